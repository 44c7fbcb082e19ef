"""Compare the measured bubble with the planned one, and attribute the difference to causes.

Each cause is removed from the measured timeline, and the table computes by how much the step would
be shorter:

- slow stage: its slots have the durations of the median stage,
- exposed message: the messages of one link are instantaneous,
- imbalance of layers: all chunks have the planned cost of the mean chunk,
- unequal slots: all types of slots in a mixed tick have the same duration,
- input wait: the batch is available when the step starts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from maxpipe.io.formatting import format_duration
from maxpipe.profiles.capture import Metadata
from maxpipe.profiles.timeline import Timeline, slot_spans

CauseKind = Literal[
    "slow stage", "exposed message", "imbalance of layers", "unequal slots", "input wait"
]
_LAYOUT: tuple[CauseKind, ...] = ("imbalance of layers", "unequal slots")
"""Causes that follow from the config."""
_MIN_SHARE = 0.05
"""Minimum loss of a cause, as a fraction of the tick loop, that is reported."""
_SHARED_CORES_NOISE = 50e-6
"""Minimum loss of a slow stage per slot in seconds, if virtual devices share cores. Threads that
wake up on another core delay short slots by tens of microseconds."""


@dataclass(frozen=True)
class Cause:
    """Reason for which a step takes longer than planned."""

    kind: CauseKind
    seconds: float
    """Time by which the step would be shorter without the cause."""
    stage: int | None = None
    """Slow stage, or stage that sends the exposed messages."""
    receiver: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = "" if self.stage is None else f" {self.stage}"
        if self.kind == "exposed message":
            where = f" from stage {self.stage} to stage {self.receiver}"
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.kind}{where} (+{format_duration(self.seconds)} per step{detail})"


@dataclass(frozen=True)
class Bubble:
    """Planned and measured bubble of the profiled steps, as fractions of the tick loop."""

    planned: float
    """Bubble of the schedule table with equally long slots."""
    planned_with_costs: float
    """Bubble of the table with the measured mean duration of each slot type, on equal stages."""
    measured: float
    wall_idle: float
    """Fraction of the wall time in which devices run no operation."""
    seconds: float
    """Duration of the tick loop."""
    causes: tuple[Cause, ...]
    """Causes with a loss of at least 5% of the tick loop, largest first. The wait for input is
    compared with the step."""

    @property
    def cause(self) -> Cause | None:
        """Return the largest cause, or None if the step is as planned."""
        return self.causes[0] if self.causes else None

    @property
    def fault(self) -> Cause | None:
        """Return the largest cause that is not part of the layout, or None.

        Only such a cause can make a step slower than earlier steps.
        """
        return next((cause for cause in self.causes if cause.kind not in _LAYOUT), None)

    def summary(self) -> str:
        """Return one line with the planned and the measured bubble and the causes."""
        causes = "; ".join(map(str, self.causes))
        return (
            f"bubble: planned {self.planned:.1%} ({self.planned_with_costs:.1%} with the measured "
            f"slot durations), measured {self.measured:.1%}; "
            f"{f'cause: {causes}' if causes else 'no slow stage, message or input'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values as JSON."""
        values = {
            "planned": self.planned,
            "planned_with_costs": self.planned_with_costs,
            "measured": self.measured,
            "wall_idle": self.wall_idle,
            "tick_loop_seconds": self.seconds,
        }
        causes = [
            {
                "kind": cause.kind,
                "seconds": cause.seconds,
                "stage": cause.stage,
                "receiver": cause.receiver,
                "text": str(cause),
            }
            for cause in self.causes
        ]
        return {name: round(value, 6) for name, value in values.items()} | {"causes": causes}


def explain(timeline: Timeline, metadata: Metadata) -> Bubble:
    """Return the bubble of a timeline and the causes of the difference from the plan."""
    planned, balanced = planned_work(timeline), balanced_work(timeline)
    ticks = timeline.tick_seconds(balanced, balanced=True, messages=0.0)
    busy = float((sum(balanced.values()) + timeline.shared).mean(axis=1).sum())
    causes = [*_slow_stages(timeline, planned), *_exposed_messages(timeline)]
    causes += _imbalance(timeline, planned, balanced)
    causes += _unequal_slots(timeline, balanced, busy, float(ticks.sum()))
    causes = [cause for cause in causes if cause.seconds >= _MIN_SHARE * float(ticks.sum())]
    # The wait is wall time, while the tick loop may be the sum of typical durations.
    if metadata.wait_seconds >= _MIN_SHARE * max(metadata.step_seconds, float(ticks.sum())):
        causes.append(Cause("input wait", metadata.wait_seconds))
    causes.sort(key=lambda cause: -cause.seconds)
    return Bubble(
        timeline.table.planned_bubble,
        1.0 - busy / float(ticks.sum()) if ticks.sum() else 0.0,
        timeline.bubble if timeline.shares_cores else timeline.wall_idle,
        timeline.wall_idle,
        timeline.seconds if timeline.shares_cores else float(timeline.wall_ticks[-1]),
        tuple(causes),
    )


def planned_work(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return the duration of each slot `[K, P]`, if all stages were as fast as the median one."""
    table = timeline.table
    return {
        kind: unit_seconds(timeline, kind) * table.planned_costs[kind] for kind in timeline.work
    }


def balanced_work(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return the duration of each slot `[K, P]`, if all chunks also had equal costs."""
    return {
        kind: unit_seconds(timeline, kind) * timeline.table.active[kind] for kind in timeline.work
    }


def unit_seconds(timeline: Timeline, kind: str) -> float:
    """Return the duration of a slot for the mean chunk on the median stage."""
    active, costs = timeline.table.active[kind], timeline.table.planned_costs[kind]
    per_stage = [
        float(np.median(timeline.work[kind][busy, stage] / costs[busy, stage]))
        for stage, busy in enumerate(active.T)
        if busy.any()
    ]
    # The mean of two stages would hide a slow one, so the faster stage is used.
    return float(np.quantile(per_stage, 0.5, method="lower")) if per_stage else 0.0


def _slow_stages(timeline: Timeline, planned: dict[str, np.ndarray]) -> Iterator[Cause]:
    whole = timeline.tick_seconds().sum()
    for stage in range(timeline.table.num_stages):
        healed = {kind: spent.copy() for kind, spent in timeline.work.items()}
        for kind, spent in healed.items():
            spent[:, stage] = np.minimum(spent[:, stage], planned[kind][:, stage])
        shared = timeline.shared.copy()
        shared[:, stage] = np.median(shared, axis=1)
        ticks = slot_spans(timeline.table, healed) + shared.max(axis=1) + timeline.message_seconds
        own = sum(float(spent[:, stage].sum()) for spent in timeline.work.values())
        expected = sum(float(spent[:, stage].sum()) for spent in planned.values())
        detail = f"{own / expected:.2f} x the median stage" if expected else ""
        gain = float(whole - ticks.sum())
        num_slots = sum(int(busy[:, stage].sum()) for busy in timeline.table.active.values())
        if not timeline.shares_cores or gain >= _SHARED_CORES_NOISE * num_slots:
            yield Cause("slow stage", gain, stage, detail=detail)


def _exposed_messages(timeline: Timeline) -> Iterator[Cause]:
    largest = timeline.message_seconds
    for link, seconds in timeline.messages.items():
        others = [each for other, each in timeline.messages.items() if other != link]
        rest = np.max(others, axis=0) if others else np.zeros_like(largest)
        per_message = f"{format_duration(float(np.median(seconds)))} per message"
        gain = float((largest - rest)[largest == seconds].sum())
        yield Cause("exposed message", gain, link.sender, link.receiver, per_message)


def _imbalance(
    timeline: Timeline,
    planned: dict[str, np.ndarray],
    balanced: dict[str, np.ndarray],
) -> Iterator[Cause]:
    spans = [slot_spans(timeline.table, work).sum() for work in (planned, balanced)]
    costs = np.array(timeline.table.chunk_costs)
    repeat, stage = np.unravel_index(int(costs.argmax()), costs.shape)
    layers = timeline.table.chunk_layers[repeat][stage]
    chunk = timeline.table.chunks[repeat][stage]
    detail = f"chunk {chunk} has {layers} layers, {costs.max():.2f} x the mean cost"
    yield Cause("imbalance of layers", float(spans[0] - spans[1]), int(stage), detail=detail)


def idle_cause(timeline: Timeline, tick: int, stage: int) -> str:
    """Return why a stage is idle in a tick for longer than planned: `message A -> B`, `stage N`, or
    an empty string.
    """
    idle = float(unplanned_idle(timeline)[tick, stage])
    if idle <= _MIN_SHARE * float(timeline.tick_seconds()[tick]):
        return ""
    if float(timeline.message_seconds[tick]) > idle / 2:
        slowest = max(timeline.messages, key=lambda link: float(timeline.messages[link][tick]))
        return f"message {slowest}"
    planned = balanced_work(timeline)
    work = {kind: spent[tick] for kind, spent in timeline.work.items()}
    if timeline.table.mixed:
        return f"stage {int(np.argmax(sum(work.values())))}"
    # a typed tick lasts for the slowest slot of each type
    excess = {kind: spent.max() - planned[kind][tick].max() for kind, spent in work.items()}
    return f"stage {int(np.argmax(work[max(excess, key=lambda kind: excess[kind])]))}"


@functools.lru_cache(maxsize=4)
def unplanned_idle(timeline: Timeline) -> np.ndarray:
    """Return the time for which each stage is idle in addition to the planned idle time, `[K,
    P]`.
    """

    def idle(work: Mapping[str, np.ndarray], ticks: np.ndarray) -> np.ndarray:
        return ticks[:, None] - sum(work.values())

    balanced = balanced_work(timeline)
    planned = idle(balanced, slot_spans(timeline.table, balanced))
    measured = timeline.tick_seconds() - timeline.shared.max(axis=1)
    return np.maximum(0.0, idle(timeline.work, measured) - planned)


def _unequal_slots(
    timeline: Timeline, balanced: dict[str, np.ndarray], busy: float, seconds: float
) -> Iterator[Cause]:
    """Yield the loss from slots of different types in the same tick of a mixed schedule."""
    if timeline.table.mixed:
        units = {kind: unit_seconds(timeline, kind) for kind in balanced}
        detail = ", ".join(f"{kind} {format_duration(unit)}" for kind, unit in units.items())
        ideal = busy / (1.0 - timeline.table.planned_bubble)
        yield Cause("unequal slots", seconds - ideal, detail=detail)


def timeline_json(timeline: Timeline, bubble: Bubble, metadata: Metadata) -> dict[str, Any]:
    """Return the planned and the measured timeline per stage and tick, as JSON values."""
    balanced = balanced_work(timeline)
    planned_ticks = timeline.tick_seconds(balanced, balanced=True, messages=0.0)
    planned_start = np.concatenate([[0.0], np.cumsum(planned_ticks)])
    measured = timeline.tick_seconds()
    cells = []
    for tick in range(timeline.table.num_ticks):
        for stage in range(timeline.table.num_stages):
            slots = [
                {
                    "kind": table.kind,
                    "microbatch": table.microbatch[tick][stage],
                    "chunk": timeline.table.chunks[table.repeat[tick][stage]][stage],
                    "planned_seconds": _rounded(balanced[table.kind][tick, stage]),
                    "seconds": _rounded(timeline.work[table.kind][tick, stage]),
                    "wall_seconds": _rounded(timeline.wall_work[table.kind][tick, stage]),
                }
                for table in timeline.table.slots
                if table.microbatch[tick][stage] >= 0
            ]
            busy = sum(slot["seconds"] for slot in slots) + timeline.shared[tick, stage]
            cells.append(
                {
                    "tick": tick,
                    "stage": stage,
                    "slots": slots,
                    "shared_seconds": _rounded(timeline.shared[tick, stage]),
                    "idle_seconds": _rounded(max(0.0, measured[tick] - busy)),
                    "idle_cause": idle_cause(timeline, tick, stage),
                }
            )
    return {
        "step": metadata.step,
        "num_steps": timeline.num_steps,
        "schedule": timeline.table.name,
        "num_stages": timeline.table.num_stages,
        "num_ticks": timeline.table.num_ticks,
        "bubble": bubble.to_json(),
        "step_seconds": metadata.step_seconds,
        "outside_tick_loop_seconds": _rounded(timeline.outside_seconds),
        "message_seconds": {
            str(link): _rounded(np.median(seconds)) for link, seconds in timeline.messages.items()
        },
        "planned_tick_start": [_rounded(each) for each in planned_start],
        "tick_start": [_rounded(each) for each in timeline.ticks],
        "wall_tick_start": [_rounded(each) for each in timeline.wall_ticks],
        "cells": cells,
    }


def _rounded(seconds: Any) -> float:
    return round(float(seconds), 7)
