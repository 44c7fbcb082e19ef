"""A run: the objects of its loop, and the operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from maxpipe.checkpoint.folder import BASE, AdapterBase
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.bundled_configs import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    REFERENCE_FILE,
    SAMPLES_FILE,
)
from maxpipe.config.load import to_dict
from maxpipe.config.schema import Config
from maxpipe.data.chat_spec import KEY as CONVERSATION
from maxpipe.data.loader import Batches, Datasets, Loader
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import RESTORE, Phases
from maxpipe.errors import ReplicaError
from maxpipe.evals.early_stopping import EarlyStopping
from maxpipe.evals.evaluate import Evaluator
from maxpipe.io import redact
from maxpipe.posttrain.distill import TeacherSource
from maxpipe.posttrain.rollouts import ReferenceParams, Rollouts
from maxpipe.step.build import load_batches
from maxpipe.step.replicas import format_differences
from maxpipe.step.state import TrainState
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.writers import EventLog, MetricWriter
from maxpipe.train import data_end
from maxpipe.train.bad_steps import BadStepMonitor
from maxpipe.train.data_end import SlowDataMonitor
from maxpipe.train.resume import RunStart
from maxpipe.train.samples import SampleGenerator

_RECORDS = (METRICS_FILE, f"{METRICS_FILE}.new", SAMPLES_FILE, f"{SAMPLES_FILE}.new", EVENTS_FILE)


WRITTEN_FILES = (CONFIG_FILE, REFERENCE_FILE, *_RECORDS)


@dataclass
class Run:
    """The objects of the training loop."""

    config: Config
    length: int
    """Number of steps in the config."""
    console: Console
    link: ControlChannel
    phases: Phases
    events: EventLog
    writer: MetricWriter
    open_writer: Callable[..., MetricWriter]
    """Opens the same writer for another `resume_step`."""
    checkpoints: CheckpointManager
    datasets: Datasets
    steps: Steps
    state: TrainState
    train_steps: Mapping[int, Any]
    """Compiled train steps by batch size."""
    evaluations: Evaluator
    watch: BadStepMonitor
    patience: EarlyStopping
    restore: Callable[[], RunStart]
    samples: SampleGenerator | None
    taught: TeacherSource
    """Source of teacher logits, if there is a teacher."""
    rollouts: Rollouts | None
    """Rollouts that steps train on, with prompts instead of documents."""
    reference: ReferenceParams | None
    base: AdapterBase | None
    """Base of adapters."""
    slow_data: SlowDataMonitor
    compared: int = -1
    """The last step after which replicas were compared."""
    evaluated: tuple[int, dict[str, float]] = (0, {})
    """Step and metrics of the newest evaluation."""

    @property
    def total_steps(self) -> int:
        """The last step: the configured one, or an earlier end of the data or by early stopping."""
        if self.patience.is_over:
            return self.first
        train, offset = self.datasets.train, self.watch.offset
        return data_end.last_step(train, self.length, offset, self.first)

    @property
    def first(self) -> int:
        """Number of completed steps."""
        return int(self.state.step)

    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        """Train on a batch and return the metrics."""
        run = self.train_steps[len(batch["tokens"])]
        self.state, metrics = run(self.state, batch)
        return metrics

    def train_batches(
        self, start: int, stop: int
    ) -> contextlib.AbstractContextManager[Iterator[Any]]:
        """Return the training batches from `start` to `stop - 1`.

        Document batches are prefetched, with teacher logits if there is a teacher. Batches of
        rollouts are created when they are requested.
        """
        if self.rollouts is not None:
            rollouts = self.rollouts
            return contextlib.closing(rollouts.batch(each) for each in range(start, stop))
        lessons = self.taught.lessons
        if lessons is None:
            return self.batches(self.datasets.train, start, stop)
        return lessons.batches(self.datasets.train, start, stop)

    def batches(self, loader: Loader, start: int, stop: int) -> Batches:
        """Return prefetched batches of any documents from `start` to `stop - 1`."""
        return load_batches(self.steps.batch_sharding, loader, start, stop)

    def can_stop_behind(self, step: int) -> bool:
        """Whether the run can be saved after `step`: no rollouts are partly used."""
        return self.rollouts is None or self.rollouts.begins(step + self.watch.offset)

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step`, unless it was saved; `last` waits until it is
        saved.
        """
        self.watch.settle()
        if self.config.guard.replica_check_every:
            self.compare_replicas(step)
        data = self.datasets.train.state(step + self.watch.offset)
        data["guard"] = self.state.guard.facts() | self.watch.facts()
        data |= self.taught.facts
        if self.reference is not None:
            data["reference"] = self.reference.digest
        if self.base is not None:
            data[BASE] = self.base
        if self.datasets.conversation is not None:
            data[CONVERSATION] = self.datasets.conversation
        data |= self.patience.facts()
        self.checkpoints.save(
            step,
            lambda: self.steps.to_saved(self.state),
            to_dict(redact.redact_value(self.config)),
            data,
            self.evaluated[1] if self.evaluated[0] == step else {},
            last=last,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Return validation metrics after `step`; empty if evaluation is off."""
        metrics = self.evaluations.metrics(step, self.state.params, self.batches)
        if metrics:
            self.evaluated = (step, metrics)
            self.writer.write(step, metrics)
            if self.patience.is_over_with(step, metrics):
                self.events.write("early_stop", step=step, **self.patience.event())
        return metrics

    def sample(self, step: int) -> None:
        """Print and record completions of the prompts after `step`. With rollouts, these are the
        completions that the step was trained on.
        """
        if self.rollouts is not None:
            found = self.rollouts.samples(step - 1 + self.watch.offset)
        else:
            assert self.samples is not None
            found = self.samples.take(self.state.params)
        self.writer.samples(step, found)
        for each in found:
            worth = f" (reward {each['reward']:g})" if "reward" in each else ""
            self.console.note(f"sample after step {step}: {each['prompt']}{each['text']}{worth}")

    def compare_replicas(self, step: int) -> None:
        """Check that the replicas of the state on different devices are equal.

        Raises:
            ReplicaError: some differ.
        """
        if self.compared == step:
            return
        self.compared = step
        if found := self.steps.replica_check.differences(self.state):
            self.events.write("replicas_differ", step=step, arrays=list(map(str, found)))
            raise ReplicaError(
                format_differences(found, f"{run_folder(self.config.run)}: step {step}")
            )

    def roll_back(self, bad_step: int) -> None:
        """Return to the newest checkpoint; batches from there to the bad step are skipped."""
        self.events.write("time", step=bad_step, seconds=self.phases.take())
        with self.phases.enter(RESTORE):
            self.checkpoints.wait()
            del self.state  # the devices have no memory for two states
            start = self.restore()
        self.state, first = start.state, int(start.state.step)
        self.watch.went_back(bad_step, first, start.offset, start.facts)
        self.patience = EarlyStopping(self.config.eval, self.config.checkpoint, start.waited)
        data_end.check_enough_data(self.datasets.train, self.length, self.watch.offset)
        self.compared = -1
        self.writer.close()
        self.writer = self.open_writer(resume_step=first)
