"""Charts with named axes: ticks, grid lines, curves, bands, points and a legend, on a `Canvas`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maxpipe.schedule.canvas import (
    DEFERRED,
    GREY,
    HUES,
    INK,
    RULE,
    Area,
    Box,
    Canvas,
    Curve,
    text_width,
)

LINE_COLOURS = tuple(dark for _, dark, _ in HUES)
FAINT_COLOURS = tuple(light for light, _, _ in HUES)
BAND_COLOURS = tuple(pale for _, _, pale in HUES)
TEXT, SMALL = 14, 13
"""Font sizes in pixels, chosen for a drawing that is `WIDTH` pixels wide."""
WIDTH = 640.0
_LINE_HEIGHT = 20.0
Points = Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """Range of one axis, and its name with the unit."""

    name: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    """Values with a tick (default: about five round values)."""

    def place(self, value: float) -> float:
        """Return the position of a value between 0 (`low`) and 1 (`high`)."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else self[1:3]
        return ((math.log(value) if self.log else value) - low) / (high - low)

    def tick_values(self) -> Iterable[float]:
        """Return the values of the ticks."""
        return self.ticks or round_ticks(self.low, self.high)


@dataclass
class Chart:
    """Chart with one plot area, whose upper left corner is at (`left`, `top`)."""

    x: Axis
    y: Axis
    title: str = ""
    left: float = 66.0
    top: float = 60.0
    width: float = WIDTH - 66.0 - 24.0
    height: float = 220.0
    canvas: Canvas = field(default_factory=Canvas)

    def __post_init__(self) -> None:
        """Draw the title, the axes and the grid."""
        canvas, bottom, right = self.canvas, self.top + self.height, self.left + self.width
        canvas.width, canvas.height = right + 24, bottom + 46
        if self.title:
            canvas.write(16, 27, self.title, TEXT + 1, bold=True)
        for value in self.y.tick_values():
            y = self.place(self.x.low, value)[1]
            canvas.boxes.append(Box(self.left, y - 0.5, self.width, 1, RULE))
            canvas.write(self.left - 8, y + 4.5, f"{value:g}", SMALL, GREY, "r")
        canvas.boxes.append(Box(self.left, bottom - 0.5, self.width, 1, DEFERRED))
        for value in self.x.tick_values():
            x = self.place(value, self.y.low)[0]
            canvas.boxes.append(Box(x - 0.5, bottom, 1, 5, DEFERRED))
            canvas.write(x, bottom + 19, f"{value:g}", SMALL, GREY, "m")
        canvas.write(self.left, self.top - 12, self.y.name, SMALL, GREY)
        canvas.write(right, bottom + 37, self.x.name, SMALL, GREY, "r")

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point in pixels."""
        return (
            self.left + self.width * self.x.place(x),
            self.top + self.height * (1 - self.y.place(y)),
        )

    def line(self, points: Points, colour: str, width: float = 2.2, dash: str = "") -> None:
        """Draw a line through points; a single point is drawn as a small square."""
        placed = [self.place(*point) for point in points]
        self.canvas.curves.append(Curve(placed, colour, width, dash))
        if len(placed) == 1:
            self.point(*points[0], colour)

    def band(self, low: Points, high: Points, colour: str, edge: str) -> None:
        """Fill the area between two lines, and draw the lines."""
        outline = [*low, *reversed(high)]
        self.canvas.areas.append(Area([self.place(*point) for point in outline], colour, 0.55))
        for line in (low, high):
            self.line(line, edge, 1.3, "4 3")

    def point(self, x: float, y: float, colour: str, radius: float = 4.0) -> None:
        """Draw a point as an octagon."""
        u, v = self.place(x, y)
        corners = [math.pi * (k + 0.5) / 4 for k in range(8)]
        outline = [(u + radius * math.cos(a), v + radius * math.sin(a)) for a in corners]
        self.canvas.areas.append(Area(outline, colour))

    def vertical(self, x: float, text: str, colour: str = GREY, *, row: int = 0) -> None:
        """Draw a dashed vertical line, labeled next to its middle."""
        u = self.place(x, self.y.low)[0]
        self.canvas.curves.append(
            Curve([(u, self.top), (u, self.top + self.height)], colour, 1.5, "4 4")
        )
        fits = u + 6 + text_width(text, SMALL) < self.left + self.width
        y = self.top + 0.45 * self.height + row * _LINE_HEIGHT
        self.canvas.write(u + (6 if fits else -6), y, text, SMALL, INK, "l" if fits else "r")

    def legend(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """Draw the legend below the chart: (name, color, dash) of each line."""
        x, y = self.left, self.canvas.height + 4
        for name, colour, dash in entries:
            width = 30 + text_width(name, SMALL) + 18
            if x > self.left and x + width > self.canvas.width:
                x, y = self.left, y + _LINE_HEIGHT
            self.canvas.curves.append(Curve([(x, y - 4), (x + 22, y - 4)], colour, 3, dash))
            self.canvas.write(x + 30, y, name, SMALL)
            self.canvas.width = max(self.canvas.width, x + width)
            x += width
        self.canvas.height = y + 14

    def note(self, text: str) -> None:
        """Write text below the chart."""
        y = self.canvas.height + 14
        y = self.canvas.write_lines(16, y, text, SMALL, GREY, width=self.canvas.width - 32)
        self.canvas.height = y - 4


def round_ticks(low: float, high: float) -> list[float]:
    """Return about five round tick values between `low` and `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def smoothed(points: Points, count: int) -> list[tuple[float, float]]:
    """Return the mean of every point and its neighbors: `count` points, fewer at the ends."""
    half = count // 2
    values = [value for _, value in points]
    means = []
    for index, (step, _) in enumerate(points):
        near = min(half, index, len(points) - 1 - index)
        window = values[index - near : index + near + 1]
        means.append((step, math.fsum(window) / len(window)))
    return means
