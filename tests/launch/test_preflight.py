"""The output and files of a launch contain no secret."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.io.redact import REDACTED
from tests.launch.conftest import QUICKSTART

Capture = pytest.CaptureFixture[str]
CANARY = "canary-5eb1-canary"
URL = ("data.source=jsonl", f"data.path=https://user:{CANARY}@host/x.jsonl")
CLUSTERS = {
    "slurm": ("launch.topology=h100:8", "runtime.platform=cuda"),
    "gcloud": ("launch.topology=v5e:2x4", "runtime.platform=tpu", "launch.zone=us-west4-a"),
    "gke": (
        "launch.topology=v5e:2x4",
        "runtime.platform=tpu",
        "launch.image=maxpipe:tpu",
        "launch.volume=gs://bucket",
    ),
}


def test_no_secret_in_output_of_local_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/bash\n[[ "$*" == *{CANARY}* ]]\n'
    )  # the process receives the real value
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["launch", "local", QUICKSTART, *URL, f"run.dir={tmp_path}/runs"]) == 0
    out, err = capfd.readouterr()
    log = (tmp_path / "runs/quickstart/logs/process-0.log").read_text()
    assert f"data.path = https://{REDACTED}@host/x.jsonl: the run reads" in err
    assert f"data.path=https://{REDACTED}@host/x.jsonl" in log
    assert CANARY not in out + err + log


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("held", [False, True], ids=["by-form", "by-environment"])
def test_no_secret_in_output_of_cluster_launch(
    cluster: str, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(tmp_path)
    given, where = (URL, f"data.path = https://{REDACTED}@host/x.jsonl")
    if held:
        monkeypatch.setenv("MY_TOKEN", CANARY)
        given, where = (f"run.dir=/runs/{CANARY}",), f"run.dir = /runs/{REDACTED}"
    assert main(["launch", cluster, QUICKSTART, *CLUSTERS[cluster], *given]) == 2
    out, err = capsys.readouterr()
    what, rule, action = err.splitlines()
    assert what == f"command line: {where}  [MP-LAUNCH-004]" and not out
    assert "must not contain a secret" in rule and "launch.environment" in action
    for option in ("--write", "--submit"):
        folder = [str(tmp_path / "job")] if option == "--write" else []
        given_too = [*CLUSTERS[cluster], *given, option, *folder]
        assert main(["launch", cluster, QUICKSTART, *given_too]) == 2
    assert CANARY not in "".join(capsys.readouterr()) and not list(tmp_path.iterdir())
