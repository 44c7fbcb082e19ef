"""Profile training steps, and publish the measured bubble.

A profile starts at the steps in `profile.at`, after SIGUSR1, and after a slow step. The loop keeps
one step in flight, so it waits for all started steps before the first and after the last profiled
step. A thread then writes the files and measures the timeline. A failure is a warning, and never
stops the run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import platform
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.config.sections.profile import ProfileConfig
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.errors import MaxpipeError
from maxpipe.io.formatting import format_duration, pluralize
from maxpipe.models.count import layer_costs
from maxpipe.profiles import capture, results
from maxpipe.profiles.capture import Metadata, TableRecord
from maxpipe.profiles.memory import memory_by_kind
from maxpipe.profiles.results import Results
from maxpipe.profiles.trace import STEP_NAME
from maxpipe.step.step import Steps
from maxpipe.telemetry import writers
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.writers import EventLog

_MEDIAN_STEPS, _MIN_STEPS = 51, 10
"""Number of recent steps whose median is computed, and the number required for a median."""
_PACE_STEPS = 3
"""Number of consecutive steps with pauses after which their time counts as the step time."""
_SMOOTHING = 0.1
"""Weight of the latest step in the moving average of step times."""
_TRACE_WAIT_SECONDS = 60.0
"""Time in seconds for which process 0 waits for the traces of other processes."""
_log = logging.getLogger("maxpipe")


@dataclass
class _ActiveProfile:
    """A profile that is being recorded."""

    step: int
    reason: str
    folder: Path
    temporary: Path
    rows: int = 0
    """Batch size of the first profiled step."""
    begun: float = 0.0
    """Time at which the first step began."""
    step_seconds: float = 0.0
    num_steps: int = 0
    wait_seconds: float = 0.0
    paused_seconds: float = 0.0
    """Time in which the loop paused, for example to evaluate."""
    older: frozenset[str] = frozenset()
    """Names of the folders of traces of earlier profiles of the same step."""


@dataclass(frozen=True)
class Outputs:
    """Places that a profiler writes to, in addition to the folder of the profile."""

    run_dir: Path
    console: Console
    events: EventLog
    show: Callable[[Callable[[], Any]], None]
    """Function that adds a summary to TensorBoard."""


class StepProfiler:
    """Profiles training steps.

    Args:
        config: config section `profile`.
        steps: the partitioned model.
        channel: control channel, which receives requests for profiles.
        outputs: console, event log and folder of the run.
        programs: compiled train steps, keyed by batch size.
        forecast: function that returns the predicted step time in seconds, or 0 if unknown.
    """

    def __init__(
        self,
        config: ProfileConfig,
        steps: Steps,
        channel: ControlChannel,
        outputs: Outputs,
        programs: Mapping[int, Any],
        forecast: Callable[[], float],
    ):
        self._config, self._steps, self._channel, self._outputs = config, steps, channel, outputs
        self._programs, self._forecast = programs, cache(forecast)
        self._at = frozenset(config.at)
        self._active: _ActiveProfile | None = None
        self._requested, self._num_requested = 0, 0
        self._reason = "signal"
        self._recent: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._begun = self._waited = self._latest_begun = 0.0
        self._in_flight = False
        self._intervals: deque[float] = deque(maxlen=_PACE_STEPS)
        self._worker: threading.Thread | None = None
        self._unwritten: _ActiveProfile | None = None
        self._latest: Results | None = None
        self._metrics: dict[str, float] = {}
        self._lock = threading.Lock()

    # Calls of the training loop.

    @property
    def is_active(self) -> bool:
        """Return whether a profile is being recorded."""
        return self._active is not None

    def starts_at(self, step: int) -> bool:
        """Return whether a profile starts with this step."""
        if self._active is not None:
            return False
        return step in self._at or self._request(step) is not None

    def start(self, step: int) -> None:
        """Start a profile. All earlier steps must be complete."""
        self.wait()  # the files of the previous profile
        reason = "config" if step in self._at else self._request(step)
        if reason != "config":
            self._reason = "signal"
            self._forget_request()
            self._num_requested += 1
        folder = capture.step_folder(self._outputs.run_dir, step)
        temporary = folder / f".trace-{jax.process_index()}"
        older = frozenset(capture.trace_folders(folder))
        active = _ActiveProfile(step, reason or "signal", folder, temporary, older=older)
        stop_error = None
        if (unwritten := self._unwritten) is not None:
            stop_error = self._stop_trace(unwritten)
            _remove_trace(unwritten)
        try:
            _start_trace(active, python=self._config.python)
        except Exception as error:  # a profiler session of another tool, or a full disk
            self._warn(f"step {step} is not profiled: {_first_line(stop_error or error)}")
            _remove_trace(active)
            return
        self._active, self._unwritten = active, None

    @contextlib.contextmanager
    def data_wait(self, step: int) -> Iterator[None]:
        """Measure the time that a step waits for its batch; the step begins with this call."""
        now = time.perf_counter()
        if self._begun and self._active is None:
            self._record(step, now - self._begun)
        elif self._latest_begun and not self._channel.step_seconds:
            self._record_pace(now - self._latest_begun)
        self._latest_begun = now
        # Without a step in flight, the loop does not wait: this step's time is only that of its
        # dispatch.
        self._begun = now if self._in_flight else 0.0
        yield
        self._waited = time.perf_counter() - now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from a profile, and the current step from the
        recorded times.
        """
        start = time.perf_counter()
        yield
        self._begun, self._in_flight = 0.0, False
        if (active := self._active) is not None:
            active.paused_seconds += time.perf_counter() - max(start, active.begun)

    @contextlib.contextmanager
    def step(self, step: int, rows: int) -> Iterator[None]:
        """Run a step of `rows` sequences inside the context, and annotate it in a profile."""
        active = self._active
        self._in_flight = True
        if active is None:
            yield
            return
        active.rows = active.rows or rows
        with jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=step):
            yield
        active.num_steps += 1
        active.wait_seconds += self._waited

    def ends_before(self, rows: int) -> bool:
        """Return whether a profile ends because the next step has another batch size. The program
        of that step is not the profiled one.
        """
        active = self._active
        return active is not None and active.rows not in (0, rows)

    def ends_after(self, step: int, last: int) -> bool:
        """Return whether a profile ends with this step; `last` is the last step of the run."""
        active = self._active
        return active is not None and step >= min(last, active.step + self._config.steps - 1)

    def finish(self) -> None:
        """End the profile. The profiled steps must be complete. A thread measures the timeline."""
        active, self._active = self._active, None
        assert active is not None
        seconds = time.perf_counter() - active.begun - active.paused_seconds
        active.step_seconds = seconds / active.num_steps
        if error := self._stop_trace(active):
            self._warn(f"the profile of step {active.step} is lost: {_first_line(error)}")
            _remove_trace(active)
            return
        self._worker = threading.Thread(target=self._write, args=(active,), name="profile")
        self._worker.start()

    def _stop_trace(self, active: _ActiveProfile) -> Exception | None:
        """Write the trace, and return the error if this fails.

        Before version 0.12, jax then keeps the trace and starts no other one. The start of the next
        profile therefore stops the trace again.
        """
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._unwritten = active
            return error
        return None

    def wait(self) -> None:
        """Wait until the files of the latest profile are written."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def discard(self, reason: str = "the run stopped") -> None:
        """End a profile whose steps are not all complete, without writing it."""
        active, self._active = self._active, None
        self._begun = self._latest_begun = 0.0
        self._in_flight = False
        if active is not None:
            self._stop_trace(active)
            _remove_trace(active)
            self._warn(f"the profile of step {active.step} was discarded, because {reason}")
        self.wait()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of profiles that were completed since the last call."""
        with self._lock:
            taken, self._metrics = self._metrics, {}
            return taken

    def closing_lines(self) -> list[str]:
        """Return the summary of the latest profile, or an empty list without a profile."""
        if self._latest is None or self._latest.bubble is None:
            return []
        step = self._latest.capture.metadata.step
        return [f"profile of step {step}: {self._latest.bubble.summary()}"]

    # Requests.

    def _request(self, step: int) -> str | None:
        """Return the reason for a requested profile that is due at this step, or None."""
        due = max(self._requested, self._channel.profile_at)
        if not due or step < due:
            return None
        if self._num_requested >= self._config.max_profiles:
            self._forget_request()
            limit = f"profile.max_profiles = {self._config.max_profiles}"
            self._warn(f"a request for a profile is ignored: {limit}. Raise the limit.")
            return None
        return "slow step" if self._reason == "slow step" else "signal"

    def _forget_request(self) -> None:
        self._requested = 0
        self._channel.clear_profile_request()

    def _record_pace(self, seconds: float) -> None:
        """Record the time between two steps of a run that pauses at every step or every other step.

        After a pause, the loop dispatches a step without waiting. Hence, only the sum of two
        intervals contains the time of a step.
        """
        self._intervals.append(seconds)
        if len(self._intervals) == _PACE_STEPS:
            pairs = itertools.pairwise(self._intervals)
            self._channel.step_seconds = min(map(sum, pairs)) / 2

    def _record(self, step: int, seconds: float) -> None:
        """Record the time of the step before `step`, and request a profile if it was slow."""
        mean = self._channel.step_seconds
        self._channel.step_seconds = mean + _SMOOTHING * (seconds - mean) if mean else seconds
        factor, recent = self._config.slow_step, self._recent
        slow = factor > 0 and len(recent) >= _MIN_STEPS
        slow = slow and seconds > factor * statistics.median(recent)
        recent.append(seconds)
        if not slow or self._channel.index != 0 or self._num_requested >= self._config.max_profiles:
            return
        self._reason = "slow step"
        if self._channel.count == 1:
            self._requested = step + 1
        else:
            self._channel.request_profile()

    def _median(self) -> float:
        return statistics.median(self._recent) if len(self._recent) >= _MIN_STEPS else 0.0

    # Files. These methods run in a thread.

    def _write(self, active: _ActiveProfile) -> None:
        try:
            _move_trace(active)
            if jax.process_index() != 0:
                return
            text = self._programs[active.rows].as_text()
            metadata = describe(
                self._steps.with_batch_size(active.rows),
                text,
                step=active.step,
                num_steps=active.num_steps,
                reason=active.reason,
                step_seconds=active.step_seconds,
                wait_seconds=active.wait_seconds / active.num_steps,
                median_seconds=self._median(),
                forecast_seconds=self._forecast(),
                paused_seconds=active.paused_seconds / active.num_steps,
            )
            capture.write_program(active.folder, text)
            capture.write_memory(
                active.folder, step_memory(self._steps, active.rows, self._programs[active.rows])
            )
            capture.write_metadata(active.folder, metadata)
            self._outputs.events.write(
                "profile",
                step=active.step,
                steps=active.num_steps,
                reason=active.reason,
                folder=str(active.folder),
            )
            self._await_traces(active.folder)
            self._publish(results.analyze(capture.read_capture(active.folder)))
        except (OSError, MaxpipeError) as error:
            self._warn(f"the profile of step {active.step} is incomplete: {_first_line(error)}")
        except Exception as error:  # a new version of jax may change the trace
            text = f"the profile of step {active.step} was written, but not measured"
            self._warn(f"{text}: {type(error).__name__}: {_first_line(error)}")

    def _await_traces(self, folder: Path) -> None:
        end = time.monotonic() + _TRACE_WAIT_SECONDS
        while capture.num_traces(folder) < jax.process_count() and time.monotonic() < end:
            time.sleep(0.2)

    def _publish(self, found: Results) -> None:
        """Write the results, and report them in the console, events, metrics and TensorBoard."""
        outputs, metadata = self._outputs, found.capture.metadata
        found.write()
        if found.bubble is not None:
            with self._lock:
                self._latest, self._metrics = found, {"perf/bubble": found.bubble.measured}
        count = pluralize(metadata.num_steps, "step")
        where = found.capture.folder
        outputs.console.note(f"profiled {count} from step {metadata.step}, files in {where}")
        if found.bubble is None:
            outputs.console.note(f"no timeline: {found.reason}")
            return
        outputs.console.note(found.bubble.summary())
        drawing, about = found.draw_overview(), found.bubble.summary()
        outputs.show(lambda: writers.image("profile/timeline", drawing, about))
        self._raise_alarm(found)

    def _raise_alarm(self, found: Results) -> None:
        metadata, bubble = found.capture.metadata, found.bubble
        expected = metadata.median_seconds or metadata.forecast_seconds
        seconds = metadata.step_seconds
        if not self._config.alarm or not expected or bubble is None:
            return
        if seconds <= self._config.alarm * expected:
            return
        cause = bubble.fault
        name = "the median of earlier steps" if metadata.median_seconds else "the forecast"
        stage = None if cause is None else cause.stage
        self._outputs.events.write(
            "slow_steps",
            step=metadata.step,
            seconds=seconds,
            expected_seconds=expected,
            cause=str(cause or "unknown"),
            **({} if stage is None else {"stage": stage}),
        )
        self._warn(
            f"slow steps: {format_duration(seconds)} from step {metadata.step}, "
            f"{seconds / expected:.2f} x {name}; cause: {cause or 'no slow stage or message'}"
        )

    def _warn(self, text: str) -> None:
        self._outputs.console.warn(f"profile: {text}")


def describe(
    steps: Steps,
    text: str,
    *,
    step: int,
    num_steps: int,
    reason: str,
    step_seconds: float,
    wait_seconds: float,
    median_seconds: float = 0.0,
    forecast_seconds: float = 0.0,
    paused_seconds: float = 0.0,
) -> Metadata:
    """Return the metadata of a profile of a program with this optimized HLO text.

    `steps` has the batch size of the profiled steps, and all other arguments are fields of
    `Metadata`.
    """
    mesh, layout = steps.param_layout.mesh, steps.engine.layout
    costs = layer_costs(steps.param_layout.decoder.model, steps.shape[1])
    total = np.concatenate([[0.0], np.cumsum(costs)])
    first, sizes = np.asarray(layout.first_layer), np.asarray(layout.chunk_sizes)
    devices = list(mesh.devices.flat)
    is_cpu = devices[0].platform == "cpu"
    return Metadata(
        step,
        num_steps,
        reason,
        devices[0].platform,
        capture.module_name(text),
        dict(mesh.shape),
        [[device.process_index, _local_index(device)] for device in devices],
        is_cpu,
        TableRecord.from_schedule(steps.train_schedule, total[first + sizes] - total[first], sizes),
        step_seconds,
        wait_seconds,
        median_seconds,
        forecast_seconds,
        paused_seconds,
    )


def step_memory(steps: Steps, rows: int, program: Any) -> dict[str, float]:
    """Return the memory of one device during a train step by kind, in bytes.

    Args:
        steps: the partitioned model.
        rows: batch size of the compiled step.
        program: compiled train step.
    """
    state = steps.abstract_state
    arguments = {
        "parameters": state.params,
        "optimizer state": (state.optimizer, state.guard, state.step),
        "batch": steps.abstract_batch(rows),
    }
    return memory_by_kind(
        {kind: jax.tree.leaves(tree) for kind, tree in arguments.items()}, program
    )


def profile_steps(
    folder: Path, steps: Steps, program: Any, run_step: Callable[[], Any], num_steps: int
) -> Results:
    """Profile steps outside a training run in a single process, and return the results.

    Args:
        folder: folder of the profile, which is created.
        steps: the partitioned model.
        program: compiled train step.
        run_step: function that runs one step, and returns when the step is complete.
        num_steps: number of profiled steps.
    """
    active = _ActiveProfile(0, "config", folder, folder / ".trace-0", num_steps=num_steps)
    _start_trace(active, python=False)
    for number in range(num_steps):
        with jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number):
            run_step()
    active.step_seconds = (time.perf_counter() - active.begun) / num_steps
    jax.profiler.stop_trace()
    _move_trace(active)
    text = program.as_text()
    capture.write_program(folder, text)
    metadata = describe(
        steps,
        text,
        step=0,
        num_steps=num_steps,
        reason="config",
        step_seconds=active.step_seconds,
        wait_seconds=0.0,
    )
    capture.write_memory(folder, step_memory(steps, steps.shape[0], program))
    capture.write_metadata(folder, metadata)
    return results.analyze(capture.read_capture(folder))


def _move_trace(active: _ActiveProfile) -> None:
    """Move this process's trace to the folder where XProf finds it.

    All processes use the folder that process 0 creates.
    """
    name = capture.trace_name(platform.node(), jax.process_index())
    traces = list(active.temporary.rglob("*.xplane.pb"))
    if not traces:
        raise OSError("the profiler wrote no trace")
    end = time.monotonic() + _TRACE_WAIT_SECONDS
    # Folders are sorted by name, and the newest one must be the last one.
    names = [time.strftime("%Y_%m_%d_%H_%M_%S"), *(f"{name}_1" for name in active.older)]
    target = capture.trace_folder(active.folder, max(names))
    while jax.process_index() != 0 and time.monotonic() < end:
        if shared := set(capture.trace_folders(active.folder)) - active.older:
            target = capture.trace_folder(active.folder, max(shared))
            break
        time.sleep(0.2)
    target.mkdir(parents=True, exist_ok=True)
    shutil.move(traces[0], target / name)
    shutil.rmtree(active.temporary, ignore_errors=True)


def _start_trace(active: _ActiveProfile, *, python: bool) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    shutil.rmtree(active.temporary, ignore_errors=True)  # a killed process may leave a trace
    active.temporary.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(active.temporary, profiler_options=options)
    active.begun = time.perf_counter()


def _remove_trace(active: _ActiveProfile) -> None:
    """Delete an unfinished trace, and the folder of the profile if it is empty."""
    shutil.rmtree(active.temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        active.folder.rmdir()


def _local_index(device: Any) -> int:
    """Return the index of a device among the devices of its process, as in a trace."""
    index = device.local_hardware_id
    return int(device.id if index is None else index)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
