"""The distillation objective in the engine matches the unpipelined model on several layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from maxpipe.objectives import TEACHER_IDS, TEACHER_LOGPROBS, Distill
from maxpipe.pipeline.loss_head import LossHead
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.pipeline.test_objective import plain

FORWARD = Distill("forward", 2.0, 5, 0.7)
REVERSE = Distill("reverse", 0.8, 30, 0.4)
"""Uses the whole vocabulary."""
CASES = [
    (Case(1, 1, 2, fsdp=2, data=2, layers=3), FORWARD),
    (Case(2, 2, 3, tensor=2, fsdp=2, gather="step", tied=True), REVERSE),
    (Case(2, 1, 3, loss_block=5, schedule="zb_h1", remat="names", context=2, layers=3), FORWARD),
    (Case(1, 1, 2, alike=8, layers=2), replace(FORWARD, top_k=8)),
]


def batch_with_teacher(case: Case, objective: Distill) -> dict[str, np.ndarray]:
    """Return a batch with the top-k logits of a random teacher."""
    batch, draw = batch_of(case.rows, case=case), np.random.default_rng(3)
    shape = (*batch["tokens"].shape, case.model.vocab_size)
    scores = log_softmax(2 * draw.standard_normal(shape) / objective.temperature, axis=-1)
    ids = np.argsort(-scores, axis=-1)[..., : objective.top_k]
    logprobs = np.take_along_axis(scores, ids, axis=-1)
    answer = {TEACHER_IDS: ids.astype(np.int32), TEACHER_LOGPROBS: logprobs.astype(np.float32)}
    return batch | answer


@pytest.mark.parametrize(("case", "objective"), keeping(CASES, 2), ids=str)
def test_values_and_gradients_match_unpipelined_model(case: Case, objective: Distill) -> None:
    steps = steps_of(case, case.rows, objective=objective)
    parts, batch = steps.param_layout, batch_with_teacher(case, objective)
    batch = {name: batch[name] for name in steps.abstract_batch()}
    params, means, wanted = plain(steps, objective, batch)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(params: Any, batch: Any) -> Any:
        found = run(parts.stack(params), batch, None)
        reports = [found.reports[name] for name in objective.report_names]
        return [found.loss, *reports], parts.unstack(found.gradients)

    with jax.set_mesh(parts.mesh):
        values, found = jax.jit(whole)(params, jax.device_put(batch, steps.batch_sharding))
    np.testing.assert_allclose(values, means, rtol=TOLERANCE)
    assert found.keys() == wanted.keys()
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(a - np.asarray(b)).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.layouts
def test_teacher_logits_are_equal_on_every_layout() -> None:
    """Equal logits are ordered by token ID on every layout."""
    found = []
    ask = partial(LossHead.top_log_probs, count=7, temperature=1.5)
    for case in (
        Case(1, 1, 2),
        Case(2, 1, 2, tensor=2, data=1, loss_block=3),
        Case(2, 1, 1, fsdp=2, context=2),
    ):
        steps = steps_of(case, 4)
        parts, batch = steps.param_layout, batch_of(4)
        params = jax.jit(parts.decoder.init)(jax.random.key(0))
        head = np.array(params["head"])
        head[:, 3::4] = head[:, :1]  # equal columns on all stages
        params["head"] = jax.numpy.asarray(head)
        with jax.set_mesh(parts.mesh):
            stacked = jax.jit(parts.stack, out_shardings=steps.state_sharding.params)(params)
        placed = jax.device_put(batch, steps.batch_sharding)
        for everywhere in (False, True):
            run = steps.compile_reader(ask, 4, everywhere=everywhere)
            found.append(jax.tree.map(np.asarray, run(stacked, placed)))
    for logprobs, ids in found[1:]:
        np.testing.assert_allclose(logprobs, found[0][0], rtol=TOLERANCE, atol=TOLERANCE)
        assert (ids == found[0][1]).mean() > 0.95  # the rest differ by rounding of logits
