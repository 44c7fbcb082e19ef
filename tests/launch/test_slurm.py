"""SLURM jobs: contents of the scripts, and their behavior on a fake cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.telemetry.writers import EventLog
from tests.launch.conftest import QUICKSTART, Cluster, Write, until

Capture = pytest.CaptureFixture[str]
GPUS = ("launch.topology=h100:8", "runtime.platform=cuda", "mesh.ici_fsdp=-1")


def directives(folder: Path) -> dict[str, str]:
    text = (folder / "job.sh").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


# --- contents of the scripts ----------------------------------------------------------------------


def test_one_process_per_gpu(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    keys = ("launch.slices=4", "launch.queue=gpu", "launch.time_limit_minutes=90")
    folder = write("slurm", *GPUS, *keys, "launch.grace_seconds=60", "train.batch_size=64")
    assert directives(folder) == {
        "job-name": "quickstart",
        "nodes": "4",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "partition": "gpu",
        "time": "90",
        "chdir": str(tmp_path),
        "signal": "TERM@60",
        "requeue": "",
        "open-mode": "append",
        "output": f"{folder}/slurm-%j.log",
    }
    config = load([str(folder / "config.yml")]).config
    assert config.runtime.num_processes == 0  # jax detects the processes
    assert (config.mesh.ici_stage, config.mesh.ici_fsdp) == (4, 8)  # resolved
    assert f"run={tmp_path}/runs/quickstart\n" in (folder / "job.sh").read_text()


def test_relative_workdir_is_resolved_against_current_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder = write("slurm", *GPUS, "launch.workdir=jobs")
    assert directives(folder)["chdir"] == f"{tmp_path}/jobs"
    assert f"run={tmp_path}/jobs/runs/quickstart\n" in (folder / "job.sh").read_text()


def test_cpu_nodes_run_one_process_with_all_devices(write: Write):
    folder = write("slurm", "launch.topology=cpu:4", "launch.slices=2")
    found = directives(folder)
    assert (found["nodes"], found["ntasks-per-node"]) == ("2", "1") and "gpus-per-node" not in found
    assert load([str(folder / "config.yml")]).config.mesh.cpu_devices == 4


def test_scripts_are_executable_and_pass_shellcheck(write: Write):
    folder = write("slurm", *GPUS, "launch.environment=[MY_TOKEN]", "run.dir=it's a folder")
    for name in ("job.sh", "task.sh"):
        assert os.access(folder / name, os.X_OK)
        checked = subprocess.run(
            [Path(sys.executable).parent / "shellcheck", folder / name],
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stdout


def test_environment_variable_values_are_not_written(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.setenv("MY_TOKEN", "canary-5eb1")
    folder = write("slurm", *GPUS, "launch.environment=[MY_TOKEN]")
    assert main(["launch", "slurm", QUICKSTART, *GPUS, "launch.environment=[MY_TOKEN]"]) == 0
    texts = [path.read_text() for path in folder.iterdir()] + list(capsys.readouterr())
    assert not any("canary" in text for text in texts)
    assert ': "${MY_TOKEN:?' in (folder / "job.sh").read_text()


# --- behavior of the jobs -------------------------------------------------------------------------


def behave(cluster: Cluster, text: str) -> None:
    """Make tasks run this script instead of maxpipe; `$RUN` is the run folder."""
    cluster.program.write_text(f"#!/bin/bash\n{text}\n")


@pytest.fixture
def job(write: Write, cluster: Cluster, tmp_path: Path) -> Path:
    keys = ("launch.topology=cpu:4", "launch.slices=2", f"launch.program={cluster.program}")
    cluster.environment["RUN"] = str(tmp_path / "quickstart")
    return write("slurm", *keys, "launch.restarts=1", f"run.dir={tmp_path}")


@pytest.mark.parametrize(
    ("text", "code", "steps"),
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),
        ("exit 70", 70, 1),
        ("exit 74", 74, 1),
        ("exit 1", 1, 1),
        ("exit 71", 71, 2),
        ("kill -KILL $$", 137, 2),
        # The first failure decides, although srun reports the highest code.
        ("if [ $SLURM_PROCID = 1 ]; then exit 2; fi; sleep 1; exit 134", 2, 1),
        ("if [ $SLURM_PROCID = 1 ]; then kill -KILL $$; fi; sleep 1; exit 74", 137, 2),
        # With progress, a newer checkpoint each time, five consecutive kills are allowed.
        (
            "n=$(ls $RUN/checkpoints | wc -l); [ $n -ge 10 ] && exit 0\n"
            "mkdir -p $RUN/checkpoints/{$n-$SLURM_PROCID.tmp,$((8 + n))}\nsleep 0.5\n"
            "kill -KILL $$",
            0,
            -1,
        ),
        # A preempted job that saved is requeued, and does not count as a failure.
        ("[ $SLURM_RESTART_COUNT -ge 3 ] && exit 0; exit 75", 0, 4),
        # The job is stopped before maxpipe handles the signal.
        ("[ $SLURM_RESTART_COUNT -ge 3 ] && exit 0; kill -TERM $$", 0, 4),
    ],
)
def test_exit_code_determines_job_restarts(
    job: Path, cluster: Cluster, tmp_path: Path, text: str, code: int, steps: int
):
    (tmp_path / "quickstart/checkpoints").mkdir(parents=True)
    behave(cluster, text)
    with cluster.submitted(job) as submitted:
        assert submitted.wait(timeout=60) == code, cluster.output(job)
    assert len(cluster.steps()) == steps or (steps == -1 and len(cluster.steps()) > 3)


@pytest.mark.parametrize(
    "elsewhere",
    [
        ["checkpoint.dir=gs://somewhere/runs"],
        ["checkpoint.local_dir=/tmp/checkpoints", "checkpoint.local_every=5"],
    ],
)
def test_progress_in_other_checkpoint_folder_is_read_from_events(
    write: Write, cluster: Cluster, tmp_path: Path, elsewhere: list[str]
):
    """Three kills follow newer checkpoints; then two do not, of which one is allowed."""
    keys = ["launch.topology=cpu:4", "launch.slices=2", f"launch.program={cluster.program}"]
    cluster.environment["RUN"] = str(tmp_path / "quickstart")
    job = write("slurm", *keys, *elsewhere, "launch.restarts=1", f"run.dir={tmp_path}")
    log = EventLog(tmp_path)
    log.write("start", step=77, devices=8)
    log.write("checkpoint", step=77, bytes=9)
    start, saved = (tmp_path / "events.jsonl").read_text().splitlines()
    behave(
        cluster,
        "[ $SLURM_PROCID = 0 ] || exec sleep 30\n"
        "mkdir -p $RUN; touch $RUN/events.jsonl; n=$(grep -c checkpoint $RUN/events.jsonl)\n"
        f"echo '{start}' | sed 's/: 77/: '$n/ >>$RUN/events.jsonl\n"
        f"[ $n -ge 3 ] || echo '{saved}' | sed 's/: 77/: '$((n + 1))/ >>$RUN/events.jsonl\n"
        "kill -KILL $$",
    )
    with cluster.submitted(job) as submitted:
        assert submitted.wait(timeout=60) == 137, cluster.output(job)
    assert len(cluster.steps()) == 5
    assert "newest checkpoint: step 3" in cluster.output(job)


@pytest.mark.parametrize(("text", "code"), [("trap 'exit 75' TERM", 75), ("true", 143)])
def test_cancelled_job_is_not_requeued(
    job: Path, cluster: Cluster, tmp_path: Path, text: str, code: int
):
    """Cancellation also signals the script; the time limit does not."""
    behave(cluster, f"{text}; touch {tmp_path}/ready-$SLURM_PROCID; sleep 60 & wait")
    with cluster.submitted(job) as submitted:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, submitted)
        step = cluster.steps()[0][0]
        script = int(Path(f"/proc/{step}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(script, signal.SIGTERM)
        os.kill(step, signal.SIGUSR1)
        assert submitted.wait(timeout=60) == code
    assert len(cluster.steps()) == 1


def test_tasks_share_private_secret_that_is_removed_after_job(
    job: Path, cluster: Cluster, tmp_path: Path
):
    behave(
        cluster,
        f"stat -c '%a %s' \"$MAXPIPE_RUN_SECRET_FILE\" >{tmp_path}/mode-$SLURM_PROCID\n"
        f'cat "$MAXPIPE_RUN_SECRET_FILE" >{tmp_path}/told-$SLURM_PROCID',
    )
    with cluster.submitted(job) as submitted:
        assert submitted.wait(timeout=60) == 0, cluster.output(job)
    first, second = (path.read_text() for path in tmp_path.glob("told-*"))
    assert re.fullmatch("[0-9a-f]{64}", first) and first == second
    assert {path.read_text() for path in tmp_path.glob("mode-*")} == {"600 64\n"}
    assert not list(job.glob("secret-*"))
    assert not any(first in path.read_text() for path in job.iterdir())


def test_submit_calls_sbatch(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    behave(cluster, "exit 74")
    keys = ("launch.topology=cpu:4", "launch.slices=2", f"launch.program={cluster.program}")
    assert main(["launch", "slurm", QUICKSTART, *keys, "--submit"]) == 74
    folder = tmp_path / "runs/quickstart/launch"
    assert {path.name for path in folder.glob("*.*")} >= {"job.sh", "task.sh", "config.yml"}
    assert f"wrote job.sh, task.sh, config.yml to {folder}" in capfd.readouterr().err


def test_launch_prints_the_next_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "runs/quickstart/launch"
    arguments = ["launch", "slurm", QUICKSTART, *GPUS]
    assert main(arguments) == 0
    hint = f"not submitted; add --submit to write these files to {folder} and run"
    assert hint in capfd.readouterr().err and not folder.exists()
    assert main([*arguments, "--write", "job"]) == 0
    assert f"not submitted; submit with: sbatch {tmp_path}/job/job.sh" in capfd.readouterr().err
    assert main([*arguments, "--submit"]) == 0
    hint = f"submitted; follow the run: tail -F {folder}/slurm-*.log"
    assert capfd.readouterr().err.splitlines()[-1] == hint


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ("launch.topology=", "launch.topology = ''", "must name the device type"),
        ("launch.topology=h100", "launch.topology = h100", "Write h100:8."),
        ("launch.topology=v9:8", "launch.topology = v9:8", "must name a device type"),
        (
            "launch.topology=v5e:2x4 runtime.platform=auto",
            "launch.topology = v5e:2x4",
            "maxpipe launch gcloud",
        ),
        ("launch.topology=h100:4", "mesh = stage 4 x fsdp 2", "the mesh has 8 in 1 slice"),
        ("launch.topology=gb200:6", "launch.topology = gb200:6", "each NVIDIA GB200 host has 4"),
        ("runtime.platform=cpu", "runtime.platform = cpu", "must be cuda, the platform of h100:8"),
        ("launch.queue=-x", "launch.queue = -x", "must be a name consisting of letters"),
        ("launch.queue=$(id)", "launch.queue = $(id)", "must be a name consisting of letters"),
        ("launch.workdir=a;b", "launch.workdir = a;b", "must be a path consisting of letters"),
        ("launch.program=", "launch.program = ''", "must be a path consisting of letters"),
        ("launch.environment=[A=b]", "launch.environment = [A=<redacted>]", "without values"),
        ("--write /tmp/a%b", "command line: --write = /tmp/a%b", "Name another folder"),
        ("--submit --dry-run", "command line: maxpipe launch slurm", "not allowed with"),
    ],
)
def test_slurm_rejects_invalid_arguments(arguments: str, where: str, says: str, capsys: Capture):
    given = ("launch.topology=h100:8", "runtime.platform=cuda", *arguments.split())
    assert main(["launch", "slurm", QUICKSTART, *given]) == 2
    out, err = capsys.readouterr()
    assert where in err and says in err and not out
    assert len(err.splitlines()) == 3


def test_missing_sbatch_is_reported(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("sbatch") is None
    assert main(["launch", "slurm", QUICKSTART, *GPUS, "--submit"]) == 2
    err = capsys.readouterr().err
    assert "requires sbatch, which is not on the PATH" in err
    assert f"Run `sbatch {tmp_path}/runs/quickstart/launch/job.sh` on a machine with sbatch" in err
