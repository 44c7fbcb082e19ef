"""Dropout that is the same however the batch is cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key


def dropout(
    x: Float[Array, "B T *dims"], rate: float, keys: Key[Array, " B"], places: Int[Array, " T"]
) -> Float[Array, "B T *dims"]:
    """Zeros a fraction `rate` of `x`, with one key per example, and `places` of tokens in the row.

    A key per example and token makes the mask independent of how the batch is cut or sharded.
    """

    def kept(key: Key[Array, ""], place: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, x.shape[2:])

    keep = jax.vmap(jax.vmap(kept, (None, 0)), (0, None))(keys, places)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
