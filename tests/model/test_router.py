"""Routing with expert groups and router biases, compared with plain loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers.experts import Experts, Groups
from maxpipe.nn.decoder import init_params
from maxpipe.nn.router import route_tokens

EXPERTS, CHOICES = 12, 3


def part_with(**options: Any) -> Experts:
    return Experts(7, 5, EXPERTS, CHOICES, 1.0, 0.1, **options)


def best(scores: np.ndarray, count: int) -> list[int]:
    """Return the indices of the largest scores; ties are in index order."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:count]


def chosen(scores: np.ndarray, bias: np.ndarray, groups: Groups | None) -> list[int]:
    """Return the experts that a token selects from its groups."""
    ranks = scores + bias
    if groups is not None:
        size = EXPERTS // groups.num_groups
        parts = ranks.reshape(groups.num_groups, size)
        of_group = np.sort(parts, axis=1)[:, -(1 if groups.by == "max" else 2) :].sum(1)
        allowed = best(of_group, groups.per_token)
        left = np.isin(np.arange(EXPERTS) // size, allowed)
        ranks = np.where(left, ranks, -np.inf)
    return best(ranks, CHOICES)


@pytest.mark.parametrize(
    ("options", "biased"),
    [
        ({"groups": Groups(4, 2, "max"), "normalised": False, "weight_scale": 16.0}, False),
        ({"groups": Groups(3, 1, "max")}, False),
        ({"groups": Groups(4, 2, "top2"), "scores": "sigmoid", "weight_scale": 2.5}, True),
        ({"scores": "sigmoid", "normalised": False}, True),
        ({"scores": "sqrtsoftplus", "weight_scale": 1.5}, True),
        ({"scores": "sqrtsoftplus", "normalised": False}, False),
    ],
    ids=["v2", "one group", "v3", "bias alone", "v4", "square roots"],
)
def test_routing_equals_numpy_reference(options: dict[str, Any], biased: bool) -> None:
    part = part_with(**options, expert_bias_update_rate=0.1 if biased else None)
    generator = np.random.default_rng(4)
    x = generator.normal(size=(2, 9, 7)).astype(np.float32)
    router = generator.normal(size=(7, EXPERTS)).astype(np.float32)
    # Large enough to change many choices.
    bias = generator.normal(size=EXPERTS).astype(np.float32) * 0.4 * biased
    found = route_tokens(
        jnp.asarray(x), jnp.asarray(router), part, jnp.asarray(bias) if biased else None
    )
    changed = 0
    for row, token in np.ndindex(2, 9):
        logits = x[row, token].astype(np.float64) @ router
        scores = np.exp(logits) / np.exp(logits).sum()
        if part.scores == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        if part.scores == "sqrtsoftplus":
            scores = np.sqrt(np.log1p(np.exp(logits)))
        mine = chosen(scores, bias, part.groups)
        changed += mine != best(scores, CHOICES)
        weights = np.zeros(EXPERTS)
        weights[mine] = scores[mine] / (scores[mine].sum() if part.normalised else 1.0)
        assert found.expert_ids[row, token].tolist() == mine
        np.testing.assert_allclose(
            found.weights[row, token], weights * part.weight_scale, rtol=1e-5, atol=1e-7
        )
    assert changed > 2 or (not biased and part.groups is None)


def test_router_bias_has_no_gradient_and_keeps_dtype() -> None:
    part = part_with(expert_bias_update_rate=0.1)
    declared = part.params["router_bias"]
    assert declared.shape == (EXPERTS,) and declared.own_dtype and not declared.trainable
    assert part.balance_updates["router_bias"].statistic in part.statistics
    assert (
        part_with(expert_bias_update_rate=0.0).balance_updates == {}
        and "router_bias" not in part_with().params
    )
    x, router = jnp.ones((1, 2, 7)), jnp.ones((7, EXPERTS))
    slope = jax.grad(lambda bias: route_tokens(x, router, part, bias).weights.sum())
    assert not np.asarray(slope(jnp.zeros(EXPERTS))).any()


def test_table_selects_the_experts_of_hashed_layers() -> None:
    """Scores of the router weight the experts, and only these weights have a gradient."""
    part = part_with(scores="sqrtsoftplus", hash_vocabulary=30)
    declared = part.params["token_experts"]
    assert (declared.shape, declared.own_dtype) == ((30, CHOICES), "int32")
    assert not declared.trainable and "router_bias" not in part.params
    table = init_params({"table": declared}, jax.random.key(0), jnp.dtype("float32"))["table"]
    assert table.dtype == jnp.int32
    assert all(len({*row}) == CHOICES for row in table.tolist())
    counts = np.bincount(np.asarray(table).reshape(-1), minlength=EXPERTS)
    assert counts.sum() == 30 * CHOICES and counts.max() - counts.min() <= CHOICES
    generator = np.random.default_rng(4)
    x, router = generator.normal(size=(2, 9, 7)), generator.normal(size=(7, EXPERTS))
    ids = np.asarray(table)[generator.integers(0, 30, (2, 9))]
    arrays = [jnp.asarray(each, jnp.float32) for each in (x, router)]
    found = route_tokens(arrays[0], arrays[1], part, expert_ids=jnp.asarray(ids))
    scores = np.sqrt(np.log1p(np.exp(x @ router)))
    weights = np.take_along_axis(scores, ids, -1)
    weights /= weights.sum(-1, keepdims=True)
    assert (found.expert_ids == ids).all()
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(found.weights), ids, -1), weights, rtol=1e-5
    )
    np.testing.assert_allclose(found.weights.sum(-1), 1.0, rtol=1e-5)

    def slopes(read: Any) -> Any:
        return jax.grad(
            lambda router: read(
                route_tokens(arrays[0], router, part, expert_ids=jnp.asarray(ids))
            ).sum()
        )(arrays[1])

    assert not slopes(lambda routes: jnp.square(routes.probabilities)).any()
    assert slopes(lambda routes: jnp.square(routes.weights)).any()


def test_small_logits_have_finite_scores_and_gradients() -> None:
    part = part_with(scores="sqrtsoftplus")
    router = -300.0 * jnp.ones((7, EXPERTS))
    slope = jax.grad(lambda x: route_tokens(x, router, part).weights[..., 0].sum())(
        jnp.ones((1, 2, 7))
    )
    assert np.isfinite(slope).all()
