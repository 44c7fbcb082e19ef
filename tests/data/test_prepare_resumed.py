"""`data prepare` after interruption, damage or data changes: the same files or an error."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.formats import lines as lines_module
from maxpipe.data.formats.source import RecordSource
from maxpipe.data.loader import build_loaders
from maxpipe.data.prepared import prepare as prepare_module
from maxpipe.data.prepared import writer
from maxpipe.data.prepared.manifest import JOURNAL, MANIFEST_FILE
from maxpipe.data.prepared.prepare import PrepareJob, prepare
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError, ExitCode
from tests.data.formatted import FORMATS, formatted
from tests.data.test_prepared import digests, silent

NUM_DOCUMENTS = 150
TEXTS = [f"document {number} naïve 語 " * (1 + number % 7) for number in range(NUM_DOCUMENTS)]


class Stopped(Exception):
    """Simulates a kill."""


def plan(path: str, folder: Path, **changes: Any) -> PrepareJob:
    found = PrepareJob(
        data=DataConfig(source="jsonl", path=path),
        tokenizer=TokenizerConfig(),
        seed=0,
        folder=folder,
        workers=1,
        shard_tokens=1000,
    )
    return dataclasses.replace(found, **changes)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lines") / "a.jsonl"
    write(found, TEXTS)
    return found


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def whole(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "tokens"
    prepare(plan(str(path), folder), silent)
    return folder


def stopped(path: Path, folder: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the first shards of the folder, then stop."""
    entered = 0

    def enter(journal: Any, line: Any, before: Any = prepare_module.append_journal) -> None:
        nonlocal entered
        before(journal, line)
        entered += 1
        if entered == shards + 1:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "append_journal", enter)
        with pytest.raises(Stopped):
            prepare(plan(str(path), folder), silent)


@pytest.mark.parametrize("kind", FORMATS)
def test_opened_source_is_pickled_to_workers(kind: str, tmp_path: Path) -> None:
    """A worker that opened the source itself would decompress and index all files again."""
    data = formatted(kind, TEXTS, tmp_path)
    source = open_source(data, 0)
    source[0]
    sent = writer.source_if_picklable(source)
    assert sent is not None
    there = pickle.loads(ForkingPickler.dumps(sent).tobytes())
    assert [there[number] for number in range(len(there))] == TEXTS
    assert there.where(7) == source.where(7) and there.fingerprint() == source.fingerprint()


@pytest.mark.parametrize("kind", FORMATS)
def test_prepared_batches_match_source_batches(kind: str, tmp_path: Path) -> None:
    data = formatted(kind, TEXTS, tmp_path / "files")
    prepare(plan("", tmp_path / "out", data=data), silent)
    ids = DataConfig(source="tokens", path=str(tmp_path / "out"))
    pair = [
        build_loaders(each, TokenizerConfig(), seed=3, batch_size=4, sequence_length=33).train
        for each in (data, ids)
    ]
    assert pair[0].fingerprint() == pair[1].fingerprint()
    for step in (0, 3, pair[0].num_batches - 1, 1_000_000):
        one, other = (each.batch(step) for each in pair)
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_cached_line_offsets_are_not_pickled(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_MIN_CACHED_BYTES", 1)
    data = DataConfig(source="jsonl", path=str(path))
    source = open_source(data, 0, cache_dir=str(tmp_path))
    raw = ForkingPickler.dumps(source).tobytes()
    assert len(raw) < 8 * NUM_DOCUMENTS
    assert pickle.loads(raw)[140] == TEXTS[140]


def test_compressed_files_are_decompressed_once(tmp_path: Path) -> None:
    """They are decompressed to the folder that training uses, and workers make no copies."""
    data = formatted("jsonl.gz", TEXTS, tmp_path / "files")
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={data.path}", f"run.dir={tmp_path}/runs", "--workers", "2"]
    command += ["--out", str(tmp_path / "out")]
    variables = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run(command, check=True, env=variables)
    assert len(list((tmp_path / "runs" / ".index").glob("unpacked-*[0-9a-f]"))) == 1
    assert not list((tmp_path / "temporary").glob("maxpipe-*"))


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.long)])
def test_prepare_recovers_from_damaged_journal(
    count: int, path: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a damaged journal line and of all later lines is repeated."""
    stopped(path, tmp_path / "part", 4, monkeypatch)
    raw = (tmp_path / "part" / JOURNAL).read_bytes()
    draw = np.random.default_rng(2)
    for number in range(count):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "part", folder)
        flipped = bytearray(raw)
        flipped[int(draw.integers(len(raw)))] ^= 1 << int(draw.integers(8))
        if number == 0:
            flipped = bytearray(raw[:-1])  # without the final newline
        (folder / JOURNAL).write_bytes(flipped)
        prepare(plan(str(path), folder), silent)
        assert digests(folder) == digests(whole), number


def test_resume_rejects_changed_documents(
    path: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if names, sizes and first and last bytes of the files are unchanged."""
    changed = tmp_path / "a.jsonl"
    texts = ["x" * 70_000, *TEXTS, "y" * 70_000]
    write(changed, texts)
    stopped(changed, tmp_path / "out", 6, monkeypatch)
    write(changed, [texts[0], *TEXTS[:5], TEXTS[5].swapcase(), *TEXTS[6:], texts[-1]])
    with pytest.raises(ConfigError, match=r"the content of a\.jsonl was [0-9a-f]{12} and is "):
        prepare(plan(str(changed), tmp_path / "out"), silent)
    write(changed, texts[1:])
    with pytest.raises(ConfigError, match=r"the content of a\.jsonl"):
        prepare(plan(str(changed), tmp_path / "out"), silent)


def test_resume_rejects_changed_documents_without_file_digests(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journals of earlier releases contain no file digests."""
    changed = tmp_path / "a.jsonl"
    texts = ["x" * 70_000, *TEXTS, "y" * 70_000]
    write(changed, texts)
    with monkeypatch.context() as patch:
        patch.setattr(RecordSource, "content", lambda *_: {})
        stopped(changed, tmp_path / "out", 6, patch)
    write(changed, [texts[0], *TEXTS[:5], TEXTS[5].swapcase(), *TEXTS[6:], texts[-1]])
    with pytest.raises(ConfigError, match=r"a\.jsonl:7.*\n.*must not change while"):
        prepare(plan(str(changed), tmp_path / "out"), silent)


def test_resume_depends_only_on_document_content(
    path: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume works with another path or seed, and a complete folder stays complete."""
    folder = tmp_path / "out"
    stopped(path, folder, 3, monkeypatch)
    monkeypatch.chdir(path.parent)
    prepare(plan("a.jsonl", folder, seed=3), silent)
    names = [name for name in digests(whole) if name != MANIFEST_FILE]
    assert {name: digests(folder)[name] for name in names} == {
        name: digests(whole)[name] for name in names
    }
    moved = shutil.copytree(path.parent, tmp_path / "moved")
    assert "is complete" in prepare(plan(str(moved / "a.jsonl"), folder), silent)


def test_prepare_accepts_folder_completed_by_other_process(
    path: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may complete the folder after it was inspected and before it is locked."""
    folder = tmp_path / "out"
    locked = prepare_module.lock_journal

    def late(of: Path) -> Any:
        shutil.copytree(whole, of, dirs_exist_ok=True)
        return locked(of)

    monkeypatch.setattr(prepare_module, "lock_journal", late)
    assert "is complete" in prepare(plan(str(path), folder), silent)
    assert digests(folder) == digests(whole)


def test_large_documents_are_encoded_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory use of a worker does not grow with the size of a batch of documents."""
    texts = ["a" * size for size in (5, 900, 30, 2000, 2000, 2000, *[10] * 200, 1500, 1)]
    write(tmp_path / "a.jsonl", texts)
    prepare(plan(str(tmp_path / "a.jsonl"), tmp_path / "expected"), silent)
    monkeypatch.setattr(writer, "_MAX_CHARACTERS", 1000)
    source = open_source(DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl")), 0)
    encoder = writer.build_shard_encoder(source, ByteTokenizer(), None)
    counts, first = [], 0
    while first < len(texts):
        found = encoder.encode_batch(first, min(first + 64, len(texts)))
        counts.append(len(found.lengths))
        held = found.lengths - 2
        assert held.sum() < 1000 + 2000 and held[:-1].sum() < 1000
        assert len(found.ids) == found.lengths.sum() and len(found.meta) == counts[-1]
        first += counts[-1]
    assert counts[:4] == [4, 1, 1, 64]
    # Encode in this process, where the patched limit applies.
    monkeypatch.setattr(prepare_module, "ProcessPoolExecutor", Here)
    prepare(plan(str(tmp_path / "a.jsonl"), tmp_path / "out", workers=2), silent)
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


class Here:
    """Process pool that runs each call in this process when its result is requested."""

    def __init__(self, workers: int, *, initargs: tuple[Any, ...], **_: Any):
        writer._Worker.encoder = writer.build_shard_encoder(initargs[3], ByteTokenizer(), None)

    def submit(self, call: Any, *args: Any) -> Any:
        class Done:
            @staticmethod
            def result() -> Any:
                return call(*args)

        return Done()

    def shutdown(self, **_: Any) -> None:
        """Do nothing: no process is running."""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, ExitCode.PREEMPTED, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, ExitCode.PREEMPTED, marks=pytest.mark.long),
        (signal.SIGINT, ExitCode.INTERRUPTED),
    ],
)
def test_signal_during_worker_start_exits_cleanly(
    number: signal.Signals, code: ExitCode, tmp_path: Path
) -> None:
    """A terminal signals all processes of its group: starting workers must not print tracebacks."""
    write(tmp_path / "a.jsonl", ["abc " * 200] * 30_000)
    (tmp_path / "slow").mkdir()
    # Workers start slowly and create a file when they do.
    (tmp_path / "slow" / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        f"    pathlib.Path({str(tmp_path / 'starting')!r}).touch()\n"
        "    time.sleep(1)\n"
    )
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    paths = f"{tmp_path / 'slow'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    running = subprocess.Popen(
        [*command, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    signal.signal(signal.SIGINT, before)
    while not (tmp_path / "starting").exists():
        assert running.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(running.pid, number)
    _, words = running.communicate(timeout=60)
    assert running.returncode == code, words
    assert "Run the same command again" in words and "Traceback" not in words


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_during_imports_exits_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    """The exit code requests a restart."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(
        "import importlib.abc, pathlib, sys, time\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'maxpipe.data.prepared.prepare':\n"
        f"            pathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    write(tmp_path / "a.jsonl", TEXTS)
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")]
    paths = f"{tmp_path / 'slow'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    while not (tmp_path / "importing").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    _, words = running.communicate(timeout=30)
    assert running.returncode == ExitCode.PREEMPTED
    assert "Run the same command again" in words and "Traceback" not in words


def test_prepare_ignores_sighup_under_nohup(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS * 40)
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")]
    command += ["--workers", "1", "--shard-tokens", "1000"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGHUP, before)
    while not (tmp_path / "out" / JOURNAL).exists():
        assert running.poll() is None
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGHUP)
    _, words = running.communicate(timeout=60)
    assert running.returncode == 0, words
