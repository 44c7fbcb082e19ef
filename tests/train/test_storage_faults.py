"""Storage that flips bits, truncates writes or fails, at random calls."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.checkpoint.manager import open_run
from maxpipe.errors import MaxpipeError
from tests.train.conftest import ROOT
from tests.train.runs import Run, Start, saved_digest, shim_environment, wait_for_outputs

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent
DRIVER = HERE / "storage_driver.py"
SHARDS, FAULTS_EACH = 6, 50
SMALL = ("eval.batches=0", "mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")
SMALL += ("checkpoint.retries=1", "log.trackers=[]")


@pytest.mark.fault("L2")
@pytest.mark.parametrize("action", ["flip", "cut", "lose", "eio", "enospc", "edquot", "estale"])
def test_fault_injection_library_injects_requested_fault(action: str, shim: Path, tmp_path: Path):
    code = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for text in (b"one.", b"two.", b"four"):
    try:
        print(os.write(file, text), end=" ")
    except OSError as error:
        print(error.errno, end=" ")
print(os.pread(file, 100, 0))
"""
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()

    def printed(name: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)],
            env=os.environ | shim_environment(shim, root, log, f"write {action} 2 1 3 /file"),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert printed("outside") == "4 4 4 b'one.two.four'"
    assert not log.read_text()
    found = printed("root/file")
    assert log.read_text() == f"write {action} 2 {root}/file\n"
    silent = {"cut": "4 4 4 b'one.twfour'", "lose": "4 4 4 b'one.four'"}
    failures = {"eio": 5, "enospc": 28, "edquot": 122, "estale": 116}
    if action == "flip":
        assert found != "4 4 4 b'one.two.four'" and found.startswith("4 4 4 b'one.")
        assert found.endswith("four'")
    elif action in silent:
        assert found == silent[action]
    else:
        assert found == f"4 {failures[action]} 4 b'one.four'"


@pytest.mark.fault("L2")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_faults_during_save_restore_and_prune(shard: int, shim: Path, tmp_path: Path):
    log, environment = tmp_path / "log", {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    (root := tmp_path / "root").mkdir()
    found = subprocess.run(
        [sys.executable, DRIVER, root, str(shard * FAULTS_EACH), str(FAULTS_EACH)],
        env=os.environ | environment | shim_environment(shim, root, log),
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0 and len(lines) == FAULTS_EACH, found.stderr
    happened = [line for line in lines if line["done"]]
    assert len(happened) > 0.75 * FAULTS_EACH, "too few faults matched a call"
    assert {line["phase"] for line in happened} == {"save", "restore", "prune"}
    assert {line["code"] for line in happened} <= {0, 74}
    wrong = [line for line in lines if line["wrong"]]
    assert not wrong, "\n".join(map(str, wrong))


# The command.


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", tiny, f"run.dir={folder}", *SMALL)
    return folder / "run"


def last_lines(output: str) -> str:
    return "\n".join(output.rstrip("\n").splitlines()[-3:])


COMMAND_FAULTS = [
    "write flip 3 0 1 /state",  # every array file
    "write cut 9 1 2 /state",
    "write lose 20 1 3 /checkpoints/",
    "write enospc 15 1 4 /checkpoints/",
    "write edquot 30 0 5",
    "fsync eio 10 1 6 /checkpoints/",
    "rename eio 5 1 7 /checkpoints/",
    "rename estale 1 0 8 /checkpoints/",
    "read eio 40 0 9 /checkpoints/",
    "read flip 25 3 10 /checkpoints/",
    "open estale 60 0 11 /checkpoints/",
]


@pytest.mark.fault("L2")
@pytest.mark.parametrize("resumes", [False, True], ids=["saves", "resumes"])
@pytest.mark.parametrize("plan", COMMAND_FAULTS)
def test_train_command_on_failing_storage(
    plan: str,
    resumes: bool,
    shim: Path,
    uninterrupted: Path,
    tiny: Path,
    start: Start,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (root := tmp_path / "root").mkdir()
    run_dir, log = root / "run", tmp_path / "log"
    if resumes:
        shutil.copytree(uninterrupted, run_dir)
        for step in (20, 24):
            shutil.rmtree(run_dir / "checkpoints" / str(step))
    good = {path.name: digest_of(path) for path in run_dir.glob("checkpoints/*")}
    every = ("train", tiny, f"run.dir={root}", *SMALL)
    with monkeypatch.context() as patch:
        for name, value in shim_environment(shim, root, log, plan).items():
            patch.setenv(name, value)
        process = start(*every)
        (output,) = wait_for_outputs([process])
    assert process.returncode in (0, 74) and "Traceback" not in output, output
    if process.returncode == 0:
        assert saved_digest(run_dir) == saved_digest(uninterrupted)
    else:
        assert len(last_lines(output).splitlines()) == 3 and "\n  " in last_lines(output), output
    for path in run_dir.glob("checkpoints/*.corrupt*"):
        assert good.get(path.name.partition(".")[0]) is None, f"{path}\n{output}"
    run(*every)
    assert saved_digest(run_dir) == saved_digest(uninterrupted)


def digest_of(path: Path) -> str | None:
    try:
        return saved_digest(path.parent.parent, int(path.name))
    except MaxpipeError:
        return None


@pytest.mark.fault("L2")
@pytest.mark.parametrize("plan", ["read eio 1 0 1 /state", "read estale 9 1 2", "open eio 12 0 3"])
@pytest.mark.parametrize("command", ["verify", "prune"])
def test_checkpoint_commands_on_failing_storage(
    command: str,
    plan: str,
    shim: Path,
    uninterrupted: Path,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A storage error is not reported as damage, and no checkpoint is deleted because of it."""
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "root" / "run"))
    before = {path.name for path in (run_dir / "checkpoints").iterdir()}
    for name, value in shim_environment(shim, tmp_path / "root", tmp_path / "log", plan).items():
        monkeypatch.setenv(name, value)
    keep = ("--keep", "6") if command == "prune" else ()
    process = start("checkpoints", command, run_dir, *keep)
    (output,) = wait_for_outputs([process])
    assert (tmp_path / "log").read_text(), "the fault never happened"
    assert process.returncode in (0, 74) and "Traceback" not in output, output
    assert "damaged" not in output
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == before
    with open_run(run_dir) as checkpoints:
        assert checkpoints.restore(24).step == 24


# Ctrl-C.


@pytest.mark.fault("L5")
def test_resume_after_ctrl_c_at_random_steps_is_bitwise_equal(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    """Interrupt and restart ten times; the result equals that of the uninterrupted run."""
    chance, stopped = random.Random(5), 0
    every = ("train", tiny, f"run.dir={tmp_path}", *SMALL, "log.every=1")
    for attempt in range(10):
        with start(*every) as process:
            seen = read_until(process, lambda line, at=2 * attempt + 2: step_of(line) >= at)
            time.sleep(chance.uniform(0, 0.05))
            process.send_signal(signal.SIGINT)
            (output,) = wait_for_outputs([process])
        assert process.returncode in (0, 130), seen + output
        assert "Traceback" not in output
        stopped += process.returncode == 130
    assert stopped > 0
    run(*every)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


def step_of(line: str) -> int:
    found = re.match(r"step +(\d+)/", line)
    return int(found[1]) if found else 0


def read_until(process: subprocess.Popen[str], seen: Callable[[str], bool]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if seen(line):
            break
    return "".join(lines)
