"""Summarize the time of a profiled step by part of the model, kind of operation and collective.

Times are means per step and device. The own time of an operation excludes nested operations, so
times add up, except on devices that run several operations at the same time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxpipe.io.formatting import format_duration, pluralize
from maxpipe.planner.instruction_costs import align_columns
from maxpipe.profiles.capture import Capture
from maxpipe.profiles.program import CONTROL_FLOW, Operation
from maxpipe.profiles.trace import DeviceTrace, covered, covered_seconds, seconds_inside


@dataclass
class OperationTime:
    """Time of one operation, or of a group of operations, per step and device."""

    operation: Operation
    seconds: float = 0.0
    count: float = 0.0


@dataclass
class CollectiveTime:
    """Time of the collectives of one type over the same mesh axes, per step and device."""

    kind: str
    axes: str
    count: float = 0.0
    seconds: float = 0.0
    """Time between the start and the end of the collectives."""
    overlapped: float = 0.0
    """Part of the time in which the device also computes."""

    @property
    def exposed(self) -> float:
        """Return the time in which the device computes nothing."""
        return self.seconds - self.overlapped


@dataclass
class ProfileReport:
    """Time of a profiled step, in seconds per step and device."""

    platform: str
    num_steps: int
    num_devices: int
    step_seconds: float
    wait_seconds: float
    """Time for which a step waits for its batch."""
    busy_seconds: float = 0.0
    """Time in which a device runs any operation."""
    gap_seconds: float = 0.0
    """Time between the end of a step's program and the start of the next step's program, without
    pauses."""
    operations: list[OperationTime] = field(default_factory=list)
    """All operations, longest first."""
    collectives: list[CollectiveTime] = field(default_factory=list)

    @property
    def idle_seconds(self) -> float:
        """Return the time in which a device runs no operation."""
        return max(0.0, self.step_seconds - self.busy_seconds)

    def by_place(self) -> list[tuple[str, float, float]]:
        """Return (place, seconds, number of executions) for each part of the model and program."""
        return self._grouped(lambda op: op.place)

    def by_kind(self) -> list[tuple[str, float, float]]:
        """Return (kind, seconds, number of executions) for each kind of operation."""
        return self._grouped(lambda op: op.kind)

    def _grouped(self, key: Any) -> list[tuple[str, float, float]]:
        seconds: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for each in self.operations:
            seconds[key(each.operation)] += each.seconds
            counts[key(each.operation)] += each.count
        return sorted(
            ((name, spent, counts[name]) for name, spent in seconds.items()),
            key=lambda row: -row[1],
        )

    def to_json(self, most: int = 10) -> dict[str, Any]:
        """Return the report as JSON values, with the `most` longest operations."""

        def rows(listed: Sequence[tuple[str, float, float]]) -> list[dict[str, Any]]:
            return [
                {"name": name, "seconds": spent, "count": count} for name, spent, count in listed
            ]

        return {
            "platform": self.platform,
            "num_steps": self.num_steps,
            "num_devices": self.num_devices,
            "step_seconds": self.step_seconds,
            "busy_seconds": self.busy_seconds,
            "idle_seconds": self.idle_seconds,
            "input_wait_seconds": self.wait_seconds,
            "gap_seconds": self.gap_seconds,
            "by_place": rows(self.by_place()),
            "by_kind": rows(self.by_kind()),
            "longest_operations": [
                {
                    "name": each.operation.name,
                    "kind": each.operation.kind,
                    "place": each.operation.place,
                    "region": each.operation.region,
                    "seconds": each.seconds,
                    "count": each.count,
                }
                for each in self.operations[:most]
            ],
            "collectives": [
                {
                    "kind": each.kind,
                    "axes": each.axes,
                    "count": each.count,
                    "seconds": each.seconds,
                    "overlapped_seconds": each.overlapped,
                    "exposed_seconds": each.exposed,
                }
                for each in self.collectives
            ],
        }

    def lines(self, most: int = 10) -> list[str]:
        """Return the report as text lines, with the `most` longest operations."""
        whole = self.step_seconds

        def row(name: str, seconds: float, count: float | None = None) -> tuple[str, ...]:
            share = f"{seconds / whole:.1%}" if whole else ""
            times = "" if count is None else f"{count:,.0f}"
            return name, format_duration(seconds), share, times

        lines = [
            f"{pluralize(self.num_steps, 'step')} of {format_duration(whole)} on "
            f"{pluralize(self.num_devices, f'{self.platform} device')}; times are means per step "
            "and device",
            "",
        ]
        rest = [
            row("idle", self.idle_seconds),
            row("of which between steps", self.gap_seconds),
            row("input wait (host)", self.wait_seconds),
        ]
        lines += align_columns(
            ("part", "time", "of step", "times"), [*(row(*each) for each in self.by_place()), *rest]
        )
        lines += [
            "",
            *align_columns(
                ("kind", "time", "of step", "times"), [row(*each) for each in self.by_kind()]
            ),
        ]
        if self.collectives:
            lines += [
                "",
                *align_columns(
                    ("collective", "time", "overlapped", "exposed", "times"),
                    [self._collective_row(each) for each in self.collectives],
                ),
            ]
        longest = [
            (
                *row(each.operation.kind, each.seconds, each.count),
                each.operation.place,
                each.operation.region or "-",
                each.operation.name,
            )
            for each in self.operations[:most]
        ]
        head = ("longest operations", "time", "of step", "times", "part", "region", "name")
        return [*lines, "", *align_columns(head, longest)]

    @staticmethod
    def _collective_row(each: CollectiveTime) -> tuple[str, ...]:
        share = f"{each.overlapped / each.seconds:.0%}" if each.seconds else ""
        name = f"{each.kind} over {each.axes}"
        times = (format_duration(each.seconds), share, format_duration(each.exposed))
        return (name, *times, f"{each.count:,.0f}")


def summarize(capture: Capture) -> ProfileReport:
    """Return the report of a profile."""
    metadata, program = capture.metadata, capture.program
    report = ProfileReport(
        capture.platform,
        metadata.num_steps,
        len(capture.devices),
        metadata.step_seconds,
        metadata.wait_seconds,
    )
    scale = 1.0 / (metadata.num_steps * max(1, len(capture.devices)))
    times: dict[str, OperationTime] = {}
    collectives: dict[tuple[str, str], CollectiveTime] = {}
    for events in capture.devices.values():
        operations = [program.operation(name) for name in events.names]
        in_line = ~events.in_flight
        seconds = np.bincount(events.op[in_line], events.own[in_line], minlength=len(operations))
        counts = np.bincount(events.op[in_line], minlength=len(operations))
        for op, spent, count in zip(operations, seconds, counts, strict=True):
            if capture.platform == "cpu" and op.kind == CONTROL_FLOW:
                continue  # CPU loops run on other threads than their bodies
            entry = times.setdefault(op.name, OperationTime(op))
            entry.seconds += scale * float(spent)
            entry.count += scale * float(count)
        leaf = in_line & ~np.array([op.is_container for op in operations], bool)[events.op]
        report.busy_seconds += scale * covered_seconds(events.start[leaf], events.stop[leaf])
        report.gap_seconds += scale * _gaps(events)
        for op, started, stopped, hidden in _collectives(events, operations):
            key = (op.kind, "+".join(op.axes))
            entry = collectives.setdefault(key, CollectiveTime(*key))
            entry.count += scale * len(started)
            entry.seconds += scale * float((stopped - started).sum())
            entry.overlapped += scale * float(hidden.sum())
    report.gap_seconds = max(0.0, report.gap_seconds - metadata.paused_seconds)
    report.operations = sorted(times.values(), key=lambda each: -each.seconds)
    report.collectives = sorted(collectives.values(), key=lambda each: -each.seconds)
    return report


def _gaps(events: DeviceTrace) -> float:
    """Return the total time between executions of the program on a device."""
    numbers = np.unique(events.run)
    spans = sorted(
        (float(events.start[own].min()), float(events.stop[own].max()))
        for own in (events.run == number for number in numbers.tolist())
    )
    return sum(max(0.0, b[0] - a[1]) for a, b in itertools.pairwise(spans))


def _collectives(
    events: DeviceTrace, operations: Sequence[Operation]
) -> Iterator[tuple[Operation, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield each collective with the start and stop times of its executions, and the time of each
    execution in which the device also computes.
    """
    is_collective = np.array([op.is_collective for op in operations], bool)
    compute = ~is_collective[events.op] & ~events.in_flight
    compute &= ~np.array([op.is_container for op in operations], bool)[events.op]
    begin, end = covered(events.start[compute], events.stop[compute])
    done = {op.starts: number for number, op in enumerate(operations) if op.starts}
    for number, op in enumerate(operations):
        if not op.is_collective or op.starts:
            continue
        own = events.op == number
        started, stopped = events.start[own], events.stop[own]
        if op.name in done:
            last = events.stop[events.op == done[op.name]]
            count = min(len(started), len(last))
            started, stopped = started[:count], last[:count]
        yield op, started, stopped, seconds_inside(started, stopped, begin, end)
