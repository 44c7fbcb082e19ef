"""Which experts each token goes to, and what a run writes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers import experts
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.per_device import over_devices


class Routes(NamedTuple):
    """Where the tokens of each sequence go."""

    logits: Float[Array, "B T E"]
    """Float32."""
    likely: Float[Array, "B T E"]
    """Scores of all experts, float32, which add up to 1."""
    places: Int[Array, "B T k"]
    """Experts of each token, the best one first. Of equal scores the first counts as larger."""
    chosen: Float[Array, "B T E"]
    """1 for those, else 0."""
    weights: Float[Array, "B T E"]
    """What their outputs are multiplied with; 0 for the others."""


def routed(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    part: experts.Experts,
    bias: Float[Array, " E"] | None = None,
    logit_bias: Float[Array, " E"] | None = None,
) -> Routes:
    """The experts of each token, and the weights of their outputs.

    Experts are chosen by scores and `bias`, and weighted by scores alone (arXiv:2408.15664).
    `logit_bias` counts for both.
    """
    router = router.astype(x.dtype)
    logits = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
    if logit_bias is not None:
        logits += logit_bias.astype(jnp.float32)
    shares = jax.nn.softmax(logits) if part.scores == "softmax" else jax.nn.sigmoid(logits)
    ranks = lax.stop_gradient(shares)
    if bias is not None:
        ranks += lax.stop_gradient(bias.astype(jnp.float32))
    if part.groups is not None:
        ranks = jnp.where(_in_best_groups(ranks, part.groups), ranks, -jnp.inf)
    _, places = lax.top_k(ranks, part.per_token)
    chosen = jax.nn.one_hot(places, part.num_experts, dtype=jnp.float32).sum(-2)
    weights = shares * chosen
    if part.normalised:
        weights /= weights.sum(-1, keepdims=True)
    if part.weight_scale != 1.0:
        weights *= part.weight_scale
    likely = shares if part.scores == "softmax" else shares / shares.sum(-1, keepdims=True)
    return Routes(logits, likely, places, chosen, weights)


def _in_best_groups(ranks: Float[Array, "B T E"], groups: experts.Groups) -> Bool[Array, "B T E"]:
    """Whether an expert is in one of its token's groups."""
    within = ranks.reshape(*ranks.shape[:-1], groups.num_groups, -1)
    best, _ = lax.top_k(within, 1 if groups.by == "max" else 2)
    _, places = lax.top_k(best.sum(-1), groups.per_token)
    chosen = jax.nn.one_hot(places, groups.num_groups, dtype=jnp.bool_).any(-2)
    return jnp.repeat(chosen, within.shape[-1], axis=-1)


def reported(
    routes: Routes,
    lost: Float[Array, "B T"] | None,
    mask: Float[Array, "B T"],
    over: experts.BalanceOver = "sequence",
) -> tuple[Mapping[str, Float[Array, ""]], Mapping[str, Float[Array, " E"]]]:
    """(losses, statistics) of the target tokens; `lost` is the fraction of each token's choices."""
    counts = mask.astype(jnp.float32)
    balance, load = _balance(routes, counts[..., None], over)
    likely = lax.stop_gradient(routes.likely)
    entropy = -(likely * jnp.log(jnp.maximum(likely, 1e-30))).sum(-1)
    z = jnp.square(jax.nn.logsumexp(routes.logits, axis=-1))
    losses = {"balance": balance, "router_z": (z * counts).sum()}
    losses["entropy"] = (entropy * counts).sum()
    if lost is not None:
        losses["dropped"] = (lost.astype(jnp.float32) * counts).sum()
    return losses, {"load": load}


def _balance(
    routes: Routes, counts: Float[Array, "B T 1"], over: experts.BalanceOver
) -> tuple[Float[Array, ""], Float[Array, " E"]]:
    """The balance loss, and the tokens of each expert.

    With f the share of tokens that an expert gets, and p its mean probability, it is
    `E / k * sum(f * p)` for each token (arXiv:2101.03961); gradients flow through p. f is that of
    each sequence by itself, of this call's rows, or of those of all devices (arXiv:2501.11873).
    """
    used, likely = ((counts * each).sum(1) for each in (routes.chosen, routes.likely))
    load = used.sum(0)
    if over == "devices":
        used = over_devices(load)
    else:
        # A sequence may be divided over devices: each adds its part of what is computed of p.
        used = over_devices(used if over == "sequence" else load, (CONTEXT,))
    # As many are used as tokens times k: divided by their mean they are E / k * f.
    relative = used / jnp.maximum(used.mean(-1, keepdims=True), 1e-9)
    return (relative * likely).sum(), load
