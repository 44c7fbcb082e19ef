"""Transformer layers of vision towers, applied to the patches of one image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers.patch_tower import PatchTower
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
    mixed = attend(query, key, value, is_used, query.shape[-1] ** -0.5)
    x = x + jnp.einsum("pnh,nhw->pw", mixed, attention["out"]) + attention["out_bias"]
    normed = layer_norm(params["mlp_norm"], x, epsilon)
    hidden = jnp.einsum("pw,wf->pf", normed, mlp["up"]) + mlp["up_bias"]
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + jnp.einsum("pf,fw->pw", hidden, mlp["down"]) + mlp["down_bias"]


def attend(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    is_used: Bool[Array, " P"] | None,
    scale: float,
) -> Float[Array, "P N H"]:
    """Compute attention between all patches, for one block of query patches at a time.

    No patch attends to patches that are not used. Scores are multiplied by `scale`.
    """
    patches, heads, size = query.shape
    blocks = -(-patches // QUERY_BLOCK)
    block = -(-patches // blocks)
    padded = jnp.pad(query, ((0, blocks * block - patches), (0, 0), (0, 0)))

    @jax.checkpoint
    def run(part: Float[Array, "b N H"]) -> Float[Array, "b N H"]:
        scores = jnp.einsum("qnh,knh->nqk", part, key, preferred_element_type=jnp.float32)
        scores = scores * scale
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


def rms_norm(
    scale: Float[Array, " w"] | None, x: Float[Array, "*dims w"], epsilon: float
) -> Float[Array, "*dims w"]:
    """Divide by the root mean square and multiply by `scale`, in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (normed if scale is None else normed * scale.astype(jnp.float32)).astype(x.dtype)


class PatchGrid(NamedTuple):
    """Place of each patch in an image."""

    rows: Int[Array, " P"]
    columns: Int[Array, " P"]
    is_used: Bool[Array, " P"]


def patch_grid(tower: PatchTower, size: Int[Array, " 2"]) -> PatchGrid:
    """Return the row and the column of each patch, which the order by squares determines.

    `size` is the number of patches per column and per row.
    """
    side, number = tower.merge_size, jnp.arange(tower.num_patches)
    square, inside = number // side**2, number % side**2
    per_row = jnp.maximum(size[1] // side, 1)
    rows = square // per_row * side + inside // side
    columns = square % per_row * side + inside % side
    return PatchGrid(rows, columns, number < size[0] * size[1])


def rotation_angles(
    places: Sequence[Int[Array, " P"]], head_dim: int, theta: float
) -> Float[Array, "P 2 quarter"]:
    """Return the angles by which two kinds of places rotate a quarter of a head's dims each."""
    dims = head_dim // 2
    frequencies = theta ** -(jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    return jnp.stack([place[:, None] * frequencies for place in places], axis=1)


def rotate(
    x: Float[Array, "P N H"], angles: Float[Array, "P parts pairs"]
) -> Float[Array, "P N H"]:
    """Rotate pairs of dims in each of several equal parts of a head.

    The first dims of the pairs are the first half of a part.
    """
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    parts = x.astype(jnp.float32).reshape(*x.shape[:2], angles.shape[1], -1)
    first, second = jnp.split(parts, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def normalize_image(image: Array) -> Float[Array, "*dims"]:
    """Return a uint8 image in float32, with values from -1 to 1."""
    return (image.astype(jnp.float32) * (1 / 255) - 0.5) / 0.5


def cast(params: Params, dtype: jnp.dtype) -> Params:
    """Return the parameters in a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
