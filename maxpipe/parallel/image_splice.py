"""Replacement of the embeddings of image tokens, in the pipeline and in the plain decoder."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def splice_images(
    x: Float[Array, "B T D"],
    features: Float[Array, "B F D"],
    image_tokens_left: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Return the token embeddings with those of image tokens replaced by image embeddings.

    The n-th image token of a sequence receives the n-th image embedding. Arrays that follow the
    embeddings in `x` are not changed.
    """
    is_image = image_tokens_left > 0
    number = jnp.maximum(jnp.cumsum(is_image, axis=1) - 1, 0)
    number = jnp.minimum(number, features.shape[1] - 1)
    picked = jnp.take_along_axis(features, number[..., None], axis=1).astype(x.dtype)
    picked = jnp.concatenate([picked, x[..., features.shape[-1] :]], axis=-1)
    return jnp.where(is_image[..., None], picked, x)
