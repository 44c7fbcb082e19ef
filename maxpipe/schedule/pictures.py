"""Images of schedules as SVG or PNG, and traces for Perfetto.

An image has one lane for each stage. The lane shows the stage's work over time, labeled with
microbatch indices. The number of chunks with saved activations is plotted below the work. Each
repeat has a color, and each slot type has a shade of this color. All stages advance in lockstep,
and slots have the given costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.io.formatting import pluralize
from maxpipe.schedule.draw import (
    EQUAL_COSTS,
    OVERVIEW_WIDTH,
    Area,
    Box,
    Canvas,
    Label,
    summary,
    text_width,
)
from maxpipe.schedule.table import ActionKind, Costs, Schedule

_KIND_NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


def svg(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Return the image as an SVG document; hovering over a box shows its chunk and tick."""
    return draw_schedule(schedule, costs).svg()


def png(schedule: Schedule, path: Path, costs: Costs = EQUAL_COSTS) -> None:
    """Write the image as PNG."""
    draw_schedule(schedule, costs).png(path)


def draw_schedule(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> Canvas:
    """Draw the schedule, and return the drawing."""
    return _Picture(schedule, costs).canvas


def draw_schedules(schedules: Sequence[Schedule], costs: Costs = EQUAL_COSTS) -> Canvas:
    """Return a drawing that stacks the images of several schedules vertically."""
    canvas = draw_schedule(schedules[0], costs)
    for schedule in schedules[1:]:
        canvas.append_canvas(draw_schedule(schedule, costs), canvas.height)
    return canvas


def draw_overview(schedule: Schedule) -> Canvas:
    """Draw the first ticks of each lane, with text that is legible at a width of 300 pixels.

    `draw_schedule` draws all ticks instead. In the overview, microbatch indices are small and
    legible only at full size.
    """
    times, canvas = _Timeline(schedule, EQUAL_COSTS), Canvas()
    ticks = min(schedule.num_ticks, _OVERVIEW_TICKS)
    left, right, lane = 36.0, 12.0, max(4.0, min(30.0, 400.0 / schedule.num_stages - 2))
    unit = (OVERVIEW_WIDTH - left - right) / float(times.ticks[ticks])
    some = "" if ticks == schedule.num_ticks else f"first {ticks} of "
    lines = (
        (schedule.name, 20, _INK),
        (
            f"{schedule.describe_sizes()}, {pluralize(schedule.num_microbatches, 'microbatch')}",
            18,
            _INK,
        ),
        (f"bubble {schedule.idle_fraction():.1%}, {some}{schedule.num_ticks} ticks", 18, _INK),
    )
    y = 0.0
    for text, size, colour in lines:
        y += size + 8
        canvas.labels.append(Label(12, y, text, size, colour, "l", bold=size == 20))
    top = y + 14
    every = -(-16 // int(lane + 2))
    for stage in range(schedule.num_stages):
        y = top + stage * (lane + 2)
        canvas.boxes.append(Box(left, y, OVERVIEW_WIDTH - left - right, lane, _PALE))
        if stage % every == 0:
            canvas.labels.append(Label(left - 8, y + lane / 2 + 6, f"{stage}", 16, _INK, "r"))
    for work in _work(schedule):
        if work.tick < ticks:
            shade = _shade(work.kind, work.repeat)
            x, y = left + unit * times.start(work), top + work.stage * (lane + 2)
            gap = min(0.5, unit / 8)
            canvas.boxes.append(Box(x + gap, y, unit - 2 * gap, lane, shade.fill, shade.line))
            text = str(work.microbatch)
            if (size := int(min(12, lane - 4, (unit - 1) / text_width(text, 1)))) >= 4:
                baseline = y + lane / 2 + 0.36 * size
                canvas.labels.append(Label(x + unit / 2, baseline, text, size, shade.text))
    y = top + schedule.num_stages * (lane + 2) + 8
    x = 12.0
    for kind, _ in schedule.kinds:
        shade, name = _shade(kind, 0), _KIND_NAMES[kind]
        if x + 24 + text_width(name, 18) > OVERVIEW_WIDTH:
            x, y = 12.0, y + 26
        canvas.boxes.append(Box(x, y, 18, 18, shade.fill, shade.line))
        canvas.labels.append(Label(x + 24, y + 15, name, 18, _INK, "l"))
        x += 24 + text_width(name, 18) + 16
    if schedule.num_repeats > 1:
        y += 26
        canvas.labels.append(Label(12, y + 15, "one color for each repeat", 18, _INK, "l"))
    canvas.width, canvas.height = OVERVIEW_WIDTH, y + 32
    return canvas


def perfetto_trace(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Return a trace for ui.perfetto.dev or chrome://tracing; a cost of 1 is shown as 1 ms.

    The trace shows stages as threads, slots as slices, and messages between stages as arrows. Each
    stage has a counter for the chunks with saved activations.
    """
    times = _Timeline(schedule, costs)
    about = {"name": summary(schedule).splitlines()[0]}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": about}
    ]
    for stage in range(schedule.num_stages):
        thread = {"ph": "M", "pid": 0, "tid": stage}
        events += [
            thread | {"name": "thread_name", "args": {"name": f"stage {stage}"}},
            thread | {"name": "thread_sort_index", "args": {"sort_index": stage}},
        ]
    for work in _work(schedule):
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": work.stage,
                "name": f"{work.chunk}{work.kind}{work.microbatch}",
                "cat": _KIND_NAMES[work.kind],
                "ts": _microseconds(times.start(work)),
                "dur": _microseconds(costs.of(work.kind)),
                "args": {
                    "microbatch": work.microbatch,
                    "chunk": work.chunk,
                    "repeat": work.repeat,
                    "tick": work.tick,
                },
            }
        )
    for number, (sender, receiver) in enumerate(_messages(schedule)):
        arrow = {"pid": 0, "name": "message", "cat": "message", "id": number}
        # An arrow must start inside a slice, because the next slice may already have started at the
        # end of a slice.
        sent = times.start(sender) + costs.of(sender.kind) / 2
        read = times.start(receiver)
        events += [
            arrow | {"ph": "s", "tid": sender.stage, "ts": _microseconds(sent)},
            arrow | {"ph": "f", "bp": "e", "tid": receiver.stage, "ts": _microseconds(read)},
        ]
    for stage, depths in enumerate(schedule.stash_depth().T if schedule.trains else ()):
        counter = {"ph": "C", "pid": 0, "name": f"saved chunks, stage {stage}"}
        for tick in [0, *(np.flatnonzero(np.diff(depths)) + 1).tolist()]:
            args = {"chunks": int(depths[tick])}
            events.append(counter | {"ts": _microseconds(times.ticks[tick]), "args": args})
        events.append(counter | {"ts": _microseconds(times.ticks[-1]), "args": {"chunks": 0}})
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


# Time.


class _Work(NamedTuple):
    """Work of one stage in one slot."""

    kind: ActionKind
    tick: int
    stage: int
    microbatch: int
    repeat: int
    chunk: int


def _work(schedule: Schedule) -> Iterator[_Work]:
    for kind, slots in schedule.kinds:
        for tick, stage in np.argwhere(slots.active).tolist():
            repeat = int(slots.repeat[tick, stage])
            chunk = schedule.ring.chunk(stage, repeat)
            microbatch = int(slots.microbatch[tick, stage])
            yield _Work(kind, tick, stage, microbatch, repeat, chunk)


def _messages(schedule: Schedule) -> Iterator[tuple[_Work, _Work]]:
    """Yield (sender, receiver) for every message between stages."""
    works = {(work.kind, work.chunk, work.microbatch): work for work in _work(schedule)}
    for work in works.values():
        if work.kind != "W":
            target = work.chunk + (1 if work.kind == "F" else -1)
            receiver = works.get((work.kind, target, work.microbatch))
            if receiver is not None and receiver.stage != work.stage:
                yield work, receiver


class _Timeline:
    """Start times of ticks and slots if all stages advance in lockstep."""

    def __init__(self, schedule: Schedule, costs: Costs):
        spent = schedule.tick_costs(costs)
        self.ticks = np.concatenate([[0.0], np.cumsum(spent)])
        """Start time of each tick, and the end time of the last tick."""
        self.slots: dict[ActionKind, np.ndarray] = {}
        start = self.ticks[:-1]
        for kind, slots in schedule.kinds:
            self.slots[kind] = start
            if not schedule.mixed:
                start = start + costs.of(kind) * slots.active.any(axis=1)

    def start(self, work: _Work) -> float:
        return float(self.slots[work.kind][work.tick])


def _microseconds(time: float) -> float:
    return round(1000 * float(time), 3)


# Geometry, in pixels.


class _Shade(NamedTuple):
    fill: str
    text: str
    line: str | None = None


_INK, _GREY, _PALE, _RULE, _SAVED = "#1d2633", "#667085", "#eff1f5", "#dfe3e9", "#b4bdcb"
# Light, dark and pale color for each repeat. If there are more repeats than entries, colors are
# reused.
_COLOURS = (
    ("#8fb8f4", "#2456a6", "#dfeafc"),
    ("#f6b26b", "#a8530a", "#fdebd3"),
    ("#86cfae", "#1f6f4c", "#dcf2e7"),
    ("#bba6ef", "#5a3aa6", "#ebe4fb"),
    ("#f29cb3", "#a12e56", "#fce2e9"),
    ("#7fcbd6", "#166c79", "#daf0f3"),
    ("#cfc865", "#6b6510", "#f2f0cd"),
    ("#a9b3c4", "#465268", "#e6e9ef"),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 68.0, 44.0, 58.0, 32.0
_BOX_HEIGHT, _STRIP_HEIGHT, _LANE_GAP = 24.0, 14.0, 9.0
_LEGEND_LINE = 24.0
_OVERVIEW_TICKS = 64
_MIN_WIDTH = 720.0
_WIDTH = 1500.0
"""Preferred width of the lanes, limited by `_MIN_UNIT` and `_MAX_UNIT`."""
_MIN_UNIT, _MAX_UNIT, _MAX_WIDTH = 13.0, 30.0, 16000.0


def _shade(kind: ActionKind, repeat: int) -> _Shade:
    light, dark, pale = _COLOURS[repeat % len(_COLOURS)]
    if kind == "F":
        return _Shade(light, _INK)
    return _Shade(pale, _INK, light) if kind == "W" else _Shade(dark, "#ffffff")


class _Picture:
    """Lanes, slots and memory strips of one schedule."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs = schedule, costs
        self.times = _Timeline(schedule, costs)
        self.canvas = Canvas()
        self.boxes, self.areas = self.canvas.boxes, self.canvas.areas
        self.labels = self.canvas.labels
        total = float(self.times.ticks[-1])
        shortest = min(costs.of(kind) for kind, _ in schedule.kinds)
        unit = min(max(_WIDTH * shortest / total, _MIN_UNIT), _MAX_UNIT) / shortest
        self.unit = min(unit, _MAX_WIDTH / total)
        self.end = _LEFT + total * self.unit
        titles = summary(schedule, costs).splitlines()
        needed = [
            _LEFT + text_width(text, size) for text, size in zip(titles, (15, 12), strict=True)
        ]
        self.width = round(max(_MIN_WIDTH, self.end + _RIGHT, *needed))
        self.labels += [
            Label(_LEFT, 27, titles[0], 15, _INK, "l", bold=True),
            Label(_LEFT, 47, titles[1], 12, _GREY, "l"),
        ]
        self.top = self._legend(_TOP + 6) + 18
        strip = _STRIP_HEIGHT + 2 if schedule.trains else 0
        self.pitch = _BOX_HEIGHT + strip + _LANE_GAP
        self.canvas.width = self.width
        self.canvas.height = round(self.top + schedule.num_stages * self.pitch + _BOTTOM)
        self._lanes()
        self._axis()
        self._slots()
        if schedule.trains:
            self._draw_saved_chunks()

    def _x(self, time: float) -> float:
        return _LEFT + float(time) * self.unit

    def _lane(self, stage: int) -> float:
        return self.top + stage * self.pitch

    def _legend(self, y: float) -> float:
        """Draw the legend, and return the y coordinate of the next line."""
        kinds: list[ActionKind] = [kind for kind, _ in self.schedule.kinds]
        x = _LEFT
        for repeat in range(min(self.schedule.num_repeats, len(_COLOURS))):
            last = repeat + 1 == len(_COLOURS) < self.schedule.num_repeats
            text = f"repeat {repeat}, and so on" if last else f"repeat {repeat}"
            width = 19.0 * len(kinds) + 5 + text_width(text, 12) + 16
            x, y = (x, y) if x + width <= self.width else (_LEFT, y + _LEGEND_LINE)
            for column, kind in enumerate(kinds):
                self._chip(x + 19 * column, y, kind, _shade(kind, repeat))
            self.labels.append(Label(x + 19 * len(kinds) + 5, y + 12, text, 12, _INK, "l"))
            x += width
        notes = [f"{kind} {_KIND_NAMES[kind]}" for kind in kinds]
        notes += ["box: microbatch"] + ["grey: saved chunks"] * self.schedule.trains
        width = sum(text_width(note, 12) + 16 for note in notes)
        x, y = (x, y) if x + width <= self.width else (_LEFT, y + _LEGEND_LINE)
        for note in notes:
            self.labels.append(Label(x, y + 12, note, 12, _GREY, "l"))
            x += text_width(note, 12) + 16
        return y + _LEGEND_LINE

    def _chip(self, x: float, y: float, kind: ActionKind, shade: _Shade) -> None:
        self.boxes.append(Box(x, y, 17, 16, shade.fill, shade.line, 3))
        self.labels.append(Label(x + 8.5, y + 12, kind, 11, shade.text))

    def _lanes(self) -> None:
        for stage in range(self.schedule.num_stages):
            y = self._lane(stage)
            self.boxes.append(Box(_LEFT, y, self.end - _LEFT, _BOX_HEIGHT, _PALE))
            self.labels.append(Label(_LEFT - 10, y + 16.5, f"stage {stage}", 12, _INK, "r"))

    def _axis(self) -> None:
        """Draw tick numbers where they fit."""
        bottom = self._lane(self.schedule.num_stages) - _LANE_GAP
        free = 0.0
        for tick, time in enumerate(self.times.ticks[:-1]):
            x = self._x(time)
            if x >= free:
                self.boxes.append(Box(x - 0.5, self.top - 4, 1, bottom - self.top + 10, _RULE))
                self.labels.append(Label(x, bottom + 19, f"{tick}", 11, _GREY))
                free = x + text_width(f"{tick}", 11) + 9
        self.labels.append(Label(_LEFT - 10, bottom + 19, "tick", 11, _GREY, "r"))

    def _slots(self) -> None:
        """Draw the slots, omitting microbatch indices that do not fit."""
        longest = str(self.schedule.num_microbatches - 1)
        size: dict[ActionKind, int] = {
            kind: max([8, *(s for s in range(9, 13) if self._fits(longest, s, kind))])
            for kind, _ in self.schedule.kinds
        }
        for work in _work(self.schedule):
            shade = _shade(work.kind, work.repeat)
            x, y = self._x(self.times.start(work)), self._lane(work.stage)
            width = self.costs.of(work.kind) * self.unit
            gap = min(0.75, width / 8)
            text = str(work.microbatch)
            title = (
                f"{_KIND_NAMES[work.kind]} of microbatch {work.microbatch}, chunk {work.chunk} "
                f"(repeat {work.repeat}), stage {work.stage}, tick {work.tick}"
            )
            inside = 0.5 if shade.line else 0.0  # half of the outline's width is outside the box
            self.boxes.append(
                Box(
                    x + gap + inside,
                    y + inside,
                    width - 2 * (gap + inside),
                    _BOX_HEIGHT - 2 * inside,
                    shade.fill,
                    shade.line,
                    min(3.0, width / 4),
                    title,
                )
            )
            if self._fits(text, size[work.kind], work.kind):
                baseline = y + _BOX_HEIGHT / 2 + 0.36 * size[work.kind]
                label = Label(x + width / 2, baseline, text, size[work.kind], shade.text)
                self.labels.append(label)

    def _fits(self, text: str, size: int, kind: ActionKind) -> bool:
        return text_width(text, size) + 2 <= self.costs.of(kind) * self.unit

    def _draw_saved_chunks(self) -> None:
        """Draw, below each lane, the number of chunks with saved activations and the maximum of
        this number.
        """
        depths = self.schedule.stash_depth()
        per_chunk = _STRIP_HEIGHT / max(1, int(depths.max()))
        ticks = self.times.ticks
        for stage in range(self.schedule.num_stages):
            floor = self._lane(stage) + _BOX_HEIGHT + 2 + _STRIP_HEIGHT
            points = [(_LEFT, floor)]
            for tick, depth in enumerate(depths[:, stage].tolist()):
                height = floor - depth * per_chunk
                if points[-1][1] != height:
                    points += [
                        (self._x(ticks[tick]), points[-1][1]),
                        (self._x(ticks[tick]), height),
                    ]
            points += [(self.end, points[-1][1]), (self.end, floor)]
            self.areas.append(Area(points, _SAVED))
            most = f"{int(depths[:, stage].max())}"
            self.labels.append(Label(self.end + 8, floor - 2, most, 11, _GREY, "l"))
