"""Token files written by Megatron: every token dtype, and invalid files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.loader import build_loaders
from maxpipe.data.prepared import megatron
from maxpipe.data.prepared.megatron import MegatronDocuments
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.diagnosis import doctor
from maxpipe.errors import ConfigError, StorageError
from tests.errors import raises

TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write(
    path: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    code: int = 8,
    **changes: Any,
) -> Path:
    """Write a pair of files as Megatron's builder does; each document is a list of sequences.

    Changes replace `lengths`, `pointers`, `bounds`, `count`, `num_bounds`, `magic`, `version`,
    `code`, `more` bytes at the end, or `ids`.
    """
    sequences = [sequence for document in documents for sequence in document]
    dtype = np.dtype(TYPES.get(code, np.uint16)).newbyteorder("<")
    lengths = [len(sequence) for sequence in sequences]
    tables: dict[str, Any] = {
        "lengths": lengths,
        "pointers": (np.cumsum([0, *lengths])[:-1] * dtype.itemsize).tolist(),
        "bounds": np.cumsum([0, *map(len, documents)]).tolist(),
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": code,
        "more": b"",
    }
    tables = {**tables, "count": len(lengths), "num_bounds": len(tables["bounds"]), **changes}
    header = struct.pack("<QB", tables["version"], tables["code"])
    header += struct.pack("<QQ", tables["count"], tables["num_bounds"])
    raw = tables["magic"] + header + np.array(tables["lengths"], "<i4").tobytes()
    raw += np.array(tables["pointers"], "<i8").tobytes()
    raw += np.array(tables["bounds"], "<i8").tobytes() + tables["more"]
    path.with_suffix(".idx").write_bytes(raw)
    ids = np.array([i for sequence in sequences for i in sequence], dtype).tobytes()
    path.with_suffix(".bin").write_bytes(changes.get("ids", ids))
    return path


DOCUMENTS = [[[1, 2, 3], [4]], [[]], [[5, 6]], [[], [7], [8, 9]], [[10]]]
FLAT = [[1, 2, 3, 4], [], [5, 6], [7, 8, 9], [10]]


@pytest.mark.parametrize("code", sorted(TYPES))
def test_every_token_dtype(code: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a", DOCUMENTS, code)
    found = MegatronDocuments(str(path), ByteTokenizer())
    assert [found[i].ids.tolist() for i in range(5)] == [[256, *each, 257] for each in FLAT]
    assert found.lengths.tolist() == [len(each) + 2 for each in FLAT]
    assert found.num_tokens == sum(map(len, FLAT)) + 10 and found.remark == "BOS and EOS added"


@pytest.mark.parametrize("kind", ["end", "both"])
def test_existing_bos_and_eos_are_not_added(kind: str, tmp_path: Path) -> None:
    front = [256] if kind == "both" else []
    documents = [[[*front, *each, 257]] for each in FLAT]
    found = MegatronDocuments(str(write(tmp_path / "a", documents)), ByteTokenizer())
    assert [found[i].ids.tolist() for i in range(5)] == [[256, *each, 257] for each in FLAT]
    assert found.remark == ("BOS and EOS as stored" if front else "BOS added")
    assert found.num_tokens == int(found.lengths.sum()) == sum(map(len, FLAT)) + 10


def test_multiple_megatron_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "b", DOCUMENTS[2:])
    write(tmp_path / "a", DOCUMENTS[:2], 4)
    for path in (tmp_path, tmp_path / "*", tmp_path / "*.idx", tmp_path / "[ab].bin"):
        found = MegatronDocuments(str(path), ByteTokenizer())
        assert [found[i].ids[1:-1].tolist() for i in range(5)] == FLAT
        assert found.lengths_between(1, 4).tolist() == found.lengths[1:4].tolist()
    assert MegatronDocuments(str(tmp_path / "a.idx"), ByteTokenizer()).num_documents == 2
    assert found.where(3).endswith("b.bin: document 1")
    monkeypatch.setattr(megatron, "_ENTRIES", 2)  # tables are scanned in parts
    monkeypatch.setattr(megatron, "SPAN_DOCUMENTS", 2)
    parts = MegatronDocuments(str(tmp_path), ByteTokenizer())
    assert parts.num_tokens == found.num_tokens
    assert parts.span_tokens.tolist() == [8, 4 + 5, 3]


def test_index_without_document_bounds(tmp_path: Path) -> None:
    """If the only bound is 0, each sequence is a document."""
    path = write(tmp_path / "a", [[[1, 2], [3]]], bounds=[0], num_bounds=1)
    found = MegatronDocuments(str(path), ByteTokenizer())
    assert [found[i].ids[1:-1].tolist() for i in range(found.num_documents)] == [[1, 2], [3]]


def test_sequence_modes_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "a", DOCUMENTS, more=bytes(8))
    assert MegatronDocuments(str(path), ByteTokenizer()).num_documents == 5


WRONG = {
    "magic": ({"magic": b"MMIDIDY\x00\x00"}, "begin with an MMIDIDX"),
    "old": ({"magic": b"TNTIDX\x00\x00\x00"}, "TNTIDX, the predecessor of MMIDIDX"),
    "version": ({"version": 2}, "version is 2"),
    "floats": ({"code": 7}, "floats, type 7"),
    "unknown type": ({"code": 77}, "type 77, which is unknown"),
    "many sequences": ({"count": 1 << 60}, "1152921504606846976 sequences"),
    "many bounds": ({"num_bounds": (1 << 64) - 1}, "18446744073709551615 bounds"),
    "no end": ({"more": bytes(3)}, "bounds require"),
    "negative length": ({"lengths": [3, 1, 0, 2, 0, -1, 2, 1]}, "sequence 5.*length of -1"),
    "large length": ({"lengths": [3, 1, 0, 2, 0, 1, 2, 2**31 - 1]}, "sequence 7.*ends at byte"),
    "pointer of 32 bits": (
        {"pointers": [0, 6, 8, 8, 12, 12 - 2**32, 14, 18]},
        "sequence 5.*begins at byte -4294967284, not at 12",
    ),
    "gap": ({"pointers": [0, 6, 8, 8, 12, 12, 16, 18]}, "sequence 6.*byte 16, not at 14"),
    "cut ids": ({"ids": bytes(19)}, "sequence 7.*ends at byte 20 of .*a.bin, which has 19"),
    "bounds back": ({"bounds": [0, 3, 2, 4, 7, 8]}, "document 1.*after the next document"),
    "bounds begin": ({"bounds": [1, 2, 3, 4, 7, 8]}, "document 0.*begins at sequence 1"),
    "bounds end": ({"bounds": [0, 2, 3, 4, 7, 9]}, "document 4.*ends at sequence 9"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_invalid_index_files_are_rejected(fault: str, tmp_path: Path) -> None:
    changes, words = WRONG[fault]
    path = write(tmp_path / "a", DOCUMENTS, **changes)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=f"(?s)a.idx.*{words}"):
        MegatronDocuments(str(path), ByteTokenizer())
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 5, 33, 34, 40, 100])
def test_truncated_index_is_rejected(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a", DOCUMENTS).with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"a\.idx"):
        MegatronDocuments(str(path), ByteTokenizer())


def test_random_index_damage_raises_error_or_reads(tmp_path: Path) -> None:
    """Most changed bytes of the index are detected."""
    path = write(tmp_path / "a", DOCUMENTS).with_suffix(".idx")
    whole = path.read_bytes()
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        raw = bytearray(whole)
        for at in draw.integers(len(raw), size=draw.integers(1, 4)):
            raw[at] = draw.integers(256)
        path.write_bytes(raw)
        try:
            found = MegatronDocuments(str(path), ByteTokenizer())
            for number in range(found.num_documents):
                found[number]
        except (ConfigError, StorageError):
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(("code", "bad"), [(4, -1), (8, 259)])
def test_ids_outside_vocabulary_are_rejected(code: int, bad: int, tmp_path: Path) -> None:
    documents = [[[1]]] * 70 + [[[2, bad]]]
    found = MegatronDocuments(str(write(tmp_path / "a", documents, code)), ByteTokenizer())
    found[69]
    with pytest.raises(ConfigError, match=rf"(?s)a\.bin: document 70.*from 0 to 258.*found {bad}"):
        found[70]


def test_ids_without_embedding_row_are_rejected(tmp_path: Path) -> None:
    """A device would silently read the last embedding row."""
    tokenizer = ByteTokenizer().with_control()
    tokenizer.embedding_rows = 258
    found = MegatronDocuments(str(write(tmp_path / "a", [[[1]]] * 70 + [[[2, 258]]])), tokenizer)
    assert found[0].ids.tolist() == [256, 1, 257]
    with pytest.raises(ConfigError) as caught:
        found[70]
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/a.bin: document 70 = id 258  [MP-TOK-002]",
        "  must be below model.vocab_size (258), the number of embedding rows: the tokenizer has "
        "259 ids.",
        "  Set model.vocab_size=259, or re-prepare the dataset without the text that produces this "
        "token.",
    ]


def test_missing_files_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, "data.path", names=[tmp_path / "a"], suggests="data.path"):
        MegatronDocuments(str(tmp_path / "a"), ByteTokenizer())
    write(tmp_path / "a", DOCUMENTS).with_suffix(".bin").unlink()
    with raises(ConfigError, "data.path", names=["a.bin", "a.idx"]):
        MegatronDocuments(str(tmp_path / "a"), ByteTokenizer())
    write(tmp_path / "a", [])
    with raises(ConfigError, "data.path", names=["1 index"]):
        MegatronDocuments(str(tmp_path / "a"), ByteTokenizer())


def test_megatron_batches_match_text_batches(tmp_path: Path) -> None:
    texts = [f"document {i} " * (1 + i % 5) for i in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    write(tmp_path / "a", [[list(text.encode())] for text in texts])

    def opened(source: Any, path: Path) -> Any:
        data = DataConfig(source=source, path=str(path), validation_fraction=0.2)
        return build_loaders(data, TokenizerConfig(), seed=2, batch_size=3, sequence_length=31)

    text, ids = opened("text", tmp_path / "*.txt"), opened("megatron", tmp_path / "a")
    for step in range(12):
        one, other = text.train.batch(step), ids.train.batch(step)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert ids.unigram_entropy is None
    config = load(["quickstart", "data.source=megatron", f"data.path={tmp_path / 'a'}"]).config
    checks = list(doctor.check_data(config))
    assert [check.status for check in checks] == ["ok", "ok"]
    assert "BOS and EOS added" in checks[1].text


def test_bounds_difference_beyond_64_bits_is_rejected(tmp_path: Path) -> None:
    far = (1 << 62) + 1
    path = write(tmp_path / "a", DOCUMENTS, bounds=[0, far, -far, 8], num_bounds=4)
    with pytest.raises(
        ConfigError,
        match=rf"document 1 .*\n  must be consistent: the document begins at sequence {far}",
    ):
        MegatronDocuments(str(path), ByteTokenizer())


def test_folder_name_with_glob_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a[1] b%20"
    folder.mkdir()
    write(folder / "x", DOCUMENTS)
    assert len(MegatronDocuments(str(folder), ByteTokenizer()).lengths) == 5


def test_split_without_tokens_is_rejected(tmp_path: Path) -> None:
    """BOS and EOS are stored, and all but one of the documents are empty."""
    path = write(tmp_path / "a", [[[256, 5, 257]], [[]], [[]]])
    data = DataConfig(source="megatron", path=str(path), validation_fraction=0.4)
    for seed in range(4):
        with raises(ConfigError, "data.path", names=["split validation"]):
            build_loaders(data, TokenizerConfig(), seed=seed, batch_size=2, sequence_length=8)
