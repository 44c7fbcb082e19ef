"""Order of teacher requests and student batches, and the transfer metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.loader import Loader, build_loaders
from maxpipe.distributed.phases import Phases
from maxpipe.objectives import TEACHER_IDS, TEACHER_LOGPROBS
from maxpipe.posttrain.distill import TeacherLoader

ROWS, TOKENS, COUNT = 4, 16, 3


class EchoTeacher:
    """A teacher on its own device whose logits are the input tokens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        mesh = jax.make_mesh((1,), ("rows",), devices=jax.devices()[-1:])
        self.sharding = NamedSharding(mesh, PartitionSpec("rows"))

    def place_batch(self, host: Any, rows: np.ndarray, count: int) -> dict[str, jax.Array]:
        assert rows.tolist() == list(range(count))
        return {"tokens": jax.device_put(host["tokens"], self.sharding)}

    def compute_logits(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        self.log.append(f"asked {len([each for each in self.log if each[0] == 'a'])}")
        ids = np.repeat(np.asarray(batch["tokens"])[..., None], COUNT, axis=-1)
        found = {TEACHER_IDS: ids, TEACHER_LOGPROBS: ids.astype(np.float32)}
        return jax.device_put(found, self.sharding)


def loader_of(folder: Path) -> Loader:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the sea is wide and deep and blue. " * 40)
    data = DataConfig(source="text", path=str(folder / "text"), validation_fraction=0.0)
    found = build_loaders(data, TokenizerConfig(), seed=0, batch_size=ROWS, sequence_length=TOKENS)
    return found.train


def test_teacher_runs_one_batch_ahead(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    teacher, loader = EchoTeacher(), loader_of(tmp_path)
    teacher_loader = TeacherLoader(teacher, sharding, Phases())  # type: ignore[arg-type]

    def steps() -> Iterator[int]:
        with teacher_loader.batches(loader, 5, 9) as batches:
            for number, batch in enumerate(batches):
                teacher.log.append(f"got {number}")
                wanted = loader.batch(5 + number)
                np.testing.assert_array_equal(batch["tokens"], wanted["tokens"])
                np.testing.assert_array_equal(batch[TEACHER_IDS][..., 1], wanted["tokens"])
                assert batch[TEACHER_LOGPROBS].sharding == sharding
                yield number

    assert list(steps()) == [0, 1, 2, 3]
    order = ["asked 0", "asked 1", "got 0", "asked 2", "got 1", "asked 3", "got 2", "got 3"]
    assert teacher.log == order
    read, answers = 4 * ROWS * TOKENS, 2 * 4 * ROWS * TOKENS * COUNT
    assert teacher_loader.take_metrics()["distill/transfer_bytes"] == read + answers
    assert teacher_loader.take_metrics()["distill/transfer_bytes"] == 0


def test_teacher_stops_when_loader_closes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])
    teacher = EchoTeacher()
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    teacher_loader = TeacherLoader(teacher, sharding, Phases())  # type: ignore[arg-type]
    with teacher_loader.batches(loader_of(tmp_path), 0, 9) as batches:
        next(batches)
    assert teacher.log == ["asked 0", "asked 1"]
