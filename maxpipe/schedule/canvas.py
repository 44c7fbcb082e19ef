"""Drawings of boxes, areas, curves and labels, written as SVG or PNG. All sizes are in pixels.

An SVG has an opaque background. Its colors follow the reader's color scheme: `DARK` lists the
colors of a dark scheme. A PNG always has the light colors. No font is measured, so a drawing is the
same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple
from xml.sax.saxutils import escape

OVERVIEW_WIDTH = 480.0
"""Width in pixels of an overview, chosen so that 18-pixel text is still legible when scaled to 300
pixels."""

PAGE_WIDTH = 850
"""Width in pixels of a text column. Drawings have at least 11-pixel text when scaled to it."""

CARD, INK, GREY = "#ffffff", "#1d2633", "#5d6778"
"""Background, text, and secondary text."""
PALE, RULE, SAVED, DEFERRED = "#eff1f5", "#dfe3e9", "#b4bdcb", "#7d8899"
"""Lanes, rules, saved activations, and deferred weight gradients."""
BOX_INK = "#10182a"
"""Text on a light box, in both color schemes."""
LIMIT = "#c4314b"
"""Limits and failures."""

HUES = (
    ("#8fb8f4", "#2456a6", "#dfeafc"),
    ("#f6b26b", "#a8530a", "#fdebd3"),
    ("#86cfae", "#1f6f4c", "#dcf2e7"),
    ("#bba6ef", "#5a3aa6", "#ebe4fb"),
    ("#f29cb3", "#a12e56", "#fce2e9"),
    ("#7fcbd6", "#166c79", "#daf0f3"),
    ("#cfc865", "#6b6510", "#f2f0cd"),
    ("#a9b3c4", "#465268", "#e6e9ef"),
)
"""Light, dark and pale shade of each hue."""

DARK = {
    INK: "#e6edf3",
    GREY: "#a9b4c2",
    PALE: "#232a34",
    RULE: "#3a4350",
    SAVED: "#5b6777",
    DEFERRED: "#93a1b5",
    "#dfeafc": "#1d3054",
    "#fdebd3": "#4a2f10",
    "#dcf2e7": "#173d2c",
    "#ebe4fb": "#33265c",
    "#fce2e9": "#4f1d2e",
    "#daf0f3": "#143c43",
    "#f2f0cd": "#3b3810",
    "#e6e9ef": "#2d3542",
}
"""Colors of all shapes in a dark scheme. Other colors are the same in both schemes."""
DARK_BOXES = {CARD: "#161b22", "#2456a6": "#3a6fd0", "#5a3aa6": "#7a58cf"}
"""Additional colors of boxes."""
DARK_LINES = {
    "#2456a6": "#79a8f5",
    "#a8530a": "#f0a35a",
    "#1f6f4c": "#5fc795",
    "#5a3aa6": "#b39bf2",
    "#a12e56": "#f08bae",
    "#166c79": "#5cc3d1",
    "#6b6510": "#cbc25a",
    "#465268": "#a9b4c2",
    LIMIT: "#ff8090",
    "#8fb8f4": "#3d5f99",
    "#f6b26b": "#8a5a22",
    "#86cfae": "#2f6b4e",
    "#bba6ef": "#5d4a94",
    "#f29cb3": "#8f4a60",
    "#7fcbd6": "#2f7580",
    "#cfc865": "#77732c",
    "#a9b3c4": "#5a6678",
}
"""Additional colors of curves, areas and text."""

_LARGE_PIXELS = 12e6
_ANCHORS = {"l": "start", "m": "middle", "r": "end"}


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
    opacity: float = 1.0
    """Opacity in an SVG; areas in a PNG are opaque."""


class Curve(NamedTuple):
    """A line that connects points."""

    points: list[tuple[float, float]]
    colour: str
    width: float = 2.0
    dash: str = ""
    """Lengths of dashes and gaps; a PNG has solid lines."""


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


_NARROW, _MEDIUM, _WIDE = frozenset("ijl|.,:;'!"), frozenset("frt()[]/- "), frozenset("mwMW@%")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return an estimate of the text's width in pixels that is an upper bound for most fonts."""
    ems = sum(
        0.32
        if each in _NARROW
        else 0.4
        if each in _MEDIUM
        else 0.95
        if each in _WIDE
        else 0.74
        if each.isupper()
        else 0.58
        for each in text
    )
    return ems * size * (1.06 if bold else 1.0)


def wrap_text(text: str, size: float, width: float) -> list[str]:
    """Split text at spaces into lines of at most `width` pixels; a longer word has its own line."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@dataclass
class Canvas:
    """A drawing that consists of boxes, areas, curves and labels, drawn in this order."""

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    title: str = ""
    """Name of the drawing for screen readers (default: the first bold label)."""
    description: str = ""
    """Content of the drawing in one or two sentences, for screen readers."""

    def append_canvas(self, other: Canvas, y: float, x: float = 0.0) -> None:
        """Add another drawing, shifted by `x` and `y`."""

        def moved(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
            return [(px + x, py + y) for px, py in points]

        self.boxes += [box._replace(x=box.x + x, y=box.y + y) for box in other.boxes]
        self.areas += [area._replace(points=moved(area.points)) for area in other.areas]
        self.curves += [curve._replace(points=moved(curve.points)) for curve in other.curves]
        self.labels += [each._replace(x=each.x + x, y=each.y + y) for each in other.labels]
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)
        self.description = " ".join(filter(None, (self.description, other.description)))

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        colour: str = INK,
        anchor: str = "l",
        *,
        bold: bool = False,
    ) -> None:
        """Add a line of text."""
        self.labels.append(Label(x, y, text, size, colour, anchor, bold))

    def write_lines(
        self, x: float, y: float, text: str, size: int, colour: str = INK, *, width: float
    ) -> float:
        """Add left-aligned text in lines of at most `width` pixels, and return the y coordinate of
        the line below.
        """
        for line in wrap_text(text, size, width):
            self.write(x, y, line, size, colour)
            y += round(1.4 * size)
        return y

    def arrow(
        self,
        points: Sequence[tuple[float, float]],
        colour: str = GREY,
        width: float = 1.5,
        *,
        dash: str = "",
        both: bool = False,
    ) -> None:
        """Add a line with a head at its last point, or at both ends."""
        line, size = list(points), 3 + 2.2 * width
        for end in (-1, 0) if both else (-1,):
            (x, y), (u, v) = line[end], line[-2 if end else 1]
            length = math.hypot(x - u, y - v)
            dx, dy = (x - u) / length, (y - v) / length
            left = (x - size * dx - size * dy / 2, y - size * dy + size * dx / 2)
            right = (x - size * dx + size * dy / 2, y - size * dy - size * dx / 2)
            self.areas.append(Area([(x, y), left, right], colour))
            line[end] = (x - size / 2 * dx, y - size / 2 * dy)
        self.curves.append(Curve(line, colour, width, dash))

    def svg(self) -> str:
        """Return an SVG document."""
        width, height = _number(self.width), _number(self.height)
        title = self.title or next((each.text for each in self.labels if each.bold), "drawing")
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" '
            'font-family="Inter, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
        ]
        if self.description:
            lines.append(f"<desc>{escape(self.description)}</desc>")
        card = Box(0.5, 0.5, self.width - 1, self.height - 1, CARD, RULE, 6)
        shapes = [*_boxes([card, *self.boxes]), *self._shapes()]
        return "\n".join([*lines, _dark_style("\n".join(shapes)), *shapes, "</svg>", ""])

    def _shapes(self) -> Iterable[str]:
        for area in self.areas:
            opacity = f' fill-opacity="{_number(area.opacity)}"' if area.opacity < 1 else ""
            yield f'<polygon points="{_points(area.points)}" fill="{area.fill}"{opacity}/>'
        for curve in self.curves:
            dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
            yield (
                f'<polyline points="{_points(curve.points)}" fill="none" stroke="{curve.colour}" '
                f'stroke-width="{_number(curve.width)}"{dash} stroke-linejoin="round"/>'
            )
        for label in self.labels:
            weight = ' font-weight="600"' if label.bold else ""
            yield (
                f'<text x="{_number(label.x)}" y="{_number(label.y)}" font-size="{label.size}"'
                f'{weight} text-anchor="{_ANCHORS[label.anchor]}" fill="{label.colour}" '
                f'pointer-events="none">{escape(label.text)}</text>'
            )

    def save(self, path: Path, suffix: str = "") -> None:
        """Write a PNG or an SVG. `suffix` is `.png` or `.svg` (default: the suffix of `path`)."""
        if (suffix or path.suffix) == ".png":
            self.png(path)
        else:
            path.write_text(self.svg(), encoding="utf-8")

    def png(self, path: Path | IO[bytes], scale: int = 2) -> None:
        """Write a PNG at `scale` times the SVG size; large drawings are written at scale 1."""
        from PIL import Image, ImageDraw, ImageFont

        scale = scale if self.width * self.height < _LARGE_PIXELS else 1
        image = Image.new("RGB", (round(self.width * scale), round(self.height * scale)), CARD)
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


def _boxes(boxes: Iterable[Box]) -> Iterator[str]:
    for box in boxes:
        line = f'stroke="{box.line}" ' if box.line else ""
        title = f"<title>{escape(box.title)}</title>" if box.title else ""
        radius = f'rx="{_number(box.radius)}" ' if box.radius else ""
        yield (
            f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
            f'height="{_number(box.height)}" {radius}{line}fill="{box.fill}"'
            + (f">{title}</rect>" if title else "/>")
        )


def _dark_style(shapes: str) -> str:
    """Return the style that replaces the colors of these shapes in a dark color scheme."""
    kinds = (
        ("rect", ("fill", "stroke"), DARK | DARK_BOXES),
        ("polygon", ("fill",), DARK | DARK_LINES),
        ("polyline", ("stroke",), DARK | DARK_LINES),
        ("text", ("fill",), DARK | DARK_LINES),
    )
    used = {
        (element, key, colour)
        for element, attributes in re.findall(r"<(\w+) ([^>]*)>", shapes)
        for key, colour in re.findall(r'(fill|stroke)="(#\w+)"', attributes)
    }
    rules = [
        f'{element}[{key}="{light}"]{{{key}:{dark}}}'
        for element, keys, colours in kinds
        for key in keys
        for light, dark in colours.items()
        if (element, key, light) in used
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
