"""Objects of a training run, and the operations that the training loop performs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from maxpipe.checkpoint.folder import AdapterBase
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.config.schema import Config
from maxpipe.config.sections.train import total_steps
from maxpipe.data.loader import Batches, Datasets, Loader
from maxpipe.distributed.phases import RESTORE
from maxpipe.errors import Code, ReplicaError
from maxpipe.evals.early_stopping import EarlyStopping
from maxpipe.evals.evaluate import Evaluator
from maxpipe.posttrain.distill import TeacherSource
from maxpipe.posttrain.rollouts import ReferenceParams, Rollouts
from maxpipe.step.build import load_batches
from maxpipe.step.replica_check import format_differences
from maxpipe.step.state import TrainState
from maxpipe.step.step import LAYER_STATS, Steps
from maxpipe.telemetry.writers import MetricWriter
from maxpipe.train import data_end
from maxpipe.train.bad_steps import BadStepMonitor
from maxpipe.train.data_end import SlowDataMonitor
from maxpipe.train.layer_records import LayerRecorder
from maxpipe.train.profiler import StepProfiler
from maxpipe.train.resume import restore_or_init
from maxpipe.train.samples import SampleGenerator
from maxpipe.train.session import Session, saved_config, saved_data


@dataclass
class Validation:
    """Objects for evaluation and sample generation during training."""

    evaluator: Evaluator
    early_stopping: EarlyStopping
    sample_generator: SampleGenerator | None
    latest: tuple[int, dict[str, float]] = (0, {})
    """Step and metrics of the latest evaluation."""


@dataclass(frozen=True)
class PostTraining:
    """Rollouts, and the models that a run uses in addition to its own: teacher, reference and
    base.
    """

    teacher_source: TeacherSource
    """Source of teacher logits; empty if there is no teacher."""
    rollouts: Rollouts | None
    """Rollouts to train on, if the dataset contains prompts instead of documents, else None."""
    reference: ReferenceParams | None
    base: AdapterBase | None
    """Base model of the adapters, or None if the run trains no adapters."""


@dataclass
class Run:
    """A run, with all objects that the training loop uses."""

    session: Session
    steps: Steps
    train_steps: Mapping[int, Any]
    """Compiled train steps, keyed by batch size."""
    state: TrainState
    datasets: Datasets
    slow_data: SlowDataMonitor
    checkpoints: CheckpointManager
    writer: MetricWriter
    bad_step_monitor: BadStepMonitor
    validation: Validation
    post_training: PostTraining
    layer_recorder: LayerRecorder
    profiler: StepProfiler
    last_compared_step: int = -1
    """Step after which the replicas of the state were last compared."""

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.session.config

    @property
    def configured_steps(self) -> int:
        """Number of steps according to the config."""
        return total_steps(self.config.train)

    @property
    def total_steps(self) -> int:
        """Index of the last step: the configured number of steps, or fewer if the data ends or the
        run stops early.
        """
        if self.validation.early_stopping.should_stop:
            return self.steps_done
        train, offset = self.datasets.train, self.bad_step_monitor.offset
        return data_end.last_step(train, self.configured_steps, offset, self.steps_done)

    @property
    def steps_done(self) -> int:
        """Number of completed steps."""
        return int(self.state.step)

    def train_step(self, step: int, batch: Any) -> dict[str, jax.Array]:
        """Train on the batch of a step and return the metrics."""
        # A profile describes the operations of the ordinary step only.
        records = self.layer_recorder.is_due(step) and not self.profiler.is_active
        compiled = (self.layer_recorder if records else self).train_steps[len(batch["tokens"])]
        self.state, metrics = compiled(self.state, batch)
        self.layer_recorder.flush(self.writer)  # while the devices compute this step
        if records:
            self.layer_recorder.add(step, metrics.pop(LAYER_STATS))
        return metrics

    def train_batches(
        self, start: int, stop: int
    ) -> contextlib.AbstractContextManager[Iterator[Any]]:
        """Return an iterator over the training batches `start` to `stop - 1`.

        Document batches are prefetched, and include teacher logits if the run has a teacher.
        Rollout batches are not prefetched.
        """
        if (rollouts := self.post_training.rollouts) is not None:
            return contextlib.closing(rollouts.batch(index) for index in range(start, stop))
        if (teacher := self.post_training.teacher_source.teacher_loader) is not None:
            return teacher.batches(self.datasets.train, start, stop)
        return self.batches(self.datasets.train, start, stop)

    def batches(self, loader: Loader, start: int, stop: int) -> Batches:
        """Return prefetched batches `start` to `stop - 1` of a loader."""
        return load_batches(self.steps.batch_sharding, loader, start, stop)

    def can_stop_after(self, step: int) -> bool:
        """Return whether the state can be saved after `step`; False inside a rollout's batches."""
        rollouts = self.post_training.rollouts
        return rollouts is None or rollouts.is_rollout_start(step + self.bad_step_monitor.offset)

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step`, unless it is already saved.

        If `last` is set, wait until the checkpoint is complete.
        """
        self.bad_step_monitor.flush()
        self.layer_recorder.flush(self.writer)
        if self.config.guard.replica_check_every:
            self.compare_replicas(step)
        data = saved_data(
            self.config,
            self.datasets.train.state(step + self.bad_step_monitor.offset),
            self.state.guard.to_json() | self.bad_step_monitor.state_dict(),
            self.post_training.base,
            self.datasets.conversation,
        )
        data |= self.post_training.teacher_source.state_dict
        if self.post_training.reference is not None:
            data["reference"] = self.post_training.reference.digest
        data |= self.validation.early_stopping.state_dict()
        evaluated_step, metrics = self.validation.latest
        self.checkpoints.save(
            step,
            lambda: self.steps.to_saved(self.state),
            saved_config(self.config),
            data,
            metrics if evaluated_step == step else {},
            last=last,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate after `step` and return the metrics; empty if evaluation is disabled."""
        validation = self.validation
        metrics = validation.evaluator.metrics(step, self.state.params, self.batches)
        if metrics:
            validation.latest = (step, metrics)
            self.writer.write(step, metrics)
            if validation.early_stopping.update(step, metrics):
                fields = validation.early_stopping.event_fields()
                self.session.events.write("early_stop", step=step, **fields)
        return metrics

    def sample(self, step: int) -> None:
        """Print and record completions of the prompts after `step`.

        If the run trains on rollouts, these are the completions that the step was trained on.
        """
        if (rollouts := self.post_training.rollouts) is not None:
            samples = rollouts.samples(step - 1 + self.bad_step_monitor.offset)
        else:
            assert self.validation.sample_generator is not None
            samples = self.validation.sample_generator.generate(self.state.params)
        self.writer.samples(step, samples)
        for sample in samples:
            reward = f" (reward {sample['reward']:g})" if "reward" in sample else ""
            text = f"{sample['prompt']}{sample['text']}{reward}"
            self.session.console.note(f"sample after step {step}: {text}")

    def compare_replicas(self, step: int) -> None:
        """Check that replicas of the state are identical on all devices.

        Raises:
            ReplicaError: some replicas differ.
        """
        if self.last_compared_step == step:
            return
        self.last_compared_step = step
        if differences := self.steps.replica_check.differences(self.state):
            self.session.events.write(
                "replicas_differ", step=step, arrays=list(map(str, differences))
            )
            where = f"{self.session.run_dir}: step {step}"
            raise ReplicaError(Code.RUN_REPLICAS, format_differences(differences, where))

    def finish_profiles(self, step: int) -> None:
        """Discard a profile that the last step interrupts, and record the metrics of others."""
        self.profiler.discard()
        if metrics := self.profiler.take_metrics():
            self.writer.write(step, metrics)

    def roll_back(self, bad_step: int) -> None:
        """Restore the newest checkpoint, and skip the batches between it and the bad step,
        inclusive.
        """
        session = self.session
        session.record_time(bad_step)
        self.profiler.discard(f"step {bad_step} was bad")
        with session.phases.enter(RESTORE):
            self.checkpoints.wait()
            del self.state  # the devices do not have enough memory for two states
            start = restore_or_init(
                session.loaded,
                self.steps,
                self.checkpoints,
                self.datasets,
                session.console,
                self.post_training.teacher_source.teacher,
            )
        self.state, first = start.state, int(start.state.step)
        self.bad_step_monitor.record_rollback(bad_step, first, start.offset, start.guard_counts)
        self.validation.early_stopping = EarlyStopping(
            self.config.eval, self.config.checkpoint, start.early_stopping
        )
        data_end.check_enough_data(
            self.datasets.train, self.configured_steps, self.bad_step_monitor.offset
        )
        self.last_compared_step = -1
        self.layer_recorder.discard()
        self.writer.close()
        self.writer = session.open_writer(first, self.writer.observers)
