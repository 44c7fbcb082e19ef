"""Index scores, selection of keys, and the loss of the indexer, in plain JAX for every platform.

All functions process blocks of query tokens, as plain attention does (`maxpipe.nn.attention.xla`).
Kernels can replace `select_keys` and `indexer_loss` individually.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.models.count import query_blocks
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel.sharding import AxisRules, constrain

_LOWEST = float(jnp.finfo(jnp.float32).min)
_GROUP = 128
"""Number of entries that a matmul counts."""

Block = tuple[int, int, int]
"""Start and stop of a block of query tokens, and the number of keys that they can attend to."""


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
    blocks = list(_blocks(mask, tokens, num_keys))
    return select_in_blocks(index, blocks, _seen(mask, blocks), top_k, rules)


def select_in_blocks(
    index: IndexArrays,
    blocks: Sequence[Block],
    seen: Sequence[Bool[Array, "B _ _"]],
    top_k: int,
    rules: AxisRules,
) -> Bool[Array, "B T S"]:
    """Return the selected keys of all query tokens. `seen` are the visible keys of each block."""
    index, num_keys = IndexArrays(*map(lax.stop_gradient, index)), index.key.shape[1]
    selected = []
    for (start, stop, keys), visible in zip(blocks, seen, strict=True):
        if keys > top_k:
            block = _block_of(index, start, stop, keys)
            scores = index_scores(block, index_products(block), rules)
            visible &= largest_entries(jnp.where(visible, scores, -jnp.inf), top_k)
        selected.append(jnp.pad(visible, ((0, 0), (0, 0), (0, num_keys - keys))))
    return jnp.concatenate(selected, axis=1)


def largest_entries(scores: Float[Array, "*rows S"], count: int) -> Bool[Array, "*rows S"]:
    """Return a mask of the `count` largest entries along the last dim; earlier entries win ties."""
    threshold = lax.top_k(scores, count)[0][..., -1:]
    larger, equal = scores > threshold, scores == threshold
    free = count - larger.sum(-1, keepdims=True, dtype=jnp.int32)
    return larger | (equal & (running_count(equal) <= free))


def running_count(x: Bool[Array, "*rows S"]) -> Int[Array, "*rows S"]:
    """Return the number of true entries among the first entries of each row, including the entry.

    Matmuls count in groups of entries. TPUs compile and run them faster than long cumulative sums.
    """
    *rows, size = x.shape
    padded = jnp.pad(x, [*[(0, 0)] * len(rows), (0, -size % _GROUP)])
    groups = padded.reshape(*rows, -1, _GROUP).astype(jnp.float32)
    # Zeros and ones, and the sums of a group, are exact in every precision of matmuls.
    within = jnp.einsum("...i,ij->...j", groups, jnp.tri(_GROUP, dtype=jnp.float32).T)
    totals = within[..., -1]
    counts = within + (jnp.cumsum(totals, axis=-1) - totals)[..., None]
    return counts.reshape(*rows, -1)[..., :size].astype(jnp.int32)


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
    blocks = tuple(_blocks(mask, query.shape[1], key.shape[1]))
    seen = _seen(mask, blocks)
    scale = query.shape[-1] ** -0.5 if mask.scale is None else mask.scale
    options = DivergenceOptions(blocks, _KeyTarget(scale, rules), rules)
    return divergence(index, (query, key), seen, loss_mask, options)


def divergence(
    index: IndexArrays,
    attention: Any,
    seen: Sequence[Bool[Array, "B _ _"]],
    loss_mask: Float[Array, "B T"],
    options: DivergenceOptions,
) -> Float[Array, ""]:
    """Return the divergence of the softmax of index scores from a target distribution, summed over
    targets. `attention` are the arrays from which the target is computed. They have no gradient.
    """
    counts = loss_mask.astype(jnp.float32)
    return _loss(index, lax.stop_gradient(attention), tuple(seen), counts, options)


@jax.custom_vjp
def tie_cotangents(x: Array, index: IndexArrays) -> tuple[Array, IndexArrays]:
    """Return both arguments unchanged. The cotangent of `x` depends on those of `index`.

    If the backward pass is split, the part that computes the gradient of the layer's input then
    also computes the cotangents of `index`. Otherwise, the weight gradients would repeat the
    attention scores, and need the arrays from which these are computed.
    """
    return x, index


tie_cotangents.defvjp(
    lambda x, index: ((x, index), None),
    lambda _, cotangents: lax.optimization_barrier(cotangents),
)


def _seen(mask: Mask, blocks: Sequence[Block]) -> tuple[Bool[Array, "B _ _"], ...]:
    """Return the visible keys of each block of query tokens."""
    return tuple(
        mask.seen(start, stop, keys, causal=mask.causal)[:, 0] for start, stop, keys in blocks
    )


def _blocks(mask: Mask, tokens: int, num_keys: int) -> Iterator[Block]:
    """Yield the blocks of query tokens."""
    by_place = mask.causal and mask.is_self_ordered
    for start, stop in query_blocks(tokens) if by_place else [(0, tokens)]:
        yield start, stop, stop if by_place else num_keys


def _block_of(index: IndexArrays, start: int, stop: int, keys: int) -> IndexArrays:
    """Return the arrays of the query tokens `start` to `stop` and of the first `keys` keys."""
    return IndexArrays(
        index.query[:, start:stop], index.key[:, :keys], index.weights[:, start:stop]
    )


def index_scores(
    index: IndexArrays, products: Float[Array, "B h t s"], rules: AxisRules
) -> Float[Array, "B t s"]:
    """Return the float32 scores `sum(weight * relu(query . key))`, scaled by `(h d) ** -0.5`.

    `products` are the products of queries and keys.
    """
    return constrain(weighted_sum(index, products, score_scale(index)), (None,) * 3, rules)


def weighted_sum(
    index: IndexArrays, products: Float[Array, "B h t s"], scale: float
) -> Float[Array, "B t s"]:
    """Return the float32 scores, summed over the index heads in `index`."""
    weights = index.weights.astype(jnp.float32) * scale
    return jnp.einsum("bth,bhts->bts", weights, jax.nn.relu(products))


def index_products(index: IndexArrays) -> Float[Array, "B h t s"]:
    """Return the float32 products of index queries and index keys."""
    return jnp.einsum("bthd,bsd->bhts", index.query, index.key, preferred_element_type=jnp.float32)


def score_scale(index: IndexArrays) -> float:
    """Return the factor of the scores, given the arrays of all index heads."""
    return math.prod(index.query.shape[2:]) ** -0.5


def score_gradients(
    index: IndexArrays,
    products: Float[Array, "B h t s"],
    d_scores: Float[Array, "B t s"],
    scale: float,
) -> IndexArrays:
    """Return the float32 gradients of the inputs of the scores."""
    d_scores = d_scores * scale
    d_weights = jnp.einsum("bts,bhts->bth", d_scores, jax.nn.relu(products))
    d_products = jnp.einsum("bts,bth->bhts", d_scores, index.weights.astype(jnp.float32))
    d_products = jnp.where(products > 0, d_products, 0.0).astype(index.query.dtype)
    times = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_query = times("bhts,bsd->bthd", d_products, index.key)
    d_key = times("bhts,bthd->bsd", d_products, index.query)
    return IndexArrays(d_query, d_key, d_weights)


class Target(Protocol):
    """Function that computes the target distribution of a block. Instances are compared by value,
    as static arguments.
    """

    def __call__(
        self, attention: Any, seen: Bool[Array, "B t s"], block: Block
    ) -> Float[Array, "B t s"]:
        """Return the distribution over the visible keys of each query token."""
        ...


class DivergenceOptions(NamedTuple):
    """Static arguments of the loss."""

    blocks: tuple[Block, ...]
    """Blocks of query tokens."""
    target: Target
    """Function that computes the target distribution."""
    rules: AxisRules


@dataclass(frozen=True)
class _KeyTarget:
    """Mean over heads of the attention probabilities of all visible keys."""

    scale: float
    """Factor by which the attention scores are multiplied."""
    rules: AxisRules

    def __call__(
        self, attention: Any, seen: Bool[Array, "B t s"], block: Block
    ) -> Float[Array, "B t s"]:
        """Return the target of a block; `attention` are queries and keys."""
        (query, key), (start, stop, keys) = attention, block
        query, key = query[:, start:stop], key[:, :keys]
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(seen[:, None], scores * self.scale, _LOWEST))
        return constrain(shares.mean(1), (None,) * 3, self.rules)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(
    index: IndexArrays,
    attention: Any,
    seen: tuple[Bool[Array, "B _ _"], ...],
    counts: Float[Array, "B T"],
    options: DivergenceOptions,
) -> Float[Array, ""]:
    """Return the loss. `counts` are the weights of the query tokens."""
    return _loss_forward(index, attention, seen, counts, options)[0]


def _loss_forward(
    index: IndexArrays,
    attention: Any,
    seen: tuple[Bool[Array, "B _ _"], ...],
    counts: Float[Array, "B T"],
    options: DivergenceOptions,
) -> tuple[Float[Array, ""], IndexArrays]:
    """Return the loss and its gradients, so that no array of token pairs is saved."""
    losses, gradients = [], []
    for (start, stop, keys), visible in zip(options.blocks, seen, strict=True):
        block = _block_of(index, start, stop, keys)
        products = index_products(block)
        target = options.target(attention, visible, (start, stop, keys))
        scores = index_scores(block, products, options.rules)
        loss, slopes = _divergence(scores, target, visible, counts[:, start:stop])
        losses.append(loss)
        d_query, d_key, d_weights = score_gradients(block, products, slopes, score_scale(index))
        d_key = jnp.pad(d_key, ((0, 0), (0, index.key.shape[1] - keys), (0, 0)))
        gradients.append(IndexArrays(d_query, d_key, d_weights))
    d_query, d_key, d_weights = zip(*gradients, strict=True)
    total = IndexArrays(
        jnp.concatenate(d_query, 1), reduce(jnp.add, d_key), jnp.concatenate(d_weights, 1)
    )
    narrow = (each.astype(like.dtype) for each, like in zip(total, index, strict=True))
    return reduce(jnp.add, losses), IndexArrays(*narrow)


def _loss_backward(
    options: DivergenceOptions, gradients: IndexArrays, d_loss: Float[Array, ""]
) -> tuple[IndexArrays, None, None, None]:
    del options
    return (
        IndexArrays(*((d_loss * each).astype(each.dtype) for each in gradients)),
        None,
        None,
        None,
    )


_loss.defvjp(_loss_forward, _loss_backward)


def _divergence(
    scores: Float[Array, "B t s"],
    target: Float[Array, "B t s"],
    seen: Bool[Array, "B t s"],
    counts: Float[Array, "B t"],
) -> tuple[Float[Array, ""], Float[Array, "B t s"]]:
    """Return `sum(target * log(target / softmax(scores)))` over the seen keys, weighted by
    `counts`, and its gradient for the scores.
    """
    log_shares = jax.nn.log_softmax(jnp.where(seen, scores, _LOWEST))
    positive = seen & (target > 0)
    logs = jnp.log(jnp.where(positive, target, 1.0)) - log_shares
    loss = (jnp.where(positive, target * logs, 0.0).sum(-1) * counts).sum()
    return loss, jnp.where(seen, jnp.exp(log_shares) - target, 0.0) * counts[..., None]
