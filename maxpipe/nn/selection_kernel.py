"""Pallas kernel for TPUs that selects the keys of sparse attention.

A grid step computes the index scores of a block of query tokens for one tile of keys. The scores of
all earlier keys of a block stay in on-chip memory. After the last tile, the kernel finds the k-th
largest score of each query token bit by bit, and writes one bit for each pair of tokens. Scores are
never written to high-bandwidth memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Float, Int

from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import (
    compiler_parameters,
    cost_estimate,
    dot,
    tpu_cores,
    usable_vmem,
)

_LANES = 128
_MAX_TILE = 1024
"""Number of keys in a tile. Short sequences have one smaller tile."""
_ROWS_AT_ONCE = 256
"""Number of pairs of an index head and a query token whose scores are computed at once."""
_SCORES_RATE = 1.16
"""Instructions that compute scores, as a multiple of the cycles of the matrix units."""
_PASS, _WRITE = 32 / 2**15, 240 / 2**15
"""Instructions for each score in a pass that counts scores, and in the pass that writes bits."""
_STEP, _BLOCK = 130, 2000
"""Instructions of a grid step, and of a block of query tokens, outside of these loops.
`benchmarks/kernel_schedules.py --sparse` prints the schedules."""
_LOWEST = -(1 << 31)
_NEGATIVE_INFINITY = -0x7F800001
"""Sort key of a score of minus infinity."""
_INFINITY = 0x7F800000
MIN_SCORE = -1e20
"""Lower bound of the largest score, for query tokens without keys."""


class SelectionInputs(NamedTuple):
    """Query tokens in blocks, and all keys."""

    query: Float[Array, "i B t h d"]
    """Index queries of all index heads."""
    weights: Float[Array, "i B t h"]
    segments: Int[Array, "i B t"]
    places: Int[Array, "i t"]
    """Indices of the query tokens in the sequence, in increasing order within a block."""
    key: Float[Array, "B S d"]
    key_segments: Int[Array, "B S"]


def rows_at_once(num_keys: int, num_heads: int, size: int) -> int:
    """Return the number of query tokens whose scores fit the memory of a core: 32, 16 or 8.

    `size` is the number of dims of an index head. If the scores of 8 tokens do not fit, the result
    is 0.
    """
    usable = usable_vmem()
    tile = _tile_size(num_keys)
    padded = -(-num_keys // tile) * tile
    for rows in (32, 16, 8):
        arrays = 4 * rows * padded + 2 * 4 * padded + 2 * 4 * tile * max(size, _LANES)
        queries = num_heads * rows * (2 * 4 * max(size, _LANES) + 4 * _LANES)
        products = 2 * 4 * min(_ROWS_AT_ONCE, num_heads * rows) * tile
        if arrays + queries + products <= usable:
            return rows
    return 0


def _tile_size(num_keys: int) -> int:
    return min(_MAX_TILE, -(-num_keys // _LANES) * _LANES)


def select(
    inputs: SelectionInputs, top_k: int, scale: float, rows: int, *, interpret: bool = False
) -> tuple[Int[Array, "i B S"], Float[Array, "i B t"]]:
    """Return one bit for each pair, and the log-sum-exp of the scores of the selected keys.

    Bit n of a word is the selection of query token n of the block. `rows` is the number of query
    tokens that a grid step processes. Blocks have at most 32 tokens.
    """
    tokens = inputs.query.shape[2]
    parts = -(-tokens // rows)
    padding = parts * rows - tokens

    def divide(x: Array, axis: int, fill: int = 0) -> Array:
        """Divide blocks into `parts` blocks of `rows` tokens."""
        width = [(0, padding if each == axis else 0) for each in range(x.ndim)]
        x = jnp.pad(x, width, "edge") if fill else jnp.pad(x, width)
        x = x.reshape(*x.shape[:axis], parts, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 1).reshape(-1, *x.shape[1:axis], *x.shape[axis + 1 :])

    # Segment IDs of padding equal those of the last token, whose bit is discarded below.
    query = jnp.moveaxis(divide(inputs.query, 2), 3, 2)
    weights = divide(inputs.weights, 2).astype(jnp.float32) * scale
    segments, places = divide(inputs.segments, 2, 1), divide(inputs.places, 1, 1)
    bits, sums = _call(
        query, weights, segments, places, inputs.key, inputs.key_segments, top_k, interpret
    )
    blocks, batch, num_keys = len(inputs.query), *inputs.key_segments.shape
    bits = bits[:, :, 0, :num_keys].reshape(blocks, parts, batch, num_keys)
    sums = sums[..., 0].reshape(blocks, parts, batch, rows)
    sums = jnp.moveaxis(sums, 1, 2).reshape(blocks, batch, -1)[..., :tokens]
    if padding:
        bits = bits.at[:, -1].set(bits[:, -1] & ((1 << (rows - padding)) - 1))
    shifts = rows * jnp.arange(parts, dtype=jnp.int32)[:, None, None]
    return (bits << shifts).sum(1, dtype=jnp.int32) if parts > 1 else bits[:, 0], sums


def _call(
    query: Float[Array, "i B h t d"],
    weights: Float[Array, "i B t h"],
    segments: Int[Array, "i B t"],
    places: Int[Array, "i t"],
    key: Float[Array, "B S d"],
    key_segments: Int[Array, "B S"],
    top_k: int,
    interpret: bool,
) -> tuple[Int[Array, "i B 1 P"], Float[Array, "i B t 128"]]:
    blocks, batch, heads, rows, size = query.shape
    num_keys, tile = key.shape[1], _tile_size(key.shape[1])
    tiles = -(-num_keys // tile)
    # A maximum over the tokens would be equal, but with it, libtpu 0.0.42 aborted while it compiled
    # the layer with 4096 blocks.
    stops = jnp.minimum(places[:, -1] // tile + 1, tiles)
    cores = tpu_cores().number

    def spec(shape: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
        def place(core: Any, n: Any, b: Any, j: Any, stops: Any) -> tuple[Any, ...]:
            # Blocks alternate between cores, because later tokens have more keys.
            block = jnp.minimum(n * cores + core, blocks - 1)
            return index(block, b, jnp.minimum(j, stops[block] - 1))

        return pl.BlockSpec(shape, place)

    outs = [
        jax.typeof(key_segments).update(shape=(blocks, batch, 1, tiles * tile)),
        jax.typeof(weights).update(shape=(blocks, batch, rows, _LANES)),
    ]
    operands = (
        query.reshape(blocks, batch, heads * rows, size),
        weights,
        jnp.stack(
            [segments, jnp.broadcast_to(places[:, None], segments.shape)],
            -1,
        ),
        key,
        key_segments[:, None],
    )
    pairs = blocks * rows * batch * num_keys / 2
    flops = 2 * heads * size * pairs
    cycles = kernel_cycles(blocks * batch, rows, heads * size, tiles, tile)
    with jax.named_scope(scopes.flops(flops)), jax.named_scope(scopes.cycles(cycles)):
        return pl.pallas_call(
            partial(_kernel, top_k, heads, num_keys, cores, blocks),
            out_shape=outs,
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[
                    spec((None, None, heads * rows, size), lambda i, b, j: (i, b, 0, 0)),
                    spec((None, None, rows, heads), lambda i, b, j: (i, b, 0, 0)),
                    spec((None, None, rows, 2), lambda i, b, j: (i, b, 0, 0)),
                    spec((None, tile, size), lambda i, b, j: (b, j, 0)),
                    spec((None, 1, tile), lambda i, b, j: (b, 0, j)),
                ],
                out_specs=[
                    spec((None, None, 1, tiles * tile), lambda i, b, j: (i, b, 0, 0)),
                    spec((None, None, rows, _LANES), lambda i, b, j: (i, b, 0, 0)),
                ],
                grid=(cores, -(-blocks // cores), batch, tiles),
                scratch_shapes=[
                    tpu.VMEM((tiles, rows, tile), jnp.int32),
                    tpu.VMEM((heads * rows, _LANES), jnp.float32),
                    tpu.VMEM((rows, _LANES), jnp.int32),
                ],
            ),
            compiler_params=compiler_parameters("parallel", *("arbitrary",) * 3),
            cost_estimate=cost_estimate(flops, (*operands, *outs)),
            interpret=interpret,
            name="sparse_selection",
        )(stops, *operands)


def kernel_cycles(blocks: int, rows: int, width: int, tiles: int, tile: int) -> float:
    """Return the cycles of the kernel if query tokens have `tiles / 2` tiles of earlier keys.

    `blocks` is the number of blocks of `rows` query tokens, and `width` the number of dims of all
    index heads. The constants are numbers of instructions in the schedule for v5p.
    """
    cores = tpu_cores()
    scores = rows * tile * width / cores.macs * _SCORES_RATE
    search = rows * tile * (33 * _PASS + _WRITE)
    block = (tiles + 1) / 2 * (scores + search) + tiles * _STEP + _BLOCK
    return -(-blocks // cores.number) * block


def _kernel(
    top_k: int, heads: int, num_keys: int, cores: int, blocks: int, stops: Any, *refs: Any
) -> None:
    """Compute the scores of a tile of keys. The last tile of a block completes the selection."""
    query, weights, tokens, key, key_segments, bits, sums, scores, wide, largest = refs
    rows, tile = scores.shape[1:]
    step = pl.program_id(3)
    stop = stops[jnp.minimum(pl.program_id(1) * cores + pl.program_id(0), blocks - 1)]

    @pl.when(step == 0)
    def _() -> None:
        largest[...] = jnp.full(largest.shape, _LOWEST, jnp.int32)
        for head in range(heads):
            column = weights[:, head : head + 1]
            wide[head * rows : (head + 1) * rows] = jnp.broadcast_to(column, (rows, _LANES))

    @pl.when(step < stop)
    def _() -> None:
        columns = step * tile + lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
        seen = (tokens[:, 0:1] == key_segments[...]) & (tokens[:, 1:2] >= columns)
        seen &= columns < num_keys
        total = _scores(query, key, wide, rows)
        ordered = jnp.where(seen, sort_keys(total), _NEGATIVE_INFINITY)
        scores[step] = ordered
        largest[...] = jnp.maximum(largest[...], _over_columns(ordered, jnp.maximum))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        _select(top_k, stop, scores, largest, bits, sums)


def _scores(query: Any, key: Any, wide: Any, rows: int) -> Float[Array, "t s"]:
    """Return the sum over index heads of `weight * relu(query . key)`."""
    keys, total = key[...], None
    repeats = keys.shape[0] // _LANES
    for start in range(0, query.shape[0], max(rows, _ROWS_AT_ONCE)):
        stop = min(start + max(rows, _ROWS_AT_ONCE), query.shape[0])
        products = jnp.maximum(dot(query[start:stop], keys, 1, 1), 0.0)
        for begin in range(0, stop - start, rows):
            weight = wide[start + begin : start + begin + rows]
            weight = lax.concatenate([weight] * repeats, 1)
            part = weight * products[begin : begin + rows]
            total = part if total is None else total + part
    assert total is not None
    return total


def sort_keys(x: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Return integers with the order of the float32 numbers `x`. Zeros of both signs are equal."""
    # XLA simplifies `x + 0.0` to `x`, which would keep the sign of a zero.
    number = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return _flip(number)


def _flip(number: Array) -> Array:
    """Convert the bits of float32 numbers to sort keys. The function is its own inverse."""
    return jnp.where(number < 0, number ^ 0x7FFFFFFF, number)


def _over_columns(x: Array, combine: Any) -> Array:
    """Reduce groups of `_LANES` columns to one group."""
    parts = [x[:, start : start + _LANES] for start in range(0, x.shape[1], _LANES)]
    while len(parts) > 1:
        pairs = [combine(*parts[n : n + 2]) for n in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def _select(top_k: int, stop: Any, scores: Any, largest: Any, bits: Any, sums: Any) -> None:
    """Write the selection of a block, given the sort keys of all scores."""
    rows, tile = scores.shape[1:]

    def count(test: Any) -> Int[Array, "t 1"]:
        """Return the number of scores in each row that pass a test."""

        def add(number: Any, total: Array) -> Array:
            passed = test(scores[number], number * tile)
            return total + _over_columns(jnp.where(passed, 1, 0), jnp.add)

        total = lax.fori_loop(0, stop, add, jnp.zeros((rows, _LANES), jnp.int32))
        return total.sum(1, keepdims=True)

    def next_bit(number: Any, threshold: Array) -> Array:
        higher = threshold + (1 << (31 - number))
        return jnp.where(count(lambda x, _: x >= higher) >= top_k, higher, threshold)

    # The sum of the lowest integer and `1 << 31` is 0.
    start = jnp.full((rows, 1), _LOWEST, jnp.int32)
    threshold = lax.fori_loop(0, 32, next_bit, start)
    lowest = jnp.maximum(threshold, _NEGATIVE_INFINITY + 1)
    excess = jnp.where(count(lambda x, _: x >= lowest) > top_k, 1, 0)
    end = jnp.full((rows, 1), (1 << 31) - 1, jnp.int32)
    num_bits = (scores.shape[0] * tile).bit_length()

    def first_of_equal() -> Array:
        """Return the index of the first key that the threshold does not select, if its score equals
        the threshold.
        """
        free = top_k - count(lambda x, _: x > threshold)

        def next_end(number: Any, end: Array) -> Array:
            later = end + (1 << (num_bits - 1 - number))

            def is_earlier(x: Array, first: Any) -> Array:
                place = first + lax.broadcasted_iota(jnp.int32, x.shape, 1)
                return (x == threshold) & (place < later)

            return jnp.where(count(is_earlier) <= free, later, end)

        found = lax.fori_loop(0, num_bits, next_end, jnp.zeros((rows, 1), jnp.int32))
        return jnp.where(excess == 1, found, end)

    end = lax.cond(excess.max() > 0, first_of_equal, lambda: end)
    highest = largest[...].max(1, keepdims=True)
    top = jnp.maximum(lax.bitcast_convert_type(_flip(highest), jnp.float32), MIN_SCORE)
    places = lax.broadcasted_iota(jnp.int32, (rows, tile), 0)

    def write(number: Any, total: Array) -> Array:
        x = scores[number]
        column = number * tile + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        selected = (x > threshold) | ((x == threshold) & (column < end))
        selected &= (x > _NEGATIVE_INFINITY) & (x <= _INFINITY)
        words = jnp.where(selected, jnp.int32(1) << places, 0).sum(0, keepdims=True)
        bits[:, pl.ds(pl.multiple_of(number * tile, tile), tile)] = words
        values = lax.bitcast_convert_type(_flip(x), jnp.float32)
        shares = jnp.where(selected, jnp.exp(values - top), 0.0)
        return total + _over_columns(shares, jnp.add)

    total = lax.fori_loop(0, stop, write, jnp.zeros((rows, _LANES), jnp.float32))
    total = total.sum(1, keepdims=True)
    sums[...] = jnp.broadcast_to(top + jnp.log(jnp.where(total > 0, total, 1.0)), sums.shape)

    def clear(number: Any, _: Any) -> None:
        where = pl.ds(pl.multiple_of(number * tile, tile), tile)
        bits[:, where] = jnp.zeros((1, tile), jnp.int32)

    lax.fori_loop(stop, scores.shape[0], clear, None)
