"""Kimi delta attention over packed sequences (arXiv:2510.26692).

The decay between two tokens is a vector. Its logarithm can be arbitrarily negative, so factors that
compensate a decay would overflow. Scores are therefore computed from pairs of adjacent blocks: the
decay from a token of the earlier block to a token of the later block is the product of the decay
until the boundary and the decay since the boundary, and both factors are at most 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import kda
from maxpipe.nn.chunked_scan import (
    RecurrentCache,
    Weights,
    cache_of,
    chunk_size,
    cut,
    empty_cache,
    scan_chunks,
)
from maxpipe.nn.delta_rule import Chunk, ChunkDecay, convolve, make_chunks
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel.sharding import AxisRules, constrain

_HEADS = (None, None, "heads", None)


class KimiDelta(SpecModule):
    """Linear attention with a state of constant size, whose rows decay at different rates."""

    out: nnx.Param

    def __init__(self, part: kda.KimiDelta, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the delta rule causally within document segments. Each segment must be
        contiguous.
        """
        part, rules, dtype = self.part, self.rules, x.dtype
        split = context.split(rules)
        x = split.gather_tokens(x)

        def project(name: str, x: Array) -> Array:
            return split.unsharded_matmul(x, getattr(self, name)[...].astype(dtype))

        latents = [
            checkpoint_name(project(f"{name}_down", x), f"{name}_latent")
            for name in ("forget", "gate")
        ]
        projected = [project(name, x) for name in ("query", "key", "value")]
        projected += [project("forget_up", latents[0]), project("gate_up", latents[1])]
        inputs = constrain(jnp.concatenate(projected, axis=-1), _HEADS, rules)
        inputs = checkpoint_name(inputs, "kda_inputs")
        write = checkpoint_name(constrain(project("write", x), _HEADS[:3], rules), "kda_write")
        mixed = inputs[..., : part.mixed_size]
        before = cache_of(context, mixed, part.kernel - 1, part.state_shape)
        segments = context.inputs["segment_ids"]
        weights = {
            name: getattr(self, name)[...] for name in part.params if name not in part.projections
        }
        results: Any = scan_chunks(_DeltaRule(part), weights, (inputs, write), segments, before)
        read, state = results
        read = checkpoint_name(constrain(read, _HEADS, rules), "state_read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
        cache = None if context.cache is None else before.append(mixed, segments, state)
        return Output(checkpoint_name(out, "kda_out"), cache=cache)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache, whose size does not depend on `tokens`."""
        del tokens
        mixed = jnp.zeros((rows, 0, part.num_heads, part.mixed_size), dtype)
        return empty_cache(mixed, part.kernel - 1, part.state_shape)

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `RecurrentCache` array."""
        del part
        tail, state = ("batch", None, "heads", None), ("batch", "heads", None, None, None)
        return RecurrentCache(tail, ("batch", None), state)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _DeltaRule:
    """The recurrence of Kimi delta attention.

    Its inputs are queries, keys, values, decay logits and output gates, concatenated for each head,
    and the logits of the write gates.
    """

    part: kda.KimiDelta
    step_weights: ClassVar[tuple[str, ...]] = ("norm",)

    def step(
        self, weights: Weights, state: Float[Array, "B H 1 d d"], chunk: Chunk
    ) -> tuple[Float[Array, "B H 1 d d"], Float[Array, "B H 1 C d"]]:
        """Return the state at the end of a chunk, and the chunk's normalized and gated output."""
        state, read = chunk.pass_state(state)
        read = rms_norm(read, weights["norm"].astype(jnp.float32), self.part.norm)
        gate = jax.nn.sigmoid(chunk.gate.astype(jnp.float32))
        return state, (read * gate).astype(chunk.gate.dtype)

    def chunks(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Chunk:
        """Return all chunks of the sequences."""
        part, (joined, write) = self.part, inputs
        head_dim, size = part.head_dim, chunk_size(part, segments.shape[1])
        ends = (part.mixed_size, part.mixed_size + head_dim)
        mixed, forget, gate = jnp.split(joined, ends, axis=-1)
        heads = (part.num_heads, head_dim)
        query, key, value = convolve(weights, heads, mixed, segments, before)
        query, key, value, forget, gate = (
            cut(x, size)[:, :, :, None]
            for x in (
                query * head_dim**-0.5,
                key,
                value,
                _log_decay(weights, forget, segments, before),
                gate,
            )
        )
        scores, decay = decayed_scores(jnp.stack([query, key]), key, forget)
        own = jnp.eye(size) * (query * key).sum(-1)[..., None]
        write = jax.nn.sigmoid(write.astype(jnp.float32))
        write = cut(write[..., None, None], size)
        return make_chunks(query, key, value, write, (scores[0] + own, scores[1]), decay, gate)


def _log_decay(
    weights: Weights,
    forget: Float[Array, "B T H d"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
) -> Float[Array, "B T H d"]:
    """Return the log decay of the state before each token; -inf at the start of a document."""
    rate, bias = (weights[name].astype(jnp.float32) for name in ("decay", "decay_bias"))
    decay = -jnp.exp(rate)[:, None] * jax.nn.softplus(forget.astype(jnp.float32) + bias)
    last = jnp.concatenate([before.segments[:, -1:], segments[:, :-1]], axis=1)
    return jnp.where((segments != last)[:, :, None, None], -jnp.inf, decay)


class _LogDecay(NamedTuple):
    """Log decay within blocks of tokens. Sums of negative numbers have no cancellation, unlike
    differences of cumulative sums.
    """

    since: Float[Array, "*dims blocks tokens d"]
    """Log decay from the start of the block to each token."""
    until: Float[Array, "*dims blocks tokens d"]
    """Log decay from each token to the end of the block."""

    def merge(self) -> _LogDecay:
        """Return the log decay within blocks of twice the size."""
        earlier, later = self._pairs(self.since)
        earlier_until, later_until = self._pairs(self.until)
        since = jnp.concatenate([earlier, earlier[..., -1:, :] + later], axis=-2)
        until = jnp.concatenate([earlier_until + later[..., -1:, :], later_until], axis=-2)
        return _LogDecay(since, until)

    def factors(self) -> tuple[Float[Array, "*dims pairs s d"], Float[Array, "*dims pairs s d"]]:
        """Return the decay since the boundary of each pair of blocks, for the later block, and the
        decay until the boundary, for the earlier block.
        """
        return jnp.exp(self._pairs(self.since)[1]), jnp.exp(self._pairs(self.until)[0])

    @staticmethod
    def _pairs(x: Float[Array, "*dims blocks s d"]) -> tuple[Array, Array]:
        return x[..., 0::2, :, :], x[..., 1::2, :, :]


def decayed_scores(
    left: Float[Array, "2 *dims C d"],
    right: Float[Array, "*dims C d"],
    decay: Float[Array, "*dims C d"],
) -> tuple[Float[Array, "2 *dims C C"], ChunkDecay]:
    """Return the scores of each token with the earlier tokens of its chunk, and the decay within
    the chunk.

    A score is the sum over d of `left` times `right` times the decay between both tokens. `decay`
    is the log decay of each token. The number of tokens C is a power of two.
    """
    size = right.shape[-2]
    logs = _LogDecay(decay[..., None, :], jnp.zeros_like(decay)[..., None, :])
    base = min(size, kda.BLOCK)
    scores, block = jnp.zeros((*left.shape[:-2], size // base, base, base), left.dtype), 1
    while block < base:
        scores, logs = scores + _masked_scores(left, right, logs, base), logs.merge()
        block *= 2
    while block < size:
        later, earlier = logs.factors()
        below = jnp.einsum(
            "...cd,...ed->...ce",
            _blocks(left, block)[..., 1::2, :, :] * later,
            _blocks(right, block)[..., 0::2, :, :] * earlier,
        )
        above = jnp.zeros_like(below)
        scores = jnp.concatenate(
            [
                jnp.concatenate([scores[..., 0::2, :, :], above], axis=-1),
                jnp.concatenate([below, scores[..., 1::2, :, :]], axis=-1),
            ],
            axis=-2,
        )
        logs, block = logs.merge(), 2 * block
    since, until = (jnp.exp(x[..., 0, :, :]) for x in logs)
    return scores[..., 0, :, :], ChunkDecay(since, until)


def _masked_scores(
    left: Float[Array, "2 *dims C d"], right: Float[Array, "*dims C d"], logs: _LogDecay, base: int
) -> Float[Array, "2 *dims blocks base base"]:
    """Return the scores between the blocks of each pair, in blocks of `base` tokens.

    One matmul of `base` tokens is faster than many matmuls of a few tokens.
    """
    block = logs.since.shape[-2]
    later, earlier = logs.factors()
    nothing = jnp.zeros_like(later)

    def joined(first: Array, second: Array) -> Array:
        pairs = jnp.stack([first, second], axis=-3)
        return pairs.reshape(*pairs.shape[:-4], -1, base, pairs.shape[-1])

    scores = jnp.einsum(
        "...cd,...ed->...ce",
        _blocks(left, base) * joined(nothing, later),
        _blocks(right, base) * joined(earlier, nothing),
    )
    pair = jnp.arange(base) // (2 * block)
    return jnp.where(pair[:, None] == pair, scores, 0.0)


def _blocks(x: Float[Array, "*dims C d"], size: int) -> Float[Array, "*dims blocks size d"]:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])
