"""Section `eval`: evaluation during training, samples and early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import BATCH_AXES, add_ranges, axis_keys, batch_shards, did_you_mean, rule
from maxpipe.config.sections.data import all_sources, is_synthetic
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import round_up
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Multiple-choice task that each evaluation scores, in the same way as `maxpipe eval
    --choices`.
    """

    path: str = ""
    """File of JSON lines with the fields `context`, `choices` and `answer`. The file is read once,
    at the start of the run."""
    separator: str = " "
    """Text inserted between context and choice, unless the context ends or the choice begins with
    white space."""
    chat: bool = False
    """Render each context as a user message with the tokenizer's chat template. No separator is
    added between context and choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training: validation loss, tasks, samples and early stopping."""

    every: int = 0
    """Number of steps between evaluations. 0 evaluates only after the last step."""
    batches: int = 8
    """Number of batches per evaluation. With 0, evaluations during training use no documents, and
    `maxpipe eval` uses all batches."""
    batch_size: int = 0
    """Number of sequences per evaluation batch, summed over all devices. Must be a multiple of data
    x fsdp x expert. 0 selects `train.batch_size`."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Multiple-choice tasks by name: `eval.tasks.sums.path=sums.jsonl` adds the metric
    `eval/sums/accuracy`. Each evaluation scores all tasks."""
    patience: int = 0
    """Patience of early stopping: the run ends after this number of consecutive evaluations without
    an improvement of `checkpoint.best_metric`. The run evaluates and saves a checkpoint before it
    ends. Only the periodic evaluations of `eval.every` count. 0 disables early stopping."""
    min_delta: float = field(default=0.0, metadata=renamed_from("min_gain"))
    """Minimum change of `checkpoint.best_metric`, relative to its best value so far, that early
    stopping counts as an improvement."""
    sample_every: int = 0
    """Number of steps between samples of generated text, which are written to the console,
    TensorBoard and `samples.jsonl`. 0 disables samples."""
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    """Prompts of the samples. Each prompt follows the BOS token."""
    sample_prompts_file: str = field(default="", metadata=renamed_from("sample_file"))
    """File with one prompt per line. In a `.jsonl` file, each line is an object with the field
    `prompt`. Replaces `eval.sample_prompts`. With `eval.sample_chat`, an object may contain
    `messages` instead of `prompt`."""
    sample_chat: bool = False
    """Render each prompt as a user message with the tokenizer's chat template. The model then
    generates the response."""
    sample_conversations: int = field(default=0, metadata=renamed_from("sample_documents"))
    """Number of validation conversations that are also used as prompts. The model generates the
    last message that contributes to the loss, and the sample is written together with the original
    message. Requires `data.chat`."""
    sample_max_tokens: int = field(default=64, metadata=renamed_from("sample_tokens"))
    """Maximum number of generated tokens per sample. Prompt and sample together have at most
    `train.sequence_length` tokens."""
    sample_temperature: float = 1.0
    """Sampling temperature, by which logits are divided. 0 always selects the most likely token."""


add_ranges(
    Bound("eval.every", 100, 0, why="0 evaluates only after the last step"),
    Bound("eval.batch_size", 8, 0, why="0 uses train.batch_size"),
    Bound("eval.batches", 8, 0, why="0 evaluates no documents"),
    Bound("eval.patience", 3, 0, why="0 disables early stopping"),
    Bound("eval.min_delta", 0.0, 0, LARGEST, "a negative gain is a loss"),
    Bound("eval.sample_conversations", 4, 0, why="0 samples no conversations"),
    Bound("eval.sample_every", 100, 0, why="0 disables samples"),
    Bound("eval.sample_max_tokens", 64, 1),
    Bound("eval.sample_temperature", 1.0, 0, LARGEST, "devices compute in float32"),
)


LOSS = "eval/loss"


BestMode = Literal["min", "max"]


def metrics_of(config: Config) -> dict[str, BestMode]:
    """Map the tag of each evaluation metric to its best value, `min` or `max`."""
    data, metrics = config.data, dict[str, BestMode]()
    has_documents = data.validation_fraction or data.validation or is_synthetic(data)
    if config.eval.batches and has_documents and config.train.objective != "grpo":
        pairs = config.train.objective == "preference"
        losses = _LOSSES[:1] if pairs else _LOSSES
        best: dict[str, BestMode] = dict.fromkeys(losses, "min")
        best |= PAIR_METRICS if pairs else {}
        for inner in ("eval/", *(f"eval/{name}/" for name in sorted(data.validation))):
            metrics |= {inner + what: value for what, value in best.items()}
        for name in sorted(data.mixture):
            metrics |= {f"source/{name}/eval_{what}": "min" for what in losses}
    for name in sorted(config.eval.tasks):
        metrics |= dict.fromkeys([f"eval/{name}/{what}" for what in _ACCURACIES], "max")
    return metrics


PAIR_METRICS: dict[str, BestMode] = {
    "margin": "max",
    "accuracy": "max",
    "reward_chosen": "max",
    "reward_rejected": "min",
    "nats_chosen": "min",
    "nats_rejected": "max",
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
    section = config.eval
    prompts = section.sample_prompts or section.sample_prompts_file or section.sample_conversations
    if section.sample_every and not prompts:
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
    section, best = config.eval, config.checkpoint
    if section.patience > 0 and not section.every:
        rule = (
            f"must be more than 0 with eval.patience={section.patience}, which counts evaluations."
        )
        yield RuleViolation("eval.every", rule, "Set eval.every=100, or eval.patience=0.")
    if section.patience > 0 or (best.best_metric, best.best_mode) != (LOSS, "min"):
        yield from _check_best_metric(config)
    chats = [source for source in all_sources(config.data).values() if source.chat != "off"]
    if section.sample_conversations and not chats:
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


@rule("eval.batch_size", *axis_keys(*BATCH_AXES))
def _eval_batch_divides(config: Config) -> Iterator[RuleViolation]:
    size = config.eval.batch_size
    shards, sizes = batch_shards(config.mesh)
    if size % shards:
        yield RuleViolation(
            "eval.batch_size",
            f"must be a multiple of {' x '.join(sizes)} = {shards}: each device gets the same "
            "number of sequences.",
            f"Set eval.batch_size={round_up(size, shards)}, or 0 to use train.batch_size.",
        )
