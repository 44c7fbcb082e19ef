"""Detection of bad steps and loss spikes, and the state that a bad step leaves unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import from_dict
from maxpipe.config.sections.guard import GuardConfig
from maxpipe.optim import update
from maxpipe.optim.guard import GuardState, check_step, init_guard_state, select_update
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.planner.compile import build_steps
from maxpipe.step import step
from maxpipe.step.state import TrainState
from tests.cases import OPTIM, Case, batch_of, keeping, steps_of

ROWS = 8
NAN, INF = float("nan"), float("inf")


def run_through(
    config: GuardConfig, numbers: list[tuple[float, float]]
) -> tuple[list[bool], GuardState]:
    """Return which of these steps (loss, gradient norm) are applied, and the final guard state."""
    state, mesh = init_guard_state(config), build_mesh(MeshConfig(), jax.devices()[:1])
    decide = jax.jit(lambda state, loss, norm: check_step(config, mesh, state, loss, norm))
    found = []
    for loss, norm in numbers:
        taken, state = decide(state, jnp.float32(loss), jnp.float32(norm))
        found.append(bool(taken))
    return found, state


SPIKES = GuardConfig(spike_sigmas=4.0, spike_window=8, on_spike="skip")
CALM = [(2.0 + 0.1 * (place % 2), 1.0 + 0.1 * (place % 3)) for place in range(8)]


# --- detection -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GuardConfig(), SPIKES, GuardConfig(bad_steps="rollback")])
def test_steps_with_non_finite_loss_or_norm_are_skipped(config: GuardConfig) -> None:
    numbers = [(1.0, 1.0), (NAN, 1.0), (1.0, INF), (-INF, NAN), (1.0, NAN), (1.0, 1.0)]
    taken, state = run_through(config, numbers)
    assert taken == [True, False, False, False, False, True]
    assert (int(state.skipped), int(state.spikes)) == (4, 0)


def test_spike_threshold_uses_mean_and_deviation_of_recent_steps() -> None:
    losses = np.array([loss for loss, _ in CALM])
    limit = losses.mean() + 4 * losses.std()
    taken, state = run_through(SPIKES, [*CALM, (limit + 0.01, 1.0), (limit - 0.01, 1.0)])
    assert taken == [True] * 8 + [False, True]
    assert (int(state.skipped), int(state.spikes)) == (1, 1)
    norms = np.array([norm for _, norm in CALM])
    limit = norms.mean() + 4 * norms.std()
    taken, _ = run_through(SPIKES, [*CALM, (2.0, limit + 0.01), (2.0, limit - 0.01), (-9.0, 0.0)])
    assert taken == [True] * 8 + [False, True, True]


def test_spike_detection_starts_at_half_window() -> None:
    assert run_through(SPIKES, [*CALM[:3], (99.0, 1.0)])[0] == [True] * 4
    assert run_through(SPIKES, [*CALM[:4], (99.0, 1.0)])[0] == [True] * 4 + [False]
    assert run_through(GuardConfig(on_spike="skip"), [*CALM, (99.0, 1.0)])[0] == [True] * 9


def test_only_applied_spikes_enter_recent_window() -> None:
    noted = dataclasses.replace(SPIKES, on_spike="warn")
    taken, state = run_through(noted, [*CALM, (99.0, 1.0), (99.0, 1.0), (NAN, 1.0)])
    assert taken == [True] * 10 + [False]
    assert int(state.spikes) == 1, "the first spike widens the deviation"
    assert state.recent[0, -1] == 99.0
    taken, state = run_through(SPIKES, [*CALM, (99.0, 1.0), (99.0, 1.0)])
    assert taken[8:] == [False, False] and int(state.spikes) == 2
    assert float(state.recent.max()) < 3


def test_guard_state_round_trip_is_bitwise_equal() -> None:
    _, state = run_through(SPIKES, [(x / 3, x / 7) for x, _ in CALM[:5]] + [(NAN, 0.0)])
    facts = json.loads(json.dumps(state.to_json()))
    again = init_guard_state(SPIKES, facts)
    assert again.recent.dtype == state.recent.dtype
    np.testing.assert_array_equal(again.recent, state.recent)
    assert (int(again.skipped), int(again.spikes)) == (1, 0)


def test_changed_window_keeps_newest_steps() -> None:
    _, state = run_through(SPIKES, CALM)
    shorter = init_guard_state(dataclasses.replace(SPIKES, spike_window=4), state.to_json())
    np.testing.assert_array_equal(shorter.recent, np.asarray(state.recent)[:, 4:])
    longer = init_guard_state(dataclasses.replace(SPIKES, spike_window=10), state.to_json())
    np.testing.assert_array_equal(longer.recent[:, 2:], state.recent)
    assert np.isnan(longer.recent[:, :2]).all()
    assert init_guard_state(GuardConfig(), state.to_json()).recent.shape == (2, 0)


def test_one_non_finite_entry_skips_whole_update() -> None:
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    one = jnp.float32(1)

    def check(finite: jax.Array) -> tuple[jax.Array, jax.Array]:
        return finite.all(), jnp.array([3.0, 4.0])

    decide = jax.jit(
        lambda finite: check_step(
            GuardConfig(),
            mesh,
            init_guard_state(GuardConfig()),
            one,
            one,
            check,
            (finite,),
            (None,),
        )
    )
    good, bad = jnp.ones(4, bool), jnp.array([True, True, False, True])
    (taken, state), (not_taken, same) = decide(good), decide(bad)
    assert taken and not not_taken
    assert state.bounds.tolist() == [3.0, 4.0] and same.bounds.tolist() == [INF, INF]
    new, old = {"w": jnp.arange(4.0), "count": jnp.int32(5)}, {"w": jnp.ones(4), "count": 4}
    assert select_update(jnp.array(True), new, old)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    found = select_update(jnp.array(False), new, old)
    assert found["w"].tolist() == [1.0] * 4 and int(found["count"]) == 4


# --- the step --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> step.Steps:
    return steps_of(Case(2, 1, 2, fsdp=2, data=2, layers=2), ROWS)


@pytest.fixture(scope="module")
def compiled(steps: step.Steps) -> Any:
    return steps.compile_train()


@pytest.fixture(scope="module")
def on_host(steps: step.Steps) -> TrainState:
    return jax.device_get(steps.init())


@pytest.fixture
def fresh(steps: step.Steps, on_host: TrainState) -> Callable[[], TrainState]:
    """Return a function that makes a new state; a step donates its input state."""
    return lambda: jax.device_put(on_host, steps.state_sharding)


Fresh = Callable[[], TrainState]


def place_batch(steps: step.Steps, number: int, bad_row: int | None = None) -> Any:
    """Return a batch on the devices; row `bad_row`, on one shard, has an infinite loss."""
    batch = batch_of(ROWS, number)
    if bad_row is not None:
        batch["loss_mask"][bad_row, 0] = INF
    return jax.device_put(batch, steps.batch_sharding)


def bits(tree: Any) -> list[bytes]:
    """Return the bytes of every shard of every array."""
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


@pytest.mark.parametrize("bad_row", [0, ROWS - 1])
@pytest.mark.fault("N4")
def test_bad_step_on_one_shard_changes_no_device(
    bad_row: int, steps: step.Steps, compiled: Any, fresh: Fresh
) -> None:
    state, _ = compiled(fresh(), place_batch(steps, 0))
    before = bits((state.params, state.optimizer))
    state, metrics = compiled(state, place_batch(steps, 1, bad_row))
    assert not np.isfinite(float(metrics["train/loss"]))
    assert bits((state.params, state.optimizer)) == before
    assert (int(state.step), int(state.guard.skipped)) == (2, 1)
    for value in (state.guard.skipped, metrics["train/skipped"]):
        assert [int(shard.data) for shard in value.addressable_shards] == [1] * 8


@pytest.mark.parametrize(
    ("stored", "changes"),
    keeping(
        [
            ("float32", {"name": "lion"}),
            ("bfloat16", {"name": "adafactor"}),
            ("bfloat16", {"name": "muon", "zero1": True}),
        ],
        2,
    ),
    ids=str,
)
@pytest.mark.fault("N4")
def test_bad_step_keeps_optimizer_state_of_every_optimizer(
    stored: str, changes: dict[str, Any]
) -> None:
    case = Case(2, 1, 2, fsdp=2, data=2, layers=2, stored=stored)
    optim = dataclasses.replace(OPTIM, ema_decay=0.5, rounding="stochastic", **changes)
    steps = steps_of(case, ROWS, optim=optim)
    run = steps.compile_train()
    state, _ = run(steps.init(), place_batch(steps, 0))
    before = bits((state.params, state.optimizer))
    state, _ = run(state, place_batch(steps, 1, bad_row=3))
    assert bits((state.params, state.optimizer)) == before
    state, _ = run(state, place_batch(steps, 2))
    assert (int(state.step), int(state.guard.skipped)) == (3, 1)
    after = jax.tree.leaves((state.params, state.optimizer))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in after)
    assert bits((state.params, state.optimizer)) != before


def test_training_after_bad_step_is_bitwise_equal(
    steps: step.Steps, compiled: Any, fresh: Fresh
) -> None:
    """Includes the optimizer's update count, and a checkpoint round trip."""

    def run(state: TrainState, batches: list[Any]) -> tuple[TrainState, float]:
        rate = 0.0
        for batch in batches:
            state, metrics = compiled(state, batch)
            rate = float(metrics["train/lr"])
        return state, rate

    good = [place_batch(steps, number) for number in range(3)]
    straight, straight_rate = run(fresh(), good)
    wanted = bits((straight.params, straight.optimizer))
    bad = place_batch(steps, 9, 3)
    state, rate = run(fresh(), [good[0], bad, bad, good[1], good[2]])
    assert bits((state.params, state.optimizer)) == wanted and rate == straight_rate
    state, _ = run(fresh(), [good[0], bad, bad])
    saved, facts = steps.to_saved(state), state.guard.to_json()
    state, rate = run(steps.from_saved(saved, init_guard_state(steps.guard, facts)), good[1:])
    assert bits((state.params, state.optimizer)) == wanted and rate == straight_rate
    assert (int(state.step), int(state.guard.skipped)) == (5, 2)


def test_state_without_guard_is_restored(steps: step.Steps, compiled: Any, fresh: Fresh) -> None:
    state, _ = compiled(fresh(), place_batch(steps, 0))
    again = steps.from_saved(steps.to_saved(state))
    assert np.isfinite(state.guard.bounds).all() and np.isinf(again.guard.bounds).all()
    assert bits(again._replace(guard=state.guard)) == bits(state)
    assert bits(again.guard._replace(bounds=state.guard.bounds)) == bits(state.guard)


def test_infinite_parameter_skips_all_updates(
    steps: step.Steps, compiled: Any, fresh: Fresh
) -> None:
    state = fresh()
    scale = state.params["final_norm"]["scale"].at[0].set(INF)
    state = state._replace(params=state.params | {"final_norm": {"scale": scale}})
    before = bits((state.params, state.optimizer))
    for number in range(2):
        state, _ = compiled(state, place_batch(steps, number))
    assert bits((state.params, state.optimizer)) == before
    assert (int(state.step), int(state.guard.skipped)) == (2, 2)


@pytest.mark.parametrize("place", ["params", "mu", "nu"])
@pytest.mark.fault("N6")
def test_update_overflow_on_one_device_is_bad_step(
    place: str, steps: step.Steps, compiled: Any, on_host: TrainState
) -> None:
    """Loss and gradients are finite; one entry of the updated state is not."""
    host = jax.tree.map(np.array, on_host)
    numbers = host.optimizer.trees
    if place == "params":  # a finite first moment divided by the square root of zero
        numbers["mu"]["embedding"][0, 0] = np.finfo(np.float32).max
        numbers["nu"]["embedding"][0, 0] = 0
    else:
        numbers[place]["embedding"][0, 0] = INF
    state = jax.device_put(host, steps.state_sharding)
    before = bits((state.params, state.optimizer))
    state, metrics = compiled(state, place_batch(steps, 0))
    assert np.isfinite([float(metrics["train/loss"]), float(metrics["train/grad_norm"])]).all()
    assert bits((state.params, state.optimizer)) == before
    assert [int(shard.data) for shard in state.guard.skipped.addressable_shards] == [1] * 8


@pytest.mark.parametrize("dtype", keeping(["float32", "bfloat16"], 0))
def test_guard_uses_no_extra_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a matrix would take thousands of bytes; scalars and flags take hundreds."""
    model = {"num_layers": 2, "vocab_size": 512, "d_model": 128, "d_mlp": 256, "num_heads": 2}
    model |= {"num_kv_heads": 2, "head_dim": 64, "param_dtype": dtype, "compute_dtype": dtype}
    batch = {"batch_size": 4, "sequence_length": 16, "steps": 1}
    config = from_dict({"model": model, "train": batch, "mesh": {"ici_fsdp": 2}})

    def memory() -> Any:
        return build_steps(config, jax.devices()[:2]).compile_train().memory_analysis()

    guarded = memory()
    monkeypatch.setattr(update, "select_update", lambda taken, new, old: new)
    monkeypatch.setattr(step, "check_step", lambda *given: check_step(*given[:5]))
    plain = memory()
    assert guarded.temp_size_in_bytes <= plain.temp_size_in_bytes + 1024
    assert guarded.alias_size_in_bytes == plain.alias_size_in_bytes
