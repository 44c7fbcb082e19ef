"""What imports and exports tell their caller while they work."""

from __future__ import annotations

import threading
from collections.abc import Callable

Say = Callable[[str], None]
"""Takes a line for the user."""

Report = Callable[[str, int, int], None]
"""Takes a task, and how many megabytes of how many are done."""

_MEGABYTE = 10**6


def unreported(task: str, done: int, total: int) -> None:
    """Shows nothing."""


class Bytes:
    """A count of bytes to which several threads add."""

    def __init__(self, task: str, total: int, report: Report):
        self._task, self._total, self._report = task, total, report
        self._done, self._lock = 0, threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Adds what was done."""
        with self._lock:
            self._done += count
            self._report(self._task, self._done // _MEGABYTE, -(-self._total // _MEGABYTE))
