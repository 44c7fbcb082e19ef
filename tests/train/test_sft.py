"""Supervised fine-tuning: few and uneven numbers of trained tokens, across layouts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.step.step import Steps
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.pipeline.test_engine import plain_gradients
from tests.times import shared

ROWS = 16
LAYOUTS = [
    Case(1, 1, 2, layers=8),
    Case(4, 2, 4, layers=8),
    Case(2, 2, 4, layers=8, fsdp=2, tensor=2),
    Case(1, 1, 1, layers=8, fsdp=4, data=2),
    Case(2, 1, 2, layers=8, context=2, data=2, schedule="1f1b"),
    Case(2, 1, 4, layers=8, loss_block=5, schedule="zb_h1", remat="names"),
    *(
        Case(2, schedule.repeats or 2, 4, layers=8, schedule=name, fsdp=2)
        for name, schedule in SCHEDULES.items()
    ),
]


def uneven_batch(step: int) -> dict[str, Any]:
    """Return a batch in which most sequences have few or no trained tokens, and some have many.

    The first microbatches and some devices have no trained tokens; the third step has none at all.
    """
    batch = batch_of(ROWS, step)
    mask, draw = np.zeros_like(batch["loss_mask"]), np.random.default_rng(step)
    for row in range(5 * (step % 3), ROWS) if step != 2 else ():
        share = (0.0, 0.1, 0.3, 1.0)[draw.integers(4)]
        mask[row] = batch["loss_mask"][row] * (draw.random(mask.shape[1]) < share)
    return {**batch, "loss_mask": mask}


def trained(case: Case) -> tuple[Steps, list[dict[str, Any]]]:
    """Train four steps; return the steps and the metrics of each."""
    steps = steps_of(case, ROWS)
    state, run, found = steps.init(), steps.compile_train(), []
    for step in range(4):
        batch = jax.device_put(uneven_batch(step), steps.batch_sharding)
        state, metrics = run(state, batch)
        found.append({tag: float(value) for tag, value in metrics.items()})
    return steps, found


@shared
def one_device() -> list[dict[str, Any]]:
    return trained(Case(1, 1, 1, layers=8))[1]


@pytest.mark.parametrize("case", keeping(LAYOUTS, 9), ids=str)
def test_loss_curve_matches_across_layouts(case: Case) -> None:
    _, found = trained(case)
    for step, (mine, wanted) in enumerate(zip(found, one_device(), strict=True)):
        for tag in ("train/loss", "train/grad_norm"):
            assert mine[tag] == pytest.approx(wanted[tag], rel=TOLERANCE), (step, tag)
        assert mine["train/skipped"] == 0


def test_batch_without_trained_tokens_has_zero_loss() -> None:
    found = one_device()
    assert found[2]["train/loss"] == 0 == found[2]["train/grad_norm"]
    assert found[3]["train/loss"] > 0 and np.isfinite(found[3]["train/loss"])


@pytest.mark.parametrize("step", keeping([0, 1], 0))
def test_loss_is_mean_over_all_trained_tokens(step: int) -> None:
    """Tokens have equal weight in every sequence, microbatch and device."""
    case = Case(2, 2, 4, layers=4, fsdp=2, tensor=2)
    steps, batch = steps_of(case, ROWS), uneven_batch(step)
    counts = batch["loss_mask"].sum(1)
    assert 0 in counts and counts.max() > 4 * np.median(counts)
    parts = steps.param_layout
    params, (loss, _, _), wanted = plain_gradients(parts.decoder, _without_empty(batch), None)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(plain: Any, batch: Any) -> Any:
        found = run(parts.stack(plain), batch, None)
        return found.loss, parts.unstack(found.gradients)

    with jax.set_mesh(parts.mesh):
        given = jax.device_put(batch, steps.batch_sharding)
        value, gradients = jax.jit(whole)(params, given)
    assert float(value) == pytest.approx(float(loss), rel=TOLERANCE)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert np.abs(a - np.asarray(b)).max() < TOLERANCE * np.abs(a).max()


def _without_empty(batch: dict[str, Any]) -> dict[str, Any]:
    """Drop sequences without trained tokens: the reference divides by the count of each."""
    kept = batch["loss_mask"].sum(1) > 0
    return {name: each[kept] for name, each in batch.items()}
