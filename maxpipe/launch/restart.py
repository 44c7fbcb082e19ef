"""Whether to restart a run that ended: by its exit code and its newest checkpoint."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TypedDict

from maxpipe.checkpoint.storage import FOLDER
from maxpipe.config.paths import EVENTS_FILE
from maxpipe.errors import ExitCode
from maxpipe.io.files import records

FINAL = (ExitCode.CONFIG, ExitCode.BUG, ExitCode.STORAGE, ExitCode.INTERRUPTED)
"""Failures that another start would only repeat, and a person's Ctrl-C."""

_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.CONFIG: "a mistake in the config or command line",
    ExitCode.BUG: "a bug in maxpipe",
    ExitCode.HANG: "a hang, or another process is missing",
    ExitCode.STORAGE: "storage or checkpoint",
    ExitCode.PREEMPTED: "stopped and saved",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
}


def newest_step(run_dir: Path, elsewhere: str = "") -> int | None:
    """The step of a run's newest complete checkpoint; unfinished ones are not named by a number.

    Of checkpoints `elsewhere`, in `checkpoint.dir` or `checkpoint.local_dir`, the run's own records
    say: no launcher looks into buckets.
    """
    if elsewhere:
        return _recorded(run_dir)
    try:
        names = [path.name for path in (run_dir / FOLDER).iterdir()]
    except OSError:
        return None
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


class _Record(TypedDict):
    """A line of `events.jsonl` with a step; other lines are skipped."""

    event: str
    step: int


def _recorded(run_dir: Path) -> int | None:
    newest = None
    with contextlib.suppress(OSError):
        for record in records(run_dir / EVENTS_FILE, _Record):
            if record["event"] in ("start", "checkpoint"):  # a start may go back to an older one
                newest = record["step"] or None
    return newest


def killed(code: int) -> bool:
    """Whether a signal ended the process: negative for Python, above 128 for a shell.

    Ctrl-C does not count: a run that it stops reports it, and one that has not begun dies of it.
    """
    return (code < 0 or code > 128) and not interrupted(code)


def interrupted(code: int) -> bool:
    """Whether Ctrl-C stopped the process."""
    return code in (ExitCode.INTERRUPTED, -signal.SIGINT)


def is_final(code: int) -> bool:
    """Whether another start would only repeat the failure: not after a stop, hang or kill."""
    return code not in (ExitCode.PREEMPTED, ExitCode.HANG) and not killed(code)


def described(code: int) -> str:
    """Description of an exit code."""
    if killed(code):
        number = -code if code < 0 else code - 128
        known = {each.value for each in signal.Signals}
        return f"killed by {signal.Signals(number).name if number in known else number}"
    if interrupted(code):
        code = int(ExitCode.INTERRUPTED)
    meaning = _MEANINGS.get(ExitCode(code)) if code in set(ExitCode) else None
    return f"exit code {code}{f' ({meaning})' if meaning else ''}"


class Restarts:
    """Counts the failures in a row after which no newer checkpoint was there."""

    def __init__(self, limit: int, run_dir: Path, elsewhere: str = ""):
        self._limit, self._run_dir, self._elsewhere = limit, run_dir, elsewhere
        self._newest = self.saved()
        self.fruitless = 0

    def saved(self) -> int | None:
        """The newest step that another start could go on from."""
        return newest_step(self._run_dir, self._elsewhere)

    def again(self, code: int) -> bool:
        """Whether to start again after the run ended with `code`."""
        newest = self.saved()
        progress = newest is not None and (self._newest is None or newest > self._newest)
        self._newest = newest
        if progress:
            self.fruitless = 0
        if code == ExitCode.PREEMPTED:
            return True
        if is_final(code):
            return False
        self.fruitless += not progress
        return self.fruitless <= self._limit
