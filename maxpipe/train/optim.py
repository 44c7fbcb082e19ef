"""The optimizer and its learning-rate schedule, as optax transformations."""

from __future__ import annotations

from typing import Any

import jax
import optax

from maxpipe.config.schema import OptimConfig

Tree = Any


def learning_rate(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step: a warm-up, then the configured shape until `total_steps`."""
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


def build_optimizer(
    config: OptimConfig, total_steps: int, decayed: Tree
) -> optax.GradientTransformation:
    """AdamW with clipping by the norm of the whole gradient.

    `decayed` is a tree of bools: which parameters decay.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )


def moments(state: optax.OptState) -> dict[str, Tree]:
    """The parameter-shaped part of the state; the rest follows from the step."""
    return {name: optax.tree_utils.tree_get(state, name) for name in ("mu", "nu")}


def with_moments(state: optax.OptState, step: jax.Array, saved: dict[str, Tree]) -> optax.OptState:
    """A state after `step` steps with these moments."""
    return optax.tree_utils.tree_set(state, count=step, **saved)
