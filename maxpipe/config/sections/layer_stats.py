"""Config section `layer_stats`: statistics of parameters, gradients and activations by layer."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.config.rules import add_ranges
from maxpipe.models.config import Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatsConfig:
    """Statistics of each layer's parameters, gradients, updates and activations.

    The statistics are written to `layers.jsonl` and to TensorBoard. They do not change the results
    of training.
    """

    every: int = 0
    """Number of steps between records of the statistics. 0 disables the statistics. Steps that
    record statistics run a second compiled train step, which is compiled when the run starts."""
    activations: bool = True
    """Record statistics of activations, attention and routers, in addition to parameters, gradients
    and updates."""
    histograms: bool = False
    """Also record histograms of parameters, gradients and, with `layer_stats.activations`,
    activations. Histograms are much slower to compute than the other
    statistics."""


add_ranges(
    Bound("layer_stats.every", 10, 0, why="0 disables the statistics"),
)
