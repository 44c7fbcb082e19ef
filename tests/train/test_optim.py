"""The learning rate step by step, and AdamW against plain numpy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxpipe.config.schema import OptimConfig
from maxpipe.train.optim import (
    build_optimizer,
    learning_rate,
    moments,
    reach_after,
    with_moments,
)

PEAK = 0.02


def rate_at(rate: optax.Schedule, step: int) -> float:
    return np.asarray(rate(step)).item()


def rates(total_steps: int, **changes: Any) -> np.ndarray:
    """Of every step, and of the one after the last."""
    config = OptimConfig(**{"learning_rate": PEAK, **changes})
    rate = learning_rate(config, total_steps)
    return np.array([rate_at(rate, step) for step in range(total_steps + 1)])


def linear(done: float) -> float:
    return PEAK * (1 - 0.9 * done)


def cosine(done: float) -> float:
    return PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


# Warm-up and shapes.


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_the_warm_up_moves_at_once_and_ends_at_the_peak(schedule: str, warmup: int) -> None:
    got = rates(100, schedule=schedule, warmup_steps=warmup)
    wanted = PEAK * (1 + np.arange(warmup)) / warmup
    np.testing.assert_allclose(got[:warmup], wanted, rtol=1e-5)
    # The shape starts at the peak, too.
    np.testing.assert_allclose(got[warmup], PEAK, rtol=1e-5)
    assert got.max() <= PEAK * (1 + 1e-5) and got.min() > 0


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize(("schedule", "shape"), [("linear", linear), ("cosine", cosine)])
def test_lines_and_cosines_go_down_to_the_end(
    schedule: str, shape: Callable[[float], float], warmup: int
) -> None:
    got = rates(120, schedule=schedule, warmup_steps=warmup)
    steps = np.arange(warmup, 121)
    wanted = [shape((step - warmup) / (120 - warmup)) for step in steps]
    np.testing.assert_allclose(got[warmup:], wanted, rtol=1e-5)
    np.testing.assert_allclose(got[-1], 0.1 * PEAK, rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 20])
def test_wsd_is_stable_and_then_a_line(warmup: int) -> None:
    got = rates(120, schedule="wsd", warmup_steps=warmup, decay_fraction=0.25)
    np.testing.assert_allclose(got[warmup:91], PEAK, rtol=1e-5)
    wanted = [linear(done / 30) for done in range(31)]
    np.testing.assert_allclose(got[90:], wanted, rtol=1e-5)


def test_wsd_with_a_decay_longer_than_what_the_warm_up_leaves() -> None:
    got = rates(20, schedule="wsd", warmup_steps=10, decay_fraction=0.9)
    np.testing.assert_allclose(got[10:], [linear(done / 10) for done in range(11)], rtol=1e-5)


def test_a_constant_rate_ignores_the_final_fraction() -> None:
    np.testing.assert_allclose(rates(10, schedule="constant", final_fraction=0.0), PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (3, 3), (5, 50)])
def test_short_runs_have_finite_rates(schedule: str, total: int, warmup: int) -> None:
    got = rates(total, schedule=schedule, warmup_steps=warmup)
    assert np.isfinite(got).all() and (got[:total] > 0).all() and got.max() <= PEAK * (1 + 1e-6)


def test_phases_follow_each_other() -> None:
    texts = ["10% linear 0 -> 1", "2 x 30 cosine 1 -> 0.1", "rest linear 0.5"]
    got = rates(100, phases=texts)
    bend = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 30)) / 2 for done in range(30)]
    tail = [0.1 + 0.4 * done / 30 for done in range(30)]
    wanted = [*(done / 10 for done in range(10)), *bend, *bend, *tail, 0.5]
    np.testing.assert_allclose(got, PEAK * np.array(wanted), rtol=1e-5)
    # Behind the last phase the rate stays; phases that are longer than the run are cut off.
    short = rates(20, phases=["5 linear 0.2", "5 linear 0.2"])
    np.testing.assert_allclose(short[5:], 0.2 * PEAK, rtol=1e-5)
    np.testing.assert_allclose(
        rates(10, phases=["100 cosine 0"]), rates(100, phases=["100 cosine 0"])[:11], rtol=1e-6
    )
    rising = rates(10, phases=["rest cosine 0.5 -> 1"])
    assert (np.diff(rising) > 0).all() and rising[0] == pytest.approx(0.5 * PEAK)


def test_after_the_end_the_rate_stays() -> None:
    config = OptimConfig(learning_rate=PEAK, schedule="cosine", final_fraction=0.1)
    assert rate_at(learning_rate(config, 10), 1000) == pytest.approx(0.1 * PEAK)


# AdamW.

CONFIG = OptimConfig(
    learning_rate=PEAK,
    schedule="linear",
    warmup_steps=3,
    beta1=0.8,
    beta2=0.95,
    epsilon=1e-6,
    weight_decay=0.3,
    clip_norm=0.5,
)
DECAYED = {"matrix": True, "norm": False}


def tree(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "matrix": scale * generator.normal(size=(3, 4)).astype(np.float32),
        "norm": scale * generator.normal(size=(4,)).astype(np.float32),
    }


def assert_close(got: Any, wanted: Any) -> None:
    """Float32: 1e-5 of the largest value of a leaf."""
    for name, leaf in wanted.items():
        np.testing.assert_allclose(got[name], leaf, rtol=1e-5, atol=1e-5 * np.abs(leaf).max())


def run_optax(
    config: OptimConfig, gradients: list[dict[str, np.ndarray]]
) -> tuple[dict[str, Any], optax.OptState]:
    optimizer = build_optimizer(config, 10, DECAYED)
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def run_numpy(
    config: OptimConfig, gradients: list[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Loshchilov and Hutter's algorithm 2 (arXiv:1711.05101) in float64."""
    params = {name: leaf.astype(np.float64) for name, leaf in tree(0).items()}
    mu = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    nu = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    for step, gradient in enumerate(gradients):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
        factor = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        rate = (
            PEAK * (step + 1) / config.warmup_steps
            if step < config.warmup_steps
            else linear((step - config.warmup_steps) / (10 - config.warmup_steps))
        )
        for name in params:
            g = factor * gradient[name].astype(np.float64)
            mu[name] = config.beta1 * mu[name] + (1 - config.beta1) * g
            nu[name] = config.beta2 * nu[name] + (1 - config.beta2) * g**2
            mu_hat = mu[name] / (1 - config.beta1 ** (step + 1))
            nu_hat = nu[name] / (1 - config.beta2 ** (step + 1))
            decay = config.weight_decay * params[name] if DECAYED[name] else 0.0
            params[name] = params[name] - rate * (
                mu_hat / (np.sqrt(nu_hat) + config.epsilon) + decay
            )
    return params, {"mu": mu, "nu": nu}


@pytest.mark.parametrize("num_steps", [1, 6])
def test_adamw_equals_the_plain_algorithm(num_steps: int) -> None:
    # Every other gradient is small enough to pass unclipped.
    gradients = [tree(1 + i, 1.0 if i % 2 == 0 else 0.01) for i in range(num_steps)]
    got, state = run_optax(CONFIG, gradients)
    wanted, wanted_moments = run_numpy(CONFIG, gradients)
    assert_close(got, wanted)
    found = moments(CONFIG, state)
    for name in ("mu", "nu"):
        assert_close(found[name], wanted_moments[name])


def test_only_masked_parameters_decay() -> None:
    still = [jax.tree.map(np.zeros_like, tree(1))]
    got, _ = run_optax(CONFIG, still)
    before = tree(0)
    np.testing.assert_array_equal(got["norm"], before["norm"])
    rate = PEAK / 3
    wanted = before["matrix"].astype(np.float64) * (1 - rate * CONFIG.weight_decay)
    np.testing.assert_allclose(got["matrix"], wanted, rtol=1e-5)


def first_mu(scale: float, clip_norm: float) -> float:
    """Norm of the first moment after one step: what clipping has left of the gradient."""
    config = OptimConfig(beta1=0.0, clip_norm=clip_norm)
    gradient = tree(1, scale)
    _, state = run_optax(config, [gradient])
    return float(optax.tree.norm(moments(config, state)["mu"]))


def test_clipping_measures_the_whole_gradient() -> None:
    norm = float(optax.tree.norm(jax.tree.map(jnp.asarray, tree(1))))
    # No single leaf reaches the limit; together they do.
    limit = 0.99 * norm
    assert max(float(np.linalg.norm(leaf)) for leaf in tree(1).values()) < limit
    assert first_mu(1.0, limit) == pytest.approx(limit, rel=1e-5)
    assert first_mu(100.0, limit) == pytest.approx(limit, rel=1e-5)
    assert first_mu(0.5, limit) == pytest.approx(0.5 * norm, rel=1e-5)
    assert first_mu(100.0, 0.0) == pytest.approx(100 * norm, rel=1e-5)


def test_moments_and_step_are_the_whole_state() -> None:
    gradients = [tree(1 + i) for i in range(4)]
    params, state = run_optax(CONFIG, gradients)
    fresh = build_optimizer(CONFIG, 10, DECAYED).init(params)
    again = with_moments(fresh, jnp.int32(4), moments(CONFIG, state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, two)
        assert one.dtype == two.dtype


def test_adam_is_that_of_optax_bit_for_bit() -> None:
    """And as it was where the update is not taken, moments and counts included."""
    config = dataclasses.replace(CONFIG, schedule="constant", warmup_steps=0)
    mine = build_optimizer(config, 10, DECAYED)
    theirs = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, DECAYED),
        optax.scale_by_learning_rate(learning_rate(config, 10)),
    )
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state, wanted_state = mine.init(params), theirs.init(params)
    for seed in range(1, 5):
        gradient: Any = jax.tree.map(jnp.asarray, tree(seed))
        bad: Any = jax.tree.map(lambda leaf: leaf * jnp.nan, gradient)
        _, state = mine.update(bad, state, params, taken=jnp.array(False))
        updates, state = mine.update(gradient, state, params, taken=jnp.array(True))
        wanted, wanted_state = theirs.update(gradient, wanted_state, params)
        jax.tree.map(np.testing.assert_array_equal, (updates, state), (wanted, wanted_state))
        params = optax.apply_updates(params, updates)


def test_lion_is_that_of_optax_bit_for_bit() -> None:
    """Over updates that are taken, and as it was where one is not."""
    config = dataclasses.replace(CONFIG, name="lion", schedule="constant", warmup_steps=0)
    mine = build_optimizer(config, 10, DECAYED)
    theirs = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.lion(
            learning_rate(config, 10), config.beta1, config.beta2, None, 0.3, lambda _: DECAYED
        ),
    )
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state, wanted_state = mine.init(params), theirs.init(params)
    for seed in range(1, 5):
        gradient: Any = jax.tree.map(jnp.asarray, tree(seed))
        bad: Any = jax.tree.map(lambda leaf: leaf * jnp.nan, gradient)
        _, state = mine.update(bad, state, params, taken=jnp.array(False))
        updates, state = mine.update(gradient, state, params, taken=jnp.array(True))
        wanted, wanted_state = theirs.update(gradient, wanted_state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
        mu = optax.tree_utils.tree_get(wanted_state, "mu")
        jax.tree.map(np.testing.assert_array_equal, moments(config, state), {"mu": mu})
        params = optax.apply_updates(params, updates)


def test_narrow_moments_stay_narrow() -> None:
    optimizer = build_optimizer(CONFIG, 10, DECAYED)
    params: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree(0))
    before = optimizer.init(params)
    _, after = optimizer.update(jax.tree.map(jnp.asarray, tree(1)), before, params)
    types = [[leaf.dtype for leaf in jax.tree.leaves(state)] for state in (before, after)]
    assert types[0] == types[1]


# How far an update may reach.


def sizes_of(random: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Numbers of every magnitude between powers of ten, zeros among them."""
    values = 10.0 ** random.uniform(low, high, 16) * random.choice([-1, 0, 1], 16)
    return values.astype("f4")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.fault("N6")
def test_what_is_said_to_stay_finite_does(
    name: Literal["adamw", "lion"], dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    config = OptimConfig(
        name=name,
        learning_rate=float(10.0 ** random.uniform(-6, 3)),
        schedule="constant",
        beta1=float(random.choice([0.0, 0.5, 0.9, 0.999, 0.999999, 1 - 1e-9])),
        beta2=float(random.choice([0.0, 0.9, 0.999, 1 - 1e-9])),
        epsilon=float(random.choice([0.0, 1e-38, 1e-25, 1e-12, 1e-8, 1.0])),
        weight_decay=float(random.choice([0.0, 0.1, 100.0])),
        clip_norm=float(random.choice([0.0, 1e-30, 1.0, 1e25])),
    )
    optimizer = build_optimizer(config, 10, decayed={"w": True})
    params, mu = ({"w": jnp.asarray(sizes_of(random, -40, top), dtype)} for top in (37, 38))
    state = optimizer.init(params)
    nu = {"w": jnp.abs(jnp.asarray(sizes_of(random, -45, 38), dtype))}
    largest = int(random.choice([-20, 0, 17, 18, 19]))

    @jax.jit
    def step(params: Any, state: Any, gradients: Any, reach: jax.Array) -> tuple[Any, ...]:
        norm = optax.tree.norm(gradients)
        rate = jnp.float32(config.learning_rate)
        updates, state = optimizer.update(gradients, state, params, norm=norm)
        return optax.apply_updates(params, updates), state, reach_after(config, reach, norm, rate)

    if seed % 2:  # as training leaves them: no size of moments that gradients never had
        mu, nu = ({"w": jnp.zeros_like(params["w"])} for _ in range(2))
    saved = {key: {"mu": mu, "nu": nu}[key] for key in moments(config, state)}
    state = with_moments(state, jnp.int32(random.choice([0, 3, 1000])), saved)
    reach = jnp.stack([jnp.abs(tree["w"]).max().astype("f4") for tree in (params, mu)])
    for _ in range(5):
        gradients = {"w": jnp.asarray(sizes_of(random, largest - 20, largest), dtype)}
        params, state, reach = step(params, state, gradients, reach)
        if not np.isfinite(reach).all():
            break
        for tree, bound in zip(
            (params, moments(config, state)["mu"]), np.asarray(reach), strict=True
        ):
            assert np.abs(np.asarray(tree["w"], "f4")).max() <= bound + 1e-15
        for each in moments(config, state).values():
            assert np.isfinite(np.asarray(each["w"], "f4")).all()


def test_ordinary_training_is_never_looked_at() -> None:
    """The bound grows by the rounding that it allows for: it answers for many steps."""
    config = OptimConfig()
    after = jax.jit(lambda reach: reach_after(config, reach, jnp.float32(7), jnp.float32(1e-3)))
    reach, steps = jnp.ones(2), 0
    while np.isfinite(reach).all():
        reach, steps = after(reach), steps + 1
    assert steps > 1000
