"""Track the phases of a process and the time spent in each phase.

Every process has one `Phases` object, which the main thread updates and monitoring threads read.
The phase names appear in `events.jsonl`, in stall reports and in `maxpipe goodput`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

START, DATA_SET_UP, RESTORE, COMPILE = "start", "data set-up", "restore", "compile"
LOOP, DATA, STEP, EVAL, SAVE = "loop", "data", "step", "eval", "save"
ROLLOUT, PROFILE = "rollout", "profile"
SET_UP = (START, DATA_SET_UP, RESTORE, COMPILE)
"""Phases before the first step."""
WAITING = (STEP, ROLLOUT, EVAL, SAVE, RESTORE)
"""Phases in which a process may wait for other processes. In all other phases, the other processes
wait for it."""
UNTIMED = (COMPILE,)
"""Phases that can last arbitrarily long and report no progress."""


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """Current status of a process."""

    phase: str
    step: int
    """Latest step that was started."""
    seconds: float
    """Time since the last progress, in seconds."""
    own_seconds: float
    """Total time in seconds since set-up, excluding waits for devices or other processes."""
    detail: str = ""
    """Reason for the current wait, if known."""


class Phases:
    """Tracks nested phases. Time is attributed to the innermost phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._open = [START]
        self.begun = self._since = self._progressed = clock()
        self._seconds: dict[str, float] = {}
        self._own = 0.0
        self.step = 0
        self.detail = ""
        """Reason for the current wait, as in `PhaseStatus`."""

    @contextlib.contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Attribute the time spent inside the context to `phase`."""
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
        """Record that the process made progress. `step` is the latest step that was started."""
        with self._lock:
            self._progressed = self._clock()
            self.step = self.step if step is None else step

    def status(self) -> PhaseStatus:
        """Return the current status of the process."""
        with self._lock:
            self._add_elapsed()
            idle = self._clock() - self._progressed
            return PhaseStatus(self._open[-1], self.step, idle, self._own, self.detail)

    def take_seconds(self) -> dict[str, float]:
        """Return the time spent in each phase since the last call, in seconds."""
        with self._lock:
            self._add_elapsed()
            taken, self._seconds = self._seconds, {}
            return taken

    def _add_elapsed(self) -> None:
        """Add the time since the last call to the current phase."""
        now, phase = self._clock(), self._open[-1]
        spent, self._since = now - self._since, now
        self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        if phase in (LOOP, DATA):
            self._own += spent
