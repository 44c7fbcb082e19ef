"""Image embeddings of all towers, and the SigLIP tower with the projector of Gemma 3.

Images are processed one at a time in a loop. Attention between all patches of an image is computed
in blocks of query patches, so that the scores of an image are never in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.models.layers.gemma4_vision import Gemma4VisionTower
from maxpipe.models.layers.qwen_vision import QwenVisionTower
from maxpipe.models.layers.vision import VisionTower
from maxpipe.nn import gemma4_vision, qwen_vision
from maxpipe.nn.vision_layers import (
    cast,
    layer_norm,
    normalize_image,
    rms_norm,
    transformer_layer,
)
from maxpipe.parallel.batch_arrays import IMAGE_GRIDS, IMAGES

Params = dict[str, Any]


def image_embeddings(
    tower: VisionTower | QwenVisionTower | Gemma4VisionTower,
    params: Params,
    images: Mapping[str, Array],
    dtype: jnp.dtype,
) -> Float[Array, "N K F"]:
    """Return the embeddings of each image in the compute dtype.

    `images` contains the batch arrays of images `[N, ...]`. The activations of one image at a time
    are in memory, because the backward pass computes them again for each image.
    """

    def run(image: Mapping[str, Array]) -> Float[Array, "K F"]:
        if isinstance(tower, QwenVisionTower):
            arrays = image[IMAGES], image[IMAGE_GRIDS]
            return qwen_vision.embed_image(tower, params, *arrays, dtype)
        if isinstance(tower, Gemma4VisionTower):
            arrays = image[IMAGES], image[IMAGE_GRIDS]
            return gemma4_vision.embed_image(tower, params, *arrays, dtype)
        return _embed_image(tower, params, image[IMAGES], dtype)

    return jax.lax.map(jax.checkpoint(run), dict(images))


def _embed_image(
    tower: VisionTower, params: Params, image: Array, dtype: jnp.dtype
) -> Float[Array, "K D"]:
    x = _patch_embeddings(tower, params, normalize_image(image).astype(dtype))
    x, _ = jax.lax.scan(
        lambda x, layer: (transformer_layer(layer, x, tower.norm_epsilon), None),
        x,
        cast(params["layers"], dtype),
    )
    x = layer_norm(params["norm"], x, tower.norm_epsilon)
    side, group = tower.tokens_per_side, tower.patches_per_side // tower.tokens_per_side
    squares = x.reshape(side, group, side, group, tower.width).astype(jnp.float32)
    pooled = squares.mean((1, 3)).reshape(tower.tokens_per_image, tower.width).astype(dtype)
    scale = 1.0 + params["projector"]["norm"].astype(jnp.float32)
    normed = rms_norm(scale, pooled, tower.norm_epsilon)
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
