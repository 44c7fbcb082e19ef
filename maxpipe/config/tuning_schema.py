"""The declaration of the keys of fine-tuning, as `schema.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maxpipe.io.typed_json import renamed_from


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """A teacher of this run's model, the student. Read with `train.objective=distill`."""

    teacher: str = ""
    """The model that teaches, as `checkpoint.restore_from` names one: `RUN@STEP`, `RUN@newest`,
    `RUN@best`, the path to a checkpoint's folder, an import, or `hf:DIR`. It has a model section of
    its own, and the student's vocabulary."""
    teacher_logits: str = field(default="", metadata=renamed_from("stored"))
    """In place of a teacher the folder in which `maxpipe distill prepare` has stored what it says
    of all rows."""
    direction: Literal["forward", "reverse"] = "forward"
    """Which divergence is made small: `forward`, KL(teacher | student), spreads the student over
    all that the teacher may say; `reverse`, KL(student | teacher), draws it to what the teacher
    says most."""
    temperature: float = 1.0
    """What logits of both are divided by. Above 1 the less likely tokens count more. The
    divergence is multiplied by its square, so that gradients stay as large."""
    top_k: int = 32
    """How many of the teacher's most likely tokens are told apart, at each place. All others are
    one bucket. At most `model.vocab_size`."""
    weight: float = 0.5
    """What the divergence counts in the loss; the cross entropy of the text has the rest of 1."""
    teacher_devices: int = field(default=0, metadata=renamed_from("devices"))
    """How many devices are the teacher's, the last ones; the student has the others. 0: both have
    all devices, in turn."""
    teacher_layout: list[str] = field(default_factory=list, metadata=renamed_from("layout"))
    """Mesh and pipeline of the teacher: keys of these two sections, such as `[mesh.ici_stage=2,
    mesh.ici_fsdp=2, pipeline.microbatches=4]`. Of its pipeline only forward slots run. Empty: the
    student's mesh and microbatches where both have as many devices, else fsdp over all of its
    devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """Reinforcement learning with rewards that a function gives.

    Completions are drawn, rewarded, and compared within groups. Read with `train.objective=grpo`.
    """

    prompts: str = ""
    """A file with a JSON object a line: `prompt`, a text, or `messages`, which the chat template
    makes a text of; and what the reward reads, such as `answer`."""
    group_size: int = 8
    """Completions of each prompt, which are compared with each other. A step has
    `train.batch_size` completions, as many prompts as there are groups in it."""
    max_tokens: int = 64
    """Tokens of a completion at most. Prompt and completion fit in `train.sequence_length`."""
    temperature: float = 1.0
    """Logits are divided by it, where completions are drawn and where they are trained on."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, which is rewarded without them."""
    reward: Literal["exact", "regex", "arithmetic"] = "exact"
    """What a completion is rewarded for, 1 or 0. `exact`: it is the record's `answer`, but for
    white space around it. `regex`: the record's `pattern` is found in it. `arithmetic`: it is a
    number, the value of the record's `expression`, or of what stands before the `=` in the last
    line of its prompt. Not read with `grpo.reward_file`."""
    reward_field: str = ""
    """Field of a record that `grpo.reward` reads, in place of these."""
    reward_file: str = ""
    """`FILE.py:FUNCTION` in place of `grpo.reward`. The function is given the completion and the
    record of its prompt, a text and a dict, and returns a number. It runs in a process of its own
    and is called once for each completion; given the same it must return the same."""
    allow_code: bool = False
    """Whether `grpo.reward_file` may be run: it is code, and can do what you can do."""
    reward_timeout_seconds: float = field(default=10.0, metadata=renamed_from("reward_seconds"))
    """The most that one call of a reward may take."""
    advantages: Literal["std", "mean"] = "std"
    """How much better a completion is than its group: its reward minus the group's mean, with `std`
    divided by the group's standard deviation (GRPO, arXiv:2402.03300); with `mean` it is not, so
    that prompts that are nearly always, or never, solved count no more (Dr. GRPO,
    arXiv:2503.20783)."""
    loss_aggregation: Literal["sequence", "token"] = field(
        default="sequence", metadata=renamed_from("average")
    )
    """What the loss is a mean of: completions, each the mean of its tokens (GRPO); or the tokens of
    all completions of a step, so that long ones count more (DAPO, arXiv:2503.14476)."""
    clip_ratio: float = field(default=0.2, metadata=renamed_from("clip"))
    """The probability of a token is not made more than this times smaller, 1 - clip, in the steps
    of one rollout."""
    clip_ratio_high: float = field(default=0.0, metadata=renamed_from("clip_high"))
    """The same of what makes it larger, 1 + clip_ratio_high; DAPO takes 0.28. 0: as `grpo.clip_ratio`."""
    kl_coef: float = field(default=0.0, metadata=renamed_from("kl"))
    """What the divergence from the reference, the weights that the run started with, counts in the
    loss. 0: there is no reference, and no memory for it."""
    updates_per_rollout: int = 1
    """Steps that train on completions of the same weights. They are drawn for all these steps at
    once, with the weights before the first one. Checkpoints are of steps behind a whole rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """How a model learns which of two responses is preferred. Read with
    `train.objective=preference`.
    """

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """`dpo` (arXiv:2305.18290) makes the chosen response likelier and the rejected one less likely,
    both beside the reference: the weights that the run starts from. `ipo` (arXiv:2310.12036)
    wants a margin and no more. `orpo` (arXiv:2403.07691) has no reference: it adds the odds of the
    two responses to the cross-entropy of the chosen one."""
    beta: float = 0.1
    """How much a distance from the reference costs: the beta of `dpo`, the tau of `ipo`. Rewards in
    the metrics are in its unit. Not read by `orpo`."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken to be the wrong way round, for `dpo`
    (arXiv:2306.15479)."""
    length_normalised: Literal["auto", "on", "off"] = "auto"
    """Whether the log-probability of a response is the mean over its tokens in place of the sum.
    `auto`: the mean for `ipo` and `orpo`, the sum for `dpo`."""
    odds_weight: float = 0.1
    """What the odds count beside the cross-entropy, the lambda of `orpo`. Read by it alone."""
