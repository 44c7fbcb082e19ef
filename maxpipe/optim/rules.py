"""Directions of updates, for one parameter.

Each rule takes the gradient and float32 arrays of what is kept, and returns the direction, before
weight decay and rate, with the arrays as they are after it: unless the update is taken, as before.
That choice is made before moments are used: made afterwards, XLA would keep old, new and chosen
moments side by side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from maxpipe.config.schema import OptimConfig
from maxpipe.optim.guard import unless_bad

Arrays = dict[str, Array]
"""What is kept of one parameter, by name."""
Taken = Bool[Array, ""] | bool

STEEP = 0.8
"""Adafactor's second moments at step t have the decay `1 - t**-0.8`."""
SQUARE = 1e-30
"""What Adafactor adds to means of squares where they are used: what is padding stays 0."""
HUGE = 1e15
"""Limit of a gradient divided by the root of its mean square; its own square is within float32."""


class Corrections(NamedTuple):
    """What moments that start at 0 are divided by; of all parameters the same."""

    mu: Float[Array, ""]
    nu: Float[Array, ""]

    @classmethod
    def after(cls, config: OptimConfig, count: Int[Array, ""]) -> Corrections:
        """This number of updates."""
        return cls(1 - config.beta1**count, 1 - config.beta2**count)


def adam(
    config: OptimConfig, gradient: Array, old: Arrays, by: Corrections, taken: Taken
) -> tuple[Array, Arrays]:
    """arXiv:1412.6980; in float32 optax's, bit for bit."""
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta1, 1)
    nu = optax.tree.update_moment_per_elem_norm(gradient, old["nu"], config.beta2, 2)
    new = unless_bad(taken, {"mu": mu, "nu": nu}, old)
    return new["mu"] / by.mu / (jnp.sqrt(new["nu"] / by.nu) + config.epsilon), new


def lion(config: OptimConfig, gradient: Array, old: Arrays, taken: Taken) -> tuple[Array, Arrays]:
    """arXiv:2302.06675; in float32 optax's, bit for bit."""
    # Of the gradient and the moment before it, as both are read to make the one after it.
    sign = jnp.sign((1 - config.beta1) * gradient + config.beta1 * old["mu"])
    mu = optax.tree.update_moment(gradient, old["mu"], config.beta2, 1)
    return sign, unless_bad(taken, {"mu": mu}, old)


def momentum(
    config: OptimConfig, gradient: Array, old: Arrays, taken: Taken
) -> tuple[Array, Arrays]:
    """Nesterov's, as Muon takes it: what `muon.updates` makes an update of."""
    share = config.momentum
    mu = optax.tree.update_moment(gradient, old["mu"], share, 1)
    new = unless_bad(taken, {"mu": mu}, old)
    return share * new["mu"] + (1 - share) * gradient, new


class Sides(NamedTuple):
    """Dims of an array over which Adafactor takes means."""

    inputs: tuple[int, ...]
    """Of a matrix; of what is none all of the parameter's dims,"""
    outputs: tuple[int, ...]
    """and here none."""
    num_inputs: int
    """Entries along these dims, padding left out: its gradients are 0."""
    num_outputs: int


def adafactor(
    gradient: Array, old: Arrays, count: Int[Array, ""], sides: Sides, taken: Taken
) -> tuple[Array, Arrays]:
    """arXiv:1804.04235 without momentum, and without the parameters' own size in the rate.

    The second moments of a matrix are the product of those of its rows and of its columns. The root
    of the mean square of each parameter's direction is at most 1.
    """
    decay = 1.0 - jnp.maximum(count, 1).astype(jnp.float32) ** -STEEP
    squares, inputs, outputs = jnp.square(gradient), sides.inputs, sides.outputs
    if outputs:
        means = {
            "rows": squares.sum(outputs) / sides.num_outputs,
            "columns": squares.sum(inputs) / sides.num_inputs,
        }
    else:
        means = {"nu": squares}
    new = {name: decay * old[name] + (1 - decay) * mean for name, mean in means.items()}
    new = unless_bad(taken, new, old)
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


def sides_of(
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None, shape: tuple[int, ...], stacked: int
) -> Sides:
    """Of a parameter of this shape with further dims in front of it."""
    inputs, outputs = matrix or (tuple(range(len(shape))), ())
    counts = [math.prod(shape[dim] for dim in dims) for dims in (inputs, outputs)]
    moved = [tuple(stacked + dim for dim in dims) for dims in (inputs, outputs)]
    return Sides(moved[0], moved[1], counts[0], counts[1])
