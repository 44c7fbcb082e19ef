"""What goes through the loop over ticks: rows of the table in, buffers around."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.ahead import Found
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.outside import OutsideBuffers, OutsideRow
from maxpipe.pipeline.slots import Idle, Reports, SlotRow
from maxpipe.schedule.table import Schedule, Slots

Tree = Any


class Row(NamedTuple):
    """One tick of the table as one stage sees it; arrays of all ticks before the loop."""

    forward: SlotRow
    backward: SlotRow
    weight: SlotRow
    arrivals: tuple[Any, ...]
    """Inbox slot for each of the schedule's arrivals."""
    embed: Any
    loss: Any
    embed_grad: Any
    outside: OutsideRow


class Table(NamedTuple):
    """The table as arrays: `[K, P]` or `[K]` for ticks, `[E, P]` or `[E]` for visits."""

    rows: Row
    gather_repeat: Any
    gather_slot: Any
    reduce_repeat: Any
    reduce_slot: Any

    @classmethod
    def of(cls, schedule: Schedule, layout: Layout, idle: Idle) -> Table:
        """What the program reads of a schedule."""
        names = [name for name in SlotRow._fields if not name.startswith("any_")]

        def columns(slots: Slots) -> SlotRow:
            found = {name: getattr(slots, name) for name in names}
            kinds = _any_kind(slots, layout) if idle == "compute" else None
            return SlotRow(**found, any_work=slots.active.any(axis=1), any_kind=kinds)  # type: ignore[arg-type]

        rows = Row(
            columns(schedule.forward),
            columns(schedule.backward),
            columns(schedule.weight),
            tuple(arrival.slot for arrival in schedule.arrivals),
            schedule.embed_microbatch,
            schedule.loss_microbatch,
            schedule.embed_grad_microbatch,
            OutsideRow(*(getattr(schedule.outside, name) for name in OutsideRow._fields)),
        )
        visits = schedule.visits
        events = (visits.gather_repeat, visits.gather_slot)
        table = cls(rows, *events, visits.reduce_repeat, visits.reduce_slot)
        return jax.tree.map(lambda column: np.asarray(column, np.int32), table)

    def specs(self) -> Table:
        """Partition of the table: each stage has its column."""
        return jax.tree.map(
            lambda column: PartitionSpec(None, STAGE) if column.ndim == 2 else PartitionSpec(), self
        )

    def of_this_stage(self) -> Table:
        """Columns that arrived as `[K, 1]`, a stage's part of `[K, P]`, as `[K]`."""
        return jax.tree.map(
            lambda column: column.reshape(len(column)) if column.ndim == 2 else column, self
        )


def _any_kind(slots: Slots, layout: Layout) -> np.ndarray | None:
    """bool `[K, L, kinds]`: at which position of its chunk any stage has a layer of a kind."""
    if len(layout.in_ring) == 1:
        return None
    kinds = layout.kind_at[np.maximum(slots.repeat, 0), np.arange(layout.ring.num_stages)]
    kinds = np.where(slots.active[..., None], kinds, -1)
    return (kinds[..., None] == np.arange(len(layout.in_ring))).any(axis=1)


class Gradients(NamedTuple):
    """Float32 accumulators of one device, of what is trained."""

    embedding: jax.Array | None
    layers: Tree
    final_norm: Tree
    head: jax.Array | None
    outside: Tree
    ahead: Tree


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
    outside: OutsideBuffers | None
    gradients: Gradients | None
    reports: Reports | None
    """What layers of the ring return besides their output."""
    loss: jax.Array
    """Sums of the objective's loss and reports `[R]`, of each source if there are several."""
    rows: Tree
    """What is read of rows in place of losses: arrays `[M, B, ...]`."""
    ahead: Found | None
    """What heads ahead find."""
