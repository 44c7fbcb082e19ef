"""The comparison of a forecast with a run, and the calibration by a run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from maxpipe import hardware
from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.profiles import run_comparison

_KEYS = (
    "profile.at=[3]",
    "profile.steps=2",
    "train.steps=6",
    "log.every=1",
    "eval.every=0",
    "eval.batches=0",
    "run.name=first",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "quickstart", f"run.dir={folder}", *_KEYS]) == 0
    return folder / "first"


def test_exact_terms_equal_the_prediction(run: Path) -> None:
    found = run_comparison.compare_run(run)
    by_name = {term.name: term for term in found.memory}
    for name in ("parameters and optimizer state", "gradient accumulators", "send buffers"):
        ratio = by_name[name].ratio
        assert ratio is not None and ratio == pytest.approx(1, abs=1e-3), name
    total = by_name["total of the compiled step"].ratio
    assert total is not None and 0.9 < total < 1.1
    assert found.num_records == 5 and found.step.measured
    assert sum(term.predicted or 0 for term in found.times) == pytest.approx(found.step.predicted)


def test_profiled_parts_add_up_to_the_step(run: Path) -> None:
    measured = {term.name: term.measured for term in run_comparison.compare_run(run).times}
    assert measured["layers"] and measured["head"] and measured["update"]
    report = json.loads((run / "profiles" / "step_000003" / "report.json").read_text())
    total = sum(seconds or 0 for seconds in measured.values())
    # Operations of one device may overlap, and times between operations are idle.
    assert total == pytest.approx(report["step_seconds"], rel=0.1)


def test_parts_of_a_device_profile() -> None:
    report = {
        "by_place": [
            {"name": "attention", "seconds": 2.0},
            {"name": "mlp", "seconds": 3.0},
            {"name": "head", "seconds": 0.5},
            {"name": "all-gather over fsdp", "seconds": 0.25},
            {"name": "all-reduce over stage", "seconds": 0.125},
            {"name": "all-reduce over tensor", "seconds": 1.0},
            {"name": "messages between stages", "seconds": 0.75},
        ],
        "shares_cores": False,
        "bubble": {"measured": 0.2, "tick_loop_seconds": 8.0},
        "idle_seconds": 1.6,
    }
    assert run_comparison.measured_parts(report) == {
        "layers": 6.0,
        "head": 0.625,
        "gathers": 0.25,
        "messages": 0.75,
        "bubble": pytest.approx(1.6),
        "idle": 1.6,
    }


def test_damaged_profile_is_ignored(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    report = tmp_path / "copy" / "profiles" / "step_000003" / "report.json"
    for text in ("{", "{}", '{"by_place": 3}'):
        report.write_text(text)
        times = run_comparison.compare_run(tmp_path / "copy").times
        assert all(term.measured is None for term in times)


def test_calibration_reproduces_the_measured_time(run: Path) -> None:
    found = run_comparison.compare_run(run)
    changed = run_comparison.calibrated(found)
    again = run_comparison.evaluate(found.config, changed).cost.seconds
    assert again == pytest.approx(found.step.measured, rel=0.02)
    assert changed.measured.endswith("run first")


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_calibration_rejects_impossible_times(run: Path, seconds: float) -> None:
    found = run_comparison.compare_run(run)
    changed = dataclasses.replace(found.step, measured=seconds)
    with pytest.raises(ConfigError, match="which no fraction of the peak"):
        run_comparison.calibrated(dataclasses.replace(found, step=changed))


def test_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "_MEASURED", str(tmp_path))
    hardware.known_hardware.cache_clear()
    assert main(["plan", "--against", str(run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["step_seconds"]["ratio"] == pytest.approx(
        values["step_seconds"]["measured"] / values["step_seconds"]["predicted"]
    )
    assert main(["plan", "--against", str(run), "--calibrate"]) == 0
    assert f"wrote {tmp_path}/cpu.yml" in capsys.readouterr().out
    assert main(["plan", "--against", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"]["ratio"] == pytest.approx(
        1, abs=0.02
    )
    hardware.known_hardware.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quickstart"], "cannot be combined with --against"),
        (["--topology", "v5p:4x4x4"], "has no effect with --against"),
        (["--search"], "has no effect with --against"),
    ],
)
def test_conflicts(
    run: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--against", str(run)]) == 2
    assert text in capsys.readouterr().err


def test_runs_without_a_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "perf/step_s": 0.1}\n')
    for content in (None, "{", '{"step": 0, "hardware": "", "plan": null}'):
        if content is not None:
            (tmp_path / "forecast.json").write_text(content)
        assert main(["plan", "--against", str(tmp_path)]) == 2
        rule = (
            "forecast.json  [MP-RUN-001]\n  is damaged"
            if content == "{"
            else "must contain forecast"
        )
        assert rule in capsys.readouterr().err


def test_attempt_without_steps_keeps_the_comparison(run: Path, tmp_path: Path) -> None:
    """A complete run that is started again has an event `start`, but no further records."""
    again = shutil.copytree(run, tmp_path / "run")
    last = max(json.loads(line)["step"] for line in _metrics(again).splitlines())
    with (again / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "step": last}) + "\n")
    assert (
        run_comparison.compare_run(again).num_records == run_comparison.compare_run(run).num_records
    )


@pytest.mark.parametrize("seconds", ["1e308", "5e-324", "0.0"])
def test_extreme_times_are_valid_json(
    seconds: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = shutil.copytree(run, tmp_path / "run")
    text = re.sub(r'"perf/step_s": [^,}]+', f'"perf/step_s": {seconds}', _metrics(changed))
    (changed / "metrics.jsonl").write_text(text)
    assert main(["plan", "--against", str(changed), "--json"]) == 0
    output = capsys.readouterr().out
    json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def _metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()
