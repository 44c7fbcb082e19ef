"""A schedule as a picture, SVG or PNG, and as a trace for Perfetto.

A picture has a lane for each stage: what it computes over time, with the number of the microbatch,
and below that how many chunks' activations it keeps. Colours tell repeats apart, shades kinds of
slots. Time is that of lockstep ticks at given costs. SVG and PNG draw the same `_Picture`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from maxpipe.pipeline.draw import EQUAL_COSTS, summary
from maxpipe.pipeline.table import Costs, Kind, Schedule

_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


def svg(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """The picture as an SVG document; a box tells its chunk and tick under the pointer."""
    picture = _Picture(schedule, costs)
    size = f'width="{_number(picture.width)}" height="{_number(picture.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {_number(picture.width)} {_number(picture.height)}" '
        'font-family="Inter, Helvetica, Arial, sans-serif">'
    ]
    for box in picture.boxes:
        line = f'stroke="{box.line}" ' if box.line else ""
        title = f"<title>{escape(box.title)}</title>" if box.title else ""
        lines.append(
            f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
            f'height="{_number(box.height)}" rx="{_number(box.radius)}" {line}fill="{box.fill}"'
            + (f">{title}</rect>" if title else "/>")
        )
    for area in picture.areas:
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in area.points)
        lines.append(f'<polygon points="{points}" fill="{area.fill}"/>')
    anchors = {"l": "start", "m": "middle", "r": "end"}
    for label in picture.labels:
        weight = ' font-weight="600"' if label.bold else ""
        lines.append(
            f'<text x="{_number(label.x)}" y="{_number(label.y)}" font-size="{label.size}"{weight} '
            f'text-anchor="{anchors[label.anchor]}" fill="{label.colour}" '
            f'pointer-events="none">{escape(label.text)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def png(schedule: Schedule, path: Path, costs: Costs = EQUAL_COSTS) -> None:
    """Write the picture as PNG, at twice the size of the SVG where that is not too large."""
    from PIL import Image, ImageDraw, ImageFont

    picture = _Picture(schedule, costs)
    scale = 2 if picture.width * picture.height < _LARGE_PIXELS else 1
    image = Image.new("RGB", (round(picture.width * scale), round(picture.height * scale)), "white")
    canvas = ImageDraw.Draw(image)
    fonts = {
        size: ImageFont.load_default(size * scale) for size in {la.size for la in picture.labels}
    }
    for box in picture.boxes:
        corners = [box.x, box.y, box.x + box.width, box.y + box.height]
        left, top, right, bottom = (round(value * scale) for value in corners)
        # Pillow includes the far edge.
        edges = (left, top, max(left, right - 1), max(top, bottom - 1))
        canvas.rounded_rectangle(edges, box.radius * scale, box.fill, box.line, scale)
    for area in picture.areas:
        canvas.polygon([(x * scale, y * scale) for x, y in area.points], area.fill)
    for label in picture.labels:
        canvas.text(
            (label.x * scale, label.y * scale),
            label.text,
            label.colour,
            fonts[label.size],
            anchor=f"{label.anchor}s",
        )
    image.save(path, format="PNG")


def perfetto(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """A trace for ui.perfetto.dev or chrome://tracing, where a cost of 1 is a millisecond.

    Stages are threads, slots are slices, messages between stages are arrows, and how many chunks'
    activations a stage keeps is a counter.
    """
    times = _Times(schedule, costs)
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
                "cat": _NAMES[work.kind],
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
        # An arrow begins inside of a slice; at its very end the next one may have begun.
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
    """What a stage does in one slot."""

    kind: Kind
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
    """(sender, receiver) of what goes from one stage to another."""
    works = {(work.kind, work.chunk, work.microbatch): work for work in _work(schedule)}
    for work in works.values():
        if work.kind != "W":
            target = work.chunk + (1 if work.kind == "F" else -1)
            receiver = works.get((work.kind, target, work.microbatch))
            if receiver is not None and receiver.stage != work.stage:
                yield work, receiver


class _Times:
    """When ticks and slots begin, in lockstep."""

    def __init__(self, schedule: Schedule, costs: Costs):
        spent = schedule.tick_costs(costs)
        self.ticks = np.concatenate([[0.0], np.cumsum(spent)])
        """Start of each tick, and the end of the last one."""
        self.slots: dict[Kind, np.ndarray] = {}
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


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str | None = None
    radius: float = 0.0
    title: str = ""


class _Area(NamedTuple):
    points: list[tuple[float, float]]
    fill: str


class _Label(NamedTuple):
    x: float
    y: float
    """Of the baseline."""
    text: str
    size: int
    colour: str
    anchor: str = "m"
    """Where `x` is: l(eft), m(iddle), or r(ight)."""
    bold: bool = False


class _Shade(NamedTuple):
    fill: str
    text: str
    line: str | None = None


_INK, _GREY, _PALE, _RULE, _KEPT = "#1d2633", "#667085", "#eff1f5", "#dfe3e9", "#b4bdcb"
# For each repeat, then again from the start: light, dark, pale.
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
_MIN_WIDTH = 720.0
_WIDTH = 1500.0
"""As wide as a picture likes to be, if its boxes are then neither narrow nor wide."""
_MIN_UNIT, _MAX_UNIT, _MAX_WIDTH = 13.0, 30.0, 16000.0
_LARGE_PIXELS = 12e6


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text_width(text: str, size: float) -> float:
    """Fonts differ; this is enough for most."""
    return 0.56 * size * len(text)


def _shade(kind: Kind, repeat: int) -> _Shade:
    light, dark, pale = _COLOURS[repeat % len(_COLOURS)]
    if kind == "F":
        return _Shade(light, _INK)
    return _Shade(pale, _INK, light) if kind == "W" else _Shade(dark, "#ffffff")


class _Picture:
    """Boxes, areas and labels, to be drawn in this order."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs = schedule, costs
        self.times = _Times(schedule, costs)
        self.boxes: list[_Box] = []
        self.areas: list[_Area] = []
        self.labels: list[_Label] = []
        total = float(self.times.ticks[-1])
        shortest = min(costs.of(kind) for kind, _ in schedule.kinds)
        unit = min(max(_WIDTH * shortest / total, _MIN_UNIT), _MAX_UNIT) / shortest
        self.unit = min(unit, _MAX_WIDTH / total)
        self.end = _LEFT + total * self.unit
        titles = summary(schedule, costs).splitlines()
        needed = [
            _LEFT + _text_width(text, size) for text, size in zip(titles, (15, 12), strict=True)
        ]
        self.width = round(max(_MIN_WIDTH, self.end + _RIGHT, *needed))
        self.labels += [
            _Label(_LEFT, 27, titles[0], 15, _INK, "l", bold=True),
            _Label(_LEFT, 47, titles[1], 12, _GREY, "l"),
        ]
        self.top = self._legend(_TOP + 6) + 18
        strip = _STRIP_HEIGHT + 2 if schedule.trains else 0
        self.pitch = _BOX_HEIGHT + strip + _LANE_GAP
        self.height = round(self.top + schedule.num_stages * self.pitch + _BOTTOM)
        self._lanes()
        self._axis()
        self._slots()
        if schedule.trains:
            self._kept()

    def _x(self, time: float) -> float:
        return _LEFT + float(time) * self.unit

    def _lane(self, stage: int) -> float:
        return self.top + stage * self.pitch

    def _legend(self, y: float) -> float:
        """Draws what colours mean; returns where the next line would be."""
        kinds: list[Kind] = [kind for kind, _ in self.schedule.kinds]
        x = _LEFT
        for repeat in range(min(self.schedule.num_repeats, len(_COLOURS))):
            last = repeat + 1 == len(_COLOURS) < self.schedule.num_repeats
            text = f"repeat {repeat}, and so on" if last else f"repeat {repeat}"
            width = 19.0 * len(kinds) + 5 + _text_width(text, 12) + 16
            x, y = (x, y) if x + width <= self.width else (_LEFT, y + _LEGEND_LINE)
            for place, kind in enumerate(kinds):
                self._chip(x + 19 * place, y, kind, _shade(kind, repeat))
            self.labels.append(_Label(x + 19 * len(kinds) + 5, y + 12, text, 12, _INK, "l"))
            x += width
        notes = [f"{kind} {_NAMES[kind]}" for kind in kinds]
        notes += ["box: microbatch"] + ["grey: saved chunks"] * self.schedule.trains
        width = sum(_text_width(note, 12) + 16 for note in notes)
        x, y = (x, y) if x + width <= self.width else (_LEFT, y + _LEGEND_LINE)
        for note in notes:
            self.labels.append(_Label(x, y + 12, note, 12, _GREY, "l"))
            x += _text_width(note, 12) + 16
        return y + _LEGEND_LINE

    def _chip(self, x: float, y: float, kind: Kind, shade: _Shade) -> None:
        self.boxes.append(_Box(x, y, 17, 16, shade.fill, shade.line, 3))
        self.labels.append(_Label(x + 8.5, y + 12, kind, 11, shade.text))

    def _lanes(self) -> None:
        for stage in range(self.schedule.num_stages):
            y = self._lane(stage)
            self.boxes.append(_Box(_LEFT, y, self.end - _LEFT, _BOX_HEIGHT, _PALE))
            self.labels.append(_Label(_LEFT - 10, y + 16.5, f"stage {stage}", 12, _INK, "r"))

    def _axis(self) -> None:
        """The ticks for whose number there is room."""
        bottom = self._lane(self.schedule.num_stages) - _LANE_GAP
        free = 0.0
        for tick, time in enumerate(self.times.ticks[:-1]):
            x = self._x(time)
            if x >= free:
                self.boxes.append(_Box(x - 0.5, self.top - 4, 1, bottom - self.top + 10, _RULE))
                self.labels.append(_Label(x, bottom + 19, f"{tick}", 11, _GREY))
                free = x + _text_width(f"{tick}", 11) + 9
        self.labels.append(_Label(_LEFT - 10, bottom + 19, "tick", 11, _GREY, "r"))

    def _slots(self) -> None:
        """The slots; a number that does not fit is left out."""
        longest = str(self.schedule.num_microbatches - 1)
        size: dict[Kind, int] = {
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
                f"{_NAMES[work.kind]} of microbatch {work.microbatch}, chunk {work.chunk} "
                f"(repeat {work.repeat}), stage {work.stage}, tick {work.tick}"
            )
            inside = 0.5 if shade.line else 0.0  # a line is drawn half outside
            self.boxes.append(
                _Box(
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
                label = _Label(x + width / 2, baseline, text, size[work.kind], shade.text)
                self.labels.append(label)

    def _fits(self, text: str, size: int, kind: Kind) -> bool:
        return _text_width(text, size) + 2 <= self.costs.of(kind) * self.unit

    def _kept(self) -> None:
        """Under each lane, how many chunks' activations the stage keeps; its most on the right."""
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
            self.areas.append(_Area(points, _KEPT))
            most = f"{int(depths[:, stage].max())}"
            self.labels.append(_Label(self.end + 8, floor - 2, most, 11, _GREY, "l"))
