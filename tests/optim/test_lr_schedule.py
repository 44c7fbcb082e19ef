"""Learning-rate schedules, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

from maxpipe.config.sections.optim import LRPhaseConfig, OptimConfig
from maxpipe.optim.lr_schedule import learning_rate

PEAK = 0.02


def rate_at(rate: optax.Schedule, step: int) -> float:
    return np.asarray(rate(step)).item()


def rates(total_steps: int, **changes: Any) -> np.ndarray:
    """Return the learning rate of every step and of the step after the last."""
    config = OptimConfig(**{"learning_rate": PEAK, **changes})
    rate = learning_rate(config, total_steps)
    return np.array([rate_at(rate, step) for step in range(total_steps + 1)])


def linear(done: float) -> float:
    return PEAK * (1 - 0.9 * done)


def cosine(done: float) -> float:
    return PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


# Warmup and decay shapes.


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_warmup_is_linear_and_ends_at_peak(schedule: str, warmup: int) -> None:
    got = rates(100, schedule=schedule, warmup_steps=warmup)
    wanted = PEAK * (1 + np.arange(warmup)) / warmup
    np.testing.assert_allclose(got[:warmup], wanted, rtol=1e-5)
    # The decay starts at the peak.
    np.testing.assert_allclose(got[warmup], PEAK, rtol=1e-5)
    assert got.max() <= PEAK * (1 + 1e-5) and got.min() > 0


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize(("schedule", "shape"), [("linear", linear), ("cosine", cosine)])
def test_linear_and_cosine_decay_to_minimum(
    schedule: str, shape: Callable[[float], float], warmup: int
) -> None:
    got = rates(120, schedule=schedule, warmup_steps=warmup)
    steps = np.arange(warmup, 121)
    wanted = [shape((step - warmup) / (120 - warmup)) for step in steps]
    np.testing.assert_allclose(got[warmup:], wanted, rtol=1e-5)
    np.testing.assert_allclose(got[-1], 0.1 * PEAK, rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 20])
def test_wsd_is_constant_then_decays_linearly(warmup: int) -> None:
    got = rates(120, schedule="wsd", warmup_steps=warmup, decay_fraction=0.25)
    np.testing.assert_allclose(got[warmup:91], PEAK, rtol=1e-5)
    wanted = [linear(done / 30) for done in range(31)]
    np.testing.assert_allclose(got[90:], wanted, rtol=1e-5)


def test_wsd_decay_is_limited_to_steps_after_warmup() -> None:
    got = rates(20, schedule="wsd", warmup_steps=10, decay_fraction=0.9)
    np.testing.assert_allclose(got[10:], [linear(done / 10) for done in range(11)], rtol=1e-5)


def test_constant_schedule_ignores_min_lr_ratio() -> None:
    np.testing.assert_allclose(rates(10, schedule="constant", min_lr_ratio=0.0), PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (3, 3), (5, 50)])
def test_short_runs_have_finite_learning_rates(schedule: str, total: int, warmup: int) -> None:
    got = rates(total, schedule=schedule, warmup_steps=warmup)
    assert np.isfinite(got).all() and (got[:total] > 0).all() and got.max() <= PEAK * (1 + 1e-6)


def test_lr_phases() -> None:
    phases = [
        LRPhaseConfig(percent=10, shape="linear", from_=0, to=1),
        LRPhaseConfig(steps=30, shape="cosine", from_=1, to=0.1, times=2),
        LRPhaseConfig(shape="linear", to=0.5),
    ]
    got = rates(100, lr_phases=phases)
    bend = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 30)) / 2 for done in range(30)]
    tail = [0.1 + 0.4 * done / 30 for done in range(30)]
    wanted = [*(done / 10 for done in range(10)), *bend, *bend, *tail, 0.5]
    np.testing.assert_allclose(got, PEAK * np.array(wanted), rtol=1e-5)
    # The rate is constant after the last phase; phases longer than the run are truncated.
    short = rates(20, lr_phases=[LRPhaseConfig(steps=5, shape="linear", to=0.2)] * 2)
    np.testing.assert_allclose(short[5:], 0.2 * PEAK, rtol=1e-5)
    long = [LRPhaseConfig(steps=100, shape="cosine", to=0)]
    np.testing.assert_allclose(
        rates(10, lr_phases=long),
        rates(100, lr_phases=long)[:11],
        rtol=1e-6,
    )
    rising = rates(10, lr_phases=[LRPhaseConfig(shape="cosine", from_=0.5, to=1)])
    assert (np.diff(rising) > 0).all() and rising[0] == pytest.approx(0.5 * PEAK)


def test_learning_rate_is_constant_after_last_step() -> None:
    config = OptimConfig(learning_rate=PEAK, schedule="cosine", min_lr_ratio=0.1)
    assert rate_at(learning_rate(config, 10), 1000) == pytest.approx(0.1 * PEAK)
