"""NVFP4, a block-scaled format: e2m1 numbers with one e4m3 scale per block of 16.

Each row, which is the vector that a matmul contracts, also has a float32 scale, by which the result
of the matmul is multiplied. The algorithm is that of "Pretraining Large Language Models with NVFP4"
(NVIDIA, arXiv:2509.25149), except that the paper has one float32 scale per tensor:

- Activations and gradients have blocks of 16 along the contracted dim. Their float32 scale is that
  of a token, or of a channel of one sequence in weight gradients. Results therefore do not depend
  on the other sequences of a microbatch.
- Weights have blocks of 16 x 16 and one float32 scale per matrix, so that the forward and backward
  passes multiply by the same numbers.
- Weight gradients apply a random Hadamard transform to 16 tokens of both operands before rounding.

`values` holds two e2m1 codes per byte, packed along the dim of the blocks. The first number is in
the low bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from maxpipe.parallel.axes import BLOCK_SIZES
from maxpipe.parallel.collectives import max_over
from maxpipe.parallel.quantized_array import Dims, QuantizedArray, compute_max_abs

_BLOCK = BLOCK_SIZES["nvfp4"]
_LARGEST_SCALE = 448.0
"""Largest e4m3 number."""
# The largest e2m1 number is 6. XLA would replace divisions by multiplications on some platforms.
_INVERSE_LARGEST = np.float32(1 / 6)
_INVERSE_LARGEST_PRODUCT = np.float32(1 / (6 * 448))
_MIN_ROW_SCALE = 1e-30
"""Minimum float32 scale, used if all elements are 0 or tiny."""
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Numbers between consecutive e2m1 numbers. Ties are rounded to even codes."""
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
"""Random signs of the Hadamard transform, which are those of Transformer Engine."""


def quantize_blocks(
    x: Array, dims: Dims, over: Sequence[str] = (), random: Array | None = None
) -> QuantizedArray:
    """Quantize rows along `dims`, with blocks along the last of these dims.

    Mesh axes in `over` shard `dims`. `random` are uniform numbers for stochastic rounding; without
    them, numbers are rounded to the nearest.
    """
    dims = [dim % x.ndim for dim in dims]
    row_scales = _row_scales(max_over(compute_max_abs(x, dims), over))
    values, scales = _quantize(x, dims[-1:], row_scales, random)
    return QuantizedArray(_pack(values, dims[-1]), scales, row_scales)


def quantize_weight(
    weight: Array, inside: Dims, outputs: Dims, around: Sequence[str] = ()
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantize a weight with blocks of 16 x 16, packed along the last dim of `inside` and of
    `outputs`, respectively.

    `inside` are the dims that the forward matmul contracts, and `outputs` are the others. Mesh axes
    in `around` shard any of these dims. All other dims are batch dims.
    """
    row_scales = _row_scales(max_over(compute_max_abs(weight, [*inside, *outputs]), around))
    values, scales = _quantize(weight, (inside[-1], outputs[-1]), row_scales)
    forward, backward = (
        QuantizedArray(_pack(values, dims[-1]), scales, row_scales) for dims in (inside, outputs)
    )
    return forward, backward


def _row_scales(most: Array) -> Array:
    """Return float32 scales such that the largest element has the largest number and scale."""
    return jnp.maximum(most * _INVERSE_LARGEST_PRODUCT, _MIN_ROW_SCALE)


def _quantize(
    x: Array, dims: Dims, row_scales: Array, random: Array | None = None
) -> tuple[Array, Array]:
    """Return e2m1 codes, and the e4m3 scales of blocks of 16 along each of `dims`."""
    x = x.astype(jnp.float32)
    sizes = [_BLOCK if dim in dims else 1 for dim in range(x.ndim)]
    counts = [size // block for size, block in zip(x.shape, sizes, strict=True)]
    split = [part for pair in zip(counts, sizes, strict=True) for part in pair]
    most = jnp.abs(x).reshape(split).max(tuple(range(1, 2 * x.ndim, 2)))
    scales = _round_scales(jnp.minimum(most * _INVERSE_LARGEST / row_scales, _LARGEST_SCALE))
    products = scales.astype(jnp.float32) * row_scales
    inverse = jnp.where(products == 0, 0.0, 1.0 / products)
    return _encode(x * _expand(inverse, x.shape), random), scales


def _round_scales(scales: Array) -> Array:
    return scales.astype(jnp.float8_e4m3fn)


def _encode(scaled: Float[Array, "*dims"], random: Array | None = None) -> Array:
    """Round to e2m1 codes; numbers above 6 become 6, and the code of NaN is not defined."""
    size = jnp.abs(scaled)
    if random is None:
        # Ties go to even codes: down at the midpoints 0, 2, 4 and 6, and up at the others.
        above = (
            size > middle if number % 2 == 0 else size >= middle
            for number, middle in enumerate(_MIDPOINTS)
        )
        codes = sum((each.astype(jnp.uint8) for each in above), jnp.uint8(0))
    else:
        # Codes as a piecewise linear function, whose fraction is the probability of rounding up.
        exact = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
        codes = jnp.minimum(jnp.floor(exact + random), 7.0).astype(jnp.uint8)
    return codes | jnp.signbit(scaled).astype(jnp.uint8) << 3


def _decode(codes: Array) -> Float[Array, "*dims"]:
    """Return the float32 numbers with these codes."""
    exponents = (codes >> 1 & 3).astype(jnp.float32)
    mantissas = (codes & 1).astype(jnp.float32)
    normal = (1 + mantissas / 2) * jnp.where(exponents == 3, 4.0, exponents)
    sizes = jnp.where(exponents == 0, mantissas / 2, normal)
    return jnp.where(codes >> 3 == 1, -sizes, sizes)


def _pack(codes: Array, dim: int) -> Array:
    """Store two consecutive codes along `dim` in each byte."""
    pairs = codes.reshape(*codes.shape[:dim], -1, 2, *codes.shape[dim + 1 :])
    low, high = (lax.index_in_dim(pairs, half, dim + 1, keepdims=False) for half in (0, 1))
    return low | high << 4


def _unpack(values: Array, dim: int) -> Float[Array, "*dims"]:
    """Return the float32 numbers of an array packed along `dim`."""
    codes = jnp.stack([values & 15, values >> 4], axis=dim + 1)
    return _decode(codes).reshape(*values.shape[:dim], -1, *values.shape[dim + 1 :])


def _expand(scales: Array, shape: Sequence[int]) -> Array:
    """Repeat each scale for the elements of its block; `shape` is the shape of all elements."""
    counts = [size // count for size, count in zip(shape, scales.shape, strict=True)]
    pairs = [
        part for count, size in zip(scales.shape, counts, strict=True) for part in (count, size)
    ]
    ones = [part for count in scales.shape for part in (count, 1)]
    return jnp.broadcast_to(scales.reshape(ones), pairs).reshape(shape)


def dequantize_blocks(x: QuantizedArray, dim: int) -> Float[Array, "*dims"]:
    """Return the float32 products of elements and block scales, which are exact. `dim` is the dim
    along which elements are packed. The products are not multiplied by the row scales.
    """
    values = _unpack(x.values, dim % x.values.ndim)
    return values * _expand(x.scales.astype(jnp.float32), values.shape)


def expand_scales(scales: Array, shape: Sequence[int], dim: int) -> Array:
    """Split blocks of 16 x 16 elements into blocks of 16 along `dim`.

    `shape` is the shape of the packed elements.
    """
    sizes = [*shape]
    sizes[dim] = scales.shape[dim]
    return _expand(scales, sizes)


def kernel_operand(
    values: Array, scales: Float[Array, "rows blocks"]
) -> tuple[Float[Array, "rows K"], Float[Array, "rows blocks"]]:
    """Return elements and scales in the dtypes that `jax.nn.scaled_matmul` requires."""
    codes = lax.bitcast_convert_type(values, jnp.float4_e2m1fn)
    return codes.reshape(len(values), -1), scales


def hadamard_transform(x: Float[Array, "B T *dims"]) -> Float[Array, "B T *dims"]:
    """Multiply each block of 16 tokens by an orthogonal matrix with random signs, in float32.

    The transform cancels in weight gradients, which contract tokens. It spreads outliers over the
    tokens of the block.
    """
    blocks = x.astype(jnp.float32).reshape(len(x), -1, _BLOCK, *x.shape[2:])
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < _BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix *= _SIGNS[:_BLOCK] / np.float32(_BLOCK**0.5)
    mixed = jnp.einsum("ij,bnj...->bni...", matrix, blocks, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)
