"""Heads that predict tokens further ahead, in the loss slot, on the microbatch that leaves.

Every stage computes all of them, as it computes the final norm, and propagates the gradient of its
own columns of the vocabulary: that is linear, so that one sum over the stages serves everything.
Control flow is the same on all stages. Why they are here: docs/decisions/0021-layers-ahead.md.

Heads are projections of the final norm's output, or whole layers, each of which reads what the one
before it returns and the embedding of later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel.mesh import STAGE
from maxpipe.parallel.per_device import vary
from maxpipe.pipeline import scopes
from maxpipe.pipeline.buffers import read, write
from maxpipe.pipeline.collectives import from_position, index_on, sum_over
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.pipeline.slots import Reports
from maxpipe.pipeline.vocabulary import Embedding
from maxpipe.pipeline.weights import LayerWeights

Tree = Any

AHEAD = "ahead"
"""Name of what layers ahead report, among that of other layers."""

Score = Callable[
    [Float[Array, "B T D"], Int[Array, "B T"], Float[Array, "B T"], Float[Array, ""]],
    tuple[Float[Array, ""], Float[Array, "B T D"], Float[Array, "D v"]],
]
"""(what is projected, targets, which count, factor of gradients) -> loss, and its gradients by this
stage's columns: of what is projected, and of the columns."""


class Projections(NamedTuple):
    """Heads that each project the final norm's output after a small function of it."""

    function: Callable[[Tree, Float[Array, "B T D"]], Float[Array, "B T D"]]
    """(one head's parameters, the final norm's output) -> what it projects."""
    loss_weights: dict[str, float]
    """By the name of each head's loss, what it counts in the objective."""


class Layers(NamedTuple):
    """Heads of a layer each, one behind the other; the first reads the final norm's output."""

    layer: Callable[..., tuple[Float[Array, "B T D"], dict[str, Array], dict[str, Array]]]
    """(one head's parameters, x, embeddings of later tokens [B, T, D], inputs, its number, key) ->
    (what it projects and hands on, losses, statistics), the last two as a `LayerFn` returns them.
    """
    loss_weights: dict[str, float]
    """As those of `Projections`."""


Heads = Projections | Layers


class Found(NamedTuple):
    """What heads ahead find besides gradients, summed over microbatches; the same on all stages."""

    losses: Float[Array, " heads"]
    """Cross entropy of each head, in nats, float32."""
    reports: Reports | None
    """What layers return besides their output, statistics `[heads, ...]` under `ahead`."""


class Sums(NamedTuple):
    """What heads ahead add up from microbatch to microbatch."""

    found: Found
    gradients: Tree
    """Of their parameters, float32, stacked like them."""
    embedding: Float[Array, "v d"] | None
    """The gradient of the embedding's table so far, if layers read it and it is trained."""


@dataclass(frozen=True)
class HeadsAhead:
    """Heads ahead and their parameters, stacked `[heads, ...]`; every stage holds the same."""

    heads: Heads
    weights: LayerWeights
    held: Tree
    """What parameters are read from."""
    embedding: Embedding
    table: Float[Array, "v d"]
    """What the embedding looks up."""
    keep: RematPolicy
    """What of a layer waits for its backward while its logits are there."""
    key: Array | None
    """Of the step's randomness."""
    seeds: dict[str, Array]
    """Cotangents of the layers' losses."""

    @property
    def count(self) -> int:
        """Heads beside the ordinary one."""
        return len(self.heads.loss_weights)

    @property
    def reads_embedding(self) -> bool:
        """Whether the embedding gets a gradient from here."""
        return isinstance(self.heads, Layers) and self.embedding.division.trainable

    # What is there from start to end.

    def zeros(self) -> Tree:
        """Empty gradient accumulators."""
        return self.weights.zeros(self.held)

    def nothing_found(self, like: Float[Array, "B T D"], inputs: Tree) -> Found:
        """Zeros; `like` is an activation, `inputs` a microbatch's arrays."""
        losses = vary(jnp.zeros(self.count, jnp.float32))
        if not isinstance(self.heads, Layers):
            return Found(losses, None)

        def run(x: Array) -> tuple[Tree, Tree]:
            return self._layer(self._params(0), x, x, inputs, jnp.int32(0))[1:]

        of_layer, statistics = jax.eval_shape(run, like)
        sums = {
            name: vary(jnp.zeros((self.count, *leaf.shape), jnp.float32))
            for name, leaf in statistics.items()
        }
        return Found(
            losses, Reports({name: vary(jnp.float32(0)) for name in of_layer}, {AHEAD: sums})
        )

    def finish(self, gradients: Tree) -> Tree:
        """Gradients summed over devices: each stage has those of its part of the vocabulary."""
        found = self.weights.finish(gradients)
        return jax.tree.map(lambda leaf: sum_over(leaf, STAGE), found)

    # A microbatch.

    def add(
        self,
        inputs: Tree,
        scale: Float[Array, ""],
        sums: Sums,
        score: Score,
        hidden: Float[Array, "B T D"],
        d_hidden: Float[Array, "B T D"],
        d_head: Float[Array, "D v"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "D v"], Sums]:
        """Adds what the heads find, one after the other: one's logits are in memory at once.

        `hidden` is the final norm's output; its cotangent, and that of this stage's columns, are
        the ordinary head's so far.
        """
        start = vary((d_hidden, d_head, sums))
        add = self._add_layers if isinstance(self.heads, Layers) else self._add_projections
        with jax.named_scope(scopes.AHEAD):
            return add(inputs, scale, score, hidden, start)

    def _params(self, number: Array | int) -> Tree:
        return self.weights.layer(self.held, number)

    def _add_projections(
        self, inputs: Tree, scale: Array, score: Score, hidden: Array, start: Any
    ) -> tuple[Array, Array, Sums]:
        heads = self.heads
        assert isinstance(heads, Projections)

        def one(number: Array, state: Any) -> Any:
            d_hidden, d_head, sums = state
            own, pullback = jax.vjp(heads.function, self._params(number), hidden)
            total, d_own, more = self._scored(inputs, scale, score, number, own)
            d_params, d_input = pullback(d_own)
            sums = self._with_head(sums, number, total, d_params)
            return d_hidden + d_input.astype(d_hidden.dtype), d_head + more, sums

        return lax.fori_loop(0, self.count, one, start)

    def _add_layers(
        self, inputs: Tree, scale: Array, score: Score, hidden: Array, start: Any
    ) -> tuple[Array, Array, Sums]:
        """Forward through all but the last, which keeps their inputs, then backward through all."""
        d_hidden, d_head, sums = start
        embedded = vary(self.embedding.lookup(self.table, inputs["tokens"]))
        given = self._given(hidden, embedded, inputs)
        # Every stage finds the layers' own losses whole, so that one of them propagates these.
        counts = index_on(STAGE) == 0
        seeds = {name: vary(jnp.where(counts, seed, 0)) for name, seed in self.seeds.items()}

        def one(turn: Array, state: Any) -> Any:
            d_output, d_embedded, d_head, sums = state
            number = self.count - 1 - turn
            run = partial(self._differentiable, inputs=inputs, number=number)
            scored = partial(self._scored, inputs, scale, score, number)
            arguments = self._params(number), read(given, number), embedded
            if self.keep.remat in ("none", "names"):
                kept = self._within_slot.wrap(run, at_once=True)
                (own, losses), pullback, statistics = jax.vjp(kept, *arguments, has_aux=True)
                total, d_own, more = scored(own)
            else:
                total, d_own, more = scored(run(*arguments)[0][0])
                # Not before: one's logits and the other's activations are not there at once.
                d_own, arguments = lax.optimization_barrier((d_own, arguments))
                (_, losses), pullback, statistics = jax.vjp(run, *arguments, has_aux=True)
            of_losses = {name: seeds[name] for name in losses}
            d_params, d_x, d_more = pullback((d_output + d_own, of_losses))
            sums = self._with_head(sums, number, total, d_params)
            sums = _with_reports(sums, number, losses, statistics)
            d_embedded = None if d_embedded is None else d_embedded + d_more
            return d_x, d_embedded, d_head + more, sums

        nothing = vary(jnp.zeros_like(hidden))
        state = (nothing, nothing if self.reads_embedding else None, d_head, sums)
        d_input, d_embedded, d_head, sums = lax.fori_loop(0, self.count, one, state)
        if sums.embedding is not None:
            assert d_embedded is not None
            table = self.embedding.accumulate_parts(sums.embedding, inputs["tokens"], d_embedded)
            sums = sums._replace(embedding=table)
        return d_hidden + d_input.astype(d_hidden.dtype), d_head, sums

    def _given(self, hidden: Array, embedded: Array, inputs: Tree) -> Float[Array, "heads B T D"]:
        """What each layer is given."""
        if self.count == 1:
            return hidden[None]

        def forward(number: Array, given: Array) -> Array:
            x, params = read(given, number), self._params(number)
            return write(given, number + 1, self._layer(params, x, embedded, inputs, number)[0])

        empty = vary(lax.empty((self.count, *hidden.shape), hidden.dtype))
        return lax.fori_loop(0, self.count - 1, forward, write(empty, jnp.int32(0), hidden))

    def _layer(
        self, params: Tree, x: Array, embedded: Array, inputs: Tree, number: Array
    ) -> tuple[Array, Tree, Tree]:
        """A head's layer; only tokens that it has a target for count in its losses."""
        assert isinstance(self.heads, Layers)
        counts = _stays(inputs, number + 1)
        later = jnp.where(counts[..., None], jnp.roll(embedded, -(number + 1), axis=1), 0)
        mine = inputs | {"loss_mask": further(inputs, number + 1)[1]}
        return self.heads.layer(params, x, later, mine, number, self.key)

    def _differentiable(
        self, params: Tree, x: Array, embedded: Array, *, inputs: Tree, number: Array
    ) -> tuple[tuple[Array, Tree], Tree]:
        """((a head's output, losses), statistics)."""
        output, losses, statistics = self._layer(params, x, embedded, inputs, number)
        return (output, losses), statistics

    @property
    def _within_slot(self) -> RematPolicy:
        """What is kept, but that nothing is sent to the host and back within a slot."""
        names = tuple(name for name in self.keep.names if name not in self.keep.offloaded)
        return replace(self.keep, names=names, offloaded=())

    def _scored(
        self, inputs: Tree, scale: Array, score: Score, number: Array, own: Array
    ) -> tuple[Array, Array, Array]:
        weights = jnp.asarray([*self.heads.loss_weights.values()], jnp.float32)
        targets, mask = further(inputs, number + 1)
        total, d_own, d_head = score(own, targets, mask, scale * weights[number])
        return total, d_own.astype(own.dtype), d_head

    def _with_head(self, sums: Sums, number: Array, total: Array, d_params: Tree) -> Sums:
        found = sums.found._replace(losses=sums.found.losses.at[number].add(total))
        gradients = self.weights.accumulate(sums.gradients, number, d_params)
        return sums._replace(found=found, gradients=gradients)


def _with_reports(sums: Sums, number: Array, losses: Tree, statistics: Tree) -> Sums:
    reports = sums.found.reports
    assert reports is not None
    all_losses = {name: total + losses[name] for name, total in reports.losses.items()}
    counted = {
        name: total.at[number].add(statistics[name].astype(jnp.float32))
        for name, total in reports.statistics[AHEAD].items()
    }
    return sums._replace(found=sums.found._replace(reports=Reports(all_losses, {AHEAD: counted})))


def joined(reports: Reports, found: Found | None) -> Reports:
    """Reports of the layers, whose losses are summed over stages, with those of layers ahead."""
    if found is None or found.reports is None:
        return reports
    of_one = jax.tree.map(lambda leaf: from_position(leaf, STAGE, 0), found.reports)
    losses = {name: reports.losses.get(name, 0.0) + loss for name, loss in of_one.losses.items()}
    return Reports(reports.losses | losses, reports.statistics | of_one.statistics)


def further(inputs: Tree, distance: Array) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Targets `distance` tokens behind the ordinary ones, and which of them count.

    Those count that count where they are the ordinary ones, in the same row and segment.
    """
    later = lambda name: jnp.roll(inputs[name], -distance, axis=1)  # noqa: E731
    return later("targets"), later("loss_mask") * _stays(inputs, distance)


def _stays(inputs: Tree, distance: Array) -> Bool[Array, "B T"]:
    """Whether the token that many places on is in the same row and segment."""
    ids = inputs["segment_ids"]
    in_row = jnp.arange(ids.shape[1]) + distance < ids.shape[1]
    return in_row & (jnp.roll(ids, -distance, axis=1) == ids)
