"""Learning-rate schedules, implemented as optax schedules."""

from __future__ import annotations

import optax

from maxpipe.config.sections.optim import OptimConfig, resolve_phases


def learning_rate(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: a warmup followed by the configured shape."""
    if config.lr_phases:
        return _phase_schedule(config, total_steps)
    peak = config.learning_rate
    end = peak * config.min_lr_ratio
    after = max(1, total_steps - config.warmup_steps)
    match config.schedule:
        case "constant":
            shape = optax.constant_schedule(peak)
        case "linear":
            shape = optax.linear_schedule(peak, end, after)
        case "cosine":
            shape = optax.cosine_decay_schedule(peak, after, config.min_lr_ratio)
        case "wsd":
            decay = max(1, min(after, round(total_steps * config.decay_fraction)))
            shape = optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)],
                [after - decay],
            )
    if config.warmup_steps == 0:
        return shape
    # The learning rate of the first step is peak / warmup, not 0.
    rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([rise, shape], [config.warmup_steps])


def _phase_schedule(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Return the schedule for `lr_phases`; the first step after a phase uses the phase's end
    value.
    """
    peak, shapes, borders = config.learning_rate, [], []
    phases = resolve_phases(config.lr_phases, total_steps)
    for phase in phases:
        start, end = peak * phase.start, peak * phase.end
        steps = max(1, phase.steps)
        if phase.shape == "cosine" and start != end:
            bent = optax.cosine_decay_schedule(1.0, steps)
            shapes.append(lambda step, a=start, b=end, bent=bent: b + (a - b) * bent(step))
        else:
            shapes.append(optax.linear_schedule(start, end, steps))
        last = borders[-1] if borders else 0
        borders.append(min(last + phase.steps, 2**31 - 1))  # step counts are int32
    final = optax.constant_schedule(peak * phases[-1].end)
    return optax.join_schedules([*shapes, final], borders)
