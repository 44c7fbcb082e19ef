"""Runs with damaged checkpoints, failing disks, or two starts at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.manager import open_run
from tests.train.runs import Run, Start, events, saved_digest, wait_for, write_module

STEPS = 16
GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
ARGUMENTS = (f"train.steps={STEPS}", "eval.batches=0", "log.trackers=[]")
ARGUMENTS += ("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")


EVENTS = ("start", "checkpoint", "checkpoint_failed", "checkpoint_skipped", "done")


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", tiny, f"run.dir={folder}", *ARGUMENTS)
    return folder / "run"


@pytest.fixture
def copy(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy without its last checkpoint, so a resumed run trains the last four steps."""
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "copied" / "run"))
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    return run_dir


def flip_a_bit(step: Path) -> str:
    """Flip a random bit in an array file; return its name."""
    chance = random.Random(3)
    path = chance.choice(sorted(step.glob("state/**/d/*")))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return str(path.relative_to(step))


@pytest.mark.fault("F11", "F12")
def test_resume_skips_damaged_checkpoint(copy: Path, uninterrupted: Path, tiny: Path, run: Run):
    name = flip_a_bit(copy / "checkpoints" / "12")
    output = run("train", tiny, f"run.dir={copy.parent}", *ARGUMENTS)
    step = copy / "checkpoints" / "12"
    reason = f"{name} differs from the saved content"
    assert f"warning: {step} is skipped, renamed 12.corrupt: {reason}" in output
    assert f"resuming {copy} after step 8" in output
    assert ("checkpoint_skipped", 12) in events(copy, *EVENTS)
    assert names(copy) == {"4", "8", "12", "12.corrupt", "16"}
    assert saved_digest(copy) == saved_digest(uninterrupted)


@pytest.mark.long
def test_resume_skips_checkpoint_with_invalid_metadata(copy: Path, tiny: Path, run: Run):
    """Like checkpoints of older releases, the newest step has neither manifest nor digests."""
    step = copy / "checkpoints" / "12"
    (step / "manifest.json").unlink()
    shutil.rmtree(step / "digests")
    path = step / "facts" / "metadata"
    facts = json.loads(path.read_text())
    facts["data"]["step"] = "twelve"
    path.write_text(json.dumps(facts))
    output = run("train", tiny, f"run.dir={copy.parent}", *ARGUMENTS)
    reason = "facts/metadata does not describe the model and data of a run: step must be"
    assert f"warning: {step} is skipped, renamed 12.corrupt: {reason}" in output
    assert f"resuming {copy} after step 8" in output


@pytest.mark.fault("F14", "K8")
def test_run_without_intact_checkpoint_does_not_start_from_scratch(
    copy: Path, tiny: Path, run: Run
):
    for step in (copy / "checkpoints").iterdir():
        flip_a_bit(step)
    output = run("train", tiny, f"run.dir={copy.parent}", *ARGUMENTS, code=74)
    assert "Traceback" not in output and "compiling train step" not in output
    *_, where, rule, action = output.rstrip("\n").splitlines()
    assert where == f"{copy}/checkpoints: the newest 2 checkpoints both look damaged  [MP-CKPT-002]"
    assert all(f"{step}: state/" in rule for step in (8, 12))
    assert f"maxpipe checkpoints verify {copy}" in action
    assert names(copy) == {"4", "8", "12"}, "two damaged checkpoints indicate a storage failure"
    assert not (copy / "lock.json").exists()


@pytest.mark.long
@pytest.mark.fault("F15", "F2")
def test_second_run_is_rejected_and_kill_during_save_loses_one_save(
    copy: Path, uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """The first run is suspended, then killed, while its unfinished save has array files.

    The final rename is slow, so the save cannot finish before the signal.
    """
    slow = """
import os, time
def slowly(move):
    def moved(source, *rest, **more):
        if os.fspath(source).endswith("16.orbax-checkpoint-tmp"):
            time.sleep(10)
        return move(source, *rest, **more)
    return moved
os.rename, os.replace = slowly(os.rename), slowly(os.replace)
"""
    folder, arguments = copy / "checkpoints", ("train", tiny, f"run.dir={copy.parent}", *ARGUMENTS)
    with start(*arguments, modules=write_module(tmp_path / "modules", slow)) as process:
        while process.poll() is None and not (folder / str(STEPS)).exists():
            if any(folder.glob("16.orbax-checkpoint-tmp/state/**/d/*")):
                process.send_signal(signal.SIGSTOP)
                break
        before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        second = run(*arguments, code=74)
        assert {path: path.read_bytes() for path in before} == before
        process.kill()
    where, rule, action = second.splitlines()[-3:]
    assert where == f"{copy}: is in use by another run  [MP-CKPT-004]"
    assert f"process {process.pid}," in rule and "last heartbeat" in rule
    assert "run.name" in action
    assert (folder / "16.orbax-checkpoint-tmp").exists(), "the save finished before the kill"
    output = run(*arguments)
    assert "16.orbax-checkpoint-tmp was removed" in output
    assert "lock.json was left by run run on host" in output and "is dead" in output
    assert f"resuming {copy} after step 12" in output
    assert names(copy) == {"4", "8", "12", "16"}
    assert saved_digest(copy) == saved_digest(uninterrupted)
    assert not (copy / "lock.json").exists()


@pytest.mark.long
@pytest.mark.fault("F6")
def test_run_stops_if_checkpoint_folder_becomes_unwritable(copy: Path, tiny: Path, start: Start):
    """Replace the folder by a file, because permissions do not apply to root."""
    folder = copy / "checkpoints"
    with start("train", tiny, f"run.dir={copy.parent}", *ARGUMENTS) as process:
        wait_for(process, "compiling train step ...")
        folder.rename(copy / "away")
        folder.write_text("")
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 74, output
    assert "Traceback" not in output and "cannot be written" in output
    folder.unlink()
    (copy / "away").rename(folder)
    with open_run(copy) as checkpoints:
        assert checkpoints.restore(12).step == 12


def unmount(folder: Path) -> None:
    """Unmount with retries, because a thread may briefly hold a file open."""
    for _ in range(20):
        if subprocess.run(["umount", str(folder)], capture_output=True).returncode == 0:
            return
        time.sleep(0.5)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.fault("F5")
def test_full_disk_is_reported_before_save(copy: Path, tiny: Path, run: Run):
    """Uses a tmpfs of 600 KiB; skipped if it cannot be mounted."""
    small = copy.parent / "small"
    small.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        shutil.copytree(copy, small / "run", ignore=shutil.ignore_patterns("4", "8"))
        free = shutil.disk_usage(small).free
        (small / "ballast").write_bytes(bytes(free - 120_000))
        output = run("train", tiny, f"run.dir={small}", *ARGUMENTS, code=74)
        assert "Traceback" not in output
        where, rule, action = output.splitlines()[-3:]
        assert where == f"{small}/run/checkpoints/16: cannot be written  [MP-IO-001]"
        assert "needs 0." in rule and " are free." in rule
        assert "resumes from step 12" in action
        assert names(small / "run") == {"12"}
        with open_run(small / "run") as checkpoints:
            assert checkpoints.restore(12).step == 12
    finally:
        unmount(small)


@pytest.mark.long
@pytest.mark.fault("F17")
def test_run_starts_from_checkpoint_without_manifest(run: Run, tmp_path: Path):
    golden = GOLDEN / "0.1.0-format-1"
    shutil.copy(golden / "config.yml", tmp_path)
    overrides = (f"run.dir={tmp_path}", "run.name=next", f"checkpoint.restore_from={golden}")
    output = run("train", tmp_path / "config.yml", *overrides)
    assert f"starting from {golden} after step 2" in output and "has no manifest.json" in output
    with open_run(golden) as old, open_run(tmp_path / "next") as new:
        assert tree_digest(new.restore(2).state) == tree_digest(old.restore(2).state)
    assert "2  intact" in run("checkpoints", "verify", tmp_path / "next")


@pytest.mark.long
@pytest.mark.fault("F5", "F6")
def test_training_continues_through_temporarily_full_disk(
    copy: Path, uninterrupted: Path, tiny: Path, start: Start
):
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("needs resource.prlimit to limit the file size of another process")
    arguments = (*ARGUMENTS, "checkpoint.every=1", "checkpoint.on_failure=continue", "log.every=1")
    shutil.rmtree(copy / "checkpoints" / "12")
    with start("train", tiny, f"run.dir={copy.parent}", *arguments) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, -1))
        wait_for(process, "step 13/")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (-1, -1))
        output, _ = process.communicate()
    assert process.returncode == 0, output
    failed = [step for event, step in events(copy, *EVENTS) if event == "checkpoint_failed"]
    assert failed and set(failed) < set(range(9, STEPS + 1))
    assert events(copy, *EVENTS)[-1] == ("done", STEPS)
    assert saved_digest(copy) == saved_digest(uninterrupted)
