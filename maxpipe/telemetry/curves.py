"""Plot metric curves of runs: values from `metrics.jsonl` against the step.

Tags with the same last component, such as `train/loss` and `eval/loss`, share a panel.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from maxpipe.config.config_files import METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path, read_lines
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.schedule.draw import Box, Canvas, Label, text_width
from maxpipe.schedule.draw import Curve as Line

FORMS = (".svg", ".png")
MAX_VALUE = 1e300
"""Largest metric magnitude that can be plotted. Only corrupt records contain larger values."""
_log = logging.getLogger("maxpipe")
_SHOWN_NAMES = 30
_INK, _GREY, _PALE = "#1d2633", "#667085", "#e4e7ec"
_COLOURS = ("#2456a6", "#c4314b", "#1f6f4c", "#a8530a", "#5a3aa6", "#166c79", "#6b6510", "#a12e56")
_LEFT, _WIDTH, _HEIGHT, _TOP, _BELOW = 76.0, 620.0, 200.0, 34.0, 34.0
_LINE = 1.8

Curve = list[tuple[int, float]]
"""The (step, value) points of one metric."""


def read(run_dir: str | Path, tags: Sequence[str]) -> dict[str, Curve]:
    """Read the curves of the given metric tags from a run folder.

    Lines that are not JSON and values that cannot be plotted (NaN, infinite or above `MAX_VALUE`)
    are skipped with a warning.

    Raises:
        ConfigError: the run recorded none of the tags.
        StorageError: `metrics.jsonl` cannot be read.
    """
    path = expand_path(run_dir) / METRICS_FILE
    found: dict[str, Curve] = {tag: [] for tag in tags}
    left_out = dict.fromkeys(tags, 0)
    known: set[str] = set()
    damaged = 0
    try:
        for _, line in read_lines(path):
            try:
                record = parse_json(line, dict[str, Any])
            except ValueError:
                damaged += bool(line.strip())
                continue
            known |= record.keys() - {"step", "time"}
            for tag, curve in found.items():
                step, value = record.get("step"), record.get(tag)
                if not (_is_number(step) and _is_number(value)):
                    continue  # null represents NaN or infinity
                if _is_step(step) and -MAX_VALUE <= value <= MAX_VALUE:
                    curve.append((step, float(value)))
                else:
                    left_out[tag] += 1
    except OSError as error:
        raise StorageError(
            Code.RUN_RECORDS,
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files.",
        ) from error
    if damaged:
        what = pluralize(damaged, "line")
        _log.warning("%s: skipped %s that are not valid JSON", path, what)
    for tag, count in left_out.items():
        if count:
            _log.warning(
                "%s: %s has %s that cannot be plotted: a value must be finite and at most %g, "
                "and its step an integer from 0 to 2**63 - 1",
                *(path, tag, pluralize(count, "record"), MAX_VALUE),
            )
    found = {tag: curve for tag, curve in found.items() if curve}
    if not found:
        guess = did_you_mean(tags[0], known) or "train/loss"
        names = [name[:80] for name in sorted(known)[:_SHOWN_NAMES]] or ["none"]
        if (more := len(known) - _SHOWN_NAMES) > 0:
            names.append(f"and {more} more")
        rule = f"must be a metric that the run recorded: {', '.join(names)}."
        raise ConfigError.one(
            Code.CLI_VALUE, str(path), ", ".join(tags), rule, f"Use --tags {guess}."
        )
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> TypeGuard[int]:
    try:
        return check_type(value, int) >= 0
    except ValueError:
        return False


def draw_curves(runs: Mapping[str, Mapping[str, Curve]]) -> Canvas:
    """Draw the curves of several runs in vertically stacked panels."""
    canvas = Canvas()
    ends = dict.fromkeys(tag.rpartition("/")[2] for curves in runs.values() for tag in curves)
    for end in ends:
        lines = {
            f"{name}  {tag}" if len(runs) > 1 else tag: curve
            for name, curves in runs.items()
            for tag, curve in curves.items()
            if tag.rpartition("/")[2] == end
        }
        canvas.append_canvas(_panel(end, lines), canvas.height)
    return canvas


def _panel(title: str, lines: Mapping[str, Curve]) -> Canvas:
    points = [point for curve in lines.values() for point in curve]
    last = max(max(step for step, _ in points), 1)
    low, high = _range([value for _, value in points])
    bottom = _TOP + _HEIGHT

    def place(step: float, value: float) -> tuple[float, float]:
        return (
            _LEFT + _WIDTH * step / last,
            bottom - _HEIGHT * (value - low) / (high - low),
        )

    canvas = Canvas(labels=[Label(_LEFT, 22, title, 14, _INK, "l", bold=True)])
    for value in _ticks(low, high):
        y = place(0, value)[1]
        canvas.boxes.append(Box(_LEFT, y, _WIDTH, 1, _PALE))
        canvas.labels.append(Label(_LEFT - 8, y + 4, f"{value:g}", 11, _GREY, "r"))
    for step in _ticks(0, last):
        canvas.labels.append(Label(place(step, 0)[0], bottom + 16, f"{step:g}", 11, _GREY))
    canvas.labels.append(Label(_LEFT + _WIDTH, bottom + 30, "step", 11, _GREY, "r"))
    width = _LEFT + _WIDTH
    for number, (name, curve) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        y = _TOP + 16 + 18 * number
        x = _LEFT + _WIDTH + 16
        canvas.boxes.append(Box(x, y - 9, 14, 5, colour, radius=2))
        canvas.labels.append(Label(x + 20, y, name, 12, _INK, "l"))
        width = max(width, x + 20 + text_width(name, 12))
        canvas.curves.append(Line([place(*point) for point in curve], colour, _LINE))
        if len(curve) == 1:  # draw an isolated point as a small square
            u, v = place(*curve[0])
            canvas.boxes.append(Box(u - 3, v - 3, 6, 6, colour))
    canvas.width, canvas.height = round(width + 20), round(bottom + _BELOW)
    return canvas


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the value axis, including a margin."""
    low, high = min(values), max(values)
    spread = high - low
    # If the spread is close to the smallest double, the tick spacing has no finite logarithm.
    room = 0.05 * spread if spread > 1 / MAX_VALUE else max(abs(high), 1.0) * 0.05
    return (0.0 if 0 <= low < (high - low) else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round tick values between `low` and `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]
