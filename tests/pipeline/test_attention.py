"""Blockwise attention in the engine: loops with data-dependent trip counts and a custom VJP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from maxpipe.models.count import unrolled_blocks
from maxpipe.nn.attention import blockwise
from maxpipe.pipeline import program, prologue, slots
from tests.cases import Case, keeping
from tests.pipeline.test_engine import check_gradients, matrix
from tests.pipeline.test_families import FAMILIES_IN_MATRIX, GEMMA, GPT_OSS, V3

BLOCK = 3
"""Tokens per block. Each sequence has several blocks, and the last one is not full."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "even_blocks", lambda tokens, block=0: BLOCK)
    monkeypatch.setattr(blockwise, "unrolled_blocks", lambda tokens, windows: ())


CASES = [
    Case(2, 2, 3, own=GEMMA, tied=True, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(4, 1, 5, own=GPT_OSS, layers=5, schedule="zb_h1", remat="none", tensor=2),
    Case(2, 1, 4, own=V3, layers=5, schedule="zb_h1", remat="names", data=2),
    Case(2, 2, 4, remat="names", idle="compute", dropout=0.3, offloaded=("mlp",)),
    Case(3, 2, 4, own=GEMMA, tied=True, layers=8, outside=2, remat="chunk", idle="compute"),
    Case(1, 1, 2, fsdp=2, tensor=2, gather="step", remat="none"),
]


@pytest.mark.parametrize("case", keeping(CASES, 0), ids=str)
def test_blockwise_attention_matches_unpipelined_model(case: Case) -> None:
    """Includes per-layer windows, sinks, a different value dimension and split backward passes."""
    check_gradients(replace(case, attention="blockwise"))


@pytest.mark.parametrize("case", keeping(CASES[:3] + CASES[-1:], 0), ids=str)
def test_unrolled_blockwise_attention_matches_unpipelined_model(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short sequences use unrolled blocks."""
    monkeypatch.setattr(blockwise, "unrolled_blocks", partial(unrolled_blocks, size=BLOCK))
    check_gradients(replace(case, attention="blockwise"))


@pytest.mark.parametrize("schedule", keeping(["interleaved", "zb_h1"], 1))
def test_idle_slots_do_not_affect_results(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are filled with NaN before their first write."""

    def nan_slots(count: int, like: Any) -> Any:
        empty = slots.empty_slots(count, like)
        return jnp.full_like(empty, jnp.nan) if jnp.issubdtype(empty.dtype, jnp.floating) else empty

    for module in (program, prologue):
        monkeypatch.setattr(module, "empty_slots", nan_slots)
    case = Case(3, 1, 4, own=GEMMA, tied=True, schedule=schedule, remat="names", idle="compute")
    check_gradients(replace(case, attention="blockwise"))


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(11, len(matrix()), 53))
def test_config_matrix_sample(number: int) -> None:
    """Each case uses a different model family."""
    case, family = matrix()[number], FAMILIES_IN_MATRIX[number % len(FAMILIES_IN_MATRIX)]
    check_gradients(replace(case, **family, attention="blockwise"))
