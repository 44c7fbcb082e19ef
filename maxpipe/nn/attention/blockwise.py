"""Blockwise attention in plain JAX, with memory use linear in T on every platform.

Only the scores of one (query block, key block) pair are held in memory at a time. The forward pass
uses online softmax (arXiv:1805.02867). The backward pass recomputes probabilities from the
log-sum-exp of each query token (arXiv:2205.14135). The backward pass follows algorithm 4 of
arXiv:2307.08691, but its loops have the order of that paper's forward pass. The number of loop
iterations depends on the causal mask, the window and document boundaries. The iteration count can
differ between devices and layers, because a custom gradient avoids differentiating through the
loops. Short sequences, which have few query blocks, are processed without loops: each block
computes the scores of all its visible keys at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from maxpipe.models.count import even_blocks, unrolled_blocks
from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import xla
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import mark_varying

_MASK_VALUE = -1e30
"""Score assigned to masked keys."""
MIN_SCORE = -1e20
"""Lower bound on the maximum score of a query token. With this bound, the probabilities of a query
token without visible keys are exactly 0."""
_PADDING_SEGMENT = -2
"""Segment ID of the padding after the last key. No query token has this segment ID."""


class Options(NamedTuple):
    """Static options of a compiled attention program."""

    scale: float
    soft_cap: float
    causal: bool
    run: int
    query_block: int
    key_block: int
    mean_key_blocks: float
    """Mean number of key blocks per query block, averaged over the windows, for single-document
    sequences. Sequences of several documents need at most this many blocks."""
    unrolled: tuple[tuple[int, int, int], ...] = ()
    """(first key, start, stop) of each query block in unrolled attention: query tokens `start` to
    `stop` attend to the keys from the first key to `stop`. If the tuple is empty, the loop-based
    algorithm is used.
    """


class QueryKeyMask(NamedTuple):
    """Segment IDs, positions and window from which the mask is computed."""

    segments: Int[Array, "B T"]
    key_segments: Int[Array, "B S"]
    places: Int[Array, " T"]
    window: Int[Array, ""] | None
    """Attention window of this layer, or None if no layer has a window."""


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    mask: Mask,
    block: int = 0,
) -> Float[Array, "B T N v"]:
    """Compute attention without allocating arrays of size T x S. The output is zero for query
    tokens without visible keys.

    Sums are accumulated in float32 for every input dtype. `block` is the maximum number of query
    tokens and keys per block; if 0, the block size is selected automatically. If there is a cache,
    the `xla` backend is used instead, because few scores are computed and cached keys are not in
    sequence order.
    """
    if not mask.has_places:
        return xla.attend(query, key, value, mask)
    options, rows = prepare_mask(query, key.shape[1], mask, block)
    # The transpose of `mark_varying` sums the gradients of inputs that are replicated across
    # devices.
    return _attention(*mark_varying((query, key, value, mask.sinks, rows)), options)


def prepare_mask(
    query: Float[Array, "B T N H"], keys: int, mask: Mask, block: int = 0
) -> tuple[Options, QueryKeyMask]:
    """Return the static options and the mask arrays for this number of keys."""
    tokens = query.shape[1]
    run = mask.run or tokens
    query_block, key_block = even_blocks(run, block), even_blocks(keys, block)
    windows = (mask.window,) if isinstance(mask.window, int) else mask.windows or (0,)
    ordered = mask.is_self_ordered and mask.causal and keys == tokens and not block
    options = Options(
        scale=query.shape[-1] ** -0.5 if mask.scale is None else mask.scale,
        soft_cap=mask.soft_cap,
        causal=mask.causal,
        run=run,
        query_block=query_block,
        key_block=key_block,
        mean_key_blocks=_mean_trips(keys, query_block, key_block, mask.causal, windows),
        unrolled=unrolled_blocks(tokens, windows) if ordered else (),
    )
    windowed = not isinstance(mask.window, int) or mask.window > 0
    rows = QueryKeyMask(
        mask.segments,
        mask.segments if mask.key_segments is None else mask.key_segments,
        jnp.arange(tokens, dtype=jnp.int32) if mask.places is None else mask.places,
        jnp.asarray(mask.window, jnp.int32) if windowed else None,
    )
    return options, rows


def _mean_trips(
    keys: int, query_block: int, key_block: int, causal: bool, windows: tuple[int, ...]
) -> float:
    """Return the mean number of loop iterations over key blocks for a single-document sequence.

    The loop bounds are the same as in `_Blocks.bounds`.
    """
    first, blocks = np.arange(0, keys, query_block), -(-keys // key_block)
    last = np.minimum(first + query_block, keys) - 1
    end = np.minimum(last // key_block + 1, blocks) if causal else np.full(len(first), blocks)
    begin = [np.maximum(first - size + 1, 0) // key_block * (size > 0) for size in windows]
    return float(np.mean([end - np.minimum(start, end) for start in begin]))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    sinks: Float[Array, " N"] | None,
    rows: QueryKeyMask,
    options: Options,
) -> Float[Array, "B T N v"]:
    return _forward_rule(query, key, value, sinks, rows, options)[0]


def _forward_rule(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    rows: QueryKeyMask,
    options: Options,
) -> tuple[Array, tuple[Any, ...]]:
    """The output and the log-sum-exp are named within this rule, so that the backward pass reads
    the saved copies.
    """
    run = _forward_unrolled if options.unrolled else forward
    mixed, log_sum = run(query, key, value, sinks, rows, options)
    mixed = checkpoint_name(mixed.astype(query.dtype), "context")
    log_sum = checkpoint_name(log_sum, LOG_SUM)
    return mixed, (query, key, value, sinks, rows, mixed, log_sum)


class _Blocks:
    """Queries split into blocks `[blocks, B, G, n, t, H]`, and keys into blocks
    `[blocks, B, G, s, H]`.

    The block dim comes first, so that each block is contiguous in memory. Each contiguous run of
    query tokens is padded to a multiple of the block size.
    """

    def __init__(self, query: Array, key: Array, rows: QueryKeyMask, options: Options):
        self.rows, self.options = rows, options
        self.batch, self.tokens, self.heads = query.shape[:3]
        self.keys, self.groups = key.shape[1:3]
        run, size = options.run, options.query_block
        self.runs, self.per_run = self.tokens // run, -(-run // size)
        self.num_key_blocks = -(-self.keys // options.key_block)
        self.segments = self.split_tokens(rows.segments, _PADDING_SEGMENT - 1)
        self.places = self._pad_runs(rows.places, 0, edge=True).reshape(-1, size)
        self.key_segments = self.split_keys(rows.key_segments, _PADDING_SEGMENT)

    def _pad_runs(self, x: Array, axis: int, fill: float = 0, *, edge: bool = False) -> Array:
        """Pad `[..., T, ...]` to `[..., runs, blocks x block, ...]`."""
        run = self.options.run
        x = x.reshape(*x.shape[:axis], self.runs, run, *x.shape[axis + 1 :])
        more = self.per_run * self.options.query_block - run
        if not more:
            return x
        width = [(0, more if dim == axis + 1 else 0) for dim in range(x.ndim)]
        return jnp.pad(x, width, "edge") if edge else jnp.pad(x, width, constant_values=fill)

    def split_tokens(self, x: Array, fill: float = 0) -> Array:
        """Reshape `[B, T, ...]` to `[blocks, B, t, ...]`."""
        x = self._pad_runs(x, 1, fill)
        shape = (self.batch, self.runs * self.per_run, self.options.query_block, *x.shape[3:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def split_queries(self, x: Float[Array, "B T N h"]) -> Float[Array, "i B G n t h"]:
        """Split queries into blocks, and group query heads by key/value head."""
        x = self.split_tokens(x)
        x = x.reshape(*x.shape[:3], self.groups, -1, x.shape[-1])
        return x.transpose(0, 1, 3, 4, 2, 5)

    def split_keys(self, x: Array, fill: float = 0) -> Array:
        """Reshape `[B, S, ...]` to `[blocks, B, s, ...]`."""
        more = self.num_key_blocks * self.options.key_block - self.keys
        width = [(0, more if dim == 1 else 0) for dim in range(x.ndim)]
        x = jnp.pad(x, width, constant_values=fill) if more else x
        shape = (self.batch, self.num_key_blocks, self.options.key_block, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def split_kv(self, x: Float[Array, "B S G h"]) -> Float[Array, "j B G s h"]:
        """Split keys or values into blocks."""
        return self.split_keys(x).swapaxes(2, 3)

    def merge_queries(self, x: Float[Array, "i B G n t h"]) -> Float[Array, "B T N h"]:
        """Merge query blocks into sequences."""
        x = x.transpose(1, 0, 4, 2, 3, 5)  # B i t G n h
        x = x.reshape(self.batch, self.runs, -1, self.heads, x.shape[-1])
        return x[:, :, : self.options.run].reshape(self.batch, self.tokens, *x.shape[3:])

    def merge_kv(self, x: Float[Array, "j B G s h"]) -> Float[Array, "B S G h"]:
        """Merge key or value blocks into sequences."""
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(self.batch, -1, self.groups, x.shape[-1])[:, : self.keys]

    def bounds(self) -> tuple[Int[Array, " i"], Int[Array, " i"]]:
        """Return the start and end indices of the visible key blocks for each query block.

        The range excludes key blocks before and after the documents of the query block.
        """
        size, window = self.options.key_block, self.rows.window
        near = (self.segments.min(-1)[:, None] <= self.key_segments.max(-1)) & (
            self.segments.max(-1)[:, None] >= self.key_segments.min(-1)
        )
        shared = near.any(-1)  # i j
        first = jnp.argmax(shared, axis=1).astype(jnp.int32)
        behind = jnp.argmax(shared[:, ::-1], axis=1).astype(jnp.int32)
        last = jnp.where(shared.any(1), self.num_key_blocks - behind, 0)
        if self.options.causal:
            last = jnp.minimum(self.places.max(1) // size + 1, last)
        if window is not None:
            earliest = jnp.maximum(self.places.min(1) - window + 1, 0) // size
            first = jnp.where(window > 0, jnp.maximum(earliest, first), first)
        return jnp.minimum(first, last), last

    def visible(
        self, segments: Int[Array, "B t"], places: Int[Array, " t"], block: Array
    ) -> Bool[Array, "B 1 1 t s"]:
        """Return the mask of visible (query, key) pairs between a query block and key block
        `block`.
        """
        size, window = self.options.key_block, self.rows.window
        seen = segments[:, :, None] == _at(self.key_segments, block)[:, None, :]
        distance = places[:, None] - (block * size + jnp.arange(size, dtype=jnp.int32))
        if self.options.causal:
            seen &= distance >= 0
        if window is not None:
            seen &= (distance < window) | (window == 0)
        return seen[:, None, None]


def forward(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    rows: QueryKeyMask,
    options: Options,
) -> tuple[Float[Array, "B T N v"], Float[Array, "B T N"]]:
    """Compute the attention output and the log-sum-exp of each query token, both in float32."""
    blocks = _Blocks(query, key, rows, options)
    keys, values = blocks.split_kv(key), blocks.split_kv(value)
    shape = (blocks.batch, blocks.groups, blocks.heads // blocks.groups, options.query_block)
    largest, total = jnp.full(shape, MIN_SCORE), jnp.zeros(shape)
    if sinks is not None:
        largest = jnp.broadcast_to(_group_sinks(sinks, blocks.groups), shape)
        total = jnp.ones(shape)
    start = mark_varying((largest, total, jnp.zeros((*shape, value.shape[-1]))))

    def of_block(_: None, operands: tuple[Any, ...]) -> tuple[None, tuple[Array, Array]]:
        query, segments, places, (first, last) = operands

        def add(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, mixed = state
            scores = _scores("bgnth,bgsh->bgnts", query, _at(keys, block), options)
            scores = jnp.where(blocks.visible(segments, places, block), scores, _MASK_VALUE)
            new = jnp.maximum(largest, scores.max(-1))
            shares, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            part = _dot("bgnts,bgsh->bgnth", shares.astype(value.dtype), _at(values, block))
            return new, total * shrink + shares.sum(-1), mixed * shrink[..., None] + part

        with jax.named_scope(scopes.trips(options.mean_key_blocks)):
            largest, total, mixed = lax.fori_loop(first, last, add, start)
        total = jnp.where(total > 0, total, 1.0)
        mixed = mixed / total[..., None]
        return None, (mixed, (largest + jnp.log(total))[..., None])

    operands = (blocks.split_queries(query), blocks.segments, blocks.places, blocks.bounds())
    _, (mixed, log_sum) = lax.scan(of_block, None, operands)
    return blocks.merge_queries(mixed), blocks.merge_queries(log_sum)[..., 0]


def _backward_rule(
    options: Options, saved: tuple[Any, ...], d_mixed: Float[Array, "B T N v"]
) -> tuple[Array | None, ...]:
    query, key, value, sinks, rows, mixed, log_sum = saved
    run = _backward_unrolled if options.unrolled else backward
    gradients = run(options, query, key, value, sinks, rows, mixed, log_sum, d_mixed)
    inputs = (query, key, value, sinks)
    pairs = zip(gradients, inputs, strict=True)
    return *(None if x is None else grad.astype(x.dtype) for grad, x in pairs), None


def backward(
    options: Options,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    sinks: Float[Array, " N"] | None,
    rows: QueryKeyMask,
    mixed: Float[Array, "B T N v"],
    log_sum: Float[Array, "B T N"],
    d_mixed: Float[Array, "B T N v"],
) -> tuple[Array, Array, Array, Array]:
    """Compute the float32 gradients of query, key, value and sinks.

    `mixed` and `log_sum` are computed over all keys, whereas `key` and `value` may contain a subset
    of the keys.
    """
    blocks = _Blocks(query, key, rows, options)
    keys, values, log_sums = blocks.split_kv(key), blocks.split_kv(value), log_sum[..., None]
    slope = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1, keepdims=True)

    def of_block(
        sums: tuple[Array, ...], operands: tuple[Any, ...]
    ) -> tuple[tuple[Array, ...], Array]:
        query, d_mixed, log_sum, slope, segments, places, (first, last) = operands
        *of_keys, d_sinks = sums

        def add(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_keys, d_values = state
            key, value = _at(keys, block), _at(values, block)
            scores = _scores("bgnth,bgsh->bgnts", query, key, options)
            seen = blocks.visible(segments, places, block)
            shares = jnp.exp(jnp.where(seen, scores, _MASK_VALUE) - log_sum)
            d_value = _dot("bgnts,bgnth->bgsh", shares.astype(value.dtype), d_mixed)
            d_scores = shares * (_dot("bgnth,bgsh->bgnts", d_mixed, value) - slope)
            if options.soft_cap:
                d_scores *= 1.0 - (scores / options.soft_cap) ** 2
            d_scores = (d_scores * options.scale).astype(query.dtype)
            d_query = d_query + _dot("bgnts,bgsh->bgnth", d_scores, key)
            d_key = _dot("bgnts,bgnth->bgsh", d_scores, query)
            return (
                d_query,
                _add_to_block(d_keys, d_key, block),
                _add_to_block(d_values, d_value, block),
            )

        start = (mark_varying(jnp.zeros(query.shape)), *of_keys)
        with jax.named_scope(scopes.trips(options.mean_key_blocks)):
            d_query, *d_rest = lax.fori_loop(first, last, add, start)
        if sinks is not None:
            # Sink gradients are summed in the scan, so that a split backward pass saves only the
            # sums.
            share = jnp.exp(_group_sinks(sinks, blocks.groups)[..., None] - log_sum)
            d_sinks -= (share * slope).sum((0, 3, 4))
        return (*d_rest, d_sinks), d_query

    d_sinks = jnp.zeros((blocks.groups, blocks.heads // blocks.groups))
    sums = mark_varying((jnp.zeros(keys.shape), jnp.zeros(values.shape), d_sinks))
    of_tokens = tuple(map(blocks.split_queries, (query, d_mixed, log_sums, slope)))
    operands = (*of_tokens, blocks.segments, blocks.places, blocks.bounds())
    (d_keys, d_values, d_sinks), d_query = lax.scan(of_block, sums, operands)
    of_keys = blocks.merge_kv(d_keys), blocks.merge_kv(d_values)
    return blocks.merge_queries(d_query), *of_keys, d_sinks.reshape(-1)


_attention.defvjp(_forward_rule, _backward_rule)


# Attention over short sequences, without loops.

_SCORE_EINSUM = "bgxh,bgsh->bgxs"


class _Unrolled:
    """Query and key layouts for attention without loops.

    Query heads that share a key head are merged with the query-token dim, so a sum over query
    tokens reduces a single dim.
    """

    def __init__(self, groups: int, rows: QueryKeyMask, options: Options):
        self.groups, self.rows, self.options = groups, rows, options

    def split_queries(self, x: Float[Array, "B T N h"]) -> Float[Array, "B G n T h"]:
        """Group query heads by key/value head."""
        x = x.reshape(*x.shape[:2], self.groups, -1, x.shape[-1])
        return x.transpose(0, 2, 3, 1, 4)

    def cut(self, x: Float[Array, "B G n T h"], start: int, stop: int) -> Float[Array, "B G x h"]:
        """Return a block of t query tokens, merged with the n heads of a group into dim x."""
        x = x[:, :, :, start:stop]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def mask_scores(
        self, scores: Float[Array, "B G x s"], block: tuple[int, int, int]
    ) -> Float[Array, "B G x s"]:
        """Replace the scores of masked keys with `_MASK_VALUE`."""
        first, start, stop = block
        segments, keys = self.rows.segments[:, start:stop], self.rows.key_segments[:, first:stop]
        distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
        seen = (segments[:, :, None] == keys[:, None, :]) & (distance >= 0)
        if (window := self.rows.window) is not None:
            seen &= (distance < window) | (window == 0)
        wide = scores.reshape(*scores.shape[:2], -1, *seen.shape[1:])
        return jnp.where(seen[:, None, None], wide, _MASK_VALUE).reshape(scores.shape)

    def merge_queries(self, blocks: list[Array]) -> Float[Array, "B T N h"]:
        """Concatenate query blocks `[B, G, x, h]`."""
        sizes = [stop - start for _, start, stop in self.options.unrolled]
        pairs = zip(blocks, sizes, strict=True)
        wide = [x.reshape(*x.shape[:2], -1, size, x.shape[-1]) for x, size in pairs]
        whole = jnp.concatenate(wide, axis=3) if len(wide) > 1 else wide[0]
        whole = whole.transpose(0, 3, 1, 2, 4)
        return whole.reshape(*whole.shape[:2], -1, whole.shape[-1])

    def sum_key_gradients(self, parts: list[Array]) -> Float[Array, "B S G h"]:
        """Sum the key gradients `[B, G, s, h]` of all query blocks for each key."""
        blocks, gradients = self.options.unrolled, []
        for number, (_, start, stop) in enumerate(blocks):  # keys are split like queries
            seeing = zip(blocks[number:], parts[number:], strict=True)
            gradients.append(
                sum(
                    part[:, :, start - first : stop - first]
                    for (first, _, _), part in seeing
                    if first <= start
                )
            )
        whole = jnp.concatenate(gradients, axis=2) if len(gradients) > 1 else gradients[0]
        return whole.swapaxes(1, 2)


def _forward_unrolled(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    rows: QueryKeyMask,
    options: Options,
) -> tuple[Float[Array, "B T N v"], Float[Array, "B T N"]]:
    blocks = _Unrolled(key.shape[2], rows, options)
    queries, keys, values = blocks.split_queries(query), key.swapaxes(1, 2), value.swapaxes(1, 2)
    outputs, log_sums = [], []
    for block in options.unrolled:
        first, start, stop = block
        scores = _scores(
            _SCORE_EINSUM, blocks.cut(queries, start, stop), keys[:, :, first:stop], options
        )
        scores = blocks.mask_scores(scores, block)
        largest, of_heads = jnp.maximum(scores.max(-1, keepdims=True), MIN_SCORE), None
        if sinks is not None:
            of_heads = _sinks_per_query(sinks, blocks.groups, stop - start)
            largest = jnp.maximum(largest, of_heads)
        shares = jnp.exp(scores - largest)
        total = shares.sum(-1, keepdims=True)
        if of_heads is not None:
            total += jnp.exp(of_heads - largest)
        total = jnp.where(total > 0, total, 1.0)
        mixed = _dot("bgxs,bgsh->bgxh", shares.astype(value.dtype), values[:, :, first:stop])
        outputs.append(mixed / total)
        log_sums.append(largest + jnp.log(total))
    return blocks.merge_queries(outputs), blocks.merge_queries(log_sums)[..., 0]


def _backward_unrolled(
    options: Options,
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    rows: QueryKeyMask,
    mixed: Array,
    log_sum: Array,
    d_mixed: Array,
) -> tuple[Array, Array, Array, Array]:
    blocks = _Unrolled(key.shape[2], rows, options)
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    slope = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1, keepdims=True)
    of_queries = tuple(map(blocks.split_queries, (query, d_mixed, log_sum[..., None], slope)))
    d_queries, d_keys, d_values = [], [], []
    d_sinks = jnp.zeros((blocks.groups, query.shape[2] // blocks.groups))
    for block in options.unrolled:
        first, start, stop = block
        slice_block = partial(blocks.cut, start=start, stop=stop)
        query, d_mixed, log_sum, slope = map(slice_block, of_queries)
        seen_keys, seen_values = keys[:, :, first:stop], values[:, :, first:stop]
        scores = _scores(_SCORE_EINSUM, query, seen_keys, options)
        shares = jnp.exp(blocks.mask_scores(scores, block) - log_sum)
        d_values.append(_dot("bgxs,bgxh->bgsh", shares.astype(value.dtype), d_mixed))
        d_scores = shares * (_dot("bgxh,bgsh->bgxs", d_mixed, seen_values) - slope)
        if options.soft_cap:
            d_scores *= 1.0 - (scores / options.soft_cap) ** 2
        d_scores = (d_scores * options.scale).astype(query.dtype)
        d_queries.append(_dot("bgxs,bgsh->bgxh", d_scores, seen_keys))
        d_keys.append(_dot("bgxs,bgxh->bgsh", d_scores, query))
        if sinks is not None:
            share = jnp.exp(_sinks_per_query(sinks, blocks.groups, stop - start) - log_sum)
            lost = (share * slope).reshape(*share.shape[:2], -1, stop - start)
            d_sinks -= lost.sum((0, 3))
    if sinks is not None:  # this barrier ensures that a split backward pass saves only the sum
        d_queries[0], d_sinks = lax.optimization_barrier((d_queries[0], d_sinks))
    of_keys = blocks.sum_key_gradients(d_keys), blocks.sum_key_gradients(d_values)
    return blocks.merge_queries(d_queries), *of_keys, d_sinks.reshape(-1)


def _sinks_per_query(sinks: Float[Array, " N"], groups: int, tokens: int) -> Float[Array, "G x 1"]:
    """Return the sinks, repeated for each query token of a block."""
    return jnp.repeat(_group_sinks(sinks, groups), tokens, axis=1)


def _scores(form: str, query: Array, key: Array, options: Options) -> Float[Array, ...]:
    """Return the float32 scores of all pairs after soft capping."""
    scores, cap = _dot(form, query, key) * options.scale, options.soft_cap
    return cap * jnp.tanh(scores / cap) if cap else scores


def _dot(form: str, left: Array, right: Array) -> Float[Array, ...]:
    """Compute an einsum with float32 accumulation."""
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)


def _at(blocks: Array, block: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, block, keepdims=False)


def _add_to_block(blocks: Array, more: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, _at(blocks, block) + more, block, 0)


def _group_sinks(sinks: Float[Array, " N"], groups: int) -> Float[Array, "G n 1"]:
    return sinks.astype(jnp.float32).reshape(groups, -1, 1)
