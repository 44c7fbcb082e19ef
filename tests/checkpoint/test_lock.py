"""The lock of a run folder allows one writer, and the lock of a dead run is taken over."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.checkpoint import lock as module
from maxpipe.checkpoint.lock import FILE, STALE_SECONDS, RunLock
from maxpipe.errors import StorageError
from tests.errors import raises
from tests.waiting import wait_until


def rewrite(path: Path, **values: object) -> None:
    """Change the content of a lock without changing the time of its last heartbeat."""
    stat = path.stat()
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    os.utime(path, (stat.st_atime, stat.st_mtime))


def silence(path: Path, seconds: float) -> None:
    """Set the time of the last heartbeat to `seconds` ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def leave_behind(run_dir: Path, age: float = 0.0, **values: object) -> Path:
    """Write the lock of a run that ended without removing it, `age` seconds after a heartbeat."""
    run_dir.mkdir(exist_ok=True)
    module._write(run_dir / FILE, "dead")
    rewrite(run_dir / FILE, **values)
    silence(run_dir / FILE, age)
    return run_dir / FILE


@pytest.mark.fault("F15")
def test_second_run_is_rejected_and_names_the_holder(tmp_path: Path):
    with RunLock(tmp_path) as held:
        content = held.path.read_text()
        assert json.loads(content)["pid"] == os.getpid() and not held.note
        with (
            raises(StorageError, tmp_path, suggests="run.name") as caught,
            RunLock(tmp_path),
        ):
            pass
        where, rule, action = str(caught.value).splitlines()
        assert str(tmp_path) in where and f"process {os.getpid()}" in rule
        assert json.loads(content)["host"] in rule and "last heartbeat 0 s ago" in rule
        assert action.startswith("  Stop that run")
        assert held.path.read_text() == content
    assert list(tmp_path.iterdir()) == []


def test_lock_is_released_on_exception(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as again:
        assert not again.note


@pytest.mark.fault("F15")
def test_lock_of_dead_local_process_is_taken_over_at_once(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    leave_behind(tmp_path, pid=process.pid)
    with RunLock(tmp_path) as held:
        assert f"process {process.pid}" in held.note and "is dead" in held.note
        assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes have no start time")
def test_lock_with_reused_pid_is_taken_over(tmp_path: Path):
    leave_behind(tmp_path, process_start="1")
    with RunLock(tmp_path) as held:
        assert "another process reused its PID" in held.note


ELSEWHERE = [{"host": "other"}, {"namespace": "pid:[1]"}]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_lock_of_silent_remote_host_is_taken_over(elsewhere: dict[str, str], tmp_path: Path):
    leave_behind(tmp_path, age=STALE_SECONDS + 20, **elsewhere)
    with RunLock(tmp_path) as held:
        assert "no heartbeat for 1" in held.note


def test_start_waits_for_heartbeat_of_remote_host(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    leave_behind(tmp_path, host="other")
    begin = time.monotonic()
    with RunLock(tmp_path, beat_seconds=0.02, stale_seconds=0.3) as held:
        assert held.note and time.monotonic() - begin > 0.2
    assert len(caplog.messages) == 1 and "waiting for the next heartbeat" in caplog.text


def test_start_is_rejected_after_remote_heartbeat(tmp_path: Path):
    path = leave_behind(tmp_path, age=20, host="other")
    threading.Timer(0.2, os.utime, [path]).start()
    with (
        raises(StorageError, tmp_path, names=["host other", "0 s ago"], suggests="run.name"),
        RunLock(tmp_path, beat_seconds=0.02),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_heartbeat_runs_while_lock_is_held(tmp_path: Path):
    with RunLock(tmp_path, beat_seconds=0.02) as held:
        os.utime(held.path, (0, 0))
        wait_until(lambda: held.path.stat().st_mtime > 0)
        assert time.time() - held.path.stat().st_mtime < 10
        held.check()


def test_lost_lock_is_reported_and_left_untouched(tmp_path: Path):
    with RunLock(tmp_path) as slept:
        rewrite(slept.path, host="other")
        os.utime(slept.path, (0, 0))
        with RunLock(tmp_path) as other:
            with raises(StorageError, "lock.json", names=["150 s"]):
                slept.check()
            slept.__exit__()
            other.check()
            assert other.path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "token": "../../a"}'])
def test_malformed_lock_expires_only_after_silence(content: str, tmp_path: Path):
    (tmp_path / FILE).write_text(content)
    threading.Timer(0.1, os.utime, [tmp_path / FILE]).start()
    with raises(StorageError, tmp_path, suggests="run.name"), RunLock(tmp_path, beat_seconds=0.02):
        pass
    os.utime(tmp_path / FILE, (0, 0))
    with RunLock(tmp_path) as held:
        assert held.note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("L3")
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_future_dated_lock_does_not_extend_wait(elsewhere: dict[str, str], tmp_path: Path):
    path = leave_behind(tmp_path, age=-7 * 24 * 3600.0, **elsewhere)
    begin = time.monotonic()
    with RunLock(tmp_path, beat_seconds=0.02, stale_seconds=0.3) as held:
        assert "no heartbeat for 0 s" in held.note and 0.2 < time.monotonic() - begin < 30
        assert path.stat().st_mtime < time.time() + 3600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("L3")
def test_live_holder_with_fast_clock_keeps_lock(tmp_path: Path):
    path = leave_behind(tmp_path, age=-1e6, host="other")
    threading.Timer(0.2, silence, [path, -1e6 - 30]).start()
    with (
        raises(StorageError, tmp_path, suggests="run.name"),
        RunLock(tmp_path, beat_seconds=0.02, stale_seconds=5.0),
    ):
        pass


@pytest.mark.fault("L3")
def test_clock_jump_during_wait_does_not_expire_live_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file system's clock jumps ahead by an hour; then the holder's heartbeat arrives."""
    path = leave_behind(tmp_path, host="other")
    threading.Timer(0.3, os.utime, [path]).start()
    real = module._heartbeat_stamp
    begin = time.monotonic()

    def ahead(file: Path) -> tuple[float, int]:
        at, size = real(file)
        return (at + 3600 * (file.name != FILE and time.monotonic() - begin > 0.1)), size

    monkeypatch.setattr(module, "_heartbeat_stamp", ahead)
    with (
        raises(StorageError, tmp_path, suggests="run.name"),
        RunLock(tmp_path, beat_seconds=0.02, stale_seconds=30.0),
    ):
        pass


@pytest.mark.fault("L3")
def test_suspended_start_rechecks_heartbeat_before_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The start is suspended for longer than the limit; meanwhile, the holder renews the lock."""
    path, slept = leave_behind(tmp_path, host="other"), 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 10 * STALE_SECONDS
        os.utime(path)

    real = time.monotonic
    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + slept)
    with raises(StorageError, tmp_path, suggests="run.name"), RunLock(tmp_path):
        pass
    assert slept > 0


@pytest.mark.fault("L3")
@pytest.mark.parametrize("refuses", [True, False])
def test_heartbeat_works_if_mtime_cannot_be_set(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If the file system rejects or ignores utime, each heartbeat appends a byte to the lock."""

    def set_time(path: Path, *times: object) -> None:
        if refuses:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "utime", set_time)
    real = module._heartbeat_stamp
    monkeypatch.setattr(module, "_heartbeat_stamp", lambda path: (1000.0, real(path)[1]))
    with RunLock(tmp_path, beat_seconds=0.02) as held:
        size = held.path.stat().st_size
        wait_until(lambda: held.path.stat().st_size > size + 2)
        assert held.check_held() and json.loads(held.path.read_text())["pid"] == os.getpid()
        monkeypatch.setattr(module, "_is_on_this_host", lambda holder: False)
        with (
            raises(StorageError, tmp_path, suggests="run.name"),
            RunLock(tmp_path, beat_seconds=0.02, stale_seconds=20.0),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("L3")
def test_future_dated_claim_does_not_delay_start(tmp_path: Path):
    leave_behind(tmp_path, age=1000, host="other")
    claim = tmp_path / f"{FILE}.claim-dead"
    claim.write_text("")
    silence(claim, -5000)
    with RunLock(tmp_path) as held:
        assert "no heartbeat" in held.note
    assert list(tmp_path.iterdir()) == []


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_gigabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def a_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.fault("L4")
@pytest.mark.parametrize("make", [a_pipe, a_gigabyte, Path.mkdir, a_link])
def test_invalid_lock_file_types_are_rejected_immediately(
    make: Callable[[Path], None], tmp_path: Path
):
    make(tmp_path / FILE)
    begin = time.monotonic()
    with pytest.raises(StorageError) as caught, RunLock(tmp_path):
        pass
    assert time.monotonic() - begin < 10
    where, _, action = str(caught.value).splitlines()
    assert where.startswith(f"{tmp_path / FILE}: is") and "emove" in action
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


HOSTILE = [
    "[" * 100_000,
    '{"token": ' + '{"a":' * 50_000,
    json.dumps({"token": "a", "pid": 10**30}),
    json.dumps({"token": "a", "host": platform.node(), "namespace": ["x"]}),
    json.dumps({"token": "../../a", "pid": -1, "host": platform.node()}),
    json.dumps({"token": "a" * 5000, "pid": 2**62, "host": platform.node()}),
]


@pytest.mark.fault("L4")
@pytest.mark.parametrize("content", HOSTILE)
def test_hostile_lock_expires_after_silence(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / FILE).write_text(content)
    with RunLock(tmp_path, beat_seconds=0.02, stale_seconds=0.1) as held:
        assert "no heartbeat" in held.note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("L4")
def test_lock_content_is_shown_without_control_characters(tmp_path: Path):
    leave_behind(tmp_path, age=1000, host="\x1b[2J" + "x" * 5000, run="a\nb")
    with RunLock(tmp_path) as held:
        assert "run a?b on host ?[2Jxx" in held.note and len(held.note) < 600


# Run folders that are moved, replaced or deleted.


def move(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def replace(run_dir: Path) -> None:
    """Move the folder and put a copy of it, including the lock, in its place."""
    move(run_dir)
    shutil.copytree(run_dir.with_name("moved"), run_dir)


def delete_and_make_again(run_dir: Path) -> None:
    """Delete the folder and create an empty one, which cannot reuse the inode of an open folder."""
    shutil.rmtree(run_dir)
    run_dir.mkdir()


def delete_lock(run_dir: Path) -> None:
    (run_dir / FILE).unlink()


def pipe_as_lock(run_dir: Path) -> None:
    delete_lock(run_dir)
    os.mkfifo(run_dir / FILE)


def move_parent(run_dir: Path) -> None:
    move(run_dir.parent)


def file_as_parent(run_dir: Path) -> None:
    move(run_dir.parent)
    run_dir.parent.write_text("")


LOSSES = [move, shutil.rmtree, replace, delete_and_make_again, delete_lock, pipe_as_lock]
LOSSES += [move_parent, file_as_parent]


def everything(folder: Path) -> list[tuple[str, float]]:
    return sorted((str(path), path.lstat().st_mtime) for path in folder.rglob("*"))


@pytest.mark.fault("L1")
@pytest.mark.parametrize("lose", LOSSES)
def test_lost_run_folder_is_detected_and_left_untouched(
    lose: Callable[[Path], None], tmp_path: Path
):
    run_dir = tmp_path / "runs" / "x"
    with RunLock(run_dir) as held:
        assert held.check_held()
        held.raise_if_lost()
        lose(run_dir)
        before = everything(tmp_path)
        held.raise_if_lost()  # not checked yet
        with pytest.raises(StorageError) as found:
            held.check()
        assert not held.check_held()
        where, rule, action = str(found.value).splitlines()
        assert where.startswith(str(run_dir)) and "tart the same command again" in action, rule
    assert everything(tmp_path) == before


@pytest.mark.fault("L1")
def test_heartbeat_detects_moved_run_folder(tmp_path: Path):
    with RunLock(tmp_path / "x", beat_seconds=0.02) as held:
        move(tmp_path / "x")
        wait_until(lambda: held.lost_reason != "")
        with pytest.raises(StorageError, match="was moved or deleted"):
            held.raise_if_lost()
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


@pytest.mark.fault("L1")
def test_lock_check_tolerates_unreachable_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RunLock(tmp_path) as held:
        for number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES):
            with monkeypatch.context() as patch:

                def away(path: object, *rest: object, number: int = number) -> None:
                    raise OSError(number, "away")

                patch.setattr(module, "read", away)
                held.check()
                patch.setattr(module.os, "stat", away)
                held.check()
        os.utime(held.path, (0, 0))  # the file's time does not affect who holds the lock
        held.check()
    assert list(tmp_path.iterdir()) == []


def test_stale_lock_is_taken_over_by_exactly_one_run(tmp_path: Path):
    for _ in range(10):
        leave_behind(tmp_path, age=1000, host="other")
        start, held, rejected = threading.Barrier(8), [], []

        def acquire(start: threading.Barrier, held: list, rejected: list) -> None:
            mine = RunLock(tmp_path)
            start.wait()
            try:
                held.append(mine.__enter__())
            except StorageError as error:
                rejected.append(error)

        threads = [threading.Thread(target=acquire, args=(start, held, rejected)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1 and len(rejected) == 7
        held[0].__exit__()
        assert list(tmp_path.iterdir()) == []


def test_run_folder_creation_failure_is_reported(tmp_path: Path):
    (tmp_path / "run").write_text("in the way")
    with (
        raises(StorageError, "lock.json", names=[tmp_path / "run"], suggests="run.dir"),
        RunLock(tmp_path / "run"),
    ):
        pass


# A full disk.


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, token: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write", write)


@pytest.mark.fault("L7")
def test_full_disk_allows_deletion_without_lock(tmp_path: Path, full_disk: None):
    with (
        raises(StorageError, "lock.json", names="No space left on device", suggests="run.dir"),
        RunLock(tmp_path),
    ):
        pass
    with RunLock(tmp_path, to_free=True):
        assert not list(tmp_path.iterdir())


@pytest.mark.fault("L7")
def test_full_disk_still_respects_lock_of_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    alive = leave_behind(tmp_path / "alive")
    dead = leave_behind(tmp_path / "dead", pid=2**22 - 1, process_start="1")
    request.getfixturevalue("full_disk")
    with pytest.raises(StorageError), RunLock(alive.parent, to_free=True):
        pass
    with RunLock(dead.parent, to_free=True):
        pass
    assert alive.exists()


@pytest.mark.fault("L7")
def test_lock_is_removed_at_exit_on_full_disk(tmp_path: Path, request: pytest.FixtureRequest):
    with RunLock(tmp_path):
        request.getfixturevalue("full_disk")
    assert not list(tmp_path.iterdir())
