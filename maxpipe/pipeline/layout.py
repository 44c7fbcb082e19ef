"""Where each layer lives: network order in checkpoints, `[R, P, L]` in the train state.

A cut divides the network's layers into chunks, runs of consecutive layers; the ring says which
stage holds which chunk. Chunks may differ in length; shorter ones are padded with unused zeros,
which the engine skips. The first layers of the network may stay outside: every stage has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.schedule.table import Ring


@dataclass(frozen=True)
class Layout:
    """Layers cut into chunks, and the ring on which the chunks lie."""

    ring: Ring
    cut: tuple[int, ...]
    """Layers of each chunk, in network order."""
    outside: int = 0
    """Layers in front of the first chunk, which every stage holds."""

    @property
    def num_layers(self) -> int:
        """Layers of the network."""
        return self.outside + sum(self.cut)

    @property
    def layers_per_chunk(self) -> int:
        """Layers of the longest chunk (L)."""
        return max(self.cut)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Leading dims of a stacked parameter: `(R, P, L)`."""
        return self.ring.num_repeats, self.ring.num_stages, self.layers_per_chunk

    @cached_property
    def _chunk_at(self) -> np.ndarray:
        """int `[R, P]`: the chunk that each stage runs in each repeat."""
        repeats, stages, _ = self.shape
        chunks = [self.ring.chunk(p, r) for r in range(repeats) for p in range(stages)]
        return np.reshape(chunks, (repeats, stages))

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """int32 `[R, P]`: layers of each chunk."""
        return np.array(self.cut, np.int32)[self._chunk_at]

    @cached_property
    def first_layer(self) -> np.ndarray:
        """int32 `[R, P]`: network position of each chunk's first layer."""
        sizes = np.array(self.cut)
        return (self.outside + np.cumsum(sizes) - sizes).astype(np.int32)[self._chunk_at]

    @cached_property
    def layer_at(self) -> np.ndarray:
        """int32 `[R * P * L]`: the layer at each stacked position, -1 for padding."""
        position = np.arange(self.layers_per_chunk)
        layers = self.first_layer[..., None] + position
        used = position < self.chunk_sizes[..., None]
        return np.where(used, layers, -1).astype(np.int32).ravel()

    @property
    def _is_plain(self) -> bool:
        """Whether stacked order is network order: no padding, and no way back on the ring."""
        return bool((self.layer_at == self.outside + np.arange(self.layer_at.size)).all())

    @cached_property
    def _place_of(self) -> np.ndarray:
        """int: the stacked position of each layer of the ring, in network order."""
        used = np.flatnonzero(self.layer_at >= 0)
        return used[np.argsort(self.layer_at[used])]

    def stack(self, layers: jax.Array) -> jax.Array:
        """`[num_layers, ...]` in network order -> the ring's `[R, P, L, ...]`, zeros as padding."""
        if self._is_plain:
            ring = layers[self.outside :]
        else:
            padded = jnp.concatenate([layers, jnp.zeros_like(layers[:1])])
            ring = padded[self.layer_at]  # -1 picks the zeros
        return ring.reshape(*self.shape, *layers.shape[1:])

    def unstack(self, stacked: jax.Array, outside: jax.Array | None = None) -> jax.Array:
        """`[R, P, L, ...]` -> `[num_layers, ...]` in network order, padding dropped.

        `outside` are the layers in front of the ring, if there are any.
        """
        flat = stacked.reshape(-1, *stacked.shape[3:])
        ring = flat if self._is_plain else flat[self._place_of]
        return ring if outside is None else jnp.concatenate([outside, ring])


def pad_vocabulary(table: jax.Array, dim: int, size: int) -> jax.Array:
    """Zeros appended along `dim` up to `size`, so that the vocabulary divides its shards."""
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, size - table.shape[dim])
    return jnp.pad(table, widths) if size > table.shape[dim] else table


def padded_vocabulary(vocab_size: int, num_shards: int) -> int:
    """The smallest multiple of `num_shards` that holds the vocabulary."""
    return -(-vocab_size // num_shards) * num_shards
