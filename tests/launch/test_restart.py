"""Restart policy: the exit codes after which a run is restarted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxpipe.launch.job import RestartPolicy, describe_exit_code, newest_step


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / str(step)).mkdir(parents=True)


@pytest.mark.fault("H5")
@pytest.mark.parametrize("code", [0, 1, 2, 70, 74, 127, 130, -2])
def test_permanent_failures_are_not_restarted(tmp_path: Path, code: int):
    restarts = RestartPolicy(3, tmp_path)
    save(tmp_path, 4)  # progress changes nothing
    assert not restarts.should_restart(code)


@pytest.mark.parametrize("code", [-9, -6, 137, 71])
def test_restarts_without_progress_are_limited(tmp_path: Path, code: int):
    restarts = RestartPolicy(2, tmp_path)
    assert [restarts.should_restart(code) for _ in range(3)] == [True, True, False]


def test_newer_checkpoint_resets_failure_count(tmp_path: Path):
    save(tmp_path, 4)
    restarts = RestartPolicy(1, tmp_path)
    for step in (8, 12, 16):
        assert restarts.should_restart(-9)  # the first without progress
        save(tmp_path, step)
        assert restarts.should_restart(-9) and restarts.failures_without_progress == 0
    assert restarts.should_restart(-9) and not restarts.should_restart(-9)


def test_preemptions_with_checkpoint_do_not_count(tmp_path: Path):
    restarts = RestartPolicy(0, tmp_path)
    assert all(restarts.should_restart(75) for _ in range(20))
    assert not restarts.should_restart(-9)


def test_preemption_with_newer_checkpoint_resets_failure_count(tmp_path: Path):
    restarts = RestartPolicy(1, tmp_path)
    for step in (4, 8, 12):
        assert restarts.should_restart(71)
        save(tmp_path, step)
        assert restarts.should_restart(75) and restarts.failures_without_progress == 0


def test_only_complete_checkpoints_count(tmp_path: Path):
    assert newest_step(tmp_path) is None
    save(tmp_path, 8)
    save(tmp_path, 12)
    for name in ("16.orbax-checkpoint-tmp-1", "20.corrupt", "latest"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert newest_step(tmp_path) == 12


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed by SIGKILL"),
        (134, "killed by SIGABRT"),
        (-127, "killed by 127"),
        (71, "exit code 71 (hang, lost process, or processes that do not connect)"),
        (1, "exit code 1"),
        (130, "exit code 130 (stopped by Ctrl-C)"),
        (-2, "exit code 130 (stopped by Ctrl-C)"),
    ],
)
def test_describe_exit_code(code: int, words: str):
    assert describe_exit_code(code) == words


def test_newest_step_in_other_folder_is_read_from_events(tmp_path: Path):
    assert newest_step(tmp_path, "gs://bucket") is None
    save(tmp_path, 100)  # saved before checkpoint.dir was set
    restarts = RestartPolicy(1, tmp_path, "gs://bucket")
    records = tmp_path / "events.jsonl"
    for event, step, newest in (
        ("start", 0, None),
        ("checkpoint", 4, 4),
        ("checkpoint", 8, 8),
        ("time", 11, 8),
        ("start", 4, 4),  # 8 was damaged
    ):
        with records.open("a") as file:
            file.write(json.dumps({"event": event, "step": step}) + "\n")
        assert newest_step(tmp_path, "gs://bucket") == newest
    assert restarts.should_restart(-9) and restarts.failures_without_progress == 0
    with records.open("a") as file:
        file.write('{"event": "checkp')
    assert restarts.should_restart(-9) and not restarts.should_restart(-9)
