"""Loss over a fixed number of validation batches, weighted by tokens.

Losses of the sources of a mixture, from the sums that steps find for each.

Evaluation of a run beside its training: losses of documents, and answers to questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from maxpipe.config.schema import EvalConfig
from maxpipe.data.loader import Datasets, Loader
from maxpipe.evals.multiple_choice import Task, task_metrics
from maxpipe.io.formatting import pluralize
from maxpipe.step.step import BY_SOURCE, Steps
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.metrics import source_tag


@dataclass(frozen=True, slots=True)
class EvalTotals:
    """Sums over batches: `loss` in nats, `targets` tokens, `bytes` of text they stand for."""

    loss: float
    targets: float
    bytes: float
    by_source: Mapping[str, EvalTotals] = field(default_factory=dict)
    """Those of each source of a mixture, by name."""
    reports: Mapping[str, float] = field(default_factory=dict)
    """What the objective reports beside its loss, by name."""
    has_bytes: bool = True
    """Whether they are of tokens: those of pairs stand for no bytes."""

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/loss` in nats per target token and `eval/nats_per_byte` of the text.

        NaN where there is none, as of conversations without an answer: 0 would be the best loss.
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
        """The metrics in a line, for people."""
        found = self.metrics
        if self.has_bytes:
            return (
                f"{found['eval/loss']:.4f} nats per token, "
                f"{found['eval/nats_per_byte']:.4f} nats per byte"
            )
        reports = (f", {name} {found[f'eval/{name}']:.4f}" for name in self.reports)
        return f"loss {found['eval/loss']:.4f}{''.join(reports)}"

    def metrics_for(self, name: str) -> dict[str, float]:
        """The same of a set of documents that has a name, or none: `eval/NAME/loss`."""
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
    """Sums over the batches. Nothing if `stops`, which is asked after each batch, says so.

    `sources` are those of a mixture, of which the step has sums for each; none where the documents
    are of no source of it.

    No device computes when it is over: Python that ends meanwhile may crash.
    """
    total = {name: np.zeros(()) for name in ("loss", "targets")}

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)

    # Added one batch late: at most two are on the devices.
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
    """Sums over steps, from one record to the next: a step may have no row of a small source."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._sums = np.zeros((2, len(names)))
        self._pending: Mapping[str, Any] = {}

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """A step was started, and the one before it is done."""
        self._add()
        self._pending = metrics

    def take_metrics(self) -> dict[str, float]:
        """The metrics of all steps since the last call; waits for the newest."""
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
        # Of a step that is not finite `train/loss` tells.
        self._sums += np.where(np.isfinite(sums).all(axis=0), sums, 0.0)


@dataclass
class Evaluator:
    """What each evaluation of a run does."""

    config: EvalConfig
    datasets: Datasets
    tasks: Sequence[Task]
    console: Console
    should_stop: Callable[[], bool]
    """Whether all processes were asked to stop."""
    heartbeat: Callable[[], object]
    """Called as it goes on."""
    step: Any = None
    """The compiled step, if documents are read."""

    def compile(self, steps: Steps) -> None:
        """Makes the programs for parameters of these steps."""
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
        """Of parameters after a step; empty where there is nothing to evaluate, or it was stopped.

        `read` gives batches of a loader from one to before another.
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
                f"of {pluralize(answered['questions'], 'question')}"
            )
        return metrics

    def _losses(
        self, params: Any, read: Callable[[Loader, int, int], AbstractContextManager[Any]]
    ) -> dict[str, EvalTotals] | None:
        """By the name of a set of documents; under no name those held out, or all together."""
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
        # Without documents that are held out, the whole is that of all sets.
        return {"": sum(found.values(), start=EvalTotals(0.0, 0.0, 0.0)), **found}
