"""Detect bad steps on the devices, before the update is applied.

The host receives the result of a step only after the update, while the next step is running.
Therefore, each step compares its own loss and gradient norm with the losses and gradient norms of
recent steps. If the step is bad, parameters and optimizer state are left unchanged.
`guard.bad_steps` determines how the host reacts.

`bound_update` bounds the absolute values of the parameters after an update, without computing the
update.

Source: OLMo, which compares the loss and gradient norm with those of recent steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.spec import Param
from maxpipe.optim import muon
from maxpipe.optim.state_spec import is_orthogonalised, matrix_dims
from maxpipe.parallel.mesh import AXES

Tree = Any
Check = Callable[..., tuple[Any, Any]]


class GuardState(NamedTuple):
    """State of the guard, identical on all devices."""

    skipped: Int[Array, ""]
    """int32 number of steps whose update was skipped."""
    spikes: Int[Array, ""]
    """int32 number of steps in which the loss or the gradient norm spiked."""
    recent: Float[Array, "2 window"]
    """Float32 loss (nats per token) and gradient norm of the most recent updates, newest last.
    Missing entries are NaN. If spike detection is disabled, these arrays are empty."""
    bounds: Float[Array, " 2"]
    """Float32 bounds on the absolute values of parameters and of first moments; infinite if
    unknown. See `bound_update`."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON data for a checkpoint; `bounds` is omitted, because it is
        recomputed.
        """
        recent = np.asarray(self.recent)
        return {
            "skipped": int(self.skipped),
            "spikes": int(self.spikes),
            "recent": recent[:, np.isfinite(recent[0])].tolist(),
        }


def init_guard_state(config: GuardConfig, facts: Mapping[str, Any] | None = None) -> GuardState:
    """Return the state of a new run, or the state restored from `facts`, as numpy arrays."""
    facts = facts or {"skipped": 0, "spikes": 0, "recent": [[], []]}
    window = config.spike_window if config.spike_sigmas else 0
    known = np.asarray(facts["recent"], np.float32)
    recent = np.concatenate([np.full((2, window), np.nan, np.float32), known], axis=1)
    skipped, spikes = (np.asarray(facts[name], np.int32) for name in ("skipped", "spikes"))
    reach = np.full(2, np.inf, np.float32)
    return GuardState._make((skipped, spikes, recent[:, recent.shape[1] - window :], reach))


def check_step(
    config: GuardConfig,
    mesh: Mesh,
    state: GuardState,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    check: Check = lambda: (True, np.inf),
    operands: Tree = (),
    specs: Tree = (),
) -> tuple[Bool[Array, ""], GuardState]:
    """Return whether the update is applied, and the new guard state; both are identical on all
    devices.

    `loss` is in nats per token. `grad_norm` is the norm of the full gradient before clipping.
    `check` receives a device's shards of the operands, which are sharded according to `specs`.
    `check` returns whether all parameters and moments remain finite, and bounds on their absolute
    values. The update is skipped if any parameter or moment would become non-finite.
    """
    seen = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    flags = jnp.stack([~jnp.isfinite(seen).all(), _is_spike(config, state.recent, seen)])
    broken, spike, reach = _reduce_over_devices(mesh, flags, check, operands, specs)
    spike = spike & ~broken
    taken = ~broken & ~(spike & (config.on_spike != "warn"))
    newer = jnp.concatenate([state.recent, seen[:, None]], axis=1)[:, 1:]
    recent, reach = select_update(taken, (newer, reach), (state.recent, state.bounds))
    return taken, GuardState(state.skipped + ~taken, state.spikes + spike, recent, reach)


def select_update(taken: Bool[Array, ""] | bool, new: Tree, old: Tree) -> Tree:
    """Return `new` if the update is applied, and `old` otherwise.

    XLA fuses the elementwise selection into the computation of `new`. Therefore, no second copy is
    stored unless `old` is used later.
    """
    return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, old)


def _is_spike(
    config: GuardConfig, recent: Float[Array | np.ndarray, "2 window"], seen: Float[Array, " 2"]
) -> Bool[Array, ""]:
    window = recent.shape[1]
    if not window:
        return jnp.zeros((), bool)
    known = jnp.isfinite(recent)
    count = known.sum(axis=1)
    mean = jnp.where(known, recent, 0).sum(axis=1) / count
    variance = jnp.where(known, jnp.square(recent - mean[:, None]), 0).sum(axis=1) / count
    limit = mean + config.spike_sigmas * jnp.sqrt(variance)
    return ((2 * count >= window) & (seen > limit)).any()


def _reduce_over_devices(
    mesh: Mesh, flags: Bool[Array, " 2"], check: Check, operands: Tree, specs: Tree
) -> tuple[Bool[Array, ""], Bool[Array, ""], Float[Array, " 2"]]:
    """Return whether the step is broken, whether it is a spike, and the bounds, each as the maximum
    over all devices.

    `check` receives a device's shards of the operands. All other inputs are equal on all devices,
    unless a device is faulty. Even if a device is faulty, the decision must be identical on all
    devices; otherwise, the processes would deadlock.
    """

    def largest(flags: Array, operands: Tree) -> Array:
        finite, reach = check(*operands)
        broken, spike = flags.at[0].set(flags[0] | ~jnp.asarray(finite))
        flags_and_bounds = jnp.stack([broken, spike, *jnp.broadcast_to(reach, 2)]).astype(
            jnp.float32
        )
        return flags_and_bounds if mesh.size == 1 else jax.lax.pmax(flags_and_bounds, AXES)

    if mesh.size > 1:
        everywhere = PartitionSpec()
        largest = jax.shard_map(
            largest, mesh=mesh, in_specs=(everywhere, specs), out_specs=everywhere, check_vma=False
        )
    decision = largest(flags, operands)
    return decision[0] > 0, decision[1] > 0, decision[2:]


_ROUNDING_FACTOR = 1.05
"""Upper bound on the factor by which several bfloat16 roundings increase a magnitude, given that
each one changes it by at most 1/256.
"""

MOMENTUM = "mu"
"""State key of the first moment, whose magnitude bounds the next update."""


def bound_update(
    config: OptimConfig,
    reach: Float[Array, " 2"],
    norm: Float[Array, ""],
    rate: Float[Array, ""],
    *,
    decay: float,
    largest: float,
) -> Float[Array, " 2"]:
    """Return bounds on the parameters and first moments that the optimizer's update produces.

    Args:
        config: optimizer config.
        reach: float32 bounds on all parameters and on all first moments before the update.
        norm: norm of the full gradient before clipping.
        rate: largest learning rate of any parameter.
        decay: largest weight-decay coefficient of any parameter.
        largest: result of `max_direction` for all parameters.

    Returns: The same bounds after the update, or infinity if a value might overflow. The bounds are
        much larger than the actual values, because the square root of a second moment can be 0.
        The bounds are used only to rule out overflow.

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
    # If epsilon were smaller, a divisor could be rounded to 0.
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
    """Return a bound on update directions that are not divided by a second moment."""
    bounds = [1.0 if config.name == "lion" else 0.0]
    for param in params:
        if is_orthogonalised(config, param):
            matrix = matrix_dims(param)
            assert matrix is not None
            sides = (math.prod(param.shape[dim] for dim in dims) for dims in matrix)
            bounds.append(muon.MAX_SINGULAR_VALUE * muon.update_scale(*sides))
        elif config.name == "adafactor":  # worst case: the gradient has a single nonzero entry
            bounds.append(math.sqrt(math.prod(param.shape)))
    return max(bounds)
