"""Checkpoints saved before a model key existed, or when it had another name."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint.folder import CheckpointFolder
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER
from maxpipe.config import schema
from maxpipe.config.load import load, to_dict
from maxpipe.errors import ConfigError
from maxpipe.io.typed_json import legacy_value
from maxpipe.models.llama import LlamaConfig
from maxpipe.train.resume import check_model
from tests.conftest import FAST_COMPILE
from tests.errors import raises
from tests.train.runs import Run

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "golden" / "checkpoints"
RUNS = sorted(path.name for path in GOLDEN.iterdir())
FORMER_VALUES = REPOSITORY / "tests" / "golden" / "former_values"
RENAMED_VALUES = {
    "model.moe.dispatch": ("all", "dense"),
    "mesh.context_attention": ("heads", "ulysses"),
    "pipeline.weight_gather": ("visit", "window"),
    "data.packing": ("cut", "concatenate"),
    "checkpoint.best_mode": ("smallest", "min"),
    "guard.bad_steps": ("roll_back", "rollback"),
    "guard.on_spike": ("note", "warn"),
}
"""Former and current values of the keys of the run in `FORMER_VALUES`."""
OLD: dict[str, Any] = {
    "num_layers": 2,
    "d_model": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 2,
    "d_mlp": 8,
    "vocab_size": 259,
    "rope_scaling": 8.0,
}
"""Model section of a checkpoint that predates families and most current keys."""
SIZES = [f"model.{name}={value}" for name, value in OLD.items()]


def wanted(*overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    loaded = load([*SIZES, "train.steps=1", *overrides])
    return to_dict(loaded.config)["model"], loaded.origins


COMMAND = ("train", "golden.yml", "train.steps=3", "run.dir=.", "run.name=golden")
COMMAND += ("runtime.compilation_cache=",)


def copy_run(run: Path, folder: Path) -> None:
    """Copy a golden run and its config to a folder."""
    shutil.copytree(run, folder / "golden")
    shutil.copy(folder / "golden" / "config.yml", folder / "golden.yml")


def resume_golden_run(run: Path, folder: Path, package: Path) -> str:
    """Train a golden run for one more step with the package in a folder; return the output."""
    copy_run(run, folder)
    result = subprocess.run(
        [sys.executable, "-m", "maxpipe", *COMMAND],
        cwd=folder,
        env=os.environ | FAST_COMPILE | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "golden" / "checkpoints" / "3").is_dir()
    return " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    "name", [RUNS[0], *(pytest.param(each, marks=pytest.mark.long) for each in RUNS[1:])]
)
def test_run_of_older_release_resumes(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume by the command, with the run's own config; the model check passes."""
    copy_run(GOLDEN / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    output = " ".join(run(*COMMAND).split())
    assert (tmp_path / "golden" / "checkpoints" / "3").is_dir()
    assert "resuming golden after step 2" in output
    assert "model.rope_scaling = 1.0 was renamed to model.llama.rope_factor." in output


def test_run_with_renamed_values_resumes(tmp_path: Path) -> None:
    """Values in its config, checkpoint and data fingerprint were renamed since."""
    output = resume_golden_run(FORMER_VALUES, tmp_path, REPOSITORY)
    assert "resuming golden after step 2" in output
    for key, (former, current) in RENAMED_VALUES.items():
        assert output.count(f"{key} = {former} was renamed to {key}={current}.") == 1
    # The values count as unchanged.
    assert output.count("when step 2 was saved") == 1
    assert "config: train.steps was 2 when step 2 was saved and is 3" in output


def test_renamed_values_in_checkpoint_are_upgraded() -> None:
    metadata = CheckpointFolder(FORMER_VALUES / CHECKPOINTS_FOLDER).read_metadata(2)
    values = schema.flatten(metadata.config)
    for key, (_, current) in RENAMED_VALUES.items():
        assert values[key] == current
    assert "packing" not in metadata.data["fingerprint"]


@pytest.mark.long
def test_run_resumes_after_model_key_is_added(tmp_path: Path) -> None:
    """Resume with a copy of the package whose model has one more key."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "maxpipe", tmp_path / "new" / "maxpipe", ignore=ignore)
    module = tmp_path / "new" / "maxpipe" / "models" / "llama.py"
    declared = "    rope_factor: float = field("
    text = module.read_text()
    assert text.count(declared) == 1
    added = '    softness: float = 0.25\n    """A key that no run has known."""\n'
    module.write_text(text.replace(declared, added + declared))
    output = resume_golden_run(GOLDEN / RUNS[-1], tmp_path, tmp_path / "new")
    assert "resuming golden after step 2" in output
    assert "softness: 0.25" in (tmp_path / "golden" / "config.yml").read_text()


def test_moved_model_keys_are_compared_by_value() -> None:
    check_model(OLD, *wanted())
    with pytest.raises(ConfigError) as caught:
        check_model(OLD, *wanted("model.llama.rope_factor=4"))
    (problem,) = caught.value.problems
    assert problem.where == "command line: model.llama.rope_factor" and problem.value == "4.0"
    assert problem.rule.startswith("must be 8.0") and "model.llama.rope_fa" in problem.action


def test_mtp_heads_must_match_but_loss_weight_may_change() -> None:
    check_model(OLD, *wanted("model.mtp_loss_weight=0.1"))
    with raises(ConfigError, "model.mtp_heads", 2, names=[0], suggests="model.mtp_heads=0"):
        check_model(OLD, *wanted("model.mtp_heads=2"))


def test_mtp_kind_must_match_if_model_has_mtp_heads() -> None:
    check_model(OLD, *wanted("model.mtp_kind=layer"))
    with pytest.raises(ConfigError) as caught:
        check_model(OLD, *wanted("model.mtp_kind=layer", "model.mtp_heads=1"))
    assert [problem.where.split(": ")[-1] for problem in caught.value.problems] == [
        "model.mtp_heads"
    ]
    with_heads = OLD | {"mtp_heads": 1}
    with raises(ConfigError, "model.mtp_kind", "layer", suggests="model.mtp_kind=projection"):
        check_model(with_heads, *wanted("model.mtp_kind=layer", "model.mtp_heads=1"))


def test_changed_model_family_is_rejected() -> None:
    sizes = [each for each in SIZES if "rope_scaling" not in each]
    config = load([*sizes, "train.steps=1", "model.family=gemma3", "model.tied_embeddings=true"])
    with raises(ConfigError, "model.family", "gemma3", suggests="model.family=llama"):
        check_model(OLD, to_dict(config.config)["model"], config.origins)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wider(LlamaConfig):
    new: int = 3
    changed: float = dataclasses.field(default=0.5, metadata=legacy_value(0.0))


@pytest.fixture
def two_more_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two new keys in the Llama section; the legacy value of one differs from its default."""
    for sections in (schema.SECTIONS, schema.ALL_SECTIONS):
        monkeypatch.setitem(sections, "model.llama", _Wider)
    monkeypatch.setitem(schema.KEYS, "model.llama.new", int)
    monkeypatch.setitem(schema.KEYS, "model.llama.changed", float)
    yield


@pytest.mark.usefixtures("two_more_keys")
def test_missing_model_key_has_legacy_value() -> None:
    model, origins = wanted()
    model["llama"] |= {"new": 3, "changed": 0.0}
    check_model(OLD, model, origins)
    model["llama"] |= {"new": 4}
    with raises(ConfigError, "model.llama.new", 4, suggests="model.llama.new=3"):
        check_model(OLD, model, origins)
    # The current default differs from the legacy value of the checkpoint.
    model["llama"] |= {"new": 3, "changed": 0.5}
    with raises(ConfigError, "model.llama.changed", 0.5, suggests="model.llama.changed=0.0"):
        check_model(OLD, model, origins)
