"""Which checkpoints are kept, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxpipe.config.schema import CheckpointConfig
from maxpipe.io.text import counted

_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Saved:
    """The rules' view of a checkpoint: `time` in seconds, `metrics` of its evaluation."""

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Better:
    """Which of two evaluations is better."""

    metric: str = "eval/loss"
    is_largest: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any] | CheckpointConfig) -> Better:
        """As a section `checkpoint` says; that of a saved config may have no such keys."""
        if isinstance(section, CheckpointConfig):
            return cls(section.best_metric, section.best_is == "largest")
        metric = str(section.get("best_metric") or cls().metric)
        return cls(metric, section.get("best_is") == "largest")

    @property
    def words(self) -> str:
        """Such as `smallest eval/loss`."""
        return f"{'largest' if self.is_largest else 'smallest'} {self.metric}"

    def key(self, metrics: Mapping[str, float]) -> float | None:
        """The smaller the better; None for what was not evaluated, or is not finite."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return None
        return -value if self.is_largest else value


@dataclass(frozen=True, slots=True)
class Rules:
    """A checkpoint that one of these asks for is kept; 0 asks for none.

    `newest` many; the steps that `every_steps` divides; the first in each period of
    `every_hours`; the `best` many by an evaluation.
    """

    newest: int
    every_steps: int = 0
    every_hours: float = 0
    best: int = 0
    better: Better = field(default_factory=Better)

    @classmethod
    def of(cls, config: CheckpointConfig) -> Rules:
        """The rules that a config states."""
        periods = config.keep_every_steps, config.keep_every_hours
        return cls(config.keep, *periods, config.keep_best, Better.of(config))


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
    better = rules.better
    keys = [(key, one) for one in ordered if (key := better.key(one.metrics)) is not None]
    for _, one in sorted(keys, key=lambda each: each[0])[: rules.best]:
        keep(one, f"best, {better.metric.removeprefix('eval/')} {one.metrics[better.metric]:.4f}")
    return {step: "; ".join(reasons[step]) for step in sorted(reasons)}
