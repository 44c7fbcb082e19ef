"""Compressed JSON lines: same documents as a plain loop; truncated files and bombs are rejected."""

from __future__ import annotations

import bz2
import contextlib
import errno
import fcntl
import gzip
import json
import lzma
import os
import random
import shutil
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.data.documents import build_index
from maxpipe.data.formats import lines, record_text
from maxpipe.data.formats.disk_cache import lock_file
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError, StorageError
from tests.errors import raises

zstandard = pytest.importorskip("zstandard")

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}
KINDS = sorted(PACKED)


def documents(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices('ab é語\n"\\\0', k=draw.randrange(200))) for _ in range(count)]


def json_lines(texts: list[str]) -> bytes:
    """Encode texts with blank lines and mixed line endings, and no newline at the end."""
    ends = ["\n", "\r\n", "\n\n", "\n \t\n"]
    found = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    return "".join(line + ends[i % 4] for i, line in enumerate(found)).strip().encode()


def source(path: Path, tmp_path: Path | None = None, **keys: object) -> Source:
    config = DataConfig(source="jsonl", path=str(path), **keys)  # type: ignore[arg-type]
    return open_source(config, 0, cache_dir=None if tmp_path is None else str(tmp_path / ".index"))


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        act()
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_documents_match_plain_json_lines(kind: str, tmp_path: Path) -> None:
    texts = documents(3000)
    content = json_lines(texts)
    half = content.index(b"\n", len(content) // 2) - 3  # members may split a line
    packed = PACKED[kind](content[:half]) + PACKED[kind](content[half:])
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(packed)
    plain = [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
    assert plain == texts
    found = source(file, tmp_path)
    order = list(range(len(found)))
    random.Random(1).shuffle(order)
    assert {i: found[i] for i in order} == dict(enumerate(plain))
    # Line numbers refer to the decompressed file.
    numbers = [i for i, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    assert [found.where(i) for i in (0, 1, 2, 2999)] == [
        f"{file}:{numbers[i]}" for i in (0, 1, 2, 2999)
    ]
    assert found.record(7) == {"text": texts[7]}


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1 << 20])
def test_line_offsets_do_not_depend_on_chunk_size(size: int, tmp_path: Path) -> None:
    content = '\ufeff\n\n{}\n \n{"a": 1}\r\n\n12'.encode()
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    file_of = lines.File("a", str(file), len(content))
    starts, skips = lines._scan_lines(lines._merge_small_pieces(pieces), file_of, None)
    assert starts.tolist() == [5, 10, 21, 23] and skips
    starts, _ = lines._scan_lines(
        [content[:5], *pieces[5:]] if size == 1 else pieces, file_of, None
    )
    assert size < 3 or starts.tolist() == [5, 10, 21, 23]


def test_decompressed_copy_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    first = source(file, tmp_path)
    [folder] = (tmp_path / ".index").glob("unpacked-*[!k]")
    real, num_pieces = lines.decompress, [0]

    def pieces(file: Any) -> Iterator[bytes]:
        for piece in real(file):
            num_pieces[0] += 1
            yield piece

    monkeypatch.setattr(lines, "decompress", pieces)
    assert [source(file, tmp_path)[i] for i in range(2)] == [first[0], first[1]] == ["a", "b"]
    assert num_pieces[0] == 2, "each of the two sources must decompress only the first chunk"
    monkeypatch.undo()
    # Different content under the same name gets another copy.
    file.write_bytes(gzip.compress(json_lines(["c"])))
    assert source(file, tmp_path)[0] == "c" and first[1] == "b"
    # A damaged copy is not used.
    (folder / "lines.jsonl").write_bytes(b"x")
    with raises(ConfigError, "data.path", names=["lines.jsonl", "27 bytes", "1 bytes"]):
        first[1]


def test_damaged_decompressed_copy_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    source(file, tmp_path)
    [folder] = (tmp_path / ".index").glob("unpacked-*[!k]")
    (folder / "lines.jsonl").write_bytes(b"x")
    with raises(StorageError, folder, names=["line offsets", file], suggests="Delete this folder"):
        source(file, tmp_path)
    (folder / "starts.npy").write_bytes(b"no array")
    with raises(StorageError, folder, names=["line offsets", file], suggests="Delete this folder"):
        source(file, tmp_path)


def test_temporary_copy_is_deleted_with_source(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    found = source(file)
    place = found.records._lines[0].content.path  # type: ignore[attr-defined]
    assert found[1] == "b" and os.path.exists(place)
    del found
    assert not os.path.exists(place)
    config = DataConfig(source="jsonl", path=str(file))
    kept = open_source(config, 0, cache_dir=str(tmp_path / ".index"), keep=False)
    assert kept[0] == "a" and not (tmp_path / ".index").exists()


OPEN = """
import sys
from maxpipe.config.schema import DataConfig
from maxpipe.data.sources import open_source
source = open_source(DataConfig(source="jsonl", path=sys.argv[1]), 0, cache_dir=sys.argv[2])
print([source[i] for i in range(len(source))])
"""


def test_concurrent_processes_share_one_decompressed_copy(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.jsonl.gz", tmp_path / ".index"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    source(file, tmp_path)
    [name] = [path.name for path in folder.glob("unpacked-*[!k]")]
    shutil.rmtree(folder)
    (folder / f"{name}.partial-x").mkdir(parents=True)  # left by a killed process
    command = [sys.executable, "-c", OPEN, str(file), str(folder)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0] for each in started] == ["['a', 'b']\n"] * 2
    found = sorted(path.name for path in folder.glob("unpacked-*"))
    assert found == [name, f"{name}.lock"]


def test_process_waits_for_decompression_lock(tmp_path: Path) -> None:
    folder, moves = str(tmp_path / "made.lock"), []

    def moved() -> None:
        moves.append(1)
        first.close()

    first = contextlib.ExitStack()
    first.enter_context(lock_file(folder, "unpacking a.jsonl.gz", None))
    with lock_file(folder, "unpacking a.jsonl.gz", moved):
        assert moves == [1]


@pytest.mark.fault("F21")
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_and_corrupt_archives_are_rejected(kind: str, tmp_path: Path) -> None:
    content = json_lines(documents(500))
    packed = PACKED[kind](content)
    file = tmp_path / f"a.jsonl.{kind}"
    for cut in (0, 1, len(packed) // 2, len(packed) - 1):
        file.write_bytes(packed[:cut])
        message = refusal(lambda: source(file, tmp_path))
        assert str(file) in message and f"must be a complete .{kind} file" in message, cut
    for garbage in (b"plain text", b"\x80\x04" * 100, packed + b"more"):
        file.write_bytes(garbage)
        assert f"must be a complete .{kind} file" in refusal(lambda: source(file, tmp_path))
    assert not list((tmp_path / ".index").glob("*partial*"))
    # Trailing zero padding is valid in gzip and xz.
    file.write_bytes(packed + bytes(8))
    assert len(source(file, tmp_path)) == 500


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_flipped_bit_never_changes_documents(kind: str, tmp_path: Path) -> None:
    texts = documents(60)
    packed = PACKED[kind](json_lines(texts))
    file = tmp_path / f"a.jsonl.{kind}"
    draw = random.Random(2)
    for _ in range(50):
        place = draw.randrange(len(packed))
        flipped = bytearray(packed)
        flipped[place] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        try:
            found = source(file, tmp_path)
        except ConfigError:
            continue
        assert [found[i] for i in range(len(found))] == texts, (
            place
        )  # a flipped bit in the name or timestamp


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.long) if each == "bz2" else each for each in KINDS],
)
def test_decompression_bomb_stops_at_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 1 << 24)
    file = tmp_path / f"bomb.jsonl.{kind}"
    packed = {
        "gz": lambda data: gzip.compress(data, 9),
        "bz2": lambda data: bz2.compress(data),
        "xz": lambda data: lzma.compress(data, preset=1),
        "zst": lambda data: zstandard.ZstdCompressor(level=9).compress(data),
    }[kind]
    block = packed(b" " * (1 << 26))
    file.write_bytes(packed(b'{"text": "a"}\n{"text": "') + 8 * block)  # 512 MiB in one line
    assert file.stat().st_size < 1 << 23
    tracemalloc.start()
    message = refusal(lambda: source(file, tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{file}:2  [MP-DATA-005]\n" in message and "16777216" in message
    assert peak < 1 << 27
    file.write_bytes(packed(b'{"text": "a"}\n') + 8 * packed(b"{}\n" * (1 << 22)))
    few = {"max_decompressed_bytes": 1 << 24}
    message = refusal(lambda: source(file, tmp_path, **few))
    assert str(file) in message and "16777216" in message
    assert "data.max_decompressed_bytes" in message
    assert not list((tmp_path / ".index").glob("unpacked-*[!k]"))


def test_decompression_limit_applies_to_all_files_together(tmp_path: Path) -> None:
    size = len(json_lines(["a", "b"]))
    for name in ("a", "b"):
        content = json_lines(["a", name])
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
    source(tmp_path, tmp_path, max_decompressed_bytes=2 * size)
    for _ in range(2):  # the second time with existing copies
        message = refusal(lambda: source(tmp_path, tmp_path, max_decompressed_bytes=2 * size - 1))
        assert "b.jsonl.gz" in message


def test_full_disk_error_names_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a"])))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(lines, "_save", full)
    actions = [str(file), "data.path"]
    with raises(StorageError, tmp_path / "x", names="No space left on device", suggests=actions):
        source(file, tmp_path)
    assert not list((tmp_path / ".index").glob("*partial*"))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_file_is_rejected_without_full_read(kind: str, tmp_path: Path) -> None:
    """A sparse file of 4 TiB is an error before its digest is computed."""
    path = tmp_path / f"a.jsonl.{kind}"
    path.touch()
    os.truncate(path, 1 << 42)
    assert f"must be a complete .{kind} file" in refusal(lambda: source(path, tmp_path))


def test_zip_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zip").write_bytes(b"PK")
    message = refusal(lambda: source(tmp_path, tmp_path))
    assert "a.jsonl.zip" in message and "compressed as .gz or .bz2 or .xz or .zst" in message


def test_line_offsets_of_large_file_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_MIN_CACHED_BYTES", 1)
    file = tmp_path / "a.jsonl"
    file.write_bytes(json_lines(["a", "b"]))
    assert source(file, tmp_path)[1] == "b"
    monkeypatch.setattr(lines, "_scan_lines", lambda *_: pytest.fail("read again"))
    assert source(file, tmp_path)[1] == "b"


def test_memory_does_not_grow_with_corpus_size(tmp_path: Path) -> None:
    """Line offsets are memory-mapped, and a line is read on access."""
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wb", 1) as stream:
        for _ in range(64):
            stream.write(b'{"text": "%s"}\n' % (b"a" * 1000) * 1000)
    tracemalloc.start()
    found = source(file, tmp_path)
    assert len(found) == 64_000 and len(found[63_999]) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_overlong_line_is_rejected_without_full_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse 4 TB file is created instantly, but would take hours to read."""
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 1 << 24)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"text": "a"}\n\n')
    os.truncate(file, 1 << 42)
    message = refusal(lambda: source(file, tmp_path))
    assert f"{file}:4  [MP-DATA-005]\n" in message and "16777216" in message
    # Whitespace is not a record.
    file.write_bytes(b'{"text": "a"}\n' + b" " * (1 << 25))
    assert len(source(file, tmp_path)) == 1


def test_record_above_size_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_text, "MAX_RECORD_BYTES", 1000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(json_lines(["a", "b" * 1000, "c"]))
    found = source(file)
    message = refusal(lambda: found[1])
    assert f"{file}:2 = 1014 bytes  [MP-DATA-005]\n" in message and "1000" in message
    assert found[2] == "c"


def test_decompressed_copy_and_index_respect_umask(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    before = os.umask(0o027)
    try:
        build_index(source(file, tmp_path), ByteTokenizer(), str(tmp_path / ".index"))
    finally:
        os.umask(before)
    [folder] = (tmp_path / ".index").glob("unpacked-*[!k]")
    [index] = (tmp_path / ".index").glob("index-*.npz")
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir(), index)]
    assert modes == [0o750, 0o640, 0o640, 0o640]


def test_unreadable_copy_is_replaced_by_temporary_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))
    source(file, tmp_path)
    [folder] = (tmp_path / ".index").glob("unpacked-*[!k]")
    (folder / "lines.jsonl").write_bytes(b"of another user")
    access = os.access  # root may read everything
    denied = str(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != denied and access(path, mode))
    documents = source(file, tmp_path)
    assert [documents[i] for i in range(2)] == ["a", "b"]
    assert f"{folder} cannot be read: all files will be read on the next start" in caplog.text


@pytest.mark.parametrize("is_made", [False, True])
def test_decompression_works_without_file_locks(
    is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(["a", "b"])))

    source(file, tmp_path)
    [folder] = (tmp_path / ".index").glob("unpacked-*[!k]")
    aside = folder.rename(tmp_path / "aside")

    def no_lock(*_: object) -> None:
        if is_made and aside.exists():  # created by another process in the meantime
            aside.rename(folder)
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    documents = source(file, tmp_path)
    assert [documents[i] for i in range(2)] == ["a", "b"] and folder.is_dir()
    assert aside.exists() != is_made
    assert not list((tmp_path / ".index").glob("*partial*"))
