"""Batch-size ramp (`train.batch_ramp`) and learning-rate phases (`optim.lr_phases`).

Both keys are lists of texts, one per stage or phase. This module does not import jax.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from maxpipe.config.schema import TrainConfig

FORM = "BATCH_SIZE for N steps, or BATCH_SIZE for N tokens"
_TEXT = re.compile(r"(\d{1,8})\s+for\s+(\d(?:_?\d){0,17})\s+(steps|tokens)", re.ASCII)


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
        """Return the ramp of a config.

        Raises:
            ValueError: a stage cannot be parsed; the message describes the valid form.
        """
        stages = (_stage(text, train.sequence_length) for text in train.batch_ramp)
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


def _stage(text: str, sequence_length: int) -> RampStage:
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError(f"must have stages of the form {FORM}; {text!r} does not match.")
    rows, count = int(match[1]), int(match[2].replace("_", ""))
    if not rows or not count:
        rule = "must have stages with a batch size of at least 1 and at least 1 step"
        raise ValueError(f"{rule}; {text!r} does not.")
    # Another rule rejects a sequence length of 0.
    tokens = rows * max(1, sequence_length)
    steps = count if match[3] == "steps" else -(-count // tokens)
    return RampStage(rows, steps)


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


PHASES_FORM = "STEPS SHAPE TO, or STEPS SHAPE FROM -> TO"
EXAMPLE = "['10% linear 0 -> 1', '3 x 20% cosine 1 -> 0.1', 'rest linear 0']"


class LRPhase(NamedTuple):
    """Consecutive steps in which the learning rate changes from one fraction of its peak to
    another.
    """

    steps: int
    shape: Literal["linear", "cosine"]
    start: float
    end: float


_PHASES_TEXT = re.compile(
    r"(?:(?P<times>\d{1,2})\s*x\s+)?(?P<steps>\d{1,9}|\d{1,3}(?:\.\d+)?%|rest)\s+"
    r"(?P<shape>linear|cosine)\s+(?:(?P<start>\S+)\s*->\s*)?(?P<end>\S+)"
)


def parse_phases(texts: Sequence[str], total_steps: int) -> list[LRPhase]:
    """Parse the learning-rate phases of a run with this number of steps.

    The length of a phase is a number of steps, a percentage of the run (`10%`), or `rest`; the
    prefix `3 x` repeats a phase. Without `FROM`, a phase starts at the final value of the previous
    phase, and the first phase starts at the peak. After the last phase, the learning rate is
    constant.

    Raises:
        ValueError: a phase cannot be parsed, or several phases are `rest`; the message describes
            the rule.
    """
    found: list[tuple[int | None, re.Match[str], float, float]] = []
    last = 1.0
    for text in texts:
        if (match := _PHASES_TEXT.fullmatch(text.strip())) is None:
            raise ValueError(f"must have phases of the form {PHASES_FORM}; {text!r} is not one.")
        end = _fraction(match["end"], text)
        start = last if match["start"] is None else _fraction(match["start"], text)
        times = int(match["times"] or 1)
        if not times:
            raise ValueError(f"must have phases that run at least once; {text!r} runs 0 times.")
        for number in range(times):
            begins = start if number == 0 or match["start"] is not None else last
            found.append((_steps(match["steps"], total_steps), match, begins, end))
            last = end
    open_ended = sum(steps is None for steps, *_ in found)
    if open_ended > 1:
        raise ValueError(f"must have at most one phase with the length rest; {open_ended} have it.")
    rest = max(0, total_steps - sum(steps or 0 for steps, *_ in found))
    return [
        LRPhase(rest if steps is None else steps, match["shape"], start, end)  # type: ignore[arg-type]
        for steps, match, start, end in found
    ]


def _steps(text: str, total_steps: int) -> int | None:
    if text == "rest":
        return None
    return round(total_steps * float(text[:-1]) / 100) if text.endswith("%") else int(text)


def _fraction(text: str, phase: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"must have fractions of the peak from 0 to 1; {phase!r} has {text}.")
    return value
