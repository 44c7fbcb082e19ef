"""One document per trained message of a record, for `data.rewritten_history=each_turn`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.data_schema import SourceConfig
from maxpipe.data import kept
from maxpipe.data.chat_records import conversation_of
from maxpipe.data.formats.text_of import BadRecord
from maxpipe.data.sources import Moved, Progress, Source, UnreadableRecord
from maxpipe.errors import Problem

_VERSION = 1
_WORDS = kept.Words(
    "counting trained messages",
    "counting trained messages again",
    "the next start counts trained messages again",
)


class Answer(NamedTuple):
    """A trained message of a record."""

    record: Any
    number: int
    """Among the trained messages of the record."""


class AnswerSource:
    """The records of a source once for each of their trained messages; see `Source`."""

    def __init__(self, source: Source, counts: np.ndarray):
        """`counts` int64 [records]: trained messages of each record."""
        self._source = source
        self.ends = np.cumsum(counts)
        """int64 [records]: the document behind the last one of each record."""

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def unreadable(self) -> list[int]:
        return list(self._source.unreadable)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _place(self, document: int) -> tuple[int, int]:
        """The number of a document's record, and its own there."""
        record = int(np.searchsorted(self.ends, document, side="right"))
        return record, document - (int(self.ends[record - 1]) if record else 0)

    def __getitem__(self, index: int) -> str:
        return self._source[self._place(index)[0]]

    def record(self, index: int) -> Any:
        record, number = self._place(index)
        return Answer(self._source.record(record), number)

    def where(self, index: int) -> str:
        record, number = self._place(index)
        return f"{self._source.where(record)}, trained message {number + 1}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._source.fingerprint().encode())
        digest.update(b"each_turn" + self.ends.astype("<i8").tobytes())
        return digest.hexdigest()

    def content(self, moved: Moved | None = None) -> Mapping[str, str]:
        return self._source.content(moved)

    def check_unchanged(self, moved: Moved | None = None) -> None:
        self._source.check_unchanged(moved)


def answers_of(
    source: Source,
    config: SourceConfig,
    cache_dir: str | None = None,
    moved: Moved | None = None,
    *,
    keep: bool = False,
) -> Source:
    """The documents of conversations: records, or with `each_turn` their trained messages.

    Raises:
        ConfigError: a record has no conversation.
    """
    if config.rewritten_history != "each_turn" or config.chat not in ("messages", "prompt"):
        return source

    def make(moved: Moved | None) -> _Counts:
        counts = np.zeros(len(source), np.int64)
        progress = Progress(f"counting trained messages of {source.name}", len(source), moved)
        for number in range(len(source)):
            try:
                counts[number] = len(conversation_of(source.record(number), config).trained)
            except BadRecord as error:
                problem = Problem(source.where(number), error.given, error.rule, error.action)
                raise UnreadableRecord([problem]) from error
            progress.update(number + 1)
        source.check_unchanged(moved)
        return _Counts(counts)

    def of(arrays: kept.Arrays) -> _Counts:
        if arrays["counts"].shape != (len(source),):
            raise ValueError("an array of another shape")
        return _Counts(arrays["counts"])

    if cache_dir is None:
        found = make(moved)
    else:
        fields = [config.messages_field, config.prompt_field, config.response_field]
        content = sorted(source.content(moved).items())
        key = [_VERSION, source.fingerprint(), content, config.chat, fields]
        key += [sorted(config.trained_roles), sorted(config.chat_roles)]
        key += [config.system_field] if config.system_field else []
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        path = os.path.join(os.path.expanduser(cache_dir), f"answers-{name}.npz")
        found = kept.made_once(
            path, of, make, lambda made: made._asdict(), _WORDS, keep=keep, moved=moved
        )
    return AnswerSource(source, found.counts) if found.counts.any() else source


class _Counts(NamedTuple):
    counts: np.ndarray
