"""Early stopping: end a run after several evaluations without an improvement in the metric.

The counters are saved with the data position, so that a resumed run ends at the same step as an
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from maxpipe.checkpoint.retention import BestMetric
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import AnyFloat


class EarlyStoppingState(TypedDict):
    """Early-stopping state in a checkpoint."""

    metric: str
    is_largest: bool
    waited: int
    """Number of evaluations since the evaluation with the best metric."""
    counted: int
    """Step of the most recently counted evaluation."""
    best: NotRequired[AnyFloat]
    best_step: NotRequired[int]


class EarlyStopping:
    """Counts the periodic evaluations (`eval.every`) since the metric last improved."""

    def __init__(
        self,
        config: EvalConfig,
        checkpoint: CheckpointConfig,
        facts: Mapping[str, Any] | None = None,
    ):
        """Create the counter, restoring the state `facts` from a checkpoint, if any.

        The state is ignored if it belongs to another metric.
        """
        self._config, self._better = config, BestMetric.of(checkpoint)
        self._waited = self._counted = 0
        self._best: float | None = None
        self._best_step = 0
        facts = facts or {}
        if (facts.get("metric"), facts.get("is_largest")) == (
            self._better.metric,
            self._better.is_largest,
        ):
            self._waited, self._counted = facts["waited"], facts["counted"]
            self._best, self._best_step = facts.get("best"), facts.get("best_step", 0)

    @property
    def should_stop(self) -> bool:
        """Whether the run should stop early, or has already stopped early."""
        return 0 < self._config.patience <= self._waited

    def needs_evaluation(self, step: int) -> bool:
        """Whether the evaluation at this step is used for early stopping and is still pending."""
        return bool(self._config.patience) and self._is_counted(step)

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the evaluation at this step and return whether the run should stop."""
        if not self._is_counted(step):
            return False
        self._counted = step
        found = self._better.sort_key(metrics)
        if found is not None and self._is_improvement(found):
            self._best, self._best_step = metrics[self._better.metric], step
            self._waited = 0
        else:
            self._waited += 1
        return self.should_stop

    def _is_counted(self, step: int) -> bool:
        every = self._config.every
        return bool(every) and step % every == 0 and step > self._counted

    def _is_improvement(self, key: float) -> bool:
        if self._best is None:
            return True
        best = -self._best if self._better.is_largest else self._best
        return key < best - self._config.min_delta

    def state_dict(self) -> dict[str, EarlyStoppingState]:
        """Return the state that a checkpoint saves with the data position."""
        if not self._config.patience:
            return {}
        found = EarlyStoppingState(
            metric=self._better.metric,
            is_largest=self._better.is_largest,
            waited=self._waited,
            counted=self._counted,
        )
        if self._best is not None:
            found["best"], found["best_step"] = self._best, self._best_step
        return {"patience": found}

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of the event that records the early stop."""
        best = {} if self._best is None else {"best": self._best, "best_step": self._best_step}
        return {"metric": self._better.metric, "evaluations": self._waited, **best}

    def message(self) -> str:
        """Return a description of the early stop for the user."""
        gain = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        best = "no evaluation returned a finite value"
        if self._best is not None:
            best = f"the best value was {self._best:.6g} after step {self._best_step}"
        return (
            f"stopped early after step {self._counted}: {self._better.metric} did not improve"
            f"{gain} in {pluralize(self._waited, 'evaluation')} (eval.patience="
            f"{self._config.patience}); {best}"
        )
