"""This release restores the checkpoints of every earlier release.

If there is no checkpoint of this release yet, `pytest --update-golden
tests/checkpoint/test_golden.py` saves one. Run it after a format change and before a release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import maxpipe
from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.folder import FORMAT, CheckpointFolder
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, open_run

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
RUNS = sorted(path.name for path in GOLDEN.iterdir())
THIS = f"{maxpipe.__version__.partition('.dev')[0]}-format-{FORMAT}"
STEP = 2

TINY = """
model: {num_layers: 2, d_model: 4, num_heads: 2, num_kv_heads: 1, head_dim: 2, d_mlp: 8,
        vocab_size: 259, tied_embeddings: true, compute_dtype: float32}
train: {steps: 2, batch_size: 2, sequence_length: 16}
data: {source: synthetic}
checkpoint: {keep: 1}
eval: {batches: 0}
log: {trackers: []}
runtime: {platform: cpu, compilation_cache: ''}
"""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.fault("F17")
def test_checkpoints_of_earlier_releases_are_restored(name: str, caplog: pytest.LogCaptureFixture):
    with open_run(GOLDEN / name) as checkpoints:
        assert checkpoints.steps() == [STEP]
        found = checkpoints.restore(STEP)
    assert tree_digest(found.state) == (GOLDEN / name / "digest.txt").read_text().strip()
    assert found.metadata.data["step"] == STEP
    assert found.metadata.config["model"]["d_model"] == 4
    is_unknown = [line for line in caplog.messages if "has no manifest.json" in line]
    assert len(is_unknown) == name.endswith("-format-1")


def test_golden_checkpoint_of_this_release_exists(request: pytest.FixtureRequest):
    golden = GOLDEN / THIS
    if request.config.getoption("--update-golden") and not golden.exists():
        _make(golden)
    assert golden.exists(), "run pytest with --update-golden"
    path = CheckpointFolder(golden / CHECKPOINTS_FOLDER) / STEP
    assert manifest.verify_files(path, STEP) == []
    assert manifest.verify_arrays(path, STEP, manifest.read_expected_digests(path, STEP)) == []


def _make(golden: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        config = Path(folder) / "tiny.yml"
        config.write_text(TINY)
        subprocess.run(
            [sys.executable, "-m", "maxpipe", "train", config, "run.dir=.", "run.name=golden"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(maxpipe.__file__).parents[1])},
            check=True,
        )
        shutil.copytree(Path(folder) / "golden" / CHECKPOINTS_FOLDER, golden / CHECKPOINTS_FOLDER)
        shutil.copy(Path(folder) / "golden" / "config.yml", golden)
    with open_run(golden) as checkpoints:
        (golden / "digest.txt").write_text(tree_digest(checkpoints.restore(STEP).state) + "\n")
