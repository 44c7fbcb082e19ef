"""What goes through the loop over ticks: rows of the table in, buffers around.

The loop over ticks where weights are gathered by visit: a window of chunks that is refilled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.mtp import MtpResults
from maxpipe.pipeline.prologue import PrologueBuffers, PrologueRow
from maxpipe.pipeline.slots import Idle, LayerSlots, Reports, SlotRow, read_slot
from maxpipe.pipeline.weights import LayerWeights
from maxpipe.schedule.table import Schedule, SlotColumns

Tree = Any


class TickRow(NamedTuple):
    """One tick of the table as one stage sees it; arrays of all ticks before the loop."""

    forward: SlotRow
    backward: SlotRow
    weight: SlotRow
    arrivals: tuple[Any, ...]
    """Inbox slot for each of the schedule's arrivals."""
    embed: Any
    loss: Any
    embed_grad: Any
    prologue: PrologueRow


class TickTable(NamedTuple):
    """The table as arrays: `[K, P]` or `[K]` for ticks, `[E, P]` or `[E]` for visits."""

    rows: TickRow
    gather_repeat: Any
    gather_slot: Any
    reduce_repeat: Any
    reduce_slot: Any

    @classmethod
    def from_schedule(cls, schedule: Schedule, layout: LayerLayout, idle: Idle) -> TickTable:
        """What the program reads of a schedule."""
        names = [name for name in SlotRow._fields if not name.startswith("any_")]

        def columns(slots: SlotColumns) -> SlotRow:
            found = {name: getattr(slots, name) for name in names}
            kinds = _layer_types_at(slots, layout) if idle == "compute" else None
            return SlotRow(**found, any_work=slots.active.any(axis=1), any_layer_type=kinds)  # type: ignore[arg-type]

        rows = TickRow(
            columns(schedule.forward),
            columns(schedule.backward),
            columns(schedule.weight),
            tuple(arrival.slot for arrival in schedule.arrivals),
            schedule.embed_microbatch,
            schedule.loss_microbatch,
            schedule.embed_grad_microbatch,
            PrologueRow(*(getattr(schedule.prologue, name) for name in PrologueRow._fields)),
        )
        visits = schedule.weight_window
        events = (visits.gather_repeat, visits.gather_slot)
        table = cls(rows, *events, visits.reduce_repeat, visits.reduce_slot)
        return jax.tree.map(lambda column: np.asarray(column, np.int32), table)

    def specs(self) -> TickTable:
        """Partition of the table: each stage has its column."""
        return jax.tree.map(
            lambda column: PartitionSpec(None, STAGE) if column.ndim == 2 else PartitionSpec(), self
        )

    def local_columns(self) -> TickTable:
        """Columns that arrived as `[K, 1]`, a stage's part of `[K, P]`, as `[K]`."""
        return jax.tree.map(
            lambda column: column.reshape(len(column)) if column.ndim == 2 else column, self
        )


def _layer_types_at(slots: SlotColumns, layout: LayerLayout) -> np.ndarray | None:
    """bool `[K, L, kinds]`: at which position of its chunk any stage has a layer of a kind."""
    if len(layout.ring_layer_types) == 1:
        return None
    kinds = layout.layer_type_at[np.maximum(slots.repeat, 0), np.arange(layout.ring.num_stages)]
    kinds = np.where(slots.active[..., None], kinds, -1)
    return (kinds[..., None] == np.arange(len(layout.ring_layer_types))).any(axis=1)


class Gradients(NamedTuple):
    """Float32 accumulators of one device, of what is trained."""

    embedding: jax.Array | None
    layers: Tree
    final_norm: Tree
    head: jax.Array | None
    prologue: Tree
    mtp: Tree


class Buffers(NamedTuple):
    """What the loop over ticks carries."""

    inbox: jax.Array
    """Messages that wait `[slots, B, T, D]`."""
    stash: Tree
    """What the forwards keep: by kind arrays `[slots * L, ...]` of each layer, or the input of each
    chunk `[slots, B, T, D]`."""
    deferred: Tree
    """What weight gradients wait for: by kind arrays `[slots * L, ...]`."""
    sent: dict[str, jax.Array]
    """What leaves for other stages in the next tick, by port."""
    window: Tree
    """Whole chunks of weights, by kind `[slots * L, ...]`, when gathered by visit."""
    partial: Tree
    """Their gradients, not yet reduced."""
    outside: PrologueBuffers | None
    gradients: Gradients | None
    reports: Reports | None
    """What layers of the ring return besides their output."""
    loss: jax.Array
    """Sums of the objective's loss and reports `[R]`, of each source if there are several."""
    rows: Tree
    """What is read of rows in place of losses: arrays `[M, B, ...]`."""
    ahead: MtpResults | None
    """What heads ahead find."""


class TickProgram(Protocol):
    """What the loop needs of a program."""

    schedule: Schedule
    slots: LayerSlots
    weights: dict[str, LayerWeights]
    local_weights: Tree
    """Shards of the stage's weights, by kind."""

    def buffers(self) -> Buffers: ...

    def tick(self, carry: Buffers, row: TickRow) -> Buffers: ...


def run_weight_windows(program: TickProgram, table: TickTable) -> Buffers:
    """All ticks of a program, from one gather to the next."""
    visits, weights, slots = program.schedule.weight_window, program.weights, program.slots
    # Turn i runs the ticks between gathers i - 1 and i while gather i is on its way. Of the
    # turns the first has no tick, and the last repeats the last gather, as there is no other.
    stops = np.append(visits.gather_tick, program.schedule.num_ticks)
    starts = np.append(visits.gather_tick[:1], stops[:-1])
    # Chunks to be reduced before a turn; what is due at the end comes after the last turn.
    due = np.searchsorted(visits.reduce_tick, starts, side="right")

    def reduce_kind(kind: str, first: Any, last: Any, carry: Buffers) -> Buffers:
        length = slots.max_layers_per_chunk(kind)
        if not carry.partial[kind]:
            return carry  # nothing of this kind is trained

        def reduce_layer(number: jax.Array, carry: Buffers) -> Buffers:
            gradients = carry.gradients
            assert gradients is not None
            event, layer = number // length, number % length
            layers, sums = weights[kind].reduce(
                gradients.layers[kind],
                length * read_slot(table.reduce_repeat, event) + layer,
                carry.partial[kind],
                length * read_slot(table.reduce_slot, event) + layer,
            )
            return carry._replace(
                partial=carry.partial | {kind: sums},
                gradients=gradients._replace(layers=gradients.layers | {kind: layers}),
            )

        return lax.fori_loop(length * first, length * last, reduce_layer, carry)

    def reduce(first: Any, last: Any, carry: Buffers) -> Buffers:
        if not program.schedule.trains:
            return carry
        for kind in weights:
            with jax.named_scope(scopes.REDUCE), jax.named_scope(scopes.layer_type(kind)):
                carry = reduce_kind(kind, first, last, carry)
        return carry

    def one_tick(tick: jax.Array, carry: Buffers) -> Buffers:
        return program.tick(carry, jax.tree.map(lambda leaf: read_slot(leaf, tick), table.rows))

    def one_turn(carry: Buffers, turn: tuple[jax.Array, ...]) -> tuple[Buffers, None]:
        start, stop, first_due, last_due, repeat, slot = turn
        with jax.named_scope(scopes.GATHER):
            chunk = {
                kind: each.gather_chunk(
                    program.local_weights[kind],
                    slots.max_layers_per_chunk(kind) * repeat,
                    slots.max_layers_per_chunk(kind),
                )
                for kind, each in weights.items()
            }
        carry = reduce(first_due, last_due, carry)
        with jax.named_scope(scopes.TICKS):
            carry = lax.fori_loop(start, stop, one_tick, carry)
        window = {
            kind: jax.tree.map(
                partial(_put, index=slot * slots.max_layers_per_chunk(kind)),
                carry.window[kind],
                chunk[kind],
            )
            for kind in weights
        }
        return carry._replace(window=window), None

    spans = (starts, stops, np.append(0, due[:-1]), due)
    turns = tuple(jnp.asarray(span, jnp.int32) for span in spans)
    events = (table.gather_repeat, table.gather_slot)
    turns += tuple(jnp.append(column, column[-1:]) for column in events)
    carry, _ = lax.scan(one_turn, program.buffers(), turns)
    return reduce(due[-1], len(visits.reduce_tick), carry)


def _put(held: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(held, new, index, 0)
