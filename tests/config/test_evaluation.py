"""Config rules for fine-tuning and for evaluation during training."""

from __future__ import annotations

import pytest

from maxpipe.config.load import load
from maxpipe.config.sections.eval import metrics_of
from maxpipe.errors import ConfigError
from maxpipe.objectives import Preference

CHATS = ("data.source=jsonl", "data.path=chats.jsonl", "data.chat=messages")
TASK = "eval.tasks.sums.path=sums.jsonl"
LARGEST = "checkpoint.best_mode=max"


def rejected_keys(*given: str, to_train: bool = True) -> dict[str, str]:
    """Return the rule and action of each key for which the config is rejected."""
    try:
        load(["tiny", "train.steps=3", *given], to_train=to_train)
    except ConfigError as error:
        return {p.where.partition(": ")[2]: f"{p.rule} {p.action}" for p in error.problems}
    return {}


def test_sft_requires_chat_sources() -> None:
    [(key, words)] = rejected_keys("train.objective=sft").items()
    assert key == "data.chat" and "data.source=corpus" in words and "data.chat=messages" in words
    assert rejected_keys("train.objective=sft", *CHATS) == {}
    mixed = [f"data.mixture.a.{each.removeprefix('data.')}" for each in CHATS]
    mixed += ["data.mixture.b.source=text", "data.mixture.b.path=book"]
    assert [*rejected_keys("train.objective=sft", *mixed)] == ["data.mixture.b.chat"]
    assert rejected_keys("train.objective=sft", *mixed, "data.mixture.b.source=jsonl")
    sets = ["data.validation.book.source=text", "data.validation.book.path=book"]
    assert rejected_keys("train.objective=sft", *CHATS, *sets) == {}
    # Predictions and `maxpipe eval` do not read training targets.
    assert rejected_keys("train.objective=sft", to_train=False) == {}


def test_eval_tasks_require_a_path() -> None:
    assert [*rejected_keys("eval.tasks.sums.separator=,")] == ["eval.tasks.sums.path"]
    assert [*rejected_keys("eval.tasks.sums.separator=,", to_train=False)] == [
        "eval.tasks.sums.path"
    ]
    assert rejected_keys(TASK) == {}


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ("eval.patience=2", "eval.every", "counts evaluations"),
        ("checkpoint.best_metric=eval/los", "checkpoint.best_metric", "=eval/loss."),
        (f"{TASK} {LARGEST}", "checkpoint.best_mode", "must be min"),
        (f"{TASK} checkpoint.best_metric=eval/sums/accuracy", "checkpoint.best_mode", "=max."),
        ("checkpoint.best_metric=eval/sums/accuracy", "checkpoint.best_metric", "eval/loss"),
        ("eval.batches=0 eval.patience=1 eval.every=1", "checkpoint.best_metric", "eval.batches=8"),
        (
            "eval.sample_conversations=2 eval.sample_every=1",
            "eval.sample_conversations",
            "data.chat",
        ),
        ("eval.patience=-1", "eval.patience", "at least 0"),
        ("eval.min_delta=-1", "eval.min_delta", "from 0 to"),
    ],
)
def test_invalid_eval_settings_are_rejected(given: str, key: str, words: str) -> None:
    found = rejected_keys(*given.split())
    assert [*found] == [key] and words in found[key]


def test_best_metric_without_eval_batches_must_be_task_metric() -> None:
    given = ["eval.batches=0", "eval.every=5", "eval.patience=2", TASK, LARGEST]
    assert rejected_keys(*given, "checkpoint.best_metric=eval/sums/accuracy_by_bytes") == {}
    assert [*rejected_keys(*given, "checkpoint.best_metric=eval/loss")] == [
        "checkpoint.best_metric"
    ]


def test_metrics_of_lists_all_evaluated_metrics() -> None:
    sets = ["data.validation.book.source=text", "data.validation.book.path=book"]
    mixed = [f"data.mixture.a.{each.removeprefix('data.')}" for each in CHATS]
    config = load(["tiny", "train.steps=3", *sets, *mixed, TASK]).config
    assert metrics_of(config) == {
        **dict.fromkeys(
            [
                *("eval/loss", "eval/nats_per_byte", "eval/book/loss", "eval/book/nats_per_byte"),
                *("source/a/eval_loss", "source/a/eval_nats_per_byte"),
            ],
            "min",
        ),
        **dict.fromkeys(["eval/sums/accuracy", "eval/sums/accuracy_by_bytes"], "max"),
    }


def test_metrics_of_preference_objective() -> None:
    pairs = ["train.objective=preference", "data.chat=pairs", "data.packing=best_fit"]
    given = ["tiny", "train.steps=3", "data.source=jsonl", "data.path=a.jsonl", *pairs]
    found = metrics_of(load([*given, "data.validation_fraction=0.2"]).config)
    assert {*found} == {"eval/loss", *(f"eval/{name}" for name in Preference.report_names)}
    assert found["eval/margin"] == "max" and found["eval/loss"] == "min"
    kept = [*given, "data.validation_fraction=0.2", "checkpoint.best_metric=eval/margin"]
    assert load([*kept, "checkpoint.best_mode=max"]).config.checkpoint.best_mode == "max"


def test_eval_rules_do_not_apply_to_other_commands() -> None:
    """`maxpipe eval` uses the section with other documents and ignores checkpoint keys."""
    given = ["eval.patience=2", "eval.every=5", "eval.batches=0", "eval.sample_conversations=2"]
    assert rejected_keys(*given, to_train=False) == {}
