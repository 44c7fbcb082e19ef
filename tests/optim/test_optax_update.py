"""Optax transformations in place of the configured optimizer."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.errors import ConfigError
from maxpipe.optim.optax_update import OptaxOptimizer
from maxpipe.optim.update import Optimizer
from tests.optim.test_update import CONFIG, optimizer_of, tree

PLAIN = dataclasses.replace(CONFIG, weight_decay=0.0)


def adam(optimizer: Optimizer) -> optax.GradientTransformation:
    config = optimizer.config
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.scale_by_learning_rate(optimizer.rate),
    )


def test_adam_equals_configured_optimizer() -> None:
    usual = optimizer_of(PLAIN)
    own = OptaxOptimizer.replacing(usual, adam(usual))
    params = expected = tree(0)
    state, expected_state = own.init(params), usual.init(expected)
    for seed in range(1, 5):
        params, state = jax.jit(own.update)(tree(seed), state, params)
        expected, expected_state = jax.jit(usual.update)(tree(seed), expected_state, expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    assert int(state.updates) == int(expected_state.updates) == 4
    assert set(state.trees) == {"optax_1_mu", "optax_1_nu"}


def test_skipped_update_changes_nothing() -> None:
    usual = optimizer_of(PLAIN)
    own = OptaxOptimizer.replacing(usual, adam(usual))
    params, state = own.update(tree(1), own.init(tree(0)), tree(0))
    after, after_state = own.update(tree(2), state, params, taken=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after, params))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after_state, state))


@pytest.mark.parametrize(
    "transformation",
    [optax.sgd(0.1, momentum=0.9), optax.lion(1e-3), optax.rmsprop(1e-3), optax.nadamw(1e-3)],
)
def test_state_like_parameters_is_accepted(transformation: optax.GradientTransformation) -> None:
    own = OptaxOptimizer.replacing(optimizer_of(PLAIN), transformation)
    params = tree(0)
    state = transformation.init(params)
    for seed in (1, 2):
        changes, state = transformation.update(tree(seed), state, params)
        params = optax.apply_updates(params, changes)
    found, own_state = tree(0), own.init(tree(0))
    for seed in (1, 2):
        found, own_state = own.update(tree(seed), own_state, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, params)


@pytest.mark.parametrize(
    ("transformation", "name"),
    [
        (optax.scale_by_factored_rms(min_dim_size_to_factor=1), "v_row"),
        (optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), "gradient_step"),
        (optax.contrib.schedule_free_adamw(), "weight_sum"),
    ],
)
def test_other_state_is_rejected(transformation: optax.GradientTransformation, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptaxOptimizer.replacing(optimizer_of(PLAIN), transformation)
    assert name in caught.value.problems[0].value


@pytest.mark.parametrize(
    "config", [OptimConfig(ema_decay=0.9), OptimConfig(offload_state=True)], ids=["ema", "offload"]
)
def test_state_outside_transformation_is_rejected(config: OptimConfig) -> None:
    with pytest.raises(ConfigError, match="is not supported with an optax transformation"):
        OptaxOptimizer.replacing(optimizer_of(config), optax.sgd(0.1))
