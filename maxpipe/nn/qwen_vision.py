"""Vision tower of Qwen3-VL and Qwen3.5, which computes embeddings of an image of any size.

The number of patches is static: the patches of an image are followed by unused patches, which no
patch attends to. Patches are ordered by squares, and every square becomes one image embedding.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt8

from maxpipe.models.layers.qwen_vision import QwenVisionTower
from maxpipe.nn.vision_layers import cast, layer_norm, normalize_image, transformer_layer

Params = dict[str, Any]
_THETA = 10000.0


class _Grid(NamedTuple):
    """Place of each patch in an image."""

    rows: Int[Array, " P"]
    columns: Int[Array, " P"]
    is_used: Bool[Array, " P"]


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
    grid = _patch_grid(tower, size)
    # All frames of an image are equal, so their kernels are added.
    kernel = params["patches"]["kernel"].astype(dtype).sum(1)
    pixels = normalize_image(patches).astype(dtype)
    x = jnp.einsum("pyxc,cyxw->pw", pixels, kernel) + params["patches"]["bias"].astype(dtype)
    x = x + _positions(tower, params["positions"], grid, size).astype(dtype)
    angles = _rotation_angles(tower, grid)
    layers = cast(params["layers"], dtype)

    def run(x: Array, layer: Params) -> tuple[Array, None]:
        rotate = lambda heads: _rotate(heads, angles)  # noqa: E731
        return transformer_layer(layer, x, tower.norm_epsilon, rotate, grid.is_used), None

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


def _patch_grid(tower: QwenVisionTower, size: Int[Array, " 2"]) -> _Grid:
    """Return the row and the column of each patch, which the order by squares determines."""
    side, number = tower.merge_size, jnp.arange(tower.num_patches)
    square, inside = number // side**2, number % side**2
    per_row = jnp.maximum(size[1] // side, 1)
    rows = square // per_row * side + inside // side
    columns = square % per_row * side + inside % side
    return _Grid(rows, columns, number < size[0] * size[1])


def _positions(
    tower: QwenVisionTower, table: Float[Array, "L W"], grid: _Grid, size: Int[Array, " 2"]
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


def _rotation_angles(tower: QwenVisionTower, grid: _Grid) -> Float[Array, "P half"]:
    """Return the angles of the pairs of dims: rows rotate the first half, columns the second."""
    dims = tower.head_dim // 2
    frequencies = _THETA ** -(jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    parts = [places[:, None] * frequencies for places in (grid.rows, grid.columns)]
    return jnp.concatenate(parts, axis=-1)


def _rotate(x: Float[Array, "P N H"], angles: Float[Array, "P half"]) -> Float[Array, "P N H"]:
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
