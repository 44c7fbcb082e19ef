"""Fake SLURM cluster on one machine: `sbatch`, `srun` and `scontrol` as seen by jobs.

The first argument is the name of the tool. `sbatch` runs the job immediately, and again while it
requests to be requeued. All nodes are this machine; each task is a separate process group.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

KILL_WAIT_SECONDS = 20.0
STATE = Path(os.environ["FAKE_SLURM"])
"""Folder with the file `requeued`, the IDs of jobs to run again, and the file `started`, with one
line per job step: the process IDs of srun and its tasks."""


def sbatch(script: Path) -> int:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.MULTILINE))
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    job = os.environ["FAKE_JOB_ID"]
    environment = os.environ | {
        "SLURM_JOB_ID": job,
        "SLURM_NNODES": options["nodes"],
        "SLURM_NTASKS": str(tasks),
    }
    requeued = STATE / "requeued"
    for restarts in itertools.count():
        environment["SLURM_RESTART_COUNT"] = str(restarts)
        requeued.unlink(missing_ok=True)
        with open(options["output"].replace("%j", job), "ab") as output:
            ran = subprocess.run(
                ["bash", str(script)],
                cwd=options["chdir"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if not requeued.exists() or requeued.read_text().split() != [job]:
            return ran.returncode
    raise AssertionError


def scontrol(action: str, job: str) -> int:
    assert action == "requeue"
    (STATE / "requeued").write_text(job)
    return 0


def srun(*arguments: str) -> int:
    """Start the tasks. SIGUSR1 stands for the time limit, and is forwarded as SIGTERM."""
    *options, program = arguments
    assert options == ["--cpu-bind=none", "--kill-on-bad-exit=1"]
    tasks = [
        subprocess.Popen([program], env=os.environ | task(rank), start_new_session=True)
        for rank in range(int(os.environ["SLURM_NTASKS"]))
    ]
    signal.signal(signal.SIGUSR1, lambda *_: send(tasks, signal.SIGTERM))
    with (STATE / "started").open("a") as file:
        file.write(
            " ".join(str(pid) for pid in (os.getpid(), *(each.pid for each in tasks))) + "\n"
        )
    kill_at = float("inf")
    while any(each.poll() is None for each in tasks):
        if kill_at == float("inf") and any(each.returncode for each in tasks):
            send(tasks, signal.SIGTERM)
            kill_at = time.monotonic() + KILL_WAIT_SECONDS
        if time.monotonic() > kill_at:
            send(tasks, signal.SIGKILL)
        time.sleep(0.05)
    return max(each.returncode if each.returncode >= 0 else 128 - each.returncode for each in tasks)


def task(rank: int) -> dict[str, str]:
    """Return the environment variables of a task; each node has one task."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": os.environ["SLURM_NNODES"],
    }


def send(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to all processes of each task, like slurmstepd."""
    for each in tasks:
        if each.poll() is None:
            os.killpg(each.pid, number)


if __name__ == "__main__":
    tool, *rest = sys.argv[1:]
    if tool == "sbatch":
        sys.exit(sbatch(Path(*rest)))
    sys.exit({"srun": srun, "scontrol": scontrol}[tool](*rest))
