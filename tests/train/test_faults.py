"""Slow fault tests: real runs that are killed, hang and resume. Run with `make test-faults`."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from maxpipe.checkpoint.manager import open_run
from maxpipe.telemetry import goodput
from tests.train.runs import (
    SAME,
    Run,
    Start,
    forget_after,
    ledger,
    losses,
    saved_digest,
    saved_steps,
    shim_environment,
    start_processes,
    wait_for,
    wait_for_outputs,
    write_module,
)

pytestmark = pytest.mark.faults

STEPS = 24
QUICK = (
    "runtime.heartbeat_timeout_seconds=5",
    "runtime.cpu_collectives=gloo",  # the same bits in any number of processes
    "eval.batches=0",
    "log.every=1",
)


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run in one process. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", tiny, f"run.dir={folder}", *QUICK)
    return folder / "run"


@pytest.fixture
def own_text(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the documents for one process."""
    path = yaml.safe_load(tiny.read_text())["data"]["path"]
    return Path(shutil.copytree(path, tmp_path / "text"))


@pytest.mark.fault("F1", "F2", "F4")
def test_resume_after_twenty_random_kills_is_bitwise_equal(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    chance = random.Random(7)
    arguments = ("train", tiny, f"run.dir={tmp_path}", *QUICK, "checkpoint.every=2")
    for _ in range(20):
        with start(*arguments) as process:
            time.sleep(chance.uniform(0.3, 9.0))
            process.kill()
            process.communicate()
    run(*arguments)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("D1", "D3")
def test_logging_eval_and_checkpoint_settings_keep_results_bitwise(
    uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    """Repeat the run, then change its logging, evaluation and checkpoints."""
    other = ("eval.batches=4", "eval.every=5", "log.every=7", "checkpoint.every=0")
    for number, keys in enumerate([(), other]):
        run("train", tiny, f"run.dir={tmp_path / str(number)}", *QUICK, *keys)
        assert saved_digest(tmp_path / str(number) / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("D2")
@pytest.mark.parametrize("count", [2, 4])
def test_two_and_four_processes_match_one_process(
    count: int, uninterrupted: Path, tiny: Path, start: Start, tmp_path: Path
) -> None:
    every = (tiny, f"run.dir={tmp_path}", *QUICK, f"mesh.cpu_devices={4 // count}")
    with start_processes(start, *every, count=count) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0] * count, outputs
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("D2")
def test_in_process_collectives_match_gloo(
    uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    run("train", tiny, f"run.dir={tmp_path}", *QUICK, "runtime.cpu_collectives=auto")
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), rel=SAME)


@pytest.mark.fault("D4", "D7")
def test_resume_with_other_process_counts_is_bitwise_equal(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    """Process counts 1, 4, 2, 1: equal losses show that no sample is repeated or lost."""
    every = (tiny, f"run.dir={tmp_path}", *QUICK)
    run("train", *every, "train.steps=24")
    for step, count in ((20, 4), (12, 2)):
        forget_after(tmp_path / "run", step)
        with start_processes(
            start, *every, f"mesh.cpu_devices={4 // count}", count=count
        ) as processes:
            outputs = wait_for_outputs(processes)
        assert [process.returncode for process in processes] == [0] * count, outputs
    forget_after(tmp_path / "run", 8)
    run("train", *every)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("F3", "F19")
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_one_process_during_saves(
    victim: int, uninterrupted: Path, tiny: Path, start: Start, tmp_path: Path
) -> None:
    """Every step saves, so the kill interrupts a save; a partial save is not a checkpoint."""
    every = (tiny, f"run.dir={tmp_path}", *QUICK, "mesh.cpu_devices=2", "checkpoint.every=1")
    with start_processes(start, *every, count=2) as processes:
        wait_for(processes[0], "step 7/")
        begin = time.monotonic()
        processes[victim].kill()
        outputs = wait_for_outputs(processes)
        assert time.monotonic() - begin < 10
    assert processes[1 - victim].returncode == 71, outputs
    named = "process 1 (" if victim else "process 0"
    assert named in outputs[1 - victim] and "disconnected" in outputs[1 - victim]
    assert saved_steps(tmp_path / "run")[-1] >= 5
    with start_processes(start, *every, count=2) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


def modules_that_wait(tmp_path: Path, text: Path) -> Path:
    """Return modules with which opening these texts hangs once a file `waits` exists."""
    waits = f"""
import os, time
true = os.open
def waits(path, *rest, **named):
    if str(path).startswith({str(text)!r}) and os.path.exists({str(tmp_path / "waits")!r}):
        time.sleep(10_000)
    return true(path, *rest, **named)
os.open = waits
"""
    return write_module(tmp_path / "modules", waits)


@pytest.mark.fault("F9")
def test_hanging_reader_in_one_process_stops_run(
    tiny: Path, start: Start, own_text: Path, tmp_path: Path
) -> None:
    every = (tiny, f"run.dir={tmp_path}", *QUICK, "mesh.cpu_devices=2", "train.steps=4000")
    every += ("runtime.stall_timeout_seconds=20", "checkpoint.every=0")
    begin = partial(start, modules=modules_that_wait(tmp_path, own_text))
    with start_processes(begin, *every, second=[f"data.path={own_text}"], count=2) as processes:
        wait_for(processes[0], "step 3/")
        (tmp_path / "waits").touch()
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [71, 71], outputs
    for rank, output in enumerate(outputs):
        assert "most recent call first" in output and f"process {rank} on " in output
        what, who, _ = output.rstrip().splitlines()[-3:]
        assert what.startswith("no progress for 20 s")
        assert "process 1 (" in who and "has been in data for" in who and "process 0" not in who


@pytest.mark.fault("F8")
@pytest.mark.parametrize("signals", [1, 2])
def test_stop_request_while_data_reader_hangs(
    signals: int, tiny: Path, start: Start, own_text: Path, tmp_path: Path
) -> None:
    """The grace period expires, or a second request arrives; saved checkpoints are kept."""
    every = ("train", tiny, f"run.dir={tmp_path}", *QUICK, "train.steps=4000", "checkpoint.every=2")
    every += (f"data.path={own_text}", "runtime.stop_grace_seconds=4")
    with start(*every, modules=modules_that_wait(tmp_path, own_text)) as process:
        wait_for(process, "step 6/")
        (tmp_path / "waits").touch()
        time.sleep(3)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(1.5)
        begin = time.monotonic()
        (output,) = wait_for_outputs([process])
        assert time.monotonic() - begin < 15
    assert process.returncode == 75
    assert ("second stop request" if signals == 2 else "time limit for saving") in output
    with open_run(tmp_path / "run") as checkpoints:
        assert checkpoints.restore(checkpoints.steps()[-1]).step >= 4


@pytest.mark.fault("F7", "F10")
def test_launcher_restarts_after_kill(
    uninterrupted: Path, tiny: Path, start: Start, tmp_path: Path
) -> None:
    every = (tiny, f"run.dir={tmp_path}", *QUICK, "checkpoint.every=2")
    with start("launch", "local", "--processes", "4", *every) as launcher:
        wait_for(launcher, "step 9/")
        found = subprocess.run(
            ["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True
        )
        os.kill(int(found.stdout.split()[2]), signal.SIGKILL)
        (output,) = wait_for_outputs([launcher])
    assert launcher.returncode == 0, output
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("S1")
def test_slow_reading_process_is_reported(tiny: Path, start: Start, tmp_path: Path) -> None:
    slow = """
import sys, time
from maxpipe.data.loader import Batches
true = Batches.__next__
def slow(batches):
    time.sleep(0.05)
    return true(batches)
if "runtime.process_id=1" in sys.orig_argv:
    Batches.__next__ = slow
"""
    begin = partial(start, modules=write_module(tmp_path / "modules", slow))
    every = (tiny, f"run.dir={tmp_path}", *QUICK, "mesh.cpu_devices=2", "train.steps=50")
    with start_processes(begin, *every, count=2) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert re.search(r"process 1 \(.*\) delays the other processes: \d\d+ ms", outputs[0])
    assert not re.search(r"process 0 \(.*\) delays the other processes", outputs[0])


@pytest.mark.fault("F18")
def test_training_does_not_wait_for_slow_storage(
    uninterrupted: Path, tiny: Path, start: Start, tmp_path: Path
) -> None:
    """Every fsync is slow, and one fails."""
    slow = f"""
import itertools, os, time
true, calls = os.fsync, itertools.count(1)
def fsync(number):
    name = os.readlink(f"/proc/self/fd/{{number}}")
    if name.startswith({str(tmp_path)!r}) and "/checkpoints/" in name:
        time.sleep(1.5)
        if "/checkpoints/16" in name and next(calls) == 1:
            raise OSError(5, "Input/output error")
    true(number)
os.fsync = fsync
"""
    arguments = ("train", tiny, f"run.dir={tmp_path}", *QUICK, "checkpoint.every=8")
    with start(*arguments, modules=write_module(tmp_path / "modules", slow)) as process:
        (output,) = wait_for_outputs([process])
    assert process.returncode == 0, output
    records = ledger(tmp_path / "run")
    event_steps = [(each["event"], each["step"]) for each in records if "step" in each]
    assert event_steps.index(("checkpoint", 8)) > event_steps.index(("time", 10))
    assert [step for event, step in event_steps if event == "checkpoint_failed"] == [16]
    assert [step for event, step in event_steps if event == "checkpoint"][-1] == 24
    saves = [each for each in records if each["event"] == "checkpoint"]
    assert all(each["seconds"] > 1.4 > each["blocking_seconds"] for each in saves), saves
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.fault("F20")
def test_clock_set_back_past_midnight(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    clock = f"""
import datetime, os, time
true, begin, hours = time.time, time.time(), {{4: 2, 8: -5}}
def now():
    passed = [step for step in hours if os.path.exists(f"{tmp_path}/run/checkpoints/{{step}}")]
    moved[0] += sum(map(hours.pop, passed))
    return 1_799_884_800 + 3600 * moved[0] + true() - begin
moved = [23]
class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(now(), tz)
time.time, time.time_ns, datetime.datetime = now, lambda: int(now() * 1e9), Clock
"""
    modules = write_module(tmp_path / "modules", clock)
    arguments = ("train", tiny, f"run.dir={tmp_path}", *QUICK, "checkpoint.keep=2")
    begin = time.monotonic()
    with start(*arguments, modules=modules) as process:
        (output,) = wait_for_outputs([process])
    seconds = time.monotonic() - begin
    assert process.returncode == 0, output
    times = [record["time"] for record in ledger(tmp_path / "run")]
    assert times[0].startswith("2027-01-14T23:0") and times[-1].startswith("2027-01-14T20:0")
    assert any(time.startswith("2027-01-15T01:0") for time in times)
    found = goodput.read_goodput(tmp_path / "run")
    assert [each.ended for each in found.attempts] == ["done"] and 0 < found.total < seconds
    assert saved_steps(tmp_path / "run") == [20, 24]
    forget_after(tmp_path / "run", 20)
    run(*arguments)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
    assert goodput.read_goodput(tmp_path / "run").total > found.total


@pytest.mark.fault("O1")
def test_training_continues_while_metrics_cannot_be_written(
    uninterrupted: Path,
    tiny: Path,
    start: Start,
    shim: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full when the fifth to tenth record is written."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    plan = "write enospc 5 6 0 /metrics.jsonl"
    with monkeypatch.context() as patch:
        for name, value in shim_environment(shim, tmp_path, tmp_path / "log", plan).items():
            patch.setenv(name, value)
        with start("train", tiny, f"run.dir={tmp_path}", *QUICK, "checkpoint.every=1") as process:
            (output,) = wait_for_outputs([process])
    assert process.returncode == 0, output
    assert output.count(f"cannot write {metrics}: No space left on device") == 1
    lost = len(losses(uninterrupted)) - len(losses(tmp_path / "run"))
    assert lost == len((tmp_path / "log").read_text().splitlines()) == 6
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
