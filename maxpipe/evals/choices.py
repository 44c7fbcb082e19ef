"""Questions with choices: the most likely one after the context is the answer of the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

from maxpipe.config.rules import did_you_mean
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.chat_process import ChatInput
from maxpipe.errors import ConfigError, Problem, StorageError
from maxpipe.evals.texts import Score, Texts
from maxpipe.io import files
from maxpipe.io.typed import parse

_MAX_FILE_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 24
_MOST_PROBLEMS = 20
_CONTEXTS = ("context", "prompt")
_AT_ONCE = 64
"""Batches of rows whose results are written together."""


class Question(NamedTuple):
    """A line of a file."""

    line: int
    """From 1."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """From 0."""


class Result(TypedDict):
    """What becomes of a line; one object a line of the output."""

    line: int
    answer: int
    chosen: int
    """The most likely choice."""
    chosen_by_bytes: int
    """The most likely one by byte of its text."""
    loglikelihoods: list[float]
    """In nats, of each choice."""
    bytes: list[int]
    """Of each choice, as the file has it."""


class Summary(TypedDict):
    """What becomes of a file."""

    questions: int
    accuracy: float
    """Share of the questions of which the most likely choice is the answer."""
    accuracy_stderr: float
    """Standard error of that share as an estimate."""
    accuracy_by_bytes: float
    """The same with log-likelihoods divided by the bytes of the choice."""
    accuracy_by_bytes_stderr: float
    chance: float
    """The share that is expected of choosing blindly."""


def read(path: str, where: str) -> list[Question]:
    """The questions of a file; `where` names what gave the path.

    Raises:
        ConfigError: it cannot be read, or with every line that is none.
    """
    try:
        raw = files.read(path, _MAX_FILE_BYTES)
    except OSError as error:
        rule = f"must be a file that can be read: {error.strerror or error}."
        raise ConfigError.one(
            where, path, rule, f"Name a file of lines such as {_EXAMPLE}."
        ) from error
    found: list[Question] = []
    problems: list[Problem] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            try:
                found.append(_question(number, line))
            except ValueError as error:
                given = line[:60].decode("utf-8", "replace") + ("..." if len(line) > 60 else "")
                action = f"Correct the line, or take it out. One looks like {_EXAMPLE}."
                problems.append(Problem(f"{path}:{number}", given, f"{error}.", action))
    if problems:
        raise ConfigError(problems[:_MOST_PROBLEMS])
    if not found:
        rule = "holds no question: each line that is not blank is one."
        raise ConfigError.one(where, path, rule, f"Write lines such as {_EXAMPLE}.")
    return found


_EXAMPLE = '{"context": "2 + 2 =", "choices": ["4", "5"], "answer": 0}'


def _question(number: int, line: bytes) -> Question:
    """Raises ValueError with the rule."""
    try:
        record = parse(line, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"must be a JSON object in UTF-8: {error}") from error
    context = [record[name] for name in _CONTEXTS if name in record]
    if len(context) != 1 or not isinstance(context[0], str):
        guess = did_you_mean(next(iter(record), ""), _CONTEXTS) if not context else ""
        more = f"; did you mean {guess} by {next(iter(record))!r}?" if guess else ""
        raise ValueError(f"must have one text `context` (or `prompt`){more}".rstrip("?"))
    choices = record.get("choices")
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise ValueError("must have a list of texts `choices`")
    if len(choices) < 2 or "" in choices or len({*choices}) < len(choices):
        raise ValueError("must have at least 2 `choices`, none of them empty or there twice")
    answer = record.get("answer")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        most = len(choices) - 1
        raise ValueError(f"must have as `answer` a number from 0 to {most}, or one of the choices")
    for text in (context[0], *choices):
        text.encode()  # half of a surrogate pair is no text
    return Question(number, context[0], tuple(choices), answer)


class Model(Protocol):
    """What answers questions: `Requests`, or during training `Tasks`."""

    batch_size: int
    """Rows side by side."""

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = ...
    ) -> Sequence[Score]:
        """The log-likelihood of each continuation after its context."""
        ...


def as_chats(
    questions: Sequence[Question], chat: ChatTemplate | None, where: str, remedy: str
) -> list[Question]:
    """The questions with contexts that are what a user says, as a chat template writes them.

    Raises:
        ConfigError: there is no template, as `where` asks for; or it refuses one.
    """
    if chat is None:
        rule = "needs a chat template: the tokenizer's folder has none."
        action = f"{remedy}, or put chat_template.jinja into the folder of tokenizer.path."
        raise ConfigError.one(where, None, rule, action)
    texts = chat.render(
        [ChatInput([{"role": "user", "content": each.context}]) for each in questions]
    )
    return [each._replace(context=text) for each, text in zip(questions, texts, strict=True)]


@dataclass
class Exam:
    """Questions, and how they are put to a model."""

    questions: Sequence[Question]
    separator: str = " "
    """Put between context and choice where neither has white space."""

    def continuations(self, question: Question) -> list[tuple[str, str]]:
        """Context and continuation of each choice; the separator is the continuation's."""
        before = question.context
        joined = not before or before[-1].isspace()
        return [
            (before, each if joined or each[0].isspace() else self.separator + each)
            for each in question.choices
        ]

    def check(self, texts: Texts, path: str) -> None:
        """Raises ConfigError for questions that are longer than a row of the model."""
        problems = []
        for question in self.questions:
            rows = [texts.row(*pair) for pair in self.continuations(question)]
            longest = max(row.length for row in rows)
            if longest > texts.room:
                rule = f"has {longest} tokens, and a row has {texts.room} (train.sequence_length)."
                action = f"Shorten it, or set train.sequence_length={longest} to go beyond that."
                problems.append(Problem(f"{path}:{question.line}", "", rule, action))
        if problems:
            raise ConfigError(problems[:_MOST_PROBLEMS])

    def results(
        self, model: Model, moved: Callable[[int], object] = lambda done: None
    ) -> Iterator[Result]:
        """The result of each question, in order; `moved` is called with the number of rows done.

        Raises:
            NumbersError: the model gives numbers that are not finite.
            KeyboardInterrupt: the model's `stops` says so.
        """
        done, waiting, rows = 0, [], 0
        for number, question in enumerate(self.questions, 1):
            waiting.append(question)
            rows += len(question.choices)
            if rows < _AT_ONCE * model.batch_size and number < len(self.questions):
                continue
            pairs = [pair for each in waiting for pair in self.continuations(each)]
            before = done
            scores = iter(model.loglikelihood(pairs, lambda more, n=before: moved(n + more)))
            done += rows
            for each in waiting:
                yield _result(each, [next(scores).logprob for _ in each.choices])
            waiting, rows = [], 0


def _result(question: Question, logprobs: list[float]) -> Result:
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


def summary(results: Sequence[Result]) -> Summary:
    """Of at least one result."""
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
def written(path: str | None, where: str) -> Iterator[Callable[[Result], None]]:
    """Writes results to a file as they come, a JSON object a line; without a path nowhere.

    Results that are there are replaced, and nothing else.

    Raises:
        ConfigError: there is another file, that of the questions perhaps.
        StorageError: it cannot be written.
    """
    if path is None:
        yield lambda result: None
        return

    def unwritable(error: OSError) -> StorageError:
        action = "Free space, or name a file in a folder that exists and can be written."
        return StorageError.unwritable(f"{where} = {path}", error, action)

    try:
        if not _is_free(path):
            rule = "is there already, and holds other things than results of questions."
            raise ConfigError.one(where, path, rule, "Name another file, or delete it first.")
        descriptor = files.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except OSError as error:
        raise unwritable(error) from error
    # Without a buffer: what a full disk refused would be tried again, and fail again, at the end.
    with open(descriptor, "wb", buffering=0) as stream:

        def write(result: Result) -> None:
            line = memoryview(f"{json.dumps(result)}\n".encode())
            try:
                while line:
                    line = line[stream.write(line) :]
            except OSError as error:
                raise unwritable(error) from error

        yield write


def _is_free(path: str) -> bool:
    """Whether nothing is there, or an empty file, or results of before.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open(files.opened(path), "rb") as stream:
            first = stream.readline(_MAX_LINE_BYTES)
    except FileNotFoundError:
        return True
    with contextlib.suppress(ValueError):
        return not first or bool(parse(first, Result))
    return False
