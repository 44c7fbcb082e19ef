"""MXFP8 quantization against a reference that follows the OCP specification number by number."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.parallel import block_scaled_matmul, mxfp8
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.quantized_array import QuantizedArray
from maxpipe.parallel.quantized_matmul import matmul
from tests.parallel.block_formats import (
    POSITIVE_E4M3,
    decode_e4m3,
    encode_e4m3,
    scaled_matmul,
)
from tests.parallel.test_quantized_matmul import with_gradients

BLOCK = 32
quantize: Any = jax.jit(mxfp8.quantize_blocks, static_argnums=1)
dequantize: Any = jax.jit(mxfp8.dequantize_blocks, static_argnums=1)


def reference_block(block: list[float]) -> tuple[list[int], int]:
    """Return the element codes and the scale code of one block."""
    most = max(map(abs, block))
    if not all(map(math.isfinite, block)):
        return [], 255
    code = next(code for code in range(255) if most <= 448 * 2.0 ** (code - 127))
    return [encode_e4m3(x / 2.0 ** (code - 127)) for x in block], code


def check(x: np.ndarray) -> QuantizedArray:
    """Compare the quantization of `x` `[N, K]` with the reference, bit for bit."""
    found = quantize(x, 1)
    codes = np.asarray(found.values).view(np.uint8).reshape(-1, BLOCK)
    assert found.scales.shape == (len(x), x.shape[1] // BLOCK) and found.scales.dtype == jnp.uint8
    for block, of_block, scale in zip(
        x.astype(np.float64).reshape(-1, BLOCK), codes, found.scales.reshape(-1), strict=True
    ):
        wanted, wanted_scale = reference_block(block.tolist())
        assert scale == wanted_scale
        assert wanted_scale == 255 or of_block.tolist() == wanted
    return found


def test_every_element_is_exact_with_every_scale() -> None:
    finite = [code for code in range(256) if code & 127 != 127]
    scales = 2.0 ** np.arange(-127, 120)
    # The first element of each block is the largest number, so that the block has this scale.
    columns = np.array([448.0, *map(decode_e4m3, finite)])
    columns = np.concatenate([columns, np.full(-len(columns) % (BLOCK - 1), 448.0)])
    blocks = np.insert(columns.reshape(-1, BLOCK - 1), 0, 448.0, axis=1).reshape(-1)
    x = (scales[:, None] * blocks).astype(np.float32)
    found = quantize(x, 1)
    np.testing.assert_array_equal(np.asarray(found.scales)[:, 0], np.arange(247))
    np.testing.assert_array_equal(np.asarray(found.values, np.float64) * scales[:, None], x)
    check(x[::41])


def test_rounding_matches_reference() -> None:
    middles = [(low + high) / 2 for low, high in pairwise(POSITIVE_E4M3)]
    near = [f(each) for each in middles for f in (float, lambda x: x * (1 + 1e-6))]
    near += [each * (1 - 1e-6) for each in middles] + [-each for each in middles]
    near += [448.0] * (-len(near) % (BLOCK - 1))
    blocks = np.insert(np.reshape(near, (-1, BLOCK - 1)), 0, 448.0, axis=1)
    check(np.concatenate([blocks * scale for scale in (1.0, 2.0**-60, 2.0**-127)]).astype("f4"))
    rng = np.random.default_rng(0)
    check((rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-140, 126, (64, 1))).astype("f4"))


def test_scales_at_edges() -> None:
    most = float(np.finfo(np.float32).max)
    edge = np.float32(448 * 2.0**5)
    firsts = [0.0, -0.0, 1e-45, 2.0**-130, 448 * 2.0**-127, 449 * 2.0**-127, most, -most]
    firsts += [edge, np.nextafter(edge, np.float32(math.inf)), np.nextafter(edge, np.float32(0))]
    firsts += [math.inf, -math.inf, math.nan]
    x = np.zeros((len(firsts), 2 * BLOCK), np.float32)
    x[:, 3] = firsts
    x[:, 4] = -0.0
    found = check(x)
    scales = np.asarray(found.scales)
    assert (scales[:, 1] == 0).all() and (scales[-3:, 0] == 255).all()
    assert (scales[:5, 0] == 0).all() and scales[5:8, 0].tolist() == [1, 247, 247]
    assert scales[8:11, 0].tolist() == [132, 133, 132]
    again = np.asarray(dequantize(found, 1))
    assert np.isnan(again[-3:, :BLOCK]).all() and np.isfinite(again[:, BLOCK:]).all()


def test_dequantization_is_exact_for_all_codes() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).reshape(-1, BLOCK)
    values = codes.view(jnp.float8_e4m3fn)
    scales = np.repeat(np.arange(256, dtype=np.uint8), 256 // BLOCK)[:, None]
    found = np.asarray(dequantize(QuantizedArray(jnp.asarray(values), jnp.asarray(scales)), 1))
    elements = np.array([decode_e4m3(code) for code in range(256)])
    wanted = elements[codes] * np.where(scales == 255, math.nan, 2.0 ** (scales - 127.0))
    smallest = float(np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        wanted = np.where(np.abs(wanted) < smallest, 0.0, wanted).astype(np.float32)
    np.testing.assert_array_equal(np.where(np.abs(found) < smallest, 0.0, found), wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantized_numbers_are_exact_in_activation_dtypes(dtype: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 64), dtype)
    again = jax.jit(lambda x: mxfp8.quantize_dequantize(x, 1))(x)
    assert again.dtype == dtype
    np.testing.assert_array_equal(again.astype(jnp.float32), dequantize(quantize(x, 1), 1))


def rounded(x: np.ndarray, dim: int) -> np.ndarray:
    """Quantize and dequantize with the reference."""
    turned = np.moveaxis(x, dim, -1)
    blocks = [reference_block(block) for block in turned.reshape(-1, BLOCK).tolist()]
    numbers = [
        decode_e4m3(code) * 2.0 ** (scale - 127) for codes, scale in blocks for code in codes
    ]
    return np.moveaxis(np.reshape(numbers, turned.shape), -1, dim)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradients_match_reference_with_same_quantization(dims: int) -> None:
    x_shape, shape = {1: ((2, 32, 64), (64, 2, 32)), 2: ((2, 32, 2, 32), (2, 32, 64))}[dims]
    rng = np.random.default_rng(0)
    x, weight, cotangent = (
        jnp.asarray(rng.standard_normal(each), jnp.float32)
        for each in (x_shape, shape, (2, 32, *shape[dims:]))
    )
    how = MatmulQuantizer("mxfp8", "channel", True)
    found = with_gradients(
        lambda x, weight: matmul(x, weight, dims, how, True), cotangent, x, weight
    )
    x, weight, cotangent = map(np.asarray, (x, weight, cotangent))
    outputs = tuple(range(dims, weight.ndim))
    wanted = [
        np.tensordot(rounded(x, -1), rounded(weight, dims - 1), dims),
        np.tensordot(
            rounded(cotangent, -1),
            rounded(weight, -1),
            (tuple(range(2, cotangent.ndim)), outputs),
        ),
        np.tensordot(rounded(x, 1), rounded(cotangent, 1), ((0, 1), (0, 1))),
    ]
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-5)


def test_cuda_programs_multiply_8_bit_operands() -> None:
    how = MatmulQuantizer("mxfp8", "channel", True)
    run = jax.jit(lambda x, weight: matmul(x, weight, 1, how, True))
    traced = run.trace(jnp.ones((2, 32, 64)), jnp.ones((64, 96)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__op$block_scaled_dot") == 1 and "dot_general" not in text
    operands = "(tensor<1x64x64xf8E4M3FN>, tensor<1x96x64xf8E4M3FN>, "
    assert operands + "tensor<1x64x2xf8E8M0FNU>, tensor<1x96x2xf8E8M0FNU>)" in text


@pytest.mark.parametrize("contracted", [((2,), (0,)), ((2, 3), (1, 2)), ((0, 1), (0, 1))])
def test_kernel_operands_give_the_result_of_dequantized_operands(
    contracted: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    shapes = {
        ((2,), (0,)): ((2, 3, 64), (64, 5, 7)),
        ((2, 3), (1, 2)): ((2, 3, 4, 32), (6, 4, 32)),
        ((0, 1), (0, 1)): ((2, 64, 3), (2, 64, 5, 7)),
    }[contracted]
    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (
        quantize(jax.random.normal(key, shape), dims[-1])
        for key, shape, dims in zip(keys, shapes, contracted, strict=True)
    )
    wanted = block_scaled_matmul._multiply_dequantized(left, right, contracted, "mxfp8")
    found = block_scaled_matmul._multiply_scaled(left, right, contracted, "mxfp8")
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
