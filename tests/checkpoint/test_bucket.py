"""Checkpoints and locks in a bucket, tested with a fake server on 127.0.0.1."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint import lock as locks
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.lock import FILE, RunLock
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager, open_run
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import ConfigError, StorageError
from tests.bucket import Bucket
from tests.checkpoint.cases import abstract, put, tree
from tests.errors import raises
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture


@pytest.fixture
def empty(bucket: Bucket) -> Bucket:
    bucket.objects.clear()
    bucket.refused.clear()
    return bucket


@pytest.fixture
def saved(empty: Bucket) -> str:
    """A run with steps 3 and 6."""
    return save("gs://bucket/runs/a", 3, 6)


def save(run_dir: str, *steps: int, **keys: Any) -> str:
    with CheckpointManager(run_dir, CheckpointConfig(**keys)) as checkpoints:
        for step in steps:
            put(checkpoints, step)
    return run_dir


def newest(run_dir: str, **options: Any) -> int | None:
    with CheckpointManager(run_dir, **options) as checkpoints:
        found = checkpoints.restore_newest(abstract())
        assert found is None or tree_digest(found.state) == tree_digest(tree(found.step))
        return found and found.step


def flip(bucket: Bucket, beginning: str) -> None:
    name = min(name for name in bucket.objects if name.startswith(beginning))
    content = bucket.objects[name]
    bucket.objects[name] = content[:-1] + bytes([content[-1] ^ 1])


def names(bucket: Bucket, folder: str = f"runs/a/{CHECKPOINTS_FOLDER}/") -> set[str]:
    found = [name[len(folder) :] for name in bucket.objects if name.startswith(folder)]
    return {name.partition("/")[0] for name in found}


# --- saving and restoring -------------------------------------------------------------------


def test_restore_returns_saved_state(saved: str, empty: Bucket):
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3, 6]
        for step in (3, 6):
            assert tree_digest(checkpoints.restore(step).state) == tree_digest(tree(step))
    assert newest(saved) == 6
    assert (
        names(empty) == {"3", "6"}
        and f"runs/a/{CHECKPOINTS_FOLDER}/6/manifest.json" in empty.objects
    )


@pytest.mark.long
def test_retention_deletes_old_steps(saved: str, empty: Bucket):
    save(saved, 9, keep=2)
    assert names(empty) == {"6", "9"}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("state/d/", marks=pytest.mark.long),
        pytest.param("facts/metadata", marks=pytest.mark.long),
        "manifest.json",
    ],
)
def test_flipped_bit_falls_back_to_previous_step(
    what: str, saved: str, empty: Bucket, caplog: Logs
):
    flip(empty, f"runs/a/{CHECKPOINTS_FOLDER}/6/{what}")
    assert newest(saved) == 3
    assert names(empty) == {"3", "6.corrupt"} and "renamed 6.corrupt" in caplog.text


@pytest.mark.long
def test_missing_object_falls_back_to_previous_step(saved: str, empty: Bucket):
    del empty.objects[f"runs/a/{CHECKPOINTS_FOLDER}/6/facts/metadata"]
    assert newest(saved) == 3


@pytest.mark.long
def test_unfinished_save_is_removed(saved: str, empty: Bucket, caplog: Logs):
    for name in ("manifest.json", "commit_success.txt"):
        del empty.objects[f"runs/a/{CHECKPOINTS_FOLDER}/6/{name}"]
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3] and names(empty) == {"3", "6"}
    assert newest(saved) == 3 and names(empty) == {"3"}
    assert "6 was removed" in caplog.text


@pytest.mark.long
def test_missing_manifest_is_rewritten_on_restore(saved: str, empty: Bucket):
    del empty.objects[f"runs/a/{CHECKPOINTS_FOLDER}/6/manifest.json"]
    assert newest(saved) == 6
    assert f"runs/a/{CHECKPOINTS_FOLDER}/6/manifest.json" in empty.objects


# --- faults ---------------------------------------------------------------------------------


def test_read_only_bucket_is_reported_at_start(saved: str, empty: Bucket):
    empty.refused.add("POST")
    for begin in (
        lambda: RunLock(saved, key="checkpoint.dir").__enter__(),
        lambda: CheckpointManager(saved),
    ):
        with pytest.raises(StorageError) as caught:
            begin()
        where, rule, action = str(caught.value).splitlines()
        assert where.startswith(saved) and where.endswith(": cannot be written  [MP-IO-001]")
        assert "Forbidden" in rule and "Object User" in action
    assert names(empty) == {"3", "6"} and names(empty, "runs/a/") == {CHECKPOINTS_FOLDER}


@pytest.mark.long
def test_unreadable_bucket_is_not_treated_as_empty(saved: str, empty: Bucket):
    empty.refused.add("GET")
    for begin in (lambda: open_run(saved), lambda: newest(saved)):
        with pytest.raises(StorageError, match="cannot be read"):
            begin()
    empty.refused.clear()
    assert names(empty) == {"3", "6"}


def test_empty_bucket_has_no_run(empty: Bucket):
    with pytest.raises(ConfigError, match="gs://bucket/runs/b/checkpoints"):
        open_run("gs://bucket/runs/b")
    assert newest("gs://bucket/runs/b") is None and not empty.objects


# --- commands -------------------------------------------------------------------------------


@pytest.mark.long
def test_checkpoints_commands_on_bucket(saved: str, empty: Bucket, capsys: Capture):
    def run(*arguments: str, code: int = 0) -> str:
        assert main(["checkpoints", *arguments]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out + err

    assert [line.split()[0] for line in run("list", saved).splitlines()[1:]] == ["3", "6"]
    assert "step       6" in run("show", saved)
    assert run("diff", f"{saved}@6", f"{saved}@6") == "same\n"
    assert run("verify", saved).count("  intact, ") == 2
    flip(empty, f"runs/a/{CHECKPOINTS_FOLDER}/6/state/d/")
    assert "differs from the saved content" in run("verify", saved, code=74)
    assert "Add a rule, such as --keep 3" in run("prune", saved, code=2)
    with RunLock(saved):
        assert "is in use by another run" in run("prune", saved, "--keep", "1", code=74)
    save(saved, 9)
    run("prune", saved, "--keep", "1")
    assert names(empty) == {"9"} and names(empty, "runs/a/") == {CHECKPOINTS_FOLDER}


# --- lock -----------------------------------------------------------------------------------


def leave_behind(bucket: Bucket, age: float, **values: object) -> str:
    """Write the lock of a run that ended without removing it."""
    locks._write(RunLock("gs://bucket/runs/a").path, "dead")
    name = f"runs/a/{FILE}"
    bucket.objects[name] = json.dumps(json.loads(bucket.objects[name]) | values).encode()
    generation, then = bucket.facts[name]
    bucket.facts[name] = generation, then - timedelta(seconds=age)
    return "gs://bucket/runs/a"


def test_second_run_is_rejected_and_names_the_holder(empty: Bucket):
    with RunLock("gs://bucket/runs/a"):
        before = dict(empty.objects)
        with pytest.raises(StorageError) as caught, RunLock("gs://bucket/runs/a"):
            pass
        where, rule, action = str(caught.value).splitlines()
        assert where == "gs://bucket/runs/a: is in use by another run  [MP-CKPT-004]"
        assert "run a on host" in rule and "run.name" in action
        assert empty.objects == before
    assert not empty.objects


def test_lock_of_dead_local_process_is_taken_over_at_once(empty: Bucket):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with RunLock(leave_behind(empty, 0, pid=process.pid)) as held:
        assert "that process is dead" in held.note and set(empty.objects) == {f"runs/a/{FILE}"}
        held.check()
    assert not empty.objects


def test_lock_of_silent_remote_host_is_taken_over(empty: Bucket):
    with RunLock(leave_behind(empty, 200, host="other")) as held:
        assert "no heartbeat for 2" in held.note


def test_heartbeat_renews_lock_and_blocks_second_start(empty: Bucket):
    run_dir = leave_behind(empty, 20, host="other")
    with RunLock("gs://bucket/runs/b", beat_seconds=0.1) as held:
        first = empty.generation
        deadline = time.monotonic() + 10
        while empty.generation < first + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert empty.generation >= first + 3
        held.check()
    name = f"runs/a/{FILE}"
    threading.Timer(1.2, lambda: empty.put(name, empty.objects[name])).start()
    with (
        raises(StorageError, "gs://bucket/runs/a", names=["host other"], suggests="run.name"),
        RunLock(run_dir, beat_seconds=0.1),
    ):
        pass


def test_lost_lock_is_reported_and_left_untouched(empty: Bucket):
    with RunLock("gs://bucket/runs/a", beat_seconds=0.05) as slept:
        name = f"runs/a/{FILE}"
        empty.put(name, json.dumps(json.loads(empty.objects[name]) | {"token": "b"}).encode())
        after = empty.generation
        with raises(StorageError, "gs://bucket/runs/a/lock.json", names=["150 s"]):
            slept.check()
        time.sleep(0.3)
        assert empty.generation == after, "the old holder renewed the lock of another run"
    assert set(empty.objects) == {name}


def test_stale_lock_is_taken_over_by_exactly_one_run(empty: Bucket):
    run_dir = leave_behind(empty, 1000, host="other")
    start, held, rejected = threading.Barrier(4), [], []

    def acquire() -> None:
        mine = RunLock(run_dir)
        start.wait()
        try:
            held.append(mine.__enter__())
        except StorageError as error:
            rejected.append(error)

    threads = [threading.Thread(target=acquire) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(rejected) == 3, rejected
    held[0].__exit__()
    assert not empty.objects


@pytest.mark.long
def test_save_fails_after_lock_is_lost(saved: str, empty: Bucket, tmp_path: Path):
    config = CheckpointConfig(dir="gs://bucket/runs")
    with (
        RunLock(saved) as lock,
        CheckpointManager(tmp_path / "a", config, locks=[lock]) as checkpoints,
    ):
        empty.put(f"runs/a/{FILE}", b'{"token": "other"}')
        with pytest.raises(StorageError, match="lock of another run"):
            put(checkpoints, 9)
    assert names(empty) == {"3", "6"}


@pytest.mark.fault("L1")
@pytest.mark.parametrize("by_heart", [True, False])
def test_deleted_lock_is_detected_and_not_recreated(by_heart: bool, empty: Bucket):
    beat_seconds = 0.05 if by_heart else 100.0
    with RunLock("gs://bucket/runs/a", beat_seconds=beat_seconds) as held:
        held.check()
        del empty.objects[f"runs/a/{FILE}"]
        if by_heart:
            wait_until(lambda: held.lost_reason != "")
        with pytest.raises(StorageError, match=f"gs://bucket/runs/a/{FILE}: no longer exists"):
            held.raise_if_lost() if by_heart else held.check()
        assert not held.check_held()
    assert not empty.objects


@pytest.mark.fault("L3", "L4")
@pytest.mark.parametrize("content", ["[" * 100_000, '{"token": "a", "host": "other"}'])
def test_future_dated_or_malformed_lock_expires_after_silence(content: str, empty: Bucket):
    run_dir = leave_behind(empty, -1e6, host="other")
    empty.objects[f"runs/a/{FILE}"] = content.encode()
    with RunLock(run_dir, beat_seconds=0.1, stale_seconds=0.5) as held:
        assert "no heartbeat" in held.note
