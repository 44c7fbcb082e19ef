"""Sparse attention with memory linear in T: each block of query tokens reads only selected keys.

A block consists of up to 32 query tokens. Its index scores give the keys that each token selects.
The keys that at least one token of the block selects are gathered, in chunks, and attention runs
over these chunks with online softmax (arXiv:1805.02867). The number of chunks depends on the data.
All heads share the keys, which are the latents of multi-head latent attention, so the heads of a
few tokens fill the matrix unit and a key is gathered once for all heads.

The backward pass needs the selection, which is saved with one bit for each pair of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Shaped, UInt32

from maxpipe.models.count import SELECTION_BLOCK
from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn import gathered_attention, row_kernel, selection_kernel
from maxpipe.nn.attention import interface
from maxpipe.nn.attention.interface import Mask
from maxpipe.nn.gathered_attention import BlockOptions, OutputGradient, Softmax, chosen_keys
from maxpipe.nn.indexer import (
    IndexArrays,
    index_products,
    running_count,
    score_gradients,
    score_scale,
    weighted_sum,
)
from maxpipe.nn.key_compaction import compact
from maxpipe.nn.selection_kernel import MIN_SCORE, SelectionInputs
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import map_shards, mark_varying

_CHUNK = 2048
"""Number of gathered keys that are processed at once."""
_LANES = 128
_TOKEN_TILE = 16
"""Divisor of the number of query tokens in large blocks."""
_DIGIT = 4
"""Number of bits that a pass over the scores adds to the threshold of a query token."""
_INDEX_CHUNK = 2048
"""Number of keys whose index scores are computed at once."""
UNION = 2.0
"""Assumed number of keys that a block selects, as a multiple of the keys that a token selects.
Cycle estimates use this number."""
_PADDING_SEGMENT = -3
"""Segment ID of the tokens that pad a block. No key has this segment ID."""


class SparseOptions(NamedTuple):
    """Static options of a compiled attention program."""

    scale: float
    """Factor of the attention scores."""
    index_scale: float
    """Factor of the index scores."""
    top_k: int
    rope_size: int
    """Number of RoPE dims, which come last in a key. The other dims are also the value."""
    run: int
    """Length of each contiguous run of query tokens."""
    head_axis: str | None = None
    """Mesh axis that shards the heads."""
    index_axis: str | None = None
    """Mesh axis that shards the index heads."""
    interpret: bool = False
    """Whether kernels run as JAX operations on any device."""

    def of_block(self, key: Float[Array, "B S h"]) -> BlockOptions:
        """Return the options of attention to gathered keys."""
        return BlockOptions(self.scale, key.shape[-1] - self.rope_size, self.interpret)


class _Tokens(NamedTuple):
    """Arrays that determine which keys are visible."""

    segments: Int[Array, "B T"]
    key_segments: Int[Array, "B S"]
    places: Int[Array, " T"]


def sparse_attend(
    query: Float[Array, "B T N h"],
    key: Float[Array, "B S h"],
    index: IndexArrays,
    mask: Mask,
    loss_mask: Float[Array, "B T"] | None,
    *,
    top_k: int,
    rope_size: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N r"], Float[Array, ""]]:
    """Compute attention to the `top_k` keys with the largest index scores, and the indexer's loss.

    Keys that come first in the sequence win ties. `key` consists of the latent, which is also the
    value, and the RoPE dims. `index` contains the local query tokens and all keys. The loss is the
    divergence of the indexer's distribution over the selected keys from the mean attention
    distribution of all heads, summed over the query tokens with weights `loss_mask`. If `loss_mask`
    is None, the loss is 0. The gradient of `index` is that of the loss only. `interpret` runs
    kernels as JAX operations on any device.
    """
    tokens = query.shape[1]
    rows, head_axis = interface.query_axes(query)
    _, index_axis = interface.query_axes(index.query)
    assert mask.scale is not None
    options = SparseOptions(
        mask.scale,
        score_scale(index),
        top_k,
        rope_size,
        mask.run or tokens,
        head_axis,
        index_axis,
        interpret,
    )
    seen = _Tokens(
        mask.segments,
        mask.segments if mask.key_segments is None else mask.key_segments,
        jnp.arange(tokens, dtype=jnp.int32) if mask.places is None else mask.places,
    )
    counts = None if loss_mask is None else loss_mask.astype(jnp.float32)
    if counts is None:
        index = IndexArrays(*map(lax.stop_gradient, index))
    arrays = mark_varying((query, key, index, seen, counts))
    return _attention(*arrays, options, rows)


def _without_nan(x: Float[Array, "B T *dims"], segments: Int[Array, "B T"]) -> Array:
    """Replace numbers of padding tokens that are not finite by 0.

    Padding tokens share blocks with other tokens, and matmuls multiply their numbers by 0.
    """
    is_token = (segments != 0).reshape(*segments.shape, *(1,) * (x.ndim - 2))
    return jnp.where(is_token | jnp.isfinite(x), x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    query: Array,
    key: Array,
    index: IndexArrays,
    seen: _Tokens,
    counts: Array | None,
    options: SparseOptions,
    rows: tuple[str, ...],
) -> tuple[Float[Array, "B T N r"], Float[Array, ""]]:
    return _forward(query, key, index, seen, counts, options, rows)[0]


class _Specs(NamedTuple):
    """Partition specs of the arrays."""

    heads: PartitionSpec
    batch: PartitionSpec
    index_arrays: IndexArrays
    seen: _Tokens
    blocks: PartitionSpec


def _specs(options: SparseOptions, rows: tuple[str, ...]) -> _Specs:
    batch, index_axis = PartitionSpec(rows), options.index_axis
    index: Any = (PartitionSpec(rows, None, index_axis), batch)
    index = IndexArrays(*index, PartitionSpec(rows, None, index_axis))  # type: ignore[arg-type]
    seen: Any = _Tokens(batch, batch, PartitionSpec())  # type: ignore[arg-type]
    heads = PartitionSpec(rows, None, options.head_axis)
    return _Specs(heads, batch, index, seen, PartitionSpec(None, rows))


def _forward(
    query: Array,
    key: Array,
    index: IndexArrays,
    seen: _Tokens,
    counts: Array | None,
    options: SparseOptions,
    rows: tuple[str, ...],
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    query, index_query, weights = (
        _without_nan(x, seen.segments) for x in (query, index.query, index.weights)
    )
    key, index_key = (_without_nan(x, seen.key_segments) for x in (key, index.key))
    index = IndexArrays(index_query, index_key, weights)
    specs = _specs(options, rows)

    def run(*arguments: Any) -> Any:
        mixed, log_sum, members, loss, gradients = _local_forward(*arguments, options=options)
        loss = lax.psum(loss, rows) if rows else loss
        return mixed, log_sum, members, loss, gradients

    run = map_shards(
        run,
        (specs.heads, specs.batch, specs.index_arrays, specs.seen, specs.batch),
        (specs.heads, specs.heads, specs.blocks, PartitionSpec(), specs.index_arrays),
    )
    mixed, log_sum, members, loss, gradients = run(query, key, index, seen, counts)
    # All three arrays have checkpoint names, so that the backward pass does not repeat the forward
    # pass if they are saved.
    mixed = checkpoint_name(mixed, "context")
    log_sum, members = (checkpoint_name(array, LOG_SUM) for array in (log_sum, members))
    of_index = None
    if counts is not None:
        pairs = zip(gradients, index, strict=True)
        of_index = IndexArrays(*(gradient.astype(array.dtype) for gradient, array in pairs))
    return (mixed, loss), (query, key, mixed, log_sum, members, seen.segments, of_index)


def _backward(
    options: SparseOptions,
    rows: tuple[str, ...],
    saved: tuple[Any, ...],
    cotangents: tuple[Float[Array, "B T N r"], Float[Array, ""]],
) -> tuple[Any, ...]:
    *arrays, segments, of_index = saved
    d_mixed, d_loss = cotangents
    d_mixed = _without_nan(d_mixed, segments)
    specs = _specs(options, rows)
    run = map_shards(
        partial(_local_backward, options=options),
        (
            *(specs.heads, specs.batch),
            *(specs.heads, specs.heads, specs.blocks, specs.heads),
        ),
        (specs.heads, specs.batch),
    )
    d_query, d_key = run(*arrays, d_mixed)
    if of_index is None:  # a None is a cotangent of zeros
        return d_query, d_key, None, None, None
    d_index = IndexArrays(*((d_loss * array).astype(array.dtype) for array in of_index))
    return d_query, d_key, d_index, None, None


_attention.defvjp(_forward, _backward)


# Computation on one device.


class _Blocks:
    """Query tokens in blocks `[blocks, B, t, ...]`, with padding at the end of each run."""

    def __init__(self, tokens: int, run: int):
        self.tokens, self.run, self.runs = tokens, run, tokens // run
        self.per_run = -(-run // SELECTION_BLOCK)
        self.size = -(-run // self.per_run)
        if self.size > _TOKEN_TILE // 2:
            self.size = -(-self.size // _TOKEN_TILE) * _TOKEN_TILE

    def split(self, x: Shaped[Array, "B T *dims"], fill: float = 0) -> Shaped[Array, "i B t *dims"]:
        """Split the tokens into blocks. The padding has the value `fill`."""
        x = x.reshape(x.shape[0], self.runs, self.run, *x.shape[2:])
        width = [(0, 0) for _ in x.shape]
        width[2] = (0, self.per_run * self.size - self.run)
        x = jnp.pad(x, width, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.size, *x.shape[3:]), 1, 0)

    def split_places(self, places: Int[Array, " T"]) -> Int[Array, "i t"]:
        """Split the indices of the tokens. The padding repeats the last token of its run."""
        width = ((0, 0), (0, self.per_run * self.size - self.run))
        return jnp.pad(places.reshape(self.runs, self.run), width, "edge").reshape(-1, self.size)

    def split_heads(self, x: Float[Array, "B T N *dims"]) -> Float[Array, "i B N t *dims"]:
        """Split the tokens into blocks, in which the tokens of each head are contiguous."""
        return self.split(x).swapaxes(2, 3)

    def merge_heads(self, x: Float[Array, "i B N t *dims"]) -> Float[Array, "B T N *dims"]:
        """Merge the blocks of `split_heads`."""
        return self.merge(x.swapaxes(2, 3))

    def merge(self, x: Float[Array, "i B t *dims"]) -> Float[Array, "B T *dims"]:
        """Merge blocks into sequences, without the padding."""
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(x.shape[0], self.runs, -1, *x.shape[3:])[:, :, : self.run]
        return x.reshape(x.shape[0], self.tokens, *x.shape[3:])


def _local_forward(
    query: Float[Array, "B T N h"],
    key: Float[Array, "B S h"],
    index: IndexArrays,
    seen: _Tokens,
    counts: Float[Array, "B T"] | None,
    *,
    options: SparseOptions,
) -> tuple[Array, Array, Array, Array, IndexArrays]:
    """Return the output, the float32 log-sum-exp, the selection `[blocks, B, S]`, the loss and the
    float32 gradients of the loss.
    """
    blocks = _Blocks(query.shape[1], options.run)

    def of_block(d_key: Array, operands: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
        number, query, index_query, weights, log_index_sum, counts = operands
        selection = _Selection.of(members, number, options)
        mixed, log_sum = _attend(query, key, selection, options)
        if counts is None:
            return d_key, (mixed, log_sum, None, None, None)
        block = IndexArrays(index_query, index.key, weights)
        loss, (d_query, d_key, d_weights) = _loss(
            query, key, block, selection, log_sum, log_index_sum, counts, d_key, options
        )
        return d_key, (mixed, log_sum, loss, d_query, d_weights)

    inputs = SelectionInputs(
        blocks.split(index.query),
        blocks.split(index.weights),
        blocks.split(seen.segments, _PADDING_SEGMENT),
        blocks.split_places(seen.places),
        index.key,
        seen.key_segments,
    )
    members, log_index_sum = _select(inputs, options)
    operands = (
        jnp.arange(len(members), dtype=jnp.int32),
        blocks.split_heads(query),
        inputs.query,
        inputs.weights,
        log_index_sum,
        None if counts is None else blocks.split(counts),
    )
    d_key = mark_varying(_new_rows(index.key))
    d_key, (mixed, log_sum, loss, *d_tokens) = lax.scan(of_block, d_key, operands)
    mixed, log_sum = blocks.merge_heads(mixed), blocks.merge_heads(log_sum)
    if counts is None:
        return mixed, log_sum, members, jnp.zeros(()), index
    d_query, d_weights = map(blocks.merge, d_tokens)
    d_key = _sum(_rows_of(d_key, index.key), options.index_axis)
    gradients = IndexArrays(d_query, d_key, d_weights)
    return mixed, log_sum, members, loss.sum(), gradients


def _local_backward(
    query: Float[Array, "B T N h"],
    key: Float[Array, "B S h"],
    mixed: Float[Array, "B T N r"],
    log_sum: Float[Array, "B T N"],
    members: UInt32[Array, "i B S"],
    d_mixed: Float[Array, "B T N r"],
    *,
    options: SparseOptions,
) -> tuple[Array, Array]:
    """Return the gradients of the queries and keys."""
    blocks = _Blocks(query.shape[1], options.run)
    slope = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1)

    def of_block(d_key: Array, operands: tuple[Any, ...]) -> tuple[Array, Array]:
        number, query, *of_output = operands
        output = OutputGradient(*of_output)

        def add(chunk: _Chunk, state: tuple[Array, Array]) -> tuple[Array, Array]:
            d_query, d_key = state
            d_query, d_keys = gathered_attention.gradients(
                d_query, query, chunk.gather(key), chunk.words, output, options.of_block(key)
            )
            return d_query, chunk.add(d_key, d_keys, options)

        selection = _Selection.of(members, number, options)
        start = gathered_attention.empty_gradient(query), d_key
        d_query, d_key = _for_chunks(add, start, selection, options.top_k)
        return d_key, d_query.sum(0)

    operands = (
        jnp.arange(len(members), dtype=jnp.int32),
        *map(blocks.split_heads, (query, d_mixed, log_sum, slope)),
    )
    d_key, d_query = lax.scan(of_block, mark_varying(_new_rows(key)), operands)
    d_key = _sum(_rows_of(d_key, key), options.head_axis)
    return blocks.merge_heads(d_query).astype(query.dtype), d_key.astype(key.dtype)


# Selection of keys.


def _select(
    inputs: SelectionInputs, options: SparseOptions
) -> tuple[UInt32[Array, "i B S"], Float[Array, "i B t"]]:
    """Return the selection, and the log-sum-exp of the index scores of the selected keys.

    On TPUs, a kernel computes both if the scores of a few query tokens fit the on-chip memory.
    """
    heads, size = inputs.query.shape[3:]
    heads *= _axis_size(options.index_axis)
    rows = selection_kernel.rows_at_once(inputs.key.shape[1], heads, size)
    plain, kernel = (partial(run, options) for run in (_select_by_loop, _select_by_kernel))
    if not rows:
        return plain(*inputs)
    kernel = partial(kernel, rows)
    if options.interpret:
        return kernel(*inputs)
    return lax.platform_dependent(*inputs, tpu=kernel, default=plain)


def _select_by_loop(
    options: SparseOptions, *inputs: Array
) -> tuple[UInt32[Array, "i B S"], Float[Array, "i B t"]]:
    """Select keys in plain JAX. Partial scores are summed over the devices."""
    query, weights, segments, places, key, key_segments = inputs

    def of_block(_: None, operands: tuple[Array, ...]) -> tuple[None, tuple[Array, Array]]:
        query, weights, segments, places = operands
        block, visible = IndexArrays(query, key, weights), _Visible(segments, places, key_segments)
        scores = _index_scores(block, visible, options)
        selected = largest_keys(scores, options.top_k) & (scores > -jnp.inf)
        largest = jnp.maximum(scores.max(-1, keepdims=True), MIN_SCORE)
        total = jnp.where(selected, jnp.exp(scores - largest), 0.0).sum(-1)
        log_sum = largest[..., 0] + jnp.log(jnp.where(total > 0, total, 1.0))
        return None, (_members(selected), log_sum)

    return lax.scan(of_block, None, (query, weights, segments, places))[1]


def _select_by_kernel(
    options: SparseOptions, rows: int, *inputs: Array
) -> tuple[UInt32[Array, "i B S"], Float[Array, "i B t"]]:
    """Select keys by the kernel.

    If the index heads are sharded, every device receives all index heads of a part of the blocks,
    and then sends the selection of these blocks to the other devices. The selection needs 1/32 of
    the bytes of the scores. Consecutive blocks are on different devices, as later blocks have more
    keys.
    """
    local, axis = SelectionInputs(*inputs), options.index_axis
    num_blocks, devices = len(local.query), _axis_size(axis)

    def divide(x: Array, fill: int = 0) -> Shaped[Array, "j c *dims"]:
        width = [(0, -num_blocks % devices), *((0, 0),) * (x.ndim - 1)]
        return jnp.pad(x, width, constant_values=fill).reshape(-1, devices, *x.shape[1:])

    if axis:
        query, weights = (
            lax.all_to_all(divide(x), axis, 1, 4, tiled=True)[:, 0] for x in local[:2]
        )
        device = lax.axis_index(axis)
        segments = divide(local.segments, _PADDING_SEGMENT)[:, device]
        places = divide(local.places)[:, device]
        local = SelectionInputs(query, weights, segments, places, *local[4:])
    members, log_sum = selection_kernel.select(
        local, options.top_k, options.index_scale, rows, interpret=options.interpret
    )
    if axis:
        members, log_sum = (
            lax.all_gather(x, axis, axis=1).reshape(-1, *x.shape[1:])[:num_blocks]
            for x in (members, log_sum)
        )
    return lax.bitcast_convert_type(members, jnp.uint32), log_sum


class _Visible(NamedTuple):
    """Segments and indices from which the mask of a block is computed."""

    segments: Int[Array, "B t"]
    places: Int[Array, " t"]
    key_segments: Int[Array, "B S"]

    def pairs(self, start: Array, size: int) -> Bool[Array, "B t s"]:
        """Return whether each query token may read each of `size` keys."""
        segments = lax.dynamic_slice_in_dim(self.key_segments, start, size, 1)
        earlier = self.places[:, None] >= start + jnp.arange(size, dtype=jnp.int32)
        return (self.segments[:, :, None] == segments[:, None]) & earlier


def _index_scores(
    index: IndexArrays, visible: _Visible, options: SparseOptions
) -> Float[Array, "B t S"]:
    """Return the index scores of a block; those of invisible keys are -inf."""
    rows, tokens = index.weights.shape[:2]
    num_keys = index.key.shape[1]
    size = min(_INDEX_CHUNK, num_keys)
    last = jnp.minimum(visible.places.max() // size + 1, -(-num_keys // size))

    def add(number: Array, scores: Array) -> Array:
        # The last chunk overlaps with the previous one if the size does not divide S.
        start = jnp.minimum(number * size, num_keys - size)
        keys = lax.dynamic_slice_in_dim(index.key, start, size, 1)
        block = index._replace(key=keys)
        part = _sum(
            weighted_sum(block, index_products(block), options.index_scale), options.index_axis
        )
        part = jnp.where(visible.pairs(start, size), part, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, part, start, 2)

    start = mark_varying(jnp.full((rows, tokens, num_keys), -jnp.inf))
    mean = -(-num_keys // size) / 2 + 0.5
    with jax.named_scope(scopes.trips(mean)):
        return lax.fori_loop(0, last, add, start)


def largest_keys(scores: Float[Array, "B t S"], count: int) -> Bool[Array, "B t S"]:
    """Return a mask of the `count` largest entries along the last dim; earlier entries win ties.

    The digits of the threshold are found one by one, by counting the larger entries for each value
    of a digit. On TPUs, this is faster than sorting long rows.
    """
    if scores.shape[-1] <= count:
        return jnp.ones(scores.shape, bool)
    sign = jnp.uint32(1 << 31)
    ordered = lax.bitcast_convert_type(selection_kernel.sort_keys(scores), jnp.uint32) ^ sign

    def next_digit(number: Array, threshold: Array) -> Array:
        shift = (32 - _DIGIT * (number + 1)).astype(jnp.uint32)
        larger = (threshold | (jnp.uint32(digit) << shift) for digit in range(1, 2**_DIGIT))
        counts = ((ordered >= each).sum(-1, keepdims=True, dtype=jnp.int32) for each in larger)
        digit = sum((total >= count).astype(jnp.uint32) for total in counts)
        return threshold | (digit << shift)

    start = jnp.zeros((*scores.shape[:-1], 1), jnp.uint32)
    threshold = lax.fori_loop(0, 32 // _DIGIT, next_digit, mark_varying(start))
    selected = ordered >= threshold
    excess = selected.sum(-1, dtype=jnp.int32) > count

    def first_of_equal() -> Array:
        equal = ordered == threshold
        free = count - (ordered > threshold).sum(-1, keepdims=True, dtype=jnp.int32)
        return selected & (~equal | (running_count(equal) <= free))

    return lax.cond(excess.any(), first_of_equal, lambda: selected)


def _members(selected: Bool[Array, "B t S"]) -> UInt32[Array, "B S"]:
    """Return one bit for each query token."""
    bits = jnp.arange(selected.shape[1], dtype=jnp.uint32)[:, None]
    return (selected.astype(jnp.uint32) << bits).sum(1, dtype=jnp.uint32)


class _Selection(NamedTuple):
    """Keys that at least one query token of a block selects, in sequence order."""

    places: Int[Array, "B P"]
    """Indices of these keys, or S in places without a key."""
    words: UInt32[Array, "B P"]
    """Query tokens that select each key, with one bit for each token."""
    size: Int[Array, " B"]
    """Number of these keys."""
    num_keys: int

    @classmethod
    def of(
        cls, members: UInt32[Array, "i B S"], number: Int[Array, ""], options: SparseOptions
    ) -> _Selection:
        """Return the keys of the block with the given number."""
        num_keys = members.shape[2]
        arrays = compact(members, number, _chunk_size(num_keys), interpret=options.interpret)
        return cls(*arrays, num_keys)

    @property
    def chunks(self) -> Int[Array, ""]:
        """Return the number of chunks with selected keys."""
        return -(-self.size.max() // _chunk_size(self.num_keys))

    def chunk(self, number: Array) -> _Chunk:
        """Return a chunk."""
        size = _chunk_size(self.num_keys)
        slices = (
            lax.dynamic_slice_in_dim(x, number * size, size, 1) for x in (self.places, self.words)
        )
        return _Chunk(*slices)


def _chunk_size(num_keys: int) -> int:
    """Return the number of selected keys in a chunk."""
    return min(_CHUNK, -(-num_keys // _LANES) * _LANES)


class _Chunk(NamedTuple):
    """Selected keys that are processed at once."""

    places: Int[Array, "B s"]
    words: UInt32[Array, "B s"]

    def gather(self, x: Float[Array, "B S h"]) -> Float[Array, "B s h"]:
        """Return the rows of the keys. Places without a key get the last row."""
        options: Any = {"mode": "clip", "indices_are_sorted": True}
        return jax.vmap(lambda x, at: x.at[at].get(**options))(x, self.places)

    def add(
        self, x: Float[Array, "r 1 h"], rows: Float[Array, "B s h"], options: SparseOptions
    ) -> Float[Array, "r 1 h"]:
        """Add to the rows of the keys of all sequences. Places without a key are ignored."""
        batch, num_keys = len(rows), (len(x) - 1) // len(rows)
        first = num_keys * jnp.arange(batch, dtype=jnp.int32)[:, None]
        places = jnp.where(self.places < num_keys, first + self.places, len(x) - 1)
        rows = rows.reshape(-1, rows.shape[2])
        return row_kernel.add_rows(x, places.reshape(-1), rows, interpret=options.interpret)


def _for_chunks(
    run: Callable[[_Chunk, Any], Any], start: Any, selection: _Selection, top_k: int
) -> Any:
    """Call `run(chunk, state)` for each chunk with selected keys, and return the last state."""
    size = _chunk_size(selection.num_keys)

    def body(number: Array, state: Any) -> Any:
        return run(selection.chunk(number), state)

    mean = -(-min(int(UNION * top_k), selection.num_keys) // size)
    with jax.named_scope(scopes.trips(mean)):
        return lax.fori_loop(0, selection.chunks, body, mark_varying(start))


def _new_rows(x: Float[Array, "B S h"]) -> Float[Array, "r 1 h"]:
    """Return float32 zeros to which the gradients of `x` are added."""
    return row_kernel.new_rows(x.shape[0] * x.shape[1], x.shape[2])


def _rows_of(rows: Float[Array, "r 1 h"], x: Float[Array, "B S h"]) -> Float[Array, "B S h"]:
    """Return the gradients of `x`."""
    return rows[:-1].reshape(x.shape)


# Attention and loss of a block over the selected keys.


def _attend(
    query: Float[Array, "B N t h"],
    key: Float[Array, "B S h"],
    selection: _Selection,
    options: SparseOptions,
) -> tuple[Float[Array, "B N t r"], Float[Array, "B N t"]]:
    """Return the output and the float32 log-sum-exp."""
    block = options.of_block(key)

    def add(chunk: _Chunk, state: Softmax) -> Softmax:
        return gathered_attention.add_keys(state, query, chunk.gather(key), chunk.words, block)

    start = Softmax.empty(query, block.value_size)
    mixed, log_sum = _for_chunks(add, start, selection, options.top_k).finish()
    return mixed.astype(query.dtype), log_sum


def _loss(
    query: Float[Array, "B N t h"],
    key: Float[Array, "B S h"],
    index: IndexArrays,
    selection: _Selection,
    log_sum: Float[Array, "B N t"],
    log_index_sum: Float[Array, "B t"],
    counts: Float[Array, "B t"],
    d_key: Float[Array, "r 1 d"],
    options: SparseOptions,
) -> tuple[Float[Array, ""], tuple[Array, Array, Array]]:
    """Return the loss of a block and its float32 gradients. The gradient of the keys is added to
    `d_key`.
    """
    num_heads, tokens = query.shape[1] * _axis_size(options.head_axis), query.shape[2]

    def add(chunk: _Chunk, state: tuple[Array, Any]) -> tuple[Array, Any]:
        loss, (d_query, d_key, d_weights) = state
        target = gathered_attention.sum_shares(
            query, chunk.gather(key), chunk.words, log_sum, options.of_block(key)
        )
        target /= num_heads
        chosen = chosen_keys(chunk.words, tokens)
        block = index._replace(key=chunk.gather(index.key))
        products = index_products(block)
        index_score = weighted_sum(block, products, options.index_scale)
        target, index_score = _sum(target, options.head_axis), _sum(index_score, options.index_axis)
        log_shares = jnp.where(chosen, index_score - log_index_sum[..., None], 0.0)
        positive = chosen & (target > 0)
        logs = jnp.log(jnp.where(positive, target, 1.0)) - log_shares
        loss += (jnp.where(positive, target * logs, 0.0).sum(-1) * counts).sum()
        slopes = jnp.where(chosen, jnp.exp(log_shares) - target, 0.0) * counts[..., None]
        more = score_gradients(block, products, slopes, options.index_scale)
        return loss, (
            d_query + more.query,
            chunk.add(d_key, more.key, options),
            d_weights + more.weights,
        )

    zeros = jnp.zeros(index.query.shape), d_key, jnp.zeros(index.weights.shape)
    start = jnp.zeros(()), zeros
    return _for_chunks(add, start, selection, options.top_k)


def _sum(x: Array, axis: str | None) -> Array:
    return lax.psum(x, axis) if axis else x


def _axis_size(axis: str | None) -> int:
    return lax.axis_size(axis) if axis else 1
