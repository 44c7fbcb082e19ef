"""Sequences of each `data.packing` strategy: row contents and cached plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.config.sections.source import Packing
from maxpipe.data import packing as packing_module
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.packing import Packer, Sequences

PACKINGS: tuple[Packing, ...] = get_args(Packing)[1:]
FITTED = PACKINGS[1:]
PAD = 3


class Ids:
    """Documents with recognizable IDs: document d has d * 100 + 10, d * 100 + 11, ..."""

    pad_id = PAD

    def __init__(self, lengths: Sequence[int], *, masked: bool = False):
        self.lengths = np.array(lengths, np.int64)
        self._masked = masked

    def __getitem__(self, document: int) -> EncodedDocument:
        places = np.arange(self.lengths[document])
        return EncodedDocument(
            document * 100 + 10 + places, places % 3 > 0 if self._masked else None
        )

    def where(self, document: int) -> str:
        return f"document {document}"


def packed(documents: Ids, length: int, packing: Packing, **more: Any) -> Sequences:
    order = np.random.default_rng(4).permutation(len(documents.lengths))
    return Packer(packing, length, **more)(documents, order)


def rows(found: Sequences) -> list[dict[str, np.ndarray]]:
    return [found[i] for i in range(len(found))]


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda e: max(e) > 1)


@pytest.mark.parametrize("packing", PACKINGS)
@given(lengths=LENGTHS, length=st.integers(1, 20), masked=st.booleans())
def test_all_packings_train_same_targets(
    packing: Packing, lengths: list[int], length: int, masked: bool
) -> None:
    documents = Ids(lengths, masked=masked)
    found = packed(documents, length, packing)
    seen: Counter[tuple[int, int]] = Counter()
    inside = 0
    for row in rows(found):
        same = row["segment_ids"][1:] == row["segment_ids"][:-1]
        for token, target, mask in zip(
            row["tokens"], row["targets"], row["loss_mask"], strict=True
        ):
            seen[int(token), int(target)] += int(mask)
        inside += int((same & (row["segment_ids"][1:] > 0)).sum())
    expected: Counter[tuple[int, int]] = Counter()
    for document in range(len(lengths)):
        each = documents[document]
        trained = np.ones(len(each.ids), bool) if each.trained is None else each.trained
        expected.update(
            zip(
                each.ids[:-1][trained[1:]].tolist(), each.ids[1:][trained[1:]].tolist(), strict=True
            )
        )
    assert +seen == expected
    assert found.num_targets == sum(max(each - 1, 0) for each in lengths)
    assert found.num_tokens == sum(lengths)


@pytest.mark.parametrize("packing", FITTED)
@given(lengths=LENGTHS, length=st.integers(1, 20))
def test_rows_contain_pieces_and_padding(packing: Packing, lengths: list[int], length: int) -> None:
    documents = Ids(lengths)
    found = packed(documents, length, packing)
    for number, row in enumerate(rows(found)):
        segments, window = row["segment_ids"], np.append(row["tokens"], row["targets"][-1])
        names = found.documents(number)
        assert segments.max() == len(names) and (packing != "pad" or len(names) == 1)
        assert np.array_equal(row["targets"][:-1], row["tokens"][1:])
        end = int((segments > 0).sum())
        assert (window[end + 1 :] == PAD).all() and (segments[end:] == 0).all()
        assert not row["positions"][end:].any() and not row["loss_mask"][end:].any()
        for segment, document in enumerate(names, 1):
            [places] = np.nonzero(segments == segment)
            begin = row["tokens"][places[0]] - document * 100 - 10
            # A piece is as long as possible and begins with the last token of the previous piece.
            assert begin % length == 0
            size = min(length + 1, lengths[document] - begin)
            assert len(places) in (size, size - 1)
            assert (
                row["tokens"][places].tolist()
                == documents[document].ids[begin:][: len(places)].tolist()
            )
            assert row["positions"][places].tolist() == list(range(len(places)))


def test_documents_that_fit_are_not_split() -> None:
    """Every document that fits is in exactly one row."""
    lengths = np.random.default_rng(5).integers(2, 65, 200).tolist()
    documents = Ids(lengths, masked=True)
    for packing in FITTED:
        found = packed(documents, 64, packing)
        counts = Counter(name for number in range(len(found)) for name in found.documents(number))
        assert set(counts.values()) == {1} and len(counts) == 200
    assert len(packed(documents, 64, "best_fit")) <= len(packed(documents, 64, "first_fit")) < 200


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_epoch_has_different_order(packing: Packing) -> None:
    found = packed(Ids(list(range(2, 60))), 30, packing)
    places = np.arange(len(found))
    orders = [found.epoch_permutation(7, 1, epoch)(places) for epoch in range(2)]
    assert all(sorted(order.tolist()) == places.tolist() for order in orders)
    assert not np.array_equal(orders[0], orders[1])


@pytest.mark.parametrize("packing", PACKINGS)
def test_sequence_index_out_of_range_raises_error(packing: Packing) -> None:
    found = packed(Ids([5, 9]), 8, packing)
    for index in (-1, len(found)):
        with pytest.raises(IndexError):
            found[index]
    padding = found.padding()
    assert not padding["loss_mask"].any() and (padding["tokens"] == PAD).all()
    assert found.where(1) == "document 1" and found.size(1) == 9


def test_documents_without_targets_give_no_sequences() -> None:
    for packing in FITTED:
        assert len(packed(Ids([1, 0, 1]), 8, packing)) == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lower the cache threshold; return the list of computed plans."""
    monkeypatch.setattr(packing_module, "_MIN_CACHED_DOCUMENTS", 10)
    planned, pack_documents = [], packing_module.pack_documents

    def recorded(*arguments: Any) -> packing_module.PackingPlan:
        planned.append(arguments[3])
        return pack_documents(*arguments)

    monkeypatch.setattr(packing_module, "pack_documents", recorded)
    return planned


def test_packing_plans_are_cached(tmp_path: Path, small: list[str]) -> None:
    documents = Ids(list(range(2, 40)))
    expected = packed(documents, 16, "best_fit", cache_dir=str(tmp_path))
    for _ in range(2):
        again = packed(documents, 16, "best_fit", cache_dir=str(tmp_path))
        assert [row["tokens"].tolist() for row in rows(again)] == [
            row["tokens"].tolist() for row in rows(expected)
        ]
    assert small == ["best_fit"] and len(list(tmp_path.iterdir())) == 1
    # Every changed argument gives another plan.
    packed(documents, 17, "best_fit", cache_dir=str(tmp_path))
    packed(documents, 16, "first_fit", cache_dir=str(tmp_path))
    packed(Ids(list(range(3, 41))), 16, "best_fit", cache_dir=str(tmp_path))
    Packer("best_fit", 16, str(tmp_path))(documents, np.arange(38))
    assert len(small) == 5 and len(list(tmp_path.iterdir())) == 5
    # No plan is cached for few documents, without a folder, or with a read-only cache.
    packed(Ids([4] * 9), 16, "best_fit", cache_dir=str(tmp_path))
    packed(documents, 15, "best_fit")
    packed(documents, 15, "best_fit", cache_dir=str(tmp_path), keep=False)
    assert len(small) == 8 and len(list(tmp_path.iterdir())) == 5


def test_cache_names_of_earlier_releases_are_kept(tmp_path: Path) -> None:
    """The file name is unchanged since the packing strategy was called `cut`."""
    packer = Packer("concatenate", 16, str(tmp_path), key="documents")
    plan = packing_module.pack_documents(np.array([3]), np.array([0]), 16, "pad")
    packer.load_or_compute("rows", [3], lambda _: plan, lambda _: plan)
    assert [path.name for path in tmp_path.iterdir()] == [
        "rows-1159a7c688c9e95928e732d3fab83919.npz"
    ]


def test_damaged_packing_plan_is_rebuilt(
    tmp_path: Path, small: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    documents = Ids(list(range(2, 40)))
    expected = rows(packed(documents, 16, "best_fit", cache_dir=str(tmp_path)))
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-40], b"", whole.replace(b"begins", b"behind")):
        path.write_bytes(damaged)
        again = rows(packed(documents, 16, "best_fit", cache_dir=str(tmp_path)))
        assert all(
            np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(again, expected, strict=True)
        )
        assert "packing them again" in caplog.text and path.read_bytes() == whole
        caplog.clear()
    assert len(small) == 4
