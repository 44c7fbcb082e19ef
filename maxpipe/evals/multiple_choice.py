"""Multiple-choice tasks: the choice with the highest likelihood is the prediction.

During training, parameters remain on their devices, even with pipeline stages. Each choice is a
sequence. The evaluation step computes a separate loss for each sequence, as it does for the sources
of a mixture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np

from maxpipe.config.check import check
from maxpipe.config.rules import batch_shards, did_you_mean
from maxpipe.config.schema import Config
from maxpipe.config.sections.eval import TaskConfig
from maxpipe.data.datasets import load_run_chat_template
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.evals.language_model import Score, ScoringSequence, ScoringTokenizer, right_pad
from maxpipe.io import files
from maxpipe.io.formatting import round_up
from maxpipe.io.typed_json import parse_json
from maxpipe.parallel.sharding import local_sequences, make_global_batch
from maxpipe.step.build import steps_from_config
from maxpipe.step.step import Steps

_MAX_FILE_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 24
_MAX_PROBLEMS = 20
_CONTEXT_FIELDS = ("context", "prompt")
_BATCHES_PER_CALL = 64
"""Number of batches whose results are written together."""


class Question(NamedTuple):
    """A question from a task file."""

    line: int
    """Line number of the question in the task file, counted from 1."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the correct choice, counted from 0."""


class QuestionResult(TypedDict):
    """Result of one question, which is written as one line of the output file."""

    line: int
    answer: int
    chosen: int
    """Index of the most likely choice."""
    chosen_by_bytes: int
    """Index of the choice with the largest log-likelihood per byte."""
    loglikelihoods: list[float]
    """Log-likelihood of each choice in nats."""
    bytes: list[int]
    """Length of each choice in bytes."""


class TaskSummary(TypedDict):
    """Accuracy of a model on a task."""

    questions: int
    accuracy: float
    """Fraction of questions whose most likely choice is correct."""
    accuracy_stderr: float
    """Standard error of the accuracy."""
    accuracy_by_bytes: float
    """Accuracy with log-likelihoods divided by the byte length of the choice."""
    accuracy_by_bytes_stderr: float
    chance: float
    """Expected accuracy of a random choice."""


def read_questions(path: str, where: str) -> list[Question]:
    """Read the questions in a file; `where` is the config key or option that sets the path.

    Raises:
        ConfigError: the file cannot be read or has invalid lines; the error lists every such line.
    """
    try:
        raw = files.read(path, _MAX_FILE_BYTES)
    except OSError as error:
        rule = f"must be a readable file: {error.strerror or error}."
        raise ConfigError.one(
            Code.DATA_UNREADABLE, where, path, rule, f"Use a file with lines such as {_EXAMPLE}."
        ) from error
    found: list[Question] = []
    problems: list[Problem] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            try:
                found.append(_question(number, line))
            except ValueError as error:
                given = line[:60].decode("utf-8", "replace") + ("..." if len(line) > 60 else "")
                action = f"Correct or remove this line. Example: {_EXAMPLE}."
                problems.append(
                    Problem(Code.DATA_RECORD, f"{path}:{number}", given, f"{error}.", action)
                )
    if problems:
        raise ConfigError(problems[:_MAX_PROBLEMS])
    if not found:
        rule = "must contain at least one question, one per line."
        raise ConfigError.one(
            Code.DATA_EMPTY, where, path, rule, f"Write lines such as {_EXAMPLE}."
        )
    return found


_EXAMPLE = '{"context": "2 + 2 =", "choices": ["4", "5"], "answer": 0}'


def _question(number: int, line: bytes) -> Question:
    """Parse one line of a task file.

    Raises:
        ValueError: the line is not a valid question; the message states the violated rule.
    """
    try:
        record = parse_json(line, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"must be a JSON object in UTF-8: {error}") from error
    context = [record[name] for name in _CONTEXT_FIELDS if name in record]
    if len(context) != 1 or not isinstance(context[0], str):
        guess = did_you_mean(next(iter(record), ""), _CONTEXT_FIELDS) if not context else ""
        more = f"; did you mean {guess} instead of {next(iter(record))!r}?" if guess else ""
        raise ValueError(f"must have one string `context` (or `prompt`){more}".rstrip("?"))
    choices = record.get("choices")
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise ValueError("must have `choices`, a list of strings")
    if len(choices) < 2 or "" in choices or len({*choices}) < len(choices):
        raise ValueError("must have at least 2 `choices`, all different and none of them empty")
    answer = record.get("answer")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        most = len(choices) - 1
        raise ValueError(f"must have `answer`, an index from 0 to {most} or one of the choices")
    for text in (context[0], *choices):
        text.encode()  # raises an error for an unpaired surrogate
    return Question(number, context[0], tuple(choices), answer)


class LoglikelihoodModel(Protocol):
    """A model that scores continuations: `LanguageModel`, or `Task` during training."""

    batch_size: int
    """Sequences per batch."""

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = ...
    ) -> Sequence[Score]:
        """Return the log-likelihood of each continuation after its context."""
        ...


def apply_chat_template(
    questions: Sequence[Question], chat: ChatTemplate | None, where: str, remedy: str
) -> list[Question]:
    """Render the contexts of questions as user messages with a chat template.

    Raises:
        ConfigError: there is no template, although `where` requires it, or the template rejects a
            context.
    """
    if chat is None:
        rule = "requires a chat template, but the tokenizer's folder has none."
        action = f"{remedy}, or add chat_template.jinja to the folder of tokenizer.path."
        raise ConfigError.one(Code.TOK_TEMPLATE, where, None, rule, action)
    texts = chat.render(
        [ChatInput([{"role": "user", "content": each.context}]) for each in questions]
    )
    return [each._replace(context=text) for each, text in zip(questions, texts, strict=True)]


@dataclass
class MultipleChoice:
    """Multiple-choice questions, which are converted to continuations."""

    questions: Sequence[Question]
    separator: str = " "
    """Separator between a context and a choice, inserted if there is no white space."""

    def continuations(self, question: Question) -> list[tuple[str, str]]:
        """Return (context, continuation) for every choice; continuations include the separator."""
        before = question.context
        joined = not before or before[-1].isspace()
        return [
            (before, each if joined or each[0].isspace() else self.separator + each)
            for each in question.choices
        ]

    def check(self, texts: ScoringTokenizer, path: str) -> None:
        """Check that all questions fit into the sequence length.

        Raises:
            ConfigError: some questions are too long.
        """
        problems = []
        for question in self.questions:
            rows = [texts.sequence(*pair) for pair in self.continuations(question)]
            longest = max(row.length for row in rows)
            if longest > texts.max_length:
                rule = (
                    f"has {longest} tokens, but at most {texts.max_length} fit "
                    "(train.sequence_length)."
                )
                action = f"Shorten the question, or set train.sequence_length={longest}."
                problems.append(
                    Problem(Code.DATA_RECORD, f"{path}:{question.line}", "", rule, action)
                )
        if problems:
            raise ConfigError(problems[:_MAX_PROBLEMS])

    def results(
        self, model: LoglikelihoodModel, moved: Callable[[int], object] = lambda done: None
    ) -> Iterator[QuestionResult]:
        """Yield the result of each question in order.

        `moved` is called with the number of finished sequences.

        Raises:
            DivergenceError: the outputs of the model are not finite.
            KeyboardInterrupt: `stops` of the model returned true.
        """
        done, waiting, rows = 0, [], 0
        for number, question in enumerate(self.questions, 1):
            waiting.append(question)
            rows += len(question.choices)
            if rows < _BATCHES_PER_CALL * model.batch_size and number < len(self.questions):
                continue
            pairs = [pair for each in waiting for pair in self.continuations(each)]
            before = done
            scores = iter(model.loglikelihood(pairs, lambda more, n=before: moved(n + more)))
            done += rows
            for each in waiting:
                yield _result(each, [next(scores).logprob for _ in each.choices])
            waiting, rows = [], 0


def _result(question: Question, logprobs: list[float]) -> QuestionResult:
    sizes = [len(each.encode()) for each in question.choices]
    by_bytes = [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
    return {
        "line": question.line,
        "answer": question.answer,
        "chosen": logprobs.index(max(logprobs)),
        "chosen_by_bytes": by_bytes.index(max(by_bytes)),
        "loglikelihoods": logprobs,
        "bytes": sizes,
    }


def summarize_results(results: Sequence[QuestionResult]) -> TaskSummary:
    """Summarize the results of at least one question."""
    count = len(results)
    shares = [
        sum(each[name] == each["answer"] for each in results) / count
        for name in ("chosen", "chosen_by_bytes")
    ]
    errors = [math.sqrt(share * (1 - share) / max(count - 1, 1)) for share in shares]
    return {
        "questions": count,
        "accuracy": shares[0],
        "accuracy_stderr": errors[0],
        "accuracy_by_bytes": shares[1],
        "accuracy_by_bytes_stderr": errors[1],
        "chance": sum(1 / len(each["bytes"]) for each in results) / count,
    }


@contextlib.contextmanager
def result_writer(
    path: str | None, where: str, kind: type[Any] = QuestionResult
) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes results to a file, one JSON object per line.

    If no path is set, results are discarded. A file with earlier results, whose first line has the
    type `kind`, is overwritten.

    Raises:
        ConfigError: the path exists and is not a results file (for example, the questions file).
        StorageError: the file cannot be written.
    """
    if path is None:
        yield lambda result: None
        return

    def unwritable(error: OSError) -> StorageError:
        action = "Free disk space, or specify a file in an existing writable folder."
        return StorageError.unwritable(f"{where} = {path}", error, action)

    try:
        if not _is_replaceable(path, kind):
            rule = "must be a new file, or a file with earlier results."
            raise ConfigError.one(
                Code.CLI_OUTPUT, where, path, rule, "Use another path, or delete the file first."
            )
        descriptor = files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except OSError as error:
        raise unwritable(error) from error
    # Unbuffered, because a failed write to a full disk would otherwise be repeated at close.
    with open(descriptor, "wb", buffering=0) as stream:

        def write(result: Any) -> None:
            line = memoryview(f"{json.dumps(result)}\n".encode())
            try:
                while line:
                    line = line[stream.write(line) :]
            except OSError as error:
                raise unwritable(error) from error

        yield write


def _is_replaceable(path: str, kind: type[Any]) -> bool:
    """Return True if it is safe to overwrite the path: no file, an empty file or earlier results.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(files.open_regular(path), "rb") as stream:
            first = stream.readline(_MAX_LINE_BYTES)
    except FileNotFoundError:
        return True
    with contextlib.suppress(ValueError):
        return not first or bool(parse_json(first, kind))
    return False


_MAX_BATCH_SIZE = 64
"""Maximum batch size, rounded up to a multiple of the number of shards. The batch size is limited,
because the sum for each sequence is computed from the complete batch."""


class Task:
    """A multiple-choice task: its questions and the program that scores their choices.

    Raises:
        ConfigError: the file cannot be read, has no questions, or has a question that is too long.
    """

    def __init__(self, name: str, task: TaskConfig, config: Config, tokenizer: Tokenizer):
        key = f"eval.tasks.{name}"
        self.name = name
        self._questions = read_questions(task.path, f"{key}.path")
        self._task, self._config, self._tokenizer = task, config, tokenizer
        self._texts = ScoringTokenizer(
            tokenizer, config.train.sequence_length, is_chat=task.chat, skips_bos=task.chat
        )
        questions: Sequence[Question] = self._questions
        if task.chat:
            questions = apply_chat_template(
                questions,
                load_run_chat_template(config, tokenizer),
                f"{key}.chat",
                f"Set {key}.chat=false",
            )
        self._multiple_choice = MultipleChoice(questions, "" if task.chat else task.separator)
        self._multiple_choice.check(self._texts, task.path)
        shards, _ = batch_shards(config.mesh)
        self.batch_size = min(
            config.eval.batch_size or config.train.batch_size, round_up(_MAX_BATCH_SIZE, shards)
        )
        self._params: Any = None
        self._should_stop: Callable[[], bool] = lambda: False

    def digest(self) -> str:
        """Return a digest of the questions, which must be equal in all processes."""
        return hashlib.sha256(json.dumps(self._questions).encode()).hexdigest()

    def compile(self, steps: Steps) -> None:
        """Compile the scoring function for parameters sharded as in training (`steps`)."""
        self._scoring_steps = self._build_steps(steps)
        self._program = self._scoring_steps.compile_eval(self.batch_size)

    def _build_steps(self, steps: Steps) -> Steps:
        """Return steps for scoring, with the shortest sequence length that fits all questions.

        The evaluation step returns one sum per sequence.
        """
        pairs = [
            each
            for one in self._multiple_choice.questions
            for each in self._multiple_choice.continuations(one)
        ]
        longest = max(self._texts.sequence(*pair).length for pair in pairs)
        lengths = self._tokenizer.byte_lengths
        return build_scoring_steps(
            self._config, steps, lengths, longest, num_sources=self.batch_size
        )

    # Implementation of `LoglikelihoodModel`.

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Return the log-likelihood of each continuation after its context.

        Raises:
            StoppedError: the processes received a stop request.
        """
        rows = [self._texts.sequence(*pair) for pair in pairs]
        found: list[Score] = []
        for first in range(0, len(rows), self.batch_size):
            mine = rows[first : first + self.batch_size]
            sums = np.asarray(self._program(self._params, self._batch(mine))["loss"])
            found += [Score(-float(nats), False) for nats in sums[: len(mine)]]
            moved(len(found))
            if self._should_stop():
                raise StoppedError
        return found

    def _batch(self, rows: Sequence[ScoringSequence]) -> dict[str, Any]:
        count, tokens = self.batch_size, self._scoring_steps.shape[1]
        batch, mask = right_pad(rows, count, tokens), np.zeros((count, tokens), np.float32)
        for number, row in enumerate(rows):
            mask[number, row.target_positions] = 1
        numbers = np.arange(count, dtype=np.int32)
        batch |= {"loss_mask": mask, "example_ids": numbers, "source_ids": numbers}
        sharding = self._scoring_steps.batch_sharding
        mine = local_sequences(sharding, count)
        host = {name: each[mine] for name, each in batch.items()}
        return make_global_batch(host, mine, count, sharding)

    def evaluate(
        self, params: Any, stops: Callable[[], bool], moved: Callable[[], object]
    ) -> TaskSummary | None:
        """Evaluate the task and return its summary; None if `stops` returned true after a batch.

        This is a collective operation: all processes must call it.
        """
        self._params, self._should_stop = params, stops
        try:
            results = list(self._multiple_choice.results(self, lambda done: moved()))
        except StoppedError:
            return None
        finally:
            self._params = None
        found = summarize_results(results)
        if not all(math.isfinite(each) for one in results for each in one["loglikelihoods"]):
            found["accuracy"] = found["accuracy_by_bytes"] = math.nan
        return found


def build_scoring_steps(
    config: Config, steps: Steps, byte_lengths: np.ndarray, longest: int, *, num_sources: int = 0
) -> Steps:
    """Return steps that evaluate separate sequences with the parameters of a run.

    Args:
        config: config of the run.
        steps: steps of the run, whose layer partition is kept.
        byte_lengths: byte length of each token's text.
        longest: length in tokens of the longest sequence. The steps have the shortest length that
            fits and divides the sequence length of the run.
        num_sources: number of sums that the evaluation step returns; 0 returns one sum.
    """
    # As in generation, expert capacity is unlimited, so that sequences are independent.
    own: Any = config.model.own
    if getattr(own, "capacity_factor", 0):
        own = dataclasses.replace(own, capacity_factor=0.0)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, own=own),
        # Keep the layer partition of training, which may depend on the sequence length.
        pipeline=dataclasses.replace(
            config.pipeline, layers_per_chunk=list(steps.param_layout.layout.layer_partition)
        ),
    )
    fitting = (
        each
        for tokens in _halved_lengths(config.train.sequence_length)
        if tokens >= longest and not check(each := _with_sequence_length(config, tokens), {})
    )
    whole = _with_sequence_length(config, config.train.sequence_length)
    mesh = steps.param_layout.mesh
    return steps_from_config(next(fitting, whole), mesh, byte_lengths, num_sources=num_sources)


class StoppedError(Exception):
    """The processes received a stop request."""


def task_metrics(name: str, found: TaskSummary) -> dict[str, float]:
    """Return the metrics of a task, keyed by tag."""
    return {
        f"eval/{name}/accuracy": found["accuracy"],
        f"eval/{name}/accuracy_by_bytes": found["accuracy_by_bytes"],
    }


def open_tasks(config: Config, tokenizer: Tokenizer) -> list[Task]:
    """Open the tasks of `eval.tasks`, sorted by name.

    Raises:
        ConfigError: a task file is not valid.
    """
    tasks = sorted(config.eval.tasks.items())
    return [Task(name, task, config, tokenizer) for name, task in tasks]


def _halved_lengths(tokens: int) -> list[int]:
    """Return `tokens` and its successive halves, in ascending order."""
    found = [tokens]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found[::-1]


def _with_sequence_length(config: Config, tokens: int) -> Config:
    train = dataclasses.replace(
        config.train, objective="pretrain", sequence_length=tokens, batch_ramp=[]
    )
    return dataclasses.replace(config, train=train)
