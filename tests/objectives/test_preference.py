"""Losses of pairs: TRL's formulas and the papers', on numbers of their own."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.tuning_schema import PreferenceConfig
from maxpipe.objectives.preference import Dpo, Ipo, Orpo, Preference, of_config

# Of a pair: sums of log-probabilities of the chosen and of the rejected response, those of the
# reference, tokens of each response.
PAIRS = np.array(
    [
        [-12.5, -14.25, -13.0, -13.5, 6, 7],
        [-30.0, -8.0, -20.0, -9.5, 11, 3],
        [-0.75, -55.0, -2.25, -21.0, 2, 29],
        [-5.0, -5.0, -5.0, -5.0, 4, 4],
        [-410.0, -395.0, -400.0, -401.0, 120, 118],
    ]
)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def trl(pairs: np.ndarray, loss: str, *, beta: float, smoothing: float = 0.0, mean: bool = False):
    """`DPOTrainer.dpo_loss` and `ORPOTrainer.odds_ratio_loss`, as TRL has published them."""
    chosen, rejected, reference_chosen, reference_rejected, *tokens = pairs.T
    if mean or loss in ("ipo", "orpo"):
        chosen, rejected = chosen / tokens[0], rejected / tokens[1]
        reference_chosen, reference_rejected = (
            reference_chosen / tokens[0],
            reference_rejected / tokens[1],
        )
    if loss == "orpo":
        odds = (chosen - rejected) - (np.log1p(-np.exp(chosen)) - np.log1p(-np.exp(rejected)))
        return -chosen - beta * log_sigmoid(odds), beta * chosen, beta * rejected
    logits = (chosen - rejected) - (reference_chosen - reference_rejected)
    rewards = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
    if loss == "ipo":
        return (logits - 1 / (2 * beta)) ** 2, *rewards
    lost = -log_sigmoid(beta * logits) * (1 - smoothing) - log_sigmoid(-beta * logits) * smoothing
    return lost, *rewards


def called(objective: Preference, pairs: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses and reports, of rows with two places for a pair."""
    count = len(pairs)
    rows = -(-count // 2)
    filled = np.zeros((2 * rows, 6), np.float32)
    filled[:count] = pairs
    there = (np.arange(2 * rows) < count).astype(np.float32).reshape(rows, 2)
    halves = [filled[:, first : first + 2].reshape(rows, 4) for first in (0, 2, 4)]
    inputs = {"pairs": there, "reference": halves[1], "response_tokens": halves[2]}
    lost, reports = jax.jit(lambda scores: objective((scores,), inputs))(halves[0])
    assert all(np.isfinite(each).all() for each in (lost, *reports))
    flat = [np.asarray(each).reshape(-1)[:count] for each in (lost, *reports)]
    return flat[0], dict(zip(objective.reported, flat[1:], strict=True))


@pytest.mark.parametrize(
    ("keys", "formula"),
    [
        ({}, {"loss": "dpo", "beta": 0.1}),
        ({"beta": 0.5}, {"loss": "dpo", "beta": 0.5}),
        ({"label_smoothing": 0.2}, {"loss": "dpo", "beta": 0.1, "smoothing": 0.2}),
        ({"length_normalised": "on"}, {"loss": "dpo", "beta": 0.1, "mean": True}),
        ({"loss": "ipo"}, {"loss": "ipo", "beta": 0.1}),
        ({"loss": "ipo", "beta": 0.7}, {"loss": "ipo", "beta": 0.7}),
        ({"loss": "orpo"}, {"loss": "orpo", "beta": 0.1}),
        ({"loss": "orpo", "odds_weight": 1.5, "beta": 9.0}, {"loss": "orpo", "beta": 1.5}),
    ],
    ids=str,
)
def test_losses_are_those_of_trl(keys: dict[str, Any], formula: dict[str, Any]) -> None:
    objective = of_config(PreferenceConfig(**keys), most_pairs=2)
    lost, reports = called(objective, PAIRS)
    wanted, chosen, rejected = trl(PAIRS, **formula)
    np.testing.assert_allclose(lost, wanted, rtol=1e-5)
    near = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(reports["reward_chosen"], chosen, **near)
    np.testing.assert_allclose(reports["reward_rejected"], rejected, **near)
    np.testing.assert_allclose(reports["margin"], chosen - rejected, **near)
    np.testing.assert_array_equal(reports["accuracy"], chosen > rejected)
    np.testing.assert_allclose(reports["nats_chosen"], -PAIRS[:, 0] / PAIRS[:, 4], **near)
    np.testing.assert_allclose(reports["nats_rejected"], -PAIRS[:, 1] / PAIRS[:, 5], **near)


def test_by_hand() -> None:
    """Of the first pair: the chosen response gained 0.5 nats, the rejected one lost 0.75."""
    pair = PAIRS[:1]
    [dpo], _ = called(Dpo(2, False), pair)
    np.testing.assert_allclose(dpo, np.log(1 + np.exp(-0.1 * 1.25)), rtol=1e-6)
    [ipo], _ = called(Ipo(2, True), pair)
    gap = 0.5 / 6 + 0.75 / 7
    np.testing.assert_allclose(ipo, (gap - 5) ** 2, rtol=1e-6)
    [orpo], _ = called(Orpo(2, True), pair)
    odds = [p / (1 - p) for p in (np.exp(-12.5 / 6), np.exp(-14.25 / 7))]
    ratio = np.log(odds[0] / odds[1])
    np.testing.assert_allclose(orpo, 12.5 / 6 + 0.1 * np.log(1 + np.exp(-ratio)), rtol=1e-6)


def test_a_pair_that_did_not_move_costs_log_two() -> None:
    same = np.array([[-3.0, -4.0, -3.0, -4.0, 2, 2]])
    lost, reports = called(Dpo(2, False), same)
    np.testing.assert_allclose(lost, np.log(2), rtol=1e-6)
    assert reports["margin"] == reports["accuracy"] == 0


@pytest.mark.parametrize("objective", [Dpo(2, False), Ipo(2, True), Orpo(2, True)], ids=str)
def test_gradients_are_finite_everywhere(objective: Preference) -> None:
    """Also of a place without a pair, of a response that is certain, and of one that cannot be."""
    chosen, rejected = np.array([0.0, -1e-9, -1e-3, -1e4], np.float32), np.float32(-5.0)
    for one, other in itertools.permutations([*chosen, rejected], 2):
        scores = jnp.array([[one, other, 0.0, 0.0]])
        tokens = jnp.array([[3.0, 2.0, 0.0, 0.0]])
        inputs = {"pairs": jnp.array([[1.0, 0.0]]), "reference": scores - 1}
        inputs["response_tokens"] = tokens

        def total(scores: jax.Array, inputs: Any = inputs) -> jax.Array:
            lost, _ = objective((scores,), inputs)
            return (lost * inputs["pairs"]).sum()

        found, gradient = jax.value_and_grad(total)(scores)
        assert np.isfinite(found) and np.isfinite(gradient).all(), (one, other)
        assert not gradient[0, 2:].any()
