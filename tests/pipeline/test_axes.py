"""Context and expert parallelism: every gradient leaf matches the unpipelined model."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from maxpipe.nn import experts
from maxpipe.parallel import collectives, mesh
from tests.cases import Case, keeping, steps_of
from tests.pipeline.test_engine import check_gradients
from tests.pipeline.test_families import (
    GEMMA,
    GEMMA4,
    GEMMA4_MOE,
    GEMMA4_SMALL,
    GLM,
    GPT_OSS,
    GROUPED,
    LLAMA4,
    MINIMAX,
    MISTRAL,
    MOE,
    PHI,
    QWEN3_5_MOE,
    QWEN3_MOE,
    ROOM,
    V3,
)

LATENT = replace(V3, kv_lora_rank=8, q_lora_rank=12)
CONTEXT = [
    Case(1, 1, 1, context=2),
    Case(2, 2, 3, context=2, fsdp=2, gather="step", dropout=0.3),
    Case(2, 1, 3, context=3, remat="names", idle="compute"),
    Case(2, 1, 2, context=4, schedule="zb_h1", remat="none"),
    Case(
        1, 2, 3, context=2, tensor=2, schedule="zb_v", fsdp=2, remat="names", tied=True, dropout=0.3
    ),
    Case(1, 1, 2, context=4, attends="ring", fsdp=2),
    Case(2, 1, 3, context=2, attends="ring", idle="compute", remat="names", schedule="zb_h1"),
    Case(2, 1, 2, context=2, attends="ring", idle="compute", own=GPT_OSS, tensor=2),
    Case(2, 1, 2, context=2, attends="all_gather", own=MISTRAL),
    Case(2, 2, 3, context=2, own=GEMMA, layers=4),
    Case(2, 1, 3, context=3, own=MISTRAL, schedule="zb_h1", remat="full"),
    Case(2, 1, 3, context=2, own=GPT_OSS, layers=4, data=2),
    Case(2, 1, 3, context=2, own=V3, layers=4, tensor=2),
    Case(2, 1, 3, context=2, own=ROOM, layers=4, fsdp=2, gather="window"),
    Case(2, 1, 3, context=2, own=GROUPED, layers=4, outside=1),
    Case(2, 1, 3, context=3, own=PHI, layers=3, remat="chunk"),
    Case(2, 1, 3, context=2, own=GLM, layers=4, tensor=2),
    Case(2, 1, 3, context=2, own=MINIMAX, layers=4, fsdp=2),
    Case(2, 1, 3, context=2, own=LLAMA4, layers=4, fsdp=2),
    Case(2, 1, 3, context=2, attends="ring", own=LLAMA4, layers=4, idle="compute"),
    Case(2, 1, 3, context=2, attends="ulysses", own=LLAMA4, layers=4, remat="none"),
    Case(
        2, 1, 3, context=2, own=GEMMA4, epsilon=1.0, tied=True, layers=5, fsdp=2, schedule="zb_h1"
    ),
    Case(2, 1, 3, context=2, own=GEMMA4_SMALL, epsilon=1.0, tied=True, layers=7, tensor=2),
    Case(
        2,
        1,
        3,
        context=3,
        attends="ring",
        idle="compute",
        own=replace(GEMMA4_SMALL, hidden_size_per_layer_input=9),
        epsilon=1.0,
        tied=True,
        layers=7,
    ),
    # Fewer key/value heads than devices, and numbers that do not divide each other.
    Case(2, 1, 2, context=4, attends="ulysses", heads=(8, 2)),
    Case(1, 1, 2, context=4, attends="ulysses", heads=(8, 1), remat="names", attention="blockwise"),
    Case(1, 1, 2, context=4, attends="ulysses", heads=(12, 6)),
    Case(1, 1, 2, context=4, attends="ulysses", tensor=2),
    Case(1, 2, 3, context=2, attends="ulysses", heads=(6, 3), own=GPT_OSS, layers=4, fsdp=2),
    Case(1, 1, 1, context=8, attends="ulysses"),
    # Groups that exchange heads, in a ring.
    Case(2, 1, 3, context=4, attends="ulysses_ring", ulysses=2, idle="compute", own=GPT_OSS),
    Case(2, 1, 2, context=4, attends="ulysses_ring", idle="compute", schedule="zb_h1"),
    Case(1, 1, 2, context=8, attends="ulysses_ring", ulysses=2, remat="names"),
    Case(1, 1, 2, context=8, attends="ulysses_ring", ulysses=4, heads=(4, 1)),
    Case(1, 1, 2, context=4, attends="ulysses_ring", ulysses=2, tensor=2, own=GEMMA, layers=4),
    Case(1, 1, 2, context=6, attends="ulysses_ring", ulysses=2, own=MISTRAL, remat="none"),
    Case(1, 1, 2, context=6, attends="ulysses_ring", ulysses=3, heads=(6, 2), length=24),
    Case(1, 2, 3, context=4, attends="ulysses_ring", own=LLAMA4, layers=4, fsdp=2, gather="step"),
    Case(1, 1, 2, context=4, attends="ulysses_ring", ulysses=2, own=LATENT, layers=4),
    Case(1, 1, 2, context=4, attends="ulysses_ring", ulysses=1),
    Case(2, 2, 3, context=4, attends="ulysses_ring", ulysses=4, schedule="zb_v", remat="names"),
    Case(*(2, 2, 3), context=4, attends="ulysses_ring", ulysses=2, idle="compute", dropout=0.3),
]


@pytest.mark.parametrize("case", keeping(CONTEXT, 4, 6), ids=str)
def test_context_parallel_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


FOUR = replace(QWEN3_MOE, num_experts=4)
ALIKE = replace(ROOM, num_experts=4, num_dense_layers=0)
EXPERT = [
    Case(1, 1, 1, expert=5, own=GROUPED, layers=3),
    Case(1, 1, 2, expert=5, own=MOE, layers=3),
    Case(1, 1, 2, expert=5, own=ROOM, layers=3),
    Case(2, 2, 3, expert=2, own=LATENT, layers=5, fsdp=2, gather="step", remat="names"),
    Case(2, 1, 3, expert=2, own=replace(ROOM, num_experts=4), layers=4, tensor=2),
    Case(2, 1, 3, expert=2, own=replace(MOE, num_experts=4), layers=4, context=2),
    Case(2, 1, 3, expert=2, own=replace(GPT_OSS, num_experts=4), layers=4, schedule="zb_h1"),
    Case(2, 1, 3, expert=2, own=FOUR, layers=4, data=2, idle="compute", remat="none"),
    Case(2, 1, 3, expert=2, own=GLM, layers=4, fsdp=2, schedule="zb_h1"),
    Case(2, 1, 3, expert=2, own=replace(MINIMAX, num_experts=4), layers=4, context=2),
    Case(2, 1, 3, expert=2, own=replace(QWEN3_5_MOE, num_experts=4), epsilon=0.01, layers=4),
    Case(2, 1, 3, expert=2, own=ALIKE, layers=3, context=2, remat="none"),
    Case(2, 2, 3, expert=2, own=replace(GROUPED, num_experts=6), layers=5, gather="window"),
    Case(4, 2, 5, expert=2, own=replace(GROUPED, num_experts=6), layers=9, schedule="zb_v"),
    Case(2, 1, 3, expert=2, own=replace(LLAMA4, num_experts=4), layers=4, context=2),
    Case(
        *(2, 1, 3),
        expert=2,
        own=replace(GEMMA4_MOE, num_experts=4),
        epsilon=1.0,
        tied=True,
        layers=4,
        context=2,
    ),
]


CHUNKED = replace(GROUPED, num_experts=6, all_to_all_chunks=4)
EXPERT += [
    Case(1, 1, 1, expert=3, own=CHUNKED, layers=3),
    Case(2, 2, 3, expert=2, own=CHUNKED, layers=5, fsdp=2, gather="step", remat="names"),
    Case(2, 1, 3, expert=2, own=CHUNKED, layers=4, schedule="zb_h1", remat="none"),
    Case(4, 2, 5, expert=2, own=CHUNKED, layers=9, schedule="zb_v"),
    Case(2, 1, 3, expert=2, own=replace(ALIKE, all_to_all_chunks=2), layers=3, context=2),
    Case(2, 1, 3, expert=2, own=replace(LATENT, all_to_all_chunks=2), layers=5, tensor=2),
]


@pytest.mark.parametrize("case", keeping(EXPERT, 8, 16), ids=str)
def test_expert_parallel_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


def test_chunks_are_not_resharded() -> None:
    """With sequence parallelism, the compiler would exchange the tokens of chunks by collectives of
    all stages, which never return if the stages run different parts of the schedule.
    """
    own = replace(GROUPED, num_experts=4, all_to_all_chunks=2)
    case = Case(1, 1, 1, expert=2, tensor=2, split="sequence", own=own, layers=3)
    assert "collective-permute(" not in steps_of(case, case.rows).compile_train().as_text()


def _with_gaps(x: jax.Array, sent: jax.Array, got: jax.Array, method: str) -> jax.Array:
    """All-to-all as on TPU: rows that receive no data are uninitialized, here NaN."""
    used = jnp.arange(len(x) // len(got)) < got[:, None]
    return jnp.where(used.reshape(-1, 1), collectives.all_to_all(x, mesh.EXPERT, 0, 0), jnp.nan)


@pytest.mark.parametrize(
    "case",
    keeping(
        [
            Case(1, 1, 2, expert=5, own=GROUPED, layers=3),
            Case(1, 1, 2, expert=5, own=ROOM, layers=3),
            Case(1, 1, 2, expert=2, own=replace(GPT_OSS, num_experts=4), layers=4),
            Case(2, 1, 3, expert=2, own=LATENT, layers=4, schedule="zb_h1", remat="names"),
        ],
        2,
    ),
    ids=str,
)
def test_uninitialized_all_to_all_rows_are_never_read(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps = jax.custom_vjp(_with_gaps, nondiff_argnums=(3,))
    gaps.defvjp(
        lambda x, sent, got, method: (_with_gaps(x, sent, got, method), (sent, got)),
        lambda method, saved, ct: (_with_gaps(ct, saved[1], saved[0], method), None, None),
    )
    monkeypatch.setattr(experts, "exchange_rows", gaps)
    check_gradients(case)
