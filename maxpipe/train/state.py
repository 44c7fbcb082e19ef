"""The train state, and its two forms: stacked on the mesh, and in network order.

On the mesh layers are stacked `[R, P, L]`, those in front of the ring `[layers]`, and the
vocabulary is padded to divide its shards; in checkpoints everything is in network order
without padding. `Partition` is the only place that converts, and it knows the sharding of
both forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.model.decoder import Decoder
from maxpipe.parallel.mesh import STAGE, TENSOR
from maxpipe.parallel.sharding import STACK
from maxpipe.pipeline.layout import Layout, pad_vocabulary, padded_vocabulary
from maxpipe.train.guard import GuardState

Tree = Any


class TrainState(NamedTuple):
    """Everything that a step changes. Data position and randomness follow from `step`."""

    step: jax.Array
    """int32: steps done, those whose update was not taken included."""
    params: Tree
    optimizer: optax.OptState
    guard: GuardState


@dataclass(frozen=True)
class Partition:
    """A decoder's parameters, and trees that contain copies of them, on a mesh."""

    decoder: Decoder
    layout: Layout
    mesh: Mesh

    @cached_property
    def specs(self) -> Tree:
        """PartitionSpec of each stacked parameter."""
        rules = self.decoder.rules

        def spec(path: tuple[Any, ...], axes: tuple[str, ...]) -> PartitionSpec:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            stack = {"layers": STACK, "outside": STACK[-1:]}.get(name.partition(".")[0], ())
            return rules.spec((*stack, *axes), where=name)

        return jax.tree_util.tree_map_with_path(spec, self._axes, is_leaf=_is_axes)

    @cached_property
    def kind(self) -> str:
        """The one kind of layer that there is."""
        (kind,) = self.decoder.model.kinds
        return kind

    @cached_property
    def _network_axes(self) -> Tree:
        axes = self.decoder.axes()
        return axes | {"layers": axes["layers"][self.kind]}

    @cached_property
    def _axes(self) -> Tree:
        """Logical axes of each parameter, without those of stacking."""
        axes = self._network_axes
        return axes | {"outside": axes["layers"]} if self.layout.outside else axes

    @cached_property
    def network_specs(self) -> Tree:
        """PartitionSpec of each parameter in network order; layers are split over stages."""
        per_layer = self.layout.num_layers % self.mesh.shape[STAGE] == 0
        stage = STAGE if per_layer else None
        size = self.mesh.shape

        def unpadded(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
            divides = self.decoder.config.vocab_size % (size[STAGE] * size[TENSOR]) == 0
            drop = "vocab" in axes and not divides
            return PartitionSpec(
                *(
                    None if drop and axis == "vocab" else entry
                    for axis, entry in zip(axes, spec, strict=True)
                )
            )

        specs = {
            name: jax.tree.map(
                lambda axes, spec: unpadded(spec, axes), subtree, self.specs[name], is_leaf=_is_axes
            )
            for name, subtree in self._network_axes.items()
            if name != "layers"
        }
        layers = jax.tree.map(
            lambda spec: PartitionSpec(stage, *spec[3:]), self.specs["layers"], is_leaf=_is_spec
        )
        return specs | {"layers": {self.kind: layers}}

    @cached_property
    def decayed(self) -> Tree:
        """Which parameters weight decay applies to: all but normalisation scales."""
        return jax.tree.map(lambda axes: axes != ("norm",), self._axes, is_leaf=_is_axes)

    def shardings(self, specs: Tree) -> Tree:
        """The specs on this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def init(self, key: jax.Array) -> Tree:
        """Stacked parameters; each layer's values depend on key and layer index alone."""
        layers = jnp.asarray(self.layout.layer_at)
        drawn = self.decoder.init_layers(self.kind, key, jnp.maximum(layers, 0))

        def stack(leaf: jax.Array) -> jax.Array:
            used = (layers >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(used, leaf, 0).reshape(*self.layout.shape, *leaf.shape[1:])

        params = self._pad_vocabulary(self.decoder.init_outer(key))
        params["layers"] = jax.tree.map(stack, drawn)
        if self.layout.outside:
            outside = jnp.arange(self.layout.outside)
            params["outside"] = self.decoder.init_layers(self.kind, key, outside)
        return params

    def stack(self, params: Tree) -> Tree:
        """Network order -> the stacked, padded form."""
        layout, stacked = self.layout, self._pad_vocabulary(params)
        layers = params["layers"][self.kind]
        stacked["layers"] = jax.tree.map(layout.stack, layers)
        if layout.outside:
            stacked["outside"] = jax.tree.map(lambda leaf: leaf[: layout.outside], layers)
        return stacked

    def unstack(self, params: Tree) -> Tree:
        """The stacked form -> network order without padding."""
        size = self.decoder.config.vocab_size
        plain = dict(params)
        layers = (plain.pop("layers"), *([plain.pop("outside")] if self.layout.outside else []))
        plain["embedding"] = plain["embedding"][:size]
        if "head" in plain:
            plain["head"] = plain["head"][:, :size]
        return plain | {"layers": {self.kind: jax.tree.map(self.layout.unstack, *layers)}}

    def to_saved(self, params: Tree) -> Tree:
        """The stacked form -> what checkpoints hold, which leaves out the name of the one kind."""
        return self.as_saved(self.unstack(params))

    def as_saved(self, tree: Tree) -> Tree:
        """A tree in network order without the name of the one kind."""
        return tree | {"layers": tree["layers"][self.kind]}

    def from_saved(self, params: Tree) -> Tree:
        """What checkpoints hold -> the stacked form."""
        return self.stack(params | {"layers": {self.kind: params["layers"]}})

    def _pad_vocabulary(self, params: Tree) -> Tree:
        shape = self.mesh.shape
        size = padded_vocabulary(self.decoder.config.vocab_size, shape[STAGE] * shape[TENSOR])
        padded = dict(params)
        padded["embedding"] = pad_vocabulary(params["embedding"], 0, size)
        if "head" in params:
            padded["head"] = pad_vocabulary(params["head"], 1, size)
        return padded


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(isinstance(axis, str) for axis in node)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
