"""Image inputs in the engine: loss and gradients equal those of the unpipelined model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.schedule.catalog import SCHEDULES
from tests.cases import Case, batch_of, keeping, steps_of
from tests.pipeline.test_engine import check_gradients

TOWER = Gemma3Config(
    sliding_window=5,
    sliding_window_pattern=2,
    num_vision_layers=2,
    d_vision=16,
    num_vision_heads=2,
    d_vision_mlp=12,
    image_size=9,
    patch_size=2,
    tokens_per_image=4,
    image_token_id=29,
)
WITH_IMAGES = Case(own=TOWER, images=2, length=17, tied=True, epsilon=1e-3)
FROZEN_TOWER = ("vision.patches.*", "vision.positions", "vision.layers.*", "vision.norm.*")


def case_of(**changes: Any) -> Case:
    return replace(WITH_IMAGES, **changes)


CASES = [
    case_of(),
    case_of(stages=2, repeats=2, microbatches=3, fsdp=2),
    case_of(stages=2, microbatches=4, tensor=2, data=2, frozen=("vision.*",)),
    case_of(stages=2, microbatches=2, outside=1, fsdp=2, schedule="1f1b"),
    case_of(stages=3, microbatches=4, outside=2, schedule="1f1b"),
    case_of(stages=2, microbatches=2, fsdp=2, frozen=FROZEN_TOWER, remat="chunk"),
    case_of(stages=2, microbatches=2, fsdp=2, frozen=("embedding",), idle="compute"),
    case_of(stages=2, microbatches=2, fsdp=2, gather="window"),
    case_of(stages=2, microbatches=2, fsdp=2, expert=2, remat="none"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_autodiff(case: Case) -> None:
    check_gradients(case)


@pytest.mark.parametrize(
    "schedule", keeping(sorted(SCHEDULES), *(sorted(SCHEDULES).index(n) for n in ("zb_h1", "zb_v")))
)
def test_every_schedule(schedule: str) -> None:
    repeats = 2 if schedule in ("interleaved", "zb_v", "v_half", "v_min", "dualpipe_v") else 1
    check_gradients(case_of(stages=2, repeats=repeats, microbatches=4, schedule=schedule))


def test_explicit_axes_have_the_same_loss() -> None:
    losses = []
    for mode in ("auto", "explicit"):
        case = case_of(stages=2, microbatches=2, fsdp=2, shard_mode=mode)
        steps = steps_of(case, case.rows)
        with jax.set_mesh(steps.param_layout.mesh):
            state = steps.init()
            batch = jax.device_put(batch_of(case.rows, case=case), steps.batch_sharding)
            _, metrics = steps.compile_train()(state, batch)
        losses.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_a_batch_without_images_has_the_loss_of_the_text_model() -> None:
    with_tower = case_of(stages=2, microbatches=2, fsdp=2)
    batch = batch_of(with_tower.rows, case=replace(with_tower, images=0))
    empty = np.zeros((with_tower.rows, 2, 9, 9, 3), np.uint8)
    losses = []
    for case in (with_tower, replace(with_tower, images=0, frozen=("vision.*",))):
        steps = steps_of(case, case.rows)
        arrays = {"images": empty, "image_tokens_left": np.zeros_like(batch["tokens"])}
        given = {**batch, **arrays} if case.images else batch
        with jax.set_mesh(steps.param_layout.mesh):
            params = steps.param_layout.init(jax.random.key(0))
            run = jax.jit(
                lambda params, batch, steps=steps: steps.value_and_grad(params, batch, None)
            )
            found = run(params, jax.device_put(given, steps.batch_sharding))
        losses.append((np.asarray(found.loss), np.asarray(found.gradients["embedding"])))
    assert losses[0][0] == losses[1][0]
    np.testing.assert_array_equal(losses[0][1], losses[1][1])
