"""Fixtures that run the command in subprocesses, on models that train in seconds."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import environment_of_command
from tests.fork_server import ForkServer

ROOT = Path(__file__).parents[2]

TINY = """
run: {name: run}
model: {num_layers: 4, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
        vocab_size: 259, compute_dtype: float32}
mesh: {cpu_devices: 4, ici_stage: 4}
pipeline: {schedule: 1f1b, microbatches: 4}
train: {steps: 24, batch_size: 8, sequence_length: 16}
optim: {learning_rate: 1.0e-2, warmup_steps: 4}
data: {source: text, path: TEXT, validation_fraction: 0.2}
checkpoint: {every: 4, keep: 10}
eval: {every: 12, batches: 4}
log: {every: 2}
runtime: {platform: cpu, compilation_cache: '', heartbeat_timeout_seconds: 10}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file for a four-stage run over a small folder of text."""
    folder = tmp_path_factory.mktemp("tiny")
    words = random.Random(0)
    (folder / "text").mkdir()
    for number in range(40):
        letters = words.choices("etaoin shrdlu", k=words.randint(20, 400))
        (folder / "text" / f"{number}.txt").write_text("".join(letters))
    text = TINY.replace("TEXT", str(folder / "text"))
    (folder / "tiny.yml").write_text(text)
    return folder / "tiny.yml"


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(*arguments)`: start the command in a subprocess, with stdout and stderr in one pipe.

    With `modules`, Python runs `modules/sitecustomize.py` at startup.
    """

    def popen(*arguments: object, modules: Path | None = None) -> subprocess.Popen[str]:
        first = {"PYTHONPATH": f"{modules}{os.pathsep}{ROOT}"} if modules else {}
        return subprocess.Popen(
            [sys.executable, "-m", "maxpipe", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment_of_command() | first,
        )

    return popen


@pytest.fixture(scope="session")
def run(
    next_server: Callable[[], ForkServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """`run(*arguments, code=0)`: return the output of the command, which must exit with `code`.

    Successive commands have different hash seeds. `file_bytes` limits the size of every file that
    the command writes.
    """
    path = tmp_path_factory.mktemp("output") / "output.txt"

    def run_to_end(*arguments: object, code: int = 0, file_bytes: int = 0) -> str:
        words = [*map(str, arguments)]
        exit_code = next_server().run(
            words, environment_of_command(), path, seconds=240, file_bytes=file_bytes
        )
        output = path.read_text(encoding="utf-8")
        assert exit_code == code, output
        return output

    return run_to_end


@pytest.fixture(scope="session")
def uninterrupted(
    tiny: Path, run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a completed run, with its output in `output.txt`. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = run("train", tiny, f"run.dir={folder}")
    (folder / "run" / "output.txt").write_text(output)
    return folder / "run"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled fault-injection library; see `storage_faults.c`."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("shim") / "storage_faults.so"
    source = Path(__file__).with_name("storage_faults.c")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library
