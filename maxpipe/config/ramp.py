"""Batch sizes of a run by step: `train.batch_ramp`, one text for each stage. No jax."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from maxpipe.config.schema import TrainConfig

FORM = "ROWS for N steps, or ROWS for N tokens"
_TEXT = re.compile(r"(\d{1,8})\s+for\s+(\d(?:_?\d){0,17})\s+(steps|tokens)", re.ASCII)


class Stage(NamedTuple):
    """Steps with batches of one size."""

    rows: int
    steps: int


class Ramp(NamedTuple):
    """The rows of each batch, by the batch's number from 0: a pure function of it.

    Batches follow each other in the data without gaps: the rows in front of one are its position.
    """

    stages: tuple[Stage, ...]
    rows: int
    """Of every batch behind the stages."""

    @classmethod
    def of(cls, train: TrainConfig) -> Ramp:
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

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(first batch, rows in front of it, rows of each) of the stages and of what follows."""
        first = front = 0
        for rows, steps in self.stages:
            yield first, front, rows
            first, front = first + steps, front + rows * steps
        yield first, front, self.rows

    def place(self, number: int) -> tuple[int, int]:
        """(rows in front of a batch, its own rows)."""
        first, front, rows = next(p for p in reversed(list(self.pieces())) if p[0] <= number)
        return front + (number - first) * rows, rows

    def before(self, number: int) -> int:
        """Rows in front of a batch: those of all batches before it."""
        return self.place(number)[0]

    def batches(self, rows: int) -> int:
        """The fewest batches from the first one on with as many rows together."""
        first, front, each = next(p for p in reversed(list(self.pieces())) if p[1] <= rows)
        return first + -(-(rows - front) // each)

    def sizes(self, start: int = 0) -> list[int]:
        """Sizes from a batch on, in their order, each once."""
        ends = [first for first, *_ in self.pieces()][1:]
        left = [s.rows for s, end in zip(self.stages, ends, strict=True) if end > start]
        return list(dict.fromkeys([*left, self.rows]))

    def same_until(self, other: Ramp, number: int) -> bool:
        """Whether all batches before this one are the same rows in both."""
        edges = {p[0] for ramp in (self, other) for p in ramp.pieces()} | {number}
        return all(self.before(edge) == other.before(edge) for edge in edges if 0 <= edge <= number)

    def facts(self) -> dict[str, Any]:
        """JSON values that a fingerprint of the data holds; those of a run without stages as ever.

        `of_facts` reads them.
        """
        ramp = [list(stage) for stage in self.stages]
        return {"batch_size": self.rows} | ({"batch_ramp": ramp} if ramp else {})

    @classmethod
    def of_facts(cls, facts: Any) -> Ramp:
        """The ramp of a fingerprint."""
        stages = (Stage(*map(int, stage)) for stage in facts.get("batch_ramp", ()))
        return cls(tuple(stages), int(facts["batch_size"]))


FACTS = ("batch_size", "batch_ramp")
"""Names of `Ramp.facts`."""


def _stage(text: str, sequence_length: int) -> Stage:
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    rows, count = int(match[1]), int(match[2].replace("_", ""))
    if not rows or not count:
        raise ValueError(f"must be stages of at least 1 row and 1 step, and {text!r} is not.")
    # Rows without tokens are refused as such.
    tokens = rows * max(1, sequence_length)
    steps = count if match[3] == "steps" else -(-count // tokens)
    return Stage(rows, steps)


def check_order(ramp: Ramp) -> str:
    """The rule that sizes break that do not grow; else nothing."""
    sizes: Sequence[int] = [stage.rows for stage in ramp.stages] + [ramp.rows]
    for small, large in itertools.pairwise(sizes):
        if small >= large:
            return (
                f"must grow from stage to stage up to train.batch_size ({ramp.rows}), and {small} "
                f"is followed by {large}."
            )
    return ""
