"""The update of parameters: clipping, the optimizer's direction, weight decay, rate, averages.

It is written for one parameter at a time, as all that is done to an entry fuses to one pass over
memory. Only Muon's matrices are looked at together, as they travel together.

Stochastic rounding to bfloat16, with the same bits under every layout.

A number is rounded up with the probability that makes the mean of the result the number. What is
drawn follows from the seed, the step, the array's name, the layer and the entry's place in it:
neither meshes nor padding change it.

Source: stochastic rounding in training, arXiv:1502.02551; the integer mixing is that of
"lowbias32", whose bits pass the usual tests of avalanche.

Directions of updates, for one parameter.

Each rule takes the gradient and float32 arrays of what is kept, and returns the direction, before
weight decay and rate, with the arrays as they are after it: unless the update is taken, as before.
That choice is made before moments are used: made afterwards, XLA would keep old, new and chosen
moments side by side.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.config.schema import OptimConfig
from maxpipe.io.tree import KeyPath, flatten, unflatten
from maxpipe.models.spec import Param
from maxpipe.optim import muon
from maxpipe.optim.guard import select_update
from maxpipe.optim.offload import ALL_LAYERS, LayerSlice, map_layers
from maxpipe.optim.state_spec import EMA, StateArray, is_orthogonalised, matrix_dims, state_arrays
from maxpipe.optim.update_bound import MOMENTUM, bound_update, max_direction
from maxpipe.parallel.sharding import auto_sharded

Arrays = dict[str, Array]
"""What is kept of one parameter, by name."""
Taken = Bool[Array, ""] | bool

DECAY_EXPONENT = 0.8
"""Adafactor's second moments at step t have the decay `1 - t**-0.8`."""
SQUARE = 1e-30
"""What Adafactor adds to means of squares where they are used: what is padding stays 0."""
HUGE = 1e15
"""Limit of a gradient divided by the root of its mean square; its own square is within float32."""


class BiasCorrections(NamedTuple):
    """What moments that start at 0 are divided by; of all parameters the same."""

    mu: Float[Array, ""]
    nu: Float[Array, ""]

    @classmethod
    def after_updates(cls, config: OptimConfig, count: Int[Array, ""]) -> BiasCorrections:
        """This number of updates."""
        return cls(1 - config.beta1**count, 1 - config.beta2**count)


def adam(
    config: OptimConfig, gradient: Array, old: Arrays, by: BiasCorrections, taken: Taken
) -> tuple[Array, Arrays]:
    """arXiv:1412.6980; in float32 optax's, bit for bit."""
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta1, 1)
    nu = optax.tree.update_moment_per_elem_norm(gradient, old["nu"], config.beta2, 2)
    new = select_update(taken, {"mu": mu, "nu": nu}, old)
    return new["mu"] / by.mu / (jnp.sqrt(new["nu"] / by.nu) + config.epsilon), new


def lion(config: OptimConfig, gradient: Array, old: Arrays, taken: Taken) -> tuple[Array, Arrays]:
    """arXiv:2302.06675; in float32 optax's, bit for bit."""
    # Of the gradient and the moment before it, as both are read to make the one after it.
    sign = jnp.sign((1 - config.beta1) * gradient + config.beta1 * old["mu"])
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta2, 1)
    return sign, select_update(taken, {"mu": mu}, old)


def momentum(
    config: OptimConfig, gradient: Array, old: Arrays, taken: Taken
) -> tuple[Array, Arrays]:
    """Nesterov's, as Muon takes it: what `muon.updates` makes an update of."""
    share = config.momentum
    mu = optax.tree.update_moment(gradient, old["mu"], share, 1)
    new = select_update(taken, {"mu": mu}, old)
    return share * new["mu"] + (1 - share) * gradient, new


class FactoredDims(NamedTuple):
    """Dims of an array over which Adafactor takes means."""

    inputs: tuple[int, ...]
    """Of a matrix; of what is none all of the parameter's dims,"""
    outputs: tuple[int, ...]
    """and here none."""
    num_inputs: int
    """Entries along these dims, padding left out: its gradients are 0."""
    num_outputs: int


def adafactor(
    gradient: Array, old: Arrays, count: Int[Array, ""], sides: FactoredDims, taken: Taken
) -> tuple[Array, Arrays]:
    """arXiv:1804.04235 without momentum, and without the parameters' own size in the rate.

    The second moments of a matrix are the product of those of its rows and of its columns. The root
    of the mean square of each parameter's direction is at most 1.
    """
    decay = 1.0 - jnp.maximum(count, 1).astype(jnp.float32) ** -DECAY_EXPONENT
    squares, inputs, outputs = jnp.square(gradient), sides.inputs, sides.outputs
    if outputs:
        means = {
            "rows": squares.sum(outputs) / sides.num_outputs,
            "columns": squares.sum(inputs) / sides.num_inputs,
        }
    else:
        means = {"nu": squares}
    new = {name: decay * old[name] + (1 - decay) * mean for name, mean in means.items()}
    new = select_update(taken, new, old)
    if outputs:
        rows = jnp.expand_dims(new["rows"], outputs)
        mean = rows.sum(inputs, keepdims=True) / sides.num_inputs
        rows = (rows + SQUARE) / (mean + SQUARE)
        columns = jnp.expand_dims(new["columns"], inputs) + SQUARE
        found = gradient * _inverse_root(columns) * _inverse_root(rows)
    else:
        found = gradient * _inverse_root(new["nu"] + SQUARE)
    found = jnp.clip(found, -HUGE, HUGE)
    entries = sides.num_inputs * sides.num_outputs
    mean = jnp.square(found).sum(inputs + outputs, keepdims=True) / entries
    return found / jnp.maximum(1.0, jnp.sqrt(mean)), new


def _inverse_root(x: Array) -> Array:
    """Finite also where a square was rounded to 0: the gradient is 0 there."""
    return jnp.minimum(x**-0.5, HUGE)


def factored_dims(
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None, shape: tuple[int, ...], stacked: int
) -> FactoredDims:
    """Of a parameter of this shape with further dims in front of it."""
    inputs, outputs = matrix or (tuple(range(len(shape))), ())
    counts = [math.prod(shape[dim] for dim in dims) for dims in (inputs, outputs)]
    moved = [tuple(stacked + dim for dim in dims) for dims in (inputs, outputs)]
    return FactoredDims(moved[0], moved[1], counts[0], counts[1])


def hash_bits(x: Array) -> Array:
    """Each number of a uint32 array by one that looks drawn, all different."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def random_bits(
    seed: int,
    name: str,
    step: Int[Array, ""],
    layers: np.ndarray | Array | None,
    sizes: Sequence[int],
    shape: Sequence[int],
) -> Array:
    """A uint32 draw for each entry of an array of this shape.

    Args:
        seed: the run's.
        name: of the array, in words that no layout changes.
        step: number of updates.
        layers: int array with the shape of the stacked dims in front: which layer is there. None:
            there are none.
        sizes: of the dims behind them, without padding: they number the entries of a layer.
        shape: of the whole array.
    """
    base = zlib.crc32(f"{seed} {name}".encode())
    key = hash_bits(jnp.uint32(base) + hash_bits(step.astype(jnp.uint32)))
    stacked = 0 if layers is None else layers.ndim
    if layers is not None:
        numbers = jnp.asarray(layers.astype(np.uint32).reshape(*layers.shape, *(1,) * len(sizes)))
        key = hash_bits(key ^ hash_bits(numbers + jnp.uint32(1)))
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(sizes))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, stacked + dim)
        place += along * jnp.uint32(stride % 2**32)
        stride *= sizes[dim]
    return hash_bits(place ^ key)


def round_stochastically(x: Array, drawn: Array) -> Array:
    """Float32 numbers in bfloat16, up or down by the upper half of what is drawn for each.

    What is exact in bfloat16 stays, and so do infinities and NaN.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + (drawn >> 16)) & jnp.uint32(0xFFFF0000)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), found, x).astype(jnp.bfloat16)


Tree = Any
_PARAMETER = "parameter"
"""Name of what is drawn to round parameters, beside those of the trees."""
_GRADIENT, _FINITE, _LARGEST = "gradient", "finite", "largest"
"""Of what else there is beside them, by layers."""


class OptState(NamedTuple):
    """What an optimizer keeps."""

    updates: Int[Array, ""]
    """Those so far, int32."""
    trees: dict[str, Tree]
    """By the names of `kept`; nested dicts in the form of the parameters, of those that have it."""


class _UpdateContext(NamedTuple):
    """Of an update what is the same for all parameters."""

    updates: Int[Array, ""]
    """So far, with this one."""
    corrections: BiasCorrections
    is_applied: Taken
    clip: Callable[[Array], Array]
    rounds_stochastically: bool
    rate: Array | float = 0.0
    """The learning rate."""


@dataclass(frozen=True, eq=False)
class TrainableParam:
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
    def num_stacked_dims(self) -> int:
        """Dims in front of the parameter's own."""
        return 0 if self.layers is None else self.layers.ndim

    def shape_of(self, one: StateArray, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is kept of an array of the parameter that has this shape."""
        return tuple(size for dim, size in enumerate(shape) if not self._lacks(one, dim))

    def spec_of(self, one: StateArray) -> PartitionSpec:
        """Of what is kept of it."""
        dims = range(self.num_stacked_dims + len(self.param.dims))
        entries = (*self.spec, *(None,) * (len(dims) - len(self.spec)))
        return PartitionSpec(*(entries[dim] for dim in dims if not self._lacks(one, dim)))

    def _lacks(self, one: StateArray, dim: int) -> bool:
        return dim - self.num_stacked_dims in one.dropped_dims


@dataclass(frozen=True, eq=False)
class Optimizer:
    """The config's optimizer, behind clipping by the norm of the whole gradient."""

    config: OptimConfig
    rate: optax.Schedule
    trainable_params: Mapping[KeyPath, TrainableParam]
    """By the path in trees of trained parameters."""
    param_dtype: str = "float32"
    seed: int = 0
    mesh: Mesh = field(default_factory=lambda: Mesh(np.array(jax.devices()[:1]), ("stage",)))

    @cached_property
    def state_arrays(self) -> dict[str, dict[KeyPath, StateArray]]:
        """What there is of each parameter, by the name of its tree."""
        found: dict[str, dict[KeyPath, StateArray]] = {}
        for path, target in self.trainable_params.items():
            for name, one in state_arrays(self.config, target.param, self.param_dtype).items():
                found.setdefault(name, {})[path] = one
        return found

    def _map_state(self, of: Callable[[str, KeyPath, StateArray], Any]) -> dict[str, Tree]:
        """A tree for each name, of something for each array."""
        return {
            name: unflatten({path: of(name, path, one) for path, one in those.items()})
            for name, those in self.state_arrays.items()
        }

    def init(self, params: Tree) -> OptState:
        """The state of a new run: zeros, and averages that start as the parameters."""
        given = flatten(params)

        def first(name: str, path: KeyPath, one: StateArray) -> Array:
            if name == EMA:
                return given[path].astype(one.dtype)
            target = self.trainable_params[path]
            shape = target.shape_of(one, given[path].shape)
            return auto_sharded(lambda: jnp.zeros(shape, one.dtype), target.spec_of(one))()

        return OptState(jnp.zeros((), jnp.int32), self._map_state(first))

    @cached_property
    def vocab_dims(self) -> dict[str, dict[str, int]]:
        """By tree and parameter which dim of what is kept is that of the vocabulary."""
        found: dict[str, dict[str, int]] = {}
        for name, those in self.state_arrays.items():
            axes = {path: [axis for _, axis in one.dims] for path, one in those.items()}
            found[name] = {p[0]: each.index("vocab") for p, each in axes.items() if "vocab" in each}
        return found

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of an entry depends on that entry alone."""
        return self.config.name in ("adamw", "lion")

    def bound_update(
        self, reach: Float[Array, " 2"], norm: Float[Array, ""], rate: Float[Array, ""]
    ) -> Float[Array, " 2"]:
        """A bound on what `update` leaves: see `reach.reach_after`. `rate`: the learning rate."""
        targets = self.trainable_params.values()
        return bound_update(
            self.config,
            reach,
            norm,
            rate * max((each.rate for each in targets), default=1.0),
            decay=max((each.decay for each in targets), default=0.0),
            largest=max_direction(self.config, (each.param for each in targets)),
        )

    @cached_property
    def target_specs(self) -> Tree:
        """Of gradients, and of parameters where they are updated."""
        return unflatten({path: target.spec for path, target in self.trainable_params.items()})

    @cached_property
    def specs(self) -> dict[str, Tree]:
        """Of the state's trees."""
        return self._map_state(lambda _, path, one: self.trainable_params[path].spec_of(one))

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
        now = self._make_context(gradients, state, norm=norm, taken=taken, draw=draw)
        slopes, given = flatten(gradients), flatten(params)
        before = {name: flatten(tree) for name, tree in state.trees.items()}
        after: dict[str, dict[KeyPath, Array]] = {name: {} for name in before}
        moved: dict[KeyPath, Array] = {}
        found: dict[KeyPath, Array] = {}
        for path in self._matrices:
            # In place of the gradient is the direction then, which is in float32.
            slope = slopes[path].astype(jnp.float32) if self.config.offload_state else slopes[path]
            have = {_GRADIENT: slope} | {name: before[name][path] for name in self._names(path)}
            dtype = slopes[path].dtype
            new = self.map_layers(path, partial(self._update_moments, path, now, dtype), have)
            found[path] = new.pop(_GRADIENT)
            for name in self._names(path):
                after[name][path] = new[name]
        found = muon.compute_updates(found, self._matrices, self.mesh)
        now = now._replace(rate=jnp.asarray(self.rate(state.updates)))
        for path in self.trainable_params:
            names = [name for name in before if path in before[name] and path not in after[name]]
            have = {_GRADIENT: found.get(path, slopes[path]), _PARAMETER: given[path]}
            have |= {name: before[name][path] for name in names}
            new = self.map_layers(path, partial(self._update_param, path, now), have)
            moved[path] = new[_PARAMETER]
            for name in names:
                after[name][path] = new[name]
        trees = {name: unflatten(tree) for name, tree in after.items()}
        return unflatten(moved), OptState(now.updates, trees)

    def is_finite_after_update(
        self, gradients: Tree, norm: Float[Array, ""], params: Tree, state: OptState
    ) -> Bool[Array, ""]:
        """Whether an update by entries leaves all finite, computed by layers and not kept."""
        now = self._make_context(gradients, state, norm=norm, taken=True, draw=False)
        now = now._replace(rate=jnp.asarray(self.rate(state.updates)))
        slopes, given, finite = flatten(gradients), flatten(params), jnp.ones((), bool)
        before = {name: flatten(tree) for name, tree in state.trees.items()}
        for path in self.trainable_params:
            have = {_GRADIENT: slopes[path], _PARAMETER: given[path], _FINITE: finite}
            have |= {name: those[path] for name, those in before.items()}

            def look(layer: LayerSlice, have: Arrays, path: KeyPath = path) -> Arrays:
                new = self._update_param(path, now, layer, have).values()
                return {
                    _FINITE: reduce(operator.and_, map(jnp.isfinite, new)).all() & have[_FINITE]
                }

            finite = self.map_layers(path, look, have)[_FINITE]
        return finite

    def max_abs(self, tree: Tree) -> Float[Array, ""]:
        """Of all entries of what is kept, by layers."""
        largest = jnp.zeros(())
        for path, x in flatten(tree).items():

            def look(_: LayerSlice, have: Arrays) -> Arrays:
                found = jnp.abs(have[MOMENTUM]).max().astype(jnp.float32)
                return {_LARGEST: jnp.maximum(found, have[_LARGEST])}

            largest = self.map_layers(path, look, {MOMENTUM: x, _LARGEST: largest})[_LARGEST]
        return largest

    def map_layers(
        self, path: KeyPath, run: Callable[[LayerSlice, Arrays], Arrays], have: Arrays
    ) -> Arrays:
        """What `run` makes of a parameter and what belongs to it; at once, if all is on the device.

        Layers that mesh axes divide, those of stages, are computed together.
        """
        if not self.config.offload_state:
            return run(ALL_LAYERS, have)
        target = self.trainable_params[path]
        entries = (*target.spec, *(None,) * (target.num_stacked_dims - len(target.spec)))
        shape = next(x.shape for x in have.values() if x.ndim)
        dims = [
            dim for dim in range(target.num_stacked_dims) if entries[dim] is None and shape[dim] > 1
        ]
        return map_layers(run, have, max(dims, key=lambda dim: shape[dim], default=None))

    def _make_context(
        self, gradients: Tree, state: OptState, *, norm: Array | None, taken: Taken, draw: bool
    ) -> _UpdateContext:
        count = jnp.where(taken, optax.safe_increment(state.updates), state.updates)
        clip = self._clip(gradients, norm, taken)
        return _UpdateContext(
            count, BiasCorrections.after_updates(self.config, count), taken, clip, draw
        )

    def _update_moments(
        self, path: KeyPath, now: _UpdateContext, dtype: np.dtype, layer: LayerSlice, have: Arrays
    ) -> Arrays:
        """The direction, in place of the gradient of this type, and what is kept."""
        old = {name: have[name].astype(jnp.float32) for name in self._names(path)}
        slope = now.clip(have[_GRADIENT].astype(dtype))
        found, new = self._direction(path, slope, old, now.updates, now.corrections, now.is_applied)
        kept = {}
        for name, x in new.items():
            kept[name] = self._cast_for_storage(
                path, name, x, self.state_arrays[name][path], now, layer
            )
        return {_GRADIENT: found} | kept

    def _update_param(
        self, path: KeyPath, now: _UpdateContext, layer: LayerSlice, have: Arrays
    ) -> Arrays:
        """The parameter and all that is kept of it, by the gradient or Muon's direction."""
        target, new = self.trainable_params[path], {_GRADIENT: have[_GRADIENT]}
        if path not in self._matrices:
            new = self._update_moments(path, now, have[_GRADIENT].dtype, layer, have)
        update = new.pop(_GRADIENT)
        param = have[_PARAMETER].astype(jnp.float32)
        if target.decay:
            update = update + target.decay * param
        step = jnp.asarray(-now.rate * target.rate if target.rate != 1.0 else -now.rate)
        moved = param + step.astype(jnp.float32) * update
        whole = StateArray(target.param.dims, have[_PARAMETER].dtype.name)
        moved = self._cast_for_storage(path, _PARAMETER, moved, whole, now, layer)
        new[_PARAMETER] = moved = select_update(now.is_applied, moved, have[_PARAMETER])
        if EMA in have:
            share, mean = self.config.ema_decay, have[EMA]
            newer = share * mean + (1 - share) * moved.astype(jnp.float32)
            new[EMA] = select_update(now.is_applied, newer, mean)
        return new

    def _names(self, path: KeyPath) -> Iterator[str]:
        """Of what a parameter's update reads."""
        return (name for name, those in self.state_arrays.items() if path in those and name != EMA)

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
        # By 1 where nothing is clipped, so that quotients may take the place of gradients.
        within = norm < limit
        divisor, factor = jnp.where(within, 1, norm), jnp.where(within, 1, limit)
        return lambda leaf: leaf / divisor.astype(leaf.dtype) * factor.astype(leaf.dtype)

    def _direction(
        self,
        path: KeyPath,
        gradient: Array,
        old: Arrays,
        count: Int[Array, ""],
        by: BiasCorrections,
        taken: Taken,
    ) -> tuple[Array, Arrays]:
        """Which way a parameter goes, before weight decay and rate, and what is kept then."""
        config, target = self.config, self.trainable_params[path]
        if is_orthogonalised(config, target.param):
            return momentum(config, gradient, old, taken)
        if config.name == "lion":
            return lion(config, gradient, old, taken)
        if config.name != "adafactor":
            return adam(config, gradient, old, by, taken)
        # Means over dims that are divided: in types there is more than one way.
        specs = {name: target.spec_of(self.state_arrays[name][path]) for name in old}
        sides = factored_dims(
            matrix_dims(target.param), target.param.shape, target.num_stacked_dims
        )
        run = auto_sharded(
            lambda gradient, old, count, taken: adafactor(gradient, old, count, sides, taken),
            (target.spec, specs),
        )
        return run(gradient, old, count, jnp.asarray(taken))

    @cached_property
    def _matrices(self) -> dict[KeyPath, muon.Matrices]:
        """Muon's."""
        declared: dict[KeyPath, muon.Matrices] = {}
        for path, target in self.trainable_params.items():
            if is_orthogonalised(self.config, target.param):
                matrix = matrix_dims(target.param)
                assert matrix is not None
                inputs, outputs = (
                    tuple(target.num_stacked_dims + dim for dim in dims) for dims in matrix
                )
                declared[path] = muon.Matrices(inputs, outputs, target.spec)
        return declared

    def _cast_for_storage(
        self,
        path: KeyPath,
        name: str,
        x: Array,
        one: StateArray,
        now: _UpdateContext,
        layer: LayerSlice,
    ) -> Array:
        """In the type in which it is kept."""
        if not (
            now.rounds_stochastically
            and one.dtype == "bfloat16"
            and self.config.rounding == "stochastic"
        ):
            return x.astype(one.dtype)
        target = self.trainable_params[path]
        layers = target.layers
        if layers is not None and layer.dim is not None:
            layers = layer.slice_of(jnp.asarray(layers))
        sizes = [n for dim, n in enumerate(target.param.shape) if dim not in one.dropped_dims]
        drawn = partial(
            random_bits, self.seed, f"{target.name} {name}", now.updates, layers, sizes, x.shape
        )
        # Made of places alone, which say nothing of how they are divided.
        return round_stochastically(x, auto_sharded(drawn, target.spec_of(one))())
