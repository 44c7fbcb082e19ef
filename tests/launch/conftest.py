"""Fixtures: the small run of tests/train, job files, and a fake SLURM cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maxpipe.cli import main
from tests.conftest import CACHE, FAST_COMPILE
from tests.train.conftest import run, start, tiny  # noqa: F401  fixtures

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.yml")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(cluster, *arguments)`: write the files of a job, and return their folder."""

    def write_job(cluster: str, *arguments: object) -> Path:
        folder = tmp_path / "job"
        given = [str(argument) for argument in arguments]
        if not any(argument.endswith(".yml") for argument in given):
            given.insert(0, QUICKSTART)
        assert main(["launch", cluster, *given, "--write", str(folder)]) == 0
        return folder

    return write_job


class Cluster:
    """A fake SLURM cluster, with the tools of `slurm_cluster.py` on the PATH."""

    def __init__(self, folder: Path):
        self.state = folder / "slurm"
        self.state.mkdir()
        tools = folder / "bin"
        tools.mkdir()
        for tool in ("sbatch", "srun", "scontrol"):
            self._script(
                tools / tool,
                f'exec {sys.executable} {Path(__file__).parent / "slurm_cluster.py"} {tool} "$@"',
            )
        self.program = tools / "train"
        self._script(self.program, f'exec {sys.executable} -m maxpipe "$@"')
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SLURM_"))}
        self.environment = kept | FAST_COMPILE
        self.environment |= {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "FAKE_SLURM": str(self.state),
            "FAKE_JOB_ID": str(self._job_id()),
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(CACHE),
        }

    @staticmethod
    def _script(path: Path, command: str) -> None:
        path.write_text(f"#!/bin/bash\n{command}\n")
        path.chmod(0o755)

    @staticmethod
    def _job_id() -> int:
        """Return a job ID from which jax derives a free port."""
        for job in range(os.getpid(), os.getpid() + 100):
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", job % 2**12 + 65536 - 2**12))
                except OSError:
                    continue
                return job
        raise AssertionError("no port is free")

    @contextmanager
    def submitted(self, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sbatch", folder / "job.sh"], env=self.environment) as job:
            try:
                yield job
            finally:
                job.kill()

    def steps(self) -> list[list[int]]:
        """Return the process IDs of srun and its tasks, for every started job step."""
        file = self.state / "started"
        lines = file.read_text().splitlines() if file.exists() else []
        return [[int(pid) for pid in line.split()] for line in lines]

    def output(self, folder: Path) -> str:
        (log,) = folder.glob("slurm-*.log")
        return log.read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", made.environment["PATH"])
    return made


def until(ready: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
