"""Permute tokens into rows sorted by expert, and back. Each row holds one token-expert pair.

A token can have several rows. The transpose of each function is another function of this module, so
gradients need no scatter, which is slow on TPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel.collectives import mark_varying


class TokenPermutation(NamedTuple):
    """Assignment of token-expert pairs to rows, with k pairs for each of n tokens."""

    choice_of_row: Int[Array, " N"]
    """Pair index in each row: the token index times k, plus the index of the choice. The index is n
    times k for an empty row."""
    row_of_choice: Int[Array, "n k"]
    """Row index of each pair; N for a dropped pair."""

    @property
    def dropped_fraction(self) -> Float[Array, " n"]:
        """Return the fraction of each token's pairs that are dropped."""
        return (self.row_of_choice == len(self.choice_of_row)).mean(-1)


def sort_by_expert(
    places: Int[Array, "n k"], num_experts: int
) -> tuple[TokenPermutation, Int[Array, " E"]]:
    """Assign a row to each pair, sorted by expert; also return the number of rows per expert.

    Expert index `num_experts` means no expert, and the pair gets no row.
    """
    flat = places.reshape(-1)
    choice = stable_argsort(flat, num_experts)
    sizes = (flat[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    row = jnp.where(flat < num_experts, invert_permutation(choice), len(flat))
    return TokenPermutation(choice, row.reshape(places.shape)), sizes


def assign_capacity_slots(
    queue: Int[Array, "B T k"], lengths: Int[Array, " Q"], room: int
) -> TokenPermutation:
    """Assign up to `room` rows to the pairs of each queue, in the order of the queues.

    First choices have priority over second choices, and earlier tokens over later tokens
    (arXiv:2006.16668). `lengths` are the lengths of the Q queues. Queue index Q means that a pair
    belongs to no queue.
    """
    chosen, num_queues = queue.shape[-1], len(lengths)
    queue = queue.transpose(2, 0, 1).reshape(
        -1
    )  # first choices of all tokens precede all second choices
    first = jnp.cumsum(lengths) - lengths
    in_line = stable_argsort(queue, num_queues)
    before = invert_permutation(in_line) - first.at[queue].get(mode="clip")
    none, num_choices = num_queues * room, len(queue)
    row = jnp.where((queue < num_queues) & (before < room), queue * room + before, none)
    number, num_tokens = jnp.arange(room), num_choices // chosen
    choice_number = in_line.at[first[:, None] + number].get(mode="clip")
    choice = choice_number % num_tokens * chosen + choice_number // num_tokens
    choice = jnp.where(number < lengths[:, None], choice, num_choices)
    return TokenPermutation(choice.reshape(-1), row.reshape(chosen, -1).T)


def stable_argsort(keys: Int[Array, " N"], largest: int) -> Int[Array, " N"]:
    """Return the permutation that stably sorts keys between 0 and `largest`."""
    # The key and its index are packed into one 32-bit integer, which is then sorted. XLA for TPU
    # takes one second to compile a sort of one array, but five seconds for a stable sort or a sort
    # of two arrays. Each layer contains several of these sorts.
    numbers, bits = jnp.arange(len(keys), dtype=jnp.uint32), (len(keys) - 1).bit_length()
    if largest.bit_length() + bits <= 32:
        words = lax.sort(keys.astype(jnp.uint32) << bits | numbers, is_stable=False)
        return (words & (2**bits - 1)).astype(jnp.int32)
    # `argsort` would mark its result as replicated, because it sorts replicated indices.
    return lax.sort((keys, mark_varying(numbers.astype(jnp.int32))), num_keys=1, is_stable=True)[1]


def invert_permutation(order: Int[Array, " N"]) -> Int[Array, " N"]:
    """Return the inverse of a permutation."""
    return stable_argsort(order, len(order) - 1)


def custom_vjp_with_static(static: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a variant of `jax.custom_vjp` for a function whose argument at index `static` is not
    an array.
    """
    return lambda run: jax.custom_vjp(run, nondiff_argnums=(static,))


@custom_vjp_with_static(static=3)
def row_weights(
    weights: Float[Array, "n E"],
    places: Int[Array, "n k"],
    rows: TokenPermutation,
    num_experts: int,
) -> Float[Array, " N"]:
    """Return the routing weight of the pair in each row, given the weights of all experts; 0 for
    empty rows.
    """
    picked = jnp.where(_is_choice(places, num_experts), weights[:, None], 0).sum(-1)
    return picked.reshape(-1).at[rows.choice_of_row].get(mode="fill", fill_value=0)


def _row_weights_backward(
    num_experts: int,
    saved: tuple[Int[Array, "n k"], Int[Array, "n k"]],
    cotangent: Float[Array, " N"],
) -> tuple[Float[Array, "n E"], None, None]:
    places, row = saved
    gradient = cotangent.at[row].get(mode="fill", fill_value=0)
    return jnp.where(_is_choice(places, num_experts), gradient[..., None], 0).sum(1), None, None


def _is_choice(places: Int[Array, "n k"], num_experts: int) -> Bool[Array, "n k E"]:
    return places[..., None] == jnp.arange(num_experts)


row_weights.defvjp(
    lambda weights, places, rows, num_experts: (
        row_weights(weights, places, rows, num_experts),
        (places, rows.row_of_choice),
    ),
    _row_weights_backward,
)


@jax.custom_vjp
def row_biases(
    biases: Float[Array, "E F"], places: Int[Array, "n k"], rows: TokenPermutation
) -> Float[Array, "N F"]:
    """Return the bias of each row's expert, using a matmul to avoid a scatter in the gradient."""
    return _one_hot_experts(places, rows, biases) @ biases


def _one_hot_experts(
    places: Int[Array, "n k"], rows: TokenPermutation, like: Array
) -> Float[Array, "N E"]:
    expert = places.reshape(-1).at[rows.choice_of_row].get(mode="clip")
    return jax.nn.one_hot(expert, len(like), dtype=like.dtype)


def _row_biases_backward(
    saved: tuple[Any, ...], cotangent: Float[Array, "N F"]
) -> tuple[Float[Array, "E F"], None, None]:
    places, rows, biases = saved
    experts = _one_hot_experts(places, rows, biases)
    # Rows without an expert can hold arbitrary values, and 0 times inf is NaN.
    cotangent = jnp.where(experts.any(1, keepdims=True), cotangent, 0)
    gradient = jnp.einsum("ne,nf->ef", experts, cotangent, preferred_element_type=jnp.float32)
    return gradient.astype(biases.dtype), None, None


row_biases.defvjp(
    lambda biases, places, rows: (row_biases(biases, places, rows), (places, rows, biases)),
    _row_biases_backward,
)


@jax.custom_vjp
def weighted_biases(
    weights: Float[Array, "n E"], biases: Float[Array, "E D"]
) -> Float[Array, "n D"]:
    """Return the weighted sum of the biases of each token's experts."""
    return weights @ biases


def _weighted_biases_backward(
    saved: tuple[Any, ...], cotangent: Float[Array, "n D"]
) -> tuple[Float[Array, "n E"], Float[Array, "E D"]]:
    weights, biases = saved
    # Tokens without an expert are masked, because the arrays can hold arbitrary values for them.
    counted = jnp.where(weights.any(1, keepdims=True), cotangent, 0)
    gradient = jnp.einsum("ne,nd->ed", weights, counted, preferred_element_type=jnp.float32)
    return cotangent @ biases.T, gradient.astype(biases.dtype)


weighted_biases.defvjp(
    lambda weights, biases: (weighted_biases(weights, biases), (weights, biases)),
    _weighted_biases_backward,
)


def gather_tokens(x: Float[Array, "*tokens D"], rows: TokenPermutation) -> Float[Array, "N D"]:
    """Return an array that holds the token of each row. Empty rows hold an arbitrary token."""
    index = rows.choice_of_row // rows.row_of_choice.shape[1]
    return x.reshape(-1, x.shape[-1]).at[index].get(mode="clip")


def sum_rows_by_token(
    x: Float[Array, "N D"], row: Int[Array, "n k"], *, complete: bool = True
) -> Float[Array, "n D"]:
    """Sum each token's rows in float32. `complete` means that no pair is dropped."""
    # A single gather is used, because XLA for TPU takes a second to compile each gather. Its rows
    # are added choice by choice: XLA for TPU needs five times the cycles for a `sum` over choices.
    gathered = x.at[row.T.reshape(-1)].get(mode="clip").reshape(*row.T.shape, -1)
    total: Any = 0.0
    for rows_of_choice, places in zip(gathered, row.T[..., None], strict=True):
        terms = rows_of_choice.astype(jnp.float32)
        total += jnp.where(complete | (places < len(x)), terms, 0.0)
    return total.astype(x.dtype)


# Permutation with empty rows, which occur if experts have a capacity limit. An empty row holds an
# arbitrary token with weight 0.


@custom_vjp_with_static(static=2)
def permute_tokens(
    x: Float[Array, "B T D"], slots: TokenPermutation, shape: tuple[int, ...]
) -> Float[Array, "S D"]:
    """Return the token of each row; `shape` is the shape of `x`."""
    assert x.shape == shape
    return gather_tokens(x, slots)


@jax.custom_vjp
def unpermute_tokens(x: Float[Array, "S D"], slots: TokenPermutation) -> Float[Array, "n D"]:
    """Return the sum of each token's rows."""
    return sum_rows_by_token(x, slots.row_of_choice, complete=False)


permute_tokens.defvjp(
    lambda x, slots, shape: (permute_tokens(x, slots, shape), slots.row_of_choice),
    lambda shape, row, cotangent: (
        sum_rows_by_token(cotangent, row, complete=False).reshape(shape),
        None,
    ),
)
unpermute_tokens.defvjp(
    lambda x, slots: (unpermute_tokens(x, slots), slots),
    lambda slots, cotangent: (gather_tokens(cotangent, slots), None),
)
