"""Attention of rows whose tokens are divided over the context axis, by any backend.

`gather`: every device gets the keys and values of whole rows and computes its own queries; their
blocks are as many on all devices, as tokens are in zig-zag order. `heads`: devices exchange their
tokens' heads for all tokens of some heads, compute those as without the axis, and exchange back
(arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.model.attention.interface import Attend, Mask
from maxpipe.parallel import context
from maxpipe.parallel.collectives import exchange, index_on, size_of
from maxpipe.parallel.mesh import CONTEXT, TENSOR
from maxpipe.parallel.sharding import automatic_axes


def attend(
    backend: Attend,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    mask: Mask,
    inputs: Mapping[str, Any],
) -> Float[Array, "B T N v"]:
    """Of this device's tokens; `inputs` are the microbatch's arrays, `mask` that of its tokens."""
    if size_of(CONTEXT) == 1 or not mask.in_row:
        return backend(query, key, value, mask)
    segments = inputs[context.WHOLE_ROW]
    if _heads_divide(query.shape[2], key.shape[2]):
        return _by_heads(backend, query, key, value, replace(mask, segments=segments))
    tokens = query.shape[1]
    mask = replace(
        mask,
        key_segments=segments,
        places=context.own_places(tokens),
        run=context.run_of(tokens),
    )
    key, value = (context.whole_rows(each, 1) for each in (key, value))
    return backend(query, key, value, mask)


def _tensor_shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in automatic_axes() else 1


def _heads_divide(*heads: int) -> bool:
    """Whether every device has as many of these heads, for each of the shards over tensor."""
    shards = size_of(CONTEXT) * _tensor_shards()
    return all(each % shards == 0 for each in heads)


def _by_heads(
    backend: Attend, query: Array, key: Array, value: Array, mask: Mask
) -> Float[Array, "B T N v"]:
    query, key, value = (_to_heads(each) for each in (query, key, value))
    if mask.sinks is not None:
        mask = replace(mask, sinks=_own_heads(mask.sinks))
    return _to_tokens(backend(query, key, value, mask))


def _to_heads(x: Float[Array, "B T N H"]) -> Float[Array, "B S n H"]:
    """All tokens of this device's share of the heads, in order."""
    rows, tokens, _, size = x.shape
    # Shards over tensor stay where they are: each of them is divided.
    apart = x.reshape(rows, tokens, _tensor_shards(), -1, size)
    count = size_of(CONTEXT)
    apart = apart.reshape(*apart.shape[:3], count, -1, size)
    got = exchange(apart, CONTEXT, 3, 1)[:, :, :, 0]
    return context.in_order(got, 1).reshape(rows, count * tokens, -1, size)


def _to_tokens(x: Float[Array, "B S n H"]) -> Float[Array, "B T N H"]:
    """The way back."""
    rows, tokens, heads, size = x.shape
    count = size_of(CONTEXT)
    apart = context.by_device(x, 1).reshape(rows, tokens, _tensor_shards(), 1, -1, size)
    got = exchange(apart, CONTEXT, 1, 3)
    return got.reshape(rows, tokens // count, heads * count, size)


def _own_heads(x: Float[Array, " N"]) -> Float[Array, " n"]:
    apart = x.reshape(_tensor_shards(), size_of(CONTEXT), -1)
    return jnp.take(apart, index_on(CONTEXT), axis=1).reshape(-1)
