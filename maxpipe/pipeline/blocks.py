"""What each token has for itself, computed for a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from maxpipe.parallel.per_device import vary

Tree = Any
OfTokens = Callable[..., tuple[Tree, Tree]]
"""(activations, which count, more arrays) -> what is summed over tokens, and arrays
`[B, T, ...]`."""


def by_blocks(
    run: OfTokens,
    size: int,
    x: Float[Array, "B T D"],
    mask: Float[Array, "B T"],
    more: Tree,
) -> tuple[Tree, Tree]:
    """`run` of all tokens, `size` of them at most at a time; 0 for all of them at once.

    `more` are arrays `[B, T, ...]`.

    Blocks are of one size: where that does not divide the tokens, the last block begins with tokens
    of the one before it, which do not count again. Sums are in float32.
    """
    rows, length = mask.shape
    total = rows * length
    if not 0 < size < total:
        return run(x, mask, more)
    count = -(-total // size)
    size = -(-total // count)
    flat = jax.tree.map(lambda a: a.reshape(1, total, *a.shape[2:]), (x, mask, more))

    def block(number: Array) -> tuple[Tree, Array, Array]:
        start = jnp.minimum(number * size, total - size)
        own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, 1), flat)
        return own, start, (start + jnp.arange(size) >= number * size)[None]

    def one(number: Array, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        (x, mask, more), start, fresh = block(number)
        found, arrays = run(x, jnp.where(fresh, mask, 0), more)

        def put(whole: Array, part: Array) -> Array:
            if total % size:
                old = lax.dynamic_slice_in_dim(whole, start, size, 1)
                keep = fresh.reshape(*fresh.shape, *(1,) * (part.ndim - 2))
                part = jnp.where(keep, part, old)
            return lax.dynamic_update_slice_in_dim(whole, part, start, 1)

        sums, wholes = state
        return jax.tree.map(jnp.add, sums, found), jax.tree.map(put, wholes, arrays)

    sums, arrays = jax.eval_shape(lambda number: run(*block(number)[0]), vary(jnp.int32(0)))
    start = (
        jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), sums),
        jax.tree.map(lambda a: lax.empty((1, total, *a.shape[2:]), a.dtype), arrays),
    )
    sums, arrays = lax.fori_loop(0, count, one, vary(start))
    return sums, jax.tree.map(lambda a: a.reshape(rows, length, *a.shape[2:]), arrays)
