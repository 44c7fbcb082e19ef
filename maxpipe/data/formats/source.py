"""What every source of documents is, and the source that is made of a format's records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from maxpipe.data.formats.text_of import BadRecord, TextOf
from maxpipe.errors import ConfigError

_LOG = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0

Record = str | Mapping[str, Any]
"""A document as its format has it: its text, or columns with their values."""


class Source(Protocol):
    """A random-access sequence of documents."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...

    def record(self, index: int) -> Record:
        """The whole record that the document's text is taken from."""
        ...

    def where(self, index: int) -> str:
        """The file of a document and its place in it, for people."""
        ...

    def fingerprint(self) -> str:
        """Digest of what identifies the content cheaply: names, sizes, counts, edges of files."""
        ...


class Records(Protocol):
    """Random access to the records of files of one format."""

    @property
    def name(self) -> str: ...

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


class RecordSource:
    """The texts of a format's records."""

    def __init__(self, records: Records, text: TextOf):
        self.records = records
        self._text = text

    @property
    def name(self) -> str:
        return self.records.name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:
        try:
            return self._text(self.records.read(index, self._text.columns))
        except BadRecord as error:
            raise self._named(index, error) from error

    def record(self, index: int) -> Record:
        try:
            return self.records.read(index)
        except BadRecord as error:
            raise self._named(index, error) from error

    def where(self, index: int) -> str:
        return self.records.where(index)

    def fingerprint(self) -> str:
        return self.records.fingerprint(self._text.chosen)

    def _named(self, index: int, error: BadRecord) -> ConfigError:
        return ConfigError.one(self.where(index), error.given, error.rule, error.action)


Moved = Callable[[], object]
"""Called by a long pass over the data whenever a part of it is done."""


class Progress:
    """Log lines, a few seconds apart, while a long pass over the data runs."""

    def __init__(self, task: str, total: int, moved: Moved | None = None):
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
