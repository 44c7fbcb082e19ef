"""Which checkpoints are kept, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from maxpipe.config.schema import CheckpointConfig
from maxpipe.words import counted

_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Saved:
    """The rules' view of a checkpoint: `time` in seconds, `loss` of its evaluation."""

    step: int
    time: float
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """A checkpoint that one of these asks for is kept; 0 asks for none.

    `newest` many; the steps that `every_steps` divides; the first in each period of
    `every_hours`; the `best` many by evaluation loss.
    """

    newest: int
    every_steps: int = 0
    every_hours: float = 0
    best: int = 0

    @classmethod
    def of(cls, config: CheckpointConfig) -> Rules:
        """The rules that a config states."""
        return cls(config.keep, config.keep_every_steps, config.keep_every_hours, config.keep_best)


def kept(saved: Sequence[Saved], rules: Rules) -> dict[int, str]:
    """Step to the reason why it stays, for each of `saved` that does."""
    ordered = sorted(saved, key=lambda one: one.step)
    reasons: dict[int, list[str]] = {}

    def keep(one: Saved, reason: str) -> None:
        reasons.setdefault(one.step, []).append(reason)

    for one in ordered[-rules.newest :] if rules.newest else []:
        keep(one, "newest")
    for one in ordered:
        if rules.every_steps and one.step and one.step % rules.every_steps == 0:
            keep(one, f"every {counted(rules.every_steps, 'step')}")
    if rules.every_hours:
        periods: dict[float, Saved] = {}
        for one in ordered:
            period = one.time // (rules.every_hours * _HOUR_SECONDS)
            periods.setdefault(period, one)
        for one in periods.values():
            keep(one, f"every {rules.every_hours:g} hours")
    evaluated = [one for one in ordered if one.loss is not None and math.isfinite(one.loss)]
    for one in sorted(evaluated, key=lambda one: one.loss or 0.0)[: rules.best]:
        keep(one, f"best, loss {one.loss:.4f}")
    return {step: "; ".join(reasons[step]) for step in sorted(reasons)}
