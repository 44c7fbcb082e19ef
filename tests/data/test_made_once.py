"""One of the processes that share a folder builds an index, and any of them may be killed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.data.documents import build_index
from maxpipe.data.formats import disk_cache
from maxpipe.data.formats import source as source_module
from maxpipe.data.formats.disk_cache import lock_file
from maxpipe.data.formats.source import ReadTimes, longest_active_read, take_read_times, track_read
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.io.files import open_regular
from tests.data.texts import Texts
from tests.waiting import wait_until

TEXTS = [f"document {number} é" * (number % 5) for number in range(40)]
INDEX = """
import sys, time
from pathlib import Path
from maxpipe.data import documents
from maxpipe.data.tokenizer import ByteTokenizer
from tests.data.texts import Texts
from tests.data.test_made_once import TEXTS

documents._PASS_CHARACTERS = 1  # reports progress after each document
folder, log, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])

class Slow(Texts):
    def __getitem__(self, index):
        with log.open("a") as file:
            file.write(f"{index}\\n")
        time.sleep(seconds)
        return super().__getitem__(index)

moves = []
print("ready", flush=True)
input()
index = documents.build_index(Slow(TEXTS), ByteTokenizer(), folder, lambda: moves.append(1))
print(index.lengths.sum(), index.digests.sum(), len(moves), flush=True)
"""


@contextmanager
def processes(
    folders: Sequence[Path], tmp_path: Path, seconds: float
) -> Iterator[tuple[list[subprocess.Popen[str]], list[Path]]]:
    """Start processes that index documents; each logs the documents it reads to its own file."""
    logs = [tmp_path / f"{number}.log" for number in range(len(folders))]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", INDEX, str(folder), str(log), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder, log in zip(folders, logs, strict=True)
    ]
    try:
        for each in started:
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        for each in started:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        yield started, logs
    finally:
        for each in started:
            each.kill()
            each.communicate()


def answer(process: subprocess.Popen[str]) -> tuple[int, int, int]:
    """Return number of tokens, sum of digests, and number of progress reports."""
    out, _ = process.communicate(timeout=60)
    tokens, digests, moves = map(int, out.split())
    return tokens, digests, moves


def expected() -> tuple[int, int]:
    index = build_index(Texts(TEXTS), ByteTokenizer(), None)
    return int(index.lengths.sum()), int(index.digests.sum())


def read_by(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_only_one_of_several_processes_builds_index(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ".index"
    with processes([folder] * 3, tmp_path, 0.02) as (started, logs):
        found = [answer(each) for each in started]
    assert {each[:2] for each in found} == {expected()}
    assert sorted(map(read_by, logs)) == [0, 0, len(TEXTS)]
    # Waiting processes report progress, too.
    assert all(moves > 0 for *_, moves in found)
    assert [path.suffix for path in folder.iterdir()] == [".npz"]


def test_processes_with_separate_folders_each_build_index(tmp_path: Path) -> None:
    with processes([tmp_path / "a", tmp_path / "b"], tmp_path, 0.0) as (started, logs):
        found = [answer(each) for each in started]
    assert {each[:2] for each in found} == {expected()}
    assert list(map(read_by, logs)) == [len(TEXTS)] * 2


@pytest.mark.fault("F23")
def test_index_is_rebuilt_if_building_process_is_killed(tmp_path: Path) -> None:
    """Another process rebuilds the index and removes partially written files."""
    folder = tmp_path / ".index"
    folder.mkdir()
    with processes([folder] * 3, tmp_path, 0.05) as (started, logs):
        wait_until(lambda: max(map(read_by, logs)) > 4)
        first = max(range(3), key=lambda number: read_by(logs[number]))
        assert sorted(map(read_by, logs))[:2] == [0, 0]
        [lock] = folder.glob("*.lock")
        half = lock.with_name(f"{lock.name.removesuffix('.lock')}.abc.tmp")
        half.write_bytes(b"half")
        started[first].send_signal(signal.SIGKILL)
        found = [answer(each) for number, each in enumerate(started) if number != first]
    assert {each[:2] for each in found} == {expected()}
    others = [read_by(log) for number, log in enumerate(logs) if number != first]
    assert sorted(others) == [0, len(TEXTS)]
    assert [path.suffix for path in folder.iterdir()] == [".npz"]


def test_lock_waiter_reports_stalled_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiter names the process that holds the lock."""
    monkeypatch.setattr(disk_cache, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(disk_cache, "_HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(disk_cache, "_LOG_SECONDS", 0.3)
    path, moves, got = str(tmp_path / "x.lock"), [], []

    def wait() -> None:
        with lock_file(path, "indexing", lambda: moves.append(1)):
            got.append(1)

    with caplog.at_level(logging.INFO, "maxpipe"):
        with lock_file(path, "indexing documents of jsonl", None) as moved:
            waiting = threading.Thread(target=wait)
            waiting.start()
            for count in range(4):
                wait_until(lambda count=count: len(moves) > count)  # type: ignore[misc]
                assert len(moves) == count + 1
                time.sleep(
                    0.01
                )  # a heartbeat is a modification time with a resolution of milliseconds
                moved()
            wait_until(lambda: len(moves) > 4)
            count = len(moves)
            time.sleep(0.8)
            assert len(moves) == count and not got
            read = longest_active_read()
            assert read is not None
            name = rf"waiting for process {os.getpid()} on \S+, indexing documents of jsonl"
            assert re.fullmatch(name, str(read))
        waiting.join()
    assert got and "which has made no progress for" in caplog.text
    assert longest_active_read() is None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_index_is_built_without_file_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    source = Texts(TEXTS)
    for _ in range(2):
        index = build_index(source, ByteTokenizer(), str(tmp_path))
        assert (int(index.lengths.sum()), int(index.digests.sum())) == expected()
    assert source.reads == len(TEXTS)


def test_removed_lock_files_are_exclusive(tmp_path: Path) -> None:
    path, inside, most = str(tmp_path / "x.lock"), 0, []

    def work() -> None:
        nonlocal inside
        for _ in range(30):
            with lock_file(path, "x", None, removes=True):
                inside += 1
                most.append(inside)
                time.sleep(0.0005)
                inside -= 1

    before = disk_cache._POLL_SECONDS
    disk_cache._POLL_SECONDS = 0.001
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        disk_cache._POLL_SECONDS = before
    assert most == [1] * 120 and not list(tmp_path.iterdir())


def test_lock_file_content_is_sanitized(tmp_path: Path) -> None:
    """Other users of a folder may have written the lock file."""
    path = tmp_path / "x.lock"
    with path.open("w+b", buffering=0) as file:
        for raw in (b"", b"\xff\x1b[31m", b"host", b"a b c d e", b"x " * 5000):
            path.write_bytes(raw)
            words = disk_cache._holder(file)  # type: ignore[arg-type]
            assert words.startswith("process ") and words.isprintable() and len(words) < 500


def test_active_reads_are_tracked() -> None:
    begun = threading.Event()
    ended = threading.Event()

    def read() -> None:
        with (
            track_read("data.mixture.web"),
            track_read(lambda: "a.jsonl: record 7"),
        ):
            begun.set()
            ended.wait()

    take_read_times()
    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    found = longest_active_read()
    assert str(found) == "reading data.mixture.web, a.jsonl: record 7"
    ended.set()
    thread.join()
    assert longest_active_read() is None
    spent = take_read_times()
    assert spent.sources.keys() == {"data.mixture.web"}
    assert 0 < spent.seconds <= spent.sources["data.mixture.web"]
    assert str(spent.slowest) == str(found)
    assert take_read_times() == ReadTimes({}, None, 0.0)


def test_read_location_may_hang_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_LOCATE_SECONDS", 0.05)
    hang = threading.Event()

    def fail() -> str:
        raise OSError

    try:
        for what in (fail, lambda: str(hang.wait())):
            with track_read("data"), track_read(what):
                assert str(longest_active_read()) == "reading data"
    finally:
        hang.set()


def test_finished_threads_leave_no_active_reads() -> None:
    def read() -> None:
        with track_read("data"):
            pass

    before = len(source_module._ACTIVE_READS)
    for _ in range(20):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert len(source_module._ACTIVE_READS) == before
    assert np.isfinite(take_read_times().seconds)


def test_lock_of_another_user_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "x.lock")

    def of_another_user(name: str, flags: int = os.O_RDONLY) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return open_regular(name, flags)

    monkeypatch.setattr(disk_cache, "open_regular", of_another_user)
    with pytest.raises(PermissionError), disk_cache.lock_file(path, "work", None):
        pass
    (tmp_path / "x.lock").touch()
    with disk_cache.lock_file(path, "work", None) as moved, open(path) as stream:
        moved()
        with pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
