"""Where each layer lives: network order in checkpoints, `[R, P, L]` in the train state.

Stage p in repeat r holds chunk c = r * P + p, a run of consecutive layers. Layers
that do not divide evenly are spread so that chunks differ by at most one; shorter
chunks are padded with unused zeros, which the engine skips. Flattening `[R, P, L]`
gives network order with padding, so that the conversion is a selection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Layout:
    """The cut of `num_layers` layers into stages x repeats chunks."""

    num_layers: int
    num_stages: int
    num_repeats: int

    @property
    def num_chunks(self) -> int:
        """Chunks over all stages and repeats."""
        return self.num_stages * self.num_repeats

    @property
    def layers_per_chunk(self) -> int:
        """Layers of the longest chunk (L)."""
        return -(-self.num_layers // self.num_chunks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Leading dims of a stacked parameter: `(R, P, L)`."""
        return self.num_repeats, self.num_stages, self.layers_per_chunk

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """int32 `[R, P]`: layers of each chunk."""
        short, longer = divmod(self.num_layers, self.num_chunks)
        sizes = short + (np.arange(self.num_chunks) < longer)
        return sizes.reshape(self.num_repeats, self.num_stages).astype(np.int32)

    @cached_property
    def first_layer(self) -> np.ndarray:
        """int32 `[R, P]`: network position of each chunk's first layer."""
        sizes = self.chunk_sizes.ravel()
        return (np.cumsum(sizes) - sizes).reshape(self.chunk_sizes.shape).astype(np.int32)

    @cached_property
    def layer_at(self) -> np.ndarray:
        """int32 `[R * P * L]`: the layer at each stacked position, -1 for padding."""
        position = np.arange(self.layers_per_chunk)
        layers = self.first_layer[..., None] + position
        used = position < self.chunk_sizes[..., None]
        return np.where(used, layers, -1).astype(np.int32).ravel()

    @property
    def is_even(self) -> bool:
        """Whether every chunk has the same number of layers, hence no padding."""
        return self.num_layers == self.num_chunks * self.layers_per_chunk

    def stack(self, layers: jax.Array) -> jax.Array:
        """`[num_layers, ...]` in network order -> `[R, P, L, ...]`, zeros in the padding."""
        if not self.is_even:
            padded = jnp.concatenate([layers, jnp.zeros_like(layers[:1])])
            layers = padded[self.layer_at]  # -1 picks the zeros
        return layers.reshape(*self.shape, *layers.shape[1:])

    def unstack(self, stacked: jax.Array) -> jax.Array:
        """`[R, P, L, ...]` -> `[num_layers, ...]` in network order, padding dropped."""
        flat = stacked.reshape(-1, *stacked.shape[3:])
        return flat if self.is_even else flat[np.flatnonzero(self.layer_at >= 0)]


def pad_vocabulary(table: jax.Array, dim: int, size: int) -> jax.Array:
    """Zeros appended along `dim` up to `size`, so that the vocabulary divides its shards."""
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, size - table.shape[dim])
    return jnp.pad(table, widths) if size > table.shape[dim] else table


def padded_vocabulary(vocab_size: int, num_shards: int) -> int:
    """The smallest multiple of `num_shards` that holds the vocabulary."""
    return -(-vocab_size // num_shards) * num_shards
