"""Delta rule tiles of TPU kernels; see `delta_rule` for the same computation in XLA.

The matrices of several heads are stacked, so that they have at least 128 rows. Entries for pairs
of tokens of different heads are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.layers.recurrent import Recurrent
from maxpipe.nn import convolution_kernel
from maxpipe.nn import recurrent_kernels as kernels
from maxpipe.nn.module import rms_norm
from maxpipe.nn.recurrent_kernels import Matrices, matmul

_NO_DECAY_BETWEEN = -1e30
"""Log decay between tokens of different documents or heads."""
_MAX_STACK = 8
"""Maximum number of heads in a stack."""


def delta_rule_stack(part: Recurrent) -> int:
    """Return the number of heads whose tokens are stacked in a matrix."""
    return max(kernels.LANES // part.chunk, 1)


def supports_delta_rule(part: Recurrent, tokens: int) -> bool:
    """Return whether the head dims are multiples of 128, and the sequence has at least one full
    chunk.
    """
    whole = all(size % kernels.LANES == 0 for size in part.state_shape[2:])
    convolved = convolution_kernel.supports(part.kernel, bias=False)
    return whole and convolved and tokens >= part.chunk and delta_rule_stack(part) <= _MAX_STACK


def stacked_rows(
    rows: Sequence[Float[Array, "N B K r C"]], document: Int[Array, "N B 1 1 C"], stack: int
) -> Float[Array, "B S N R W"]:
    """Return rows of `stack` heads, and last the row of indices of documents and heads."""
    size = document.shape[-1]
    head = jnp.arange(math.prod(rows[0].shape[2:4])).reshape(*rows[0].shape[2:4], 1) % stack
    index = jnp.broadcast_to(document + head * (size + 1), rows[0].shape).astype(jnp.float32)
    joined = jnp.stack([*rows, index, *[index] * (7 - len(rows))], axis=-2)
    chunks, batch, *_ = joined.shape
    joined = joined.reshape(chunks, batch, -1, stack, 8, size)
    return joined.transpose(1, 2, 0, 4, 3, 5).reshape(batch, -1, chunks, 8, stack * size)


@dataclass(frozen=True)
class GatedDeltaTile:
    """Chunk of the gated delta rule.

    The arrays of tokens are queries, keys, values and output gates. The rows are the log decay
    since the start of the chunk or document, the decay since the start of the chunk, the decay
    until its end, the write gate, and the index of the token's document and head.
    """

    size: int
    """Number of tokens per chunk."""
    heads: int
    """Number of heads in a stack."""
    group: int
    """Number of value heads per key head."""
    norm: RMSNorm
    dtype: Any

    def __call__(
        self, shared: list[Matrices], tokens: list[Matrices], rows: Matrices, states: Matrices
    ) -> tuple[Matrices, Matrices]:
        query, key, value, gate = tokens
        outputs, after = [], []
        for at, each in enumerate(rows):
            heads = range(at * self.heads, (at + 1) * self.heads)
            by_key = [[x[head // self.group] for head in heads] for x in (query, key)]
            by_value = [[x[head] for head in heads] for x in (value, gate, states)]
            out, state = self._stack(shared[0][0], by_key, by_value, each)
            outputs += out
            after += state
        return outputs, after

    def flops(self, key_size: int, value_size: int) -> float:
        """Return the FLOPs of the matmuls of one head in the forward pass."""
        wide, size = self.heads * self.size, self.size
        state = 3 * key_size * value_size * size
        pairs = size * wide * (2 * key_size + 2 * value_size)
        levels = max(math.log2(size) - 1, 0)
        return 2.0 * (state + pairs + 2 * levels * size * wide**2)

    def _stack(
        self,
        norm: Array,
        by_key: list[Matrices],
        by_value: list[Matrices],
        rows: Array,
    ) -> tuple[Matrices, Matrices]:
        (queries, keys), (values, gates, states) = by_key, by_value
        wide = self.heads * self.size
        first, second = kernels.iota(wide, 0), kernels.iota(wide, 1)
        total, since, until, write, document, *_ = kernels.columns(rows)
        query, key = kernels.stack(queries), kernels.stack(keys)
        within = (document == kernels.row(rows, 4)) & (first >= second)
        between = jnp.where(within, total - kernels.row(rows, 0), _NO_DECAY_BETWEEN)
        between = jnp.exp(between)
        mixing = matmul(query, key, (1, 1), self.dtype) * between
        overlap = matmul(key, key, (1, 1), self.dtype) * between * write
        inverse = kernels.inverse_of_unit_lower(
            jnp.where(first > second, overlap, 0.0), self.size, self.dtype
        )
        pairs = list(zip(keys, queries, states, strict=True))
        known, read = (
            kernels.stack([matmul(x[of], x[2], (1, 0), self.dtype) for x in pairs]) for of in (0, 1)
        )
        wrong = write * (kernels.stack(values).astype(jnp.float32) - since * known)
        written = matmul(inverse, wrong, (1, 0), self.dtype)
        read = since * read + matmul(mixing, written, (1, 0), self.dtype)
        towards_end = key.astype(jnp.float32) * until
        parts = (kernels.unstack(x, self.heads) for x in (towards_end, written, since))
        last = lax.broadcasted_iota(jnp.int32, (self.size, 1), 0) == self.size - 1
        after = [
            jnp.where(last, since, 0.0).sum(0, keepdims=True) * state
            + matmul(key, written, (0, 0), self.dtype)
            for key, written, since, state in zip(*parts, states, strict=True)
        ]
        return kernels.unstack(
            self._normalized(read, kernels.stack(gates), norm), self.heads
        ), after

    def _normalized(self, read: Array, gate: Array, scale: Array) -> Array:
        wide = rms_norm(read.astype(gate.dtype).astype(jnp.float32), None, self.norm)
        scale = self.norm.offset + scale.astype(jnp.float32)
        if not self.norm.is_wide:
            wide = wide.astype(gate.dtype).astype(jnp.float32)
        wide = (wide * scale).astype(gate.dtype).astype(jnp.float32)
        gate = gate.astype(jnp.float32)
        return wide * gate * kernels.sigmoid(gate)


@dataclass(frozen=True)
class KimiDeltaTile:
    """Chunk of Kimi delta attention.

    The arrays of tokens are queries, keys, values, log decays and output gates. The first row has
    the write gates. The scores are sums over pairs of adjacent blocks, as in `kda.decayed_scores`.
    """

    size: int
    """Number of tokens per chunk, a power of two."""
    heads: int
    """Number of heads in a stack."""
    norm: RMSNorm
    dtype: Any

    def __call__(
        self, shared: list[Matrices], tokens: list[Matrices], rows: Matrices, states: Matrices
    ) -> tuple[Matrices, Matrices]:
        outputs, after = [], []
        for at, each in enumerate(rows):
            heads = slice(at * self.heads, (at + 1) * self.heads)
            stacked = [kernels.stack(x[heads]) for x in tokens]
            out, state = self._stack(shared[0][0], stacked, states[heads], each)
            outputs += out
            after += state
        return outputs, after

    def flops(self, head_dim: int) -> float:
        """Return the FLOPs of the matmuls of one head in the forward pass."""
        wide, size = self.heads * self.size, self.size
        levels = math.log2(size)
        pairs = size * wide * head_dim * (2 + 3 * levels + 2)
        return 2.0 * (3 * head_dim**2 * size + pairs + 2 * max(levels - 1, 0) * size * wide**2)

    def _stack(
        self, norm: Array, tokens: Matrices, states: Matrices, rows: Array
    ) -> tuple[Matrices, Matrices]:
        query, key, value, forget, gate = (x.astype(jnp.float32) for x in tokens)
        write, *_ = kernels.columns(rows)
        mixing, overlap = self._scores(query, key, forget)
        inverse = kernels.inverse_of_unit_lower(overlap * write, self.size, self.dtype)
        first, second = (kernels.iota(len(query), dim) for dim in (0, 1))
        head = first // self.size == second // self.size
        since = self._decay(head & (second <= first), forget)
        until = self._decay(head & (second > first), forget)
        known, read = (
            kernels.stack(
                [
                    matmul(part, state, (1, 0), self.dtype)
                    for part, state in zip(kernels.unstack(x, self.heads), states, strict=True)
                ]
            )
            for x in (key * since, query * since)
        )
        written = matmul(inverse, write * (value - known), (1, 0), self.dtype)
        read += matmul(mixing, written, (1, 0), self.dtype)
        parts = (kernels.unstack(x, self.heads) for x in (key * until, written, since))
        after = [
            kernels.last_row_as_column(since) * state + matmul(key, written, (0, 0), self.dtype)
            for key, written, since, state in zip(*parts, states, strict=True)
        ]
        read = rms_norm(read, None, self.norm) * (self.norm.offset + norm.astype(jnp.float32))
        return kernels.unstack(read * kernels.sigmoid(gate), self.heads), after

    def _scores(self, query: Array, key: Array, forget: Array) -> tuple[Array, Array]:
        """Return the scores of queries and of keys with earlier keys, and with decay. Those of
        queries include the token's own key.
        """
        first, second = (kernels.iota(len(query), dim) for dim in (0, 1))
        own = (query * key).sum(1, keepdims=True)
        mixing, overlap, block = jnp.where(first == second, own, 0.0), jnp.zeros(first.shape), 1
        while block < self.size:
            row, column = first // block, second // block
            # Decay since the start of every second block, and until the end of the others.
            inside = (row % 2 == 1) & (second <= first) | (row % 2 == 0) & (second > first)
            decay = self._decay((row == column) & inside, forget)
            pair = (row == column + 1) & (row % 2 == 1)
            earlier = key * decay
            read = matmul(query * decay, earlier, (1, 1), self.dtype)
            mixing += jnp.where(pair, read, 0.0)
            overlap += jnp.where(pair, matmul(earlier, earlier, (1, 1), self.dtype), 0.0)
            block *= 2
        return mixing, overlap

    def _decay(self, mask: Array, forget: Array) -> Array:
        mask = jnp.where(mask, 1.0, 0.0)
        return jnp.exp(kernels.masked_sums(mask, forget, self.dtype))
