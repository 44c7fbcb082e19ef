"""One number of several runs over their steps, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxpipe.boundary.files import records
from maxpipe.config.paths import METRICS_FILE
from maxpipe.errors import ConfigError, StorageError
from maxpipe.schedule.canvas import Box, Canvas, Curve, Label, text_width

Points = Mapping[int, float]
"""Step to value."""

_COLOURS = ("#2456a6", "#c4741b", "#1f6f4c", "#a12e56", "#5a3aa6", "#667085")
_INK, _GREY, _PALE = "#1d2633", "#667085", "#e4e7ec"
_LEFT, _TOP, _WIDTH, _HEIGHT = 64.0, 44.0, 560.0, 280.0
_TICKS = 6


def read(folder: Path, tag: str) -> dict[int, float]:
    """The values of a tag that a run has written, by step.

    Raises:
        ConfigError: there are none.
        StorageError: its records cannot be read.
    """
    path, found, tags = folder / METRICS_FILE, dict[int, float](), set[str]()
    try:
        for record in records(path, dict[str, Any]):
            tags.update(record)
            if isinstance(value := record.get(tag), int | float) and "step" in record:
                found[int(record["step"])] = float(value)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Name a run that has written metrics."
        ) from error
    if not found:
        known = ", ".join(sorted(tags - {"step", "time"})) or "none"
        rule = f"must be a number that {folder} has written: there are {known}."
        raise ConfigError.one("command line: --tag", tag, rule, "Give one of them.")
    return found


def picture(curves: Mapping[str, Points], tag: str) -> Canvas:
    """A curve for each name, under the tag as a title."""
    steps = [step for points in curves.values() for step in points]
    values = [value for points in curves.values() for value in points.values()]
    low, high, gap = _round(min(values), max(values))
    first, last = min(0, *steps), max(steps)

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + _WIDTH * (step - first) / max(last - first, 1)
        return x, _TOP + _HEIGHT * (high - value) / (high - low)

    canvas = Canvas(_LEFT + _WIDTH + 20, _TOP + _HEIGHT + 44)
    canvas.labels.append(Label(_LEFT, 26, tag, 15, _INK, "l", bold=True))
    value = low
    while value <= high + gap / 2:
        _, y = place(first, value)
        canvas.boxes.append(Box(_LEFT, y - 0.5, _WIDTH, 1, _PALE))
        canvas.labels.append(Label(_LEFT - 8, y + 4, f"{value:.6g}", 12, _GREY, "r"))
        value += gap
    _, _, gap = _round(first, last)
    for number in range(int((last - first) / gap) + 1):
        x, _ = place(first + number * gap, low)
        text = f"{first + number * gap:.6g}"
        canvas.labels.append(Label(x, _TOP + _HEIGHT + 20, text, 12, _GREY))
    canvas.labels.append(Label(_LEFT + _WIDTH, _TOP + _HEIGHT + 38, "step", 12, _GREY, "r"))
    right = _LEFT + _WIDTH
    for number, (name, points) in reversed(list(enumerate(curves.items()))):
        colour = _COLOURS[number % len(_COLOURS)]
        canvas.curves.append(Curve([place(*each) for each in sorted(points.items())], colour))
        right -= text_width(name, 13)
        canvas.labels.append(Label(right, 26, name, 13, _INK, "l"))
        canvas.boxes.append(Box(right - 22, 20, 16, 4, colour, radius=2))
        right -= 40
    return canvas


def _round(low: float, high: float) -> tuple[float, float, float]:
    """The same range, or a little more, between multiples of a round number; and that number."""
    rough = max(high - low, abs(high) * 1e-6, 1e-12) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough)
    return math.floor(low / gap) * gap, math.ceil(high / gap) * gap, gap
