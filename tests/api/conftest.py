"""Small runs on eight virtual CPU devices: two stages and four fsdp shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = {
    "model": {"num_layers": 4, "d_model": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    | {"d_mlp": 32, "vocab_size": 259, "compute_dtype": "float32"},
    "mesh": {"cpu_devices": 8, "ici_stage": 2, "ici_fsdp": 4},
    "pipeline": {"schedule": "1f1b", "microbatches": 2},
    "train": {"steps": 6, "batch_size": 8, "sequence_length": 16},
    "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
    "checkpoint": {"every": 100, "keep": 10},
    "eval": {"every": 100, "batches": 2},
    "log": {"every": 1, "trackers": []},
    "runtime": {"platform": "cpu", "compilation_cache": ""},
}
Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    for number in range(40):
        letters = words.choices("etaoin shrdlu", k=words.randint(20, 400))
        (folder / f"{number}.txt").write_text("".join(letters))
    return folder


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Settings:
    """`settings(name, **sections)`: a config as a dict, for a run in a folder of this session."""
    runs = tmp_path_factory.mktemp("runs")

    def make(name: str, **more: Any) -> dict[str, Any]:
        data = {"source": "text", "path": str(text_folder), "validation_fraction": 0.2}
        return SMALL | {"run": {"name": name, "dir": str(runs)}, "data": data} | more

    return make
