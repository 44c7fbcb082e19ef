"""Tokens brought to rows, and rows back to tokens: one row for each choice of an expert.

A row has one token and a token some rows, so that each function's transpose is another of them: no
gradient is scattered, which is slow on TPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel.collectives import mark_varying


class TokenPermutation(NamedTuple):
    """Which choice of which token stands where. n tokens have k choices each."""

    choice_of_row: Int[Array, " N"]
    """In each row: a token times k, and which of its choices. n k in a row without one."""
    row_of_choice: Int[Array, "n k"]
    """Of each choice; N if it has none."""

    @property
    def dropped_fraction(self) -> Float[Array, " n"]:
        """Fraction of each token's choices that have no row."""
        return (self.row_of_choice == len(self.choice_of_row)).mean(-1)


def sort_by_expert(
    places: Int[Array, "n k"], num_experts: int
) -> tuple[TokenPermutation, Int[Array, " E"]]:
    """A row for each choice, sorted by the experts of each token; and how many each expert has.

    A choice of `num_experts` is one of no expert: it has no row.
    """
    flat = places.reshape(-1)
    choice = stable_argsort(flat, num_experts)
    sizes = (flat[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    row = jnp.where(flat < num_experts, invert_permutation(choice), len(flat))
    return TokenPermutation(choice, row.reshape(places.shape)), sizes


def assign_capacity_slots(
    queue: Int[Array, "B T k"], lengths: Int[Array, " Q"], room: int
) -> TokenPermutation:
    """Room for some choices of each queue as rows, the first queue's first.

    First choices go before second ones, earlier tokens before later ones (arXiv:2006.16668). Of the
    queues, whose `lengths` are given, a choice of Q stands in none.
    """
    chosen, num_queues = queue.shape[-1], len(lengths)
    queue = queue.transpose(2, 0, 1).reshape(-1)  # all first choices, then all second ones
    first = jnp.cumsum(lengths) - lengths
    in_line = stable_argsort(queue, num_queues)
    before = invert_permutation(in_line) - first.at[queue].get(mode="clip")
    none, num_choices = num_queues * room, len(queue)
    row = jnp.where((queue < num_queues) & (before < room), queue * room + before, none)
    number, num_tokens = jnp.arange(room), num_choices // chosen
    found = in_line.at[first[:, None] + number].get(mode="clip")
    choice = found % num_tokens * chosen + found // num_tokens
    choice = jnp.where(number < lengths[:, None], choice, num_choices)
    return TokenPermutation(choice.reshape(-1), row.reshape(chosen, -1).T)


def stable_argsort(keys: Int[Array, " N"], largest: int) -> Int[Array, " N"]:
    """The order that sorts keys from 0 to `largest`, equal ones as they were."""
    # Sorting one word for key and place takes XLA for TPU a second to compile, sorting two, or
    # keeping the order of equal ones, five; a layer has several of these sorts.
    numbers, bits = jnp.arange(len(keys), dtype=jnp.uint32), (len(keys) - 1).bit_length()
    if largest.bit_length() + bits <= 32:
        words = lax.sort(keys.astype(jnp.uint32) << bits | numbers, is_stable=False)
        return (words & (2**bits - 1)).astype(jnp.int32)
    # `argsort` would call the order the same on all devices, as what it sorts along with them is.
    return lax.sort((keys, mark_varying(numbers.astype(jnp.int32))), num_keys=1, is_stable=True)[1]


def invert_permutation(order: Int[Array, " N"]) -> Int[Array, " N"]:
    """Where each element of a permutation stands in it."""
    return stable_argsort(order, len(order) - 1)


def custom_vjp_with_static(static: int) -> Callable[[Callable[..., Any]], Any]:
    """`jax.custom_vjp` of a function of which one argument, given by its place, is no array."""
    return lambda run: jax.custom_vjp(run, nondiff_argnums=(static,))


@custom_vjp_with_static(static=3)
def row_weights(
    weights: Float[Array, "n E"],
    places: Int[Array, "n k"],
    rows: TokenPermutation,
    num_experts: int,
) -> Float[Array, " N"]:
    """Of all experts' weights for each token those of its choices, by row; 0 in other rows."""
    picked = jnp.where(_is_choice(places, num_experts), weights[:, None], 0).sum(-1)
    return picked.reshape(-1).at[rows.choice_of_row].get(mode="fill", fill_value=0)


def _row_weights_backward(
    num_experts: int,
    saved: tuple[Int[Array, "n k"], Int[Array, "n k"]],
    cotangent: Float[Array, " N"],
) -> tuple[Float[Array, "n E"], None, None]:
    places, row = saved
    found = cotangent.at[row].get(mode="fill", fill_value=0)
    return jnp.where(_is_choice(places, num_experts), found[..., None], 0).sum(1), None, None


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
    """Those of each row's expert. As a matmul: its gradient is one, and is not scattered."""
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
    # Rows of no expert may hold anything: times 0 that would be no number.
    cotangent = jnp.where(experts.any(1, keepdims=True), cotangent, 0)
    found = jnp.einsum("ne,nf->ef", experts, cotangent, preferred_element_type=jnp.float32)
    return found.astype(biases.dtype), None, None


row_biases.defvjp(
    lambda biases, places, rows: (row_biases(biases, places, rows), (places, rows, biases)),
    _row_biases_backward,
)


@jax.custom_vjp
def weighted_biases(
    weights: Float[Array, "n E"], biases: Float[Array, "E D"]
) -> Float[Array, "n D"]:
    """The sum of each token's experts' biases, by its weights."""
    return weights @ biases


def _weighted_biases_backward(
    saved: tuple[Any, ...], cotangent: Float[Array, "n D"]
) -> tuple[Float[Array, "n E"], Float[Array, "E D"]]:
    weights, biases = saved
    # As above: what has no expert may hold anything.
    counted = jnp.where(weights.any(1, keepdims=True), cotangent, 0)
    found = jnp.einsum("ne,nd->ed", weights, counted, preferred_element_type=jnp.float32)
    return cotangent @ biases.T, found.astype(biases.dtype)


weighted_biases.defvjp(
    lambda weights, biases: (weighted_biases(weights, biases), (weights, biases)),
    _weighted_biases_backward,
)


def gather_tokens(x: Float[Array, "*tokens D"], rows: TokenPermutation) -> Float[Array, "N D"]:
    """The token in each row; any in a row without one."""
    index = rows.choice_of_row // rows.row_of_choice.shape[1]
    return x.reshape(-1, x.shape[-1]).at[index].get(mode="clip")


def sum_rows_by_token(
    arrays: Sequence[Float[Array, "N D"]], row: Int[Array, "n k"], *, complete: bool = True
) -> Float[Array, "n D"]:
    """Each token's sum over its rows of all arrays. `complete`: all choices have a row."""
    total: Any = 0.0
    # One gather: each takes XLA for TPU a second to compile.
    index = row.T.reshape(-1)
    for array in arrays:
        found = array.at[index].get(mode="clip").reshape(*row.T.shape, -1).astype(jnp.float32)
        total += jnp.where(complete | (row.T[..., None] < len(array)), found, 0.0).sum(0)
    return total.astype(arrays[0].dtype)


# Rows of which some have no token, as those have that room is left in. They hold some token: its
# weight is 0, and so is all that comes of it.


@custom_vjp_with_static(static=2)
def permute_tokens(
    x: Float[Array, "B T D"], slots: TokenPermutation, shape: tuple[int, ...]
) -> Float[Array, "S D"]:
    """Each slot's token; `shape` is that of `x`."""
    assert x.shape == shape
    return gather_tokens(x, slots)


@jax.custom_vjp
def unpermute_tokens(x: Float[Array, "S D"], slots: TokenPermutation) -> Float[Array, "n D"]:
    """Each token's sum over its slots."""
    return sum_rows_by_token([x], slots.row_of_choice, complete=False)


permute_tokens.defvjp(
    lambda x, slots, shape: (permute_tokens(x, slots, shape), slots.row_of_choice),
    lambda shape, row, cotangent: (
        sum_rows_by_token([cotangent], row, complete=False).reshape(shape),
        None,
    ),
)
unpermute_tokens.defvjp(
    lambda x, slots: (unpermute_tokens(x, slots), slots),
    lambda slots, cotangent: (gather_tokens(cotangent, slots), None),
)
