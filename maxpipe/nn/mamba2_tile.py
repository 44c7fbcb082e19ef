"""Mamba-2 tiles of TPU kernels; see `mamba2` for the same computation in XLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from maxpipe.nn import recurrent_kernels as kernels
from maxpipe.nn.recurrent_kernels import Matrices, matmul

_NO_DECAY_BETWEEN = -1e30
"""Log decay between tokens of different documents."""


@dataclass(frozen=True)
class Mamba2Tile:
    """Chunk of the heads of one group.

    The shared arrays are the factors of the skip connection and the scale of the norm, if any. The
    arrays of tokens are queries, keys, output gates and values, where several heads of fewer than
    128 dims are joined. The rows are the log decay since the start of the chunk or document, the
    decay since the start of the chunk, the decay until its end, the time step, and the index of the
    document.
    """

    size: int
    """Number of tokens per chunk."""
    joined: int
    """Number of heads that are joined."""
    head_dim: int
    epsilon: float | None
    """Epsilon of the norm. None disables the norm."""
    dtype: Any

    def __call__(
        self, shared: list[Matrices], tokens: list[Matrices], rows: Matrices, states: Matrices
    ) -> tuple[Matrices, Matrices]:
        (query,), (key,), gates, values = tokens
        scores = matmul(query, key, (1, 1), self.dtype)
        gated, after = [], []
        for at, (gate, value, skip, state) in enumerate(
            zip(gates, values, shared[0], states, strict=True)
        ):
            heads = rows[at * self.joined : (at + 1) * self.joined]
            read, state = self._joined_heads(
                (query, key, scores), value.astype(jnp.float32), heads, state
            )
            gate = gate.astype(jnp.float32)
            read += value.astype(jnp.float32) * skip.astype(jnp.float32)
            gated.append(read * gate * kernels.sigmoid(gate))
            after.append(state)
        if self.epsilon is None:
            return gated, after
        width = len(gated) * self.joined * self.head_dim
        square = sum((x * x).sum(1, keepdims=True) for x in gated) / width
        factor = lax.rsqrt(square + self.epsilon)
        outputs = [
            x * factor * scale.astype(jnp.float32)
            for x, scale in zip(gated, shared[1], strict=True)
        ]
        return outputs, after

    def flops(self, state_size: int, group: int) -> float:
        """Return the FLOPs of the matmuls of joined heads in the forward pass."""
        width = self.joined * self.head_dim
        scores = self.size * state_size * self.joined / group
        inside = self.joined * self.size * width
        return 2.0 * self.size * (2 * state_size * width + scores + inside)

    def _joined_heads(
        self, shared: tuple[Array, Array, Array], value: Array, rows: Matrices, state: Array
    ) -> tuple[Array, Array]:
        """Return the values read from the state, and the new state."""
        query, key, scores = shared
        first, second = (kernels.iota(self.size, dim) for dim in (0, 1))
        lane = lax.broadcasted_iota(jnp.int32, value.shape, 1) // self.head_dim
        all_columns = [kernels.columns(each) for each in rows]
        since, until, step = (
            self._by_lane(lane, [of[at] for of in all_columns]) for at in (1, 2, 3)
        )
        written = value * step
        read = since * matmul(query, state, (1, 0), self.dtype)
        for head, (row, (total, _, _, _, document, *_)) in enumerate(
            zip(rows, all_columns, strict=True)
        ):
            within = (document == kernels.row(row, 4)) & (first >= second)
            decay = jnp.exp(jnp.where(within, total - kernels.row(row, 0), _NO_DECAY_BETWEEN))
            own = jnp.where(lane == head, written, 0.0)
            read += matmul(scores * decay, own, (1, 0), self.dtype)
        last = lax.broadcasted_iota(jnp.int32, value.shape, 0) == self.size - 1
        keep = jnp.where(last, since, 0.0).sum(0, keepdims=True)
        return read, keep * state + matmul(key, written * until, (0, 0), self.dtype)

    def _by_lane(self, lane: Array, columns: Matrices) -> Array:
        """Return an array whose lanes contain the column of their head."""
        wide = jnp.broadcast_to(columns[0], lane.shape)
        for head, column in enumerate(columns[1:], start=1):
            wide = jnp.where(lane == head, column, wide)
        return wide
