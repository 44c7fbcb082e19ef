"""Index scores, selection of keys, and the loss of the indexer, in plain JAX for every platform.

All functions process blocks of query tokens, as plain attention does (`maxpipe.nn.attention.xla`).
Kernels can replace `select_keys` and `indexer_loss` individually.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from maxpipe.models.count import query_blocks
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel.sharding import AxisRules, constrain

_LOWEST = float(jnp.finfo(jnp.float32).min)


class IndexArrays(NamedTuple):
    """Inputs of the index scores."""

    query: Float[Array, "B T h d"]
    """Index queries after RoPE."""
    key: Float[Array, "B S d"]
    """Index keys after RoPE, which all index heads share."""
    weights: Float[Array, "B T h"]
    """Weight of each index head. Can be negative."""


def select_keys(
    index: IndexArrays, mask: Mask, top_k: int, rules: AxisRules
) -> Bool[Array, "B T S"] | None:
    """Return a mask that is true for the `top_k` keys with the largest scores of each query token.

    Keys that `mask` excludes are never selected. If fewer keys are left, all of them are selected.
    If scores are equal, keys that come first in the key sequence are preferred. The mask has no
    gradient. If there are at most `top_k` keys, the result is None.
    """
    tokens, num_keys = index.query.shape[1], index.key.shape[1]
    if num_keys <= top_k:
        return None
    index = IndexArrays(*map(lax.stop_gradient, index))
    selected = []
    for start, stop, keys in _blocks(mask, tokens, num_keys):
        seen = mask.seen(start, stop, keys, causal=mask.causal)[:, 0]
        if keys > top_k:
            scores = _block_scores(index, start, stop, keys, rules)
            seen &= largest_entries(jnp.where(seen, scores, -jnp.inf), top_k)
        selected.append(jnp.pad(seen, ((0, 0), (0, 0), (0, num_keys - keys))))
    return jnp.concatenate(selected, axis=1)


def largest_entries(scores: Float[Array, "*rows S"], count: int) -> Bool[Array, "*rows S"]:
    """Return a mask of the `count` largest entries along the last dim; earlier entries win ties."""
    threshold = lax.top_k(scores, count)[0][..., -1:]
    larger, equal = scores > threshold, scores == threshold
    free = count - larger.sum(-1, keepdims=True, dtype=jnp.int32)
    return larger | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= free))


def indexer_loss(
    index: IndexArrays,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    mask: Mask,
    loss_mask: Float[Array, "B T"],
    rules: AxisRules,
) -> Float[Array, ""]:
    """Return the divergence of the softmax of index scores from attention, summed over targets.

    The target distribution of a query token is the mean over heads of the attention probabilities.
    It covers the keys that `mask` includes. Only `index` has a gradient.
    """
    query, key = lax.stop_gradient(query), lax.stop_gradient(key)
    counts, loss = loss_mask.astype(jnp.float32), jnp.float32(0)
    for start, stop, keys in _blocks(mask, query.shape[1], key.shape[1]):
        seen = mask.seen(start, stop, keys, causal=mask.causal)
        target = _mean_probabilities(query[:, start:stop], key[:, :keys], seen, mask.scale)
        scores = _block_scores(index, start, stop, keys, rules)
        target = constrain(target, (None,) * 3, rules)
        loss += _divergence(scores, target, seen[:, 0], counts[:, start:stop])
    return loss


def _blocks(mask: Mask, tokens: int, num_keys: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, number of keys) of each block of query tokens."""
    by_place = mask.causal and mask.is_self_ordered
    for start, stop in query_blocks(tokens) if by_place else [(0, tokens)]:
        yield start, stop, stop if by_place else num_keys


def _block_scores(
    index: IndexArrays, start: int, stop: int, keys: int, rules: AxisRules
) -> Float[Array, "B t s"]:
    """Return the scores of the query tokens `start` to `stop` for the first `keys` keys."""
    scores = index_scores(
        index.query[:, start:stop], index.key[:, :keys], index.weights[:, start:stop]
    )
    return constrain(scores, (None,) * 3, rules)


@jax.custom_vjp
def index_scores(
    query: Float[Array, "B t h d"], key: Float[Array, "B s d"], weights: Float[Array, "B t h"]
) -> Float[Array, "B t s"]:
    """Return the float32 scores `sum(weight * relu(query . key))`, scaled by `(h d) ** -0.5`.

    The backward pass recomputes the scores of the heads.
    """
    rectified = jax.nn.relu(_head_scores(query, key))
    return jnp.einsum("bth,bhts->bts", _scaled(weights, query), rectified)


def _scaled(weights: Float[Array, "B t h"], query: Float[Array, "B t h d"]) -> Array:
    return weights.astype(jnp.float32) * (query.shape[2] * query.shape[3]) ** -0.5


def _head_scores(
    query: Float[Array, "B t h d"], key: Float[Array, "B s d"]
) -> Float[Array, "B h t s"]:
    return jnp.einsum("bthd,bsd->bhts", query, key, preferred_element_type=jnp.float32)


def _index_scores_backward(
    saved: tuple[Array, Array, Array], d_scores: Float[Array, "B t s"]
) -> tuple[Array, Array, Array]:
    query, key, weights = saved
    products = _head_scores(query, key)
    d_weights = jnp.einsum("bts,bhts->bth", d_scores, jax.nn.relu(products))
    d_products = jnp.einsum("bts,bth->bhts", d_scores, _scaled(weights, query))
    d_products = jnp.where(products > 0, d_products, 0.0).astype(query.dtype)
    d_query = jnp.einsum("bhts,bsd->bthd", d_products, key, preferred_element_type=jnp.float32)
    d_key = jnp.einsum("bhts,bthd->bsd", d_products, query, preferred_element_type=jnp.float32)
    d_weights = _scaled(d_weights, query)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_weights.astype(weights.dtype)


index_scores.defvjp(
    lambda query, key, weights: (index_scores(query, key, weights), (query, key, weights)),
    _index_scores_backward,
)


def _mean_probabilities(
    query: Float[Array, "B t N H"],
    key: Float[Array, "B s N H"],
    seen: Bool[Array, "B 1 t s"],
    scale: float | None,
) -> Float[Array, "B t s"]:
    """Return the mean over heads of the attention probabilities."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    return jax.nn.softmax(jnp.where(seen, scores, _LOWEST)).mean(1)


@jax.custom_vjp
def _divergence(
    scores: Float[Array, "B t s"],
    target: Float[Array, "B t s"],
    seen: Bool[Array, "B t s"],
    counts: Float[Array, "B t"],
) -> Float[Array, ""]:
    """Return `sum(target * log(target / softmax(scores)))` over the seen keys, weighted by
    `counts`. Only `scores` has a gradient.
    """
    return _divergence_forward(scores, target, seen, counts)[0]


def _divergence_forward(
    scores: Array, target: Array, seen: Array, counts: Array
) -> tuple[Float[Array, ""], Float[Array, "B t s"]]:
    log_shares = jax.nn.log_softmax(jnp.where(seen, scores, _LOWEST))
    positive = seen & (target > 0)
    logs = jnp.log(jnp.where(positive, target, 1.0)) - log_shares
    loss = (jnp.where(positive, target * logs, 0.0).sum(-1) * counts).sum()
    slopes = jnp.where(seen, jnp.exp(log_shares) - target, 0.0) * counts[..., None]
    return loss, slopes


def _divergence_backward(
    slopes: Float[Array, "B t s"], d_loss: Float[Array, ""]
) -> tuple[Array, None, None, None]:
    return d_loss * slopes, None, None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)
