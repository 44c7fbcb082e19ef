"""Collective matmuls: all-gathers and reduce-scatters overlapped with matmuls.

The arrays that move between devices are sharded over tokens (dim 1), and the stationary arrays are
sharded over features, both along the same mesh axis. Shards are sent around the ring in both
directions. Each shard is multiplied while the next shard is transferred. Partial sums are sent
around the ring in the same way, and every device adds its matmul result to them. In shapes, t is T
divided by the axis size, and weights have their per-device dims.

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
"""Index of the token dim."""


Tree = Any


def all_gather_matmul(
    x: Tree,
    weights: Sequence[Float[Array, "D ..."]],
    axis: str,
    multiply: Callable[[Tree, Array], Array],
) -> list[Float[Array, "B T *dims"]]:
    """Return the gathered `x` multiplied by each weight, using a single ring of messages.

    `x` is an array or a tree of arrays `[B, t, ...]`.
    """
    outputs: list[Array | None] = [None] * len(weights)
    length, size = jax.tree.leaves(x)[0].shape[TOKEN_DIM], lax.axis_size(axis)
    for place, shard in _iterate_shards(x, axis):
        for number, weight in enumerate(weights):
            part = multiply(shard, weight)
            whole = outputs[number]
            if whole is None:
                shape = [*part.shape]
                shape[TOKEN_DIM] *= size
                whole = lax.empty(tuple(shape), part.dtype)
            outputs[number] = lax.dynamic_update_slice_in_dim(
                whole, part, place * length, TOKEN_DIM
            )
    return [whole for whole in outputs if whole is not None]


def matmul_reduce_scatter(
    arrays: Sequence[Tree],
    multiplies: Sequence[Callable[[Tree], Float[Array, "B t D"]]],
    axis: str,
    dtype: Any,
) -> Float[Array, "B t D"]:
    """Sum the matmul results over devices and arrays, and return the sum for this device's tokens.

    `arrays` are arrays or trees of arrays `[B, T, ...]`. Each function in `multiplies` multiplies
    the corresponding array by this device's weights in float32. Sums are computed in float32 and
    are sent in `dtype`.
    """
    size, own_index = lax.axis_size(axis), lax.axis_index(axis)
    length = jax.tree.leaves(arrays)[0].shape[TOKEN_DIM] // size

    def part(place: Array) -> Array:
        """Return this device's contribution to the tokens of the device at index `place`."""
        start = place % size * length
        cut = partial(
            lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=TOKEN_DIM
        )
        products = [
            multiply(jax.tree.map(cut, array))
            for array, multiply in zip(arrays, multiplies, strict=True)
        ]
        return sum(products[1:], products[0])

    total = part(own_index)
    for step, hops in _ring_directions(size):
        # The partial sum received here started on the device `hops` positions earlier.
        travelling: Array | None = None
        for hop in range(hops, 0, -1):
            added = part(own_index + step * hop)
            travelling = added if travelling is None else travelling.astype(jnp.float32) + added
            travelling = _ring_shift(travelling.astype(dtype), axis, step)
        if travelling is not None:
            total += travelling.astype(jnp.float32)
    return total.astype(dtype)


def ring_all_gather(x: Float[Array, "B t D"], axis: str) -> Float[Array, "B T D"]:
    """Gather all shards for a matmul that sums over tokens, overlapped with other matmuls.

    If each shard were multiplied on arrival, the full float32 sum would be read and written once
    per shard. For weight gradients, this memory traffic would take longer than the matmul itself.
    """
    rows, length, width = x.shape
    whole = lax.empty((rows, lax.axis_size(axis) * length, width), x.dtype)
    for place, shard in _iterate_shards(x, axis):
        whole = lax.dynamic_update_slice_in_dim(whole, shard, place * length, TOKEN_DIM)
    return whole


def matmul(array: Array, weight: Array, dtype: Any) -> Array:
    """Contract all dims of the weight except the last, with accumulation in `dtype`."""
    count = weight.ndim - 1
    dims = ((tuple(range(array.ndim - count, array.ndim)), tuple(range(count))), ((), ()))
    return lax.dot_general(array, weight, dims, preferred_element_type=dtype)


def outer_product(one: Array, other: Array) -> Array:
    """Contract the sequence and token dims, with accumulation in float32."""
    dims = (((0, TOKEN_DIM), (0, TOKEN_DIM)), ((), ()))
    return lax.dot_general(one, other, dims, preferred_element_type=jnp.float32)


def _ring_directions(size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (step, hops) for each of the two directions, which together reach all devices in the
    ring.
    """
    return (1, size // 2), (-1, (size - 1) // 2)


def _iterate_shards(x: Tree, axis: str) -> Iterator[tuple[Array, Tree]]:
    """Yield (source device index, shard) pairs, starting with this device's shard."""
    size, own_index = lax.axis_size(axis), lax.axis_index(axis)
    yield own_index, x
    moving = {step: x for step, _ in _ring_directions(size)}
    for hop in range(1, size // 2 + 1):
        for step, hops in _ring_directions(size):
            if hop <= hops:
                shift = partial(_ring_shift, axis=axis, step=step)
                moving[step] = jax.tree.map(shift, moving[step])
                yield (own_index - step * hop) % size, moving[step]


def _ring_shift(x: Array, axis: str, step: int) -> Array:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(place, (place + step) % size) for place in range(size)])
