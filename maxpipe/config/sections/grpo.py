"""Config section `grpo`: rollouts and rewards for `train.objective=grpo`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import add_ranges, format_value, rule, value_of
from maxpipe.config.sections.train import LENGTH_KEYS, total_steps
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import format_choices, round_up
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """Reinforcement learning with GRPO: a reward function scores the completions.

    The loss compares completions of the same prompt. Ignored unless `train.objective=grpo`.
    """

    prompts: str = ""
    """JSON Lines file that contains the prompts. Each object contains either a string in `prompt`,
    or `messages`, which are rendered by the chat template. Each object also contains the fields
    that the reward function reads, such as `answer`."""
    group_size: int = 8
    """Number of completions per prompt. The completions of one prompt form a group. Each step uses
    `train.batch_size` completions, so the number of prompts per step is `train.batch_size /
    grpo.group_size`."""
    max_tokens: int = 64
    """Maximum number of tokens per completion. Prompt and completion together are limited to
    `train.sequence_length` tokens."""
    temperature: float = 1.0
    """Sampling temperature of completions. Logits are also divided by this temperature during
    training."""
    stop: list[str] = field(default_factory=list)
    """Stop strings. A completion ends at the first stop string, which is removed before the reward
    is computed."""
    reward: Literal["exact", "number", "regex", "arithmetic"] = "exact"
    """Built-in reward function, which returns 1 or 0. `exact` returns 1 if the completion equals
    the record's `answer`, ignoring surrounding whitespace. `number` returns 1 if the last number in
    the completion equals the last number in the record's `answer`. `regex` returns 1 if the
    record's `pattern` matches anywhere in the completion. `arithmetic` returns 1 if the completion
    is a number equal to the value of the record's `expression`, or of the expression before `=` in
    the last line of the prompt. Ignored if `grpo.reward_file` is set."""
    reward_field: str = ""
    """Name of the record field that `grpo.reward` reads. If empty, the default field of the reward
    function is used."""
    reward_file: str = ""
    """Python reward function, as `FILE.py:FUNCTION`. Replaces `grpo.reward`. The function is called
    once per completion with the completion (a string) and the prompt's record (a dict), and must
    return a number. The function runs in a separate process and must be deterministic."""
    allow_code: bool = False
    """Allow the code in `grpo.reward_file` to run. The code runs with your permissions."""
    reward_timeout_seconds: float = field(default=10.0, metadata=renamed_from("reward_seconds"))
    """Time limit in seconds for one call to the reward function."""
    advantages: Literal["std", "mean"] = "std"
    """Normalization of the advantage, which is a completion's reward minus the mean reward of its
    group. `std` divides the advantage by the standard deviation of the group's rewards (GRPO,
    arXiv:2402.03300). `mean` omits this division (Dr. GRPO, arXiv:2503.20783), so that prompts that
    are almost always or almost never solved get no extra weight."""
    loss_aggregation: Literal["sequence", "token"] = field(
        default="sequence", metadata=renamed_from("average")
    )
    """How the loss is averaged. `sequence`: the loss is averaged over the tokens of each
    completion, and then over completions (GRPO). `token`: the loss is averaged over all tokens of a
    step, which gives long completions more weight (DAPO, arXiv:2503.14476)."""
    clip_ratio: float = field(default=0.2, metadata=renamed_from("clip"))
    """Lower clipping range: in the updates on one rollout, a token's probability ratio is clipped
    to at least 1 - clip_ratio."""
    clip_ratio_high: float = field(default=0.0, metadata=renamed_from("clip_high"))
    """Upper clipping range: a token's probability ratio is clipped to at most 1 + clip_ratio_high.
    DAPO uses 0.28. 0 selects `grpo.clip_ratio`."""
    kl_coef: float = field(default=0.0, metadata=renamed_from("kl"))
    """Coefficient of the KL penalty in the loss. The KL divergence is measured relative to the
    reference model, which is the model at the start of the run. If 0, no reference model is kept in
    memory."""
    updates_per_rollout: int = 1
    """Number of training steps per rollout. The completions for all steps of a rollout are sampled
    together, using the weights before the first of these steps. Checkpoints are saved only after
    the last step of a rollout."""


add_ranges(
    Bound("grpo.group_size", 8, 2, why="the completions of a group are compared"),
    Bound("grpo.max_tokens", 64, 1),
    Bound("grpo.temperature", 1.0, 0.01, 100, "token probabilities are compared"),
    Bound("grpo.reward_timeout_seconds", 10.0, 0, 86400, low_is_inside=False),
    Bound("grpo.clip_ratio", 0.2, 0, 1, "probability ratios are not negative", low_is_inside=False),
    Bound(
        "grpo.clip_ratio_high",
        0.0,
        0,
        LARGEST,
        "0 uses grpo.clip_ratio; the value must fit in float32",
    ),
    Bound(
        "grpo.kl_coef",
        0.04,
        0,
        LARGEST,
        "0 disables the reference model; the value must fit in float32",
    ),
    Bound(
        "grpo.updates_per_rollout", 1, 1, 1024, "all completions of a rollout are sampled together"
    ),
)


_OBJECTIVE = "train.objective"


_GROUP, _UPDATES, _FILE = "grpo.group_size", "grpo.updates_per_rollout", "grpo.reward_file"


_CODE, _PROMPTS = "grpo.allow_code", "grpo.prompts"


def _is_grpo(config: Config) -> bool:
    return config.train.objective == "grpo"


@rule(_PROMPTS, _OBJECTIVE)
def _there_are_prompts(config: Config) -> Iterator[RuleViolation]:
    if _is_grpo(config) and not config.grpo.prompts:
        yield RuleViolation(
            Code.DATA_MISSING,
            _PROMPTS,
            "must be a file of prompts with train.objective=grpo.",
            'Set grpo.prompts=prompts.jsonl, with lines such as {"prompt": "3+4=", "answer": "7"}.',
        )


@rule(_GROUP, "train.batch_size", _OBJECTIVE)
def _groups_fill_a_batch(config: Config) -> Iterator[RuleViolation]:
    size, rows = config.grpo.group_size, config.train.batch_size
    if _is_grpo(config) and rows % size:
        yield RuleViolation(
            Code.CFG_SIZES,
            _GROUP,
            f"must divide train.batch_size ({rows}): each step consists of complete groups.",
            f"Set train.batch_size={round_up(rows, size)}, or grpo.group_size to "
            f"{format_choices(n for n in range(2, rows + 1) if rows % n == 0) or 2}.",
        )


@rule("grpo.max_tokens", "train.sequence_length", _OBJECTIVE)
def _completions_fit(config: Config) -> Iterator[RuleViolation]:
    most, tokens = config.grpo.max_tokens, config.train.sequence_length
    if _is_grpo(config) and most >= tokens:
        yield RuleViolation(
            Code.CFG_VALUE,
            "grpo.max_tokens",
            f"must be less than train.sequence_length ({tokens}): a sequence contains the prompt "
            "and the completion.",
            f"Set grpo.max_tokens={tokens // 2}, or train.sequence_length={2 * most}.",
        )


def is_function_in_file(text: str) -> bool:
    """Return whether the text has the form `FILE.py:FUNCTION`."""
    return re.fullmatch(r".+\.py:[A-Za-z_]\w*", text) is not None


@rule(_FILE, _CODE, _OBJECTIVE)
def _code_is_allowed(config: Config) -> Iterator[RuleViolation]:
    reward_file = config.grpo.reward_file
    if not reward_file or not _is_grpo(config):
        return
    if not is_function_in_file(reward_file):
        yield RuleViolation(
            Code.POST_REWARD,
            _FILE,
            "must be a Python file and the name of a function in it, as FILE.py:FUNCTION.",
            "Set grpo.reward_file=rewards.py:reward.",
        )
    elif not config.grpo.allow_code:
        yield RuleViolation(
            Code.POST_REWARD,
            _FILE,
            "requires grpo.allow_code=true: the run executes this code with your permissions.",
            "Read the file, and set grpo.allow_code=true if you trust it.",
        )


_REQUIRED_VALUES = {
    "train.batch_ramp": ([], "all steps must have the same batch size"),
    "data.mixture": ({}, "prompts come from grpo.prompts"),
    "data.validation": ({}, "no documents are evaluated"),
    "data.end": ("repeat", "prompts are always repeated"),
    "model.mtp_heads": (0, "multi-token prediction is not supported"),
    "model.dropout": (0.0, "completions are sampled without dropout"),
    "pipeline.offload_weights": (False, "rollouts read all weights from device memory"),
}
"""Maps config keys to the value that `train.objective=grpo` requires, and the reason for it."""


def _add_required_value_rule(key: str, wanted: object, why: str) -> None:
    @rule(key, _OBJECTIVE)
    def find(config: Config) -> Iterator[RuleViolation]:
        if _is_grpo(config) and value_of(config, key) != wanted:
            value = format_value(wanted)
            yield RuleViolation(
                Code.CFG_CONFLICT,
                key,
                f"must be {value} with train.objective=grpo: {why}.",
                f"Set {key}={value}.",
            )


for _key, (_wanted, _why) in _REQUIRED_VALUES.items():
    _add_required_value_rule(_key, _wanted, _why)


@rule(_UPDATES, *LENGTH_KEYS, "checkpoint.every", "checkpoint.local_every", _OBJECTIVE)
def _rollouts_are_whole(config: Config) -> Iterator[RuleViolation]:
    updates = config.grpo.updates_per_rollout
    if not _is_grpo(config):
        return
    steps = total_steps(config.train)
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
                Code.CFG_SIZES,
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
    if guard.bad_steps == "rollback":
        key = "guard.bad_steps"
    elif guard.spike_sigmas and guard.on_spike == "rollback":
        key = "guard.on_spike"
    else:
        return
    yield RuleViolation(
        Code.CFG_CONFLICT,
        key,
        f"must not be rollback with grpo.updates_per_rollout ({updates}) above 1: the run would "
        "continue in the middle of a rollout.",
        f"Set {key}=skip, or grpo.updates_per_rollout=1.",
    )
