"""Prologue layers and the embedding, which run outside the ring on all stages.

Prologue layers are the network's first layers. All stages run them, each on a different microbatch.
Their forward pass runs for a round of P microbatches, one per stage, when the round's first
microbatch enters the ring. Each stage keeps the output of its microbatch until that microbatch
enters the ring, and later receives the output's cotangent. When the round's last microbatch has
returned, all stages run the backward pass of the prologue layers. Every stage holds a replica of
the prologue weights, as in data parallelism. Control flow is the same on all stages.

The vocabulary of the embedding is sharded over the stages. Each stage holds V / P rows of the table
and looks up the tokens that belong to those rows. A small all-reduce over the stage axis combines
the results. Every stage thus performs an equal share of the lookup, which the first stage would
otherwise perform alone. The forward and backward passes are hand-written, and their control flow is
the same on all stages.

The table's columns remain sharded over the fsdp, expert and context axes. Tokens are sent to all
shards and activations are returned, which needs less traffic than gathering the table. In shapes,
`v` is V / P, this stage's share of the padded vocabulary. `d` is the number of table columns that a
device
holds: D, or a shard of D.

Source: the vocabulary-parallel embedding of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcast_from,
    mark_varying,
    reduce_scatter,
    sum_over,
)
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.images import ImageInputs
from maxpipe.pipeline.slots import (
    LayerSlots,
    Reports,
    SlotRow,
    SlotWork,
    empty_slots,
    read_slot,
    select_microbatch,
    write_slot,
)
from maxpipe.pipeline.weights import WeightSharding, gather_weight, scatter_gradient, sum_gradient
from maxpipe.schedule.table import IDLE, Schedule


class Embedding(NamedTuple):
    """Embedding lookup in this stage's rows `[v, d]` of the table."""

    weight_sharding: WeightSharding
    """Sharding of the embedding table."""
    scale: float = 1.0
    """Scaling factor applied to the embeddings, rounded to the embedding dtype."""
    num_carried: int = 0
    """Number of zeros that are appended to each embedding, for arrays that layers pass to later
    layers."""
    num_streams: int = 1
    """Number of residual streams, to which each embedding is copied."""

    @property
    def is_column_sharded(self) -> bool:
        """Return whether the table's columns remain sharded, so that devices exchange tokens and
        activations.
        """
        return self.weight_sharding.dim == 1

    def prepare(self, shard: Float[Array, "v shard"], dtype: jnp.dtype) -> Float[Array, "v d"]:
        """Return the table used by `lookup`: this device's shard, or all gathered shards."""
        return (
            mark_varying(shard.astype(dtype))
            if self.is_column_sharded
            else gather_weight(shard, self.weight_sharding, dtype)
        )

    def lookup(
        self, table: Float[Array, "v d"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Return the first layer's input, identical on every stage."""
        return self._layer_input(self._to_rows(sum_over(self._lookup_local(table, tokens), STAGE)))

    def lookup_per_stage(
        self, table: Float[Array, "v d"], tokens: Int[Array, "P B T"]
    ) -> Float[Array, "B T D"]:
        """Return the first layer's input for this stage's microbatch, given all stages' tokens."""
        rows = reduce_scatter(self._lookup_local(table, tokens), STAGE, 0)[0]
        return self._layer_input(self._to_rows(rows))

    def accumulate(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Add the cotangent from stage 0 to `total`, the float32 gradient of this device's table
        shard.
        """
        cotangent = broadcast_from(self._embedding_cotangent(cotangent), STAGE, 0)
        return self._add(total, tokens, self._to_columns(mark_varying(cotangent)))

    def accumulate_parts(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Sum the stages' partial cotangents, and add the result to the gradient `total`."""
        cotangent = sum_over(self._embedding_cotangent(cotangent), STAGE)
        return self._add(total, tokens, self._to_columns(mark_varying(cotangent)))

    def accumulate_per_stage(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "P B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Add the cotangents of all stages' microbatches to the gradient `total`; `tokens` contains
        the tokens of all stages.
        """
        columns = self._to_columns(self._embedding_cotangent(cotangent))[None]
        return self._add(total, tokens, all_gather(columns, STAGE, 0))

    def finish(self, total: Float[Array, "v d"]) -> Float[Array, "v shard"]:
        """Sum the gradient over devices, and return this device's shard of the sum."""
        total = total if self.is_column_sharded else scatter_gradient(total, self.weight_sharding)
        return sum_gradient(total, self.weight_sharding)

    def _lookup_local(
        self, table: Float[Array, "v d"], tokens: Int[Array, "*dims T"]
    ) -> Float[Array, "*found T d"]:
        row, is_local = self._local_rows(tokens, table.shape[0])
        return self._scaled(jnp.where(is_local[..., None], table[row], 0), table.dtype)

    def _scaled(self, x: jax.Array, dtype: Any) -> jax.Array:
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, dtype).astype(x.dtype)

    def _add(self, total: jax.Array, tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
        row, is_local = self._local_rows(tokens, total.shape[0])
        row = jnp.where(is_local, row, total.shape[0])  # out-of-range indices are dropped
        cotangent = self._scaled(cotangent.astype(total.dtype), cotangent.dtype)
        return total.at[row].add(mark_varying(cotangent), mode="drop")

    def _layer_input(self, x: jax.Array) -> jax.Array:
        x = jnp.tile(x, self.num_streams) if self.num_streams > 1 else x
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.num_carried))) if self.num_carried else x

    def _to_rows(self, x: jax.Array) -> jax.Array:
        """Return all columns for this device's tokens, given this device's columns for all shards'
        tokens.
        """
        return all_to_all(x, self.weight_sharding.axes, 0, 2) if self.is_column_sharded else x

    def _embedding_cotangent(self, x: jax.Array) -> jax.Array:
        """Return the cotangent of the embeddings, given that of the first layer's input."""
        x = x[..., : x.shape[-1] - self.num_carried] if self.num_carried else x
        first, *others = jnp.split(x, self.num_streams, axis=-1)
        return sum(others, start=first)

    def _to_columns(self, x: jax.Array) -> jax.Array:
        """Return this device's columns for all shards' tokens, given all columns for this device's
        tokens.
        """
        if not self.is_column_sharded:
            return x
        # On TPUs, XLA's all-to-all from dim 2 to dim 0 is five times slower.
        axes = self.weight_sharding.axes
        return all_to_all(jnp.concatenate(jnp.split(x, axis_size(axes), axis=2)), axes, 0, 0)

    def _local_rows(
        self, tokens: Int[Array, "*dims T"], num_rows: int
    ) -> tuple[Int[Array, "*found T"], Bool[Array, "*found T"]]:
        """Return the table row of every token, and whether this stage holds that row."""
        if self.is_column_sharded:
            tokens = all_gather(tokens, self.weight_sharding.axes, tokens.ndim - 2)
        row = tokens - axis_index(STAGE) * num_rows
        return jnp.clip(row, 0, num_rows - 1), (row >= 0) & (row < num_rows)


Tree = Any
GradientsT = TypeVar("GradientsT", bound=Any)
"""Type of `tick_loop.Gradients`."""


class PrologueRow(NamedTuple):
    """Prologue work in one tick (see `table.PrologueRounds`), identical on all stages."""

    forward: Any
    forward_slot: Any
    backward: Any
    backward_slot: Any


class PrologueBuffers(NamedTuple):
    """Arrays kept between the forward and the backward pass of each round."""

    waiting: Float[Array, "slots B T D"]
    """Output of the layers until the microbatch enters the ring, and afterwards the cotangent of
    that output."""
    stash: Tree
    """Saved activations of the layers, stacked as `[slots * layers, ...]` and keyed by layer
    type."""
    reports: Reports | None
    """Losses and statistics of the layers."""


@dataclass(frozen=True)
class PrologueLayers:
    """Run the prologue layers."""

    slots: LayerSlots
    local_weights: Tree
    """Tree that stores the layers' weights."""
    schedule: Schedule
    batch: Tree
    """Arrays of all microbatches `[M, B, ...]`."""
    layer_vjps: Any
    """Differentiated layers, keyed by layer type; None in forward-only programs."""
    seeds: Tree
    """Cotangents of the layers' losses."""
    embedding: Embedding
    table: Float[Array, "v d"]
    """Embedding table that is passed to `embedding`."""
    images: ImageInputs | None = None

    def buffers(self, like: Float[Array, "B T D"]) -> PrologueBuffers:
        """Return empty buffers for the rounds; `like` is an activation."""
        count = self.schedule.prologue.num_slots
        trains = self.schedule.trains
        stash = self.slots.empty_stash(self.layer_vjps, count, like) if trains else []
        reports = self.slots.empty_reports(self.layer_vjps) if trains else None
        return PrologueBuffers(empty_slots(count, like), stash, reports)

    def zeros(self) -> Tree:
        """Return zero gradient accumulators for the layers."""
        return {
            kind: weights.zeros(self.local_weights[kind])
            for kind, weights in self.slots.weights.items()
        }

    def enter(
        self, buffers: PrologueBuffers, row: PrologueRow, entering: Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], PrologueBuffers]:
        """Run the round that starts in this tick, and return the microbatch that enters the ring.

        `entering` is the index of that microbatch; negative if none enters.
        """
        starts = row.forward >= 0
        nothing = jnp.zeros_like(buffers.waiting[0])
        with jax.named_scope(scopes.EMBED):
            tokens = self.batch["tokens"][self._round_microbatches(row.forward)]
            x = lax.cond(
                starts,
                lambda: mark_varying(self.embedding.lookup_per_stage(self.table, tokens)),
                lambda: nothing,
            )
            if self.images is not None:
                x = self.images.splice(x, self._own_microbatch(row.forward))
        work = self._work(row.forward, row.forward_slot)
        stash, reports = buffers.stash, buffers.reports
        with jax.named_scope(scopes.FORWARD):
            if self.schedule.trains:
                assert reports is not None
                y, stash, reports = self.slots.forward_and_save(
                    self.layer_vjps, self.local_weights, work, x, stash, reports
                )
            else:
                y, _ = self.slots.forward(self.local_weights, work, x)
        waiting = _put(buffers.waiting, row.forward_slot, y, starts)
        with jax.named_scope(scopes.SEND):
            output = lax.cond(
                entering >= 0,
                lambda mine: mark_varying(broadcast_from(mine, STAGE, self._owner(entering))),
                lambda mine: nothing,
                read_slot(waiting, row.forward_slot),
            )
        return output, PrologueBuffers(waiting, stash, reports)

    def leave(
        self,
        buffers: PrologueBuffers,
        row: PrologueRow,
        returning: Int[Array, ""],
        cotangent: Float[Array, "B T D"],
        gradients: GradientsT,
    ) -> tuple[PrologueBuffers, GradientsT]:
        """Store the returned microbatch's cotangent, and run the round's backward pass when the
        round is complete.

        `gradients` are the accumulated gradients of the step.
        """
        with jax.named_scope(scopes.SEND):
            arrived = lax.cond(
                returning >= 0,
                lambda cotangent: mark_varying(broadcast_from(cotangent, STAGE, 0)),
                jnp.zeros_like,
                cotangent,
            )
        is_owner = (returning >= 0) & (axis_index(STAGE) == self._owner(returning))
        waiting = _put(buffers.waiting, row.backward_slot, arrived, is_owner)
        work = self._work(row.backward, row.backward_slot)
        assert work.exists is not None
        d_output = jnp.where(work.exists, read_slot(waiting, row.backward_slot), 0)
        with jax.named_scope(scopes.BACKWARD):
            d_input, totals = self.slots.backward(
                self.layer_vjps,
                self.local_weights,
                work,
                d_output,
                buffers.stash,
                gradients.prologue,
            )
        gradients, buffers = gradients._replace(prologue=totals), buffers._replace(waiting=waiting)
        own = self._own_microbatch(row.backward)
        if gradients.images is not None and self.images is not None:
            exists = (row.backward >= 0) & work.exists
            images = self.images.accumulate(gradients.images, d_input, own, exists)
            gradients = gradients._replace(images=images)
        if gradients.embedding is None:
            return buffers, gradients
        if self.images is not None:
            d_input = self.images.of_tokens(d_input, own)
        tokens = self.batch["tokens"][self._round_microbatches(row.backward)]
        with jax.named_scope(scopes.EMBED_GRAD):
            embedding = lax.cond(
                row.backward >= 0,
                lambda total: mark_varying(
                    self.embedding.accumulate_per_stage(total, tokens, d_input)
                ),
                lambda total: total,
                gradients.embedding,
            )
        return buffers, gradients._replace(embedding=embedding)

    def finish(self, totals: Tree) -> Tree:
        """Return the gradients summed over devices, in the tree structure of the parameters."""
        gradients = {
            kind: weights.finish(totals[kind]) for kind, weights in self.slots.weights.items()
        }
        return jax.tree.map(lambda total: sum_over(total, STAGE), gradients)

    def _owner(self, microbatch: jax.Array) -> jax.Array:
        """Return the stage that runs this microbatch in its round."""
        return jnp.maximum(microbatch, 0) % self.schedule.num_stages

    def _local_microbatch(self, number: jax.Array) -> jax.Array:
        return jnp.maximum(number, 0) * self.schedule.num_stages + axis_index(STAGE)

    def _own_microbatch(self, number: jax.Array) -> jax.Array:
        """Return this stage's microbatch of a round; short rounds repeat the last microbatch."""
        return jnp.minimum(self._local_microbatch(number), self.schedule.num_microbatches - 1)

    def _round_microbatches(self, number: jax.Array) -> jax.Array:
        """Return the microbatch indices of a round, int `[P]`; short rounds repeat the last
        microbatch.
        """
        first = jnp.maximum(number, 0) * self.schedule.num_stages
        members = first + jnp.arange(self.schedule.num_stages)
        return jnp.minimum(members, self.schedule.num_microbatches - 1)

    def _work(self, number: jax.Array, slot: jax.Array) -> SlotWork:
        """Return this stage's work in a round; the trip count is the same on every stage.

        The last round can be short. A stage without a microbatch then processes the last microbatch
        again and discards the result.
        """
        own = self._own_microbatch(number)
        exists = self._local_microbatch(number) < self.schedule.num_microbatches
        none, runs, layout = mark_varying(jnp.int32(0)), number >= 0, self.slots.layout
        row = SlotRow(jnp.where(runs, own, IDLE), none, none, slot, none, none, none, any_work=runs)
        size = jnp.where(runs, layout.max_layers_per_chunk, 0)
        return SlotWork(
            row,
            chunk=none,
            gradient=none,
            first=none,
            size=size,
            num_iterations=size,
            inputs=select_microbatch(self.batch, own),
            layer_types=mark_varying(jnp.asarray(layout.layer_type_at[0, 0])),
            indices_in_type=mark_varying(jnp.asarray(layout.index_in_type_at[0, 0])),
            seeds=jax.tree.map(lambda seed: jnp.where(exists, seed, 0), self.seeds),
            exists=exists,
        )


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array, counts: jax.Array) -> jax.Array:
    return write_slot(buffer, slot, jnp.where(counts, value, read_slot(buffer, slot)))
