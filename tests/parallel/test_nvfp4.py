"""NVFP4 quantization against a reference that rounds number by number in exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.parallel import block_scaled_matmul, nvfp4, stochastic_rounding
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.quantized_array import QuantizedArray
from maxpipe.parallel.quantized_matmul import matmul, matmuls, split_keys
from tests.parallel.block_formats import decode_e4m3, encode_e4m3, scaled_matmul
from tests.parallel.test_quantized_matmul import with_gradients

BLOCK = 16
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""e2m1 numbers with the codes 0 to 7. The codes 8 to 15 are their negatives."""
SIGNED = np.array([*NUMBERS, *(-number for number in NUMBERS)])
quantize: Any = jax.jit(nvfp4.quantize_blocks, static_argnums=(1, 2))
quantize_weight: Any = jax.jit(nvfp4.quantize_weight, static_argnums=(1, 2))
dequantize: Any = jax.jit(nvfp4.dequantize_blocks, static_argnums=1)
encode: Any = jax.jit(nvfp4._encode)


def encode_e2m1(x: float) -> int:
    """Return the code of the nearest e2m1 number; ties go to even codes, and large numbers to 6."""
    size = min(abs(x), 6.0)
    nearest = min(range(8), key=lambda code: (abs(size - NUMBERS[code]), code % 2))
    return nearest | (8 if math.copysign(1, x) < 0 else 0)


def unpacked(found: QuantizedArray, dim: int = -1) -> np.ndarray:
    """Return the codes of an array that is packed along `dim`."""
    values = np.moveaxis(np.asarray(found.values), dim, -1)
    codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)
    return np.moveaxis(codes, -1, dim)


def reference_scales(most: np.ndarray, row_scale: np.ndarray) -> np.ndarray:
    """Return the codes of the e4m3 scales of blocks with these largest magnitudes, in float32."""
    exact = np.minimum(most * np.float32(1 / 6) / row_scale, np.float32(448))
    return np.vectorize(lambda x: encode_e4m3(float(x)), otypes=[np.uint8])(exact)


def reference(blocks: np.ndarray, row_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return element and scale codes of blocks `[n, 16 or 256]` with row scales `[n]`."""
    scales = reference_scales(np.abs(blocks).max(1), row_scale)
    codes = np.zeros(blocks.shape, np.uint8)
    for block, scale, row, out in zip(blocks, scales, row_scale, codes, strict=True):
        step = np.float32(decode_e4m3(int(scale))) * row
        inverse = np.float32(1) / step if step else np.float32(0)
        out[:] = [encode_e2m1(float(x * inverse)) for x in block]
    return codes, scales


def check(x: np.ndarray) -> QuantizedArray:
    """Compare the quantization of `x` `[N, K]` with the reference, bit for bit."""
    found = quantize(x, (1,))
    rows = np.maximum(np.abs(x).max(1, keepdims=True) * np.float32(1 / 2688), np.float32(1e-30))
    np.testing.assert_array_equal(found.row_scales, rows)
    each = np.repeat(rows[:, 0], x.shape[1] // BLOCK)
    codes, scales = reference(x.reshape(-1, BLOCK), each)
    np.testing.assert_array_equal(np.asarray(found.scales).view(np.uint8).reshape(-1), scales)
    np.testing.assert_array_equal(unpacked(found).reshape(-1, BLOCK), codes)
    return found


def test_all_codes_decode_and_encode_exactly() -> None:
    codes = np.arange(16, dtype=np.uint8)
    numbers = SIGNED.astype(np.float32)
    np.testing.assert_array_equal(jax.jit(nvfp4._decode)(codes), numbers)
    np.testing.assert_array_equal(encode(numbers), codes)
    typed = codes.view(np.uint8).astype(jnp.uint4).view(jnp.float4_e2m1fn)
    np.testing.assert_array_equal(typed.astype(np.float32), numbers)


def test_rounding_matches_reference_at_midpoints_and_beyond() -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = [np.nextafter(middles, np.float32(end)) for end in (0, 10)]
    x = np.concatenate([middles, *near, [5.99, 6.0, 6.5, 1e30, 1e-40, 0.0]]).astype(np.float32)
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(encode(x), [encode_e2m1(float(each)) for each in x])


def test_quantization_matches_reference() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-60, 60, (64, 1))
    check(x.astype(np.float32))
    # Blocks with very different sizes have scales over the complete range of e4m3.
    x = rng.standard_normal((64, 256)) * 2.0 ** -rng.integers(0, 24, (64, 16)).repeat(BLOCK, 1)
    found = check(x.astype(np.float32))
    scales = np.asarray(found.scales).view(np.uint8)
    assert scales.min() == 0 and (scales < 8).sum() > 50 and scales.max() == 126  # 126 is 448


def test_scales_at_edges() -> None:
    x = np.zeros((9, 2 * BLOCK), np.float32)
    most = float(np.finfo(np.float32).max)
    x[:, 0] = [0.0, -0.0, 1e-45, 1e-38, 1e-30, 2688e-30, 1.0, most, -most]
    x[:, BLOCK] = x[:, 0] * 2.0**-9
    found = check(x)
    assert np.asarray(found.scales)[:2].astype(np.float32).max() == 0
    assert (np.asarray(found.scales)[6:, 0].astype(np.float32) == 448).all()
    again = np.asarray(dequantize(found, 1)) * np.asarray(found.row_scales)
    np.testing.assert_allclose(again[5:, 0], x[5:, 0], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_numbers_make_only_their_row_non_finite(bad: float) -> None:
    x = np.random.default_rng(0).standard_normal((2, 2, 64)).astype(np.float32)
    x[0, 1, 3] = bad
    how = MatmulQuantizer("nvfp4", "channel", True)
    out = jax.jit(lambda x, w: matmul(x, w, 1, how, True))(x, np.ones((64, 32), np.float32))
    assert not np.isfinite(out[0, 1]).any() and np.isfinite(out[0, 0]).all()
    assert np.isfinite(out[1]).all()
    weight = np.ones((64, 32), np.float32)
    weight[40, 20] = bad
    out = jax.jit(lambda x, w: matmul(x, w, 1, how, True))(x[1:], weight)
    assert not np.isfinite(out).any()


def weight_blocks(weight: np.ndarray) -> np.ndarray:
    """Return blocks of 16 x 16 of a matrix, flattened."""
    rows, columns = (size // BLOCK for size in weight.shape)
    return weight.reshape(rows, BLOCK, columns, BLOCK).swapaxes(1, 2).reshape(-1, BLOCK**2)


def rounded_weight(weight: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Quantize and dequantize a matrix with the reference, given its row scale."""
    codes, scales = reference(weight_blocks(weight), np.full(weight.size // 256, row))
    numbers = SIGNED[codes]
    numbers *= np.array([decode_e4m3(int(scale)) for scale in scales])[:, None] * float(row)
    rows, columns = (size // BLOCK for size in weight.shape)
    return numbers.reshape(rows, columns, BLOCK, BLOCK).swapaxes(1, 2).reshape(weight.shape)


def rounded(x: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """Quantize and dequantize rows along `dims` with the reference."""
    turned = np.moveaxis(x, dims, range(x.ndim - len(dims), x.ndim))
    flat = turned.reshape(math.prod(turned.shape[: x.ndim - len(dims)]), -1)
    rows = np.abs(flat).max(1) * np.float32(1 / 2688)
    each = np.repeat(rows, flat.shape[1] // BLOCK)
    codes, scales = reference(flat.reshape(-1, BLOCK), each)
    numbers = SIGNED[codes]
    numbers *= (np.array([decode_e4m3(int(scale)) for scale in scales]) * each)[:, None]
    return np.moveaxis(numbers.reshape(turned.shape), range(x.ndim - len(dims), x.ndim), dims)


def test_weights_have_equal_numbers_in_both_directions() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    weight[3, 5] = 100.0
    forward, backward = quantize_weight(weight, (0,), (1,))
    np.testing.assert_array_equal(unpacked(forward, 0), unpacked(backward, 1))
    wanted = rounded_weight(weight, np.abs(weight).max() * np.float32(1 / 2688))
    for found, dim in ((forward, 0), (backward, 1)):
        assert found.scales.shape == (4, 6)
        np.testing.assert_allclose(dequantize(found, dim) * found.row_scales, wanted, rtol=1e-6)


def test_stacked_weights_equal_single_weights() -> None:
    stack = np.random.default_rng(0).standard_normal((3, 4, 32, 48)).astype(np.float32)
    how = MatmulQuantizer("nvfp4", "channel", True)
    together = jax.jit(lambda stack: how.quantize_weight(stack, 1, 2))(stack)
    assert together.shape == stack.shape
    for number in range(3):
        alone = jax.jit(lambda weight: how.quantize_weight(weight, 0, 2))(stack[number])
        jax.tree.map(
            lambda a, b, number=number: np.testing.assert_array_equal(a[number], b), together, alone
        )


def hadamard_reference(x: np.ndarray) -> np.ndarray:
    """Multiply blocks of 16 tokens by signs and by the Hadamard matrix, in float64."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    entry = lambda i, j: (-1) ** (i & j).bit_count() / 4  # noqa: E731
    matrix = np.array([[entry(i, j) * signs[j] for j in range(16)] for i in range(16)])
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    blocks = x.astype(np.float64).reshape(len(x), -1, BLOCK, math.prod(x.shape[2:]))
    return (matrix @ blocks).reshape(x.shape)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradients_match_reference_with_same_quantization(dims: int) -> None:
    x_shape, shape = {1: ((2, 32, 64), (64, 2, 32)), 2: ((2, 32, 2, 32), (2, 32, 64))}[dims]
    rng = np.random.default_rng(0)
    x, weight, cotangent = (
        rng.standard_normal(each).astype(np.float32)
        for each in (x_shape, shape, (2, 32, *shape[dims:]))
    )
    how = MatmulQuantizer("nvfp4", "channel", True)
    found = with_gradients(
        lambda x, weight: matmul(x, weight, dims, how, True),
        *map(jnp.asarray, (cotangent, x, weight)),
    )
    # A weight with three dims has one row scale. Its blocks have a contracted and an output dim.
    slices = weight.swapaxes(0, 1) if dims == 1 else weight
    row = np.abs(weight).max() * np.float32(1 / 2688)
    of_weight = np.stack([rounded_weight(matrix, row) for matrix in slices])
    of_weight = of_weight.swapaxes(0, 1) if dims == 1 else of_weight
    outputs = tuple(range(dims, weight.ndim))
    of_tokens = lambda x: tuple(range(2, x.ndim))  # noqa: E731
    mixed = [hadamard_reference(array).astype(np.float32) for array in (x, cotangent)]
    wanted = [
        np.tensordot(rounded(x, of_tokens(x)), of_weight, dims),
        np.tensordot(
            rounded(cotangent, of_tokens(cotangent)), of_weight, (of_tokens(cotangent), outputs)
        ),
        sum(
            np.tensordot(rounded(mixed[0], (1,))[n], rounded(mixed[1], (1,))[n], (0, 0))
            for n in range(2)
        ),
    ]
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-4)


def test_stochastic_rounding_is_unbiased_and_exact_for_e2m1_numbers() -> None:
    keys = jnp.arange(4096, dtype=jnp.uint32).reshape(64, 64)
    x = np.linspace(-6, 6, 97, dtype=np.float32)  # multiples of 1/8
    random = stochastic_rounding.uniform(stochastic_rounding.fold_in(keys, 5), (64, 64, 97))
    codes = np.asarray(encode(np.broadcast_to(x, (64, 64, 97)), random))
    numbers = SIGNED[codes].reshape(-1, 97)
    exact = np.isin(np.abs(x), NUMBERS)
    np.testing.assert_array_equal(numbers[:, exact], np.broadcast_to(x, numbers.shape)[:, exact])
    below = np.array([max(n for n in SIGNED if n <= each) for each in x])
    above = np.array([min(n for n in SIGNED if n >= each) for each in x])
    assert ((numbers == below) | (numbers == above)).all()
    deviation = np.sqrt((x - below) * (above - x) / len(numbers))
    assert (np.abs(numbers.mean(0) - x) <= 4.5 * deviation + 1e-5).all()


def saturated(x: np.ndarray, dim: int) -> np.ndarray:
    """Return the expected value of stochastic rounding of rows along `dim`.

    The scale of a block can be rounded down. Its largest elements are then above 6 times the scale
    and are always rounded to this product.
    """
    turned = np.moveaxis(x, dim, -1)
    rows = np.repeat(np.abs(turned).max(-1).reshape(-1), turned.shape[-1] // BLOCK)
    rows *= np.float32(1 / 2688)
    blocks = turned.reshape(-1, BLOCK)
    _, scales = reference(blocks, rows)
    steps = np.array([decode_e4m3(int(scale)) for scale in scales]) * rows
    limits = 6 * steps[:, None]
    return np.moveaxis(np.clip(blocks, -limits, limits).reshape(turned.shape), -1, dim)


def test_stochastic_gradients_are_unbiased() -> None:
    how = MatmulQuantizer("nvfp4", "channel", True)
    x, weight, cotangent = (
        jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape)
        for number, shape in enumerate([(1, 32, 32), (32, 32), (1, 32, 32)])
    )

    def gradients(keys: Any) -> Any:
        run = lambda x, weight: matmuls(x, None, (weight,), 1, how, True, keys=keys)[0]  # noqa: E731
        return jax.vjp(run, x, weight)[1](cotangent)

    key = jax.random.key(1)
    draw = lambda n: stochastic_rounding.token_keys(  # noqa: E731
        jax.random.fold_in(key, n), jnp.arange(1), jnp.arange(32)
    )
    drawn = jax.jit(lambda n: jax.lax.map(lambda n: gradients((draw(n),)), n))(jnp.arange(1024))
    d_x, d_weight = (np.asarray(each, np.float64) for each in drawn)
    rounded_w = rounded_weight(np.asarray(weight), np.abs(weight).max() * np.float32(1 / 2688))
    mixed = hadamard_reference(np.asarray(x)).astype(np.float32)
    mixed_cotangent = hadamard_reference(np.asarray(cotangent)).astype(np.float32)
    wanted = [
        saturated(np.asarray(cotangent), 2) @ rounded_w.T,
        rounded(mixed, (1,))[0].T @ saturated(mixed_cotangent, 1)[0],
    ]
    for found, exact in zip((d_x, d_weight), wanted, strict=True):
        error = (found.mean(0) - exact) / (found.std(0) / len(found) ** 0.5)
        assert found.std(0).min() > 0
        assert abs(error.mean()) < 0.2 and (error**2).mean() ** 0.5 < 1.3
    nearest = jax.jit(lambda: gradients(()))()
    for found, exact, plain in zip((d_x, d_weight), wanted, nearest, strict=True):
        bias, biased = np.abs(found.mean(0) - exact).mean(), np.abs(plain - exact).mean()
        assert bias < 0.2 * biased


def test_input_and_weight_gradients_have_different_keys() -> None:
    keys = jnp.arange(64, dtype=jnp.uint32).reshape(2, 32)
    streams = [*split_keys(keys), *split_keys(stochastic_rounding.name_keys(keys, "embed"))]
    draws = [
        stochastic_rounding.uniform(each, (2, 32, 128)).reshape(-1)
        for each in streams
        if each is not None
    ]
    found = np.corrcoef(np.asarray(draws)) - np.eye(4)
    assert np.abs(found).max() < 5 / len(draws[0]) ** 0.5


def test_cuda_programs_multiply_4_bit_operands() -> None:
    how = MatmulQuantizer("nvfp4", "channel", True)
    run = jax.jit(lambda x, weight: matmul(x, weight, 1, how, True))
    traced = run.trace(jnp.ones((2, 32, 64)), jnp.ones((64, 96)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__op$block_scaled_dot") == 1 and "dot_general" not in text
    operands = "(tensor<1x64x64xf4E2M1FN>, tensor<1x96x64xf4E2M1FN>, "
    assert operands + "tensor<1x64x4xf8E4M3FN>, tensor<1x96x4xf8E4M3FN>)" in text


@pytest.mark.parametrize("dims", [1, 2])
def test_kernel_operands_give_the_result_of_dequantized_operands(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    keys = jax.random.split(jax.random.key(0), 2)
    shape, inside = [(32, 5, 48), (3, 32, 48)][dims - 1], tuple(range(dims))
    outputs = tuple(range(dims, 3))
    both = quantize_weight(jax.random.normal(keys[0], shape), inside, outputs)
    for weight, contracted in zip(both, (inside, outputs), strict=True):
        sizes = [shape[dim] for dim in contracted]
        of_x = tuple(range(2, 2 + len(sizes)))
        x = quantize(jax.random.normal(keys[1], (2, 4, *sizes)), of_x)
        arguments = x, weight, (of_x, contracted), "nvfp4"
        wanted = block_scaled_matmul._multiply_dequantized(*arguments)
        found = block_scaled_matmul._multiply_scaled(*arguments)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)
