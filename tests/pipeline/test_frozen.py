"""Parameters that are not trained: no gradients, no accumulators, no reductions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from maxpipe.plan.hlo_text import parse
from tests.cases import Case, steps_of
from tests.pipeline import test_kinds
from tests.pipeline.test_executor import check_gradients

ENDS = ("embedding", "final_norm.*", "head")
CASES = [
    Case(1, 1, 2, fsdp=2, gather="step", frozen=("layers.*",)),
    Case(2, 2, 4, fsdp=2, frozen=("layers.attention.*", "embedding")),
    Case(2, 1, 3, schedule="1f1b", tied=True, fsdp=2, remat="none", frozen=("embedding",)),
    Case(2, 3, 4, fsdp=2, layers=7, gather="visit", frozen=("*_norm.scale", "layers.mlp.up")),
    Case(2, 2, 4, schedule="zb_v", remat="names", frozen=("layers.*.query", "head"), tensor=2),
    Case(3, 2, 7, schedule="v_half", layers=7, remat="none", frozen=ENDS, dropout=0.3),
    Case(2, 2, 5, outside=1, remat="chunk", idle="compute", fsdp=2, frozen=("layers.*", "head")),
    Case(4, 1, 9, schedule="zb_h1", outside=1, data=2, frozen=("embedding", "layers.mlp.*")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_the_others_equal_the_plain_loop(case: Case) -> None:
    check_gradients(case)


KINDS = [
    test_kinds.Case("pwnwpnwnw", 3, 2, 6, fsdp=2, gather="visit", frozen=("wide", "narrow.into")),
    test_kinds.Case("npwnnwp", 2, 1, 5, schedule="zb_h1", remat="names", frozen=("narrow", "head")),
    test_kinds.Case("pwnwn", 2, 1, 5, outside=1, fsdp=2, frozen=("plain", "embedding")),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_frozen_kind_hands_on_the_gradient_of_its_input(case: test_kinds.Case) -> None:
    test_kinds.check(case)
