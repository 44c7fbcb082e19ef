"""Evaluation during training: token-weighted validation loss and multiple-choice tasks.

The module also computes the training loss of every source of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from maxpipe.config.sections.eval import EvalConfig
from maxpipe.data.loader import Datasets, Loader
from maxpipe.evals.multiple_choice import Task, task_metrics
from maxpipe.io.formatting import pluralize
from maxpipe.step.step import BY_SOURCE, Steps
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.metrics import source_tag


@dataclass(frozen=True, slots=True)
class EvalTotals:
    """Sums over batches: `loss` in nats, the number of target tokens, and the size of their text in
    bytes.
    """

    loss: float
    targets: float
    bytes: float
    by_source: Mapping[str, EvalTotals] = field(default_factory=dict)
    """Totals of the sources of a mixture, keyed by name."""
    reports: Mapping[str, float] = field(default_factory=dict)
    """Sums of additional metrics of the objective, keyed by name."""
    has_bytes: bool = True
    """Whether targets are tokens. Preference pairs have no size in bytes."""

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/loss` in nats per target token, and `eval/nats_per_byte` of the text.

        Without targets, the metrics are NaN, because 0 would be the best loss.
        """
        found = {"eval/loss": self.loss / self.targets if self.targets else math.nan}
        if self.has_bytes:
            per_byte = self.loss / max(self.bytes, 1.0) if self.targets else math.nan
            found["eval/nats_per_byte"] = per_byte
        for name, report in self.reports.items():
            found[f"eval/{name}"] = report / self.targets if self.targets else math.nan
        for name, each in self.by_source.items():
            if each.targets:
                found[source_tag(name, "eval_loss")] = each.loss / each.targets
                if self.has_bytes:
                    found[source_tag(name, "eval_nats_per_byte")] = each.loss / max(each.bytes, 1.0)
        return found

    @property
    def summary(self) -> str:
        """Metrics formatted as one line of text."""
        found = self.metrics
        if self.has_bytes:
            return (
                f"{found['eval/loss']:.4f} nats per token, "
                f"{found['eval/nats_per_byte']:.4f} nats per byte"
            )
        reports = (f", {name} {found[f'eval/{name}']:.4f}" for name in self.reports)
        return f"loss {found['eval/loss']:.4f}{''.join(reports)}"

    def metrics_for(self, name: str) -> dict[str, float]:
        """Return the metrics of a validation set, with tags `eval/NAME/loss` if it has a name."""
        inner = f"eval/{name}/" if name else "eval/"
        return {tag.replace("eval/", inner): value for tag, value in self.metrics.items()}

    def __add__(self, other: EvalTotals) -> EvalTotals:
        names = dict.fromkeys([*self.reports, *other.reports])
        return EvalTotals(
            self.loss + other.loss,
            self.targets + other.targets,
            self.bytes + other.bytes,
            reports={
                name: self.reports.get(name, 0.0) + other.reports.get(name, 0.0) for name in names
            },
            has_bytes=self.has_bytes and other.has_bytes,
        )


def evaluate(
    step: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    batches: Iterable[Any],
    stops: Callable[[], bool] = lambda: False,
    sources: Sequence[str] = (),
) -> EvalTotals | None:
    """Evaluate batches and return the totals; None if `stops` returned true after a batch.

    `sources` are the names of the sources of a mixture. The step returns separate sums for each
    source. On return, no device is busy, because Python may crash if it exits during a computation.
    """
    total = {name: np.zeros(()) for name in ("loss", "targets")}

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)

    # Read results one batch late, so that at most two batches are in flight.
    before: Mapping[str, jax.Array] | None = None
    try:
        for batch in batches:
            started, before = before, step(params, batch)
            if started is not None:
                add(started)
            if stops():
                return None
        if before is not None:
            add(before)
    finally:
        jax.block_until_ready(before)
    loss, targets, of_text = total.pop("loss"), total.pop("targets"), "bytes" in total or not total
    num_bytes = total.pop("bytes", np.zeros_like(loss))
    of_sources = {
        name: EvalTotals(float(loss[number]), float(targets[number]), float(num_bytes[number]))
        for number, name in enumerate(sources)
    }
    reports = {name: float(value.sum()) for name, value in total.items()}
    return EvalTotals(
        float(loss.sum()),
        float(targets.sum()),
        float(num_bytes.sum()),
        of_sources,
        reports,
        of_text,
    )


class SourceSums:
    """Sums the losses of each source between two log records. A step may lack some sources."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._sums = np.zeros((2, len(names)))
        self._pending: Mapping[str, Any] = {}

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Add the sums of the previous step, and store the sums of the step that was just
        started.
        """
        self._add()
        self._pending = metrics

    def take_metrics(self) -> dict[str, float]:
        """Wait for the newest step, and return the metrics of all steps since the last call."""
        self._add()
        (nats, targets), self._sums = self._sums, np.zeros_like(self._sums)
        found = {}
        for name, lost, count in zip(self._names, nats, targets, strict=True):
            found[source_tag(name, "targets")] = float(count)
            if count:
                found[source_tag(name, "loss")] = float(lost / count)
        return found

    def _add(self) -> None:
        metrics, self._pending = self._pending, {}
        if not self._names or not metrics:
            return
        sums = np.stack([np.asarray(metrics[tag], np.float64) for tag in BY_SOURCE])
        # Skip steps with values that are not finite; `train/loss` shows these steps.
        self._sums += np.where(np.isfinite(sums).all(axis=0), sums, 0.0)


@dataclass
class Evaluator:
    """Runs the evaluations of a training run."""

    config: EvalConfig
    datasets: Datasets
    tasks: Sequence[Task]
    console: Console
    should_stop: Callable[[], bool]
    """Returns whether all processes should stop."""
    heartbeat: Callable[[], object]
    """Called to report progress."""
    step: Any = None
    """The compiled evaluation step; None without validation documents."""

    def compile(self, steps: Steps) -> None:
        """Compile the evaluation programs for the parameters of `steps`."""
        if self._loaders:
            with self.console.stage("compiling eval step"):
                self.step = steps.compile_eval(self.config.batch_size)
        for task in self.tasks:
            with self.console.stage(f"compiling task {task.name}"):
                task.compile(steps)

    @property
    def _loaders(self) -> Mapping[str, Loader]:
        return self.datasets.eval_loaders() if self.config.batches else {}

    def metrics(
        self,
        number: int,
        params: Any,
        read: Callable[[Loader, int, int], AbstractContextManager[Any]],
    ) -> dict[str, float]:
        """Return the metrics of parameters after step `number`; empty without evaluations or after
        a stop.

        `read(loader, begin, end)` returns the batches [begin, end) of a loader.
        """
        if (found := self._losses(params, read)) is None:
            return {}
        metrics = {
            tag: value for name in found for tag, value in found[name].metrics_for(name).items()
        }
        for name, totals in found.items():
            of = f" on {name}" if name else ""
            self.console.note(f"validation{of} after step {number}: {totals.summary}")
        for task in self.tasks:
            if (answered := task.evaluate(params, self.should_stop, self.heartbeat)) is None:
                return {}
            metrics |= task_metrics(task.name, answered)
            self.console.note(
                f"task {task.name} after step {number}: accuracy {answered['accuracy']:.4f}, "
                f"by bytes {answered['accuracy_by_bytes']:.4f}, chance {answered['chance']:.4f}, "
                f"{pluralize(answered['questions'], 'question')}"
            )
        return metrics

    def _losses(
        self, params: Any, read: Callable[[Loader, int, int], AbstractContextManager[Any]]
    ) -> dict[str, EvalTotals] | None:
        """Return totals keyed by validation set. The empty name is the held-out set or the sum of
        all sets.
        """
        found: dict[str, EvalTotals] = {}
        for name, loader in self._loaders.items():
            count = min(self.config.batches, loader.num_batches)
            with read(loader, 0, count) as batches:
                totals = evaluate(self.step, params, batches, self.should_stop, loader.sources)
            if totals is None:
                return None
            found[name] = totals
        if not found:
            return {}
        # Without held-out documents, the empty name contains the sum of all sets.
        return {"": sum(found.values(), start=EvalTotals(0.0, 0.0, 0.0)), **found}
