"""Arrays that wait between slots: buffers of one slot each, read and written by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel.memory_order import laid_out
from maxpipe.parallel.per_device import vary
from maxpipe.pipeline.remat import Kept

Tree = Any
LANES = 128
"""Length of a TPU's vector registers: shorter minor dims are padded to it."""
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def room(count: int, like: Any) -> jax.Array:
    """Slots for arrays like this one, where it is kept; their contents are undefined."""
    empty = vary(lax.empty((count, *like.shape), like.dtype))
    return jax.device_put(empty, _HOST) if isinstance(like, Kept) and like.on_host else empty


def read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """The contents of a slot."""
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)


def write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """The buffer with the value in a slot."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def microbatch(batch: Tree, index: jax.Array) -> Tree:
    """The batch's arrays of one microbatch, of microbatch 0 when idle."""
    return jax.tree.map(lambda leaf: read(leaf, jnp.maximum(index, 0)), batch)


def read_all(buffers: Sequence[jax.Array], slot: jax.Array, *, pinned: bool) -> list[jax.Array]:
    """What each buffer has in a slot; `pinned` as it was written."""
    values = [read(buffer, slot) for buffer in buffers]
    return [_pinned(value) for value in values] if pinned else values


def write_all(
    buffers: Sequence[jax.Array],
    slot: jax.Array,
    values: Sequence[jax.Array],
    used: jax.Array | None,
    *,
    pinned: bool,
) -> list[jax.Array]:
    """Each value into its buffer, where the turn counts.

    `pinned` fixes how the values lie in memory. XLA carries the layout that the writing loop
    prefers into the loop that reads, but through one loop only: in loops within loops, as unlike
    layers have them, reader and writer choose by themselves, and the whole buffer is copied in each
    tick. Without such loops XLA's own choice is faster by some percent.
    """

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if used is not None:
            # Nothing is computed in host memory: what is kept there comes and goes.
            space = jax.typeof(buffer).memory_space
            new, old = (jax.device_put(a, _DEVICE) for a in (value, read(buffer, slot)))
            value = jax.device_put(jnp.where(used, new, old), space)
        return write(buffer, slot, _pinned(value) if pinned else value)

    return [put(*pair) for pair in zip(buffers, values, strict=True)]


def _pinned(value: jax.Array) -> jax.Array:
    """The value, on TPUs laid out by its shape alone; what is in host memory stays as it is."""
    if value.ndim < 2 or jax.typeof(value).memory_space == _HOST:
        return value
    return laid_out(value, layout_order(value.shape))


def layout_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Dims from major to minor that waste little of a TPU's tiles, of 8 or 16 by 128 elements.

    The last dim is minor if it fills the lanes, else the longest; before it stands the longest of
    the others: of `[B, T, N, H]` that is `(B, N, T, H)`, with which attention multiplies.
    """

    def longest(dims: Iterable[int]) -> int:
        return max(dims, key=lambda dim: (shape[dim], dim))

    dims = list(range(len(shape)))
    minor = dims[-1] if shape[-1] >= LANES else longest(dims)
    dims.remove(minor)
    second = longest(dims)
    dims.remove(second)
    return (*dims, second, minor)
