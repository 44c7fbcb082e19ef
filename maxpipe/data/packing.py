"""Documents to sequences of fixed length, addressed by number.

Owns the split into training and validation documents, their shuffled order and the
cutting of the token stream. Sequence i is made from the documents' lengths alone, so no
earlier sequence has to be read first. It does not know batches, epochs or processes;
`stream.py` is the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from maxpipe.data.documents import Documents
from maxpipe.data.formats.reads import reading
from maxpipe.errors import ConfigError

_FEISTEL_ROUNDS = 8
_FEISTEL_BLOCK = 1 << 16
DOCUMENT_ORDER = 0
"""First word of the keys of a permutation, so that no two uses share an order."""


class Permutation:
    """A seeded order of `range(size)`, computed per index in constant memory.

    The same in every version of every library: a position in a checkpoint names the
    same sequence for ever. It is a Feistel network over the next power of four,
    iterated until the result is inside the range.
    """

    def __init__(self, size: int, *key: int):
        half = max(1, -(-(max(size, 1) - 1).bit_length() // 2))
        self._size = size
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        entropy = [word % (1 << 64) for word in key]
        self._keys = np.random.SeedSequence(entropy).generate_state(_FEISTEL_ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        inside = indices.size == 0 or 0 <= indices.min() <= indices.max() < self._size
        assert inside, f"an index outside of range({self._size}) would walk for ever"
        # In blocks that fit the processor's cache: four times as fast for many indices.
        blocks = range(_FEISTEL_BLOCK, len(indices), _FEISTEL_BLOCK)
        return np.concatenate([self._walk(block) for block in np.split(indices, blocks)])

    def _walk(self, indices: np.ndarray) -> np.ndarray:
        values = self._rounds(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self._size)):
            values[outside] = self._rounds(values[outside])
        return values.astype(np.int64)

    def _rounds(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Spreads each bit of a uint64 over all others (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_documents(
    num_documents: int, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled numbers of the training and of the validation documents.

    Raises:
        ConfigError: a fraction above 0 and fewer than two documents.
    """
    order = Permutation(num_documents, seed, DOCUMENT_ORDER)(np.arange(num_documents))
    if validation_fraction <= 0:
        return order, order[:0]
    if num_documents < 2:
        raise ConfigError.one(
            "data.validation_fraction",
            validation_fraction,
            f"needs at least 2 documents, one to train on and one to evaluate: "
            f"data.path has {num_documents}.",
            "Set data.validation_fraction=0 and eval.batches=0, or divide the text into documents.",
        )
    num_validation = min(max(round(validation_fraction * num_documents), 1), num_documents - 1)
    return order[num_validation:], order[:num_validation]


class Piece(NamedTuple):
    """Tokens of a document in a row."""

    document: int
    begin: int
    end: int


class Sequences(Protocol):
    """Rows of T tokens by number; the same each time, in any thread and process."""

    sequence_length: int
    num_tokens: int
    """Of all documents, begin and end included."""
    num_targets: int
    """Positions of all rows at which the next token is of the same document."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `segment_ids`, `positions` int32 [T], `loss_mask` float32 [T].

        `segment_ids` counts the documents of the sequence from 1, 0 is padding;
        `positions` counts from each document's first token in this sequence;
        `loss_mask` is 1 where token and target are of one document, and the target is trained.
        """
        ...

    def padding(self) -> dict[str, np.ndarray]:
        """A sequence without text: it adds nothing to a loss."""
        ...

    def documents(self, index: int) -> list[int]:
        """Numbers of the documents that have a token in this sequence."""
        ...

    def shuffled(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """The order of sequences in an epoch that the key stands for."""
        ...

    def where(self, document: int) -> str:
        """The file of a document and its place in it, for people."""
        ...

    def size(self, document: int) -> int:
        """Tokens of a document."""
        ...


def efficiency_of(sequences: Sequences) -> float:
    """The part of all positions that has a target of its document."""
    return sequences.num_targets / (len(sequences) * sequences.sequence_length)


def targets_of(lengths: np.ndarray) -> int:
    """Tokens that follow another one of their document, of documents of these lengths."""
    return int(lengths.sum() - np.count_nonzero(lengths))


def assembled(
    documents: Documents, pieces: Iterable[Piece], sequence_length: int
) -> dict[str, np.ndarray]:
    """The arrays of a row that pieces of documents fill from its begin: T inputs and the target of
    the last one, T + 1 tokens at most. Halves of a pair are segments of their own.
    """
    size = sequence_length + 1
    window = np.full(size, documents.pad_id, np.int32)
    segments = np.zeros(size, np.int32)
    trained = np.ones(size, bool)
    positions = np.zeros(size, np.int32)
    at = segment = 0
    for number, begin, end in pieces:
        with reading(partial(documents.where, number)):
            document = documents[number]
        here, inside = slice(at, at + end - begin), slice(begin, end)
        window[here] = document.ids[inside]
        if document.trained is not None:
            trained[here] = document.trained[inside]
        border = [document.border] if document.border else []
        for first, last in itertools.pairwise([begin, *border, end]):
            segment += 1
            segments[at : at + last - first] = segment
            positions[at : at + last - first] = np.arange(last - first)
            at += last - first
    same = (segments[:-1] == segments[1:]) & (segments[1:] > 0) & trained[1:]
    return {
        "tokens": window[:-1],
        "targets": window[1:],
        "segment_ids": segments[:-1],
        "positions": positions[:-1],
        "loss_mask": same.astype(np.float32),
    }


class PackedSequences:
    """Sequences of T tokens, cut from the concatenation of documents.

    Sequence i covers tokens i*T to i*T + T of the stream: T inputs and the same
    shifted by one as targets. The last one is padded.
    """

    def __init__(self, documents: Documents, order: np.ndarray, sequence_length: int):
        self.sequence_length = sequence_length
        self._documents = documents
        self._order = order
        lengths = documents.lengths[order]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_tokens = int(self._starts[-1])
        self.num_targets = targets_of(lengths)

    def __len__(self) -> int:
        # The last token of the stream is only ever a target: it starts no sequence.
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return assembled(self._documents, self._pieces(index), self.sequence_length)

    def shuffled(self, *key: int) -> Permutation:
        return Permutation(len(self), *key)

    def padding(self) -> dict[str, np.ndarray]:
        return assembled(self._documents, (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        first = index * self.sequence_length
        last = min(first + self.sequence_length, self.num_tokens) - 1
        begin, end = np.searchsorted(self._starts, [first, last], side="right")
        return self._order[begin - 1 : end].tolist()

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths[document])

    def _pieces(self, index: int) -> Iterator[Piece]:
        at = index * self.sequence_length
        last = min(at + self.sequence_length + 1, self.num_tokens)
        position = int(np.searchsorted(self._starts, at, side="right")) - 1
        while at < last:
            begin, end = self._starts[position : position + 2].tolist()
            end = min(end, last)
            yield Piece(int(self._order[position]), at - begin, end - begin)
            at, position = end, position + 1
