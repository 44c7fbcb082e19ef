"""Plot metric curves of runs: values from `metrics.jsonl` against the step.

Tags with the same last component, such as `train/loss` and `eval/loss`, share a panel. Runs whose
names differ only in a final number, such as `base-0` and `base-1`, can be drawn as one curve: their
mean, with a band from the smallest to the largest value.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from maxpipe.config.config_files import CONFIG_FILE, METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path, read_lines
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.schedule import chart
from maxpipe.schedule.canvas import Canvas
from maxpipe.schedule.chart import BAND_COLOURS, FAINT_COLOURS, LINE_COLOURS, Axis, Chart
from maxpipe.telemetry.metrics import unit_of

FORMS = (".svg", ".png")
MAX_VALUE = 1e300
"""Largest metric magnitude that can be plotted. Only corrupt records contain larger values."""
_log = logging.getLogger("maxpipe")
_SHOWN_NAMES = 30
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


def loss_units(run_dir: str | Path) -> dict[str, str]:
    """Return the units of the losses of a run whose objective is not a cross-entropy."""
    try:
        text = (expand_path(run_dir) / CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    special = re.search(r"^ *objective: *(preference|grpo) *$", text, re.MULTILINE)
    name = f"{special[1]} loss, no unit" if special else ""
    return {"train/loss": name, "eval/loss": name} if name else {}


@dataclass(frozen=True, kw_only=True)
class Style:
    """Options of `draw_curves`."""

    smooth: int = 1
    """Number of records whose mean is drawn; the records are drawn in a faint color."""
    band: bool = False
    """Draw runs whose names differ only in a final number as one curve with a band."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Text at dashed vertical lines, by step."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Units of tags that differ from those in `telemetry.metrics`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of curves in the legend (default: run and tag)."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of panels (default: the last component of their tags)."""
    note: str = ""
    """Text below the last panel."""


def draw_curves(runs: Mapping[str, Mapping[str, Curve]], style: Style | None = None) -> Canvas:
    """Draw the curves of several runs in vertically stacked panels."""
    style = style or Style()
    canvas = Canvas()
    groups: dict[str, dict[str, list[Curve]]] = {}
    tags: dict[str, str] = {}  # the first tag of each group
    for run, curves in runs.items():
        run = re.sub(r"-\d+$", "", run) if style.band else run
        for tag, curve in curves.items():
            name = f"{run}  {tag}" if len(runs) > 1 else tag
            name = style.names.get(name, name)
            end = tag.rpartition("/")[2]
            tags.setdefault(end, tag)
            groups.setdefault(end, {}).setdefault(name, []).append(curve)
    for end, lines in groups.items():
        unit = style.units.get(tags[end], unit_of(tags[end]))
        panel = _panel(style.titles.get(end, end), unit, lines, style)
        if style.note and end == [*groups][-1]:
            panel.note(style.note)
        canvas.append_canvas(panel.canvas, canvas.height)
    canvas.title = f"{', '.join(groups)} against the step"
    names = [name for lines in groups.values() for name in lines]
    canvas.description = f"Line charts of {', '.join(dict.fromkeys(names))}. {style.note}".strip()
    return canvas


def _panel(title: str, unit: str, lines: Mapping[str, Sequence[Curve]], style: Style) -> Chart:
    points = [point for curves in lines.values() for curve in curves for point in curve]
    last = max(max(step for step, _ in points), 1)
    low, high = _range([value for _, value in points])
    panel = Chart(Axis("step", 0, last), Axis(unit or "no unit", low, high), title)
    for row, (step, text) in enumerate(style.marks.items()):
        panel.vertical(step, text, row=row)
    legend = []
    for number, (name, curves) in enumerate(lines.items()):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        pale, faint = BAND_COLOURS[number % 8], FAINT_COLOURS[number % 8]
        curve: chart.Points = curves[0]
        if len(curves) > 1:
            curve, least, most = _combined(curves)
            panel.band(least, most, pale, faint)
            name += f" (mean and range of {len(curves)} runs)"
        if style.smooth > 1:
            panel.line(curve, faint, 1.3)
            curve = chart.smoothed(curve, style.smooth)
        panel.line(curve, colour)
        legend.append((name, colour, ""))
    panel.legend(legend)
    return panel


def _combined(curves: Sequence[Curve]) -> tuple[Curve, Curve, Curve]:
    """Return the mean, the minimum and the maximum at the steps that all curves have."""
    values = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(each) for each in values)))
    at = {step: [each[step] for each in values] for step in steps}
    return (
        [(step, sum(each) / len(each)) for step, each in at.items()],
        [(step, min(each)) for step, each in at.items()],
        [(step, max(each)) for step, each in at.items()],
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the value axis, including a margin."""
    low, high = min(values), max(values)
    spread = high - low
    # If the spread is close to the smallest double, the tick spacing has no finite logarithm.
    room = 0.05 * spread if spread > 1 / MAX_VALUE else max(abs(high), 1.0) * 0.05
    return (0.0 if 0 <= low < (high - low) else low - room), high + room
