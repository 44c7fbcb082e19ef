"""Documents to sequences of fixed length, addressed by number.

Owns the split into training and validation documents, their shuffled order and the
cutting of the token stream. Sequence i is made from the documents' lengths alone, so no
earlier sequence has to be read first. It does not know batches, epochs or processes;
`stream.py` is the next step.

Rows of whole documents, planned from the documents' lengths alone.

A row has T inputs and the target of the last one: T + 1 tokens, of any number of documents. A
document of more tokens is cut into pieces of T + 1, of which each begins with the last token of the
one before it, so that no target is lost at a cut; what remains is a shorter piece, fitted as a
document is. Documents of fewer than two tokens have no target and are in no row. It does not know
ids, epochs or files; `sequences.py` reads the rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from maxpipe.data.documents import Documents
from maxpipe.data.formats.read_tracker import track_read
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


class TokenSpan(NamedTuple):
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

    def epoch_permutation(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """The order of sequences in an epoch that the key stands for."""
        ...

    def where(self, document: int) -> str:
        """The file of a document and its place in it, for people."""
        ...

    def size(self, document: int) -> int:
        """Tokens of a document."""
        ...


def packing_efficiency(sequences: Sequences) -> float:
    """The part of all positions that has a target of its document."""
    return sequences.num_targets / (len(sequences) * sequences.sequence_length)


def count_targets(lengths: np.ndarray) -> int:
    """Tokens that follow another one of their document, of documents of these lengths."""
    return int(lengths.sum() - np.count_nonzero(lengths))


def assemble_sequence(
    documents: Documents, pieces: Iterable[TokenSpan], sequence_length: int
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
        with track_read(partial(documents.where, number)):
            document = documents[number]
        here, inside = slice(at, at + end - begin), slice(begin, end)
        window[here] = document.ids[inside]
        if document.trained is not None:
            trained[here] = document.trained[inside]
        border = [document.second_half_start] if document.second_half_start else []
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


class ConcatenatedSequences:
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
        self.num_targets = count_targets(lengths)

    def __len__(self) -> int:
        # The last token of the stream is only ever a target: it starts no sequence.
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return assemble_sequence(self._documents, self._pieces(index), self.sequence_length)

    def epoch_permutation(self, *key: int) -> Permutation:
        return Permutation(len(self), *key)

    def padding(self) -> dict[str, np.ndarray]:
        return assemble_sequence(self._documents, (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        first = index * self.sequence_length
        last = min(first + self.sequence_length, self.num_tokens) - 1
        begin, end = np.searchsorted(self._starts, [first, last], side="right")
        return self._order[begin - 1 : end].tolist()

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths[document])

    def _pieces(self, index: int) -> Iterator[TokenSpan]:
        at = index * self.sequence_length
        last = min(at + self.sequence_length + 1, self.num_tokens)
        position = int(np.searchsorted(self._starts, at, side="right")) - 1
        while at < last:
            begin, end = self._starts[position : position + 2].tolist()
            end = min(end, last)
            yield TokenSpan(int(self._order[position]), at - begin, end - begin)
            at, position = end, position + 1


Strategy = Literal["first_fit", "best_fit", "pad"]

MAX_OPEN_SEQUENCES = 1024
"""Rows that `first_fit` looks at; more than these are never open."""
_PACKED_ORDER = 4
"""Second word of the key of a permutation, beside those of documents, sequences and mixtures."""


class PackingPlan(NamedTuple):
    """Pieces of documents by row. Piece p is of `documents[p]`, from its token `begins[p]`."""

    starts: np.ndarray
    """int64 [rows + 1]: the first piece of each row, and the end."""
    documents: np.ndarray
    """Unsigned integers [pieces], as small as their numbers allow."""
    begins: np.ndarray
    """Likewise."""


def pack_documents(
    lengths: np.ndarray,
    order: np.ndarray,
    sequence_length: int,
    strategy: Strategy,
    most_pieces: int = 0,
) -> PackingPlan:
    """Rows of the documents that `order` int64 [documents] numbers, of `lengths` int64 [all].

    The same for the same arguments, everywhere. Pieces of a row are in the order of documents. A
    row has `most_pieces` of them at most, if that is not 0: shorter ones take as much room as that
    number leaves each.
    """
    documents, begins = _split_into_spans(lengths[order], order, sequence_length)
    capacity = sequence_length + 1
    sizes = np.minimum(lengths[documents] - begins, capacity)
    if most_pieces:
        sizes = np.maximum(sizes, -(-capacity // most_pieces))
    documents, begins = _to_smallest_dtype(documents), _to_smallest_dtype(begins)
    if strategy == "pad":
        return PackingPlan(np.arange(len(sizes) + 1), documents, begins)
    rows = _best_fit(sizes, capacity) if strategy == "best_fit" else _first_fit(sizes, capacity)
    num_rows = int(rows.max(initial=-1)) + 1
    # Rows of like documents, or filled at the end, are next to each other: not so in the plan.
    rows = Permutation(num_rows, 0, _PACKED_ORDER)(np.arange(num_rows))[rows]
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return PackingPlan(starts, documents[by_row], begins[by_row])


def _to_smallest_dtype(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _split_into_spans(
    lengths: np.ndarray, order: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(document, begin) of each piece, document by document."""
    counts = -(-np.maximum(lengths - 1, 0) // sequence_length)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(order, counts), numbers * sequence_length


def _first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64 [pieces]: rows by first fit, pieces in their order.

    Each piece goes into the first open row that has room for it. Where none has, a row is opened;
    of more than `OPEN_ROWS` the fullest is closed, the first of those that are as full.
    """
    row_of = np.empty(len(sizes), np.int64)
    rooms = np.zeros(MAX_OPEN_SEQUENCES, np.int64)
    opened = np.zeros(MAX_OPEN_SEQUENCES, np.int64)
    rows = 0
    for piece, size in enumerate(sizes.tolist()):
        has_room = rooms >= size
        at = has_room.argmax()
        if not has_room[at]:
            fullest = rooms.argmin()
            rooms[fullest:-1] = rooms[fullest + 1 :]
            opened[fullest:-1] = opened[fullest + 1 :]
            at = -1
            rooms[at], opened[at] = capacity, rows
            rows += 1
        rooms[at] -= size
        row_of[piece] = opened[at]
    return row_of


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64 [pieces]: rows by best fit, longest pieces first.

    Each piece goes into the fullest row that has room for it, the first of those that are as full.
    Pieces of one size are placed together: the fullest row stays that until no other piece fits
    into it. So beside the sorting, time grows with the number of sizes, not with that of pieces.
    """
    rests = (capacity - sizes).astype(np.min_scalar_type(capacity))
    by_size = np.argsort(rests, kind="stable")  # of 16 bits by radix
    counts = np.bincount(rests)
    row_of = np.empty(len(sizes), np.int64)  # of the pieces as `by_size` has them
    opened, rows, placed = _OpenSequences(capacity), 0, 0
    for rest in np.flatnonzero(counts).tolist():
        size, count = capacity - rest, int(counts[rest])
        opened.set_piece_size(size)
        while count:
            found = opened.take()
            if found is None:
                end = rows - (-count // (capacity // size))
                found, rows = (rows, end, capacity), end
            first, end, room = found
            each = room // size
            middle = first + min(end - first, count // each)
            filled = np.repeat(np.arange(first, middle), each)
            opened.put(first, middle, room - each * size)
            if middle < end:  # too few are left to fill another one
                last = count - len(filled)
                filled = np.append(filled, np.full(last, middle))
                opened.put(middle, middle + (last > 0), room - last * size)
                opened.put(middle + (last > 0), end, room)
            row_of[placed : placed + len(filled)] = filled
            placed, count = placed + len(filled), count - len(filled)
    found_rows = np.empty_like(row_of)
    found_rows[by_size] = row_of
    return found_rows


class _OpenSequences:
    """Rows that are not full: ranges of consecutive ones with the same room."""

    def __init__(self, capacity: int):
        self._size = capacity + 1
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """Heaps of (first row, end) by room."""
        self._rooms: list[int] = []
        """A heap of the rooms in which a piece of this size fits."""

    def set_piece_size(self, size: int) -> None:
        """Pieces are of this size, smaller than before, from here on."""
        for room in range(size, self._size):
            if room in self._ranges:
                heapq.heappush(self._rooms, room)
        self._size = size

    def take(self) -> tuple[int, int, int] | None:
        """(first row, end, room) of the first range of the fullest rows in which a piece fits."""
        if not self._rooms:
            return None
        room = self._rooms[0]
        ranges = self._ranges[room]
        first, end = heapq.heappop(ranges)
        if not ranges:
            del self._ranges[room]
            heapq.heappop(self._rooms)
        return first, end, room

    def put(self, first: int, end: int, room: int) -> None:
        """Rows from `first` to before `end` have this room."""
        if first == end:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            if room >= self._size:
                heapq.heappush(self._rooms, room)
        heapq.heappush(self._ranges[room], (first, end))
