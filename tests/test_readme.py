"""The README shows the actual output of the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxpipe.cli import command_line_parser, main
from maxpipe.config.load import load
from maxpipe.config.schema import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def quickstart() -> Config:
    return load([str(ROOT / "configs" / "quickstart.yml")]).config


def test_schedule_diagram_is_that_of_quickstart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main(["schedule", str(ROOT / "configs" / "quickstart.yml")])
    drawn = capsys.readouterr().out.strip()
    assert drawn in README, f"paste this into README.md:\n{drawn}"


def test_first_screen_shows_training_and_schedule() -> None:
    first = "\n".join(README.splitlines()[:45])
    for text in ("make quickstart", "final validation loss", "stage  3 F", "maxpipe train"):
        assert text in first


def test_every_command_is_in_table() -> None:
    names = command_line_parser().command_names
    assert {"eval", "goodput", "completion", "checkpoints"} <= set(names)
    for name in names:
        assert re.search(rf"^\| `maxpipe {name}\b", README, re.MULTILINE), name


def test_named_keys_and_paths_exist() -> None:
    for key in set(re.findall(r"`(\w+\.\w+)=", README)):
        section, name = key.split(".")
        assert hasattr(getattr(quickstart(), section), name), key
    for path in set(re.findall(r"\]\(([^)#]+)\)", README)):
        assert (ROOT / path).exists(), path
