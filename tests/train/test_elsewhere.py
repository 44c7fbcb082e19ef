"""Runs that save checkpoints in another folder or in a bucket (`checkpoint.dir`)."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxpipe.checkpoint.storage import entries, to_epath
from maxpipe.launch.job import newest_step
from tests.bucket import Bucket
from tests.train.runs import Run, Start, ledger, saved_digest, wait_for

STEPS = 12
ARGUMENTS = (f"train.steps={STEPS}", "eval.batches=0", "log.trackers=[]", "log.every=1")
ARGUMENTS += ("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")


@dataclass
class CheckpointDir:
    """The value of checkpoint.dir, and a function that flips a bit in an array of a step."""

    dir: str
    flip: Callable[[int], None]

    def names(self) -> set[str]:
        return {entry.name for entry in entries(to_epath(f"{self.dir}/run/checkpoints"))}


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.fixture(params=["folder", "bucket"])
def checkpoint_dir(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointDir:
    if request.param == "folder":
        folder = tmp_path / "checkpoint_dir"

        def flip_file(step: int) -> None:
            path = min((folder / "run" / "checkpoints" / str(step) / "state").glob("**/d/*"))
            path.write_bytes(flipped(path.read_bytes()))

        return CheckpointDir(str(folder), flip_file)
    bucket: Bucket = request.getfixturevalue("bucket")
    bucket.objects.clear()

    def flip_object(step: int) -> None:
        begin = f"all/run/checkpoints/{step}/state/"
        name = min(name for name in bucket.objects if name.startswith(begin) and "/d/" in name)
        bucket.objects[name] = flipped(bucket.objects[name])

    return CheckpointDir("gs://bucket/all", flip_object)


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run, with its checkpoints. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", tiny, f"run.dir={folder}", *ARGUMENTS)
    return folder / "run"


@pytest.mark.faults
@pytest.mark.fault("F11", "F15")
def test_separate_checkpoint_dir_survives_kill_and_corruption(
    checkpoint_dir: CheckpointDir,
    uninterrupted: Path,
    tiny: Path,
    start: Start,
    run: Run,
    tmp_path: Path,
):
    arguments = ("train", tiny, *ARGUMENTS, f"checkpoint.dir={checkpoint_dir.dir}")
    folder = tmp_path / "runs" / "run"
    with start(*arguments, f"run.dir={folder.parent}") as process:
        wait_for(process, "step 9/")
        process.send_signal(signal.SIGSTOP)
        second = run(*arguments, f"run.dir={tmp_path / 'others'}", code=74)
        process.kill()
    where, rule, action = second.splitlines()[-3:]
    assert where == f"{checkpoint_dir.dir}/run: is in use by another run  [MP-CKPT-004]"
    assert f"process {process.pid}," in rule and "run.name" in action
    assert "4" in checkpoint_dir.names() and newest_step(folder, checkpoint_dir.dir) in (4, 8)

    output = run(*arguments, f"run.dir={folder.parent}")
    assert f"{checkpoint_dir.dir}/run/lock.json was left by run run on host" in output
    # The save of step 8 may have been in progress.
    assert any(f"resuming {folder} after step {step}" in output for step in (4, 8))
    assert checkpoint_dir.names() == {"4", "8", "12"} and not (folder / "checkpoints").exists()
    assert newest_step(folder, checkpoint_dir.dir) == STEPS
    assert saved_digest(folder) == saved_digest(uninterrupted)

    checkpoint_dir.flip(12)
    assert "12  damaged: state/" in run("checkpoints", "verify", folder, code=74)
    output = run(*arguments, f"run.dir={folder.parent}")
    assert "12 is skipped, renamed 12.corrupt" in output
    assert ledger(folder, "start")[-1]["step"] == 8
    assert checkpoint_dir.names() == {"4", "8", "12", "12.corrupt"}
    assert saved_digest(folder) == saved_digest(uninterrupted)

    source = f"{checkpoint_dir.dir}/run"
    new = (f"run.dir={tmp_path}", "run.name=new", f"checkpoint.restore_from={source}")
    assert f"starting from {source} after step 12" in run("train", tiny, *ARGUMENTS, *new)
    assert saved_digest(tmp_path / "new") == saved_digest(uninterrupted)


@pytest.mark.long
@pytest.mark.fault("L6")
def test_missing_checkpoint_dir_does_not_start_new_run(tiny: Path, run: Run, tmp_path: Path):
    """For example, the file system is not mounted."""
    place, run_dir = tmp_path / "place", tmp_path / "runs" / "run"
    arguments = ("train", tiny, *ARGUMENTS, f"run.dir={run_dir.parent}", f"checkpoint.dir={place}")
    run(*arguments)
    before = (run_dir / "metrics.jsonl").read_bytes()
    place.rename(tmp_path / "away")
    where, rule, action = run(*arguments, code=74).splitlines()[-3:]
    assert where == f"{place}/run/checkpoints: contains no checkpoint  [MP-CKPT-005]"
    assert f"step {STEPS} was saved there" in rule and f"delete {run_dir}" in action
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(place)
    (tmp_path / "away").rename(place)
    assert "nothing is left to train" in run(*arguments)


@pytest.mark.long
@pytest.mark.fault("L6")
def test_missing_checkpoints_do_not_start_new_run(tiny: Path, run: Run, tmp_path: Path):
    """Test a missing and an empty folder; the suggested actions work."""
    run_dir = tmp_path / "runs" / "run"
    arguments = ("train", tiny, *ARGUMENTS, f"run.dir={run_dir.parent}")
    run(*arguments)
    before = (run_dir / "metrics.jsonl").read_bytes()
    (run_dir / "checkpoints").rename(tmp_path / "away")
    for _ in range(2):  # the first start does not create the folder
        where, rule, action = run(*arguments, code=74).splitlines()[-3:]
        assert where == f"{run_dir}/checkpoints: is missing  [MP-CKPT-005]"
        assert f"has records up to step {STEPS}. No file was changed." in rule
        assert f"To start over, delete {run_dir}, or set run.name to a new name." in action
    (run_dir / "events.jsonl").rename(tmp_path / "events.jsonl")
    assert "metrics.jsonl has records up to step" in run(*arguments, code=74)
    (tmp_path / "events.jsonl").rename(run_dir / "events.jsonl")
    (run_dir / "checkpoints").mkdir()
    where, rule, _ = run(*arguments, code=74).splitlines()[-3:]
    assert where == f"{run_dir}/checkpoints: contains no checkpoint  [MP-CKPT-005]"
    assert f"records that step {STEPS} was saved there" in rule
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert "starting a new run" in run(*arguments, "run.name=other", "train.steps=1")
    (run_dir / "checkpoints").rmdir()
    (tmp_path / "away").rename(run_dir / "checkpoints")
    assert "nothing is left to train" in run(*arguments)
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    output = run(*arguments)
    assert f"contains no checkpoint of step {STEPS}, although" in output
    assert f"the run resumes after step {STEPS - 4}." in output


@pytest.mark.long
def test_changed_checkpoint_dir_does_not_start_new_run(
    uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
):
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "runs" / "run"))
    arguments = ("train", tiny, *ARGUMENTS, f"run.dir={run_dir.parent}")
    arguments += (f"checkpoint.dir={tmp_path / 'new'}",)
    output = run(*arguments, code=2)
    where, rule, action = output.splitlines()[-3:]
    assert where == f"command line: checkpoint.dir = {tmp_path / 'new'}  [MP-CKPT-005]"
    assert (
        f"up to step {STEPS} in {run_dir}/checkpoints" in rule and "Copy the checkpoints" in action
    )
    (run_dir / "checkpoints").rename(tmp_path / "new" / "run" / "checkpoints")
    assert f"resuming {run_dir} after step {STEPS}" in run(*arguments)
    back = run(*arguments[:-1], code=2)
    assert f"in {tmp_path}/new/run/checkpoints" in back
