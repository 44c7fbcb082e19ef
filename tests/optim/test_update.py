"""Optimizer updates compared with optax and numpy, and their magnitude bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.spec import Constant, Normal, Param
from maxpipe.optim.lr_schedule import learning_rate
from maxpipe.optim.update import Optimizer, OptState, TrainableParam

PEAK = 0.02


def linear(done: float) -> float:
    return PEAK * (1 - 0.9 * done)


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
PARAMS = {
    "matrix": Param(((3, "embed"), (4, "mlp")), Normal(3)),
    "norm": Param(((4, "norm"),), Constant(1.0), decays=False),
}


def optimizer_of(config: OptimConfig, params: dict[str, Param] = PARAMS) -> Optimizer:
    decay = config.weight_decay
    targets = {
        (name,): TrainableParam(param, name, decay=decay if param.decays else 0.0)
        for name, param in params.items()
    }
    return Optimizer(config, learning_rate(config, 10), targets)


def tree(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "matrix": scale * generator.normal(size=(3, 4)).astype(np.float32),
        "norm": scale * generator.normal(size=(4,)).astype(np.float32),
    }


def assert_close(got: Any, wanted: Any) -> None:
    """Compare in float32: 1e-5 of the largest value of each leaf."""
    for name, leaf in wanted.items():
        np.testing.assert_allclose(got[name], leaf, rtol=1e-5, atol=1e-5 * np.abs(leaf).max())


def run(
    config: OptimConfig, gradients: list[dict[str, np.ndarray]]
) -> tuple[dict[str, Any], OptState]:
    optimizer = optimizer_of(config)
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, params)
    return params, state


def run_numpy(
    config: OptimConfig, gradients: list[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Run algorithm 2 of Loshchilov and Hutter (arXiv:1711.05101) in float64."""
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
def test_adamw_matches_numpy_reference(num_steps: int) -> None:
    # Every other gradient is small enough to pass unclipped.
    gradients = [tree(1 + i, 1.0 if i % 2 == 0 else 0.01) for i in range(num_steps)]
    got, state = run(CONFIG, gradients)
    wanted, wanted_moments = run_numpy(CONFIG, gradients)
    assert_close(got, wanted)
    found = state.trees
    for name in ("mu", "nu"):
        assert_close(found[name], wanted_moments[name])


def test_weight_decay_applies_only_to_decayed_parameters() -> None:
    still = [jax.tree.map(np.zeros_like, tree(1))]
    got, _ = run(CONFIG, still)
    before = tree(0)
    np.testing.assert_array_equal(got["norm"], before["norm"])
    rate = PEAK / 3
    wanted = before["matrix"].astype(np.float64) * (1 - rate * CONFIG.weight_decay)
    np.testing.assert_allclose(got["matrix"], wanted, rtol=1e-5)


def first_mu(scale: float, clip_norm: float) -> float:
    """Return the norm of the first moment after one step, which is that of the clipped gradient."""
    config = OptimConfig(beta1=0.0, clip_norm=clip_norm)
    gradient = tree(1, scale)
    _, state = run(config, [gradient])
    return float(optax.tree.norm(state.trees["mu"]))


def test_clipping_uses_global_gradient_norm() -> None:
    norm = float(optax.tree.norm(jax.tree.map(jnp.asarray, tree(1))))
    # No single leaf reaches the limit; together they do.
    limit = 0.99 * norm
    assert max(float(np.linalg.norm(leaf)) for leaf in tree(1).values()) < limit
    assert first_mu(1.0, limit) == pytest.approx(limit, rel=1e-5)
    assert first_mu(100.0, limit) == pytest.approx(limit, rel=1e-5)
    assert first_mu(0.5, limit) == pytest.approx(0.5 * norm, rel=1e-5)
    assert first_mu(100.0, 0.0) == pytest.approx(100 * norm, rel=1e-5)


def test_adamw_is_bitwise_equal_to_optax() -> None:
    """Skipped updates change nothing, including the update count."""
    config = dataclasses.replace(CONFIG, schedule="constant", warmup_steps=0)
    mine = optimizer_of(config)
    theirs = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, DECAYED),
        optax.scale_by_learning_rate(learning_rate(config, 10)),
    )

    @jax.jit  # jit both functions: fused arithmetic rounds differently
    def plain(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = theirs.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(lambda *given: mine.update(*given[:3], taken=given[3]))
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state, wanted_state = mine.init(params), theirs.init(params)
    for seed in range(1, 5):
        gradient: Any = jax.tree.map(jnp.asarray, tree(seed))
        bad: Any = jax.tree.map(lambda leaf: leaf * jnp.nan, gradient)
        same, state = update(bad, state, params, jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, same, params)
        wanted, wanted_state = plain(gradient, wanted_state, params)
        params, state = update(gradient, state, params, jnp.array(True))
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        for name, tree_of in state.trees.items():
            moment = optax.tree_utils.tree_get(wanted_state, name)
            jax.tree.map(np.testing.assert_array_equal, tree_of, moment)
        assert int(state.updates) == seed


def test_lion_is_bitwise_equal_to_optax() -> None:
    """Skipped updates change nothing."""
    config = dataclasses.replace(CONFIG, name="lion", schedule="constant", warmup_steps=0)
    mine = optimizer_of(config)
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
        same, state = mine.update(bad, state, params, taken=jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, same, params)
        wanted, wanted_state = theirs.update(gradient, wanted_state, params)
        wanted = optax.apply_updates(params, wanted)
        params, state = mine.update(gradient, state, params, taken=jnp.array(True))
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        mu = optax.tree_utils.tree_get(wanted_state, "mu")
        jax.tree.map(np.testing.assert_array_equal, state.trees, {"mu": mu})


def test_adafactor_matches_optax() -> None:
    config = dataclasses.replace(
        CONFIG, name="adafactor", schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    mine = optimizer_of(config)
    theirs = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, DECAYED),
        optax.scale_by_learning_rate(PEAK),
    )
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    # optax also uses a decay of 0 in the first step: its count starts at 0.
    state, wanted_state, wanted = mine.init(params), theirs.init(params), params
    for seed in range(1, 6):
        gradient: Any = jax.tree.map(jnp.asarray, tree(seed, 10.0 ** (seed - 3)))
        bad: Any = jax.tree.map(lambda leaf: leaf * jnp.nan, gradient)
        same, state = mine.update(bad, state, params, taken=jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, same, params)
        params, state = mine.update(gradient, state, params)
        updates, wanted_state = theirs.update(gradient, wanted_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        assert_close(params, wanted)
    assert {name: list(tree) for name, tree in state.trees.items()} == {
        "rows": ["matrix"],
        "columns": ["matrix"],
        "nu": ["norm"],
    }


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e18])
def test_adafactor_is_finite_for_gradients_of_any_magnitude(scale: float) -> None:
    config = dataclasses.replace(CONFIG, name="adafactor", clip_norm=0.0, weight_decay=0.0)
    mine, before = optimizer_of(config), jax.tree.map(jnp.asarray, tree(0))
    gradient = {"matrix": jnp.zeros((3, 4)).at[1, 2].set(scale), "norm": jnp.zeros(4)}
    after, state = mine.update(gradient, mine.init(before), before)
    moved = np.asarray(after["matrix"] - before["matrix"])
    assert np.isfinite(moved).all() and np.abs(moved).max() <= PEAK * math.sqrt(12)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert (scale < 1) or moved[1, 2] < 0


def test_muon_orthogonalizes_matrices_and_uses_adam_elsewhere() -> None:
    config = dataclasses.replace(
        CONFIG, name="muon", schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    mine, adam = optimizer_of(config), optimizer_of(dataclasses.replace(config, name="adamw"))
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    state, adams, norm = mine.init(params), adam.init(params), params["norm"]
    matrix, moment = tree(0)["matrix"], np.zeros((3, 4))
    for seed in range(1, 4):
        gradient: Any = jax.tree.map(jnp.asarray, tree(seed))
        norm, adams = adam.update(gradient, adams, params)
        params, state = mine.update(gradient, state, params)
        np.testing.assert_array_equal(params["norm"], norm["norm"])
        moment = 0.95 * moment + 0.05 * tree(seed)["matrix"]
        nesterov = 0.95 * moment + 0.05 * tree(seed)["matrix"]
        left, values, right = np.linalg.svd(nesterov / np.linalg.norm(nesterov), False)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        step = 0.2 * 2 * (left * values) @ right + 0.3 * matrix
        matrix = matrix - PEAK * step
        np.testing.assert_allclose(params["matrix"], matrix, rtol=0, atol=1e-5)
    assert {name: list(tree) for name, tree in state.trees.items()} == {
        "mu": ["matrix", "norm"],
        "nu": ["norm"],
    }


def test_learning_rate_multipliers_and_ema() -> None:
    config = dataclasses.replace(CONFIG, ema_decay=0.75, weight_decay=0.0, warmup_steps=0)
    mine = optimizer_of(config)
    slow = dataclasses.replace(mine.trainable_params["matrix",], rate=0.25)
    halved = dataclasses.replace(
        mine, trainable_params={**mine.trainable_params, ("matrix",): slow}
    )
    params: Any = jax.tree.map(jnp.asarray, tree(0))
    gradient: Any = jax.tree.map(jnp.asarray, tree(1))
    whole, _ = mine.update(gradient, mine.init(params), params)
    some, state = halved.update(gradient, halved.init(params), params)
    np.testing.assert_array_equal(whole["norm"], some["norm"])
    moved = (whole["matrix"] - params["matrix"], some["matrix"] - params["matrix"])
    np.testing.assert_allclose(0.25 * moved[0], moved[1], rtol=1e-4, atol=1e-8)
    average = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, params, some)
    assert_close(state.trees["average"], average)
    _, same = halved.update(gradient, state, some, taken=jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, same, state)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_stochastic_rounding_keeps_updates_below_precision(rounding: Any) -> None:
    param = Param(((4000, "norm"),), Constant(1.0), decays=False)
    config = OptimConfig(
        name="lion", learning_rate=2.0**-12, schedule="constant", rounding=rounding
    )
    mine = dataclasses.replace(optimizer_of(config, {"w": param}), param_dtype="bfloat16")
    params = {"w": jnp.full(4000, -1.5, jnp.bfloat16)}  # spacing of bfloat16 values: 2**-7
    state, update = mine.init(params), jax.jit(mine.update)
    for _ in range(32):
        params, state = update({"w": jnp.ones(4000)}, state, params)
    moved = float((params["w"].astype(jnp.float32) + 1.5).mean())
    wanted = -32 * 2.0**-12
    assert moved == 0 if rounding == "nearest" else abs(moved / wanted - 1) < 0.1


def test_bfloat16_moments_keep_their_dtype() -> None:
    optimizer = dataclasses.replace(optimizer_of(CONFIG), param_dtype="bfloat16")
    params: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree(0))
    before = optimizer.init(params)
    _, after = optimizer.update(jax.tree.map(jnp.asarray, tree(1)), before, params)
    types = [[leaf.dtype for leaf in jax.tree.leaves(state)] for state in (before, after)]
    assert types[0] == types[1]


# Bounds of updates.


def sizes_of(random: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Return random values of all magnitudes between two powers of ten, and zeros."""
    values = 10.0 ** random.uniform(low, high, 16) * random.choice([-1, 0, 1], 16)
    return values.astype("f4")


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(each, marks=pytest.mark.long) for each in range(8, 60))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
@pytest.mark.fault("N6")
def test_update_bounds_hold_for_random_inputs(
    name: Literal["adamw", "lion", "adafactor", "muon"], dtype: str, seed: int
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
    matrix = Param(((4, "embed"), (4, "mlp")), Normal(4))
    vector = Param(((16, "norm"),), Constant(0.0))
    param = matrix if name in ("adafactor", "muon") and seed % 3 else vector
    optimizer = dataclasses.replace(optimizer_of(config, {"w": param}), param_dtype=dtype)

    def drawn(low: int, high: int) -> dict[str, jax.Array]:
        return {"w": jnp.asarray(sizes_of(random, low, high), dtype).reshape(param.shape)}

    params, mu = (drawn(-40, top) for top in (37, 38))
    state = optimizer.init(params)
    nu = jax.tree.map(jnp.abs, drawn(-45, 38))
    largest = int(random.choice([-20, 0, 17, 18, 19]))

    @jax.jit
    def step(params: Any, state: Any, gradients: Any, reach: jax.Array) -> tuple[Any, ...]:
        norm = optax.tree.norm(gradients)
        rate = jnp.float32(config.learning_rate)
        reach = optimizer.bound_update(reach, norm, rate)
        return *optimizer.update(gradients, state, params, norm=norm), reach

    if seed % 2:  # as in training: moments no larger than past gradients
        mu, nu = ({"w": jnp.zeros_like(params["w"])} for _ in range(2))
    saved = {key: {"mu": mu, "nu": nu}.get(key, tree) for key, tree in state.trees.items()}
    state = OptState(jnp.int32(random.choice([0, 3, 1000])), saved)
    first = saved.get("mu", {"w": jnp.zeros(())})
    reach = jnp.stack([jnp.abs(tree["w"]).max().astype("f4") for tree in (params, first)])
    for _ in range(5):
        gradients = drawn(largest - 20, largest)
        params, state, reach = step(params, state, gradients, reach)
        if not np.isfinite(reach).all():
            break
        first = state.trees.get("mu", {"w": jnp.zeros(())})
        for tree, bound in zip((params, first), np.asarray(reach), strict=True):
            assert np.abs(np.asarray(tree["w"], "f4")).max() <= bound + 1e-15
        for each in state.trees.values():
            assert np.isfinite(np.asarray(each["w"], "f4")).all()


def test_update_bound_is_finite_for_many_ordinary_steps() -> None:
    """The bound grows by its rounding allowance, so it must stay finite for many steps."""
    config = OptimConfig()
    after = jax.jit(
        lambda reach: optimizer_of(config).bound_update(reach, jnp.float32(7), jnp.float32(1e-3))
    )
    reach, steps = jnp.ones(2), 0
    while np.isfinite(reach).all():
        reach, steps = after(reach), steps + 1
    assert steps > 1000
