"""Routing of tokens to experts, and the losses and statistics of the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers import experts
from maxpipe.parallel.collectives import sum_count
from maxpipe.parallel.mesh import CONTEXT


class Routing(NamedTuple):
    """Selected experts and routing weights of each token."""

    logits: Float[Array, "B T E"]
    """Float32 router logits."""
    probabilities: Float[Array, "B T E"]
    """Normalized float32 scores of all experts, which sum to 1."""
    expert_ids: Int[Array, "B T k"]
    """Selected experts of each token, best first. Ties are resolved in favor of the lower expert
    index."""
    expert_mask: Float[Array, "B T E"]
    """Selection mask: 1 for selected experts and 0 for all others."""
    weights: Float[Array, "B T E"]
    """Routing weights, which multiply the outputs of selected experts; 0 for unselected experts."""


def route_tokens(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    part: experts.Experts,
    bias: Float[Array, " E"] | None = None,
    logit_bias: Float[Array, " E"] | None = None,
    expert_scale: Float[Array, " E"] | None = None,
    expert_ids: Int[Array, "B T k"] | None = None,
) -> Routing:
    """Select the experts of each token and compute their routing weights.

    `bias` affects only the selection (arXiv:2408.15664), and `expert_scale` only the weights.
    `logit_bias` affects both. If `expert_ids` is set, these experts are selected.
    """
    router = router.astype(x.dtype)
    logits = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
    if logit_bias is not None:
        logits += logit_bias.astype(jnp.float32)
    shares = _SCORES[part.scores](logits)
    places = _select(logits, shares, part, bias) if expert_ids is None else expert_ids
    chosen = jax.nn.one_hot(places, part.num_experts, dtype=jnp.float32).sum(-2)
    weights = shares * chosen
    if part.normalised:
        weights /= weights.sum(-1, keepdims=True)
    if part.weight_scale != 1.0:
        weights *= part.weight_scale
    if expert_scale is not None:
        weights *= expert_scale.astype(jnp.float32)
    likely = shares if part.scores == "softmax" else shares / shares.sum(-1, keepdims=True)
    if expert_ids is not None:
        # The balance loss cannot change the selection.
        likely = lax.stop_gradient(likely)
    return Routing(logits, likely, places, chosen, weights)


def _sqrt_softplus(logits: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Return `sqrt(log(1 + exp(logits)))`. Logits below -80 have no gradient, because the square
    root of 0 has none.
    """
    return jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, -80.0)))


_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _sqrt_softplus}


def _select(
    logits: Float[Array, "B T E"],
    scores: Float[Array, "B T E"],
    part: experts.Experts,
    bias: Float[Array, " E"] | None,
) -> Int[Array, "B T k"]:
    """Return the experts with the largest scores, best first."""
    # Large logits have equal sigmoids, which would not rank the experts.
    plain = part.scores != "softmax" and bias is None and part.groups is None
    ranks = lax.stop_gradient(logits if plain else scores)
    if bias is not None:
        ranks += lax.stop_gradient(bias.astype(jnp.float32))
    if part.groups is not None:
        ranks = jnp.where(_in_best_groups(ranks, part.groups), ranks, -jnp.inf)
    return lax.top_k(ranks, part.per_token)[1]


def _in_best_groups(ranks: Float[Array, "B T E"], groups: experts.Groups) -> Bool[Array, "B T E"]:
    """Return whether each expert belongs to one of the groups selected for the token."""
    within = ranks.reshape(*ranks.shape[:-1], groups.num_groups, -1)
    best, _ = lax.top_k(within, 1 if groups.by == "max" else 2)
    _, places = lax.top_k(best.sum(-1), groups.per_token)
    chosen = jax.nn.one_hot(places, groups.num_groups, dtype=jnp.bool_).any(-2)
    return jnp.repeat(chosen, within.shape[-1], axis=-1)


def compute_router_metrics(
    routes: Routing,
    lost: Float[Array, "B T"] | None,
    mask: Float[Array, "B T"],
    over: experts.BalanceOver = "sequence",
) -> tuple[Mapping[str, Float[Array, ""]], Mapping[str, Float[Array, " E"]]]:
    """Return losses and statistics over the target tokens.

    `lost` is the fraction of each token's experts that dropped the token.
    """
    counts = mask.astype(jnp.float32)
    balance, load = _balance(routes, counts[..., None], over)
    likely = lax.stop_gradient(routes.probabilities)
    entropy = -(likely * jnp.log(jnp.maximum(likely, 1e-30))).sum(-1)
    z = jnp.square(jax.nn.logsumexp(routes.logits, axis=-1))
    losses = {"balance": balance, "router_z": (z * counts).sum()}
    losses["entropy"] = (entropy * counts).sum()
    if lost is not None:
        losses["dropped"] = (lost.astype(jnp.float32) * counts).sum()
    return losses, {"load": load}


def _balance(
    routes: Routing, counts: Float[Array, "B T 1"], over: experts.BalanceOver
) -> tuple[Float[Array, ""], Float[Array, " E"]]:
    """Compute the load-balance loss and the number of tokens that each expert receives.

    The loss per token is `E / k * sum(f * p)`, where f is the fraction of tokens that an expert
    receives and p is the expert's mean probability (arXiv:2101.03961). Gradients flow through p.
    The fraction f is computed per sequence, over the sequences of this call, or over the sequences
    of all devices (arXiv:2501.11873).
    """
    used, likely = (
        (counts * weight).sum(1) for weight in (routes.expert_mask, routes.probabilities)
    )
    load = used.sum(0)
    if over == "devices":
        used = sum_count(load)
    else:
        # If a sequence is sharded over devices, each device adds the contribution of its tokens to
        # p.
        used = sum_count(used if over == "sequence" else load, (CONTEXT,))
    # `used` sums to the number of tokens times k, so dividing by its mean gives E / k * f.
    relative = used / jnp.maximum(used.mean(-1, keepdims=True), 1e-9)
    return (relative * likely).sum(), load
