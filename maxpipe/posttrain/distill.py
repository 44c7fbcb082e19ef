"""Batches with what a teacher says of them, asked or stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxpipe.config.load import Loaded
from maxpipe.config.schema import Config
from maxpipe.data.loader import Batch, Datasets, Loader
from maxpipe.data.prepared.logits import StoredAnswers, TeacherEntry, open_stored
from maxpipe.data.stream import Arrays
from maxpipe.distributed.phases import STEP, Phases
from maxpipe.io.files import full, scheme
from maxpipe.objectives.distill import TEACHER_IDS, TEACHER_LOGPROBS
from maxpipe.parallel.sharding import local_rows, place_rows, placed_again
from maxpipe.posttrain.teacher import Answer, Teacher, open_teacher
from maxpipe.step.step import Steps

Stage = Callable[[str], contextlib.AbstractContextManager[object]]
"""Shows, by these words, what takes a while."""


class Lessons:
    """Asks the teacher one batch ahead, so that it works while the student does.

    Only token batches go to the teacher's devices, and answers `[B, T, K]` to the student's.
    """

    def __init__(self, teacher: Teacher, sharding: NamedSharding, phases: Phases):
        """`sharding` is that of the student's batches."""
        self.teacher, self._sharding, self._phases = teacher, sharding, phases
        self._waited, self._bytes, self._count = 0.0, 0, 0

    def compile(self, count: int) -> None:
        """Compiles the teacher for batches of this number of rows."""
        self.teacher.compile(count, self._sharding)

    def batches(self, loader: Loader, start: int, stop: int) -> contextlib.closing[Generator[Any]]:
        """Global batches of the steps from `start` to before `stop`, read ahead."""
        held = self._sharding, self.teacher.sharding
        rows = {
            count: reduce(np.union1d, (local_rows(each, count) for each in held))
            for count in loader.ramp.sizes(start)
        }

        def placed(host: Batch, count: int) -> tuple[Any, Any]:
            mine = rows[count]
            teachers = self.teacher.place(host, mine, count)
            return place_rows(host, mine, count, self._sharding), teachers

        source = loader.batches(start, rows.__getitem__, stop_step=stop, made=placed)

        def taught() -> Generator[Any]:
            asked: tuple[Any, Answer, int] | None = None
            try:
                with source:
                    for batch, read in source:
                        sent = sum(array.nbytes for array in read.values())
                        before, asked = asked, (batch, self.teacher.ask(read), sent)
                        if before is not None:
                            yield self._answered(*before)
                if asked is not None:
                    yield self._answered(*asked)
            finally:  # Python that ends while devices compute may crash
                jax.block_until_ready(asked and asked[1])

        return contextlib.closing(taught())

    def _answered(self, batch: Any, answer: Answer, sent: int) -> Any:
        """The batch with the answer; `sent` are the bytes that went to the teacher."""
        begin = time.perf_counter()
        with self._phases.enter(STEP):
            jax.block_until_ready(answer)
        self._waited += time.perf_counter() - begin
        self._count += 1
        self._bytes += sent + sum(each.nbytes for each in answer.values())
        return batch | placed_again(answer, self._sharding)

    def take(self) -> dict[str, float]:
        """Metrics of a step, means since the last call."""
        count = max(self._count, 1)
        found = {
            "distill/teacher_wait_s": self._waited / count,
            "distill/transfer_bytes": self._bytes / count,
        }
        self._waited, self._bytes, self._count = 0.0, 0, 0
        return found


@dataclass(frozen=True)
class Taught:
    """Where what a teacher says comes from; nothing without one."""

    teacher: TeacherEntry | None = None
    lessons: Lessons | None = None
    """Of a teacher that is asked. What is stored comes with the rows."""
    words: Sequence[tuple[str, str]] = ()
    """For people."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.teacher is None else {"teacher": self.teacher}

    def compile(self, sizes: Iterable[int], stage: Stage) -> None:
        """Compiles the teacher for batches of these sizes."""
        if self.lessons is not None:
            with stage("compiling the teacher"):
                for rows in sizes:
                    self.lessons.compile(rows)

    def take(self) -> dict[str, float]:
        """Metrics of a step, means since the last call."""
        return {} if self.lessons is None else self.lessons.take()


def taught_by(
    loaded: Loaded,
    datasets: Datasets,
    steps: Steps,
    phases: Phases,
    stage: Stage,
) -> Taught:
    """What the config says of a teacher.

    Raises:
        ConfigError: there is no such teacher, or it does not fit the run.
        StorageError: its files are damaged, or cannot be read.
    """
    config = loaded.config
    if config.train.objective != "distill":
        return Taught()
    told = f"{config.distill.top_k} most likely tokens"
    if config.distill.stored:
        stored = read_stored(config, datasets.train)
        words = f"{stored.teacher['name']}, its {told}, stored in {config.distill.stored}"
        return Taught(stored.teacher, words=[("teacher", words)])
    with stage(f"opening the teacher {config.distill.teacher}"):
        teacher = open_teacher(loaded, datasets.tokenizer)
    words = f"{teacher.name}, its {told}, on {teacher.mesh}"
    lessons = Lessons(teacher, steps.batch_sharding, phases)
    return Taught(teacher.entry, lessons, [("teacher", words)])


def read_stored(config: Config, loader: Loader) -> StoredAnswers:
    """Lets each sequence of training come with the answer that is stored for it.

    Raises:
        ConfigError: the folder is of other rows, or was made for other numbers.
        StorageError: it is damaged, or cannot be read.
    """
    own = config.distill
    folder = own.stored if scheme(own.stored) else str(full(own.stored, "distill.stored"))
    stored = open_stored(
        folder,
        loader.facts_of_rows(),
        vocab_size=config.model.vocab_size,
        temperature=own.temperature,
        top_k=own.top_k,
        row_tokens=config.train.sequence_length,
    )
    shape = (config.train.sequence_length, own.top_k)

    def beside(source: str, sequence: int, arrays: Arrays) -> Mapping[str, np.ndarray]:
        if sequence < 0:
            ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        else:
            ids, logprobs = stored.read(source, sequence, arrays)
        return {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}

    loader.stream.beside = beside
    return stored
