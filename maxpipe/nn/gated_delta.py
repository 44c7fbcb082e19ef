"""Gated delta rule over packed sequences.

All tokens in a chunk are processed at once with the inverse of a triangular matrix (the WY
representation of arXiv:2412.06464). `chunked_scan` passes the recurrent state from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import gated_delta
from maxpipe.nn.chunked_scan import (
    RecurrentCache,
    Weights,
    cache_of,
    causal_convolution,
    chunk_size,
    cut,
    decay_in_chunks,
    empty_cache,
    scan_chunks,
)
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_EPSILON = 1e-6
"""Epsilon added to the squared norm of queries and keys."""
_NAMES = ("conv_query", "conv_key", "conv_value", "decay", "decay_bias", "norm")


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
        mixed = qkvz[..., : part.mixed_size]
        before = cache_of(context, mixed, part.kernel - 1, part.state_shape)
        segments = context.inputs["segment_ids"]
        weights = {name: getattr(self, name)[...] for name in _NAMES}
        results: Any = scan_chunks(_DeltaRule(part), weights, (qkvz, ba), segments, before)
        read, state = results
        read = checkpoint_name(constrain(read, (None, None, "heads", None), rules), "read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
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
        mixed = jnp.zeros((rows, 0, part.num_key_heads, part.mixed_size), dtype)
        return empty_cache(mixed, part.kernel - 1, part.state_shape)

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `RecurrentCache` array."""
        del part
        tail, state = ("batch", None, "kv_heads", None), ("batch", "kv_heads", None, None, None)
        return RecurrentCache(tail, ("batch", None), state)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _DeltaRule:
    """The recurrence of the gated delta rule; its inputs are `qkvz` and `ba`."""

    part: gated_delta.GatedDelta
    step_weights: ClassVar[tuple[str, ...]] = ("norm",)

    def step(
        self, weights: Weights, state: Float[Array, "B K r dk dv"], chunk: Chunk
    ) -> tuple[Float[Array, "B K r dk dv"], Float[Array, "B K r C dv"]]:
        """Return the state at the end of a chunk, and the chunk's normalized and gated output."""
        written = chunk.value - chunk.known @ state
        read = chunk.query @ state + chunk.mixing @ written
        state = chunk.keep[..., None, None] * state + chunk.key.swapaxes(-1, -2) @ written
        dtype = chunk.gate.dtype
        read = rms_norm(read.astype(dtype), weights["norm"], self.part.norm).astype(jnp.float32)
        return state, (read * jax.nn.silu(chunk.gate.astype(jnp.float32))).astype(dtype)

    def chunks(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Chunk:
        """Return all chunks of the sequences."""
        part, (qkvz, ba) = self.part, inputs
        size = chunk_size(part, qkvz.shape[1])
        by_value = (*qkvz.shape[:3], part.group, part.value_size)
        mixed, gate = jnp.split(qkvz, (part.mixed_size,), axis=-1)
        query, key, value = _convolve(part, weights, mixed, segments, before)
        key = cut(key, size)
        query = cut(query * part.key_size**-0.5, size)
        value = cut(value.reshape(by_value), size)
        write, forget = _gates(part, weights, ba.astype(jnp.float32))
        write = cut(write[..., None], size)
        decay = decay_in_chunks(forget, segments, before, size)
        since, until = decay.since[..., None], decay.until[..., None]
        lower = jnp.einsum("nbkcd,nbked->nbkce", key, key)[:, :, :, None] * decay.between * write
        inverse = _inverse(jnp.where(jnp.tri(size, k=-1, dtype=bool), lower, 0.0))
        mixing = jnp.einsum("nbkcd,nbked->nbkce", query, key)[:, :, :, None] * decay.between
        key, query = key[:, :, :, None], query[:, :, :, None]
        return Chunk(
            query=query * since,
            key=key * until,
            value=inverse @ (value * write),
            known=inverse @ (key * since * write),
            mixing=mixing,
            keep=decay.over_chunk,
            gate=cut(gate.reshape(by_value), size),
        )


def _convolve(
    part: gated_delta.GatedDelta,
    weights: Weights,
    mixed: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
) -> tuple[Float[Array, "B T K dk"], Float[Array, "B T K dk"], Float[Array, "B T K rdv"]]:
    """Return the convolved queries and keys, normalized to unit length, and the convolved
    values.
    """
    row, of = before.prepend_tail(mixed, segments)
    kernel = jnp.concatenate(
        [
            weights[f"conv_{name}"].reshape(part.num_key_heads, -1, part.kernel)
            for name in ("query", "key", "value")
        ],
        axis=1,
    )
    total = causal_convolution(kernel, None, row, of, segments)
    query, key, value = jnp.split(total, (part.key_size, 2 * part.key_size), axis=-1)
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
