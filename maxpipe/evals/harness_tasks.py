"""Tasks of lm-evaluation-harness during training, with the parameters on the training devices.

Every process processes the same requests in the same order. Only the first process computes
metrics, which it shares with the others. The harness is imported on first use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from maxpipe.config.rules import did_you_mean
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import Code, ConfigError, MaxpipeError
from maxpipe.evals.language_model import (
    RequestModel,
    Score,
    ScoringSequence,
    ScoringTokenizer,
    right_pad,
    score_in_batches,
    to_score,
)
from maxpipe.generation.completions import DecodeEngineProtocol
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    build_decode_engine,
    decode_param_converter,
    decode_param_layout,
)
from maxpipe.io.typed_json import parse_json
from maxpipe.parallel.sharding import local_sequences, make_global_batch
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.step.step import Steps

_KEY = "eval.harness_tasks"
_MAX_REASON = 300
_log = logging.getLogger("maxpipe")


class TrainingModel(RequestModel):
    """The model of a run, with the parameters sharded as in training."""

    def __init__(
        self,
        steps: Steps,
        scoring_steps: Callable[[int], Steps],
        tokenizer: Tokenizer,
        batch_size: int,
        should_stop: Callable[[], bool],
        moved: Callable[[], object],
    ):
        """Set up the programs, which are compiled on first use.

        Args:
            steps: steps of the run.
            scoring_steps: function that returns steps for sequences of at least this length.
            tokenizer: tokenizer of the run.
            batch_size: number of sequences that are scored together.
            should_stop: function that returns whether all processes should stop.
            moved: function that is called to report progress.
        """
        texts = ScoringTokenizer(tokenizer, steps.shape[1])
        super().__init__(texts, batch_size, should_stop)
        self._scoring_steps, self._moved = scoring_steps, moved
        self._programs: dict[int, tuple[Steps, Any]] = {}
        parts = decode_param_layout(steps.param_layout)
        self._convert = decode_param_converter(steps.param_layout, parts)
        self._engine = cache(
            lambda sampling: build_decode_engine(parts, sampling, steps.seed % (1 << 32))
        )
        self._params: Any = None
        self._decode_params: Any = None

    @contextlib.contextmanager
    def params(self, params: Any) -> Iterator[None]:
        """Use these parameters inside the context."""
        self._params = params
        try:
            yield
        finally:
            self._params = self._decode_params = None

    def score(
        self, rows: Sequence[ScoringSequence], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Score sequences in batches of similar length; see `RequestModel.score`."""

        def report(done: int) -> None:
            moved(done)
            self._moved()

        return score_in_batches(rows, self.batch_size, self._score_batch, self.should_stop, report)

    def _score_batch(self, rows: Sequence[ScoringSequence]) -> list[Score]:
        steps, program = self._program(max(row.length for row in rows))
        count, tokens = self.batch_size, steps.shape[1]
        batch = right_pad(rows, count, tokens)
        host: dict[str, Any] = batch | {
            "loss_mask": np.ones((count, tokens), np.float32),
            "example_ids": np.arange(count, dtype=np.int32),
        }
        mine = local_sequences(steps.batch_sharding, count)
        local = {name: each[mine] for name, each in host.items()}
        placed = make_global_batch(local, mine, count, steps.batch_sharding)
        (logprobs, (_, best)) = jax.device_get(program(self._params, placed))
        is_best = best[..., 0] == batch["targets"]
        return [
            to_score(row, logprobs[0][number], is_best[number]) for number, row in enumerate(rows)
        ]

    def _program(self, longest: int) -> tuple[Steps, Any]:
        """Return the scoring program of the shortest sequence length that fits."""
        steps = self._scoring_steps(longest)
        tokens = steps.shape[1]
        if tokens not in self._programs:
            program = steps.compile_reader(_scores_and_best, self.batch_size, everywhere=True)
            self._programs[tokens] = steps, program
        return self._programs[tokens]

    def decoding(self, sampling: Sampling) -> tuple[DecodeEngineProtocol, Any]:
        """Return a decode engine, and the parameters in the layout that it requires."""
        if self._decode_params is None:
            self._decode_params = self._convert(self._params)
        return self._engine(sampling), self._decode_params


def _scores_and_best(
    head: LossHead, norm: Any, columns: Any, output: jax.Array, inputs: Any
) -> Any:
    return (
        head.scores(norm, columns, output, inputs),
        head.top_log_probs(norm, columns, output, inputs, count=1, temperature=1.0),
    )


class HarnessTasks:
    """The tasks of `eval.harness_tasks`.

    Raises:
        ConfigError: the harness is not installed, or a task is unknown or cannot be loaded.
    """

    def __init__(self, eval_config: EvalConfig):
        self._names, self._config = list(eval_config.harness_tasks), eval_config
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        try:
            from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

            if not hasattr(TaskManager, "load"):
                raise ImportError("lm-eval must be at least 0.4.12")
        except ImportError as error:
            rule = f"requires lm-evaluation-harness: {error}."
            action = "Run: pip install 'maxpipe[harness]'"
            names = ", ".join(self._names)
            raise ConfigError.one(Code.ENV_PACKAGE, _KEY, names, rule, action) from error

        self._manager = TaskManager(include_path=eval_config.harness_path or None)
        known = self._manager.all_tasks
        for name in self._names:
            if name not in known:
                guess = did_you_mean(name, known)
                rule = "must be a task of lm-evaluation-harness or in eval.harness_path."
                action = f"Set {_KEY}=[{guess}]." if guess else "Run `lm-eval ls tasks`."
                raise ConfigError.one(Code.CFG_VALUE, _KEY, name, rule, action)
        try:
            self._manager.load(self._names)  # downloads the datasets
        except Exception as error:
            rule = f"cannot be loaded: {type(error).__name__}: {error}"[:_MAX_REASON]
            action = "Check the network, or download the datasets before the run."
            names = ", ".join(self._names)
            raise ConfigError.one(Code.DATA_MISSING, _KEY, names, f"{rule}.", action) from error
        self._model: TrainingModel | None = None

    def compile(
        self,
        steps: Steps,
        scoring_steps: Callable[[int], Steps],
        tokenizer: Tokenizer,
        should_stop: Callable[[], bool],
        moved: Callable[[], object],
    ) -> None:
        """Set up the programs; see `TrainingModel`."""
        rows = self._config.batch_size or steps.shape[0]
        self._model = TrainingModel(steps, scoring_steps, tokenizer, rows, should_stop, moved)

    def is_due(self, step: int) -> bool:
        """Return whether the evaluation after a step includes these tasks."""
        return not self._config.harness_every or step % self._config.harness_every == 0

    def evaluate(
        self, params: Any, same: Callable[[str, str], Mapping[str, Sequence[int]]], *, first: bool
    ) -> dict[str, float] | None:
        """Return the metrics, keyed by tag; None if a stop was requested.

        All processes of a run must call this method together. `first` is set in the first process.

        Raises:
            DivergenceError: the outputs of the model are not finite.
        """
        import lm_eval  # pyright: ignore[reportMissingImports]

        from maxpipe.evals.harness import RequestHarnessModel

        assert self._model is not None
        own = ""
        try:
            # The warnings about default metrics were printed when the tasks were loaded.
            with self._model.params(params), _log_level("lm_eval", logging.ERROR):
                found = lm_eval.simple_evaluate(
                    model=RequestHarnessModel(self._model, "maxpipe"),
                    tasks=self._names,
                    task_manager=self._manager,
                    num_fewshot=None if (count := self._config.harness_fewshot) < 0 else count,
                    limit=self._config.harness_limit or None,
                    bootstrap_iters=0,
                    log_samples=False,
                )
            if first and found is not None:
                own = json.dumps(harness_metrics(found["results"]))
        except KeyboardInterrupt:
            return None
        except MaxpipeError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
            _log.warning("%s: the evaluation failed (%s). Training continues.", _KEY, reason)
        values = same(_KEY, own)
        shared = next((value for value, indices in values.items() if 0 in indices), "")
        return parse_json(shared, dict[str, float]) if shared else {}


@contextlib.contextmanager
def _log_level(name: str, level: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def harness_metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all tasks, keyed by `harness/TASK/METRIC`.

    The harness names a metric `acc,none`, where the part after the comma is a filter of responses.
    """
    metrics = {}
    for task, values in results.items():
        for key, value in values.items():
            name, _, rule = key.partition(",")
            if name.endswith("_stderr") or isinstance(value, bool | str):
                continue
            if isinstance(value, int | float) and math.isfinite(value) and rule:
                suffix = "" if rule == "none" else f"_{rule}"
                names = (re.sub(r"[^\w.-]", "_", each) for each in (task, f"{name}{suffix}"))
                metrics["/".join(("harness", *names))] = float(value)
    return metrics
