"""Matmuls on one device whose input is gathered, or whose result is summed and scattered.

Tokens are split over an axis, dim 1 of what moves; features are split over the same axis, in what
stays. Shards go around the ring in both directions, and each is multiplied when it arrives: while
one is multiplied the next is on its way. A sum goes the other way round, and gets a product more at
each stop. In shapes t is T over the size of the axis, and dims of weights are this device's.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

TOKEN_DIM = 1
"""The dim of tokens."""


Tree = Any


def all_gather_matmul(
    x: Float[Array, "B t D"],
    weights: Sequence[Float[Array, "D ..."]],
    axis: str,
    multiply: Callable[[Array, Array], Array],
) -> list[Float[Array, "B T *dims"]]:
    """All shards times each of the weights: one ring serves them all."""
    found: list[Array | None] = [None] * len(weights)
    length, size = x.shape[TOKEN_DIM], lax.axis_size(axis)
    for place, shard in _iterate_shards(x, axis):
        for number, weight in enumerate(weights):
            part = multiply(shard, weight)
            whole = found[number]
            if whole is None:
                shape = [*part.shape]
                shape[TOKEN_DIM] *= size
                whole = lax.empty(tuple(shape), part.dtype)
            found[number] = lax.dynamic_update_slice_in_dim(whole, part, place * length, TOKEN_DIM)
    return [whole for whole in found if whole is not None]


def matmul_reduce_scatter(
    arrays: Sequence[Tree],
    multiplies: Sequence[Callable[[Tree], Float[Array, "B t D"]]],
    axis: str,
    dtype: Any,
) -> Float[Array, "B t D"]:
    """The sum over devices, and over the arrays, of each times its weight; this device's tokens.

    `arrays`, or trees of them, are `[B, T, ...]`, and what multiplies them with this device's
    weights gives float32. Sums are of that type on a device, and of `dtype` on their way.
    """
    size, mine = lax.axis_size(axis), lax.axis_index(axis)
    length = jax.tree.leaves(arrays)[0].shape[TOKEN_DIM] // size

    def part(place: Array) -> Array:
        """What this device adds to the tokens of another."""
        start = place % size * length
        cut = partial(
            lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=TOKEN_DIM
        )
        found = [
            multiply(jax.tree.map(cut, array))
            for array, multiply in zip(arrays, multiplies, strict=True)
        ]
        return sum(found[1:], found[0])

    total = part(mine)
    for step, hops in _ring_directions(size):
        # The sum that arrives here was begun by the device that is `hops` places before.
        found: Array | None = None
        for hop in range(hops, 0, -1):
            added = part(mine + step * hop)
            found = added if found is None else found.astype(jnp.float32) + added
            found = _ring_shift(found.astype(dtype), axis, step)
        if found is not None:
            total += found.astype(jnp.float32)
    return total.astype(dtype)


def ring_all_gather(x: Float[Array, "B t D"], axis: str) -> Float[Array, "B T D"]:
    """All shards, for a sum over tokens: they travel behind other matmuls.

    A matmul of each when it arrives would read and write the whole sum in float32 for each, which
    for a weight's gradient takes longer than the matmul.
    """
    rows, length, width = x.shape
    whole = lax.empty((rows, lax.axis_size(axis) * length, width), x.dtype)
    for place, shard in _iterate_shards(x, axis):
        whole = lax.dynamic_update_slice_in_dim(whole, shard, place * length, TOKEN_DIM)
    return whole


def matmul(array: Array, weight: Array, dtype: Any) -> Array:
    """Over all dims of the weight but its last, in that type."""
    count = weight.ndim - 1
    dims = ((tuple(range(array.ndim - count, array.ndim)), tuple(range(count))), ((), ()))
    return lax.dot_general(array, weight, dims, preferred_element_type=dtype)


def outer_product(one: Array, other: Array) -> Array:
    """Summed over rows and tokens in float32."""
    dims = (((0, TOKEN_DIM), (0, TOKEN_DIM)), ((), ()))
    return lax.dot_general(one, other, dims, preferred_element_type=jnp.float32)


def _ring_directions(size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(step, hops) of both ways around the ring, which together reach every other device."""
    return (1, size // 2), (-1, (size - 1) // 2)


def _iterate_shards(x: Array, axis: str) -> Iterator[tuple[Array, Array]]:
    """(position of the device that a shard is from, the shard), this device's own first."""
    size, mine = lax.axis_size(axis), lax.axis_index(axis)
    yield mine, x
    moving = {step: x for step, _ in _ring_directions(size)}
    for hop in range(1, size // 2 + 1):
        for step, hops in _ring_directions(size):
            if hop <= hops:
                moving[step] = _ring_shift(moving[step], axis, step)
                yield (mine - step * hop) % size, moving[step]


def _ring_shift(x: Array, axis: str, step: int) -> Array:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(place, (place + step) % size) for place in range(size)])
