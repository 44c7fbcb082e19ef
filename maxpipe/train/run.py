"""The objects of a run, and the operations of the training loop on them."""

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
from maxpipe.step.state import TrainState, format_differences
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
    """A run: all objects that the training loop uses."""

    config: Config
    length: int
    """Number of steps according to the config."""
    console: Console
    link: ControlChannel
    phases: Phases
    events: EventLog
    writer: MetricWriter
    open_writer: Callable[..., MetricWriter]
    """Function that opens the same writer with a different `resume_step`."""
    checkpoints: CheckpointManager
    datasets: Datasets
    steps: Steps
    state: TrainState
    train_steps: Mapping[int, Any]
    """Compiled train steps, keyed by batch size."""
    evaluator: Evaluator
    bad_step_monitor: BadStepMonitor
    early_stopping: EarlyStopping
    restore: Callable[[], RunStart]
    sample_generator: SampleGenerator | None
    teacher_source: TeacherSource
    """Source of teacher logits; empty without a teacher."""
    rollouts: Rollouts | None
    """Rollouts that the run trains on, if the dataset contains prompts instead of documents."""
    reference: ReferenceParams | None
    base: AdapterBase | None
    """Base model of the adapters. None: the run trains no adapters."""
    slow_data: SlowDataMonitor
    last_compared_step: int = -1
    """Step after which replicas were last compared."""
    last_evaluation: tuple[int, dict[str, float]] = (0, {})
    """Step and metrics of the latest evaluation."""

    @property
    def total_steps(self) -> int:
        """Number of the last step: as configured, or earlier if the data ends or the run stops
        early.
        """
        if self.early_stopping.should_stop:
            return self.steps_done
        train, offset = self.datasets.train, self.bad_step_monitor.offset
        return data_end.last_step(train, self.length, offset, self.steps_done)

    @property
    def steps_done(self) -> int:
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
        """Return an iterator over the training batches `start` to `stop - 1`.

        Document batches are prefetched, with teacher logits if there is a teacher. Rollout batches
        are not prefetched.
        """
        if self.rollouts is not None:
            rollouts = self.rollouts
            return contextlib.closing(rollouts.batch(each) for each in range(start, stop))
        lessons = self.teacher_source.teacher_loader
        if lessons is None:
            return self.batches(self.datasets.train, start, stop)
        return lessons.batches(self.datasets.train, start, stop)

    def batches(self, loader: Loader, start: int, stop: int) -> Batches:
        """Return prefetched batches `start` to `stop - 1` of a loader."""
        return load_batches(self.steps.batch_sharding, loader, start, stop)

    def can_stop_after(self, step: int) -> bool:
        """Whether the run can be saved after `step`. False while a rollout is partly used."""
        return self.rollouts is None or self.rollouts.is_rollout_start(
            step + self.bad_step_monitor.offset
        )

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step` unless already saved; `last` waits for the end."""
        self.bad_step_monitor.flush()
        if self.config.guard.replica_check_every:
            self.compare_replicas(step)
        data = self.datasets.train.state(step + self.bad_step_monitor.offset)
        data["guard"] = self.state.guard.to_json() | self.bad_step_monitor.state_dict()
        data |= self.teacher_source.state_dict
        if self.reference is not None:
            data["reference"] = self.reference.digest
        if self.base is not None:
            data[BASE] = self.base
        if self.datasets.conversation is not None:
            data[CONVERSATION] = self.datasets.conversation
        data |= self.early_stopping.state_dict()
        self.checkpoints.save(
            step,
            lambda: self.steps.to_saved(self.state),
            to_dict(redact.redact_value(self.config)),
            data,
            self.last_evaluation[1] if self.last_evaluation[0] == step else {},
            last=last,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Return validation metrics after `step`; empty if evaluation is off."""
        metrics = self.evaluator.metrics(step, self.state.params, self.batches)
        if metrics:
            self.last_evaluation = (step, metrics)
            self.writer.write(step, metrics)
            if self.early_stopping.update(step, metrics):
                self.events.write("early_stop", step=step, **self.early_stopping.event_fields())
        return metrics

    def sample(self, step: int) -> None:
        """Print and record completions of the prompts after `step`. With rollouts, these are the
        completions on which the step was trained.
        """
        if self.rollouts is not None:
            found = self.rollouts.samples(step - 1 + self.bad_step_monitor.offset)
        else:
            assert self.sample_generator is not None
            found = self.sample_generator.generate(self.state.params)
        self.writer.samples(step, found)
        for each in found:
            worth = f" (reward {each['reward']:g})" if "reward" in each else ""
            self.console.note(f"sample after step {step}: {each['prompt']}{each['text']}{worth}")

    def compare_replicas(self, step: int) -> None:
        """Check that the replicas of the state are equal on all devices.

        Raises:
            ReplicaError: some replicas differ.
        """
        if self.last_compared_step == step:
            return
        self.last_compared_step = step
        if found := self.steps.replica_check.differences(self.state):
            self.events.write("replicas_differ", step=step, arrays=list(map(str, found)))
            raise ReplicaError(
                format_differences(found, f"{run_folder(self.config.run)}: step {step}")
            )

    def roll_back(self, bad_step: int) -> None:
        """Return to the newest checkpoint, and skip the batches from there to the bad step."""
        self.events.write("time", step=bad_step, seconds=self.phases.take_seconds())
        with self.phases.enter(RESTORE):
            self.checkpoints.wait()
            del self.state  # the devices have no memory for two states
            start = self.restore()
        self.state, first = start.state, int(start.state.step)
        self.bad_step_monitor.record_roll_back(bad_step, first, start.offset, start.guard_counts)
        self.early_stopping = EarlyStopping(
            self.config.eval, self.config.checkpoint, start.early_stopping
        )
        data_end.check_enough_data(self.datasets.train, self.length, self.bad_step_monitor.offset)
        self.last_compared_step = -1
        self.writer.close()
        self.writer = self.open_writer(resume_step=first)
