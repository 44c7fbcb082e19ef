"""Messages of resumed runs, with a small state instead of a trained model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager
from maxpipe.config.load import load, to_dict
from maxpipe.errors import StorageError
from maxpipe.telemetry.console import Console
from maxpipe.train.resume import RunStart, restore_or_init
from tests.checkpoint.cases import abstract, tree
from tests.errors import contains, raises

FINGERPRINT = {"documents": 40, "batch_size": 8}
Facts = dict[str, Any]


class RunFolder:
    """A run folder, with functions that save checkpoints and restore them as a run does."""

    def __init__(self, file: Path, runs: Path):
        self.arguments = [str(file), f"run.dir={runs}"]
        self.folder = runs / "run"

    def save(self, step: int, change: Callable[[Facts, Facts], object] | None = None) -> None:
        """Save a checkpoint; `change` may modify its config and data position."""
        loaded = load(self.arguments)
        config, data = to_dict(loaded.config), {"step": step, "fingerprint": FINGERPRINT}
        if change is not None:
            change(config, data)
        with CheckpointManager(self.folder, loaded.config.checkpoint) as checkpoints:
            checkpoints.save(step, lambda: tree(step), config, data, last=True)

    def start_run(self, *overrides: str) -> tuple[RunStart, str]:
        """Restore or initialize the run with these overrides; return the result and the output."""
        loaded, stream = load([*self.arguments, *overrides]), io.StringIO()
        steps: Any = SimpleNamespace(
            abstract_saved=abstract(), from_saved=lambda state, guard, params: state
        )
        train = SimpleNamespace(
            fingerprint=lambda: FINGERPRINT, resume_mixture=lambda fingerprint, step: False
        )
        datasets: Any = SimpleNamespace(train=train)
        console = Console("plain", stream=stream)
        try:
            with CheckpointManager(self.folder, loaded.config.checkpoint) as checkpoints:
                start = restore_or_init(loaded, steps, checkpoints, datasets, console)
        finally:
            console.close()
        return start, stream.getvalue()

    def names(self) -> list[str]:
        """Return the names of the checkpoints."""
        return sorted(path.name for path in (self.folder / CHECKPOINTS_FOLDER).iterdir())


@pytest.fixture
def run_folder(tiny: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(tiny, tmp_path)


UNDESCRIBED: dict[str, tuple[Callable[[Facts, Facts], object], str]] = {
    "a position that is no number": (lambda config, data: data.update(step="six"), "step"),
    "no position": (lambda config, data: data.pop("step"), "step"),
    "a position before the start": (lambda config, data: data.update(step=-1), "step -1"),
    "no fingerprint": (lambda config, data: data.pop("fingerprint"), "fingerprint"),
    "no batch size": (
        lambda config, data: data.update(fingerprint={"documents": 40}),
        "batch_size",
    ),
    "no model": (lambda config, data: config.pop("model"), "model"),
    "patterns that are no list": (lambda config, data: config["model"].update(frozen=3), "list"),
}


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_checkpoint_with_invalid_metadata_is_skipped(name: str, run_folder: RunFolder) -> None:
    change, reason = UNDESCRIBED[name]
    run_folder.save(4)
    run_folder.save(6, change)
    start, output = run_folder.start_run()
    assert start.message == f"resuming {run_folder.folder} after step 4" and start.is_resumed
    (line,) = [line for line in output.splitlines() if "does not describe" in line]
    text = "does not describe the model and data of a run"
    step = run_folder.folder / CHECKPOINTS_FOLDER / "6"
    assert line.startswith(f"warning: {step} is skipped, renamed 6.corrupt: ")
    assert contains(line, f"facts/metadata {text}") and reason in line.partition(text)[2]
    assert run_folder.names() == ["4", "6.corrupt"]


def test_run_with_only_invalid_checkpoint_does_not_start(run_folder: RunFolder) -> None:
    run_folder.save(6, lambda config, data: data.update(step="six"))
    facts = ["does not describe the model and data of a run", "step"]
    folder = run_folder.folder / CHECKPOINTS_FOLDER
    with raises(StorageError, folder, names=facts, suggests="start from scratch"):
        run_folder.start_run()


def test_changed_keys_are_logged_with_both_values(run_folder: RunFolder) -> None:
    """Keys that may differ between processes are not logged."""
    run_folder.save(4)
    start, output = run_folder.start_run(
        "optim.learning_rate=0.02", "model.dropout=0.1", "train.steps=25", "eval.every=6"
    )
    assert start.is_resumed
    notes = [line.strip() for line in output.splitlines() if "was" in line.split()]
    assert sorted(notes) == [
        "config: eval.every was 12 when step 4 was saved and is 6",
        "config: model.dropout was 0.0 when step 4 was saved and is 0.1",
        "config: optim.learning_rate was 0.01 when step 4 was saved and is 0.02",
        "config: train.steps was 24 when step 4 was saved and is 25",
    ]
    _, output = run_folder.start_run("runtime.heartbeat_timeout_seconds=11", "log.every=3")
    assert "when step 4 was saved" not in output
    _, output = run_folder.start_run()
    assert "when step 4 was saved" not in output
