"""Rules for reinforcement learning: prompts, rewards, and rollouts of several steps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from maxpipe.config.rules import format_value, rule, value_of
from maxpipe.config.schema import Config
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import format_choices, round_up

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
