"""Daemon thread with a bounded queue, for work that must never slow or stop training."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger("maxpipe")

WARN_EVERY_SECONDS = 600.0
"""Minimum time between two warnings about the same cause."""


class RateLimiter:
    """Allows one warning per period, and counts those that were suppressed."""

    def __init__(self, seconds: float = WARN_EVERY_SECONDS):
        self._seconds, self._warned_at = seconds, -math.inf

    def allows(self) -> bool:
        """Return True if a warning is due."""
        now = time.monotonic()
        if now - self._warned_at < self._seconds:
            return False
        self._warned_at = now
        return True

    def reset(self) -> None:
        """Allow the next warning immediately."""
        self._warned_at = -math.inf


class BackgroundWorker(Generic[_T]):
    """Calls `handle` for each item in a daemon thread.

    `put` never blocks: if the queue is full, the item is dropped and counted. `handle(None)` is
    called after the number of seconds that the previous call returned, unless an item arrives
    earlier; None means no such call. An exception in `handle` is logged, and the thread continues.
    """

    def __init__(
        self, name: str, handle: Callable[[_T | None], float | None], capacity: int
    ) -> None:
        self.dropped = 0
        """Number of items that were dropped because the queue was full."""
        self._name, self._handle = name, handle
        self._queue: queue.Queue[_T] = queue.Queue(capacity)
        self._ending, self._limiter = False, RateLimiter()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which first calls `handle(None)`."""
        self._thread.start()

    def put(self, item: _T) -> bool:
        """Add an item; return False if the queue was full."""
        try:
            self._queue.put_nowait(item)
            return True
        except queue.Full:
            self.dropped += 1
            return False

    def end(self) -> None:
        """Make the thread end when the queue is empty and no call is pending; do not wait."""
        self._ending = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # type: ignore[arg-type] # wake the thread

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return False if it is still running."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        delay = self._call(None)
        while not (self._ending and delay is None and self._queue.empty()):
            try:
                item = self._queue.get(timeout=delay)
            except queue.Empty:
                item = None
            delay = self._call(item)

    def _call(self, item: _T | None) -> float | None:
        try:
            return self._handle(item)
        except Exception as error:
            if self._limiter.allows():
                _log.warning("%s: %s: %s", self._name, type(error).__name__, error)
            return None
