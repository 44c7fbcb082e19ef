"""Image embeddings in the pipeline: they replace the embeddings of image tokens in stage 0's input.

The embeddings are computed before the tick loop, and their gradients are used after the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from maxpipe.parallel.batch_arrays import IMAGE_FEATURES, IMAGE_TOKENS_LEFT
from maxpipe.parallel.collectives import broadcast_from, mark_varying, sum_over
from maxpipe.parallel.image_splice import splice_images
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.slots import read_slot, write_slot


@dataclass(frozen=True)
class ImageInputs:
    """Image embeddings of all microbatches on this device."""

    features: Float[jax.Array, "M B N K F"]
    tokens_left: Int[jax.Array, "M B T"]
    """Number of tokens of an image from each of its tokens to its last token; 0 for text."""
    trainable: bool
    """Whether the gradient of `features` is computed."""

    @classmethod
    def take_from(cls, batch: dict[str, Any], *, trainable: bool) -> ImageInputs | None:
        """Remove the image embeddings from a batch, and return them; None if there are none.

        The layers do not read the embeddings.
        """
        if (features := batch.pop(IMAGE_FEATURES, None)) is None:
            return None
        return cls(features, batch[IMAGE_TOKENS_LEFT], trainable)

    def splice(
        self, x: Float[jax.Array, "B T D"], microbatch: Int[jax.Array, ""]
    ) -> Float[jax.Array, "B T D"]:
        """Return the token embeddings of a microbatch with image embeddings in place."""
        index = jnp.maximum(microbatch, 0)
        return splice_images(x, read_slot(self.features, index), read_slot(self.tokens_left, index))

    def zeros(self) -> Float[jax.Array, "M B N K F"] | None:
        """Return zeros for the gradient of `features`, or None if it is not computed."""
        return mark_varying(jnp.zeros_like(self.features)) if self.trainable else None

    def of_tokens(
        self, cotangent: Float[jax.Array, "B T D"], microbatch: Int[jax.Array, ""]
    ) -> Float[jax.Array, "B T D"]:
        """Return the cotangent of the token embeddings, which is 0 at image tokens."""
        is_image = read_slot(self.tokens_left, jnp.maximum(microbatch, 0)) > 0
        return jnp.where(is_image[..., None], 0, cotangent)

    def accumulate(
        self,
        total: Float[jax.Array, "M B N K F"],
        cotangent: Float[jax.Array, "B T D"],
        microbatch: Int[jax.Array, ""],
        exists: Any,
    ) -> Float[jax.Array, "M B N K F"]:
        """Write the cotangent of a microbatch's image embeddings, if the microbatch exists."""
        index = jnp.maximum(microbatch, 0)
        left = read_slot(self.tokens_left, index)
        like = read_slot(self.features, index)
        _, pull = jax.vjp(lambda features: splice_images(cotangent, features, left), like)
        (own,) = pull(cotangent)
        return write_slot(total, index, jnp.where(exists, own, read_slot(total, index)))

    def finish(
        self, total: Float[jax.Array, "M B N K F"], *, in_prologue: bool
    ) -> Float[jax.Array, "rows N K F"]:
        """Return the gradient of `features` for all sequences of this device.

        With prologue layers, the stage that ran a microbatch in its round has its gradient.
        Otherwise, stage 0 has all gradients.
        """
        flat = total.reshape(-1, *total.shape[2:])
        return sum_over(flat, STAGE) if in_prologue else broadcast_from(flat, STAGE, 0)
