"""Router biases that follow expert loads, compared with plain arithmetic and across layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layer_reports import Follows
from maxpipe.models.moe import MoeConfig
from maxpipe.step.step import balance_step
from tests.cases import Case, batch_of, keeping, steps_of
from tests.times import shared

RATE = 0.03
OWN = MoeConfig(
    num_experts=5,
    num_dense_layers=2,
    d_expert=12,
    score_func="sigmoid",
    expert_bias=True,
    expert_bias_update_rate=RATE,
    load_balance_loss_weight=0.0,
)
AHEAD: Any = {"ahead": 1, "form": "layer"}
DENSE = replace(OWN, num_dense_layers=0, dispatch="dense")
CASES = [
    Case(2, 1, 4, own=DENSE, layers=2, schedule="1f1b", data=2, **AHEAD),
    Case(4, 1, 8, own=OWN, layers=6, schedule="zb_h1", **AHEAD),
    Case(2, 1, 4, own=OWN, layers=6, schedule="1f1b", data=2, outside=3, gather="window", **AHEAD),
]
ROWS, STEPS = 16, 3


def biases(saved: Any) -> np.ndarray:
    """Return the router biases of all expert layers, multi-token prediction layers last."""
    params = saved["params"]
    layers = params["layers"]["experts"]
    # The only type of layers has no name.
    parts = layers.get("experts", layers), params["ahead"]["layer"]["experts"]
    return np.concatenate([np.asarray(each["router_bias"]) for each in parts])


@shared
def run(number: int) -> tuple[list[Any], Any]:
    """Return the saved state before each step and after the last, and the `Steps` of a case."""
    case = CASES[number]
    assert case.rows == ROWS
    steps = steps_of(case, ROWS)
    train, state, found = steps.compile_train(), steps.init(), []
    batches = [batch_of(ROWS, step, case) for step in range(STEPS)]
    for batch in batches:
        found.append(jax.device_get(steps.to_saved(state)))
        state, metrics = train(state, jax.device_put(batch, steps.batch_sharding))
        assert metrics["train/skipped"] == 0
    # A step with a NaN loss changes no bias.
    before = jax.device_get(steps.to_saved(state))
    bad = batches[-1] | {"loss_mask": np.full_like(batches[-1]["loss_mask"], np.nan)}
    state, metrics = train(state, jax.device_put(bad, steps.batch_sharding))
    assert metrics["train/skipped"] == 1
    after = jax.device_get(steps.to_saved(state))
    np.testing.assert_array_equal(biases(after), biases(before))
    # Saving and restoring keeps the biases.
    restored = steps.to_saved(steps.from_saved(after))
    np.testing.assert_array_equal(biases(restored), biases(after))
    return [*found, before], steps


@pytest.mark.parametrize("number", keeping(range(len(CASES)), 0))
def test_router_biases_follow_loads_of_each_batch(number: int) -> None:
    case, (saved, steps) = CASES[number], run(number)
    decoder, parts = steps.param_layout.decoder, steps.param_layout
    plain, num_layers = jax.jit(decoder.run), case.layers - case.own.num_dense_layers
    for step in range(STEPS):
        batch = batch_of(ROWS, step, case)
        params = parts.split_layer_types(saved[step]["params"])
        found = plain(params, batch).statistics
        load = np.concatenate([found[name]["load"] for name in ("experts", "ahead")])
        assert load.shape == (num_layers + 1, 5)
        assert load.sum() == 2 * num_counted(batch, num_layers)
        wanted = biases(saved[step]).copy()
        for layer, counts in enumerate(load):
            for expert, count in enumerate(counts):
                wanted[layer, expert] += RATE * np.sign(counts.mean() - count)
        np.testing.assert_allclose(biases(saved[step + 1]), wanted, rtol=1e-6)
    assert len({*np.abs(biases(saved[-1])).round(5).ravel()}) > 1


def num_counted(batch: Any, num_layers: int) -> int:
    """Return the number of target tokens of these layers and of the multi-token prediction head."""
    ids, mask = batch["segment_ids"], batch["loss_mask"]
    further = mask[:, 1:] * (ids[:, 1:] == ids[:, :-1])
    return int(num_layers * mask.sum() + further.sum())


@pytest.mark.layouts
def test_router_biases_match_across_layouts() -> None:
    (one, _), (other, _) = run(1), run(2)
    np.testing.assert_array_equal(biases(one[-1]), biases(other[-1]))


@pytest.mark.layouts
def test_frozen_router_biases_are_unchanged_and_float32() -> None:
    own = replace(OWN, dispatch="dense")
    case = Case(own=own, layers=3, dtype="bfloat16", frozen=("*router_bias",), **AHEAD)
    steps = steps_of(case, case.rows)
    model = steps.param_layout.decoder.model
    assert not model.layer_types["experts"].balance_updates and not model.ends.balance_updates
    batch = jax.device_put(batch_of(case.rows, case=case), steps.batch_sharding)
    saved = jax.device_get(steps.to_saved(steps.compile_train()(steps.init(), batch)[0]))
    assert biases(saved).dtype == np.float32 and not biases(saved).any()
    narrow = replace(case.model, param_dtype="bfloat16")
    shapes = jax.eval_shape(
        replace(steps.param_layout.decoder, config=narrow).init, jax.random.key(0)
    )
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)}
    assert types == {"bfloat16", "float32"}


def test_expert_with_mean_load_keeps_its_bias() -> None:
    loads = jnp.asarray([[1.0, 2, 3], [0, 0, 0]])
    found = balance_step(jnp.zeros((2, 3)), loads, Follows("load", 0.5))
    np.testing.assert_array_equal(found, [[0.5, 0, -0.5], [0, 0, 0]])
