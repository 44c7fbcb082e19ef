"""Replacement of the embeddings of image tokens, in the pipeline and in the plain decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def splice_images(
    x: Float[Array, "B T W"],
    features: Float[Array, "B N K F"],
    image_tokens_left: Int[Array, "B T"],
) -> Float[Array, "B T W"]:
    """Return the token embeddings with those of image tokens replaced by image embeddings.

    The k-th token of the n-th image of a sequence receives embedding `[n, k]`. Arrays that follow
    the embeddings in `x` are not changed.
    """
    is_image = image_tokens_left > 0
    before = jnp.pad(image_tokens_left[:, :-1], ((0, 0), (1, 0)))
    begins = is_image & (before <= 1)
    image = jnp.clip(jnp.cumsum(begins, axis=1) - 1, 0, features.shape[1] - 1)
    places = jnp.arange(x.shape[1])
    inside = places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    index = image * features.shape[2] + jnp.clip(inside, 0, features.shape[2] - 1)
    flat = features.reshape(len(features), -1, features.shape[-1])
    picked = jnp.take_along_axis(flat, index[..., None], axis=1).astype(x.dtype)
    picked = jnp.concatenate([picked, x[..., features.shape[-1] :]], axis=-1)
    return jnp.where(is_image[..., None], picked, x)
