"""The loss slot of a tick: the loss head and the MTP heads run on the leaving microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel import scopes
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.mtp import MtpLossHeads, MtpTotals
from maxpipe.pipeline.slots import empty_slots, select_microbatch, write_slot
from maxpipe.pipeline.tick_loop import Buffers, TickRow
from maxpipe.pipeline.weights import LayerWeights, select_trainable

Tree = Any
OutputReader = Callable[[LossHead, Tree, Any, jax.Array, Tree], Tree]
"""(loss head, final norm, this stage's head columns, the last layer's output, microbatch) ->
arrays `[B, ...]`."""


@dataclass(frozen=True)
class LossSlot:
    """Loss head, MTP heads and their parameters. All stages run them on the same microbatch."""

    head: LossHead
    final_norm: Tree
    """Parameters of the final norm."""
    norm_is_trainable: Tree
    """Whether each parameter of the final norm has a gradient."""
    head_weights: LayerWeights
    local_head: Tree
    """Tree from which this stage's head columns are read. The head is stored as a stack of one
    layer."""
    batch: Tree
    """Arrays of all microbatches `[M, B, ...]`."""
    mtp: MtpLossHeads | None
    scale: jax.Array | None
    """Factor of the objective's gradients. None in forward-only programs."""

    def trainable_norm(self, tree: Tree) -> Tree:
        """Return the leaves of a final-norm tree whose parameters have gradients."""
        return select_trainable(tree, self.norm_is_trainable)

    def loss(self, carry: Buffers, row: TickRow, output: jax.Array) -> Buffers:
        """Add the loss of the leaving microbatch."""

        def work(loss: jax.Array) -> jax.Array:
            return loss + self.head.loss(*self._head_inputs(row.loss, output))

        with jax.named_scope(scopes.HEAD):
            loss = lax.cond(row.loss >= 0, work, lambda loss: loss, carry.loss)
        return carry._replace(loss=loss)

    def read_outputs(
        self, carry: Buffers, row: TickRow, output: jax.Array, reader: OutputReader
    ) -> Buffers:
        """Compute the reader's output for the leaving microbatch and store it in `rows`."""

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
        self, carry: Buffers, row: TickRow, output: jax.Array
    ) -> tuple[jax.Array, Buffers]:
        """Add the loss of the leaving microbatch and its gradients; return its cotangent."""
        gradients, scale = carry.gradients, self.scale
        assert gradients is not None and scale is not None
        totals = None
        if self.mtp is not None:
            assert carry.ahead is not None
            table = gradients.embedding if self.mtp.reads_embedding else None
            totals = MtpTotals(carry.ahead, gradients.mtp, table)

        def work(loss: jax.Array, norm: Tree, head: jax.Array, totals: MtpTotals | None):
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
            return new.output, loss + new.sums, norm, head, totals

        def idle(loss: jax.Array, norm: Tree, head: jax.Array, totals: MtpTotals | None):
            return jnp.zeros_like(output), loss, norm, head, totals

        with jax.named_scope(scopes.HEAD):
            cotangent, loss, norm, head, totals = lax.cond(
                row.loss >= 0, work, idle, carry.loss, gradients.final_norm, gradients.head, totals
            )
        gradients = gradients._replace(final_norm=norm, head=head)
        if totals is None:
            return cotangent, carry._replace(loss=loss, gradients=gradients)
        gradients = gradients._replace(mtp=totals.gradients)
        if totals.embedding is not None:
            gradients = gradients._replace(embedding=totals.embedding)
        return cotangent, carry._replace(loss=loss, gradients=gradients, ahead=totals.results)

    def _head_inputs(
        self, microbatch: jax.Array, output: jax.Array
    ) -> tuple[Tree, Any, jax.Array, Tree]:
        inputs = select_microbatch(self.batch, microbatch)
        return self.final_norm, self.head_weights.layer(self.local_head, 0), output, inputs
