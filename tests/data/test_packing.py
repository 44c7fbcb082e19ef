"""Packing: every token once, separate documents, and deterministic sequences."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.data import documents, packing
from maxpipe.data.documents import EncodedDocument, EncodedDocuments, build_index
from maxpipe.data.packing import ConcatenatedSequences, Permutation, split_documents
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError
from tests.data.texts import Texts

DOCUMENTS = st.lists(st.text("abc é", max_size=20), min_size=1, max_size=12)
LENGTHS = st.integers(2, 17)


def pack(
    texts: Sequence[str], length: int, order: Sequence[int] | None = None
) -> ConcatenatedSequences:
    source = Texts(texts)
    index = build_index(source, ByteTokenizer(), None)
    encoded = EncodedDocuments(source, ByteTokenizer(), index)
    return ConcatenatedSequences(encoded, np.array(order or range(len(texts))), length)


def stream_of(texts: Sequence[str]) -> list[int]:
    return [i for text in texts for i in (256, *text.encode(), 257)]


@given(DOCUMENTS, LENGTHS)
def test_inputs_match_token_stream(texts: list[str], length: int) -> None:
    sequences = pack(texts, length)
    stream = stream_of(texts)
    assert sequences.num_tokens == len(stream)
    examples = [sequences[i] for i in range(len(sequences))]
    inputs = np.concatenate([e["tokens"][e["segment_ids"] > 0] for e in examples])
    # Only the last token may be missing: it is a target but has no target itself.
    assert inputs.tolist() == stream[: len(inputs)] and len(inputs) >= len(stream) - 1
    for i, example in enumerate(examples):
        targets = example["targets"][: len(stream) - 1 - i * length]
        assert targets.tolist() == stream[i * length + 1 :][:length]
        assert example["loss_mask"].any()
    # Splitting a document loses no targets: every token but its first is a target.
    assert sum(e["loss_mask"].sum() for e in examples) == len(stream) - len(texts)


@given(DOCUMENTS, LENGTHS)
def test_each_document_has_its_own_segment(texts: list[str], length: int) -> None:
    sequences = pack(texts, length)
    owner = [number for number, text in enumerate(texts) for _ in range(len(text.encode()) + 2)]
    for i in range(len(sequences)):
        example = sequences[i]
        owners = owner[i * length : i * length + length + 1]
        real = min(len(owners), length)
        segments, positions = example["segment_ids"], example["positions"]
        assert segments[:real].tolist() == [o - owners[0] + 1 for o in owners[:real]]
        assert not segments[real:].any() and not positions[real:].any()
        assert (example["tokens"][real:] == 258).all()
        for o in set(owners[:real]):
            where = [k for k in range(real) if owners[k] == o]
            assert positions[where].tolist() == list(range(len(where)))
        same = [k + 1 < len(owners) and owners[k] == owners[k + 1] for k in range(length)]
        assert example["loss_mask"].tolist() == [float(s) for s in same]
        assert sequences.documents(i) == sorted(set(owners[:real]))


def test_sequence_documents_use_source_indices() -> None:
    sequences = pack(["a", "bcdefg", "h"], 6, order=[2, 0, 1])
    assert [sequences.documents(i) for i in range(len(sequences))] == [[2, 0], [1], [1]]


def test_sequence_shapes_and_dtypes() -> None:
    sequences = pack(["abc", "de"], 4)
    for example in (sequences[0], sequences[len(sequences) - 1], sequences.padding()):
        kinds = {name: str(array.dtype) for name, array in example.items()}
        assert kinds == {
            "tokens": "int32",
            "targets": "int32",
            "segment_ids": "int32",
            "positions": "int32",
            "loss_mask": "float32",
        }
        assert {array.shape for array in example.values()} == {(4,)}
    padding = sequences.padding()
    assert not padding["loss_mask"].any() and not padding["segment_ids"].any()
    assert (padding["tokens"] == 258).all()
    for outside in (-1, len(sequences)):
        with pytest.raises(IndexError):
            sequences[outside]


def test_packed_sequence_matches_hand_computed_arrays() -> None:
    example = pack(["ab", "", "c"], 6)[0]
    assert example["tokens"].tolist() == [256, 97, 98, 257, 256, 257]
    assert example["targets"].tolist() == [97, 98, 257, 256, 257, 256]
    assert example["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2]
    assert example["positions"].tolist() == [0, 1, 2, 3, 0, 1]
    assert example["loss_mask"].tolist() == [1, 1, 1, 0, 1, 0]


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 3))
def test_permutation_is_bijective(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    last = np.array([size - 1])
    assert Permutation(size, seed, epoch)(last).tolist() == [order[-1]]


def test_permutation_does_not_depend_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Permutation(100, 7)(np.arange(100))
    monkeypatch.setattr(packing, "_FEISTEL_BLOCK", 32)
    assert np.array_equal(Permutation(100, 7)(np.arange(100)), whole)
    assert Permutation(100, 7)(np.arange(0)).tolist() == []
    for outside in (-1, 100):
        with pytest.raises(AssertionError, match=r"range\(100\)"):
            Permutation(100, 7)(np.array([outside]))


def test_permutation_never_changes() -> None:
    """A change here changes the data of every resumed run."""
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [0, 7, 3, 4, 1, 9, 5, 2, 8, 6]
    large = Permutation(1_000_003, -5, 2)(np.arange(5))
    assert large.tolist() == [321092, 420657, 179093, 503537, 877009]


def test_permutation_is_uniform() -> None:
    """All 24 permutations of four items are about equally likely, and neighbors are separated."""
    seen = [tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(2400)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 24 and min(counts) > 60 and max(counts) < 140
    order = Permutation(20_000, 3)(np.arange(20_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


@given(st.integers(2, 400), st.floats(1e-6, 1.0, exclude_max=True), st.integers(0, 5))
def test_every_document_is_in_one_split(count: int, fraction: float, seed: int) -> None:
    train, validation = split_documents(count, fraction, seed)
    assert sorted([*train, *validation]) == list(range(count))
    assert len(train) >= 1
    assert len(validation) == min(max(round(fraction * count), 1), count - 1)


def test_split_edge_cases() -> None:
    train, validation = split_documents(1, 0.0, 0)
    assert len(train) == 1 and len(validation) == 0
    with pytest.raises(ConfigError) as error:
        split_documents(1, 0.05, 0)
    [problem] = error.value.problems
    assert (problem.where, problem.value) == ("data.validation_fraction", "0.05")
    assert "at least 2 documents" in problem.rule and "has 1" in problem.rule
    assert "data.validation_fraction=0" in problem.action
    assert set(split_documents(50, 0.2, 0)[1]) != set(split_documents(50, 0.2, 1)[1])


def test_concurrent_threads_read_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_CACHED_BYTES", 200)
    texts = ["".join(chr(97 + (i * k) % 26) for k in range(i)) for i in range(40)]
    sequences = pack(texts, 16)
    numbers = list(range(len(sequences))) * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(sequences.__getitem__, numbers))
    alone = pack(texts, 16)
    for number, example in zip(numbers, found, strict=True):
        expected = alone[number]
        assert all((example[name] == expected[name]).all() for name in expected)
    kept = sequences._documents
    assert isinstance(kept, EncodedDocuments)
    assert kept._cached_bytes == sum(each.ids.nbytes for each in kept._cached.values())


class Masked:
    """Two documents in which some tokens are not trained on."""

    lengths = np.array([5, 4])
    pad_id = 9

    def __getitem__(self, document: int) -> EncodedDocument:
        if document:
            return EncodedDocument(np.arange(4), np.array([False, True, False, True]))
        return EncodedDocument(np.arange(5), np.array([False, False, True, True, False]))

    def where(self, document: int) -> str:
        return f"document {document}"


def test_untrained_targets_are_masked() -> None:
    sequences = ConcatenatedSequences(Masked(), np.array([0, 1]), 4)
    masks = np.concatenate([sequences[i]["loss_mask"] for i in range(len(sequences))])
    # Every token but the first of a document is a target; the last position has no target.
    assert masks.tolist()[:8] == [0, 1, 1, 0, 0, 1, 0, 1]
