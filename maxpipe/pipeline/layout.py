"""Where each layer lives: network order in checkpoints, `[R, P, L]` in the train state.

A cut divides the network's layers into chunks, runs of consecutive layers; the ring says which
stage holds which chunk. Layers may be of unlike kinds, each of which has stacks of its own. Chunks
may differ in length and in kinds; shorter stacks are padded with unused zeros, which the engine
skips. The first layers of the network may stay outside: every stage has them.
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
"""The kind of all layers of a network whose layers are alike."""


@dataclass(frozen=True)
class LayerLayout:
    """Layers cut into chunks, and the ring on which the chunks lie.

    Parameters, and all that is kept per layer, are stacked by kind of layer: memory is the sum of
    what each kind really has. Tables say of which kind a layer of a chunk is, and at which place
    of that kind's stack it stands.
    """

    ring: Ring
    layer_partition: tuple[int, ...]
    """Layers of each chunk, in network order."""
    num_prologue_layers: int = 0
    """Layers in front of the first chunk, which every stage holds."""
    layer_types: tuple[str, ...] = ()
    """The kind of each layer of the network, in order. Empty: all layers are alike."""

    @property
    def num_layers(self) -> int:
        """Layers of the network."""
        return self.num_prologue_layers + sum(self.layer_partition)

    @property
    def max_layers_per_chunk(self) -> int:
        """Layers of the longest chunk (L)."""
        return max(self.layer_partition)

    @cached_property
    def type_of_layer(self) -> tuple[str, ...]:
        """The kind of each layer of the network, in order."""
        assert len(self.layer_types) in (0, self.num_layers)
        return self.layer_types or (SINGLE_LAYER_TYPE,) * self.num_layers

    @cached_property
    def stacks(self) -> dict[str, LayerTypeStack]:
        """Where the layers of each kind are, in the order in which kinds appear."""
        return {
            kind: LayerTypeStack.from_layout(self, kind)
            for kind in dict.fromkeys(self.type_of_layer)
        }

    @property
    def ring_layer_types(self) -> tuple[str, ...]:
        """Kinds of the layers in chunks; tables count them in this order."""
        return tuple(kind for kind, stack in self.stacks.items() if stack.max_layers_per_chunk)

    @property
    def prologue_layer_types(self) -> tuple[str, ...]:
        """Kinds of the layers outside the ring."""
        return tuple(kind for kind, stack in self.stacks.items() if stack.num_prologue_layers)

    @property
    def prologue(self) -> LayerLayout:
        """The layers outside the ring, as one chunk of one stage."""
        return LayerLayout(
            Ring(1, 1),
            (self.num_prologue_layers,),
            layer_types=self.type_of_layer[: self.num_prologue_layers],
        )

    @cached_property
    def _chunk_at(self) -> np.ndarray:
        """int `[R, P]`: the chunk that each stage runs in each repeat."""
        repeats, stages = self.ring.num_repeats, self.ring.num_stages
        chunks = [self.ring.chunk(p, r) for r in range(repeats) for p in range(stages)]
        return np.reshape(chunks, (repeats, stages))

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """int32 `[R, P]`: layers of each chunk."""
        return np.array(self.layer_partition, np.int32)[self._chunk_at]

    @cached_property
    def first_layer(self) -> np.ndarray:
        """int32 `[R, P]`: network position of each chunk's first layer."""
        sizes = np.array(self.layer_partition)
        return (self.num_prologue_layers + np.cumsum(sizes) - sizes).astype(np.int32)[
            self._chunk_at
        ]

    @cached_property
    def layer_at(self) -> np.ndarray:
        """int32 `[R, P, L]`: the network's layer at each position of a chunk, -1 for padding."""
        position = np.arange(self.max_layers_per_chunk)
        layers = self.first_layer[..., None] + position
        used = position < self.chunk_sizes[..., None]
        return np.where(used, layers, -1).astype(np.int32)

    @cached_property
    def layer_type_at(self) -> np.ndarray:
        """int32 `[R, P, L]`: number of each layer's kind in `in_ring`, -1 for padding."""
        numbers = np.array([[*self.stacks].index(kind) for kind in self.type_of_layer], np.int32)
        ring = {
            [*self.stacks].index(kind): number for number, kind in enumerate(self.ring_layer_types)
        }
        of_layer = np.array([ring.get(number, -1) for number in numbers], np.int32)
        return np.where(self.layer_at >= 0, of_layer[self.layer_at], -1).astype(np.int32)

    @cached_property
    def index_in_type_at(self) -> np.ndarray:
        """int32 `[R, P, L]`: how many layers of the same kind are before it in its chunk."""
        earlier = np.tril(np.ones((self.max_layers_per_chunk,) * 2, bool), -1)
        same = self.layer_type_at[..., :, None] == self.layer_type_at[..., None, :]
        return (same & earlier).sum(axis=-1).astype(np.int32)

    def stack(self, layers: Tree) -> tuple[Tree, Tree]:
        """`{kind: [n, ...]}` in network order -> the ring's `{kind: [R, P, L, ...]}`, and those
        outside it `{kind: [n, ...]}`. Kinds may be missing.
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
        """The way back: `{kind: [n, ...]}` in network order, padding dropped.

        Kinds that are in neither are left out.
        """
        found = {}
        for kind, stack in self.stacks.items():
            if kind in ring:
                trees = [tree[kind] for tree in (ring, front) if kind in tree]
                found[kind] = jax.tree.map(stack.unstack, *trees)
            elif kind in front:
                found[kind] = front[kind]
        return found


@dataclass(frozen=True)
class LayerTypeStack:
    """Where the layers of one kind are: in the stacks of the ring, and in front of it."""

    layers: tuple[int, ...]
    """Positions in the network of all layers of this kind, in order."""
    num_prologue_layers: int
    """How many of them are in front of the ring."""
    shape: tuple[int, int, int]
    """Leading dims of a stacked parameter: `(R, P, L)`, L being the most of a chunk."""
    layer_at: np.ndarray
    """int32 `[R * P * L]`: the network's layer at each stacked position, -1 for padding."""

    @classmethod
    def from_layout(cls, layout: LayerLayout, kind: str) -> LayerTypeStack:
        """The layers of this kind in a layout."""
        layers = tuple(n for n, name in enumerate(layout.type_of_layer) if name == kind)
        mine = set(layers)
        chunks = [
            [int(n) for n in chunk if n in mine]
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
        """Positions in the network of those in front of the ring."""
        return self.layers[: self.num_prologue_layers]

    @property
    def max_layers_per_chunk(self) -> int:
        """L of this kind: the most of its layers in one chunk."""
        return self.shape[2]

    @cached_property
    def _number_at(self) -> np.ndarray:
        """int `[R * P * L]`: the layer's number among those of its kind in the ring, -1."""
        numbers = {layer: n for n, layer in enumerate(self.layers[self.num_prologue_layers :])}
        return np.array([numbers.get(int(layer), -1) for layer in self.layer_at], int)

    @property
    def _is_network_order(self) -> bool:
        """Whether stacked order is network order: no padding, and no way back on the ring."""
        return bool((self._number_at == np.arange(self._number_at.size)).all())

    def stack(self, layers: jax.Array) -> jax.Array:
        """`[n, ...]` in network order -> the ring's `[R, P, L, ...]`, zeros as padding."""
        ring = layers[self.num_prologue_layers :]
        if not self._is_network_order:
            padded = jnp.concatenate([ring, jnp.zeros_like(ring[:1])])
            ring = padded[self._number_at]  # -1 picks the zeros
        return ring.reshape(*self.shape, *layers.shape[1:])

    def unstack(self, stacked: jax.Array, outside: jax.Array | None = None) -> jax.Array:
        """`[R, P, L, ...]` -> `[n, ...]` in network order, padding dropped.

        `outside` are the layers of this kind in front of the ring, if there are any.
        """
        flat = stacked.reshape(-1, *stacked.shape[3:])
        if not self._is_network_order:
            used = np.flatnonzero(self._number_at >= 0)
            flat = flat[used[np.argsort(self._number_at[used])]]
        return flat if outside is None else jnp.concatenate([outside, flat])


def pad_vocabulary(table: jax.Array, dim: int, size: int) -> jax.Array:
    """Zeros appended along `dim` up to `size`, so that the vocabulary divides its shards."""
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, size - table.shape[dim])
    return jnp.pad(table, widths) if size > table.shape[dim] else table


def padded_vocab_size(vocab_size: int, num_shards: int) -> int:
    """The smallest multiple of `num_shards` that holds the vocabulary."""
    return -(-vocab_size // num_shards) * num_shards
