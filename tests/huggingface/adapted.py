"""Adapter checkpoints on top of a Hugging Face folder, made without training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.huggingface.folder import open_folder
from maxpipe.parallel.mesh import build_mesh
from maxpipe.restore.initial_weights import read_folder_params
from maxpipe.step.build import steps_from_config
from maxpipe.step.step import Steps
from maxpipe.train.resume import RunStart, restore_or_init
from tests.huggingface.test_starts import RecordingConsole
from tests.pipeline.test_engine import with_changes

FINGERPRINT = {"batch_size": 4}


class Made(NamedTuple):
    """A run with one checkpoint."""

    folder: Path
    steps: Steps
    params: Any
    """All parameters of the merged model, as in checkpoints."""


def begun(
    base: Path, runs: Path, *overrides: str, saved: bool = False
) -> tuple[LoadedConfig, Steps, RunStart]:
    """Start a run, or resume it if it has `saved` a checkpoint."""
    section = {**open_folder(str(base)).description.section, "compute_dtype": "float32"}
    section["param_dtype"] = "float32"
    known = {
        "run": {"name": "adapted", "dir": str(runs)},
        "model": section,
        "train": {"steps": 2, "batch_size": 4, "sequence_length": 8},
        "tokenizer": {"kind": "huggingface", "path": "none"},
        "checkpoint": {"restore_from": f"hf:{base}"},
    }
    loaded = load(list(overrides), known, "test")
    config = loaded.config
    mesh = build_mesh(config.mesh, jax.devices()[: config.mesh.cpu_devices])
    steps = steps_from_config(config, mesh, np.zeros(config.model.vocab_size, np.int32))
    train = SimpleNamespace(
        fingerprint=dict(FINGERPRINT).copy, resume_mixture=lambda fingerprint, step: False
    )
    datasets: Any = SimpleNamespace(train=train)
    console: Any = RecordingConsole()
    with CheckpointManager(runs / config.run.name, config.checkpoint, write=saved) as checkpoints:
        return loaded, steps, restore_or_init(loaded, steps, checkpoints, datasets, console)


def made(base: Path, runs: Path, *overrides: str) -> Made:
    """Save nonzero adapters as step 1 of a new run."""
    loaded, steps, start = begun(base, runs, "adapter.rank=2", "adapter.alpha=3", *overrides)
    saved = steps.to_saved(start.state)
    saved["params"] = with_changes(saved["params"])
    saved["step"] = saved["step"] + 1
    data = {"step": 1, "fingerprint": FINGERPRINT, "guard": None, "base": start.base}
    folder = runs / loaded.config.run.name
    with CheckpointManager(folder, loaded.config.checkpoint) as checkpoints:
        checkpoints.save(1, lambda: saved, to_dict(loaded.config), data, last=True)
    read = read_folder_params(open_folder(str(base)), steps.abstract_base)
    whole = steps.merge_adapters(read, saved["params"])
    return Made(folder, steps, jax.device_get(steps.param_layout.split_layer_types(whole)))
