"""Images of schedules as SVG or PNG, and traces for Perfetto.

An image has one lane for each stage. The lane shows the stage's work over time, labeled with
microbatch indices. The number of chunks with saved activations is plotted below the work. Each
repeat has a color, and each slot type has a shade of this color. All stages advance in lockstep,
and slots have the given costs. A long schedule continues in further rows of lanes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.io.formatting import pluralize
from maxpipe.schedule.canvas import (
    BOX_INK,
    DEFERRED,
    GREY,
    HUES,
    INK,
    OVERVIEW_WIDTH,
    PAGE_WIDTH,
    PALE,
    RULE,
    SAVED,
    Area,
    Box,
    Canvas,
    Label,
    text_width,
    wrap_text,
)
from maxpipe.schedule.draw import EQUAL_COSTS, summary
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
    times, canvas = Timeline(schedule, EQUAL_COSTS), Canvas()
    ticks = min(schedule.num_ticks, _OVERVIEW_TICKS)
    left, right, lane = 36.0, 12.0, max(4.0, min(30.0, 400.0 / schedule.num_stages - 2))
    unit = (OVERVIEW_WIDTH - left - right) / float(times.ticks[ticks])
    some = "" if ticks == schedule.num_ticks else f"first {ticks} of "
    lines = (
        (schedule.name, 20, INK),
        (
            f"{schedule.describe_sizes()}, {pluralize(schedule.num_microbatches, 'microbatch')}",
            18,
            INK,
        ),
        (f"bubble {schedule.idle_fraction():.1%}, {some}{schedule.num_ticks} ticks", 18, INK),
    )
    y = 0.0
    for text, size, colour in lines:
        y += size + 8
        canvas.labels.append(Label(12, y, text, size, colour, "l", bold=size == 20))
    top = y + 14
    every = -(-16 // int(lane + 2))
    for stage in range(schedule.num_stages):
        y = top + stage * (lane + 2)
        canvas.boxes.append(Box(left, y, OVERVIEW_WIDTH - left - right, lane, PALE))
        if stage % every == 0:
            canvas.labels.append(Label(left - 8, y + lane / 2 + 6, f"{stage}", 16, INK, "r"))
    for work in list_work(schedule):
        if work.tick < ticks:
            shade = shade_of(work.kind, work.repeat)
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
        shade, name = shade_of(kind, 0), _KIND_NAMES[kind]
        if x + 24 + text_width(name, 18) > OVERVIEW_WIDTH:
            x, y = 12.0, y + 26
        canvas.boxes.append(Box(x, y, 18, 18, shade.fill, shade.line))
        canvas.labels.append(Label(x + 24, y + 15, name, 18, INK, "l"))
        x += 24 + text_width(name, 18) + 16
    if schedule.num_repeats > 1:
        y += 26
        canvas.labels.append(Label(12, y + 15, "one color for each repeat", 18, INK, "l"))
    canvas.width, canvas.height = OVERVIEW_WIDTH, y + 32
    return canvas


def perfetto_trace(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Return a trace for ui.perfetto.dev or chrome://tracing; a cost of 1 is shown as 1 ms.

    The trace shows stages as threads, slots as slices, and messages between stages as arrows. Each
    stage has a counter for the chunks with saved activations.
    """
    times = Timeline(schedule, costs)
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
    for work in list_work(schedule):
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


class Work(NamedTuple):
    """Work of one stage in one slot."""

    kind: ActionKind
    tick: int
    stage: int
    microbatch: int
    repeat: int
    chunk: int


def list_work(schedule: Schedule) -> Iterator[Work]:
    """Yield the work of all slots."""
    for kind, slots in schedule.kinds:
        for tick, stage in np.argwhere(slots.active).tolist():
            repeat = int(slots.repeat[tick, stage])
            chunk = schedule.ring.chunk(stage, repeat)
            microbatch = int(slots.microbatch[tick, stage])
            yield Work(kind, tick, stage, microbatch, repeat, chunk)


def _messages(schedule: Schedule) -> Iterator[tuple[Work, Work]]:
    """Yield (sender, receiver) for every message between stages."""
    works = {(work.kind, work.chunk, work.microbatch): work for work in list_work(schedule)}
    for work in works.values():
        if work.kind != "W":
            target = work.chunk + (1 if work.kind == "F" else -1)
            receiver = works.get((work.kind, target, work.microbatch))
            if receiver is not None and receiver.stage != work.stage:
                yield work, receiver


class Timeline:
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

    def start(self, work: Work) -> float:
        """Return the start time of a slot."""
        return float(self.slots[work.kind][work.tick])


def _microseconds(time: float) -> float:
    return round(1000 * float(time), 3)


# Geometry, in pixels.


class Shade(NamedTuple):
    """Colors of one slot type in one repeat."""

    fill: str
    text: str
    line: str | None = None


_LEFT, _RIGHT = 100.0, 62.0
_BOX_HEIGHT, _STRIP_HEIGHT, _LANE_GAP = 24.0, 14.0, 9.0
_AXIS_HEIGHT = 34.0
_LEGEND_LINE = 22.0
_OVERVIEW_TICKS = 64
_TEXT, _NUMBER = 12, 11
"""Font sizes of text and of microbatch indices."""
_MIN_WIDTH = 620.0
_ROW_WIDTH = PAGE_WIDTH - _LEFT - _RIGHT
"""Maximum width of the lanes."""
_MAX_UNIT = 30.0
_MIN_UNIT = 3.0
"""Minimum width of the shortest slot if microbatch indices do not fit."""
_NUMBERED_ROWS, _MAX_ROWS = 4, 12
"""Maximum number of rows of lanes, with and without microbatch indices."""


def shade_of(kind: ActionKind, repeat: int) -> Shade:
    """Return the colors of a slot: light for F, dark for B and I, pale for W."""
    light, dark, pale = HUES[repeat % len(HUES)]
    if kind == "F":
        return Shade(light, BOX_INK)
    return Shade(pale, INK, light) if kind == "W" else Shade(dark, "#ffffff")


class _Picture:
    """Lanes, slots and memory strips of one schedule."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs = schedule, costs
        self.times = Timeline(schedule, costs)
        self.canvas = Canvas()
        self.boxes, self.areas = self.canvas.boxes, self.canvas.areas
        self.labels = self.canvas.labels
        self.unit = self._choose_unit()
        self.rows = self._break_rows()
        ends = [self._x(self.times.ticks[row.stop], row) for row in self.rows]
        self.width = max(_MIN_WIDTH, round(max(ends) + _RIGHT))
        self.top = self._legend(self._title())
        strip = _STRIP_HEIGHT + 2 if schedule.trains else 0
        self.pitch = _BOX_HEIGHT + strip + _LANE_GAP
        self.row_height = schedule.num_stages * self.pitch + _AXIS_HEIGHT
        self.canvas.width = self.width
        self.canvas.height = round(self.top + len(self.rows) * self.row_height)
        for number in range(len(self.rows)):
            self._lanes(number)
        self._slots()
        if schedule.trains:
            for number in range(len(self.rows)):
                self._draw_saved_chunks(number)
        self._describe()

    def _choose_unit(self) -> float:
        """Return the width of one time unit: the largest of the fewest rows in which microbatch
        indices fit, or a smaller one without indices.
        """
        total = float(self.times.ticks[-1])
        shortest = min(self.costs.of(kind) for kind, _ in self.schedule.kinds)
        longest = float(np.diff(self.times.ticks).max())
        number = text_width(str(self.schedule.num_microbatches - 1), _NUMBER) + 2
        # A row ends between two ticks, so up to the length of a tick is lost in every row but one.
        unit = 0.0
        for rows in range(1, _MAX_ROWS + 1):
            unit = rows * _ROW_WIDTH / (total + (rows - 1) * longest)
            if unit * shortest >= (number if rows <= _NUMBERED_ROWS else _MIN_UNIT):
                break
        return min(unit, _MAX_UNIT / shortest, _ROW_WIDTH / longest)

    def _break_rows(self) -> list[range]:
        """Return the ticks of each row of lanes."""
        rows, start = [], 0
        room = _ROW_WIDTH / self.unit * (1 + 1e-9)
        for tick in range(self.schedule.num_ticks):
            if self.times.ticks[tick + 1] - self.times.ticks[start] > room:
                rows.append(range(start, tick))
                start = tick
        return [*rows, range(start, self.schedule.num_ticks)]

    def _x(self, time: float, row: range) -> float:
        return _LEFT + float(time - self.times.ticks[row.start]) * self.unit

    def _lane(self, row: int, stage: int) -> float:
        return self.top + row * self.row_height + stage * self.pitch

    def _title(self) -> float:
        """Draw the title, and return the y coordinate of the next line."""
        first, second = summary(self.schedule, self.costs).splitlines()
        y = 27.0
        for text, size in ((first, 15), (second, _TEXT)):
            for line in wrap_text(text, size, self.width - 32):
                self.labels.append(
                    Label(16, y, line, size, INK if size == 15 else GREY, "l", bold=size == 15)
                )
                y += size + 7
        return y - 7

    def _legend(self, y: float) -> float:
        """Draw the legend, and return the y coordinate of the lanes."""
        x = 16.0
        kinds: list[ActionKind] = [kind for kind, _ in self.schedule.kinds]
        repeats = range(min(self.schedule.num_repeats, len(HUES)))
        entries = [
            ([(kind, shade_of(kind, n)) for kind in kinds], self._repeat(n)) for n in repeats
        ]
        entries += [([], f"{kind} {_KIND_NAMES[kind]}") for kind in kinds]
        entries.append(([("", Shade(PALE, INK, RULE))], "idle (bubble)"))
        if self.schedule.trains:
            entries.append(([("", Shade(SAVED, INK))], "saved chunks, peak at the right"))
        if self.schedule.mixed:
            entries.append(([("", Shade(DEFERRED, INK))], "deferred weight gradients"))
        entries += [([], "number: microbatch"), ([], f"width: time{self._cost_ratio()}")]
        for chips, text in entries:
            width = 19.0 * len(chips) + 5 * bool(chips) + text_width(text, _TEXT) + 16
            x, y = (x, y) if x == 16 or x + width <= self.width else (16.0, y + _LEGEND_LINE)
            for column, (letter, shade) in enumerate(chips):
                self._chip(x + 19 * column, y, letter, shade)
            colour, left = (INK if chips else GREY), x + 19 * len(chips) + 5 * bool(chips)
            self.labels.append(Label(left, y + 12, text, _TEXT, colour, "l"))
            x += width
        y += 8 if self.schedule.trains else 0
        return y + _LEGEND_LINE + 14

    def _repeat(self, repeat: int) -> str:
        """Return the legend's text for one repeat; in a V, its chunks and their direction."""
        ring = self.schedule.ring
        if repeat + 1 == len(HUES) < ring.num_repeats:
            return f"repeat {repeat}, and so on"
        if ring.shape != "v" or ring.num_stages == 1:
            return f"repeat {repeat}"
        first = repeat * ring.num_stages
        way = "back to the first" if repeat % 2 else "first to last"
        return f"repeat {repeat}: chunks {first} to {first + ring.num_stages - 1}, {way} stage"

    def _cost_ratio(self) -> str:
        """Return the costs of the slot types as multiples of F."""
        costs = [
            f"{kind} = {self.costs.of(kind) / self.costs.forward:.3g} F"
            for kind, _ in self.schedule.kinds[1:]
        ]
        return f", {', '.join(costs).replace(' 1 F', ' F')}" if costs else ""

    def _chip(self, x: float, y: float, letter: str, shade: Shade) -> None:
        self.boxes.append(Box(x, y, 17, 16, shade.fill, shade.line, 3))
        if letter:
            self.labels.append(Label(x + 8.5, y + 12, letter, _NUMBER, shade.text))

    def _lanes(self, number: int) -> None:
        """Draw the lanes of one row, and tick numbers where they fit."""
        row, schedule = self.rows[number], self.schedule
        end = self._x(self.times.ticks[row.stop], row)
        for stage in range(schedule.num_stages):
            y = self._lane(number, stage)
            self.boxes.append(Box(_LEFT, y, end - _LEFT, _BOX_HEIGHT, PALE))
            self.labels.append(Label(_LEFT - 10, y + 16.5, f"stage {stage}", _TEXT, INK, "r"))
            if schedule.num_repeats > 1 and schedule.trains:
                text = self._chunks(stage)
                self.labels.append(Label(_LEFT - 10, y + 34, text, _NUMBER, GREY, "r"))
        top, bottom = self._lane(number, 0), self._lane(number, schedule.num_stages) - _LANE_GAP
        free = 0.0
        for tick in row:
            x = self._x(self.times.ticks[tick], row)
            if x >= free:
                self.boxes.append(Box(x - 0.5, top - 4, 1, bottom - top + 10, RULE))
                self.labels.append(Label(x, bottom + 19, f"{tick}", _NUMBER, GREY))
                free = x + text_width(f"{tick}", _NUMBER) + 9
        self.labels.append(Label(_LEFT - 22, bottom + 19, "tick", _NUMBER, GREY, "r"))

    def _chunks(self, stage: int) -> str:
        """Return the chunks of a stage, as many as fit next to its lane."""
        repeats = range(self.schedule.num_repeats)
        chunks = [str(self.schedule.ring.chunk(stage, repeat)) for repeat in repeats]
        text = f"chunks {', '.join(chunks)}"
        while text_width(text, _NUMBER) > _LEFT - 14:
            chunks.pop()
            text = f"chunks {', '.join(chunks)}, ..."
        return text

    def _slots(self) -> None:
        """Draw the slots, omitting microbatch indices that do not fit."""
        row_of = {tick: number for number, row in enumerate(self.rows) for tick in row}
        for work in list_work(self.schedule):
            shade, number = shade_of(work.kind, work.repeat), row_of[work.tick]
            x = self._x(self.times.start(work), self.rows[number])
            y = self._lane(number, work.stage)
            width = self.costs.of(work.kind) * self.unit
            gap = min(0.75, width / 8)
            text = str(work.microbatch)
            title = (
                f"{_KIND_NAMES[work.kind]} of microbatch {work.microbatch}, chunk {work.chunk} "
                f"(repeat {work.repeat}), stage {work.stage}, tick {work.tick}"
            )
            # half of the outline's width is outside the box
            inside = 0.5 if shade.line and width > 4 else 0.0
            self.boxes.append(
                Box(
                    x + gap + inside,
                    y + inside,
                    width - 2 * (gap + inside),
                    _BOX_HEIGHT - 2 * inside,
                    shade.fill,
                    shade.line if inside else None,
                    min(3.0, width / 4),
                    title,
                )
            )
            sizes = (size for size in (12, _NUMBER) if text_width(text, size) + 2 <= width)
            if size := next(sizes, None):
                baseline = y + _BOX_HEIGHT / 2 + 0.36 * size
                self.labels.append(Label(x + width / 2, baseline, text, size, shade.text))

    def _draw_saved_chunks(self, number: int) -> None:
        """Draw, below each lane of a row, the number of chunks with saved activations, and the
        maximum of this number.

        The part with deferred weight gradients has a darker shade.
        """
        depths, row = self.schedule.stash_depth(), self.rows[number]
        parts = [(depths, SAVED)]
        if self.schedule.mixed:
            parts.append((self.schedule.deferred_depth(), DEFERRED))
        per_chunk = _STRIP_HEIGHT / max(1, int(depths.max()))
        end = self._x(self.times.ticks[row.stop], row)
        if number == 0:
            self.labels.append(Label(end + 8, self.top - 6, "peak", _TEXT, GREY, "l"))
        for stage in range(self.schedule.num_stages):
            floor = self._lane(number, stage) + _BOX_HEIGHT + 2 + _STRIP_HEIGHT
            for part, colour in parts:
                points = [(_LEFT, floor)]
                for tick in row:
                    height = floor - int(part[tick, stage]) * per_chunk
                    if points[-1][1] != height:
                        x = self._x(self.times.ticks[tick], row)
                        points += [(x, points[-1][1]), (x, height)]
                points += [(end, points[-1][1]), (end, floor)]
                self.areas.append(Area(points, colour))
            if number == 0:
                most = f"{int(depths[:, stage].max())}"
                self.labels.append(Label(end + 8, floor - 2, most, _TEXT, INK, "l"))

    def _describe(self) -> None:
        schedule = self.schedule
        self.canvas.title = f"Timeline of the {schedule.name} schedule"
        text = (
            f"{schedule.describe_sizes()}, {pluralize(schedule.num_microbatches, 'microbatch')}. "
            "Each row is a stage, and each box is one slot."
        )
        if schedule.trains:
            peaks = schedule.stash_depth().max(axis=0).tolist()
            text += f" Peak of saved chunks: {', '.join(map(str, peaks[:8]))}"
            text += ", and so on." if len(peaks) > 8 else "."
        self.canvas.description = text
