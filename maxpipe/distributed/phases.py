"""The phase of a process in its run, and the time spent in each.

One object per process, written by the main thread and read by those that watch it. The names are
those of the ledger in `events.jsonl`, of stall reports and of `maxpipe goodput`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

START, DATA_SET_UP, RESTORE, COMPILE = "start", "data set-up", "restore", "compile"
LOOP, DATA, STEP, EVAL, SAVE = "loop", "data", "step", "eval", "save"
ROLLOUT = "rollout"
SET_UP = (START, DATA_SET_UP, RESTORE, COMPILE)
"""Before the first step."""
WAITING = (STEP, ROLLOUT, EVAL, SAVE, RESTORE)
"""Phases that may wait for other processes; in all others a process delays them itself."""
UNTIMED = (COMPILE,)
"""Of unknown length: from outside, progress cannot be seen."""


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """What a process is doing."""

    phase: str
    step: int
    """The newest step that was started."""
    seconds: float
    """Since the last progress."""
    own_seconds: float
    """In total after set-up, without waits for devices or other processes."""
    detail: str = ""
    """What it waits for there, where that is known."""


class Phases:
    """The phase of a process; phases nest, and time belongs to the innermost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._open = [START]
        self.begun = self._since = self._progressed = clock()
        self._seconds: dict[str, float] = {}
        self._own = 0.0
        self.step = 0
        self.detail = ""
        """As in `Where`."""

    @contextlib.contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Time inside belongs to `phase`."""
        with self._lock:
            self._add_elapsed()
            self._open.append(phase)
            self._progressed = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._add_elapsed()
                self._open.pop()
                self._progressed = self._clock()

    def progress(self, step: int | None = None) -> None:
        """Progress was made; `step` is the newest step that was started."""
        with self._lock:
            self._progressed = self._clock()
            self.step = self.step if step is None else step

    def status(self) -> PhaseStatus:
        """What the process is doing now."""
        with self._lock:
            self._add_elapsed()
            idle = self._clock() - self._progressed
            return PhaseStatus(self._open[-1], self.step, idle, self._own, self.detail)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        with self._lock:
            self._add_elapsed()
            taken, self._seconds = self._seconds, {}
            return taken

    def _add_elapsed(self) -> None:
        """Books the time since the last call."""
        now, phase = self._clock(), self._open[-1]
        spent, self._since = now - self._since, now
        self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        if phase in (LOOP, DATA):
            self._own += spent
