"""Interface of attention backends: masks, KV caches and head sharding.

Attention kernels run on one device. Callers invoke the kernels in a per-device program
(`per_device.on_shards`), with heads sharded over the tensor axis. If all mesh axes are auto axes,
sequences are also sharded. If layers have different windows, `switch_window` selects the kernel for
a layer's window at run time.
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
    """Attention mask and transformations of the scores.

    By default, queries and keys belong to the same tokens of a sequence, starting with the first
    token. If the query tokens are a subset of the sequence, `places` holds their indices.
    `key_positions` holds the positions of cached keys.
    """

    segments: Int[Array, "B T"]
    """Document ID of each query token. A query token attends only to keys of the same document."""
    positions: Int[Array, "B T"] | None = None
    """Position of each query token within its document. If None, positions are indices in the
    sequence."""
    key_segments: Int[Array, "B S"] | None = None
    """Document ID of each key. If None, the document IDs of the query tokens are used."""
    key_positions: Int[Array, "B S"] | None = None
    """Position of each key within its document. If None, keys are in sequence order."""
    places: Int[Array, " T"] | None = None
    """Indices of the query tokens within the key sequence, if the device holds only some of the
    tokens. If None, the indices are 0 to T - 1.
    """
    run: int = 0
    """Length of each contiguous run of query tokens if `places` is set. Must divide T."""
    causal: bool = True
    """Whether a query token attends only to itself and earlier tokens."""
    window: int | Int[Array, ""] = 0
    """Number of tokens that a query token attends to, including itself. 0 means all tokens."""
    windows: tuple[int, ...] = ()
    """All possible values of `window`, if `window` is an array."""
    scale: float | None = None
    """Scaling factor applied to the scores. If None, `H ** -0.5` is used."""
    soft_cap: float = 0.0
    """Soft cap on the scores: `cap * tanh(scores / cap)`. 0 disables the cap."""
    sinks: Float[Array, " N"] | None = None
    """Sink logit of each head in the softmax."""
    shared_dims: int = 0
    """Number of dims at the end of each key that are equal in all heads. Kernels can read them
    once."""
    selected: Bool[Array, "B T S"] | None = None
    """Keys that each query token can attend to. If None, it can attend to all keys."""
    image_tokens_left: Int[Array, "B T"] | None = None
    """Number of tokens of an image from each of its query tokens to its last token, or 0 for text.
    A query token attends to all tokens of its image. None without images."""
    image_tokens: int = 0
    """Number of tokens of an image, which limits `image_tokens_left`."""

    @property
    def has_places(self) -> bool:
        """Return whether keys are in sequence order, so that token order follows from indices."""
        return self.key_positions is None

    @property
    def is_self_ordered(self) -> bool:
        """Return whether queries and keys belong to the same tokens in sequence order."""
        return self.has_places and self.places is None

    def seen(self, start: int, stop: int, keys: int, *, causal: bool) -> Bool[Array, "B 1 t s"]:
        """Return a mask over the first `keys` keys that is true where query tokens `start` to
        `stop` attend to a key.

        `causal=False` omits the causal mask, which the caller applies.
        """
        key_segments = self.segments if self.key_segments is None else self.key_segments
        seen = self.segments[:, None, start:stop, None] == key_segments[:, None, None, :keys]
        if self.selected is not None:
            seen &= self.selected[:, None, start:stop, :keys]
        if not causal and isinstance(self.window, int) and not self.window:
            return seen
        if self.positions is None or self.key_positions is None:
            places = jnp.arange(start, stop) if self.places is None else self.places[start:stop]
            distance = places[:, None] - jnp.arange(keys)
        else:
            queries = self.positions[:, None, start:stop, None]
            distance = queries - self.key_positions[:, None, None, :keys]
        if causal and self.image_tokens_left is not None:
            # The last token of an image is visible to all tokens of the image.
            ahead = jnp.maximum(self.image_tokens_left[:, None, start:stop, None] - 1, 0)
            seen &= distance >= -ahead
        elif causal:
            seen &= distance >= 0
        if not isinstance(self.window, int) or self.window:
            seen &= (distance < self.window) | (jnp.asarray(self.window) == 0)
        return seen


AttentionBackend = Callable[
    [Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G v"], Mask],
    Float[Array, "B T N v"],
]
"""Function that maps (query, key, value, mask) to the attention output of each query head.

Every backend assigns the checkpoint name `context` to the attention output. A backend with a custom
gradient assigns this name in its forward rule, where it also names the log-sum-exp (`LOG_SUM`). If
the name were assigned outside the rule, the backward pass would repeat the forward pass. Naming the
output twice would save two copies.
"""


_EMPTY = -1
"""Segment ID of an empty cache slot."""


class KVCache(NamedTuple):
    """Keys and values of earlier tokens, with free slots for later tokens.

    Each head's entries are contiguous, because a query token reads all of them. The slots form a
    ring buffer: token n is in slot n modulo the number of slots.
    """

    keys: Float[Array, "B G S H"]
    """Cached keys, after RoPE."""
    values: Float[Array, "B G S v"]
    segments: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    length: Int[Array, ""]
    """Number of cached tokens per sequence."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
        """Return an empty cache; `shape` is (B, S, G, H)."""
        rows, tokens, heads, size = shape
        places = jnp.full((rows, tokens), _EMPTY, jnp.int32)
        none = jnp.zeros((rows, heads, tokens, size), dtype)
        return cls(none, none, places, places, jnp.zeros((), jnp.int32))

    @classmethod
    def axes(cls) -> Any:
        """Return the logical axes of each array."""
        kept, places = ("batch", "kv_heads", None, "head_dim"), ("batch", None)
        return cls._make((kept, kept, places, places, ()))

    @property
    def key(self) -> Float[Array, "B S G H"]:
        """Return the keys in the layout that attention backends expect."""
        return jnp.swapaxes(self.keys, 1, 2)

    @property
    def value(self) -> Float[Array, "B S G v"]:
        """Return the values in the layout that attention backends expect."""
        return jnp.swapaxes(self.values, 1, 2)

    def append(
        self,
        key: Float[Array, "B T G H"],
        value: Float[Array, "B T G v"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> KVCache:
        """Return the cache with T more tokens, which overwrite the oldest tokens if the cache is
        full.
        """
        put = partial(_put, start=self.length)
        return KVCache(
            put(self.keys, jnp.swapaxes(key, 1, 2), 2),
            put(self.values, jnp.swapaxes(value, 1, 2), 2),
            put(self.segments, segments, 1),
            put(self.positions, positions, 1),
            self.length + key.shape[1],
        )


def _put(old: Array, new: Array, axis: int, start: Int[Array, ""]) -> Array:
    """Write new tokens into the ring buffer, starting at slot `start`."""
    size, count, new = old.shape[axis], new.shape[axis], new.astype(old.dtype)
    if count == 1:
        return lax.dynamic_update_slice_in_dim(old, new, start % size, axis)
    # The new tokens may wrap around the end of the ring buffer.
    number = (jnp.arange(size) - start) % size
    turned = jnp.take(new, jnp.minimum(number, count - 1), axis)
    is_new = (number < count).reshape([-1 if dim == axis else 1 for dim in range(old.ndim)])
    return jnp.where(is_new, turned, old)


def query_axes(query: Float[Array, "B T N H"]) -> tuple[tuple[str, ...], str | None]:
    """Return the mesh axes that shard sequences and the axis that shards heads in the current
    program.
    """
    return shard_axes(query.shape[0], query.shape[2])


def shard_axes(num_rows: int, num_heads: int) -> tuple[tuple[str, ...], str | None]:
    """Return the mesh axes that shard these numbers of sequences and of heads."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    rows = tuple(axis for axis in BATCH_AXES if axis in automatic)
    if num_rows % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()
    return rows, TENSOR if _head_shards(num_heads) > 1 else None


def repeat_kv_heads(x: Float[Array, "B S G h"], num_heads: int) -> Float[Array, "B S g h"]:
    """Repeat key/value heads if there are fewer key/value heads than head shards."""
    count, shards = x.shape[2], _head_shards(num_heads)
    return jnp.repeat(x, math.lcm(count, shards) // count, axis=2) if count % shards else x


def _head_shards(num_heads: int) -> int:
    """Return the number of head shards in the current program."""
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or TENSOR in mesh.manual_axes:
        return 1
    size = mesh.shape[TENSOR]
    return 1 if num_heads % size else size


def switch_window(
    run: Callable[..., Any], window: Int[Array, ""] | None, sizes: Sequence[int], arrays: Any
) -> Any:
    """Call `run(size, *arrays)` with the entry of `sizes` that equals `window`; if `window` is
    None, `sizes` has a single entry.
    """
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
