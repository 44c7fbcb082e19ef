"""Real runs that are killed or stopped under the local and SLURM launchers: same result."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from tests.launch.conftest import Cluster, Write, until
from tests.train.runs import Run, Start, wait_for

pytestmark = pytest.mark.multihost

STEPS = 60
# Two stages, one in each process.
SMALL = ("mesh.cpu_devices=2", "mesh.ici_stage=2", "pipeline.microbatches=2")
TRAIN = (
    *SMALL,
    f"train.steps={STEPS}",
    "checkpoint.every=20",
    "eval.batches=0",
    "log.every=1",
    "log.trackers=[]",
)


def digests(folder: Path) -> list[str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["checkpoints", "show", f"{folder}@{STEPS}"]) == 0
    found = [line for line in shown.getvalue().splitlines() if line.startswith("sha256")]
    assert len(found) == 4
    return found


def steps(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    shown = run("launch", "local", "--processes", 2, tiny, *TRAIN, f"run.dir={folder}")
    assert "ok         mesh: stage 2 = 2 devices in 2 processes" in shown
    assert "2 x cpu in 2 processes" in shown and f"step {STEPS:>5}/{STEPS}" in shown
    return digests(folder / "run")


def children(process: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process IDs of a launcher's child processes, keyed by rank."""
    found = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        (rank,) = (a.partition("=")[2] for a in arguments if a.startswith("runtime.process_id"))
        found[int(rank)] = int(pid)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="requires /proc")
@pytest.mark.faults
def test_result_is_identical_after_process_is_killed(
    start: Start, tiny: Path, tmp_path: Path, uninterrupted: list[str]
):
    process = start("launch", "local", "--processes", 2, tiny, *TRAIN, f"run.dir={tmp_path}")
    wait_for(process, "step 25/")
    os.kill(children(process)[1], signal.SIGKILL)
    said = wait_for(process, "launch: restarting from step ")
    assert said[-2] == "launch: process 1 of 2: killed by SIGKILL\n"
    assert re.search(r"from step (20|40), attempt 2$", said[-1])
    rest, _ = process.communicate(timeout=240)
    assert process.returncode == 0, rest
    assert digests(tmp_path / "run") == uninterrupted
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))
    for rank in (0, 1):
        text = (tmp_path / f"run/logs/process-{rank}.log").read_text()
        headers = re.findall(r"^=== .*$", text, re.MULTILINE)
        for attempt, header in enumerate(headers, 1):
            assert f" attempt {attempt}: maxpipe train " in header
            assert "mesh.cpu_devices=1 " in header and f"process_id={rank}" in header
        assert len(headers) == 2


@pytest.mark.faults
def test_slurm_job_on_two_nodes_resumes_after_time_limit(
    cluster: Cluster, write: Write, tiny: Path, tmp_path: Path, uninterrupted: list[str]
):
    """jax detects the two processes by SLURM's variables; the first job ends before the run."""
    keys = ("launch.topology=cpu:1", "launch.slices=2", f"launch.program={cluster.program}")
    folder = write("slurm", tiny, *keys, *TRAIN, f"run.dir={tmp_path}")
    metrics = tmp_path / "run/metrics.jsonl"
    with cluster.submitted(folder) as job:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, job)
        os.kill(cluster.steps()[0][0], signal.SIGUSR1)
        assert job.wait(timeout=240) == 0, cluster.output(folder)
    output = cluster.output(folder)
    assert len(cluster.steps()) == 2, output
    stopped = re.search(rf"stopped after step (\d+) of {STEPS}", output)
    assert stopped and f"exit code 75; newest checkpoint: step {stopped[1]}\n" in output
    assert "2 x cpu in 2 processes" in output and "exited with code 0;" in output
    assert digests(tmp_path / "run") == uninterrupted
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))
    assert not list(folder.glob("codes-*"))
