"""Locations of a run's checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint import storage
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager, open_run
from maxpipe.checkpoint.storage import (
    checkpoint_home,
    files,
    find_checkpoint_home,
    in_bucket,
    to_epath,
)
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import ConfigError, StorageError
from tests.checkpoint.cases import put, tree


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of run `a`, whose checkpoints of steps 3 and 6 are in another folder."""
    run_dir, config = tmp_path / "runs" / "a", CheckpointConfig(dir=str(tmp_path / "saved"))
    with CheckpointManager(run_dir, config) as checkpoints:
        for step in (3, 6):
            put(checkpoints, step)
    run_dir.mkdir(parents=True)
    text = (
        "model: {num_layers: 1, d_model: 8, num_heads: 1, num_kv_heads: 1, head_dim: 8, "
        f"d_mlp: 8, vocab_size: 259}}\nrun: {{name: a}}\ncheckpoint: {{dir: {config.dir}}}\n"
        "train: {steps: 6}\n"
    )
    (run_dir / "config.yml").write_text(text)
    return run_dir


def test_checkpoints_are_located_by_config(run_dir: Path, tmp_path: Path):
    assert find_checkpoint_home(run_dir) == str(tmp_path / "saved" / "a")
    assert sorted(os.listdir(tmp_path / "saved" / "a" / CHECKPOINTS_FOLDER)) == ["3", "6"]
    assert not (run_dir / CHECKPOINTS_FOLDER).exists()
    copied = shutil.copytree(run_dir, tmp_path / "copied")
    for folder in (run_dir, copied, tmp_path / "saved" / "a"):
        with open_run(folder) as checkpoints:
            assert tree_digest(checkpoints.restore(6).state) == tree_digest(tree(6))


def test_commands_use_checkpoint_dir_of_config(run_dir: Path, tmp_path: Path, capsys: Any):
    kept = tmp_path / "saved" / "a" / CHECKPOINTS_FOLDER
    assert main(["checkpoints", "verify", str(run_dir)]) == 0
    assert main(["checkpoints", "diff", f"{run_dir}@3", f"{tmp_path}/saved/a@3"]) == 0
    assert capsys.readouterr().out.endswith("same\n")
    assert main(["checkpoints", "prune", str(run_dir), "--keep", "1"]) == 2
    assert "--elsewhere" in capsys.readouterr().err
    assert main(["checkpoints", "prune", str(run_dir), "--keep", "1", "--elsewhere"]) == 0
    assert os.listdir(kept) == ["6"] and os.listdir(kept.parent) == [CHECKPOINTS_FOLDER]


def test_broken_config_is_reported_only_if_needed(run_dir: Path):
    (run_dir / "config.yml").write_text("run: [")
    with pytest.raises(ConfigError, match=r"config\.yml"):
        open_run(run_dir)
    (run_dir / CHECKPOINTS_FOLDER).mkdir()
    assert find_checkpoint_home(run_dir) == str(run_dir)


def test_checkpoint_home():
    assert checkpoint_home("runs/a", CheckpointConfig()) == "runs/a"
    assert checkpoint_home("runs/a", CheckpointConfig(dir="gs://b/c/")) == "gs://b/c/a"
    assert checkpoint_home(Path("runs/a"), CheckpointConfig(dir="~/c")) == os.path.expanduser(
        "~/c/a"
    )


def test_unsupported_or_unreachable_storage_is_reported(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="https:// is "):
        to_epath("https://bucket/run")

    def without_package(path: str) -> None:
        raise ImportError

    monkeypatch.setattr(storage, "store_filesystem", without_package)
    for scheme, package, extra in (("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")):
        with pytest.raises(StorageError) as caught:
            to_epath(f"{scheme}://bucket/run")
        where, rule, action = str(caught.value).splitlines()
        assert where == f"{scheme}://bucket/run: cannot be reached  [MP-ENV-001]"
        assert package in rule and action == f"  Run: pip install 'maxpipe[{extra}]'"


def test_local_paths_resembling_bucket_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert not in_bucket("runs/x://y") and not in_bucket("/gs://y")
    assert str(to_epath("x")) == str(tmp_path / "x")
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "z").write_bytes(bytes(5))
    assert files(to_epath("x")) == {"y/z": 5} and not storage.entries(to_epath("nothing"))
