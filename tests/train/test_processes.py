"""Runs of two processes with four devices each: losses, files and exit codes."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.distributed import protocol
from tests.huggingface import maker
from tests.train.runs import (
    SAME,
    Run,
    Start,
    losses,
    saved_digest,
    saved_steps,
    start_pair,
    wait_for,
    wait_for_outputs,
)

pytestmark = pytest.mark.multihost

STEPS = 12
# The stage axis or the fsdp axis spans both processes.
ACROSS = {
    "stage": ("mesh.ici_stage=4", "mesh.ici_fsdp=2"),
    "fsdp": ("mesh.ici_stage=4", "mesh.dcn_fsdp=2"),
}
# Only process 0 writes the compilation cache, so process 1 always compiles.
NO_EVALUATION = "eval.batches=0"
HEARTBEAT = "runtime.heartbeat_timeout_seconds=5"


@pytest.fixture(scope="module")
def arguments(tiny: Path) -> tuple[object, ...]:
    return (tiny, f"train.steps={STEPS}", "log.every=1", "eval.every=6", "checkpoint.every=5")


@pytest.fixture(scope="module")
def alone(
    run: Run, arguments: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in one process with eight devices and the reduction order of several processes."""
    folder = tmp_path_factory.mktemp("alone")
    own = (f"run.dir={folder}", "mesh.cpu_devices=8", "runtime.cpu_collectives=gloo")
    run("train", *arguments, *ACROSS["stage"], *own)
    return folder / "run"


@pytest.fixture(scope="module")
def together(
    start: Start, arguments: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in two processes, with outputs in `0.txt` and `1.txt`. Read-only for tests."""
    folder = tmp_path_factory.mktemp("together")
    with start_pair(start, *arguments, *ACROSS["stage"], f"run.dir={folder}") as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank, output in enumerate(outputs):
        (folder / f"{rank}.txt").write_text(output)
    return folder / "run"


@pytest.mark.fault("D2")
def test_two_processes_match_one_process(together: Path, alone: Path):
    assert list(losses(together)) == list(range(1, STEPS + 1))
    assert losses(together) == losses(alone)
    assert losses(together, "eval/loss") == losses(alone, "eval/loss")
    assert saved_digest(together) == saved_digest(alone)


def test_only_process_0_prints_and_writes_files(together: Path):
    first, second = ((together.parent / f"{rank}.txt").read_text() for rank in (0, 1))
    assert second == ""
    assert "8 x cpu in 2 processes" in first
    assert "Gloo" not in first and "warning" not in first and "WARNING" not in first
    names = {path.name for path in together.iterdir()}
    files = {"config.yml", "metrics.jsonl", "events.jsonl", "forecast.json"}
    assert names == {*files, "tensorboard", "checkpoints"}
    assert len(list((together / "tensorboard").iterdir())) == 1


@pytest.mark.long
def test_processes_without_shared_run_folder_fail(
    start: Start, arguments: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a shared file system, the checkpoint shards of the second host would be lost."""
    monkeypatch.setenv(
        protocol.VARIABLE, protocol.generate_secret()
    )  # the processes do not share a run folder
    other = [f"run.dir={tmp_path / 'other'}"]
    every = (*arguments, "mesh.cpu_devices=2", f"run.dir={tmp_path / 'one'}")
    with start_pair(start, *every, second=other) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert "process 1 on " in outputs[0] and "does not see the folder of process 0" in outputs[0]


@pytest.mark.faults
def test_fsdp_axis_across_processes_matches_one_process(
    start: Start, arguments: tuple[object, ...], alone: Path, tmp_path: Path
):
    every = (*arguments, *ACROSS["fsdp"], f"run.dir={tmp_path}", NO_EVALUATION)
    with start_pair(start, *every) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=SAME)


@pytest.mark.long
@pytest.mark.fault("D7")
def test_one_process_restores_checkpoint_of_two_processes(
    run: Run, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    before = saved_digest(together)
    restore = f"checkpoint.restore_from={together}"
    run("train", *arguments, f"run.dir={tmp_path}", restore, NO_EVALUATION)
    assert saved_digest(tmp_path / "run") == before


@pytest.mark.faults
def test_two_processes_start_from_hugging_face_folder(
    run: Run, start: Start, tmp_path: Path
) -> None:
    """Each process reads its shard of every parameter."""
    maker.write(tmp_path / "hf", *maker.llama("F32"), files=2)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    every = (tmp_path / "ckpt" / "config.yml", f"checkpoint.restore_from=hf:{tmp_path / 'hf'}")
    every += ("data.source=synthetic", "tokenizer.kind=bytes", "tokenizer.path=", "train.steps=3")
    every += ("train.batch_size=4", "train.sequence_length=16", "pipeline.microbatches=2")
    every += ("log.every=1", "eval.every=0", "optim.warmup_steps=0", "runtime.platform=cpu")
    every += ("mesh.cpu_devices=1", "run.name=run", "model.compute_dtype=float32")
    with start_pair(start, *every, "mesh.ici_fsdp=2", f"run.dir={tmp_path / 'two'}") as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "with the weights of" in outputs[0]
    run("train", *every, f"run.dir={tmp_path / 'one'}")
    one, two = (losses(tmp_path / name / "run") for name in ("one", "two"))
    assert list(one) == [1, 2, 3] and two == pytest.approx(one, rel=SAME)


@pytest.mark.fault("F7")
@pytest.mark.faults
def test_signal_to_one_process_stops_both_at_the_same_step(
    start: Start, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    """Stop during training, stop the resumed run during compilation, then train to the end."""
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", NO_EVALUATION)
    every += ("checkpoint.every=0",)
    for moment, signalled in (("step 3/", 1), ("compiling train step ...", 0)):
        with start_pair(start, *every) as processes:
            wait_for(processes[0], moment)
            processes[signalled].send_signal(signal.SIGTERM)
            outputs = wait_for_outputs(processes)
        assert [process.returncode for process in processes] == [75, 75], outputs
        step = saved_steps(tmp_path / "run")[-1]
        assert step < STEPS
        message = (
            f"stopped after step {step} of {STEPS}" if moment == "step 3/" else "stop requested"
        )
        for output in outputs:
            assert message in output and "Traceback" not in output
    with start_pair(start, *every) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(together)
    assert saved_digest(tmp_path / "run") == saved_digest(together)


@pytest.mark.long
@pytest.mark.fault("F10")
def test_failure_of_one_process_stops_both(
    start: Start, arguments: tuple[object, ...], tmp_path: Path
):
    """Neither process waits longer than the heartbeat timeout."""
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", HEARTBEAT, NO_EVALUATION)
    begin = time.monotonic()
    with start_pair(start, *every, second=["data.path=/nowhere"]) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    for output in outputs:
        assert "data.path = /nowhere" in output and "Traceback" not in output
    assert re.search(r"^process 1 \(.* failed first:$", outputs[0], re.M)
    assert time.monotonic() - begin < 60


@pytest.mark.fault("F3")
@pytest.mark.faults
def test_kill_of_one_process_stops_the_other_and_run_resumes(
    start: Start, arguments: tuple[object, ...], together: Path, tmp_path: Path
):
    every = (*arguments, *ACROSS["stage"], f"run.dir={tmp_path}", HEARTBEAT, NO_EVALUATION)
    with start_pair(start, *every) as processes:
        wait_for(processes[0], "step 7/")
        processes[1].kill()
        begin = time.monotonic()
        outputs = wait_for_outputs(processes)
        assert time.monotonic() - begin < 60
    assert processes[0].returncode == 71, outputs
    assert re.search(r"^process 1 \(.*\) disconnected$", outputs[0], re.M)
    with start_pair(start, *every) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(together)
    assert saved_digest(tmp_path / "run") == saved_digest(together)
