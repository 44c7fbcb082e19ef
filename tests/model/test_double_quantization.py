"""Double quantization against the published algorithm of bitsandbytes, and its effect on losses."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxpipe.models.adapters import SCALE, SCALE_MEAN, SCALE_SCALE
from maxpipe.models.config import AdapterConfig
from maxpipe.models.count import num_params
from maxpipe.models.registry import describe
from maxpipe.nn.adapters import complete_params, dequantize_scales, quantize_scales
from maxpipe.planner.sizes import Sizes
from tests.cases import Case, steps_of
from tests.planner.test_memory import config_of
from tests.step.states import ROWS, trained_on


def dynamic_map() -> np.ndarray:
    """Return the levels of bitsandbytes' `create_dynamic_map` with 8 bits, written as loops."""
    levels = []
    for exponent in range(7):
        width = 0.9 / 2**exponent
        for number in range(2**exponent):
            level = (0.1 + (number + 0.5) * width) * 10.0 ** (exponent - 6)
            levels += [level, -level]
    return np.array(sorted([*levels, 0.0, 1.0]))


def reference(scales: np.ndarray) -> np.ndarray:
    """Return the dequantized scales of bitsandbytes: mean, blocks of 256 and the nearest level."""
    mean = scales.mean(dtype=np.float64)
    flat, found, levels = (scales - mean).reshape(-1), [], dynamic_map()
    for first in range(0, len(flat), 256):
        block = flat[first : first + 256]
        most = np.abs(block).max()
        nearest = np.abs(block[:, None] / most - levels).argmin(1)
        found.append(levels[nearest] * most)
    return (np.concatenate(found) + mean).reshape(scales.shape)


def test_scales_match_bitsandbytes() -> None:
    weights = np.random.default_rng(0).standard_normal((512, 64, 6)).astype(np.float32)
    scales = np.abs(weights).max(1)  # 512 inputs, 6 blocks of 64 outputs
    quantized = quantize_scales(jax.numpy.asarray(scales), -2, 2, (-2, -1))
    assert quantized.codes.dtype == np.uint8 and quantized.scales.shape == (2, 6)
    found = np.asarray(dequantize_scales(quantized, -2))
    # Blocks of bitsandbytes are consecutive in memory; here they extend along the inputs.
    wanted = reference(scales.T).T
    near = np.isclose(found, wanted, rtol=1e-5)
    assert near.mean() > 0.999  # a value halfway between two levels may be rounded differently
    assert np.abs(found - scales).max() < 1.01 * np.abs(wanted - scales).max()
    np.testing.assert_allclose(quantized.mean, scales.mean(dtype=np.float64), rtol=1e-5)


TWICE = AdapterConfig(rank=2, base_quantization="nf4", double_quantization=True)
ONCE = replace(TWICE, double_quantization=False)


def test_stored_arrays_and_counts() -> None:
    """The mean does not depend on layers that are stacked in the same call."""
    twice, once = (describe(Case(adapter=each).model) for each in (TWICE, ONCE))
    assert num_params(twice) == num_params(once)
    kind = twice.layer_types["layer"]
    draw = np.random.default_rng(1)
    params = {
        key: jax.numpy.asarray(draw.standard_normal((3, *param.shape)), np.float32)
        for key, param in kind.params_in_init_order.items()
        if key in kind.declared or "_lora_" in key[1]
    }
    stacked = complete_params(kind, params)
    alone = complete_params(kind, {key: array[1] for key, array in params.items()})
    for end, dtype in ((SCALE, np.uint8), (SCALE_SCALE, np.float32), (SCALE_MEAN, np.float32)):
        key = "attention", f"query{end}"
        assert stacked[key].dtype == dtype and stacked[key].shape == (3, *kind.params[key].shape)
        np.testing.assert_array_equal(stacked[key][1], alone[key])


def test_double_quantization_saves_memory() -> None:
    wide = config_of(
        {"d_model": 512, "d_mlp": 1024, "head_dim": 64}, {"ici_stage": 2}, {"microbatches": 2}
    )
    once, twice = (Sizes(replace(wide, adapter=each)).model for each in (ONCE, TWICE))
    size = {"uint8": 1, "float32": 4}

    def bits(model: object) -> float:
        (kind,) = model.layer_types.values()  # type: ignore[attr-defined]
        held = [param for param in kind.params.values() if param.own_dtype]
        total = sum(8 * np.prod(param.shape) * size[param.own_dtype] for param in held)
        return total / sum(np.prod(param.shape) for param in kind.declared.values())

    assert bits(once) == pytest.approx(4.5, rel=0.01)
    assert bits(twice) == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, rel=0.01)


def test_losses_are_close_to_those_of_nf4() -> None:
    curves = []
    for adapter in (ONCE, TWICE):
        steps = steps_of(Case(layers=2, adapter=adapter), ROWS, 8)
        curves.append(trained_on(steps, steps.compile_train(), steps.init(), 0, 8)[1])
    assert not np.array_equal(*curves)
    np.testing.assert_allclose(*curves, rtol=2e-3)
