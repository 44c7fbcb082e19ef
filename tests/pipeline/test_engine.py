"""The engine's loss and every gradient leaf against autodiff of the unpipelined model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint.digests import map_named_leaves
from maxpipe.models.adapters import LENGTH, UP
from maxpipe.nn.decoder import Decoder, cross_entropy
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.weights import replace_subtree, select_trainable
from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.schedule.orders import read_orders
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.conftest import GOLDEN
from tests.times import shared

TOWER_KEY_BIAS = "vision.layers.attention.key_bias"


@shared
def _plain(decoder: Decoder, with_key: bool) -> tuple[Any, Any]:
    """Return initial parameters, and a function for one sequence's summed objective and gradients.

    The function runs the unpipelined model. In addition to the objective, it returns the cross
    entropy, the layer losses and the layer statistics.
    """

    def total(mine: Any, row: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
        count, found = row["loss_mask"].sum(), decoder.run(replace_subtree(params, mine), row, key)
        reported = cross_entropy(found.logits, row) * count, found.losses, found.statistics
        return decoder.objective_from_output(found, row) * count, reported

    params = jax.jit(decoder.init)(jax.random.key(0))
    if "transform" in params.get("ahead", {}):  # some gradients are 0 at its initial 0
        shape = params["ahead"]["transform"].shape
        drawn = jax.random.normal(jax.random.key(1), shape) * shape[-1] ** -0.5
        params |= {"ahead": {"transform": drawn}}
    params = with_changes(params)
    gradient = jax.jit(jax.value_and_grad(total, has_aux=True))
    return params, partial(gradient, select_trainable(params, decoder.trainable()))


def with_changes(params: Any) -> Any:
    """Perturb the adapters, some of whose gradients are 0 at initialization."""

    def changed(name: str, leaf: Any) -> Any:
        if not name.endswith((UP, LENGTH)):
            return leaf
        drawn = jax.random.normal(jax.random.key(len(name)), leaf.shape)
        return leaf * (1 + 0.1 * drawn) + 0.1 * drawn * name.endswith(UP)

    return map_named_leaves(changed, params)


def plain_gradients(
    decoder: Decoder, batch: Any, key: jax.Array | None, together: Any = None
) -> tuple[Any, Any, Any]:
    """Return parameters, results and gradients of the unpipelined model.

    `together` lists the groups of sequence indices that run together; by default each sequence runs
    alone. The results are the cross entropy and all other losses per target token, and the layer
    statistics. Sequences are summed in float64, because one float32 pass over many sequences has an
    error of 1e-5.
    """
    params, run = _plain(decoder, key is not None)
    rows = []
    for numbers in np.arange(len(batch["tokens"]))[:, None] if together is None else together:
        (_, reported), gradient = run({k: v[numbers] for k, v in batch.items()}, key)
        rows.append((reported, gradient))
    (loss, losses, statistics), gradients = jax.tree.map(
        lambda *leaves: sum(np.asarray(leaf, np.float64) for leaf in leaves), *rows
    )
    mean = lambda tree: jax.tree.map(lambda leaf: leaf / batch["loss_mask"].sum(), tree)  # noqa: E731
    return params, (mean(loss), mean(losses), statistics), mean(gradients)


def check_gradients(case: Case, together: Any = None, **model: Any) -> None:
    """Compare the engine's loss and gradients with autodiff of the unpipelined model.

    Also compare the losses and statistics of its layers. `together` is passed to `plain_gradients`;
    `model` overrides fields of the unpipelined model's config.
    """
    steps = steps_of(case, case.rows)
    parts = steps.param_layout
    drops = case.dropout or (case.adapter is not None and case.adapter.dropout)
    key = jax.random.key(7) if drops or case.low[0] == "nvfp4" else None
    batch: Any = batch_of(case.rows, case=case)
    # The reference uses one device, so that cases with different meshes share it.
    decoder = Decoder(
        replace(parts.decoder.config, frozen=[], **model), AxisRules.from_config(MeshConfig())
    )
    plain, reported, wanted = plain_gradients(decoder, batch, key, together)
    wanted = select_trainable(wanted, parts.decoder.trainable())
    run = steps.value_and_grad

    def whole(plain: Any, batch: Any) -> Any:
        found = run(parts.stack(plain), batch, key)
        layers = found.statistics["layers"], found.statistics.get("outside", {})
        statistics = {kind: {} for kind in parts.decoder.model.layer_types}
        statistics |= parts.layout.unstack(*layers)
        statistics |= {
            name: found.statistics[name] for name in ("ahead",) if name in found.statistics
        }
        return (found.loss, found.losses, statistics), parts.unstack(found.gradients)

    with jax.set_mesh(parts.mesh):
        values, found = jax.jit(whole)(plain, jax.device_put(batch, steps.batch_sharding))
    assert jax.tree.structure(values) == jax.tree.structure(reported)
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(reported), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        largest = np.abs(a).max()
        if jax.tree_util.keystr(path, simple=True, separator=".") == TOWER_KEY_BIAS:
            # Without RoPE, this gradient is 0, because a softmax does not depend on it.
            largest = np.abs(wanted["vision"]["layers"]["attention"]["query_bias"]).max()
        error = np.abs(a - np.asarray(b)).max() / largest
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


SHAPES = [
    Case(1, 1, 1, layers=9),
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
    Case(4, 1, 2, schedule="1f1b", fsdp=2, layers=9),
    Case(4, 2, 3, layers=8, fsdp=2),
    Case(8, 1, 8, schedule="1f1b", layers=8),
    Case(8, 2, 17, layers=16, gather="step"),
    Case(8, 1, 9, schedule="circular", layers=10, dropout=0.3),
    # Delayed messages, layer partitions, saved activations.
    Case(3, 2, 4, schedule="circular", delayed=True, fsdp=2, layers=7),
    Case(4, 1, 5, schedule="gpipe", delayed=True, data=2),
    Case(2, 2, 4, cut=(1, 2, 1, 1), fsdp=2),
    Case(3, 2, 6, layers=12, cut=(1, 3, 1, 4, 1, 2), remat="names", tensor=2),
    Case(2, 2, 5, remat="names", fsdp=2, tied=True, dropout=0.3),
    Case(2, 2, 4, remat="none", fsdp=2, tensor=2, dropout=0.3),
    # Split backward passes, on a loop and on a V.
    Case(2, 1, 5, schedule="zb_h1", fsdp=2, remat="none"),
    Case(4, 1, 9, schedule="zb_h2", remat="names", dropout=0.3, tensor=2, tied=True),
    Case(1, 2, 3, schedule="zb_v", fsdp=2, remat="names"),
    Case(2, 2, 5, schedule="zb_v", fsdp=2, idle="compute", tied=True),
    Case(4, 2, 8, schedule="v_half", layers=9, fsdp=2, gather="step", remat="none"),
    Case(3, 2, 7, schedule="v_min", layers=7, data=2, remat="chunk"),
    Case(4, 2, 3, schedule="dualpipe_v", layers=10, dropout=0.3, remat="names"),
    Case(8, 1, 8, schedule="zb_h1", layers=8),
    Case(8, 2, 9, schedule="zb_v", layers=17, remat="names"),
    # All dims have the same size, so weights can only be identified by data flow.
    Case(4, 1, 4, fsdp=2, layers=4, alike=4),
    Case(2, 2, 4, schedule="zb_v", layers=4, alike=4, remat="none"),
]


@pytest.mark.parametrize("case", keeping(SHAPES, 0, 18, 30, 33, 39), ids=str)
def test_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


HANDWRITTEN = f"file:{GOLDEN / 'handwritten.csv'}"


@pytest.mark.parametrize("delayed", keeping([False, True], 1))
def test_handwritten_schedule_gradients_match_unpipelined_model(delayed: bool) -> None:
    ring, orders = read_orders(GOLDEN / "handwritten.csv")
    count = 1 + max(action.microbatch for action in orders[0])
    case = Case(ring.num_stages, ring.num_repeats, count, schedule=HANDWRITTEN, delayed=delayed)
    check_gradients(replace(case, layers=9, fsdp=2, remat="names"))


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, 4, schedule="circular", fsdp=2, delayed=True, layers=7),
        Case(4, 2, 4, schedule="zb_v", fsdp=2, remat="chunk", idle="compute"),
    ],
    ids=str,
)
@pytest.mark.long
def test_repeated_steps_do_not_deadlock_and_are_bitwise_equal(case: Case) -> None:
    """Repeat one program many times: no device waits forever, and all results are equal."""
    steps = steps_of(case, 2 * case.microbatches * case.fsdp)
    batch = jax.device_put(batch_of(steps.shape[0]), steps.batch_sharding)
    state, run = steps.init(), steps.compile_train()
    seen = set()
    for _ in range(100):
        _, metrics = run(jax.tree.map(jnp.copy, state), batch)
        seen.add(tuple(float(metrics[name]) for name in ("train/loss", "train/grad_norm")))
    assert len(seen) == 1


@pytest.mark.layouts
@pytest.mark.parametrize("group", [2, 3, 4, 5])
def test_group_sizes_match_unpipelined_model(group: int) -> None:
    check_gradients(Case(2, 2, 5, group=group, fsdp=2))


VISITS = [
    Case(2, 3, 5, group=3, fsdp=2, layers=9),
    Case(2, 4, 5, group=3, fsdp=2, tensor=2, layers=8, remat="names"),
    Case(3, 3, 7, fsdp=2, layers=11, dropout=0.3),
    Case(3, 4, 6, group=6, fsdp=2, layers=12),
    Case(4, 3, 9, group=5, fsdp=2, layers=14, idle="compute"),
    Case(4, 4, 4, schedule="breadth_first", fsdp=2, layers=16, remat="chunk"),
    Case(4, 3, 4, schedule="circular", delayed=True, fsdp=2, layers=12, remat="none"),
    Case(8, 3, 9, layers=24),
]


@pytest.mark.parametrize("case", keeping(VISITS, 0), ids=str)
def test_weight_prefetch_window_matches_unpipelined_model(case: Case) -> None:
    """Covers several stage counts and group sizes, which change the ticks of chunk switches."""
    check_gradients(replace(case, gather="window"))


OUTSIDE = [
    # Microbatches fill whole rounds, leave a partial last round, or fill less than one round.
    Case(1, 1, 1, outside=2),
    Case(1, 3, 3, outside=2, fsdp=2, data=2, gather="window"),
    Case(2, 2, 4, outside=1, fsdp=2, gather="step", dropout=0.3),
    Case(2, 2, 5, outside=1, tied=True, tensor=2, fsdp=2, dropout=0.3),
    Case(3, 1, 2, outside=2, schedule="1f1b", remat="none", data=2),
    Case(3, 2, 7, outside=3, layers=9, remat="names", dropout=0.3, fsdp=2),
    Case(3, 3, 6, outside=1, layers=11, gather="window", fsdp=2),
    Case(4, 1, 4, outside=1, tensor=2),
    Case(4, 2, 9, outside=2, layers=10, fsdp=2, remat="chunk", idle="compute"),
    Case(4, 2, 3, outside=3, layers=12, fsdp=2, tied=True),
    Case(2, 2, 4, outside=1, cut=(2, 1, 1, 2), layers=7, fsdp=2),
    Case(8, 1, 9, outside=1, layers=9, dropout=0.3),
    # Schedules that store every round; delayed messages; split backward passes, on a V.
    Case(3, 2, 7, outside=2, schedule="circular", layers=9, delayed=True, fsdp=2),
    Case(4, 1, 9, outside=1, schedule="gpipe", data=2, gather="step"),
    Case(2, 1, 5, outside=2, schedule="zb_h1", fsdp=2, remat="names", idle="compute"),
    Case(4, 2, 8, outside=2, schedule="zb_v", layers=10, fsdp=2, remat="full", dropout=0.3),
    Case(2, 2, 5, outside=1, schedule="v_min", tensor=2, remat="none", tied=True),
    Case(3, 2, 4, outside=2, schedule="dualpipe_v", layers=8, data=2, remat="chunk"),
]


@pytest.mark.parametrize("case", keeping(OUTSIDE, 3, 12), ids=str)
def test_prologue_layers_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


NAMES = ("gpipe", "circular", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_v")
NAMES += ("v_half", "v_min", "dualpipe_v", "delayed")


def matrix() -> list[Case]:
    """Return every schedule x gather x remat x idle x stages; the other options alternate."""
    cases = []
    choices = itertools.product(
        NAMES,
        ("iteration", "window", "step"),
        ("full", "chunk", "names", "none"),
        ("skip", "compute"),
        (1, 2, 3, 4),
    )
    for number, (name, gather, remat, idle, stages) in enumerate(choices):
        schedule = "circular" if name == "delayed" else name
        turns = number // 2 + number // 8  # not aligned with any of the choices above
        repeats = SCHEDULES[schedule].repeats or (3 if gather == "window" else 1 + turns % 3)
        more = turns % 4
        cases.append(
            Case(
                stages,
                repeats,
                (stages, 2 * stages, 2 * stages + 1)[turns % 3],
                schedule=schedule,
                delayed=name == "delayed",
                gather=gather,
                idle=idle,
                remat=remat,
                dropout=(0.0, 0.3)[turns % 5 == 0],
                layers=stages * repeats + more,
                outside=(0, more)[number // 3 % 2],
                tied=turns % 7 == 0,
                ahead=(0, 0, 2)[(number + turns) % 3],
                fsdp=1 + (turns % 3 == 0),
                data=1 + (turns % 3 == 1),
                tensor=1 + (turns % 3 == 2),
            )
        )
    eight = ("1f1b", "interleaved", "zb_v")
    cases += [
        Case(8, SCHEDULES[schedule].repeats or 2, count, schedule=schedule, layers=17, remat=remat)
        for schedule in eight
        for count in (8, 16, 17)
        for remat in ("full", "names")
    ]
    return cases


@pytest.mark.layouts
@pytest.mark.parametrize("case", matrix()[::53], ids=str)
def test_config_matrix_sample(case: Case) -> None:
    check_gradients(case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_config_matrix(case: Case) -> None:
    check_gradients(case)


def test_config_matrix_covers_every_option() -> None:
    """The alternating options are still combined with every schedule."""
    cases = matrix()
    for schedule in SCHEDULES:
        mine = [case for case in cases if case.schedule == schedule]
        for field in ("fsdp", "data", "tensor"):
            assert {getattr(case, field) for case in mine} == {1, 2}, (schedule, field)
        for stages in (1, 2, 3, 4):
            found = {case.microbatches for case in mine if case.stages == stages}
            assert found == {stages, 2 * stages, 2 * stages + 1}, (schedule, stages)
        assert {case.dropout > 0 for case in mine} == {True, False}
        assert {(case.ahead, case.tied) for case in mine} == {
            (0, False),
            (0, True),
            (2, False),
            (2, True),
        }
        assert {case.outside for case in mine} == {0, 1, 2, 3}
        if SCHEDULES[schedule].repeats is None:
            assert {case.repeats for case in mine} == {1, 2, 3}
