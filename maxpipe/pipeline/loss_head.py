"""The loss head, with the vocabulary sharded over the stages.

Each stage holds V / P columns of the projection and computes the logits for these columns. Small
reductions over the stage axis combine the partial results, so every stage performs an equal share
of the work. The forward and backward passes are hand-written. Autodiff is applied only to the
objective, which is a function of a few numbers per token.

Logits can be computed for one token block at a time, which limits their memory use.

Source: the vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.parallel.collectives import (
    all_gather,
    axis_index,
    axis_size,
    broadcast_from,
    mark_varying,
    max_over,
    sum_over,
)
from maxpipe.parallel.mesh import CONTEXT, STAGE
from maxpipe.pipeline.objective import (
    CrossEntropy,
    LogProbSpec,
    Objective,
    Scores,
    broadcast_segments,
    segment_sums,
)

Tree = Any
TokenFn = Callable[..., tuple[Tree, Tree]]
"""Function that maps (activations, loss mask, other arrays) to (sums over tokens, arrays
`[B, T, ...]`).
"""


def map_token_blocks(
    run: TokenFn,
    size: int,
    x: Float[Array, "B T D"],
    mask: Float[Array, "B T"],
    more: Tree,
) -> tuple[Tree, Tree]:
    """Call `run` on blocks of at most `size` tokens. If `size` is 0, all tokens form a single
    block.

    `more` is a tree of arrays `[B, T, ...]`.

    All blocks have the same size. If the block size does not divide the number of tokens, the last
    block overlaps the previous one, and the overlapping tokens are masked. Sums are computed in
    float32.
    """
    rows, length = mask.shape
    total = rows * length
    if not 0 < size < total:
        return run(x, mask, more)
    count = -(-total // size)
    size = -(-total // count)
    flat = jax.tree.map(lambda a: a.reshape(1, total, *a.shape[2:]), (x, mask, more))

    def block(number: Array) -> tuple[Tree, Array, Array]:
        start = jnp.minimum(number * size, total - size)
        own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, 1), flat)
        return own, start, (start + jnp.arange(size) >= number * size)[None]

    def one(number: Array, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        (x, mask, more), start, fresh = block(number)
        new_sums, arrays = run(x, jnp.where(fresh, mask, 0), more)

        def put(whole: Array, part: Array) -> Array:
            if total % size:
                old = lax.dynamic_slice_in_dim(whole, start, size, 1)
                keep = fresh.reshape(*fresh.shape, *(1,) * (part.ndim - 2))
                part = jnp.where(keep, part, old)
            return lax.dynamic_update_slice_in_dim(whole, part, start, 1)

        sums, wholes = state
        return jax.tree.map(jnp.add, sums, new_sums), jax.tree.map(put, wholes, arrays)

    sums, arrays = jax.eval_shape(lambda number: run(*block(number)[0]), mark_varying(jnp.int32(0)))
    start = (
        jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), sums),
        jax.tree.map(lambda a: lax.empty((1, total, *a.shape[2:]), a.dtype), arrays),
    )
    sums, arrays = lax.fori_loop(0, count, one, mark_varying(start))
    return sums, jax.tree.map(lambda a: a.reshape(rows, length, *a.shape[2:]), arrays)


_COTANGENTS = "cotangents"
"""Key under which the token arrays store precomputed cotangents of the per-token scores, if any."""

TokenArrays = Mapping[str, Any]
"""Arrays `[B, T, ...]` that the objective uses, and the index of each token's data source."""
CotangentFn = Callable[[Scores, Array, TokenArrays], tuple[Array | None, Scores]]
"""Function that maps (scores, loss mask, per-token arrays) to (sums, cotangents of the scores).

The sums are None if they have already been computed."""


class LossGradients(NamedTuple):
    """Summed losses of one microbatch, and the gradients of the loss."""

    sums: Float[Array, "*sums"]
    """Float32 sums of the loss and of the objective's metrics: `[R]`, or `[R, sources]` with
    several sources."""
    output: Float[Array, "B T W"]
    """Cotangent of the last layer's output."""
    norm: Any
    head: Float[Array, "D v"]
    """Float32 gradient of this stage's columns, summed over the microbatch."""


class _Logits(NamedTuple):
    """Float32 logits for this stage's vocabulary columns."""

    values: Float[Array, "B T v"]
    slope: Float[Array, "B T v"] | float | None
    """Derivative of the logits with respect to the matmul output. None means 1."""
    token_ids: Int[Array, " v"]
    """Token IDs of this stage's columns."""


class _Softmax(NamedTuple):
    """exp(logits - maximum) for this stage's columns, and its sum over the full vocabulary."""

    exponent: Float[Array, "B T v"]
    normaliser: Float[Array, "B T"]


class LossHead(NamedTuple):
    """Final norm, projection to the vocabulary, and the objective."""

    reduce: Callable[[Any, Float[Array, "B T W"]], Float[Array, "B T D"]]
    """Function that maps the last layer's output to the input of the final norm. The parameters are
    those of `norm`. Only the reduced output is sent to the other stages."""
    norm: Callable[[Any, Float[Array, "B T D"]], Float[Array, "B T D"]]
    last_stage: int
    """Stage that holds the network's last chunk."""
    vocab_size: int
    """Vocabulary size without padding. Padding columns have zero probability."""
    objective: Objective
    logit_scale: float = 1.0
    """Scaling factor applied to the logits."""
    final_logit_softcapping: float = 0.0
    """Soft cap: scaled logits become `cap * tanh(logits / cap)`. 0 disables the cap."""
    block_tokens: int = 0
    """Number of tokens whose logits are in memory at the same time. If 0, all tokens of a
    microbatch are processed together."""
    num_sources: int = 0
    """Number of data sources for which sums are computed separately. If 0, one sum covers all
    sequences."""

    # Forward only.

    def loss(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T W"],
        inputs: Any,
    ) -> Float[Array, "*sums"]:
        """Return the weighted sums of the loss and the metrics over the microbatch."""
        if self.objective.segments_per_loss:
            scores = self._all_scores(
                norm_params, head, *self._token_arrays(norm_params, output, inputs)
            )
            return self._segment_losses(scores, inputs, None)[0]

        def of_block(x: Array, mask: Array, given: TokenArrays) -> tuple[Array, None]:
            logits = self._logits(self.norm(norm_params, x), head)
            scores, _ = self._log_probs(logits, self.objective.log_prob_specs, given)
            return self._token_losses(self.objective, None, scores, mask, given)[0], None

        return map_token_blocks(
            of_block, self.block_tokens, *self._token_arrays(norm_params, output, inputs)
        )[0]

    def scores(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T W"],
        inputs: Any,
    ) -> Scores:
        """Return the objective's inputs: per-token scores, or sums of these scores over segments
        `[B, S]`.
        """
        scores = self._all_scores(
            norm_params, head, *self._token_arrays(norm_params, output, inputs)
        )
        return self._sum_by_segment(scores, inputs) if self.objective.segments_per_loss else scores

    def top_log_probs(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T W"],
        inputs: Any,
        *,
        count: int,
        temperature: float,
    ) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
        """Return the `count` largest log-probabilities at each position in descending order, and
        their token IDs.
        """

        def of_block(x: Array, mask: Array, given: TokenArrays) -> tuple[None, Scores]:
            del mask, given
            logits = self._logits(self.norm(norm_params, x), head)
            _, log = _softmax(logits.values / temperature)
            # Ties are resolved in favor of the smaller ID, regardless of how the columns are
            # sharded.
            local_logits, at = jax.lax.top_k(logits.values, min(count, logits.values.shape[-1]))
            ids = jnp.take(logits.token_ids, at)
            all_logits, all_ids = (all_gather(array, STAGE, 2) for array in (local_logits, ids))
            largest, at = jax.lax.top_k(all_logits, count)
            ids = jnp.take_along_axis(all_ids, at, axis=2)
            return None, mark_varying((largest / temperature - log[..., None], ids))

        return map_token_blocks(
            of_block, self.block_tokens, *self._token_arrays(norm_params, output, inputs)
        )[1]

    # With gradients.

    def loss_and_grad(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T W"],
        inputs: Any,
        scale: Float[Array, ""],
        ahead: Callable[..., Any] | None = None,
    ) -> tuple[LossGradients, Any]:
        """Return the loss, and the gradients of the loss multiplied by `scale`.

        `output` comes from the last stage, `head` is this stage's shard, and `inputs` are the
        microbatch's arrays. MTP heads (`ahead`) contribute to the gradients of both `output` and
        `head`. The other
        results of the MTP heads are the second return value (see `MtpLossHeads.add`).

        The gradient of the norm's parameters is valid on the last stage only.
        """
        norm_params = mark_varying(norm_params)
        reduced, reduce_vjp = jax.vjp(self.reduce, norm_params, output)
        x, mask, given = self._shared_arrays(reduced, inputs)
        of_segments, cotangents_of = None, partial(self._token_losses, self.objective, scale)
        if self.objective.segments_per_loss and not 0 < self.block_tokens < mask.size:
            cotangents_of = lambda scores, *_: self._segment_losses(scores, inputs, scale)  # noqa: E731
        elif self.objective.segments_per_loss:
            # The cotangents depend on sums over all blocks, so the logits of each block are
            # computed twice.
            scores = self._all_scores(norm_params, head, x, mask, given)
            of_segments, known = self._segment_losses(scores, inputs, scale)
            given, cotangents_of = given | {_COTANGENTS: known}, _known_cotangents

        def of_block(x: Array, mask: Array, given: TokenArrays) -> tuple[Any, Array]:
            hidden, norm_vjp = jax.vjp(self.norm, norm_params, x)
            total, d_hidden, d_head = self._loss_gradients(
                self.objective.log_prob_specs, cotangents_of, head, hidden, mask, given
            )
            sums = None
            if ahead is not None:
                score = partial(self._cross_entropy, head)  # summed over all sequences
                d_hidden, d_head, sums = ahead(score, hidden, d_hidden, d_head)
            d_hidden = mark_varying(sum_over(d_hidden, STAGE)).astype(hidden.dtype)
            d_norm, d_x = norm_vjp(d_hidden)
            return (total, d_norm, d_head, sums), d_x

        # MTP heads use tokens from other blocks, so the final norm is applied to all tokens at
        # once. Only the logits are computed in blocks.
        size = self.block_tokens if ahead is None else 0
        (total, d_norm, d_head, sums), d_x = map_token_blocks(of_block, size, x, mask, given)
        of_reduction, d_output = reduce_vjp(d_x)
        d_norm = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_norm, of_reduction)
        total = total if of_segments is None else of_segments
        return LossGradients(total, d_output, d_norm, d_head), sums

    def _cross_entropy(
        self,
        head: Float[Array, "D v"],
        hidden: Float[Array, "B T D"],
        scale: Float[Array, ""],
        targets: Int[Array, "B T"],
        mask: Float[Array, "B T"],
    ) -> tuple[Float[Array, ""], Float[Array, "B T D"], Float[Array, "D v"]]:
        """Return an MTP head's cross entropy, and the gradients of this loss."""
        objective, arrays = CrossEntropy(), {"targets": targets}
        total, d_hidden, d_head = self._loss_gradients(
            objective.log_prob_specs,
            partial(self._token_losses, objective, scale),
            head,
            hidden,
            mask,
            arrays,
        )
        assert total is not None
        return total[0], d_hidden, d_head

    def _loss_gradients(
        self,
        reads: tuple[LogProbSpec, ...],
        cotangents_of: CotangentFn,
        head: Float[Array, "D v"],
        hidden: Float[Array, "B T D"],
        mask: Float[Array, "B T"],
        given: TokenArrays,
    ) -> tuple[Float[Array, "*sums"] | None, Float[Array, "B T D"], Float[Array, "D v"]]:
        """Return the sums, and this stage's gradients with respect to `hidden` and the head
        columns.
        """

        def of_block(hidden: Array, mask: Array, given: TokenArrays) -> tuple[Any, Array]:
            logits = self._logits(hidden, head)
            scores, softmaxes = self._log_probs(logits, reads, given)
            total, cotangents = cotangents_of(scores, mask, given)
            terms = zip(reads, softmaxes, cotangents, strict=True)
            errors = [
                _logits_cotangent(logits, softmax, read, given, ct) for read, softmax, ct in terms
            ]
            error = sum(errors[1:], start=errors[0])
            error = error if logits.slope is None else error * logits.slope
            error = error.astype(hidden.dtype)
            d_head = _einsum_float32("btd,btv->dv", hidden, error)
            return (total, d_head), _einsum_float32("btv,dv->btd", error, head)

        (total, d_head), d_hidden = map_token_blocks(
            of_block, self.block_tokens, hidden, mask, given
        )
        return total, d_hidden, d_head

    # Scores.

    def _token_arrays(
        self, norm_params: Any, output: Array, inputs: Any
    ) -> tuple[Array, Array, dict[str, Any]]:
        """Return the input of the final norm, the loss mask, and the other per-token arrays."""
        return self._shared_arrays(self.reduce(mark_varying(norm_params), output), inputs)

    def _shared_arrays(self, reduced: Array, inputs: Any) -> tuple[Array, Array, dict[str, Any]]:
        extra = (
            name for name, array in self.objective.batch_arrays.items() if not array.per_sequence
        )
        names = dict.fromkeys([*(read.ids for read in self.objective.log_prob_specs), *extra])
        arrays = {name: inputs[name] for name in names}
        mask = inputs["loss_mask"]
        if self.num_sources:
            arrays["source_ids"] = jnp.broadcast_to(inputs["source_ids"][:, None], mask.shape)
        return mark_varying(broadcast_from(reduced, STAGE, self.last_stage)), mask, arrays

    def _logits(self, hidden: Float[Array, "B T D"], head: Float[Array, "D v"]) -> _Logits:
        num_columns = head.shape[1]
        logits, slope = _einsum_float32("btd,dv->btv", hidden, head), None
        if self.logit_scale != 1.0:
            logits, slope = logits * self.logit_scale, self.logit_scale
        if self.final_logit_softcapping:
            bent = jnp.tanh(logits / self.final_logit_softcapping)
            logits, slope = (
                self.final_logit_softcapping * bent,
                (1.0 - bent * bent) * self.logit_scale,
            )
        column = axis_index(STAGE) * num_columns + jnp.arange(num_columns)
        logits = jnp.where(column < self.vocab_size, logits, jnp.finfo(jnp.float32).min)
        return _Logits(logits, slope, column)

    def _log_probs(
        self, logits: _Logits, reads: tuple[LogProbSpec, ...], given: TokenArrays
    ) -> tuple[Scores, tuple[_Softmax, ...]]:
        """Return the log-probabilities listed in `reads`, and the softmax computed for each of
        them.
        """
        scores, softmaxes, known = [], [], {}
        for read in reads:
            if read.temperature not in known:
                known[read.temperature] = _softmax(
                    _apply_temperature(logits.values, read.temperature)
                )
            softmax, log = known[read.temperature]
            ids = given[read.ids]
            picked = _apply_temperature(_gather_logits(logits, ids), read.temperature)
            scores.append(picked - (log if ids.ndim == 2 else log[..., None]))
            softmaxes.append(softmax)
        return tuple(scores), tuple(softmaxes)

    def _all_scores(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T W"],
        mask: Float[Array, "B T"],
        given: TokenArrays,
    ) -> Scores:

        def of_block(output: Array, mask: Array, given: TokenArrays) -> tuple[None, Scores]:
            del mask
            logits = self._logits(self.norm(norm_params, output), head)
            return None, self._log_probs(logits, self.objective.log_prob_specs, given)[0]

        return map_token_blocks(of_block, self.block_tokens, output, mask, given)[1]

    def _sum_by_segment(self, scores: Scores, inputs: Any) -> Scores:
        """Return the sums over the tokens of each segment `[B, S]`, across all context devices."""
        mask, ids = inputs["loss_mask"], inputs["segment_ids"]
        count = self.objective.segments_per_loss * inputs[self.objective.normaliser].shape[1]
        of_rows = (segment_sums(score * mask, ids, count) for score in scores)
        return tuple(mark_varying(sum_over(score, CONTEXT)) for score in of_rows)

    def _token_losses(
        self,
        objective: Objective,
        scale: Float[Array, ""] | None,
        scores: Scores,
        mask: Float[Array, "B T"],
        given: TokenArrays,
    ) -> tuple[Float[Array, "*sums"], Scores]:
        """Return the sums, and the cotangents of the scores for the loss multiplied by `scale`."""
        lost, cotangents, reports = _value_and_grad(objective, scores, given, mask, scale)
        return self._weighted_sums((lost, *reports), mask, given.get("source_ids")), cotangents

    def _segment_losses(
        self, scores: Scores, inputs: Any, scale: Float[Array, ""] | None
    ) -> tuple[Float[Array, "*sums"], Scores]:
        """Compute the same results as `_token_losses` for a per-segment objective; `scores` must
        cover all tokens.
        """
        weight, rows = inputs[self.objective.normaliser], self._sum_by_segment(scores, inputs)
        lost, cotangents, reports = _value_and_grad(self.objective, rows, inputs, weight, scale)
        sources = inputs["source_ids"][:, None] if self.num_sources else None
        mask, ids = inputs["loss_mask"], inputs["segment_ids"]
        of_tokens = tuple(broadcast_segments(cotangent, ids) * mask for cotangent in cotangents)
        return self._weighted_sums((lost, *reports), mask_other_devices(weight), sources), of_tokens

    def _weighted_sums(
        self, values: Scores, weight: Float[Array, "B N"], sources: Int[Array, "B _"] | None
    ) -> Float[Array, "*sums"]:
        weighted = [value * weight for value in values]
        if sources is None:
            return mark_varying(jnp.stack([value.sum() for value in weighted]))
        return mark_varying(
            jnp.stack([sum_by_source(value, self.num_sources, sources) for value in weighted])
        )


def _known_cotangents(scores: Scores, mask: Array, given: TokenArrays) -> tuple[None, Scores]:
    """Return a block's precomputed cotangents, with zeros for masked tokens."""
    del scores
    return None, tuple(jnp.where(mask != 0, cotangent, 0) for cotangent in given[_COTANGENTS])


def mask_other_devices(values: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Return `values` unchanged on the first device along the context axis, and zeros on all other
    devices.
    """
    if axis_size(CONTEXT) == 1:
        return values
    return jnp.where(axis_index(CONTEXT) == 0, values, 0)


def _value_and_grad(
    objective: Objective,
    scores: Scores,
    inputs: TokenArrays,
    weight: Array,
    scale: Float[Array, ""] | None,
) -> tuple[Array, Scores, Scores]:
    """Return the losses, the cotangents of the scores (empty if `scale` is None), and the
    metrics.
    """

    def run(scores: Scores) -> tuple[Array, Scores]:
        return objective(scores, inputs)

    if scale is None:
        lost, reports = run(scores)
        return lost, (), reports
    # If the scores were marked as replicated, JAX would sum their cotangents over the devices.
    lost, vjp, reports = jax.vjp(run, mark_varying(scores), has_aux=True)
    return lost, vjp(weight * scale)[0], reports


def _softmax(
    values: Float[Array, "B T v"],
) -> tuple[_Softmax, Float[Array, "B T"]]:
    """Return the softmax and the log-sum-exp over the full vocabulary."""
    largest = max_over(values.max(axis=-1), STAGE)
    exponent = jnp.exp(values - largest[..., None])
    normaliser = sum_over(exponent.sum(axis=-1), STAGE)
    return _Softmax(exponent, normaliser), jnp.log(normaliser) + largest


def _apply_temperature(values: Array, temperature: float) -> Array:
    return values if temperature == 1.0 else values / temperature


def _gather_logits(logits: _Logits, ids: Int[Array, "B T *K"]) -> Float[Array, "B T *K"]:
    """Return the logits of these token IDs, summed over the stages that hold them."""
    if ids.ndim == 2:
        is_target = logits.token_ids == ids[..., None]
        return sum_over(jnp.where(is_target, logits.values, 0.0).sum(axis=-1), STAGE)
    place, is_local = _local_columns(logits, ids)
    picked = jnp.take_along_axis(logits.values, jnp.where(is_local, place, 0), axis=-1)
    return sum_over(jnp.where(is_local, picked, 0.0), STAGE)


def _local_columns(logits: _Logits, ids: Array) -> tuple[Array, Array]:
    """Return each token ID's index among this stage's columns, and whether this stage holds the
    ID.
    """
    place = ids - logits.token_ids[0]
    return place, (place >= 0) & (place < logits.token_ids.shape[0])


def _logits_cotangent(
    logits: _Logits,
    softmax: _Softmax,
    read: LogProbSpec,
    given: TokenArrays,
    cotangent: Float[Array, "B T *K"],
) -> Float[Array, "B T v"]:
    """Return the cotangent of the logits, given the cotangent of the log-probabilities."""
    ids, share = given[read.ids], softmax.exponent / softmax.normaliser[..., None]
    cotangent = _apply_temperature(cotangent, read.temperature)
    if ids.ndim == 2:
        is_target = (logits.token_ids == ids[..., None]).astype(jnp.float32)
        return (share - is_target) * -cotangent[..., None]
    place, is_local = _local_columns(logits, ids)
    place = jnp.where(is_local, place, logits.token_ids.shape[0])  # out of range: dropped
    rows, tokens = (jnp.arange(size) for size in ids.shape[:2])
    error = -share * cotangent.sum(-1, keepdims=True)
    where = rows[:, None, None], tokens[:, None], place
    return error.at[where].add(cotangent, mode="drop")


def sum_by_source(
    values: Float[Array, "B T"], num_sources: int, sources: Int[Array, "B _"]
) -> Float[Array, " sources"]:
    """Return the sums over the tokens of each data source."""
    # Compute one sum per source, because the summation order of a scatter-add depends on the
    # device.
    is_source = sources == jnp.arange(num_sources)[:, None, None]
    return jnp.where(is_source, values, 0.0).sum((1, 2))


def _einsum_float32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute an einsum with float32 accumulation. The CPU backend lacks some bfloat16 matmuls, so
    inputs are cast to float32 on CPU.
    """
    multiply = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if a.dtype != jnp.bfloat16:
        return multiply(a, b)
    wide = lambda a, b: multiply(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(a, b, cpu=wide, default=multiply)
