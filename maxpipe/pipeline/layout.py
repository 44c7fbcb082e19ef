"""Map layers between model order (checkpoints) and stacks `[R, P, L]` (train state).

Model order is the order in which the network runs its layers. A layer partition divides the layers
into chunks of consecutive layers, and the ring assigns the chunks to stages. Each layer type is
stacked separately. Chunks can differ in length and layer types. Shorter stacks are padded with
zeros, which the engine skips. The network's first layers can form a prologue, which is outside the
ring and is replicated on every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.schedule.table import Ring

Tree = Any


SINGLE_LAYER_TYPE = "layer"
"""Name of the layer type in networks with a single layer type."""


@dataclass(frozen=True)
class LayerLayout:
    """Partition of the layers into chunks, and placement of the chunks on the ring.

    Parameters and other per-layer arrays are stacked separately for each layer type, so their total
    memory is the sum over the types. Tables map each layer of a chunk to its type and to its index
    in the stack of that type.
    """

    ring: Ring
    layer_partition: tuple[int, ...]
    """Number of layers in each chunk, in model order."""
    num_prologue_layers: int = 0
    """Number of prologue layers, which precede the first chunk and are replicated on every
    stage."""
    layer_types: tuple[str, ...] = ()
    """Type of each layer, in model order. An empty tuple means that all layers have the same
    type."""

    @property
    def num_layers(self) -> int:
        """Return the number of layers in the network."""
        return self.num_prologue_layers + sum(self.layer_partition)

    @property
    def max_layers_per_chunk(self) -> int:
        """Return the number of layers in the longest chunk (L)."""
        return max(self.layer_partition)

    @cached_property
    def type_of_layer(self) -> tuple[str, ...]:
        """Return the type of each layer, in model order."""
        assert len(self.layer_types) in (0, self.num_layers)
        return self.layer_types or (SINGLE_LAYER_TYPE,) * self.num_layers

    @cached_property
    def stacks(self) -> dict[str, LayerTypeStack]:
        """Return the stack of each layer type, in the order in which the types first appear in the
        network.
        """
        return {
            kind: LayerTypeStack.from_layout(self, kind)
            for kind in dict.fromkeys(self.type_of_layer)
        }

    @property
    def ring_layer_types(self) -> tuple[str, ...]:
        """Return the layer types that occur in chunks. Tables refer to a type by its index in this
        tuple.
        """
        return tuple(kind for kind, stack in self.stacks.items() if stack.max_layers_per_chunk)

    @property
    def prologue_layer_types(self) -> tuple[str, ...]:
        """Return the layer types that occur in the prologue."""
        return tuple(kind for kind, stack in self.stacks.items() if stack.num_prologue_layers)

    @property
    def prologue(self) -> LayerLayout:
        """Return the layout of the prologue: one chunk on one stage."""
        return LayerLayout(
            Ring(1, 1),
            (self.num_prologue_layers,),
            layer_types=self.type_of_layer[: self.num_prologue_layers],
        )

    @cached_property
    def _chunk_at(self) -> np.ndarray:
        """Return the chunk that each stage runs in each repeat, as an int array `[R, P]`."""
        repeats, stages = self.ring.num_repeats, self.ring.num_stages
        chunks = [self.ring.chunk(p, r) for r in range(repeats) for p in range(stages)]
        return np.reshape(chunks, (repeats, stages))

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """Return the number of layers in each chunk, as an int32 array `[R, P]`."""
        return np.array(self.layer_partition, np.int32)[self._chunk_at]

    @cached_property
    def first_layer(self) -> np.ndarray:
        """Return the network index of each chunk's first layer, as an int32 array `[R, P]`."""
        sizes = np.array(self.layer_partition)
        return (self.num_prologue_layers + np.cumsum(sizes) - sizes).astype(np.int32)[
            self._chunk_at
        ]

    @cached_property
    def layer_at(self) -> np.ndarray:
        """Return each layer's network index, -1 for padding, as an int32 array `[R, P, L]`."""
        position = np.arange(self.max_layers_per_chunk)
        layers = self.first_layer[..., None] + position
        used = position < self.chunk_sizes[..., None]
        return np.where(used, layers, -1).astype(np.int32)

    @cached_property
    def layer_type_at(self) -> np.ndarray:
        """Return the index of each layer's type in `ring_layer_types`, -1 for padding, as an int32
        array `[R, P, L]`.
        """
        numbers = np.array([[*self.stacks].index(kind) for kind in self.type_of_layer], np.int32)
        ring = {
            [*self.stacks].index(kind): number for number, kind in enumerate(self.ring_layer_types)
        }
        of_layer = np.array([ring.get(number, -1) for number in numbers], np.int32)
        return np.where(self.layer_at >= 0, of_layer[self.layer_at], -1).astype(np.int32)

    @cached_property
    def index_in_type_at(self) -> np.ndarray:
        """Return the number of earlier layers of the same type in the same chunk, as an int32 array
        `[R, P, L]`.
        """
        earlier = np.tril(np.ones((self.max_layers_per_chunk,) * 2, bool), -1)
        same = self.layer_type_at[..., :, None] == self.layer_type_at[..., None, :]
        return (same & earlier).sum(axis=-1).astype(np.int32)

    def stack(self, layers: Tree) -> tuple[Tree, Tree]:
        """Stack layers given in model order as `{type: [n, ...]}`. Layer types may be missing from
        the given layers.

        Returns `{type: [R, P, L, ...]}` for the chunks and `{type: [n, ...]}` for the prologue.
        """
        ring = {
            kind: jax.tree.map(self.stacks[kind].stack, layers[kind])
            for kind in self.ring_layer_types
            if kind in layers
        }
        front = {
            kind: jax.tree.map(
                lambda leaf, n=self.stacks[kind].num_prologue_layers: leaf[:n], layers[kind]
            )
            for kind in self.prologue_layer_types
            if kind in layers
        }
        return ring, front

    def unstack(self, ring: Tree, front: Tree) -> Tree:
        """Return `{type: [n, ...]}` in model order, without padding; the inverse of `stack`.

        Layer types that are missing from both trees are missing from the result.
        """
        layers = {}
        for kind, stack in self.stacks.items():
            if kind in ring:
                trees = [tree[kind] for tree in (ring, front) if kind in tree]
                layers[kind] = jax.tree.map(stack.unstack, *trees)
            elif kind in front:
                layers[kind] = front[kind]
        return layers


@dataclass(frozen=True)
class LayerTypeStack:
    """Positions of one type's layers in the ring's stacks and in the prologue."""

    layers: tuple[int, ...]
    """Indices, within the network, of all layers of this type, in ascending order."""
    num_prologue_layers: int
    """Number of layers of this type in the prologue."""
    shape: tuple[int, int, int]
    """Leading dims `(R, P, L)` of a stacked parameter; L is the largest number of layers of this
    type in one chunk."""
    layer_at: np.ndarray
    """int32 `[R * P * L]`: network index of the layer in each stack entry, -1 for padding."""

    @classmethod
    def from_layout(cls, layout: LayerLayout, kind: str) -> LayerTypeStack:
        """Return the positions of the layers of type `kind` in a layout."""
        layers = tuple(n for n, name in enumerate(layout.type_of_layer) if name == kind)
        of_type = set(layers)
        chunks = [
            [int(n) for n in chunk if n in of_type]
            for chunk in layout.layer_at.reshape(-1, layout.max_layers_per_chunk)
        ]
        length = max(map(len, chunks))
        padded = [chunk + [-1] * (length - len(chunk)) for chunk in chunks]
        repeats, stages = layout.ring.num_repeats, layout.ring.num_stages
        return cls(
            layers,
            sum(n < layout.num_prologue_layers for n in layers),
            (repeats, stages, length),
            np.array(padded, np.int32).ravel(),
        )

    @property
    def prologue_layers(self) -> tuple[int, ...]:
        """Return the network indices of the prologue layers of this type."""
        return self.layers[: self.num_prologue_layers]

    @property
    def max_layers_per_chunk(self) -> int:
        """Return the largest number of layers of this type in one chunk (L)."""
        return self.shape[2]

    @cached_property
    def _number_at(self) -> np.ndarray:
        """Return the index of each layer among the ring layers of this type, or -1 for padding, as
        an int array `[R * P * L]`.
        """
        numbers = {layer: n for n, layer in enumerate(self.layers[self.num_prologue_layers :])}
        return np.array([numbers.get(int(layer), -1) for layer in self.layer_at], int)

    @property
    def _is_network_order(self) -> bool:
        """Return whether the stacks are in model order, without padding."""
        return bool((self._number_at == np.arange(self._number_at.size)).all())

    def stack(self, layers: jax.Array) -> jax.Array:
        """Stack the ring's layers as `[R, P, L, ...]`, padded with zeros, given `[n, ...]` in model
        order.
        """
        ring = layers[self.num_prologue_layers :]
        if not self._is_network_order:
            padded = jnp.concatenate([ring, jnp.zeros_like(ring[:1])])
            ring = padded[self._number_at]  # index -1 selects the zeros
        return ring.reshape(*self.shape, *layers.shape[1:])

    def unstack(self, stacked: jax.Array, outside: jax.Array | None = None) -> jax.Array:
        """Return the layers `[n, ...]` in model order, without padding, given `[R, P, L, ...]`.

        `outside` contains the prologue layers of this type, if any.
        """
        flat = stacked.reshape(-1, *stacked.shape[3:])
        if not self._is_network_order:
            used = np.flatnonzero(self._number_at >= 0)
            flat = flat[used[np.argsort(self._number_at[used])]]
        return flat if outside is None else jnp.concatenate([outside, flat])


def pad_vocabulary(table: jax.Array, dim: int, size: int) -> jax.Array:
    """Pad `dim` with zeros to `size`, so that the vocabulary can be divided into equal shards."""
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, size - table.shape[dim])
    return jnp.pad(table, widths) if size > table.shape[dim] else table


def padded_vocab_size(vocab_size: int, num_shards: int) -> int:
    """Return the smallest multiple of `num_shards` that is at least `vocab_size`."""
    return -(-vocab_size // num_shards) * num_shards
