"""Weights of a mixture by stages of the run: `data.mixture_stages`, one text for each. No jax."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.ramp import Ramp
from maxpipe.config.data_schema import DataConfig
from maxpipe.config.values import NAME_FORM

FORM = "NAME WEIGHT NAME WEIGHT ... for N steps, or ... for N tokens"
_TEXT = re.compile(r"(.+?)\s+for\s+(\d(?:_?\d){0,17})\s+(steps|tokens)", re.ASCII)


class Stage(NamedTuple):
    """A part of the run with weights of its own."""

    weights: dict[str, float]
    """By the name of a source; those that are missing are 0."""
    length: int
    unit: Literal["steps", "tokens"]


def stages(texts: Sequence[str]) -> list[Stage]:
    """The stages of a config.

    Raises:
        ValueError: one cannot be read; the message is the rule.
    """
    return [_stage(text) for text in texts]


def _stage(text: str) -> Stage:
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    words = match[1].split()
    weights: dict[str, float] = {}
    for name, weight in zip(words[::2], words[1::2], strict=False):
        if name in weights:
            raise ValueError(f"must name a source once in a stage, and {text!r} has {name} twice.")
        weights[name] = _weight(weight, text)
    if len(words) % 2 or not all(map(NAME_FORM.fullmatch, weights)):
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    count = int(match[2].replace("_", ""))
    if not count or not any(weights.values()):
        raise ValueError(f"must be stages of some length with a weight above 0; {text!r} is not.")
    return Stage(weights, count, match[3])  # type: ignore[arg-type]


def _weight(text: str, stage: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"must have weights of at least 0, and {stage!r} has {text}.")
    return value


def ends(found: Sequence[Stage], ramp: Ramp, sequence_length: int) -> list[int]:
    """The rows in front of the first batch behind each stage; a stage ends with a whole batch."""
    batch, edges = 0, []
    for stage in found:
        if stage.unit == "steps":
            batch += stage.length
        else:
            batch = ramp.batches(ramp.before(batch) - (-stage.length // sequence_length))
        edges.append(ramp.before(batch))
    return edges


def sources(data: DataConfig) -> Mapping[str, SourceConfig]:
    """What training reads, by name, in an order that does not depend on the config's.

    Without a mixture it is `data` itself, under no name.
    """
    return {name: data.mixture[name] for name in sorted(data.mixture)} or {"": data}


def shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """The part of the sequences that each source has; weights are raised to 1 / temperature."""
    largest = max(weights.values())
    flat = {
        name: (weight / largest) ** (1 / temperature) if weight else 0.0
        for name, weight in weights.items()
    }
    total = sum(flat.values())
    return {name: each / total for name, each in flat.items()}
