"""Atomic file writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from maxpipe.errors import ConfigError
from maxpipe.io import files
from tests.errors import raises


@pytest.mark.fault("L7")
@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_file_unchanged(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files.write(path := tmp_path / "config.yml", "before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_urls_are_not_written_to_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for check in (files.check_can_write, lambda path: files.write(path, "x")):
        with pytest.raises(files.UnsafeFileError, match="s3:// begins a URL"):
            check("s3://bucket/a.svg")
    with raises(ConfigError, "command line: --out", suggests="./out"):
        files.expand_path("s3://bucket/a", "command line: --out")
    assert not os.listdir(tmp_path)


def test_write_keeps_file_permissions(tmp_path: Path):
    path = tmp_path / "figures.json"
    path.touch(0o600)
    files.write(path, "1")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("1", 0o600)


@pytest.mark.parametrize("name", ["file", "file.partial"])
def test_write_rejects_symbolic_links(name: str, tmp_path: Path):
    (target := tmp_path / "target").write_text("other")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(files.UnsafeFileError, match="symbolic link"):
        files.write(tmp_path / "file", "mine")
    assert target.read_text() == "other"
