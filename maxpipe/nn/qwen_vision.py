"""Vision tower of Qwen3-VL and Qwen3.5, which computes embeddings of an image of any size.

The number of patches is static: the patches of an image are followed by unused patches, which no
patch attends to. Patches are ordered by squares, and every square becomes one image embedding.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt8

from maxpipe.models.layers.qwen_vision import QwenVisionTower
from maxpipe.nn.vision_layers import (
    PatchGrid,
    cast,
    layer_norm,
    normalize_image,
    patch_grid,
    rotate,
    rotation_angles,
    transformer_layer,
)

Params = dict[str, Any]
_THETA = 10000.0


def embed_image(
    tower: QwenVisionTower,
    params: Params,
    patches: UInt8[Array, "P S S 3"],
    size: Int[Array, " 2"],
    dtype: jnp.dtype,
) -> Float[Array, "K F"]:
    """Return the embeddings of an image, each followed by its DeepStack embeddings.

    `size` is the number of patches per column and per row.
    """
    grid = patch_grid(tower, size)
    # All frames of an image are equal, so their kernels are added.
    kernel = params["patches"]["kernel"].astype(dtype).sum(1)
    pixels = normalize_image(patches).astype(dtype)
    x = jnp.einsum("pyxc,cyxw->pw", pixels, kernel) + params["patches"]["bias"].astype(dtype)
    x = x + _positions(tower, params["positions"], grid, size).astype(dtype)
    angles = rotation_angles((grid.rows, grid.columns), tower.head_dim, _THETA)
    angles = angles.reshape(len(angles), 1, -1)
    layers = cast(params["layers"], dtype)

    def run(x: Array, layer: Params) -> tuple[Array, None]:
        turn = partial(rotate, angles=angles)
        return transformer_layer(layer, x, tower.norm_epsilon, turn, grid.is_used), None

    ends = [0, *(index + 1 for index in tower.deepstack_layers), tower.num_layers]
    merged = list[Array]()
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        part = jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], layers)
        x, _ = jax.lax.scan(run, x, part)
        if number < len(tower.deepstack_layers):
            merger = jax.tree.map(lambda leaf, at=number: leaf[at], params["deepstack"])
            squares = x.reshape(-1, tower.merged_width)
            normed = layer_norm(merger["norm"], squares, tower.norm_epsilon)
            merged.append(_merge(merger, normed, dtype))
    normed = layer_norm(params["merger"]["norm"], x, tower.norm_epsilon)
    embedded = _merge(params["merger"], normed.reshape(-1, tower.merged_width), dtype)
    return jnp.concatenate([embedded, *merged], axis=-1)


def _merge(params: Params, squares: Float[Array, "K M"], dtype: jnp.dtype) -> Float[Array, "K D"]:
    weights = cast({name: params[name] for name in ("up", "up_bias", "down", "down_bias")}, dtype)
    hidden = jnp.einsum("km,mn->kn", squares, weights["up"]) + weights["up_bias"]
    hidden = jax.nn.gelu(hidden, approximate=False)
    return jnp.einsum("kn,nd->kd", hidden, weights["down"]) + weights["down_bias"]


def _positions(
    tower: QwenVisionTower, table: Float[Array, "L W"], grid: PatchGrid, size: Int[Array, " 2"]
) -> Float[Array, "P W"]:
    """Return the learned positions, interpolated between the four closest positions in float32.

    The corners of the table and of the image coincide.
    """
    side = round(tower.num_positions**0.5)
    total = jnp.zeros((tower.num_patches, tower.width), jnp.float32)
    wide = table.astype(jnp.float32)
    (low_row, row_share), (low_column, column_share) = (
        _interpolated(places, count, side)
        for places, count in ((grid.rows, size[0]), (grid.columns, size[1]))
    )
    for row, column in itertools.product((0, 1), (0, 1)):
        rows = jnp.minimum(low_row + row, side - 1)
        columns = jnp.minimum(low_column + column, side - 1)
        weight = (row_share if row else 1 - row_share) * (
            column_share if column else 1 - column_share
        )
        total += wide[rows * side + columns] * weight[:, None]
    return total


def _interpolated(
    places: Int[Array, " P"], count: Int[Array, ""], side: int
) -> tuple[Int[Array, " P"], Float[Array, " P"]]:
    """Return the lower of two neighbouring positions, and the weight of the upper one."""
    place = places.astype(jnp.float32) * (side - 1) / jnp.maximum(count - 1, 1)
    low = jnp.floor(place)
    return jnp.clip(low.astype(jnp.int32), 0, side - 1), place - low
