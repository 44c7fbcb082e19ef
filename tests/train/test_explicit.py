"""Explicit sharding gives the same results as automatic sharding, across layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from maxpipe.models.moe import MoeConfig
from maxpipe.step.step import Steps
from tests.cases import Case, batch_of, steps_of, with_rare

ROWS = 24
DENSE = Case(2, 1, 3, layers=3, length=24, width=48)
EXPERTS = MoeConfig(num_experts=4, num_dense_layers=1, d_expert=12, expert_bias=True)
CASES = [
    replace(DENSE, fsdp=2, cut=(1, 2)),
    pytest.param(
        replace(DENSE, expert=2, tensor=2, own=EXPERTS, outside=1), marks=pytest.mark.layouts
    ),
]
RARE_CASES = [
    replace(DENSE, fsdp=2, tensor=2, gather="step", dropout=0.1),
    replace(DENSE, context=2, fsdp=2, tied=True, outside=1),
    replace(DENSE, fsdp=2, data=2),
]


def run(case: Case, num_steps: int = 4) -> tuple[Steps, Any, list[dict[str, float]]]:
    """Train; return the steps, the final state and the metrics of each step."""
    steps = steps_of(case, ROWS, num_steps)
    step, state, found = steps.compile_train(), steps.init(), []
    for number in range(num_steps):
        batch = jax.device_put(batch_of(ROWS, number, case), steps.batch_sharding)
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    return steps, state, found


@pytest.mark.parametrize("case", with_rare(CASES, RARE_CASES), ids=str)
def test_explicit_sharding_matches_auto_sharding(case: Case) -> None:
    auto, auto_state, wanted = run(case)
    steps, state, found = run(replace(case, shard_mode="explicit"))
    for mine, other in zip(found, wanted, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-6, err_msg=name)
    mesh = steps.param_layout.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis, size in mesh.shape.items():
        explicit = size > 1 and axis != "tensor"
        assert (types[axis] == AxisType.Explicit) == explicit, axis
    # Save in one mode, restore in the other, and evaluate in both.
    saved, other = steps.to_saved(state), auto.to_saved(auto_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), saved, other)
    for there, tree in ((auto, saved), (steps, other)):
        placed = jax.device_put(jax.device_get(tree), there.saved_sharding)
        again = there.to_saved(there.from_saved(placed, jax.device_get(state.guard)))
        jax.tree.map(np.testing.assert_array_equal, again, tree)
    batch = batch_of(ROWS, 99, case)
    sums = [
        each.compile_eval()(given.params, jax.device_put(batch, each.batch_sharding))
        for each, given in ((auto, auto_state), (steps, state))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *sums)
    assert not steps.replica_check.differences(state)
