"""Rows of whole documents, planned from the documents' lengths alone.

A row has T inputs and the target of the last one: T + 1 tokens, of any number of documents. A
document of more tokens is cut into pieces of T + 1, of which each begins with the last token of the
one before it, so that no target is lost at a cut; what remains is a shorter piece, fitted as a
document is. Documents of fewer than two tokens have no target and are in no row. It does not know
ids, epochs or files; `sequences.py` reads the rows.
"""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

import numpy as np

from maxpipe.data.packing import Permutation

Strategy = Literal["first_fit", "best_fit", "pad"]

OPEN_ROWS = 1024
"""Rows that `first_fit` looks at; more than these are never open."""
_ROW_ORDER = 4
"""Second word of the key of a permutation, beside those of documents, sequences and mixtures."""


class Plan(NamedTuple):
    """Pieces of documents by row. Piece p is of `documents[p]`, from its token `begins[p]`."""

    starts: np.ndarray
    """int64 [rows + 1]: the first piece of each row, and the end."""
    documents: np.ndarray
    """Unsigned integers [pieces], as small as their numbers allow."""
    begins: np.ndarray
    """Likewise."""


def fitted(
    lengths: np.ndarray,
    order: np.ndarray,
    sequence_length: int,
    strategy: Strategy,
    most_pieces: int = 0,
) -> Plan:
    """Rows of the documents that `order` int64 [documents] numbers, of `lengths` int64 [all].

    The same for the same arguments, everywhere. Pieces of a row are in the order of documents. A
    row has `most_pieces` of them at most, if that is not 0: shorter ones take as much room as that
    number leaves each.
    """
    documents, begins = _pieces(lengths[order], order, sequence_length)
    capacity = sequence_length + 1
    sizes = np.minimum(lengths[documents] - begins, capacity)
    if most_pieces:
        sizes = np.maximum(sizes, -(-capacity // most_pieces))
    documents, begins = _small(documents), _small(begins)
    if strategy == "pad":
        return Plan(np.arange(len(sizes) + 1), documents, begins)
    rows = _best_fit(sizes, capacity) if strategy == "best_fit" else _first_fit(sizes, capacity)
    num_rows = int(rows.max(initial=-1)) + 1
    # Rows of like documents, or filled at the end, are next to each other: not so in the plan.
    rows = Permutation(num_rows, 0, _ROW_ORDER)(np.arange(num_rows))[rows]
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return Plan(starts, documents[by_row], begins[by_row])


def _small(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _pieces(
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
    rooms = np.zeros(OPEN_ROWS, np.int64)
    opened = np.zeros(OPEN_ROWS, np.int64)
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
    opened, rows, placed = _Opened(capacity), 0, 0
    for rest in np.flatnonzero(counts).tolist():
        size, count = capacity - rest, int(counts[rest])
        opened.shrink(size)
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


class _Opened:
    """Rows that are not full: ranges of consecutive ones with the same room."""

    def __init__(self, capacity: int):
        self._size = capacity + 1
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """Heaps of (first row, end) by room."""
        self._rooms: list[int] = []
        """A heap of the rooms in which a piece of this size fits."""

    def shrink(self, size: int) -> None:
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
