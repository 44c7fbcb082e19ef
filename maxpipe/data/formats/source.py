"""What every source of documents is, and the source that is made of a format's records."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from maxpipe.data.formats.files import File
from maxpipe.data.formats.record_text import BadRecord, TextExtractor
from maxpipe.errors import ConfigError, Problem
from maxpipe.io import redact

_LOG = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_NAMED = 10
"""Records that are skipped and named in the log."""

Heartbeat = Callable[[], object]
"""Called by a long pass over the data whenever a part of it is done."""

Record = str | Mapping[str, Any]
"""A document as its format has it: its text, or columns with their values."""


class UnreadableRecord(ConfigError):
    """A record that is no document. Others of its file may be."""


class Source(Protocol):
    """A random-access sequence of documents."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...

    def record(self, index: int) -> Record:
        """The whole record that the document's text is taken from; empty if it was skipped."""
        ...

    def where(self, index: int) -> str:
        """The file of a document and its place in it, for people."""
        ...

    @property
    def unreadable(self) -> Sequence[int]:
        """The numbers of the records that were skipped so far: documents without text."""
        ...

    def fingerprint(self) -> str:
        """Digest of what identifies the content cheaply: names, sizes, counts, edges of files."""
        ...

    def content(self, moved: Heartbeat | None = None) -> Mapping[str, str]:
        """Digests of everything in its files, by name; empty if it has no files.

        Raises:
            ConfigError: a file cannot be read, or changes while it is read.
        """
        ...

    def check_unchanged(self, moved: Heartbeat | None = None) -> None:
        """Checks that every file has the content of when `content` was first called.

        Raises:
            ConfigError: one has not.
        """
        ...


class Records(Protocol):
    """Random access to the records of files of one format."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> Sequence[File]:
        """The files that hold them; none of records that are made."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        """A record; of its columns at least those named, of None all.

        Raises:
            BadRecord: its content is at fault.
            ConfigError: its file is.
        """
        ...

    def where(self, index: int) -> str:
        """As `Source.where`."""
        ...

    def fingerprint(self, chosen: str) -> str:
        """As `Source.fingerprint`; `chosen` says what of a record is taken."""
        ...


class FileDigests(Protocol):
    """Digests of files; see `digests.Digests`."""

    def content(
        self, sources: Sequence[File], moved: Heartbeat | None = None
    ) -> Mapping[str, str]: ...

    def check(self, sources: Sequence[File], moved: Heartbeat | None = None) -> None: ...


class RecordSource:
    """The texts of a format's records.

    A record that cannot be read raises UnreadableRecord; with `most_skipped` that many of them are
    empty documents instead. So documents keep their numbers, and an index says of each what it is.
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
        """For other processes: each counts what it skips."""
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
        """Counts a record that cannot be read. Raises UnreadableRecord for one too many."""
        with self._lock:
            if index in self._skipped:
                return
            count = len(self._skipped) + 1
            if count <= self._most_skipped:
                self._skipped.add(index)
        problem = Problem(self.where(index), error.value, error.rule, error.action)
        if count > self._most_skipped:
            if self._most_skipped:
                rule = f"{problem.rule} It is one more than data.max_bad_records skips "
                problem = replace(problem, rule=f"{rule}({self._most_skipped}).")
            raise UnreadableRecord([problem]) from error
        if count <= _NAMED:
            # What a record holds may control a terminal.
            _LOG.warning(
                "%s Skipped, as an empty document.", redact.redact_for_terminal(problem.line)
            )
        if count == _NAMED:
            _LOG.warning("%s: further records that are skipped are counted only", self.name)


class Progress:
    """Log lines, a few seconds apart, while a long pass over the data runs."""

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
