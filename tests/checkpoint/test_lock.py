"""A run folder has one writer, and a dead one does not keep it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxpipe.checkpoint import lock as module
from maxpipe.checkpoint.lock import FILE, STALE_SECONDS, RunLock
from maxpipe.errors import StorageError


def rewrite(path: Path, **values: object) -> None:
    """Change what a lock says, keeping its heartbeat."""
    stat = path.stat()
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    os.utime(path, (stat.st_atime, stat.st_mtime))


def silence(path: Path, seconds: float) -> None:
    """As if the heart had last beaten so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def leave_behind(run_dir: Path, age: float = 0.0, **values: object) -> Path:
    """The lock of a run that could not remove it, silent for `age` seconds."""
    run_dir.mkdir(exist_ok=True)
    module._write(run_dir / FILE, "dead")
    rewrite(run_dir / FILE, **values)
    silence(run_dir / FILE, age)
    return run_dir / FILE


@pytest.mark.fault("F15")
def test_second_run_is_refused_with_names(tmp_path: Path):
    with RunLock(tmp_path) as held:
        content = held.path.read_text()
        assert json.loads(content)["pid"] == os.getpid() and not held.note
        with (
            pytest.raises(StorageError, match="is in use by another run") as refused,
            RunLock(tmp_path),
        ):
            pass
        where, rule, action = str(refused.value).splitlines()
        assert str(tmp_path) in where and f"process {os.getpid()}" in rule
        assert json.loads(content)["host"] in rule and "last sign of life 0 s ago" in rule
        assert action.startswith("  Stop that run")
        assert held.path.read_text() == content
    assert list(tmp_path.iterdir()) == []


def test_released_whatever_happens(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as again:
        assert not again.note


@pytest.mark.fault("F15")
def test_dead_process_of_this_host_loses_it_at_once(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    leave_behind(tmp_path, pid=process.pid)
    with RunLock(tmp_path) as held:
        assert f"process {process.pid}" in held.note and "is dead" in held.note
        assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes have no start time")
def test_number_that_another_process_got_is_not_the_holder(tmp_path: Path):
    leave_behind(tmp_path, process_start="1")
    with RunLock(tmp_path) as held:
        assert "another one has its number" in held.note


ELSEWHERE = [{"host": "other"}, {"namespace": "pid:[1]"}]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_other_hosts_lose_it_after_silence(elsewhere: dict[str, str], tmp_path: Path):
    leave_behind(tmp_path, age=STALE_SECONDS + 20, **elsewhere)
    with RunLock(tmp_path) as held:
        assert "no sign of life for 1" in held.note


def test_start_waits_for_a_host_that_was_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    leave_behind(tmp_path, host="other")
    begin = time.monotonic()
    with RunLock(tmp_path, beat_seconds=0.02, stale_seconds=0.3) as held:
        assert held.note and time.monotonic() - begin > 0.2
    assert len(caplog.messages) == 1 and "waiting for another one, or 0 s" in caplog.text


def test_start_is_refused_when_another_host_gives_a_sign(tmp_path: Path):
    path = leave_behind(tmp_path, age=20, host="other")
    threading.Timer(0.2, os.utime, [path]).start()
    with (
        pytest.raises(StorageError, match="on host other.*0 s ago"),
        RunLock(tmp_path, beat_seconds=0.02),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_heart_beats_while_it_is_held(tmp_path: Path):
    with RunLock(tmp_path, beat_seconds=0.02) as held:
        os.utime(held.path, (0, 0))
        for _ in range(200):
            if held.path.stat().st_mtime > 0:
                break
            time.sleep(0.02)
        assert time.time() - held.path.stat().st_mtime < 10
        held.check()


def test_run_that_lost_its_lock_is_told_and_leaves_it_alone(tmp_path: Path):
    with RunLock(tmp_path) as slept:
        rewrite(slept.path, host="other")
        os.utime(slept.path, (0, 0))
        with RunLock(tmp_path) as other:
            with pytest.raises(StorageError, match="was taken over by another run"):
                slept.check()
            slept.__exit__()
            other.check()
            assert other.path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "token": "../../a"}'])
def test_unreadable_lock_is_void_after_silence_only(content: str, tmp_path: Path):
    (tmp_path / FILE).write_text(content)
    threading.Timer(0.1, os.utime, [tmp_path / FILE]).start()
    with pytest.raises(StorageError, match="is in use"), RunLock(tmp_path, beat_seconds=0.02):
        pass
    os.utime(tmp_path / FILE, (0, 0))
    with RunLock(tmp_path) as held:
        assert held.note
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path: Path):
    for _ in range(10):
        leave_behind(tmp_path, age=1000, host="other")
        start, held, refused = threading.Barrier(8), [], []

        def grab(start: threading.Barrier, held: list, refused: list) -> None:
            mine = RunLock(tmp_path)
            start.wait()
            try:
                held.append(mine.__enter__())
            except StorageError as error:
                refused.append(error)

        threads = [threading.Thread(target=grab, args=(start, held, refused)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1 and len(refused) == 7
        held[0].__exit__()
        assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"), RunLock(tmp_path / "run"):
        pass
