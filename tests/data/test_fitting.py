"""Packing of whole documents: complete, within capacity, and equal to the reference algorithms."""

from __future__ import annotations

import time
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.data import packing
from maxpipe.data.packing import PackingPlan, Strategy, pack_documents

STRATEGIES = get_args(Strategy)
LENGTHS = st.lists(st.integers(0, 60), max_size=60).map(lambda each: np.array(each, np.int64))
SEQUENCE_LENGTH = st.integers(1, 25)

Piece = tuple[int, int, int]


def rows_of(plan: PackingPlan, lengths: np.ndarray, sequence_length: int) -> list[list[Piece]]:
    """Return (document, begin, end) of each piece by row."""
    found = []
    for first, last in zip(plan.starts[:-1], plan.starts[1:], strict=True):
        row = []
        for piece in range(first, last):
            document, begin = int(plan.documents[piece]), int(plan.begins[piece])
            row.append((document, begin, min(begin + sequence_length + 1, int(lengths[document]))))
        found.append(row)
    return found


def whole_pieces(lengths: np.ndarray, order: np.ndarray, sequence_length: int) -> list[Piece]:
    """Split documents into pieces as the docstring of `packing` defines."""
    found = []
    for document in order.tolist():
        begin = 0
        while begin + 1 < lengths[document]:
            end = min(begin + sequence_length + 1, int(lengths[document]))
            found.append((document, begin, end))
            begin = end - 1
    return found


def first_fit(pieces: list[Piece], capacity: int, most: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    rooms: dict[int, int] = {}  # of open rows, in the order in which they were opened
    for piece in pieces:
        size = piece[2] - piece[1]
        row = next((row for row, room in rooms.items() if room >= size), None)
        if row is None:
            if len(rooms) == most:
                del rooms[min(rooms, key=lambda each: rooms[each])]
            row = len(rows)
            rows.append([])
            rooms[row] = capacity
        rows[row].append(piece)
        rooms[row] -= size
    return rows


def best_fit(pieces: list[Piece], capacity: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda each: each[1] - each[2]):
        size = piece[2] - piece[1]
        fits = [(room, row) for row, room in enumerate(rooms) if room >= size]
        if not fits:
            rows.append([])
            rooms.append(capacity)
        row = min(fits)[1] if fits else len(rows) - 1
        rows[row].append(piece)
        rooms[row] -= size
    return rows


def shuffled(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(len(lengths))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths=LENGTHS, sequence_length=SEQUENCE_LENGTH)
def test_every_target_is_in_exactly_one_row(
    strategy: Strategy, lengths: np.ndarray, sequence_length: int
) -> None:
    plan = pack_documents(lengths, shuffled(lengths), sequence_length, strategy)
    rows = rows_of(plan, lengths, sequence_length)
    targets = Counter((d, i) for row in rows for d, b, e in row for i in range(b + 1, e))
    assert targets == Counter((d, i) for d, length in enumerate(lengths) for i in range(1, length))
    # Only a piece's first token is repeated: it is the last one of the piece before.
    assert all(b % sequence_length == 0 for row in rows for _, b, _ in row)
    # A row holds sequence_length inputs and one more token.
    assert all(1 <= sum(e - b for _, b, e in row) <= sequence_length + 1 for row in rows)
    # A document is split into as few pieces as possible.
    pieces = Counter(d for row in rows for d, _, _ in row)
    fewest = -(-np.maximum(lengths - 1, 0) // sequence_length)
    assert [pieces[document] for document in range(len(lengths))] == fewest.tolist()
    assert plan.starts.dtype == np.int64 and plan.starts[0] == 0


@given(lengths=LENGTHS, sequence_length=SEQUENCE_LENGTH)
def test_best_fit_matches_reference_loop(lengths: np.ndarray, sequence_length: int) -> None:
    order = shuffled(lengths)
    rows = rows_of(
        pack_documents(lengths, order, sequence_length, "best_fit"), lengths, sequence_length
    )
    expected = best_fit(whole_pieces(lengths, order, sequence_length), sequence_length + 1)
    assert sorted(map(sorted, rows)) == sorted(map(sorted, expected))


@given(lengths=LENGTHS, sequence_length=SEQUENCE_LENGTH, most=st.sampled_from([1, 2, 5, 1024]))
def test_first_fit_matches_reference_loop(
    lengths: np.ndarray, sequence_length: int, most: int
) -> None:
    order = shuffled(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MAX_OPEN_SEQUENCES", most)
        plan = pack_documents(lengths, order, sequence_length, "first_fit")
    expected = first_fit(whole_pieces(lengths, order, sequence_length), sequence_length + 1, most)
    rows = rows_of(plan, lengths, sequence_length)
    assert sorted(map(sorted, rows)) == sorted(map(sorted, expected))


@given(lengths=LENGTHS, sequence_length=SEQUENCE_LENGTH)
def test_pad_puts_one_piece_in_each_row(lengths: np.ndarray, sequence_length: int) -> None:
    order = shuffled(lengths)
    rows = rows_of(pack_documents(lengths, order, sequence_length, "pad"), lengths, sequence_length)
    assert rows == [[each] for each in whole_pieces(lengths, order, sequence_length)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_within_row_keep_their_order(strategy: Strategy) -> None:
    lengths = np.random.default_rng(1).integers(2, 40, 500)
    order = shuffled(lengths)
    place = np.argsort(order)
    for row in rows_of(pack_documents(lengths, order, 64, strategy), lengths, 64):
        places = [place[document] for document, _, _ in row]
        assert places == sorted(places)


def lengths_like_text(count: int) -> np.ndarray:
    """Draw log-normal document lengths: many short and a few very long documents."""
    return np.exp(np.random.default_rng(2).normal(6, 1.2, count)).astype(np.int64) + 2


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit"])
def test_packing_rows_are_nearly_full(strategy: Strategy) -> None:
    lengths = lengths_like_text(100_000)
    rows = len(pack_documents(lengths, shuffled(lengths), 2048, strategy).starts) - 1
    tokens = sum(e - b for _, b, e in whole_pieces(lengths, np.arange(len(lengths)), 2048))
    fewest = -(-tokens // 2049)
    assert fewest <= rows <= fewest * (1.0005 if strategy == "best_fit" else 1.01)


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit"])
def test_document_lengths_are_spread_evenly_over_rows(strategy: Strategy) -> None:
    """The first rows, which a short evaluation uses, are representative of all rows."""
    lengths = lengths_like_text(50_000)
    plan = pack_documents(lengths, shuffled(lengths), 1024, strategy)
    pieces = np.diff(plan.starts)
    tenths = [each.mean() for each in np.array_split(pieces, 10)]
    # Ten standard errors of the mean of one tenth.
    assert np.ptp(tenths) < 10 * pieces.std() / np.sqrt(len(pieces) / 10)


def test_packing_plan_never_changes() -> None:
    """Checkpoints store row positions, so the plan must never change."""
    lengths = np.array([9, 2, 5, 30, 3, 3, 4, 8, 1, 0, 6])
    order = np.array([4, 1, 10, 8, 0, 3, 9, 2, 7, 6, 5])
    found = {each: pack_documents(lengths, order, 9, each) for each in STRATEGIES}
    assert {name: [part.tolist() for part in plan] for name, plan in found.items()} == GOLDEN


GOLDEN = {
    "first_fit": [
        [0, 2, 3, 4, 6, 7, 8, 11, 12],
        [2, 5, 3, 3, 10, 6, 0, 7, 4, 1, 3, 3],
        [0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 27, 18],
    ],
    "best_fit": [
        [0, 2, 3, 5, 6, 7, 9, 10, 12],
        [4, 2, 0, 1, 7, 3, 3, 3, 5, 3, 10, 6],
        [0, 0, 0, 0, 0, 9, 18, 27, 0, 0, 0, 0],
    ],
    "pad": [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [4, 1, 10, 0, 3, 3, 3, 3, 2, 7, 6, 5],
        [0, 0, 0, 0, 0, 9, 18, 27, 0, 0, 0, 0],
    ],
}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(each, marks=pytest.mark.long) if each == "first_fit" else each
        for each in STRATEGIES
    ],
)
def test_packing_a_million_documents_takes_seconds(strategy: Strategy) -> None:
    lengths = lengths_like_text(1_000_000)
    order = shuffled(lengths)
    begin = time.process_time()
    pack_documents(lengths, order, 4096, strategy)
    assert time.process_time() - begin < 30
