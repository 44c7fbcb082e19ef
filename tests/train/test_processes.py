"""One run in two processes of four devices each: the same curve, files, and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from maxpipe.checkpoint.manager import open_run
from maxpipe.checkpoint.trees import digest
from maxpipe.hub import free_port

Run = Callable[..., str]
Start = Callable[..., subprocess.Popen[str]]

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

SAME = 1e-5  # float32, relative
STEPS = 12
# Two processes share each stage axis, or each fsdp axis.
ACROSS = {
    "stage": ("mesh.ici_stage=4", "mesh.ici_fsdp=2"),
    "fsdp": ("mesh.ici_stage=4", "mesh.dcn_fsdp=2"),
}
# Process 1 finds no compiled program in the cache, which process 0 alone writes.
NO_EVALUATION = "eval.batches=0"
HEARTBEAT = "runtime.heartbeat_timeout_seconds=5"


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["train/loss"] for line in lines}


def evaluations(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


def saved_digest(folder: Path) -> str:
    with open_run(folder) as checkpoints:
        found = checkpoints.restore(STEPS)
        return digest(found.state) + json.dumps(found.facts.data, sort_keys=True)


def newest(folder: Path) -> int:
    with open_run(folder) as checkpoints:
        return checkpoints.steps()[-1]


@contextmanager
def together_at(
    start: Start, *arguments: object, count: int, second: Sequence[object] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """All processes of a run; `second` are overrides of process 1. None outlives the block."""
    address = f"127.0.0.1:{free_port()}"
    shared = (*arguments, f"runtime.num_processes={count}", f"runtime.coordinator={address}")
    processes = [
        start("train", *shared, f"runtime.process_id={rank}", *(second if rank == 1 else ()))
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


pair = partial(together_at, count=2)


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each process has printed when it is over."""
    return [process.communicate(timeout=240)[0] for process in processes]


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if " ".join(line.split()).startswith(beginning):
            return
    raise AssertionError(f"{beginning!r} was never printed")


@pytest.fixture(scope="module")
def arguments(tiny: Path) -> tuple[object, ...]:
    return (tiny, f"train.steps={STEPS}", "log.every=1", "eval.every=6", "checkpoint.every=5")


@pytest.fixture(scope="module")
def alone(
    run: Run, arguments: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in one process with eight devices, which add up as those of several do."""
    folder = tmp_path_factory.mktemp("alone")
    own = (f"run.dir={folder}", "mesh.cpu_devices=8", "runtime.cpu_collectives=gloo")
    run("train", *arguments, *ACROSS["stage"], *own)
    return folder / "run"


@pytest.fixture(scope="module")
def together(
    start: Start, arguments: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in two processes; their outputs are in `0.txt` and `1.txt`. Not to be changed."""
    folder = tmp_path_factory.mktemp("together")
    with pair(start, *arguments, *ACROSS["stage"], f"run.dir={folder}") as processes:
        outputs = ends(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank, output in enumerate(outputs):
        (folder / f"{rank}.txt").write_text(output)
    return folder / "run"


@pytest.mark.fault("D2")
def test_two_processes_train_like_one(together: Path, alone: Path):
    assert list(losses(together)) == list(range(1, STEPS + 1))
    assert losses(together) == losses(alone)
    assert evaluations(together) == evaluations(alone)
    assert saved_digest(together) == saved_digest(alone)


def test_only_the_first_process_speaks_and_only_in_our_lines(together: Path):
    first, second = ((together.parent / f"{rank}.txt").read_text() for rank in (0, 1))
    assert second == ""
    assert "8 x cpu in 2 process(es)" in first
    assert "Gloo" not in first and "warning" not in first and "WARNING" not in first
    names = {path.name for path in together.iterdir()}
    assert names == {"config.yml", "metrics.jsonl", "events.jsonl", "tensorboard", "checkpoints"}
    assert len(list((together / "tensorboard").iterdir())) == 1


@pytest.mark.faults
def test_fsdp_may_lie_across_processes(
    start: Start, arguments: tuple[object, ...], alone: Path, tmp_path: Path
):
    every = (*arguments, *ACROSS["fsdp"], f"run.dir={tmp_path}", NO_EVALUATION)
    with pair(start, *every) as processes:
        outputs = ends(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=SAME)


@pytest.mark.fault("D7")
def test_one_process_resumes_what_two_have_saved(
    run: Run, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    before = saved_digest(together)
    restore = f"checkpoint.restore_from={together}"
    run("train", *arguments, f"run.dir={tmp_path}", restore, NO_EVALUATION)
    assert saved_digest(tmp_path / "run") == before


@pytest.mark.fault("F7")
@pytest.mark.faults
def test_signal_to_one_process_stops_both_at_the_same_step(
    start: Start, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    """In the middle, then while the resumed run compiles, then on to the end."""
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", NO_EVALUATION)
    every += ("checkpoint.every=0",)
    for moment, signalled in (("step 3/", 1), ("compiling train step ...", 0)):
        with pair(start, *every) as processes:
            wait_for(processes[0], moment)
            processes[signalled].send_signal(signal.SIGTERM)
            outputs = ends(processes)
        assert [process.returncode for process in processes] == [75, 75], outputs
        step = newest(tmp_path / "run")
        assert step < STEPS
        told = f"stopped after step {step} of {STEPS}" if moment == "step 3/" else "asked to stop"
        for output in outputs:
            assert told in output and "Traceback" not in output
    with pair(start, *every) as processes:
        outputs = ends(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(together)
    assert saved_digest(tmp_path / "run") == saved_digest(together)


@pytest.mark.fault("F10")
def test_process_that_fails_alone_ends_both(
    start: Start, arguments: tuple[object, ...], tmp_path: Path
):
    """Neither waits for the other for longer than the heartbeat allows."""
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", HEARTBEAT, NO_EVALUATION)
    begin = time.monotonic()
    with pair(start, *every, second=["data.path=/nowhere"]) as processes:
        outputs = ends(processes)
    assert processes[1].returncode == 2, outputs
    assert "data.path = /nowhere" in outputs[1] and "Traceback" not in outputs[1]
    assert processes[0].returncode != 0
    assert time.monotonic() - begin < 60


@pytest.mark.fault("F3")
@pytest.mark.faults
def test_killed_process_ends_the_other_and_the_run_resumes(
    start: Start, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", HEARTBEAT, NO_EVALUATION)
    with pair(start, *every) as processes:
        wait_for(processes[0], "step 7/")
        processes[1].kill()
        begin = time.monotonic()
        ends(processes)
        assert time.monotonic() - begin < 60
    assert processes[0].returncode != 0
    with pair(start, *every) as processes:
        outputs = ends(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(together)
    assert saved_digest(tmp_path / "run") == saved_digest(together)
