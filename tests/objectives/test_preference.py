"""Preference losses, compared with TRL and with the formulas in the papers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.preference import PreferenceConfig
from maxpipe.objectives import Dpo, Ipo, Orpo, Preference, make_preference

# Per pair: summed log-probabilities of the chosen and the rejected response under the policy, then
# under the reference, and the token count of each response.
PAIRS = np.array(
    [
        [-12.5, -14.25, -13.0, -13.5, 6, 7],
        [-30.0, -8.0, -20.0, -9.5, 11, 3],
        [-0.75, -55.0, -2.25, -21.0, 2, 29],
        [-5.0, -5.0, -5.0, -5.0, 4, 4],
        [-410.0, -395.0, -400.0, -401.0, 120, 118],
    ]
)


# Keys of `preference`, then losses, chosen rewards and rejected rewards, as returned by
# `DPOTrainer.dpo_loss` and `ORPOTrainer.odds_ratio_loss` of TRL 0.23.0 in float64. `ipo` and `orpo`
# use per-token means. The cross-entropy is added to the `orpo` losses.
TRL = [
    (
        {},
        [0.63259904, 1.4250806, 0.028319821, 0.69314718, 1.7839007],
        [0.05, -1, 0.15, 0, -1],
        [-0.075, 0.15, -3.4, 0, 0.6],
    ),
    (
        {"beta": 0.5},
        [0.42870068, 5.7531777, 1.9555681e-08, 0.69314718, 8.0003354],
        [0.25, -5, 0.75, 0, -5],
        [-0.375, 0.75, -17, 0, 3],
    ),
    (
        {"label_smoothing": 0.2},
        [0.65759904, 1.1950806, 0.73831982, 0.69314718, 1.4639007],
        [0.05, -1, 0.15, 0, -1],
        [-0.075, 0.15, -3.4, 0, 0.6],
    ),
    (
        {"loss": "ipo"},
        [23.131519, 41.076446, 9.4715369, 25, 26.359812],
        [0.00833333, -0.0909091, 0.075, 0, -0.00833333],
        [-0.0107143, 0.05, -0.117241, 0, 0.00508475],
    ),
    (
        {"loss": "ipo", "beta": 0.7},
        [0.27437642, 4.5087283, 1.4595735, 0.51020408, 0.71989541],
        [0.0583333, -0.636364, 0.525, 0, -0.0583333],
        [-0.075, 0.35, -0.82069, 0, 0.0355932],
    ),
    (
        {"loss": "orpo"},
        [2.1554143, 2.7998896, 0.38272816, 1.3193147, 3.4896277],
        [-0.20833333, -0.27272727, -0.0375, -0.125, -0.34166667],
        [-0.20357143, -0.26666667, -0.18965517, -0.125, -0.33474576],
    ),
    (
        {"loss": "orpo", "odds_weight": 1.5, "beta": 9.0},
        [3.1645473, 3.816526, 0.49092246, 2.2897208, 4.5110825],
        [-3.125, -4.09090909, -0.5625, -1.875, -5.125],
        [-3.05357143, -4.0, -2.84482759, -1.875, -5.02118644],
    ),
]


def evaluate_objective(
    objective: Preference, pairs: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return losses and reports of pairs packed two to a sequence."""
    count = len(pairs)
    rows = -(-count // 2)
    filled = np.zeros((2 * rows, 6), np.float32)
    filled[:count] = pairs
    there = (np.arange(2 * rows) < count).astype(np.float32).reshape(rows, 2)
    halves = [filled[:, first : first + 2].reshape(rows, 4) for first in (0, 2, 4)]
    inputs: Any = {"pairs": there, "reference": halves[1], "response_tokens": halves[2]}
    lost, reports = jax.jit(lambda scores: objective((scores,), inputs))(halves[0])
    assert all(np.isfinite(each).all() for each in (lost, *reports))
    flat = [np.asarray(each).reshape(-1)[:count] for each in (lost, *reports)]
    return flat[0], dict(zip(objective.report_names, flat[1:], strict=True))


@pytest.mark.parametrize(("keys", "wanted", "chosen", "rejected"), TRL, ids=str)
def test_losses_match_trl(
    keys: dict[str, Any], wanted: list[float], chosen: list[float], rejected: list[float]
) -> None:
    objective = make_preference(PreferenceConfig(**keys), most_pairs=2)
    lost, reports = evaluate_objective(objective, PAIRS)
    np.testing.assert_allclose(lost, wanted, rtol=1e-5)
    near: Any = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(reports["reward_chosen"], chosen, **near)
    np.testing.assert_allclose(reports["reward_rejected"], rejected, **near)
    np.testing.assert_allclose(reports["margin"], np.subtract(chosen, rejected), **near)
    np.testing.assert_array_equal(reports["accuracy"], np.greater(chosen, rejected))
    np.testing.assert_allclose(reports["nats_chosen"], -PAIRS[:, 0] / PAIRS[:, 4], **near)
    np.testing.assert_allclose(reports["nats_rejected"], -PAIRS[:, 1] / PAIRS[:, 5], **near)


def test_losses_match_hand_computed_values() -> None:
    """In the first pair, the chosen response gained 0.5 nats and the rejected one lost 0.75."""
    pair = PAIRS[:1]
    [dpo], _ = evaluate_objective(Dpo(2, False), pair)
    np.testing.assert_allclose(dpo, np.log(1 + np.exp(-0.1 * 1.25)), rtol=1e-6)
    [ipo], _ = evaluate_objective(Ipo(2, True), pair)
    gap = 0.5 / 6 + 0.75 / 7
    np.testing.assert_allclose(ipo, (gap - 5) ** 2, rtol=1e-6)
    [orpo], _ = evaluate_objective(Orpo(2, True), pair)
    odds = [p / (1 - p) for p in (np.exp(-12.5 / 6), np.exp(-14.25 / 7))]
    ratio = np.log(odds[0] / odds[1])
    np.testing.assert_allclose(orpo, 12.5 / 6 + 0.1 * np.log(1 + np.exp(-ratio)), rtol=1e-6)


def test_length_normalized_loss() -> None:
    """With length normalization, each response contributes its mean log-probability per token."""
    objective = make_preference(PreferenceConfig(length_normalised="on", beta=2.0), most_pairs=2)
    [found], reports = evaluate_objective(objective, PAIRS[:1])
    gap = 0.5 / 6 + 0.75 / 7
    np.testing.assert_allclose(found, np.log(1 + np.exp(-2 * gap)), rtol=1e-6)
    np.testing.assert_allclose(reports["margin"], 2 * gap, rtol=1e-6)


def test_dpo_loss_of_unchanged_pair_is_log_two() -> None:
    same = np.array([[-3.0, -4.0, -3.0, -4.0, 2, 2]])
    lost, reports = evaluate_objective(Dpo(2, False), same)
    np.testing.assert_allclose(lost, np.log(2), rtol=1e-6)
    assert reports["margin"] == reports["accuracy"] == 0


@pytest.mark.parametrize("objective", [Dpo(2, False), Ipo(2, True), Orpo(2, True)], ids=str)
def test_gradients_are_finite_for_extreme_logprobs(objective: Preference) -> None:
    """Test empty pair slots, and responses with probability near 1 or near 0."""
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
