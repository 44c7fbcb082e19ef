"""The layout of the train state: initialization, shardings, and conversions of its two forms.

`state.ParamLayout` converts trees that are structured like the parameters. `StateLayout` adds the
optimizer state, the guard state and adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Key

from maxpipe.config.schema import GuardConfig
from maxpipe.optim.guard import GuardState, init_guard_state
from maxpipe.optim.update import Optimizer, OptState
from maxpipe.parallel.sharding import auto_sharded, trace_on_mesh, with_shardings
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.step.state import VOCABULARY, ParamLayout, ReplicaCheck, TrainState, digest

Tree = Any
# Each use of randomness has a separate stream of keys.
PARAM_STREAM, DROPOUT_STREAM = 0, 1


@dataclass(frozen=True)
class StateLayout:
    """Layout of the train state of a model and an optimizer on a mesh."""

    param_layout: ParamLayout
    optimizer: Optimizer
    seed: int
    guard: GuardConfig

    # Shapes and shardings.

    @cached_property
    def state_sharding(self) -> TrainState:
        """Sharding of the stacked train state."""
        state = self.param_layout.shardings(self._state_specs)
        trees = self._in_state_memory(state.optimizer.trees)
        return state._replace(optimizer=state.optimizer._replace(trees=trees))

    def _in_state_memory(self, shardings: Tree) -> Tree:
        """Return the shardings of optimizer-state trees with the memory kind that stores them."""
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
        """Sharding of the state in saved form, in network order."""
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
        """Shapes, dtypes and shardings of the stacked train state."""
        return with_shardings(jax.eval_shape(self._init), self.state_sharding)

    @cached_property
    def abstract_saved(self) -> Tree:
        """Shapes, dtypes and shardings of the saved form."""
        state = jax.eval_shape(self._init)
        return with_shardings(jax.eval_shape(self._to_saved, state), self.saved_sharding)

    @cached_property
    def abstract_base(self) -> Tree:
        """Shapes, dtypes and shardings of the base parameters of a run, without adapters."""
        layout = self.param_layout.base
        stacked = jax.eval_shape(layout.init, self._key(PARAM_STREAM))
        saved = jax.eval_shape(auto_sharded(layout.to_saved, layout.saved_specs), stacked)
        return with_shardings(saved, layout.shardings(layout.saved_specs))

    # New states.

    def init(self) -> TrainState:
        """Return a new state on the mesh; its values depend only on the seed and the model."""
        init = self._jit(self._init, self.state_sharding).lower()
        # On CPU, LLVM needs many seconds to optimize the random number generator, which runs only
        # once. The generator uses integer arithmetic, so the bits are the same at any optimization
        # level.
        options: dict[str, Any] = {}
        if self.param_layout.mesh.devices.flat[0].platform == "cpu":
            options["xla_backend_optimization_level"] = 0
        return init.compile(options)()

    def init_params(self) -> Tree:
        """Return the parameters of a new state."""
        init = partial(self.param_layout.init, self._key(PARAM_STREAM))
        return self._jit(init, self.state_sharding.params)()

    def init_from_params(self, params: Tree) -> TrainState:
        """Return a new state with parameters from a checkpoint.

        For a model with adapters, `params` are the parameters of the base model.
        """

        def convert(saved: Tree) -> TrainState:
            params, guard = self._stack_with_adapters(saved), init_guard_state(self.guard)
            optimizer, step = self._optimizer_state(params), jnp.zeros((), jnp.int32)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)(params)

    @cached_property
    def initial_params(self) -> Any:
        """Function that converts saved parameters to the initial stacked parameters of a run. With
        adapters, the saved parameters are those of the base model.
        """
        return self._jit(self._stack_with_adapters, self.state_sharding.params)

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
        """Function that converts a state to its saved form: network order, without padding."""
        return self._jit(self._to_saved, self.saved_sharding)

    def _to_saved(self, state: TrainState) -> Tree:
        parts = self.param_layout

        # Merge the layers of all stages into one dim and remove padding.
        def unstack(tree: Tree, specs: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
            run = partial(parts.to_saved, vocabulary=vocabulary)
            return auto_sharded(run, specs)(tree)

        specs, vocabulary = self._saved_trees_specs, self.optimizer.vocab_dims
        saved = {
            name: unstack(_on_device(tree), specs[name], vocabulary[name])
            for name, tree in state.optimizer.trees.items()
        }
        params = self._select_saved(unstack(state.params, parts.saved_specs))
        return {"step": state.step, "params": params, "optimizer": saved}

    def _select_saved(self, params: Tree) -> Tree:
        """Return the parameters that a checkpoint stores: only the adapters, if there are any."""
        parts = self.param_layout
        return params if parts.base is parts else parts.select_trainable_saved(params)

    @cached_property
    def from_saved(self) -> Any:
        """Function (saved form, guard state, base parameters) -> state.

        The guard state defaults to that of a new run. Base parameters are needed only with
        adapters.
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
                trees[name] = auto_sharded(run, specs[name])(_on_device(tree))
            optimizer = OptState(step - guard.skipped, trees)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)

    @cached_property
    def stack_params(self) -> Any:
        """Function that converts saved parameters to stacked parameters."""
        return self._jit(self._stack, self.state_sharding.params)

    @cached_property
    def merge_adapters(self) -> Any:
        """Function (base, adapters) -> all parameters, all of them in saved form."""
        parts, specs = self.param_layout, self.param_layout.saved_specs

        def convert(base: Tree, adapters: Tree) -> Tree:
            return auto_sharded(parts.to_saved, specs)(self._stack(adapters, base))

        return self._jit(convert, parts.shardings(specs))

    def _stack(self, params: Tree, base: Tree | None = None) -> Tree:
        """Stack saved parameters. With a `base`, `params` are adapters of that base."""
        # Distribute the layers over the stages and pad the vocabulary.
        parts = self.param_layout
        if base is None:
            return auto_sharded(parts.from_saved, parts.specs)(params)
        adapters = auto_sharded(parts.from_saved, parts.select_trainable(parts.specs))(params)
        return replace_subtree(self._stack_with_adapters(base), adapters)

    def _stack_with_adapters(self, base: Tree) -> Tree:
        """Return the stacked parameters of a saved base with new adapters."""
        base_layout = self.param_layout.base
        stacked = auto_sharded(base_layout.from_saved, base_layout.specs)(base)
        return self.param_layout.add_adapters(stacked, self._key(PARAM_STREAM))

    def _jit(self, run: Callable[..., Tree], shardings: Tree) -> Any:
        """Return a jitted function whose outputs have these shardings."""
        return jax.jit(trace_on_mesh(self.param_layout.mesh, run), out_shardings=shardings)

    # Comparisons.

    @cached_property
    def replica_check(self) -> ReplicaCheck:
        """Check that replicated parts of the stacked train state are bitwise equal."""
        return ReplicaCheck(self.param_layout.mesh, self.abstract_state, self.state_sharding)

    def digest(self, params: Tree) -> str:
        """Return a checksum of the parameters that does not depend on the layout."""
        parts = self.param_layout

        def digests(params: Tree) -> Array:
            saved = parts.to_saved(params, vocabulary=VOCABULARY)
            return jnp.stack([digest(leaf) for leaf in jax.tree.leaves(saved)])

        everywhere = NamedSharding(parts.mesh, PartitionSpec())
        checksums = self._jit(auto_sharded(digests, PartitionSpec()), everywhere)(params)
        return hashlib.sha256(np.asarray(checksums, "<u4").tobytes()).hexdigest()


def _on_device(tree: Tree) -> Tree:
    """Move arrays to device memory, if they are in host memory."""
    return jax.device_put(tree, jax.memory.Space.Device)
