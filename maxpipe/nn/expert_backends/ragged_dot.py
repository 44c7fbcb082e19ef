"""Grouped matmuls by XLA's ragged dot, for all platforms.

On platforms where XLA has no implementation, it multiplies every row by the weights of all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.parallel import scopes


def grouped_matmul(
    rows: Sequence[Float[Array, "N K"]],
    weights: Sequence[Float[Array, "_ _ _"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool,
    filled: float = 1.0,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, and sum over the pairs of rows and weights.

    Rows without an expert are 0 in the result.
    """
    contracted = (2 if transposed else 1) if dim == 0 else 2 if transposed else 0
    width = weights[0].shape[3 - dim - contracted]
    dims = lax.RaggedDotDimensionNumbers((((1,), (contracted,)), ((), ())), (0,), (dim,))
    with jax.named_scope(scopes.flops(2 * filled * len(rows) * rows[0].size * width)):
        products = [
            lax.ragged_dot_general(*pair, sizes, dims) for pair in zip(rows, weights, strict=True)
        ]
    return functools.reduce(jnp.add, products)


def grouped_outer(
    rows: Float[Array, "N K"],
    cotangents: Float[Array, "N J"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    filled: float = 1.0,
) -> Float[Array, "_ _ _"]:
    """Sum the outer products of rows and cotangents for each expert, in float32."""
    # Rows without an expert can hold arbitrary values, and 0 times inf is NaN.
    used = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    rows, cotangents = jnp.where(used, rows, 0), jnp.where(used, cotangents, 0)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    with jax.named_scope(scopes.flops(2 * filled * rows.size * cotangents.shape[1])):
        product = lax.ragged_dot_general(
            rows, cotangents, sizes, dims, preferred_element_type=jnp.float32
        )
    return jnp.moveaxis(product.astype(rows.dtype), 0, dim)
