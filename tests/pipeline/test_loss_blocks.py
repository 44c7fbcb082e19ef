"""Loss by blocks of tokens: values, gradients and the automatic block size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.models.resolve_auto import BLOCK_TOKENS, loss_block
from maxpipe.pipeline.loss_head import map_token_blocks
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.pipeline.test_engine import check_gradients
from tests.pipeline.test_families import GEMMA2, GRANITE, GROUPED, NEXT, V3

# A microbatch has 16 tokens on a device, or 8 if the context axis splits them.
CASES = [
    Case(1, 1, 2, loss_block=5, fsdp=2, data=2),
    Case(2, 2, 3, loss_block=4, own=GEMMA2, tied=True, layers=7, fsdp=2, tensor=2),
    Case(2, 1, 5, loss_block=3, schedule="zb_h1", remat="names", context=2, data=2),
    Case(2, 2, 5, loss_block=7, schedule="zb_v", remat="none", tied=True, dropout=0.3, fsdp=2),
    Case(2, 2, 4, loss_block=6, ahead=2, outside=1, gather="step", tensor=2, fsdp=2),
    Case(2, 1, 3, loss_block=1, own=GRANITE, tied=True, gather="window", idle="compute"),
    Case(2, 1, 3, loss_block=8, split="sequence", tensor=4, schedule="1f1b", delayed=False),
    Case(2, 2, 3, loss_block=5, split="ring", tensor=2, idle="compute", tied=True),
    Case(2, 1, 4, loss_block=6, own=replace(GROUPED, num_experts=6), expert=2, fsdp=2, layers=5),
    Case(2, 2, 3, loss_block=5, own=V3, layers=5, fsdp=2, tensor=2, remat="names"),
    Case(2, 1, 3, loss_block=7, own=NEXT, epsilon=0.01, layers=5, data=2, remat="chunk"),
    Case(2, 1, 3, loss_block=5, own=V3, ahead=2, form="layer", tensor=2, layers=4),
    Case(2, 1, 3, loss_block=5, frozen=("head", "final_norm*"), data=2, schedule="gpipe"),
]


@pytest.mark.parametrize("case", keeping(CASES, 3, 12), ids=str)
def test_blockwise_loss_matches_unpipelined_model(case: Case) -> None:
    check_gradients(case)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 4), (3, 9)])
def test_map_token_blocks_processes_each_token_once(rows: int, length: int) -> None:
    """For any block size, sums count each unmasked token once and arrays keep their order."""
    tokens = rows * length
    sizes = sorted({0, 1, 2, 3, 5, 7, tokens // 2, tokens - 1, tokens, tokens + 1})
    random = np.random.default_rng(rows * 100 + length)
    x = random.integers(1, 9, (rows, length, 2)).astype(np.float32)
    targets = random.integers(0, 50, (rows, length))
    mask = random.integers(0, 2, (rows, length)).astype(np.float32)

    def run(size: int, x: jax.Array, mask: jax.Array, targets: jax.Array):
        assert not 0 < size < tokens or targets.size <= size
        counted = x * mask[..., None]
        return (mask.sum(), (targets * mask).sum(), counted.sum((0, 1))), (counted, counted + 1)

    @jax.jit
    def every(*given: jax.Array) -> Any:
        return [map_token_blocks(partial(run, size), size, *given) for size in sizes]

    counted = x * mask[..., None]
    wanted = mask.sum(), (targets * mask).sum(), counted.sum((0, 1))
    for sums, arrays in every(x, mask, targets):
        for a, b in zip(sums, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(arrays[0], counted)
        np.testing.assert_array_equal(arrays[1], counted + 1)


@pytest.mark.parametrize(("size", "mode"), keeping([(3, "auto"), (8, "explicit")], 1))
def test_blockwise_evaluation_matches_full_logits(size: int, mode: str) -> None:
    case = Case(2, 1, 2, loss_block=size, data=2, shard_mode=mode)
    whole = replace(case, loss_block=0)
    batch, found = batch_of(case.rows), []
    params = steps_of(case, case.rows).init().params
    for each in (case, whole):
        steps = steps_of(each, each.rows)
        placed = jax.device_put(batch, steps.batch_sharding)
        found.append(steps.compile_eval()(params, placed))
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], rtol=TOLERANCE)
    assert found[0]["targets"] == found[1]["targets"]


def test_small_models_compile_without_loss_blocks() -> None:
    """The automatic rule selects no blocks there, so the program is the same as without blocks."""
    case = Case(2, 1, 2)
    texts = []
    for size in (-1, 0, 16, 8):
        steps = steps_of(replace(case, loss_block=size), case.rows)
        run = jax.jit(steps.engine.value_and_grad(steps.train_schedule))
        with jax.set_mesh(steps.param_layout.mesh):
            lowered = run.lower(steps.abstract_state.params, steps.abstract_batch(), None)
        texts.append(lowered.as_text())
    assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.parametrize(
    ("setting", "tokens", "vocabulary", "wanted"),
    [
        (-1, 8192, 128256 // 4, BLOCK_TOKENS),  # long sequences
        (-1, 4096, 128256, BLOCK_TOKENS),  # one stage
        (-1, 2048, 128256, 0),  # one block holds all tokens
        (-1, 4096, 128256 // 4, 0),
        (-1, 8192, 50257 // 8, 0),  # a small vocabulary
        (0, 2**20, 2**20, 0),
        (100, 2000, 30, 100),
        (100, 100, 30, 0),
    ],
)
def test_auto_loss_block_size(setting: int, tokens: int, vocabulary: int, wanted: int) -> None:
    assert loss_block(setting, tokens, vocabulary) == wanted
