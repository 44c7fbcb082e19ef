"""Gather weights that are sharded over fsdp, expert and context, and reduce their gradients.

This code runs inside the per-device program, where every collective is explicit and autodiff
inserts no collectives. Weights are gathered in the compute dtype. Gradients are accumulated in
float32 and are not reduced over `data` until the end of the step.

Gradient trees are nested dicts with the structure of the parameters. These trees contain neither
frozen parameters nor empty dicts.
"""

from __future__ import annotations

import math
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
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer, is_quantized_weight
from maxpipe.parallel.mesh import AUTOMATIC_AXES, DATA, TOKEN_AXES
from maxpipe.parallel.quantized_array import QuantizedArray
from maxpipe.parallel.sharding import (
    entry_axes,
    fsdp_dim,
    is_on_host,
    restrict_spec,
    to_device,
)


def select_trainable(tree: Tree, is_trained: Tree) -> Tree:
    """Return the subtree of leaves that are marked true in `is_trained`, or None if `tree` is a
    frozen leaf.

    Frozen leaves may already be missing from the tree.
    """
    if not isinstance(is_trained, Mapping):
        return tree if is_trained else None
    parts = {name: select_trainable(part, is_trained[name]) for name, part in tree.items()}
    return {
        name: part
        for name, part in parts.items()
        if part is not None and not (isinstance(part, Mapping) and not part)
    }


def replace_subtree(tree: Tree, part: Tree) -> Tree:
    """Return a copy of the full tree in which the leaves of the partial tree replace the
    corresponding leaves.

    An 8-bit weight is kept, and its `gradient` is set to the new leaf.
    """
    if not isinstance(part, Mapping):
        return replace(tree, gradient=part) if is_quantized_weight(tree) else part
    return {
        name: replace_subtree(own, part[name]) if name in part else own
        for name, own in tree.items()
    }


Tree = Any
GatherMode = Literal["iteration", "window", "step"]
NOT_SHARDED = -1
"""Value of `WeightSharding.dim` for parameters without a gathered dim."""


@dataclass(frozen=True)
class WeightSharding:
    """Sharding of a parameter over the devices of a stage."""

    dim: int
    """Dim whose shards are gathered before use, or `NOT_SHARDED`."""
    axes: tuple[str, ...] = ()
    """Mesh axes over which this dim is sharded, including fsdp."""
    ungathered_axes: tuple[str, ...] = ()
    """Mesh axes that shard another dim, which is never gathered. Each device uses its
    shard to process the tokens of all devices along these axes."""
    auto_axes: tuple[Any, ...] = ()
    """Auto axes over which each dim is sharded, in the format of a PartitionSpec."""
    trainable: bool = True
    """Whether the parameter has a gradient."""
    has_own_dtype: bool = False
    """Whether the parameter is used in its stored dtype instead of the compute dtype. Such a
    parameter is float32 or has no gradient."""
    zero1_dim: int = NOT_SHARDED
    """Dim along which the gradient is reduce-scattered over the data axis at the end of a step,
    counted with stacked dims. `NOT_SHARDED` if each device receives the full gradient."""
    reduce_dtype: str = "float32"
    """Dtype used to communicate gradients in reductions."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer for the weight, which is then gathered in 8-bit form. None if the weight is not
    quantized."""
    contracted_dims: int = 0
    """Number of leading dims contracted by the matmul, not counting the `num_stacked` stacked
    dims."""
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
        """Return the sharding that corresponds to the specs of a parameter and its gradient."""
        dim = NOT_SHARDED if (sharded_dim := fsdp_dim(spec)) is None else sharded_dim
        by_dim = [entry_axes(entry) for entry in restrict_spec(spec, TOKEN_AXES)]
        axes = () if dim == NOT_SHARDED else by_dim.pop(dim)
        kept = tuple(axis for others in by_dim for axis in others)
        automatic = tuple(restrict_spec(spec, AUTOMATIC_AXES))
        over = [entry_axes(entry) for entry in gradient or ()]
        owned = next((n for n, axes_of_dim in enumerate(over) if DATA in axes_of_dim), NOT_SHARDED)
        low = low if summed else None
        return cls(dim, axes, kept, automatic, trainable, exact, owned, reduced, low, summed)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Return the axes over which partial gradients are all-reduced instead of
        reduce-scattered.
        """
        later = () if self.zero1_dim == NOT_SHARDED else (DATA,)
        return tuple(a for a in TOKEN_AXES if a not in (*self.axes, *self.ungathered_axes, *later))

    def unstacked(self, num_stacked: int) -> WeightSharding:
        """Return the sharding without the `num_stacked` leading dims, for a single weight."""
        dim = self.dim if self.dim == NOT_SHARDED else self.dim - num_stacked
        return replace(self, dim=dim, auto_axes=self.auto_axes[num_stacked:])

    @property
    def stacked(self) -> WeightSharding:
        """Return the sharding of weights like this one, stacked along a new leading dim."""
        dim = self.dim if self.dim == NOT_SHARDED else self.dim + 1
        automatic = (None, *self.auto_axes)
        return replace(self, dim=dim, auto_axes=automatic, num_stacked=self.num_stacked + 1)

    @property
    def transposed(self) -> WeightSharding:
        """Return the sharding of the transposed matrix."""
        rows, columns = (*self.auto_axes, None, None)[:2]
        dim = self.dim if self.dim == NOT_SHARDED else 1 - self.dim
        return replace(self, dim=dim, auto_axes=(columns, rows))


REPLICATED = WeightSharding(NOT_SHARDED)
"""Sharding of a replicated parameter."""


def gather_weight(shard: jax.Array, division: WeightSharding, dtype: jnp.dtype) -> jax.Array:
    """Gather the full weight from its shards, in the compute dtype or in 8 bits."""
    shard = shard if division.has_own_dtype else shard.astype(dtype)
    if division.quantizer is not None:
        return _gather_quantized(division.quantizer, shard, division)
    if division.dim == NOT_SHARDED:
        return mark_varying(shard)
    run = partial(all_gather, axes=division.axes, dim=division.dim)
    return mark_varying(map_auto_axes(run, division.auto_axes)(shard))


def _gather_quantized(low: MatmulQuantizer, shard: jax.Array, division: WeightSharding) -> Tree:
    """Gather a weight in 4 or 8 bits, quantized with the scales of the full weight."""
    dim, sharded = division.dim, division.dim != NOT_SHARDED
    over = division.axes if sharded else ()
    rounded = low.quantize_weight(shard, division.num_stacked, division.contracted_dims, over, dim)

    def whole(leaf: jax.Array) -> jax.Array:
        if not sharded:
            return mark_varying(leaf)
        entries = [*division.auto_axes, *[None] * leaf.ndim][: leaf.ndim]
        entries = [
            axes if size > 1 else None for axes, size in zip(entries, leaf.shape, strict=True)
        ]
        run = partial(all_gather, axes=division.axes, dim=dim)
        return mark_varying(map_auto_axes(run, entries)(leaf))

    def gather(array: QuantizedArray) -> QuantizedArray:
        # All shards share a float32 scale of size 1. A shard of one block has its own block scale.
        is_shared = array.scales.shape[dim] == 1 != shard.shape[dim] and low.block_format is None
        return QuantizedArray(
            whole(array.values),
            mark_varying(array.scales) if is_shared else whole(array.scales),
            mark_varying(array.row_scales),
        )

    is_leaf = lambda node: isinstance(node, QuantizedArray)  # noqa: E731
    return jax.tree.map(gather, rounded, is_leaf=is_leaf)


def scatter_gradient(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """Reduce-scatter a gradient over the axes of its shards, and return this device's shard.
    Gradients of unsharded parameters are returned unchanged.
    """
    if division.dim == NOT_SHARDED:
        return gradient
    run = partial(reduce_scatter, axes=division.axes, dim=division.dim)
    sent = gradient.astype(division.reduce_dtype)
    return mark_varying(map_auto_axes(run, division.auto_axes)(sent)).astype(gradient.dtype)


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one stage's layers, stacked as `[R * L, ...]`, in one of three gather modes.

    `iteration` stores shards and gathers each layer when it is used. `step` stores all weights in
    gathered form. `window` stores a prefetch window of gathered chunks. Gradients of trainable
    weights are accumulated in the sharding of the stored weights.
    """

    gather_mode: GatherMode
    weight_shardings: Tree
    """Tree that contains the `WeightSharding` of each weight of one layer."""
    dtype: jnp.dtype

    @cached_property
    def trainable(self) -> Tree:
        """Return a tree of bools that are true for weights with a gradient."""
        return jax.tree.map(lambda division: division.trainable, self.weight_shardings)

    @cached_property
    def _trainable_shardings(self) -> Tree:
        """Return the shardings of the trainable weights."""
        return select_trainable(self.weight_shardings, self.trainable)

    def prepare(self, shards: Tree) -> Tree:
        """Return the tree from which the tick loop reads weights; in `window` mode, the shards to
        gather.
        """
        if self.gather_mode != "step":
            return mark_varying(shards)
        return jax.tree.map(
            lambda shard, division: gather_weight(shard, division.stacked, self.dtype),
            shards,
            self.weight_shardings,
        )

    def layer(self, held: Tree, index: jax.Array | int) -> Tree:
        """Return the full weights of one layer."""
        gathers = self.gather_mode == "iteration"
        own = jax.tree.map(lambda leaf: bind_to_index(leaf, index), held) if gathers else held
        picked = jax.tree.map(lambda leaf: _layer_of(leaf, index), own)
        if not gathers:
            return picked
        return jax.tree.map(
            lambda leaf, division: gather_weight(leaf, division, self.dtype),
            picked,
            self.weight_shardings,
        )

    def zeros(self, held: Tree) -> Tree:
        """Return zero float32 accumulators with the sharding of the stored weights."""
        trained = select_trainable(held, self.trainable)
        zeros = lambda leaf: mark_varying(jnp.zeros(_stacked_shape(leaf), jnp.float32))  # noqa: E731
        return jax.tree.map(zeros, trained, is_leaf=is_quantized_weight)

    def accumulate(self, totals: Tree, index: jax.Array | int, gradient: Tree) -> Tree:
        """Add one layer's gradient to the totals in place."""

        def add(total: jax.Array, part: jax.Array, division: WeightSharding) -> jax.Array:
            part = part.astype(jnp.float32)
            return _add(
                total,
                index,
                scatter_gradient(part, division) if self.gather_mode == "iteration" else part,
            )

        trained = select_trainable(gradient, self.trainable)
        return jax.tree.map(add, totals, trained, self._trainable_shardings)

    def finish(self, totals: Tree) -> Tree:
        """Return the gradients summed over devices, with the sharding of the stored parameters."""

        def reduce(total: jax.Array, division: WeightSharding) -> jax.Array:
            if self.gather_mode == "step":
                total = scatter_gradient(total, division.stacked)
            return sum_gradient(total, division)

        return jax.tree.map(reduce, totals, self._trainable_shardings)

    # Prefetch window (`window`): chunks of `length` layers.

    def empty_window(self, shards: Tree, num_layers: int) -> Tree:
        """Return zero weights for `num_layers` unsharded layers."""
        layers = self._empty_layers(shards, self.weight_shardings, num_layers, self.dtype)

        def held(whole: jax.Array, division: WeightSharding) -> Tree:
            if (low := division.quantizer) is None:
                return whole
            form = jax.eval_shape(
                lambda x: low.quantize_weight(x, 1, division.contracted_dims), whole
            )
            return mark_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form))

        return jax.tree.map(held, layers, self.weight_shardings)

    def empty_gradient_window(self, shards: Tree, num_layers: int) -> Tree:
        """Return zero float32 gradients for `num_layers` unsharded layers."""
        trained = select_trainable(shards, self.trainable)
        return self._empty_layers(trained, self._trainable_shardings, num_layers, jnp.float32)

    def _empty_layers(self, shards: Tree, divisions: Tree, num_layers: int, dtype: Any) -> Tree:

        def empty(shard: jax.Array, division: WeightSharding) -> jax.Array:
            shape = [num_layers, *shard.shape[1:]]
            if division.dim != NOT_SHARDED:
                shape[1 + division.dim] *= axis_size(division.axes)
            return mark_varying(jnp.zeros(shape, shard.dtype if division.has_own_dtype else dtype))

        return jax.tree.map(empty, shards, divisions)

    def gather_chunk(self, shards: Tree, first: jax.Array, length: int) -> Tree:
        """Gather the full weights of `length` layers, starting at layer `first`."""
        cut = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=length)
        return jax.tree.map(
            lambda shard, division: gather_weight(cut(shard), division.stacked, self.dtype),
            shards,
            self.weight_shardings,
        )

    def reduce(
        self, totals: Tree, index: jax.Array, partial_sums: Tree, place: jax.Array
    ) -> tuple[Tree, Tree]:
        """Add one layer's full gradient to the sharded totals, and clear its window entry."""

        def add(total: jax.Array, sums: jax.Array, division: WeightSharding) -> jax.Array:
            part = lax.dynamic_index_in_dim(sums, place, 0, False)
            return _add(total, index, scatter_gradient(part, division))

        def clear(sums: jax.Array) -> jax.Array:
            zeros = mark_varying(jnp.zeros(sums.shape[1:], sums.dtype))
            return lax.dynamic_update_index_in_dim(sums, zeros, place, 0)

        totals = jax.tree.map(add, totals, partial_sums, self._trainable_shardings)
        return totals, jax.tree.map(clear, partial_sums)


def merge_stacked_dims(leaf: jax.Array) -> jax.Array:
    """Merge the dims [R, 1, L] of a stage's weights into one dim. Weights in host memory are
    returned unchanged, because XLA cannot reshape them.
    """
    return leaf if is_on_host(leaf) else leaf.reshape(-1, *leaf.shape[3:])


def _stacked_shape(leaf: jax.Array) -> tuple[int, ...]:
    """Return the shape `[R * L, ...]` of a stage's weights."""
    shape = leaf.shape
    merges = not is_quantized_weight(leaf) and is_on_host(leaf)
    return (math.prod(shape[:3]), *shape[3:]) if merges else shape


def bind_to_index(stack: jax.Array, index: jax.Array | int) -> jax.Array:
    """Return the stack, whose reads inside a loop then depend on `index` even if the stack has only
    one entry.

    XLA ignores the index of a stack with one entry. Everything that is computed from the entry
    would then be loop-invariant, and XLA would move it out of the loop over layers: gathers, and
    weight gradients with their reduce-scatters, would run in every tick, even on idle stages.
    """
    if len(stack) > 1 or is_on_host(stack) or not isinstance(index, jax.Array):
        return stack
    return lax.optimization_barrier((stack, index))[0]


def _layer_of(leaf: jax.Array, index: jax.Array | int) -> jax.Array:
    """Return one layer of a stage's weights, in device memory."""
    if not is_on_host(leaf):
        return lax.dynamic_index_in_dim(leaf, index, 0, False)
    per_repeat, rest = leaf.shape[2], leaf.shape[3:]
    start = (index // per_repeat, 0, index % per_repeat, *(0 for _ in rest))
    # A copy directly after the slice moves only the slice from host memory.
    return to_device(lax.dynamic_slice(leaf, start, (1, 1, 1, *rest))).reshape(rest)


def _add(totals: jax.Array, index: jax.Array | int, part: jax.Array) -> jax.Array:
    """Add `part` to the entry of `totals` at `index`, in place."""
    # If the entry's first dim were dropped, XLA for TPU would not fuse this addition with the
    # matmul, and would first copy the entry.
    old = lax.dynamic_slice_in_dim(totals, index, 1)
    return lax.dynamic_update_slice_in_dim(totals, old + part[None], index, 0)


def sum_gradient(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """Sum a gradient over the axes that `scatter_gradient` and `zero1_shard` do not reduce over."""
    sent = gradient.astype(division.reduce_dtype)
    return sum_over(sent, division.reduce_axes).astype(gradient.dtype)


def zero1_shard(gradient: jax.Array, division: WeightSharding) -> jax.Array:
    """Reduce-scatter a gradient over the data axis, and return the shard that this device
    updates.
    """
    if division.zero1_dim == NOT_SHARDED:
        return gradient
    run = partial(reduce_scatter, axes=(DATA,), dim=division.zero1_dim)
    sent = gradient.astype(division.reduce_dtype)
    return map_auto_axes(run, division.auto_axes)(sent).astype(gradient.dtype)
