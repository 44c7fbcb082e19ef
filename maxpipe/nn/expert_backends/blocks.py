"""Grouped matmuls by a loop over blocks of rows, for all platforms.

A block that contains rows of several experts is processed once per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from maxpipe.parallel.collectives import mark_varying


def matrix_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return the shape of one expert's matrix; `dim` is the expert dim."""
    return shape[:dim] + shape[dim + 1 :]


class BlockSteps(NamedTuple):
    """Steps of a loop over row blocks."""

    expert: Int[Array, " V"]
    start: Int[Array, " V"]
    """First row of the block."""
    first: Int[Array, " V"]
    """First row of the expert processed in this step."""
    stop: Int[Array, " V"]


def row_block_size(num_rows: int, num_experts: int) -> int:
    """Return the number of rows per block: at most a quarter of the mean number of rows per
    expert.
    """
    quarter = max(1, num_rows // num_experts // 4)
    power = 1 << quarter.bit_length() - 1
    return min(num_rows, max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, power)))


_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 512


def num_block_steps(num_rows: int, num_experts: int, block: int) -> int:
    """Return the number of steps in a loop over blocks of `block` rows. Each expert except the
    first can add a step, because its rows may start inside a block.
    """
    blocks = -(-num_rows // block)
    return blocks + min(num_experts, num_rows) - 1


def num_multiplied_rows(num_rows: int, num_experts: int) -> int:
    """Return the number of rows multiplied in a loop over row blocks."""
    block = row_block_size(num_rows, num_experts)
    return num_block_steps(num_rows, num_experts, block) * block


def make_block_steps(sizes: Int[Array, " E"], num_rows: int, block: int) -> BlockSteps:
    """Return the steps of a loop over blocks of `block` rows. Unused steps process no rows."""
    stops = jnp.cumsum(sizes)
    firsts = stops - sizes
    blocks = jnp.where(sizes > 0, (stops - 1) // block - firsts // block + 1, 0)
    ends = jnp.cumsum(blocks)
    turns = jnp.arange(num_block_steps(num_rows, len(sizes), block))
    expert = (turns[:, None] >= ends).sum(
        1
    )  # in unused steps, the index equals the number of experts
    expert, left = jnp.minimum(expert, len(sizes) - 1), expert < len(sizes)
    number = firsts[expert] // block + turns - (ends - blocks)[expert]
    # The last block ends at the last row and can overlap the previous block.
    start = jnp.clip(number * block, 0, max(num_rows - block, 0))
    first = jnp.maximum(firsts[expert], number * block)
    return BlockSteps(expert, start, first, jnp.where(left, stops[expert], 0))


def _expert_row_mask(step: BlockSteps, block: int) -> Array:
    """Return the mask `[b, 1]` of the rows in the block that belong to the step."""
    row = step.start + jnp.arange(block)
    return ((row >= step.first) & (row < step.stop))[:, None]


def grouped_matmul(
    rows: Sequence[Array], weights: Sequence[Array], sizes: Array, *, dim: int, transposed: bool
) -> Array:
    """Multiply each row by its expert's weights, and sum over the pairs of rows and weights.

    Rows without an expert are 0 in the result.
    """
    num_rows, block = len(rows[0]), row_block_size(len(rows[0]), len(sizes))
    width = matrix_shape(weights[0].shape, dim)[0 if transposed else 1]

    def add_block(output: Array, step: BlockSteps) -> tuple[Array, None]:
        new: Any = 0
        for of_rows, of_experts in zip(rows, weights, strict=True):
            block_rows = lax.dynamic_slice_in_dim(of_rows, step.start, block)
            weight = lax.dynamic_index_in_dim(of_experts, step.expert, dim, keepdims=False)
            new += block_rows @ (weight.T if transposed else weight)
        old = lax.dynamic_slice_in_dim(output, step.start, block)
        new = jnp.where(_expert_row_mask(step, block), new, old)
        return lax.dynamic_update_slice_in_dim(output, new, step.start, 0), None

    empty = mark_varying(jnp.zeros((num_rows, width), rows[0].dtype))
    return lax.scan(add_block, empty, make_block_steps(sizes, num_rows, block))[0]


def grouped_outer(rows: Array, cotangents: Array, sizes: Array, *, dim: int) -> Array:
    """Sum the outer products of rows and cotangents for each expert, in float32."""
    num_rows, block = len(rows), row_block_size(len(rows), len(sizes))

    def add_block(output: Array, step: BlockSteps) -> tuple[Array, None]:
        block_rows, block_cotangents = (
            lax.dynamic_slice_in_dim(array, step.start, block) for array in (rows, cotangents)
        )
        # Both operands are masked, because rows without an expert can hold arbitrary values.
        block_rows, block_cotangents = (
            jnp.where(_expert_row_mask(step, block), array, 0)
            for array in (block_rows, block_cotangents)
        )
        added = jnp.einsum(
            "bk,bj->kj", block_rows, block_cotangents, preferred_element_type=jnp.float32
        )
        old = lax.dynamic_slice_in_dim(output, step.expert, 1, dim)
        new = old + jnp.expand_dims(added, dim)
        return lax.dynamic_update_slice_in_dim(output, new, step.expert, dim), None

    shape = [rows.shape[1], cotangents.shape[1]]
    shape.insert(dim, len(sizes))
    empty = mark_varying(jnp.zeros(shape, jnp.float32))
    return lax.scan(add_block, empty, make_block_steps(sizes, num_rows, block))[0].astype(
        rows.dtype
    )
