"""Tracking of reads in all threads, so that messages can name a slow read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

_LOCATE_SECONDS = 5.0
"""Time limit in seconds for locating a document, because locating may hang like the read itself."""

ReadTarget = str | Callable[[], str]
"""Name of a source, or a function that returns the location of a document."""


class track_read:
    """Record a read in this thread. A source read may contain document reads."""

    __slots__ = ("_reads", "begun", "verb", "what")

    def __init__(self, what: ReadTarget, verb: str = "reading"):
        self.what, self.verb = what, verb

    def __enter__(self) -> None:
        self._reads = _ACTIVE_READS.setdefault(threading.get_ident(), [])
        self._reads.append(self)
        self.begun = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.monotonic() - self.begun
        # faster document reads are not recorded
        if seconds > _READ_TIMES.slowest or isinstance(self.what, str):
            _READ_TIMES.add(_innermost_read(self._reads), seconds)
        self._reads.pop()
        if not self._reads:
            del _ACTIVE_READS[threading.get_ident()]  # the id of a thread may be reused


_ACTIVE_READS: dict[int, list[track_read]] = {}
"""Maps thread ids to active reads, outermost first."""


class TrackedRead(NamedTuple):
    """Read in progress. Targets are listed from the outermost to the innermost."""

    begun: float
    """Start time, as returned by `time.monotonic`."""
    verb: str
    whats: tuple[ReadTarget, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(filter(None, map(_describe_target, self.whats)))}"


def _innermost_read(reads: Sequence[track_read]) -> TrackedRead:
    return TrackedRead(reads[-1].begun, reads[-1].verb, tuple(read.what for read in reads))


def _describe_target(what: ReadTarget) -> str:
    """Return a description of a target for messages, or an empty string after `_LOCATE_SECONDS`."""
    if isinstance(what, str):
        return what
    places: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # access to the file may fail
            places.append(what())

    looking = threading.Thread(target=look, name="place of a read", daemon=True)
    looking.start()
    looking.join(_LOCATE_SECONDS)
    return places[0] if places else ""


def longest_active_read() -> TrackedRead | None:
    """Return the document read that has been active for the longest time, if any."""
    threads = [list(reads) for reads in list(_ACTIVE_READS.values())]
    active = [
        _innermost_read(thread)
        for thread in threads
        if thread and not isinstance(thread[-1].what, str)
    ]
    return min(active, key=lambda read: read.begun, default=None)


class ReadTimes(NamedTuple):
    """Statistics of completed reads."""

    sources: dict[str, float]
    """Total read time in seconds across all threads, keyed by source name."""
    slowest: TrackedRead | None
    """Slowest document read."""
    seconds: float
    """Duration of the slowest document read in seconds."""


class _ReadTimeSums:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = ReadTimes({}, None, 0.0)

    @property
    def slowest(self) -> float:
        """Duration of the slowest document read in seconds."""
        return self._now.seconds

    def add(self, read: TrackedRead, seconds: float) -> None:
        """Add a completed read."""
        with self._lock:
            sources, what = self._now.sources, read.whats[-1]
            if isinstance(what, str):
                sources[what] = sources.get(what, 0.0) + seconds
            elif seconds > self._now.seconds:
                self._now = ReadTimes(sources, read, seconds)

    def take(self) -> ReadTimes:
        """Return and reset the statistics."""
        with self._lock:
            taken, self._now = self._now, ReadTimes({}, None, 0.0)
            return taken


_READ_TIMES = _ReadTimeSums()
take_read_times = _READ_TIMES.take
