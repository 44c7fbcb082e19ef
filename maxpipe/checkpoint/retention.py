"""Retention rules: decide which checkpoints of a run to keep, and which metric ranks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.io.formatting import pluralize

_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Checkpoint properties used by retention rules. `time` is the save time in Unix seconds."""

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The metric that ranks checkpoints, and whether larger values are better."""

    metric: str = "eval/loss"
    is_largest: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any] | CheckpointConfig) -> BestMetric:
        """Return the metric from a `checkpoint` config section. Saved configs may lack its keys."""
        if isinstance(section, CheckpointConfig):
            return cls(section.best_metric, section.best_mode == "max")
        metric = str(section.get("best_metric") or cls().metric)
        return cls(metric, section.get("best_mode") == "max")

    @property
    def description(self) -> str:
        """Ranking rule as shown in messages, such as `smallest eval/loss`."""
        return f"{'largest' if self.is_largest else 'smallest'} {self.metric}"

    def sort_key(self, metrics: Mapping[str, float]) -> float | None:
        """Return a sort key (smaller is better), or None if the metric is missing or not finite."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return None
        return -value if self.is_largest else value


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Retention rules. A checkpoint is retained if any rule matches. A value of 0 disables a rule.

    The rules retain the last `newest` checkpoints, checkpoints whose step is divisible by
    `every_steps`, the first checkpoint in every `every_hours`-hour period, and the `best`
    checkpoints ranked highest by `better`.
    """

    newest: int
    every_steps: int = 0
    every_hours: float = 0
    best: int = 0
    better: BestMetric = field(default_factory=BestMetric)

    @classmethod
    def of(cls, config: CheckpointConfig) -> RetentionRules:
        """Return the retention rules of a config."""
        periods = config.keep_every_steps, config.keep_every_hours
        return cls(config.keep, *periods, config.keep_best, BestMetric.of(config))


def select_retained(saved: Sequence[CheckpointInfo], rules: RetentionRules) -> dict[int, str]:
    """Return the reason to keep each retained checkpoint, keyed by step."""
    ordered = sorted(saved, key=lambda info: info.step)
    reasons: dict[int, list[str]] = {info.step: [] for info in ordered}
    for info in ordered[-rules.newest :] if rules.newest else []:
        reasons[info.step].append("newest")
    for info in ordered:
        if rules.every_steps and info.step and info.step % rules.every_steps == 0:
            reasons[info.step].append(f"every {pluralize(rules.every_steps, 'step')}")
    if rules.every_hours:
        periods: dict[float, int] = {}
        for info in ordered:
            periods.setdefault(info.time // (rules.every_hours * _HOUR_SECONDS), info.step)
        for step in periods.values():
            reasons[step].append(f"every {rules.every_hours:g} hours")
    better = rules.better
    keys = [(key, info) for info in ordered if (key := better.sort_key(info.metrics)) is not None]
    # The newest of several equal values is best, as for `RUN@best`. Otherwise the step that
    # `RUN@best` names would be deleted while an older step with the same value is kept.
    for _, info in sorted(keys, key=lambda pair: (pair[0], -pair[1].step))[: rules.best]:
        value = f"{info.metrics[better.metric]:.4f}"
        reasons[info.step].append(f"best, {better.metric.removeprefix('eval/')} {value}")
    return {step: "; ".join(words) for step, words in reasons.items() if words}
