"""Declarations of the fine-tuning keys: distillation, GRPO and preference optimization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maxpipe.io.typed_json import renamed_from


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Distillation from a teacher model into the model of this run, the student. Ignored unless
    `train.objective=distill`.
    """

    teacher: str = ""
    """Teacher model, in the same form as `checkpoint.restore_from`: `RUN@STEP`, `RUN@newest`,
    `RUN@best`, the path of a checkpoint folder, an imported model, or `hf:DIR`. The teacher may
    have a different architecture, but must have the same vocabulary."""
    teacher_logits: str = field(default="", metadata=renamed_from("stored"))
    """Folder of precomputed teacher logits, written by `maxpipe distill prepare`. Replaces
    `distill.teacher`."""
    direction: Literal["forward", "reverse"] = "forward"
    """Direction of the KL divergence between the predicted distributions. `forward` minimizes
    KL(teacher | student), which makes the student cover all tokens that the teacher considers
    likely. `reverse` minimizes KL(student | teacher), which concentrates the student on the
    teacher's most likely tokens."""
    temperature: float = 1.0
    """Temperature that divides the logits of teacher and student. Values above 1 give less likely
    tokens more weight. The divergence is multiplied by the squared temperature, so that the scale
    of the gradients does not change."""
    top_k: int = 32
    """Number of the teacher's most likely tokens that are compared at each position. All other
    tokens are merged into one bucket. At most `model.vocab_size`."""
    weight: float = 0.5
    """Weight of the divergence in the loss. The weight of the cross-entropy is 1 minus this
    value."""
    teacher_devices: int = field(default=0, metadata=renamed_from("devices"))
    """Number of devices at the end of the device list that run only the teacher. The student uses
    all other devices. With 0, teacher and student alternate on all devices."""
    teacher_layout: list[str] = field(default_factory=list, metadata=renamed_from("layout"))
    """Settings of the teacher's mesh and pipeline, such as `[mesh.ici_stage=2, mesh.ici_fsdp=2,
    pipeline.microbatches=4]`. The teacher's pipeline runs only forward passes. If empty, and
    teacher and student have the same number of devices, the teacher uses the student's mesh and
    microbatches. With different numbers of devices, the teacher uses fsdp over all of its
    devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """Reinforcement learning with GRPO on completions that a reward function scores.

    The loss compares completions of the same prompt. Ignored unless `train.objective=grpo`.
    """

    prompts: str = ""
    """File of prompts with one JSON object per line. An object has a text in `prompt`, or
    `messages` that the chat template renders. It also has the fields that the reward function
    reads, such as `answer`."""
    group_size: int = 8
    """Number of completions per prompt. The completions of one prompt form a group. Each step has
    `train.batch_size` completions, so the number of prompts per step is `train.batch_size /
    grpo.group_size`."""
    max_tokens: int = 64
    """Maximum number of tokens per completion. Prompt and completion together have at most
    `train.sequence_length` tokens."""
    temperature: float = 1.0
    """Sampling temperature of completions. Logits are also divided by this temperature during
    training."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion. The text that ended a completion is removed before the reward is
    computed."""
    reward: Literal["exact", "regex", "arithmetic"] = "exact"
    """Reward function, with the value 1 or 0. `exact`: the completion equals the `answer` of the
    record, ignoring surrounding white space. `regex`: the `pattern` of the record matches a part of
    the completion. `arithmetic`: the completion is a number equal to the value of the record's
    `expression`, or of the text before `=` in the last line of the prompt. Ignored if
    `grpo.reward_file` is set."""
    reward_field: str = ""
    """Name of the record field that `grpo.reward` reads. If empty, the default field of the reward
    function is used."""
    reward_file: str = ""
    """Python reward function, as `FILE.py:FUNCTION`. Replaces `grpo.reward`. The function is called
    once per completion. Its arguments are the completion (a string) and the record of the prompt (a
    dict), and it must return a number. The function runs in a separate process and must be
    deterministic."""
    allow_code: bool = False
    """Allow the code in `grpo.reward_file` to run. The code runs with your permissions."""
    reward_timeout_seconds: float = field(default=10.0, metadata=renamed_from("reward_seconds"))
    """Time limit in seconds for one call of the reward function."""
    advantages: Literal["std", "mean"] = "std"
    """Advantage of a completion. Both values subtract the mean reward of the group. `std` also
    divides by the standard deviation of the group (GRPO, arXiv:2402.03300). `mean` does not divide
    (Dr. GRPO, arXiv:2503.20783). Prompts that are almost always or almost never solved then get no
    extra weight."""
    loss_aggregation: Literal["sequence", "token"] = field(
        default="sequence", metadata=renamed_from("average")
    )
    """Method that averages the loss. `sequence`: the loss is averaged over the tokens of each
    completion, and then over completions (GRPO). `token`: the loss is averaged over all tokens of a
    step, which gives long completions more weight (DAPO, arXiv:2503.14476)."""
    clip_ratio: float = field(default=0.2, metadata=renamed_from("clip"))
    """Lower clipping range: within one rollout, the probability ratio of a token is clipped at 1 -
    clip_ratio."""
    clip_ratio_high: float = field(default=0.0, metadata=renamed_from("clip_high"))
    """Upper clipping range: the probability ratio of a token is clipped at 1 + clip_ratio_high.
    DAPO uses 0.28. 0 uses `grpo.clip_ratio`."""
    kl_coef: float = field(default=0.0, metadata=renamed_from("kl"))
    """Coefficient in the loss of the KL divergence from the reference model, which has the weights
    at the start of the run. With 0, no reference model is kept in memory."""
    updates_per_rollout: int = 1
    """Number of training steps per rollout. The completions for all steps of a rollout are sampled
    together, with the weights before the first of these steps. Checkpoints are saved only after the
    last step of a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """Preference optimization on response pairs. Ignored unless `train.objective=preference`."""

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """Loss on a pair of responses. `dpo` (arXiv:2305.18290) increases the likelihood of the chosen
    response relative to the rejected response. Both likelihoods are compared with those of a
    reference model, which has the weights at the start of the run. `ipo` (arXiv:2310.12036)
    regresses the difference to a fixed margin. `orpo` (arXiv:2403.07691) needs no reference model,
    and adds an odds-ratio term to the cross-entropy of the chosen response."""
    beta: float = 0.1
    """Strength of the penalty for deviating from the reference model: beta in the paper of `dpo`,
    tau in that of `ipo`. It also scales the rewards in the metrics. Ignored by `orpo`."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels (arXiv:2306.15479). Only for `dpo`."""
    length_normalised: Literal["auto", "on", "off"] = "auto"
    """Use the mean log-probability over the tokens of a response instead of the sum. `auto` uses
    the mean for `ipo` and `orpo`, and the sum for `dpo`."""
    odds_weight: float = 0.1
    """Weight of the odds-ratio term relative to the cross-entropy (lambda in the paper). Ignored
    unless `preference.loss` is `orpo`."""
