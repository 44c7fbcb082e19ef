"""Runs whose folder is moved, deleted or replaced: they stop and write nothing more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from maxpipe.checkpoint.lock import BEAT_SECONDS
from tests.train.runs import (
    Run,
    Start,
    ledger,
    records,
    saved_digest,
    saved_steps,
    wait_for,
    wait_for_outputs,
)
from tests.waiting import wait_until

SMALL = ("eval.batches=0", "mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")
LONG = (*SMALL, "train.steps=400000", "log.every=1")


def content(folder: Path) -> dict[Path, bytes | None]:
    """Return every path below a folder with its content, or None for folders."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def assert_lost_folder_error(output: str, where: str, code: int | None) -> None:
    assert code == 74 and "Traceback" not in output, output
    found, rule, action = output.rstrip("\n").splitlines()[-3:]
    assert found.startswith(where), output
    assert rule.startswith("  ") and "same command again" in action, output


@pytest.mark.long
@pytest.mark.fault("L1")
def test_run_stops_if_folder_moves_and_resumes_from_new_path(
    tiny: Path, start: Start, run: Run, tmp_path: Path
):
    every = ("train", tiny, f"run.dir={tmp_path}", *LONG)
    with start(*every) as process:
        wait_for(process, "step 9/")
        (tmp_path / "run").rename(tmp_path / "moved")
        (output,) = wait_for_outputs([process])
    assert_lost_folder_error(output, f"{tmp_path}/run: was moved or deleted", process.returncode)
    assert not (tmp_path / "run").exists()
    assert saved_steps(tmp_path / "moved")[0] <= 8
    steps = saved_steps(tmp_path / "moved")[-1]
    output = run(*every, "run.name=moved", f"train.steps={steps}")
    assert "lock.json was left by run run" in output and "is dead" in output
    assert f"resuming {tmp_path}/moved after step {steps}" in output


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", tiny, f"run.dir={folder}", *SMALL)
    return folder / "run"


@pytest.mark.faults
@pytest.mark.fault("L1")
@pytest.mark.parametrize("times", [1, 2])
def test_first_run_does_not_write_to_replaced_run_folder(
    times: int, uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """The folder is moved or deleted, and a second run starts while the first is running."""
    every = ("train", tiny, f"run.dir={tmp_path}", *SMALL)
    with start(*every, "train.steps=400000", "log.every=1", "checkpoint.every=1") as process:
        wait_for(process, "step 9/")
        if times == 1:
            (tmp_path / "run").rename(tmp_path / "moved")
        else:
            while (tmp_path / "run").exists():  # a save may be in progress in it
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert "starting a new run" in run(*every)
        (output,) = wait_for_outputs([process])
    assert_lost_folder_error(output, f"{tmp_path}/run", process.returncode)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
    starts = [each["pid"] for each in ledger(tmp_path / "run", "begin")]
    assert len(starts) == 1 and process.pid not in starts
    assert [*records(tmp_path / "run")] == [*records(uninterrupted)]


def is_committed(step: Path) -> bool:
    return step.name.isdecimal() and (step / "facts" / "metadata").exists()


def is_saving(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/*.orbax-checkpoint-tmp"))


def delete_lock(run_dir: Path) -> None:
    (run_dir / "lock.json").unlink()


@pytest.mark.faults
@pytest.mark.fault("L1")
@pytest.mark.parametrize("lose", [shutil.rmtree, delete_lock])
def test_idle_run_detects_lost_folder_at_next_heartbeat(
    lose: Callable[[Path], None], tiny: Path, start: Start, run: Run, tmp_path: Path
):
    every = ("train", tiny, f"run.dir={tmp_path}", *SMALL)
    quiet = ("log.every=400000", "checkpoint.every=0", "train.steps=400000")
    with start(*every, *quiet) as process:
        wait_for(process, "compiling train step: ")
        wait_until(lambda: any(ledger(tmp_path / "run", "start")))
        time.sleep(2)  # until all files of the start are written
        lose(tmp_path / "run")
        before, begin = content(tmp_path), time.monotonic()
        (output,) = wait_for_outputs([process])
        assert time.monotonic() - begin < BEAT_SECONDS + 15
    assert_lost_folder_error(output, f"{tmp_path}/run", process.returncode)
    assert content(tmp_path) == before
    assert "starting a new run" in run(*every, "train.steps=2")


@pytest.mark.faults
@pytest.mark.fault("L1")
@pytest.mark.parametrize("key", ["checkpoint.dir", "checkpoint.local_dir"])
def test_run_stops_if_checkpoint_folder_is_moved(
    key: str, uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    other = tmp_path / "other"
    every = ("train", tiny, f"run.dir={tmp_path}", *SMALL, f"{key}={other}")
    if key == "checkpoint.local_dir":
        every += ("checkpoint.local_every=2",)
    with start(*every, "train.steps=400000", "log.every=1") as process:
        wait_for(process, "step 9/")
        (holder,) = other.iterdir()
        other.rename(tmp_path / "moved")
        (output,) = wait_for_outputs([process])
    assert_lost_folder_error(output, f"{holder}: was moved or deleted", process.returncode)
    assert f"set {key} to its new path" in output
    assert not other.exists()
    (tmp_path / "moved").rename(other)
    newest = max(int(each.name) for each in tmp_path.rglob("*") if is_committed(each))
    assert f"after step {newest}" in run(*every, f"train.steps={newest + 1}")


@pytest.mark.faults
@pytest.mark.fault("L1")
def test_save_in_progress_does_not_recreate_moved_folder(
    tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """The folder is moved during a save, at three different steps."""
    for number in range(3):
        every = ("train", tiny, f"run.dir={tmp_path / str(number)}", *LONG, "checkpoint.every=1")
        run_dir, moved = tmp_path / str(number) / "run", tmp_path / str(number) / "moved"
        with start(*every) as process:
            wait_for(process, f"step {6 + 2 * number}/")
            wait_until(partial(is_saving, run_dir))
            run_dir.rename(moved)
            (output,) = wait_for_outputs([process])
        assert_lost_folder_error(output, f"{run_dir}: was moved or deleted", process.returncode)
        assert not run_dir.exists()
        assert "intact" in run("checkpoints", "verify", moved)
