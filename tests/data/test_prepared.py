"""Prepared documents: correct IDs after any interruption, and every damage is detected."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.loader import build_loaders, build_single_pass
from maxpipe.data.prepared import range_reader
from maxpipe.data.prepared.manifest import BIN, IDX, JOURNAL, MANIFEST_FILE, read_manifest
from maxpipe.data.prepared.prepare import PrepareJob, prepare, verify
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.prepared.writer import ChecksummedWriter
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer, open_tokenizer
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.io.typed_json import dump_checksummed
from tests.bucket import served, variables
from tests.errors import raises

SHARD_TOKENS = 4000
NUM_DOCUMENTS = 331


def silent(*_: object) -> None:
    """Discard progress reports."""


def text_of(number: int) -> str:
    """Return a document of varying length with non-ASCII characters; one in 19 is empty."""
    return "" if number % 19 == 7 else f"document {number} naïve 語 " * (1 + number * number % 13)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the documents as JSON lines."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    texts = (json.dumps({"text": text_of(number)}) for number in range(NUM_DOCUMENTS))
    path.write_text("\n".join(texts) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def tokens(lines: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the documents with two workers."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare(plan(lines, folder, workers=2), silent)
    return folder


def plan(path: str, folder: Path, workers: int = 1, **changes: Any) -> PrepareJob:
    """Return a job that prepares JSON lines with the byte tokenizer."""
    section = DataConfig(source="jsonl", path=path)
    found = PrepareJob(
        data=section,
        tokenizer=TokenizerConfig(),
        seed=0,
        folder=folder,
        workers=workers,
        shard_tokens=SHARD_TOKENS,
    )
    return dataclasses.replace(found, **changes)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_prepared_ids_match_plain_loop(lines: str, tokens: Path) -> None:
    found = PreparedDocuments(str(tokens), ByteTokenizer())
    expected = [[256, *text_of(number).encode(), 257] for number in range(NUM_DOCUMENTS)]
    assert [found[number].ids.tolist() for number in range(NUM_DOCUMENTS)] == expected
    assert found.lengths.tolist() == [len(ids) for ids in expected]
    assert found.lengths_between(100, 230).tolist() == found.lengths[100:230].tolist()
    assert found.num_tokens == sum(map(len, expected)) == int(found.span_tokens.sum())
    shards = found.manifest["shards"]
    assert len(shards) > 3 and all(s["tokens"] >= SHARD_TOKENS for s in shards[:-1])
    assert not (tokens / JOURNAL).exists()
    with pytest.raises(IndexError):
        found[NUM_DOCUMENTS]


def test_prepared_metadata_matches_texts(tokens: Path) -> None:
    found = PreparedDocuments(str(tokens), ByteTokenizer())
    raws = [text_of(number).encode() for number in range(NUM_DOCUMENTS)]
    meta = found.meta(0, NUM_DOCUMENTS)
    assert meta["text_bytes"].tolist() == [len(raw) for raw in raws]
    assert meta["digest"].tolist() == [
        int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") for raw in raws
    ]
    assert found.manifest["text_bytes"] == sum(map(len, raws))
    counts = np.bincount(np.frombuffer(b"".join(raws), np.uint8), minlength=256)
    assert found.manifest["byte_counts"] == counts.tolist()
    assert found.where(3).endswith(f"shard-00000{BIN}: document 3 of jsonl")


def test_files_have_megatron_format(tokens: Path) -> None:
    """Read the index with plain numpy, as Megatron does."""
    raw = (tokens / f"shard-00001{IDX}").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00" and raw[9:17] == (1).to_bytes(8, "little")
    assert raw[17] == 8  # uint16
    count, bounds = np.frombuffer(raw[18:34], "<u8").tolist()
    lengths = np.frombuffer(raw, "<i4", count, 34)
    pointers = np.frombuffer(raw, "<i8", count, 34 + 4 * count)
    assert bounds == count + 1 and len(raw) == 34 + 12 * count + 8 * bounds
    assert np.frombuffer(raw, "<i8", bounds, 34 + 12 * count).tolist() == list(range(bounds))
    ids = np.fromfile(tokens / f"shard-00001{BIN}", "<u2")
    found = PreparedDocuments(str(tokens), ByteTokenizer())
    first = found.manifest["shards"][0]["documents"]
    for number in range(count):
        at = int(pointers[number]) // 2
        expected = found[first + number].ids.tolist()
        assert ids[at : at + int(lengths[number])].tolist() == expected


@pytest.mark.parametrize("seed", [0, 3])
def test_prepared_batches_match_text_batches(seed: int, lines: str, tokens: Path) -> None:
    def opened(source: Any, path: str) -> Any:
        data = DataConfig(source=source, path=path, validation_fraction=0.2)
        return build_loaders(data, TokenizerConfig(), seed=seed, batch_size=4, sequence_length=33)

    text, ids = opened("jsonl", lines), opened("tokens", str(tokens))
    assert text.train.fingerprint() == ids.train.fingerprint()
    assert text.unigram_entropy == ids.unigram_entropy
    for one, other in ((text.train, ids.train), (text.validation, ids.validation)):
        for step in (0, 1, 10, one.num_batches - 1):
            pair = one.batch(step), other.batch(step)
            assert all(np.array_equal(pair[0][name], pair[1][name]) for name in pair[0])
            assert one.batch_contents(step) == other.batch_contents(step)
    far = 10_000_000
    assert np.array_equal(text.train.batch(far)["tokens"], ids.train.batch(far)["tokens"])


@pytest.mark.parametrize("workers", [1, 3])
def test_files_do_not_depend_on_worker_count(
    workers: int, lines: str, tokens: Path, tmp_path: Path
) -> None:
    prepare(plan(lines, tmp_path / "again", workers), silent)
    assert digests(tmp_path / "again") == digests(tokens)


@pytest.mark.long
def test_resume_after_kill_gives_identical_files(lines: str, tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={lines}", "--out", str(folder), "--shard-tokens", str(SHARD_TOKENS)]
    slowed = tmp_path / "slow"
    slowed.mkdir()
    # Reading each document is slowed down so that the process is killed midway.
    (slowed / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "def slow():\n"
        "    import time\n"
        "    from maxpipe.data.formats.lines import JsonLines\n"
        "    read = JsonLines.read\n"
        "    def later(self, *args):\n"
        "        time.sleep(0.004)\n"
        "        return read(self, *args)\n"
        "    JsonLines.read = later\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv): slow()\n"
    )
    path = f"{slowed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    killed = 0
    for _ in range(20):
        running = subprocess.Popen(
            [*command, "--workers", "2"], env=os.environ | {"PYTHONPATH": path}
        )
        workers: set[int] = set()
        before = len(journal(folder))
        while running.poll() is None and len(journal(folder)) < before + 2:
            workers |= children(running.pid)
            time.sleep(0.01)
        running.kill()
        if running.wait() == 0:
            break
        killed += 1
        assert not (folder / MANIFEST_FILE).exists()
        wait_until_exited(workers)
    assert killed >= 2
    assert digests(folder) == digests(tokens)


def journal(folder: Path) -> list[str]:
    """Return the journal's lines."""
    path = folder / JOURNAL
    return path.read_text().splitlines() if path.exists() else []


def children(pid: int) -> set[int]:
    """Return the IDs of a process's children."""
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return set()


def wait_until_exited(processes: set[int]) -> None:
    """Wait until processes whose parent was killed have exited."""
    end = time.monotonic() + 30
    while any(is_alive(each) for each in processes):
        assert time.monotonic() < end, "a worker is still running after its parent was killed"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_stopped_prepare_prints_resume_hint(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "abc " * 2000}) + "\n")
    with path.open("a") as file:
        file.writelines(json.dumps({"text": f"{i} " * 2000}) + "\n" for i in range(2_000))
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={path}", "--out", str(tmp_path / "out"), "--workers", "1"]
    command += ["--shard-tokens", "100000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    while len(journal(tmp_path / "out")) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    _, words = running.communicate(timeout=60)
    code = ExitCode.PREEMPTED if number == signal.SIGTERM else ExitCode.INTERRUPTED
    assert running.returncode == code
    assert "Run the same command again" in words and "Traceback" not in words


def test_prepare_resumes_from_truncated_journal(lines: str, tokens: Path, tmp_path: Path) -> None:
    """A shard whose journal line is truncated is written again."""
    folder = tmp_path / "cut"
    prepare(plan(lines, folder), silent)
    manifest = read_manifest(str(folder))
    (folder / MANIFEST_FILE).unlink()
    spec = {key: manifest[key] for key in ("format", "source", "tokenizer", "shard_tokens")}
    (folder / JOURNAL).write_text(dump_checksummed(spec, indent=None) + '\n{"shard": {"docu')
    prepare(plan(lines, folder, workers=2), silent)
    assert digests(folder) == digests(tokens)
    (folder / MANIFEST_FILE).unlink()
    (folder / JOURNAL).write_text(
        dump_checksummed({**spec, "shard_tokens": 17}, indent=None) + "\n"
    )
    with pytest.raises(ConfigError, match="shard_tokens: 17 and 4000"):
        prepare(plan(lines, folder), silent)
    assert len(journal(folder)) == 1


def test_complete_folder_is_not_prepared_again(
    lines: str, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(tokens)
    assert "is complete: 331 documents" in prepare(plan(lines, tokens), silent)
    assert digests(tokens) == before
    inputs = ["data.source=jsonl", f"data.path={lines}", "--shard-tokens", str(SHARD_TOKENS)]
    assert main(["data", "prepare", *inputs, "--out", str(tokens)]) == 0
    assert "is complete" in capsys.readouterr().out


def test_unrelated_output_folders_are_rejected(lines: str, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    facts = ["must be new, empty or written by this command", "notes.txt"]
    with raises(ConfigError, "--out", tmp_path, names=facts, suggests=f"--out {tmp_path}-2"):
        prepare(plan(lines, tmp_path), silent)
    file = tmp_path / "notes.txt"
    with raises(ConfigError, "--out", file, names="folder", suggests=f"--out {file}-2"):
        prepare(plan(lines, file), silent)
    with pytest.raises(ConfigError, match="shard_tokens: 4000 and 5000"):
        prepare(plan(lines, tokens, shard_tokens=5000), silent)


def test_prepare_rejects_invalid_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "tw\n')
    inputs = ["data.source=jsonl", f"data.path={path}", "--workers", "1"]
    assert main(["data", "prepare", *inputs, "--out", str(tmp_path / "out")]) == 2
    assert f"{path}:2" in capsys.readouterr().err
    path.write_text('{"text": ""}\n')
    assert main(["data", "prepare", *inputs, "--out", str(tmp_path / "empty")]) == 2
    assert "must contain text" in capsys.readouterr().err
    assert main(["data", "prepare", *inputs, "--out", "gs://bucket/tokens"]) == 2
    tokens = ["data.source=tokens", "data.path=x", "--out", str(tmp_path / "other")]
    assert main(["data", "prepare", *tokens]) == 2
    assert "must be a text source" in capsys.readouterr().err


def test_different_tokenizer_is_rejected(tokens: Path, tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        def fingerprint(self) -> str:
            return "other-1"

    with raises(
        ConfigError,
        "data.path",
        names=["tokenizer.kind=bytes", 259],
        suggests="tokenizer.kind=bytes",
    ):
        PreparedDocuments(str(tokens), Other())


def test_ids_without_embedding_row_are_rejected(tokens: Path) -> None:
    """For example, a control token beyond the model's vocabulary."""
    tokenizer = ByteTokenizer().with_control()
    tokenizer.embedding_rows = 257
    found = PreparedDocuments(str(tokens), tokenizer)
    with pytest.raises(ConfigError, match=r"document 0 = id 257 .*\n.*model.vocab_size \(257\)"):
        found[0]


def test_unprepared_folders_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, "data.path", names=["manifest.json"], suggests="maxpipe data prepare"):
        PreparedDocuments(str(tmp_path), ByteTokenizer())
    (tmp_path / JOURNAL).touch()
    with raises(ConfigError, "data.path", suggests="`maxpipe data prepare`"):
        PreparedDocuments(str(tmp_path), ByteTokenizer())
    (tmp_path / MANIFEST_FILE).write_text("{}")
    with raises(StorageError, "manifest.json", suggests="`maxpipe data verify`"):
        PreparedDocuments(str(tmp_path), ByteTokenizer())


def all_ids(folder: Path) -> list[list[int]]:
    """Return all tokens and targets as training would read them."""
    data = DataConfig(source="tokens", path=str(folder))
    loader, _ = build_single_pass(
        data, TokenizerConfig(), "all", seed=0, batch_size=8, sequence_length=64
    )
    batches = [loader.batch(step) for step in range(loader.num_batches)]
    loader.close()
    found = [np.concatenate([batch[name] for batch in batches]) for name in ("tokens", "targets")]
    return np.concatenate(found).tolist()


@pytest.mark.fault("F22")
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_every_flipped_bit_is_detected(count: int, tokens: Path, tmp_path: Path) -> None:
    """Bits of every file are flipped: none is trained on, and `verify` detects all of them."""
    expected = all_ids(tokens)
    paths = sorted(tokens.iterdir())
    draw = np.random.default_rng(5)
    folder = tmp_path / "flipped"
    folder.mkdir()
    for path in paths:
        (folder / path.name).write_bytes(path.read_bytes())
    for number in range(count):
        path = folder / paths[number % len(paths)].name
        whole = path.read_bytes()
        raw = bytearray(whole)
        raw[int(draw.integers(len(raw)))] ^= 1 << int(draw.integers(8))
        path.write_bytes(raw)
        try:
            assert verify(str(folder), silent).damage, path
        except (StorageError, ConfigError):
            assert path.name == MANIFEST_FILE
        try:
            # Training does not read .meta files.
            assert all_ids(folder) == expected and path.suffix == ".meta", path
        except (StorageError, ConfigError) as error:
            assert "damaged" in str(error) or "format" in str(error)
        path.write_bytes(whole)
    assert not verify(str(folder), silent).damage and all_ids(folder) == expected


def test_truncated_or_missing_file_raises_error(tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in tokens.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / f"shard-00001{BIN}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    documents = PreparedDocuments(str(folder), ByteTokenizer())
    first = documents.manifest["shards"][0]["documents"]
    with raises(StorageError, "shard-00001.bin", names=[8433, 8434]):
        documents[first]
    path.unlink()
    with raises(StorageError, "shard-00001.bin", suggests="data.path"):
        documents[first]
    assert len(verify(str(folder), silent).damage) == 1
    path.write_bytes(whole)
    documents[first]
    path.write_bytes(whole[:10])  # while it is read
    with raises(StorageError, "shard-00001.bin", names=["10 bytes"]):
        documents[first + 5]


def test_verify_names_damaged_file(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "verify", str(tokens)]) == 0
    assert "all checksums match" in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path)]) == 2
    capsys.readouterr()
    folder = tmp_path / "flipped"
    folder.mkdir()
    for path in tokens.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    raw = bytearray((folder / f"shard-00002{BIN}").read_bytes())
    raw[17] ^= 4
    (folder / f"shard-00002{BIN}").write_bytes(raw)
    assert main(["data", "verify", str(folder)]) == ExitCode.STORAGE
    out, err = capsys.readouterr()
    assert f"shard-00002{BIN}: the checksum does not match" in err and "1 of" in out


@pytest.mark.long
def test_bucket_reads_match_local_reads(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as bucket:
        for name, value in variables(bucket).items():
            monkeypatch.setenv(name, value)
        for path in tokens.iterdir():
            bucket.put(f"tokens/{path.name}", path.read_bytes())
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from tests.data.test_prepared import all_ids, silent\n"
            "from maxpipe.data.prepared.prepare import verify\n"
            "from maxpipe.errors import StorageError\n"
            "local = all_ids(Path(sys.argv[1]))\n"
            "assert all_ids('gs://bucket/tokens') == local\n"
            "assert not verify('gs://bucket/tokens', silent).damage\n"
            "print('same')\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, str(tokens)], capture_output=True, text=True, timeout=120
        )
        assert result.stdout == "same\n", result.stderr
        raw = bytearray(bucket.objects[f"tokens/shard-00000{BIN}"])
        raw[100] ^= 1
        bucket.put(f"tokens/shard-00000{BIN}", bytes(raw))
        code = "from tests.data.test_prepared import all_ids; all_ids('gs://bucket/tokens')"
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
        assert "is damaged" in result.stderr


def test_encode_batch_matches_encode() -> None:
    texts = [text_of(number) for number in range(30)]
    tokenizer = open_tokenizer(TokenizerConfig())
    expected = [tokenizer.encode(text).tolist() for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


def test_crcs_do_not_depend_on_write_sizes(tmp_path: Path) -> None:
    raw = np.random.default_rng(3).bytes(3 * range_reader.BLOCK_BYTES + 1234)
    found = []
    for size in (1 << 10, 70_001, len(raw)):
        file = ChecksummedWriter(tmp_path / "a")
        for start in range(0, len(raw), size):
            file.write(raw[start : start + size])
        entry = file.close()
        found.append((entry, file.crcs.tolist()))
    assert found[0] == found[1] == found[2] and len(found[0][1]) == 4
    assert (tmp_path / "a").read_bytes() == raw


def test_prepare_text_files(tmp_path: Path) -> None:
    """Prepare text files, one document per file."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(text_of(number))
    data = DataConfig(source="text", path=str(tmp_path / "*.txt"))
    prepare(plan("", tmp_path / "out", data=data), silent)
    source = open_source(data, 0)
    found = PreparedDocuments(str(tmp_path / "out"), ByteTokenizer())
    assert found.num_documents == len(source)
    for number in range(len(source)):
        text = bytes(found[number].ids[1:-1].astype(np.uint8).tolist())
        assert text.decode() == source[number]


def changed(tokens: Path, folder: Path, keys: tuple[Any, ...], value: Any) -> None:
    """Copy a prepared folder and change its manifest, with a valid digest."""
    shutil.copytree(tokens, folder, dirs_exist_ok=True)
    manifest = json.loads((tokens / MANIFEST_FILE).read_text())
    del manifest["sha256"]
    inner = manifest
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / MANIFEST_FILE).write_text(dump_checksummed(manifest))


NUMBERS = [
    ("documents",),
    ("tokens",),
    ("text_bytes",),
    ("shards", 0, "documents"),
    ("shards", 1, "tokens"),
    ("shards", 0, "files", BIN, "bytes"),
    ("shards", 0, "files", ".crc", "bytes"),
    ("shards", 1, "files", ".meta", "bytes"),
    ("spans", "bytes"),
    ("byte_counts", 7),
]


@pytest.mark.parametrize("value", [-1, 0, 17, 2**62, 2**63, 1.5, None, "x"])
@pytest.mark.parametrize("keys", NUMBERS, ids=str)
def test_manifest_with_invalid_number_is_rejected(
    keys: tuple[Any, ...], value: object, tokens: Path, tmp_path: Path
) -> None:
    changed(tokens, tmp_path, keys, value)
    if keys[0] == "byte_counts" and value == 0:
        return
    with raises(StorageError, tmp_path, suggests="`maxpipe data verify`"):
        all_ids(tmp_path)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("dtype",), "<i4"),
        (("dtype",), "O"),
        (("shards",), []),
        (("shards", 0, "files"), {}),
        (("shards", 0, "files", "/../x"), {"bytes": 1, "sha256": ""}),
        (("shards", 0, "unreadable"), 1 << 40),
        (("byte_counts",), [1]),
    ],
    ids=str,
)
def test_inconsistent_manifests_are_rejected(
    keys: tuple[Any, ...], value: object, tokens: Path, tmp_path: Path
) -> None:
    changed(tokens, tmp_path, keys, value)
    with raises(StorageError, "manifest.json", suggests="`maxpipe data verify`"):
        PreparedDocuments(str(tmp_path), ByteTokenizer())


def test_reordered_shards_are_rejected(tokens: Path, tmp_path: Path) -> None:
    shards = json.loads((tokens / MANIFEST_FILE).read_text())["shards"]
    changed(tokens, tmp_path, ("shards",), [*shards[:2], *shards[1:]])
    with raises(StorageError, "manifest.json", suggests="`maxpipe data verify`"):
        PreparedDocuments(str(tmp_path), ByteTokenizer())
    changed(tokens, tmp_path, ("shards",), shards[::-1])
    with raises(StorageError, "shard-00000.crc", suggests="`maxpipe data verify`"):
        all_ids(tmp_path)


@pytest.mark.parametrize("pointer", [-2, 3, 1 << 20, 1 << 62, -(1 << 63)])
def test_index_with_wrong_pointer_is_rejected(pointer: int, tokens: Path, tmp_path: Path) -> None:
    """The CRCs and digests of the folder match the wrong index."""
    shutil.copytree(tokens, tmp_path, dirs_exist_ok=True)
    manifest = json.loads((tokens / MANIFEST_FILE).read_text())
    del manifest["sha256"]
    shard = manifest["shards"][0]
    index = bytearray((tokens / f"shard-00000{IDX}").read_bytes())
    at = 34 + 4 * shard["documents"] + 8 * 5
    index[at : at + 8] = pointer.to_bytes(8, "little", signed=True)
    contents = {IDX: bytes(index)}
    crcs = []
    for suffix in (BIN, IDX, ".meta"):
        raw = contents.get(suffix, (tokens / f"shard-00000{suffix}").read_bytes())
        parts = range(0, len(raw), range_reader.BLOCK_BYTES)
        crcs += [zlib.crc32(raw[start : start + range_reader.BLOCK_BYTES]) for start in parts]
    contents[".crc"] = np.array(crcs, "<u4").tobytes()
    for suffix, raw in contents.items():
        (tmp_path / f"shard-00000{suffix}").write_bytes(raw)
        entry = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        shard["files"][suffix] = entry
    (tmp_path / MANIFEST_FILE).write_text(dump_checksummed(manifest))
    documents = PreparedDocuments(str(tmp_path), ByteTokenizer())
    documents[3]
    with raises(StorageError, "shard-00000.idx", names=["document 5"]):
        documents[5]


def test_slow_bucket_failures_are_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The storage library has already retried for some time."""
    now = [0.0]
    monkeypatch.setattr(range_reader.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(range_reader.time, "sleep", lambda seconds: None)
    calls = []

    def answer(seconds: float) -> None:
        calls.append(seconds)
        now[0] += seconds
        raise OSError("no answer")

    for seconds, count in ((0.1, 3), (50.0, 1)):
        calls.clear()
        with raises(StorageError, "gs://bucket/a", suggests="data.path"):
            range_reader._retry("gs://bucket/a", lambda seconds=seconds: answer(seconds))
        assert len(calls) == count


def test_verify_summarizes_a_million_missing_files(
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from maxpipe.data.prepared import prepare as module

    folder = Path(shutil.copytree(tokens, tmp_path / "many"))
    real, entry = module.list_files, {"bytes": 1, "sha256": "0" * 64}

    def many(manifest: Any) -> Any:
        yield from real(manifest)
        yield from ((f"shard-{number}.bin", entry) for number in range(10**6, 2 * 10**6))

    monkeypatch.setattr(module, "list_files", many)
    begin = time.process_time()
    assert main(["data", "verify", str(folder)]) == ExitCode.STORAGE
    assert time.process_time() - begin < 20
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if "missing" in line or "more" in line]
    assert lines[0] == f"{folder}/shard-1000000.bin: the file is missing"
    assert len(lines) == 11 and lines[10] == "and 999990 more damaged files"
    assert "1000000 of 10000" in found.out and "damaged" in found.out
