"""Weights sharded over fsdp: when they are gathered, when gradients are reduced.

Everything here runs inside the per-device program and is explicit: no collective
is left to automatic differentiation. Gathers happen in the compute dtype; gradients
accumulate in float32 and stay unreduced over `data` until the step's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.mesh import DATA, FSDP
from maxpipe.pipeline.collectives import gather_shards, scatter_sum, size_of, sum_over, vary

Tree = Any
Gather = Literal["iteration", "visit", "step"]
NOT_SHARDED = -1
"""Stands for "no dim is sharded over fsdp" in trees of dims."""


def gather(shard: jax.Array, dim: int, dtype: jnp.dtype) -> jax.Array:
    """The whole weight in the compute dtype, from this device's shard."""
    shard = shard.astype(dtype)
    if dim == NOT_SHARDED:
        return vary(shard)
    return vary(gather_shards(shard, FSDP, dim))


def scatter(gradient: jax.Array, dim: int) -> jax.Array:
    """This device's shard of the gradient, summed over fsdp; unsharded ones stay unsummed."""
    if dim == NOT_SHARDED:
        return gradient
    return vary(scatter_sum(gradient, FSDP, dim))


@dataclass(frozen=True)
class LayerWeights:
    """Access to one stage's layers, stacked `[R * L, ...]`, under a gather mode.

    `iteration` holds shards and gathers one layer when it is used; `step` holds all whole weights;
    `visit` holds a window of whole chunks. Gradients add up in the form of what is held.
    """

    mode: Gather
    dims: Tree
    """For each leaf the dim of one layer's weight that is sharded over fsdp."""
    dtype: jnp.dtype

    def hold(self, shards: Tree) -> Tree:
        """What the tick loop reads weights from; in `visit` the shards that fill the window."""
        if self.mode != "step":
            return vary(shards)
        return jax.tree.map(
            lambda shard, dim: gather(shard, _stacked(dim), self.dtype), shards, self.dims
        )

    def layer(self, held: Tree, index: jax.Array | int) -> Tree:
        """One layer's whole weights."""
        picked = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, False), held)
        if self.mode != "iteration":
            return picked
        return jax.tree.map(lambda leaf, dim: gather(leaf, dim, self.dtype), picked, self.dims)

    def zeros(self, held: Tree) -> Tree:
        """Empty float32 accumulators in the form of what is held."""
        return jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, jnp.float32)), held)

    def accumulate(self, totals: Tree, index: jax.Array | int, gradient: Tree) -> Tree:
        """Adds one layer's gradient in place."""

        def add(total: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            part = part.astype(jnp.float32)
            return _add(total, index, scatter(part, dim) if self.mode == "iteration" else part)

        return jax.tree.map(add, totals, gradient, self.dims)

    def finish(self, totals: Tree) -> Tree:
        """Summed over data and fsdp, in the form of the stored shards."""

        def reduce(total: jax.Array, dim: int) -> jax.Array:
            if self.mode == "step":
                total = scatter(total, _stacked(dim))
            return sum_over_batch(total, dim)

        return jax.tree.map(reduce, totals, self.dims)

    # Chunks of `length` layers in the window of `visit`.

    def window(self, shards: Tree, num_layers: int, dtype: jnp.dtype) -> Tree:
        """Zeros for this many whole layers."""

        def empty(shard: jax.Array, dim: int) -> jax.Array:
            shape = [num_layers, *shard.shape[1:]]
            if dim != NOT_SHARDED:
                shape[1 + dim] *= size_of(FSDP)
            return vary(jnp.zeros(shape, dtype))

        return jax.tree.map(empty, shards, self.dims)

    def gather_chunk(self, shards: Tree, first: jax.Array, length: int) -> Tree:
        """Whole weights of the layers from `first` on."""
        cut = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=length)
        return jax.tree.map(
            lambda shard, dim: gather(cut(shard), _stacked(dim), self.dtype), shards, self.dims
        )

    def reduce(
        self, totals: Tree, index: jax.Array, partial_sums: Tree, place: jax.Array
    ) -> tuple[Tree, Tree]:
        """Adds one layer's whole gradient to the sharded totals, and empties its place."""

        def add(total: jax.Array, sums: jax.Array, dim: int) -> jax.Array:
            part = lax.dynamic_index_in_dim(sums, place, 0, False)
            return _add(total, index, scatter(part, dim))

        def clear(sums: jax.Array) -> jax.Array:
            zeros = vary(jnp.zeros(sums.shape[1:], sums.dtype))
            return lax.dynamic_update_index_in_dim(sums, zeros, place, 0)

        totals = jax.tree.map(add, totals, partial_sums, self.dims)
        return totals, jax.tree.map(clear, partial_sums)


def _add(totals: jax.Array, index: jax.Array | int, part: jax.Array) -> jax.Array:
    """Adds to one entry in place."""
    # With the entry's first dim dropped, XLA for TPU no longer adds where it multiplies: it copies
    # the entry before.
    old = lax.dynamic_slice_in_dim(totals, index, 1)
    return lax.dynamic_update_slice_in_dim(totals, old + part[None], index, 0)


def sum_over_batch(gradient: jax.Array, dim: int) -> jax.Array:
    """Sums over the batch axes that `scatter` has not summed over."""
    return sum_over(gradient, DATA if dim != NOT_SHARDED else (DATA, FSDP))


def _stacked(dim: int) -> int:
    return dim if dim == NOT_SHARDED else dim + 1
