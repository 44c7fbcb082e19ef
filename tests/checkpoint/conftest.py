"""Fixtures: a run folder with two checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.cases import save


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 3 and 6. Tests must not modify it."""
    return save(tmp_path_factory.mktemp("saved"), 3, 6)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))
