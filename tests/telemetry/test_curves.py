"""Curves of runs: what is read, and where it is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.telemetry import curves


def write_run(folder: Path, values: dict[int, float], tag: str = "eval/loss") -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": step, "train/loss": 1.0} for step in range(1, 4)]
    lines += [{"step": step, tag: value} for step, value in values.items()]
    lines.append({"step": 9, tag: None})  # what is not finite
    text = "\n".join(map(json.dumps, lines))
    (folder / "metrics.jsonl").write_text(text + '\n{"step": 10, "eval')
    (folder / "config.yml").touch()
    return folder


def test_a_tag_is_read_by_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: 3.5, 4: 3.0})
    assert curves.read(run, ["eval/loss"]) == {"eval/loss": [(2, 3.5), (4, 3.0)]}
    with pytest.raises(ConfigError, match="it has eval/loss, train/loss"):
        curves.read(run, ["eval/lose"])


@pytest.mark.parametrize("values", [{1: 2.0}, {1: 2.0, 5: 2.0}, {3: -1e-3, 900: 1e6, 5: 0.0}])
def test_points_are_where_their_numbers_are(values: dict[int, float]) -> None:
    """Lower values are lower; nothing is drawn outside of the frame."""
    points = sorted(values.items())
    canvas = curves.picture({"one": {"train/loss": points}, "other": {"train/loss": [(0, 1.0)]}})
    drawn = dict(zip(sorted(values), canvas.curves[0].points, strict=True))
    for a in values:
        assert 0 <= drawn[a][0] <= canvas.width and 0 <= drawn[a][1] <= canvas.height
        for b in values:
            assert (a < b) == (drawn[a][0] < drawn[b][0])
            assert (values[a] < values[b]) <= (drawn[a][1] > drawn[b][1])
    texts = " ".join(label.text for label in canvas.labels)
    assert all(word in texts for word in ("one  train/loss", "other", "step"))


def test_the_command_writes_a_picture(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, {1: 2.0, 2: 1.0})) for name in ("alone", "taught")]
    svg, png = tmp_path / "curves.svg", tmp_path / "curves.png"
    assert main(["curves", *runs, "--tags", "eval/loss", "--out", str(svg)]) == 0
    tree = ElementTree.parse(svg)
    lines = [each for each in tree.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2 and "alone" in svg.read_text() and "taught" in svg.read_text()
    assert main(["curves", *runs, "--tags", "eval/loss", "--out", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["curves", *runs, "--tags", "nothing", "--out", str(svg)]) == 2
    assert main(["curves", *runs, "--out", str(tmp_path / "curves.txt")]) == 2
