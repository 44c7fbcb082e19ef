"""What the threads of this process read at the moment, so that one that is slow can be named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

_LOCATE_SECONDS = 5.0
"""For the place of a document: looking for it may hang as its reading does."""

ReadTarget = str | Callable[[], str]
"""The name of a source, or what tells the place of a document."""


class track_read:
    """While a thread is inside, it reads what this says. They nest: a source, a document of it."""

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
        if seconds > _READ_TIMES.slowest or isinstance(self.what, str):  # else it is forgotten
            _READ_TIMES.add(_innermost_read(self._reads), seconds)
        self._reads.pop()
        if not self._reads:
            del _ACTIVE_READS[threading.get_ident()]  # the next thread may have this number


_ACTIVE_READS: dict[int, list[track_read]] = {}
"""By thread, the outer ones first."""


class TrackedRead(NamedTuple):
    """A read that has begun, of what is named from the outside in."""

    begun: float
    """By `time.monotonic`."""
    verb: str
    whats: tuple[ReadTarget, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(filter(None, map(_describe_target, self.whats)))}"


def _innermost_read(reads: Sequence[track_read]) -> TrackedRead:
    return TrackedRead(reads[-1].begun, reads[-1].verb, tuple(each.what for each in reads))


def _describe_target(what: ReadTarget) -> str:
    """For people; empty where it is not found in time."""
    if isinstance(what, str):
        return what
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # its file fails, perhaps
            found.append(what())

    looking = threading.Thread(target=look, name="place of a read", daemon=True)
    looking.start()
    looking.join(_LOCATE_SECONDS)
    return found[0] if found else ""


def longest_active_read() -> TrackedRead | None:
    """Of the documents that are read, the one that has taken longest."""
    threads = [list(each) for each in list(_ACTIVE_READS.values())]
    found = [
        _innermost_read(each) for each in threads if each and not isinstance(each[-1].what, str)
    ]
    return min(found, key=lambda each: each.begun, default=None)


class ReadTimes(NamedTuple):
    """Reads that have ended."""

    sources: dict[str, float]
    """Seconds of all threads by the name of the source."""
    slowest: TrackedRead | None
    """Of the reads of one document."""
    seconds: float
    """That it took."""


class _ReadTimeSums:
    """Of the reads since the last time they were asked for. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = ReadTimes({}, None, 0.0)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest read of a document."""
        return self._now.seconds

    def add(self, read: TrackedRead, seconds: float) -> None:
        """A read has ended."""
        with self._lock:
            sources, what = self._now.sources, read.whats[-1]
            if isinstance(what, str):
                sources[what] = sources.get(what, 0.0) + seconds
            elif seconds > self._now.seconds:
                self._now = ReadTimes(sources, read, seconds)

    def take(self) -> ReadTimes:
        """What was added since the last call."""
        with self._lock:
            taken, self._now = self._now, ReadTimes({}, None, 0.0)
            return taken


_READ_TIMES = _ReadTimeSums()
take_read_times = _READ_TIMES.take
