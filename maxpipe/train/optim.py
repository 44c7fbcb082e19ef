"""The optimizer and its learning-rate schedule, as optax transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from maxpipe.config.phases import phases
from maxpipe.config.schema import OptimConfig
from maxpipe.train.guard import unless_bad
from maxpipe.train.optimizers import optimizer_of

Tree = Any

_ROUNDED = 1.05
"""How much larger rounding makes a result: some steps of bfloat16, each at most 1/256."""


def learning_rate(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step: a warm-up, then the configured shape until `total_steps`."""
    if config.phases:
        return _by_phases(config, total_steps)
    peak = config.learning_rate
    end = peak * config.final_fraction
    after = max(1, total_steps - config.warmup_steps)
    match config.schedule:
        case "constant":
            shape = optax.constant_schedule(peak)
        case "linear":
            shape = optax.linear_schedule(peak, end, after)
        case "cosine":
            shape = optax.cosine_decay_schedule(peak, after, config.final_fraction)
        case "wsd":
            decay = max(1, min(after, round(total_steps * config.decay_fraction)))
            shape = optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)],
                [after - decay],
            )
    if config.warmup_steps == 0:
        return shape
    # The first step already moves: rate peak/warmup, not 0.
    rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([rise, shape], [config.warmup_steps])


def _by_phases(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """The phases one after the other; each reaches its end with the step behind its last."""
    peak, shapes, borders = config.learning_rate, [], []
    for phase in phases(config.phases, total_steps):
        start, end = peak * phase.start, peak * phase.end
        steps = max(1, phase.steps)
        if phase.shape == "cosine" and start != end:
            bent = optax.cosine_decay_schedule(1.0, steps)
            shapes.append(lambda step, a=start, b=end, bent=bent: b + (a - b) * bent(step))
        else:
            shapes.append(optax.linear_schedule(start, end, steps))
        last = borders[-1] if borders else 0
        borders.append(min(last + phase.steps, 2**31 - 1))  # steps are int32
    final = optax.constant_schedule(peak * phases(config.phases, total_steps)[-1].end)
    return optax.join_schedules([*shapes, final], borders)


def reach_after(
    config: OptimConfig,
    reach: Float[Array, " 2"],
    norm: Float[Array, ""],
    rate: Float[Array, ""],
) -> Float[Array, " 2"]:
    """A bound on what `build_optimizer`'s update leaves, without looking at it.

    Args:
        config: the optimizer's.
        reach: bounds on the size of any parameter and of any first moment before, float32.
        norm: of the whole gradient, unclipped.
        rate: the learning rate.

    Returns:
        The same after the update; infinite where something might not stay finite. Far above what
        is there, as the root of a second moment may be 0: it says only what cannot overflow.

    No entry of the gradient is larger than the norm, and moments are means of such entries. The
    second ones are means of squares whose sum did not overflow when the norm was taken.
    """
    params, moment = reach
    gradient = jnp.minimum(norm, config.clip_norm) if config.clip_norm else norm
    is_lion = config.name == "lion"
    decay = config.beta2 if is_lion else config.beta1
    moment = _ROUNDED * (decay * moment + (1 - decay) * gradient)
    if is_lion:  # a sign, of a mixture of moment and gradient
        corrected = jnp.maximum(reach[1], gradient)
        update = 1.0 + config.weight_decay * params
    else:
        corrected = moment / (1 - config.beta1)
        update = corrected / config.epsilon + config.weight_decay * params
    params = _ROUNDED * (params + jnp.abs(rate) * update)
    bounds = jnp.stack([params, moment]).astype(jnp.float32)
    # Smaller numbers may be rounded to 0, as divisors or beside 1.
    is_bounded = is_lion or config.epsilon > 1e-30
    is_bounded &= max(config.beta1, config.beta2) < 1 - 1e-6
    within = jnp.maximum(jnp.maximum(params, corrected), update) < 1e37
    return jnp.where(is_bounded & within, bounds, jnp.inf)


def build_optimizer(
    config: OptimConfig, total_steps: int, decayed: Tree
) -> optax.GradientTransformationExtraArgs:
    """The config's optimizer, behind clipping by the norm of the whole gradient.

    `decayed` is a tree of bools: which parameters decay. `update` takes `norm`, that of the whole
    gradient if it is known, and `taken`, a bool: unless it is true the state stays as it is, and
    the updates mean nothing.
    """
    clip = _clip(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(
        clip,
        _scale_by_lion(config.beta1, config.beta2)
        if config.name == "lion"
        else _scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, decayed),
        _if_taken(optax.scale_by_learning_rate(learning_rate(config, total_steps))),
    )


def _clip(limit: float) -> optax.GradientTransformationExtraArgs:
    """optax's clipping, bit for bit, by a norm that is known already.

    It waits for `taken`: both moments read the quotients, so XLA may keep all of them in memory. It
    must not do so while the step looks at what the update would leave.
    """

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        norm: Any = None,
        taken: Bool[Array, ""] | bool = True,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        norm = optax.tree.norm(updates) if norm is None else norm
        norm = unless_bad(taken, norm, jnp.inf)
        within = norm < limit
        clip = lambda leaf: jnp.where(within, leaf, leaf / norm.astype(leaf.dtype) * limit)  # noqa: E731
        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """optax's Adam, with moments that stay as they are unless the update is taken.

    In float32 it is that of optax bit for bit. The choice is made before the moments are used. Made
    afterwards, XLA would keep old, new and chosen moments side by side.
    """

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        taken: Bool[Array, ""] | bool = True,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        mu = optax.tree.update_moment(updates, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, beta2, 2)
        new = optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)
        # Gradients may be wider than what is kept.
        new = unless_bad(taken, optax.tree.cast_like(new, state), state)
        mu = optax.tree.bias_correction(new.mu, beta1, new.count)
        nu = optax.tree.bias_correction(new.nu, beta2, new.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu), new

    init = optax.scale_by_adam(beta1, beta2, epsilon).init
    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_lion(beta1: float, beta2: float) -> optax.GradientTransformationExtraArgs:
    """optax's Lion, with a moment that stays as it is unless the update is taken."""

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        taken: Bool[Array, ""] | bool = True,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        # Of the gradient and the moment before it, as both are read to make the one after it.
        signs = jax.tree.map(
            lambda gradient, moment: jnp.sign((1 - beta1) * gradient + beta1 * moment),
            updates,
            state.mu,
        )
        mu = optax.tree.update_moment(updates, state.mu, beta2, 1)
        new = optax.ScaleByLionState(optax.safe_increment(state.count), mu)
        return signs, unless_bad(taken, optax.tree.cast_like(new, state), state)

    init = optax.scale_by_lion(beta1, beta2).init
    return optax.GradientTransformationExtraArgs(init, update)


def _if_taken(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state stays as it is unless the update is taken."""

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        taken: Bool[Array, ""] | bool = True,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        updates, new = inner.update(updates, state, params)
        return updates, unless_bad(taken, new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def moments(config: OptimConfig, state: optax.OptState) -> dict[str, Tree]:
    """The parameter-shaped part of the state; the rest follows from the step."""
    trees = optimizer_of(config).trees
    return {name: optax.tree_utils.tree_get(state, name) for name in trees}


def momentum(config: OptimConfig, state: optax.OptState) -> Tree:
    """The averaged gradients, which `reach_after` bounds."""
    return optax.tree_utils.tree_get(state, optimizer_of(config).momentum)


def with_moments(
    state: optax.OptState, step: Int[Array, ""], saved: dict[str, Tree]
) -> optax.OptState:
    """A state after `step` steps with these moments."""
    return optax.tree_utils.tree_set(state, count=step, **saved)
