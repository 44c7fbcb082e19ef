"""Data files that change before training, between save and resume, or while they are read."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.formats import digests as digests_module
from maxpipe.data.formats import files as files_module
from maxpipe.data.formats.digests import ContentHasher, Digests
from maxpipe.data.formats.files import File, find_files, stat_files
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.prepared import prepare as prepare_module
from maxpipe.data.prepared.prepare import PrepareJob, prepare
from maxpipe.data.sources import open_source
from maxpipe.errors import ConfigError, MaxpipeError, StorageError
from tests.data import test_megatron
from tests.data.formatted import FORMATS, formatted
from tests.data.test_prepared import silent

TEXTS = [f"document {number} says {number * 7919 % 1000:03} " * 12 for number in range(300)]


@pytest.fixture(autouse=True)
def cache_recent_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the digests of recently written files, too."""
    monkeypatch.setattr(files_module, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(digests_module, "SETTLED_SECONDS", 0.0)


def opened(data: DataConfig, tmp_path: Path) -> Datasets:
    return build_loaders(
        dataclasses.replace(data, validation_fraction=0.0),
        TokenizerConfig(),
        seed=0,
        batch_size=4,
        sequence_length=64,
        cache_dir=str(tmp_path / ".index"),
    )


def overwrite(path: Path, at: int, new: bytes) -> None:
    """Change bytes in place without changing the size or modification time of the file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(path: Path, at: int) -> None:
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1]))


def reads_all(found: Datasets) -> list[np.ndarray]:
    return [found.train.batch(step)["tokens"] for step in range(found.train.num_batches)]


# Digests.


def test_digest_depends_on_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers file sizes around the block size and content that arrives in chunks of any size."""
    monkeypatch.setattr(digests_module, "BLOCK_BYTES", 64)
    draw, path = random.Random(1), tmp_path / "a"
    seen: dict[str, bytes] = {}
    for size in (0, 1, 63, 64, 65, 128, 1000):
        raw = draw.randbytes(size)
        for change in (None, *sorted({0, size // 2, size - 1} & set(range(size)))):
            content = bytearray(raw)
            if change is not None:
                content[change] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            [file] = stat_files([str(path)], str(tmp_path))
            [sha256] = Digests(None, keep=False).compute([file])
            passed, at = ContentHasher(file), 0
            pieces = []
            while at < size:
                step = draw.randrange(1, 200)
                pieces.append(bytes(content[at : at + step]))
                at += step
            assert b"".join(passed.hash_pieces(pieces)) == content
            assert passed.sha256 == sha256
            assert seen.setdefault(sha256, bytes(content)) == content


def test_unchanged_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is hashed again only after it was written to or replaced."""
    data, index = formatted("text", TEXTS[:3], tmp_path / "data"), str(tmp_path / ".index")
    read: list[str] = []

    def block(file: File, start: int, stat: object, before: Callable = digests_module._block):
        read.append(file.name)
        return before(file, start, stat)

    monkeypatch.setattr(digests_module, "_block", block)

    def content() -> dict[str, str]:
        read.clear()
        found = find_files(data.path, ())
        return Digests(index, keep=True).content(found)

    first = content()
    assert read == [*first] == ["00000.txt", "00001.txt", "00002.txt"]
    assert content() == first and not read
    path = tmp_path / "data" / "00001.txt"
    path.touch()
    assert content() == first and read == ["00001.txt"]
    flip(path, 30)
    changed = content()
    assert read == ["00001.txt"]
    assert [name for name in first if first[name] != changed[name]] == ["00001.txt"]
    moved = shutil.copytree(tmp_path / "data", tmp_path / "moved")
    assert Digests(index, keep=True).content(find_files(str(moved), ())) == changed
    names = [tmp_path / "data" / f"0000{number}.txt" for number in (0, 2)]
    os.rename(names[0], tmp_path / "x")
    os.rename(names[1], names[0])
    os.rename(tmp_path / "x", names[1])
    swapped = content()
    assert swapped["00000.txt"] == first["00002.txt"] != swapped["00002.txt"]
    names[0].unlink()
    names[0].symlink_to(path)
    assert content()["00000.txt"] == changed["00001.txt"]
    for stored in Path(index).glob("digests-*.json"):
        stored.write_text(stored.read_text().replace("00001", "00003"))
    content()
    assert len(read) == 3  # the cached digests are damaged


def test_recently_written_file_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modification time may be the same after another change."""
    monkeypatch.setattr(files_module, "SETTLED_SECONDS", 60.0)
    data = formatted("text", TEXTS[:2], tmp_path / "data")
    Digests(str(tmp_path / ".index"), keep=True).compute(find_files(data.path, ()))
    later = Digests(str(tmp_path / ".index"), keep=True)
    found = find_files(data.path, ())
    later.load(found)
    assert [later.get(file) for file in found] == [None, None]


def test_digests_of_deleted_files_are_dropped(tmp_path: Path) -> None:
    """They are dropped when another file is added; digests of other sources' files are kept."""
    folder, store = tmp_path / "data", tmp_path / "store"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(name)
    Digests(str(store), keep=True).compute(find_files(str(folder / "*.txt"), ()))
    [path] = store.glob("digests-*.json")
    (folder / "b.txt").unlink()
    (folder / "d.txt").write_text("d")
    Digests(str(store), keep=True).compute(find_files(str(folder / "[ad].txt"), ()))
    assert sorted(json.loads(path.read_text())["files"]) == ["a.txt", "c.txt", "d.txt"]


def test_many_files_are_grouped_by_name(tmp_path: Path) -> None:
    for number in range(130):
        (tmp_path / f"{number:03}.txt").write_text(str(number))
    content = Digests(None, keep=False).content(find_files(str(tmp_path), ()))
    assert len(content) == 44 and next(iter(content)) == "000.txt to 002.txt"


# Between two starts.


@pytest.mark.parametrize("kind", FORMATS)
def test_any_changed_byte_changes_content_fingerprint(kind: str, tmp_path: Path) -> None:
    """Even if size and modification time are unchanged. A new run rebuilds the index."""
    data = formatted(kind, TEXTS, tmp_path / "data")
    before = opened(data, tmp_path).train.fingerprint()
    assert compare_fingerprints(before, opened(data, tmp_path).train.fingerprint()) == []
    paths = sorted(path for path in (tmp_path / "data").iterdir() if path.suffix != ".json")
    draw = random.Random(kind)
    for number in range(6):
        path = draw.choice(paths)
        raw = path.read_bytes()
        at = [0, len(raw) - 1, draw.randrange(len(raw))][min(number, 2)]
        flip(path, at)
        try:
            now = opened(data, tmp_path).train.fingerprint()
        except MaxpipeError as error:
            assert str(tmp_path) in str(error) or "data.text_field" in str(error)
        else:
            names = [name for name, *_ in compare_fingerprints(before, now)]
            # Text files are compared in groups if there are many.
            expected = "the content of " if kind == "text" else f"the content of {path.name}"
            assert any(name.startswith(expected) for name in names), at
        flip(path, at)
    assert compare_fingerprints(before, opened(data, tmp_path).train.fingerprint()) == []


def test_stale_index_is_rebuilt(tmp_path: Path) -> None:
    """The change is in the middle of a large file and keeps the number of tokens."""
    texts = ["x" * 70_000, *TEXTS, "y" * 70_000]
    data = formatted("jsonl", texts, tmp_path / "data")
    first = reads_all(opened(data, tmp_path))
    raw = Path(data.path).read_bytes()
    at = raw.index(b"document 150")
    overwrite(Path(data.path), at, b"DOCUMENT")
    second = reads_all(opened(data, tmp_path))
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    assert b"DOCUMENT 150" in b"".join(bytes(np.uint8(each[each < 256])) for each in second)


# While a run reads.


def longest(data: DataConfig, tmp_path: Path) -> tuple[Datasets, Path]:
    found = opened(data, tmp_path)
    folder = Path(data.path) if Path(data.path).is_dir() else Path(data.path).parent
    path = max(folder.iterdir(), key=lambda each: (each.stat().st_size, each.name))
    return found, path


@pytest.mark.fault("F24")
@pytest.mark.parametrize("kind", ["text", "jsonl", "huggingface", "parquet", "arrayrecord"])
@pytest.mark.parametrize("how", ["flip", "append", "cut", "replace"])
def test_file_change_during_run_raises_error(kind: str, how: str, tmp_path: Path) -> None:
    """No batch contains changed data, and a truncated file does not crash the process."""
    data = formatted(kind, TEXTS, tmp_path / "data")
    expected = reads_all(opened(data, tmp_path))
    found, path = longest(data, tmp_path)
    raw = path.read_bytes()
    if how == "flip":
        at = len(raw) // 2
        overwrite(path, at, bytes(each ^ 1 for each in raw[at : at + 64]))
    elif how == "append":
        path.write_bytes(raw + raw[-100:])
    elif how == "cut":
        os.truncate(path, len(raw) // 2)
    else:
        other = formatted(kind, [text.swapcase() for text in TEXTS], tmp_path / "other")
        os.replace(longest(other, tmp_path)[1], path)
    raised = False
    for step, batch in enumerate(expected):
        try:
            assert (found.train.batch(step)["tokens"] == batch).all()
        except MaxpipeError as error:
            raised = True
            assert error.exit_code in (2, 74) and str(tmp_path / "data") in str(error)
    # The ArrayRecord reader keeps its file open and does not read a replacement.
    assert raised or kind == "arrayrecord"


@pytest.mark.parametrize("rounds", [10, pytest.param(40, marks=pytest.mark.long)])
def test_random_file_changes_during_run(rounds: int, tmp_path: Path) -> None:
    """Each batch is unchanged or raises an error."""
    data = formatted("jsonl", TEXTS, tmp_path / "data")
    expected = reads_all(opened(data, tmp_path))
    draw, path = random.Random(3), Path(data.path)
    raw = path.read_bytes()
    for _ in range(rounds):
        found, at = opened(data, tmp_path), draw.randrange(len(raw))
        overwrite(path, at, bytes([raw[at] ^ 1 << draw.randrange(8)]))
        bad = 0
        for step, batch in enumerate(expected):
            try:
                assert (found.train.batch(step)["tokens"] == batch).all(), at
            except MaxpipeError:
                bad += 1
        # Each document is in few batches; whitespace between keys belongs to no document.
        assert 1 <= bad <= 6 or raw[at : at + 1] in b' {}":\n', at
        overwrite(path, at, raw[at : at + 1])


def test_prepared_block_is_verified_after_each_write(tmp_path: Path) -> None:
    """This includes blocks that were read before."""
    data = formatted("jsonl", TEXTS, tmp_path / "data")
    prepare(plan(data, tmp_path / "out"), silent)
    found = opened(DataConfig(source="tokens", path=str(tmp_path / "out")), tmp_path)
    expected = reads_all(found)
    path = min((tmp_path / "out").glob("shard-*.bin"))
    path.touch()
    assert all((a == b).all() for a, b in zip(reads_all(found), expected, strict=True))
    flip(path, path.stat().st_size // 2)
    with pytest.raises(StorageError, match=r"\.bin: is damaged .*\n  the checksum of bytes 0 to"):
        reads_all(found)
    flip(path, path.stat().st_size // 2)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StorageError, match="is damaged"):
        reads_all(found)


def test_truncated_line_offset_cache_raises_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxpipe.data.formats.lines._MIN_CACHED_BYTES", 1)
    data = formatted("jsonl", TEXTS, tmp_path / "data")
    found = opened(data, tmp_path)
    reads_all(found)
    [path] = (tmp_path / ".index").glob("lines-*/starts.npy")
    os.truncate(path, 200)
    source = open_source(data, 0)
    assert source[299] == TEXTS[299]
    with pytest.raises(StorageError, match="Delete this folder"):
        reads_all(opened(data, tmp_path))


# Prepared documents.


def plan(data: DataConfig, folder: Path) -> PrepareJob:
    return PrepareJob(
        data=data,
        tokenizer=TokenizerConfig(),
        seed=0,
        folder=folder,
        workers=1,
        shard_tokens=20_000,
    )


@pytest.mark.fault("F24")
@pytest.mark.parametrize("change", ["flip", "touch"])
def test_prepare_seals_only_shards_of_unchanged_files(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = formatted("jsonl", TEXTS, tmp_path / "data")
    entered: list[int] = []

    def enter(
        journal: object, line: dict, before: Callable = prepare_module.append_journal
    ) -> None:
        before(journal, line)
        entered.append(len(entered))
        if len(entered) == 2:  # after the first shard
            path = Path(data.path)
            path.touch() if change == "touch" else flip(
                path, path.read_bytes().index(b"document 1 ")
            )

    monkeypatch.setattr(prepare_module, "append_journal", enter)
    if change == "touch":
        assert "wrote" in prepare(plan(data, tmp_path / "out"), silent)
        return
    with pytest.raises(ConfigError, match=r"must not change while in use") as error:
        prepare(plan(data, tmp_path / "out"), silent)
    assert "--out" in str(error.value) and len(entered) == 2
    monkeypatch.undo()
    # Only the original file completes the folder.
    with pytest.raises(ConfigError, match=r"the content of a\.jsonl was"):
        prepare(plan(data, tmp_path / "out"), silent)
    flip(Path(data.path), Path(data.path).read_bytes().index(b"eocument 1 "))
    assert "wrote" in prepare(plan(data, tmp_path / "out"), silent)


def test_preparing_changed_data_again_changes_fingerprint(tmp_path: Path) -> None:
    """The number of documents and tokens and the first and last bytes of the file are unchanged."""
    texts = ["x" * 70_000, *TEXTS, "y" * 70_000]
    data = formatted("jsonl", texts, tmp_path / "data")
    tokens = DataConfig(source="tokens", path=str(tmp_path / "out"))
    prepare(plan(data, tmp_path / "out"), silent)
    before = opened(tokens, tmp_path).train.fingerprint()
    assert compare_fingerprints(opened(data, tmp_path).train.fingerprint(), before) == []
    overwrite(Path(data.path), Path(data.path).read_bytes().index(b"document 150"), b"DOCUMENT")
    shutil.rmtree(tmp_path / "out")
    prepare(plan(data, tmp_path / "out"), silent)
    [found] = compare_fingerprints(before, opened(tokens, tmp_path).train.fingerprint())
    assert found[0] == "the content of a.jsonl"


def test_fingerprints_without_digests_are_compatible(tmp_path: Path) -> None:
    now = opened(formatted("jsonl", TEXTS, tmp_path / "data"), tmp_path).train.fingerprint()
    before = {name: value for name, value in now.items() if name != "content"}
    assert compare_fingerprints(before, now) == compare_fingerprints(now, before) == []
    object_of_a_bucket = {**now, "content": {"a.jsonl": "crc32c:AAAA=="}}
    assert compare_fingerprints(object_of_a_bucket, now) == []
    other = {**now, "content": {"a.jsonl": "crc32c:BBBB=="}}
    assert [name for name, *_ in compare_fingerprints(object_of_a_bucket, other)] == [
        "the content of a.jsonl"
    ]


def megatron(tmp_path: Path) -> tuple[Path, DataConfig]:
    """Write files that are too large for a digest of only their first and last bytes."""
    (tmp_path / "ids").mkdir()
    documents = [[[number % 250, *[7] * 99]] for number in range(1200)]
    path = test_megatron.write(tmp_path / "ids" / "a", documents).with_suffix(".bin")
    return path, DataConfig(source="megatron", path=str(tmp_path / "ids"))


def test_megatron_file_change_before_resume_changes_fingerprint(tmp_path: Path) -> None:
    path, data = megatron(tmp_path)
    before = opened(data, tmp_path).train.fingerprint()
    assert not compare_fingerprints(before, opened(data, tmp_path).train.fingerprint())
    flip(path, path.stat().st_size // 2)
    found = compare_fingerprints(before, opened(data, tmp_path).train.fingerprint())
    assert any("a.bin" in str(each) for each in found)
    flip(path, path.stat().st_size // 2)
    assert not compare_fingerprints(before, opened(data, tmp_path).train.fingerprint())


def test_megatron_file_change_during_read_raises_error(tmp_path: Path) -> None:
    path, data = megatron(tmp_path)
    loader = opened(data, tmp_path).train
    first = loader.batch(0)
    path.touch()
    assert (loader.batch(0)["tokens"] == first["tokens"]).all()
    flip(path, path.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"a\.bin .*\n.*must not change while in use"):
        loader.batch(1)


def test_megatron_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = megatron(tmp_path)
    opened(data, tmp_path)
    monkeypatch.setattr(
        digests_module, "hash_files", lambda files, moved: [] if not files else 1 / 0
    )
    opened(data, tmp_path)
