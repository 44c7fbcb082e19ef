"""Run the training loop, and finish the run.

Step, parameters, optimizer state and data position are saved in one checkpoint, and all randomness
depends only on the seed and the step. A run that was killed and resumed therefore produces results
that are bitwise identical to those of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from maxpipe.config.load import LoadedConfig
from maxpipe.distributed.phases import DATA, EVAL, LOOP, PROFILE, ROLLOUT, SAVE, STEP
from maxpipe.evals.evaluate import SourceSums
from maxpipe.hardware import peak_flops
from maxpipe.io.formatting import pluralize
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.registry import describe
from maxpipe.step.step import BY_SOURCE
from maxpipe.telemetry.metrics import source_tag
from maxpipe.train.bad_steps import Rollback
from maxpipe.train.memory_check import explain_allocation_errors
from maxpipe.train.run import Run
from maxpipe.train.session import open_session
from maxpipe.train.set_up import set_up


def train(loaded: LoadedConfig) -> None:
    """Train or resume the run.

    Raises:
        ConfigError: the config does not match the machine, the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
        Preemption: the run received a stop request and saved its state.
        UserInterrupt: the run was interrupted by Ctrl-C and saved its state.
        DivergenceError: the config requires the run to stop after a bad step.
        ReplicaError: replicas of an array differ between devices.
    """
    with open_session(loaded) as session, explain_allocation_errors(session.config):
        run = set_up(session)
        with session.phases.enter(LOOP):
            _run_loop(run)


def _run_loop(run: Run) -> None:
    """Train to the last step, restarting the loop after each rollback."""
    while True:
        try:
            return _train_steps(run)
        except Rollback as bad:
            step = bad.step
        run.roll_back(step)


def _train_steps(run: Run) -> None:
    """Run the training loop once, from the current step to the last step."""
    config, session, early_stopping = run.config, run.session, run.validation.early_stopping
    first, offset = run.steps_done, run.bad_step_monitor.offset
    meter = ThroughputMeter(run)
    evaluated: dict[str, float] = {}
    if first and early_stopping.needs_evaluation(first):  # stopped before the evaluation
        with meter.paused(EVAL):
            evaluated = run.evaluate(first)
    last = run.total_steps
    session.console.begin(first, last)
    if session.channel.should_stop() and first < last:
        _save_and_stop(run, first)
    with run.train_batches(first + offset, last + offset) as batches:
        for step in range(first + 1, last + 1):
            if not meter.run_rollout(step):
                _save_and_stop(run, step - 1)
            if run.profiler.starts_at(step):
                with meter.paused(PROFILE):
                    run.profiler.start(step)
            with run.profiler.data_wait(step):
                batch = meter.next_batch(batches)
            if run.profiler.ends_before(len(batch["tokens"])):
                with meter.paused(PROFILE):
                    run.profiler.finish()
            session.phases.progress(step)
            with session.phases.enter(STEP), run.profiler.step(step, len(batch["tokens"])):
                metrics = run.train_step(step, batch)
                meter.record_step(metrics, len(batch["tokens"]))
            if run.profiler.ends_after(step, last):
                with meter.paused(PROFILE):
                    run.profiler.finish()
            run.bad_step_monitor.record_step(step, metrics)
            if step % config.log.every == 0 or step == last:
                meter.report(step)
            if config.eval.every and step % config.eval.every == 0:
                with meter.paused(EVAL):
                    evaluated = run.evaluate(step)
                last = step if early_stopping.should_stop else last
            if config.eval.sample_every and step % config.eval.sample_every == 0:
                with meter.paused(EVAL):
                    run.sample(step)
            if config.guard.replica_check_every and step % config.guard.replica_check_every == 0:
                with meter.paused(LOOP):
                    run.compare_replicas(step)
            run.checkpoints.poll()
            if step < last and run.can_stop_after(step):  # the last step is saved after evaluation
                if run.checkpoints.should_save(step):
                    with meter.paused(SAVE):
                        run.save(step)
                if session.channel.should_stop():
                    _save_and_stop(run, step)
            if step == last:
                break
    run.bad_step_monitor.flush()
    run.finish_profiles(last)
    if not (config.eval.every and last % config.eval.every == 0 and evaluated):
        with meter.paused(EVAL):
            evaluated = run.evaluate(last)
    if session.channel.should_stop():
        _save_and_stop(run, last)
    _save_and_wait(run, last)
    session.events.write("done", step=last)
    session.console.note(_closing_message(run, evaluated))


def _save_and_stop(run: Run, step: int) -> None:
    session = run.session
    session.console.note(f"stop requested: saving step {step}")
    _save_and_wait(run, step)
    session.events.write("preempted", step=step)
    raise session.channel.stop_error(
        f"{session.run_dir}: stopped after step {step} of {run.total_steps}\n"
        "  The state is saved.\n"
        "  Run the same command again to resume."
    )


def _save_and_wait(run: Run, step: int) -> None:
    with run.session.phases.enter(SAVE):
        run.save(step, last=True)
    run.session.record_time(step)


def _closing_message(run: Run, evaluated: dict[str, float]) -> str:
    lines = [f"done: {pluralize(run.total_steps, 'step')}, files in {run.session.run_dir}"]
    if run.validation.early_stopping.should_stop:
        lines.append(run.validation.early_stopping.message())
    elif run.total_steps < run.configured_steps:
        lines.append(f"all documents were read: the run ended before step {run.configured_steps}")
    if "eval/nats_per_byte" in evaluated:
        lines.append(f"final validation loss {evaluated['eval/nats_per_byte']:.4f} nats per byte")
        if (entropy := run.datasets.unigram_entropy) is not None:
            lines[-1] += f" (unigram byte entropy of the text: {entropy:.4f})"
    return "\n".join([*lines, *run.profiler.closing_lines()])


def memory_in_use() -> dict[str, float]:
    """Return device and host memory in use, keyed by metric tag. CPU devices report no memory."""
    memory = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    if peaks:
        memory["memory/device_peak_bytes"] = float(max(peaks))
    with contextlib.suppress(OSError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory["memory/host_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return memory


def _data_metrics(run: Run, step: int) -> dict[str, float]:
    """Return the number of epochs and tokens read from each source up to a step."""
    train = run.datasets.train
    counts = train.stream.samples_before(
        train.ramp.sequences_before(step + run.bad_step_monitor.offset)
    )
    metrics = {}
    for name, count in counts.items():
        epochs = count / len(train.stream.part(name).sequences)
        if not name:
            return {"train/epochs": epochs}
        metrics[source_tag(name, "epochs")] = epochs
        metrics[source_tag(name, "tokens")] = float(count * run.steps.shape[1])
    return metrics


_DRIFT_RECORDS, _DRIFT = 20, 0.1
"""Number of records whose median step times are compared, and the relative change that is
reported."""
_DRIFT_DEVIATIONS = 2.5
"""Change that noise does not cause, relative to the median deviation of the step times. For normal
noise, this is 4 standard deviations of the difference between two medians of 20 values."""


class StepTimeDrift:
    """Detects slow changes of the step time over a run, such as those of a device that gets hot.

    The median of the newest records is compared with the median of the first records. A change is
    reported if it exceeds 10% and the noise. The next records then become the new reference.
    """

    def __init__(self) -> None:
        self._reference: list[float] = []
        self._newest: deque[float] = deque(maxlen=_DRIFT_RECORDS)

    def add(self, seconds: float) -> tuple[float, float] | None:
        """Add the step time of a record; return the medians before and after a change, or None."""
        if len(self._reference) < _DRIFT_RECORDS:
            self._reference.append(seconds)
            return None
        self._newest.append(seconds)
        if len(self._newest) < _DRIFT_RECORDS:
            return None
        before, after = statistics.median(self._reference), statistics.median(self._newest)
        deviation = statistics.median(abs(each - before) for each in self._reference)
        if abs(after - before) <= max(_DRIFT * before, _DRIFT_DEVIATIONS * deviation):
            return None
        self._reference.clear()
        self._newest.clear()
        return before, after


class ThroughputMeter:
    """Measures step time and throughput between reports."""

    def __init__(self, run: Run):
        self._run, self._phases = run, run.session.phases
        self._latest: dict[str, jax.Array] = {}
        self._source_sums = SourceSums(run.datasets.train.sources)
        mesh = run.steps.param_layout.mesh
        self._batch_size, self._sequence_length = run.steps.shape
        model = describe(run.config.model)
        self._device_flops_per_token = (
            train_flops_per_token(model, self._sequence_length) / mesh.size
        )
        self._peak_flops = peak_flops(mesh.devices.flat[0].device_kind)
        self._idle_fraction = functools.cache(
            lambda rows: run.steps.with_batch_size(rows).train_schedule.idle_fraction()
        )
        self._drift, self._is_first_record = StepTimeDrift(), True
        self._restart()

    def _restart(self) -> None:
        self._start, self._steps, self._data_wait_seconds = time.perf_counter(), 0, 0.0
        self._num_sequences, self._rollout_seconds = 0, 0.0

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and record the time spent waiting for data."""
        start = time.perf_counter()
        with self._phases.enter(DATA):
            batch = next(batches)
        self._data_wait_seconds += time.perf_counter() - start
        return batch

    def run_rollout(self, step: int) -> bool:
        """Generate the rollouts for a step if needed; return False if the run must stop."""
        run, rollouts = self._run, self._run.post_training.rollouts
        position = step - 1 + run.bad_step_monitor.offset
        if rollouts is None or not rollouts.is_rollout_start(position):
            return True
        start = time.perf_counter()
        with self.paused(ROLLOUT):
            completed = rollouts.generate(
                run.state.params, position, run.session.channel.should_stop
            )
        self._rollout_seconds += time.perf_counter() - start
        return completed

    def record_step(self, metrics: dict[str, jax.Array], rows: int) -> None:
        """Record a started step, and wait for the previous one to limit the number of steps in
        flight.
        """
        if self._latest:
            jax.block_until_ready(self._latest)
        self._source_sums.add_step(metrics)
        self._latest = metrics
        self._steps += 1
        self._num_sequences, self._batch_size = self._num_sequences + rows, rows

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Attribute the time spent inside the context to `phase` instead of to steps."""
        with self._phases.enter(STEP):
            jax.block_until_ready(self._latest)
        start = time.perf_counter()
        with self._run.profiler.paused(), self._phases.enter(phase):
            yield
        self._start += time.perf_counter() - start

    def report(self, step: int) -> None:
        """Write and print the metrics of the latest step, and the rates since the last report."""
        run, session = self._run, self._run.session
        with self._phases.enter(STEP):
            metrics = {
                tag: float(value) for tag, value in self._latest.items() if tag not in BY_SOURCE
            }
            metrics |= self._source_sums.take_metrics()
        seconds = time.perf_counter() - self._start
        tokens_per_second = self._num_sequences * self._sequence_length / seconds
        device_flops = self._device_flops_per_token * tokens_per_second
        run.slow_data.record_steps(self._data_wait_seconds, seconds)
        sequences = run.bad_step_monitor.sequences_done(step)
        metrics |= {
            "train/tokens": float(sequences * self._sequence_length),
            "perf/step_s": seconds / self._steps,
            "perf/data_wait_s": self._data_wait_seconds / self._steps,
            "perf/tokens_per_s": tokens_per_second,
            "perf/tflops_per_device": device_flops / 1e12,
            "pipe/bubble_pct": 100 * self._idle_fraction(self._batch_size),
        }
        if run.datasets.train.ramp.stages:
            metrics["train/batch_size"] = float(self._batch_size)
        if (rollouts := run.post_training.rollouts) is not None:
            metrics |= rollouts.metrics(step - 1 + run.bad_step_monitor.offset)
            metrics["perf/rollout_s"] = self._rollout_seconds / self._steps
        metrics |= _data_metrics(run, step)
        metrics |= run.post_training.teacher_source.take_metrics()
        metrics |= run.layer_recorder.take_metrics(run.writer)
        metrics |= memory_in_use() | run.profiler.take_metrics()
        if self._peak_flops is not None:
            metrics["perf/mfu"] = device_flops / self._peak_flops
        session.record_time(step)
        self._report_drift(step, metrics["perf/step_s"])
        run.writer.write(step, metrics)
        session.console.step(step, metrics)
        self._restart()

    def _report_drift(self, step: int, seconds: float) -> None:
        """Write an event if the step time has changed. The first record includes warm-up."""
        if self._is_first_record:
            self._is_first_record = False
        elif medians := self._drift.add(seconds):
            before, after = medians
            events = self._run.session.events
            events.write("drift", step=step, seconds=after, seconds_before=before)
