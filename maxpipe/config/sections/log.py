"""Config section `log`: console output and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maxpipe.config.rules import add_ranges
from maxpipe.models.config import Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Console output and metrics during training."""

    every: int = 10
    """Number of steps between records in `metrics.jsonl`, TensorBoard and the console."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """Console output: a `live` view or `plain` lines. `auto` uses `live` if the output is a
    terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


add_ranges(
    Bound("log.every", 10, 1),
)
