"""How far an update may reach, without looking at it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.config.schema import OptimConfig
from maxpipe.models.spec import Param
from maxpipe.optim import muon
from maxpipe.optim.state_spec import is_orthogonalised, matrix_dims

_ROUNDING_FACTOR = 1.05
"""How much larger rounding makes a result: some steps of bfloat16, each at most 1/256."""

MOMENTUM = "mu"
"""Name of the averaged gradients, whose size bounds the next update."""


def bound_update(
    config: OptimConfig,
    reach: Float[Array, " 2"],
    norm: Float[Array, ""],
    rate: Float[Array, ""],
    *,
    decay: float,
    largest: float,
) -> Float[Array, " 2"]:
    """A bound on what the optimizer's update leaves.

    Args:
        config: the optimizer's.
        reach: bounds on the size of any parameter and of any first moment before, float32.
        norm: of the whole gradient, unclipped.
        rate: the largest learning rate of a parameter.
        decay: the largest weight decay.
        largest: `largest_update` of all parameters.

    Returns:
        The same after the update; infinite where something might not stay finite. Far above what
        is there, as the root of a second moment may be 0: it says only what cannot overflow.

    No entry of the gradient is larger than the norm, and moments are means of such entries. The
    second ones are means of squares whose sum did not overflow when the norm was taken.
    """
    params, moment = reach
    gradient = jnp.minimum(norm, config.clip_norm) if config.clip_norm else norm
    divides, shares = config.name in ("adamw", "muon"), _moment_decays(config)
    moments = [_ROUNDING_FACTOR * (share * moment + (1 - share) * gradient) for share in shares]
    update = jnp.full((), largest, jnp.float32)
    corrected = jnp.maximum(moment, gradient)
    if divides:
        own = _ROUNDING_FACTOR * (config.beta1 * moment + (1 - config.beta1) * gradient)
        corrected = own / (1 - config.beta1)
        update = jnp.maximum(update, corrected / config.epsilon)
    update = update + decay * params
    after = _ROUNDING_FACTOR * (params + jnp.abs(rate) * update)
    moment = jnp.stack(moments).max() if moments else jnp.zeros(())
    bounds = jnp.stack([after, moment]).astype(jnp.float32)
    # Smaller numbers may be rounded to 0, as divisors or beside 1.
    is_bounded = not divides or config.epsilon > 1e-30
    is_bounded &= config.name == "adafactor" or max(config.beta1, config.beta2) < 1 - 1e-6
    within = jnp.maximum(jnp.maximum(after, corrected), update) < 1e37
    return jnp.where(is_bounded & within, bounds, jnp.inf)


def _moment_decays(config: OptimConfig) -> tuple[float, ...]:
    """Of a first moment in the next one, for each kind of first moment."""
    match config.name:
        case "adamw":
            return (config.beta1,)
        case "lion":
            return (config.beta2,)
        case "muon":
            return (config.beta1, config.momentum)
        case "adafactor":
            return ()


def max_direction(config: OptimConfig, params: Iterable[Param]) -> float:
    """Limit of an entry of a direction where no second moment is divided by, without decay."""
    found = [1.0 if config.name == "lion" else 0.0]
    for param in params:
        if is_orthogonalised(config, param):
            matrix = matrix_dims(param)
            assert matrix is not None
            sides = (math.prod(param.shape[dim] for dim in dims) for dims in matrix)
            found.append(muon.MAX_SINGULAR_VALUE * muon.update_scale(*sides))
        elif config.name == "adafactor":  # all of the mean square in one entry
            found.append(math.sqrt(math.prod(param.shape)))
    return max(found)
