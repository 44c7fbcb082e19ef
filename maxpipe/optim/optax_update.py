"""Parameter updates by an optax transformation in place of the optimizer in the config.

The state of the transformation is stored like the state of a configured optimizer: arrays that have
the shape of the parameters are sharded, saved and restored with the parameters. Counters of updates
are not stored, because the train state contains the number of updates.

Source: optax (https://optax.readthedocs.io), whose transformations map gradients, state and
parameters to changes of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.errors import Code, ConfigError
from maxpipe.models.param_names import KeyPath, unflatten
from maxpipe.optim.guard import select_update
from maxpipe.optim.state_spec import StateArray
from maxpipe.optim.update import Optimizer, OptState, Taken
from maxpipe.parallel.sharding import auto_sharded

Tree = Any
_WHERE = "optimizer"
OPTAX = "optax"
"""Key of the names of the state arrays in the data section of a checkpoint."""


@dataclass(frozen=True, eq=False)
class OptaxOptimizer(Optimizer):
    """Applies an optax transformation. Gradients are not clipped, and the keys of `optim` that
    define an update have no effect.

    The guard checks the loss and the gradients of a step, but not the result of the update.
    """

    transformation: optax.GradientTransformation = field(default_factory=optax.identity)

    @classmethod
    def replacing(
        cls, optimizer: Optimizer, transformation: optax.GradientTransformation
    ) -> OptaxOptimizer:
        """Return an optimizer for the same parameters that applies the transformation.

        Raises:
            ConfigError: the config requires an update that a transformation cannot compute, or
                the state of the transformation has arrays with other shapes.
        """
        _check_config(optimizer.config)
        new = cls(
            optimizer.config,
            optimizer.rate,
            optimizer.trainable_params,
            optimizer.param_dtype,
            optimizer.seed,
            optimizer.mesh,
            transformation,
        )
        new._check_update()
        new._check_state()
        return new

    @cached_property
    def state_arrays(self) -> dict[str, dict[KeyPath, StateArray]]:
        """Return the state arrays of each parameter, keyed by tree name and path."""
        trees, _ = self._split(self._abstract_state)
        return {
            name: {
                path: StateArray(target.param.dims, _leaf(tree, path).dtype.name)
                for path, target in self.trainable_params.items()
            }
            for name, tree in trees.items()
        }

    @property
    def is_elementwise(self) -> bool:
        """Return False, because a transformation may combine entries."""
        return False

    def init(self, params: Tree) -> OptState:
        """Return the state of a new run."""
        run = auto_sharded(
            lambda params: self._stored(self.transformation.init(params)), self.specs
        )
        return OptState(jnp.zeros((), jnp.int32), run(params))

    def bound_update(
        self, reach: Float[Array, " 2"], norm: Float[Array, ""], rate: Float[Array, ""]
    ) -> Float[Array, " 2"]:
        """Return zeros, because the result of a transformation is unknown and is not checked."""
        del norm, rate
        return jnp.zeros_like(reach)

    def update(
        self,
        gradients: Tree,
        state: OptState,
        params: Tree,
        *,
        norm: Float[Array, ""] | None = None,
        taken: Taken = True,
        draw: bool = True,
    ) -> tuple[Tree, OptState]:
        """Return the updated parameters and state; see `Optimizer.update`."""
        del norm, draw

        def run(
            gradients: Tree, trees: Tree, params: Tree, updates: Array, taken: Bool[Array, ""]
        ) -> tuple[Tree, Tree]:
            changes, new = self.transformation.update(
                gradients, self._joined(trees, updates), params
            )
            moved = optax.apply_updates(params, changes)
            return select_update(taken, (moved, self._stored(new)), (params, trees))

        run = auto_sharded(run, (self.target_specs, self.specs))
        taken = jnp.asarray(taken)
        moved, trees = run(gradients, state.trees, params, state.updates, taken)
        count = jnp.where(taken, optax.safe_increment(state.updates), state.updates)
        return moved, OptState(count, trees)

    # State of the transformation.

    def _params(self, of: Any) -> Tree:
        """Return a tree of trainable parameters whose leaves are `of(shape, dtype)`."""
        leaves = {}
        for path, target in self.trainable_params.items():
            stacked = () if target.layers is None else target.layers.shape
            dtype = jnp.dtype(target.param.own_dtype or self.param_dtype)
            leaves[path] = of((*stacked, *target.param.shape), dtype)
        return unflatten(leaves)

    @cached_property
    def _abstract_state(self) -> Tree:
        return jax.eval_shape(self.transformation.init, self._params(jax.ShapeDtypeStruct))

    @cached_property
    def _structure(self) -> Any:
        return jax.tree.structure(self._params(lambda shape, dtype: 0))

    def _is_param_tree(self, node: Any) -> bool:
        return isinstance(node, dict) and jax.tree.structure(node) == self._structure

    def _split(self, state: Tree) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Return the trees with the structure of the parameters and all other leaves of a state,
        keyed by their names.
        """
        trees, others = {}, {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=self._is_param_tree):
            name = jax.tree_util.keystr(path, simple=True, separator="_")
            (trees if self._is_param_tree(leaf) else others)[f"optax_{name}"] = leaf
        return trees, others

    def _stored(self, state: Tree) -> dict[str, Tree]:
        """Return the stored arrays of a state, in their stored dtypes."""
        trees, _ = self._split(state)
        abstract, _ = self._split(self._abstract_state)
        return {
            name: jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, abstract[name])
            for name, tree in trees.items()
        }

    def _joined(self, trees: Tree, updates: Array) -> Tree:
        """Return the state of the transformation after `updates` updates."""
        leaves, structure = jax.tree.flatten(self._abstract_state, is_leaf=self._is_param_tree)
        stored = iter(trees.values())
        return structure.unflatten(
            next(stored) if self._is_param_tree(leaf) else updates.astype(leaf.dtype)
            for leaf in leaves
        )

    def _check_update(self) -> None:
        """Check that an update returns changes with the shapes of the parameters.

        Raises:
            ConfigError: the transformation raised an exception, or its result has other shapes.
        """
        params = self._params(jax.ShapeDtypeStruct)
        gradients = self._params(lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.float32))
        try:
            state = jax.eval_shape(self.transformation.init, params)
            changes, new = jax.eval_shape(self.transformation.update, gradients, state, params)
        except Exception as error:
            text = " ".join(str(error).split())
            rule = f"raised {type(error).__name__}: {text}"
            raise _transformation_error(self.transformation, rule) from error
        shapes, wanted = (jax.tree.map(jnp.shape, each) for each in (changes, params))
        if shapes != wanted:
            rule = "must return changes with the structure and the shapes of the parameters."
            raise _transformation_error(self.transformation, rule)
        if jax.tree.structure(new) != jax.tree.structure(state):
            rule = "must return a state with the structure of the initial state."
            raise _transformation_error(self.transformation, rule)

    def _check_state(self) -> None:
        """Check that the state consists of arrays like the parameters and of update counters.

        The counters are compared with the number of updates in two updates of small arrays.

        Raises:
            ConfigError: the state contains something else.
        """
        trees, others = self._split(self._abstract_state)
        params = self._params(jax.ShapeDtypeStruct)
        wrong = [
            name
            for name, tree in trees.items()
            if jax.tree.map(jnp.shape, tree) != jax.tree.map(jnp.shape, params)
        ]
        wrong += [name for name, leaf in others.items() if not _is_counter(leaf)]
        if not wrong and others:
            small = self._params(lambda shape, dtype: jnp.ones((1,) * len(shape), dtype))
            state = self.transformation.init(small)
            for count in (1, 2):
                _, state = self.transformation.update(small, state, small)
                wrong = [name for name, leaf in self._split(state)[1].items() if leaf != count]
                if wrong:
                    break
        if wrong:
            raise ConfigError.one(
                Code.API_OPTIMIZER,
                _WHERE,
                ", ".join(wrong),
                "the state of the optax transformation must consist of arrays with the shapes of "
                "the parameters and of counters of updates, because checkpoints store no other "
                "state.",
                "Use a transformation without this state, such as optax.adamw, optax.lion or "
                "optax.sgd with momentum.",
            )


def check_transformation(transformation: object) -> None:
    """Check the type of a transformation.

    Raises:
        ConfigError: the object has no functions `init` and `update`.
    """
    if not all(callable(getattr(transformation, each, None)) for each in ("init", "update")):
        rule = "must be an optax transformation, with the functions init and update."
        raise _transformation_error(transformation, rule)


def _transformation_error(given: object, rule: str) -> ConfigError:
    name = getattr(given, "__name__", type(given).__name__)
    action = "Call a function of optax and pass its result, such as optax.adamw(1e-3)."
    return ConfigError.one(Code.API_OPTIMIZER, _WHERE, name, rule, action)


def _is_counter(leaf: Any) -> bool:
    return leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)


def _leaf(tree: Tree, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _check_config(config: OptimConfig) -> None:
    """Check that the config requires no state in addition to that of the transformation.

    Raises:
        ConfigError: EMA parameters or state in host memory are requested.
    """
    for key, value, off in (
        ("optim.ema_decay", config.ema_decay, 0),
        ("optim.offload_state", config.offload_state, "false"),
    ):
        if value:
            rule = "is not supported with an optax transformation."
            raise ConfigError.one(Code.API_OPTIMIZER, key, value, rule, f"Set {key}={off}.")
