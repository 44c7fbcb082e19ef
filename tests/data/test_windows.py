"""Windowed shuffling of large datasets: windows, seeks, and a start without a full pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig, MixedSourceConfig
from maxpipe.config.sections.source import Packing
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.packing import Packer
from maxpipe.data.prepared import reader
from maxpipe.data.prepared.manifest import SPAN_DOCUMENTS
from maxpipe.data.prepared.reader import WindowedSequences, split_spans
from tests.data.large import DOCUMENTS, MEASURED, SHARDS, write_sparse
from tests.data.texts import write_texts

NUM_DOCUMENTS = 7 * SPAN_DOCUMENTS + 100
PACKINGS: tuple[Packing, ...] = get_args(Packing)[1:]
FITTED = PACKINGS[1:]
LENGTH = 50


class Numbers:
    """Documents that contain only their own index, repeated one to five times."""

    pad_id = 0
    num_documents = NUM_DOCUMENTS

    def __init__(self) -> None:
        self.lengths = 1 + np.arange(NUM_DOCUMENTS) % 5
        self.span_tokens = np.add.reduceat(
            self.lengths, np.arange(0, NUM_DOCUMENTS, SPAN_DOCUMENTS)
        )
        self.num_tokens = int(self.lengths.sum())

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        return self.lengths[first:stop]

    def __getitem__(self, document: int) -> EncodedDocument:
        return EncodedDocument(np.full(self.lengths[document], document))

    def where(self, document: int) -> str:
        return f"document {document}"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two spans per window."""
    monkeypatch.setattr(reader, "WINDOW_SPANS", 2)


def opened(
    split: Any = "train",
    fraction: float = 0.3,
    seed: int | None = 5,
    packing: Packing = "concatenate",
    **more: Any,
) -> WindowedSequences:
    documents = Numbers()
    spans = split_spans(documents, split, fraction, seed or 0)
    return WindowedSequences(documents, spans, Packer(packing, LENGTH, **more), seed)


def trained(sequences: WindowedSequences, order: np.ndarray) -> np.ndarray:
    """Return the input tokens of sequences in the given order."""
    found = [sequences[i] for i in order.tolist()]
    return np.concatenate([each["tokens"][each["segment_ids"] > 0] for each in found])


def test_splits_contain_every_token_once() -> None:
    held, kept = opened("validation"), opened("train")
    tokens = [trained(each, np.arange(len(each))) for each in (held, kept)]
    documents = Numbers()
    counts = np.bincount(np.concatenate(tokens), minlength=NUM_DOCUMENTS)
    # The last token of a window is only a target, never an input.
    missing = documents.lengths - counts
    assert missing.min() >= 0 and missing.sum() <= 2 + 4
    assert not set(tokens[0]) & set(tokens[1])
    assert held.num_tokens + kept.num_tokens == documents.num_tokens
    assert len(set(tokens[0] // SPAN_DOCUMENTS)) == round(0.3 * 8)


@pytest.mark.parametrize("packing", FITTED)
def test_packed_documents_are_in_exactly_one_row(packing: Packing) -> None:
    held, kept = opened("validation", packing=packing), opened("train", packing=packing)
    documents = Numbers()
    rows = [each.documents(number) for each in (held, kept) for number in range(len(each))]
    found = np.concatenate(rows)
    # Every fifth document has a single token and therefore no target.
    assert sorted(found.tolist()) == np.flatnonzero(documents.lengths > 1).tolist()
    assert held.num_targets + kept.num_targets == (documents.lengths - 1).sum()
    for number in (0, len(kept) - 1):
        row, names = kept[number], kept.documents(number)
        tokens = np.concatenate([np.full(documents.lengths[each], each) for each in names])
        assert row["tokens"][row["segment_ids"] > 0].tolist() == tokens[:LENGTH].tolist()
    targets = sum(kept[number]["loss_mask"].sum() for number in range(len(kept)))
    assert targets == kept.num_targets


def test_window_row_counts_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = opened(packing="best_fit", cache_dir=str(tmp_path))
    read = Numbers.lengths_between

    def refused(self: Numbers, first: int, stop: int) -> np.ndarray:
        raise AssertionError("a second start must not read lengths")

    monkeypatch.setattr(Numbers, "lengths_between", refused)
    again = opened(packing="best_fit", cache_dir=str(tmp_path))
    assert len(again) == len(expected) and again.num_targets == expected.num_targets
    with pytest.raises(AssertionError):
        opened(packing="first_fit", cache_dir=str(tmp_path))
    with pytest.raises(AssertionError):
        opened(packing="best_fit", cache_dir=str(tmp_path), seed=6)
    monkeypatch.setattr(Numbers, "lengths_between", read)
    for number in (len(again) - 1, 3):
        assert np.array_equal(again[number]["tokens"], expected[number]["tokens"])


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_epoch_has_every_sequence_once_in_new_order(packing: Packing) -> None:
    sequences = opened(packing=packing)
    count = len(sequences)
    orders = [sequences.epoch_permutation(5, 1, epoch)(np.arange(count)) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(count)) for order in orders)
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[1], orders[2])
    for places in (np.array([3, count - 1, 0, 17]), np.array([count // 2])):
        assert np.array_equal(sequences.epoch_permutation(5, 1, 2)(places), orders[2][places])
    visited = [np.searchsorted(sequences._starts, order, side="right") for order in orders]
    assert all(np.count_nonzero(np.diff(each)) == 2 for each in visited)  # three windows


def test_documents_are_shuffled_within_windows() -> None:
    sequences = opened()
    window = sequences[0]["tokens"]
    assert np.count_nonzero(np.diff(window.astype(int)) == 1) < 5
    names = sequences.documents(0)
    assert sorted(set(window[:LENGTH].tolist())) == sorted(names)
    as_they_are = opened("all", seed=None)
    assert (
        as_they_are[0]["tokens"].tolist()
        == Numbers().__getitem__(0).ids.tolist()
        + [number for i in range(1, 40) for number in [i] * (1 + i % 5)][: LENGTH - 1]
    )


def test_sequence_index_out_of_range_raises_error() -> None:
    sequences = opened()
    for index in (-1, len(sequences)):
        with pytest.raises(IndexError):
            sequences[index]
    assert not sequences.padding()["loss_mask"].any()


@pytest.fixture(scope="module")
def hundred_gigabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the sparse folder of `write_sparse`."""
    folder = tmp_path_factory.mktemp("large")
    write_sparse(folder)
    return folder


def test_hundred_gigabytes_open_in_seconds(hundred_gigabytes: Path) -> None:
    """Limits: 5 s of wall-clock time, which includes disk waits, and 1 GB of memory."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, str(hundred_gigabytes)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tokens"] == pytest.approx(0.95 * 50e9, rel=1e-3)
    assert found["sizes"] == [[8, 2048]] * 4
    assert found["open"] < 5 and found["peak"] < 1e9, found
    # A seek opens at most one other window, independent of the step.
    assert max(found["seeks"]) < 5, found


def test_windowed_batches_do_not_depend_on_rows_read(hundred_gigabytes: Path) -> None:
    data = DataConfig(source="tokens", path=str(hundred_gigabytes))
    found: Datasets = build_loaders(
        data, TokenizerConfig(), seed=0, batch_size=4, sequence_length=128
    )
    whole = found.train.batch(10_000_000)
    part = found.train.batch(10_000_000, [3, 1])
    assert np.array_equal(whole["segment_ids"][[3, 1]], part["segment_ids"])
    assert found.train.fingerprint()["order"] == "windows"
    ids = found.train.batch_contents(10_000_000)
    assert len(ids["sequences"]) == 4 and max(ids["documents"]) < SHARDS * DOCUMENTS


def test_windows_in_a_mixture(hundred_gigabytes: Path, tmp_path: Path) -> None:
    """Mixes a windowed source with a small text source, in training and evaluation."""
    few = write_texts(tmp_path / "few", [f"text {i} " * 20 for i in range(30)])
    mixture = {
        "large": MixedSourceConfig(source="tokens", path=str(hundred_gigabytes), weight=3),
        "few": MixedSourceConfig(source="text", path=few, weight=1),
    }
    data = DataConfig(mixture=mixture, validation_fraction=0.1)
    found = build_loaders(data, TokenizerConfig(), seed=0, batch_size=8, sequence_length=128)
    for step in (0, 10_000_000):
        rows, batch = found.train.sequence_origins(step), found.train.batch(step)
        assert {row.source for row in rows} == {"large", "few"}
        names = [found.train.sources[number] for number in batch["source_ids"]]
        assert names == [row.source for row in rows] and batch["loss_mask"].any(axis=1).all()
    held_out = found.validation
    assert held_out is not None
    # Each source is read in its own order, window by window.
    rows = [row for step in range(3) for row in held_out.sequence_origins(step)]
    large = [row.sequence for row in rows if row.source == "large"]
    assert large == list(range(len(large))) and len(rows) == 24


def test_windowed_document_locations_and_sizes() -> None:
    sequences = opened()
    numbers = sequences.documents(0)
    assert [sequences.where(each) for each in numbers] == [f"document {i}" for i in numbers]
    assert [sequences.size(each) for each in numbers] == [1 + i % 5 for i in numbers]
