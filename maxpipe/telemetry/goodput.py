"""Goodput: the share of a run's time in steps that count, and the use of the rest.

Read from `events.jsonl` alone: durations inside an attempt are those of a monotonic clock,
the time between attempts is that of the calendar. The measure is Google's ML goodput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from maxpipe.config.paths import EVENTS_FILE
from maxpipe.distributed.phases import DATA, EVAL, LOOP, ROLLOUT, SAVE, SET_UP, STEP
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.files import full, records
from maxpipe.telemetry.console import duration

PRODUCTIVE, REDONE, DOWN, UNKNOWN = "productive", "redone", "down", "unknown"
CAUSES = {
    PRODUCTIVE: "steps that count",
    REDONE: "steps that were done again after a restart",
    DATA: "waiting for data",
    EVAL: "evaluation",
    SAVE: "waiting for checkpoints",
    **dict(
        zip(SET_UP, ("start of the process", "opening data", "restoring", "compiling"), strict=True)
    ),
    DOWN: "between attempts",
    UNKNOWN: "unknown: after the last record of an attempt that was killed",
}


_OF_STEPS = (STEP, LOOP, ROLLOUT)
"""Phases of steps: what a step trains on may be drawn for it."""
_LONGEST_SECONDS = 1e10
"""Three hundred years, a limit for damaged records."""


class Record(TypedDict):
    """A line of `events.jsonl`; which of the last three it has depends on the event."""

    time: str
    event: str
    uptime: NotRequired[float]
    step: NotRequired[int]
    seconds: NotRequired[dict[str, float]]
    to: NotRequired[int]


@dataclass
class Stretch:
    """Steps and their time, from one record."""

    first: int
    """Done before it."""
    last: int
    seconds: dict[str, float]


@dataclass
class Attempt:
    """One start of the run."""

    begin: datetime
    end: datetime
    """Of the last record."""
    first: int | None = None
    """The step it resumed from; None if it ended before."""
    last: int = 0
    ended: str = "killed"
    uptime: float = 0.0
    """Seconds to the last record."""
    set_up: dict[str, float] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)


@dataclass(frozen=True)
class Goodput:
    """A run's time by cause."""

    attempts: list[Attempt]
    seconds: dict[str, float]
    """By the names of `CAUSES`."""

    @property
    def total(self) -> float:
        """Seconds from the first record to the last."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the time, that went into steps that count."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.total if self.total else 0.0


def read(run_dir: str | Path) -> Goodput:
    """The time of a run.

    Raises:
        ConfigError: there are no records.
        StorageError: they cannot be read.
    """
    path, attempts = full(run_dir) / EVENTS_FILE, []
    try:
        attempts = _attempts(records(path, Record))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run, by default runs/<run.name>, as `maxpipe train` left it."
        ) from error
    if not attempts:
        raise ConfigError.one(
            f"run folder {run_dir}",
            None,
            f"must hold an {EVENTS_FILE} that `maxpipe train` wrote.",
            "Give the folder of a run, by default runs/<run.name>.",
        )
    return Goodput(attempts, _by_cause(attempts))


def _attempts(found: Iterable[Record]) -> list[Attempt]:
    attempts: list[Attempt] = []
    for record in found:
        try:
            _add(record, attempts)
        except (ValueError, OverflowError):  # no record of ours
            continue
    return attempts


def _add(record: Record, attempts: list[Attempt]) -> None:
    """Adds a record to the attempt that it is of.

    Raises:
        ValueError, OverflowError: it is not one that a run writes.
    """
    time, uptime = datetime.fromisoformat(record["time"]), record.get("uptime", 0.0)
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    seconds = record.get("seconds", {})
    if not all(0 <= each <= _LONGEST_SECONDS for each in (uptime, *seconds.values())):
        raise ValueError("a duration above the limit")
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
            attempt.stretches.append(Stretch(attempt.last, step, seconds))
            attempt.last = step
        case "roll_back" if to is not None:
            attempt.last = to
        case "done" | "preempted" | "failed" as ended:
            attempt.ended = ended
    attempt.end = time
    attempt.uptime = max(attempt.uptime, uptime)


def _by_cause(attempts: list[Attempt]) -> dict[str, float]:
    total = dict.fromkeys(CAUSES, 0.0)
    # From the last to the first: a step after the start of a later stretch was done again.
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
                if phase in _OF_STEPS and attempt.first == attempt.last:
                    total[SET_UP[0]] += seconds  # a finished run was started again
                elif phase in _OF_STEPS:
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


def facts(found: Goodput) -> dict[str, Any]:
    """Plain values."""
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


def page(found: Goodput) -> str:
    """The same for a terminal."""
    count = len(found.attempts)
    lines = [
        f"{duration(found.total)} in {count} attempt{'s' * (count > 1)}, "
        f"{found.share:.1%} of them in steps that count",
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
