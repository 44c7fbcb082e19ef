"""A small training state that is determined by its step, with helpers to save and restore it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.checkpoint.manager import CheckpointManager, open_run
from maxpipe.config.sections.checkpoint import CheckpointConfig

Tree = dict[str, Any]


class Faults:
    """A number of faults that the threads of a test share."""

    def __init__(self, number: int):
        self.left, self._lock = number, threading.Lock()

    def take(self) -> bool:
        """Return whether the calling thread must inject a fault."""
        with self._lock:
            if self.left:
                self.left -= 1
                return True
            return False


def tree(step: int) -> Tree:
    values = np.random.default_rng(step)
    params = {
        "embedding": jax.numpy.asarray(values.normal(size=(30, 8)), "float32"),
        "layers": {"scale": jax.numpy.asarray(values.normal(size=(4, 8)), "bfloat16")},
    }
    moments = {name: jax.tree.map(lambda leaf: leaf + 1, params) for name in ("mu", "nu")}
    return {"step": jax.numpy.int32(step), "params": params, "optimizer": moments}


def abstract(step: int = 0) -> Tree:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree(step)
    )


def config(step: int) -> dict[str, Any]:
    return {"run": {"seed": step}, "optim": {"learning_rate": 1e-3}}


def data(step: int) -> dict[str, Any]:
    return {"step": step, "fingerprint": {"source": "corpus"}}


def put(
    checkpoints: CheckpointManager, step: int, *, last: bool = False, loss: float | None = None
) -> None:
    values = {} if loss is None else {"eval/loss": loss}
    checkpoints.save(step, lambda: tree(step), config(step), data(step), values, last=last)


def save(run_dir: Path, *steps: int, keep: int = 5) -> Path:
    with CheckpointManager(run_dir, CheckpointConfig(keep=keep)) as checkpoints:
        for step in steps:
            put(checkpoints, step)
    return run_dir


def restore(run_dir: Path, step: int, abstract: Tree | None = None) -> Tree:
    with open_run(run_dir) as checkpoints:
        return checkpoints.restore(step, abstract).state


def files(step: Path) -> list[Path]:
    """Relative paths of all files in a step's folder, with the manifest last."""
    names = sorted(path.relative_to(step) for path in step.rglob("*") if path.is_file())
    return sorted(names, key=lambda name: name.name == "manifest.json")
