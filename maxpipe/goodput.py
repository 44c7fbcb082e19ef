"""Which share of a run's time went into steps that count, and where the rest went.

Read from `events.jsonl` alone: durations inside an attempt are those of a clock that nobody sets,
the time between attempts is that of the calendar. The measure is Google's ML goodput.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from maxpipe.errors import ConfigError
from maxpipe.files import full
from maxpipe.phases import DATA, EVAL, LOOP, SAVE, SET_UP, STEP
from maxpipe.telemetry import duration

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
    UNKNOWN: "not told: since the last record of an attempt that was killed",
}


@dataclass
class Stretch:
    """Steps and the time they took, as one record tells."""

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
    """The step it went on from; None if it did not get so far."""
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
    """
    path = full(run_dir) / "events.jsonl"
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:  # the disk was full, or a kill came in the middle of it
                continue
    attempts = _attempts(records)
    if not attempts:
        raise ConfigError.one(
            f"run folder {run_dir}",
            None,
            "must hold an events.jsonl that `maxpipe train` wrote.",
            "Give the folder of a run, by default runs/<run.name>.",
        )
    return Goodput(attempts, _by_cause(attempts))


def _attempts(records: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    found: list[Attempt] = []
    for record in records:
        time = datetime.fromisoformat(record["time"])
        if record["event"] == "begin":
            found.append(Attempt(time - timedelta(seconds=record["uptime"]), time))
        if not found:
            continue
        attempt = found[-1]
        attempt.end = time
        attempt.uptime = max(attempt.uptime, record.get("uptime", 0.0))
        match record["event"]:
            case "start":
                attempt.first = attempt.last = record["step"]
                attempt.set_up = record["seconds"]
            case "time":
                attempt.stretches.append(Stretch(attempt.last, record["step"], record["seconds"]))
                attempt.last = record["step"]
            case "roll_back":
                attempt.last = record["to"]
            case "done" | "preempted" | "failed" as ended:
                attempt.ended = ended
    return found


def _by_cause(attempts: list[Attempt]) -> dict[str, float]:
    total = dict.fromkeys(CAUSES, 0.0)
    for number, attempt in enumerate(attempts):
        told = 0.0
        for phase, seconds in attempt.set_up.items():
            total[phase if phase in total else SET_UP[0]] += seconds
            told += seconds
        for place, stretch in enumerate(attempt.stretches):
            later = [each.first for each in attempts[number + 1 :] if each.first is not None]
            later += [each.first for each in attempt.stretches[place + 1 :]]
            counts = min([stretch.last, *later]) - stretch.first
            share = max(0.0, counts / max(1, stretch.last - stretch.first))
            for phase, seconds in stretch.seconds.items():
                told += seconds
                if phase in (STEP, LOOP):
                    total[PRODUCTIVE] += share * seconds
                    total[REDONE] += (1 - share) * seconds
                else:
                    total[phase if phase in total else UNKNOWN] += seconds
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
