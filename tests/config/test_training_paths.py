"""A path that the source does not read: missing files are named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.cli import main


def test_a_missing_path_is_named_before_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "data.path=nowhere"]) == 2
    shown = capsys.readouterr().err
    assert "does not exist: nowhere. It is not read with data.source=corpus." in shown
    assert "Name files that exist, and set data.source=text" in shown
    (tmp_path / "nowhere").write_text("text")
    assert main(["train", "quickstart", "data.path=nowhere"]) == 2
    assert "does not exist" not in capsys.readouterr().err
