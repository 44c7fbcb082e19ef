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

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from maxpipe.parallel.axes import BLOCK_SIZES
from maxpipe.parallel.quantized_array import QuantizedArray

_BLOCK = BLOCK_SIZES["mxfp8"]
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_SIGN = np.uint32(1 << 31)
_NON_FINITE = 255
"""Biased exponent of infinity and NaN in float32, and code of NaN in e8m0."""
_LARGEST_EXPONENT = 8
"""Exponent of 448, the largest e4m3 number."""
_LARGEST_MANTISSA = 3 << (_MANTISSA_BITS - 2)
"""Mantissa of 448 = 1.75 x 2^8 in float32."""


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
    return x.reshape(*x.shape[:dim], -1, _BLOCK, *x.shape[dim + 1 :])


def quantize_dequantize(x: Array, dim: int) -> Array:
    """Round `x` to elements times scales; the dtype of `x` represents these products exactly."""
    return dequantize_blocks(quantize_blocks(x, dim), dim).astype(x.dtype)


def kernel_operand(values: Array, scales: Array) -> tuple[Array, Array]:
    """Return elements and scales in the dtypes that `jax.nn.scaled_matmul` requires."""
    return values, lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)
