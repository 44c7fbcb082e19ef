"""Questions with choices during training: parameters stay where they are, stages included.

Each choice is a row. The step of evaluation adds up its loss over the tokens of the choice, apart
from other rows': what it does for the sources of a mixture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxpipe.config.check import check
from maxpipe.config.eval_schema import TaskConfig
from maxpipe.config.rules import batch_shards
from maxpipe.config.schema import Config
from maxpipe.data.datasets import spoken_in_run
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.evals.choices import Exam, Question, Summary, as_chats, read, summary
from maxpipe.evals.texts import Row, Score, Texts, laid_out
from maxpipe.io.text import up
from maxpipe.parallel.sharding import local_rows, place_rows
from maxpipe.step.build import steps_of
from maxpipe.step.step import Steps

_ROWS = 64
"""Rows at a time at most, as far as devices divide them: each row's sum reads all of them."""


class Task:
    """A file of questions, and the program that scores their choices.

    Raises:
        ConfigError: the file cannot be read, or holds none, or one that is longer than a row.
    """

    def __init__(self, name: str, task: TaskConfig, config: Config, tokenizer: Tokenizer):
        key = f"eval.tasks.{name}"
        self.name = name
        self._questions = read(task.path, f"{key}.path")
        self._task, self._config, self._tokenizer = task, config, tokenizer
        self._texts = Texts(
            tokenizer, config.train.sequence_length, is_chat=task.chat, as_written=task.chat
        )
        questions: Sequence[Question] = self._questions
        if task.chat:
            questions = as_chats(
                questions, spoken_in_run(config, tokenizer), f"{key}.chat", f"Set {key}.chat=false"
            )
        self._exam = Exam(questions, "" if task.chat else task.separator)
        self._exam.check(self._texts, task.path)
        shards, _ = batch_shards(config.mesh)
        self.batch_size = min(config.eval.batch_size or config.train.batch_size, up(_ROWS, shards))
        self._params: Any = None
        self._stops: Callable[[], bool] = lambda: False

    def digest(self) -> str:
        """Of the questions, by which processes know whether all have the same."""
        return hashlib.sha256(json.dumps(self._questions).encode()).hexdigest()

    def compile(self, steps: Steps) -> None:
        """Makes the program that scores; parameters will be those of `steps`."""
        self._scoring = self._steps(steps)
        self._program = self._scoring.compile_eval(self.batch_size)

    def _steps(self, steps: Steps) -> Steps:
        """The steps of rows that are no longer than they have to be, with a sum for each."""
        config = self._config
        # As in generation an expert has room for all tokens: rows do not change each other.
        own: Any = config.model.own
        if getattr(own, "capacity_factor", 0):
            own = dataclasses.replace(own, capacity_factor=0.0)
        pairs = [each for one in self._exam.questions for each in self._exam.continuations(one)]
        longest = max(self._texts.row(*pair).length for pair in pairs)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, own=own),
            # That of the training's rows, where it follows from their length.
            pipeline=dataclasses.replace(config.pipeline, cut=list(steps.partition.layout.cut)),
        )
        fitting = (
            each
            for tokens in _shorter(config.train.sequence_length)
            if tokens >= longest and not check(each := _of_length(config, tokens), {})
        )
        whole = _of_length(config, config.train.sequence_length)
        mesh, lengths = steps.partition.mesh, self._tokenizer.byte_lengths
        return steps_of(next(fitting, whole), mesh, lengths, num_sources=self.batch_size)

    # What an exam asks for.

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """The log-likelihood of each continuation after its context.

        Raises:
            StoppedError: the processes were asked to stop.
        """
        rows = [self._texts.row(*pair) for pair in pairs]
        found: list[Score] = []
        for first in range(0, len(rows), self.batch_size):
            mine = rows[first : first + self.batch_size]
            sums = np.asarray(self._program(self._params, self._batch(mine))["loss"])
            found += [Score(-float(nats), False) for nats in sums[: len(mine)]]
            moved(len(found))
            if self._stops():
                raise StoppedError
        return found

    def _batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        count, tokens = self.batch_size, self._scoring.shape[1]
        batch, mask = laid_out(rows, count, tokens), np.zeros((count, tokens), np.float32)
        for number, row in enumerate(rows):
            mask[number, row.predicting] = 1
        numbers = np.arange(count, dtype=np.int32)
        batch |= {"loss_mask": mask, "example_ids": numbers, "source_ids": numbers}
        sharding = self._scoring.batch_sharding
        mine = local_rows(sharding, count)
        host = {name: each[mine] for name, each in batch.items()}
        return place_rows(host, mine, count, sharding)

    def answered(
        self, params: Any, stops: Callable[[], bool], moved: Callable[[], object]
    ) -> Summary | None:
        """How well parameters answer; nothing if `stops`, asked after each batch, says so.

        All processes of a run call it together.
        """
        self._params, self._stops = params, stops
        try:
            results = list(self._exam.results(self, lambda done: moved()))
        except StoppedError:
            return None
        finally:
            self._params = None
        found = summary(results)
        if not all(math.isfinite(each) for one in results for each in one["loglikelihoods"]):
            found["accuracy"] = found["accuracy_by_bytes"] = math.nan
        return found


class StoppedError(Exception):
    """The processes were asked to stop."""


def metrics_of(name: str, found: Summary) -> dict[str, float]:
    """By tag."""
    return {
        f"eval/{name}/accuracy": found["accuracy"],
        f"eval/{name}/accuracy_by_bytes": found["accuracy_by_bytes"],
    }


def tasks_of(config: Config, tokenizer: Tokenizer) -> list[Task]:
    """Those of `eval.tasks`, by name.

    Raises:
        ConfigError: a file of questions cannot be used.
    """
    tasks = sorted(config.eval.tasks.items())
    return [Task(name, task, config, tokenizer) for name, task in tasks]


def _shorter(tokens: int) -> list[int]:
    """`tokens` and what halving makes of them, the shortest first."""
    found = [tokens]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found[::-1]


def _of_length(config: Config, tokens: int) -> Config:
    train = dataclasses.replace(
        config.train, objective="pretrain", sequence_length=tokens, batch_ramp=[]
    )
    return dataclasses.replace(config, train=train)
