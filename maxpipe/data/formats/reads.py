"""What the threads of this process read at the moment, so that one that is slow can be named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

_PLACE_SECONDS = 5.0
"""For the place of a document: looking for it may hang as its reading does."""

What = str | Callable[[], str]
"""The name of a source, or what tells the place of a document."""


class reading:
    """While a thread is inside, it reads what this says. They nest: a source, a document of it."""

    __slots__ = ("_reads", "begun", "verb", "what")

    def __init__(self, what: What, verb: str = "reading"):
        self.what, self.verb = what, verb

    def __enter__(self) -> None:
        self._reads = _NOW.setdefault(threading.get_ident(), [])
        self._reads.append(self)
        self.begun = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.monotonic() - self.begun
        if seconds > _SPENT.slowest or isinstance(self.what, str):  # else it is forgotten
            _SPENT.add(_read(self._reads), seconds)
        self._reads.pop()
        if not self._reads:
            del _NOW[threading.get_ident()]  # the next thread may have this number


_NOW: dict[int, list[reading]] = {}
"""By thread, the outer ones first."""


class Read(NamedTuple):
    """A read that has begun, of what is named from the outside in."""

    begun: float
    """By `time.monotonic`."""
    verb: str
    whats: tuple[What, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(filter(None, map(_named, self.whats)))}"


def _read(reads: Sequence[reading]) -> Read:
    return Read(reads[-1].begun, reads[-1].verb, tuple(each.what for each in reads))


def _named(what: What) -> str:
    """For people; empty where it is not found in time."""
    if isinstance(what, str):
        return what
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # its file fails, perhaps
            found.append(what())

    looking = threading.Thread(target=look, name="place of a read", daemon=True)
    looking.start()
    looking.join(_PLACE_SECONDS)
    return found[0] if found else ""


def longest() -> Read | None:
    """Of the documents that are read, the one that has taken longest."""
    threads = [list(each) for each in list(_NOW.values())]
    found = [_read(each) for each in threads if each and not isinstance(each[-1].what, str)]
    return min(found, key=lambda each: each.begun, default=None)


class Spent(NamedTuple):
    """Reads that have ended."""

    sources: dict[str, float]
    """Seconds of all threads by the name of the source."""
    slowest: Read | None
    """Of the reads of one document."""
    seconds: float
    """That it took."""


class _Sums:
    """Of the reads since the last time they were asked for. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Spent({}, None, 0.0)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest read of a document."""
        return self._now.seconds

    def add(self, read: Read, seconds: float) -> None:
        """A read has ended."""
        with self._lock:
            sources, what = self._now.sources, read.whats[-1]
            if isinstance(what, str):
                sources[what] = sources.get(what, 0.0) + seconds
            elif seconds > self._now.seconds:
                self._now = Spent(sources, read, seconds)

    def take(self) -> Spent:
        """What was added since the last call."""
        with self._lock:
            taken, self._now = self._now, Spent({}, None, 0.0)
            return taken


_SPENT = _Sums()
take = _SPENT.take
