"""Multiple-choice questions: reading files, scoring choices and writing results."""

from __future__ import annotations

import json
import math
import resource
import signal
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError, StorageError
from maxpipe.evals.language_model import LanguageModel, ScoringTokenizer
from maxpipe.evals.multiple_choice import (
    MultipleChoice,
    Question,
    QuestionResult,
    read_questions,
    result_writer,
    summarize_results,
)
from tests.evals.model import BYTES, logprobs, weights
from tests.train.runs import SAME, is_explained

LINES = [
    {"context": "2 + 2 =", "choices": ["4", "five, or so"], "answer": 0},
    {"prompt": "The sea is ", "choices": ["wet", "dry", "a kind of large cat"], "answer": "dry"},
    {"context": "", "choices": ["Yes", " no"], "answer": 1, "id": "x3"},
]


def test_read_questions_and_continuations(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in LINES) + "\n")
    found = read_questions(str(path), "here")
    assert [each.line for each in found] == [1, 3, 5]
    assert found[1] == Question(3, "The sea is ", ("wet", "dry", "a kind of large cat"), 1)
    pairs = [MultipleChoice(found).continuations(each) for each in found]
    assert pairs[0] == [("2 + 2 =", " 4"), ("2 + 2 =", " five, or so")]
    assert pairs[1][0] == ("The sea is ", "wet") and pairs[2] == [("", "Yes"), ("", " no")]
    assert MultipleChoice(found, "").continuations(found[0])[0] == ("2 + 2 =", "4")


BROKEN = {
    "[1]": "must be a JSON object",
    '{"context": "a", "choices": ["b", "c"]': "must be a JSON object",
    '{"question": "a", "choices": ["b", "c"], "answer": 0}': "must have one string `context`",
    '{"context": "a", "prompt": "a", "choices": ["b", "c"], "answer": 0}': "must have one string",
    '{"context": "a", "choices": "bc", "answer": 0}': "a list of strings",
    '{"context": "a", "choices": ["b"], "answer": 0}': "at least 2 `choices`",
    '{"context": "a", "choices": ["b", "b"], "answer": 0}': "all different and none of them empty",
    '{"context": "a", "choices": ["b", "c"], "answer": 2}': "an index from 0 to 1",
    '{"context": "a", "choices": ["b", "c"], "answer": true}': "an index from 0 to 1",
    '{"context": "a", "choices": ["b", "c"], "answer": "d"}': "or one of the choices",
    '{"context": "a", "choices": ["b", "\\ud800"], "answer": 0}': "surrogates not allowed",
}


def test_every_invalid_question_line_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text("\n".join([json.dumps(LINES[0]), *BROKEN]) + "\n")
    Path("config.json").write_text("{}")  # questions are read before the model
    assert main(["eval", ".", "--choices", "q.jsonl"]) == 2
    output = capsys.readouterr().err
    is_explained(output)
    for number, rule in enumerate(BROKEN.values(), 2):
        where, _, rest = output[output.index(f"q.jsonl:{number} = ") :].partition("\n")
        assert rule in rest.partition("\n")[0], where
    Path("q.jsonl").write_text("\n")
    assert main(["eval", ".", "--choices", "q.jsonl"]) == 2
    assert "at least one question" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ". --choices q.jsonl --data x",
        ". --choices q.jsonl --split all",
        ". --data x --jsonl y",
        ". --batch-size 3",
    ],
)
def test_options_without_effect_are_rejected(
    arguments: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    assert main(["eval", *arguments.split()]) == 2
    output = capsys.readouterr().err
    is_explained(output)
    assert "does not affect" in output


def test_chosen_answers_are_most_likely_choices(tmp_path: Path) -> None:
    """Compare total and per-byte log-likelihoods over several groups of questions."""
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES * 10))
    exam, told = MultipleChoice(read_questions(str(path), "here")), []
    model = LanguageModel(weights(), ScoringTokenizer(BYTES, 64), batch_size=1)
    found = list(exam.results(model, told.append))
    assert len(found) == 30 and told[-1] == 10 * 7 and told == sorted(told)
    for question, result in zip(exam.questions, found, strict=True):
        nats, by_byte = [], []
        for before, more in exam.continuations(question):
            mine = logprobs((before + more).encode())[0][len(before.encode()) :].sum()
            nats.append(float(mine))
            by_byte.append(
                nats[-1]
                / len(more.encode().removeprefix(b" " if before and before[-1] != " " else b""))
            )
        assert result["loglikelihoods"] == pytest.approx(nats, rel=SAME)
        assert result["chosen"] == nats.index(max(nats))
        assert result["chosen_by_bytes"] == by_byte.index(max(by_byte))
        assert (result["line"], result["answer"]) == (question.line, question.answer)
    assert {each["chosen"] == each["chosen_by_bytes"] for each in found} == {True, False}


def test_summarize_results() -> None:
    def result(chosen: int, by_bytes: int, choices: int) -> QuestionResult:
        return {
            **{"line": 1, "answer": 1, "chosen": chosen, "chosen_by_bytes": by_bytes},
            **{"loglikelihoods": [0.0] * choices, "bytes": [1] * choices},
        }  # type: ignore[typeddict-item]

    found = summarize_results([result(1, 0, 2), result(1, 1, 2), result(0, 0, 4), result(1, 0, 4)])
    assert found["questions"] == 4 and found["chance"] == 0.375
    assert (found["accuracy"], found["accuracy_by_bytes"]) == (0.75, 0.25)
    assert found["accuracy_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_question_longer_than_sequence_length_is_rejected(tmp_path: Path) -> None:
    exam = MultipleChoice([Question(7, "0123456789", ("abc", "defgh"), 0)])
    exam.check(ScoringTokenizer(BYTES, 16), "q.jsonl")
    with pytest.raises(ConfigError, match=r"q.jsonl:7 .*\n  has 16 tokens, but at most 15 fit"):
        exam.check(ScoringTokenizer(BYTES, 15), "q.jsonl")


def test_result_writer_overwrites_only_result_files(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    result = QuestionResult(
        line=1, answer=0, chosen=1, chosen_by_bytes=1, loglikelihoods=[-1.5, -1.0], bytes=[3, 2]
    )
    path.write_text("")
    for _ in range(2):  # the same command twice
        with result_writer(str(path), "--jsonl") as write:
            write(result)
        assert json.loads(path.read_text()) == result
    for content in (json.dumps(LINES[0]), "run: {name: x}\n", "\n", "[" * 99, "x" * (1 << 25)):
        path.write_text(content)
        with (
            pytest.raises(ConfigError, match="must be a new file"),
            result_writer(str(path), "--jsonl") as write,
        ):
            write(result)
        assert path.read_text() == content


def test_full_disk_raises_storage_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    result = QuestionResult(
        line=1, answer=0, chosen=1, chosen_by_bytes=1, loglikelihoods=[-1.5] * 99, bytes=[3]
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with (
            pytest.raises(StorageError, match="cannot be written"),
            result_writer(str(tmp_path / "results.jsonl"), "--jsonl") as write,
        ):
            write(result)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
