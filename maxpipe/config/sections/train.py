"""Config section `train`: training objective, run length and batch shape."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from maxpipe.config.rules import (
    MAX_INT32,
    add_item_rules,
    add_ranges,
    axis_keys,
    axis_size,
    rule,
    upgrade_batch_ramp,
)
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import pluralize, round_up
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

ObjectiveName = Literal["pretrain", "sft", "preference", "distill", "grpo"]
"""Objectives of this package."""

OBJECTIVES: dict[str, Callable[..., Any]] = {}
"""Objectives from plug-ins, keyed by name: functions of `train.objective_options` that return an
`Objective`."""

MAX_STEPS = 10**11
"""Maximum number of steps in a run, chosen so that sequence indices fit in 63 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampStageConfig:
    """Stage at the start of the run with a smaller batch size. Set either `steps` or `tokens`."""

    batch_size: int
    """Number of sequences per step, summed over all devices."""
    steps: int | None = None
    """Length of the stage in steps."""
    tokens: int | None = None
    """Length of the stage in tokens, rounded up to complete steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Training objective, run length and batch shape."""

    objective: str = "pretrain"
    """Training objective. `pretrain`: next-token cross-entropy on documents. `sft`: supervised
    fine-tuning, which applies the cross-entropy only to the assistant's tokens in conversations.
    `sft` requires documents with a loss mask; see `data.chat`. `pretrain` and `sft` average the
    loss over all tokens of a batch that contribute to the loss. `preference`: preference
    optimization on pairs of responses; see `preference.loss`. `distill`: the next-token loss plus a
    divergence from a teacher; see the section `distill`. `grpo`: reinforcement learning on sampled
    completions that a reward function scores; see the section `grpo`. Plug-ins add further
    objectives; see the section `plugins`."""
    objective_options: dict[str, float] = field(default_factory=dict, hash=False)
    """Settings of an objective from a plug-in, keyed by name, such as `{gamma: 2}`. The plug-in
    defines the names and the defaults."""
    steps: int = 0
    """Number of optimizer steps. If 0, `train.tokens` determines the length of the run."""
    tokens: int = 0
    """Number of training tokens, rounded up to complete steps. Ignored unless `train.steps` is
    0."""
    batch_size: int = 8
    """Number of sequences per step, summed over all devices."""
    batch_ramp: list[BatchRampStageConfig] = field(
        default_factory=list,
        hash=False,  # a list has no hash
        metadata=renamed_from(values=upgrade_batch_ramp),
    )
    """Batch size warm-up: stages with smaller batches at the start of the run, such as
    `[{batch_size: 16, steps: 1000}, {batch_size: 32, tokens: 50000000}]`. Batch sizes must increase
    up to `train.batch_size`. No data is skipped between stages. The microbatch size is constant, so
    smaller batches have fewer microbatches. On resume, stages that are already complete must be
    unchanged."""
    sequence_length: int = 1024
    """Number of tokens per sequence."""


add_ranges(
    Bound("train.steps", 100, 0, MAX_STEPS, "0 uses train.tokens"),
    Bound("train.tokens", 1000000, 0, 10**18, "0 uses train.steps"),
    Bound("train.batch_size", 8, 1, 2**24, "every step enumerates all sequences of its batch"),
    Bound(
        "train.sequence_length",
        1024,
        2,
        MAX_INT32,
        "the last token has no target, and positions are int32",
    ),
    Bound(
        "train.batch_ramp[].batch_size",
        4,
        1,
        2**24,
        "every step enumerates all sequences of its batch",
    ),
    Bound("train.batch_ramp[].steps", 10, 1, MAX_STEPS),
    Bound("train.batch_ramp[].tokens", 1000000, 1, 10**18),
)


@rule("train.objective", "train.objective_options")
def _objective_accepts_options(config: Config) -> Iterator[RuleViolation]:
    key, options = "train.objective_options", config.train.objective_options
    make = OBJECTIVES.get(name := config.train.objective)
    known = list(inspect.signature(make).parameters) if make else []
    if wrong := [each for each in options if each not in known]:
        accepted = f"accepts {', '.join(known)}" if known else "has no options"
        yield RuleViolation(
            Code.CFG_IGNORED,
            key,
            f"contains {wrong[0]}, but train.objective={name} {accepted}.",
            f"Set {key}={{}}." if len(wrong) == len(options) else f"Leave {wrong[0]} out.",
        )


add_item_rules("train.batch_ramp", "[{batch_size: 4, steps: 10}]", one_of=("steps", "tokens"))


def total_steps(train: TrainConfig) -> int:
    """Return the number of optimizer steps in the run."""
    return train.steps or BatchRamp.from_config(train).num_batches(
        -(-train.tokens // train.sequence_length)
    )


LENGTH_KEYS = (
    "train.steps",
    "train.tokens",
    "train.batch_size",
    "train.batch_ramp",
    "train.sequence_length",
)
"""Keys that determine `total_steps`."""


@rule(*LENGTH_KEYS)
def _ramp_grows_and_ends(config: Config) -> Iterator[RuleViolation]:
    ramp, steps = BatchRamp.from_config(config.train), total_steps(config.train)
    if wrong := check_order(ramp):
        yield RuleViolation(
            Code.CFG_VALUE,
            "train.batch_ramp",
            wrong,
            "Set train.batch_ramp=[] for a constant batch size.",
        )
    elif ramp.stages and ramp.steps >= steps > 0:
        yield RuleViolation(
            Code.CFG_VALUE,
            "train.batch_ramp",
            f"has {pluralize(ramp.steps, 'step')}, but the run has {steps}: no batch reaches "
            f"train.batch_size ({ramp.batch_size}).",
            f"Set train.steps={2 * ramp.steps}, or shorten the stages of train.batch_ramp.",
        )


@rule(*axis_keys("context"), "train.sequence_length")
def _context_divides_sequence_length(config: Config) -> Iterator[RuleViolation]:
    size, tokens = axis_size(config.mesh, "context") or 1, config.train.sequence_length
    if size > 1 and tokens % (2 * size):
        yield RuleViolation(
            Code.CFG_SIZES,
            "train.sequence_length",
            f"must be a multiple of 2 x context ({size}) = {2 * size}: for load balance, each "
            "device computes an early and a late chunk of a sequence.",
            f"Set train.sequence_length={round_up(tokens, 2 * size)}, or the context size to 1.",
        )


@rule("train.sequence_length", "mesh.sequence_parallel", *axis_keys("context", "tensor"))
def _tokens_divide(config: Config) -> Iterator[RuleViolation]:
    tokens, mesh = config.train.sequence_length, config.mesh
    context, tensor = axis_size(mesh, "context") or 1, axis_size(mesh, "tensor") or 1
    if mesh.sequence_parallel and tokens % (context * tensor):
        # With a context axis, the sequence length must also be a multiple of 2 x context.
        more = round_up(tokens, math.lcm(context * tensor, 2 * context if context > 1 else 1))
        sizes = f"context ({context}) x tensor ({tensor})" if context > 1 else f"tensor ({tensor})"
        yield RuleViolation(
            Code.CFG_SIZES,
            "train.sequence_length",
            f"must be a multiple of {sizes} with mesh.sequence_parallel=true: tokens are sharded "
            "evenly between matmuls.",
            f"Set train.sequence_length={more}, or mesh.sequence_parallel=false.",
        )


class RampStage(NamedTuple):
    """Stage of consecutive steps with the same batch size."""

    batch_size: int
    steps: int


class BatchRamp(NamedTuple):
    """Batch size as a function of the batch index, which starts at 0.

    Consecutive batches use consecutive sequences of the dataset. The position of a batch is the
    total number of sequences in all earlier batches.
    """

    stages: tuple[RampStage, ...]
    batch_size: int
    """Batch size after the last stage."""

    @classmethod
    def from_config(cls, train: TrainConfig) -> BatchRamp:
        """Return the batch ramp defined in a config."""
        stages = (
            RampStage(stage.batch_size, _stage_steps(stage, train.sequence_length))
            for stage in train.batch_ramp
        )
        return cls(tuple(stages), train.batch_size)

    @property
    def steps(self) -> int:
        """Number of steps before the final batch size is reached."""
        return sum(stage.steps for stage in self.stages)

    def stage_starts(self) -> Iterator[tuple[int, int, int]]:
        """Yield the index of the first batch, the number of earlier sequences and the batch size
        for each stage, and finally for the steps after the ramp.
        """
        first = front = 0
        for rows, steps in self.stages:
            yield first, front, rows
            first, front = first + steps, front + rows * steps
        yield first, front, self.batch_size

    def position_of(self, number: int) -> tuple[int, int]:
        """Return the total number of sequences in all earlier batches, and the size of this
        batch.
        """
        first, front, rows = next(p for p in reversed(list(self.stage_starts())) if p[0] <= number)
        return front + (number - first) * rows, rows

    def sequences_before(self, number: int) -> int:
        """Return the total number of sequences in all batches before this one."""
        return self.position_of(number)[0]

    def num_batches(self, rows: int) -> int:
        """Return the minimum number of batches, counted from the start, that contain at least
        `rows` sequences.
        """
        first, front, size = next(p for p in reversed(list(self.stage_starts())) if p[1] <= rows)
        return first + -(-(rows - front) // size)

    def sizes(self, start: int = 0) -> list[int]:
        """Return the distinct batch sizes used from batch `start` onward, in order."""
        ends = [first for first, *_ in self.stage_starts()][1:]
        left = [s.batch_size for s, end in zip(self.stages, ends, strict=True) if end > start]
        return list(dict.fromkeys([*left, self.batch_size]))

    def equals_until(self, other: BatchRamp, number: int) -> bool:
        """Return True if both ramps assign the same sequences to every batch before batch
        `number`.
        """
        edges = {p[0] for ramp in (self, other) for p in ramp.stage_starts()} | {number}
        return all(
            self.sequences_before(edge) == other.sequences_before(edge)
            for edge in edges
            if 0 <= edge <= number
        )

    def metadata(self) -> dict[str, Any]:
        """Return the ramp as JSON values for the data fingerprint; inverse of `from_metadata`.

        An empty ramp results in the format of earlier releases.
        """
        ramp = [list(stage) for stage in self.stages]
        return {"batch_size": self.batch_size} | ({"batch_ramp": ramp} if ramp else {})

    @classmethod
    def from_metadata(cls, facts: Any) -> BatchRamp:
        """Return the ramp that is stored in a data fingerprint."""
        stages = (RampStage(*map(int, stage)) for stage in facts.get("batch_ramp", ()))
        return cls(tuple(stages), int(facts["batch_size"]))


METADATA_KEYS = ("batch_size", "batch_ramp")
"""Keys of the dict that `BatchRamp.metadata` returns."""


def _stage_steps(stage: BatchRampStageConfig, sequence_length: int) -> int:
    # Other rules reject a sequence length or batch size of 0.
    batch_tokens = max(1, stage.batch_size) * max(1, sequence_length)
    return stage.steps or -(-(stage.tokens or 0) // batch_tokens)


def check_order(ramp: BatchRamp) -> str:
    """Return an error message if batch sizes do not increase; otherwise, return an empty string."""
    sizes: Sequence[int] = [stage.batch_size for stage in ramp.stages] + [ramp.batch_size]
    for small, large in itertools.pairwise(sizes):
        if small >= large:
            return (
                f"must increase from stage to stage up to train.batch_size ({ramp.batch_size}), "
                "but "
                f"{small} is followed by {large}."
            )
    return ""
