"""Losses of the sources of a mixture, from the sums that steps find for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxpipe.step.step import BY_SOURCE
from maxpipe.telemetry.metrics import of_source


class SourceSums:
    """Sums over steps, from one record to the next: a step may have no row of a small source."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._sums = np.zeros((2, len(names)))
        self._pending: Mapping[str, Any] = {}

    def started(self, metrics: Mapping[str, Any]) -> None:
        """A step was started, and the one before it is done."""
        self._add()
        self._pending = metrics

    def take(self) -> dict[str, float]:
        """The metrics of all steps since the last call; waits for the newest."""
        self._add()
        (nats, targets), self._sums = self._sums, np.zeros_like(self._sums)
        found = {}
        for name, lost, count in zip(self._names, nats, targets, strict=True):
            found[of_source(name, "targets")] = float(count)
            if count:
                found[of_source(name, "loss")] = float(lost / count)
        return found

    def _add(self) -> None:
        metrics, self._pending = self._pending, {}
        if not self._names or not metrics:
            return
        sums = np.stack([np.asarray(metrics[tag], np.float64) for tag in BY_SOURCE])
        # Of a step that is not finite `train/loss` tells.
        self._sums += np.where(np.isfinite(sums).all(axis=0), sums, 0.0)
