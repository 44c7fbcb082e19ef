"""Draw metric curves of runs, and compute their goodput.

Curves show the metrics in `metrics.jsonl` by step. Tags with the same last component, such as
`train/loss` and `eval/loss`, share a panel.

Goodput is the fraction of wall time spent on productive steps. It is computed from `events.jsonl`
only: durations within an attempt come from a monotonic clock, and the time between attempts from
the wall clock. The definition follows Google's ML goodput.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeGuard

from maxpipe.config.config_files import EVENTS_FILE, METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.distributed.phases import DATA, EVAL, LOOP, ROLLOUT, SAVE, SET_UP, STEP
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.files import expand_path, read_json_lines, read_lines
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.schedule.draw import Box, Canvas, Label, text_width
from maxpipe.schedule.draw import Curve as Line
from maxpipe.telemetry.console import duration

FORMS = (".svg", ".png")
MAX_VALUE = 1e300
"""Largest metric magnitude that can be drawn. Only corrupt records contain larger values."""
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

    Values that cannot be drawn (NaN, infinite or above `MAX_VALUE`) and lines that are not JSON are
    skipped with a warning.

    Raises:
        ConfigError: the run has recorded none of the tags.
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
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files."
        ) from error
    if damaged:
        what = pluralize(damaged, "line")
        _log.warning("%s: skipped %s that are not valid JSON", path, what)
    for tag, count in left_out.items():
        if count:
            _log.warning(
                "%s: %s has %s that cannot be drawn: a value must be finite and at most %g, "
                "and its step an integer from 0 to 2**63 - 1",
                *(path, tag, pluralize(count, "record"), MAX_VALUE),
            )
    found = {tag: curve for tag, curve in found.items() if curve}
    if not found:
        guess = did_you_mean(tags[0], known) or "train/loss"
        names = [name[:80] for name in sorted(known)[:_SHOWN_NAMES]] or ["none"]
        if (more := len(known) - _SHOWN_NAMES) > 0:
            names.append(f"and {more} more")
        rule = f"must be a recorded metric; this run recorded {', '.join(names)}."
        raise ConfigError.one(str(path), ", ".join(tags), rule, f"Use --tags {guess}.")
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> TypeGuard[int]:
    try:
        return check_type(value, int) >= 0
    except ValueError:
        return False


def draw_curves(runs: Mapping[str, Mapping[str, Curve]]) -> Canvas:
    """Draw the curves of several runs in panels that are stacked vertically."""
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
        if len(curve) == 1:  # draw a single point as a small square
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


PRODUCTIVE, REDONE, DOWN, UNKNOWN = "productive", "redone", "down", "unknown"
CAUSES = {
    PRODUCTIVE: "productive steps",
    REDONE: "steps repeated after a restart",
    DATA: "waiting for data",
    EVAL: "evaluation",
    SAVE: "waiting for checkpoints",
    **dict(zip(SET_UP, ("process start", "opening data", "restoring", "compiling"), strict=True)),
    DOWN: "time between attempts",
    UNKNOWN: "unknown: time after the last record of a killed attempt",
}


_STEP_PHASES = (STEP, LOOP, ROLLOUT)
"""Phases of a step, including the sampling of completions for the step."""
_MAX_DURATION_SECONDS = 1e10
"""Maximum duration in a valid record: about 300 years."""


class EventRecord(TypedDict):
    """A line of `events.jsonl`. The last three fields are present only for some events."""

    time: str
    event: str
    uptime: NotRequired[float]
    step: NotRequired[int]
    seconds: NotRequired[dict[str, float]]
    to: NotRequired[int]


@dataclass
class StepInterval:
    """A range of consecutive steps and the time spent in each phase, from one record."""

    first: int
    """Number of steps completed before the interval."""
    last: int
    seconds: dict[str, float]


@dataclass
class Attempt:
    """An attempt of a run, which lasts from a start of the command to its exit."""

    begin: datetime
    end: datetime
    """Time of the last record."""
    first: int | None = None
    """Step from which the attempt resumed, or None if it ended before training began."""
    last: int = 0
    ended: str = "killed"
    uptime: float = 0.0
    """Time in seconds from the start of the attempt to its last record."""
    set_up: dict[str, float] = field(default_factory=dict)
    stretches: list[StepInterval] = field(default_factory=list)


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run, broken down by cause."""

    attempts: list[Attempt]
    seconds: dict[str, float]
    """Wall time in seconds, keyed by the causes in `CAUSES`."""

    @property
    def total(self) -> float:
        """Wall time of the run in seconds, from the first record to the last."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Fraction of wall time spent on productive steps."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.total if self.total else 0.0


def read_goodput(run_dir: str | Path) -> Goodput:
    """Compute the goodput of a run from its events.

    Raises:
        ConfigError: the run folder has no event records.
        StorageError: `events.jsonl` cannot be read.
    """
    path, attempts = expand_path(run_dir) / EVENTS_FILE, []
    try:
        attempts = _attempts(read_json_lines(path, EventRecord))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files."
        ) from error
    if not attempts:
        raise ConfigError.one(
            f"run folder {run_dir}",
            None,
            f"must contain the file {EVENTS_FILE}, which `maxpipe train` writes.",
            "Give the folder of a run (default: runs/<run.name>).",
        )
    return Goodput(attempts, _by_cause(attempts))


def _attempts(found: Iterable[EventRecord]) -> list[Attempt]:
    attempts: list[Attempt] = []
    for record in found:
        try:
            _add(record, attempts)
        except (ValueError, OverflowError):  # not a valid event record
            continue
    return attempts


def _add(record: EventRecord, attempts: list[Attempt]) -> None:
    """Add a record to its attempt.

    Raises:
        ValueError, OverflowError: the record is not valid.
    """
    time, uptime = datetime.fromisoformat(record["time"]), record.get("uptime", 0.0)
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    seconds = record.get("seconds", {})
    if not all(0 <= each <= _MAX_DURATION_SECONDS for each in (uptime, *seconds.values())):
        raise ValueError("a duration is negative or above the limit")
    event = record["event"]
    if event == "begin":
        attempts.append(Attempt(time - timedelta(seconds=uptime), time))
    if not attempts:
        return
    attempt, step, to = attempts[-1], record.get("step"), record.get("to")
    match event:
        case "start" if step is not None:
            attempt.first = attempt.last = step
            attempt.set_up = seconds
        case "time" if step is not None:
            attempt.stretches.append(StepInterval(attempt.last, step, seconds))
            attempt.last = step
        case "rollback" | "roll_back" if to is not None:
            attempt.last = to
        case "done" | "preempted" | "failed" as ended:
            attempt.ended = ended
    attempt.end = time
    attempt.uptime = max(attempt.uptime, uptime)


def _by_cause(attempts: list[Attempt]) -> dict[str, float]:
    total = dict.fromkeys(CAUSES, 0.0)
    # Iterate backwards. Steps beyond the start of a later interval were repeated.
    begun_later = math.inf
    for number in reversed(range(len(attempts))):
        attempt, told = attempts[number], 0.0
        for phase, seconds in attempt.set_up.items():
            total[phase if phase in total else SET_UP[0]] += seconds
            told += seconds
        for stretch in reversed(attempt.stretches):
            steps = stretch.last - stretch.first
            counts = min(stretch.last, begun_later) - stretch.first
            share = max(0.0, counts / steps) if steps else 1.0
            begun_later = min(begun_later, stretch.first)
            for phase, seconds in stretch.seconds.items():
                told += seconds
                if phase in _STEP_PHASES and attempt.first == attempt.last:
                    total[SET_UP[0]] += seconds  # a restart of a finished run
                elif phase in _STEP_PHASES:
                    total[PRODUCTIVE] += share * seconds
                    total[REDONE] += (1 - share) * seconds
                else:
                    total[phase if phase in total else UNKNOWN] += seconds
        if attempt.first is not None:
            begun_later = min(begun_later, attempt.first)
        total[UNKNOWN] += max(0.0, attempt.uptime - told)
        if number:
            gap = (attempt.begin - attempts[number - 1].end).total_seconds()
            total[DOWN] += max(0.0, gap)
    return {cause: seconds for cause, seconds in total.items() if seconds > 0}


def goodput_to_dict(found: Goodput) -> dict[str, Any]:
    """Return goodput as JSON-compatible values."""
    return {
        "seconds": found.total,
        "productive_share": found.share,
        "seconds_by_cause": found.seconds,
        "attempts": [
            {
                "begin": each.begin.isoformat(),
                "end": each.end.isoformat(),
                "from_step": each.first,
                "to_step": each.last,
                "ended": each.ended,
            }
            for each in found.attempts
        ],
    }


def format_goodput(found: Goodput) -> str:
    """Format goodput for a terminal."""
    count = len(found.attempts)
    lines = [
        f"{duration(found.total)} in {count} attempt{'s' * (count > 1)}, "
        f"{found.share:.1%} of the time in productive steps",
        "",
    ]
    ordered = sorted(found.seconds.items(), key=lambda item: -item[1])
    for cause, seconds in ordered:
        share = seconds / found.total
        lines.append(f"{cause:<12} {duration(seconds):>8} {share:>6.1%}  {CAUSES[cause]}")
    lines += ["", "attempt  began                steps            ended"]
    for number, each in enumerate(found.attempts, 1):
        steps = "-" if each.first is None else f"{each.first} to {each.last}"
        lines.append(f"{number:>7}  {each.begin:%Y-%m-%d %H:%M:%S}  {steps:<15}  {each.ended}")
    return "\n".join(lines)
