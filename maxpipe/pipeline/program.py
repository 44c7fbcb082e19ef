"""The program that a device runs for one step: buffers, messages, and the order of work in a tick.

The inputs are a network and its execution plan on a ring of stages. The code is per-device code, as
in shard_map. Stages differ only in their columns of the schedule table. Collectives over the stage
axis run between slots, where all stages execute the same code, and never inside a slot.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import (
    axis_index,
    broadcast_from,
    map_statistics,
    mark_varying,
    reduce_statistic,
    ring_shift,
    sum_over,
)
from maxpipe.parallel.mesh import STAGE, TOKEN_AXES
from maxpipe.pipeline.images import ImageInputs
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.mtp import MtpLossHeads, merge_reports
from maxpipe.pipeline.network import Network
from maxpipe.pipeline.prologue import Embedding, PrologueLayers
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.pipeline.slots import (
    Idle,
    LayerSlots,
    Reports,
    SlotRow,
    SlotWork,
    empty_slots,
    read_slot,
    select_microbatch,
    write_slot,
)
from maxpipe.pipeline.tick_loop import (
    Buffers,
    Gradients,
    LossSlot,
    OutputReader,
    TickRow,
    TickTable,
    run_weight_windows,
)
from maxpipe.pipeline.weights import (
    GatherMode,
    LayerWeights,
    merge_stacked_dims,
    select_trainable,
    sum_gradient,
    zero1_shard,
)
from maxpipe.schedule.table import DISCARD, Schedule

Tree = Any


class StepProgram:
    """Run a step's computation on one device."""

    def __init__(
        self,
        plan: PipelinePlan,
        schedule: Schedule,
        params: Tree,
        batch: Tree,
        key: jax.Array | None,
        scale: jax.Array | None,
        reader: OutputReader | None = None,
        by_token: jax.Array | None = None,
    ):
        """Initialize the state of one step.

        `scale` multiplies the gradients of the objective. `by_token` multiplies the gradients of
        the layers' losses, which are sums over tokens. Forward-only programs need neither `scale`
        nor `by_token`. In a forward-only program, a `reader` returns per-sequence arrays instead of
        losses.
        """
        self.scale, self.reader = scale, reader
        self.seeds = (
            {}
            if by_token is None
            else {name: weight * by_token for name, weight in plan.network.loss_weights.items()}
        )
        self.plan, self.schedule, self.network = plan, schedule, plan.network
        self.stage = axis_index(STAGE)
        # Reshape this device's sequences `[M * B, ...]` to microbatches `[M, B, ...]`.
        self.batch = jax.tree.map(
            lambda leaf: leaf.reshape(schedule.num_microbatches, -1, *leaf.shape[1:]),
            mark_varying(batch),
        )
        self.images = ImageInputs.take_from(
            self.batch, trainable=self.network.has_image_gradients and schedule.trains
        )
        # If all chunks fit in the prefetch window, no chunk is ever evicted, so weights are
        # gathered once per step.
        self.uses_weight_window = (
            schedule.weight_window.num_chunk_slots > 0 and plan.weight_gather == "window"
        )
        key = None if key is None else mark_varying(key)
        self.embedding = Embedding(
            plan.weight_shardings["embedding"],
            self.network.embed_scale,
            self.network.num_carried,
            self.network.num_streams,
        )
        self.table = self.embedding.prepare(params["embedding"], self.network.compute_dtype)
        self.is_tied = "head" not in params
        self.loss_slot = self._build_loss_slot(params, key)
        self._prepare_layers(params["layers"], key)
        self.prologue = (
            self._build_prologue(params["outside"], key) if "outside" in params else None
        )

    def _build_loss_slot(self, params: Tree, key: jax.Array | None) -> LossSlot:
        plan, network = self.plan, self.network
        shardings, dtype = plan.weight_shardings, network.compute_dtype
        final_norm = jax.tree.map(
            lambda leaf, sharding: mark_varying(
                leaf if sharding.has_own_dtype else leaf.astype(dtype)
            ),
            params["final_norm"],
            shardings["final_norm"],
        )
        if self.is_tied:
            head, sharding = params["embedding"].T, shardings["embedding"].transposed
        else:
            head, sharding = params["head"], shardings["head"]
        weights = LayerWeights(plan.prologue_gather_mode, sharding, dtype)
        return LossSlot(
            LossHead(
                network.reduce,
                network.norm,
                self.schedule.ring.last_stage,
                network.vocab_size,
                network.objective,
                network.logit_scale,
                network.final_logit_softcapping,
                network.loss_block_tokens,
                network.num_sources,
            ),
            final_norm,
            plan.trainable["final_norm"],
            weights,
            weights.prepare(head[None]),  # a stack of a single layer
            self.batch,
            self._build_mtp(params["ahead"], key) if plan.has_mtp(self.schedule) else None,
            self.scale,
        )

    def _build_mtp(self, params: Tree, key: jax.Array | None) -> MtpLossHeads:
        plan, network = self.plan, self.network
        shardings = _unstacked_shardings(plan.weight_shardings["ahead"], num_stacked=1)
        weights = LayerWeights(plan.prologue_gather_mode, shardings, network.compute_dtype)
        assert network.mtp is not None
        return MtpLossHeads(
            network.mtp,
            weights,
            weights.prepare(params),
            self.embedding._replace(num_streams=1),
            self.table,
            key,
            self.seeds,
        )

    def _prepare_layers(self, params: Tree, key: jax.Array | None) -> None:
        plan, dtype = self.plan, self.network.compute_dtype
        mode = plan.weight_gather
        mode = "step" if mode == "window" and not self.uses_weight_window else mode
        # Merge the stacked dims [R, 1, L] of this stage into one dim.
        self.weights = {
            kind: LayerWeights(mode, _unstacked_shardings(divisions, num_stacked=3), dtype)
            for kind, divisions in plan.weight_shardings["layers"].items()
        }
        flat = jax.tree.map(merge_stacked_dims, params)
        self.local_weights = {kind: self.weights[kind].prepare(flat[kind]) for kind in flat}
        self.slots = LayerSlots(
            self.network.layers,
            plan.layout,
            self.weights,
            plan.remat_policy,
            plan.idle,
            key,
            self.uses_weight_window,
        )
        if self.schedule.trains:
            held = self._empty_weight_window(1) if self.uses_weight_window else self.local_weights
            like, inputs = self._activation(), self._first_inputs()
            halves = self.schedule.mixed
            self.layer_vjps = self.slots.differentiate_layers(
                held, like, inputs, self.seeds, halves=halves
            )

    def _build_prologue(self, params: Tree, key: jax.Array | None) -> PrologueLayers:
        """Return the prologue layers, which form one chunk that is replicated on every stage."""
        plan, trains = self.plan, self.schedule.trains
        mode, dtype = plan.prologue_gather_mode, self.network.compute_dtype
        weights = {
            kind: LayerWeights(mode, _unstacked_shardings(divisions, num_stacked=1), dtype)
            for kind, divisions in plan.weight_shardings["outside"].items()
        }
        held = {kind: weights[kind].prepare(params[kind]) for kind in params}
        front = plan.layout.prologue
        slots = LayerSlots(
            self.network.layers, front, weights, plan.remat_policy, "skip", key, False
        )
        pieces = None
        if trains:
            like, inputs = self._activation(), self._first_inputs()
            pieces = slots.differentiate_layers(held, like, inputs, self.seeds, halves=False)
        ends = (self.embedding, self.table, self.images)
        return PrologueLayers(slots, held, self.schedule, self.batch, pieces, self.seeds, *ends)

    def _empty_weight_window(self, num_chunks: int) -> Tree:
        return {
            kind: weights.empty_window(
                self.local_weights[kind], num_chunks * self.slots.max_layers_per_chunk(kind)
            )
            for kind, weights in self.weights.items()
        }

    def _activation(self) -> jax.Array:
        """Return an uninitialized activation array `[B, T, D]`."""
        like = jax.eval_shape(self.embedding.lookup, self.table, self.batch["tokens"][0])
        return mark_varying(lax.empty(like.shape, like.dtype))

    def _first_inputs(self) -> Tree:
        """Return the arrays of the first microbatch; only their shapes are used."""
        return select_microbatch(self.batch, mark_varying(jnp.int32(0)))

    def buffers(self) -> Buffers:
        """Return empty buffers with the sizes that the schedule declares."""
        empty, schedule, mtp = self._activation(), self.schedule, self.loss_slot.mtp
        stash: Tree = []
        deferred: Tree = []
        gradients, reports, sums, visits = None, None, None, schedule.weight_window
        if schedule.trains:
            with jax.named_scope(scopes.SAVED):
                stash = self.slots.empty_stash(self.layer_vjps, schedule.num_stash, empty)
            if schedule.mixed:
                with jax.named_scope(scopes.DEFERRED):
                    deferred = self.slots.empty_deferred(self.layer_vjps, schedule.num_deferred)
            with jax.named_scope(scopes.GRADIENTS):
                sums, gradients = self._empty_gradients()
            reports = self.slots.empty_reports(self.layer_vjps)
        with jax.named_scope(scopes.INBOX):
            inbox = empty_slots(schedule.num_inbox, empty)
        window = None
        if self.uses_weight_window:
            with jax.named_scope(scopes.WINDOW):
                window = self._empty_weight_window(visits.num_chunk_slots)
        return Buffers(
            inbox=inbox,
            stash=stash,
            deferred=deferred,
            sent=dict.fromkeys(self._ports_between_ticks(), empty),
            window=window,
            partial=sums,
            outside=self.prologue and self.prologue.buffers(empty),
            gradients=gradients,
            reports=reports,
            loss=mark_varying(jnp.zeros(self.network.sums_shape)),
            rows=self.reader
            and self.loss_slot.empty_outputs(self.reader, schedule.num_microbatches, empty),
            ahead=mtp and mtp.empty_results(self._first_inputs()),
        )

    def _empty_gradients(self) -> tuple[Tree, Gradients]:
        """Return zeros for the gradients in the prefetch window, and for all other gradients."""
        window, sums, mtp = self.schedule.weight_window, None, self.loss_slot.mtp
        if self.uses_weight_window:
            sums = {
                kind: weights.empty_gradient_window(
                    self.local_weights[kind],
                    window.num_gradient_slots * self.slots.max_layers_per_chunk(kind),
                )
                for kind, weights in self.weights.items()
            }
        wide = partial(jnp.zeros_like, dtype=jnp.float32)
        gradients = Gradients(
            wide(self.table) if self.embedding.weight_sharding.trainable else None,
            {
                kind: weights.zeros(self.local_weights[kind])
                for kind, weights in self.weights.items()
            },
            jax.tree.map(wide, self.loss_slot.trainable_norm(self.loss_slot.final_norm)),
            self.loss_slot.head_weights.zeros(self.loss_slot.local_head),
            self.prologue and self.prologue.zeros(),
            mtp and mtp.zeros(),
            self.images and self.images.zeros(),
        )
        return sums, mark_varying(gradients)

    def _ports_between_ticks(self) -> tuple[str, ...]:
        """Return the message sources (`Arrival.port`) whose outputs are sent during the next
        tick.
        """
        if self.schedule.mixed:
            return ("X",)
        if not self.schedule.trains:
            return ()
        return ("F", "B") if self.schedule.delayed else ("B",)

    # A tick.

    def tick(self, carry: Buffers, row: TickRow) -> Buffers:
        """Run one tick of the schedule."""
        return self._mixed_tick(carry, row) if self.schedule.mixed else self._typed_tick(carry, row)

    def _typed_tick(self, carry: Buffers, row: TickRow) -> Buffers:
        """Run the forward slot, the loss head and the backward slot.

        The transfer of the previous tick's cotangent overlaps with the forward slot. The transfer
        of the activation overlaps with the loss head and the backward slot. In delayed schedules,
        both transfers overlap with the full tick.
        """
        delayed, trains = self.schedule.delayed, self.schedule.trains
        travelling = self._send(carry.sent)
        output, carry = self._forward_slot(carry, row)
        if not delayed:
            travelling |= self._send({"F": output})
        sent = {"F": output}
        if trains:
            if not delayed:
                carry = self._receive(carry, row, travelling, "B")
            carry = self._loss_and_grad(carry, row, output)
            sent["B"], carry = self._backward_slot(carry, row)
            carry = self._embed_grad(carry, row, sent["B"])
        elif self.reader is not None:
            carry = self.loss_slot.read_outputs(carry, row, output, self.reader)
        else:
            carry = self.loss_slot.loss(carry, row, output)
        carry = self._receive(carry, row, travelling, "FB" if delayed else "F")
        carry = self._receive(carry, row, self._local_messages(sent), "FB")
        return carry._replace(sent={port: sent[port] for port in carry.sent})

    def _mixed_tick(self, carry: Buffers, row: TickRow) -> Buffers:
        """Run one action of any type; all communication between stages precedes or follows the
        action.
        """
        delayed = self.schedule.delayed
        travelling = self._send(carry.sent) if delayed else {}
        carry = self._loss_and_grad(carry, row, carry.sent["X"])
        output, carry = self._forward_slot(carry, row)
        d_input, carry = self._input_grad_slot(carry, row)
        carry = self._weight_grad_slot(carry, row)
        sent = {"X": jnp.where(row.forward.microbatch >= 0, output, d_input)}
        if not delayed:
            travelling = self._send(sent)
        carry = self._embed_grad(carry, row, d_input)
        carry = self._receive(carry, row, travelling | self._local_messages(sent), "X")
        return carry._replace(sent=sent)

    # Messages.

    def _send(self, outputs: dict[str, jax.Array]) -> dict[int, jax.Array]:
        """Send outputs to neighboring stages, and return the received messages, keyed by index in
        `schedule.arrivals`.
        """
        ways = enumerate(self.schedule.arrivals)
        with jax.named_scope(scopes.SEND):
            return {
                number: ring_shift(
                    outputs[way.port], STAGE, way.direction, self.schedule.num_stages
                )
                for number, way in ways
                if way.direction and way.port in outputs
            }

    def _local_messages(self, outputs: dict[str, jax.Array]) -> dict[int, jax.Array]:
        """Return the messages that a stage sends to itself, keyed by index in
        `schedule.arrivals`.
        """
        return {
            number: outputs[way.port]
            for number, way in enumerate(self.schedule.arrivals)
            if way.direction == 0 and way.port in outputs
        }

    def _receive(
        self, carry: Buffers, row: TickRow, messages: dict[int, jax.Array], ports: Container[str]
    ) -> Buffers:
        """Write the messages received from these ports to the inbox."""
        inbox = carry.inbox
        for number, message in messages.items():
            if self.schedule.arrivals[number].port in ports:
                inbox = self._store_message(inbox, row, number, message)
        return carry._replace(inbox=inbox)

    def _store_message(
        self, inbox: jax.Array, row: TickRow, number: int, message: jax.Array
    ) -> jax.Array:
        """Write a message to its inbox slot, unless this stage discards it in this tick. `number`
        is the index in `schedule.arrivals`.
        """
        slot = row.arrivals[number]
        if self.schedule.arrivals[number].discards:
            stored, slot = slot != DISCARD, jnp.maximum(slot, 0)
            message = jnp.where(stored, message, read_slot(inbox, slot))
        return write_slot(inbox, slot, message)

    # Slots.

    def _work(self, row: SlotRow) -> SlotWork:
        return self.slots.work(row, self.batch, self.seeds)

    def _current_weights(self, carry: Buffers) -> Tree:
        return carry.window if self.uses_weight_window else self.local_weights

    def _forward_slot(self, carry: Buffers, row: TickRow) -> tuple[jax.Array, Buffers]:
        """Run a chunk's forward pass and save the activations needed by the backward slot."""
        x, carry = self._enter(carry, row, read_slot(carry.inbox, row.forward.inbox))
        work, held = self._work(row.forward), self._current_weights(carry)
        with jax.named_scope(scopes.FORWARD):
            if not self.schedule.trains:
                return self.slots.forward(held, work, x)[0], carry
            assert carry.reports is not None
            x, stash, reports = self.slots.forward_and_save(
                self.layer_vjps, held, work, x, carry.stash, carry.reports
            )
        return x, carry._replace(stash=stash, reports=reports)

    def _backward_slot(self, carry: Buffers, row: TickRow) -> tuple[jax.Array, Buffers]:
        work = self._work(row.backward)
        cotangent = read_slot(carry.inbox, row.backward.inbox)
        with jax.named_scope(scopes.BACKWARD):
            d_input, totals = self.slots.backward(
                self.layer_vjps,
                self._current_weights(carry),
                work,
                cotangent,
                carry.stash,
                self._totals(carry),
            )
        return d_input, self._with_totals(carry, totals)

    def _input_grad_slot(self, carry: Buffers, row: TickRow) -> tuple[jax.Array, Buffers]:
        """Compute the gradient of a chunk's input; save the inputs of the deferred weight
        gradients.
        """
        work = self._work(row.backward)
        cotangent = read_slot(carry.inbox, row.backward.inbox)
        with jax.named_scope(scopes.INPUT_GRAD):
            d_input, deferred = self.slots.input_grad(
                self.layer_vjps,
                self._current_weights(carry),
                work,
                cotangent,
                carry.stash,
                carry.deferred,
            )
        return d_input, carry._replace(deferred=deferred)

    def _weight_grad_slot(self, carry: Buffers, row: TickRow) -> Buffers:
        work = self._work(row.weight)
        with jax.named_scope(scopes.WEIGHT_GRAD):
            totals = self.slots.weight_grad(
                self.layer_vjps, work, carry.deferred, self._totals(carry)
            )
        return self._with_totals(carry, totals)

    def _totals(self, carry: Buffers) -> Tree:
        """Return the gradient accumulators of the layers."""
        assert carry.gradients is not None
        return carry.partial if self.uses_weight_window else carry.gradients.layers

    def _with_totals(self, carry: Buffers, totals: Tree) -> Buffers:
        assert carry.gradients is not None
        if self.uses_weight_window:
            return carry._replace(partial=totals)
        return carry._replace(gradients=carry.gradients._replace(layers=totals))

    # Embedding, prologue and loss head.

    def _enter(self, carry: Buffers, row: TickRow, x: jax.Array) -> tuple[jax.Array, Buffers]:
        """Return `x`, or the embeddings of the microbatch that enters the pipeline if this is the
        first chunk.
        """
        is_first = (self.stage == 0) & (row.forward.repeat == 0)
        if self.prologue is not None:
            assert carry.outside is not None
            with jax.named_scope(scopes.PROLOGUE):
                entering, outside = self.prologue.enter(carry.outside, row.prologue, row.embed)
            return jnp.where(is_first, entering, x), carry._replace(outside=outside)
        tokens = read_slot(self.batch["tokens"], jnp.maximum(row.embed, 0))

        def enter(x: jax.Array) -> jax.Array:
            embedded = self.embedding.lookup(self.table, tokens)
            if self.images is not None:
                embedded = self.images.splice(embedded, row.embed)
            return jnp.where(is_first, embedded, x)

        with jax.named_scope(scopes.EMBED):
            return lax.cond(row.embed >= 0, enter, lambda x: x, x), carry

    def _embed_grad(self, carry: Buffers, row: TickRow, d_input: jax.Array) -> Buffers:
        gradients = carry.gradients
        assert gradients is not None
        if self.prologue is not None:
            assert carry.outside is not None
            with jax.named_scope(scopes.PROLOGUE):
                outside, gradients = self.prologue.leave(
                    carry.outside, row.prologue, row.embed_grad, d_input, gradients
                )
            return carry._replace(outside=outside, gradients=gradients)
        if gradients.images is not None and self.images is not None:
            exists = row.embed_grad >= 0
            images = self.images.accumulate(gradients.images, d_input, row.embed_grad, exists)
            gradients = gradients._replace(images=images)
        if gradients.embedding is None:
            return carry._replace(gradients=gradients)
        if self.images is not None:
            d_input = self.images.of_tokens(d_input, row.embed_grad)
        tokens = read_slot(self.batch["tokens"], jnp.maximum(row.embed_grad, 0))
        with jax.named_scope(scopes.EMBED_GRAD):
            embedding = lax.cond(
                row.embed_grad >= 0,
                lambda total: self.embedding.accumulate(total, tokens, d_input),
                lambda total: total,
                gradients.embedding,
            )
        return carry._replace(gradients=gradients._replace(embedding=embedding))

    def _loss_and_grad(self, carry: Buffers, row: TickRow, output: jax.Array) -> Buffers:
        """Add the loss of the microbatch that leaves the pipeline, and write the loss cotangent to
        the inbox.
        """
        number = [arrival.port for arrival in self.schedule.arrivals].index("loss")
        store = lambda inbox, cotangent: self._store_message(inbox, row, number, cotangent)  # noqa: E731
        return self.loss_slot.loss_and_grad(carry, row, output, store)

    # The full step.

    def run(self, table: TickTable) -> Buffers:
        """Run all ticks and return the final buffers."""
        table = table.local_columns()
        if self.uses_weight_window:
            return run_weight_windows(self, table)

        def body(carry: Buffers, row: TickRow) -> tuple[Buffers, None]:
            return self.tick(carry, row), None

        return lax.scan(body, self.buffers(), table.rows)[0]

    def finish(self, gradients: Gradients) -> Tree:
        """Sum gradients over devices, and return a tree of the trainable parameters' gradients."""
        layers = {
            kind: self._stacked(kind, weights.finish(gradients.layers[kind]))
            for kind, weights in self.weights.items()
        }
        # Every stage has computed the gradient of the final norm. The last stage's gradient is
        # used, because only that stage has the input of the reduction before the norm.
        last = self.schedule.ring.last_stage
        divisions = select_trainable(self.plan.weight_shardings, self.plan.trainable)
        final_norm = jax.tree.map(
            lambda leaf, division: sum_gradient(broadcast_from(leaf, STAGE, last), division),
            gradients.final_norm,
            divisions.get("final_norm", {}),
        )
        found = {"layers": layers, "final_norm": final_norm}
        if self.prologue is not None:
            found["outside"] = self.prologue.finish(gradients.prologue)
        if self.loss_slot.mtp is not None:
            found["ahead"] = self.loss_slot.mtp.finish(gradients.mtp)
        if gradients.embedding is not None:
            found["embedding"] = self.embedding.finish(gradients.embedding)
        if gradients.head is not None:
            head = self.loss_slot.head_weights.finish(gradients.head)[0]
            name = "embedding" if self.is_tied else "head"
            found[name] = found[name] + head.T if self.is_tied else head
        return jax.tree.map(zero1_shard, select_trainable(found, self.plan.trainable), divisions)

    def finish_reports(self, carry: Buffers) -> Reports:
        """Return the losses, summed over layers and sequences, and the statistics of each layer.

        Statistics are sums or maxima over all sequences. The key `layers` contains the ring's
        layers, `[R, 1, L, ...]`; `outside` the prologue, `[layers, ...]`; and `ahead` the MTP
        layers, `[heads, ...]`.
        """
        assert carry.reports is not None
        losses = {name: sum_over(loss, STAGE) for name, loss in carry.reports.losses.items()}
        statistics: dict[str, Tree] = {
            "layers": {
                kind: self._stacked(kind, found) for kind, found in carry.reports.statistics.items()
            }
        }
        if self.prologue is not None:
            assert carry.outside is not None and carry.outside.reports is not None
            front = carry.outside.reports
            statistics["outside"] = map_statistics(
                lambda each: reduce_statistic(each, STAGE), front.statistics
            )
            for name, loss in front.losses.items():
                losses[name] = losses.get(name, 0.0) + sum_over(loss, STAGE)
        found = merge_reports(Reports(losses, statistics), carry.ahead)
        return map_statistics(lambda each: reduce_statistic(each, TOKEN_AXES), found)

    def _stacked(self, kind: str, tree: Tree) -> Tree:
        """Reshape `[R * L, ...]` to `[R, 1, L, ...]`."""
        repeats, _, length = self.plan.layout.stacks[kind].shape
        return jax.tree.map(lambda leaf: leaf.reshape(repeats, 1, length, *leaf.shape[1:]), tree)


def _unstacked_shardings(divisions: Tree, *, num_stacked: int) -> Tree:
    """Return the shardings without the `num_stacked` leading dims, for the weights of a single
    layer.
    """
    return jax.tree.map(lambda division: division.unstacked(num_stacked), divisions)


@dataclass(frozen=True)
class PipelinePlan:
    """Execution plan of a network on a ring of stages."""

    network: Network
    layout: LayerLayout
    weight_gather: GatherMode
    remat_policy: RematPolicy
    idle: Idle
    weight_shardings: Tree
    """`WeightSharding` of each parameter."""

    @cached_property
    def trainable(self) -> Tree:
        """Return a tree of bools that are true for parameters with a gradient."""
        return jax.tree.map(lambda sharding: sharding.trainable, self.weight_shardings)

    @property
    def prologue_gather_mode(self) -> GatherMode:
        """Return the gather mode of weights outside the ring, which are not in the prefetch
        window.
        """
        return "step" if self.weight_gather == "window" else self.weight_gather

    def has_mtp(self, schedule: Schedule) -> bool:
        """Return whether a step with this schedule computes MTP heads."""
        return schedule.trains and self.network.mtp is not None
