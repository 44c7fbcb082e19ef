"""Progress messages of commands in a log file."""

from __future__ import annotations

import re
import time

import pytest

from maxpipe.telemetry import console


def test_log_shows_phase_and_elapsed_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "_PHASE_SECONDS", 0.05)
    with console.PhaseProgress("compile") as phases:
        for phase in ("tracing", "compiling"):
            phases.begin(phase)
            time.sleep(0.3)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and all(re.fullmatch(r"compile: \w+, [0-9]+ s", line) for line in lines)
    assert {line.split(",")[0] for line in lines} == {"compile: tracing", "compile: compiling"}
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_short_phase_prints_nothing(capsys: pytest.CaptureFixture[str]):
    with console.PhaseProgress("compile"):
        pass
    assert capsys.readouterr() == ("", "")
