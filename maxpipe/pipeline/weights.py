"""Weights sharded over fsdp and axes beside it: when they are gathered, when gradients are reduced.

Everything here runs inside the per-device program and is explicit: no collective
is left to automatic differentiation. Gathers happen in the compute dtype; gradients
accumulate in float32 and stay unreduced over `data` until the step's end.

Trees of parameters without those that are not trained, and back.

Gradients and all that is kept for them are nested dicts in the form of the parameters, in which
frozen ones are missing, and so are dicts that would be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.parallel.collectives import (
    all_gather,
    axis_size,
    map_auto_axes,
    mark_varying,
    reduce_scatter,
    sum_over,
)
from maxpipe.parallel.mesh import AUTOMATIC_AXES, DATA, TOKEN_AXES
from maxpipe.parallel.quantized_matmul import MatmulQuantizer, is_quantized_weight
from maxpipe.parallel.sharding import entry_axes, fsdp_dim, restrict_spec


def select_trainable(tree: Tree, is_trained: Tree) -> Tree:
    """The parts of a tree where a tree of bools is true; None of a single leaf that is not.

    The tree may lack frozen parts already.
    """
    if not isinstance(is_trained, Mapping):
        return tree if is_trained else None
    found = {name: select_trainable(part, is_trained[name]) for name, part in tree.items()}
    return {
        name: part
        for name, part in found.items()
        if part is not None and not (isinstance(part, Mapping) and not part)
    }


def replace_subtree(tree: Tree, part: Tree) -> Tree:
    """The whole tree, with this part of it in place of its own.

    A weight in 8 bits stays, and has the gradient of what would be in its place.
    """
    if not isinstance(part, Mapping):
        return replace(tree, gradient=part) if is_quantized_weight(tree) else part
    return {
        name: replace_subtree(own, part[name]) if name in part else own
        for name, own in tree.items()
    }


Tree = Any
GatherMode = Literal["iteration", "visit", "step"]
NOT_SHARDED = -1
"""Stands for "no dim is gathered"."""


@dataclass(frozen=True)
class WeightSharding:
    """How a parameter is divided among the devices of a stage."""

    dim: int
    """The dim whose shards are gathered for use, or `NOT_SHARDED`."""
    axes: tuple[str, ...] = ()
    """Axes over which it is sharded, fsdp among them."""
    ungathered_axes: tuple[str, ...] = ()
    """Axes over which another dim is sharded, and stays so: each device of them computes with its
    own part, for the tokens of all."""
    auto_axes: tuple[Any, ...] = ()
    """For each dim the automatic axes over which it is sharded, as in a PartitionSpec."""
    trainable: bool = True
    """Whether it has a gradient."""
    has_own_dtype: bool = False
    """Whether it is used in the type in which it is stored; it has no gradient then."""
    zero1_dim: int = NOT_SHARDED
    """The dim along which each device of the data axis gets its part of the whole gradient, at the
    end of a step; `NOT_SHARDED` if each gets all. Stacked dims count."""
    reduce_dtype: str = "float32"
    """Type in which gradients are sent to be summed."""
    quantizer: MatmulQuantizer | None = None
    """How it is rounded, and gathered in 8 bits; None if it is not."""
    contracted_dims: int = 0
    """How many of its first dims its product sums over; stacked ones, `stack`, do not count."""
    num_stacked: int = 0

    @classmethod
    def from_spec(
        cls,
        spec: PartitionSpec,
        trainable: bool = True,
        exact: bool = False,
        gradient: PartitionSpec | None = None,
        summed: int = 0,
        *,
        reduced: str = "float32",
        low: MatmulQuantizer | None = None,
    ) -> WeightSharding:
        """From the spec of the whole parameter, and that of its gradient if it is another."""
        dim = NOT_SHARDED if (found := fsdp_dim(spec)) is None else found
        by_dim = [entry_axes(entry) for entry in restrict_spec(spec, TOKEN_AXES)]
        axes = () if dim == NOT_SHARDED else by_dim.pop(dim)
        kept = tuple(axis for others in by_dim for axis in others)
        automatic = tuple(restrict_spec(spec, AUTOMATIC_AXES))
        over = [entry_axes(entry) for entry in gradient or ()]
        owned = next((n for n, those in enumerate(over) if DATA in those), NOT_SHARDED)
        low = low if summed else None
        return cls(dim, axes, kept, automatic, trainable, exact, owned, reduced, low, summed)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Axes whose devices each have a part of a gradient, besides those it is scattered over:
        for its use, or at the end.
        """
        later = () if self.zero1_dim == NOT_SHARDED else (DATA,)
        return tuple(a for a in TOKEN_AXES if a not in (*self.axes, *self.ungathered_axes, *later))

    def unstacked(self, num_stacked: int) -> WeightSharding:
        """Of one weight, when this is of weights with `num_stacked` dims in front."""
        dim = self.dim if self.dim == NOT_SHARDED else self.dim - num_stacked
        return replace(self, dim=dim, auto_axes=self.auto_axes[num_stacked:])

    @property
    def stacked(self) -> WeightSharding:
        """Of weights like this one, stacked along a new first dim."""
        dim = self.dim if self.dim == NOT_SHARDED else self.dim + 1
        automatic = (None, *self.auto_axes)
        return replace(self, dim=dim, auto_axes=automatic, num_stacked=self.num_stacked + 1)

    @property
    def transposed(self) -> WeightSharding:
        """Of the transposed matrix."""
        rows, columns = (*self.auto_axes, None, None)[:2]
        dim = self.dim if self.dim == NOT_SHARDED else 1 - self.dim
        return replace(self, dim=dim, auto_axes=(columns, rows))


REPLICATED = WeightSharding(NOT_SHARDED)
"""Every device has all of it."""


def gather_weight(shard: jax.Array, division: WeightSharding, dtype: jnp.dtype) -> jax.Array:
    """The whole weight in the compute dtype, or in 8 bits, from this device's shard."""
    shard = shard if division.has_own_dtype else shard.astype(dtype)
    if division.quantizer is not None:
        return _gather_quantized(division.quantizer, shard, division)
    if division.dim == NOT_SHARDED:
        return mark_varying(shard)
    run = partial(all_gather, axes=division.axes, dim=division.dim)
    return mark_varying(map_auto_axes(run, division.auto_axes)(shard))


def _gather_quantized(low: MatmulQuantizer, shard: jax.Array, division: WeightSharding) -> Tree:
    """Rounded as the whole weight would be."""
    dim, sharded = division.dim, division.dim != NOT_SHARDED
    over = division.axes if sharded else ()
    rounded = low.quantize_weight(shard, division.num_stacked, division.contracted_dims, over, dim)

    def whole(leaf: jax.Array) -> jax.Array:
        if not sharded or leaf.shape[dim] == 1 != shard.shape[dim]:
            return mark_varying(leaf)  # a scale for all of that dim
        entries = [*division.auto_axes, *[None] * leaf.ndim][: leaf.ndim]
        entries = [
            axes if size > 1 else None for axes, size in zip(entries, leaf.shape, strict=True)
        ]
        run = partial(all_gather, axes=division.axes, dim=dim)
        return mark_varying(map_auto_axes(run, entries)(leaf))

    return jax.tree.map(whole, rounded)


def scatter_gradient(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """This device's shard of the gradient, summed over the axes of the shards; unsharded ones stay
    unsummed.
    """
    if division.dim == NOT_SHARDED:
        return gradient
    run = partial(reduce_scatter, axes=division.axes, dim=division.dim)
    sent = gradient.astype(division.reduce_dtype)
    return mark_varying(map_auto_axes(run, division.auto_axes)(sent)).astype(gradient.dtype)


@dataclass(frozen=True)
class LayerWeights:
    """Access to one stage's layers, stacked `[R * L, ...]`, under a gather mode.

    `iteration` holds shards and gathers one layer when it is used; `step` holds all whole weights;
    `visit` holds a window of whole chunks. Gradients add up in the form of what is held, those of
    trainable weights: totals and sums lack the others.
    """

    gather_mode: GatherMode
    weight_shardings: Tree
    """For each leaf the `WeightSharding` of one layer's weight."""
    dtype: jnp.dtype

    @cached_property
    def trainable(self) -> Tree:
        """Which weights have a gradient."""
        return jax.tree.map(lambda division: division.trainable, self.weight_shardings)

    @cached_property
    def _trainable_shardings(self) -> Tree:
        """Divisions of those."""
        return select_trainable(self.weight_shardings, self.trainable)

    def prepare(self, shards: Tree) -> Tree:
        """What the tick loop reads weights from; in `visit` the shards that fill the window."""
        if self.gather_mode != "step":
            return mark_varying(shards)
        return jax.tree.map(
            lambda shard, division: gather_weight(shard, division.stacked, self.dtype),
            shards,
            self.weight_shardings,
        )

    def layer(self, held: Tree, index: jax.Array | int) -> Tree:
        """One layer's whole weights."""
        picked = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, False), held)
        if self.gather_mode != "iteration":
            return picked
        return jax.tree.map(
            lambda leaf, division: gather_weight(leaf, division, self.dtype),
            picked,
            self.weight_shardings,
        )

    def zeros(self, held: Tree) -> Tree:
        """Empty float32 accumulators in the form of what is held."""
        mine = select_trainable(held, self.trainable)
        zeros = lambda leaf: mark_varying(jnp.zeros(leaf.shape, jnp.float32))  # noqa: E731
        return jax.tree.map(zeros, mine, is_leaf=is_quantized_weight)

    def accumulate(self, totals: Tree, index: jax.Array | int, gradient: Tree) -> Tree:
        """Adds one layer's gradient in place."""

        def add(total: jax.Array, part: jax.Array, division: WeightSharding) -> jax.Array:
            part = part.astype(jnp.float32)
            return _add(
                total,
                index,
                scatter_gradient(part, division) if self.gather_mode == "iteration" else part,
            )

        mine = select_trainable(gradient, self.trainable)
        return jax.tree.map(add, totals, mine, self._trainable_shardings)

    def finish(self, totals: Tree) -> Tree:
        """Summed over devices, in the form of the stored shards."""

        def reduce(total: jax.Array, division: WeightSharding) -> jax.Array:
            if self.gather_mode == "step":
                total = scatter_gradient(total, division.stacked)
            return sum_gradient(total, division)

        return jax.tree.map(reduce, totals, self._trainable_shardings)

    # Chunks of `length` layers in the window of `visit`.

    def empty_window(self, shards: Tree, num_layers: int) -> Tree:
        """Zeros for this many whole layers."""
        found = self._empty_layers(shards, self.weight_shardings, num_layers, self.dtype)

        def held(whole: jax.Array, division: WeightSharding) -> Tree:
            if (low := division.quantizer) is None:
                return whole
            form = jax.eval_shape(
                lambda x: low.quantize_weight(x, 1, division.contracted_dims), whole
            )
            return mark_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form))

        return jax.tree.map(held, found, self.weight_shardings)

    def empty_gradient_window(self, shards: Tree, num_layers: int) -> Tree:
        """Zeros for the gradients of this many whole layers, float32."""
        mine = select_trainable(shards, self.trainable)
        return self._empty_layers(mine, self._trainable_shardings, num_layers, jnp.float32)

    def _empty_layers(self, shards: Tree, divisions: Tree, num_layers: int, dtype: Any) -> Tree:

        def empty(shard: jax.Array, division: WeightSharding) -> jax.Array:
            shape = [num_layers, *shard.shape[1:]]
            if division.dim != NOT_SHARDED:
                shape[1 + division.dim] *= axis_size(division.axes)
            return mark_varying(jnp.zeros(shape, shard.dtype if division.has_own_dtype else dtype))

        return jax.tree.map(empty, shards, divisions)

    def gather_chunk(self, shards: Tree, first: jax.Array, length: int) -> Tree:
        """Whole weights of the layers from `first` on."""
        cut = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=length)
        return jax.tree.map(
            lambda shard, division: gather_weight(cut(shard), division.stacked, self.dtype),
            shards,
            self.weight_shardings,
        )

    def reduce(
        self, totals: Tree, index: jax.Array, partial_sums: Tree, place: jax.Array
    ) -> tuple[Tree, Tree]:
        """Adds one layer's whole gradient to the sharded totals, and empties its place."""

        def add(total: jax.Array, sums: jax.Array, division: WeightSharding) -> jax.Array:
            part = lax.dynamic_index_in_dim(sums, place, 0, False)
            return _add(total, index, scatter_gradient(part, division))

        def clear(sums: jax.Array) -> jax.Array:
            zeros = mark_varying(jnp.zeros(sums.shape[1:], sums.dtype))
            return lax.dynamic_update_index_in_dim(sums, zeros, place, 0)

        totals = jax.tree.map(add, totals, partial_sums, self._trainable_shardings)
        return totals, jax.tree.map(clear, partial_sums)


def _add(totals: jax.Array, index: jax.Array | int, part: jax.Array) -> jax.Array:
    """Adds to one entry in place."""
    # With the entry's first dim dropped, XLA for TPU no longer adds where it multiplies: it copies
    # the entry before.
    old = lax.dynamic_slice_in_dim(totals, index, 1)
    return lax.dynamic_update_slice_in_dim(totals, old + part[None], index, 0)


def sum_gradient(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """Sums over the devices with other tokens that `scatter` has not summed over."""
    sent = gradient.astype(division.reduce_dtype)
    return sum_over(sent, division.reduce_axes).astype(gradient.dtype)


def zero1_shard(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """Of the gradient of a whole parameter the part that this device updates."""
    if division.zero1_dim == NOT_SHARDED:
        return gradient
    run = partial(reduce_scatter, axes=(DATA,), dim=division.zero1_dim)
    sent = gradient.astype(division.reduce_dtype)
    return map_auto_axes(run, division.auto_axes)(sent).astype(gradient.dtype)
