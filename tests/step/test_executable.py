"""Compiled executables on disk: permissions, checksums and provenance."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.errors import ConfigError, MaxpipeError, StorageError
from maxpipe.step.executable import PROGRAM, PROVENANCE, load, save

FACTS = {"model.d_model": "16", "mesh.ici_stage": "1", "program": "abc"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compiled = jax.jit(lambda x: 2 * x).lower(jnp.ones(3)).compile()
    save(compiled, tmp_path / "kept", FACTS)
    return tmp_path / "kept"


def loaded(folder: Path, facts: dict[str, str] = FACTS) -> Any:
    trees = jax.tree.structure(((0,), {})), jax.tree.structure(0)
    return load(folder, facts, *trees, jax.devices()[:1])


def test_saved_executable_runs(folder: Path) -> None:
    assert loaded(folder)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / PROGRAM).stat().st_mode & 0o777 == 0o600


def refused(folder: Path, kind: type[MaxpipeError], facts: dict[str, str] = FACTS) -> str:
    with pytest.raises(kind) as caught:
        loaded(folder, facts)
    message = str(caught.value)
    assert message.startswith(f"runtime.compiled_step = {folder}") and message.count("\n") == 2
    return message


def test_changed_provenance_is_rejected(folder: Path) -> None:
    message = refused(folder, ConfigError, FACTS | {"mesh.ici_stage": "2"})
    assert "was compiled for mesh.ici_stage = 1, but this run has 2." in message
    assert "has None" in refused(folder, ConfigError, {"program": "abc", "model.d_model": "16"})


def test_load_on_several_cpu_devices_is_rejected(folder: Path) -> None:
    trees = jax.tree.structure(((0,), {})), jax.tree.structure(0)
    with pytest.raises(ConfigError, match="cannot be used by 2 CPU devices"):
        load(folder, FACTS, *trees, jax.devices()[:2])


@pytest.mark.parametrize("name", ["", PROGRAM, PROVENANCE])
def test_files_writable_by_others_are_rejected(folder: Path, name: str) -> None:
    os.chmod(folder / name, 0o777)
    with pytest.raises(StorageError, match="can be written by other users"):
        loaded(folder)


@pytest.mark.parametrize("name", [PROGRAM, PROVENANCE])
def test_damaged_files_are_rejected(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises((StorageError, ConfigError)):
        loaded(folder)


def test_digest_mismatch_is_rejected(folder: Path) -> None:
    record = json.loads((folder / PROVENANCE).read_text())
    (folder / PROVENANCE).write_text(json.dumps(record | {"sha256": "0" * 64}))
    assert "is damaged" in refused(folder, StorageError)


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "none", StorageError)
