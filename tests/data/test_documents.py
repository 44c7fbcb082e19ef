"""Encoded documents: the index is built once, cached on disk, and rebuilt if damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from maxpipe.data import documents
from maxpipe.data.documents import DocumentIndex, EncodedDocuments, build_index
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import StorageError
from tests.data.texts import Texts


def test_unigram_entropy() -> None:
    def entropy(*texts: str) -> float:
        return build_index(Texts(texts), ByteTokenizer(), None).unigram_entropy

    assert entropy("abab", "ba") == pytest.approx(np.log(2), rel=1e-12)
    assert entropy("abcd") == pytest.approx(np.log(4), rel=1e-12)
    assert f"{entropy('aaa'):.4f}" == "0.0000"
    assert entropy("") == 0


def test_index_does_not_depend_on_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a" * n for n in range(50)]
    whole = build_index(Texts(texts), ByteTokenizer(), None)
    assert whole.lengths.tolist() == [n + 2 for n in range(50)]
    monkeypatch.setattr(documents, "_PASS_CHARACTERS", 7)
    parts = build_index(Texts(texts), ByteTokenizer(), None)
    assert parts.lengths.tolist() == whole.lengths.tolist()


def test_index_is_read_from_cache(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    source = Texts(["abc", "", "é"])
    first = build_index(source, ByteTokenizer(), str(folder))
    assert source.reads == 3
    second = build_index(source, ByteTokenizer(), str(folder))
    assert source.reads == 3
    assert second.lengths.tolist() == first.lengths.tolist() == [5, 2, 4]
    assert second.unigram_entropy == first.unigram_entropy
    assert [path.suffix for path in folder.iterdir()] == [".npz"]
    build_index(Texts(["abc"]), ByteTokenizer(), str(folder))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_damaged_cache_is_rebuilt(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Texts(["abc", "de"])
    build_index(source, ByteTokenizer(), str(tmp_path))
    [path] = tmp_path.iterdir()
    raw = path.read_bytes()
    middle = raw.index(b"NUMPY") + 128  # in the first array, after its header
    flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    path.write_bytes({"cut": raw[:100], "flipped": flipped, "empty": b"", "other": b"text"}[damage])
    assert build_index(source, ByteTokenizer(), str(tmp_path)).lengths.tolist() == [5, 4]
    assert source.reads == 4 and "cannot be used" in caplog.text
    build_index(source, ByteTokenizer(), str(tmp_path))
    assert source.reads == 4


def test_unwritable_cache_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    index = build_index(Texts(["abc"]), ByteTokenizer(), str(tmp_path / "file"))
    assert index.lengths.tolist() == [5] and "cannot be written" in caplog.text


def test_document_changed_after_indexing_raises_error() -> None:
    source = Texts(["abc", "de"])
    encoded = EncodedDocuments(source, ByteTokenizer(), build_index(source, ByteTokenizer(), None))
    source.texts[1] = "dex"
    assert len(encoded[0].ids) == 5
    with pytest.raises(StorageError, match="document 1 of texts has different content"):
        encoded[1]


def test_document_cache_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token ID takes two bytes; the limit holds three of the four documents."""
    monkeypatch.setattr(documents, "_CACHED_BYTES", 3 * 2 * 10)
    source = Texts(["a" * 8] * 4)
    index = build_index(source, ByteTokenizer(), None)
    encoded = EncodedDocuments(source, ByteTokenizer(), index)
    source.reads = 0
    for number in (0, 1, 2, 0, 1, 2, 0, 3, 0):
        encoded[number]
    assert source.reads == 4
    encoded[1]
    assert source.reads == 5 and encoded._cached_bytes == 60
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        EncodedDocuments(source, ByteTokenizer(), DocumentIndex(np.array([100]), np.ones(256)))
    assert "(100 tokens)" in caplog.text
