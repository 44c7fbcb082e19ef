"""Curves of metrics, and invalid arguments of `maxpipe curves`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.schedule.canvas import Canvas
from maxpipe.schedule.chart import round_ticks, smoothed
from maxpipe.telemetry.curves import Style, draw_curves, read

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one of which was killed in the middle of a line."""
    monkeypatch.chdir(tmp_path)
    for name, scale in (("one", 1.0), ("two", 2.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yml").touch()
        lines = [{"step": step, "train/loss": scale / step} for step in (10, 20, 30)]
        lines[1] |= {"eval/loss": None, "eval/sums/accuracy": 0.5}
        lines[2]["eval/loss"] = 0.25
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"step": 40, "train/lo')
    return tmp_path


def test_read_returns_recorded_metrics(runs: Path) -> None:
    found = read(runs / "runs/one", ["train/loss", "eval/loss", "eval/other"])
    assert found == {
        "train/loss": [(10, 0.1), (20, 0.05), (30, pytest.approx(1 / 30))],
        "eval/loss": [(30, 0.25)],
    }


def test_tags_with_same_suffix_share_panel(runs: Path) -> None:
    tags = ["train/loss", "eval/loss", "eval/sums/accuracy"]
    canvas = draw_curves({name: read(runs / "runs" / name, tags) for name in ("one", "two")})
    titles = [label.text for label in canvas.labels if label.bold]
    assert titles == ["loss", "accuracy"]
    names = {label.text for label in canvas.labels if "  " in label.text}
    assert {"one  train/loss", "two  eval/loss"} <= names
    # There are two lines, two single points in each panel, and a line for each legend entry.
    assert [len(curve.points) for curve in canvas.curves].count(1) == 4
    assert len(canvas.curves) == 2 * (2 + 2 + 2)
    assert all(0 <= y <= canvas.height for curve in canvas.curves for _, y in curve.points)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_curves_command_writes_image(suffix: str, runs: Path, capsys: Capture) -> None:
    assert main(["curves", "one", "runs/two", "--out", f"loss.{suffix}"]) == 0
    assert capsys.readouterr().out == f"wrote loss.{suffix}\n"
    assert main(["curves", "one", "runs/two", f"--{suffix}", "again"]) == 0
    content = (runs / f"loss.{suffix}").read_bytes()
    assert (runs / "again").read_bytes() == content
    assert content.startswith({"svg": b"<svg", "png": b"\x89PNG"}[suffix])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["one", "--out", "a.pdf"], 2, "must end in .svg or .png"),
        (["one", "--out", "a.svg", "--tags", " ,"], 2, "must name a metric"),
        (["one", "--out", "a.svg", "--tags", "train/los"], 2, "Use --tags train/loss."),
        (["three", "--out", "a.svg"], 2, "three"),
        (["one"], 2, "Add --out curves.svg."),
        (["one", "--out", "no/a.svg"], 74, "cannot be written"),
    ],
)
def test_curves_command_rejects_invalid_arguments(
    arguments: list[str], code: int, words: str, runs: Path, capsys: Capture
) -> None:
    assert main(["curves", *arguments]) == code
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


@pytest.mark.parametrize("low, high", [(0, 1), (0.33, 0.34), (-5, 120), (2.0, 2.0001), (0, 7e6)])
def test_ticks_are_round_and_within_range(low: float, high: float) -> None:
    found = round_ticks(low, high)
    assert 2 <= len(found) <= 7 and all(low <= each <= high for each in found)
    assert all(re.fullmatch(r"-?[\d.]{1,7}(e\+\d+)?", f"{each:g}") for each in found)


ODD_VALUES = ["NaN", "Infinity", "-1e400", "1e308", "9" * 400, "true", '"1"', "[1]", "1e-320"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_invalid_numbers_in_records_are_skipped_with_warning(
    suffix: str, runs: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    path = runs / "runs/one/metrics.jsonl"
    lines = [f'{{"step": {40 + at}, "train/loss": {one}}}' for at, one in enumerate(ODD_VALUES)]
    steps = ("9" * 400, "-1", "2.5", "NaN", "9" * 5000, str(2**63))
    lines += [f'{{"step": {step}, "train/loss": 1}}' for step in steps]
    path.write_text(path.read_text() + "\n" + "\n".join(lines) + "\n")
    found = read(runs / "runs/one", ["train/loss"])["train/loss"]
    assert found == [(10, 0.1), (20, 0.05), (30, pytest.approx(1 / 30)), (48, 1e-320)]
    assert "train/loss has 8 records that cannot be plotted" in caplog.text
    # Numbers of 400 and 5000 digits, and the incomplete line of `runs`.
    assert "skipped 4 lines that are not valid JSON" in caplog.text
    assert main(["curves", "one", "--out", f"odd.{suffix}"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [(-1e300, 1e300), (0, 1e-322), (1e300, 1e300), (1, 1 + 2**-52), (0, 5e-324)]
)
def test_extreme_values_have_axis(values: tuple[float, float]) -> None:
    canvas = draw_curves({"one": {"train/loss": list(enumerate(values))}})
    assert all(0 <= y <= canvas.height for curve in canvas.curves for _, y in curve.points)
    assert len(canvas.labels) < 20


def texts(canvas: Canvas) -> list[str]:
    return [label.text for label in canvas.labels]


def test_axes_are_named_with_units() -> None:
    curve = [(1, 0.5), (2, 0.4)]
    tags = ("train/loss", "eval/sums/accuracy", "perf/step_s", "own/value")
    drawn = texts(draw_curves({"one": dict.fromkeys(tags, curve)}))
    assert [text for text in drawn if text == "step"] == ["step"] * 4
    assert {"nats per token", "seconds"} <= set(drawn)
    # The accuracy and the unknown metric have no unit.
    assert drawn.count("no unit") == 2


@pytest.mark.parametrize(
    ("objective", "name"),
    [("grpo", "grpo loss, no unit"), ("preference", "preference loss, no unit"), ("sft", "nats")],
)
def test_loss_unit_follows_objective(objective: str, name: str, runs: Path) -> None:
    (runs / "runs/one/config.yml").write_text(f"train:\n  objective: {objective}\n")
    assert main(["curves", "one", "--out", "loss.svg"]) == 0
    assert f">{name}" in (runs / "loss.svg").read_text()


def test_band_combines_runs_that_differ_in_final_number(runs: Path) -> None:
    curves = {
        f"base-{seed}": {"eval/loss": [(10, 2.0 + seed), (20, 1.0 + seed)]} for seed in range(3)
    }
    canvas = draw_curves(curves, Style(band=True))
    assert "base  eval/loss (mean and range of 3 runs)" in texts(canvas)
    ((left, mean), *_) = canvas.curves[2].points  # after the edges of the band
    (band,) = canvas.areas
    heights = [y for x, y in band.points if x == left]
    assert sum(heights) / 2 == pytest.approx(mean) and heights[0] != heights[1]
    # Without the option, every run has its own curve.
    assert len(draw_curves(curves).curves) == 3 + 3


def test_smoothing_keeps_records_in_pale_color() -> None:
    curve = [(step, float(step % 2)) for step in range(1, 10)]
    canvas = draw_curves({"one": {"train/loss": curve}}, Style(smooth=3))
    (raw, mean, _) = canvas.curves
    spread = [
        max(y for _, y in each.points) - min(y for _, y in each.points) for each in (raw, mean)
    ]
    assert raw.colour != mean.colour and spread[1] < spread[0]


def test_smoothed_is_mean_of_symmetric_window() -> None:
    points = [(0, 1.0), (1, 2.0), (2, 6.0), (3, 4.0)]
    assert smoothed(points, 3) == [(0, 1.0), (1, 3.0), (2, 4.0), (3, 4.0)]
    assert smoothed(points, 1) == points


@pytest.mark.parametrize("count", ["0", "-3", "x"])
def test_curves_command_rejects_smoothing_below_one(count: str, capsys: Capture) -> None:
    assert main(["curves", "one", "--smooth", count, "--out", "a.svg"]) == 2
    assert "--smooth" in capsys.readouterr().err
