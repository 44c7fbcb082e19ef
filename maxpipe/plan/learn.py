"""Bayesian choice of the next layout to measure, from those that ran.

The logarithm of measured by predicted time is modelled as a sum: an error shared by all
layouts, one of each setting (`stage=2`, `remat=names`, rows of a microbatch), and one of the layout
itself. All are normal, and the forecast is the prior mean.

Source: Bayesian optimization with a lower confidence bound (Srinivas et al., arXiv:0912.3995).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxpipe.plan.search import Candidate
from maxpipe.plan.sizes import Sizes

CANDIDATES = 256
"""The layouts with the best forecasts, from which the measured ones are chosen."""
COMMON = 3.0
"""Standard deviation of the shared error: devices may be faster or slower than their figures."""
SETTING = 0.03
"""The same of one setting's error."""
OWN = 0.02
"""The same of a layout's own error."""
NOISE = 0.01
"""The same of a measured median."""


def next_to_run(candidates: Sequence[Candidate], ran: Mapping[int, float | None]) -> int:
    """The candidate that may be the fastest: as fast as expected, less a standard error.

    Args:
        candidates: all layouts, more than ran.
        ran: measured seconds by a candidate's index; None for one that could not run.
    """
    seconds = {index: taken for index, taken in ran.items() if taken is not None}
    mean, error = expected(candidates, seconds)
    lowest = mean * np.exp(-error)
    held = np.array([each.memory.total for each in candidates])
    failed = [index for index, taken in ran.items() if taken is None]
    smaller = held < held[failed].min() if failed else np.ones(len(candidates), bool)
    smaller[list(ran)] = False
    if smaller.any():  # one that needs as much memory would fail, too
        lowest[~smaller] = np.inf
    lowest[list(ran)] = np.inf
    return int(lowest.argmin())


def expected(
    candidates: Sequence[Candidate], ran: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """`[N]`: median seconds of each candidate, and the standard error of their logarithm."""
    predicted = np.array([each.cost.seconds for each in candidates])
    prior = COMMON**2 + SETTING**2 * _shared(candidates) + OWN**2 * np.eye(len(candidates))
    indices = list(ran)
    seen = prior[np.ix_(indices, indices)] + NOISE**2 * np.eye(len(indices))
    gain = np.linalg.solve(seen, prior[indices])
    off = np.log(np.array(list(ran.values())) / predicted[indices])
    left = prior.diagonal() - (gain * prior[indices]).sum(axis=0)
    return predicted * np.exp(off @ gain), np.sqrt(np.maximum(left, 0.0))


def _shared(candidates: Sequence[Candidate]) -> np.ndarray:
    """`[N, N]`: number of settings that two layouts share."""
    settings = [_settings(each) for each in candidates]
    total = np.zeros((len(candidates),) * 2)
    for key in sorted({key for each in settings for key in each}):
        codes: dict[Any, int] = {}
        column = np.array([codes.setdefault(each.get(key), len(codes)) for each in settings])
        total += column[:, None] == column
    return total


def _settings(candidate: Candidate) -> dict[str, Any]:
    """The layout's keys, and the rows of a microbatch that follow from them."""
    return {**candidate.changes, "rows": Sizes(candidate.config).rows}
