"""The update of parameters: clipping, the optimizer's direction, weight decay, rate, averages.

It is written for one parameter at a time, as all that is done to an entry fuses to one pass over
memory. Only Muon's matrices are looked at together, as they travel together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from maxpipe.config.schema import OptimConfig
from maxpipe.model.spec import Param
from maxpipe.nested import Path, flat, nested
from maxpipe.optim import muon
from maxpipe.optim.kept import AVERAGE, Kept, is_orthogonalised, kept, matrix_of
from maxpipe.optim.reach import largest_update, reach_after
from maxpipe.optim.rounding import draws, rounded
from maxpipe.optim.rules import (
    Arrays,
    Corrections,
    Taken,
    adafactor,
    adam,
    lion,
    momentum,
    sides_of,
)
from maxpipe.parallel.explicit import left_to_compiler
from maxpipe.train.guard import unless_bad

Tree = Any
_PARAMETER = "parameter"
"""Name of what is drawn to round parameters, beside those of the trees."""


class OptState(NamedTuple):
    """What an optimizer keeps."""

    updates: Int[Array, ""]
    """Those so far, int32."""
    trees: dict[str, Tree]
    """By the names of `kept`; nested dicts in the form of the parameters, of those that have it."""


@dataclass(frozen=True, eq=False)
class Target:
    """A trained parameter in the stacked form, and how it is updated."""

    param: Param
    name: str = ""
    """In checkpoints."""
    rate: float = 1.0
    """Factor of the learning rate."""
    decay: float = 0.0
    """Weight decay."""
    layers: np.ndarray | None = None
    """int, the stacked dims: which layer of the network is where; None if there are none."""
    spec: PartitionSpec = field(default_factory=PartitionSpec)
    """Of its gradient and of where it is updated."""

    @property
    def stacked(self) -> int:
        """Dims in front of the parameter's own."""
        return 0 if self.layers is None else self.layers.ndim

    def shape_of(self, one: Kept, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is kept of an array of the parameter that has this shape."""
        return tuple(size for dim, size in enumerate(shape) if not self._lacks(one, dim))

    def spec_of(self, one: Kept) -> PartitionSpec:
        """Of what is kept of it."""
        dims = range(self.stacked + len(self.param.dims))
        entries = (*self.spec, *(None,) * (len(dims) - len(self.spec)))
        return PartitionSpec(*(entries[dim] for dim in dims if not self._lacks(one, dim)))

    def _lacks(self, one: Kept, dim: int) -> bool:
        return dim - self.stacked in one.left_out


@dataclass(frozen=True, eq=False)
class Optimizer:
    """The config's optimizer, behind clipping by the norm of the whole gradient."""

    config: OptimConfig
    rate: optax.Schedule
    targets: Mapping[Path, Target]
    """By the path in trees of trained parameters."""
    param_dtype: str = "float32"
    seed: int = 0
    mesh: Mesh = field(default_factory=lambda: Mesh(np.array(jax.devices()[:1]), ("stage",)))

    @cached_property
    def kept(self) -> dict[str, dict[Path, Kept]]:
        """What there is of each parameter, by the name of its tree."""
        found: dict[str, dict[Path, Kept]] = {}
        for path, target in self.targets.items():
            for name, one in kept(self.config, target.param, self.param_dtype).items():
                found.setdefault(name, {})[path] = one
        return found

    def _each(self, of: Callable[[str, Path, Kept], Any]) -> dict[str, Tree]:
        """A tree for each name, of something for each array."""
        return {
            name: nested({path: of(name, path, one) for path, one in those.items()})
            for name, those in self.kept.items()
        }

    def init(self, params: Tree) -> OptState:
        """The state of a new run: zeros, and averages that start as the parameters."""
        given = flat(params)

        def first(name: str, path: Path, one: Kept) -> Array:
            if name == AVERAGE:
                return given[path].astype(one.dtype)
            target = self.targets[path]
            shape = target.shape_of(one, given[path].shape)
            return left_to_compiler(lambda: jnp.zeros(shape, one.dtype), target.spec_of(one))()

        return OptState(jnp.zeros((), jnp.int32), self._each(first))

    @cached_property
    def vocabulary(self) -> dict[str, dict[str, int]]:
        """By tree and parameter which dim of what is kept is that of the vocabulary."""
        found: dict[str, dict[str, int]] = {}
        for name, those in self.kept.items():
            axes = {path: [axis for _, axis in one.dims] for path, one in those.items()}
            found[name] = {p[0]: each.index("vocab") for p, each in axes.items() if "vocab" in each}
        return found

    @property
    def is_by_entry(self) -> bool:
        """Whether the update of an entry depends on that entry alone."""
        return self.config.name in ("adamw", "lion")

    def reach_after(
        self, reach: Float[Array, " 2"], norm: Float[Array, ""], rate: Float[Array, ""]
    ) -> Float[Array, " 2"]:
        """A bound on what `update` leaves: see `reach.reach_after`. `rate`: the learning rate."""
        targets = self.targets.values()
        return reach_after(
            self.config,
            reach,
            norm,
            rate * max((each.rate for each in targets), default=1.0),
            decay=max((each.decay for each in targets), default=0.0),
            largest=largest_update(self.config, (each.param for each in targets)),
        )

    @cached_property
    def target_specs(self) -> Tree:
        """Of gradients, and of parameters where they are updated."""
        return nested({path: target.spec for path, target in self.targets.items()})

    @cached_property
    def specs(self) -> dict[str, Tree]:
        """Of the state's trees."""
        return self._each(lambda _, path, one: self.targets[path].spec_of(one))

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
        """(parameters, state) after the update, or as they were unless it is taken.

        Args:
            gradients: of trained parameters, in their form.
            state: before.
            params: trained ones.
            norm: of the whole gradient, if it is known.
            taken: whether there is an update.
            draw: whether to round as the config says; else to the nearest number.
        """
        count = jnp.where(taken, optax.safe_increment(state.updates), state.updates)
        clip = self._clip(gradients, norm, taken)
        slopes, given = flat(gradients), flat(params)
        before = {name: flat(tree) for name, tree in state.trees.items()}
        after: dict[str, dict[Path, Array]] = {name: {} for name in before}
        store = partial(self._stored, count=count, draw=draw)
        moved: dict[Path, Array] = {}
        by = Corrections.after(self.config, count)

        def direction(path: Path) -> Array:
            # Behind all but the last of what was moved: what is there at once is no more than the
            # parameter before and its own.
            behind = [slopes[path], *list(moved.values())[-2:-1]]
            old = {
                name: self._fetched(before[name][path], behind).astype(jnp.float32)
                for name in self._names(path)
            }
            found, new = self._direction(path, clip(slopes[path]), old, count, by, taken)
            for name, x in new.items():
                after[name][path] = self._kept_at_home(store(path, name, x, self.kept[name][path]))
            return found

        matrices = self._matrices
        found = {path: direction(path) for path in matrices}
        found = muon.updates(found, matrices, self.mesh)
        rate = jnp.asarray(self.rate(state.updates))
        for path, target in self.targets.items():
            update = found[path] if path in found else direction(path)
            param = given[path].astype(jnp.float32)
            if target.decay:
                update = update + target.decay * param
            step = -rate * target.rate if target.rate != 1.0 else -rate
            new = param + step.astype(jnp.float32) * update
            whole = Kept(target.param.dims, given[path].dtype.name)
            moved[path] = unless_bad(taken, store(path, _PARAMETER, new, whole), given[path])
            if AVERAGE in after:
                share = self.config.average_decay
                mean = self._fetched(before[AVERAGE][path], [moved[path]])
                newer = share * mean + (1 - share) * moved[path].astype(jnp.float32)
                after[AVERAGE][path] = self._kept_at_home(unless_bad(taken, newer, mean))
        trees = {name: nested(tree) for name, tree in after.items()}
        return nested(moved), OptState(count, trees)

    def _fetched(self, x: Array, behind: Sequence[Array]) -> Array:
        """What is kept, on the device: from the host once these are there.

        Fetched earlier it would take the room of what the step's loops need.
        """
        if not self.config.offload_state:
            return x
        x, *_ = jax.lax.optimization_barrier((x, *behind))
        return jax.device_put(x, jax.memory.Space.Device)

    def _kept_at_home(self, x: Array) -> Array:
        """What is kept, where it is between steps."""
        return jax.device_put(x, jax.memory.Space.Host) if self.config.offload_state else x

    def _names(self, path: Path) -> Iterator[str]:
        """Of what a parameter's update reads."""
        return (name for name, those in self.kept.items() if path in those and name != AVERAGE)

    def _clip(
        self, gradients: Tree, norm: Float[Array, ""] | None, taken: Taken
    ) -> Callable[[Array], Array]:
        """optax's clipping, bit for bit, by a norm that may be known already.

        It waits for `taken`: both moments read the quotients, so XLA may keep all of them in
        memory. It must not do so while the step looks at what the update would leave.
        """
        limit = self.config.clip_norm
        if not limit:
            return lambda leaf: leaf
        norm = jnp.asarray(optax.tree.norm(gradients) if norm is None else norm)
        norm = jnp.where(taken, norm, jnp.inf)
        within = norm < limit
        return lambda leaf: jnp.where(within, leaf, leaf / norm.astype(leaf.dtype) * limit)

    def _direction(
        self,
        path: Path,
        gradient: Array,
        old: Arrays,
        count: Int[Array, ""],
        by: Corrections,
        taken: Taken,
    ) -> tuple[Array, Arrays]:
        """Which way a parameter goes, before weight decay and rate, and what is kept then."""
        config, target = self.config, self.targets[path]
        if is_orthogonalised(config, target.param):
            return momentum(config, gradient, old, taken)
        if config.name == "lion":
            return lion(config, gradient, old, taken)
        if config.name != "adafactor":
            return adam(config, gradient, old, by, taken)
        # Means over dims that are divided: in types there is more than one way.
        specs = {name: target.spec_of(self.kept[name][path]) for name in old}
        sides = sides_of(matrix_of(target.param), target.param.shape, target.stacked)
        run = left_to_compiler(
            lambda gradient, old, count, taken: adafactor(gradient, old, count, sides, taken),
            (target.spec, specs),
        )
        return run(gradient, old, count, jnp.asarray(taken))

    @cached_property
    def _matrices(self) -> dict[Path, muon.Matrices]:
        """Muon's."""
        declared: dict[Path, muon.Matrices] = {}
        for path, target in self.targets.items():
            if is_orthogonalised(self.config, target.param):
                matrix = matrix_of(target.param)
                assert matrix is not None
                inputs, outputs = (tuple(target.stacked + dim for dim in dims) for dims in matrix)
                declared[path] = muon.Matrices(inputs, outputs, target.spec)
        return declared

    def _stored(
        self, path: Path, name: str, x: Array, one: Kept, *, count: Int[Array, ""], draw: bool
    ) -> Array:
        """In the type in which it is kept."""
        if not (draw and one.dtype == "bfloat16" and self.config.rounding == "stochastic"):
            return x.astype(one.dtype)
        target = self.targets[path]
        sizes = [n for dim, n in enumerate(target.param.shape) if dim not in one.left_out]
        drawn = partial(
            draws, self.seed, f"{target.name} {name}", count, target.layers, sizes, x.shape
        )
        # Made of places alone, which say nothing of how they are divided.
        return rounded(x, left_to_compiler(drawn, target.spec_of(one))())
