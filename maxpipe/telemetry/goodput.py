"""Compute the goodput of a run: the fraction of wall time spent on productive steps.

Only `events.jsonl` is read. Durations within an attempt come from a monotonic clock; the time
between attempts comes from the wall clock. The definition follows Google's ML goodput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.distributed.phases import DATA, EVAL, LOOP, PROFILE, ROLLOUT, SAVE, SET_UP, STEP
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path, read_json_lines
from maxpipe.telemetry.console import duration

PRODUCTIVE, REDONE, DOWN, UNKNOWN = "productive", "redone", "down", "unknown"
CAUSES = {
    PRODUCTIVE: "productive steps",
    REDONE: "steps repeated after a restart",
    DATA: "waiting for data",
    EVAL: "evaluation",
    SAVE: "waiting for checkpoints",
    PROFILE: "starting and ending profiles",
    **dict(zip(SET_UP, ("process start", "opening data", "restoring", "compiling"), strict=True)),
    DOWN: "time between attempts",
    UNKNOWN: "unknown: time after the last record of a killed attempt",
}


_STEP_PHASES = (STEP, LOOP, ROLLOUT)
"""Phases that belong to a step, including the sampling of completions."""
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
    """Consecutive steps covered by one record, with the time spent in each phase."""

    first: int
    """Number of steps completed before the interval."""
    last: int
    seconds: dict[str, float]


@dataclass
class Attempt:
    """Attempt of a run, from the start of the command to its exit."""

    begin: datetime
    end: datetime
    """Time of the attempt's last record."""
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
            Code.RUN_RECORDS,
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files.",
        ) from error
    if not attempts:
        raise ConfigError.one(
            Code.RUN_RECORDS,
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
    """Add a record to the attempt in which it was written.

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
    # Iterate backwards. Steps after the start of a later interval were repeated.
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
    """Return goodput as JSON-compatible data."""
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
        f"{found.share:.1%} of the time spent on productive steps",
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
