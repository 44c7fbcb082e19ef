"""The train state in two forms: stacked on the mesh, and with layers in model order.

On the mesh, layers are stacked `[R, P, L]`, prologue layers are stacked `[layers]`, and the
vocabulary is padded to a multiple of the number of shards. In checkpoints, all layers are in model
order without padding. Only `ParamLayout` converts trees with the structure of the parameters
between the two forms. `ParamLayout` also defines the sharding of both forms. `StateLayout` adds the
optimizer state, the guard state and adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Key

from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.param_names import KeyPath, chosen, flatten, names_in_layers, unflatten
from maxpipe.models.spec import Param
from maxpipe.nn.adapters import complete_params
from maxpipe.nn.decoder import Decoder
from maxpipe.optim.guard import GuardState, init_guard_state
from maxpipe.optim.state_spec import StateArray
from maxpipe.optim.update import Optimizer, OptState, TrainableParam
from maxpipe.parallel.axes import find_zero1_dim
from maxpipe.parallel.mesh import DATA, STAGE, TENSOR
from maxpipe.parallel.sharding import (
    STACKED_AXES,
    auto_sharded,
    entry_axes,
    to_device,
    trace_on_mesh,
    with_shardings,
)
from maxpipe.pipeline.layout import LayerLayout, pad_vocabulary, padded_vocab_size
from maxpipe.pipeline.weights import replace_subtree, select_trainable
from maxpipe.step.replica_check import ReplicaCheck, digest

Tree = Any
VOCABULARY: Mapping[str, int] = {"embedding": 0, "head": 1}
"""Parameters with a vocab dim, and the index of that dim."""


class TrainState(NamedTuple):
    """Training state that is updated by every step. The data position and the random keys are
    derived from `step`.
    """

    step: jax.Array
    """int32 number of completed steps, including steps whose update was skipped."""
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
        """Return the PartitionSpec of each stacked parameter."""
        rules = self.decoder.rules

        def spec(path: tuple[Any, ...], axes: tuple[str, ...]) -> PartitionSpec:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            stack = {"layers": STACKED_AXES, "outside": STACKED_AXES[-1:]}.get(
                name.partition(".")[0], ()
            )
            return rules.spec((*stack, *axes), where=name)

        return jax.tree_util.tree_map_with_path(spec, self.logical_axes, is_leaf=_is_axes)

    @cached_property
    def logical_axes(self) -> Tree:
        """Return the logical axes of each parameter, excluding stacked dims."""
        return self._split_prologue(self.decoder.axes())

    @cached_property
    def trainable(self) -> Tree:
        """Return a tree in stacked form, with bools that are true for trainable parameters."""
        return self._split_prologue(self.decoder.trainable())

    @cached_property
    def has_own_dtype(self) -> Tree:
        """Return a tree in stacked form, with bools that are true for parameters used in their
        stored dtype.
        """
        return self._split_prologue(self.decoder.has_own_dtype())

    @cached_property
    def contracted_dims(self) -> Tree:
        """Return `Decoder.contracted_dims` in stacked form."""
        return self._split_prologue(self.decoder.contracted_dims())

    def select_trainable(self, params: Tree) -> Tree:
        """Return the trainable parameters of a tree in stacked form."""
        return select_trainable(params, self.trainable)

    def _split_prologue(self, declared: Tree) -> Tree:
        """Split a tree keyed by layer type into the ring's layer types and the prologue's layer
        types.
        """
        layers, layout = declared["layers"], self.layout
        found = declared | {"layers": {kind: layers[kind] for kind in layout.ring_layer_types}}
        if layout.num_prologue_layers:
            found |= {"outside": {kind: layers[kind] for kind in layout.prologue_layer_types}}
        return found

    @cached_property
    def saved_specs(self) -> Tree:
        """Return the PartitionSpec of each parameter in saved form, in which the layer dim is
        sharded over stages.
        """
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
        """Return the trainable parameters of a tree in the form saved in checkpoints."""
        mask = self.decoder.trainable()
        layers = {kind: mask["layers"][kind] for kind in self.layout.stacks}
        return select_trainable(saved, mask | {"layers": self._drop_single_layer_type(layers)})

    def saved_state_specs(
        self, kept: Mapping[KeyPath, StateArray], targets: Mapping[KeyPath, TrainableParam]
    ) -> Tree:
        """Return the specs of state arrays in saved form; the arguments are keyed by each
        parameter's path in stacked form.
        """
        found: dict[KeyPath, PartitionSpec] = {}
        for path, spec in flatten(self.split_layer_types(self.saved_specs)).items():
            in_layers = path[0] == "layers"
            paths = (path, ("outside", *path[1:])) if in_layers else (path,)
            own = next((each for each in paths if each in kept), None)
            if own is not None:
                target, one = targets[own], kept[own]
                # Saved layers have one stacked dim, and other parameters have none. All other dims
                # are sharded as on the mesh.
                entries = [*spec[:in_layers], *target.spec[target.num_stacked_dims :]]
                entries += [None] * (in_layers + len(target.param.dims) - len(entries))
                if not in_layers:  # the vocabulary is not padded in saved form
                    vocab = target.param.axes.index("vocab") if "vocab" in target.param.axes else -1
                    entries = [spec[n] if n == vocab else each for n, each in enumerate(entries)]
                dropped = {in_layers + dim for dim in one.dropped_dims}
                kept_dims = (each for dim, each in enumerate(entries) if dim not in dropped)
                found[path] = PartitionSpec(*kept_dims)
        return self._plain_to_saved(unflatten(found))

    def _saved_layers(self, kind: str) -> Tree:
        """Return the PartitionSpecs of one layer type's parameters in saved form."""
        count = len(self.layout.stacks[kind].layers)
        stage = STAGE if count % self.mesh.shape[STAGE] == 0 else None
        ring, front = self.specs["layers"], self.specs.get("outside", {})
        num_stacked, stacked = (3, ring[kind]) if kind in ring else (1, front[kind])
        return jax.tree.map(
            lambda spec: PartitionSpec(stage, *spec[num_stacked:]), stacked, is_leaf=_is_spec
        )

    def _drop_single_layer_type(self, layers: Tree) -> Tree:
        """Return the saved form of layers keyed by type, dropping the key if there is only one
        type.

        Checkpoints written before layer types existed have this form.
        """
        return layers if len(self.layout.stacks) > 1 else layers[next(iter(self.layout.stacks))]

    def split_layer_types(self, saved: Tree) -> Tree:
        """Return a saved tree with layers keyed by type, even if there is only one type."""
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
        # The key does not determine a sharding, so explicit axes require specs.
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

    # Adapters added to a base model.

    @cached_property
    def base(self) -> ParamLayout:
        """Return the layout of the same model without adapters; `self` if the model has no
        adapters.
        """
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
        """Convert parameters with `layers {type: [n, ...]}` in model order to the stacked form.

        In this method and the following ones, parameters and dims can be missing, such as frozen
        parameters in optimizer state. `vocabulary` maps parameters to the index of their vocab dim.
        """
        stacked = self._pad_vocabulary(params, vocabulary)
        layers, outside = self.layout.stack(stacked.pop("layers", {}))
        places = {"layers": layers, "outside": outside}
        return stacked | {name: tree for name, tree in places.items() if tree}

    def unstack(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the stacked form to layers in model order, without padding."""
        size = self.decoder.config.vocab_size
        plain = dict(params)
        layers = self.layout.unstack(plain.pop("layers", {}), plain.pop("outside", {}))
        for name, dim in vocabulary.items():
            if name in plain:
                plain[name] = jax.lax.slice_in_dim(plain[name], 0, size, axis=dim)
        return plain | {"layers": layers} if layers else plain

    def to_saved(self, params: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the stacked form to the form saved in checkpoints."""
        return self._plain_to_saved(self.unstack(params, vocabulary))

    def _plain_to_saved(self, plain: Tree) -> Tree:
        if "layers" not in plain:
            return plain
        return plain | {"layers": self._drop_single_layer_type(plain["layers"])}

    def from_saved(self, saved: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
        """Convert the form saved in checkpoints to the stacked form."""
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


# Each use of random numbers has a separate stream of keys.
PARAM_STREAM, DROPOUT_STREAM = 0, 1


@dataclass(frozen=True)
class StateLayout:
    """Mesh layout of the train state of a model and its optimizer."""

    param_layout: ParamLayout
    optimizer: Optimizer
    seed: int
    guard: GuardConfig
    offloads_weights: bool
    """Whether the weight matrices of the pipelined layers are stored in host memory."""

    # Shapes and shardings.

    @cached_property
    def state_sharding(self) -> TrainState:
        """Return the sharding of the stacked train state."""
        state = self.param_layout.shardings(self._state_specs)
        trees = self._in_state_memory(state.optimizer.trees)
        optimizer = state.optimizer._replace(trees=trees)
        return state._replace(params=self._in_weight_memory(state.params), optimizer=optimizer)

    def _in_weight_memory(self, shardings: Tree) -> Tree:
        """Return the shardings of stacked parameters, with offloaded weights in host memory."""
        if not self.offloads_weights:
            return shardings

        def stored(path: tuple[Any, ...], sharding: NamedSharding, axes: tuple[str, ...]) -> Any:
            is_offloaded = path[0].key == "layers" and len(axes) > 1
            return sharding.with_memory_kind("pinned_host") if is_offloaded else sharding

        axes = self.param_layout.logical_axes
        return jax.tree_util.tree_map_with_path(stored, shardings, axes)

    def _in_state_memory(self, shardings: Tree) -> Tree:
        """Return the shardings of optimizer-state trees with the memory kind in which these trees
        are stored.
        """
        if not self.optimizer.config.offload_state:
            return shardings
        return jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)

    @cached_property
    def _state_specs(self) -> TrainState:
        specs = self.param_layout.specs
        optimizer = OptState._make((PartitionSpec(), self.optimizer.specs))
        guard = jax.tree.map(lambda _: PartitionSpec(), init_guard_state(self.guard))
        return TrainState._make((PartitionSpec(), specs, optimizer, guard))

    @cached_property
    def saved_sharding(self) -> Tree:
        """Return the sharding of the state in saved form, with layers in model order."""
        specs, trees = self._select_saved(self.param_layout.saved_specs), self._saved_trees_specs
        saved = self.param_layout.shardings(
            {"step": PartitionSpec(), "params": specs, "optimizer": trees}
        )
        return saved | {"optimizer": self._in_state_memory(saved["optimizer"])}

    @cached_property
    def _saved_trees_specs(self) -> dict[str, Tree]:
        run = partial(self.param_layout.saved_state_specs, targets=self.optimizer.trainable_params)
        return {name: run(arrays) for name, arrays in self.optimizer.state_arrays.items()}

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the stacked train state."""
        return with_shardings(jax.eval_shape(self._init), self.state_sharding)

    @cached_property
    def abstract_saved(self) -> Tree:
        """Return the shapes, dtypes and shardings of the state in saved form."""
        state = jax.eval_shape(self._init)
        return with_shardings(jax.eval_shape(self._to_saved, state), self.saved_sharding)

    @cached_property
    def abstract_base(self) -> Tree:
        """Return the shapes, dtypes and shardings of a run's base parameters, without adapters."""
        layout = self.param_layout.base
        stacked = jax.eval_shape(layout.init, self._key(PARAM_STREAM))
        saved = jax.eval_shape(auto_sharded(layout.to_saved, layout.saved_specs), stacked)
        return with_shardings(saved, layout.shardings(layout.saved_specs))

    # New states.

    def init(self) -> TrainState:
        """Return a new state on the mesh, which depends only on the seed and the model."""
        init = self._jit(self._init, self.state_sharding).lower()
        # On CPU, LLVM spends many seconds optimizing the random number generator, which runs only
        # once. The generator uses integer arithmetic, so the random bits are the same at any
        # optimization level.
        options: dict[str, Any] = {}
        if self.param_layout.mesh.devices.flat[0].platform == "cpu":
            options["xla_backend_optimization_level"] = 0
        return init.compile(options)()

    def init_params(self) -> Tree:
        """Return the parameters of a new train state."""
        init = partial(self.param_layout.init, self._key(PARAM_STREAM))
        return self._jit(init, self.state_sharding.params)()

    def init_from_params(self, params: Tree, adapters: Tree | None = None) -> TrainState:
        """Return a new state with saved parameters. For a model with adapters, these are the
        parameters of the base model, and `adapters` are saved adapters, or None for new ones.
        """

        def convert(saved: Tree, adapters: Tree | None) -> TrainState:
            params, guard = self._stack(adapters, saved), init_guard_state(self.guard)
            optimizer, step = self._optimizer_state(params), jnp.zeros((), jnp.int32)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)(params, adapters)

    @cached_property
    def initial_params(self) -> Any:
        """Return a function that converts saved parameters to a run's initial stacked parameters.
        The arguments are those of `init_from_params`.
        """
        stack = lambda saved, adapters=None: self._stack(adapters, saved)  # noqa: E731
        return self._jit(stack, self.state_sharding.params)

    def _key(self, stream: int) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.key(self.seed), stream)

    def _optimizer_state(self, params: Tree) -> Tree:
        """Return the optimizer state of a new run, without frozen parameters."""
        return self.optimizer.init(self.param_layout.select_trainable(params))

    def _init(self) -> TrainState:
        params = self.param_layout.init(self._key(PARAM_STREAM))
        guard = jax.tree.map(jnp.asarray, init_guard_state(self.guard))
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer_state(params), guard)

    # Conversions to and from the saved form.

    @cached_property
    def to_saved(self) -> Any:
        """Return a function that converts a state to its saved form: unpadded, with layers in model
        order.
        """
        return self._jit(self._to_saved, self.saved_sharding)

    def _to_saved(self, state: TrainState) -> Tree:
        parts = self.param_layout

        # Merge the layers of all stages into one dim, and remove the padding.
        def unstack(tree: Tree, specs: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
            run = partial(parts.to_saved, vocabulary=vocabulary)
            return auto_sharded(run, specs)(tree)

        specs, vocabulary = self._saved_trees_specs, self.optimizer.vocab_dims
        saved = {
            name: unstack(to_device(tree), specs[name], vocabulary[name])
            for name, tree in state.optimizer.trees.items()
        }
        params = self._select_saved(unstack(to_device(state.params), parts.saved_specs))
        return {"step": state.step, "params": params, "optimizer": saved}

    def _select_saved(self, params: Tree) -> Tree:
        """Return the parameters that a checkpoint stores: only the adapters, if there are any."""
        parts = self.param_layout
        return params if parts.base is parts else parts.select_trainable_saved(params)

    @cached_property
    def from_saved(self) -> Any:
        """Return a function that maps (saved form, guard state, base parameters) to the train
        state.

        The guard state defaults to the guard state of a new run. Base parameters are needed only
        with adapters.
        """

        def convert(
            saved: Tree, guard: GuardState | None = None, base: Tree | None = None
        ) -> TrainState:
            guard = init_guard_state(self.guard) if guard is None else guard
            step, params = saved["step"], self._stack(saved["params"], base)
            specs, vocabulary = self.optimizer.specs, self.optimizer.vocab_dims
            trees = {}
            for name, tree in saved["optimizer"].items():
                run = partial(self.param_layout.from_saved, vocabulary=vocabulary[name])
                trees[name] = auto_sharded(run, specs[name])(to_device(tree))
            optimizer = OptState(step - guard.skipped, trees)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)

    @cached_property
    def stack_params(self) -> Any:
        """Return a function that converts saved parameters to stacked parameters."""
        return self._jit(self._stack, self.state_sharding.params)

    @cached_property
    def merge_adapters(self) -> Any:
        """Return a function that maps (base, adapters) to all parameters; inputs and output are in
        saved form.
        """
        parts, specs = self.param_layout, self.param_layout.saved_specs

        def convert(base: Tree, adapters: Tree) -> Tree:
            return auto_sharded(parts.to_saved, specs)(self._stack(adapters, base))

        return self._jit(convert, parts.shardings(specs))

    def _stack(self, params: Tree | None, base: Tree | None = None) -> Tree:
        """Convert saved parameters to the stacked form. If `base` is set, `params` are adapters of
        that base, or None for new adapters.
        """
        # Distribute the layers over the stages and pad the vocabulary.
        parts = self.param_layout
        if base is None:
            return auto_sharded(parts.from_saved, parts.specs)(params)
        if params is None:
            return self._stack_with_adapters(base)
        adapters = auto_sharded(parts.from_saved, parts.select_trainable(parts.specs))(params)
        return replace_subtree(self._stack_with_adapters(base), adapters)

    def _stack_with_adapters(self, base: Tree) -> Tree:
        """Return the stacked parameters of a saved base with new adapters."""
        base_layout = self.param_layout.base
        stacked = auto_sharded(base_layout.from_saved, base_layout.specs)(base)
        return self.param_layout.add_adapters(stacked, self._key(PARAM_STREAM))

    def _jit(self, run: Callable[..., Tree], shardings: Tree) -> Any:
        """Return a jitted version of `run` whose outputs have these shardings."""
        return jax.jit(trace_on_mesh(self.param_layout.mesh, run), out_shardings=shardings)

    # Comparisons.

    @cached_property
    def replica_check(self) -> ReplicaCheck:
        """Return the check that replicated arrays in the stacked train state are bitwise equal."""
        return ReplicaCheck(self.param_layout.mesh, self.abstract_state, self.state_sharding)

    def digest(self, params: Tree) -> str:
        """Return a checksum of the parameters that does not depend on the layout."""
        parts = self.param_layout

        def digests(params: Tree) -> Array:
            saved = parts.to_saved(to_device(params), vocabulary=VOCABULARY)
            return jnp.stack([digest(leaf) for leaf in jax.tree.leaves(saved)])

        everywhere = NamedSharding(parts.mesh, PartitionSpec())
        checksums = self._jit(auto_sharded(digests, PartitionSpec()), everywhere)(params)
        return hashlib.sha256(np.asarray(checksums, "<u4").tobytes()).hexdigest()
