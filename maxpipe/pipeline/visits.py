"""The loop over ticks where weights are gathered by visit: a window of chunks that is refilled."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxpipe.pipeline import scopes
from maxpipe.pipeline.buffers import read
from maxpipe.pipeline.carry import Buffers, Row, Table
from maxpipe.pipeline.slots import LayerSlots
from maxpipe.pipeline.weights import LayerWeights
from maxpipe.schedule.table import Schedule

Tree = Any


class Ticks(Protocol):
    """What the loop needs of a program."""

    schedule: Schedule
    slots: LayerSlots
    weights: dict[str, LayerWeights]
    held: Tree
    """Shards of the stage's weights, by kind."""

    def buffers(self) -> Buffers: ...

    def tick(self, carry: Buffers, row: Row) -> Buffers: ...


def run_visits(program: Ticks, table: Table) -> Buffers:
    """All ticks of a program, from one gather to the next."""
    visits, weights, slots = program.schedule.visits, program.weights, program.slots
    # Turn i runs the ticks between gathers i - 1 and i while gather i is on its way. Of the
    # turns the first has no tick, and the last repeats the last gather, as there is no other.
    stops = np.append(visits.gather_tick, program.schedule.num_ticks)
    starts = np.append(visits.gather_tick[:1], stops[:-1])
    # Chunks to be reduced before a turn; what is due at the end comes after the last turn.
    due = np.searchsorted(visits.reduce_tick, starts, side="right")

    def reduce_kind(kind: str, first: Any, last: Any, carry: Buffers) -> Buffers:
        length = slots.length(kind)
        if not carry.partial[kind]:
            return carry  # nothing of this kind is trained

        def reduce_layer(number: jax.Array, carry: Buffers) -> Buffers:
            gradients = carry.gradients
            assert gradients is not None
            event, layer = number // length, number % length
            layers, sums = weights[kind].reduce(
                gradients.layers[kind],
                length * read(table.reduce_repeat, event) + layer,
                carry.partial[kind],
                length * read(table.reduce_slot, event) + layer,
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
            with jax.named_scope(scopes.REDUCE), jax.named_scope(scopes.of_kind(kind)):
                carry = reduce_kind(kind, first, last, carry)
        return carry

    def one_tick(tick: jax.Array, carry: Buffers) -> Buffers:
        return program.tick(carry, jax.tree.map(lambda leaf: read(leaf, tick), table.rows))

    def one_turn(carry: Buffers, turn: tuple[jax.Array, ...]) -> tuple[Buffers, None]:
        start, stop, first_due, last_due, repeat, slot = turn
        with jax.named_scope(scopes.GATHER):
            chunk = {
                kind: each.gather_chunk(
                    program.held[kind], slots.length(kind) * repeat, slots.length(kind)
                )
                for kind, each in weights.items()
            }
        carry = reduce(first_due, last_due, carry)
        with jax.named_scope(scopes.TICKS):
            carry = lax.fori_loop(start, stop, one_tick, carry)
        window = {
            kind: jax.tree.map(
                partial(_put, index=slot * slots.length(kind)), carry.window[kind], chunk[kind]
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
