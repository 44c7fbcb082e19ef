"""Whole steps: loss curves under every layout, memory, and what is gathered when."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import TOKENS, TOLERANCE, Case, batch_of, steps_of

ROWS = 24


def loss_curve(case: Case, num_steps: int = 10) -> list[float]:
    steps = steps_of(case, ROWS, num_steps)
    run, state, losses = steps.compile_train(), steps.init(), []
    for step in range(num_steps):
        state, metrics = run(state, jax.device_put(batch_of(ROWS, step), steps.batch_sharding))
        losses.append(float(metrics["train/loss"]))
    return losses


@pytest.fixture(scope="module")
def unsharded_curve() -> list[float]:
    return loss_curve(Case(layers=8, dropout=0.1))


CURVES = [
    Case(1, 1, 24),
    Case(1, 2, 3, data=4, tensor=2),
    Case(2, 2, 2, fsdp=4, gather="step"),
    Case(2, 1, 3, schedule="gpipe", data=2, fsdp=2),
    Case(2, 4, 6, schedule="circular", tensor=4),
    Case(2, 2, 12, schedule="1f1b", fsdp=2, tensor=2),
    Case(4, 2, 4, schedule="breadth_first", data=2),
    Case(4, 1, 12, fsdp=2, gather="step", idle="compute"),
    Case(4, 2, 1),
    Case(8, 1, 8, schedule="1f1b"),
    Case(8, 1, 24, schedule="circular"),
]


@pytest.mark.parametrize("case", [replace(c, layers=8, dropout=0.1) for c in CURVES], ids=str)
def test_loss_curve_is_the_same_under_every_layout(
    case: Case, unsharded_curve: list[float]
) -> None:
    np.testing.assert_allclose(loss_curve(case), unsharded_curve, rtol=TOLERANCE)
    assert unsharded_curve[-1] < unsharded_curve[0]


def test_idle_slots_and_padding_never_reach_the_result() -> None:
    """NaN in everything that an idle slot may touch changes nothing."""
    case = Case(4, 2, 5, layers=6, fsdp=2, idle="compute")
    steps = steps_of(case, rows=20)
    parts = steps.partition
    batch = jax.device_put(batch_of(20), steps.batch_sharding)
    run = jax.jit(steps.engine.value_and_grad(steps.train_schedule))
    with jax.set_mesh(parts.mesh):
        params = steps.init().params
        used = jnp.asarray(parts.layout.layer_at >= 0).reshape(parts.layout.shape)
        poisoned = dict(params)
        poisoned["layers"] = jax.tree.map(
            lambda leaf: jnp.where(
                jnp.expand_dims(used, tuple(range(3, leaf.ndim))), leaf, jnp.nan
            ),
            params["layers"],
        )
        loss, gradients = run(params, batch, None)
        poisoned_loss, poisoned_gradients = run(poisoned, batch, None)
    assert float(loss) == float(poisoned_loss)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(poisoned_gradients), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_does_not_grow_with_microbatches() -> None:
    def temp_bytes(microbatches: int) -> int:
        case = Case(4, 2, microbatches, fsdp=2, layers=8)
        compiled = steps_of(case, rows=2 * microbatches).compile_train()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temp_bytes(8), temp_bytes(32)
    # What may grow is the batch: five arrays of 4-byte entries. Two saved chunks more for
    # each microbatch, as a forward-then-backward schedule keeps, would be far more.
    assert many - few < (32 - 8) * 2 * TOKENS * 4 * 5


@pytest.mark.parametrize("gather", ["iteration", "step"])
def test_weights_are_gathered_when_the_mode_says(gather: str) -> None:
    """`step` has no gather and no reduction of weights inside the loop over ticks."""
    steps = steps_of(Case(4, 2, 8, fsdp=2, layers=8, gather=gather), rows=16)
    text = steps.compile_train().as_text()
    in_loops = [line for line in text.splitlines() if "/while/" in line]
    matrices = 7
    expected = 0 if gather == "step" else matrices
    gathers = sum(" all-gather(" in line for line in in_loops)
    reductions = sum(" reduce-scatter(" in line for line in in_loops)
    # A layer's weights are gathered in its forward and again in its backward.
    assert (gathers, reductions) == (2 * expected, expected)
