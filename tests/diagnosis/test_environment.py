"""Contents of bug reports, and probe processes with a time limit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.diagnosis import environment

Capture = pytest.CaptureFixture[str]
TOKEN = "hf_" + "aB3dE5gH7jK9" * 3


def spec(**runtime: Any) -> dict[str, Any]:
    runtime = {"platform": "cpu", "compilation_cache": ""} | runtime
    return {"runtime": runtime, "mesh": {}, "folder": "."}


def test_report_contains_versions_machine_and_variables(monkeypatch: pytest.MonkeyPatch):
    import jax

    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/{TOKEN}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TPU_API_KEY", "secret word")
    monkeypatch.setenv("UNRELATED", "value")
    monkeypatch.setattr("sys.argv", ["maxpipe", "env", f"--x={TOKEN}"])
    found = json.loads(json.dumps(environment.report()))
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"].keys() >= {"python", "maxpipe", *environment.PACKAGES}
    assert found["machine"]["cpus"] == os.cpu_count()
    assert found["machine"]["memory_bytes"] > 1 << 28
    variables = found["variables"]
    assert variables["XLA_FLAGS"] == "--xla_dump_to=/<redacted>"
    assert variables["SLURM_JOB_ID"] == "7" and variables["TPU_API_KEY"] == "<redacted>"
    assert "UNRELATED" not in variables
    assert found["command_line"] == ["env", "--x=<redacted>"]


def test_commit_is_reported_only_in_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = environment.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setattr(environment, "_PROJECT", tmp_path / "pyproject.toml")
    assert environment.commit() is None


def test_requirements_match_project_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    here = set(environment.requirements())
    assert ("jax", "0.10.2", True) in here and ("tokenizers", "0.21", False) in here
    assert ("python", "3.11", True) in here
    assert not [name for name, _, _ in here if name == "ruff"]
    # Without a checkout, requirements are read from the metadata of the installed package.
    monkeypatch.setattr(environment, "_PROJECT", tmp_path / "none")
    assert {name for name, _, _ in environment.requirements()} >= {"jax", "python", "numpy"}


def test_hanging_process_is_terminated():
    begin = time.monotonic()
    alone = spec(num_processes=2, coordinator="127.0.0.1:9", process_id=1)
    (records,) = environment.probe([alone], 3.0)
    assert time.monotonic() - begin < 10
    assert records[-1]["status"] == "FAILED"
    assert records[-1]["text"] == "no result within 3 s."


def test_failed_process_reports_cause():
    (records,) = environment.probe([spec(platform="no such")], 60.0)
    assert records[-1]["status"] == "FAILED" and "'no such'" in records[-1]["text"]
    (records,) = environment.probe([{"runtime": {TOKEN: 1}, "mesh": {}}], 60.0)
    text = records[-1]["text"]
    assert text.startswith("the process exited with code 1: ")
    assert "unexpected keyword argument '<redacted>'" in text and TOKEN not in text


def test_env_prints_lines_and_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("maxpipe.diagnosis.doctor.count_device_kinds", lambda: {"TPU v5": 4})
    assert main(["env"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["devices"] == "4 x TPU v5"
    assert {"python", "jax", "libtpu", "cpus", "memory_bytes", "commit"} <= lines.keys()
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == {"TPU v5": 4}
