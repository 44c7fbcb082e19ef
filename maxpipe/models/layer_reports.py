"""Metrics and parameter updates that are computed from the losses and statistics of layers.

The module does not import jax.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Follows(NamedTuple):
    """Update rule for a parameter without a gradient. Each step raises an entry if its statistic is
    below the mean and lowers the entry if its statistic is above the mean (arXiv:2408.15664).
    """

    statistic: str
    """Name of a statistic of the same sublayer, whose dims equal those of the parameter."""
    rate: float
    """Amount by which each step raises or lowers an entry."""


class Summary(NamedTuple):
    """A metric computed during a run from the losses and statistics that layers report."""

    of: str
    """Name of the loss or statistic."""
    take: Literal["mean", "largest", "smallest"]
    """`mean`: a loss averaged over its layers and all target tokens, before multiplication by its
    coefficient. `largest` and `smallest`: the extreme entry of a statistic over all layers, divided
    by the mean entry in its layer."""
    unit: str
    meaning: str
