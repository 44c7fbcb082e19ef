"""Chunks of the delta rule, shared by layers with one decay gate per head or per key dim.

All tokens in a chunk are processed at once with the inverse of a triangular matrix (the WY
representation of arXiv:2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.nn.chunked_scan import RecurrentCache, Weights, causal_convolution
from maxpipe.nn.convolution_kernel import EPSILON


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
    keep: Float[Array, "B K r #dk"]
    """Factors by which the rows of the state decay over the chunk."""
    gate: Float[Array, "B K r C dv"]
    """Output gate, in the compute dtype."""

    def pass_state(
        self, state: Float[Array, "B K r dk dv"]
    ) -> tuple[Float[Array, "B K r dk dv"], Float[Array, "B K r C dv"]]:
        """Return the state at the end of the chunk, and the values that the queries read."""
        written = self.value - self.known @ state
        read = self.query @ state + self.mixing @ written
        return self.keep[..., None] * state + self.key.swapaxes(-1, -2) @ written, read


class ChunkDecay(NamedTuple):
    """Decay of the state, with one entry per head or per key dim."""

    since: Float[Array, "N B K r C #dk"]
    """Decay from the start of the chunk to each token."""
    until: Float[Array, "N B K r C #dk"]
    """Decay from each token to the end of the chunk."""


def make_chunks(
    query: Float[Array, "N B K #r C dk"],
    key: Float[Array, "N B K #r C dk"],
    value: Float[Array, "N B K r C dv"],
    write: Float[Array, "N B K r C 1"],
    scores: tuple[Float[Array, "N B K r C C"], Float[Array, "N B K r C C"]],
    decay: ChunkDecay,
    gate: Float[Array, "N B K r C dv"],
) -> Chunk:
    """Return all chunks.

    Args:
        query: scaled queries.
        key: keys of unit length.
        value: values.
        write: gates of the updates.
        scores: products of queries with keys and of keys with keys, multiplied by the decay between
            the tokens; 0 for keys of later tokens.
        decay: decay within each chunk.
        gate: output gates.
    """
    mixing, overlap = scores
    earlier = jnp.tri(key.shape[-2], k=-1, dtype=bool)
    inverse = inverse_of_unit_lower(jnp.where(earlier, overlap * write, 0.0))
    return Chunk(
        query=query * decay.since,
        key=key * decay.until,
        value=inverse @ (value * write),
        known=inverse @ (key * decay.since * write),
        mixing=mixing,
        keep=decay.since[..., -1, :],
        gate=gate,
    )


def convolve(
    weights: Weights,
    sizes: tuple[int, int],
    mixed: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
) -> tuple[Float[Array, "B T K dk"], Float[Array, "B T K dk"], Float[Array, "B T K rdv"]]:
    """Return the convolved queries and keys, normalized to unit length, and the convolved values.

    `sizes` are the number of key heads and the dimension of a query or key.
    """
    heads, size = sizes
    row, of = before.prepend_tail(mixed, segments)
    total = causal_convolution(joined_kernels(weights, heads), None, row, of, segments)
    query, key, value = jnp.split(total, (size, 2 * size), axis=-1)
    return l2_normalize(query), l2_normalize(key), value


def joined_kernels(weights: Weights, heads: int) -> Float[Array, "K E w"]:
    """Return the convolution kernels of queries, keys and values, concatenated for each head."""
    kernels = (weights[f"conv_{name}"] for name in ("query", "key", "value"))
    return jnp.concatenate(
        [kernel.reshape(heads, -1, kernel.shape[-1]) for kernel in kernels], axis=1
    )


def l2_normalize(x: Float[Array, "*dims d"]) -> Float[Array, "*dims d"]:
    """Divide by the norm of the last dim."""
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + EPSILON)


@jax.custom_vjp
def inverse_of_unit_lower(lower: Float[Array, "*dims C C"]) -> Float[Array, "*dims C C"]:
    """Invert `1 + lower`, where `lower` is strictly lower triangular and C is a power of two.

    Each iteration doubles the size of the diagonal blocks that have been inverted. The block below
    two diagonal blocks is multiplied on each side by the inverse of one of these diagonal blocks.
    This method is as stable as substitution and uses only matmuls.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
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
    inverse = inverse_of_unit_lower(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-_product(_product(turned, cotangent), turned),)


inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)
