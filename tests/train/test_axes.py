"""Loss curves with sequences and experts sharded over several devices, by every method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.moe import MoeConfig
from tests.cases import TOLERANCE, Case, keeping
from tests.step.test_step import loss_curve
from tests.times import shared

MODELS = {
    "dense": Case(layers=4, length=24, width=48, dropout=0.1),
    "windows": Case(
        layers=4, length=24, width=48, own=Gemma3Config(sliding_window=5, sliding_window_pattern=3)
    ),
    "experts": Case(
        layers=4,
        length=12,
        width=240,
        own=MoeConfig(num_experts=10, d_expert=12, num_shared_experts=1, dispatch="grouped"),
    ),
    "room": Case(
        layers=4,
        length=12,
        width=48,
        own=MoeConfig(
            num_experts=4, d_expert=12, capacity_factor=0.9, load_balance_loss_weight=0.1
        ),
    ),
}
"""Models to train. Those with experts see few tokens: within some thousand tokens, rounding changes
the choice between two experts with nearly equal scores, under any layout."""
ROWS = 20


def _curve(case: Case) -> list[float]:
    return loss_curve(case, num_steps=4, rows=ROWS)


@shared
def _one_device(model: str) -> list[float]:
    return _curve(MODELS[model])


PAIRS = [
    ("dense", Case(2, 1, 5, data=2)),
    ("dense", Case(2, 1, 5, fsdp=2)),
    ("dense", Case(2, 1, 5, tensor=2)),
    ("dense", Case(2, 1, 5, context=2)),
    ("experts", Case(2, 1, 5, expert=2)),
    # Every method, several slices, and odd sizes.
    ("dense", Case(2, 1, 5, context=2, attends="all_gather", across=("context",))),
    ("dense", Case(2, 1, 5, context=2, attends="ring", idle="compute")),
    ("dense", Case(2, 2, 5, context=3, remat="names")),
    ("dense", Case(2, 2, 5, context=4, schedule="zb_v", attention="blockwise")),
    ("dense", Case(2, 2, 5, fsdp=2, attention="blockwise", across=("stage",))),
    ("windows", Case(2, 2, 5, context=2)),
    ("windows", Case(2, 1, 5, context=2, attends="all_gather", attention="blockwise")),
    ("windows", Case(2, 1, 5, context=3, attends="ring", idle="compute")),
    ("experts", Case(1, 1, 4, expert=5, across=("expert",))),
    ("experts", Case(2, 2, 5, expert=2, schedule="zb_v", remat="names")),
    ("room", Case(2, 1, 5, expert=4, schedule="zb_h1")),
    ("room", Case(2, 1, 5, context=3)),
    # Three axes at once.
    ("dense", Case(2, 1, 5, context=2, tensor=2)),
    ("dense", Case(2, 1, 5, context=2, data=2, across=("data",))),
    ("experts", Case(2, 1, 5, expert=2, fsdp=2, gather="step")),
    ("experts", Case(2, 1, 5, expert=2, tensor=2)),
    ("room", Case(2, 1, 5, expert=2, context=2)),
]


@pytest.mark.parametrize(("model", "case"), keeping(PAIRS, 8), ids=str)
def test_loss_curve_matches_one_device(model: str, case: Case) -> None:
    trained = MODELS[model]
    named = ("layers", "length", "width", "own", "dropout")
    case = replace(case, **{name: getattr(trained, name) for name in named})
    np.testing.assert_allclose(_curve(case), _one_device(model), rtol=TOLERANCE)
