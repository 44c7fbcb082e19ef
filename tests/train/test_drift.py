"""Slow changes of the step time are detected, and noise is not."""

from __future__ import annotations

import numpy as np
import pytest

from maxpipe.train.loop import StepTimeDrift


def test_drift_of_the_step_time() -> None:
    drift = StepTimeDrift()
    rng = np.random.default_rng(0)
    noise = 1 + 0.2 * rng.standard_normal(200)
    assert not any(drift.add(abs(value)) for value in noise), "noise is not a drift"
    changes = [(number, drift.add(1.3)) for number in range(60)]
    found = [(number, change) for number, change in changes if change]
    assert len(found) == 1 and found[0][0] < 20
    before, after = found[0][1] or (0, 0)
    assert before == pytest.approx(1, abs=0.1) and after > 1.1 * before
    faster = [change for change in (drift.add(0.5) for _ in range(60)) if change]
    assert len(faster) == 1 and faster[0][0] > 1.2 and faster[0][1] < 1
