"""The network's first layers outside the ring: all stages run them, each on its own microbatch.

They go forward for a round of P microbatches at a time, one on each stage, when the first of the
round enters the ring. Each stage keeps its microbatch until that enters too, and later takes back
its cotangent; with the last one of the round the layers go backward, again on all stages at once.
Every stage holds the same weights, like replicas in data parallelism. Nothing here diverges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.parallel.collectives import from_position, index_on, sum_over
from maxpipe.parallel.mesh import STAGE
from maxpipe.parallel.per_device import vary
from maxpipe.pipeline import scopes
from maxpipe.pipeline.buffers import microbatch, read, room, write
from maxpipe.pipeline.slots import LayerSlots, Reports, SlotRow, Work
from maxpipe.pipeline.vocabulary import Embedding
from maxpipe.schedule.table import IDLE, Schedule

Tree = Any


class OutsideRow(NamedTuple):
    """One tick as all stages see it; columns of `table.Outside`."""

    forward: Any
    forward_slot: Any
    backward: Any
    backward_slot: Any


class OutsideBuffers(NamedTuple):
    """What rounds leave between their forward and their backward."""

    waiting: Float[Array, "slots B T D"]
    """The layers' output until it enters, then its cotangent."""
    stash: Tree
    """What the layers keep for their backward: by kind `[slots * layers, ...]`."""
    reports: Reports | None
    """What they return besides their output."""


@dataclass(frozen=True)
class OutsideLayers:
    """Runs the layers in front of the ring."""

    slots: LayerSlots
    held: Tree
    """What their weights are read from."""
    schedule: Schedule
    batch: Tree
    """Arrays of all microbatches `[M, B, ...]`."""
    pieces: Any
    """The layers differentiated, by kind; None when only forward."""
    seeds: Tree
    """Cotangents of the layers' losses."""
    embedding: Embedding
    table: Float[Array, "v d"]
    """What the embedding looks up."""

    def buffers(self, like: Float[Array, "B T D"]) -> OutsideBuffers:
        """Empty slots for rounds, `like` one activation."""
        count = self.schedule.outside.num_slots
        trains = self.schedule.trains
        stash = self.slots.empty_stash(self.pieces, count, like) if trains else []
        reports = self.slots.empty_reports(self.pieces) if trains else None
        return OutsideBuffers(room(count, like), stash, reports)

    def zeros(self) -> Tree:
        """Empty gradient accumulators of the layers."""
        return {kind: each.zeros(self.held[kind]) for kind, each in self.slots.weights.items()}

    def enter(
        self, buffers: OutsideBuffers, row: OutsideRow, entering: Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], OutsideBuffers]:
        """The microbatch that enters the ring, after the round that starts with it.

        `entering` is its number, or negative for none.
        """
        starts = row.forward >= 0
        nothing = jnp.zeros_like(buffers.waiting[0])
        with jax.named_scope(scopes.EMBED):
            tokens = self.batch["tokens"][self._members(row.forward)]
            x = lax.cond(
                starts,
                lambda: vary(self.embedding.lookup_own(self.table, tokens)),
                lambda: nothing,
            )
        work = self._work(row.forward, row.forward_slot)
        stash, reports = buffers.stash, buffers.reports
        with jax.named_scope(scopes.FORWARD):
            if self.schedule.trains:
                assert reports is not None
                y, stash, reports = self.slots.forward_and_keep(
                    self.pieces, self.held, work, x, stash, reports
                )
            else:
                y, _ = self.slots.forward(self.held, work, x)
        waiting = _put(buffers.waiting, row.forward_slot, y, starts)
        with jax.named_scope(scopes.SEND):
            output = lax.cond(
                entering >= 0,
                lambda mine: vary(from_position(mine, STAGE, self._owner(entering))),
                lambda mine: nothing,
                read(waiting, row.forward_slot),
            )
        return output, OutsideBuffers(waiting, stash, reports)

    def leave(
        self,
        buffers: OutsideBuffers,
        row: OutsideRow,
        returning: Int[Array, ""],
        cotangent: Float[Array, "B T D"],
        totals: Tree,
        embedding: Float[Array, "v d"] | None,
    ) -> tuple[OutsideBuffers, Tree, Float[Array, "v d"] | None]:
        """Takes stage 0's cotangent of the microbatch that is back, and the round it completes.

        `totals` and `embedding` are the gradients of the layers and of the embedding so far, None
        of a frozen one.
        """
        with jax.named_scope(scopes.SEND):
            arrived = lax.cond(
                returning >= 0,
                lambda cotangent: vary(from_position(cotangent, STAGE, 0)),
                jnp.zeros_like,
                cotangent,
            )
        mine = (returning >= 0) & (index_on(STAGE) == self._owner(returning))
        waiting = _put(buffers.waiting, row.backward_slot, arrived, mine)
        work = self._work(row.backward, row.backward_slot)
        assert work.exists is not None
        d_output = jnp.where(work.exists, read(waiting, row.backward_slot), 0)
        with jax.named_scope(scopes.BACKWARD):
            d_input, totals = self.slots.backward(
                self.pieces, self.held, work, d_output, buffers.stash, totals
            )
        if embedding is None:
            return buffers._replace(waiting=waiting), totals, None
        tokens = self.batch["tokens"][self._members(row.backward)]
        with jax.named_scope(scopes.EMBED_GRAD):
            embedding = lax.cond(
                row.backward >= 0,
                lambda total: vary(self.embedding.accumulate_own(total, tokens, d_input)),
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

    def _own(self, number: jax.Array) -> jax.Array:
        """This stage's microbatch of a round."""
        return jnp.maximum(number, 0) * self.schedule.num_stages + index_on(STAGE)

    def _members(self, number: jax.Array) -> jax.Array:
        """int `[P]`: microbatches of a round; where it is short, the last one again."""
        first = jnp.maximum(number, 0) * self.schedule.num_stages
        members = first + jnp.arange(self.schedule.num_stages)
        return jnp.minimum(members, self.schedule.num_microbatches - 1)

    def _work(self, number: jax.Array, slot: jax.Array) -> Work:
        """A round on this stage; every stage does the same.

        The last round may be short: what has no microbatch works on another one's for nothing.
        """
        own = jnp.minimum(self._own(number), self.schedule.num_microbatches - 1)
        exists = self._own(number) < self.schedule.num_microbatches
        none, runs, layout = vary(jnp.int32(0)), number >= 0, self.slots.layout
        row = SlotRow(jnp.where(runs, own, IDLE), none, none, slot, none, none, none, any_work=runs)
        size = jnp.where(runs, layout.layers_per_chunk, 0)
        return Work(
            row,
            chunk=none,
            gradient=none,
            first=none,
            size=size,
            trips=size,
            inputs=microbatch(self.batch, own),
            kinds=vary(jnp.asarray(layout.kind_at[0, 0])),
            places=vary(jnp.asarray(layout.place_at[0, 0])),
            seeds=jax.tree.map(lambda seed: jnp.where(exists, seed, 0), self.seeds),
            exists=exists,
        )


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array, counts: jax.Array) -> jax.Array:
    """The buffer with the value in a slot, where it counts."""
    return write(buffer, slot, jnp.where(counts, value, read(buffer, slot)))
