"""Train steps: loss curves across layouts, memory, and collectives of weights."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.parallel.collectives import mark_varying
from maxpipe.pipeline import program, prologue, slots
from tests.cases import (
    TOKENS,
    TOLERANCE,
    Case,
    batch_of,
    buffer_bytes,
    keeping,
    steps_of,
    with_rare,
)
from tests.times import shared

ROWS = 24


def loss_curve(case: Case, num_steps: int = 10, rows: int = ROWS) -> list[float]:
    steps = steps_of(case, rows, num_steps)
    run, state, losses = steps.compile_train(), steps.init(), []
    for step in range(num_steps):
        state, metrics = run(
            state, jax.device_put(batch_of(rows, step, case), steps.batch_sharding)
        )
        losses.append(float(metrics["train/loss"]))
    return losses


@pytest.fixture(scope="module")
def unsharded_curve() -> list[float]:
    return loss_curve(Case(layers=8, dropout=0.1))


CURVES = [
    Case(1, 1, 24),
    Case(1, 2, 3, data=4, tensor=2),
    Case(2, 2, 2, fsdp=4, gather="step"),
    Case(2, 4, 6, schedule="circular", tensor=4),
    Case(2, 1, 12, schedule="1f1b", fsdp=2, tensor=2),
    Case(2, 2, 12, schedule="interleaved", fsdp=2, tensor=2),
    Case(4, 2, 4, schedule="breadth_first", data=2),
    Case(4, 2, 1),
    Case(8, 1, 8, schedule="1f1b"),
    Case(4, 2, 6, schedule="circular", delayed=True, fsdp=2),
    Case(4, 1, 12, schedule="zb_h1", remat="none"),
    Case(4, 2, 12, schedule="zb_v", fsdp=2, remat="names"),
    Case(2, 2, 8, schedule="v_half", data=3),
    Case(4, 2, 4, schedule="v_min", gather="window", remat="none"),
    Case(4, 2, 24, schedule="dualpipe_v", remat="chunk"),
    Case(2, 4, 6, fsdp=2, gather="window", remat="names"),
    Case(2, 2, 4, cut=(3, 1, 2, 2), tensor=2),
    Case(4, 1, 6, schedule="zb_h1", outside=4, gather="step", fsdp=2),
    Case(2, 3, 3, outside=2, cut=(1,) * 6, gather="window", tensor=2),
]
RARE_CURVES = [
    Case(2, 1, 3, schedule="gpipe", data=2, fsdp=2),
    Case(4, 1, 12, fsdp=2, gather="step", idle="compute"),
    Case(8, 1, 24, schedule="circular"),
    Case(2, 1, 6, schedule="zb_h2", tensor=2, fsdp=2, remat="names"),
    Case(3, 2, 4, outside=2, fsdp=2, remat="names"),
]


@pytest.mark.parametrize("case", with_rare(keeping(CURVES, 12), RARE_CURVES), ids=str)
@pytest.mark.fault("D5")
def test_loss_curve_matches_across_layouts(case: Case, unsharded_curve: list[float]) -> None:
    case = replace(case, layers=8, dropout=0.1)
    np.testing.assert_allclose(loss_curve(case), unsharded_curve, rtol=TOLERANCE)
    assert unsharded_curve[-1] < unsharded_curve[0]


IN_BFLOAT16 = [
    Case(2, 2, 3, fsdp=2, tensor=2, tied=True, gather="step", remat="names"),
    Case(2, 2, 3, schedule="zb_v", outside=1, fsdp=2, data=2),
    Case(2, 3, 4, outside=2, gather="window", fsdp=2, remat="chunk"),
]


@pytest.mark.parametrize("case", with_rare(IN_BFLOAT16[:1], IN_BFLOAT16[1:]), ids=str)
@pytest.mark.layouts
def test_bfloat16_losses_are_close_to_float32(case: Case) -> None:
    """bfloat16 has an 8-bit significand: losses agree to about 1%."""
    case = replace(case, layers=8)
    wide, narrow = (loss_curve(replace(case, dtype=d), 3) for d in ("float32", "bfloat16"))
    np.testing.assert_allclose(narrow, wide, rtol=2e-2)


POISONED = [
    Case(4, 2, 5, layers=10, fsdp=2, idle="compute"),
    Case(4, 2, 5, layers=11, fsdp=2, remat="names"),
    Case(3, 3, 4, layers=11, fsdp=2, gather="window", remat="chunk", idle="compute"),
    Case(4, 1, 5, schedule="zb_h1", layers=6, fsdp=2, idle="compute", remat="none"),
    Case(4, 2, 5, schedule="zb_v", layers=10, fsdp=2, idle="compute", tied=True),
    Case(2, 2, 4, schedule="circular", delayed=True, layers=6, fsdp=2, idle="compute"),
    Case(4, 1, 5, outside=2, layers=7, fsdp=2, remat="names"),
    Case(4, 1, 5, schedule="zb_h1", outside=1, layers=6, fsdp=2, remat="chunk"),
]


@pytest.mark.parametrize("case", with_rare(keeping(POISONED[::2], 2), POISONED[1::2]), ids=str)
def test_idle_slots_and_padding_do_not_affect_gradients(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaNs in padding and in empty buffers leave the gradients unchanged."""
    steps = steps_of(case, rows=20 if case.microbatches == 5 else 16)
    parts = steps.param_layout
    batch = jax.device_put(batch_of(steps.shape[0]), steps.batch_sharding)

    def gradients(params: Any) -> Any:
        run = steps.engine.value_and_grad(steps.train_schedule)
        with jax.set_mesh(parts.mesh):
            return jax.jit(run)(params, batch, None)

    params = steps.init().params
    used = jnp.asarray(parts.layout.layer_at >= 0)
    assert not used.all()
    poisoned = dict(params)
    poisoned["layers"] = jax.tree.map(
        lambda leaf: jnp.where(jnp.expand_dims(used, tuple(range(3, leaf.ndim))), leaf, jnp.nan),
        params["layers"],
    )
    wanted = gradients(params)
    for module in (slots, program, prologue):
        monkeypatch.setattr(
            module, "empty_slots", lambda *like, real=slots.empty_slots: nan_of(real(*like))
        )
    found = gradients(poisoned)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


def nan_of(empty: jax.Array) -> jax.Array:
    full = jnp.full_like(empty, jnp.nan if jnp.issubdtype(empty.dtype, jnp.inexact) else 7)
    return mark_varying(full)


@shared
def compiled(case: Case, rows: int) -> Any:
    """Return the compiled train step, shared by several tests."""
    return steps_of(case, rows).compile_train()


@pytest.mark.parametrize("outside", keeping([0, 4], 0))
def test_program_size_and_memory_are_independent_of_microbatches(outside: int) -> None:
    few, many = (
        compiled(Case(4, 2, count, fsdp=2, layers=8 + outside, outside=outside), rows=2 * count)
        for count in (8, 32)
    )
    assert few.as_text().count(" = ") == many.as_text().count(" = ")
    few, many = (each.memory_analysis().temp_size_in_bytes for each in (few, many))
    # Only the batch may grow: five arrays of 4-byte entries. Two more saved activations per
    # microbatch, as in a forward-then-backward schedule, would take far more.
    assert many - few < (32 - 8) * 2 * TOKENS * 4 * 5


MATRICES = 7
"""Number of weights of a layer that are sharded over fsdp."""


def collectives(text: str, kind: str) -> tuple[int, int]:
    """Return the numbers of weight collectives inside and outside the loop over ticks.

    The embedding is never gathered; collectives of its activations are in a separate scope.
    """
    lines = [line for line in text.splitlines() if f" {kind}(" in line and "/embed" not in line]
    inside = [line for line in lines if "/while/" in line]
    return len(inside), len(lines) - len(inside)


@pytest.mark.parametrize("gather", ["iteration", "step"])
@pytest.mark.parametrize("schedule", keeping(["interleaved", "zb_v"], 1))
def test_weight_gather_mode_determines_collectives(gather: str, schedule: str) -> None:
    """In mode `step`, no weights are gathered or reduced inside the loop over ticks."""
    case = Case(4, 2, 8, schedule, fsdp=2, layers=8, gather=gather)
    text = compiled(case, rows=16).as_text()
    each = 0 if gather == "step" else 1
    gathers, _ = collectives(text, "all-gather")
    reductions, _ = collectives(text, "reduce-scatter")
    # A layer's weights are gathered in its forward and again in its backward, the loss head's once;
    # weight gradients need none.
    assert (gathers, reductions) == (each * (2 * MATRICES + 1), each * (MATRICES + 1))


@pytest.mark.parametrize(
    ("gather", "mode"),
    [pytest.param("iteration", "iteration", marks=pytest.mark.matrix), ("window", "step")],
)
@pytest.mark.layouts
def test_prologue_layers_are_gathered_once_per_step_or_iteration(gather: str, mode: str) -> None:
    """In mode `window`, prologue layers are gathered once per step."""
    case = Case(2, 3, 4, outside=2, fsdp=2, layers=8, gather=gather)
    cases = (case, replace(case, outside=0))
    with_outside, without = (compiled(each, rows=8).as_text() for each in cases)
    for kind, passes in (("all-gather", 2), ("reduce-scatter", 1)):
        inside, others = np.subtract(collectives(with_outside, kind), collectives(without, kind))
        expected = (passes * MATRICES, 0) if mode == "iteration" else (0, MATRICES)
        assert (inside, others) == expected


@pytest.mark.parametrize("stages, repeats, group", keeping([(2, 3, 8), (4, 4, 4), (4, 3, 8)], 0))
def test_weight_window_gathers_at_most_twice_per_group(
    stages: int, repeats: int, group: int
) -> None:
    """Per step and weight: at most 2 * M / N gathers and M / N reductions, none inside a tick."""
    case = Case(stages, repeats, 8, group=group, fsdp=2, layers=stages * repeats, gather="window")
    steps = steps_of(case, rows=16)
    visits = steps.train_schedule.weight_window
    # The last forward chunk of a group is its first backward chunk, so they share one gather.
    assert len(visits.gather_tick) <= (2 * repeats - 1) * 8 // group
    assert len(visits.reduce_tick) == repeats * 8 // group
    text = steps.compile_train().as_text()
    # Each weight is gathered once in the loop over windows, and reduced once in the loop over due
    # reductions and once in the copy of that loop after the last tick.
    names = [
        re.search(r'op_name="([^"]*)"', line)
        for line in text.splitlines()
        if " all-gather(" in line and "/embed" not in line
    ]
    inside = [name[1] for name in names if name and "/while/" in name[1]]
    assert len(inside) == MATRICES and all("/gather/" in name for name in inside), inside
    assert all(name.count("while/body") == 1 for name in inside)
    reductions = [
        line for line in text.splitlines() if " reduce-scatter(" in line and "/while/" in line
    ]
    assert len(reductions) == 2 * MATRICES and all("/reduce/" in line for line in reductions)


@pytest.mark.parametrize(
    ("remat", "outside", "schedule"),
    keeping(
        [
            ("full", 0, "interleaved"),
            ("names", 3, "interleaved"),
            ("names", 0, "zb_v"),
            ("none", 0, "zb_v"),
        ],
        3,
    ),
)
def test_buffer_sizes_match_prediction(remat: str, outside: int, schedule: str) -> None:
    """Compare the predicted buffers of the loop over ticks with the compiled program.

    The compiled loop also carries weights and batch, so the test compares two schedules with
    different numbers of saved activations.
    """

    def sizes(microbatches: int, group: int) -> tuple[int, int]:
        case = Case(4, 2, microbatches, schedule, group, fsdp=2, remat=remat)
        case = replace(case, layers=8 + outside, outside=outside)
        # The microbatch size is constant; the batch itself is not counted.
        steps = steps_of(case, rows=16 * microbatches)
        predicted = buffer_bytes(steps)
        assert (predicted["outside"] > 0) == (outside > 0)
        assert predicted["stash"] > 0 and (predicted["deferred"] > 0) == steps.train_schedule.mixed
        run = jax.jit(steps.engine.value_and_grad(steps.train_schedule))
        with jax.set_mesh(steps.param_layout.mesh):
            lowered = run.lower(steps.abstract_state.params, steps.abstract_batch(), None)
        return sum(predicted.values()), carried_bytes(lowered.compile().as_text() or "")

    few, many = SIZES[schedule]
    (predicted, carried), (more_predicted, more_carried) = sizes(*few), sizes(*many)
    assert more_predicted > predicted
    assert more_carried - carried == pytest.approx(more_predicted - predicted, rel=0.05)


SIZES = {"interleaved": ((8, 4), (8, 8)), "zb_v": ((2, 0), (4, 0))}
"""Microbatches and group size of two schedules that save different numbers of activations."""


def carried_bytes(text: str) -> int:
    """Return the bytes of the arrays carried by the loop over ticks in compiled HLO."""
    loops = re.findall(r"= \((.*?)\) while\(", text)
    sizes = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2}
    totals = []
    for carried in loops:
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", carried)
        totals.append(
            sum(
                sizes[kind] * math.prod(map(int, filter(None, dims.split(","))))
                for kind, dims in shapes
            )
        )
    return max(totals)
