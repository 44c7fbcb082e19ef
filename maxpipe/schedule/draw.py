"""Text output for schedules: the timeline of one schedule, or a comparison of several schedules.

If a slot can hold different types of work, the timeline has one line per stage. Otherwise, the
timeline has two lines per stage: one for forward slots and one for backward slots.

Each cell contains the microbatch index and a letter for the repeat: `3b` is microbatch 3 in the
second repeat, and `.` is an empty slot. If there is one line per stage, the type of work comes
first: `F3b`, `I3b`, `W3b`.

`Canvas` is a drawing of boxes, areas, curves and labels that can be written as SVG or PNG. All
sizes are in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple
from xml.sax.saxutils import escape

from maxpipe.io.formatting import pluralize
from maxpipe.schedule.table import Costs, Schedule

EQUAL_COSTS = Costs()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def summary(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Return two lines of text: the schedule's sizes, and the time and memory that the schedule
    needs.
    """
    kept = pluralize(schedule.num_stash, "saved chunk") if schedule.trains else "no saved chunks"
    if schedule.mixed:
        kept += f" and {pluralize(schedule.num_deferred, 'deferred weight gradient')}"
    shape = " in a V" if schedule.ring.shape == "v" else ""
    delayed = ", messages delayed" if schedule.delayed else ""
    idle = f"{schedule.idle_fraction():.1%}"
    if costs != EQUAL_COSTS:
        idle += f" ({schedule.idle_fraction(costs):.1%} at {_ratio(costs)})"
    return (
        f"{schedule.name}: {schedule.describe_sizes()}{shape}, "
        f"{pluralize(schedule.num_microbatches, 'microbatch')} in groups of {schedule.group}"
        f"{delayed}\n"
        f"{pluralize(schedule.num_ticks, 'tick')}, idle {idle}, "
        f"at most {kept} on a stage, {pluralize(schedule.num_inbox, 'message')} waiting"
    )


def draw_timeline(
    schedule: Schedule,
    costs: Costs = EQUAL_COSTS,
    *,
    width: int = 0,
    mark: tuple[int, int, str] | None = None,
) -> str:
    """Return the timeline, split into blocks of at most `width` columns (0 for a single block).

    `mark` = (tick, stage, kind) adds brackets around one cell and limits the output to the block
    that contains it.
    """
    rows = _rows(schedule, mark)
    size = max(len(cell) for _, cells in rows for cell in cells)
    size = max(size, len(str(schedule.num_ticks - 1)))
    margin = max(_MARGIN, *(len(title) + 1 for title, _ in rows))
    per_block = max(1, (width - margin) // (size + 1)) if width else schedule.num_ticks
    if mark:
        per_block = 16
    blocks = []
    for start in range(0, schedule.num_ticks, per_block):
        ticks = slice(start, min(start + per_block, schedule.num_ticks))
        if mark is None or ticks.start <= mark[0] < ticks.stop:
            lines = [
                (
                    title.ljust(_MARGIN) + " ".join(cell.rjust(size) for cell in cells[ticks])
                ).rstrip()
                for title, cells in rows
            ]
            blocks.append("\n".join(lines))
    return "\n\n".join([summary(schedule, costs), *blocks])


_MARGIN = len("stage 00 F ")


def _rows(schedule: Schedule, mark: tuple[int, int, str] | None) -> list[tuple[str, list[str]]]:
    """Return, for every line of the timeline, a title and one cell per tick."""
    ticks = range(schedule.num_ticks)
    rows = [("tick", [str(tick) for tick in ticks])]
    for stage in range(schedule.num_stages):
        if schedule.mixed:
            cells = [_mixed_cell(schedule, tick, stage) for tick in ticks]
            rows.append((f"stage {stage:2d}", _mark_cell(cells, mark, stage)))
            continue
        for kind, slots in schedule.kinds:
            cells = [
                _cell(schedule, int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]))
                for tick in ticks
            ]
            title = f"stage {stage:2d} F" if kind == "F" else f"         {kind}"
            rows.append(
                (title, _mark_cell(cells, mark if mark and mark[2] == kind else None, stage))
            )
    if schedule.trains:
        rows.append(("kept", [str(depth) for depth in schedule.stash_depth().max(axis=1)]))
    return rows


def _cell(schedule: Schedule, microbatch: int, repeat: int) -> str:
    if microbatch < 0:
        return "."
    if schedule.num_repeats == 1:
        return str(microbatch)
    letter = _LETTERS[repeat] if repeat < len(_LETTERS) else f"/{repeat}"
    return f"{microbatch}{letter}"


def _mixed_cell(schedule: Schedule, tick: int, stage: int) -> str:
    for kind, slots in schedule.kinds:
        if slots.active[tick, stage]:
            microbatch, repeat = slots.microbatch[tick, stage], slots.repeat[tick, stage]
            return kind + _cell(schedule, int(microbatch), int(repeat))
    return "."


def _mark_cell(cells: list[str], mark: tuple[int, int, str] | None, stage: int) -> list[str]:
    if mark and mark[1] == stage:
        cells[mark[0]] = f"[{cells[mark[0]]}]"
    return cells


def comparison_table(schedules: Sequence[Schedule], costs: Costs) -> str:
    """Return a table with one line per schedule, which shows the step time and the memory per
    stage.
    """
    rows = [
        ["", "", "", "idle", "idle", "saved", "", "in", "", "", ""],
        ["schedule", "repeats", "ticks", "at 1:1:1", f"at {_ratio(costs)}", "chunks"],
    ]
    rows[1] += ["deferred", "layers", "inbox", "messages", "gathers"]
    for schedule in schedules:
        deferred = schedule.num_deferred if schedule.mixed else 0
        saved = schedule.num_stash if schedule.trains else 0
        visits = len(schedule.weight_window.gather_tick)
        rows.append(
            [
                schedule.name,
                f"{schedule.num_repeats}",
                f"{schedule.num_ticks}",
                f"{schedule.idle_fraction():.1%}",
                f"{schedule.idle_fraction(costs):.1%}",
                f"{saved}",
                f"{deferred}",
                f"{(saved + deferred) / schedule.num_repeats:.4g}",
                f"{schedule.num_inbox}",
                f"{_max_sent_messages(schedule)}",
                f"{visits / schedule.num_repeats:.4g}" if visits else "1",
            ]
        )
    if costs == EQUAL_COSTS:
        rows = [[*row[:4], *row[5:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    first = schedules[0]
    sizes = (
        f"{pluralize(first.num_stages, 'stage')}, {pluralize(first.num_microbatches, 'microbatch')}"
    )
    return "\n".join([sizes, *lines, *_identical_schedules(rows[1:]), "", *_LEGEND])


def _identical_schedules(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines that list the schedules whose results are identical at these sizes."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *numbers in rows:
        names.setdefault(tuple(numbers), []).append(name)
    same = [
        f"{' and '.join(each)} are identical at these sizes."
        for each in names.values()
        if len(each) > 1
    ]
    return ["", *same] if same else []


def _ratio(costs: Costs) -> str:
    return ":".join(f"{cost:g}" for cost in costs)


_LEGEND = (
    "idle: fraction of a step at costs F:I:W. saved chunks, deferred (weight gradients), inbox:",
    "slot counts per stage. in layers: saved chunks plus deferred, in units of a stage's layers.",
    "messages: maximum sent by a stage per step. "
    "gathers: per weight and step with weight_gather=window.",
)


def _max_sent_messages(schedule: Schedule) -> int:
    """Return the largest number of messages that any stage sends to other stages in a step."""
    ring = schedule.ring
    sent = [0] * ring.num_stages
    for stage in range(ring.num_stages):
        for repeat in range(ring.num_repeats):
            targets = [ring.next_chunk(stage, repeat)]
            targets += [ring.previous_chunk(stage, repeat)] if schedule.trains else []
            moves = sum(target is not None and target[0] != stage for target in targets)
            sent[stage] += moves * schedule.num_microbatches
    return max(sent)


_LARGE_PIXELS = 12e6

OVERVIEW_WIDTH = 480.0
"""Width in pixels of an overview, chosen so that 18-pixel text is still legible when scaled to 300
pixels."""


class Box(NamedTuple):
    """A rectangle; its title is shown on hover."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str | None = None
    radius: float = 0.0
    title: str = ""


class Area(NamedTuple):
    """A polygon."""

    points: list[tuple[float, float]]
    fill: str


class Curve(NamedTuple):
    """A line that connects points."""

    points: list[tuple[float, float]]
    colour: str
    width: float = 2.0


class Label(NamedTuple):
    """A line of text."""

    x: float
    y: float
    """Position of the baseline."""
    text: str
    size: int
    colour: str
    anchor: str = "m"
    """Alignment of the text relative to `x`: l(eft), m(iddle), or r(ight)."""
    bold: bool = False


def text_width(text: str, size: float) -> float:
    """Return an estimate of the text's width in pixels that is an upper bound for most fonts."""
    return 0.56 * size * len(text)


@dataclass
class Canvas:
    """A drawing that consists of boxes, areas, curves and labels, drawn in this order."""

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def append_canvas(self, other: Canvas, y: float) -> None:
        """Add another drawing, shifted down by `y`."""
        self.boxes += [box._replace(y=box.y + y) for box in other.boxes]
        self.areas += [Area([(x, py + y) for x, py in a.points], a.fill) for a in other.areas]
        moved = (([(x, py + y) for x, py in each.points], each) for each in other.curves)
        self.curves += [each._replace(points=points) for points, each in moved]
        self.labels += [label._replace(y=label.y + y) for label in other.labels]
        self.width = max(self.width, other.width)
        self.height = max(self.height, y + other.height)

    def svg(self) -> str:
        """Return an SVG document."""
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {_number(self.width)} {_number(self.height)}" '
            'font-family="Inter, Helvetica, Arial, sans-serif">'
        ]
        return "\n".join([*lines, *self._shapes(), "</svg>", ""])

    def _shapes(self) -> Iterable[str]:
        for box in self.boxes:
            line = f'stroke="{box.line}" ' if box.line else ""
            title = f"<title>{escape(box.title)}</title>" if box.title else ""
            yield (
                f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
                f'height="{_number(box.height)}" rx="{_number(box.radius)}" {line}fill="{box.fill}"'
                + (f">{title}</rect>" if title else "/>")
            )
        for area in self.areas:
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in area.points)
            yield f'<polygon points="{points}" fill="{area.fill}"/>'
        for curve in self.curves:
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in curve.points)
            yield (
                f'<polyline points="{points}" fill="none" stroke="{curve.colour}" '
                f'stroke-width="{_number(curve.width)}" stroke-linejoin="round"/>'
            )
        anchors = {"l": "start", "m": "middle", "r": "end"}
        for label in self.labels:
            weight = ' font-weight="600"' if label.bold else ""
            yield (
                f'<text x="{_number(label.x)}" y="{_number(label.y)}" font-size="{label.size}"'
                f'{weight} text-anchor="{anchors[label.anchor]}" fill="{label.colour}" '
                f'pointer-events="none">{escape(label.text)}</text>'
            )

    def png(self, path: Path | IO[bytes], scale: int = 2) -> None:
        """Write a PNG at `scale` times the SVG size; large drawings are written at scale 1."""
        from PIL import Image, ImageDraw, ImageFont

        scale = scale if self.width * self.height < _LARGE_PIXELS else 1
        image = Image.new("RGB", (round(self.width * scale), round(self.height * scale)), "white")
        pen = ImageDraw.Draw(image)
        fonts = {
            size: ImageFont.load_default(size * scale)
            for size in {label.size for label in self.labels}
        }
        for box in self.boxes:
            corners = [box.x, box.y, box.x + box.width, box.y + box.height]
            left, top, right, bottom = (round(value * scale) for value in corners)
            # Pillow's coordinates include the right and bottom edges.
            edges = (left, top, max(left, right - 1), max(top, bottom - 1))
            pen.rounded_rectangle(edges, box.radius * scale, box.fill, box.line, scale)
        for area in self.areas:
            pen.polygon([(x * scale, y * scale) for x, y in area.points], area.fill)
        for curve in self.curves:
            points = [(x * scale, y * scale) for x, y in curve.points]
            pen.line(points, curve.colour, round(curve.width * scale), "curve")
        for label in self.labels:
            position = (label.x * scale, label.y * scale)
            font, anchor = fonts[label.size], f"{label.anchor}s"
            pen.text(position, label.text, label.colour, font, anchor=anchor)
        image.save(path, format="PNG")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
