"""Attention over sequences that are sharded over the context axis, for every backend.

`all_gather`: every device gathers the keys and values of full sequences for its local query tokens.
Zig-zag order balances the number of computed scores across devices (arXiv:2407.21783). If all
layers have a window, only tokens within the window are gathered. `ulysses`: an all-to-all converts
sequence shards to head shards, attention runs on full sequences, and a second all-to-all restores
the sequence shards (arXiv:2309.14509).

`ring`: keys and values rotate around the context axis, and each device sends the next shard while
it computes the scores of the current shard. Partial softmax results are combined through their
log-sum-exp (arXiv:2310.01889). All platforms use blockwise attention. All pipeline stages must
execute the ring's collective permutes in the same order.

`ulysses_ring`: groups of adjacent devices exchange tokens for heads, and the groups form a ring
(arXiv:2405.07719). In zig-zag order, the tokens of a group are one chunk from the front of the
sequence and the mirrored chunk from the back, so a group has the same tokens as one device of a
smaller context axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.count import tokens_before
from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import blockwise
from maxpipe.nn.attention.blockwise import Options, QueryKeyMask
from maxpipe.nn.attention.interface import AttentionBackend, Mask
from maxpipe.parallel import collectives
from maxpipe.parallel.collectives import all_to_all, axis_index, axis_size, mark_varying, ring_shift
from maxpipe.parallel.mesh import CONTEXT, TENSOR
from maxpipe.parallel.sharding import AxisRules, auto_axes

_NO_SEGMENT = -1


def attend(
    backend: AttentionBackend,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    mask: Mask,
    inputs: Mapping[str, Any],
    rules: AxisRules,
) -> Float[Array, "B T N v"]:
    """Compute attention for the local tokens.

    `inputs` are the arrays of the microbatch, and `mask` is the mask of the local tokens.
    """
    if axis_size(CONTEXT) == 1 or not mask.has_places:
        return backend(query, key, value, mask)
    segments = inputs[collectives.FULL_SEGMENT_IDS]
    method = rules.context_attention._replace(context=axis_size(CONTEXT), tensor=_tensor_shards())
    size = method.exchange_size(query.shape[2], key.shape[2])
    if size > 1:
        num_keys = method.exchanged_kv_heads(query.shape[2], key.shape[2])
        key, value = (jnp.repeat(x, num_keys // x.shape[2], axis=2) for x in (key, value))
        return _by_heads(backend, query, key, value, replace(mask, segments=segments), size)
    mask = _with_places(replace(mask, key_segments=segments), query.shape[1], 1)
    if method.ring_size(query.shape[2], key.shape[2]) > 1:
        return ring_attend(query, key, value, mask)
    before = tokens_before(_windows(mask), mask.run)
    if before < mask.run:
        return _attend_in_window(backend, query, key, value, mask, before)
    key, value = (collectives.gather_sequences(array, 1) for array in (key, value))
    return backend(query, key, value, mask)


def gather_keys(
    mask: Mask, arrays: tuple[Array, ...], inputs: Mapping[str, Any]
) -> tuple[Mask, tuple[Array, ...]]:
    """Return arrays `[B, S, ...]` of all tokens, and the mask of the local query tokens."""
    if axis_size(CONTEXT) == 1:
        return mask, arrays
    mask = replace(mask, key_segments=inputs[collectives.FULL_SEGMENT_IDS])
    mask = _with_places(mask, mask.segments.shape[1], 1)
    return mask, tuple(collectives.gather_sequences(array, 1) for array in arrays)


# Head sharding (`ulysses` and `ulysses_ring`). `size` is the number of devices in a group.


def _tensor_shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in auto_axes() else 1


def _by_heads(
    backend: AttentionBackend, query: Array, key: Array, value: Array, mask: Mask, size: int
) -> Float[Array, "B T N v"]:
    query, key, value = (_to_heads(array, size) for array in (query, key, value))
    if mask.sinks is not None:
        mask = replace(mask, sinks=_own_heads(mask.sinks, size))
    if size == axis_size(CONTEXT):
        return _to_tokens(backend(query, key, value, mask), size)
    local, whole = collectives.local_shard(mask.segments, 1, size), mask.segments
    mask = _with_places(replace(mask, segments=local, key_segments=whole), query.shape[1], size)
    return _to_tokens(ring_attend(query, key, value, mask, size), size)


def _with_places(mask: Mask, tokens: int, size: int) -> Mask:
    """Return the mask with the positions of the `tokens` query tokens of a group."""
    places = collectives.local_positions(tokens, size)
    return replace(mask, places=places, run=tokens // 2)


def _to_heads(x: Float[Array, "B T N H"], size: int) -> Float[Array, "B S n H"]:
    """Convert sequence shards to head shards, with the tokens of a group in sequence order."""
    rows, tokens, _, width = x.shape
    # Heads remain sharded over the tensor axis, and each shard is split further over the group.
    apart = x.reshape(rows, tokens, _tensor_shards(), size, -1, width)
    exchanged = all_to_all(apart, CONTEXT, 3, 1, size)
    return collectives.undo_zigzag(exchanged, 1, size).reshape(rows, size * tokens, -1, width)


def _to_tokens(x: Float[Array, "B S n H"], size: int) -> Float[Array, "B T N H"]:
    """Convert head shards to sequence shards; the inverse of `_to_heads`."""
    rows, tokens, heads, width = x.shape
    apart = collectives.apply_zigzag(x, 1, size)
    apart = apart.reshape(rows, tokens, _tensor_shards(), 1, -1, width)
    exchanged = all_to_all(apart, CONTEXT, 1, 3, size)
    return exchanged.reshape(rows, tokens // size, heads * size, width)


def _own_heads(x: Float[Array, " N"], size: int) -> Float[Array, " n"]:
    apart = x.reshape(_tensor_shards(), size, -1)
    return jnp.take(apart, axis_index(CONTEXT) % size, axis=1).reshape(-1)


# Windowed attention. The two local chunks become two sequences, each preceded by the tokens before
# that chunk.


def _windows(mask: Mask) -> tuple[int, ...]:
    """Return the window sizes used by the layers; 0 means an unlimited or unknown window."""
    return mask.windows or ((mask.window,) if isinstance(mask.window, int) else (0,))


def _attend_in_window(
    backend: AttentionBackend, query: Array, key: Array, value: Array, mask: Mask, before: int
) -> Float[Array, "B T N v"]:
    assert mask.key_segments is not None
    segments = jnp.pad(mask.key_segments, ((0, 0), (before, 0)), constant_values=_NO_SEGMENT)
    starts = collectives.local_starts(query.shape[1])
    near = replace(
        mask,
        segments=_as_rows(mask.segments),
        key_segments=jnp.concatenate(
            [lax.dynamic_slice_in_dim(segments, at, mask.run + before, 1) for at in starts]
        ),
        places=before + jnp.arange(mask.run),
        run=mask.run,
    )
    key, value = (_prepend_preceding_tokens(array, before, starts) for array in (key, value))
    output = backend(_as_rows(query), key, value, near)
    return jnp.concatenate(jnp.split(output, 2), axis=1)


def _as_rows(x: Array) -> Array:
    """Reshape `[B, 2t, ...]` to `[2B, t, ...]`."""
    return jnp.concatenate(jnp.split(x, 2, axis=1))


def _prepend_preceding_tokens(
    x: Float[Array, "B T G H"], before: int, starts: tuple[Int[Array, ""], Int[Array, ""]]
) -> Float[Array, "_ _ G H"]:
    """Prepend the last tokens of the preceding chunk to each of the two local chunks.

    The tokens prepended to a sequence's first chunk are arbitrary: no query token attends to them.
    """
    pieces = jnp.split(x, 2, axis=1)
    run = pieces[0].shape[1]
    ends = jnp.concatenate([piece[:, run - before :] for piece in pieces], axis=1)
    ends = collectives.gather_sequences(ends, 1)
    extended = []
    for piece, start in zip(pieces, starts, strict=True):
        place = jnp.maximum(start // run - 1, 0) * before
        extended += [jnp.concatenate([lax.dynamic_slice_in_dim(ends, place, before, 1), piece], 1)]
    return jnp.concatenate(extended)


def ring_attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G v"],
    mask: Mask,
    size: int = 1,
) -> Float[Array, "B T N v"]:
    """Compute ring attention for the local tokens; `mask` indexes the query tokens within full
    sequences.

    The ring consists of groups of `size` adjacent devices. The devices of a group have the same
    tokens and different heads.
    """
    options, pairs = blockwise.prepare_mask(query, mask.run, mask)
    return _ring_attention(*mark_varying((query, key, value, mask.sinks, pairs)), options, size)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _ring_attention(
    query: Array,
    key: Array,
    value: Array,
    sinks: Float[Array, " N"] | None,
    pairs: QueryKeyMask,
    options: Options,
    size: int,
) -> Float[Array, "B T N v"]:
    return _forward(query, key, value, sinks, pairs, options, size)[0]


def _forward_rule(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    pairs: QueryKeyMask,
    options: Options,
    size: int,
) -> tuple[Array, tuple[Any, ...]]:
    mixed, log_sum = _forward(query, key, value, sinks, pairs, options, size)
    mixed, log_sum = checkpoint_name(mixed, "context"), checkpoint_name(log_sum, LOG_SUM)
    return mixed, (query, key, value, sinks, pairs, mixed, log_sum)


def _shift_to_next(tree: Any, size: int) -> Any:
    """Send arrays from each device to the device with the same heads in the next group."""
    return jax.tree.map(lambda x: ring_shift(x, CONTEXT, size, axis_size(CONTEXT)), tree)


def _piece_mask(
    pairs: QueryKeyMask, hop: Int[Array, ""], piece: int, tokens: int, size: int
) -> QueryKeyMask:
    """Return the mask for one of the two key chunks that this device holds after `hop` hops."""
    owner = (axis_index(CONTEXT) // size - hop) % (axis_size(CONTEXT) // size)
    start = collectives.shard_starts(owner, tokens, size)[piece]
    segments = lax.dynamic_slice_in_dim(pairs.key_segments, start, tokens // 2, 1)
    return pairs._replace(key_segments=segments, places=pairs.places - start)


def _forward(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    pairs: QueryKeyMask,
    options: Options,
    size: int,
) -> tuple[Float[Array, "B T N v"], Float[Array, "B T N"]]:
    rows, tokens, heads, _ = query.shape
    empty = jnp.full((rows, tokens, heads), blockwise.MIN_SCORE)
    log_sum = empty if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32), empty.shape)
    start = mark_varying((jnp.zeros((*empty.shape, value.shape[-1])), log_sum))

    def hop(number: Array, state: Any) -> Any:
        here, mixed, log_sum = state
        following = _shift_to_next(here, size)
        for piece, (keys, values) in enumerate(zip(*map(_pieces, here), strict=True)):
            mask = _piece_mask(pairs, number, piece, tokens, size)
            part, of_part = blockwise.forward(query, keys, values, None, mask, options)
            both = jnp.logaddexp(log_sum, of_part)
            mixed *= jnp.exp(log_sum - both)[..., None]
            mixed += part * jnp.exp(of_part - both)[..., None]
            log_sum = both
        return following, mixed, log_sum

    _, mixed, log_sum = lax.fori_loop(0, axis_size(CONTEXT) // size, hop, ((key, value), *start))
    return mixed.astype(query.dtype), log_sum


def _pieces(x: Array) -> list[Array]:
    return jnp.split(x, 2, axis=1)


def _backward_rule(
    options: Options, size: int, saved: tuple[Any, ...], d_mixed: Float[Array, "B T N v"]
) -> tuple[Array | None, ...]:
    query, key, value, sinks, pairs, mixed, log_sum = saved
    tokens = query.shape[1]

    def hop(number: Array, state: Any) -> Any:
        here, sums, d_query = state
        following, d_keys = _shift_to_next(here, size), []
        for piece, (keys, values) in enumerate(zip(*map(_pieces, here), strict=True)):
            mask = _piece_mask(pairs, number, piece, tokens, size)
            arguments = (query, keys, values, None, mask, mixed, log_sum)
            more, *of_keys, _ = blockwise.backward(options, *arguments, d_mixed)
            d_query, d_keys = d_query + more, [*d_keys, of_keys]
        added = (jnp.concatenate(parts, axis=1) for parts in zip(*d_keys, strict=True))
        # Gradients rotate together with their keys and values, and return to the original device in
        # the last hop.
        return following, _shift_to_next(tuple(map(jnp.add, sums, added)), size), d_query

    zeros = lambda x: mark_varying(jnp.zeros(x.shape, jnp.float32))  # noqa: E731
    start = ((key, value), (zeros(key), zeros(value)), zeros(query))
    _, (d_key, d_value), d_query = lax.fori_loop(0, axis_size(CONTEXT) // size, hop, start)
    d_sinks = None
    if sinks is not None:
        slope = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1)
        share = jnp.exp(sinks.astype(jnp.float32) - log_sum)
        d_sinks = -(share * slope).sum((0, 1)).astype(sinks.dtype)
    gradients = d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
    return (*gradients, d_sinks, None)


_ring_attention.defvjp(_forward_rule, _backward_rule)
