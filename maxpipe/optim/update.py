"""Parameter updates: clipping, update direction, weight decay, learning rate and EMA.

Updates are computed one parameter at a time, so that all operations on an entry are fused into one
pass over memory. Only Muon processes several matrices together, because devices exchange them
together.

Functions such as `adam` receive the gradient and the float32 state arrays of one parameter. These
functions return the direction, before weight decay and learning rate, and the new state arrays, or
the old state arrays if the update is skipped. The selection between new and old moments precedes
their use; otherwise, XLA would store the old, new and selected moments at the same time.

Stochastic rounding to bfloat16 rounds up with the probability that makes the expected value of the
result equal to the input. The random bits are a hash of the seed, the step, the array name, the
layer and the entry's index. These bits do not depend on the mesh or on padding.

Sources: stochastic rounding in training, arXiv:1502.02551; the integer hash is "lowbias32", which
passes the usual avalanche tests.

With `optim.offload_state`, arrays in host memory are updated one layer at a time.
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

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.param_names import KeyPath, flatten, unflatten
from maxpipe.models.spec import Param
from maxpipe.optim import muon
from maxpipe.optim.guard import MOMENTUM, bound_update, max_direction, select_update
from maxpipe.optim.state_spec import EMA, StateArray, is_orthogonalised, matrix_dims, state_arrays
from maxpipe.parallel.sharding import auto_sharded, is_on_host, to_device


class LayerSlice(NamedTuple):
    """A slice of arrays along the dim over which a loop iterates."""

    place: Int[Array, ""] | int = 0
    """Index of the slice along the dim."""
    dim: int | None = None
    """Dim over which the loop iterates. If None, the slice is the full array."""

    def slice_of(self, x: Array) -> Array:
        """Return this slice of an array, keeping all dims."""
        if self.dim is None or not x.ndim:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.place, 1, self.dim)

    def put(self, into: Array, part: Array) -> Array:
        """Return a copy of the array in which this slice is replaced by `part`."""
        if self.dim is None or not into.ndim:
            return part
        return jax.lax.dynamic_update_slice_in_dim(into, part, self.place, self.dim)


ALL_LAYERS = LayerSlice()


def map_layers(
    run: Callable[[LayerSlice, Arrays], Mapping[str, Array]], arrays: Arrays, dim: int | None
) -> Arrays:
    """Apply `run` to each layer's slices, and return arrays that contain the new slices.

    If a computation uses an array in host memory, XLA can copy the full array to the device at any
    time. In a loop that slices along exactly one dim, XLA copies only the slice.

    Args:
        run: function that maps (layer, slices on the device) to new slices of the same shapes and
            dtypes, keyed by name. Scalars are carried between iterations.
        arrays: arrays in host or device memory, keyed by name.
        dim: unsharded dim of all arrays over which the loop iterates. If None, `run` is called
        once.
    """

    def turn(number: Int[Array, ""] | int, have: Arrays) -> Arrays:
        layer, new = LayerSlice(number, dim), dict(have)
        parts = {name: layer.slice_of(x) for name, x in have.items()}
        # Copy directly after slicing; an operation in between would run on the full array.
        parts = to_device(parts)
        for name, part in run(layer, parts).items():
            into = have[name]
            new[name] = layer.put(
                into, jax.device_put(part, jax.memory.Space.Host) if is_on_host(into) else part
            )
        return new

    if dim is None:
        return turn(0, arrays)
    count = next(x.shape[dim] for x in arrays.values() if x.ndim)
    return jax.lax.fori_loop(0, count, turn, arrays)


Arrays = dict[str, Array]
"""Optimizer-state arrays of one parameter, keyed by name."""
Taken = Bool[Array, ""] | bool

DECAY_EXPONENT = 0.8
"""Exponent in Adafactor's decay of second moments, which is `1 - t**-0.8` at step t."""
SQUARE = 1e-30
"""Constant that Adafactor adds to mean squares when it uses them, so that stored padding remains
0."""
HUGE = 1e15
"""Limit on a gradient entry divided by its root mean square; the square of this limit fits in
float32."""


class BiasCorrections(NamedTuple):
    """Divisors that correct the moments for their initialization at 0; the same for all
    parameters.
    """

    mu: Float[Array, ""]
    nu: Float[Array, ""]

    @classmethod
    def after_updates(cls, config: OptimConfig, count: Int[Array, ""]) -> BiasCorrections:
        """Return the bias-correction divisors that apply after `count` updates."""
        return cls(1 - config.beta1**count, 1 - config.beta2**count)


def adam(
    config: OptimConfig, gradient: Array, old: Arrays, by: BiasCorrections, taken: Taken
) -> tuple[Array, Arrays]:
    """Return Adam's direction (arXiv:1412.6980), bitwise equal to optax in float32."""
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta1, 1)
    nu = optax.tree.update_moment_per_elem_norm(gradient, old["nu"], config.beta2, 2)
    new = select_update(taken, {"mu": mu, "nu": nu}, old)
    return new["mu"] / by.mu / (jnp.sqrt(new["nu"] / by.nu) + config.epsilon), new


def lion(config: OptimConfig, gradient: Array, old: Arrays, taken: Taken) -> tuple[Array, Arrays]:
    """Return Lion's direction (arXiv:2302.06675), bitwise equal to optax in float32."""
    # The direction uses the old moment, not the selected moment.
    sign = jnp.sign((1 - config.beta1) * gradient + config.beta1 * old["mu"])
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta2, 1)
    return sign, select_update(taken, {"mu": mu}, old)


def momentum(
    config: OptimConfig, gradient: Array, old: Arrays, taken: Taken
) -> tuple[Array, Arrays]:
    """Return Muon's Nesterov momentum, from which `muon.compute_updates` computes the update."""
    share = config.momentum
    mu = optax.tree.update_moment(gradient, old["mu"], share, 1)
    new = select_update(taken, {"mu": mu}, old)
    return share * new["mu"] + (1 - share) * gradient, new


class FactoredDims(NamedTuple):
    """Dims of an array over which Adafactor averages."""

    inputs: tuple[int, ...]
    """Input dims of a matrix, or all dims of a parameter that is not a matrix."""
    outputs: tuple[int, ...]
    """Output dims of a matrix; empty for other parameters."""
    num_inputs: int
    """Number of entries along the input dims, excluding padding entries, whose gradients are 0."""
    num_outputs: int


def adafactor(
    gradient: Array, old: Arrays, count: Int[Array, ""], sides: FactoredDims, taken: Taken
) -> tuple[Array, Arrays]:
    """Return Adafactor's direction (arXiv:1804.04235), without momentum or relative step size.

    The second moments of a matrix are approximated by the product of row and column moments. Each
    parameter's direction has a root mean square of at most 1.
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
        direction = gradient * _inverse_root(columns) * _inverse_root(rows)
    else:
        direction = gradient * _inverse_root(new["nu"] + SQUARE)
    direction = jnp.clip(direction, -HUGE, HUGE)
    entries = sides.num_inputs * sides.num_outputs
    mean = jnp.square(direction).sum(inputs + outputs, keepdims=True) / entries
    return direction / jnp.maximum(1.0, jnp.sqrt(mean)), new


def _inverse_root(x: Array) -> Array:
    """Return the inverse square root, limited to a finite value because gradients can be 0."""
    return jnp.minimum(x**-0.5, HUGE)


def factored_dims(
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None, shape: tuple[int, ...], stacked: int
) -> FactoredDims:
    """Return the factored dims for a parameter of this shape with `stacked` stacked dims."""
    inputs, outputs = matrix or (tuple(range(len(shape))), ())
    counts = [math.prod(shape[dim] for dim in dims) for dims in (inputs, outputs)]
    moved = [tuple(stacked + dim for dim in dims) for dims in (inputs, outputs)]
    return FactoredDims(moved[0], moved[1], counts[0], counts[1])


def hash_bits(x: Array) -> Array:
    """Hash each uint32 to a pseudo-random uint32. The mapping is one-to-one."""
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
    """Return a pseudo-random uint32 for each entry of an array of this shape.

    Args:
        seed: seed of the run.
        name: name of the array, which does not depend on the layout.
        step: number of updates.
        layers: int array with the shape of the leading stacked dims that holds each layer's index
            in the network. None if the array is not stacked.
        sizes: sizes of the other dims without padding, which determine the index of an entry.
        shape: shape of the full array.
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
    """Round a float32 array up or down to bfloat16, depending on the upper 16 bits of `drawn`.

    Infinities, NaN, and values that bfloat16 represents exactly are unchanged.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + (drawn >> 16)) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


Tree = Any
_PARAMETER = "parameter"
"""Key of the parameter itself in loops over layers, and in the random bits for rounding it."""
_GRADIENT, _FINITE, _LARGEST = "gradient", "finite", "largest"
"""Key of the gradient, and keys of the scalars that loops over layers accumulate."""


class OptState(NamedTuple):
    """Optimizer state."""

    updates: Int[Array, ""]
    """int32 number of updates so far."""
    trees: dict[str, Tree]
    """State arrays, keyed by the names in `state_arrays`. Each tree is a nested dict with the
    structure of the parameter tree, restricted to the parameters that have this array."""


class _UpdateContext(NamedTuple):
    """Update settings shared by all parameters."""

    updates: Int[Array, ""]
    """Number of updates so far, including this one."""
    corrections: BiasCorrections
    is_applied: Taken
    clip: Callable[[Array], Array]
    rounds_stochastically: bool
    rate: Array | float = 0.0
    """Learning rate."""


@dataclass(frozen=True, eq=False)
class TrainableParam:
    """A trainable parameter in stacked form, with its update settings."""

    param: Param
    name: str = ""
    """Name of the parameter in checkpoints."""
    rate: float = 1.0
    """Scaling factor applied to the learning rate."""
    decay: float = 0.0
    """Weight-decay coefficient."""
    layers: np.ndarray | None = None
    """int array that holds each layer's index in the network, with the shape of the stacked dims;
    None without stacked dims.
    """
    spec: PartitionSpec = field(default_factory=PartitionSpec)
    """PartitionSpec of the gradient and the update."""

    @property
    def num_stacked_dims(self) -> int:
        """Return the number of leading stacked dims."""
        return 0 if self.layers is None else self.layers.ndim

    def shape_of(self, one: StateArray, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a state array, given the shape of the parameter array."""
        return tuple(size for dim, size in enumerate(shape) if not self._lacks(one, dim))

    def spec_of(self, one: StateArray) -> PartitionSpec:
        """Return the partition spec of one optimizer-state array."""
        dims = range(self.num_stacked_dims + len(self.param.dims))
        entries = (*self.spec, *(None,) * (len(dims) - len(self.spec)))
        return PartitionSpec(*(entries[dim] for dim in dims if not self._lacks(one, dim)))

    def _lacks(self, one: StateArray, dim: int) -> bool:
        return dim - self.num_stacked_dims in one.dropped_dims


@dataclass(frozen=True, eq=False)
class Optimizer:
    """The configured optimizer, including gradient clipping by global norm."""

    config: OptimConfig
    rate: optax.Schedule
    trainable_params: Mapping[KeyPath, TrainableParam]
    """Trainable parameters, keyed by their paths in the tree of trainable parameters."""
    param_dtype: str = "float32"
    seed: int = 0
    mesh: Mesh = field(default_factory=lambda: Mesh(np.array(jax.devices()[:1]), ("stage",)))

    @cached_property
    def state_arrays(self) -> dict[str, dict[KeyPath, StateArray]]:
        """Return the state arrays of each parameter, keyed by tree name and path."""
        arrays: dict[str, dict[KeyPath, StateArray]] = {}
        for path, target in self.trainable_params.items():
            for name, array in state_arrays(self.config, target.param, self.param_dtype).items():
                arrays.setdefault(name, {})[path] = array
        return arrays

    def _map_state(self, of: Callable[[str, KeyPath, StateArray], Any]) -> dict[str, Tree]:
        """Return one tree for each state-array name; its leaves are the results of calling `of` for
        each parameter's array.
        """
        return {
            name: unflatten({path: of(name, path, array) for path, array in arrays.items()})
            for name, arrays in self.state_arrays.items()
        }

    def init(self, params: Tree) -> OptState:
        """Return the state of a new run: zero moments, and an EMA initialized to the parameters."""
        params_by_path = flatten(params)

        def first(name: str, path: KeyPath, one: StateArray) -> Array:
            if name == EMA:
                return params_by_path[path].astype(one.dtype)
            target = self.trainable_params[path]
            shape = target.shape_of(one, params_by_path[path].shape)
            return auto_sharded(lambda: jnp.zeros(shape, one.dtype), target.spec_of(one))()

        return OptState(jnp.zeros((), jnp.int32), self._map_state(first))

    @cached_property
    def vocab_dims(self) -> dict[str, dict[str, int]]:
        """Return the index of the vocab dim of each state array, keyed by tree name and
        parameter.
        """
        vocab_dims: dict[str, dict[str, int]] = {}
        for name, arrays in self.state_arrays.items():
            axes = {path: [axis for _, axis in array.dims] for path, array in arrays.items()}
            vocab_dims[name] = {
                p[0]: dims.index("vocab") for p, dims in axes.items() if "vocab" in dims
            }
        return vocab_dims

    @property
    def is_elementwise(self) -> bool:
        """Return whether each entry's update depends only on that entry."""
        return self.config.name in ("adamw", "lion")

    def bound_update(
        self, reach: Float[Array, " 2"], norm: Float[Array, ""], rate: Float[Array, ""]
    ) -> Float[Array, " 2"]:
        """Bound the parameters and first moments after an update; see `guard.bound_update`."""
        targets = self.trainable_params.values()
        return bound_update(
            self.config,
            reach,
            norm,
            rate * max((target.rate for target in targets), default=1.0),
            decay=max((target.decay for target in targets), default=0.0),
            largest=max_direction(self.config, (target.param for target in targets)),
        )

    @cached_property
    def target_specs(self) -> Tree:
        """Return the PartitionSpecs of the gradients, and of the parameters while they are
        updated.
        """
        return unflatten({path: target.spec for path, target in self.trainable_params.items()})

    @cached_property
    def specs(self) -> dict[str, Tree]:
        """Return the PartitionSpecs of the optimizer-state trees."""
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
        """Return the updated parameters and state, or the old parameters and state if `taken` is
        false.

        Args:
            gradients: gradients of the trainable parameters, with the same tree structure.
            state: state before the update.
            params: trainable parameters.
            norm: norm of the full gradient, if known.
            taken: `False` skips the update.
            draw: whether to use the configured rounding mode; if false, round to nearest.
        """
        now = self._make_context(gradients, state, norm=norm, taken=taken, draw=draw)
        gradients_by_path, params_by_path = flatten(gradients), flatten(params)
        before = {name: flatten(tree) for name, tree in state.trees.items()}
        after: dict[str, dict[KeyPath, Array]] = {name: {} for name in before}
        moved: dict[KeyPath, Array] = {}
        directions: dict[KeyPath, Array] = {}
        for path in self._matrices:
            # From here on, Muon's float32 direction replaces the gradient.
            slope = (
                gradients_by_path[path].astype(jnp.float32)
                if self.config.offload_state
                else gradients_by_path[path]
            )
            arrays = {_GRADIENT: slope} | {name: before[name][path] for name in self._names(path)}
            dtype = gradients_by_path[path].dtype
            new = self.map_layers(path, partial(self._update_moments, path, now, dtype), arrays)
            directions[path] = new.pop(_GRADIENT)
            for name in self._names(path):
                after[name][path] = new[name]
        directions = muon.compute_updates(directions, self._matrices, self.mesh)
        now = now._replace(rate=jnp.asarray(self.rate(state.updates)))
        for path in self.trainable_params:
            names = [name for name in before if path in before[name] and path not in after[name]]
            arrays = {
                _GRADIENT: directions.get(path, gradients_by_path[path]),
                _PARAMETER: params_by_path[path],
            }
            arrays |= {name: before[name][path] for name in names}
            new = self.map_layers(path, partial(self._update_param, path, now), arrays)
            moved[path] = new[_PARAMETER]
            for name in names:
                after[name][path] = new[name]
        trees = {name: unflatten(tree) for name, tree in after.items()}
        return unflatten(moved), OptState(now.updates, trees)

    def is_finite_after_update(
        self, gradients: Tree, norm: Float[Array, ""], params: Tree, state: OptState
    ) -> Bool[Array, ""]:
        """Compute an elementwise update layer by layer, and return whether all results are
        finite.
        """
        now = self._make_context(gradients, state, norm=norm, taken=True, draw=False)
        now = now._replace(rate=jnp.asarray(self.rate(state.updates)))
        gradients_by_path, params_by_path, finite = (
            flatten(gradients),
            flatten(params),
            jnp.ones((), bool),
        )
        before = {name: flatten(tree) for name, tree in state.trees.items()}
        for path in self.trainable_params:
            have = {
                _GRADIENT: gradients_by_path[path],
                _PARAMETER: params_by_path[path],
                _FINITE: finite,
            }
            have |= {name: arrays_by_path[path] for name, arrays_by_path in before.items()}

            def look(layer: LayerSlice, have: Arrays, path: KeyPath = path) -> Arrays:
                new = self._update_param(path, now, layer, have).values()
                return {
                    _FINITE: reduce(operator.and_, map(jnp.isfinite, new)).all() & have[_FINITE]
                }

            finite = self.map_layers(path, look, have)[_FINITE]
        return finite

    def max_abs(self, tree: Tree) -> Float[Array, ""]:
        """Return the largest absolute value of the first moments, computed layer by layer."""
        largest = jnp.zeros(())
        for path, x in flatten(tree).items():

            def look(_: LayerSlice, have: Arrays) -> Arrays:
                largest_here = jnp.abs(have[MOMENTUM]).max().astype(jnp.float32)
                return {_LARGEST: jnp.maximum(largest_here, have[_LARGEST])}

            largest = self.map_layers(path, look, {MOMENTUM: x, _LARGEST: largest})[_LARGEST]
        return largest

    def map_layers(
        self, path: KeyPath, run: Callable[[LayerSlice, Arrays], Arrays], have: Arrays
    ) -> Arrays:
        """Apply `run` to a parameter and its arrays, layer by layer if the state is offloaded.

        Layers along a sharded dim, such as the layers of different stages, are processed together.
        """
        if not any(map(is_on_host, have.values())):
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
        """Return the direction, stored under the gradient's key, and the new state arrays."""
        old = {name: have[name].astype(jnp.float32) for name in self._names(path)}
        slope = now.clip(have[_GRADIENT].astype(dtype))
        direction, new = self._direction(
            path, slope, old, now.updates, now.corrections, now.is_applied
        )
        kept = {}
        for name, x in new.items():
            kept[name] = self._cast_for_storage(
                path, name, x, self.state_arrays[name][path], now, layer
            )
        return {_GRADIENT: direction} | kept

    def _update_param(
        self, path: KeyPath, now: _UpdateContext, layer: LayerSlice, have: Arrays
    ) -> Arrays:
        """Return the updated parameter and state arrays, given the gradient or Muon's direction."""
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
        """Yield the names of the state arrays used in a parameter's update."""
        return (
            name for name, arrays in self.state_arrays.items() if path in arrays and name != EMA
        )

    def _clip(
        self, gradients: Tree, norm: Float[Array, ""] | None, taken: Taken
    ) -> Callable[[Array], Array]:
        """Return a function that clips gradients bitwise like optax. If `norm` is None, the norm is
        computed.

        Clipping depends on `taken`, so that XLA cannot materialize the clipped gradients, which
        both moments use, before the update has been checked.
        """
        limit = self.config.clip_norm
        if not limit:
            return lambda leaf: leaf
        norm = jnp.asarray(optax.tree.norm(gradients) if norm is None else norm)
        norm = jnp.where(taken, norm, jnp.inf)
        # Divide by 1 if nothing is clipped, so that XLA can reuse the gradients' memory.
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
        """Return a parameter's direction, before weight decay, and its new state arrays."""
        config, target = self.config, self.trainable_params[path]
        if is_orthogonalised(config, target.param):
            return momentum(config, gradient, old, taken)
        if config.name == "lion":
            return lion(config, gradient, old, taken)
        if config.name != "adafactor":
            return adam(config, gradient, old, by, taken)
        # Adafactor averages over sharded dims, so the output sharding is ambiguous with explicit
        # axes.
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
        """Return the matrix layout of each parameter that Muon orthogonalizes, keyed by path."""
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
        # The random bits have no sharded input, so their sharding is ambiguous with explicit axes.
        return round_stochastically(x, auto_sharded(drawn, target.spec_of(one))())
