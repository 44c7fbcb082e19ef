"""The tick loop: its table as arrays, its buffers, the loss slot, and the weight prefetch loop.

In a tick's loss slot, the loss head and the MTP heads process the microbatch that is leaving the
pipeline. The prefetch loop refills a window of gathered chunks (`weight_gather=window`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.mtp import MtpLossHeads, MtpResults, MtpTotals
from maxpipe.pipeline.prologue import PrologueBuffers, PrologueRow
from maxpipe.pipeline.slots import (
    Idle,
    LayerSlots,
    Reports,
    SlotRow,
    empty_slots,
    read_slot,
    select_microbatch,
    write_slot,
)
from maxpipe.pipeline.weights import LayerWeights, select_trainable
from maxpipe.schedule.table import Schedule, SlotColumns

Tree = Any


class TickRow(NamedTuple):
    """Table columns of one stage, for one tick or (before the loop starts) for all ticks."""

    forward: SlotRow
    backward: SlotRow
    weight: SlotRow
    arrivals: tuple[Any, ...]
    """Inbox slot in which each arriving message is stored."""
    embed: Any
    loss: Any
    embed_grad: Any
    prologue: PrologueRow


class TickTable(NamedTuple):
    """The schedule table as arrays: `[K, P]` or `[K]` for ticks, `[E, P]` or `[E]` for window
    events.
    """

    rows: TickRow
    gather_repeat: Any
    gather_slot: Any
    reduce_repeat: Any
    reduce_slot: Any

    @classmethod
    def from_schedule(cls, schedule: Schedule, layout: LayerLayout, idle: Idle) -> TickTable:
        """Return the schedule columns that the program uses."""
        names = [name for name in SlotRow._fields if not name.startswith("any_")]

        def columns(slots: SlotColumns) -> SlotRow:
            table: dict[str, Any] = {name: getattr(slots, name) for name in names}
            table["any_work"] = slots.active.any(axis=1)
            table["any_layer_type"] = _layer_types_at(slots, layout) if idle == "compute" else None
            return SlotRow(**table)

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
        """Return the PartitionSpecs of the table, which assign each stage its columns."""
        return jax.tree.map(
            lambda column: PartitionSpec(None, STAGE) if column.ndim == 2 else PartitionSpec(), self
        )

    def local_columns(self) -> TickTable:
        """Reshape this stage's columns from `[K, 1]` (its shard of `[K, P]`) to `[K]`."""
        return jax.tree.map(
            lambda column: column.reshape(len(column)) if column.ndim == 2 else column, self
        )


def _layer_types_at(slots: SlotColumns, layout: LayerLayout) -> np.ndarray | None:
    """Return whether any stage's chunk has a layer of each type at each position, as a bool array
    `[K, L, types]`.
    """
    if len(layout.ring_layer_types) == 1:
        return None
    kinds = layout.layer_type_at[np.maximum(slots.repeat, 0), np.arange(layout.ring.num_stages)]
    kinds = np.where(slots.active[..., None], kinds, -1)
    return (kinds[..., None] == np.arange(len(layout.ring_layer_types))).any(axis=1)


class Gradients(NamedTuple):
    """Float32 gradient accumulators of one device for the trainable parameters."""

    embedding: jax.Array | None
    layers: Tree
    final_norm: Tree
    head: jax.Array | None
    prologue: Tree
    mtp: Tree
    images: jax.Array | None = None
    """Gradient of the image embeddings `[M, B, N, K, F]`, in their dtype."""


class Buffers(NamedTuple):
    """State carried by the tick loop."""

    inbox: jax.Array
    """Received messages that have not yet been read, `[slots, B, T, D]`."""
    stash: Tree
    """Saved activations: arrays `[slots * L, ...]` keyed by layer type, or the input of each chunk
    `[slots, B, T, D]`."""
    deferred: Tree
    """Deferred inputs of the weight gradients: arrays `[slots * L, ...]`, keyed by layer type."""
    sent: dict[str, jax.Array]
    """Outputs to be sent to other stages in the next tick, keyed by port."""
    window: Tree
    """Gathered weights of the chunks in the prefetch window: `[slots * L, ...]` keyed by layer
    type."""
    partial: Tree
    """Gradients of the weights in `window`, before the reduction over devices."""
    outside: PrologueBuffers | None
    gradients: Gradients | None
    reports: Reports | None
    """Losses and statistics of the layers in the ring."""
    loss: jax.Array
    """Sums of the objective's loss and metrics `[R]`, or `[R, sources]` with several sources."""
    rows: Tree
    """Output of the `reader`: per-sequence arrays `[M, B, ...]`. None in programs that compute
    losses.
    """
    ahead: MtpResults | None
    """Losses and statistics of the MTP heads."""


class TickProgram(Protocol):
    """Interface of programs that the tick loop runs."""

    schedule: Schedule
    slots: LayerSlots
    weights: dict[str, LayerWeights]
    local_weights: Tree
    """Shards of the stage's weights, keyed by layer type."""

    def buffers(self) -> Buffers: ...

    def tick(self, carry: Buffers, row: TickRow) -> Buffers: ...


def run_weight_windows(program: TickProgram, table: TickTable) -> Buffers:
    """Run all ticks of a program, gathering weights into the prefetch window between ticks."""
    visits, weights, slots = program.schedule.weight_window, program.weights, program.slots
    # Iteration i runs the ticks between gathers i - 1 and i, overlapped with gather i. The first
    # iteration runs no ticks. The last iteration has nothing new to gather, so it repeats the
    # previous gather.
    stops = np.append(visits.gather_tick, program.schedule.num_ticks)
    starts = np.append(visits.gather_tick[:1], stops[:-1])
    # Number of gradient reductions that are due before each iteration. The remaining reductions run
    # after the loop.
    due = np.searchsorted(visits.reduce_tick, starts, side="right")

    def reduce_kind(kind: str, first: Any, last: Any, carry: Buffers) -> Buffers:
        length = slots.max_layers_per_chunk(kind)
        if not carry.partial[kind]:
            return carry  # no weight of this type is trainable

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


OutputReader = Callable[[LossHead, Tree, Any, jax.Array, Tree], Tree]
"""Function that maps (loss head, final norm, this stage's head columns, the last layer's output,
microbatch) to arrays `[B, ...]`.
"""


@dataclass(frozen=True)
class LossSlot:
    """Loss head and MTP heads, with their parameters. All stages run these heads on the same
    microbatch.
    """

    head: LossHead
    final_norm: Tree
    """Parameters of the final norm."""
    norm_is_trainable: Tree
    """Whether each parameter of the final norm has a gradient."""
    head_weights: LayerWeights
    local_head: Tree
    """Tree that stores this stage's head columns. The head is stored as a stack with a single
    layer."""
    batch: Tree
    """Arrays of all microbatches `[M, B, ...]`."""
    mtp: MtpLossHeads | None
    scale: jax.Array | None
    """Scaling factor applied to the gradients of the objective. None in forward-only programs."""

    def trainable_norm(self, tree: Tree) -> Tree:
        """Return the leaves of a final-norm tree whose parameters have gradients."""
        return select_trainable(tree, self.norm_is_trainable)

    def loss(self, carry: Buffers, row: TickRow, output: jax.Array) -> Buffers:
        """Add the loss of the microbatch that leaves the pipeline."""

        def work(loss: jax.Array) -> jax.Array:
            return loss + self.head.loss(*self._head_inputs(row.loss, output))

        with jax.named_scope(scopes.HEAD):
            loss = lax.cond(row.loss >= 0, work, lambda loss: loss, carry.loss)
        return carry._replace(loss=loss)

    def read_outputs(
        self, carry: Buffers, row: TickRow, output: jax.Array, reader: OutputReader
    ) -> Buffers:
        """Compute the reader's output for the microbatch that leaves the pipeline, and store it in
        `rows`.
        """

        def work(rows: Tree) -> Tree:
            outputs = reader(self.head, *self._head_inputs(row.loss, output))
            return jax.tree.map(lambda whole, own: write_slot(whole, row.loss, own), rows, outputs)

        with jax.named_scope(scopes.HEAD):
            rows = lax.cond(row.loss >= 0, work, lambda rows: rows, carry.rows)
        return carry._replace(rows=rows)

    def empty_outputs(self, reader: OutputReader, num_microbatches: int, like: jax.Array) -> Tree:
        """Return empty per-sequence arrays for the reader's output; `like` is an activation."""
        outputs = jax.eval_shape(lambda: reader(self.head, *self._head_inputs(jnp.int32(0), like)))
        return jax.tree.map(lambda leaf: empty_slots(num_microbatches, leaf), outputs)

    def loss_and_grad(
        self,
        carry: Buffers,
        row: TickRow,
        output: jax.Array,
        store: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Buffers:
        """Add the loss and gradients of the microbatch that leaves the pipeline.

        `store(inbox, cotangent)` returns the inbox with the loss cotangent.
        """
        gradients, scale = carry.gradients, self.scale
        assert gradients is not None and scale is not None
        totals = None
        if self.mtp is not None:
            assert carry.ahead is not None
            table = gradients.embedding if self.mtp.reads_embedding else None
            totals = MtpTotals(carry.ahead, gradients.mtp, table)

        def work(
            inbox: jax.Array, loss: jax.Array, norm: Tree, head: jax.Array, totals: MtpTotals | None
        ):
            norm_params, columns, last, inputs = self._head_inputs(row.loss, output)
            add_mtp = None
            if self.mtp is not None and totals is not None:
                trips = jnp.where(row.loss >= 0, self.mtp.num_heads, 0)
                add_mtp = partial(self.mtp.add, inputs, scale, trips, totals)
            new, totals = self.head.loss_and_grad(
                norm_params, columns, last, inputs, scale, add_mtp
            )
            # The gradients of frozen parameters are unused, so XLA does not compute them.
            norm = jax.tree.map(jnp.add, norm, self.trainable_norm(new.norm))
            head = self.head_weights.accumulate(head, 0, new.head)
            # Writing the cotangent here instead of returning it saves two passes over an
            # activation in the ticks without a loss.
            inbox = store(inbox, new.output)
            return inbox, loss + new.sums, norm, head, totals

        state = (carry.inbox, carry.loss, gradients.final_norm, gradients.head, totals)
        with jax.named_scope(scopes.HEAD):
            inbox, loss, norm, head, totals = lax.cond(
                row.loss >= 0, work, lambda *state: state, *state
            )
        gradients = gradients._replace(final_norm=norm, head=head)
        carry = carry._replace(inbox=inbox)
        if totals is None:
            return carry._replace(loss=loss, gradients=gradients)
        gradients = gradients._replace(mtp=totals.gradients)
        if totals.embedding is not None:
            gradients = gradients._replace(embedding=totals.embedding)
        return carry._replace(loss=loss, gradients=gradients, ahead=totals.results)

    def _head_inputs(
        self, microbatch: jax.Array, output: jax.Array
    ) -> tuple[Tree, Any, jax.Array, Tree]:
        inputs = select_microbatch(self.batch, microbatch)
        return self.final_norm, self.head_weights.layer(self.local_head, 0), output, inputs
