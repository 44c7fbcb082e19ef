"""Fixtures shared by the data tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a folder of 24 short documents, one per file."""
    path = tmp_path_factory.mktemp("texts")
    for i in range(24):
        (path / f"{i:02}.txt").write_text(f"document {i} " * (1 + i % 7))
    return str(path)
