"""Select the implementation of grouped matmuls on one device.

Each row is multiplied by the weights of its expert. Rows are sorted by expert, and `sizes` are the
numbers of rows of the experts. Rows after the last expert's rows belong to no expert; their results
are not defined. `dim` (0 or 1) is the expert dim of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.models.layers.experts import ExpertBackend
from maxpipe.nn.expert_backends import blocks, mosaic, ragged_dot, triton


def grouped_matmul(
    rows: Sequence[Float[Array, "N K"]],
    weights: Sequence[Float[Array, "_ _ _"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool = False,
    filled: float = 1.0,
    backend: ExpertBackend = "auto",
    tiles: mosaic.Tiles | None = None,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, and sum over the pairs of rows and weights.

    If `transposed` is set, the weights are transposed. `filled` is the mean fraction of rows that
    have an expert. `tiles` are the tile sizes on TPUs, by default those with the lowest estimated
    time.
    """
    options = {"dim": dim, "transposed": transposed}
    loop = partial(blocks.grouped_matmul, **options)
    if backend == "ragged_dot":
        return ragged_dot.grouped_matmul(rows, weights, sizes, **options, filled=filled)
    if backend == "loop":
        return loop(rows, weights, sizes)
    first, second = blocks.matrix_shape(weights[0].shape, dim)
    dims = (second, first) if transposed else (first, second)
    kernel, num_pairs = loop, len(rows)
    tiles = tiles or mosaic.matmul_tiles(
        len(rows[0]), len(sizes), *dims, rows[0].dtype, num_pairs=num_pairs
    )
    if tiles:
        kernel = partial(mosaic.grouped_matmul, **options, tiles=tiles, filled=filled)
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
    cotangents: Sequence[Float[Array, "N J"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    filled: float = 1.0,
    backend: ExpertBackend = "auto",
    tiles: mosaic.Tiles | None = None,
) -> tuple[Float[Array, "_ _ _"], ...]:
    """Sum the outer products of rows and each array of cotangents for each expert.

    `tiles` are the tile sizes on TPUs, by default those with the lowest estimated time.
    """

    def each(run: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
        return lambda rows, cotangents, sizes: tuple(
            run(rows, cotangent, sizes, dim=dim) for cotangent in cotangents
        )

    loop = each(blocks.grouped_outer)
    if backend == "ragged_dot":
        return each(partial(ragged_dot.grouped_outer, filled=filled))(rows, cotangents, sizes)
    if backend == "loop":
        return loop(rows, cotangents, sizes)
    dims = rows.shape[1], cotangents[0].shape[1]
    kernel, number = loop, len(cotangents)
    tiles = tiles or mosaic.outer_tiles(len(rows), len(sizes), *dims, rows.dtype, number=number)
    if tiles:
        kernel = partial(mosaic.grouped_outer, dim=dim, tiles=tiles, filled=filled)
    return lax.platform_dependent(
        rows,
        cotangents,
        sizes,
        tpu=kernel,
        cuda=each(partial(triton.grouped_outer, filled=filled)),
        default=loop,
    )
