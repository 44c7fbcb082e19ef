"""Pallas kernels of attention for TPUs, which process only the visible blocks of scores.

Each grid step multiplies a block of queries by a block of keys. The list of block pairs can depend
on runtime arrays, so a device can hold any chunks of a sequence. Blocks without masked scores skip
the mask, and blocks whose documents differ are skipped.

Queries and keys can consist of several arrays, each with some of the dims of a head. The kernels
concatenate blocks of these arrays on the chip. An array of keys can have fewer heads than the
others, such as the RoPE dims of latent attention, which are equal in all heads.

One backward kernel computes all gradients with five matmuls. Two kernels, as in jax's splash
attention, need seven and compute the softmax twice. The gradients of the queries are summed in
on-chip memory, which bounds the number of queries of a call.

References:
    FlashAttention-2 (arXiv:2307.08691), and the splash attention kernels of JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Bool, Float, Int, Shaped

from maxpipe.parallel.tpu_kernels import (
    compiler_parameters,
    cost_estimate,
    dot,
    tpu_cores,
    usable_vmem,
)

LANES = 128
"""Every block size is a multiple of this number."""
_MASKED_SCORE = -0.7 * float(np.finfo(np.float32).max)
"""Score of masked pairs. Differences of two such scores are finite."""
_LOG2_E = math.log2(math.e)
_NUM_TEMPORARIES = 4
"""Number of float32 blocks of scores that exist at the same time in the backward kernel."""

_FIRST, _LAST, _MASKED, _SKIPPED, _DIAGONAL, _QUERY_FIRST, _QUERY_LAST = (1 << n for n in range(7))
"""Flags of block pairs: first and last pair of the output block, whether scores can be masked,
whether all scores are masked, whether the pair is on the diagonal of a causal mask, first and last
pair of the query block."""


@dataclass(frozen=True)
class BlockSizes:
    """Numbers of tokens."""

    queries: int
    """Query tokens of a grid step."""
    keys: int
    """Key tokens of a grid step."""
    keys_at_once: int
    """Key tokens for which scores are computed at a time."""

    @property
    def keys_on_diagonal(self) -> int:
        """Return the size of the parts of a key block on the diagonal of a causal mask. The first
        queries of the block attend to no key of the later parts. Small blocks are not divided,
        because smaller matmuls run at a lower rate.
        """
        part = 2 * LANES
        is_large = self.queries == self.keys > 2 * part
        return part if is_large and self.keys % part == 0 else self.keys

    @property
    def diagonal_share(self) -> float:
        """Return the fraction of scores that are computed for a pair on the diagonal."""
        parts = self.keys // self.keys_on_diagonal
        return (parts + 1) / (2 * parts)


@dataclass(frozen=True)
class ScoreFunction:
    """Static properties of the scores."""

    causal: bool
    window: int
    """Number of tokens that a query token attends to, including itself; 0 means all tokens."""
    scale: float
    soft_cap: float = 0.0
    """Soft cap on the scores; 0 disables the cap."""

    @property
    def query_scale(self) -> float:
        """Return the factor by which the kernels multiply queries.

        The kernels compute powers of two. With a soft cap, the product of queries and keys is the
        argument of `tanh`.
        """
        return self.scale / self.soft_cap if self.soft_cap else self.scale * _LOG2_E

    def scale_queries(self, query: Array) -> Array:
        """Return a block of queries times `query_scale`, in the dtype of the queries."""
        return (query.astype(jnp.float32) * self.query_scale).astype(query.dtype)

    def intersects_block(self, first: Any, size: int, first_keys: Any, size_keys: int) -> Any:
        """Return whether any query token of a query block attends to any key of a key block, given
        the start indices of both blocks, `[I]` and `[J]`.
        """
        distance = first[:, None] - first_keys
        return self._is_visible(distance + size - 1, distance - size_keys + 1)

    def contains_block(self, first: Any, size: int, first_keys: Any, size_keys: int) -> Any:
        """Return whether every query token of a query block attends to every key of a key block."""
        distance = first[:, None] - first_keys
        return self._is_visible(distance - size_keys + 1, distance + size - 1)

    def _is_visible(self, causal_distance: Any, window_distance: Any) -> Any:
        """Return whether the first distance from a query token to a key satisfies the causal mask,
        and the second one the window.
        """
        seen = np.ones(causal_distance.shape, bool)
        if self.causal:
            seen = seen & (causal_distance >= 0)
        return seen & (window_distance < self.window) if self.window else seen


class BlockPairs(NamedTuple):
    """Pairs of a query block and a key block, one for each grid step."""

    query: Int[Array, " P"]
    key: Int[Array, " P"]
    distance: Int[Array, " P"]
    """Index of the first query token minus the index of the first key token."""
    completed: Int[Array, " P"]
    """Query block of the next pair that is the last of its query block."""
    flags: Int[Array, " B*P"]


def list_pairs(
    function: ScoreFunction,
    sizes: BlockSizes,
    first: Int[Any, " I"],
    segments: Int[Array, "B T"],
    key_segments: Int[Array, "B S"],
    *,
    by_key: bool,
) -> tuple[BlockPairs, Any]:
    """Return the visible block pairs and their number.

    `first` holds the sequence index of the first token of each query block, as a numpy array or as
    a runtime array. Pairs are ordered by query block, or by key block if `by_key` is true. Every
    query block and every key block occurs in a pair, so that every output is written.
    """
    xp: Any = np if isinstance(first, np.ndarray) else jnp
    first_keys = np.arange(0, key_segments.shape[1], sizes.keys, dtype=np.int32)
    geometry = (first, sizes.queries, first_keys, sizes.keys)
    seen = function.intersects_block(*geometry)
    masked = ~function.contains_block(*geometry)
    rows, columns = (np.arange(size)[:, None] for size in seen.shape)
    listed = seen | (~seen.any(1, keepdims=True) & (columns.T == 0))
    listed |= ~seen.any(0, keepdims=True) & (rows == 0)
    flags = xp.where(masked, _MASKED, 0) | xp.where(seen, 0, _SKIPPED)
    edges = ((0, _FIRST, _LAST), (1, _QUERY_FIRST, _QUERY_LAST))
    for axis, opens, closes in edges if by_key else ((1, *edges[0][1:]), (0, 0, 0)):
        before, total = xp.cumsum(listed, axis), listed.sum(axis, keepdims=True)
        flags = flags | xp.where(before == 1, opens, 0) | xp.where(before == total, closes, 0)
    in_order = listed.T if by_key else listed
    count = listed.sum()
    if xp is np:
        places = np.flatnonzero(in_order)
        count = int(count)
    else:
        places = jnp.flatnonzero(in_order, size=in_order.size, fill_value=0)
    major, minor = places // in_order.shape[1], places % in_order.shape[1]
    query, key = (minor, major) if by_key else (major, minor)
    flags = flags[query, key]
    ends = xp.where(flags & _QUERY_LAST != 0, np.arange(len(places)), len(places) - 1)
    ends = np.minimum.accumulate(ends[::-1])[::-1] if xp is np else lax.cummin(ends, reverse=True)
    distance = first[query] - xp.asarray(first_keys)[key]
    if function.causal and sizes.diagonal_share < 1:
        flags = flags | xp.where(distance == 0, _DIAGONAL, 0)
    flags = flags | _segment_flags(sizes, segments, key_segments, query, key)
    pairs = BlockPairs(query, key, distance, query[ends], flags.reshape(-1))
    return BlockPairs(*(jnp.asarray(each, jnp.int32) for each in pairs)), count


def _segment_flags(
    sizes: BlockSizes, segments: Array, key_segments: Array, query: Any, key: Any
) -> Int[Array, "B P"]:
    """Return the flags that follow from the documents of each pair's blocks."""

    def extremes(ids: Array, size: int, places: Any) -> tuple[Array, Array]:
        blocks = ids.reshape(len(ids), -1, size)
        return blocks.min(2)[:, places], blocks.max(2)[:, places]

    low, high = extremes(segments, sizes.queries, query)
    low_keys, high_keys = extremes(key_segments, sizes.keys, key)
    is_same = (low == high) & (low_keys == high_keys) & (low == low_keys)
    is_apart = (high < low_keys) | (high_keys < low)
    return jnp.where(is_same, 0, _MASKED) | jnp.where(is_apart, _SKIPPED, 0)


# Forward pass.


def forward(
    queries: Sequence[Float[Array, "B N T _"]],
    keys: Sequence[Float[Array, "B _ S _"]],
    value: Float[Array, "B G S v"],
    segments: Int[Array, "B T"],
    key_segments: Int[Array, "B S"],
    first: Int[Any, " I"],
    *,
    sinks: Float[Array, " N"] | None = None,
    function: ScoreFunction,
    sizes: BlockSizes,
    interpret: bool = False,
) -> tuple[Float[Array, "B N T v"], Float[Array, "B N T"]]:
    """Return the attention output and the float32 log-sum-exp of the scores.

    A query token that attends to no key has zeros and a very small log-sum-exp.
    """
    query, value_size = queries[0], value.shape[3]
    batch, heads, tokens, _ = query.shape
    widths = [each.shape[3] for each in queries]
    pairs, count = list_pairs(function, sizes, first, segments, key_segments, by_key=False)
    has_sinks = sinks is not None
    start = sinks.astype(jnp.float32) * _LOG2_E if has_sinks else jnp.zeros(1, jnp.float32)

    def spec(block: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
        def place(h: Any, p: Any, query: Any, key: Any, *_: Any) -> tuple[Any, ...]:
            return index(*_divmod(h, heads), query[p], key[p])

        return pl.BlockSpec(block, place)

    def row(width: int) -> pl.BlockSpec:
        return spec((None, None, sizes.queries, width), lambda b, n, i, j: (b, n, i, 0))

    def column(array: Array) -> pl.BlockSpec:
        group = heads // array.shape[1]
        return spec(
            (None, None, sizes.keys, array.shape[3]),
            lambda b, n, i, j: (b, _divmod(n, group)[0], j, 0),
        )

    outs = [
        jax.typeof(query).update(shape=(batch, heads, tokens, value_size)),
        jax.typeof(query).update(shape=(batch, heads, 1, tokens), dtype=jnp.float32),
    ]
    mixed, sums = pl.pallas_call(
        partial(_forward_kernel, function, sizes, heads, len(pairs.query), has_sinks, len(widths)),
        out_shape=outs,
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs) + 1,
            in_specs=[
                *map(row, widths),
                *map(column, (*keys, value)),
                spec((None, 1, sizes.queries), lambda b, n, i, j: (b, 0, i)),
                spec((None, 1, sizes.keys), lambda b, n, i, j: (b, 0, j)),
            ],
            out_specs=[
                row(value_size),
                spec((None, None, 1, sizes.queries), lambda b, n, i, j: (b, n, 0, i)),
            ],
            grid=(batch * heads, count),
            scratch_shapes=[
                tpu.VMEM((sizes.queries, LANES), jnp.float32),
                tpu.VMEM((sizes.queries, LANES), jnp.float32),
                tpu.VMEM((sizes.queries, value_size), jnp.float32),
                tpu.VMEM((sizes.queries, sum(widths)), query.dtype),
            ],
        ),
        compiler_params=compiler_parameters("parallel", "arbitrary"),
        cost_estimate=_cost_estimate(pairs, sizes, 1, queries, keys, value, outs),
        interpret=interpret,
        name="splash_forward",
    )(*pairs, start, *queries, *keys, value, segments[:, None], key_segments[:, None])
    return mixed, sums[:, :, 0]


def _forward_kernel(
    function: ScoreFunction,
    sizes: BlockSizes,
    heads: int,
    num_pairs: int,
    has_sinks: bool,
    num_parts: int,
    *refs: Any,
) -> None:
    """Add one block of keys to the output of a block of queries (online softmax)."""
    pairs, start, refs = BlockPairs(*refs[:5]), refs[5], refs[6:]
    queries, keys, refs = refs[:num_parts], refs[num_parts : 2 * num_parts], refs[2 * num_parts :]
    value, segments, key_segments, out, sums, top, total, mixed, scaled = refs
    (sequence, head), step = _divmod(pl.program_id(0), heads), pl.program_id(1)
    flags = pairs.flags[sequence * num_pairs + step]

    @pl.when(flags & _FIRST != 0)
    def _() -> None:
        # A sink is a score without a value.
        top[...] = jnp.full(top.shape, start[head] if has_sinks else _MASKED_SCORE)
        total[...] = jnp.full(total.shape, 1.0 if has_sinks else 0.0)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)
        scaled[...] = function.scale_queries(_joined(queries, pl.ds(0, sizes.queries)))

    def add(begin: int, size: int, start: int, is_masked: bool) -> None:
        part, rows = pl.ds(begin, size), pl.ds(start, sizes.queries - start)
        scores, _ = _scores(function, dot(scaled[rows], _joined(keys, part), 1, 1))
        if is_masked:
            seen = _visible(function, pairs.distance[step] + start - begin, scores.shape, 0)
            seen &= _columns(segments[:, rows], size) == key_segments[:, part]
            scores = jnp.where(seen, scores, _MASKED_SCORE)
        previous = top[rows]
        highest = jnp.maximum(previous, scores.max(1, keepdims=True))
        weights = jnp.exp2(scores - _widen(highest, size))
        shrink = jnp.exp2(previous - highest)
        values, added = value[part], None
        if _sums_by_matmul(values.shape[1]):
            ones = jnp.ones((size, LANES), values.dtype)
            products = dot(weights.astype(values.dtype), lax.concatenate([values, ones], 1), 1, 0)
            products, added = products[:, :-LANES], products[:, -LANES:]
        else:
            products = dot(weights.astype(values.dtype), values, 1, 0)
            added = weights.sum(1, keepdims=True)
        top[rows] = highest
        total[rows] = total[rows] * shrink + added
        mixed[rows] = mixed[rows] * _widen(shrink, mixed.shape[1]) + products

    _for_visible_parts(flags, sizes, add)

    @pl.when(flags & _LAST != 0)
    def _() -> None:
        is_empty = total[...] == 0
        inverse = 1 / jnp.where(is_empty, 1, total[...])
        out[...] = (mixed[...] * _widen(inverse, mixed.shape[1])).astype(out.dtype)
        log_sum = jnp.where(is_empty, _MASKED_SCORE, top[...] + jnp.log2(total[...]))
        sums[...] = jnp.transpose(log_sum)[:1] / _LOG2_E


def _sums_by_matmul(value_size: int) -> bool:
    """Return whether a matmul computes the sums of weights in columns that are otherwise unused."""
    width = tpu_cores().matrix_width
    return value_size % LANES == 0 and value_size % width == width - LANES and width > LANES


# Backward pass.


def backward(
    queries: Sequence[Float[Array, "B N T _"]],
    keys: Sequence[Float[Array, "B _ S _"]],
    value: Float[Array, "B G S v"],
    segments: Int[Array, "B T"],
    key_segments: Int[Array, "B S"],
    first: Int[Any, " I"],
    mixed: Float[Array, "B N T v"],
    sums: Float[Array, "B N T"],
    d_mixed: Float[Array, "B N T v"],
    *,
    function: ScoreFunction,
    sizes: BlockSizes,
    interpret: bool = False,
) -> tuple[list[Array], list[Array], Float[Array, "B G S v"]]:
    """Return the gradients of the queries, keys and values. Those of each array of keys have all G
    heads.

    `mixed` and `sums` are the results of the forward pass.
    """
    products = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1)
    sums = sums * _LOG2_E
    span, parts = _query_span(queries, value, sizes)
    tokens = mixed.shape[2]
    run = partial(
        _backward_span,
        keys=keys,
        value=value,
        key_segments=key_segments,
        function=function,
        sizes=sizes,
        parts=parts,
        sums_spans=span < tokens,
        interpret=interpret,
    )
    d_queries, d_keys = [], None
    for start in range(0, tokens, span):
        part = slice(start, start + span)
        blocks = slice(start // sizes.queries, (start + span) // sizes.queries)
        found, more = run(
            [each[:, :, part] for each in queries],
            *(each[:, :, part] for each in (d_mixed, sums, products)),
            segments=segments[:, part],
            first=first[blocks],
        )
        d_queries.append(found)
        d_keys = more if d_keys is None else [a + b for a, b in zip(d_keys, more, strict=True)]
    assert d_keys is not None
    *d_keys, d_value = (each.astype(value.dtype) for each in d_keys)
    return [lax.concatenate(each, 2) for each in zip(*d_queries, strict=True)], d_keys, d_value


def _query_span(queries: Sequence[Array], value: Array, sizes: BlockSizes) -> tuple[int, int]:
    """Return the number of query tokens of a kernel call, and the number of parts into which the
    query heads of a key head are divided.

    A part is processed like a separate key head, so that fewer gradients are in on-chip memory. An
    even number of heads occupies both cores of a device.
    """
    batch, heads, tokens, _ = queries[0].shape
    size, key_heads = sum(each.shape[3] for each in queries), value.shape[1]
    group, item = heads // key_heads, value.dtype.itemsize
    width = size + value.shape[3]
    blocks = 2 * item * (sizes.queries * (width + size) + 2 * sizes.keys * width)
    scratch = 4 * sizes.keys * width
    temporary = 4 * _NUM_TEMPORARIES * sizes.queries * sizes.keys_at_once
    left = usable_vmem() - blocks - scratch - temporary
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    fits = [parts for parts in divisors if 4 * group // parts * tokens * size <= left]
    if not fits:
        count = tokens // sizes.queries
        most = max(1, int(left // (4 * sizes.queries * size)))
        per_call = max(
            number for number in range(1, count + 1) if not count % number and number <= most
        )
        return per_call * sizes.queries, group
    is_even = [parts for parts in fits if batch * key_heads * parts % tpu_cores().number == 0]
    return tokens, (is_even or fits)[0]


def _backward_span(
    queries: Sequence[Array],
    d_mixed: Array,
    sums: Array,
    products: Array,
    *,
    segments: Array,
    first: Any,
    keys: Sequence[Array],
    value: Array,
    key_segments: Array,
    function: ScoreFunction,
    sizes: BlockSizes,
    parts: int,
    sums_spans: bool,
    interpret: bool,
) -> tuple[list[Array], list[Array]]:
    """Return the gradients of some queries, and their contribution to those of keys and values."""
    batch, heads, tokens, _ = queries[0].shape
    widths, key_heads = [each.shape[3] for each in queries], value.shape[1]
    group = heads // key_heads // parts
    pairs, count = list_pairs(function, sizes, first, segments, key_segments, by_key=True)

    def spec(block: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
        def place(h: Any, p: Any, g: Any, query: Any, key: Any, *_: Any) -> tuple[Any, ...]:
            sequence, part = _divmod(h, key_heads * parts)
            return index(sequence, part, part * group + g, query[p], key[p])

        return pl.BlockSpec(block, place)

    def completed(h: Any, p: Any, g: Any, *scalars: Any) -> tuple[Any, ...]:
        at = BlockPairs(*scalars)
        sequence, part = _divmod(h, key_heads * parts)
        is_last = at.flags[sequence * len(pairs.query) + p] & _QUERY_LAST != 0
        return sequence, part * group + jnp.where(is_last, g, 0), at.completed[p], 0

    queries_of = lambda width: (None, None, sizes.queries, width)  # noqa: E731

    def row(width: int) -> pl.BlockSpec:
        return spec(queries_of(width), lambda b, r, n, i, j: (b, n, i, 0))

    def column(width: int, shared: int = 1) -> pl.BlockSpec:
        head = lambda r: _divmod(r, shared)[0] if shared > 1 else r  # noqa: E731
        return spec((None, None, sizes.keys, width), lambda b, r, n, i, j: (b, head(r), j, 0))

    rows = key_heads * parts
    per_query = spec((None, None, 1, sizes.queries), lambda b, r, n, i, j: (b, n, 0, i))
    dtype = jnp.float32 if parts > 1 or sums_spans else value.dtype
    like = jax.typeof(value).update(dtype=dtype)
    of_keys = [*widths, value.shape[3]]
    outs = [jax.typeof(each) for each in queries]
    outs += [like.update(shape=(batch, rows, value.shape[2], width)) for width in of_keys]
    results = pl.pallas_call(
        partial(_backward_kernel, function, sizes, rows, len(pairs.query), len(widths)),
        out_shape=outs,
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs),
            in_specs=[
                *map(row, widths),
                *(column(each.shape[3], rows // each.shape[1]) for each in (*keys, value)),
                row(value.shape[3]),
                per_query,
                per_query,
                spec((None, 1, sizes.queries), lambda b, r, n, i, j: (b, 0, i)),
                spec((None, 1, sizes.keys), lambda b, r, n, i, j: (b, 0, j)),
            ],
            out_specs=[
                *(pl.BlockSpec(queries_of(width), completed) for width in widths),
                *map(column, of_keys),
            ],
            grid=(batch * rows, count, group),
            scratch_shapes=[
                tpu.VMEM((group, sum(widths), tokens), jnp.float32),
                tpu.VMEM((sum(widths), sizes.keys), jnp.float32),
                tpu.VMEM((value.shape[3], sizes.keys), jnp.float32),
            ],
        ),
        compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost_estimate(pairs, sizes, 2.5, queries, keys, value, outs),
        interpret=interpret,
        name="splash_backward",
    )(
        *pairs,
        *queries,
        *keys,
        value,
        d_mixed,
        sums[:, :, None],
        products[:, :, None],
        segments[:, None],
        key_segments[:, None],
    )
    d_queries, gradients = list(results[: len(widths)]), list(results[len(widths) :])
    if parts > 1:
        shape = (batch, key_heads, parts)
        gradients = [each.reshape(*shape, *each.shape[2:]).sum(2) for each in gradients]
    return d_queries, gradients


def _backward_kernel(
    function: ScoreFunction,
    sizes: BlockSizes,
    key_heads: int,
    num_pairs: int,
    num_parts: int,
    *refs: Any,
) -> None:
    """Add the gradients of one pair of blocks.

    Scores are transposed: keys are rows and queries are columns. Accumulated gradients are
    transposed as well, so that their matmuls use the full width of the matrix units, and blocks of
    scores need no transpose.
    """
    pairs, refs = BlockPairs(*refs[:5]), refs[5:]
    queries, keys, refs = refs[:num_parts], refs[num_parts : 2 * num_parts], refs[2 * num_parts :]
    value, d_mixed, sums, products, segments, key_segments = refs[:6]
    d_queries, d_keys = refs[6 : 6 + num_parts], refs[6 + num_parts : 6 + 2 * num_parts]
    d_value, query_total, key_total, value_total = refs[-4:]
    step, head = pl.program_id(1), pl.program_id(2)
    sequence, _ = _divmod(pl.program_id(0), key_heads)
    flags = pairs.flags[sequence * num_pairs + step]
    first = pairs.query[step] * sizes.queries
    tokens = pl.ds(pl.multiple_of(first, LANES), sizes.queries)

    @pl.when((flags & _FIRST != 0) & (head == 0))
    def _() -> None:
        key_total[...] = jnp.zeros(key_total.shape, jnp.float32)
        value_total[...] = jnp.zeros(value_total.shape, jnp.float32)

    @pl.when(flags & _QUERY_FIRST != 0)
    def _() -> None:
        empty = jnp.zeros((query_total.shape[1], sizes.queries), jnp.float32)
        query_total[head, :, tokens] = empty

    def add(begin: int, size: int, start: int, is_masked: bool) -> None:
        part, place = pl.ds(begin, size), pl.ds(start, sizes.queries - start)
        own, cotangents = _joined(keys, part), d_mixed[place]
        rows = function.scale_queries(_joined(queries, place))
        scores, slope = _scores(function, dot(own, rows, 1, 1))
        if is_masked:
            seen = _visible(function, pairs.distance[step] + start - begin, scores.shape, 1)
            seen &= _columns(key_segments[:, part], scores.shape[1]) == segments[:, place]
            scores = jnp.where(seen, scores, _MASKED_SCORE)
        weights = jnp.exp2(scores - sums[:, place])
        d_values = dot(jnp.transpose(cotangents), weights.astype(cotangents.dtype), 1, 1)
        value_total[:, part] = value_total[:, part] + d_values
        d_scores = weights * (dot(value[part], cotangents, 1, 1) - products[:, place])
        d_scores = (d_scores if slope is None else d_scores * slope).astype(rows.dtype)
        key_total[:, part] = key_total[:, part] + dot(jnp.transpose(rows), d_scores, 1, 1)
        d_rows = dot(jnp.transpose(own), d_scores, 1, 0)
        mine = pl.ds(pl.multiple_of(first + start, LANES), sizes.queries - start)
        query_total[head, :, mine] = query_total[head, :, mine] + d_rows

    _for_visible_parts(flags, sizes, add)

    @pl.when(flags & _QUERY_LAST != 0)
    def _() -> None:
        total = query_total[head, :, tokens] * function.scale
        _store_transposed(d_queries, total)

    @pl.when((flags & _LAST != 0) & (head == pl.num_programs(2) - 1))
    def _() -> None:
        scale = function.scale / function.query_scale
        _store_transposed(d_keys, key_total[...] * scale)
        d_value[...] = jnp.transpose(value_total[...]).astype(d_value.dtype)


# Shared by both kernels.


def _joined(parts: Sequence[Any], tokens: Any) -> Array:
    """Return the block of queries or keys with all dims of a head."""
    blocks = [part[tokens] for part in parts]
    return blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, 1)


def _store_transposed(parts: Sequence[Any], total: Float[Array, "H T"]) -> None:
    """Store the transpose of the gradients of a block, divided like the queries or keys."""
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        part[...] = jnp.transpose(total[start:stop]).astype(part.dtype)
        start = stop


def _cost_estimate(
    pairs: BlockPairs,
    sizes: BlockSizes,
    forwards: float,
    queries: Sequence[Array],
    keys: Sequence[Array],
    value: Array,
    outs: Sequence[Any],
) -> pl.CostEstimate:
    """Return the work of a call that computes `forwards` times the FLOPs of the forward kernel."""
    batch, heads = queries[0].shape[:2]
    scores = batch * heads * len(pairs.query) * sizes.queries * sizes.keys
    width = sum(each.shape[3] for each in queries) + value.shape[3]
    arrays = (*queries, *keys, value, *outs)
    return cost_estimate(2 * forwards * scores * width, arrays, transcendentals=scores)


def _for_visible_parts(flags: Array, sizes: BlockSizes, add: Any) -> None:
    """Call `add(begin, size, start, is_masked)` for the parts of a key block, unless the block is
    skipped. The part with `size` keys that starts at key `begin` is visible to the queries from
    `start` on.
    """

    def run(size: int, is_masked: bool, is_diagonal: bool = False) -> None:
        for begin in range(0, sizes.keys, size):
            add(begin, size, begin if is_diagonal else 0, is_masked)

    kind = flags & (_MASKED | _SKIPPED | _DIAGONAL)
    pl.when(kind == 0)(partial(run, sizes.keys_at_once, False))
    pl.when(kind == _MASKED)(partial(run, sizes.keys_at_once, True))
    if sizes.diagonal_share < 1:
        pl.when(kind == (_MASKED | _DIAGONAL))(partial(run, sizes.keys_on_diagonal, True, True))


def _scores(function: ScoreFunction, products: Array) -> tuple[Array, Array | None]:
    """Return the scores times log2(e), and the slope of the soft cap."""
    if not function.soft_cap:
        return products, None
    capped = jnp.tanh(products)
    return function.soft_cap * _LOG2_E * capped, 1 - capped * capped


def _visible(
    function: ScoreFunction, distance: Array, shape: tuple[int, ...], query_dim: int
) -> Bool[Array, "_ _"]:
    """Return the causal and window mask; `distance` is that of the first query from the first
    key.
    """
    seen = jnp.ones(shape, jnp.bool_)
    if not function.causal and not function.window:
        return seen
    queries, keys = (
        lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (query_dim, 1 - query_dim)
    )
    relative = queries - keys
    if function.window:
        seen = relative < function.window - distance
    if function.causal:
        causal = relative >= -distance
        seen = seen & causal if function.window else causal
    return seen


def _columns(row: Int[Array, "1 K"], width: int) -> Int[Array, "K width"]:
    """Return the transpose of a row, repeated `width` times (a multiple of the lane count)."""
    column = jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))
    return _widen(column, width)


def _widen(column: Shaped[Array, "K L"], width: int) -> Shaped[Array, "K width"]:
    """Repeat an array whose columns are equal."""
    copies = -(-width // LANES)
    return (column if copies == 1 else jnp.tile(column, (1, copies)))[:, :width]


def _divmod(number: Any, divisor: int) -> tuple[Any, Any]:
    """Divide a number that is not negative, with fewer instructions than Python's operators."""
    number = jnp.asarray(number, jnp.int32)
    return lax.div(number, jnp.int32(divisor)), lax.rem(number, jnp.int32(divisor))
