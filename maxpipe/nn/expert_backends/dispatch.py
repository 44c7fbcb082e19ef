"""Select the implementation of grouped matmuls on one device.

Each row is multiplied by the weights of its expert. Rows are sorted by expert, and `sizes` are the
numbers of rows of the experts. Rows after the last expert's rows belong to no expert; their results
are not defined. `dim` (0 or 1) is the expert dim of the weights.
"""

from __future__ import annotations

from functools import partial

from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.models.layers.experts import ExpertBackend
from maxpipe.nn.expert_backends import blocks, megablox, ragged_dot, triton


def grouped_matmul(
    rows: Float[Array, "N K"],
    weights: Float[Array, "_ _ _"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool = False,
    filled: float = 1.0,
    backend: ExpertBackend = "auto",
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights or, if `transposed` is set, by the transposed
    weights.

    `filled` is the mean fraction of rows that have an expert.
    """
    options = {"dim": dim, "transposed": transposed}
    loop = partial(blocks.grouped_matmul, **options)
    if backend == "ragged_dot":
        return ragged_dot.grouped_matmul(rows, weights, sizes, **options, filled=filled)
    if backend == "loop":
        return loop(rows, weights, sizes)
    first, second = blocks.matrix_shape(weights.shape, dim)
    dims = (second, first) if transposed else (first, second)
    kernel, tiles = loop, megablox.matmul_tiles(len(rows), len(sizes), *dims, rows.dtype)
    if tiles:
        kernel = partial(megablox.grouped_matmul, **options, tiles=tiles, filled=filled)
    return lax.platform_dependent(
        rows,
        weights,
        sizes,
        tpu=kernel,
        cuda=partial(triton.grouped_matmul, **options, filled=filled),
        default=loop,
    )


def grouped_outer(
    rows: Float[Array, "N K"],
    cotangents: Float[Array, "N J"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    filled: float = 1.0,
    backend: ExpertBackend = "auto",
) -> Float[Array, "_ _ _"]:
    """Sum the outer products of rows and cotangents for each expert."""
    loop = partial(blocks.grouped_outer, dim=dim)
    if backend == "ragged_dot":
        return ragged_dot.grouped_outer(rows, cotangents, sizes, dim=dim, filled=filled)
    if backend == "loop":
        return loop(rows, cotangents, sizes)
    dims = rows.shape[1], cotangents.shape[1]
    kernel, tiles = loop, megablox.outer_tiles(len(rows), len(sizes), *dims, rows.dtype)
    if tiles:
        kernel = partial(megablox.grouped_outer, dim=dim, tiles=tiles, filled=filled)
    return lax.platform_dependent(
        rows,
        cotangents,
        sizes,
        tpu=kernel,
        cuda=partial(triton.grouped_outer, dim=dim, filled=filled),
        default=loop,
    )
