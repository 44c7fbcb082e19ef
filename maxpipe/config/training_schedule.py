"""Batch-size ramp (`train.batch_ramp`) and learning-rate phases (`optim.lr_phases`).

Both keys are lists of items, one per stage or phase. This module does not import jax.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from maxpipe.config.items import BatchRampStageConfig, LRPhaseConfig
from maxpipe.config.schema import TrainConfig


class RampStage(NamedTuple):
    """Consecutive steps with the same batch size."""

    batch_size: int
    steps: int


class BatchRamp(NamedTuple):
    """Batch size as a function of the batch number, which starts at 0.

    Consecutive batches use consecutive sequences of the data. The position of a batch is the number
    of sequences in all earlier batches.
    """

    stages: tuple[RampStage, ...]
    batch_size: int
    """Batch size after the last stage."""

    @classmethod
    def from_config(cls, train: TrainConfig) -> BatchRamp:
        """Return the ramp of a config."""
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
        """Yield (first batch number, number of earlier sequences, batch size) for each stage, and
        then for the steps after the ramp.
        """
        first = front = 0
        for rows, steps in self.stages:
            yield first, front, rows
            first, front = first + steps, front + rows * steps
        yield first, front, self.batch_size

    def position_of(self, number: int) -> tuple[int, int]:
        """Return the number of sequences in all earlier batches, and the size of this batch."""
        first, front, rows = next(p for p in reversed(list(self.stage_starts())) if p[0] <= number)
        return front + (number - first) * rows, rows

    def sequences_before(self, number: int) -> int:
        """Return the number of sequences in all batches before this one."""
        return self.position_of(number)[0]

    def num_batches(self, rows: int) -> int:
        """Return the minimum number of batches from the start that contain this number of
        sequences.
        """
        first, front, each = next(p for p in reversed(list(self.stage_starts())) if p[1] <= rows)
        return first + -(-(rows - front) // each)

    def sizes(self, start: int = 0) -> list[int]:
        """Return the batch sizes from this batch number on, in order and without duplicates."""
        ends = [first for first, *_ in self.stage_starts()][1:]
        left = [s.batch_size for s, end in zip(self.stages, ends, strict=True) if end > start]
        return list(dict.fromkeys([*left, self.batch_size]))

    def equals_until(self, other: BatchRamp, number: int) -> bool:
        """Whether both ramps use the same sequences in all batches before this batch number."""
        edges = {p[0] for ramp in (self, other) for p in ramp.stage_starts()} | {number}
        return all(
            self.sequences_before(edge) == other.sequences_before(edge)
            for edge in edges
            if 0 <= edge <= number
        )

    def metadata(self) -> dict[str, Any]:
        """Return the ramp as JSON values for the data fingerprint. `from_metadata` is the inverse.

        Without stages, the format is that of earlier releases.
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
    # Other rules reject lengths and batch sizes of 0.
    batch_tokens = max(1, stage.batch_size) * max(1, sequence_length)
    return stage.steps or -(-(stage.tokens or 0) // batch_tokens)


def check_order(ramp: BatchRamp) -> str:
    """Return the violated rule if batch sizes do not increase, or an empty string."""
    sizes: Sequence[int] = [stage.batch_size for stage in ramp.stages] + [ramp.batch_size]
    for small, large in itertools.pairwise(sizes):
        if small >= large:
            return (
                f"must increase from stage to stage up to train.batch_size ({ramp.batch_size}), "
                "but "
                f"{small} is followed by {large}."
            )
    return ""


class LRPhase(NamedTuple):
    """Consecutive steps in which the learning rate changes from one fraction of its peak to
    another.
    """

    steps: int
    shape: Literal["linear", "cosine"]
    start: float
    end: float


def resolve_phases(phases: Sequence[LRPhaseConfig], total_steps: int) -> list[LRPhase]:
    """Return the learning-rate phases of a run with this number of steps.

    Repeated phases are listed several times. After the last phase, the learning rate is constant.
    """
    listed = [phase for phase in phases for _ in range(phase.times)]
    lengths = [_phase_steps(phase, total_steps) for phase in listed]
    remaining = max(0, total_steps - sum(steps or 0 for steps in lengths))
    resolved, last = list[LRPhase](), 1.0
    for phase, steps in zip(listed, lengths, strict=True):
        start = last if phase.from_ is None else phase.from_
        length = remaining if steps is None else steps
        resolved.append(LRPhase(length, phase.shape, start, phase.to))
        last = phase.to
    return resolved


def _phase_steps(phase: LRPhaseConfig, total_steps: int) -> int | None:
    if phase.percent is None:
        return phase.steps
    return round(total_steps * phase.percent / 100)
