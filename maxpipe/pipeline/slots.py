"""What a stage does in a slot: its chunk's layers, forward or backward.

The layers of a slot run in a loop whose number of turns comes from the table, none when idle, so
that no conditional ever passes a buffer through. Layers of unlike kinds follow the same rule: each
turn has a loop of no or one turn for each kind, and what is read from a kind's stacks is indexed by
that loop's counter, too, so that nothing in it is loop-invariant and would be copied out of it.
With `idle="compute"` every stage turns as often as the busiest one and throws away what does not
count: control flow that is the same everywhere.

Arrays that wait between slots: buffers of one slot each, read and written by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import axis_index, mark_varying, with_layout
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.remat import (
    LayerConstants,
    LayerFn,
    LayerVJP,
    RematPolicy,
    SavedArray,
    differentiate_layer,
)
from maxpipe.pipeline.weights import LayerWeights

LANES = 128
"""Length of a TPU's vector registers: shorter minor dims are padded to it."""
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def empty_slots(count: int, like: Any) -> jax.Array:
    """Slots for arrays like this one, where it is kept; their contents are undefined."""
    empty = mark_varying(lax.empty((count, *like.shape), like.dtype))
    return jax.device_put(empty, _HOST) if isinstance(like, SavedArray) and like.on_host else empty


def read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """The contents of a slot."""
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)


def write_slot(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """The buffer with the value in a slot."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def select_microbatch(batch: Tree, index: jax.Array) -> Tree:
    """The batch's arrays of one microbatch, of microbatch 0 when idle."""
    return jax.tree.map(lambda leaf: read_slot(leaf, jnp.maximum(index, 0)), batch)


def read_slots(buffers: Sequence[jax.Array], slot: jax.Array, *, pinned: bool) -> list[jax.Array]:
    """What each buffer has in a slot; `pinned` as it was written."""
    values = [read_slot(buffer, slot) for buffer in buffers]
    return [_pin_layout(value) for value in values] if pinned else values


def write_slots(
    buffers: Sequence[jax.Array],
    slot: jax.Array,
    values: Sequence[jax.Array],
    used: jax.Array | None,
    *,
    pinned: bool,
) -> list[jax.Array]:
    """Each value into its buffer, where the turn counts.

    `pinned` fixes how the values lie in memory. XLA carries the layout that the writing loop
    prefers into the loop that reads, but through one loop only: in loops within loops, as unlike
    layers have them, reader and writer choose by themselves, and the whole buffer is copied in each
    tick. Without such loops XLA's own choice is faster by some percent.
    """

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if used is not None:
            # Nothing is computed in host memory: what is kept there comes and goes.
            space = jax.typeof(buffer).memory_space
            new, old = (jax.device_put(a, _DEVICE) for a in (value, read_slot(buffer, slot)))
            value = jax.device_put(jnp.where(used, new, old), space)
        return write_slot(buffer, slot, _pin_layout(value) if pinned else value)

    return [put(*pair) for pair in zip(buffers, values, strict=True)]


def _pin_layout(value: jax.Array) -> jax.Array:
    """The value, on TPUs laid out by its shape alone; what is in host memory stays as it is."""
    if value.ndim < 2 or jax.typeof(value).memory_space == _HOST:
        return value
    return with_layout(value, layout_order(value.shape))


def layout_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Dims from major to minor that waste little of a TPU's tiles, of 8 or 16 by 128 elements.

    The last dim is minor if it fills the lanes, else the longest; before it stands the longest of
    the others: of `[B, T, N, H]` that is `(B, N, T, H)`, with which attention multiplies.
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
    """One kind of slot in one tick as one stage sees it; entries are scalars."""

    microbatch: jax.Array
    repeat: jax.Array
    inbox: jax.Array
    stash: jax.Array
    deferred: jax.Array
    window: jax.Array
    gradient: jax.Array
    any_work: jax.Array
    """Whether any stage works in this slot."""
    any_layer_type: Any = None
    """`[L, kinds]`: whether any stage has a layer of this kind at this position of its chunk. Where
    all stages turn alike and there is more than one kind."""


class SlotWork(NamedTuple):
    """What one slot does, as scalars that differ between stages."""

    row: SlotRow
    chunk: jax.Array
    """Number of its chunk among the weights that are held."""
    gradient: jax.Array
    """The same among the gradients."""
    first: jax.Array
    """Position of its first layer in the network."""
    size: jax.Array
    """Number of layers, 0 when idle."""
    num_iterations: jax.Array
    """Turns of the layer loop."""
    inputs: Tree
    """The microbatch's arrays."""
    layer_types: jax.Array
    """`[L]`: number of each layer's kind."""
    indices_in_type: jax.Array
    """`[L]`: its place among the layers of that kind in the chunk."""
    seeds: Tree
    """Cotangents of the layers' losses."""
    exists: jax.Array | None = None
    """Whether its microbatch is one of the step's; None: it is."""


class Reports(NamedTuple):
    """What layers return besides their output, summed over a step."""

    losses: dict[str, jax.Array]
    """Scalars, float32."""
    statistics: dict[str, dict[str, jax.Array]]
    """For each kind arrays of each layer `[R * L, ...]`, float32."""


@dataclass(frozen=True)
class LayerSlots:
    """Runs the layers of a stage's chunks.

    Trees of weights, gradients and kept arrays are dicts by kind of layer. `held` in the methods is
    what weights are read from: all that the stage holds, or the window.
    """

    layers: dict[str, LayerFn]
    layout: LayerLayout
    weights: dict[str, LayerWeights]
    remat_policy: RematPolicy
    idle: Idle
    key: jax.Array | None
    uses_weight_window: bool
    """Weights and gradients lie where the table's window columns say, not by repeat."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kinds of the layers in the chunks; tables count them in this order."""
        return self.layout.ring_layer_types

    @property
    def is_heterogeneous(self) -> bool:
        """Whether there is more than one kind, and so a loop of a kind's own in each turn."""
        return len(self.layer_types) > 1

    def max_layers_per_chunk(self, kind: str) -> int:
        """The most layers of a kind in one chunk: the stride of all that is kept by layer."""
        return self.layout.stacks[kind].max_layers_per_chunk

    def differentiate_layers(
        self, held: Tree, x: jax.Array, inputs: Tree, seeds: Tree, *, halves: bool
    ) -> dict[str, LayerVJP]:
        """The layers differentiated, traced aside: nothing of it enters this program."""
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
        """Room for what `count` chunks keep for their backward."""
        if self.remat_policy.remat == "chunk":
            return [empty_slots(count, like)]
        return self._empty_arrays(count, {kind: pieces[kind].saved for kind in self.layer_types})

    def empty_deferred(self, pieces: dict[str, LayerVJP], count: int) -> Tree:
        """Room for what `count` chunks keep for their weights' gradients."""
        return self._empty_arrays(count, {kind: pieces[kind].deferred for kind in self.layer_types})

    def _empty_arrays(self, count: int, kept: dict[str, tuple[SavedArray, ...]]) -> Tree:
        return {
            kind: [empty_slots(count * self.max_layers_per_chunk(kind), leaf) for leaf in leaves]
            for kind, leaves in kept.items()
        }

    def empty_reports(self, pieces: dict[str, LayerVJP]) -> Reports:
        """Zeros for what the layers of all chunks return besides their output."""
        losses = {name for kind in self.layer_types for name in pieces[kind].losses}
        repeats = self.layout.ring.num_repeats

        def zeros(kind: str, shape: tuple[int, ...]) -> jax.Array:
            return mark_varying(
                jnp.zeros((repeats * self.max_layers_per_chunk(kind), *shape), jnp.float32)
            )

        return Reports(
            {name: mark_varying(jnp.float32(0)) for name in sorted(losses)},
            {
                kind: {name: zeros(kind, shape) for name, shape in pieces[kind].statistics.items()}
                for kind in self.layer_types
                if pieces[kind].statistics
            },
        )

    def work(self, row: SlotRow, batch: Tree, seeds: Tree) -> SlotWork:
        """What this slot does on this stage."""
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

    # Layers one after the other.

    def _loop_layers(
        self,
        work: SlotWork,
        run: Callable[[str, jax.Array, jax.Array, jax.Array | None, State], State],
        state: State,
        *,
        last_first: bool = False,
    ) -> State:
        """The state after each layer: `run(kind, step, place, used, state)`.

        `step` is a layer's position in its chunk, `place` that among the chunk's layers of its
        kind; `used` says whether the turn counts, None when every turn does.
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
        """Where the stacks of chunk `number` begin, by kind."""
        return {kind: self.max_layers_per_chunk(kind) * number for kind in self.layer_types}

    def _constants(self, work: SlotWork, step: jax.Array) -> LayerConstants:
        """What a layer reads besides weights and input."""
        return LayerConstants(work.inputs, work.first + step, self.key, work.seeds)

    def _add_reports(
        self,
        reports: Reports,
        kind: str,
        index: jax.Array,
        found: Sequence[Tree],
        counts: jax.Array | None,
    ) -> Reports:
        """With what one layer returned, losses and statistics, added if it counts."""
        losses, statistics = found
        if not losses and not statistics:
            return reports

        def add(total: jax.Array, found: jax.Array) -> jax.Array:
            found = found.astype(jnp.float32)
            return total + (found if counts is None else jnp.where(counts, found, 0))

        def add_at(totals: jax.Array, found: jax.Array) -> jax.Array:
            return write_slot(totals, index, add(read_slot(totals, index), found))

        all_losses = reports.losses | {
            name: add(reports.losses[name], found) for name, found in losses.items()
        }
        if not statistics:
            return reports._replace(losses=all_losses)
        mine = jax.tree.map(add_at, reports.statistics[kind], dict(statistics))
        return Reports(all_losses, reports.statistics | {kind: mine})

    def forward(
        self, held: Tree, work: SlotWork, x: jax.Array, reports: Reports | None = None
    ) -> tuple[jax.Array, Reports | None]:
        """The chunk's output and nothing else, and the reports with its own."""
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
        """The chunk's output, the stash with what its backward needs, and the reports."""
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
        """The chunk's output; what a layer keeps goes to `stash[kind][...][base + place]`."""
        bases, of_reports = self._stack_offsets(work.chunk), self._stack_offsets(work.row.repeat)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            x, stash, reports = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            y, saved, *found = pieces[kind].forward(weights, x, self._constants(work, step))
            if reports is not None:
                counts = _logical_and(used, work.exists)
                reports = self._add_reports(reports, kind, of_reports[kind] + place, found, counts)
            slot = stash_bases[kind] + place
            mine = write_slots(stash[kind], slot, saved, used, pinned=self.is_heterogeneous)
            return _pick(used, y, x), stash | {kind: mine}, reports

        return self._loop_layers(work, run, (x, stash, reports))

    def _saved_activations(
        self, pieces: dict[str, LayerVJP], held: Tree, work: SlotWork, stash: Tree
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """What the layers kept, and where each kind begins; `chunk` recomputes the chunk for it."""
        if self.remat_policy.remat != "chunk":
            return stash, self._stack_offsets(work.row.stash)
        scratch = self._empty_arrays(1, {kind: pieces[kind].saved for kind in self.layer_types})
        bases = self._stack_offsets(jnp.zeros_like(work.row.stash))
        with jax.named_scope(scopes.RECOMPUTE):
            x = read_slot(stash[0], work.row.stash)
            return self._forward_layers_and_save(pieces, held, work, x, scratch, bases, None)[
                1
            ], bases

    def backward(
        self,
        pieces: dict[str, LayerVJP],
        held: Tree,
        work: SlotWork,
        cotangent: jax.Array,
        stash: Tree,
        totals: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Both gradients of a chunk, its last layer first: the input's, and the totals."""
        (kept, kept_bases), bases = (
            self._saved_activations(pieces, held, work, stash),
            self._stack_offsets(work.chunk),
        )
        of_totals = self._stack_offsets(work.gradient)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            cotangent, totals = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            values = read_slots(kept[kind], kept_bases[kind] + place, pinned=self.is_heterogeneous)
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
        """The gradient of a chunk's input; what its weights' gradients need is deferred."""
        (kept, kept_bases), bases = (
            self._saved_activations(pieces, held, work, stash),
            self._stack_offsets(work.chunk),
        )
        of_deferred = self._stack_offsets(work.row.deferred)

        def run(kind: str, step: Any, place: Any, used: Any, state: Any) -> Any:
            cotangent, deferred = state
            weights = self.weights[kind].layer(held[kind], bases[kind] + place)
            values = read_slots(kept[kind], kept_bases[kind] + place, pinned=self.is_heterogeneous)
            constants = self._constants(work, step)
            d_x, later = pieces[kind].input_grad(weights, values, constants, cotangent)
            slot = of_deferred[kind] + place
            mine = write_slots(deferred[kind], slot, later, used, pinned=self.is_heterogeneous)
            return _pick(used, d_x, cotangent), deferred | {kind: mine}

        return self._loop_layers(work, run, (cotangent, deferred), last_first=True)

    def weight_grad(
        self, pieces: dict[str, LayerVJP], work: SlotWork, deferred: Tree, totals: Tree
    ) -> Tree:
        """The totals with the gradients of a chunk's weights, from what was deferred."""
        of_deferred, of_totals = (
            self._stack_offsets(work.row.deferred),
            self._stack_offsets(work.gradient),
        )

        def run(kind: str, step: Any, place: Any, used: Any, totals: Tree) -> Tree:
            later = read_slots(
                deferred[kind], of_deferred[kind] + place, pinned=self.is_heterogeneous
            )
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
