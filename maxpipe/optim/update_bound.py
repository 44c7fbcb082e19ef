"""Bounds on the absolute values of parameters after an update, without computing the update."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.spec import Param
from maxpipe.optim import muon
from maxpipe.optim.state_spec import is_orthogonalised, matrix_dims

_ROUNDING_FACTOR = 1.05
"""Upper bound on the factor by which several bfloat16 roundings, of at most 1/256 each, increase a
value."""

MOMENTUM = "mu"
"""Name of the first moments, whose magnitude bounds the next update."""


def bound_update(
    config: OptimConfig,
    reach: Float[Array, " 2"],
    norm: Float[Array, ""],
    rate: Float[Array, ""],
    *,
    decay: float,
    largest: float,
) -> Float[Array, " 2"]:
    """Return bounds on the values that the optimizer's update produces.

    Args:
        config: config of the optimizer.
        reach: float32 bounds on any parameter and any first moment before the update.
        norm: norm of the full gradient before clipping.
        rate: largest learning rate of any parameter.
        decay: largest weight decay.
        largest: `max_direction` of all parameters.

    Returns:
        The same bounds after the update, or infinity if a value might overflow. The bounds are much
        larger than actual values, because the root of a second moment may be 0. They are used only
        to exclude overflow.

    No gradient entry exceeds the norm, and first moments are averages of gradient entries. Second
    moments are averages of squared entries, which are finite because the norm is finite.
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
    # With smaller values, a divisor may be rounded to 0.
    is_bounded = not divides or config.epsilon > 1e-30
    is_bounded &= config.name == "adafactor" or max(config.beta1, config.beta2) < 1 - 1e-6
    within = jnp.maximum(jnp.maximum(after, corrected), update) < 1e37
    return jnp.where(is_bounded & within, bounds, jnp.inf)


def _moment_decays(config: OptimConfig) -> tuple[float, ...]:
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
    """Return a bound on update directions that involve no division by a second moment."""
    bounds = [1.0 if config.name == "lion" else 0.0]
    for param in params:
        if is_orthogonalised(config, param):
            matrix = matrix_dims(param)
            assert matrix is not None
            sides = (math.prod(param.shape[dim] for dim in dims) for dims in matrix)
            bounds.append(muon.MAX_SINGULAR_VALUE * muon.update_scale(*sides))
        elif config.name == "adafactor":  # worst case: a single entry is nonzero
            bounds.append(math.sqrt(math.prod(param.shape)))
    return max(bounds)
