"""Policy-gradient loss, compared with hand-computed values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.objectives import ON_POLICY, KlPolicyGradient, Policy, advantages, kl_estimate


def test_group_advantages() -> None:
    rewards = np.array([[1.0, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [3, 1, 1, 1]])
    found = advantages(rewards, "std")
    root = math.sqrt(0.75)
    wanted = [[1, -1, -1, 1], [0] * 4, [1.5 / root, -0.5 / root, -0.5 / root, -0.5 / root]]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert (found[1] == 0).all()  # exactly zero, despite rounding in the mean
    mean = advantages(rewards, "mean")
    np.testing.assert_allclose(mean, [[0.5, -0.5, -0.5, 0.5], [0] * 4, [1.5, -0.5, -0.5, -0.5]])


def test_large_rewards_stay_finite() -> None:
    assert np.isfinite(advantages(np.array([[3.4e38, -3.4e38, 3.4e38, 0]]), "std")).all()


CLIPPED = [
    # ratio, advantage, loss, slope of the loss by the log-probability, clipped
    (1.0, 2.0, -2.0, -2.0, 0),
    (1.1, 2.0, -2.2, -2.2, 0),
    (1.5, 2.0, -2.6, 0.0, 1),  # clipped at 1.3
    (0.5, 2.0, -1.0, -1.0, 0),  # below the range, but not clipped for a positive advantage
    (0.5, -2.0, 1.6, 0.0, 1),  # clipped at 0.8
    (1.5, -2.0, 3.0, 3.0, 0),
    (1.2, 0.0, 0.0, 0.0, 0),
]


@pytest.mark.parametrize(("ratio", "gain", "loss", "slope", "clipped"), CLIPPED)
def test_ratio_is_clipped(
    ratio: float, gain: float, loss: float, slope: float, clipped: int
) -> None:
    old = -1.5
    inputs = {"old_logp": jnp.full((1, 1), old), "advantages": jnp.full((1, 1), gain)}

    def lost(logp: jax.Array) -> tuple[jax.Array, jax.Array]:
        each, (entropy, is_clipped) = Policy(0.2, 0.3)((logp,), inputs)
        assert entropy.shape == is_clipped.shape == (1, 1)
        return each.sum(), is_clipped

    logp = jnp.full((1, 1), old + math.log(ratio))
    (found, is_clipped), grad = jax.value_and_grad(lost, has_aux=True)(logp)
    np.testing.assert_allclose([found, grad[0, 0]], [loss, slope], rtol=1e-5, atol=1e-6)
    assert is_clipped[0, 0] == clipped


def test_on_policy_ratio_is_exactly_one() -> None:
    logp = jnp.asarray(np.random.default_rng(0).normal(-2, 1, (3, 5)), jnp.float32)
    gains = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32)
    inputs = {"old_logp": jnp.full_like(logp, ON_POLICY), "advantages": gains}
    run = lambda logp: Policy(0.2, 0.2)((logp,), inputs)[0].sum()  # noqa: E731
    each, (entropy, clipped) = Policy(0.2, 0.2)((logp,), inputs)
    assert (each == -gains).all() and (clipped == 0).all() and (entropy == -logp).all()
    assert (jax.grad(run)(logp) == -gains).all()


def test_kl_estimate_and_kl_penalty() -> None:
    """The KL estimate is nonnegative, 0 for equal distributions, and unbiased."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    each = kl_estimate(jnp.log(p), jnp.log(q))
    np.testing.assert_allclose((p * each).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)
    assert (np.asarray(each) >= 0).all() and (kl_estimate(jnp.log(p), jnp.log(p)) == 0).all()
    objective = KlPolicyGradient(0.2, 0.2, kl=0.5)
    logp, reference = jnp.log(p)[None], jnp.log(q)[None]
    inputs = {
        "old_logp": jnp.full_like(logp, ON_POLICY),
        "advantages": jnp.ones_like(logp),
        "reference_logp": reference,
    }
    lost, reports = objective((logp,), inputs)
    assert objective.report_names == ("entropy", "clipped", "kl") and len(reports) == 3
    np.testing.assert_allclose(lost, -1 + 0.5 * each[None], rtol=1e-6)
