"""The choice of a token from its logits: pure functions, each row by its own key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The steps follow each other in the order of these fields."""

    repetition_penalty: float = 1.0
    """Logits of tokens that the row already has are divided by it if they are positive, and
    multiplied if not (arXiv:1909.05858). 1: as they are."""
    temperature: float = 1.0
    """Logits are divided by it. 0: the most likely token, the first of equals."""
    top_k: int = 0
    """Only this many of the most likely tokens, and those as likely as the last. 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that are together as likely as this (arXiv:1904.09751), and those
    as likely as the last. 1: all."""
    min_p: float = 0.0
    """Only tokens at least this times as likely as the most likely one (arXiv:2407.01082)."""


class Choice(NamedTuple):
    """A token of each row."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    """Log-probability in nats that the model gives the token: before penalty, temperature and the
    rest. Not a number where the row's logits are not."""


def sample(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    keys: Key[Array, " B"],
    sampling: Sampling,
) -> Choice:
    """A token of each row, which depends on the row's logits, seen tokens and key alone."""
    logits = logits.astype(jnp.float32)
    scores = logits
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a penalty needs the tokens that it is for"
        scores = penalised(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        tokens = most_likely(scores)
    else:
        scores = filtered(tempered(scores, sampling.temperature), sampling)
        tokens = jax.vmap(jax.random.categorical)(keys, scores)
    taken = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return Choice(tokens.astype(jnp.int32), taken - jax.nn.logsumexp(logits, axis=-1))


def most_likely(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The first of the highest scores; the last token where scores are not numbers.

    Two reductions of one number each: on CPU `argmax`, which reduces pairs, takes five times as
    long.
    """
    last = scores.shape[-1] - 1
    is_best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(last + 1), last).min(axis=-1)


def tempered(scores: Float[Array, "B V"], temperature: float) -> Float[Array, "B V"]:
    """Scores divided by the temperature, counted from the highest, which is 0.

    So a tiny temperature, which may be 0 in float32, leaves the highest, and none overflows.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    return jnp.where(below == 0, 0.0, below / temperature)


def penalised(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """Logits with those of seen tokens made less likely by a penalty above 1."""
    less = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, less, logits)


def filtered(scores: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Scores with `-inf` for tokens that top-k, top-p or min-p exclude; each looks at what the
    one before has left. The most likely token always stays.
    """
    least = jnp.full(scores.shape[:-1], -jnp.inf)
    count = scores.shape[-1]
    if 0 < sampling.top_k < count or sampling.top_p < 1.0:
        ordered = -jnp.sort(-scores, axis=-1)
        if 0 < sampling.top_k < count:
            least = ordered[:, sampling.top_k - 1]
            ordered = jnp.where(ordered < least[:, None], -jnp.inf, ordered)
        if sampling.top_p < 1.0:
            shares = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(shares, axis=-1) - shares
            kept = jnp.where(before < sampling.top_p, ordered, jnp.inf)
            # The first is kept even if `top_p` is smaller than what rounding leaves of it.
            least = jnp.maximum(least, jnp.minimum(kept.min(axis=-1), ordered[:, 0]))
    if sampling.min_p > 0.0:
        best = scores.max(axis=-1)
        least = jnp.maximum(least, best + jnp.log(sampling.min_p))
    return jnp.where(scores < least[:, None], -jnp.inf, scores)


def row_keys(seed: int, rows: Int[Array, " B"], positions: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of each row for the token at its position: no batch or mesh changes it."""
    base = jax.random.key(seed)

    def key(row: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, row), position)

    return jax.vmap(key)(rows, positions)
