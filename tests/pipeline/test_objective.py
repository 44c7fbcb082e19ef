"""Per-token and per-segment objectives, and outputs read per sequence, against full logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.objective import (
    BatchArraySpec,
    CrossEntropy,
    LogProbSpec,
    Objective,
    Scores,
    reference_loss,
)
from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule
from maxpipe.step.step import BY_SOURCE
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of

COUNT = 3


@dataclass(frozen=True)
class Mixed(Objective):
    """Uses log-probabilities of several tokens at a temperature in addition to the target's."""

    report_names: ClassVar[tuple[str, ...]] = ("nats", "likely")
    temperature: float = 2.0

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        return LogProbSpec("targets"), LogProbSpec("wanted_ids", self.temperature)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        return {
            "wanted_ids": BatchArraySpec((COUNT,), jnp.int32),
            "wanted": BatchArraySpec((COUNT,), jnp.float32),
        }

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        target, several = scores
        nats = -target
        return nats - (inputs["wanted"] * several).sum(-1), (nats, jnp.exp(several).sum(-1))


@dataclass(frozen=True)
class Better(Objective):
    """Loss that makes the first of two segments more likely than the second."""

    segments_per_loss: ClassVar[int] = 2
    normaliser: ClassVar[str] = "pairs"
    report_names: ClassVar[tuple[str, ...]] = ("margin",)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        of_rows = partial(BatchArraySpec, dtype=jnp.float32, per_sequence=True)
        return {"pairs": of_rows((1,)), "reference": of_rows((2,))}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        margin = (scores[0] - inputs["reference"])[:, ::2] - scores[0][:, 1::2]
        return -jax.nn.log_sigmoid(margin / 3), (margin,)


def batch_for(case: Case) -> dict[str, np.ndarray]:
    """Return a batch with the arrays of both objectives; one sequence has no pair."""
    random, batch = np.random.default_rng(1), batch_of(case.rows, case=case)
    shape = (*batch["tokens"].shape, COUNT)
    pairs = np.ones((case.rows, 1), np.float32)
    pairs[case.rows // 2] = 0
    if case.sources:
        pairs[batch["source_ids"] < 0] = 0
    return batch | {
        "wanted_ids": random.integers(0, case.model.vocab_size, shape, np.int32),
        "wanted": random.random(shape, np.float32),
        "pairs": pairs,
        "reference": random.normal(size=(case.rows, 2)).astype(np.float32),
    }


def plain(steps: Any, objective: Objective, batch: Any) -> tuple[Any, list[float], Any]:
    """Return parameters, mean loss and reports, and gradients, summed in float64."""
    decoder = steps.param_layout.decoder

    def total(params: Any, row: Any) -> tuple[Array, Any]:
        count = row[objective.normaliser].sum()
        loss, reports = reference_loss(objective, decoder.run(params, row).logits, row)
        return loss * count, [each * count for each in (loss, *reports.values())]

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    params, found = jax.jit(decoder.init)(jax.random.key(0)), []
    for number in range(len(batch["tokens"])):
        (_, sums), gradient = run(params, {k: v[number : number + 1] for k, v in batch.items()})
        found.append((sums, gradient))
    added = jax.tree.map(lambda *each: sum(np.asarray(x, np.float64) for x in each), *found)
    means, gradients = jax.tree.map(lambda x: x / batch[objective.normaliser].sum(), added)
    return params, means, gradients


CASES = [
    Case(1, 1, 2, fsdp=2, data=2),
    Case(2, 2, 3, tensor=2, fsdp=2, gather="step", tied=True),
    Case(2, 1, 3, context=2, data=2, schedule="1f1b"),
    Case(2, 1, 3, loss_block=5, schedule="zb_h1", remat="names", context=2),
    Case(2, 1, 3, sources=3, loss_block=3, context=2, fsdp=2),
    Case(1, 1, 1, alike=8),
    *(Case(2, each.repeats or 2, 4, schedule=name) for name, each in SCHEDULES.items()),
]


@pytest.mark.parametrize(
    "objective", keeping([Mixed(), Better()], 1), ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("case", keeping(CASES, 3), ids=str)
def test_values_and_gradients_match_unpipelined_model(case: Case, objective: Objective) -> None:
    steps = steps_of(case, case.rows, objective=objective)
    parts, batch = steps.param_layout, batch_for(case)
    batch = {name: batch[name] for name in steps.abstract_batch()}
    shapes = {name: leaf.shape for name, leaf in steps.abstract_batch().items()}
    assert shapes == {name: each.shape for name, each in batch.items()}
    params, means, wanted = plain(steps, objective, batch)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(params: Any, batch: Any) -> Any:
        found = run(parts.stack(params), batch, None)
        return found.loss, found.reports, parts.unstack(found.gradients), found.by_source

    placed = jax.device_put(batch, steps.batch_sharding)
    with jax.set_mesh(parts.mesh):
        loss, reports, found, by_source = jax.jit(whole)(params, placed)
    reported = [reports[name] for name in objective.report_names]
    np.testing.assert_allclose([loss, *reported], means, rtol=TOLERANCE)
    if case.sources:
        np.testing.assert_allclose(by_source.nats.sum() / by_source.targets.sum(), loss, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(a - np.asarray(b)).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"

    stacked = jax.device_put(jax.jit(parts.stack)(params), steps.state_sharding.params)
    evaluated = steps.compile_eval()(stacked, placed)
    sums = [evaluated[name].sum() for name in ("loss", *objective.report_names)]
    count = evaluated["targets"].sum()
    assert count == batch[objective.normaliser].sum()
    np.testing.assert_allclose(np.asarray(sums) / count, means, rtol=TOLERANCE)


def test_train_step_reports_objective_metrics() -> None:
    case = Case(2, 1, 2, sources=3)
    steps = steps_of(case, case.rows, objective=Mixed())
    batch = {name: batch_for(case)[name] for name in steps.abstract_batch()}
    _, metrics = steps.compile_train()(steps.init(), jax.device_put(batch, steps.batch_sharding))
    nats, targets = (np.asarray(metrics[tag]).sum() for tag in BY_SOURCE)
    np.testing.assert_allclose(metrics["train/loss"], nats / targets, rtol=TOLERANCE)
    assert metrics["train/nats"] > 0 and 0 < metrics["train/likely"] < COUNT


def test_logits_are_computed_once_without_loss_blocks() -> None:
    counts = {}
    for blocks in (0, 5):
        for objective in (CrossEntropy(), Mixed(), Better()):
            case = Case(2, 1, 2, layers=2, loss_block=blocks)
            steps = steps_of(case, case.rows, objective=objective)
            run = jax.jit(steps.engine.value_and_grad(steps.train_schedule))
            with jax.set_mesh(steps.param_layout.mesh):
                lowered = run.lower(steps.abstract_state.params, steps.abstract_batch(), None)
            text = lowered.as_text()
            columns = case.model.vocab_size // 2
            products = re.findall(rf"dot_general.*-> tensor<\d+x\d+x{columns}xf32>", text)
            counts[type(objective).__name__, blocks] = len(products)
    once, again = (counts["CrossEntropy", blocks] for blocks in (0, 5))
    assert once == again > 0
    assert counts["Mixed", 0] == counts["Better", 0] == once == counts["Mixed", 5]
    assert counts["Better", 5] == 2 * once


@pytest.mark.layouts
@pytest.mark.parametrize("objective", [Mixed(), Better()], ids=lambda each: type(each).__name__)
def test_explicit_shard_mode_matches_auto(objective: Objective) -> None:
    found = []
    for mode in ("auto", "explicit"):
        case = Case(2, 1, 2, fsdp=2, tensor=2, loss_block=5, shard_mode=mode)
        steps = steps_of(case, case.rows, objective=objective)
        batch = {name: batch_for(case)[name] for name in steps.abstract_batch()}
        placed = jax.device_put(batch, steps.batch_sharding)
        metrics = steps.compile_train()(steps.init(), placed)[1]
        found.append([float(metrics[f"train/{n}"]) for n in ("loss", "grad_norm")])
    np.testing.assert_allclose(*found, rtol=TOLERANCE)


ROWS = [
    Case(1, 1, 2, fsdp=2, data=2),
    Case(2, 2, 3, context=2, loss_block=5),
    Case(4, 1, 2, tensor=2, layers=4),
    Case(2, 1, 3, sources=3, fsdp=2, context=2),
]


@pytest.mark.parametrize("case", keeping(ROWS, 3), ids=str)
def test_read_outputs_match_logits(case: Case) -> None:
    """Covers scores of tokens and segments, and the most likely tokens."""
    for objective in (Mixed(), Better()):
        steps = steps_of(case, case.rows, objective=objective)
        parts, engine = steps.param_layout, steps.engine
        batch = {name: batch_for(case)[name] for name in steps.abstract_batch()}
        params = jax.jit(parts.decoder.init)(jax.random.key(0))
        logits = np.asarray(jax.jit(parts.decoder.run)(params, batch).logits, np.float64)
        schedule = make_forward_schedule(steps.train_schedule.ring, case.microbatches)
        placed = jax.device_put(batch, steps.batch_sharding)
        readers: list[Any] = [LossHead.scores]
        if not objective.segments_per_loss:
            readers.append(partial(LossHead.top_log_probs, count=20, temperature=0.5))
        with jax.set_mesh(parts.mesh):
            stacked = jax.jit(parts.stack)(params)
            found = [
                jax.jit(engine.read_outputs(schedule, each))(stacked, placed, None)
                for each in readers
            ]

        def scores(temperature: float, logits: np.ndarray = logits) -> np.ndarray:
            scaled = logits / temperature
            return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

        picked = np.take_along_axis(scores(1.0), batch["targets"][..., None], -1)[..., 0]
        if objective.segments_per_loss:
            weighted = picked * batch["loss_mask"]
            each = [(weighted * (batch["segment_ids"] == n)).sum(-1) for n in (1, 2)]
            np.testing.assert_allclose(found[0][0], np.stack(each, -1), rtol=TOLERANCE)
            continue
        several = np.take_along_axis(scores(2.0), batch["wanted_ids"], -1)
        np.testing.assert_allclose(found[0][0], picked, rtol=TOLERANCE)
        np.testing.assert_allclose(found[0][1], several, rtol=TOLERANCE)
        largest, ids = found[1]
        wanted = -np.sort(-scores(0.5), axis=-1)[..., :20]
        np.testing.assert_allclose(largest, wanted, rtol=TOLERANCE, atol=1e-5)
        again = np.take_along_axis(scores(0.5), np.asarray(ids), -1)
        np.testing.assert_allclose(again, largest, rtol=TOLERANCE, atol=1e-5)
        found_ids = np.sort(np.asarray(ids), axis=-1)
        assert (np.diff(found_ids) >= 1).all() and found_ids.max() < case.model.vocab_size
