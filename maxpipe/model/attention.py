"""Grouped-query attention with rotary positions over packed sequences."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.schema import ModelConfig
from maxpipe.model.count import query_blocks
from maxpipe.model.layers import residual_gain, weight
from maxpipe.parallel.sharding import AxisRules, constrain

# Llama 3.1: wave lengths above original/1 are fully stretched, below original/4 left alone.
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0


def rotary_frequencies(config: ModelConfig) -> jax.Array:
    """Angle per position, float32 `[H / 2]`, with Llama 3.1's stretching of long waves.

    Source: arXiv:2104.09864; the stretching follows the released Llama 3.1 models.
    """
    exponent = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    frequencies = config.rope_theta**-exponent
    if config.rope_scaling == 1.0:
        return frequencies
    turns = config.rope_original_tokens * frequencies / (2 * math.pi)
    blend = (turns - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / config.rope_scaling)


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Turns each pair (i, i + H/2) of `x [B, T, N, H]` by its position's angle."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    implementation: Literal["xla", "cudnn"],
    block: int = 0,
) -> jax.Array:
    """Causal attention within segments, `[B, T, N, H]`, by blocks of queries.

    A block scores only the keys up to its own end: at T = 2048 that is 9/16 of the square, and
    the scores are small enough to stay out of the chip's main memory. `block` 0 chooses.
    """
    tokens = query.shape[1]
    blocks = query_blocks(tokens, block) if implementation == "xla" else [(0, tokens)]
    parts = []
    for start, stop in blocks:
        mask = segment_ids[:, None, start:stop, None] == segment_ids[:, None, None, :stop]
        if start:
            mask &= jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        parts.append(
            jax.nn.dot_product_attention(
                query[:, start:stop],
                key[:, :stop],
                value[:, :stop],
                mask=mask,
                is_causal=start == 0,
                implementation=implementation,
            )
        )
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


class Attention(nnx.Module):
    """Causal self-attention in which G key/value heads serve N query heads."""

    def __init__(self, config: ModelConfig, rules: AxisRules, rngs: nnx.Rngs):
        d, n, g, h = config.d_model, config.num_heads, config.num_kv_heads, config.head_size
        dtype = config.param_dtype
        heads, kv_heads = ("embed", "heads", "head_size"), ("embed", "kv_heads", "head_size")
        self.query = weight(rngs, (d, n, h), heads, fan_in=d, dtype=dtype)
        self.key = weight(rngs, (d, g, h), kv_heads, fan_in=d, dtype=dtype)
        self.value = weight(rngs, (d, g, h), kv_heads, fan_in=d, dtype=dtype)
        self.out = weight(
            rngs,
            (n, h, d),
            ("heads", "head_size", "embed"),
            fan_in=n * h,
            dtype=dtype,
            gain=residual_gain(config),
        )
        self.config = config
        self.rules = rules

    def __call__(self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """`x [B, T, D]`, ids and positions `[B, T]`; tokens see their own segment's past only."""
        dtype, rules = x.dtype, self.rules
        frequencies = rotary_frequencies(self.config)
        query = jnp.einsum("btd,dnh->btnh", x, self.query[...].astype(dtype))
        key = jnp.einsum("bsd,dgh->bsgh", x, self.key[...].astype(dtype))
        value = jnp.einsum("bsd,dgh->bsgh", x, self.value[...].astype(dtype))
        query = constrain(
            rotate(query, positions, frequencies), (None, None, "heads", "head_size"), rules
        )
        key = constrain(
            rotate(key, positions, frequencies), (None, None, "kv_heads", "head_size"), rules
        )
        value = constrain(value, (None, None, "kv_heads", "head_size"), rules)
        query = checkpoint_name(query, "query")
        key = checkpoint_name(key, "key")
        value = checkpoint_name(value, "value")
        mixed = attend(query, key, value, segment_ids, self.config.attention)
        mixed = checkpoint_name(mixed, "context")
        out = jnp.einsum("btnh,nhd->btd", mixed, self.out[...].astype(dtype))
        return checkpoint_name(out, "attention_out")
