"""Runs in a store that tensorstore has no driver for: train, kill, resume, and all commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.checkpoint.run_copy import folder_of_records
from maxpipe.cli import main
from maxpipe.io import store_server
from tests.folder_store import STALL, STALLED, FolderStore
from tests.train.test_run_in_s3 import settings
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
RUNS = "folder://bucket/runs"
RUN = f"{RUNS}/a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))


def test_run_that_is_killed_in_a_save_resumes_and_is_used(
    folder_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    train = ["train", *settings(f"run.dir={RUNS}", "checkpoint.best_metric=eval/loss")]
    train += ["eval.every=2", "eval.batches=1"]
    alone = ["train.steps=100", "eval.every=0", "mesh.cpu_devices=1", "mesh.ici_data=1"]
    command = [sys.executable, "-m", "tests.folder_store", *train, *alone]
    environment = os.environ | {STALL: "/checkpoints/4/state/ocdbt.process_0/d/"}
    with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
        try:
            stalled = folder_store / STALLED
            wait_until(lambda: stalled.exists() or process.poll() is not None, 300)
        finally:
            process.kill()
    saved = folder_store / "bucket/runs/a/checkpoints"
    assert (saved / "2/manifest.json").exists() and not (saved / "4/manifest.json").exists()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert main([*train, "train.steps=4"]) == 0
    output = "".join(capsys.readouterr())
    assert "after step 2" in output and "lock.json was left by run a" in output
    assert set(os.listdir(saved)) == {"2", "4"}

    assert main(["checkpoints", "list", RUN]) == main(["checkpoints", "verify", RUN]) == 0
    assert main(["checkpoints", "best", RUN]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(RUN)
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    assert main(["eval", RUN, "data.source=text", f"data.path={text}"]) == 0
    assert main(["export", f"{RUN}@newest", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert main(["goodput", RUN]) == 0
    assert main(["curves", RUN, "--svg", str(tmp_path / "curves.svg")]) == 0
    assert list(Path(folder_of_records(RUNS)).glob("a/tensorboard/*"))
    start = settings("run.name=b", f"checkpoint.restore_from={RUN}", "train.steps=5")
    assert main(["train", *start, f"run.dir={tmp_path}", f"checkpoint.dir={RUNS}"]) == 0
    assert main(["checkpoints", "delete", f"{RUN}@2"]) == 0
    assert os.listdir(saved) == ["4"]


@pytest.mark.parametrize("error", [PermissionError("denied by the store"), OSError("status 500")])
def test_errors_of_the_store_end_the_run(
    folder_store: Path, error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(store_server.CONTEXT["s3_request_retries"], "max_retries", 0)

    def fault(operation: str, path: str) -> None:
        if "/d/" in path and operation == "wb":
            raise error

    monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
    arguments = settings(f"run.dir={RUNS}", "train.steps=1", "checkpoint.retries=0")
    assert main(["train", *arguments]) == 74
    message = capsys.readouterr().err
    assert f"{RUN}/checkpoints/1: cannot be written" in message and str(error) in message
    assert "Traceback" not in message
    assert store_server._server().token not in message
