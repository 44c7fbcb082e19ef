"""Rules for evaluation during training: tasks, samples, best checkpoint and early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from maxpipe.config.data_sources import all_sources, is_synthetic
from maxpipe.config.rules import did_you_mean, rule
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation

LOSS = "eval/loss"
BestMode = Literal["smallest", "largest"]


def metrics_of(config: Config) -> dict[str, BestMode]:
    """Return the metrics of an evaluation, as a map from each tag to its better direction."""
    data, found = config.data, dict[str, BestMode]()
    has_documents = data.validation_fraction or data.validation or is_synthetic(data)
    if config.eval.batches and has_documents and config.train.objective != "grpo":
        pairs = config.train.objective == "preference"
        losses = _LOSSES[:1] if pairs else _LOSSES
        best: dict[str, BestMode] = dict.fromkeys(losses, "smallest")
        best |= PAIR_METRICS if pairs else {}
        for inner in ("eval/", *(f"eval/{name}/" for name in sorted(data.validation))):
            found |= {inner + what: value for what, value in best.items()}
        for name in sorted(data.mixture):
            found |= {f"source/{name}/eval_{what}": "smallest" for what in losses}
    for name in sorted(config.eval.tasks):
        found |= dict.fromkeys([f"eval/{name}/{what}" for what in _ACCURACIES], "largest")
    return found


PAIR_METRICS: dict[str, BestMode] = {
    "margin": "largest",
    "accuracy": "largest",
    "reward_chosen": "largest",
    "reward_rejected": "smallest",
    "nats_chosen": "smallest",
    "nats_rejected": "largest",
}
"""Metrics of preference evaluations, in addition to the loss."""
_LOSSES, _ACCURACIES = ("loss", "nats_per_byte"), ("accuracy", "accuracy_by_bytes")


@rule("eval.tasks")
def _tasks_have_files(config: Config) -> Iterator[RuleViolation]:
    for name, task in config.eval.tasks.items():
        if not task.path:
            key = f"eval.tasks.{name}.path"
            yield RuleViolation(
                key, "must be a file of multiple-choice examples.", f"Set {key}={name}.jsonl."
            )


@rule(
    "eval.sample_every",
    "eval.sample_prompts",
    "eval.sample_prompts_file",
    "eval.sample_conversations",
)
def _samples_have_prompts(config: Config) -> Iterator[RuleViolation]:
    given = config.eval
    prompts = given.sample_prompts or given.sample_prompts_file or given.sample_conversations
    if given.sample_every and not prompts:
        yield RuleViolation(
            "eval.sample_prompts",
            "must have a prompt if eval.sample_every is more than 0.",
            "Set eval.sample_prompts=['Once upon a time'], or eval.sample_every=0.",
        )


def check_eval_during_training(config: Config) -> Iterator[RuleViolation]:
    """Yield problems with evaluation, early stopping and samples during training.

    These checks are not config rules, because `maxpipe eval` reads the same section but uses other
    documents.
    """
    given, best = config.eval, config.checkpoint
    if given.patience > 0 and not given.every:
        rule = f"must be more than 0 with eval.patience={given.patience}, which counts evaluations."
        yield RuleViolation("eval.every", rule, "Set eval.every=100, or eval.patience=0.")
    if given.patience > 0 or (best.best_metric, best.best_mode) != (LOSS, "smallest"):
        yield from _check_best_metric(config)
    chats = [each for each in all_sources(config.data).values() if each.chat != "off"]
    if given.sample_conversations and not chats:
        rule = "requires conversations: no source sets data.chat."
        action = "Set eval.sample_conversations=0, or data.chat=messages."
        yield RuleViolation("eval.sample_conversations", rule, action)


def _check_best_metric(config: Config) -> Iterator[RuleViolation]:
    metric, known = config.checkpoint.best_metric, metrics_of(config)
    if metric not in known:
        key, guess = "checkpoint.best_metric", did_you_mean(metric, known)
        if not known:
            rule = "requires an evaluation, but nothing is evaluated (eval.batches=0)."
            yield RuleViolation(
                key, rule, "Set eval.batches=8, or eval.tasks.mine.path=questions.jsonl."
            )
            return
        rule = f"must be a metric of the evaluations in this run: {', '.join(known)}."
        yield RuleViolation(key, rule, f"Set {key}={guess or next(iter(known))}.")
    elif config.checkpoint.best_mode != known[metric]:
        key = "checkpoint.best_mode"
        rule = f"must be {known[metric]} with checkpoint.best_metric={metric}."
        yield RuleViolation(key, rule, f"Set {key}={known[metric]}.")
