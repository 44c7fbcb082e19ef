"""Declare all metrics of a run: tag, unit, meaning, and when they are recorded.

docs/reference/metrics.md and the TensorBoard charts are generated from this table, and a test
compares the table with the metrics that runs write. `maxpipe.models.layers` declares the metrics of
layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from maxpipe.models.registry import summaries


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric in `metrics.jsonl` and TensorBoard."""

    tag: str
    unit: str
    meaning: str
    when: str = "each record"


_DISTILLED = "with `train.objective=distill`"
_EVALUATED, _MIXED = "after an evaluation", "with `data.mixture`"
_LAYERS = "with `layer_stats.every`"
_GRPO = "with `train.objective=grpo`"
_PREFERENCE = "with `train.objective=preference`"
_PREFERENCE_METRICS = {
    "reward_chosen": (
        "",
        "Implicit reward of the chosen response: the log-ratio of policy to reference, times "
        "`preference.beta`; with `orpo`, the log-probability times `preference.odds_weight`. All "
        "preference metrics are means over pairs.",
    ),
    "reward_rejected": ("", "Implicit reward of the rejected response."),
    "margin": ("", "Difference `reward_chosen` minus `reward_rejected`."),
    "accuracy": ("fraction", "Fraction of pairs whose chosen response has the larger reward."),
    "nats_chosen": (
        "nats per token",
        "Per-token cross-entropy of the chosen response, averaged over pairs.",
    ),
    "nats_rejected": (
        "nats per token",
        "Per-token cross-entropy of the rejected response, averaged over pairs.",
    ),
}
"""Unit and meaning of the preference metrics."""


def source_tag(name: str, what: str) -> str:
    """Return the tag of a metric for one source of a mixture."""
    return f"source/{name}/{what}"


METRICS = (
    Metric(
        "train/loss",
        "nats per token",
        "Mean cross-entropy over all target tokens of the step's batch, before the update, "
        "excluding auxiliary layer losses and MTP losses. With "
        "`train.objective=preference`, the "
        "mean of `preference.loss` over pairs, also in evaluations; with `train.objective=grpo`, "
        "the policy loss, which has no unit; with `train.objective=distill`, the weighted mean of "
        "cross-entropy and divergence from the teacher.",
    ),
    Metric(
        "train/loss_ahead_1",
        "nats per token",
        "Cross-entropy of the first MTP head: the sum over its target tokens divided by the number "
        "of target tokens of `train/loss`. `train/loss_ahead_2` is the loss of the second head. "
        "With `model.mtp_kind=layer`, the layer metrics below include the MTP layers, counting "
        "only tokens with a target in an MTP layer.",
        "with `model.mtp_heads`",
    ),
    Metric(
        "train/grad_norm",
        "",
        "Global gradient norm over the parameters of all stages, before clipping "
        "(`optim.clip_norm`).",
    ),
    Metric("train/lr", "", "Learning rate of the step."),
    Metric(
        "train/tokens",
        "tokens",
        "Total number of tokens, including padding, in all steps up to and including this one.",
    ),
    Metric(
        "train/batch_size",
        "sequences",
        "Number of sequences in the step's batch.",
        "with `train.batch_ramp`",
    ),
    Metric("train/skipped", "steps", "Number of updates skipped so far; see `guard.bad_steps`."),
    Metric(
        "train/spikes",
        "steps",
        "Number of loss spikes and gradient-norm spikes so far.",
        "with `guard.spike_sigmas`",
    ),
    Metric(
        "train/cross_entropy",
        "nats per token",
        "Cross-entropy of the step's batch, one of the two terms of `train/loss`.",
        _DISTILLED,
    ),
    Metric(
        "train/divergence",
        "nats per token",
        "Divergence between student and teacher times the square of `distill.temperature`, the "
        "other term of `train/loss`.",
        _DISTILLED,
    ),
    Metric(
        "distill/teacher_wait_s",
        "seconds",
        "Time per step spent waiting for the teacher; included in `perf/data_wait_s`.",
        f"{_DISTILLED} and `distill.teacher`",
    ),
    Metric(
        "distill/transfer_bytes",
        "bytes",
        "Bytes sent per step between teacher and student devices: the batch and the teacher "
        "logits.",
        f"{_DISTILLED} and `distill.teacher`",
    ),
    Metric("eval/loss", "nats per token", "Cross-entropy on the validation documents.", _EVALUATED),
    Metric(
        "eval/nats_per_byte",
        "nats per byte",
        "Cross-entropy on the validation documents per byte of text, which is comparable across "
        "tokenizers.",
        _EVALUATED,
    ),
    Metric(
        "rollout/reward",
        "",
        "Mean reward of the step's completions.",
        _GRPO,
    ),
    Metric("rollout/reward_std", "", "Standard deviation of the step's rewards.", _GRPO),
    Metric(
        "rollout/flat_groups",
        "fraction",
        "Fraction of groups whose completions all have the same reward; such a group contributes "
        "no policy gradient.",
        _GRPO,
    ),
    Metric("rollout/tokens", "tokens", "Mean length of the step's completions.", _GRPO),
    Metric(
        "rollout/cut",
        "fraction",
        "Fraction of completions truncated at `grpo.max_tokens`.",
        _GRPO,
    ),
    Metric(
        "train/entropy",
        "nats per token",
        "Entropy of the policy, estimated from the sampled tokens, with the same averaging as "
        "`train/loss`.",
        _GRPO,
    ),
    Metric(
        "train/clipped",
        "fraction",
        "Fraction of tokens whose policy gradient is 0 due to clipping (`grpo.clip_ratio`). The "
        "fraction is 0 in the first step of a rollout.",
        _GRPO,
    ),
    Metric(
        "train/kl",
        "nats per token",
        "KL divergence from the reference model, estimated from the sampled tokens.",
        "with `grpo.kl_coef`",
    ),
    *(Metric(f"train/{name}", *each, _PREFERENCE) for name, each in _PREFERENCE_METRICS.items()),
    *(
        Metric(f"eval/{name}", unit, f"`train/{name}` on the validation documents.", _PREFERENCE)
        for name, (unit, _) in _PREFERENCE_METRICS.items()
    ),
    Metric(
        "train/epochs",
        "",
        "Number of passes over the training documents.",
        "without `data.mixture`",
    ),
    Metric(
        "source/NAME/loss",
        "nats per token",
        "Cross-entropy on the source NAME, averaged over its target tokens since the previous "
        "record; absent if there were none. With `log.every=1`, the mean over all sources, "
        "weighted by `source/NAME/targets`, equals `train/loss`.",
        _MIXED,
    ),
    Metric(
        "source/NAME/targets",
        "tokens",
        "Number of target tokens from the source since the previous record.",
        _MIXED,
    ),
    Metric(
        "source/NAME/tokens",
        "tokens",
        "Total number of tokens, including padding, in the source's sequences up to and including "
        "this step. The sum over sources equals `train/tokens` plus the tokens of batches skipped "
        "after bad steps.",
        _MIXED,
    ),
    Metric("source/NAME/epochs", "", "Number of passes over the source.", _MIXED),
    Metric(
        "source/NAME/eval_loss",
        "nats per token",
        "Cross-entropy on the source's validation documents.",
        f"{_EVALUATED}, {_MIXED}",
    ),
    Metric(
        "source/NAME/eval_nats_per_byte",
        "nats per byte",
        "Per-byte cross-entropy on the source's validation documents.",
        f"{_EVALUATED}, {_MIXED}",
    ),
    Metric(
        "eval/NAME/loss",
        "nats per token",
        "Cross-entropy on the validation set NAME in `data.validation`. If no training documents "
        "are held out for validation, `eval/loss` is the loss over all validation sets.",
        "after an evaluation, with `data.validation`",
    ),
    Metric(
        "eval/NAME/nats_per_byte",
        "nats per byte",
        "Per-byte cross-entropy on the validation set NAME.",
        "after an evaluation, with `data.validation`",
    ),
    Metric(
        "eval/NAME/accuracy",
        "",
        "Accuracy on the multiple-choice task NAME in `eval.tasks`. The prediction is the choice "
        "with the highest log-likelihood.",
        "after an evaluation, with `eval.tasks`",
    ),
    Metric(
        "eval/NAME/accuracy_by_bytes",
        "",
        "Accuracy on the task NAME, with log-likelihoods normalized by the byte length of each "
        "choice.",
        "after an evaluation, with `eval.tasks`",
    ),
    Metric(
        "eval/NAME/score",
        "",
        "Mean score of the completions of the generative task NAME in `eval.generative_tasks`.",
        "after an evaluation, with `eval.generative_tasks`",
    ),
    Metric(
        "eval/NAME/pass_at_K",
        "fraction",
        "Estimated probability that at least one of K completions of a prompt has a score of at "
        "least 1, averaged over the prompts (arXiv:2107.03374). K is 1, 2, 4, ..., and the number "
        "of completions per prompt.",
        "with `eval.generative_tasks.NAME.samples` above 1",
    ),
    Metric(
        "eval/NAME/truncated",
        "fraction",
        "Fraction of completions that end at `eval.generative_tasks.NAME.max_tokens`.",
        "after an evaluation, with `eval.generative_tasks`",
    ),
    Metric(
        "harness/TASK/METRIC",
        "",
        "Metric of a task of lm-evaluation-harness, such as `harness/hellaswag/acc_norm`.",
        "after an evaluation, with `eval.harness_tasks`",
    ),
    Metric(
        "perf/step_s",
        "seconds",
        "Mean step time since the previous record, excluding evaluation and checkpointing.",
    ),
    Metric("perf/tokens_per_s", "tokens per second", "Total throughput of all devices."),
    Metric(
        "perf/tflops_per_device",
        "TFLOP/s",
        "Model FLOP/s per device, excluding recomputation.",
    ),
    Metric(
        "perf/mfu",
        "fraction",
        "Model FLOPs utilization: model FLOP/s as a fraction of the device's peak.",
        "on devices with a file in `configs/hardware`",
    ),
    Metric(
        "perf/rollout_s",
        "seconds",
        "Time per step to sample completions and compute rewards; not included in `perf/step_s`.",
        _GRPO,
    ),
    Metric("perf/data_wait_s", "seconds", "Time per step spent waiting for the batch."),
    Metric(
        "pipe/bubble_pct",
        "percent",
        "Percentage of idle slots in the pipeline schedule; see `maxpipe schedule`.",
    ),
    Metric(
        "layers/activation_max",
        "",
        "Largest magnitude of any recorded activation in the newest record of `layers.jsonl`. All "
        "metrics of the group `layers` refer to this record.",
        _LAYERS,
    ),
    Metric("layers/activation_max_layer", "", "Index of the layer with this activation.", _LAYERS),
    Metric(
        "layers/attention_logit_max",
        "",
        "Largest attention logit of the sampled queries, over all layers.",
        _LAYERS,
    ),
    Metric(
        "layers/update_ratio_max",
        "",
        "Largest ratio of the norm of an update to the norm of its parameter, over all parameters "
        "in layers.",
        _LAYERS,
    ),
    Metric("layers/update_ratio_max_layer", "", "Index of the layer with this ratio.", _LAYERS),
    Metric(
        "layers/update_ratio_min", "", "Smallest ratio, defined as `update_ratio_max`.", _LAYERS
    ),
    Metric(
        "perf/bubble",
        "fraction",
        "Measured fraction of the tick loop during which stages are idle, from the latest profile; "
        "compare with `pipe/bubble_pct`, which is planned.",
        "after a profile",
    ),
    Metric(
        "memory/device_peak_bytes",
        "bytes",
        "Highest peak memory so far among the devices of process 0.",
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
    ("source loss", ("source/NAME/loss", "source/NAME/eval_loss")),
    ("validation set loss", ("eval/NAME/loss",)),
    ("task accuracy", ("eval/NAME/accuracy",)),
    ("task score", ("eval/NAME/score",)),
    ("harness", ("harness/TASK/METRIC",)),
    ("reward margin", ("train/margin", "eval/margin")),
    ("reward accuracy", ("train/accuracy", "eval/accuracy")),
    ("throughput", ("perf/tokens_per_s",)),
    ("MFU", ("perf/mfu",)),
    ("learning rate", ("train/lr",)),
    ("gradient norm", ("train/grad_norm",)),
    ("step time", ("perf/step_s", "perf/data_wait_s")),
    ("memory", ("memory/device_peak_bytes", "memory/host_bytes")),
)
"""Titles and tags of the custom charts in TensorBoard, most important first. NAME matches any
name."""


def tag_pattern(tag: str) -> str:
    """Return a regular expression that matches the tags of a declared metric. NAME, TASK and
    METRIC match any name, and `_K` any number.
    """
    names = re.sub(r"\b(NAME|TASK|METRIC)\b", "[^/]+", tag.replace(".", r"\."))
    return re.sub(r"_K\b", r"_[0-9]+", names)


def metric_of(tag: str) -> Metric | None:
    """Return the declaration of a metric, or None if it is unknown."""
    for metric in METRICS:
        if re.fullmatch(tag_pattern(metric.tag), tag):
            return metric
    return None


def unit_of(tag: str) -> str:
    """Return the unit of a metric, or "" if it has none or is unknown."""
    metric = metric_of(tag)
    return metric.unit if metric else ""


def table() -> str:
    """Return the Markdown table of docs/reference/metrics.md."""
    lines = ["| tag | unit | meaning | written |", "|---|---|---|---|"]
    for each in METRICS:
        lines.append(f"| `{each.tag}` | {each.unit} | {each.meaning} | {each.when} |")
    return "\n".join([*lines, ""])
