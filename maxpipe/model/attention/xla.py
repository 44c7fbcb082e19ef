"""Attention in plain jax, which runs everywhere: by blocks of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from maxpipe.model.attention.interface import Mask
from maxpipe.model.count import query_blocks


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mask: Mask,
    block: int = 0,
) -> Float[Array, "B T N H"]:
    """Attention by blocks of queries, of which each scores only the keys up to its own end.

    At T = 2048 that is 9/16 of the square, and the scores are small enough to stay out of the
    chip's main memory. `block` 0 chooses.
    """
    tokens = query.shape[1]
    by_place = mask.causal and mask.in_row
    blocks = query_blocks(tokens, block) if by_place else [(0, tokens)]
    parts = []
    for start, stop in blocks:
        keys = stop if by_place else key.shape[1]
        part = query[:, start:stop], key[:, :keys], value[:, :keys]
        # The first block is the square that `is_causal` is made for.
        square = by_place and start == 0
        seen = mask.seen(start, stop, keys, causal=mask.causal and not square)
        # Behind a cache jax's function puts keys and values in another order first.
        if mask.soft_cap or mask.sinks is not None or not mask.in_row:
            if square:
                seen &= jnp.tri(stop, dtype=bool)
            parts.append(_mixed(*part, seen, mask))
        else:
            mixed = jax.nn.dot_product_attention(
                *part, mask=seen, is_causal=square, scale=mask.scale, implementation="xla"
            )
            parts.append(mixed)
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _mixed(
    query: Float[Array, "B t N H"],
    key: Float[Array, "B s G H"],
    value: Float[Array, "B s G H"],
    seen: Bool[Array, "B 1 t s"],
    mask: Mask,
) -> Float[Array, "B t N H"]:
    """With a soft cap (arXiv:2408.00118) or sinks (arXiv:2309.17453), which jax's has not."""
    rows, tokens, heads, size = query.shape
    groups, num_keys = key.shape[2], key.shape[1]
    # Heads in front, as caches have them: one matmul of plain matrices for each.
    grouped = query.reshape(rows, tokens, groups, -1, size).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, groups, -1, size)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    scores = jnp.einsum("bgxh,bgsh->bgxs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, groups, -1, tokens, num_keys)
    scores *= size**-0.5 if mask.scale is None else mask.scale
    if mask.soft_cap:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
    if mask.sinks is not None:
        sinks = mask.sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., :num_keys].astype(value.dtype)
    shares = shares.reshape(rows, groups, -1, num_keys)
    mixed = jnp.einsum("bgxs,bgsh->bgxh", shares, value)
    mixed = mixed.reshape(rows, groups, -1, tokens, value.shape[-1]).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, tokens, heads, value.shape[-1])
