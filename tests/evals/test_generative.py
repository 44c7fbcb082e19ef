"""Generative tasks: pass@k, scorers, completions in training and in `maxpipe eval`."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.config.sections.eval import pass_counts
from maxpipe.evals.generative import ScoredCompletion, pass_at_k, summarize
from maxpipe.rewards.builtin import builtin_reward, last_number
from tests.train.runs import Start, wait_for_outputs

_TASK = "eval.generative_tasks.sums"
_RECORDS = [
    {"prompt": "import o", "answer": "s"},
    {"prompt": "2 + 2 = ", "answer": "4"},
    {"prompt": "def add(a, b):\n    return", "answer": "a + b"},
]


def _write_tasks(folder: Path, records: list[dict[str, Any]] | None = None) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records or _RECORDS))
    return path


def _train(folder: Path, *keys: str, name: str = "run") -> tuple[int, Path]:
    given = [f"run.dir={folder}", f"run.name={name}", "eval.batches=0", "log.every=1"]
    return main(["train", "quickstart", *given, *keys]), folder / name


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_counts_the_subsets_with_a_correct_completion(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        hits = sum(any(index < correct for index in subset) for subset in subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(hits / len(subsets))


@pytest.mark.parametrize(
    ("samples", "counts"), [(1, []), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_values_of_k(samples: int, counts: list[int]) -> None:
    assert pass_counts(samples) == counts


def test_summary() -> None:
    def completion(score: float, reason: str = "end") -> ScoredCompletion:
        return {
            "line": "",
            "sample": 0,
            "prompt": "",
            "text": "",
            "tokens": 1,
            "finish_reason": reason,
            "score": score,
        }

    scored = [completion(1.0), completion(0.5, "length"), completion(0.0), completion(0.0)]
    found = summarize(scored, 2, failures=1)
    assert found.score == 0.375 and found.prompts == 2 and found.truncated == 0.25
    assert found.passes == {1: 0.25, 2: 0.5}
    assert found.score_stderr == pytest.approx(0.375)
    assert found.metrics("sums")["eval/sums/pass_at_2"] == 0.5
    assert summarize(scored[:1], 1, 0).passes == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The total is 1,234.50 dollars.", Fraction(2469, 2)),
        ("so 3 + 4 = 7", Fraction(7)),
        ("#### -12", Fraction(-12)),
        ("a ratio of 3/4", Fraction(3, 4)),
        ("v2 and x3y", None),
        ("version 1.2.3", Fraction(6, 5)),
        ("", None),
        ("9" * 2000, Fraction(10**1000 - 1)),  # only the last 1,000 characters are read
    ],
)
def test_last_number(text: str, expected: Fraction | None) -> None:
    assert last_number(text) == expected


def test_number_reward_reads_the_answer_of_gsm8k() -> None:
    reward = builtin_reward("number", "")
    record = {"prompt": "How many?", "answer": "She has 2 + 3 = 5 apples.\n#### 1,005"}
    assert reward("It is 1005.", record) == 1.0
    assert reward("It is 1004", record) == 0.0
    assert reward("no number", record) == 0.0


def test_tasks_during_training_equal_the_evaluation_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write_tasks(tmp_path)
    keys = (f"{_TASK}.path={path}", f"{_TASK}.max_tokens=8")
    code, run = _train(tmp_path, "train.steps=4", "eval.every=2", *keys)
    assert code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval/sums/score" in record] == [2, 4]
    written = (run / "evaluations" / "sums-00000004.jsonl").read_text()
    capsys.readouterr()
    results = tmp_path / "results.jsonl"
    options = ["--prompts", str(path), "--max-tokens", "8", "--jsonl", str(results), "--json"]
    assert main(["eval", str(run), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["score"] == records[-1]["eval/sums/score"] and found["prompts"] == 3
    assert results.read_text() == written


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout",
    [
        ("mesh.ici_stage=1", "mesh.ici_fsdp=8", "pipeline.repeats=1", "pipeline.microbatches=1"),
        ("mesh.ici_stage=2", "mesh.ici_tensor=2"),
    ],
)
def test_completions_do_not_depend_on_the_layout(tmp_path: Path, layout: tuple[str, ...]) -> None:
    path = _write_tasks(tmp_path)
    keys = ("train.steps=1", f"{_TASK}.path={path}", f"{_TASK}.max_tokens=12")
    keys += (f"{_TASK}.samples=3", f"{_TASK}.temperature=1", "optim.learning_rate=1e-30")
    texts = []
    for name, given in (("base", ()), ("other", layout)):
        code, run = _train(tmp_path, *keys, *given, name=name)
        assert code == 0
        lines = (run / "evaluations" / "sums-00000001.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["text"] for line in lines])
    assert texts[0] == texts[1] and len({*texts[0]}) > 3


def test_failures_of_a_scorer_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write_tasks(tmp_path)
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "import os, time\n"
        "def score(text, record):\n"
        "    if record['answer'] == 's':\n        raise ValueError('no')\n"
        "    if record['answer'] == '4':\n        os._exit(3)\n"
        "    return 1\n"
    )
    keys = ("train.steps=2", f"{_TASK}.path={path}", f"{_TASK}.max_tokens=4")
    keys += (f"{_TASK}.scorer_file={scorer}:score", f"{_TASK}.allow_code=true")
    code, run = _train(tmp_path, *keys)
    assert code == 0
    assert "the scorer failed for 2 of 3 completions" in capsys.readouterr().out
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["eval/sums/score"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("samples=2",), "must be more than 0 with"),
        (("scorer_file=x.py",), "FILE.py:FUNCTION"),
        (("scorer_file=x.py:f",), "allow_code=true"),
        (("samples=0",), "must be from 1 to 1024"),
        (("max_tokens=500",), "must fit in train.sequence_length"),
        (("scorer=number",), "contains no number"),
        (("scorer=words",), "must be"),
        (("path=missing.jsonl",), "must name an existing file"),
    ],
)
def test_invalid_tasks(
    tmp_path: Path, keys: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write_tasks(tmp_path)
    given = [f"{_TASK}.path={path}", *(f"{_TASK}.{key}" for key in keys)]
    code, run = _train(tmp_path, "train.steps=1", *given)
    error = capsys.readouterr().err
    assert code == 2 and text in error and "Traceback" not in error
    assert not (run / "metrics.jsonl").exists()


def test_best_checkpoint_and_early_stopping_accept_the_score(tmp_path: Path) -> None:
    path = _write_tasks(tmp_path)
    keys = ("train.steps=6", "eval.every=1", "eval.patience=2", f"{_TASK}.path={path}")
    keys += (f"{_TASK}.max_tokens=4", "checkpoint.best_metric=eval/sums/score")
    code, run = _train(tmp_path, *keys, "checkpoint.best_mode=max")
    assert code == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3  # the score does not improve in two evaluations
    assert not math.isnan(last["eval/sums/score"])


@pytest.mark.long
def test_stop_request_during_scoring_is_not_delayed_by_the_scorer(
    tmp_path: Path, start: Start
) -> None:
    """The completions that remain are not scored, and the run saves its state and ends."""
    path, calls = _write_tasks(tmp_path), tmp_path / "calls"
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "import os, pathlib, signal, time\n"
        "def score(text, record):\n"
        f"    with pathlib.Path({str(calls)!r}).open('a') as file:\n"
        "        file.write('call\\n')\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        "    return 1\n"
    )
    keys = [f"run.dir={tmp_path}", "run.name=run", "eval.batches=0", "eval.every=2", "log.every=1"]
    keys += [f"{_TASK}.path={path}", f"{_TASK}.max_tokens=4", f"{_TASK}.samples=4"]
    keys += [f"{_TASK}.temperature=1.0", "train.steps=50"]
    keys += [f"{_TASK}.scorer_file={scorer}:score", f"{_TASK}.allow_code=true"]
    process = start("train", "quickstart", *keys)
    (output,) = wait_for_outputs([process])
    assert process.returncode == 75, output
    assert calls.read_text().count("call") == 1
    assert "sums/score" not in (tmp_path / "run" / "metrics.jsonl").read_text()
