"""Evaluation of a run beside its training: losses of documents, and answers to questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from maxpipe.config.schema import EvalConfig
from maxpipe.data.loader import Datasets, Loader
from maxpipe.evals.evaluate import Totals, evaluate
from maxpipe.evals.tasks import Task, metrics_of
from maxpipe.io.text import counted
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console


@dataclass
class Evaluations:
    """What each evaluation of a run does."""

    config: EvalConfig
    datasets: Datasets
    tasks: Sequence[Task]
    console: Console
    stops: Callable[[], bool]
    """Whether all processes were asked to stop."""
    moved: Callable[[], object]
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
        return self.datasets.evaluated() if self.config.batches else {}

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
        metrics = {tag: value for name in found for tag, value in found[name].named(name).items()}
        for name, totals in found.items():
            of = f" on {name}" if name else ""
            self.console.note(f"validation{of} after step {number}: {totals.words}")
        for task in self.tasks:
            if (answered := task.answered(params, self.stops, self.moved)) is None:
                return {}
            metrics |= metrics_of(task.name, answered)
            self.console.note(
                f"task {task.name} after step {number}: accuracy {answered['accuracy']:.4f}, "
                f"by bytes {answered['accuracy_by_bytes']:.4f}, chance {answered['chance']:.4f}, "
                f"of {counted(answered['questions'], 'question')}"
            )
        return metrics

    def _losses(
        self, params: Any, read: Callable[[Loader, int, int], AbstractContextManager[Any]]
    ) -> dict[str, Totals] | None:
        """By the name of a set of documents; under no name those held out, or all together."""
        found: dict[str, Totals] = {}
        for name, loader in self._loaders.items():
            count = min(self.config.batches, loader.num_batches)
            with read(loader, 0, count) as batches:
                totals = evaluate(self.step, params, batches, self.stops, loader.sources)
            if totals is None:
                return None
            found[name] = totals
        if not found:
            return {}
        # Without documents that are held out, the whole is that of all sets.
        return {"": sum(found.values(), start=Totals(0.0, 0.0, 0.0)), **found}
