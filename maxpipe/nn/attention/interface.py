"""What attention is asked for: which keys a query sees, and how scores become shares.

How attention is divided over axes that the pipeline's program leaves to the compiler.

A kernel is a program for one device: what calls it enters the devices' own programs
(`per_device.on_shards`), heads over tensor, and rows where the program is automatic throughout.

A kernel for each size of window, where layers differ in it and data say which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import BATCH_AXES, TENSOR


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, and what happens to their scores.

    Queries and keys stand in one row, from its first token on, unless queries have places of their
    own in it, or keys have positions of their own, as those of a cache do.
    """

    segments: Int[Array, "B T"]
    """Documents of the queries: a query sees its own only."""
    positions: Int[Array, "B T"] | None = None
    """Of the queries in their documents. None: by their places in the row."""
    key_segments: Int[Array, "B S"] | None = None
    """None: those of the queries."""
    key_positions: Int[Array, "B S"] | None = None
    """None: keys stand in the row, the first at place 0."""
    places: Int[Array, " T"] | None = None
    """Of the queries in the row of the keys, when a device has some of them. None: 0 to T - 1."""
    run: int = 0
    """With `places`: how many queries stand next to each other in the row; then as many elsewhere.
    Divides T."""
    causal: bool = True
    """A query sees itself and what is before it."""
    window: int | Int[Array, ""] = 0
    """Tokens that a query sees at most, itself and those right before it. 0: all."""
    windows: tuple[int, ...] = ()
    """Sizes of which `window` is one, where it is an array."""
    scale: float | None = None
    """Of the scores. None: `H ** -0.5`."""
    soft_cap: float = 0.0
    """Scores become `cap * tanh(scores / cap)`. 0: as they are."""
    sinks: Float[Array, " N"] | None = None
    """A score for each head that takes a share and adds nothing."""

    @property
    def has_places(self) -> bool:
        """Whether keys stand in a row with the queries: places tell what is before what."""
        return self.key_positions is None

    @property
    def is_self_ordered(self) -> bool:
        """Whether queries and keys are the same tokens of a row, in its order."""
        return self.has_places and self.places is None

    def seen(self, start: int, stop: int, keys: int, *, causal: bool) -> Bool[Array, "B 1 t s"]:
        """Whether queries from `start` to `stop` see each of the first `keys` keys.

        `causal=False` leaves out causality, which the caller sees to.
        """
        key_segments = self.segments if self.key_segments is None else self.key_segments
        seen = self.segments[:, None, start:stop, None] == key_segments[:, None, None, :keys]
        if not causal and isinstance(self.window, int) and not self.window:
            return seen
        if self.positions is None or self.key_positions is None:
            places = jnp.arange(start, stop) if self.places is None else self.places[start:stop]
            distance = places[:, None] - jnp.arange(keys)
        else:
            queries = self.positions[:, None, start:stop, None]
            distance = queries - self.key_positions[:, None, None, :keys]
        if causal:
            seen &= distance >= 0
        if not isinstance(self.window, int) or self.window:
            seen &= (distance < self.window) | (jnp.asarray(self.window) == 0)
        return seen


AttentionBackend = Callable[
    [Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G v"], Mask],
    Float[Array, "B T N v"],
]
"""(query, key, value, mask) -> mixed values of each query head.

A backend names its result `context`. One with a backward of its own does so in its forward rule,
where it names `parts.attention.LOG_SUM` as well: a name behind the rule would not spare its
backward another forward, and two names would keep two copies."""


_EMPTY = -1
"""Segment of a place in a cache that holds no token."""


class KVCache(NamedTuple):
    """Keys and values of earlier tokens, with room for later ones.

    Each head's lie together: a query reads all of them. Places are a ring: token n is at n modulo
    their number.
    """

    keys: Float[Array, "B G S H"]
    """Rotated."""
    values: Float[Array, "B G S v"]
    segments: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    length: Int[Array, ""]
    """Tokens of each row that it holds."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
        """Room for `shape` = (B, S, G, H)."""
        rows, tokens, heads, size = shape
        places = jnp.full((rows, tokens), _EMPTY, jnp.int32)
        none = jnp.zeros((rows, heads, tokens, size), dtype)
        return cls(none, none, places, places, jnp.zeros((), jnp.int32))

    @classmethod
    def axes(cls) -> Any:
        """Logical axes of each array."""
        kept, places = ("batch", "kv_heads", None, "head_dim"), ("batch", None)
        return cls._make((kept, kept, places, places, ()))

    @property
    def key(self) -> Float[Array, "B S G H"]:
        """As backends take them."""
        return jnp.swapaxes(self.keys, 1, 2)

    @property
    def value(self) -> Float[Array, "B S G v"]:
        """As backends take them."""
        return jnp.swapaxes(self.values, 1, 2)

    def append(
        self,
        key: Float[Array, "B T G H"],
        value: Float[Array, "B T G v"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> KVCache:
        """With T tokens more, in place of the oldest ones where there is no room."""
        put = partial(_put, start=self.length)
        return KVCache(
            put(self.keys, jnp.swapaxes(key, 1, 2), 2),
            put(self.values, jnp.swapaxes(value, 1, 2), 2),
            put(self.segments, segments, 1),
            put(self.positions, positions, 1),
            self.length + key.shape[1],
        )


def _put(old: Array, new: Array, axis: int, start: Int[Array, ""]) -> Array:
    """New tokens from place `start` of a ring on."""
    size, count, new = old.shape[axis], new.shape[axis], new.astype(old.dtype)
    if count == 1:
        return lax.dynamic_update_slice_in_dim(old, new, start % size, axis)
    # They may lie on both sides of the ring's end.
    number = (jnp.arange(size) - start) % size
    turned = jnp.take(new, jnp.minimum(number, count - 1), axis)
    is_new = (number < count).reshape([-1 if dim == axis else 1 for dim in range(old.ndim)])
    return jnp.where(is_new, turned, old)


def query_axes(query: Float[Array, "B T N H"]) -> tuple[tuple[str, ...], str | None]:
    """(axes over which rows are divided here, that of the heads)."""
    mesh = jax.sharding.get_abstract_mesh()
    rest = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    rows = tuple(axis for axis in BATCH_AXES if axis in rest)
    if query.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()
    return rows, TENSOR if _head_shards(query.shape[2]) > 1 else None


def repeat_kv_heads(x: Float[Array, "B S G h"], num_heads: int) -> Float[Array, "B S g h"]:
    """Key/value heads, some repeated where there are fewer than shards of the query heads."""
    count, shards = x.shape[2], _head_shards(num_heads)
    return jnp.repeat(x, math.lcm(count, shards) // count, axis=2) if count % shards else x


def _head_shards(num_heads: int) -> int:
    """Devices over which heads are split here."""
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or TENSOR in mesh.manual_axes:
        return 1
    size = mesh.shape[TENSOR]
    return 1 if num_heads % size else size


def switch_window(
    run: Callable[..., Any], window: Int[Array, ""] | None, sizes: Sequence[int], arrays: Any
) -> Any:
    """`run(size, *arrays)` with the size that is asked for, None for the only one."""
    if window is None or len(sizes) == 1:
        return run(sizes[0], *arrays)
    number = sum((window > size).astype(jnp.int32) for size in sizes[:-1])
    with jax.named_scope(scopes.WINDOW_SWITCH):
        return lax.switch(number, [_window_branch(run, size) for size in sizes], *arrays)


def _window_branch(run: Callable[..., Any], window: int) -> Callable[..., Any]:
    def branch(*arrays: Any) -> Any:
        with jax.named_scope(scopes.window(window)):
            return run(window, *arrays)

    return branch
