"""Tokens split over tensor, gathered at once or in rings: equal to the plain loop, and how."""

from __future__ import annotations

import pytest

from tests.cases import Case, thinned
from tests.pipeline.test_executor import check_gradients
from tests.pipeline.test_families import GEMMA, GEMMA2, GROUPED, NEXT, QWEN2, QWEN3, ROOM, V2, V3

CASES = [
    Case(2, 2, 4, split="ring", tensor=2, fsdp=2, idle="compute", remat="names"),
    Case(2, 2, 4, split="sequence", tensor=2, fsdp=2, tied=True, dropout=0.3),
    Case(1, 1, 2, split="ring", tensor=4),
    Case(2, 1, 5, split="ring", tensor=3, by_three=True, idle="compute", schedule="zb_h1",
         remat="none"),
    Case(2, 1, 5, split="sequence", tensor=3, by_three=True, schedule="zb_h1", remat="names"),
    Case(1, 2, 3, split="sequence", tensor=4, remat="chunk", outside=1),
    Case(2, 2, 4, split="ring", tensor=4, idle="compute", remat="chunk", layers=7, outside=2),
    Case(2, 3, 4, split="sequence", tensor=2, fsdp=2, gather="visit", remat="none", layers=7),
    Case(2, 2, 5, split="ring", tensor=2, data=2, idle="compute", schedule="zb_v", gather="step"),
    Case(1, 2, 3, split="sequence", tensor=4, ahead=2, tied=True),
    Case(2, 2, 3, split="ring", tensor=2, ahead=2, form="layer", idle="compute", remat="names"),
    # Windows and head norms, biases, experts, latents, states.
    Case(2, 1, 3, split="ring", own=GEMMA, tied=True, layers=6, tensor=4, idle="compute"),
    Case(2, 2, 3, split="sequence", own=QWEN2, tensor=2, fsdp=2, schedule="zb_v", remat="names"),
    Case(2, 1, 5, split="ring", own=QWEN3, tensor=4, idle="compute", schedule="zb_h1"),
    Case(2, 2, 3, split="ring", own=V3, tensor=2, idle="compute", remat="names", schedule="zb_v"),
    Case(2, 1, 3, split="sequence", own=V2, tensor=4),
    Case(2, 1, 3, split="sequence", own=GROUPED, tensor=2, fsdp=2, schedule="zb_h1"),
    Case(2, 1, 3, split="ring", own=ROOM, tensor=4, idle="compute"),
    Case(2, 1, 3, split="sequence", own=NEXT, epsilon=0.01, tensor=2, fsdp=2),
    Case(1, 1, 2, split="ring", own=GEMMA2, tied=True, tensor=2),
]


@pytest.mark.parametrize("case", thinned(CASES, 4), ids=str)
def test_gradients_equal_the_plain_loop(case: Case) -> None:
    check_gradients(case)
