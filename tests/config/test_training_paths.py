"""Errors for a data path that does not exist or that the data source does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.errors import ConfigError


def test_missing_data_path_is_reported_before_source_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "data.path=nowhere"]) == 2
    shown = capsys.readouterr().err
    assert "does not exist: nowhere. It is ignored with data.source=corpus." in shown
    assert "data.source=text" in shown
    (tmp_path / "nowhere").write_text("text")
    assert main(["train", "quickstart", "data.path=nowhere"]) == 2
    assert "does not exist" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("input.txt", "text"),
        ("a.jsonl", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.array_record", "arrayrecord"),
        ("texts", "text"),
        ("saved", "huggingface"),
    ],
)
def test_data_path_without_source_suggests_matching_source(name: str, source: str, tmp_path: Path):
    path = tmp_path / name
    if "." in name:
        path.write_text("hello\n")
    else:
        path.mkdir()
        inside = "dataset_info.json" if name == "saved" else "a.txt"
        (path / inside).write_text("{}")
    given = ["tiny", "train.steps=5", f"data.path={path}"]
    with pytest.raises(ConfigError) as caught:
        load(given, to_train=True)
    [problem] = caught.value.problems
    assert problem.action == f"Set data.source={source}, or leave data.path out."
    load([*given, f"data.source={source}"], to_train=True)
    load(given[:-1], to_train=True)


def test_missing_data_path_suggests_source_by_suffix():
    with pytest.raises(ConfigError) as caught:
        load(["tiny", "train.steps=5", "data.path=nowhere.jsonl"], to_train=True)
    [problem] = caught.value.problems
    assert problem.action.endswith("data.source=jsonl, or leave data.path out.")
