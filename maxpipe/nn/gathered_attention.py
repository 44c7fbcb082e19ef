"""Attention of a block of query tokens to gathered keys, with Pallas kernels for TPUs.

All heads share the keys, so the query tokens of all heads are rows of the same matmuls. One word
per key contains the query tokens that select the key, one bit for each token. The scores of a tile
of keys stay in on-chip memory. Keys consist of the latent, which is also the value, and RoPE dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Bool, Float, UInt32

from maxpipe.nn.selection_kernel import MIN_SCORE
from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import (
    compiler_parameters,
    cost_estimate,
    dot,
    tpu_cores,
    usable_vmem,
)

_MAX_ROWS = 512
"""Largest number of pairs of a head and a query token that a grid step processes."""
_TILE = 512
"""Number of keys that a grid step processes."""
_LANES = 128
_ADD_RATE, _SHARES_RATE, _GRADIENTS_RATE = 1.32, 1.08, 1.02
"""Instructions of the kernels for v5p, as multiples of the cycles of the matrix units.
`benchmarks/kernel_schedules.py --sparse` prints the schedules."""
_MASK_VALUE = -1e30


class BlockOptions(NamedTuple):
    """Static options of the attention of a block."""

    scale: float
    """Factor of the attention scores."""
    value_size: int
    """Number of dims of a value, which come first in a key."""
    interpret: bool = False
    """Whether kernels run as JAX operations on any device."""


class Softmax(NamedTuple):
    """Attention output and softmax sums over the keys so far. All arrays are float32."""

    largest: Float[Array, "B N t 1"]
    total: Float[Array, "B N t 1"]
    mixed: Float[Array, "B N t r"]

    @classmethod
    def empty(cls, query: Float[Array, "B N t h"], value_size: int) -> Softmax:
        """Return the sums over no keys."""
        shape = query.shape[:3]
        total = jnp.zeros((*shape, 1))
        return cls(jnp.full_like(total, MIN_SCORE), total, jnp.zeros((*shape, value_size)))

    def finish(self) -> tuple[Float[Array, "B N t r"], Float[Array, "B N t"]]:
        """Return the float32 output and the log-sum-exp of the scores."""
        total = jnp.where(self.total > 0, self.total, 1.0)
        return self.mixed / total, (self.largest + jnp.log(total))[..., 0]


def add_keys(
    state: Softmax,
    query: Float[Array, "B N t h"],
    keys: Float[Array, "B s h"],
    words: UInt32[Array, "B s"],
    options: BlockOptions,
) -> Softmax:
    """Return the sums with more keys."""
    arrays = query, keys, words, *state
    return Softmax(*_choose(_add_plain, _add_kernel, arrays, options))


def sum_shares(
    query: Float[Array, "B N t h"],
    keys: Float[Array, "B s h"],
    words: UInt32[Array, "B s"],
    log_sum: Float[Array, "B N t"],
    options: BlockOptions,
) -> Float[Array, "B t s"]:
    """Return the attention probabilities of the keys, summed over the heads."""
    return _choose(_shares_plain, _shares_kernel, (query, keys, words, log_sum), options)


class OutputGradient(NamedTuple):
    """Gradient of the output, and float32 numbers for the gradient of the softmax."""

    d_mixed: Float[Array, "B N t r"]
    log_sum: Float[Array, "B N t"]
    slope: Float[Array, "B N t"]
    """Product of the output and its gradient."""


def empty_gradient(query: Float[Array, "B N t h"]) -> Float[Array, "c B N t h"]:
    """Return float32 zeros to which `gradients` adds. Every core adds to its own part."""
    return jnp.zeros((tpu_cores().number, *query.shape))


def gradients(
    d_query: Float[Array, "c B N t h"],
    query: Float[Array, "B N t h"],
    keys: Float[Array, "B s h"],
    words: UInt32[Array, "B s"],
    output: OutputGradient,
    options: BlockOptions,
) -> tuple[Float[Array, "c B N t h"], Float[Array, "B s h"]]:
    """Return the gradients of the queries, added to `d_query`, and of these keys.

    The gradient of the queries is the sum over the first dim of `d_query`.
    """
    arrays = query, keys, words, *output, d_query
    return _choose(_gradients_plain, _gradients_kernel, arrays, options)


def _choose(plain: Any, kernel: Any, arrays: tuple[Array, ...], options: BlockOptions) -> Any:
    """Run the kernel on TPUs if its arrays fit the on-chip memory, and plain JAX otherwise."""
    plain, kernel = partial(plain, options), partial(kernel, options)
    if not fits(arrays[0].shape, arrays[1].shape):
        return plain(*arrays)
    if options.interpret:
        return kernel(*arrays)
    return lax.platform_dependent(*arrays, tpu=kernel, default=plain)


# Plain JAX.


def _add_plain(
    options: BlockOptions,
    query: Array,
    keys: Array,
    words: Array,
    largest: Array,
    total: Array,
    mixed: Array,
) -> tuple[Array, Array, Array]:
    scores = _scores(query, keys, words, options.scale)
    new = jnp.maximum(largest, scores.max(-1, keepdims=True))
    shares, shrink = jnp.exp(scores - new), jnp.exp(largest - new)
    part = _dot("bnts,bsr->bntr", shares.astype(keys.dtype), keys[..., : options.value_size])
    return new, total * shrink + shares.sum(-1, keepdims=True), mixed * shrink + part


def _shares_plain(
    options: BlockOptions, query: Array, keys: Array, words: Array, log_sum: Array
) -> Float[Array, "B t s"]:
    return jnp.exp(_scores(query, keys, words, options.scale) - log_sum[..., None]).sum(1)


def _gradients_plain(
    options: BlockOptions,
    query: Array,
    keys: Array,
    words: Array,
    d_mixed: Array,
    log_sum: Array,
    slope: Array,
    d_query: Array,
) -> tuple[Array, Array]:
    values = keys[..., : options.value_size]
    shares = jnp.exp(_scores(query, keys, words, options.scale) - log_sum[..., None])
    d_value = _dot("bnts,bntr->bsr", shares.astype(keys.dtype), d_mixed)
    d_scores = shares * (_dot("bntr,bsr->bnts", d_mixed, values) - slope[..., None])
    d_scores = (d_scores * options.scale).astype(keys.dtype)
    d_query = d_query.at[0].add(_dot("bnts,bsh->bnth", d_scores, keys))
    d_keys = _dot("bnts,bnth->bsh", d_scores, query)
    return d_query, d_keys.at[..., : options.value_size].add(d_value)


def _scores(query: Array, keys: Array, words: Array, scale: float) -> Float[Array, "B N t s"]:
    """Return the float32 scores. Those of keys that a token does not select are very small."""
    scores = _dot("bnth,bsh->bnts", query, keys) * scale
    return jnp.where(chosen_keys(words, query.shape[2])[:, None], scores, _MASK_VALUE)


def chosen_keys(words: UInt32[Array, "B s"], tokens: int) -> Bool[Array, "B t s"]:
    """Return whether each query token selects each key."""
    return (words[:, None] >> jnp.arange(tokens, dtype=jnp.uint32)[:, None]) & 1 == 1


def _dot(form: str, left: Array, right: Array) -> Float[Array, ...]:
    """Compute an einsum with float32 accumulation."""
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)


# Kernels.


def fits(query: tuple[int, ...], keys: tuple[int, ...]) -> bool:
    """Return whether the kernels support arrays of these shapes `[B, N, t, h]` and `[B, s, h]`.

    A grid step of the largest kernel has, for each pair of a row and a key, four scores and two
    rounded scores, and two copies of each operand and result.
    """
    rows, tile = _heads_at_once(query[1], query[2]) * query[2], _tile_size(keys[1])
    if not rows or not tile:
        return False
    width = -(-query[3] // _LANES) * _LANES
    pairs = rows * tile * (4 * 4 + 2 * 4)
    row_arrays = rows * width * 2 * (4 + 4 + 4 + 4)
    key_arrays = tile * (width * 2 * (4 + 4) + 2 * 4 * _LANES)
    return pairs + row_arrays + key_arrays <= usable_vmem()


def _heads_at_once(heads: int, tokens: int, parts: int = 1) -> int:
    """Return the number of heads of a grid step, or 0 if the kernels do not support the number of
    tokens. If possible, there are at least `parts` grid steps.
    """
    if tokens not in (16, 32):
        return 0
    limit = min(_MAX_ROWS // tokens, max(1, heads // parts))
    return next(count for count in range(limit, 0, -1) if heads % count == 0)


def _tile_size(num_keys: int) -> int:
    """Return the number of keys of a grid step, or 0 if the kernels do not support the number."""
    return next((size for size in (_TILE, 256, 128) if num_keys % size == 0), 0)


def _flat(x: Any) -> Array:
    """Merge the dims for heads and tokens of a block."""
    x = x[...]
    return x.reshape(-1, x.shape[-1])


def _words(words: UInt32[Array, "B s"]) -> Array:
    return lax.bitcast_convert_type(words, jnp.int32)


def _masked_scores(query: Any, keys: Any, words: Any, scale: float) -> Float[Array, "n t s"]:
    """Return the scores of a tile of keys; those of other keys than the selected are very small."""
    heads, tokens, _ = query.shape
    scores = dot(_flat(query), keys[...], 1, 1) * scale
    token = lax.broadcasted_iota(jnp.int32, (tokens, keys.shape[0]), 0)
    chosen = (words[...] >> token) & 1 == 1
    return jnp.where(chosen[None], scores.reshape(heads, tokens, -1), _MASK_VALUE)


def _add_kernel(
    options: BlockOptions,
    query: Array,
    keys: Array,
    words: Array,
    largest: Array,
    total: Array,
    mixed: Array,
) -> tuple[Array, ...]:
    batch, heads, tokens, width = query.shape
    group, tile = _heads_at_once(heads, tokens, tpu_cores().number), _tile_size(keys.shape[1])

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, group, tokens, width), lambda g, b, j: (b, g, 0, 0))

    state = (largest, total, mixed)
    specs = [rows(x.shape[3]) for x in state]
    macs = batch * heads * tokens * keys.shape[1] * (width + options.value_size)
    with _costs(macs, _ADD_RATE):
        return pl.pallas_call(
            partial(_add_body, options),
            out_shape=[jax.typeof(x) for x in state],
            in_specs=[
                rows(width),
                pl.BlockSpec((None, tile, width), lambda g, b, j: (b, j, 0)),
                pl.BlockSpec((None, 1, tile), lambda g, b, j: (b, 0, j)),
                *specs,
            ],
            out_specs=specs,
            grid=(heads // group, batch, keys.shape[1] // tile),
            input_output_aliases={3: 0, 4: 1, 5: 2},
            compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
            cost_estimate=cost_estimate(2 * macs, (query, keys, *state, *state)),
            interpret=options.interpret,
            name="gathered_forward",
        )(query, keys, _words(words)[:, None], *state)


def _add_body(options: BlockOptions, query: Any, keys: Any, words: Any, *state: Any) -> None:
    starts, (largest, total, mixed) = state[:3], state[3:]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for start, x in zip(starts, state[3:], strict=True):
            x[...] = start[...]

    scores = _masked_scores(query, keys, words, options.scale)
    new = jnp.maximum(largest[...], scores.max(-1, keepdims=True))
    shares, shrink = jnp.exp(scores - new), jnp.exp(largest[...] - new)
    largest[...] = new
    total[...] = total[...] * shrink + shares.sum(-1, keepdims=True)
    narrow = shares.reshape(-1, shares.shape[-1]).astype(keys.dtype)
    part = dot(narrow, keys[:, : options.value_size], 1, 0)
    mixed[...] = mixed[...] * shrink + part.reshape(mixed.shape)


def _shares_kernel(
    options: BlockOptions, query: Array, keys: Array, words: Array, log_sum: Array
) -> Float[Array, "B t s"]:
    batch, heads, tokens, width = query.shape
    group, tile = _heads_at_once(heads, tokens), _tile_size(keys.shape[1])
    macs = batch * heads * tokens * keys.shape[1] * width
    out = jax.typeof(log_sum).update(shape=(batch, tokens, keys.shape[1]))
    with _costs(macs, _SHARES_RATE):
        return pl.pallas_call(
            partial(_shares_body, options.scale),
            out_shape=out,
            in_specs=[
                pl.BlockSpec((None, group, tokens, width), lambda j, b, g: (b, g, 0, 0)),
                pl.BlockSpec((None, tile, width), lambda j, b, g: (b, j, 0)),
                pl.BlockSpec((None, 1, tile), lambda j, b, g: (b, 0, j)),
                pl.BlockSpec((None, group, tokens, 1), lambda j, b, g: (b, g, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, tokens, tile), lambda j, b, g: (b, 0, j)),
            grid=(keys.shape[1] // tile, batch, heads // group),
            compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
            cost_estimate=cost_estimate(2 * macs, (query, keys, out)),
            interpret=options.interpret,
            name="gathered_shares",
        )(query, keys, _words(words)[:, None], log_sum[..., None])


def _shares_body(scale: float, query: Any, keys: Any, words: Any, log_sum: Any, out: Any) -> None:
    shares = jnp.exp(_masked_scores(query, keys, words, scale) - log_sum[...]).sum(0)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        out[...] = shares

    @pl.when(pl.program_id(2) > 0)
    def _() -> None:
        out[...] += shares


def _gradients_kernel(options: BlockOptions, query: Array, *arrays: Array) -> tuple[Array, Array]:
    """Call the kernel for groups of heads, whose gradients of keys are added."""
    keys, words, d_mixed, log_sum, slope, d_query = arrays
    heads = query.shape[1]
    group = _heads_at_once(heads, query.shape[2])
    d_queries, d_keys = [], None
    for start in range(0, heads, group):
        part = slice(start, start + group)
        one, d_part = _group_gradients(
            options,
            *(query[:, part], keys, words, d_mixed[:, part]),
            *(log_sum[:, part], slope[:, part], d_query[:, :, part]),
        )
        d_queries.append(one)
        d_keys = d_part if d_keys is None else d_keys + d_part
    assert d_keys is not None
    return jnp.concatenate(d_queries, 2) if len(d_queries) > 1 else d_queries[0], d_keys


def _group_gradients(options: BlockOptions, query: Array, *arrays: Array) -> tuple[Array, Array]:
    keys, words, d_mixed, log_sum, slope, d_query = arrays
    batch, heads, tokens, width = query.shape
    num_keys, rows = keys.shape[1], heads * tokens
    tile, cores = _tile_size(num_keys), len(d_query)
    steps = num_keys // tile
    # Every core processes contiguous tiles. One core processes all of them if their number is odd.
    active = cores if steps % cores == 0 else 1
    steps //= active

    def merged(x: Array) -> Array:
        """Merge the dims for heads and tokens."""
        return x.reshape(*x.shape[:-3], rows, x.shape[-1])

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, width), lambda c, b, j: (b, 0, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, tile, width), lambda c, b, j: (b, c * steps + j, 0))

    sums = jnp.stack([log_sum.reshape(batch, rows), slope.reshape(batch, rows)], 1)
    part = pl.BlockSpec((None, None, rows, width), lambda c, b, j: (c, b, 0, 0))
    parts = merged(d_query)
    out = jax.typeof(parts).update(shape=keys.shape)
    macs = batch * rows * num_keys * (3 * width + 2 * options.value_size)
    with _costs(macs, _GRADIENTS_RATE):
        parts, d_keys = pl.pallas_call(
            partial(_gradients_body, options, tokens),
            out_shape=[jax.typeof(parts), out],
            in_specs=[
                *(of_rows(width), of_keys(width), of_keys(1), of_rows(d_mixed.shape[3])),
                pl.BlockSpec((None, 2, rows), lambda c, b, j: (b, 0, 0)),
                part,
            ],
            out_specs=[part, of_keys(width)],
            grid=(active, batch, steps),
            input_output_aliases={5: 0},
            compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
            cost_estimate=cost_estimate(2 * macs, (query, d_mixed, keys, parts, parts, out)),
            interpret=options.interpret,
            name="gathered_backward",
        )(merged(query), keys, _words(words)[..., None], merged(d_mixed), sums, parts)
    return parts.reshape(d_query.shape), d_keys


def _gradients_body(
    options: BlockOptions,
    tokens: int,
    query: Any,
    keys: Any,
    words: Any,
    d_mixed: Any,
    sums: Any,
    start: Any,
    d_query: Any,
    d_keys: Any,
) -> None:
    """Compute the gradients of a tile of keys. Scores have one row for each key."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        d_query[...] = start[...]

    size = options.value_size
    # The number of tokens is a power of two, and rows are ordered by head.
    row = lax.broadcasted_iota(jnp.int32, (keys.shape[0], query.shape[0]), 1)
    chosen = (words[...] >> (row & (tokens - 1))) & 1 == 1
    scores = dot(keys[...], query[...], 1, 1) * options.scale
    shares = jnp.where(chosen, jnp.exp(scores - sums[0:1]), 0.0)
    d_shares = dot(keys[:, :size], d_mixed[...], 1, 1)
    d_scores = (shares * (d_shares - sums[1:2]) * options.scale).astype(keys.dtype)
    d_query[...] += dot(d_scores, keys[...], 0, 0)
    d_values = dot(shares.astype(keys.dtype), d_mixed[...], 1, 0)
    d_rows = dot(d_scores, query[...], 1, 0)
    d_keys[:, :size] = d_rows[:, :size] + d_values
    d_keys[:, size:] = d_rows[:, size:]


@contextmanager
def _costs(macs: float, rate: float) -> Iterator[None]:
    """Declare the FLOPs and cycles of a kernel, which is `rate` times as long as the matrix units
    need.
    """
    cores = tpu_cores()
    cycles = scopes.cycles(macs / cores.macs / cores.number * rate)
    with jax.named_scope(scopes.flops(2 * macs)), jax.named_scope(cycles):
        yield
