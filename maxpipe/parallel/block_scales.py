"""MXFP8, a block-scaled format: e4m3 numbers with one power-of-two scale per block of 32.

The format is defined in the OCP Microscaling Formats (MX) specification v1.0. A scale is stored as
its biased exponent (e8m0): code `c` means 2^(c - 127), and code 255 means NaN. The specification
leaves two choices to the implementation:

- Scales are rounded up to the smallest power of two for which no element of the block exceeds the
  largest e4m3 number, 448. The algorithm in section 6.3 of the specification rounds down, and
  saturates elements between 448 and 512 times the scale, which can make training diverge
  (NVIDIA, arXiv:2506.08027).
- A block with a non-finite element has the scale NaN, so that the guard detects it.

The functions operate on the bits of float32 numbers, because CPUs and TPUs flush subnormal numbers
in floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.parallel import scopes
from maxpipe.parallel.axes import MICROSCALING_BLOCK
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.quantized_array import Dims, QuantizedArray
from maxpipe.parallel.sharding import auto_axes, entry_axes

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_SIGN = np.uint32(1 << 31)
_NON_FINITE = 255
"""Biased exponent of infinity and NaN in float32, and code of NaN in e8m0."""
_LARGEST_EXPONENT = 8
"""Exponent of 448, the largest e4m3 number."""
_LARGEST_MANTISSA = 3 << (_MANTISSA_BITS - 2)
"""Mantissa of 448 = 1.75 x 2^8 in float32."""


OperandSpecs = tuple[PartitionSpec, PartitionSpec]
"""Partition specs of both operands of a matmul over the axes that the compiler shards."""


class MatmulSharding(NamedTuple):
    """Sharding, by the compiler, of a weight and of the tokens that are multiplied by it."""

    weight: PartitionSpec = PartitionSpec()
    token_axis: str | None = None
    """Mesh axis that shards the tokens."""

    def of_tokens(self, dims: Dims) -> PartitionSpec:
        """Return the spec of activations `[B, T, *dims]` with these dims of the weight."""
        entries = [*self.weight, *[None] * (max(dims) + 1)]
        return PartitionSpec(None, self.token_axis, *(entries[dim] for dim in dims))

    def of_weight_grad(self, dims: int, ndim: int) -> OperandSpecs:
        """Return the specs of the operands of a weight gradient. The forward matmul contracts the
        first `dims` of the weight's `ndim` dims.
        """
        return self.of_tokens(range(dims)), self.of_tokens(range(dims, ndim))


def quantize_blocks(x: Array, dim: int) -> QuantizedArray:
    """Quantize blocks along `dim`, whose size must be a multiple of the block size."""
    dim %= x.ndim
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitudes = _split_blocks(bits & ~_SIGN, dim)
    # The bits of magnitudes are ordered like the magnitudes, and NaN is larger than infinity.
    codes = _scale_codes(magnitudes.max(dim + 1, keepdims=True))
    scaled = _multiply_by_inverse_scale(magnitudes, codes).reshape(x.shape)
    signed = lax.bitcast_convert_type(scaled, jnp.uint32) | (bits & _SIGN)
    values = lax.bitcast_convert_type(signed, jnp.float32).astype(jnp.float8_e4m3fn)
    return QuantizedArray(values, codes.squeeze(dim + 1).astype(jnp.uint8))


def _scale_codes(largest: Array) -> Array:
    """Return the codes for blocks whose largest magnitudes have these float32 bits."""
    exponents = (largest >> _MANTISSA_BITS).astype(jnp.int32)
    above = (largest & _MANTISSA) > _LARGEST_MANTISSA
    codes = jnp.maximum(exponents - _LARGEST_EXPONENT + above.astype(jnp.int32), 0)
    return jnp.where(exponents == _NON_FINITE, _NON_FINITE, codes)


def _multiply_by_inverse_scale(magnitudes: Array, codes: Array) -> Array:
    """Return float32 magnitudes, given as bits, times 2^(127 - code).

    Results below the smallest e4m3 number may be replaced by other numbers that round to 0.
    """
    exponents = (magnitudes >> _MANTISSA_BITS).astype(jnp.int32)
    leading = jnp.where(exponents > 0, 1 << _MANTISSA_BITS, 0).astype(jnp.uint32)
    integers = ((magnitudes & _MANTISSA) | leading).astype(jnp.int32).astype(jnp.float32)
    powers = jnp.maximum(exponents, 1) - _MANTISSA_BITS - codes
    return integers * _power_of_two(powers)


def _power_of_two(exponents: Array) -> Array:
    """Return float32 powers of two; exponents outside the range of normal numbers are clipped."""
    biased = jnp.clip(exponents, -126, 127) + 127
    return lax.bitcast_convert_type(biased << _MANTISSA_BITS, jnp.float32)


def dequantize_blocks(x: QuantizedArray, dim: int) -> Array:
    """Return the float32 products of elements and scales. `dim` is the dim of the blocks.

    Subnormal products may be flushed to 0.
    """
    dim %= x.values.ndim
    values = _split_blocks(x.values.astype(jnp.float32), dim)
    products = multiply_by_scales(values, jnp.expand_dims(x.scales, dim + 1))
    return products.reshape(x.values.shape)


def multiply_by_scales(values: Array, codes: Array) -> Array:
    """Multiply by the scales with these codes."""
    exponents = codes.astype(jnp.int32) - 127
    # 2^-127 is subnormal, so the multiplication has two steps.
    half = exponents >> 1
    products = values * _power_of_two(half) * _power_of_two(exponents - half)
    return jnp.where(codes == _NON_FINITE, jnp.nan, products)


def _split_blocks(x: Array, dim: int) -> Array:
    """Split `dim` into blocks; the elements of a block are indexed by the following dim."""
    return x.reshape(*x.shape[:dim], -1, MICROSCALING_BLOCK, *x.shape[dim + 1 :])


def quantize_dequantize(x: Array, dim: int) -> Array:
    """Round `x` to elements times scales; the dtype of `x` represents these products exactly."""
    return dequantize_blocks(quantize_blocks(x, dim), dim).astype(x.dtype)


def matmul(
    left: QuantizedArray,
    right: QuantizedArray,
    contracted: tuple[Dims, Dims],
    specs: OperandSpecs | None = None,
) -> Float[Array, ...]:
    """Return the float32 product, with the remaining dims of `left` before those of `right`.

    Blocks lie along the last contracted dim of each operand. NVIDIA GPUs multiply the 8-bit
    elements and their scales. Other devices multiply the dequantized operands, and so do all
    devices if the compiler shards an operand in a way that `specs` does not define.
    """
    if specs is None and auto_axes():
        return _multiply_dequantized(left, right, contracted)
    of_left, of_right = (
        [*map(entry_axes, spec), *[()] * operand.values.ndim][: operand.values.ndim]
        for spec, operand in zip(specs or (PartitionSpec(),) * 2, (left, right), strict=True)
    )
    summed = tuple(axis for dim in contracted[0] for axis in of_left[dim])
    remaining = _without(of_left, contracted[0]) + _without(of_right, contracted[1])

    def run(left: QuantizedArray, right: QuantizedArray) -> Array:
        product = _multiply(left, right, contracted)
        return lax.psum(product, summed) if summed else product

    inputs = PartitionSpec(*of_left), PartitionSpec(*of_right)
    return map_shards(run, inputs, PartitionSpec(*remaining))(left, right)


def _multiply(left: QuantizedArray, right: QuantizedArray, contracted: Any) -> Array:
    """Multiply operands that are not sharded by the compiler."""
    return lax.platform_dependent(
        left,
        right,
        cuda=lambda left, right: mark_varying(_multiply_scaled(left, right, contracted)),
        default=lambda left, right: mark_varying(_multiply_dequantized(left, right, contracted)),
    )


def _multiply_scaled(left: QuantizedArray, right: QuantizedArray, contracted: Any) -> Array:
    """Multiply with `jax.nn.scaled_matmul`, which is one kernel on Blackwell GPUs.

    On earlier GPUs, XLA dequantizes the operands.
    """
    shapes = [
        _without(operand.values.shape, dims)
        for operand, dims in zip((left, right), contracted, strict=True)
    ]
    (x, x_scales), (y, y_scales) = (
        (_as_matrix(operand.values, dims), _as_matrix(operand.scales, dims))
        for operand, dims in zip((left, right), contracted, strict=True)
    )
    x_scales, y_scales = (
        lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu) for scales in (x_scales, y_scales)
    )
    with jax.named_scope(scopes.flops(2 * len(x) * len(y) * x.shape[1])):
        product = jax.nn.scaled_matmul(x[None], y[None], x_scales[None], y_scales[None])
    return product.reshape(*shapes[0], *shapes[1])


def _multiply_dequantized(left: QuantizedArray, right: QuantizedArray, contracted: Any) -> Array:
    of_left, of_right = contracted
    left_values = dequantize_blocks(left, of_left[-1])
    right_values = dequantize_blocks(right, of_right[-1])
    return lax.dot_general(left_values, right_values, (contracted, ((), ())))


def _as_matrix(x: Array, dims: Dims) -> Float[Array, "rows K"]:
    """Flatten the contracted dims into the last dim, and the other dims into the first."""
    last = math.prod(x.shape[dim] for dim in dims)
    return jnp.moveaxis(x, dims, range(x.ndim - len(dims), x.ndim)).reshape(-1, last)


def _without(items: Sequence[Any], dims: Dims) -> list[Any]:
    return [item for dim, item in enumerate(items) if dim not in dims]
