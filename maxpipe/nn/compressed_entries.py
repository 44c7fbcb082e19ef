"""Compressed entries of token windows, and attention to a sliding window and to these entries.

All functions are plain JAX for every platform. Windows follow the positions within a document, so
entries never contain tokens of two documents. Backward passes recompute sums and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.models.count import query_blocks
from maxpipe.nn.attention.xla import softmax_with_sinks
from maxpipe.nn.indexer import Block
from maxpipe.parallel.sharding import AxisRules, constrain

EMPTY = -1
"""Segment ID of entries and cached tokens that do not exist."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


class Tokens(NamedTuple):
    """Documents and positions of tokens or entries."""

    segments: Int[Array, "B S"]
    """Document ID, or `EMPTY` for tokens and entries that do not exist."""
    positions: Int[Array, "B S"]
    """Position within the document. The position of an entry is that of its last token."""

    def join(self, later: Tokens) -> Tokens:
        """Return these tokens followed by `later`."""
        pairs = zip(self, later, strict=True)
        return Tokens(*(jnp.concatenate(pair, axis=1) for pair in pairs))

    def between(self, start: int, stop: int) -> Tokens:
        """Return the tokens `start` to `stop`."""
        return Tokens(self.segments[:, start:stop], self.positions[:, start:stop])

    @classmethod
    def empty(cls, rows: int, count: int) -> Tokens:
        """Return tokens that do not exist."""
        places = jnp.full((rows, count), EMPTY, jnp.int32)
        return cls(places, places)


class Windows(NamedTuple):
    """Complete windows of a sequence. A block of `rate` consecutive tokens contains the last token
    of at most one window, so the windows need no sorting.
    """

    last: Int[Array, "B E"]
    """Index of the last token of the window that ends in each block."""
    follows: Bool[Array, "B E"]
    """Whether all tokens of the preceding window of the document are in the sequence."""
    tokens: Tokens
    """Documents and positions of the entries; `EMPTY` for blocks in which no window ends."""


def complete_windows(
    tokens: Tokens, rate: int, earlier: int, start: int | Int[Array, ""]
) -> Windows:
    """Return the windows that end in the tokens after the first `earlier` tokens.

    `start` is the index of the first of these tokens in the full sequence, which determines the
    blocks of tokens.
    """
    segments, positions = tokens
    rows, total = segments.shape

    def is_run(length: int) -> Bool[Array, "B S"]:
        """Return whether the `length` tokens that end with each token are consecutive tokens of a
        document.
        """
        before = [(0, 0), (min(length - 1, total), 0)]
        of = jnp.pad(segments, before, constant_values=EMPTY)[:, :total]
        place = jnp.pad(positions, before)[:, :total]
        return (of == segments) & (positions - place == length - 1) & (segments > 0)

    new = total - earlier
    ends = is_run(rate) & (positions % rate == rate - 1)
    blocks = _num_blocks(new, rate, start)
    place = jnp.arange(blocks)[:, None] * rate - start % rate + jnp.arange(rate)
    inside = (place >= 0) & (place < new)
    place = jnp.clip(place, 0, new - 1) + earlier
    is_last = jnp.take(ends, place.reshape(-1), axis=1).reshape(rows, blocks, rate) & inside
    last = jnp.where(is_last, place, 0).sum(-1)
    exists = is_last.any(-1)
    at = partial(jnp.take_along_axis, indices=last, axis=1)
    entries = (jnp.where(exists, at(each), EMPTY) for each in (segments, positions))
    return Windows(last, at(is_run(2 * rate)), Tokens(*entries))


def _num_blocks(new: int, rate: int, start: int | Array) -> int:
    """Return the maximum number of blocks that contain `new` tokens. If `start` is an array, the
    first block can be partial.
    """
    return -(-new // rate) if isinstance(start, int) else (new - 2) // rate + 2


@dataclass(frozen=True)
class Compress:
    """Function that computes an entry for each window."""

    rate: int
    overlaps: bool

    def __call__(self, arrays: Any, places: Any) -> Float[Array, "B E H"]:
        """Return the entries before their norm; `arrays` are values, gates and gate biases."""
        value, gate, bias = arrays
        last, follows = places
        value, gate = (self._windows(each, last) for each in (value, gate))
        gate = gate.astype(jnp.float32) + bias.astype(jnp.float32)
        if self.overlaps:
            # The first half of the dims belongs to the entry of the next window.
            size = value.shape[-1] // 2
            before = [self._windows(each, last - self.rate) for each in arrays[:2]]
            earlier = before[1].astype(jnp.float32) + bias.astype(jnp.float32)
            earlier = jnp.where(follows[..., None, None], earlier[..., :size], _LOWEST)
            gate = jnp.concatenate([earlier, gate[..., size:]], axis=2)
            value = jnp.concatenate([before[0][..., :size], value[..., size:]], axis=2)
        shares = jax.nn.softmax(gate, axis=2).astype(value.dtype)
        return (value * shares).sum(2)

    def _windows(self, x: Float[Array, "B S F"], last: Int[Array, "B E"]) -> Array:
        """Return the rows of each window's tokens, `[B, E, rate, F]`."""
        place = jnp.maximum(last[..., None] - jnp.arange(self.rate)[::-1], 0)
        return jax.vmap(lambda rows, index: rows[index])(x, place)


@dataclass(frozen=True)
class AttendBlocks:
    """Attention to a sliding window and to entries, in blocks of query tokens."""

    window: int
    scale: float
    earlier: int
    """Number of keys before the key of the first query token."""
    rate: int
    """Number of tokens per entry, if entries are in the order of the query tokens' windows. 0 if
    all query tokens can attend to all entries."""

    def blocks(self, tokens: int, entries: int) -> list[Block]:
        """Return start, stop and number of visible entries of each block of query tokens."""
        return [
            (start, stop, min(-(-stop // self.rate), entries) if self.rate else entries)
            for start, stop in query_blocks(tokens)
        ]

    def keys(self, start: int, stop: int) -> slice:
        """Return the keys in the window of the query tokens `start` to `stop`."""
        return slice(max(0, start + self.earlier - self.window + 1), stop + self.earlier)

    def shares(
        self, query: Float[Array, "B t N H"], arrays: Any, places: Any, block: Block
    ) -> tuple[Float[Array, "B N t s"], Float[Array, "B s H"]]:
        """Return the float32 probabilities of a block, and its keys and entries. `query` are the
        queries of the block.
        """
        (key, entries, sinks), (of, of_keys, of_entries, selected) = arrays, places
        start, stop, count = block
        window = self.keys(start, stop)
        tokens, near = of.between(start, stop), of_keys.between(window.start, window.stop)
        distance = tokens.positions[..., None] - near.positions[:, None]
        seen = (tokens.segments[..., None] == near.segments[:, None]) & (distance >= 0)
        seen &= distance < self.window
        keys = key[:, window]
        if count:
            visible = visible_entries(tokens, of_entries.between(0, count))
            if selected is not None:
                visible &= selected[:, start:stop, :count]
            seen = jnp.concatenate([seen, visible], axis=-1)
            keys = jnp.concatenate([keys, entries[:, :count]], axis=1)
        scores = jnp.einsum("btnh,bsh->bnts", query, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None], scores * self.scale, _LOWEST)
        return softmax_with_sinks(scores, sinks[:, None, None]), keys

    def of_block(
        self, query: Float[Array, "B t N H"], arrays: Any, places: Any, block: Block
    ) -> Float[Array, "B t N H"]:
        """Return the attention output of a block."""
        shares, keys = self.shares(query, arrays, places, block)
        return jnp.einsum("bnts,bsh->btnh", shares.astype(keys.dtype), keys)


def visible_entries(tokens: Tokens, entries: Tokens) -> Bool[Array, "B t e"]:
    """Return whether each token can attend to each entry: an entry of its document, whose window is
    complete.
    """
    same = tokens.segments[..., None] == entries.segments[:, None]
    return same & (entries.positions[:, None] <= tokens.positions[..., None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(function: Callable[[Any, Any], Array], arrays: Any, places: Any) -> Array:
    """Return `function(arrays, places)`. The backward pass saves only the arguments.

    `places` have no gradients. All gradients are computed together, so the first part of a split
    backward pass computes them.
    """
    return function(arrays, places)


def _recomputed_backward(function: Any, saved: Any, cotangent: Array) -> tuple[Any, None]:
    arrays, places = saved
    _, pull = jax.vjp(lambda arrays: function(arrays, places), arrays)
    return lax.optimization_barrier(pull(cotangent)[0]), None


recomputed.defvjp(
    lambda function, arrays, places: (function(arrays, places), (arrays, places)),
    _recomputed_backward,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    how: AttendBlocks, query: Float[Array, "B T N H"], arrays: Any, places: Any
) -> Float[Array, "B T N H"]:
    """Return the attention output. The backward pass recomputes the scores of each block.

    `arrays` are keys, entries and sinks. `places` are the `Tokens` of queries, keys and entries,
    and the selected entries or None.
    """
    return jnp.concatenate(
        [
            how.of_block(query[:, block[0] : block[1]], arrays, places, block)
            for block in how.blocks(query.shape[1], arrays[1].shape[1])
        ],
        axis=1,
    )


def _attend_backward(how: AttendBlocks, saved: Any, cotangent: Array) -> tuple[Array, Any, None]:
    query, arrays, places = saved
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), arrays)
    d_query = []
    for block in how.blocks(query.shape[1], arrays[1].shape[1]):
        tokens = slice(*block[:2])
        run = partial(how.of_block, places=places, block=block)
        _, pull = jax.vjp(run, query[:, tokens], arrays)
        d_block, change = pull(cotangent[:, tokens])
        d_query.append(d_block)
        total = jax.tree.map(lambda sum_, new: sum_ + new.astype(jnp.float32), total, change)
    narrow = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), total, arrays)
    return *lax.optimization_barrier((jnp.concatenate(d_query, axis=1), narrow)), None


attend.defvjp(lambda how, *arguments: (attend(how, *arguments), arguments), _attend_backward)


@dataclass(frozen=True)
class EntryTarget:
    """Target distribution of an indexer over entries: the attention probabilities of the entries,
    summed over heads and normalized.
    """

    how: AttendBlocks
    rules: AxisRules

    def __call__(
        self, attention: Any, seen: Bool[Array, "B t e"], block: Block
    ) -> Float[Array, "B t e"]:
        """Return the target of a block; `attention` are the arrays that `attend` receives."""
        del seen  # part of `attention`
        query, arrays, places = attention
        start, stop, count = block
        shares, _ = self.how.shares(query[:, start:stop], arrays, places, block)
        total = constrain(shares[..., shares.shape[-1] - count :].sum(1), (None,) * 3, self.rules)
        return total / jnp.maximum(total.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
