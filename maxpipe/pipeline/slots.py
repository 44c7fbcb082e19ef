"""Run the layers of one chunk in a slot of the schedule: forward, backward, or weight gradients.

The layers in a slot run in a loop whose trip count is read from the table: 0 if the stage is idle.
Conditionals are avoided, because XLA copies buffers inside them. If there are several layer types,
every iteration contains one inner loop per type with a trip count of 0 or 1. Reads from a type's
stacks are indexed by the inner counter; otherwise, XLA would treat the reads as loop-invariant and
copy them out of the loop. If a stack has one entry, XLA removes the index, so a barrier adds it to
the reads (`bind_to_index`). With `idle="compute"`, every stage runs as many iterations as the
busiest stage and discards unused results, so that control flow is identical on all stages.

Arrays that are kept between slots of the schedule are stored in buffers with numbered entries,
which are also called slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import (
    Statistic,
    add_statistic,
    axis_index,
    empty_statistic,
    map_statistics,
    mark_varying,
    with_layout,
)
from maxpipe.parallel.mesh import STAGE
from maxpipe.parallel.sharding import auto_axes
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.remat import (
    LayerConstants,
    LayerFn,
    LayerVJP,
    RematPolicy,
    SavedArray,
    differentiate_layer,
)
from maxpipe.pipeline.weights import LayerWeights, bind_to_index

LANES = 128
"""Number of lanes in a TPU vector register; shorter minor dims are padded to this size."""
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def empty_slots(count: int, like: Any) -> jax.Array:
    """Return `count` uninitialized slots for arrays with the shape and dtype of `like`, in the same
    memory space.
    """
    empty = mark_varying(lax.empty((count, *like.shape), like.dtype))
    return jax.device_put(empty, _HOST) if isinstance(like, SavedArray) and like.on_host else empty


def read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """Return the contents of one buffer slot."""
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)


def write_slot(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Return the buffer with `value` written to a slot."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def select_microbatch(batch: Tree, index: jax.Array) -> Tree:
    """Return the arrays of one microbatch, or of microbatch 0 if the slot is idle."""
    return jax.tree.map(lambda leaf: read_slot(leaf, jnp.maximum(index, 0)), batch)


def read_slots(buffers: Sequence[jax.Array], slot: jax.Array, *, pinned: bool) -> list[jax.Array]:
    """Return the contents of one slot in each buffer; `pinned` fixes the memory layout as in
    `write_slots`.
    """
    values = [read_slot(bind_to_index(buffer, slot), slot) for buffer in buffers]
    return [_pin_layout(value) for value in values] if pinned else values


def write_slots(
    buffers: Sequence[jax.Array],
    slot: jax.Array,
    values: Sequence[jax.Array],
    used: jax.Array | None,
    *,
    pinned: bool,
) -> list[jax.Array]:
    """Write each array to its buffer, unless `used` is false.

    `pinned` fixes the memory layout of the arrays on TPUs. Otherwise XLA chooses a transposed
    layout for activations of the backward pass, and copies every saved activation. With the 8B
    model, a layer then needs 3% more cycles on v5p and 30% more on v6e, without attention kernels.
    Models with several layer types have nested loops, in which XLA would copy the full buffer in
    every tick.
    """

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if used is not None:
            # Arrays in host memory cannot be used in computations, so they are moved to the device
            # and back.
            space = jax.typeof(buffer).memory_space
            new, old = (jax.device_put(a, _DEVICE) for a in (value, read_slot(buffer, slot)))
            value = jax.device_put(jnp.where(used, new, old), space)
        return write_slot(buffer, slot, _pin_layout(value) if pinned else value)

    return [put(*pair) for pair in zip(buffers, values, strict=True)]


def _pin_layout(value: jax.Array) -> jax.Array:
    """Return the array with a TPU layout determined by its shape; arrays in host memory are
    returned unchanged.
    """
    if value.ndim < 2 or jax.typeof(value).memory_space == _HOST:
        return value
    return with_layout(value, layout_order(value.shape))


def layout_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims from major to minor, in an order that needs little padding on TPUs.

    A TPU tile has 8 x 128 or 16 x 128 elements. The last dim becomes the minor dim if it fills the
    lanes; otherwise the longest dim does. The longest remaining dim becomes the second-minor dim.
    For `[B, T, N, H]` the result is `(B, N, T, H)`, the order that the matmuls of attention use.
    """

    def longest(dims: Iterable[int]) -> int:
        return max(dims, key=lambda dim: (shape[dim], dim))

    dims = list(range(len(shape)))
    minor = dims[-1] if shape[-1] >= LANES else longest(dims)
    dims.remove(minor)
    second = longest(dims)
    dims.remove(second)
    return (*dims, second, minor)


Tree = Any
Idle = Literal["skip", "compute"]
State = TypeVar("State")


class SlotRow(NamedTuple):
    """Table entries of one slot type for one tick on one stage; all entries are scalars."""

    microbatch: jax.Array
    repeat: jax.Array
    inbox: jax.Array
    stash: jax.Array
    deferred: jax.Array
    window: jax.Array
    gradient: jax.Array
    any_work: jax.Array
    """Whether any stage has work in this slot during this tick."""
    any_layer_type: Any = None
    """`[L, types]`: whether any stage's chunk has a layer of this type at this position. Set only
    if all stages run the same number of iterations and there are several layer types."""


class SlotWork(NamedTuple):
    """Work of one slot on one stage."""

    row: SlotRow
    chunk: jax.Array
    """Index of the chunk within the stage's stacked weights."""
    gradient: jax.Array
    """Index of the chunk within the stage's stacked gradients."""
    first: jax.Array
    """Network index of the chunk's first layer."""
    size: jax.Array
    """Number of layers; 0 if idle."""
    num_iterations: jax.Array
    """Trip count of the layer loop."""
    inputs: Tree
    """Arrays of the microbatch."""
    layer_types: jax.Array
    """`[L]`: index of each layer's type."""
    indices_in_type: jax.Array
    """`[L]`: index of each layer among the chunk's layers of the same type."""
    seeds: Tree
    """Cotangents of the layers' losses."""
    exists: jax.Array | None = None
    """Whether the microbatch is part of the step; false if it only pads a prologue round. None
    means always true."""


class Reports(NamedTuple):
    """Losses and statistics that layers return in addition to activations, summed over a step."""

    losses: dict[str, jax.Array]
    """Float32 scalar losses, keyed by name."""
    statistics: dict[str, dict[str, Statistic]]
    """Float32 statistics `[R * L, ...]` with one entry per layer, keyed by layer type and name."""


@dataclass(frozen=True)
class LayerSlots:
    """Run the layers of a stage's chunks.

    Trees of weights, gradients and saved arrays are dicts keyed by layer type. The methods' `held`
    argument is the weight tree: all weights of the stage, or the prefetch window.
    """

    layers: dict[str, LayerFn]
    layout: LayerLayout
    weights: dict[str, LayerWeights]
    remat_policy: RematPolicy
    idle: Idle
    key: jax.Array | None
    uses_weight_window: bool
    """Whether weights and gradients are indexed by the table's window columns instead of by
    repeat."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Return the layer types that occur in chunks. Tables refer to a type by its index in this
        tuple.
        """
        return self.layout.ring_layer_types

    @property
    def is_heterogeneous(self) -> bool:
        """Return whether there are several layer types, so that each type needs an inner loop."""
        return len(self.layer_types) > 1

    @property
    def pins_layouts(self) -> bool:
        """Return whether the memory layout of saved arrays is fixed.

        XLA can gather an array with a fixed layout that is sharded over an automatic mesh axis.
        This costs less than the copies of full buffers in nested loops, but can cost more than the
        copies of single activations.
        """
        return self.is_heterogeneous or not auto_axes()

    def max_layers_per_chunk(self, kind: str) -> int:
        """Return the stride of per-layer arrays: the largest number of layers of one type in a
        chunk.
        """
        return self.layout.stacks[kind].max_layers_per_chunk

    def differentiate_layers(
        self, held: Tree, x: jax.Array, inputs: Tree, seeds: Tree, *, halves: bool
    ) -> dict[str, LayerVJP]:
        """Differentiate the layers in a separate trace, which adds no operations to this
        program.
        """
        found: dict[str, LayerVJP] = {}
        keep = RematPolicy("full") if self.remat_policy.remat == "chunk" else self.remat_policy

        def trace(held: Tree, x: jax.Array, inputs: Tree, seeds: Tree, index: jax.Array):
            constants = LayerConstants(inputs, index, self.key, seeds)
            for kind in self.layer_types:
                weights = self.weights[kind].layer(held[kind], index)
                found[kind] = differentiate_layer(
                    self.layers[kind],
                    keep,
                    weights,
                    x,
                    constants,
                    halves=halves,
                    trainable=self.weights[kind].trainable,
                )
            return index

        jax.eval_shape(trace, held, x, inputs, seeds, mark_varying(jnp.int32(0)))
        return found

    def empty_stash(self, pieces: dict[str, LayerVJP], count: int, like: jax.Array) -> Tree:
        """Return empty buffers for the saved activations of `count` chunks."""
        if self.remat_policy.remat == "chunk":
            return [empty_slots(count, like)]
        return self._empty_arrays(count, {kind: pieces[kind].saved for kind in self.layer_types})

    def empty_deferred(self, pieces: dict[str, LayerVJP], count: int) -> Tree:
        """Return empty buffers for the deferred weight-gradient inputs of `count` chunks."""
        return self._empty_arrays(count, {kind: pieces[kind].deferred for kind in self.layer_types})

    def _empty_arrays(self, count: int, kept: dict[str, tuple[SavedArray, ...]]) -> Tree:
        return {
            kind: [empty_slots(count * self.max_layers_per_chunk(kind), leaf) for leaf in leaves]
            for kind, leaves in kept.items()
        }

    def empty_reports(self, pieces: dict[str, LayerVJP]) -> Reports:
        """Return zeros for the losses and statistics of the layers in all chunks."""
        losses = {name for kind in self.layer_types for name in pieces[kind].losses}
        repeats = self.layout.ring.num_repeats

        def empty(kind: str, like: Any) -> Statistic:
            return mark_varying(empty_statistic(like, repeats * self.max_layers_per_chunk(kind)))

        return Reports(
            {name: mark_varying(jnp.float32(0)) for name in sorted(losses)},
            {
                kind: {name: empty(kind, like) for name, like in pieces[kind].statistics.items()}
                for kind in self.layer_types
                if pieces[kind].statistics
            },
        )

    def work(self, row: SlotRow, batch: Tree, seeds: Tree) -> SlotWork:
        """Return this stage's work in this slot."""
        mine = lambda table: read_slot(  # noqa: E731
            read_slot(mark_varying(jnp.asarray(table)), row.repeat), axis_index(STAGE)
        )
        size = jnp.where(row.microbatch >= 0, mine(self.layout.chunk_sizes), 0)
        skips, longest = self.idle == "skip", self.layout.max_layers_per_chunk
        return SlotWork(
            row,
            chunk=row.window if self.uses_weight_window else row.repeat,
            gradient=row.gradient if self.uses_weight_window else row.repeat,
            first=mine(self.layout.first_layer),
            size=size,
            num_iterations=size if skips else jnp.where(row.any_work > 0, longest, 0),
            inputs=select_microbatch(batch, row.microbatch),
            layer_types=mine(self.layout.layer_type_at),
            indices_in_type=mine(self.layout.index_in_type_at),
            seeds=seeds,
        )

    # Loops over layers.

    def _loop_layers(
        self,
        work: SlotWork,
        run: Callable[[str, jax.Array, jax.Array, jax.Array | None, State], State],
        state: State,
        *,
        last_first: bool = False,
    ) -> State:
        """Call `run(kind, step, place, used, state)` for each layer, and return the final state.

        `step` is the layer's index in its chunk, and `place` is its index among the chunk's layers
        of the same type. `used` is true if the iteration's result is kept, or None if every result
        is kept.
        """
        computes = self.idle == "compute"

        def turn(number: jax.Array, state: State) -> State:
            step = work.num_iterations - 1 - number if last_first else number
            used = step < work.size if computes else None
            if not self.is_heterogeneous:
                return run(self.layer_types[0], step, step, used, state)
            mine, place = read_slot(work.layer_types, step), read_slot(work.indices_in_type, step)
            for kind, name in enumerate(self.layer_types):
                is_mine = mine == kind
                if computes:
                    is_mine &= step < work.size
                here = read_slot(work.row.any_layer_type, step)[kind] > 0 if computes else is_mine

                def inner(extra: jax.Array, state: State, name=name, is_mine=is_mine) -> State:
                    used = is_mine if computes else None
                    return run(name, step, place + extra, used, state)

                with jax.named_scope(scopes.layer_type(name)):
                    state = lax.fori_loop(0, here.astype(jnp.int32), inner, state)
            return state

        return lax.fori_loop(0, work.num_iterations, turn, state)

    def _stack_offsets(self, number: jax.Array) -> dict[str, jax.Array]:
        """Return, for each layer type, the stack index of the first entry of chunk `number`."""
        return {kind: self.max_layers_per_chunk(kind) * number for kind in self.layer_types}

    def _constants(self, work: SlotWork, step: jax.Array) -> LayerConstants:
        return LayerConstants(work.inputs, work.first + step, self.key, work.seeds)

    def _add_reports(
        self,
        reports: Reports,
        kind: str,
        index: jax.Array,
        found: Sequence[Tree],
        counts: jax.Array | None,
    ) -> Reports:
        """Add one layer's losses and statistics to `reports`, unless `counts` is false."""
        losses, statistics = found
        if not losses and not statistics:
            return reports

        def add(total: jax.Array, found: jax.Array) -> jax.Array:
            found = found.astype(jnp.float32)
            return total + (found if counts is None else jnp.where(counts, found, 0))

        def add_at(totals: Statistic, found: Statistic) -> Statistic:
            return add_statistic(totals, found, index, counts)

        all_losses = reports.losses | {
            name: add(reports.losses[name], found) for name, found in losses.items()
        }
        if not statistics:
            return reports._replace(losses=all_losses)
        mine = map_statistics(add_at, reports.statistics[kind], dict(statistics))
        return Reports(all_losses, reports.statistics | {kind: mine})

    def forward(
        self, held: Tree, work: SlotWork, x: jax.Array, reports: Reports | None = None
    ) -> tuple[jax.Array, Reports | None]:
        """Run a chunk without saving activations, and return its output and the updated
        `reports`.
        """
        bases, of_reports = self._stack_offsets(work.chunk), self._stack_offsets(work.row.repeat)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            x, reports = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            constants = self._constants(work, step)
            y, *found = self.layers[kind](weights, x, *constants[:3])
            if reports is not None:
                counts = _logical_and(used, work.exists)
                reports = self._add_reports(reports, kind, of_reports[kind] + place, found, counts)
            return _pick(used, y, x), reports

        return self._loop_layers(work, run, (x, reports))

    def forward_and_save(
        self,
        pieces: dict[str, LayerVJP],
        held: Tree,
        work: SlotWork,
        x: jax.Array,
        stash: Tree,
        reports: Reports,
    ) -> tuple[jax.Array, Tree, Reports]:
        """Run a chunk and save its activations; return its output and the updated `stash` and
        `reports`.
        """
        if self.remat_policy.remat != "chunk":
            bases = self._stack_offsets(work.row.stash)
            return self._forward_layers_and_save(pieces, held, work, x, stash, bases, reports)
        kept = jnp.where(work.row.microbatch >= 0, x, read_slot(stash[0], work.row.stash))
        x, found = self.forward(held, work, x, reports)
        assert found is not None
        return x, [write_slot(stash[0], work.row.stash, kept)], found

    def _forward_layers_and_save(
        self,
        pieces: dict[str, LayerVJP],
        held: Tree,
        work: SlotWork,
        x: jax.Array,
        stash: Tree,
        stash_bases: dict[str, jax.Array],
        reports: Reports | None,
    ) -> tuple[jax.Array, Tree, Any]:
        """Run the layers and save their activations at `stash[kind][...][base + place]`."""
        bases, of_reports = self._stack_offsets(work.chunk), self._stack_offsets(work.row.repeat)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            x, stash, reports = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            y, saved, *found = pieces[kind].forward(weights, x, self._constants(work, step))
            if reports is not None:
                counts = _logical_and(used, work.exists)
                reports = self._add_reports(reports, kind, of_reports[kind] + place, found, counts)
            slot = stash_bases[kind] + place
            mine = write_slots(stash[kind], slot, saved, used, pinned=self.pins_layouts)
            return _pick(used, y, x), stash | {kind: mine}, reports

        return self._loop_layers(work, run, (x, stash, reports))

    def _saved_activations(
        self, pieces: dict[str, LayerVJP], held: Tree, work: SlotWork, stash: Tree
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """Return the saved activations, and the index of each layer type's first entry; for the
        `chunk` policy, recompute the activations.
        """
        if self.remat_policy.remat != "chunk":
            return stash, self._stack_offsets(work.row.stash)
        scratch = self._empty_arrays(1, {kind: pieces[kind].saved for kind in self.layer_types})
        bases = self._stack_offsets(jnp.zeros_like(work.row.stash))
        with jax.named_scope(scopes.RECOMPUTE):
            x = read_slot(stash[0], work.row.stash)
            _, saved, _ = self._forward_layers_and_save(pieces, held, work, x, scratch, bases, None)
        return saved, bases

    def backward(
        self,
        pieces: dict[str, LayerVJP],
        held: Tree,
        work: SlotWork,
        cotangent: jax.Array,
        stash: Tree,
        totals: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Return the gradient of a chunk's input, and the totals with the chunk's weight gradients
        added.
        """
        kept, kept_bases = self._saved_activations(pieces, held, work, stash)
        bases = self._stack_offsets(work.chunk)
        of_totals = self._stack_offsets(work.gradient)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            cotangent, totals = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            values = read_slots(kept[kind], kept_bases[kind] + place, pinned=self.pins_layouts)
            constants = self._constants(work, step)
            d_weights, d_x = pieces[kind].backward(weights, values, constants, cotangent)
            totals = self._accumulate(totals, kind, of_totals[kind] + place, d_weights, used)
            return _pick(used, d_x, cotangent), totals

        return self._loop_layers(work, run, (cotangent, totals), last_first=True)

    def input_grad(
        self,
        pieces: dict[str, LayerVJP],
        held: Tree,
        work: SlotWork,
        cotangent: jax.Array,
        stash: Tree,
        deferred: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Return the gradient of a chunk's input, and `deferred` with the arrays of this chunk
        added.
        """
        kept, kept_bases = self._saved_activations(pieces, held, work, stash)
        bases = self._stack_offsets(work.chunk)
        of_deferred = self._stack_offsets(work.row.deferred)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            cotangent, deferred = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            values = read_slots(kept[kind], kept_bases[kind] + place, pinned=self.pins_layouts)
            constants = self._constants(work, step)
            d_x, later = pieces[kind].input_grad(weights, values, constants, cotangent)
            slot = of_deferred[kind] + place
            mine = write_slots(deferred[kind], slot, later, used, pinned=self.pins_layouts)
            return _pick(used, d_x, cotangent), deferred | {kind: mine}

        return self._loop_layers(work, run, (cotangent, deferred), last_first=True)

    def weight_grad(
        self, pieces: dict[str, LayerVJP], work: SlotWork, deferred: Tree, totals: Tree
    ) -> Tree:
        """Add a chunk's weight gradients, computed from the deferred arrays, to the totals."""
        of_deferred = self._stack_offsets(work.row.deferred)
        of_totals = self._stack_offsets(work.gradient)

        def run(kind: str, step: Any, place: Any, used: Any, totals: Tree) -> Tree:
            later = read_slots(deferred[kind], of_deferred[kind] + place, pinned=self.pins_layouts)
            d_weights = pieces[kind].weight_grad(later, self._constants(work, step))
            return self._accumulate(totals, kind, of_totals[kind] + place, d_weights, used)

        return self._loop_layers(work, run, totals)

    def _accumulate(
        self, totals: Tree, kind: str, index: jax.Array, d_weights: Tree, used: jax.Array | None
    ) -> Tree:
        if used is not None:
            d_weights = jax.tree.map(lambda leaf: jnp.where(used, leaf, 0), d_weights)
        mine = self.weights[kind].accumulate(totals[kind], index, d_weights)
        return totals | {kind: mine}


def _logical_and(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    return other if one is None else one if other is None else one & other


def _pick(used: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    return new if used is None else jnp.where(used, new, old)
