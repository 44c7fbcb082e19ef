"""The learning rate as phases: `optim.phases`, one text for each. No jax."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

PHASES_FORM = "STEPS SHAPE TO, or STEPS SHAPE FROM -> TO"
EXAMPLE = "['10% linear 0 -> 1', '3 x 20% cosine 1 -> 0.1', 'rest linear 0']"


class Phase(NamedTuple):
    """Steps in which the rate goes from one fraction of its peak to another."""

    steps: int
    shape: Literal["linear", "cosine"]
    start: float
    end: float


_TEXT = re.compile(
    r"(?:(?P<times>\d{1,2})\s*x\s+)?(?P<steps>\d{1,9}|\d{1,3}(?:\.\d+)?%|rest)\s+"
    r"(?P<shape>linear|cosine)\s+(?:(?P<start>\S+)\s*->\s*)?(?P<end>\S+)"
)


def phases(texts: Sequence[str], total_steps: int) -> list[Phase]:
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
        if (match := _TEXT.fullmatch(text.strip())) is None:
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
        Phase(rest if steps is None else steps, match["shape"], start, end)  # type: ignore[arg-type]
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
