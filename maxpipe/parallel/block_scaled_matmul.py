"""Matmuls of block-scaled operands: one kernel on NVIDIA GPUs, dequantized operands elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.parallel import mxfp8, nvfp4, scopes
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.quantized_array import Dims, QuantizedArray
from maxpipe.parallel.sharding import auto_axes, entry_axes

BlockFormat = Literal["mxfp8", "nvfp4"]
_FORMATS = {"mxfp8": mxfp8, "nvfp4": nvfp4}

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


def matmul(
    left: QuantizedArray,
    right: QuantizedArray,
    contracted: tuple[Dims, Dims],
    block_format: BlockFormat,
    specs: OperandSpecs | None = None,
) -> Float[Array, ...]:
    """Return the float32 product, with the remaining dims of `left` before those of `right`.

    Blocks lie along the last contracted dim of each operand. Row scales are not applied. NVIDIA
    GPUs multiply the elements and their block scales. Other devices multiply the dequantized
    operands, and so do all devices if the compiler shards an operand in a way that `specs` does not
    define.
    """
    left, right = left._replace(row_scales=None), right._replace(row_scales=None)
    if specs is None and auto_axes():
        return _multiply_dequantized(left, right, contracted, block_format)
    of_left, of_right = (
        [*map(entry_axes, spec), *[()] * operand.values.ndim][: operand.values.ndim]
        for spec, operand in zip(specs or (PartitionSpec(),) * 2, (left, right), strict=True)
    )
    summed = tuple(axis for dim in contracted[0] for axis in of_left[dim])
    remaining = _without(of_left, contracted[0]) + _without(of_right, contracted[1])

    def run(left: QuantizedArray, right: QuantizedArray) -> Array:
        product = _multiply(left, right, contracted, block_format)
        return lax.psum(product, summed) if summed else product

    inputs = PartitionSpec(*of_left), PartitionSpec(*of_right)
    return map_shards(run, inputs, PartitionSpec(*remaining))(left, right)


def _multiply(
    left: QuantizedArray, right: QuantizedArray, contracted: Any, block_format: BlockFormat
) -> Array:
    """Multiply operands that are not sharded by the compiler."""
    scaled, dequantized = (
        partial(multiply, contracted=contracted, block_format=block_format)
        for multiply in (_multiply_scaled, _multiply_dequantized)
    )
    return lax.platform_dependent(
        left,
        right,
        cuda=lambda left, right: mark_varying(scaled(left, right)),
        default=lambda left, right: mark_varying(dequantized(left, right)),
    )


def _multiply_scaled(
    left: QuantizedArray, right: QuantizedArray, contracted: Any, block_format: BlockFormat
) -> Array:
    """Multiply with `jax.nn.scaled_matmul`, which is one kernel on Blackwell GPUs.

    On earlier GPUs, XLA dequantizes the operands.
    """
    shapes = [
        _without(operand.values.shape, dims)
        for operand, dims in zip((left, right), contracted, strict=True)
    ]
    (x, x_scales), (y, y_scales) = (
        _kernel_operand(operand, dims, block_format)
        for operand, dims in zip((left, right), contracted, strict=True)
    )
    with jax.named_scope(scopes.flops(2 * len(x) * len(y) * x.shape[1])):
        product = jax.nn.scaled_matmul(x[None], y[None], x_scales[None], y_scales[None])
    return product.reshape(*shapes[0], *shapes[1])


def _kernel_operand(
    operand: QuantizedArray, dims: Dims, block_format: BlockFormat
) -> tuple[Float[Array, "rows K"], Float[Array, "rows blocks"]]:
    """Return elements and scales as matrices whose last dim is contracted."""
    scales = operand.scales
    if block_format == "nvfp4":
        scales = nvfp4.expand_scales(scales, operand.values.shape, dims[-1])
    values, scales = _as_matrix(operand.values, dims), _as_matrix(scales, dims)
    return _FORMATS[block_format].kernel_operand(values, scales)


def _multiply_dequantized(
    left: QuantizedArray, right: QuantizedArray, contracted: Any, block_format: BlockFormat
) -> Array:
    left_values, right_values = (
        _FORMATS[block_format].dequantize_blocks(operand, dims[-1])
        for operand, dims in zip((left, right), contracted, strict=True)
    )
    return lax.dot_general(left_values, right_values, (contracted, ((), ())))


def _as_matrix(x: Array, dims: Dims) -> Float[Array, "rows K"]:
    """Flatten the contracted dims into the last dim, and the other dims into the first."""
    last = math.prod(x.shape[dim] for dim in dims)
    return jnp.moveaxis(x, dims, range(x.ndim - len(dims), x.ndim)).reshape(-1, last)


def _without(items: Sequence[Any], dims: Dims) -> list[Any]:
    return [item for dim, item in enumerate(items) if dim not in dims]
