"""Declarations of the items of list keys, such as the phases of `optim.lr_phases`.

An item is a mapping in YAML. A trailing underscore of a field's name is not part of the YAML name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampStageConfig:
    """Consecutive steps at the start of the run that have a smaller batch size. A stage has either
    `steps` or `tokens`.
    """

    batch_size: int
    """Number of sequences per step, summed over all devices."""
    steps: int | None = None
    """Length of the stage in steps."""
    tokens: int | None = None
    """Length of the stage in tokens, rounded up to complete steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRPhaseConfig:
    """Phase of the learning-rate schedule. Without `steps` and `percent`, a phase has the remaining
    steps of the run.
    """

    steps: int | None = None
    """Length of the phase in steps."""
    percent: float | None = None
    """Length of the phase as a percentage of the run. Set either `steps` or `percent`."""
    shape: Literal["linear", "cosine"]
    """Shape of the learning rate between `from` and `to`."""
    from_: float | None = None
    """Learning rate at the start of the phase, as a fraction of the peak. By default, a phase
    starts at the final value of the previous phase, and the first phase starts at the peak."""
    to: float
    """Learning rate at the end of the phase, as a fraction of the peak."""
    times: int = 1
    """Number of times that the phase runs in succession."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRMultiplierConfig:
    """Learning-rate multiplier of the parameters that a pattern matches."""

    pattern: str
    """Pattern of parameter names, as in `model.frozen`."""
    multiplier: float
    """Factor of the learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecayConfig:
    """Weight decay of the parameters that a pattern matches."""

    pattern: str
    """Pattern of parameter names, as in `model.frozen`."""
    weight_decay: float
    """Decoupled weight decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureStageConfig:
    """Stage of the run with separate mixture weights. A stage has either `steps` or `tokens`."""

    weights: dict[str, float]
    """Mixture weights, keyed by the name of the source. Sources that are not listed have weight
    0."""
    steps: int | None = None
    """Length of the stage in steps."""
    tokens: int | None = None
    """Length of the stage in tokens, rounded up to complete batches."""
