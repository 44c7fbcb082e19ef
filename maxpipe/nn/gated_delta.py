"""Chunked gated delta rule over packed sequences.

All tokens in a chunk are processed at once with the inverse of a triangular matrix (the WY
representation of arXiv:2412.06464). A recurrent state is passed from chunk to chunk. The state and
the convolution are reset at document boundaries. The backward pass recomputes each chunk from its
saved initial state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers import gated_delta
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_EPSILON = 1e-6
"""Epsilon added to the squared norm of queries and keys."""
_EMPTY_SEGMENT = -1
"""Segment ID that marks positions before the start of a sequence."""
_NAMES = ("conv_query", "conv_key", "conv_value", "decay", "decay_bias", "norm")

Weights = Mapping[str, Array]


class GatedDeltaCache(NamedTuple):
    """Cache of one layer, whose size does not depend on the number of earlier tokens."""

    tail: Float[Array, "B w K E"]
    """Convolution inputs of the most recent tokens."""
    segments: Int[Array, "B w"]
    """Segment IDs of the tokens whose convolution inputs are in `tail`."""
    state: Float[Array, "B K r dk dv"]
    """Float32 recurrent state."""

    def append(
        self, mixed: Float[Array, "B T K E"], segments: Int[Array, "B T"], state: Array
    ) -> GatedDeltaCache:
        """Return the cache after T more tokens; `state` is the recurrent state after these
        tokens.
        """
        width = self.segments.shape[1]
        tail, of = self.prepend_tail(mixed, segments)
        return GatedDeltaCache(tail[:, -width:], of[:, -width:], state)

    def prepend_tail(
        self, mixed: Float[Array, "B T K E"], segments: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B S K E"], Int[Array, "B S"]]:
        """Return the cached and the new convolution inputs, concatenated, and the segment IDs of
        both.
        """
        tail = jnp.concatenate([self.tail, mixed], axis=1)
        return tail, jnp.concatenate([self.segments, segments], axis=1)


class Chunk(NamedTuple):
    """Float32 arrays with which a chunk reads and updates the state, including decay.

    Entries for pairs of tokens from different documents are 0.
    """

    query: Float[Array, "B K r C dk"]
    """Queries that read the state at the start of the chunk."""
    key: Float[Array, "B K r C dk"]
    """Keys that write to the state at the end of the chunk."""
    value: Float[Array, "B K r C dv"]
    """Values that would be written to an empty state."""
    known: Float[Array, "B K r C dk"]
    """Keys that read the values already stored in the state."""
    mixing: Float[Array, "B K r C C"]
    """Weights with which the written values contribute to the chunk's outputs."""
    keep: Float[Array, "B K r"]
    """Factor by which the state decays over the chunk."""
    gate: Float[Array, "B K r C dv"]
    """Output gate, in the compute dtype."""


class GatedDelta(SpecModule):
    """Linear attention with a state of constant size (arXiv:2412.06464)."""

    conv_query: nnx.Param
    conv_key: nnx.Param
    conv_value: nnx.Param
    decay: nnx.Param
    decay_bias: nnx.Param
    norm: nnx.Param
    out: nnx.Param

    def __init__(self, part: gated_delta.GatedDelta, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the delta rule causally within document segments. Each segment must be
        contiguous.
        """
        part, rules, dtype = self.part, self.rules, x.dtype
        split = context.split(rules)
        x = split.gather_tokens(x)
        qkvz, ba = (self._projected(name, x, split) for name in ("qkvz", "ba"))
        before = _empty_cache(part, qkvz) if context.cache is None else context.cache
        segments = context.inputs["segment_ids"]
        weights = {name: getattr(self, name)[...] for name in _NAMES}
        results: Any = _delta_rule(part, weights, qkvz, ba, segments, before)
        read, state = results
        read = checkpoint_name(constrain(read, (None, None, "heads", None), rules), "read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
        mixed = qkvz[..., : part.mixed_size]
        cache = None if context.cache is None else before.append(mixed, segments, state)
        return Output(checkpoint_name(out, "delta_out"), cache=cache)

    def _projected(
        self, name: str, x: Float[Array, "B T D"], split: SequenceParallel
    ) -> Float[Array, "B T K E"]:
        """Return a projection, split into key heads."""
        by_key = (*x.shape[:2], self.part.num_key_heads, -1)
        projected = [
            split.unsharded_matmul(x, getattr(self, source)[...].astype(x.dtype)).reshape(by_key)
            for source in self.part.sources[name]
        ]
        joined = projected[0] if len(projected) == 1 else jnp.concatenate(projected, axis=-1)
        return checkpoint_name(constrain(joined, (None, None, "kv_heads", None), self.rules), name)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache, whose size does not depend on `tokens`."""
        del tokens
        return _empty_cache(part, jnp.zeros((rows, 0, part.num_key_heads, 0), dtype))

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `GatedDeltaCache` array."""
        del part
        tail, state = ("batch", None, "kv_heads", None), ("batch", "kv_heads", None, None, None)
        return GatedDeltaCache(tail, ("batch", None), state)  # type: ignore[arg-type]


def _empty_cache(part: gated_delta.GatedDelta, like: Float[Array, "B T K E"]) -> GatedDeltaCache:
    """Return an empty cache for sequences whose projections have the shape of `like`."""
    rows, _, heads, _ = like.shape
    width = part.kernel - 1
    state = (rows, heads, part.group, part.key_size, part.value_size)
    return GatedDeltaCache(
        lax.full_like(like, 0, shape=(rows, width, heads, part.mixed_size)),
        lax.full_like(like, _EMPTY_SEGMENT, jnp.int32, shape=(rows, width)),
        lax.full_like(like, 0, jnp.float32, shape=state),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_rule(
    part: gated_delta.GatedDelta,
    weights: Weights,
    qkvz: Float[Array, "B T K E"],
    ba: Float[Array, "B T K e"],
    segments: Int[Array, "B T"],
    before: GatedDeltaCache,
) -> tuple[Float[Array, "B T V dv"], Float[Array, "B K r dk dv"]]:
    """Return the normalized and gated output, and the recurrent state after the last token."""
    chunks = _chunks(part, weights, qkvz, ba, segments, before)
    state, read = lax.scan(partial(_chunk_step, part, weights["norm"]), before.state, chunks)
    return _merge_chunks(read, qkvz.shape[1]), state


def _delta_rule_forward(part: gated_delta.GatedDelta, *arguments: Any) -> tuple[Any, Any]:
    chunks, (weights, qkvz, *_, before) = _chunks(part, *arguments), arguments

    def through(state: Array, chunk: Chunk) -> tuple[Array, tuple[Array, Array]]:
        after, read = _chunk_step(part, weights["norm"], state, chunk)
        return after, (read, state)

    state, (read, states) = lax.scan(through, before.state, chunks)
    return (_merge_chunks(read, qkvz.shape[1]), state), (arguments, states)


def _delta_rule_backward(part: gated_delta.GatedDelta, saved: Any, cotangents: Any) -> Any:
    (weights, qkvz, ba, segments, before), states = saved

    def again(weights: Weights, qkvz: Array, ba: Array, tail: Array) -> Chunk:
        return _chunks(part, weights, qkvz, ba, segments, before._replace(tail=tail))

    chunks, pull_chunks = jax.vjp(again, weights, qkvz, ba, before.tail)
    d_read, d_state = cotangents
    d_read = d_read.reshape(*d_read.shape[:2], part.num_key_heads, part.group, part.value_size)
    d_read = _cut(d_read, chunks.mixing.shape[-1])

    def back(carry: tuple[Array, Array], each: Any) -> tuple[tuple[Array, Array], Chunk]:
        (d_state, d_norm), (state, chunk, d_read) = carry, each
        _, pull = jax.vjp(partial(_chunk_step, part), weights["norm"], state, chunk)
        more, d_state, d_chunk = pull((d_state, d_read))
        return (d_state, d_norm + more.astype(jnp.float32)), d_chunk

    nothing = lax.full_like(d_state, 0, shape=weights["norm"].shape)
    inputs = (states, chunks, d_read)
    (d_state, d_norm), d_chunks = lax.scan(back, (d_state, nothing), inputs, reverse=True)
    d_weights, d_qkvz, d_ba, d_tail = pull_chunks(d_chunks)
    d_weights["norm"] += d_norm.astype(d_weights["norm"].dtype)
    # A split backward pass saves these small gradients instead of their inputs.
    d_weights, d_qkvz, d_ba = lax.optimization_barrier((d_weights, d_qkvz, d_ba))
    return d_weights, d_qkvz, d_ba, None, GatedDeltaCache(d_tail, None, d_state)  # type: ignore[arg-type]


_delta_rule.defvjp(_delta_rule_forward, _delta_rule_backward)


def _chunk_step(
    part: gated_delta.GatedDelta,
    norm: Float[Array, " dv"],
    state: Float[Array, "B K r dk dv"],
    chunk: Chunk,
) -> tuple[Float[Array, "B K r dk dv"], Float[Array, "B K r C dv"]]:
    """Return the state at the end of a chunk, and the chunk's normalized and gated output."""
    written = chunk.value - chunk.known @ state
    read = chunk.query @ state + chunk.mixing @ written
    state = chunk.keep[..., None, None] * state + chunk.key.swapaxes(-1, -2) @ written
    dtype = chunk.gate.dtype
    read = rms_norm(read.astype(dtype), norm, part.norm).astype(jnp.float32)
    return state, (read * jax.nn.silu(chunk.gate.astype(jnp.float32))).astype(dtype)


def _chunks(
    part: gated_delta.GatedDelta,
    weights: Weights,
    qkvz: Float[Array, "B T K E"],
    ba: Float[Array, "B T K e"],
    segments: Int[Array, "B T"],
    before: GatedDeltaCache,
) -> Chunk:
    """Return all chunks of the sequences, stacked along a new leading dim.

    The last chunk is padded with tokens that do not change the state.
    """
    tokens = qkvz.shape[1]
    size = min(part.chunk, 1 << (tokens - 1).bit_length())
    by_value = (*qkvz.shape[:3], part.group, part.value_size)
    mixed, gate = jnp.split(qkvz, (part.mixed_size,), axis=-1)
    query, key, value = _causal_convolution(part, weights, mixed, segments, before)
    key = _cut(key, size)
    query = _cut(query * part.key_size**-0.5, size)
    value = _cut(value.reshape(by_value), size)
    write, forget = _gates(part, weights, ba.astype(jnp.float32))
    write = _cut(write[..., None], size)
    # Index of each token's document within the chunk. Document 0 continues from the previous chunk.
    last = jnp.concatenate([before.segments[:, -1:], segments[:, :-1]], axis=1)
    document = jnp.cumsum(_cut((segments != last)[:, :, None, None], size)[:, :, :, :, 0], axis=-1)
    document = document[:, :, :, None]
    within = document[..., :, None] == document[..., None, :]
    within &= jnp.tri(size, dtype=bool)
    total = _cumulative_log_decay(within, _cut(forget[..., None], size))
    decay = jnp.exp(jnp.where(within, total[..., :, None] - total[..., None, :], -jnp.inf))
    since = jnp.where(document == 0, jnp.exp(total), 0.0)[..., None]
    until = jnp.where(document == document[..., -1:], total[..., -1:] - total, -jnp.inf)
    until = jnp.exp(until)[..., None]
    lower = jnp.einsum("nbkcd,nbked->nbkce", key, key)[:, :, :, None] * decay * write
    inverse = _inverse(jnp.where(jnp.tri(size, k=-1, dtype=bool), lower, 0.0))
    mixing = jnp.einsum("nbkcd,nbked->nbkce", query, key)[:, :, :, None] * decay
    key, query = key[:, :, :, None], query[:, :, :, None]
    return Chunk(
        query=query * since,
        key=key * until,
        value=inverse @ (value * write),
        known=inverse @ (key * since * write),
        mixing=mixing,
        keep=since[..., -1, 0],
        gate=_cut(gate.reshape(by_value), size),
    )


def _cumulative_log_decay(
    within: Bool[Array, "N B 1 1 C C"], forget: Float[Array, "N B K r C 1"]
) -> Float[Array, "N B K r C"]:
    """Return each token's cumulative log decay since the start of the chunk or of the token's
    document.

    Differences of cumulative sums over entire chunks would be inaccurate, because a large decay in
    other documents would cause rounding errors.
    """
    factors, each = within[:, :, 0, 0].astype(jnp.float32), forget[..., 0]
    return jnp.einsum("nbcj,nbkrj->nbkrc", factors, each, precision=lax.Precision.HIGHEST)


def _causal_convolution(
    part: gated_delta.GatedDelta,
    weights: Weights,
    mixed: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    before: GatedDeltaCache,
) -> tuple[Float[Array, "B T K dk"], Float[Array, "B T K dk"], Float[Array, "B T K rdv"]]:
    """Return the convolved queries and keys, normalized to unit length, and the convolved
    values.
    """
    row, of = before.prepend_tail(mixed, segments)
    heads, tokens = part.num_key_heads, mixed.shape[1]
    kernel = jnp.concatenate(
        [
            weights[f"conv_{name}"].reshape(heads, -1, part.kernel)
            for name in ("query", "key", "value")
        ],
        axis=1,
    ).astype(jnp.float32)
    total: Any = 0.0
    for at in range(part.kernel):  # the kernel's last entry multiplies the current token
        there = slice(at, at + tokens)
        seen = (of[:, there] == segments)[..., None, None]
        total += jnp.where(seen, row[:, there], 0).astype(jnp.float32) * kernel[..., at]
    cut = (part.key_size, 2 * part.key_size)
    query, key, value = jnp.split(jax.nn.silu(total), cut, axis=-1)
    return _l2_normalize(query), _l2_normalize(key), value


def _l2_normalize(x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _EPSILON)


def _gates(
    part: gated_delta.GatedDelta, weights: Weights, ba: Float[Array, "B T K e"]
) -> tuple[Float[Array, "B T K r"], Float[Array, "B T K r"]]:
    """Return the write gate and the log decay of the state."""
    heads = (part.num_key_heads, part.group)
    rate, bias = (
        weights[name].reshape(heads).astype(jnp.float32) for name in ("decay", "decay_bias")
    )
    write, forget = jnp.split(ba, 2, axis=-1)
    return jax.nn.sigmoid(write), -jnp.exp(rate) * jax.nn.softplus(forget + bias)


def _cut(x: Array, size: int) -> Array:
    """Split `[B, T, K, ..., d]` into chunks `[N, B, K, ..., C, d]`, padded with zeros."""
    rows, tokens, *other_dims = x.shape
    count = -(-tokens // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * len(other_dims)])
    x = x.reshape(rows, count, size, *other_dims)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)


def _merge_chunks(x: Float[Array, "N B K r C d"], tokens: int) -> Float[Array, "B T V d"]:
    """Merge the chunks of value heads; the inverse of `_cut`."""
    x = jnp.moveaxis(jnp.moveaxis(x, -2, 2), 0, 1)
    rows, count, size, heads, group, width = x.shape
    return x.reshape(rows, count * size, heads * group, width)[:, :tokens]


@jax.custom_vjp
def _inverse(lower: Float[Array, "*dims C C"]) -> Float[Array, "*dims C C"]:
    """Invert `1 + lower`, where `lower` is strictly lower triangular and C is a power of two.

    Each iteration doubles the size of the diagonal blocks that have been inverted. The block below
    two diagonal blocks is multiplied on each side by the inverse of one of these diagonal blocks.
    This method is as stable as substitution and uses only matmuls.
    """
    size = lower.shape[-1]
    place = jnp.arange(size)
    inverse, block = jnp.eye(size, dtype=lower.dtype), 1
    while block < size:
        at = place // block
        below = (at[:, None] == at + 1) & (at[:, None] % 2 == 1)
        between = jnp.where(below, lower, 0.0)
        inverse = inverse - (
            between if block == 1 else _product(_product(inverse, between), inverse)
        )
        block *= 2
    return jnp.broadcast_to(inverse, lower.shape)


def _product(x: Float[Array, "*dims C C"], y: Float[Array, "*dims C C"]) -> Array:
    """Multiply in full float32 precision; rounding errors would otherwise accumulate in a chunk."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-_product(_product(turned, cotangent), turned),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
