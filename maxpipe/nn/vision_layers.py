"""Transformer layers of vision towers, applied to the patches of one image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from maxpipe.models.layers.vision import QUERY_BLOCK

Params = dict[str, Any]
Rotation = Callable[[Float[Array, "P N H"]], Float[Array, "P N H"]]
_MASKED = -1e30
"""Score of a masked key. Finite, so that the probabilities of an image without patches are too."""


def transformer_layer(
    params: Params,
    x: Float[Array, "P W"],
    epsilon: float,
    rotate: Rotation | None = None,
    is_used: Bool[Array, " P"] | None = None,
) -> Float[Array, "P W"]:
    """Apply a pre-norm layer with biases.

    `rotate` is applied to queries and keys. No patch attends to patches that are not used.
    """
    attention, mlp = params["attention"], params["mlp"]
    normed = layer_norm(params["attention_norm"], x, epsilon)
    query, key, value = (
        jnp.einsum("pw,wnh->pnh", normed, attention[name]) + attention[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    if rotate is not None:
        query, key = rotate(query), rotate(key)
    mixed = _attend(query, key, value, is_used)
    x = x + jnp.einsum("pnh,nhw->pw", mixed, attention["out"]) + attention["out_bias"]
    normed = layer_norm(params["mlp_norm"], x, epsilon)
    hidden = jnp.einsum("pw,wf->pf", normed, mlp["up"]) + mlp["up_bias"]
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + jnp.einsum("pf,fw->pw", hidden, mlp["down"]) + mlp["down_bias"]


def _attend(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    is_used: Bool[Array, " P"] | None,
) -> Float[Array, "P N H"]:
    """Compute attention between all patches, for one block of query patches at a time."""
    patches, heads, size = query.shape
    blocks = -(-patches // QUERY_BLOCK)
    block = -(-patches // blocks)
    padded = jnp.pad(query, ((0, blocks * block - patches), (0, 0), (0, 0)))

    @jax.checkpoint
    def run(part: Float[Array, "b N H"]) -> Float[Array, "b N H"]:
        scores = jnp.einsum("qnh,knh->nqk", part, key, preferred_element_type=jnp.float32)
        scores = scores * size**-0.5
        if is_used is not None:
            scores = jnp.where(is_used, scores, _MASKED)
        shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("nqk,knh->qnh", shares, value)

    mixed = jax.lax.map(run, padded.reshape(blocks, block, heads, size))
    return mixed.reshape(blocks * block, heads, size)[:patches]


def layer_norm(params: Params, x: Float[Array, "P W"], epsilon: float) -> Float[Array, "P W"]:
    """Normalize each patch in float32, and return the result in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    scale, bias = (params[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (normed * scale + bias).astype(x.dtype)


def normalize_image(image: Array) -> Float[Array, "*dims"]:
    """Return a uint8 image in float32, with values from -1 to 1."""
    return (image.astype(jnp.float32) * (1 / 255) - 0.5) / 0.5


def cast(params: Params, dtype: jnp.dtype) -> Params:
    """Return the parameters in a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
