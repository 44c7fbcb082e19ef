"""Measure the work of each stage in each tick, and compare it with the schedule table.

Operations outside loops over layers run once in each tick, so their k-th execution on a device
starts tick k. All other operations of the tick loop belong to the tick in which they start.

Virtual CPU devices share the cores of a host, so the wall time of an operation depends on the work
of other stages at that moment. The measured bubble therefore uses the typical duration of each
operation on its stage: a low quantile of its executions on shared cores, and the median on
accelerators. The table places these durations in ticks. The share of wall time in which a device
runs no operation is reported separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from maxpipe.profiles.capture import Capture, TableRecord
from maxpipe.profiles.program import Operation
from maxpipe.profiles.trace import DeviceTrace, covered_seconds

_SHARED_CORES_QUANTILE, _ACCELERATOR_QUANTILE = 0.2, 0.5
_SHARED = "shared"
"""Key of the work that all stages do in the same ticks: embedding, prologue and loss head."""


class NoTicksError(Exception):
    """Raised if a trace does not show the ticks of the schedule."""


@dataclass(frozen=True)
class Link:
    """Direct connection between two stages."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}"


@dataclass(frozen=True, eq=False)
class Timeline:
    """Measured work of the stages in the ticks of one step, in seconds.

    Values are means over the profiled steps and over the devices of a stage.
    """

    table: TableRecord
    shares_cores: bool
    work: dict[str, np.ndarray]
    """Typical duration of each slot, `[K, P]`."""
    shared: np.ndarray
    """Typical duration of the work outside slots, `[K, P]`."""
    messages: dict[Link, np.ndarray]
    """Exposed time of the messages on each link, `[K]`."""
    wall_begin: dict[str, np.ndarray]
    """Start of each slot after the start of the tick loop, `[K, P]`; NaN if idle."""
    wall_work: dict[str, np.ndarray]
    """Wall time in which operations of each slot run, `[K, P]`."""
    wall_ticks: np.ndarray
    """Start of each tick and the end of the last tick, after the start of the tick loop,
    `[K + 1]`."""
    wall_idle: float
    """Fraction of the tick loop's wall time in which devices run no operation."""
    outside_seconds: float
    """Wall time of a step outside the tick loop."""
    num_steps: int

    @cached_property
    def message_seconds(self) -> np.ndarray:
        """Return the largest exposed message time of each tick, `[K]`."""
        if not self.messages:
            return np.zeros(self.table.num_ticks)
        return np.max(list(self.messages.values()), axis=0)

    def tick_seconds(
        self,
        work: Mapping[str, np.ndarray] | None = None,
        *,
        balanced: bool = False,
        messages: np.ndarray | float | None = None,
    ) -> np.ndarray:
        """Return the duration of each tick `[K]`, in which stages wait for the slowest one.

        Args:
            work: durations of slots (default: the measured ones).
            balanced: whether the work outside slots is assumed to be equal on all stages.
            messages: exposed message time of each tick (default: the measured time).
        """
        work = self.work if work is None else work
        shared = self.shared.mean(axis=1) if balanced else self.shared.max(axis=1)
        messages = self.message_seconds if messages is None else messages
        return slot_spans(self.table, work) + shared + messages

    @property
    def seconds(self) -> float:
        """Return the duration of the tick loop according to the typical durations."""
        return float(self.tick_seconds().sum())

    @property
    def busy_seconds(self) -> float:
        """Return the mean work of a stage in one step."""
        return float((sum(self.work.values()) + self.shared).mean(axis=1).sum())

    @property
    def bubble(self) -> float:
        """Return the measured fraction of the tick loop during which stages are idle."""
        return 1.0 - self.busy_seconds / self.seconds if self.seconds else 0.0

    @cached_property
    def ticks(self) -> np.ndarray:
        """Return the start of each tick and the end of the last one, `[K + 1]`."""
        return np.concatenate([[0.0], np.cumsum(self.tick_seconds())])

    @cached_property
    def begin(self) -> dict[str, np.ndarray]:
        """Return the start of each slot, `[K, P]`: in order within a tick, in lockstep."""
        starts, offset = {}, np.zeros((self.table.num_ticks, 1))
        for kind, spent in self.work.items():
            starts[kind] = self.ticks[:-1, None] + offset + np.zeros_like(spent)
            if not self.table.mixed:
                offset = offset + spent.max(axis=1, keepdims=True)
        return starts


def slot_spans(table: TableRecord, work: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the duration of the slots of each tick, `[K]`, if stages advance in lockstep."""
    if table.mixed:
        return np.sum(list(work.values()), axis=0).max(axis=1)
    return np.sum([spent.max(axis=1) for spent in work.values()], axis=0)


@dataclass
class _Run:
    """Execution of the tick loop on one device."""

    stage: int
    position: int
    events: DeviceTrace
    """Events of the tick loop, without containers."""
    operations: list[Operation]
    """Operation of each event."""
    tick: np.ndarray
    """Tick of each event."""
    bounds: np.ndarray
    """Start of each tick and the end of the last tick, `[K + 1]`."""
    shares_cores: bool
    typical: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Typical duration of each event's operation on its stage."""


def measure(capture: Capture) -> Timeline:
    """Measure the timeline of the profiled steps.

    Raises:
        NoTicksError: the trace does not show the ticks of the schedule, or lacks a stage.
    """
    table, metadata = capture.metadata.table, capture.metadata
    if not capture.program.has_ticks:
        raise NoTicksError("the compiled program has no tick loop")
    runs = [
        run
        for position, events in capture.devices.items()
        for run in _runs(capture, position, events)
    ]
    stages = {run.stage for run in runs}
    if missing := set(range(table.num_stages)) - stages:
        listed = ", ".join(map(str, sorted(missing)))
        raise NoTicksError(f"the traces contain no complete step of stage {listed}")
    quantile = _SHARED_CORES_QUANTILE if metadata.shares_cores else _ACCELERATOR_QUANTILE
    _set_typical(runs, quantile)
    shape = (table.num_ticks, table.num_stages)
    work, wall_work, begin = (
        {each.kind: np.zeros(shape) for each in table.slots} for _ in range(3)
    )
    shared, devices = np.zeros(shape), np.zeros(table.num_stages)
    busy = wall = 0.0
    for run in runs:
        devices[run.stage] += 1
        masks = _masks(run)
        for kind, mask in masks.items():
            into = shared if kind == _SHARED else work.get(kind)
            if into is None:
                continue
            into[:, run.stage] += np.bincount(
                run.tick[mask], run.typical[mask], minlength=table.num_ticks
            )
            if kind != _SHARED:
                spans = _spans(run, mask, table.num_ticks)
                wall_work[kind][:, run.stage] += spans[1]
                begin[kind][:, run.stage] += spans[0] - run.bounds[0]
        compute = np.logical_or.reduce(list(masks.values()))
        busy += covered_seconds(run.events.start[compute], run.events.stop[compute])
        wall += run.bounds[-1] - run.bounds[0]
    active = table.active
    for kind in work:
        # with idle="compute", stages without work in a slot also run its operations
        work[kind] = work[kind] / devices * active[kind]
        wall_work[kind] = wall_work[kind] / devices * active[kind]
        begin[kind] = np.where(active[kind], begin[kind] / devices, np.nan)
    bounds = np.mean([run.bounds - run.bounds[0] for run in runs], axis=0)
    count = len({int(run.events.run[0]) for run in runs})
    return Timeline(
        table,
        metadata.shares_cores,
        work,
        shared / devices,
        _messages(capture, runs),
        begin,
        wall_work,
        bounds,
        1.0 - busy / wall if wall else 0.0,
        metadata.step_seconds - float(bounds[-1]),
        count,
    )


def _runs(capture: Capture, position: int, events: DeviceTrace) -> Iterator[_Run]:
    """Yield the complete executions of the tick loop on a device."""
    operations = [capture.program.operation(name) for name in events.names]
    in_ticks = np.array([op.in_ticks and not op.is_container for op in operations])
    once = np.array([op.once_per_tick for op in operations])
    num_ticks = capture.metadata.table.num_ticks
    events = events.select(in_ticks[events.op])
    numbers = np.unique(events.run)
    if len(numbers) == 1 and numbers[0] < 0:
        events.run[:] = _split_runs(events, once, num_ticks)
        numbers = np.unique(events.run)
    for number in numbers.tolist():
        own = events.select(events.run == number)
        starts = [
            np.sort(own.start[own.op == op])
            for op, count in enumerate(np.bincount(own.op, minlength=len(once)).tolist())
            if once[op] and count == num_ticks
        ]
        if not starts:
            continue
        begin = np.min(starts, axis=0)
        tick = np.searchsorted(begin, own.start, side="right") - 1
        end = own.stop[(tick == num_ticks - 1)].max()
        yield _Run(
            capture.stage_of(position),
            position,
            own,
            [operations[op] for op in own.op.tolist()],
            np.maximum(tick, 0),
            np.append(begin, end),
            capture.metadata.shares_cores,
        )


def _split_runs(events: DeviceTrace, once: np.ndarray, num_ticks: int) -> np.ndarray:
    """Return the execution of each event in a trace that does not number executions.

    Execution i starts with the first of the i-th K executions of an operation that runs once per
    tick.
    """
    firsts = []
    for op in np.unique(events.op[once[events.op]]).tolist():
        starts = np.sort(events.start[events.op == op])
        if len(starts) % num_ticks == 0:
            firsts.append(starts[::num_ticks])
    if not firsts:
        return np.zeros(len(events), np.int64)
    length = min(map(len, firsts))
    begin = np.min([first for first in firsts if len(first) == length], axis=0)
    return np.maximum(np.searchsorted(begin, events.start, side="right") - 1, 0)


def _set_typical(runs: Sequence[_Run], quantile: float) -> None:
    """Set the typical durations: a quantile over the executions of an operation on a stage."""
    for stage in {run.stage for run in runs}:
        own = [run for run in runs if run.stage == stage]
        durations: dict[str, list[np.ndarray]] = {}
        for run in own:
            for op in np.unique(run.events.op).tolist():
                name = run.events.names[op]
                durations.setdefault(name, []).append(run.events.own[run.events.op == op])
        typical = {
            name: float(np.quantile(np.concatenate(parts), quantile))
            for name, parts in durations.items()
        }
        for run in own:
            by_op = np.array([typical.get(name, 0.0) for name in run.events.names])
            run.typical = by_op[run.events.op]


def _masks(run: _Run) -> dict[str, np.ndarray]:
    """Return the compute events of each slot type, and those outside slots."""
    compute = np.array(
        [not op.is_collective and not op.starts and not op.delays for op in run.operations], bool
    )
    compute &= ~run.events.in_flight
    slots = np.array([op.slot for op in run.operations])
    masks = {kind: compute & (slots == kind) for kind in np.unique(slots).tolist() if kind}
    # Operations without a region only read the table and move buffers between ticks.
    return masks | {_SHARED: compute & (slots == "")}


def _spans(run: _Run, mask: np.ndarray, num_ticks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of the selected events in each tick, and the wall time they cover, `[K]`."""
    start, stop, tick = run.events.start[mask], run.events.stop[mask], run.tick[mask]
    edges = np.searchsorted(tick, np.arange(num_ticks + 1))
    begin, length = np.full(num_ticks, np.nan), np.zeros(num_ticks)
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        if last > first:
            begin[number] = start[first]
            length[number] = covered_seconds(start[first:last], stop[first:last])
    return begin, length


# Messages.


def _messages(capture: Capture, runs: Sequence[_Run]) -> dict[Link, np.ndarray]:
    """Return the exposed time of the messages on each link in each tick.

    The exposed time of a message is the time of the operations that delay its transfer on the
    sender, plus the time that the receiver waits after both ends have reached the transfer.
    """
    num_ticks = capture.metadata.table.num_ticks
    program = capture.program
    sends = [op for op in program.operations.values() if op.is_send and not op.starts]
    ends = {op.starts: op.name for op in program.operations.values() if op.is_send and op.starts}
    found: dict[Link, list[np.ndarray]] = {}
    by_number: dict[int, dict[int, _Run]] = {}
    for run in runs:
        by_number.setdefault(int(run.events.run[0]), {})[run.position] = run
    for send in sends:
        for group in by_number.values():
            times = {
                position: _send_times(run, send.name, ends.get(send.name, ""), num_ticks)
                for position, run in group.items()
            }
            for receiver, sender in send.routes.items():
                if receiver not in times or sender not in times or receiver == sender:
                    continue
                link = Link(capture.stage_of(sender), capture.stage_of(receiver))
                if link.sender == link.receiver:
                    continue
                target = [each for each, source in send.routes.items() if source == receiver]
                peers = list(times) if capture.metadata.shares_cores else [sender, *target]
                ready = np.max([times[each].start for each in peers if each in times], axis=0)
                waited = times[receiver].stop - np.maximum(ready, times[receiver].wait)
                found.setdefault(link, []).append(np.maximum(waited, 0.0) + times[sender].delay)
    # A slow link delays every message, while other waits differ between ticks. Between virtual
    # devices, most of a transfer is the wait for a core, so the shortest transfer is used.
    quantile = 0.0 if capture.metadata.shares_cores else _ACCELERATOR_QUANTILE
    typical = {
        link: float(np.quantile(np.concatenate(parts), quantile)) for link, parts in found.items()
    }
    return {link: np.full(num_ticks, seconds) for link, seconds in typical.items()}


@dataclass(frozen=True)
class _SendTimes:
    """Times of the transfers on one device, `[K]`."""

    start: np.ndarray
    """When the device reached the transfer."""
    wait: np.ndarray
    """When the device started to wait for the transfer's end."""
    stop: np.ndarray
    delay: np.ndarray
    """Duration of the operations that only delay the transfer."""


def _send_times(run: _Run, start: str, end: str, num_ticks: int) -> _SendTimes:
    """Return the times of a transfer on one device. Without an event for its end, as on GPUs, one
    event lasts for the complete transfer, and the device waits after its last computation.
    """
    names = np.array([op.name for op in run.operations])
    first, last = names == start, names == end
    waits = run.events.start.copy()
    if not last.any():
        last = first
        compute = np.logical_or.reduce(list(_masks(run).values()))
        for number in np.flatnonzero(first).tolist():
            before = compute & (run.tick == run.tick[number])
            before &= run.events.stop <= run.events.stop[number]
            if not run.shares_cores and before.any():
                waits[number] = max(waits[number], run.events.stop[before].max())
    delayed = np.array([op.delays == start for op in run.operations], bool)
    nothing = np.full(num_ticks, run.bounds[0])

    def per_tick(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        filled = nothing.copy()
        filled[run.tick[mask]] = values[mask]
        return filled

    return _SendTimes(
        per_tick(run.events.start, first),
        per_tick(waits, last),
        per_tick(run.events.stop, last),
        np.bincount(run.tick[delayed], run.typical[delayed], minlength=num_ticks),
    )
