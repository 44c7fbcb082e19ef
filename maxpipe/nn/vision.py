"""Vision tower of SigLIP and the projector of Gemma 3, which compute image embeddings.

Images are processed one at a time in a loop. Attention between all patches of an image is computed
in blocks of query patches, so that the scores of an image are never in memory at the same time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from maxpipe.models.layers.vision import QUERY_BLOCK, VisionTower

Params = dict[str, Any]


def image_embeddings(
    tower: VisionTower, params: Params, images: UInt8[Array, "N S S 3"], dtype: jnp.dtype
) -> Float[Array, "N K D"]:
    """Return the embeddings of each image in the compute dtype.

    The activations of one image at a time are in memory, because the backward pass computes them
    again for each image.
    """
    run = jax.checkpoint(lambda image: _embed_image(tower, params, image, dtype))
    return jax.lax.map(run, images)


def normalize_image(image: UInt8[Array, "S S 3"]) -> Float[Array, "S S 3"]:
    """Return the image in float32, with values from -1 to 1."""
    return (image.astype(jnp.float32) * (1 / 255) - 0.5) / 0.5


def _embed_image(
    tower: VisionTower, params: Params, image: Array, dtype: jnp.dtype
) -> Float[Array, "K D"]:
    x = _patch_embeddings(tower, params, normalize_image(image).astype(dtype))
    x, _ = jax.lax.scan(
        lambda x, layer: (_layer(tower, layer, x), None), x, _cast(params["layers"], dtype)
    )
    x = _layer_norm(tower, params["norm"], x)
    side, group = tower.tokens_per_side, tower.patches_per_side // tower.tokens_per_side
    squares = x.reshape(side, group, side, group, tower.width).astype(jnp.float32)
    pooled = squares.mean((1, 3)).reshape(tower.tokens_per_image, tower.width).astype(dtype)
    normed = _rms_norm(tower, params["projector"]["norm"], pooled)
    return jnp.einsum("kw,wd->kd", normed, params["projector"]["kernel"].astype(dtype))


def _patch_embeddings(
    tower: VisionTower, params: Params, image: Float[Array, "S S 3"]
) -> Float[Array, "P W"]:
    side, size, dtype = tower.patches_per_side, tower.patch_size, image.dtype
    used = image[: side * size, : side * size]
    patches = used.reshape(side, size, side, size, 3).transpose(0, 2, 4, 1, 3)
    patches = patches.reshape(tower.num_patches, 3, size, size)
    kernel, bias = (params["patches"][name].astype(dtype) for name in ("kernel", "bias"))
    embedded = jnp.einsum("pcyx,cyxw->pw", patches, kernel) + bias
    return embedded + params["positions"].astype(dtype)


def _layer(tower: VisionTower, params: Params, x: Float[Array, "P W"]) -> Float[Array, "P W"]:
    attention, mlp = params["attention"], params["mlp"]
    normed = _layer_norm(tower, params["attention_norm"], x)
    query, key, value = (
        jnp.einsum("pw,wnh->pnh", normed, attention[name]) + attention[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    mixed = _attend(query, key, value)
    x = x + jnp.einsum("pnh,nhw->pw", mixed, attention["out"]) + attention["out_bias"]
    normed = _layer_norm(tower, params["mlp_norm"], x)
    hidden = jnp.einsum("pw,wf->pf", normed, mlp["up"]) + mlp["up_bias"]
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + jnp.einsum("pf,fw->pw", hidden, mlp["down"]) + mlp["down_bias"]


def _attend(
    query: Float[Array, "P N H"], key: Float[Array, "P N H"], value: Float[Array, "P N H"]
) -> Float[Array, "P N H"]:
    """Compute attention between all patches, for one block of query patches at a time."""
    patches, heads, size = query.shape
    blocks = -(-patches // QUERY_BLOCK)
    block = -(-patches // blocks)
    padded = jnp.pad(query, ((0, blocks * block - patches), (0, 0), (0, 0)))

    @jax.checkpoint
    def run(part: Float[Array, "b N H"]) -> Float[Array, "b N H"]:
        scores = jnp.einsum("qnh,knh->nqk", part, key, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * size**-0.5, axis=-1).astype(value.dtype)
        return jnp.einsum("nqk,knh->qnh", shares, value)

    mixed = jax.lax.map(run, padded.reshape(blocks, block, heads, size))
    return mixed.reshape(blocks * block, heads, size)[:patches]


def _layer_norm(tower: VisionTower, params: Params, x: Float[Array, "P W"]) -> Float[Array, "P W"]:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + tower.norm_epsilon)
    scale, bias = (params[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (normed * scale + bias).astype(x.dtype)


def _rms_norm(
    tower: VisionTower, scale: Float[Array, " W"], x: Float[Array, "K W"]
) -> Float[Array, "K W"]:
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + tower.norm_epsilon)
    return (normed * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
