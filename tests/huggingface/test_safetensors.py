"""Untrusted safetensors files: read exactly, or rejected with a reason."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxpipe.errors import ConfigError
from maxpipe.huggingface.safetensors import JoinedReader, SafetensorsReader, SafetensorsWriter
from tests.huggingface import maker

TENSORS = {
    "a": np.arange(15, dtype=np.float32).reshape(5, 3),
    "b": np.arange(7).astype(ml_dtypes.bfloat16),
    "../../c": np.ones((2, 1, 2), np.float16),
    "none": np.ones((0, 4), np.float32),
}


def test_reader_reads_whole_tensors_and_row_ranges(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(maker.encoded(TENSORS))
    reader = SafetensorsReader(path)
    assert [*reader.entries] == [*TENSORS]
    maker.same_bits({name: reader.read(name) for name in TENSORS}, TENSORS)
    assert (reader.read("a", (2, 4)) == TENSORS["a"][2:4]).all()


def test_joined_reader_concatenates_rows(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).normal(size=(11, 3, 4)).astype(np.float32)
    parts = {"a": drawn[:5], "b": drawn[5:6], "c": drawn[6:]}
    path = tmp_path / "x.safetensors"
    path.write_bytes(maker.encoded(parts))
    reader = JoinedReader("all", [(name, SafetensorsReader(path)) for name in parts])
    assert reader.entries["all"].shape == drawn.shape
    np.testing.assert_array_equal(reader.read("all"), drawn)
    np.testing.assert_array_equal(reader.read("all", (4, 7)), drawn[4:7])
    rows = drawn.reshape(33, 4)
    np.testing.assert_array_equal(reader.read("all", (14, 19), (4,)), rows[14:19])
    np.testing.assert_array_equal(reader.read("all", (4, 7), None, (1, 3)), drawn[4:7, :, 1:3])
    lines = slice(0, None, 2)
    np.testing.assert_array_equal(reader.read("all", (0, 9), lines=lines), drawn[:9, lines])


@pytest.mark.parametrize(
    "other", [np.ones((2, 4), np.float32), np.ones((2, 3), np.float16), np.ones((), np.float32)]
)
def test_joined_reader_rejects_different_parts(other: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(maker.encoded({"a": np.ones((2, 3), np.float32), "b": other}))
    with pytest.raises(ValueError, match="the parts of 'all' have different dtypes or shapes"):
        JoinedReader("all", [(name, SafetensorsReader(path)) for name in "ab"])


def test_writer_accepts_rows_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(
        path, {n: (each.dtype, each.shape) for n, each in TENSORS.items()}
    ) as writer:
        for name, array in reversed(TENSORS.items()):
            for row in reversed(range(len(array))):
                writer.write(name, array[row : row + 1], row)
    maker.same_bits(maker.read(tmp_path), TENSORS)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0  # tensor data is aligned


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def made(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"a": entry()}
BAD = {
    "empty": (b"", "0 bytes"),
    "short": (b"\x01\0\0", "3 bytes"),
    "huge header": (struct.pack("<Q", 2**62) + b"{}", "the limit is 100 million"),
    "longer than the file": (struct.pack("<Q", 99) + b"{}", "size is 99 bytes"),
    "no JSON": (made(b"{nothing"), "Expecting"),
    "no text": (made(b"\xff\xfe{}"), "utf-8"),
    "a list": (made([1]), "must be an object"),
    "deep": (made(b'{"a":' * 5000), "brackets"),
    "twice": (made(b'{"a":1,"a":2}'), "'a' twice"),
    "twice inside": (made(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "'dtype' twice"),
    "no entry": (made({"a": 5}), "must have exactly"),
    "more in an entry": (made({"a": {**entry(), "code": "x"}}), "must have exactly"),
    "unknown type": (made({"a": entry("object")}, b"1234"), "unknown dtype"),
    "type of a list": (made({"a": entry(["F32"])}, b"1234"), "unknown dtype"),
    "negative shape": (made({"a": entry(shape=[-1])}, b"1234"), "lists of integers"),
    "true as a size": (made({"a": entry(shape=[True])}, b"1234"), "lists of integers"),
    "huge shape": (made({"a": entry(shape=[2**62, 2**62])}, b"1234"), "more than 2**63 bytes"),
    "many dims": (made({"a": entry(shape=[1] * 17)}, b"1234"), "has 17 dims, but at most 16"),
    "half a million dims": (made({"a": entry(shape=[2**62] * 400_000)}), "400,000 dims"),
    "three million dims": (made({"a": entry(shape=[1] * 3_000_000)}), "3,000,000 dims"),
    "not whole": (made({"a": entry(shape=[1.0])}, b"1234"), "lists of integers"),
    "NaN": (made(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'), "lists of integers"),
    "400 digits": (made({"a": entry(shape=[10**400])}), "integer of 401 digits"),
    "300 digits": (made({"a": entry(shape=[10**299])}), "lists of integers"),
    "6000 digits": (
        made(b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % (b"7" * 6000)),
        "an integer of 6,000 digits, 777777777777..., but at most 308 digits",
    ),
    "a name of a megabyte": (made({"n" * 1_000_000: entry(dtype="F31")}), "unknown dtype 'F31'"),
    "a type of a megabyte": (made({"a": entry(dtype="F" * 1_000_000)}), "unknown dtype 'FFF"),
    "huge number": (made({"a": entry(shape=[2**70])}, b"1234"), "lists of integers"),
    "three offsets": (made({"a": entry(offsets=[0, 4, 4])}, b"1234"), "lists of integers"),
    "backwards": (made({"a": entry(shape=[0], offsets=[4, 0])}, b"1234"), "needs"),
    "other bytes": (made({"a": entry(offsets=[0, 3])}, b"123"), "3 bytes, but F32"),
    "ends outside": (made({"a": entry()}, b"12"), "ends too early"),
    "longer": (made({"a": entry()}, b"123456"), "is too long"),
    "overlap": (made({**ONE, "b": entry(offsets=[2, 6])}, b"123456"), "overlaps"),
    "same place": (made({**ONE, "b": entry()}, b"1234"), "overlaps"),
    "hole": (made({**ONE, "b": entry(offsets=[6, 10])}, b"1234567890"), "follows a gap"),
    "metadata": (made({"__metadata__": 5}), "not a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_file_is_rejected_with_reason(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        SafetensorsReader(path)
    text = str(caught.value)
    assert text.startswith(f"{path}  [MP-HF-004]\n") and reason in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("odd", ["pipe", "folder", "missing"])
def test_non_regular_or_missing_file_is_rejected(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"x\.safetensors"):
        SafetensorsReader(path)


def test_file_truncated_after_opening_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(maker.encoded(TENSORS))
    reader = SafetensorsReader(path)
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(ConfigError, match="ends inside the tensor"):
        reader.read("../../c")
