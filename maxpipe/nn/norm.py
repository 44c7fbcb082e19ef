"""Normalisation over the model's width, or over a head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from maxpipe.models.layers import norm
from maxpipe.nn.part import PartModule


class RMSNorm(PartModule):
    """Scales by the root mean square (arXiv:1910.07467)."""

    scale: nnx.Param

    def __init__(self, part: norm.RMSNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Same dtype."""
        return rms_normed(x, self.scale[...], self.part)

    def largest(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims 1"]:
        """Of what it makes of each token, float32, up to how that is rounded; not differentiated.

        XLA finds it in the pass that finds the mean square, and would need one more for the result.
        """
        wide, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        scaled = wide * ((self.part.offset or 0.0) + scale)
        most = jnp.max(jnp.abs(scaled), axis=-1, keepdims=True)
        return lax.stop_gradient(most * _by_mean_square(wide, (-1,), self.part))


def rms_normed(
    x: Float[Array, "*dims"], scale: Float[Array, "*over"], part: norm.RMSNorm
) -> Float[Array, "*dims"]:
    """Over as many of the last dims as the scale has.

    Measured in float32. With an offset it is scaled there, too, as released models do.
    """
    wide, over = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    normed = wide * _by_mean_square(wide, over, part)
    if part.offset:
        return (normed * (part.offset + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def _by_mean_square(
    wide: Float[Array, "*dims"], over: tuple[int, ...], part: norm.RMSNorm
) -> Float[Array, ...]:
    mean_square = jnp.mean(jnp.square(wide), axis=over, keepdims=True)
    return lax.rsqrt(mean_square + part.epsilon)


class LayerNorm(PartModule):
    """Subtracts the mean, and scales by the standard deviation (arXiv:1607.06450)."""

    scale: nnx.Param
    bias: nnx.Param

    def __init__(self, part: norm.LayerNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Same dtype; measured, scaled and shifted in float32."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(variance + self.part.epsilon)
        normed = normed * self.scale[...].astype(jnp.float32)
        if self.part.bias:
            normed = normed + self.bias[...].astype(jnp.float32)
        return normed.astype(x.dtype)
