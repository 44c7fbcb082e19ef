"""The network's first layers outside the ring: all stages run them, each on its own microbatch.

They go forward for a round of P microbatches at a time, one on each stage, when the first of the
round enters the ring. Each stage keeps its microbatch until that enters too, and later takes back
its cotangent; with the last one of the round the layers go backward, again on all stages at once.
Every stage holds the same weights, like replicas in data parallelism. Nothing here diverges.

The embedding with the vocabulary divided over the stages.

Each stage holds V / P rows, looks up its own, and one small sum over the stage axis puts the parts
together: every stage does an equal share of the work that would otherwise sit on the first.
Forward and backward are explicit; both run in control flow that is the same on all stages.

The embedding's columns stay divided over fsdp and the axes beside it: tokens go to all shards and
activations come back, which is less than the table. In shapes `v` is V / P, this stage's part of
the padded vocabulary, and `d` the columns of the table that a device holds: D, or its shard.

Source: the vocabulary-parallel embedding of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Lookup in this stage's rows of the table `[v, d]`."""

    weight_sharding: WeightSharding
    """Of the table."""
    scale: float = 1.0
    """Factor of what is looked up, rounded to its type."""

    @property
    def is_column_sharded(self) -> bool:
        """Whether devices that share the columns each look up their own."""
        return self.weight_sharding.dim == 1

    def prepare(self, shard: Float[Array, "v shard"], dtype: jnp.dtype) -> Float[Array, "v d"]:
        """What `lookup` reads."""
        return (
            mark_varying(shard.astype(dtype))
            if self.is_column_sharded
            else gather_weight(shard, self.weight_sharding, dtype)
        )

    def lookup(
        self, table: Float[Array, "v d"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """The first layer's input, the same on every stage."""
        return self._to_rows(sum_over(self._lookup_local(table, tokens), STAGE))

    def lookup_per_stage(
        self, table: Float[Array, "v d"], tokens: Int[Array, "P B T"]
    ) -> Float[Array, "B T D"]:
        """The same, to each stage that of its own microbatch."""
        return self._to_rows(reduce_scatter(self._lookup_local(table, tokens), STAGE, 0)[0])

    def accumulate(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds stage 0's cotangent to the gradient of what is held, float32."""
        return self._add(
            total, tokens, self._to_columns(mark_varying(broadcast_from(cotangent, STAGE, 0)))
        )

    def accumulate_parts(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds a cotangent of which every stage has a part, their sum."""
        return self._add(total, tokens, self._to_columns(mark_varying(sum_over(cotangent, STAGE))))

    def accumulate_per_stage(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "P B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds every stage's own cotangent, of its microbatch among all stages' tokens."""
        columns = self._to_columns(cotangent)[None]
        return self._add(total, tokens, all_gather(columns, STAGE, 0))

    def finish(self, total: Float[Array, "v d"]) -> Float[Array, "v shard"]:
        """Summed over devices, in the form of the stored shard."""
        total = total if self.is_column_sharded else scatter_gradient(total, self.weight_sharding)
        return sum_gradient(total, self.weight_sharding)

    def _lookup_local(
        self, table: Float[Array, "v d"], tokens: Int[Array, "*dims T"]
    ) -> Float[Array, "*found T d"]:
        row, mine = self._local_rows(tokens, table.shape[0])
        return self._scaled(jnp.where(mine[..., None], table[row], 0), table.dtype)

    def _scaled(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Times the scale, rounded to the type of activations."""
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, dtype).astype(x.dtype)

    def _add(self, total: jax.Array, tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
        row, mine = self._local_rows(tokens, total.shape[0])
        row = jnp.where(mine, row, total.shape[0])  # out of range: dropped
        cotangent = self._scaled(cotangent.astype(total.dtype), cotangent.dtype)
        return total.at[row].add(mark_varying(cotangent), mode="drop")

    def _to_rows(self, x: jax.Array) -> jax.Array:
        """This device's columns of all shards' tokens -> all columns of its own tokens."""
        return all_to_all(x, self.weight_sharding.axes, 0, 2) if self.is_column_sharded else x

    def _to_columns(self, x: jax.Array) -> jax.Array:
        """All columns of this device's tokens -> its own columns of all shards' tokens."""
        if not self.is_column_sharded:
            return x
        # XLA for TPU takes five times as long to exchange from dim 2 to dim 0.
        axes = self.weight_sharding.axes
        return all_to_all(jnp.concatenate(jnp.split(x, axis_size(axes), axis=2)), axes, 0, 0)

    def _local_rows(
        self, tokens: Int[Array, "*dims T"], num_rows: int
    ) -> tuple[Int[Array, "*found T"], Bool[Array, "*found T"]]:
        """Row of every token that is looked up here, and whether it is held here."""
        if self.is_column_sharded:
            tokens = all_gather(tokens, self.weight_sharding.axes, tokens.ndim - 2)
        row = tokens - axis_index(STAGE) * num_rows
        return jnp.clip(row, 0, num_rows - 1), (row >= 0) & (row < num_rows)


Tree = Any


class PrologueRow(NamedTuple):
    """One tick as all stages see it; columns of `table.Outside`."""

    forward: Any
    forward_slot: Any
    backward: Any
    backward_slot: Any


class PrologueBuffers(NamedTuple):
    """What rounds leave between their forward and their backward."""

    waiting: Float[Array, "slots B T D"]
    """The layers' output until it enters, then its cotangent."""
    stash: Tree
    """What the layers keep for their backward: by kind `[slots * layers, ...]`."""
    reports: Reports | None
    """What they return besides their output."""


@dataclass(frozen=True)
class PrologueLayers:
    """Runs the layers in front of the ring."""

    slots: LayerSlots
    local_weights: Tree
    """What their weights are read from."""
    schedule: Schedule
    batch: Tree
    """Arrays of all microbatches `[M, B, ...]`."""
    layer_vjps: Any
    """The layers differentiated, by kind; None when only forward."""
    seeds: Tree
    """Cotangents of the layers' losses."""
    embedding: Embedding
    table: Float[Array, "v d"]
    """What the embedding looks up."""

    def buffers(self, like: Float[Array, "B T D"]) -> PrologueBuffers:
        """Empty slots for rounds, `like` one activation."""
        count = self.schedule.prologue.num_slots
        trains = self.schedule.trains
        stash = self.slots.empty_stash(self.layer_vjps, count, like) if trains else []
        reports = self.slots.empty_reports(self.layer_vjps) if trains else None
        return PrologueBuffers(empty_slots(count, like), stash, reports)

    def zeros(self) -> Tree:
        """Empty gradient accumulators of the layers."""
        return {
            kind: each.zeros(self.local_weights[kind]) for kind, each in self.slots.weights.items()
        }

    def enter(
        self, buffers: PrologueBuffers, row: PrologueRow, entering: Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], PrologueBuffers]:
        """The microbatch that enters the ring, after the round that starts with it.

        `entering` is its number, or negative for none.
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
        totals: Tree,
        embedding: Float[Array, "v d"] | None,
    ) -> tuple[PrologueBuffers, Tree, Float[Array, "v d"] | None]:
        """Takes stage 0's cotangent of the microbatch that is back, and the round it completes.

        `totals` and `embedding` are the gradients of the layers and of the embedding so far, None
        of a frozen one.
        """
        with jax.named_scope(scopes.SEND):
            arrived = lax.cond(
                returning >= 0,
                lambda cotangent: mark_varying(broadcast_from(cotangent, STAGE, 0)),
                jnp.zeros_like,
                cotangent,
            )
        mine = (returning >= 0) & (axis_index(STAGE) == self._owner(returning))
        waiting = _put(buffers.waiting, row.backward_slot, arrived, mine)
        work = self._work(row.backward, row.backward_slot)
        assert work.exists is not None
        d_output = jnp.where(work.exists, read_slot(waiting, row.backward_slot), 0)
        with jax.named_scope(scopes.BACKWARD):
            d_input, totals = self.slots.backward(
                self.layer_vjps, self.local_weights, work, d_output, buffers.stash, totals
            )
        if embedding is None:
            return buffers._replace(waiting=waiting), totals, None
        tokens = self.batch["tokens"][self._round_microbatches(row.backward)]
        with jax.named_scope(scopes.EMBED_GRAD):
            embedding = lax.cond(
                row.backward >= 0,
                lambda total: mark_varying(
                    self.embedding.accumulate_per_stage(total, tokens, d_input)
                ),
                lambda total: total,
                embedding,
            )
        return buffers._replace(waiting=waiting), totals, embedding

    def finish(self, totals: Tree) -> Tree:
        """Gradients summed over devices, in the form of the parameters."""
        found = {kind: each.finish(totals[kind]) for kind, each in self.slots.weights.items()}
        return jax.tree.map(lambda total: sum_over(total, STAGE), found)

    def _owner(self, microbatch: jax.Array) -> jax.Array:
        """The stage that has this microbatch in its round."""
        return jnp.maximum(microbatch, 0) % self.schedule.num_stages

    def _local_microbatch(self, number: jax.Array) -> jax.Array:
        """This stage's microbatch of a round."""
        return jnp.maximum(number, 0) * self.schedule.num_stages + axis_index(STAGE)

    def _round_microbatches(self, number: jax.Array) -> jax.Array:
        """int `[P]`: microbatches of a round; where it is short, the last one again."""
        first = jnp.maximum(number, 0) * self.schedule.num_stages
        members = first + jnp.arange(self.schedule.num_stages)
        return jnp.minimum(members, self.schedule.num_microbatches - 1)

    def _work(self, number: jax.Array, slot: jax.Array) -> SlotWork:
        """A round on this stage; every stage does the same.

        The last round may be short: what has no microbatch works on another one's for nothing.
        """
        own = jnp.minimum(self._local_microbatch(number), self.schedule.num_microbatches - 1)
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
    """The buffer with the value in a slot, where it counts."""
    return write_slot(buffer, slot, jnp.where(counts, value, read_slot(buffer, slot)))
