"""Pipelined steps against the plain loop: value, every gradient leaf, and loss curves."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.schema import MeshConfig, ModelConfig, OptimConfig, PipelineConfig, TrainConfig
from maxpipe.mesh import build_mesh
from maxpipe.model.decoder import Decoder
from maxpipe.sharding import AxisRules
from maxpipe.train.step import Steps, partition

TOLERANCE = 1e-5  # float32; of a gradient leaf's largest entry, relative for losses
MODEL = ModelConfig(
    num_layers=5,
    d_model=16,
    num_heads=8,
    num_kv_heads=4,
    head_size=4,
    d_mlp=32,
    vocab_size=30,
    compute_dtype="float32",
)
TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One way to run the model. `group` 0 is the schedule's own."""

    stages: int = 1
    repeats: int = 1
    microbatches: int = 1
    schedule: str = "interleaved"
    group: int = 0
    fsdp: int = 1
    data: int = 1
    tensor: int = 1
    gather: str = "iteration"
    remat: str = "full"
    idle: str = "skip"
    layers: int = 5
    dropout: float = 0.0
    tied: bool = False

    def __str__(self) -> str:
        shown = [f"{self.schedule}-P{self.stages}R{self.repeats}M{self.microbatches}"]
        named = ("stages", "repeats", "microbatches", "schedule")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in named and value != field.default:
                shown.append(f"{field.name}{value}")
        return "-".join(shown)


def steps_of(case: Case, rows: int, total_steps: int = 10) -> Steps:
    config = replace(MODEL, num_layers=case.layers, dropout=case.dropout, tied_embeddings=case.tied)
    size = case.stages * case.fsdp * case.data * case.tensor
    mesh = MeshConfig(
        ici_stage=case.stages, ici_fsdp=case.fsdp, ici_data=case.data, ici_tensor=case.tensor
    )
    return partition(
        build_mesh(mesh, jax.devices()[:size]),
        model=config,
        pipeline=PipelineConfig(
            schedule=case.schedule,  # type: ignore[arg-type]
            repeats=case.repeats,
            microbatches=case.microbatches,
            group=case.group,
            weight_gather=case.gather,  # type: ignore[arg-type]
            remat=case.remat,  # type: ignore[arg-type]
            idle=case.idle,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=2),
        train=TrainConfig(batch_size=rows, sequence_length=TOKENS),
        total_steps=total_steps,
        rules=AxisRules.from_config(mesh),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )


def batch_of(rows: int, step: int = 0) -> dict[str, np.ndarray]:
    """Random tokens; every row holds two documents that meet at another place."""
    random = np.random.default_rng(step)
    ids = random.integers(0, MODEL.vocab_size, (rows, TOKENS + 1), np.int32)
    cut = random.integers(1, TOKENS, (rows, 1))
    place = np.arange(TOKENS, dtype=np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": (1 + (place >= cut)).astype(np.int32),
        "positions": np.where(place >= cut, place - cut, place).astype(np.int32),
        "loss_mask": (place != cut - 1).astype(np.float32),
        "example_ids": np.arange(rows, dtype=np.int32),
    }


@functools.cache
def _plain(decoder: Decoder, with_key: bool) -> tuple[Any, Any]:
    """Initial parameters, and the plain loop's summed loss of one row with its gradients."""

    def total(params: Any, row: Any, key: jax.Array | None) -> jax.Array:
        return decoder.loss(params, row, key) * row["loss_mask"].sum()

    return jax.jit(decoder.init)(jax.random.key(0)), jax.jit(jax.value_and_grad(total))


def plain_gradients(decoder: Decoder, batch: Any, key: jax.Array | None) -> tuple[float, Any, Any]:
    """Parameters, mean loss and its gradients by the plain loop, row by row.

    Rows are added up in float64: one float32 pass over many rows is off by 1e-5 itself.
    """
    params, run = _plain(decoder, key is not None)
    loss, total = 0.0, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float64), params)
    for row in range(len(batch["tokens"])):
        value, gradient = run(params, {k: v[row : row + 1] for k, v in batch.items()}, key)
        loss += float(value)
        total = jax.tree.map(lambda a, b: a + np.asarray(b, np.float64), total, gradient)
    count = batch["loss_mask"].sum()
    return params, loss / count, jax.tree.map(lambda leaf: leaf / count, total)


def check_gradients(case: Case) -> None:
    """The engine's loss and gradients equal automatic differentiation of the plain loop."""
    rows = 2 * case.microbatches * case.fsdp * case.data
    steps = steps_of(case, rows)
    parts = steps.partition
    key = jax.random.key(7) if case.dropout else None
    batch: Any = batch_of(rows)
    plain, wanted_loss, wanted = plain_gradients(parts.decoder, batch, key)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(plain: Any, batch: Any) -> Any:
        loss, gradients = run(parts.stack(plain), batch, key)
        return loss, parts.unstack(gradients)

    with jax.set_mesh(parts.mesh):
        loss, found = jax.jit(whole)(plain, jax.device_put(batch, steps.batch_sharding))
    np.testing.assert_allclose(loss, wanted_loss, rtol=TOLERANCE)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(a - np.asarray(b)).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


SHAPES = [
    Case(1, 1, 1),
    Case(1, 1, 4, fsdp=2, data=2, gather="step"),
    Case(1, 2, 3, schedule="circular", tensor=2),
    Case(1, 3, 2, dropout=0.3, fsdp=2),
    Case(2, 1, 2, schedule="1f1b", fsdp=2, dropout=0.3),
    Case(2, 1, 5, schedule="gpipe", data=2, gather="step"),
    Case(2, 2, 5, fsdp=2, tensor=2, tied=True),
    Case(2, 2, 4, idle="compute", fsdp=2, data=2, gather="step", dropout=0.3),
    Case(2, 2, 5, idle="compute", remat="chunk", fsdp=2, layers=7),
    Case(2, 3, 3, schedule="breadth_first", layers=7, tensor=2, gather="step"),
    Case(3, 1, 7, schedule="1f1b", data=2),
    Case(3, 2, 6, schedule="circular", fsdp=2, layers=8, gather="step"),
    Case(3, 3, 4, layers=9, fsdp=2),
    Case(4, 1, 4, schedule="gpipe", tensor=2, dropout=0.3),
    Case(4, 2, 9, fsdp=2, layers=8),
    Case(4, 2, 8, fsdp=2, layers=17, remat="chunk", dropout=0.3),
    Case(4, 2, 8, fsdp=2, layers=11, gather="step", idle="compute"),
    Case(4, 3, 5, schedule="breadth_first", layers=12, data=2, tied=True),
    Case(4, 1, 2, schedule="1f1b", fsdp=2),
    Case(4, 2, 3, layers=8, fsdp=2),
    Case(8, 1, 8, schedule="1f1b", layers=8),
    Case(8, 2, 17, layers=16, gather="step"),
    Case(8, 1, 9, schedule="circular", layers=10, dropout=0.3),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_gradients_equal_the_plain_loop(case: Case) -> None:
    check_gradients(case)


@pytest.mark.parametrize("group", [2, 3, 4, 5])
def test_every_group_size(group: int) -> None:
    check_gradients(Case(2, 2, 5, group=group, fsdp=2))


def all_combinations() -> list[Case]:
    """Stages x repeats x microbatches x schedules x gathers; the other choices take turns."""
    cases = []
    for number, (stages, repeats, more, schedule, gather) in enumerate(
        itertools.product(
            (1, 2, 3, 4),
            (1, 2, 3),
            (0, 1, 2),
            ("gpipe", "circular", "1f1b", "interleaved", "breadth_first"),
            ("iteration", "step"),
        )
    ):
        if schedule == "gpipe" and repeats > 1:
            continue
        sharded = ("fsdp", "data", "tensor")[number % 3]
        cases.append(
            Case(
                stages,
                repeats,
                (stages, 2 * stages, 2 * stages + 1)[more],
                schedule=schedule,
                gather=gather,
                idle=("skip", "compute")[number % 2],
                remat=("full", "full", "chunk")[number % 3],
                dropout=(0.0, 0.3)[number % 5 == 0],
                layers=stages * repeats + number % 4,
                tied=number % 7 == 0,
                **{sharded: 2},
            )
        )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", all_combinations()[::9], ids=str)
def test_sample_of_all_combinations(case: Case) -> None:
    check_gradients(case)


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
    # What may grow is the table and the integer batch itself.
    assert many - few < 32 * 2 * TOKENS * 4 * 8


@pytest.mark.parametrize("gather", ["iteration", "step"])
def test_weights_are_gathered_when_the_mode_says(gather: str) -> None:
    """`step` has no gather and no reduction of weights inside the loop over ticks."""
    steps = steps_of(Case(4, 2, 8, fsdp=2, layers=8, gather=gather), rows=16)
    text = steps.compile_train().as_text()
    loops = [part for part in text.split("\n\n") if "collective-permute" in part]
    assert loops, "no ring message in the program"
    inside = [line for line in text.splitlines() if " all-gather(" in line and "/while/" in line]
    matrices = 7
    assert len(inside) == (0 if gather == "step" else 2 * matrices)
