"""Grouped matmuls by megablox kernels, for TPUs (arXiv:2211.15841)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from maxpipe.nn.expert_backends.blocks import row_block_size
from maxpipe.parallel import scopes

Tiles = tuple[int, int, int]
"""Tile sizes of the rows, the contracted dim and the output dim."""


def grouped_matmul(
    rows: Float[Array, "N K"],
    weights: Float[Array, "_ _ _"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights. Rows without an expert are uninitialized in the
    result.
    """
    weights = jnp.moveaxis(weights, dim, 0)
    with jax.named_scope(scopes.flops(2 * filled * len(rows) * math.prod(weights.shape[1:]))):
        return _megablox().gmm(
            rows,
            weights,
            sizes,
            rows.dtype,
            tiles,
            transpose_rhs=transposed,
            interpret=interpret,
        )


def grouped_outer(
    rows: Float[Array, "N K"],
    cotangents: Float[Array, "N J"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> Float[Array, "_ _ _"]:
    """Sum the outer products of rows and cotangents for each expert."""
    run = _megablox().tgmm
    with jax.named_scope(scopes.flops(2 * filled * rows.size * cotangents.shape[1])):
        product = run(rows.T, cotangents, sizes, rows.dtype, tiles, interpret=interpret)
    return jnp.moveaxis(product, 0, dim)


def _megablox() -> Any:
    # The `megablox` package exports a function named `gmm`, which shadows its module `gmm`.
    import jax.experimental.pallas.ops.tpu.megablox.gmm  # noqa: F401

    return sys.modules["jax.experimental.pallas.ops.tpu.megablox.gmm"]


_LANES = 128
_LARGEST_TILE = 1024
_VMEM_BYTES = 12 * 2**20
"""Maximum memory in bytes for the tiles of one kernel. A kernel can use 16 MiB of memory in total.
"""


def matmul_tiles(
    num_rows: int, num_experts: int, contracted: int, width: int, dtype: Any
) -> Tiles | None:
    """Return the tile sizes of the rows, the contracted dim and the output dim.

    Returns None if no multiple of the lane count divides a dim. A row tile is processed once for
    each expert whose rows it contains, so row tiles are small. If memory allows, the contracted dim
    is a single tile. The expert's weights then remain in memory from one row tile to the next.
    """
    rows = _rows_tile(num_rows, num_experts)
    ways = [(contracted, 1024), (contracted, 512), (contracted, 256), (1024, 1024), (512, 512)]
    return _select_tiles(
        [(rows, _divisor(contracted, most), _divisor(width, wide)) for most, wide in ways],
        lambda m, k, n: m * n,
        dtype,
    )


def outer_tiles(
    num_rows: int, num_experts: int, first: int, second: int, dtype: Any
) -> Tiles | None:
    """Return the tile sizes of the contracted rows and both output dims, or None."""
    rows = _rows_tile(num_rows, num_experts)
    return _select_tiles(
        [(rows, _divisor(first, most), _divisor(second, most)) for most in (1024, 512)],
        lambda m, k, n: k * n,
        dtype,
    )


def _rows_tile(num_rows: int, num_experts: int) -> int:
    """Return the row tile size, which is smaller than a loop's row block because a kernel step has
    less overhead.
    """
    return _divisor(num_rows, max(_LANES, row_block_size(num_rows, num_experts) // 2))


def _select_tiles(
    tries: Sequence[Tiles], sums: Callable[[int, int, int], int], dtype: Any
) -> Tiles | None:
    """Return the first entry of `tries` whose tiles fit into memory, or None.

    Each tile has two buffers, one for computation and one for transfers. `sums` returns the number
    of float32 accumulator entries.
    """
    size = jnp.dtype(dtype).itemsize

    def fits(tiles: Tiles) -> bool:
        m, k, n = tiles
        return 2 * size * (m * k + k * n + m * n) + 4 * sums(m, k, n) <= _VMEM_BYTES

    return next((tiles for tiles in tries if all(tiles) and fits(tiles)), None)


def _divisor(size: int, most: int) -> int:
    """Return the largest multiple of the lane count that divides `size` and is at most `most`, or
    0.
    """
    largest = min(most, size) // _LANES * _LANES
    return next((tile for tile in range(largest, 0, -_LANES) if size % tile == 0), 0)
