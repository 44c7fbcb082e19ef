"""Train steps of models whose layers return losses and statistics."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxpipe.models.moe import MoeConfig
from maxpipe.step.step import compute_layer_metrics
from tests.cases import TOLERANCE, Case, batch_of, steps_of

OWN = MoeConfig(num_experts=5, num_dense_layers=2, d_expert=12)


@pytest.mark.layouts
def test_step_returns_layer_metrics_and_saves_by_layer_type() -> None:
    case = Case(2, 1, 3, own=OWN, layers=5, outside=1)
    steps, batch = steps_of(case, case.rows), batch_of(case.rows, case=case)
    decoder, parts = steps.param_layout.decoder, steps.param_layout
    state = steps.init()
    saved = parts.to_saved(state.params)
    assert {kind: len(tree["attention"]["query"]) for kind, tree in saved["layers"].items()} == {
        "dense": 2,
        "experts": 3,
    }
    jax.tree.map(np.testing.assert_array_equal, parts.from_saved(saved), state.params)

    plain = jax.jit(decoder.run)(saved, batch)
    wanted = compute_layer_metrics(
        decoder.model,
        {name: loss / batch["loss_mask"].sum() for name, loss in plain.losses.items()},
        plain.statistics,
    )
    placed = jax.device_put(batch, steps.batch_sharding)
    _, metrics = steps.compile_train()(state, placed)
    assert wanted.keys() == {tag for tag in metrics if tag.startswith("moe/")}
    for tag, number in wanted.items():
        np.testing.assert_allclose(metrics[tag], number, rtol=TOLERANCE)


@pytest.mark.layouts
def test_padding_uses_no_all_to_all_capacity() -> None:
    """The first half of each sequence is padding, so the rest fits whichever experts it uses."""
    own = MoeConfig(num_experts=4, num_dense_layers=1, d_expert=12, dispatch="grouped")
    losses = []
    for factor in (0.0, 1.0):
        case = Case(expert=2, own=replace(own, all_to_all_capacity_factor=factor), layers=2)
        steps, batch = steps_of(case, case.rows), batch_of(case.rows, case=case)
        is_padding = np.arange(case.tokens) < case.tokens // 2
        batch["tokens"] = np.where(is_padding, 0, batch["tokens"])
        batch["segment_ids"] = np.where(is_padding, 0, batch["segment_ids"])
        batch["loss_mask"] = np.where(is_padding, 0.0, batch["loss_mask"]).astype(np.float32)
        placed = jax.device_put(batch, steps.batch_sharding)
        _, metrics = steps.compile_train()(steps.init(), placed)
        losses.append(float(metrics["train/loss"]))
    assert float(metrics["moe/dropped"]) == 0.0
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)
