"""Vision tower of Gemma 4, which computes embeddings of an image of any size.

The patches of an image are followed by unused patches, which no patch attends to. Patches are
ordered by squares, and the average of every square becomes one image embedding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt8

from maxpipe.models.layers.gemma4_vision import Gemma4VisionTower
from maxpipe.nn.vision_layers import (
    attend,
    cast,
    normalize_image,
    patch_grid,
    rms_norm,
    rotate,
    rotation_angles,
)

Params = dict[str, Any]
_THETA = 100.0


def embed_image(
    tower: Gemma4VisionTower,
    params: Params,
    patches: UInt8[Array, "P S S 3"],
    size: Int[Array, " 2"],
    dtype: jnp.dtype,
) -> Float[Array, "K D"]:
    """Return the embeddings of an image. `size` is the number of patches per column and per row."""
    grid = patch_grid(tower, size)
    pixels, table = normalize_image(patches).astype(dtype), params["positions"].astype(dtype)
    x = jnp.einsum("pyxc,yxcw->pw", pixels, params["patches"]["kernel"].astype(dtype))
    x = x + table[0, grid.columns] + table[1, grid.rows]
    angles = rotation_angles((grid.columns, grid.rows), tower.head_dim, _THETA)

    def run(x: Array, layer: Params) -> tuple[Array, None]:
        return _layer(tower, layer, x, angles, grid.is_used), None

    x, _ = jax.lax.scan(run, x, cast(params["layers"], dtype))
    squares = x.reshape(-1, tower.merge_size**2, tower.width).astype(jnp.float32)
    # The average is rounded to the compute dtype before it is scaled.
    pooled = squares.mean(1).astype(dtype).astype(jnp.float32) * tower.width**0.5
    if tower.is_standardized:
        stored = cast(params["standardize"], jnp.dtype("float32"))
        pooled = (pooled - stored["bias"]) * stored["scale"]
    normed = rms_norm(None, pooled.astype(dtype), tower.norm_epsilon)
    return jnp.einsum("kw,wd->kd", normed, params["projector"]["kernel"].astype(dtype))


def _layer(
    tower: Gemma4VisionTower,
    params: Params,
    x: Float[Array, "P W"],
    angles: Float[Array, "P 2 quarter"],
    is_used: Bool[Array, " P"],
) -> Float[Array, "P W"]:
    """Apply attention and a gated MLP, with norms before and after each of them."""
    attention, mlp = params["attention"], params["mlp"]

    def norm(name: str, x: Array) -> Array:
        return rms_norm(params[name]["scale"], x, tower.norm_epsilon)

    normed = norm("attention_norm", x)
    query, key, value = (
        _matmul(attention, name, "pw,wnh->pnh", normed) for name in ("query", "key", "value")
    )
    query, key = rotate(norm("query_norm", query), angles), rotate(norm("key_norm", key), angles)
    value = rms_norm(None, value, tower.norm_epsilon)
    mixed = _matmul(attention, "out", "pnh,nhw->pw", attend(query, key, value, is_used, 1.0))
    x = x + norm("attention_after_norm", mixed)
    normed = norm("mlp_norm", x)
    gate, up = (_matmul(mlp, name, "pw,wf->pf", normed) for name in ("gate", "up"))
    hidden = _matmul(mlp, "down", "pf,fw->pw", jax.nn.gelu(gate, approximate=True) * up)
    return x + norm("mlp_after_norm", hidden)


def _matmul(params: Params, name: str, pattern: str, x: Float[Array, "*dims"]) -> Array:
    """Multiply by a matrix. If the parameters contain limits, the input and output are clipped."""
    is_clipped = f"{name}_input_min" in params
    if is_clipped:
        x = _clip(x, params[f"{name}_input_min"], params[f"{name}_input_max"])
    x = jnp.einsum(pattern, x, params[name])
    if is_clipped:
        x = _clip(x, params[f"{name}_output_min"], params[f"{name}_output_max"])
    return x


def _clip(x: Float[Array, "*dims"], low: Float[Array, " 1"], high: Float[Array, " 1"]) -> Array:
    """Return `x` between two limits. The gradient at a limit is 1, as in PyTorch."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))
