"""Multi-token prediction (MTP) heads, which the loss slot runs on the output of the last stage.

All heads are computed on every stage, like the final norm. Each stage propagates only the gradient
of the vocabulary columns that it holds. The backward pass is linear, so the sum over the stages
gives the full gradients. Control flow is the same on all stages. The rationale is in
docs/decisions/0021-multi-token-prediction.md.

Each head is either a projection of the final norm's output or a full layer. The input of each such
layer combines the output of the previous layer with the embeddings of later tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import (
    Statistic,
    add_statistic,
    axis_index,
    broadcast_from,
    empty_statistic,
    map_statistics,
    mark_varying,
    sum_over,
)
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.prologue import Embedding
from maxpipe.pipeline.slots import Reports, read_slot, write_slot
from maxpipe.pipeline.weights import LayerWeights

Tree = Any

MTP = "ahead"
"""Key under which the statistics of the MTP layers are reported."""

ScoreFn = Callable[
    [Float[Array, "B T D"], Int[Array, "B T"], Float[Array, "B T"], Float[Array, ""]],
    tuple[Float[Array, ""], Float[Array, "B T D"], Float[Array, "D v"]],
]
"""Function that maps (activations to project, gradient scale, targets, loss mask) to (loss,
cotangent of the activations, gradient of the head columns). Both gradients cover only this stage's
columns.
"""


class MtpProjectionFns(NamedTuple):
    """MTP heads that apply a small function to the final norm's output and project the result."""

    function: Callable[[Tree, Float[Array, "B T D"]], Float[Array, "B T D"]]
    """Function that maps (one head's parameters, the final norm's output) to activations to
    project.
    """
    loss_weights: dict[str, float]
    """Weight of each head's loss in the objective, keyed by loss name."""


class MtpLayerFns(NamedTuple):
    """MTP heads with one layer each, applied in sequence; the first input is the final norm's
    output.
    """

    layer: Callable[..., tuple[Float[Array, "B T D"], Mapping[str, Array], Mapping[str, Statistic]]]
    """Function that maps (one head's parameters, x, embeddings of later tokens [B, T, D], inputs,
    head index, key) to (output, losses, statistics).

    The output is projected to logits and is also the next layer's input. Losses and statistics have
    the format described for `LayerFn`."""
    loss_weights: dict[str, float]
    """Weight of each head's loss, as in `MtpProjectionFns`."""


MtpFns = MtpProjectionFns | MtpLayerFns


class MtpResults(NamedTuple):
    """Losses and statistics of MTP heads, summed over microbatches and identical on all stages."""

    losses: Float[Array, " heads"]
    """Float32 cross entropy of each head, in nats."""
    reports: Reports | None
    """Losses and statistics of the heads' layers. Statistics are arrays `[heads, ...]` under the
    key `ahead`."""

    def with_loss(self, number: Array, loss: Array) -> MtpResults:
        """Return these results with the loss of one head added."""
        return self._replace(losses=self.losses.at[number].add(loss))

    def with_reports(self, number: Array, losses: Tree, statistics: Tree) -> MtpResults:
        """Return these results with the losses and statistics of one head's layer added."""
        reports = self.reports
        assert reports is not None
        all_losses = {name: total + losses[name] for name, total in reports.losses.items()}
        counted = {
            name: add_statistic(total, statistics[name], number, None)
            for name, total in reports.statistics[MTP].items()
        }
        return self._replace(reports=Reports(all_losses, {MTP: counted}))


class MtpTotals(NamedTuple):
    """Losses, statistics and gradients of MTP heads, accumulated over microbatches."""

    results: MtpResults
    gradients: Tree
    """Float32 gradients of the heads' parameters, stacked like the parameters."""
    embedding: Float[Array, "v d"] | None
    """Accumulated gradient of the embedding table; None if the heads use no trainable embedding
    table.
    """


@dataclass(frozen=True)
class MtpLossHeads:
    """MTP heads and their parameters, stacked as `[heads, ...]` and identical on every stage."""

    functions: MtpFns
    weights: LayerWeights
    local_weights: Tree
    """Tree that stores the heads' parameters."""
    embedding: Embedding
    """Embedding lookup, which returns a single residual stream."""
    table: Float[Array, "v d"]
    """Embedding table that is passed to `embedding`."""
    key: Array | None
    """Random key of the training step."""
    seeds: dict[str, Array]
    """Cotangents of the layers' losses."""

    @property
    def num_heads(self) -> int:
        """Return the number of MTP heads, excluding the ordinary head."""
        return len(self.functions.loss_weights)

    @property
    def reads_embedding(self) -> bool:
        """Return whether these heads contribute to the embedding's gradient."""
        return isinstance(self.functions, MtpLayerFns) and self.embedding.weight_sharding.trainable

    # Initialize accumulators, and reduce gradients

    def zeros(self) -> Tree:
        """Return zero gradient accumulators."""
        return self.weights.zeros(self.local_weights)

    def empty_results(self, inputs: Tree) -> MtpResults:
        """Return results initialized to zero; `inputs` are the arrays of a microbatch."""
        losses = mark_varying(jnp.zeros(self.num_heads, jnp.float32))
        if not isinstance(self.functions, MtpLayerFns):
            return MtpResults(losses, None)

        def run() -> tuple[Tree, Tree]:
            x = mark_varying(self.embedding.lookup(self.table, inputs["tokens"]))
            return self._layer(self._params(0), x, x, inputs, jnp.int32(0))[1:]

        of_layer, statistics = jax.eval_shape(run)

        def empty(like: Any) -> Statistic:
            return mark_varying(empty_statistic(like, self.num_heads))

        sums = {name: mark_varying(jnp.float32(0)) for name in of_layer}
        return MtpResults(losses, Reports(sums, {MTP: map_statistics(empty, statistics)}))

    def finish(self, gradients: Tree) -> Tree:
        """Return the gradients of the heads' parameters, summed over all devices and stages."""
        found = self.weights.finish(gradients)
        return jax.tree.map(lambda leaf: sum_over(leaf, STAGE), found)

    # One microbatch.

    def add(
        self,
        inputs: Tree,
        scale: Float[Array, ""],
        trips: Int[Array, ""],
        sums: MtpTotals,
        score: ScoreFn,
        hidden: Float[Array, "B T D"],
        d_hidden: Float[Array, "B T D"],
        d_head: Float[Array, "D v"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "D v"], MtpTotals]:
        """Add the results of all heads, processing one head at a time so that the logits of only
        one head are in memory.

        `hidden` is the final norm's output. `d_hidden` and `d_head` are the gradients computed by
        the ordinary head. `trips` is the number of heads as a traced value.
        """
        with jax.named_scope(scopes.MTP):
            if isinstance(self.functions, MtpLayerFns):
                state = (d_hidden, d_head, sums)
                return self._add_layers(inputs, scale, trips, score, hidden, state)
            state = mark_varying((d_hidden, d_head, sums))
            return self._add_projections(inputs, scale, score, hidden, state)

    def _params(self, number: Array | int) -> Tree:
        return self.weights.layer(self.local_weights, number)

    def _add_projections(
        self, inputs: Tree, scale: Array, score: ScoreFn, hidden: Array, state: Any
    ) -> tuple[Array, Array, MtpTotals]:
        heads = self.functions
        assert isinstance(heads, MtpProjectionFns)

        def one(number: Array, state: Any) -> Any:
            d_hidden, d_head, sums = state
            own, pullback = jax.vjp(heads.function, self._params(number), hidden)
            total, d_own, more = self._head_loss(inputs, scale, score, number, own)
            d_params, d_input = pullback(d_own)
            sums = MtpTotals(
                sums.results.with_loss(number, total),
                self.weights.accumulate(sums.gradients, number, d_params),
                sums.embedding,
            )
            return d_hidden + d_input.astype(d_hidden.dtype), d_head + more, sums

        return lax.fori_loop(0, self.num_heads, one, state)

    def _head_loss(
        self, inputs: Tree, scale: Array, score: ScoreFn, number: Array, own: Array
    ) -> tuple[Array, Array, Array]:
        weights = jnp.asarray([*self.functions.loss_weights.values()], jnp.float32)
        targets, mask = shift_targets(inputs, number + 1)
        total, d_own, d_head = score(own, scale * weights[number], targets, mask)
        return total, d_own.astype(own.dtype), d_head

    def _add_layers(
        self,
        inputs: Tree,
        scale: Array,
        trips: Array,
        score: ScoreFn,
        hidden: Array,
        state: tuple[Array, Array, MtpTotals],
    ) -> tuple[Array, Array, MtpTotals]:
        """Run three loops: the forward passes of all layers, all losses, and the backward passes.

        Only the layers' outputs are kept between the loops. Therefore, neither the activations of
        two layers nor the activations of a layer and the logits are in memory at the same time. The
        trip count is a traced value; otherwise, XLA would unroll single-iteration loops and merge
        duplicate computations.
        """
        d_hidden, d_head, sums = state
        embedded = mark_varying(self.embedding.lookup(self.table, inputs["tokens"]))

        def forward(number: Array, state: Any) -> Any:
            outputs, found = state
            x, params = read_slot(outputs, number), self._params(number)
            output, *reported = self._layer(params, x, embedded, inputs, number)
            return write_slot(outputs, number + 1, output), found.with_reports(number, *reported)

        empty = mark_varying(lax.empty((self.num_heads + 1, *hidden.shape), hidden.dtype))
        start = mark_varying((write_slot(empty, jnp.int32(0), hidden), sums.results))
        outputs, found = lax.fori_loop(0, trips, forward, start)

        def scored(number: Array, state: Any) -> Any:
            cotangents, d_head, found = state
            own = read_slot(outputs, number + 1)
            total, d_own, more = self._head_loss(inputs, scale, score, number, own)
            found = found.with_loss(number, total)
            return write_slot(cotangents, number, d_own), d_head + more, found

        start = mark_varying((empty[1:], d_head, found))
        cotangents, d_head, found = lax.fori_loop(0, trips, scored, start)
        # All stages compute the same layer losses, so only stage 0 propagates their gradients.
        is_first = axis_index(STAGE) == 0
        seeds = {
            name: mark_varying(jnp.where(is_first, seed, 0)) for name, seed in self.seeds.items()
        }

        def backward(turn: Array, state: Any) -> Any:
            d_output, d_embedded, gradients = state
            number = self.num_heads - 1 - turn

            def run(params: Tree, x: Array, embedded: Array) -> tuple[Array, Tree]:
                return self._layer(params, x, embedded, inputs, number)[:2]

            params, x = self._params(number), read_slot(outputs, number)
            (_, losses), pullback = jax.vjp(run, params, x, embedded)
            d_output += read_slot(cotangents, number)
            d_params, d_x, more = pullback((d_output, {name: seeds[name] for name in losses}))
            gradients = self.weights.accumulate(gradients, number, d_params)
            return d_x, None if d_embedded is None else d_embedded + more, gradients

        nothing = jnp.zeros_like(hidden)
        start = mark_varying((nothing, nothing if self.reads_embedding else None, sums.gradients))
        d_input, d_embedded, gradients = lax.fori_loop(0, trips, backward, start)
        table = sums.embedding
        if table is not None:
            table = self.embedding.accumulate_parts(table, inputs["tokens"], d_embedded)
        return d_hidden + d_input.astype(d_hidden.dtype), d_head, MtpTotals(found, gradients, table)

    def _layer(
        self, params: Tree, x: Array, embedded: Array, inputs: Tree, number: Array
    ) -> tuple[Array, Tree, Tree]:
        """Run the layer of one head. The layer's losses include only tokens that have a target for
        this head.
        """
        assert isinstance(self.functions, MtpLayerFns)
        counts = _in_same_segment(inputs, number + 1)
        later = jnp.where(counts[..., None], jnp.roll(embedded, -(number + 1), axis=1), 0)
        mine = inputs | {"loss_mask": shift_targets(inputs, number + 1)[1]}
        return self.functions.layer(params, x, later, mine, number, self.key)


def merge_reports(reports: Reports, found: MtpResults | None) -> Reports:
    """Add the MTP layers' losses and statistics to `reports`, whose entries are already summed over
    stages.
    """
    if found is None or found.reports is None:
        return reports
    of_one = jax.tree.map(lambda leaf: broadcast_from(leaf, STAGE, 0), found.reports)
    losses = {name: reports.losses.get(name, 0.0) + loss for name, loss in of_one.losses.items()}
    return Reports(reports.losses | losses, reports.statistics | of_one.statistics)


def shift_targets(inputs: Tree, distance: Array) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Return the targets `distance` tokens after the ordinary targets, and the loss mask of these
    targets.

    A shifted target is unmasked if its token is in the ordinary loss mask and in the same sequence
    and segment.
    """
    later = lambda name: jnp.roll(inputs[name], -distance, axis=1)  # noqa: E731
    return later("targets"), later("loss_mask") * _in_same_segment(inputs, distance)


def _in_same_segment(inputs: Tree, distance: Array) -> Bool[Array, "B T"]:
    """Return a mask that is true if the token `distance` positions later is in the same sequence
    and segment.
    """
    ids = inputs["segment_ids"]
    in_row = jnp.arange(ids.shape[1]) + distance < ids.shape[1]
    return in_row & (jnp.roll(ids, -distance, axis=1) == ids)
