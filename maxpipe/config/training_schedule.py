"""Batch sizes of a run by step: `train.batch_ramp`, one text for each stage. No jax.

The learning rate as phases: `optim.lr_phases`, one text for each. No jax.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from maxpipe.config.schema import TrainConfig

FORM = "ROWS for N steps, or ROWS for N tokens"
_TEXT = re.compile(r"(\d{1,8})\s+for\s+(\d(?:_?\d){0,17})\s+(steps|tokens)", re.ASCII)


class RampStage(NamedTuple):
    """Steps with batches of one size."""

    batch_size: int
    steps: int


class BatchRamp(NamedTuple):
    """The rows of each batch, by the batch's number from 0: a pure function of it.

    Batches follow each other in the data without gaps: the rows in front of one are its position.
    """

    stages: tuple[RampStage, ...]
    batch_size: int
    """Of every batch behind the stages."""

    @classmethod
    def from_config(cls, train: TrainConfig) -> BatchRamp:
        """That of a config.

        Raises:
            ValueError: it cannot be read; the message is the rule.
        """
        stages = (_stage(text, train.sequence_length) for text in train.batch_ramp)
        return cls(tuple(stages), train.batch_size)

    @property
    def steps(self) -> int:
        """Steps until batches have their last size."""
        return sum(stage.steps for stage in self.stages)

    def stage_starts(self) -> Iterator[tuple[int, int, int]]:
        """(first batch, rows in front of it, rows of each) of the stages and of what follows."""
        first = front = 0
        for rows, steps in self.stages:
            yield first, front, rows
            first, front = first + steps, front + rows * steps
        yield first, front, self.batch_size

    def position_of(self, number: int) -> tuple[int, int]:
        """(rows in front of a batch, its own rows)."""
        first, front, rows = next(p for p in reversed(list(self.stage_starts())) if p[0] <= number)
        return front + (number - first) * rows, rows

    def sequences_before(self, number: int) -> int:
        """Rows in front of a batch: those of all batches before it."""
        return self.position_of(number)[0]

    def num_batches(self, rows: int) -> int:
        """The fewest batches from the first one on with as many rows together."""
        first, front, each = next(p for p in reversed(list(self.stage_starts())) if p[1] <= rows)
        return first + -(-(rows - front) // each)

    def sizes(self, start: int = 0) -> list[int]:
        """Sizes from a batch on, in their order, each once."""
        ends = [first for first, *_ in self.stage_starts()][1:]
        left = [s.batch_size for s, end in zip(self.stages, ends, strict=True) if end > start]
        return list(dict.fromkeys([*left, self.batch_size]))

    def equals_until(self, other: BatchRamp, number: int) -> bool:
        """Whether all batches before this one are the same rows in both."""
        edges = {p[0] for ramp in (self, other) for p in ramp.stage_starts()} | {number}
        return all(
            self.sequences_before(edge) == other.sequences_before(edge)
            for edge in edges
            if 0 <= edge <= number
        )

    def metadata(self) -> dict[str, Any]:
        """JSON values that a fingerprint of the data holds; those of a run without stages as ever.

        `of_facts` reads them.
        """
        ramp = [list(stage) for stage in self.stages]
        return {"batch_size": self.batch_size} | ({"batch_ramp": ramp} if ramp else {})

    @classmethod
    def from_metadata(cls, facts: Any) -> BatchRamp:
        """The ramp of a fingerprint."""
        stages = (RampStage(*map(int, stage)) for stage in facts.get("batch_ramp", ()))
        return cls(tuple(stages), int(facts["batch_size"]))


METADATA_KEYS = ("batch_size", "batch_ramp")
"""Names of `Ramp.facts`."""


def _stage(text: str, sequence_length: int) -> RampStage:
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    rows, count = int(match[1]), int(match[2].replace("_", ""))
    if not rows or not count:
        raise ValueError(f"must be stages of at least 1 row and 1 step, and {text!r} is not.")
    # Rows without tokens are refused as such.
    tokens = rows * max(1, sequence_length)
    steps = count if match[3] == "steps" else -(-count // tokens)
    return RampStage(rows, steps)


def check_order(ramp: BatchRamp) -> str:
    """The rule that sizes break that do not grow; else nothing."""
    sizes: Sequence[int] = [stage.batch_size for stage in ramp.stages] + [ramp.batch_size]
    for small, large in itertools.pairwise(sizes):
        if small >= large:
            return (
                f"must grow from stage to stage up to train.batch_size ({ramp.batch_size}), "
                f"and {small} "
                f"is followed by {large}."
            )
    return ""


PHASES_FORM = "STEPS SHAPE TO, or STEPS SHAPE FROM -> TO"
EXAMPLE = "['10% linear 0 -> 1', '3 x 20% cosine 1 -> 0.1', 'rest linear 0']"


class LRPhase(NamedTuple):
    """Steps in which the rate goes from one fraction of its peak to another."""

    steps: int
    shape: Literal["linear", "cosine"]
    start: float
    end: float


_PHASES_TEXT = re.compile(
    r"(?:(?P<times>\d{1,2})\s*x\s+)?(?P<steps>\d{1,9}|\d{1,3}(?:\.\d+)?%|rest)\s+"
    r"(?P<shape>linear|cosine)\s+(?:(?P<start>\S+)\s*->\s*)?(?P<end>\S+)"
)


def parse_phases(texts: Sequence[str], total_steps: int) -> list[LRPhase]:
    """The phases of a run of this many steps.

    A phase has a number of steps, a share of the run (`10%`), or the `rest` of it; `3 x` in front
    repeats it. Without FROM it starts where the one before it ends, the first one at the peak.
    Behind the last the rate stays.

    Raises:
        ValueError: one of them cannot be read, or more than one is the `rest`; the message is the
            rule.
    """
    found: list[tuple[int | None, re.Match[str], float, float]] = []
    last = 1.0
    for text in texts:
        if (match := _PHASES_TEXT.fullmatch(text.strip())) is None:
            raise ValueError(f"must be phases, and {text!r} is not {PHASES_FORM}.")
        end = _fraction(match["end"], text)
        start = last if match["start"] is None else _fraction(match["start"], text)
        times = int(match["times"] or 1)
        if not times:
            raise ValueError(f"must be phases, and {text!r} is done 0 times.")
        for number in range(times):
            begins = start if number == 0 or match["start"] is not None else last
            found.append((_steps(match["steps"], total_steps), match, begins, end))
            last = end
    open_ended = sum(steps is None for steps, *_ in found)
    if open_ended > 1:
        raise ValueError(f"must have one phase that is the rest, and {open_ended} are.")
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
        raise ValueError(f"must have fractions of the peak from 0 to 1, and {phase!r} has {text}.")
    return value
