"""The train state in its two forms: stacked on the mesh, and in network order.

On the mesh, layers are stacked `[R, P, L]`, prologue layers are stacked `[layers]`, and the
vocabulary is padded to a multiple of the number of shards. In checkpoints, all layers are in
network order without padding. `ParamLayout` is the only class that converts between the forms, and
it defines the sharding of both.

The module also compares the replicated parts of the train state bitwise across devices. If a mesh
axis does not shard an array, the devices along the axis hold replicas, and every step changes them
identically. A hardware fault in a device makes its replica differ, which no other check detects.
Each device reduces every shard to one integer, and only these integers are communicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.io.tree import KeyPath, flatten, unflatten
from maxpipe.models.param_names import chosen, names_in_layers
from maxpipe.models.spec import Param
from maxpipe.nn.adapters import complete_params
from maxpipe.nn.decoder import Decoder
from maxpipe.optim.guard import GuardState
from maxpipe.optim.state_spec import StateArray
from maxpipe.optim.update import OptState, TrainableParam
from maxpipe.parallel.axes import find_zero1_dim
from maxpipe.parallel.mesh import AXES, DATA, STAGE, TENSOR
from maxpipe.parallel.sharding import STACKED_AXES, auto_sharded, entry_axes
from maxpipe.pipeline.layout import LayerLayout, pad_vocabulary, padded_vocab_size
from maxpipe.pipeline.weights import select_trainable

Tree = Any
VOCABULARY: Mapping[str, int] = {"embedding": 0, "head": 1}
"""Parameters with a vocabulary dim, and the index of that dim."""


class TrainState(NamedTuple):
    """State that a step changes. The data position and the random keys are derived from `step`."""

    step: jax.Array
    """int32: number of completed steps, including steps whose update was skipped."""
    params: Tree
    optimizer: OptState
    guard: GuardState


@dataclass(frozen=True)
class ParamLayout:
    """Layout of a decoder's parameters, and of trees with the same structure, on a mesh."""

    decoder: Decoder
    layout: LayerLayout
    mesh: Mesh

    @cached_property
    def specs(self) -> Tree:
        """PartitionSpec of each stacked parameter."""
        rules = self.decoder.rules

        def spec(path: tuple[Any, ...], axes: tuple[str, ...]) -> PartitionSpec:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            stack = {"layers": STACKED_AXES, "outside": STACKED_AXES[-1:]}.get(
                name.partition(".")[0], ()
            )
            return rules.spec((*stack, *axes), where=name)

        return jax.tree_util.tree_map_with_path(spec, self._axes, is_leaf=_is_axes)

    @cached_property
    def _axes(self) -> Tree:
        """Logical axes of each parameter, without stacked dims."""
        return self._split_prologue(self.decoder.axes())

    @cached_property
    def trainable(self) -> Tree:
        """Whether each parameter of the stacked form is trainable."""
        return self._split_prologue(self.decoder.trainable())

    @cached_property
    def has_own_dtype(self) -> Tree:
        """Whether each parameter of the stacked form is used in its stored dtype."""
        return self._split_prologue(self.decoder.has_own_dtype())

    @cached_property
    def contracted_dims(self) -> Tree:
        """`Decoder.contracted_dims` for the stacked form."""
        return self._split_prologue(self.decoder.contracted_dims())

    def select_trainable(self, params: Tree) -> Tree:
        """Return the trainable parameters of a tree in stacked form."""
        return select_trainable(params, self.trainable)

    def _split_prologue(self, declared: Tree) -> Tree:
        """Convert a tree keyed by layer type to the layer types in the ring and in the prologue."""
        layers, layout = declared["layers"], self.layout
        found = declared | {"layers": {kind: layers[kind] for kind in layout.ring_layer_types}}
        if layout.num_prologue_layers:
            found |= {"outside": {kind: layers[kind] for kind in layout.prologue_layer_types}}
        return found

    @cached_property
    def saved_specs(self) -> Tree:
        """PartitionSpec of each parameter in saved form; the layer dim is sharded over stages."""
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
            for name, subtree in self.decoder.axes().items()
            if name != "layers"
        }
        specs["layers"] = self._drop_single_layer_type(
            {kind: self._saved_layers(kind) for kind in self.layout.stacks}
        )
        return specs

    def _zero1_spec(self, spec: PartitionSpec, param: Param, stacked: int) -> PartitionSpec:
        """Add ZeRO-1 sharding to the spec of a parameter with `stacked` leading dims."""
        entries = list(map(entry_axes, spec)) + [()] * (stacked + len(param.dims) - len(spec))
        dim = find_zero1_dim(param.dims, entries[stacked:], self.mesh.shape)
        if dim is not None:
            entries[stacked + dim] = (*entries[stacked + dim], DATA)
        return PartitionSpec(*(each or None for each in entries))

    def select_trainable_saved(self, saved: Tree) -> Tree:
        """Return the trainable parameters of a tree in saved form."""
        mask = self.decoder.trainable()
        layers = {kind: mask["layers"][kind] for kind in self.layout.stacks}
        return select_trainable(saved, mask | {"layers": self._drop_single_layer_type(layers)})

    def saved_state_specs(
        self, kept: Mapping[KeyPath, StateArray], targets: Mapping[KeyPath, TrainableParam]
    ) -> Tree:
        """Return the specs of state arrays in saved form; the arguments have stacked paths."""
        found: dict[KeyPath, PartitionSpec] = {}
        for path, spec in flatten(self.split_layer_types(self.saved_specs)).items():
            in_layers = path[0] == "layers"
            paths = (path, ("outside", *path[1:])) if in_layers else (path,)
            own = next((each for each in paths if each in kept), None)
            if own is not None:
                target, one = targets[own], kept[own]
                # Saved layers have one stacked dim, other parameters none. All other dims are
                # sharded as on the mesh.
                entries = [*spec[:in_layers], *target.spec[target.num_stacked_dims :]]
                entries += [None] * (in_layers + len(target.param.dims) - len(entries))
                if not in_layers:  # the saved form does not pad the vocabulary
                    vocab = target.param.axes.index("vocab") if "vocab" in target.param.axes else -1
                    entries = [spec[n] if n == vocab else each for n, each in enumerate(entries)]
                dropped = {in_layers + dim for dim in one.dropped_dims}
                kept_dims = (each for dim, each in enumerate(entries) if dim not in dropped)
                found[path] = PartitionSpec(*kept_dims)
        return self._plain_to_saved(unflatten(found))

    def _saved_layers(self, kind: str) -> Tree:
        """Return the PartitionSpecs of the parameters of one layer type, in network order."""
        count = len(self.layout.stacks[kind].layers)
        stage = STAGE if count % self.mesh.shape[STAGE] == 0 else None
        ring, front = self.specs["layers"], self.specs.get("outside", {})
        num_stacked, stacked = (3, ring[kind]) if kind in ring else (1, front[kind])
        return jax.tree.map(
            lambda spec: PartitionSpec(stage, *spec[num_stacked:]), stacked, is_leaf=_is_spec
        )

    def _drop_single_layer_type(self, layers: Tree) -> Tree:
        """Return the saved form of layers keyed by type, without the key if there is only one type.

        Checkpoints written before layer types existed have this form.
        """
        return layers if len(self.layout.stacks) > 1 else layers[next(iter(self.layout.stacks))]

    def split_layer_types(self, saved: Tree) -> Tree:
        """Return a saved tree with layers keyed by type, even for a single type."""
        if "layers" not in saved or len(self.layout.stacks) > 1:
            return saved
        return saved | {"layers": {next(iter(self.layout.stacks)): saved["layers"]}}

    def trainable_params(self, optim: OptimConfig) -> dict[KeyPath, TrainableParam]:
        """Return the trainable parameters, keyed by their paths in stacked form."""
        model, layout = self.decoder.model, self.layout
        rates = chosen(model, [(item.pattern, item.multiplier) for item in optim.lr_multipliers])
        decays = chosen(model, [(item.pattern, item.weight_decay) for item in optim.weight_decays])
        specs, found = flatten(self.specs), dict[KeyPath, TrainableParam]()

        def add(path: KeyPath, name: str, param: Param, layers: np.ndarray | None = None) -> None:
            decay = decays.get(name, optim.weight_decay if param.decays else 0.0)
            if param.trainable:
                spec = specs[path]
                if optim.zero1:
                    spec = self._zero1_spec(spec, param, 0 if layers is None else layers.ndim)
                found[path] = TrainableParam(param, name, rates.get(name, 1.0), decay, layers, spec)

        for key, param in model.ends.params.items():
            add(key, ".".join(key), param)
        for kind, stack in layout.stacks.items():
            names, params = names_in_layers(model, kind), model.layer_types[kind].params
            for key, name in names.items():
                if kind in layout.ring_layer_types:
                    layers = stack.layer_at.reshape(stack.shape)
                    add(("layers", kind, *key), name, params[key], layers)
                if kind in layout.prologue_layer_types:
                    add(("outside", kind, *key), name, params[key], np.array(stack.prologue_layers))
        return found

    def shardings(self, specs: Tree) -> Tree:
        """Return the specs as NamedShardings on this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def init(self, key: jax.Array) -> Tree:
        """Return new stacked parameters, which depend only on the key and the layer indices."""
        # The key does not determine a sharding, so explicit axes need specs.
        return auto_sharded(self._init_stacked, self.specs)(key)

    def _init_stacked(self, key: jax.Array) -> Tree:
        layout, init_layers = self.layout, self.decoder.init_layers

        def drawn(kind: str) -> Tree:
            stack = layout.stacks[kind]
            layers = jnp.asarray(stack.layer_at)

            def padded(leaf: jax.Array) -> jax.Array:
                used = (layers >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
                return jnp.where(used, leaf, 0).reshape(*stack.shape, *leaf.shape[1:])

            return jax.tree.map(padded, init_layers(kind, key, jnp.maximum(layers, 0)))

        params = self._pad_vocabulary(self.decoder.init_outer(key))
        params["layers"] = {kind: drawn(kind) for kind in layout.ring_layer_types}
        if layout.num_prologue_layers:
            params["outside"] = {
                kind: init_layers(kind, key, jnp.asarray(layout.stacks[kind].prologue_layers))
                for kind in layout.prologue_layer_types
            }
        return params

    # Adapters of a base model.

    @cached_property
    def base(self) -> ParamLayout:
        """Layout of the same model without adapters; `self` if the model has no adapters."""
        config = self.decoder.config
        if config.adapter is None:
            return self
        decoder = Decoder(replace(config, adapter=None), self.decoder.rules)
        return ParamLayout(decoder, self.layout, self.mesh)

    def add_adapters(self, base: Tree, key: jax.Array) -> Tree:
        """Add new adapters to the stacked parameters of `base`."""
        if self.base is self:
            return base
        return auto_sharded(self._add_adapters, self.specs)(base, self.init(key))

    def _add_adapters(self, base: Tree, drawn: Tree) -> Tree:
        found = dict(base)
        for place in {"layers", "outside"} & base.keys():
            found[place] = {}
            for kind, mine in base[place].items():
                described = self.decoder.model.layer_types[kind]
                both = flatten(drawn[place][kind]) | flatten(mine)
                read = {name: both[name] for name in described.params_in_init_order if name in both}
                found[place][kind] = unflatten(complete_params(described, read))
        return found

    def stack(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert parameters in network order, `layers {type: [n, ...]}`, to the stacked, padded
        form.

        In this and the following methods, parameters and dims may be missing, such as frozen
        parameters in optimizer state. `vocabulary` maps parameters to the index of their vocabulary
        dim.
        """
        stacked = self._pad_vocabulary(params, vocabulary)
        layers, outside = self.layout.stack(stacked.pop("layers", {}))
        places = {"layers": layers, "outside": outside}
        return stacked | {name: tree for name, tree in places.items() if tree}

    def unstack(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the stacked form to network order without padding."""
        size = self.decoder.config.vocab_size
        plain = dict(params)
        layers = self.layout.unstack(plain.pop("layers", {}), plain.pop("outside", {}))
        for name, dim in vocabulary.items():
            if name in plain:
                plain[name] = jax.lax.slice_in_dim(plain[name], 0, size, axis=dim)
        return plain | {"layers": layers} if layers else plain

    def to_saved(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the stacked form to the saved form, in network order."""
        return self._plain_to_saved(self.unstack(params, vocabulary))

    def _plain_to_saved(self, plain: Tree) -> Tree:
        if "layers" not in plain:
            return plain
        return plain | {"layers": self._drop_single_layer_type(plain["layers"])}

    def from_saved(self, saved: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the saved form to the stacked form."""
        return self.stack(self.split_layer_types(saved), vocabulary)

    def _pad_vocabulary(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        shape = self.mesh.shape
        size = padded_vocab_size(self.decoder.config.vocab_size, shape[STAGE] * shape[TENSOR])
        padded = dict(params)
        for name, dim in vocabulary.items():
            if name in params:
                padded[name] = pad_vocabulary(params[name], dim, size)
        return padded


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(isinstance(axis, str) for axis in node)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


@dataclass(frozen=True, slots=True)
class Difference:
    """An array whose replica on `device` differs from the majority, which includes `other`."""

    name: str
    device: Any
    other: Any

    def __str__(self) -> str:
        kind, process = self.device.device_kind, self.device.process_index
        return f"{self.name} on device {self.device.id} ({kind}, process {process})"


def format_differences(found: Sequence[Difference], where: str) -> str:
    """Return the error message for these differences."""
    more = f", and {len(found) - 1} more replicas differ" if found[1:] else ""
    return (
        f"{where}: {found[0]}\n"
        f"  must be bitwise equal to the replica on device {found[0].other.id}{more}; events.jsonl "
        "lists all. Nothing was saved since the replicas were last equal.\n"
        "  Start again to resume from the newest checkpoint; remove the device if it is named "
        "a second time."
    )


class ReplicaCheck:
    """Compare the replicas in trees with the given shardings."""

    def __init__(self, mesh: Mesh, abstract: Tree, shardings: Tree):
        self._devices = list(mesh.devices.flat)
        shapes = jax.tree_util.tree_leaves_with_path(abstract)
        placed = jax.tree.leaves(shardings)
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in shapes]
        self._groups = np.stack(
            [self._copies(leaf, each) for (_, leaf), each in zip(shapes, placed, strict=True)],
            axis=1,
        )
        self._digests = jax.jit(
            jax.shard_map(
                _digests,
                mesh=mesh,
                in_specs=(jax.tree.map(lambda each: each.spec, shardings),),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )

    def _copies(self, leaf: Any, sharding: NamedSharding) -> list[int]:
        """Return, for each device, the index of the first device that holds the same shard."""
        indices = sharding.devices_indices_map(leaf.shape)
        first: dict[str, int] = {}
        return [
            first.setdefault(str(indices[device]), index)
            for index, device in enumerate(self._devices)
        ]

    def differences(self, tree: Tree) -> list[Difference]:
        """Return the differences in a tree, identical in all processes."""
        found = np.asarray(self._digests(tree))
        wrong = found != np.take_along_axis(found, self._groups, axis=0)
        return [
            difference
            for column in np.flatnonzero(wrong.any(axis=0)).tolist()
            for difference in self._of_array(column, found[:, column])
        ]

    def _of_array(self, column: int, found: np.ndarray) -> list[Difference]:
        groups, differences = self._groups[:, column], []
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            usual = Counter(found[members].tolist()).most_common(1)[0][0]
            other = members[found[members] == usual][0]
            differences += [
                Difference(self._names[column], self._devices[member], self._devices[other])
                for member in members
                if found[member] != usual
            ]
        return differences


def _digests(tree: Tree) -> jax.Array:
    """Return the checksums of each device's shards, uint32 `[devices, arrays]`, on every device."""
    mine = jnp.stack([digest(leaf) for leaf in jax.tree.leaves(tree)])
    return jax.lax.all_gather(mine, AXES)


def digest(array: jax.Array) -> jax.Array:
    """Return the uint32 sum of the bits of all entries, weighted by odd numbers.

    The weight of an entry depends on its index. Odd weights are invertible modulo a power of two,
    so a single flipped bit always changes the sum.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    index = jnp.zeros(array.shape, jnp.uint32)
    for dim in range(array.ndim):
        stride = jnp.uint32(math.prod(array.shape[dim + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim) * stride
    return (bits.astype(jnp.uint32) * (2 * index + 1)).sum(dtype=jnp.uint32)
