"""Attention in plain JAX for every platform, computed in query blocks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from maxpipe.models.count import query_blocks
from maxpipe.nn.attention.interface import Mask


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    mask: Mask,
    block: int = 0,
) -> Float[Array, "B T N v"]:
    """Compute attention in query blocks. Each block computes only the scores of keys up to the end
    of the block.

    At T = 2048, 9/16 of all scores are computed. The scores of a block are small enough to stay in
    on-chip memory. If `block` is 0, the block size is selected automatically. With images, a block
    also computes the scores of an image that begins in the block.
    """
    tokens = query.shape[1]
    by_place = mask.causal and mask.is_self_ordered
    blocks = query_blocks(tokens, block) if mask.causal and mask.has_places else [(0, tokens)]
    parts = []
    for start, stop in blocks:
        has_images = mask.image_tokens_left is not None
        last = min(stop + mask.image_tokens * has_images, tokens)
        keys = last if by_place else key.shape[1]
        part = query[:, start:stop], key[:, :keys], value[:, :keys]
        # The first block has as many keys as query tokens, so `is_causal` can be used.
        square = by_place and start == 0 and not has_images
        seen = mask.seen(start, stop, keys, causal=mask.causal and not square)
        # If there is a cache, `jax.nn.dot_product_attention` would first transpose keys and values.
        plain = mask.has_places and not mask.soft_cap and mask.sinks is None
        if not plain or key.shape[-1] != value.shape[-1]:
            if square:
                seen &= jnp.tri(stop, dtype=bool)
            parts.append(_attend_unfused(*part, seen, mask))
        else:
            mixed = jax.nn.dot_product_attention(
                *part, mask=seen, is_causal=square, scale=mask.scale, implementation="xla"
            )
            parts.append(mixed)
    mixed = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return checkpoint_name(mixed, "context")


def _attend_unfused(
    query: Float[Array, "B t N H"],
    key: Float[Array, "B s G H"],
    value: Float[Array, "B s G v"],
    seen: Bool[Array, "B 1 t s"],
    mask: Mask,
) -> Float[Array, "B t N v"]:
    """Compute attention with features that `jax.nn.dot_product_attention` lacks.

    These features are a soft cap (arXiv:2408.00118), attention sinks (arXiv:2309.17453), and value
    heads whose size differs from that of key heads.
    """
    rows, tokens, heads, size = query.shape
    groups, num_keys = key.shape[2], key.shape[1]
    # Heads come first, as in caches, so that each head needs only a plain matmul.
    grouped = query.reshape(rows, tokens, groups, -1, size).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, groups, -1, size)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    scores = jnp.einsum("bgxh,bgsh->bgxs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, groups, -1, tokens, num_keys)
    scores *= size**-0.5 if mask.scale is None else mask.scale
    if mask.soft_cap:
        scores = _soft_cap(scores, mask.soft_cap)
    scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
    if mask.sinks is None:
        shares = jax.nn.softmax(scores, axis=-1)
    else:
        shares = softmax_with_sinks(scores, mask.sinks.reshape(*scores.shape[1:3], 1, 1))
    shares = shares.astype(value.dtype).reshape(rows, groups, -1, num_keys)
    mixed = jnp.einsum("bgxs,bgsh->bgxh", shares, value)
    mixed = mixed.reshape(rows, groups, -1, tokens, value.shape[-1]).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, tokens, heads, value.shape[-1])


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _soft_cap(scores: Float[Array, "*pairs"], cap: float) -> Float[Array, "*pairs"]:
    """Return `cap * tanh(scores / cap)`, saving only its slope for the backward pass.

    Some jax releases save the slope of tanh as the residual, and others save two arrays that
    determine the slope.
    """
    return cap * jnp.tanh(scores / cap)


@_soft_cap.defjvp
def _soft_cap_forward(
    cap: float, scores: tuple[Array], moved: tuple[Array]
) -> tuple[Float[Array, "*pairs"], Float[Array, "*pairs"]]:
    bent = jnp.tanh(scores[0] / cap)
    return cap * bent, ((1.0 - bent) * (1.0 + bent)) * moved[0]


def softmax_with_sinks(
    scores: Float[Array, "*dims s"], sinks: Float[Array, "*heads 1 1"]
) -> Float[Array, "*dims s"]:
    """Return the softmax over scores and sinks, excluding the probabilities of the sinks.

    Appending the sinks to the scores would copy all scores.
    """
    sinks = sinks.astype(jnp.float32)
    largest = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    likely = jnp.exp(scores - largest)
    return likely / (likely.sum(-1, keepdims=True) + jnp.exp(sinks - largest))
