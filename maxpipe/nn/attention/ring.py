"""Attention in which keys and values go around the context axis, from device to device.

No device has those of whole rows. While one part is scored the next is on its way. Parts of the
softmax are put together by the logarithms of their sums (arXiv:2310.01889), scored by blocks, on
all platforms. Permutes stand in it: all stages have to turn alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import blockwise
from maxpipe.nn.attention.blockwise import Options, Pairs
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel import context
from maxpipe.parallel.collectives import index_on, shift, size_of
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.per_device import vary


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G v"],
    mask: Mask,
) -> Float[Array, "B T N v"]:
    """Of this device's tokens; the mask is that of its queries among whole rows."""
    options, pairs = blockwise.arranged(query, mask.run, mask)
    return _mixed(*vary((query, key, value, mask.sinks, pairs)), options)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mixed(
    query: Array,
    key: Array,
    value: Array,
    sinks: Float[Array, " N"] | None,
    pairs: Pairs,
    options: Options,
) -> Float[Array, "B T N v"]:
    return _forward(query, key, value, sinks, pairs, options)[0]


def _forward_rule(
    query: Array, key: Array, value: Array, sinks: Array | None, pairs: Pairs, options: Options
) -> tuple[Array, tuple[Any, ...]]:
    mixed, log_sum = _forward(query, key, value, sinks, pairs, options)
    mixed, log_sum = checkpoint_name(mixed, "context"), checkpoint_name(log_sum, LOG_SUM)
    return mixed, (query, key, value, sinks, pairs, mixed, log_sum)


def _turned(tree: Any) -> Any:
    """From each device to the next one."""
    return jax.tree.map(lambda x: shift(x, CONTEXT, 1, size_of(CONTEXT)), tree)


def _arrived(pairs: Pairs, hop: Int[Array, ""], piece: int, tokens: int) -> Pairs:
    """What queries are to one of the two pieces of keys that are here after this number of hops."""
    owner = (index_on(CONTEXT) - hop) % size_of(CONTEXT)
    start = context.starts_of(owner, tokens)[piece]
    segments = lax.dynamic_slice_in_dim(pairs.key_segments, start, tokens // 2, 1)
    return pairs._replace(key_segments=segments, places=pairs.places - start)


def _forward(
    query: Array, key: Array, value: Array, sinks: Array | None, pairs: Pairs, options: Options
) -> tuple[Float[Array, "B T N v"], Float[Array, "B T N"]]:
    rows, tokens, heads, _ = query.shape
    empty = jnp.full((rows, tokens, heads), blockwise.LEAST)
    log_sum = empty if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32), empty.shape)
    start = vary((jnp.zeros((*empty.shape, value.shape[-1])), log_sum))

    def hop(number: Array, state: Any) -> Any:
        here, mixed, log_sum = state
        following = _turned(here)
        for piece, (keys, values) in enumerate(zip(*map(_pieces, here), strict=True)):
            mine = _arrived(pairs, number, piece, tokens)
            part, of_part = blockwise.forward(query, keys, values, None, mine, options)
            both = jnp.logaddexp(log_sum, of_part)
            mixed *= jnp.exp(log_sum - both)[..., None]
            mixed += part * jnp.exp(of_part - both)[..., None]
            log_sum = both
        return following, mixed, log_sum

    _, mixed, log_sum = lax.fori_loop(0, size_of(CONTEXT), hop, ((key, value), *start))
    return mixed.astype(query.dtype), log_sum


def _pieces(x: Array) -> list[Array]:
    return jnp.split(x, 2, axis=1)


def _backward_rule(
    options: Options, saved: tuple[Any, ...], d_mixed: Float[Array, "B T N v"]
) -> tuple[Array | None, ...]:
    query, key, value, sinks, pairs, mixed, log_sum = saved
    tokens = query.shape[1]

    def hop(number: Array, state: Any) -> Any:
        here, sums, d_query = state
        following, found = _turned(here), []
        for piece, (keys, values) in enumerate(zip(*map(_pieces, here), strict=True)):
            mine = _arrived(pairs, number, piece, tokens)
            given = (query, keys, values, None, mine, mixed, log_sum)
            more, *of_keys, _ = blockwise.backward(options, *given, d_mixed)
            d_query, found = d_query + more, [*found, of_keys]
        added = (jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
        # Gradients of keys and values go on with them, and are at home after the last hop.
        return following, _turned(tuple(map(jnp.add, sums, added))), d_query

    zeros = lambda x: vary(jnp.zeros(x.shape, jnp.float32))  # noqa: E731
    start = ((key, value), (zeros(key), zeros(value)), zeros(query))
    _, (d_key, d_value), d_query = lax.fori_loop(0, size_of(CONTEXT), hop, start)
    d_sinks = None
    if sinks is not None:
        slope = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(-1)
        share = jnp.exp(sinks.astype(jnp.float32) - log_sum)
        d_sinks = -(share * slope).sum((0, 1)).astype(sinks.dtype)
    found = d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
    return (*found, d_sinks, None)


_mixed.defvjp(_forward_rule, _backward_rule)
