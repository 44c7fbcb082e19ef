"""Rules for post-training: adapters, preference pairs, distillation and GRPO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from maxpipe.config.data_rules import named_sources
from maxpipe.config.keys import KEYS, default_of
from maxpipe.config.rules import axis_keys, axis_size, did_you_mean, format_value, rule, value_of
from maxpipe.config.schema import Config
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import format_choices, round_up
from maxpipe.models.adapters import (
    block_size,
    dim_of_scales,
    matrices,
    names_of_adaptable,
    picked,
    summed,
    unmatched,
)
from maxpipe.models.param_names import declared, suggestions
from maxpipe.models.registry import describe

_OBJECTIVE = "train.objective"
_GROUP, _UPDATES, _FILE = "grpo.group_size", "grpo.updates_per_rollout", "grpo.reward_file"
_CODE, _PROMPTS = "grpo.allow_code", "grpo.prompts"
_LENGTH = (
    *("train.steps", "train.tokens", "train.batch_size", "train.batch_ramp"),
    "train.sequence_length",
)
"""Keys that determine the number of steps."""


def _is_grpo(config: Config) -> bool:
    return config.train.objective == "grpo"


@rule(_PROMPTS, _OBJECTIVE)
def _there_are_prompts(config: Config) -> Iterator[RuleViolation]:
    if _is_grpo(config) and not config.grpo.prompts:
        yield RuleViolation(
            _PROMPTS,
            "must be a file of prompts with train.objective=grpo.",
            'Set grpo.prompts=prompts.jsonl, with lines such as {"prompt": "3+4=", "answer": "7"}.',
        )


@rule(_GROUP, "train.batch_size", _OBJECTIVE)
def _groups_fill_a_batch(config: Config) -> Iterator[RuleViolation]:
    size, rows = config.grpo.group_size, config.train.batch_size
    if _is_grpo(config) and rows % size:
        yield RuleViolation(
            _GROUP,
            f"must divide train.batch_size ({rows}): a step has complete groups.",
            f"Set train.batch_size={round_up(rows, size)}, or grpo.group_size to "
            f"{format_choices(each for each in range(2, rows + 1) if rows % each == 0) or 2}.",
        )


@rule("grpo.max_tokens", "train.sequence_length", _OBJECTIVE)
def _completions_fit(config: Config) -> Iterator[RuleViolation]:
    most, tokens = config.grpo.max_tokens, config.train.sequence_length
    if _is_grpo(config) and most >= tokens:
        yield RuleViolation(
            "grpo.max_tokens",
            f"must be less than train.sequence_length ({tokens}): a sequence contains the prompt "
            "and the completion.",
            f"Set grpo.max_tokens={tokens // 2}, or train.sequence_length={2 * most}.",
        )


@rule(_FILE, _CODE, _OBJECTIVE)
def _code_is_allowed(config: Config) -> Iterator[RuleViolation]:
    given = config.grpo.reward_file
    if not given or not _is_grpo(config):
        return
    if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", given):
        yield RuleViolation(
            _FILE,
            "must be a Python file and a function in the file.",
            "Set grpo.reward_file=rewards.py:reward.",
        )
    elif not config.grpo.allow_code:
        yield RuleViolation(
            _FILE,
            "requires grpo.allow_code=true: the run executes this code with your permissions.",
            "Read the file, and set grpo.allow_code=true if you trust it.",
        )


_REQUIRED_VALUES = {
    "train.batch_ramp": ([], "all steps have the same batch size"),
    "data.mixture": ({}, "prompts come from grpo.prompts"),
    "data.validation": ({}, "no documents are evaluated"),
    "data.end": ("repeat", "prompts are always repeated"),
    "model.mtp_heads": (0, "multi-token prediction is not supported"),
    "model.dropout": (0.0, "completions are sampled without dropout"),
}
"""Maps keys to the values that this objective requires, and the reasons."""


def _add_required_value_rule(key: str, wanted: object, why: str) -> None:
    @rule(key, _OBJECTIVE)
    def find(config: Config) -> Iterator[RuleViolation]:
        if _is_grpo(config) and value_of(config, key) != wanted:
            value = format_value(wanted)
            yield RuleViolation(
                key, f"must be {value} with train.objective=grpo: {why}.", f"Set {key}={value}."
            )


for _key, (_wanted, _why) in _REQUIRED_VALUES.items():
    _add_required_value_rule(_key, _wanted, _why)


@rule(_UPDATES, *_LENGTH, "checkpoint.every", "checkpoint.local_every", _OBJECTIVE)
def _rollouts_are_whole(config: Config) -> Iterator[RuleViolation]:
    updates = config.grpo.updates_per_rollout
    if not _is_grpo(config):
        return
    steps = config.train.steps or BatchRamp.from_config(config.train).num_batches(
        -(-config.train.tokens // config.train.sequence_length)
    )
    periods = {
        "train.steps" if config.train.steps else "train.tokens": steps,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.local_every": config.checkpoint.local_every,
    }
    for key, period in periods.items():
        if period % updates:
            value = f"train.steps={round_up(steps, updates)}"
            value = value if key.startswith("train") else f"{key}={round_up(period, updates)}"
            yield RuleViolation(
                key,
                f"must be a multiple of grpo.updates_per_rollout ({updates}): checkpoints are only "
                "saved after complete rollouts, so that a run resumes with the same completions.",
                f"Set {value}, or grpo.updates_per_rollout=1.",
            )


@rule(_UPDATES, "guard.bad_steps", "guard.on_spike", "guard.spike_sigmas", _OBJECTIVE)
def _no_rollback_within_a_rollout(config: Config) -> Iterator[RuleViolation]:
    guard, updates = config.guard, config.grpo.updates_per_rollout
    if not _is_grpo(config) or updates == 1:
        return
    if guard.bad_steps == "roll_back":
        key = "guard.bad_steps"
    elif guard.spike_sigmas and guard.on_spike == "roll_back":
        key = "guard.on_spike"
    else:
        return
    yield RuleViolation(
        key,
        f"must not be roll_back with grpo.updates_per_rollout ({updates}) above 1: the run would "
        "continue in the middle of a rollout.",
        f"Set {key}=skip, or grpo.updates_per_rollout=1.",
    )


@rule("train.objective", "data.source", "data.chat", "data.mixture", "data.validation")
def _pairs_for_preferences(config: Config) -> Iterator[RuleViolation]:
    wants_pairs = config.train.objective == "preference"
    for section, each in named_sources(config):
        key, has_pairs = f"{section}.chat", each.chat == "pairs"
        if wants_pairs and not has_pairs:
            yield RuleViolation(
                key,
                "must be pairs with train.objective=preference, which compares two responses.",
                f"Set {key}=pairs, {section}.packing=best_fit, {section}.source=jsonl, and "
                f"{section}.path to records with prompt, chosen and rejected.",
            )
        if has_pairs and not wants_pairs:
            yield RuleViolation(
                key,
                f"must not be pairs with train.objective={config.train.objective}, which would "
                "also train on rejected responses.",
                f"Set train.objective=preference, or {key}=prompt and "
                f"{section}.response_field={each.chosen_field} to train on chosen responses only.",
            )


@rule("train.objective", "model.mtp_heads")
def _no_mtp_with_preferences(config: Config) -> Iterator[RuleViolation]:
    if config.train.objective == "preference" and config.model.mtp_heads:
        yield RuleViolation(
            "model.mtp_heads",
            "must be 0 with train.objective=preference: these heads would also train on rejected "
            "responses.",
            "Set model.mtp_heads=0.",
        )


@rule("preference.loss", "preference.length_normalised")
def _orpo_needs_length_normalisation(config: Config) -> Iterator[RuleViolation]:
    section = config.preference
    if section.loss == "orpo" and section.length_normalised == "off":
        yield RuleViolation(
            "preference.length_normalised",
            "must not be off with preference.loss=orpo: the odds of a full response are close to "
            "zero.",
            "Set preference.length_normalised=auto.",
        )


@rule("preference.loss", "preference.label_smoothing")
def _smoothed_labels(config: Config) -> Iterator[RuleViolation]:
    section = config.preference
    if section.loss != "dpo" and section.label_smoothing:
        yield RuleViolation(
            "preference.label_smoothing",
            f"is ignored with preference.loss={section.loss}.",
            "Set preference.label_smoothing=0, or preference.loss=dpo.",
        )


@rule(_OBJECTIVE, "distill.teacher", "distill.teacher_logits")
def _teacher_is_named(config: Config) -> Iterator[RuleViolation]:
    if config.train.objective != "distill":
        return
    own = config.distill
    if not (own.teacher or own.teacher_logits):
        yield RuleViolation(
            "distill.teacher",
            "must be set to a teacher model with train.objective=distill.",
            "Set distill.teacher=RUN@newest or hf:DIR, or set distill.teacher_logits to a folder "
            "written "
            "by `maxpipe distill prepare`.",
        )
    elif own.teacher and own.teacher_logits:
        yield RuleViolation(
            "distill.teacher_logits",
            "must be empty with distill.teacher: teacher logits are computed or read, not both.",
            "Set distill.teacher='' to read precomputed logits, or distill.teacher_logits='' to "
            "compute "
            "them.",
        )


@rule(_OBJECTIVE, "distill.top_k", "model.vocab_size")
def _top_k_is_in_the_vocabulary(config: Config) -> Iterator[RuleViolation]:
    most = config.model.vocab_size
    if config.train.objective == "distill" and config.distill.top_k > most:
        yield RuleViolation(
            "distill.top_k",
            f"must be at most model.vocab_size ({most}).",
            f"Set distill.top_k={most}, or less.",
        )


@rule(_OBJECTIVE, "distill.teacher_logits", "distill.teacher_devices", "distill.teacher_layout")
def _stored_logits_need_no_devices(config: Config) -> Iterator[RuleViolation]:
    own = config.distill
    if config.train.objective != "distill" or not own.teacher_logits:
        return
    for name, value in (
        ("teacher_devices", own.teacher_devices),
        ("teacher_layout", own.teacher_layout),
    ):
        if value:
            empty = "0" if name == "teacher_devices" else "[]"
            yield RuleViolation(
                f"distill.{name}",
                "has no effect with distill.teacher_logits: no teacher runs.",
                f"Set distill.{name}={empty}.",
            )


@rule("distill.teacher_layout")
def _layout_is_of_two_sections(config: Config) -> Iterator[RuleViolation]:
    for text in config.distill.teacher_layout:
        key = text.partition("=")[0]
        if "=" not in text or not key.startswith(("mesh.", "pipeline.")):
            yield RuleViolation(
                "distill.teacher_layout",
                "must contain only keys of the sections mesh and pipeline with values, but has "
                f"{text!r}.",
                "Set distill.teacher_layout=[mesh.ici_stage=2,pipeline.microbatches=4].",
            )
        elif key == "mesh.cpu_devices":
            yield RuleViolation(
                "distill.teacher_layout",
                "must not contain mesh.cpu_devices, which applies to teacher and student together.",
                "Set mesh.cpu_devices and distill.teacher_devices in the config of the run.",
            )


_KEYS = tuple(key for key in KEYS if key.startswith(("adapter.", "model.")))
_MAX_FINDINGS = 8


@rule(*(key for key in KEYS if key.startswith("adapter.")))
def _adapter_keys_need_a_rank(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank:
        return
    for key in ("targets", "dropout", "base_quantization", "kind"):
        if getattr(config.adapter, key) != default_of(f"adapter.{key}"):
            yield RuleViolation(
                f"adapter.{key}",
                "is ignored with adapter.rank = 0: all parameters are trained.",
                f"Set adapter.rank=16, or leave adapter.{key} out.",
            )


@rule(*_KEYS)
def _targets_support_adapters(config: Config) -> Iterator[RuleViolation]:
    if not config.adapter.rank:
        return
    model, targets = describe(replace(config.model, adapter=None)), config.adapter.targets
    can = names_of_adaptable(model)
    if not can:
        yield RuleViolation(
            "adapter.rank",
            f"must be 0: layers of model.family={config.model.family} have no matrices that "
            "support adapters.",
            "Set adapter.rank=0, and list the parameters to freeze in model.frozen.",
        )
    unknown = unmatched(model, config.adapter)
    useless = [
        each for each in targets if each not in unknown and not picked(model, [each]) & {*can}
    ]
    good = [each for each in targets if each not in (*unknown, *useless)]
    for wrong in (*unknown, *useless)[:_MAX_FINDINGS]:
        guess = did_you_mean(wrong, [*can, *suggestions(model)])
        guess = guess if picked(model, [guess]) & {*can} else ""
        what = "which matches no parameter" if wrong in unknown else "which has no adapter support"
        kept = ",".join([*good, *filter(None, [guess])])
        yield RuleViolation(
            "adapter.targets",
            f"contains {wrong!r}, {what}: adapters support {', '.join(can)}.",
            f"Set adapter.targets=[{kept}]" + ("." if kept else " to adapt all of these."),
        )


@rule(*_KEYS)
def _rank_fits_the_matrices(config: Config) -> Iterator[RuleViolation]:
    adapter = config.adapter
    if not adapter.rank:
        return
    for name, param in matrices(describe(replace(config.model, adapter=None)), adapter).items():
        sides = param.dims[: summed(param)], param.dims[summed(param) :]
        small = min(math.prod(size for size, _ in side) for side in sides)
        if adapter.rank > small:
            yield RuleViolation(
                "adapter.rank",
                f"must be at most {small}, the smaller dimension of {name}, which limits its rank.",
                f"Set adapter.rank={small}, or adapter.targets to larger matrices.",
            )
            return


@rule("adapter.rank", "model.mtp_heads")
def _no_mtp_with_adapters(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank and config.model.mtp_heads:
        yield RuleViolation(
            "model.mtp_heads",
            "must be 0 with adapters: multi-token prediction heads do not support adapters.",
            "Set model.mtp_heads=0; such heads in the base weights are ignored.",
        )


@rule("adapter.rank", "adapter.kind", "model.matmul")
def _dora_needs_default_matmul(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank and config.adapter.kind == "dora" and config.model.matmul != "default":
        yield RuleViolation(
            "adapter.kind",
            "must be lora with 8-bit matmuls: dora normalizes weight columns, but "
            f"model.matmul={config.model.matmul} quantizes the weights.",
            "Set adapter.kind=lora, or model.matmul=default.",
        )


@rule(*_KEYS, *axis_keys("tensor"))
def _nf4_blocks_divide_over_tensor(config: Config) -> Iterator[RuleViolation]:
    """Check that each shard contains only complete bytes (two 4-bit values each) and complete
    blocks (one scale each).
    """
    if not config.adapter.rank or config.adapter.base_quantization != "nf4":
        return
    shards = axis_size(config.mesh, "tensor") or 1
    for name, param in declared(describe(replace(config.model, adapter=None))).items():
        if name.startswith("layers.") and (dim := dim_of_scales(param)) is not None:
            size, axis = param.dims[dim]
            parts = shards if axis == "mlp" else 1
            piece = max(block_size(size), 2)
            if size % (piece * parts):
                yield RuleViolation(
                    "adapter.base_quantization",
                    f"nf4 stores {name} in blocks of {piece} values along {axis} ({size}), which "
                    f"{parts} devices of mesh axis tensor cannot shard evenly."
                    if parts > 1
                    else f"nf4 stores {name} in pairs of values along {axis}, but {axis} has an "
                    f"odd size ({size}).",
                    "Set adapter.base_quantization=int8.",
                )
                return
