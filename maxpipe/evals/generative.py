"""Generative tasks: the model completes prompts, and a scorer rates the completions.

The random key of a completion depends only on the seed, the prompt's index and the sample's index,
so the completions of a model do not depend on the step, the layout or the batch size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import numpy as np

from maxpipe.config.sections.eval import GenerativeTaskConfig, pass_counts
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat_spec import add_end_of_turn_ids
from maxpipe.data.prompts import PromptRecord, check_prompt_lengths, read_prompt_records
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import ConfigError
from maxpipe.generation.completions import (
    Completion,
    DecodeEngineProtocol,
    GenerationLimits,
    Prompt,
    complete,
    parse_stops,
)
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    build_decode_engine,
    decode_param_converter,
    decode_param_layout,
)
from maxpipe.io.typed_json import parse_json
from maxpipe.rewards.process import RewardFunction, RewardSettings, check
from maxpipe.step.step import Steps

_MAX_NUMBERS = 1 << 31
"""Number of random keys of completions."""
_SHOWN_FAILURE = 600
SameOnAll = Callable[[str, str], Mapping[str, Sequence[int]]]
"""`ControlChannel.compare_across_processes`."""


class ScoredCompletion(TypedDict):
    """Result of one completion, which is written as one line of the output file."""

    line: str
    """File and line of the prompt."""
    sample: int
    """Index of the completion among the completions of its prompt."""
    prompt: str
    text: str
    tokens: int
    """Number of tokens of the completion."""
    finish_reason: str
    score: float


class GenerativeSummary(NamedTuple):
    """Metrics of a generative task."""

    prompts: int
    samples: int
    """Number of completions per prompt."""
    score: float
    """Mean score over all completions."""
    score_stderr: float
    """Standard error of `score`, computed from the mean scores of the prompts."""
    passes: dict[int, float]
    """Estimated pass@k, keyed by k; empty with one completion per prompt."""
    truncated: float
    """Fraction of completions that end at `max_tokens`."""
    failures: int
    """Number of completions for which the scorer failed."""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics, keyed by tag."""
        tags = {"score": self.score, "truncated": self.truncated}
        tags |= {f"pass_at_{count}": value for count, value in self.passes.items()}
        return {f"eval/{name}/{tag}": value for tag, value in tags.items()}

    def text(self) -> str:
        """Format the metrics as one line of text."""
        passes = "".join(f", pass@{k} {value:.4f}" for k, value in self.passes.items() if k > 1)
        counts = f"{self.prompts} prompts x {self.samples} completions"
        return (
            f"score {self.score:.4f} ± {self.score_stderr:.4f}{passes}, "
            f"truncated {self.truncated:.1%}, {counts}"
        )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k completions is correct.

    It is 1 - C(n - c, k) / C(n, k) for c correct ones of n completions (arXiv:2107.03374).
    """
    if num_samples - num_correct < k:
        return 1.0
    remaining = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / remaining))


def summarize(scored: Sequence[ScoredCompletion], samples: int, failures: int) -> GenerativeSummary:
    """Summarize the completions of at least one prompt, in prompt order."""
    scores = np.array([each["score"] for each in scored]).reshape(-1, samples)
    correct = (scores >= 1.0).sum(axis=1)
    by_prompt = scores.mean(axis=1)
    count = len(by_prompt)
    spread = float(by_prompt.std(ddof=1)) if count > 1 else 0.0
    return GenerativeSummary(
        prompts=count,
        samples=samples,
        score=float(scores.mean()),
        score_stderr=spread / math.sqrt(count),
        passes={
            k: float(np.mean([pass_at_k(samples, int(each), k) for each in correct]))
            for k in pass_counts(samples)
        },
        truncated=float(np.mean([each["finish_reason"] == "length" for each in scored])),
        failures=failures,
    )


class GenerativeTask:
    """A generative task: its prompts, its scorer, and the limits of its completions.

    Raises:
        ConfigError: the file cannot be read, a prompt is too long or cannot be scored, or the
            scorer cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        task: GenerativeTaskConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        sequence_length: int,
        batch_size: int,
        is_first_process: bool = True,
        is_stop_requested: Callable[[], bool] = lambda: False,
        is_cli: bool = False,
    ):
        """Read the prompts and, in the first process of a run, start the scorer.

        Error messages name the options of `maxpipe eval` if `is_cli` is set, else the config keys.
        """

        def key(name: str, option: str) -> str:
            return f"command line: --{option}" if is_cli else f"{section}.{name}"

        section = f"eval.generative_tasks.{name}"
        self.name, self._task = name, task
        self._settings = RewardSettings(
            kind=task.scorer,
            field=task.scorer_field,
            file=task.scorer_file,
            allow_code=task.allow_code,
            timeout_seconds=task.timeout_seconds,
            kind_key=key("scorer", "scorer"),
            file_key=key("scorer_file", "scorer"),
        )
        self._tokenizer = tokenizer
        records, self._file_digest = read_prompt_records(
            task.path,
            key("path", "prompts"),
            partial(check, self._settings),
            SourceConfig(),
            tokenizer,
            template,
            chat=task.chat,
        )
        if task.chat or any("messages" in each.record for each in records):
            self._tokenizer = add_end_of_turn_ids(tokenizer)
        self._records: list[PromptRecord] = records[: task.num_prompts or None]
        check_prompt_lengths(
            self._records,
            task.max_tokens,
            sequence_length,
            key("path", "prompts"),
            key("max_tokens", "max-tokens").rpartition(" ")[2],
        )
        stops, stop_ids = parse_stops(task.stop, tokenizer, key("stop", "stop"))
        self._limits = GenerationLimits(
            task.max_tokens,
            sequence_length,
            stops,
            batch_size=min(batch_size, self.num_completions),
            longest_prompt=max(len(each.ids) for each in self._records),
            stop_ids=stop_ids,
        )
        self._is_stop_requested, self._skipped = is_stop_requested, False
        self._scorer, self._is_first_process = RewardFunction(self._settings), is_first_process
        if is_first_process:
            self._scorer.start()
        self.close = self._scorer.close
        self._decoding: Any = None
        self._convert: Callable[[Any], Any] = lambda params: params
        self.last_failure = ""
        """Message of the last failure of the scorer in the newest evaluation, or ""."""

    @property
    def num_completions(self) -> int:
        """Number of completions in each evaluation."""
        return len(self._records) * self._task.samples

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the completions."""
        return Sampling(temperature=self._task.temperature)

    def digest(self) -> str:
        """Return a digest of prompts and scorer, which must be equal in all processes."""
        content = f"{self._file_digest} {self._scorer.fingerprint()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def compile(self, steps: Steps) -> None:
        """Build the decoding program for parameters sharded as in training (`steps`)."""
        parts = decode_param_layout(steps.param_layout)
        self._decoding = build_decode_engine(parts, self.sampling, steps.seed % (1 << 32))
        self._convert = decode_param_converter(steps.param_layout, parts)

    def evaluate(
        self, params: Any, stops: Callable[[], bool], moved: Callable[[], object], same: SameOnAll
    ) -> tuple[GenerativeSummary, list[ScoredCompletion]] | None:
        """Complete and score all prompts; None if `stops` returned true, or if a stop was requested
        while the first process computed scores.

        All processes of a run must call this method together. `moved` is called for each
        completion. Only the first process computes and returns scores, because a scorer with a time
        limit may return different scores in other processes. All processes get its summary.

        Raises:
            DivergenceError: the model returns non-finite log-probabilities.
        """
        assert self._decoding is not None
        try:
            scored, failures = self.results(
                self._decoding, self._convert(params), stops, lambda _: moved()
            )
        except KeyboardInterrupt:
            return None
        own = ""
        if self._is_first_process and not self._skipped:
            own = json.dumps(summarize(scored, self._task.samples, failures))
        values = same(f"summary of {self.name}", own)
        shared = next(value for value, processes in values.items() if 0 in processes)
        if not shared:
            return None
        summary = GenerativeSummary(*parse_json(shared, list[Any]))
        passes = {int(k): value for k, value in dict(summary.passes).items()}
        return summary._replace(passes=passes), scored

    def results(
        self,
        decoding: DecodeEngineProtocol,
        params: Any,
        stops: Callable[[], bool],
        write: Callable[[ScoredCompletion], object],
    ) -> tuple[list[ScoredCompletion], int]:
        """Return the completions with their scores in prompt order, and the number of scorer
        failures. Scores are NaN in processes other than the first one.

        `write` receives each scored completion.

        Raises:
            KeyboardInterrupt: `stops` returned true, or the process was interrupted.
        """
        scored: list[ScoredCompletion] = []
        failures, self.last_failure, self._skipped = 0, "", False

        def score(done: Completion) -> None:
            nonlocal failures
            if done.finish_reason == "interrupted":
                return
            prompt, sample = divmod(len(scored), self._task.samples)
            record = self._records[prompt]
            value = math.nan
            try:
                # The scores of a stopped evaluation are not used.
                self._skipped = self._skipped or self._is_stop_requested()
                if self._is_first_process and not self._skipped:
                    value = self._scorer.compute(done.text, record.record, record.where)
            except ConfigError as error:
                failures, value = failures + 1, 0.0
                self.last_failure = str(error)[:_SHOWN_FAILURE]
            scored.append(
                {
                    "line": record.where,
                    "sample": sample,
                    "prompt": record.text,
                    "text": done.text,
                    "tokens": len(done.tokens),
                    "finish_reason": done.finish_reason or "",
                    "score": value,
                }
            )
            write(scored[-1])

        complete(
            decoding,
            params,
            self._tokenizer,
            list(self._prompts()),
            self._limits,
            write=score,
            stops=stops,
        )
        return scored, failures

    def _prompts(self) -> Iterator[Prompt]:
        """Yield each prompt once per completion. The number selects the random key."""
        for index, record in enumerate(self._records):
            for sample in range(self._task.samples):
                number = (index * self._task.samples + sample) % _MAX_NUMBERS
                yield Prompt(number, record.text, record.ids.tolist())
