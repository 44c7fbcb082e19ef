"""Conversations that are longer than a sequence, as `data.long_conversations` treats them.

Their tokens are known, and the length of each: so records and prepared folders give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from maxpipe.data.documents import Documents, Encoded
from maxpipe.data.prepared.windows import TokenFiles
from maxpipe.data.sources import Moved, Progress
from maxpipe.errors import ConfigError
from maxpipe.io.text import counted

Policy = Literal["truncate", "drop", "split", "error"]

_KEY = "data.long_conversations"
_PART = 1 << 20
"""Documents whose lengths are counted at a time."""


class Left(NamedTuple):
    """Numbers of conversations, int64 []: with tokens left, and without any."""

    with_tokens: np.ndarray
    left_out: np.ndarray


class BoundedDocuments:
    """Conversations of as many tokens as a sequence has, or fewer; see `Documents`.

    With `truncate` one of which no trained token is left has no tokens, as with `drop`.
    """

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        policy: Policy,
        trains: Callable[[int, int], bool] | None = None,
    ):
        """`trains` says of a document's number and a count whether any of its first tokens trains;
        by default the document is read.
        """
        self.pad_id = documents.pad_id
        self._documents = documents
        self._most = sequence_length + 1
        """T inputs, and the target of the last one."""
        self._policy: Policy = policy
        self._trains = trains or self._reads
        self._lengths: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        if self._lengths is None:
            self._lengths = self._bounded(self._documents.lengths, 0)
        return self._lengths

    def counts(self, moved: Moved | None = None) -> Left:
        """Count the conversations that had tokens; `moved` is called for each part of them."""
        return self._counted(self._documents.lengths, self.lengths)

    @staticmethod
    def _counted(before: np.ndarray, after: np.ndarray) -> Left:
        num_left = np.count_nonzero(after)
        return Left(np.array(num_left), np.array(np.count_nonzero(before) - num_left))

    def _reads(self, document: int, count: int) -> bool:
        trained = self._documents[document].trained
        return trained is None or bool(trained[1:count].any())

    def _bounded(self, lengths: np.ndarray, first: int) -> np.ndarray:
        """Tokens that are left of consecutive documents from `first` on, of `lengths` tokens."""
        found = np.array(lengths)
        for at in np.flatnonzero(found > self._most).tolist():
            found[at] = self._size(first + at)
        return found

    def _size(self, document: int) -> int:
        """Tokens that are left of a conversation that is too long."""
        is_left = self._policy == "truncate" and self._trains(document, self._most)
        return self._most if is_left else 0

    def __getitem__(self, document: int) -> Encoded:
        found = self._documents[document]
        if len(found.ids) <= self._most:
            return found
        trained = found.trained
        is_left = trained is None or bool(trained[1 : self._most].any())
        size = self._most if is_left and self._policy == "truncate" else 0
        trained = None if trained is None else trained[:size]
        return replace(found, ids=found.ids[:size], trained=trained)

    def where(self, document: int) -> str:
        return self._documents.where(document)


class BoundedFiles(BoundedDocuments):
    """Bounded conversations of a prepared folder that is read in windows; see `TokenFiles`."""

    def __init__(self, documents: TokenFiles, sequence_length: int, policy: Policy):
        super().__init__(documents, sequence_length, policy)
        self._files = documents
        self.num_documents, self.num_tokens = documents.num_documents, documents.num_tokens
        self.span_tokens: np.ndarray = documents.span_tokens
        self.is_bounded = True
        """Whether lengths differ from the sums of `span_tokens`."""

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """int64 tokens of the documents from `first` to before `stop`."""
        return self._bounded(self._files.lengths_between(first, stop), first)

    def counts(self, moved: Moved | None = None) -> Left:
        progress = Progress("counting long conversations", self.num_documents, moved)
        with_tokens = left_out = np.array(0)
        for first in range(0, self.num_documents, _PART):
            stop = min(first + _PART, self.num_documents)
            lengths = self._files.lengths_between(first, stop)
            part = self._counted(lengths, self._bounded(lengths, first))
            with_tokens, left_out = with_tokens + part.with_tokens, left_out + part.left_out
            progress.update(stop)
        return Left(np.array(with_tokens), np.array(left_out))


def bounded(
    documents: Documents, sequence_length: int, policy: Policy, first_targets: np.ndarray
) -> Documents:
    """Return conversations as the policy leaves them; see `DocumentIndex.first_targets`."""
    if policy not in ("truncate", "drop"):
        return documents
    return BoundedDocuments(
        documents,
        sequence_length,
        policy,
        lambda document, count: 0 < first_targets[document] < count,
    )


def long_ones(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Numbers of the documents that no sequence of this length holds whole."""
    return np.flatnonzero(lengths > sequence_length + 1)


def num_long(documents: TokenFiles, sequence_length: int) -> tuple[int, int]:
    """How many documents are longer than a sequence, and the number of the first one, or 0."""
    count = first = 0
    for begin in range(0, documents.num_documents, _PART):
        lengths = documents.lengths_between(begin, min(begin + _PART, documents.num_documents))
        found = long_ones(lengths, sequence_length)
        if len(found) and not count:
            first = begin + int(found[0])
        count += len(found)
    return count, first


def too_long(count: int, where: str, sequence_length: int) -> ConfigError:
    """The error for `error`; `where` names the first of `count` conversations."""
    rule = f"ends the run where a conversation is longer than a sequence of {sequence_length}: "
    rule += f"{counted(count, 'conversation')}, the first one {where}."
    return _wrong("error", rule, "data.long_conversations=truncate")


def check_left(left: Left, num_documents: int, sequence_length: int, policy: Policy) -> None:
    """Checks that the policy leaves conversations to train on, of `num_documents`.

    Raises:
        ConfigError: it leaves none.
    """
    if left.with_tokens:
        return
    all_of = f"each of {counted(num_documents, 'conversation')}"
    sequence = f"a sequence of {sequence_length}"
    if policy == "drop":
        rule = f"leaves nothing: {all_of} is longer than {sequence}."
        raise _wrong(policy, rule, "data.long_conversations=truncate")
    rule = f"leaves nothing to train: {all_of} has its first answer behind {sequence}."
    raise _wrong(policy, rule, "")


def _wrong(policy: str, rule: str, other: str) -> ConfigError:
    larger = "a larger train.sequence_length"
    return ConfigError.one(
        _KEY, policy, rule, f"Set {f'{larger}, or {other}' if other else larger}."
    )
