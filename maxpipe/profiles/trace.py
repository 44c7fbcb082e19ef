"""Read the device operations and steps in a trace that jax's profiler wrote (`*.xplane.pb`).

A trace has one plane for each device and one for the host. The layouts differ:

- TPU: the plane `/device:TPU:0` has the lines `XLA Modules` (executions of programs), `XLA Ops`
  (nested operations, named by their HLO text) and `Async XLA Ops` (transfers in flight).
- GPU: the plane `/device:GPU:0` has one line for each stream. The statistics `hlo_op` and
  `hlo_module` of a kernel name its operation.
- CPU: the plane `/host:CPU` has one line for each thread. The statistics `hlo_op`, `hlo_module`,
  `run_id` and `device_ordinal` of an event name its operation, its execution and its device.

Source: `xla/tsl/profiler/utils/xplane_schema.cc`.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEP_NAME = "train"
"""Name of the host annotation around each profiled step."""
_DEVICE = re.compile(r"^/device:(TPU|GPU):(\d+)$")
_HLO_NAME = re.compile(r"^%?([\w.\-]+) = ")
_DERIVED_LINES = frozenset(
    (
        *("XLA Modules", "XLA Ops", "XLA TraceMe", "Steps", "Framework Ops"),
        *("Framework Name Scope", "TensorFlow Ops", "TensorFlow Name Scope", "Source code"),
        *("Launch Stats", "Source", "Scope range ID"),
    )
)
"""Lines of a GPU plane that repeat the kernels of its streams."""

_statistics_types: set[type] = set()


class Event(NamedTuple):
    """Execution of an operation on a device. Times are in nanoseconds."""

    op: str
    start: float
    stop: float
    run: int
    """Execution of the program, or -1 if unknown."""
    lane: int
    """Line of the trace that contains the event."""
    in_flight: bool = False
    """Whether the event is a transfer that runs in parallel with the operations of the device."""


@dataclass
class DeviceTrace:
    """Operations that one device executed, as arrays sorted by start time."""

    names: list[str]
    """Names of the operations, indexed by `op`."""
    op: np.ndarray
    start: np.ndarray
    """Start times in seconds."""
    stop: np.ndarray
    own: np.ndarray
    """Duration in seconds without nested events."""
    run: np.ndarray
    lane: np.ndarray
    in_flight: np.ndarray

    def __len__(self) -> int:
        return len(self.op)

    def select(self, mask: np.ndarray) -> DeviceTrace:
        """Return the events selected by a mask or by indices."""
        arrays = (self.op, self.start, self.stop, self.own, self.run, self.lane, self.in_flight)
        return DeviceTrace(self.names, *(array[mask] for array in arrays))


@dataclass
class Trace:
    """Trace of one host."""

    platform: str
    """Platform of the devices: `tpu`, `gpu` or `cpu`."""
    devices: dict[int, DeviceTrace] = field(default_factory=dict)
    """Events of the train step's program, keyed by the local index of the device."""
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """Number, start and end time of each annotated step on the host, in seconds."""
    num_foreign_events: int = 0
    """Number of device events that belong to other programs."""


def read_trace(path: str | Path, module: str) -> Trace:
    """Read a trace file.

    Args:
        path: file that jax's profiler wrote.
        module: name of the HLO module whose operations are returned.

    Raises:
        ValueError: the file is not a trace.
    """
    from jax.profiler import ProfileData

    data = Path(path).read_bytes()
    try:
        planes = list(ProfileData.from_serialized_xspace(data).planes)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a trace: {error}") from error
    _create_statistics_types(planes)
    found: dict[int, list[Event]] = {}
    trace = Trace("cpu")
    for plane in planes:
        if device := _DEVICE.match(plane.name):
            trace.platform = device.group(1).lower()
            read = _tpu_events if trace.platform == "tpu" else _gpu_events
            found[int(device.group(2))] = list(read(plane, module, trace))
    for plane in planes:
        if plane.name == "/host:CPU":
            for index, event in _host_events(plane, module, trace, with_ops=not found):
                found.setdefault(index, []).append(event)
    trace.devices = {index: _arrays(events) for index, events in sorted(found.items()) if events}
    trace.steps.sort()
    return trace


def _create_statistics_types(planes: Sequence[Any]) -> None:
    """Read the statistics of one event, and keep their type.

    jaxlib 0.12 creates the type of these statistics when it is needed, and frees the type with the
    last statistics. Creation causes a deprecation warning, and if warnings are errors, the process
    aborts.
    """
    events = (event for plane in planes for line in plane.lines for event in line.events)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for event in itertools.islice(events, 1):
            _statistics_types.add(type(event.stats))


def _tpu_events(plane: Any, module: str, trace: Trace) -> Iterator[Event]:
    lines = {line.name: line for line in plane.lines}
    spans = sorted(
        (event.start_ns, event.end_ns, event.name.partition("(")[0])
        for event in (lines["XLA Modules"].events if "XLA Modules" in lines else ())
    )
    starts = np.array([span[0] for span in spans])
    own = np.cumsum([span[2] == module for span in spans]) - 1
    for lane, (name, in_flight) in enumerate((("XLA Ops", False), ("Async XLA Ops", True))):
        for event in lines[name].events if name in lines else ():
            start, stop = event.start_ns, event.end_ns
            place = int(np.searchsorted(starts, start, side="right")) - 1
            if place < 0 or spans[place][2] != module or start >= spans[place][1]:
                trace.num_foreign_events += 1
                continue
            matched = _HLO_NAME.match(event.name)
            op = matched.group(1) if matched else event.name
            yield Event(op, start, stop, int(own[place]), lane, in_flight)


def _gpu_events(plane: Any, module: str, trace: Trace) -> Iterator[Event]:
    for lane, line in enumerate(plane.lines):
        if line.name in _DERIVED_LINES:
            continue
        for event in line.events:
            stats = dict(event.stats)
            if stats.get("hlo_module") != module:
                trace.num_foreign_events += 1
                continue
            op = str(stats.get("hlo_op") or event.name)
            yield Event(op, event.start_ns, event.end_ns, -1, lane)


def _host_events(
    plane: Any, module: str, trace: Trace, *, with_ops: bool
) -> Iterator[tuple[int, Event]]:
    """Yield (device, event) for CPU devices, and add the annotated steps to the trace."""
    for lane, line in enumerate(plane.lines):
        for event in line.events:
            if event.name.startswith("ThreadpoolListener"):
                continue  # most events of a CPU trace; reading their statistics takes seconds
            if event.name == STEP_NAME:
                number = dict(event.stats).get("step_num")
                if number is not None:
                    span = (event.start_ns * 1e-9, event.end_ns * 1e-9)
                    trace.steps.append((int(number), *span))
            elif with_ops:
                stats = dict(event.stats)
                if "hlo_op" not in stats or "device_ordinal" not in stats:
                    continue
                if stats.get("hlo_module") != module:
                    trace.num_foreign_events += 1
                    continue
                run = int(stats.get("run_id", -1))
                index = int(stats["device_ordinal"])
                yield index, Event(str(stats["hlo_op"]), event.start_ns, event.end_ns, run, lane)


def _arrays(events: list[Event]) -> DeviceTrace:
    """Convert events to arrays, sorted by start time with outer events first."""
    events.sort(key=lambda event: (event.start, -event.stop))
    index: dict[str, int] = {}
    ops = np.array([index.setdefault(event.op, len(index)) for event in events], np.int32)
    start = np.array([event.start for event in events]) * 1e-9
    stop = np.array([event.stop for event in events]) * 1e-9
    lane = np.array([event.lane for event in events], np.int32)
    return DeviceTrace(
        list(index),
        ops,
        start,
        stop,
        own_seconds(start, stop, lane),
        np.array([event.run for event in events], np.int64),
        lane,
        np.array([event.in_flight for event in events], bool),
    )


def own_seconds(start: np.ndarray, stop: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Return the duration of each event minus the duration of the events directly inside it.

    Events are sorted by start time. Only events of the same line are nested.
    """
    own = stop - start
    open_events: dict[int, list[int]] = {}
    for number, (begin, line) in enumerate(zip(start.tolist(), lane.tolist(), strict=True)):
        stack = open_events.setdefault(line, [])
        while stack and stop[stack[-1]] <= begin:
            stack.pop()
        if stack and stop[number] <= stop[stack[-1]]:
            own[stack[-1]] -= stop[number] - begin
        stack.append(number)
    return own


def covered(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the union of intervals as disjoint intervals, sorted by start."""
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    first = np.concatenate([[True], start[1:] > stop[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], stop[last]


def covered_seconds(start: np.ndarray, stop: np.ndarray) -> float:
    """Return the length of the union of intervals."""
    begin, end = covered(start, stop)
    return float((end - begin).sum())


def seconds_inside(
    start: np.ndarray, stop: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return how many seconds of each interval [start, stop] are inside disjoint intervals.

    `begin` and `end` are the sorted results of `covered`.
    """
    if not len(begin):
        return np.zeros_like(start)
    total = np.concatenate([[0.0], np.cumsum(end - begin)])

    def before(time: np.ndarray) -> np.ndarray:
        place = np.searchsorted(begin, time, side="right")
        inside = np.minimum(time, end[np.maximum(place - 1, 0)]) - begin[np.maximum(place - 1, 0)]
        return np.where(place > 0, total[np.maximum(place - 1, 0)] + inside, 0.0)

    return before(stop) - before(start)
