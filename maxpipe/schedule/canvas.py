"""A drawing of boxes, areas, curves and labels, written as SVG or as PNG. Sizes are in pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple
from xml.sax.saxutils import escape

_LARGE_PIXELS = 12e6

OVERVIEW_WIDTH = 480.0
"""Width of a drawing whose text of 18 pixels is legible at a width of 300 pixels."""


class Box(NamedTuple):
    """A rectangle; its title is shown under the pointer."""

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
    """A line through points."""

    points: list[tuple[float, float]]
    colour: str
    width: float = 2.0


class Label(NamedTuple):
    """A line of text."""

    x: float
    y: float
    """Of the baseline."""
    text: str
    size: int
    colour: str
    anchor: str = "m"
    """Where `x` is: l(eft), m(iddle), or r(ight)."""
    bold: bool = False


def text_width(text: str, size: float) -> float:
    """Fonts differ; this is enough for most."""
    return 0.56 * size * len(text)


@dataclass
class Canvas:
    """Boxes, areas, curves and labels, drawn in this order."""

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def put(self, other: Canvas, y: float) -> None:
        """Adds another drawing from this height on."""
        self.boxes += [box._replace(y=box.y + y) for box in other.boxes]
        self.areas += [Area([(x, py + y) for x, py in a.points], a.fill) for a in other.areas]
        moved = (([(x, py + y) for x, py in each.points], each) for each in other.curves)
        self.curves += [each._replace(points=points) for points, each in moved]
        self.labels += [label._replace(y=label.y + y) for label in other.labels]
        self.width = max(self.width, other.width)
        self.height = max(self.height, y + other.height)

    def svg(self) -> str:
        """An SVG document."""
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
        """Write a PNG of `scale` times the size of the SVG, of its size where that is large."""
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
            # Pillow includes the far edge.
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
