"""8-bit matmuls: gradients match the unpipelined model on every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.models.moe import MoeConfig
from maxpipe.parallel import (
    block_scaled_matmul,
    matmul_quantizer,
    mxfp8,
    nvfp4,
    quantized_array,
)
from maxpipe.parallel.quantized_array import QuantizedArray
from tests.cases import Case, keeping
from tests.pipeline.test_engine import check_gradients
from tests.pipeline.test_families import GROUPED, QWEN2, ROOM, V3

INT8, FP8 = ("int8", "channel", "default"), ("fp8", "channel", "default")
TENSOR, SAME = ("int8", "tensor", "default"), ("int8", "channel", "same")
BLOCK, ALL = ("fp8", "block", "same"), ("fp8", "tensor", "same")
MXFP8, MXFP8_SAME = ("mxfp8", "channel", "default"), ("mxfp8", "channel", "same")
NVFP4, NVFP4_SAME = ("nvfp4", "channel", "default"), ("nvfp4", "channel", "same")
ROOM4 = replace(ROOM, num_experts=4)


def wide(config: MoeConfig) -> MoeConfig:
    """Return the config with experts whose shards consist of complete blocks."""
    return replace(config, d_expert=16)


CASES = [
    Case(1, 1, 2, low=INT8),
    Case(2, 2, 4, low=SAME, fsdp=2, data=2, gather="step"),
    Case(2, 1, 5, low=FP8, fsdp=2, tensor=2, schedule="zb_h1", remat="names"),
    Case(2, 2, 4, low=TENSOR, split="ring", tensor=2, idle="compute", remat="names"),
    Case(2, 1, 5, low=SAME, split="sequence", tensor=2, schedule="zb_h1", remat="none"),
    Case(2, 2, 3, low=BLOCK, split="sequence", tensor=2, schedule="zb_v", gather="window"),
    Case(2, 1, 3, low=ALL, context=2, remat="chunk"),
    Case(2, 1, 3, low=INT8, own=QWEN2, data=2, ahead=2, tied=True, dropout=0.3),
    Case(2, 3, 6, low=SAME, low_parts="mlp", fsdp=2, tensor=2, gather="window", remat="names"),
    # Experts: grouped with sharded width, with capacity, and with expert parallelism.
    Case(2, 1, 3, low=INT8, own=GROUPED, tensor=2, fsdp=2, schedule="zb_h1"),
    Case(2, 1, 3, low=BLOCK, own=ROOM, tensor=2),
    Case(1, 1, 2, low=TENSOR, own=ROOM4, tensor=2, expert=2, layers=4),
    Case(2, 1, 3, low=FP8, own=V3, expert=2),
    Case(1, 1, 2, low=MXFP8_SAME),
    Case(2, 2, 4, low=MXFP8_SAME, fsdp=2, data=2, gather="step"),
    Case(2, 1, 3, low=MXFP8_SAME, fsdp=2, tensor=2, schedule="zb_h1", remat="names"),
    Case(2, 2, 4, low=MXFP8, split="ring", tensor=2, idle="compute", remat="names"),
    Case(2, 2, 3, low=MXFP8_SAME, split="sequence", tensor=2, schedule="zb_v", gather="window"),
    Case(2, 1, 3, low=MXFP8_SAME, fsdp=2, context=2, length=16, gather="window", remat="chunk"),
    Case(2, 1, 3, low=MXFP8, low_parts="mlp", own=wide(GROUPED), tensor=2, fsdp=2),
    Case(2, 1, 3, low=MXFP8, own=wide(ROOM), tensor=2),
    Case(1, 1, 2, low=MXFP8, own=wide(ROOM4), tensor=2, expert=2, layers=4),
    Case(1, 1, 2, low=NVFP4_SAME),
    Case(2, 2, 4, low=NVFP4_SAME, fsdp=2, data=2, gather="step"),
    Case(2, 1, 3, low=NVFP4_SAME, fsdp=2, tensor=2, schedule="zb_h1", remat="names"),
    Case(2, 2, 4, low=NVFP4_SAME, split="ring", tensor=2, idle="compute", remat="names"),
    Case(2, 2, 3, low=NVFP4_SAME, split="sequence", tensor=2, schedule="zb_v", gather="window"),
    Case(2, 1, 3, low=NVFP4_SAME, fsdp=2, context=2, length=16, gather="window", remat="chunk"),
    Case(2, 1, 3, low=NVFP4, low_parts="mlp", own=QWEN2, data=2, ahead=2, tied=True, dropout=0.3),
    Case(3, 2, 5, low=NVFP4_SAME, tensor=2, remat="none", schedule="zb_v"),
]


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace rounding by a smooth function that depends on the scales in the same way.

    Rounding a value close to a midpoint depends on the order of summation, which differs by layout.
    """

    def wave(x: jax.Array, dtype: Any) -> jax.Array:
        return x * (1 + 0.3 * jnp.sin(3 * x / quantized_array.max_of_dtype(dtype)))

    for module in (quantized_array, matmul_quantizer):
        monkeypatch.setattr(module, "round_to_dtype", wave)
    monkeypatch.setattr(quantized_array, "_next_power_of_two", lambda x: x)  # also a step function
    monkeypatch.setattr(quantized_array, "QUANTIZATION_BLOCK", 4)

    def quantize_blocks(x: jax.Array, dim: int) -> QuantizedArray:
        dim %= x.ndim
        split = mxfp8._split_blocks(x.astype(jnp.float32), dim)
        most = jnp.abs(split).max(dim + 1, keepdims=True)
        scales = quantized_array.compute_scale(most, jnp.float8_e4m3fn)
        values = wave(split / scales, jnp.float8_e4m3fn).reshape(x.shape)
        return QuantizedArray(values, scales.squeeze(dim + 1))

    monkeypatch.setattr(mxfp8, "_BLOCK", 4)
    monkeypatch.setattr(mxfp8, "quantize_blocks", quantize_blocks)
    monkeypatch.setattr(mxfp8, "multiply_by_scales", lambda values, scales: values * scales)

    def encode(scaled: jax.Array, random: jax.Array | None = None) -> jax.Array:
        change = 0 if random is None else random - 0.5
        return scaled * (1 + 0.3 * jnp.sin(scaled / 2)) + change

    monkeypatch.setattr(nvfp4, "_BLOCK", 4)
    monkeypatch.setattr(nvfp4, "_round_scales", lambda scales: scales)
    monkeypatch.setattr(nvfp4, "_encode", encode)
    for name in ("_pack", "_unpack"):
        monkeypatch.setattr(nvfp4, name, lambda values, dim: values)
    multiply = block_scaled_matmul._multiply_dequantized
    monkeypatch.setattr(block_scaled_matmul, "_multiply", multiply)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("case", keeping(CASES, 4, 15), ids=str)
def test_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)
