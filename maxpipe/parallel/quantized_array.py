"""Quantized arrays with their scales, and rounding to 8-bit numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from maxpipe.parallel.axes import QUANTIZATION_BLOCK
from maxpipe.parallel.collectives import max_over

_MIN_SCALE = 1e-30
"""Minimum scale, used if all elements are 0 or would be rounded to 0."""

Dims = Sequence[int]


class QuantizedArray(NamedTuple):
    """Numbers of 4 or 8 bits, and the float32 scales by which they are multiplied.

    The scales of a block-scaled array have the dims of `values`, divided by the block size.
    """

    values: Array
    scales: Array
    row_scales: Array | None = None
    """Float32 scales in addition to the block scales, with size 1 in contracted dims."""


def quantize_array(
    x: Array, dims: Dims, dtype: Any, over: Sequence[str] = (), most: Array | None = None
) -> QuantizedArray:
    """Return an array of `dtype` and scales (of size 1 in `dims`) whose product approximates `x`.

    A non-finite element makes its scale non-finite, and therefore also every result that uses this
    scale. Mesh axes in `over` shard `dims`. `most` is the maximum absolute value, if known.
    """
    most = compute_max_abs(x, dims) if most is None else most
    scale = compute_scale(max_over(most, over), dtype)
    return QuantizedArray(round_to_dtype(x.astype(jnp.float32) * (1 / scale), dtype), scale)


def compute_max_abs(x: Array, dims: Dims) -> Array:
    """Return the float32 maximum absolute value over `dims`, keeping `dims` with size 1."""
    return jnp.abs(x).max(tuple(dims), keepdims=True).astype(jnp.float32)


def compute_scale(most: Array, dtype: Any) -> Array:
    """Return the scale for an array with this maximum absolute value."""
    return jnp.maximum(most / max_of_dtype(dtype), _MIN_SCALE)


def quantize_dequantize_blocks(x: Array, dims: Dims, dtype: Any) -> Array:
    """Round `x` to numbers of `dtype` times a power of two for each block of `dims`.

    The result has the dtype of `x`, which represents these products exactly.
    """
    shape: list[int] = []
    inner: list[int] = []
    for dim, size in enumerate(x.shape):
        block = math.gcd(size, QUANTIZATION_BLOCK) if dim in dims else 1
        shape += [size // block, block]
        inner += [len(shape) - 1]
    split = x.reshape(shape).astype(jnp.float32)
    most = jnp.abs(split).max(inner, keepdims=True)
    scale = _next_power_of_two(jnp.maximum(most / max_of_dtype(dtype), _MIN_SCALE))
    scale = jnp.where(jnp.isfinite(most), scale, most)
    rounded = round_to_dtype(split / scale, dtype).astype(jnp.float32) * scale
    return rounded.astype(x.dtype).reshape(x.shape)


def _next_power_of_two(x: Array) -> Array:
    fraction, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), exponent - (fraction == 0.5).astype(exponent.dtype))


def max_of_dtype(dtype: Any) -> float:
    """Return the largest finite value of an 8-bit dtype."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def round_to_dtype(x: Array, dtype: Any) -> Array:
    """Round to numbers of an 8-bit dtype; larger numbers become the largest finite number."""
    x = jnp.clip(x, -max_of_dtype(dtype), max_of_dtype(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def dot_general(x: Array, y: Array, summed: tuple[Dims, Dims]) -> Float[Array, ...]:
    """Return the float32 product; `summed` are the contracted dims of both operands."""
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(x, y, (summed, ((), ())), preferred_element_type=sums)
    return product.astype(jnp.float32)
