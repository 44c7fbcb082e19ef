"""Interface of document sources, and a generic source for the records of a file format.

The module also tracks the reads in all threads, so that messages can name a slow read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxpipe.data.formats.files import File
from maxpipe.data.formats.record_text import BadRecord, TextExtractor
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io import redact

_LOG = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_NAMED = 10
"""Maximum number of skipped records whose location is logged."""

Heartbeat = Callable[[], object]
"""Heartbeat function, which a long pass over the data calls after each chunk."""

Record = str | Mapping[str, Any]
"""A document as stored: the text, or a mapping from column names to values."""


class UnreadableRecord(ConfigError):
    """Raised for a record that cannot be read. Other records of the same file may be readable."""


class Source(Protocol):
    """Random-access sequence of documents."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...

    def record(self, index: int) -> Record:
        """Return the full record of a document; empty if the record was skipped."""
        ...

    def where(self, index: int) -> str:
        """Return a document's file and its position in that file, for use in messages."""
        ...

    def folder(self, index: int) -> str:
        """Return the folder of a document's file, to which the paths of images are relative."""
        ...

    @property
    def unreadable(self) -> Sequence[int]:
        """Indices of the records that have been skipped so far. The documents of these records have
        no text.
        """
        ...

    def fingerprint(self) -> str:
        """Return a fast digest of file names, sizes, document counts, and first and last bytes."""
        ...

    def content(self, moved: Heartbeat | None = None) -> Mapping[str, str]:
        """Return content digests keyed by file name; empty for a source without files.

        Raises:
            ConfigError: a file cannot be read, or changes while it is being read.
        """
        ...

    def check_unchanged(self, moved: Heartbeat | None = None) -> None:
        """Raise ConfigError if a file changed since `content` was first called."""
        ...


def place_of(ends: np.ndarray, index: int) -> tuple[int, int]:
    """Return the index of the part that contains item `index`, and the item's index within this
    part. `ends` contains the exclusive end index of each part.
    """
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


class Records(Protocol):
    """Random access to the records in files of one file format."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> Sequence[File]:
        """Files that contain the records; empty for generated records."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        """Return a record with at least the given columns; None selects all columns.

        Raises:
            BadRecord: the content of the record is invalid.
            ConfigError: the file cannot be read.
        """
        ...

    def where(self, index: int) -> str:
        """See `Source.where`."""
        ...

    def fingerprint(self, chosen: str) -> str:
        """See `Source.fingerprint`. `chosen` identifies the column or template that is read."""
        ...


class FileDigests(Protocol):
    """Interface of `digests.Digests`."""

    def content(
        self, sources: Sequence[File], moved: Heartbeat | None = None
    ) -> Mapping[str, str]: ...

    def check(self, sources: Sequence[File], moved: Heartbeat | None = None) -> None: ...


class RecordSource:
    """Source that extracts one document from each record of a file format.

    Up to `most_skipped` unreadable records become empty documents, so document indices do not
    change. Any further unreadable record raises UnreadableRecord.
    """

    def __init__(
        self, records: Records, text: TextExtractor, most_skipped: int, digests: FileDigests
    ):
        self.records = records
        self._digests = digests
        self._content: Mapping[str, str] | None = None
        self._text = text
        self._most_skipped = most_skipped
        self._skipped: set[int] = set()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. Each process counts its skipped records separately."""
        return {**self.__dict__, "_skipped": set(), "_lock": None, "_digests": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    @property
    def name(self) -> str:
        return self.records.name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:
        try:
            return self._text(self.records.read(index, self._text.columns))
        except BadRecord as error:
            self._skip(index, error)
            return ""

    def record(self, index: int) -> Record:
        try:
            return self.records.read(index)
        except BadRecord as error:
            self._skip(index, error)
            return ""

    def where(self, index: int) -> str:
        return self.records.where(index)

    def folder(self, index: int) -> str:
        file_of = getattr(self.records, "file_of", None)
        if file_of is None:
            rule = f"must contain images as bytes, because records of {self.name} have no folder."
            raise BadRecord("", rule, "Store the bytes of images, or use the source jsonl.")
        return os.path.dirname(file_of(index).path)

    def fingerprint(self) -> str:
        return self.records.fingerprint(self._text.fingerprint_key)

    def content(self, moved: Heartbeat | None = None) -> Mapping[str, str]:
        if self._content is None:
            self._content = self._digests.content(self.records.files, moved)
        return self._content

    def check_unchanged(self, moved: Heartbeat | None = None) -> None:
        self.content(moved)
        self._digests.check(self.records.files, moved)

    @property
    def unreadable(self) -> list[int]:
        with self._lock:
            return sorted(self._skipped)

    def _skip(self, index: int, error: BadRecord) -> None:
        """Count an unreadable record; raise UnreadableRecord if the limit is exceeded."""
        with self._lock:
            if index in self._skipped:
                return
            count = len(self._skipped) + 1
            if count <= self._most_skipped:
                self._skipped.add(index)
        problem = Problem(
            Code.DATA_RECORD, self.where(index), error.value, error.rule, error.action
        )
        if count > self._most_skipped:
            if self._most_skipped:
                rule = f"{problem.rule} The number of such records exceeds data.max_bad_records "
                problem = replace(problem, rule=f"{rule}({self._most_skipped}).")
            raise UnreadableRecord([problem]) from error
        if count <= _NAMED:
            # The content of a record may contain terminal control sequences.
            _LOG.warning(
                "%s Skipped; the record counts as an empty document.",
                redact.redact_for_terminal(problem.line),
            )
        if count == _NAMED:
            _LOG.warning("%s: further skipped records are counted but not logged", self.name)


class Progress:
    """Periodic progress log for a long pass over the data."""

    def __init__(self, task: str, total: int, moved: Heartbeat | None = None):
        self._task = task
        self._total = total
        self._moved = moved
        self._next = time.monotonic() + _PROGRESS_SECONDS

    def update(self, done: int) -> None:
        if self._moved is not None:
            self._moved()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_SECONDS
            percent = 100 * done / max(1, self._total)
            _LOG.info("%s: %.1f %% of %d", self._task, percent, self._total)


# --- reads in progress --------------------------------------------------------

_LOCATE_SECONDS = 5.0
"""Time limit in seconds for locating a document, which can hang just as reading can."""

ReadTarget = str | Callable[[], str]
"""Target of a read: the name of a source, or a function that returns a document's location."""


class track_read:
    """Track a read in this thread. Reads may be nested: reading a source may read documents."""

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
    """A read that is in progress. Targets are listed from the outermost to the innermost."""

    begun: float
    """Start time, as returned by `time.monotonic`."""
    verb: str
    whats: tuple[ReadTarget, ...]

    def __str__(self) -> str:
        return f"{self.verb} {', '.join(filter(None, map(_describe_target, self.whats)))}"


def _innermost_read(reads: Sequence[track_read]) -> TrackedRead:
    return TrackedRead(reads[-1].begun, reads[-1].verb, tuple(read.what for read in reads))


def _describe_target(what: ReadTarget) -> str:
    """Return the name or location of a read target, or "" if it cannot be located in time."""
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
    """Return the active document read that started first, if any."""
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
        """Return the statistics of completed reads, and reset them."""
        with self._lock:
            taken, self._now = self._now, ReadTimes({}, None, 0.0)
            return taken


_READ_TIMES = _ReadTimeSums()
take_read_times = _READ_TIMES.take
