"""Declarations of every number that a run writes: tag, unit, meaning and when it is written.

The page docs/metrics.md, TensorBoard's groups of charts and the test of what runs write are made
from this table. Numbers that layers return are declared by `maxpipe.models.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.models.registry import summaries


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of `metrics.jsonl` and TensorBoard."""

    tag: str
    unit: str
    meaning: str
    when: str = "each record"


_DISTILLED = "with `train.objective=distill`"
_EVALUATED, _MIXED = "after an evaluation", "with `data.mixture`"
_GRPO = "with `train.objective=grpo`"
_PREFERENCE = "with `train.objective=preference`"
_PREFERENCE_METRICS = {
    "reward_chosen": (
        "",
        "What the chosen response gained beside the reference, times `preference.beta`; of `orpo` "
        "its log-probability, times `preference.odds_weight`. As all of these a mean over pairs.",
    ),
    "reward_rejected": ("", "The same of the rejected response."),
    "margin": ("", "The first less the second."),
    "accuracy": ("fraction", "Pairs whose chosen response has the larger reward."),
    "nats_chosen": ("nats per token", "Cross-entropy of the chosen response, the mean of each."),
    "nats_rejected": ("nats per token", "The same of the rejected response."),
}
"""What preferences report: unit and meaning."""


def source_tag(name: str, what: str) -> str:
    """The tag of a number that each source of a mixture has."""
    return f"source/{name}/{what}"


METRICS = (
    Metric(
        "train/loss",
        "nats per token",
        "Cross-entropy of the step's batch, before its update, over all tokens that are predicted. "
        "Losses that layers and heads ahead add to the objective are not in it. Of preferences it "
        "is what `preference.loss` says, the mean over pairs, and so in evaluations; with "
        "`train.objective=grpo` the loss of the policy, in no unit, and with "
        "`train.objective=distill` the mean with the divergence from the teacher.",
    ),
    Metric(
        "train/loss_ahead_1",
        "nats per token",
        "Cross-entropy of the first head ahead, the sum over the tokens that it predicts divided "
        "by the number of those of `train/loss`. `train/loss_ahead_2` is that of the second. With "
        "`model.mtp_kind=layer` their layers count in the numbers of layers below, each for the "
        "tokens that it has a target for.",
        "with `model.mtp_heads`",
    ),
    Metric(
        "train/grad_norm",
        "",
        "Norm of the whole gradient over all stages, before clipping by `optim.clip_norm`.",
    ),
    Metric("train/lr", "", "Learning rate of the step."),
    Metric("train/tokens", "tokens", "Tokens in all steps up to this one, padding included."),
    Metric("train/batch_size", "rows", "Rows of the step's batch.", "with `train.batch_ramp`"),
    Metric("train/skipped", "steps", "Updates left out so far, see `guard.bad_steps`."),
    Metric(
        "train/spikes",
        "steps",
        "Spikes of loss or gradient norm so far.",
        "with `guard.spike_sigmas`",
    ),
    Metric(
        "train/cross_entropy",
        "nats per token",
        "Cross-entropy of the step's batch, a part of `train/loss`.",
        _DISTILLED,
    ),
    Metric(
        "train/divergence",
        "nats per token",
        "Divergence of student and teacher, times `distill.temperature` squared: the other part.",
        _DISTILLED,
    ),
    Metric(
        "distill/teacher_wait_s",
        "seconds",
        "Part of a step's time that waited for the teacher; it is in `perf/data_wait_s`, too.",
        f"{_DISTILLED} and `distill.teacher`",
    ),
    Metric(
        "distill/transfer_bytes",
        "bytes",
        "What a step sends between devices of teacher and student: batch one way, answers the "
        "other.",
        f"{_DISTILLED} and `distill.teacher`",
    ),
    Metric("eval/loss", "nats per token", "Cross-entropy of validation documents.", _EVALUATED),
    Metric(
        "eval/nats_per_byte",
        "nats per byte",
        "The same per byte of text, which compares across tokenizers.",
        _EVALUATED,
    ),
    Metric(
        "rollout/reward",
        "",
        "Mean reward of the completions that the step is trained on.",
        _GRPO,
    ),
    Metric("rollout/reward_std", "", "Standard deviation of these rewards.", _GRPO),
    Metric(
        "rollout/flat_groups",
        "fraction",
        "Groups of them whose rewards are all the same, which say nothing.",
        _GRPO,
    ),
    Metric("rollout/tokens", "tokens", "Mean length of these completions.", _GRPO),
    Metric(
        "rollout/cut",
        "fraction",
        "These completions that were ended by `grpo.max_tokens`.",
        _GRPO,
    ),
    Metric(
        "train/entropy",
        "nats per token",
        "Entropy of the policy, estimated from the tokens that were drawn: of `train/loss`, its "
        "kind of mean.",
        _GRPO,
    ),
    Metric(
        "train/clipped",
        "fraction",
        "Tokens that `grpo.clip_ratio` keeps from being learned from; 0 in the first step of a rollout.",
        _GRPO,
    ),
    Metric(
        "train/kl",
        "nats per token",
        "Divergence from the reference, estimated from the tokens that were drawn.",
        "with `grpo.kl_coef`",
    ),
    *(Metric(f"train/{name}", *each, _PREFERENCE) for name, each in _PREFERENCE_METRICS.items()),
    *(
        Metric(f"eval/{name}", unit, f"`train/{name}` of validation documents.", _PREFERENCE)
        for name, (unit, _) in _PREFERENCE_METRICS.items()
    ),
    Metric("train/epochs", "", "How often the documents were read.", "without `data.mixture`"),
    Metric(
        "source/NAME/loss",
        "nats per token",
        "Cross-entropy of the source NAME, over its tokens that were predicted since the record "
        "before; not there if there were none. With `log.every` 1 the losses of all sources, "
        "weighted by `source/NAME/targets`, add up to `train/loss`.",
        _MIXED,
    ),
    Metric("source/NAME/targets", "tokens", "These tokens of the source.", _MIXED),
    Metric(
        "source/NAME/tokens",
        "tokens",
        "Tokens in all rows of the source up to this step. They add up to `train/tokens`, but for "
        "batches that were left out after bad steps, which are counted here.",
        _MIXED,
    ),
    Metric("source/NAME/epochs", "", "How often the source was read.", _MIXED),
    Metric(
        "source/NAME/eval_loss",
        "nats per token",
        "Cross-entropy of validation documents of the source.",
        f"{_EVALUATED}, {_MIXED}",
    ),
    Metric(
        "source/NAME/eval_nats_per_byte",
        "nats per byte",
        "The same per byte of text.",
        f"{_EVALUATED}, {_MIXED}",
    ),
    Metric(
        "eval/NAME/loss",
        "nats per token",
        "Cross-entropy of a set of documents that has this name in `data.validation`. If nothing "
        "is held out of the training's own documents, `eval/loss` is that of all sets together.",
        "after an evaluation, with `data.validation`",
    ),
    Metric(
        "eval/NAME/nats_per_byte",
        "nats per byte",
        "The same per byte of text.",
        "after an evaluation, with `data.validation`",
    ),
    Metric(
        "eval/NAME/accuracy",
        "",
        "Share of the questions of the task NAME in `eval.tasks` whose most likely choice is the "
        "answer.",
        "after an evaluation, with `eval.tasks`",
    ),
    Metric(
        "eval/NAME/accuracy_by_bytes",
        "",
        "The same with likelihoods by byte of the choice.",
        "after an evaluation, with `eval.tasks`",
    ),
    Metric(
        "perf/step_s",
        "seconds",
        "Mean time of a step since the record before, without evaluations and saves.",
    ),
    Metric("perf/tokens_per_s", "tokens per second", "Tokens of all devices in that time."),
    Metric(
        "perf/tflops_per_device",
        "10^12 operations per second",
        "What the model needs, without recomputation, in that time on each device.",
    ),
    Metric(
        "perf/mfu",
        "fraction",
        "The same as a fraction of the device's peak.",
        "on devices with a file in `configs/hardware`",
    ),
    Metric(
        "perf/rollout_s",
        "seconds",
        "Time for each step, beside `perf/step_s`, in which completions were drawn and rewarded.",
        _GRPO,
    ),
    Metric("perf/data_wait_s", "seconds", "Part of a step's time that waited for its batch."),
    Metric(
        "pipe/bubble_pct",
        "percent",
        "Slots of the schedule in which a stage has no work, `maxpipe schedule` draws them.",
    ),
    Metric(
        "memory/device_peak_bytes",
        "bytes",
        "Most memory in use so far, of the device of process 0 that used most.",
        "on TPU and GPU",
    ),
    Metric("memory/host_bytes", "bytes", "Resident memory of process 0.", "on Linux"),
    *(
        Metric(tag, each.unit, each.meaning, f"with `model.family={' or '.join(families)}`")
        for tag, each, families in summaries()
    ),
)

CHARTS = (
    ("loss", ("train/loss", "eval/loss")),
    ("distillation", ("train/cross_entropy", "train/divergence")),
    ("reward", ("rollout/reward",)),
    ("loss of sources", ("source/NAME/loss", "source/NAME/eval_loss")),
    ("loss of validation sets", ("eval/NAME/loss",)),
    ("accuracy of tasks", ("eval/NAME/accuracy",)),
    ("margin of rewards", ("train/margin", "eval/margin")),
    ("accuracy of rewards", ("train/accuracy", "eval/accuracy")),
    ("throughput", ("perf/tokens_per_s",)),
    ("MFU", ("perf/mfu",)),
    ("learning rate", ("train/lr",)),
    ("gradient norm", ("train/grad_norm",)),
    ("time of a step", ("perf/step_s", "perf/data_wait_s")),
    ("memory", ("memory/device_peak_bytes", "memory/host_bytes")),
)
"""Title and tags of TensorBoard's custom charts, the most important first. NAME is any name."""


def table() -> str:
    """The rows of docs/metrics.md."""
    lines = ["| tag | unit | meaning | written |", "|---|---|---|---|"]
    for each in METRICS:
        lines.append(f"| `{each.tag}` | {each.unit} | {each.meaning} | {each.when} |")
    return "\n".join([*lines, ""])
