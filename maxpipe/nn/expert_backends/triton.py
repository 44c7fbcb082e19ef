"""Grouped matmuls by Triton kernels, for GPUs.

The kernels read each expert's weights in the stored layout, so weights are not transposed. Each
program of a kernel computes one tile of the output. A row tile that contains rows of several
experts is processed once per expert (arXiv:2211.15841). The weight gradient of an expert is one
matmul that contracts the expert's rows.

References:
    The order of the tiles is that of Triton's matmul tutorial: programs that run at the same time
    share rows and weights, which then remain in the L2 cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from maxpipe.nn.expert_backends.blocks import BlockSteps, make_block_steps, num_block_steps
from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import mesh_device_kind


class Tiles(NamedTuple):
    """Tile sizes of one kernel; all of them are powers of two."""

    rows: int
    """Rows of a tile of the output; contracted rows in weight gradients."""
    contracted: int
    """Contracted elements per iteration; input width of a tile in weight gradients."""
    width: int
    """Output width of a tile."""
    num_warps: int
    num_stages: int
    """Number of iterations whose operands are loaded ahead."""


_ROW_TILES_PER_GROUP = 8
"""Number of row tiles whose programs are interleaved, so that they share weights in the cache."""
_NUM_STAGES = 3
_SMALLEST = 16
"""Smallest tile size that a tensor core supports."""


_KIB = 1024
_SHARED_BYTES = {r"A100|A800": 163 * _KIB, r"H100|H200|H800|B100|B200|B300": 227 * _KIB}
"""Shared memory in bytes that a kernel can use, keyed by pattern of device kinds. Sources: NVIDIA's
CUDA programming guide, limits by compute capability."""
_SMALLEST_SHARED_BYTES = 99 * _KIB
"""Shared memory of all other devices since compute capability 8.6."""


def shared_bytes(kind: str) -> int:
    """Return the shared memory in bytes that a kernel can use on a device kind."""
    found = (size for pattern, size in _SHARED_BYTES.items() if re.search(pattern, kind))
    return next(found, _SMALLEST_SHARED_BYTES)


def row_tile(rows_per_expert: float, dtype: Any) -> int:
    """Return the number of rows in a tile of `grouped_matmul`.

    It is at most the smallest power of two that is not less than the mean number of rows per
    expert, because a tile is processed once for each expert whose rows it contains.
    """
    return _power_of_two(rows_per_expert, 128 if jnp.dtype(dtype).itemsize <= 2 else 64)


def matmul_tiles(
    num_rows: int, num_experts: int, contracted: int, width: int, dtype: Any, shared: int
) -> Tiles:
    """Return the tile sizes of `grouped_matmul`; `shared` is the shared memory of the device."""
    size = jnp.dtype(dtype).itemsize
    rows = row_tile(num_rows / num_experts, dtype)
    inner = _power_of_two(contracted, 64 if size <= 2 else 32)

    def fits(columns: int) -> bool:
        return size * inner * (rows + columns) * _NUM_STAGES <= shared

    wide = size <= 2 and rows == 128 and width % 256 == 0 and fits(256)
    columns = _power_of_two(width, 256 if wide else 128 if size <= 2 else 64)
    return Tiles(rows, inner, columns, 8 if rows * columns >= 128 * 256 else 4, _NUM_STAGES)


def outer_tiles(first: int, second: int, dtype: Any) -> Tiles:
    """Return the tile sizes of `grouped_outer`."""
    wide = jnp.dtype(dtype).itemsize > 2
    largest = 64 if wide else 128
    tiles = _power_of_two(first, largest), _power_of_two(second, largest)
    return Tiles(32 if wide else 64, *tiles, num_warps=4, num_stages=_NUM_STAGES)


def _power_of_two(size: float, largest: int) -> int:
    """Return the smallest power of two that is at least `size`, within the allowed tile sizes."""
    return max(_SMALLEST, min(largest, 1 << max(0, math.ceil(size) - 1).bit_length()))


def grouped_matmul(
    rows: Sequence[Float[Array, "N K"]],
    weights: Sequence[Float[Array, "_ _ _"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool,
    filled: float = 1.0,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, and sum over the pairs of rows and weights.

    If `transposed` is set, the weights are transposed. Rows without an expert are uninitialized in
    the result. `dim` is the expert dim of the weights. `filled` is the mean fraction of rows that
    have an expert, for the FLOPs in reports.
    """
    (num_rows, contracted), dtype = rows[0].shape, rows[0].dtype
    width = weights[0].shape[1 if transposed and dim == 0 else 0 if transposed else 2]
    if tiles is None:
        shared = shared_bytes(mesh_device_kind())
        tiles = matmul_tiles(num_rows, len(sizes), contracted, width, dtype, shared)
    steps = make_block_steps(sizes, num_rows, tiles.rows)
    num_steps = num_block_steps(num_rows, len(sizes), tiles.rows)
    kernel = partial(
        _matmul_kernel,
        tiles=tiles,
        num_steps=num_steps,
        num_pairs=len(rows),
        dim=dim,
        transposed=transposed,
    )
    with jax.named_scope(scopes.flops(2 * filled * len(rows) * num_rows * contracted * width)):
        return pl.pallas_call(
            kernel,
            out_shape=jax.typeof(rows[0]).update(shape=(num_rows, width)),
            grid=(num_steps * pl.cdiv(width, tiles.width),),
            compiler_params=_parameters(tiles),
            interpret=interpret,
            name="grouped_matmul",
        )(*steps, *rows, *weights)


def _matmul_kernel(
    *refs: Any,
    tiles: Tiles,
    num_steps: int,
    num_pairs: int,
    dim: int,
    transposed: bool,
) -> None:
    steps, (*pairs, out_ref) = refs[:4], refs[4:]
    contracted, width = pairs[0].shape[1], out_ref.shape[1]
    step, column = _order(pl.program_id(0), num_steps, pl.cdiv(width, tiles.width))
    at = BlockSteps(*(ref[step] for ref in steps))

    @pl.when(at.first < at.stop)
    def _() -> None:
        rows = [Matrix(ref, ref.shape) for ref in pairs[:num_pairs]]
        shape = (width, contracted) if transposed else (contracted, width)
        weights = [Matrix(ref, shape, at.expert, dim) for ref in pairs[num_pairs:]]
        row = at.start + jnp.arange(tiles.rows)
        columns = column * tiles.width + jnp.arange(tiles.width)

        def add(of_rows: Matrix, weight: Matrix, number: Array, total: Array) -> Array:
            inner = number * tiles.contracted + jnp.arange(tiles.contracted)
            tile = weight.load(columns, inner).T if transposed else weight.load(inner, columns)
            return total + _dot(of_rows.load(row, inner), tile)

        total = jnp.zeros((tiles.rows, tiles.width), jnp.float32)
        # One loop per pair, because the operands of one loop have to fit into shared memory.
        for pair in zip(rows, weights, strict=True):
            total = lax.fori_loop(
                0, pl.cdiv(contracted, tiles.contracted), partial(add, *pair), total
            )
        mask = ((row >= at.first) & (row < at.stop))[:, None] & (columns < width)[None]
        target = Matrix(out_ref, out_ref.shape).at(row, columns)
        triton.store(target, total.astype(out_ref.dtype), mask=mask)


def _order(program: Array, num_steps: int, num_columns: int) -> tuple[Array, Array]:
    """Return the row step and the column tile of a program."""
    group = program // (_ROW_TILES_PER_GROUP * num_columns)
    within = program - group * _ROW_TILES_PER_GROUP * num_columns
    height = jnp.minimum(num_steps - group * _ROW_TILES_PER_GROUP, _ROW_TILES_PER_GROUP)
    return group * _ROW_TILES_PER_GROUP + within % height, within // height


def grouped_outer(
    rows: Float[Array, "N K"],
    cotangents: Float[Array, "N J"],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    filled: float = 1.0,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "_ _ _"]:
    """Sum the outer products of rows and cotangents for each expert, in float32.

    The expert dim of the result is `dim`. Experts without rows have zeros.
    """
    depth, width = rows.shape[1], cotangents.shape[1]
    tiles = tiles or outer_tiles(depth, width, rows.dtype)
    num_tiles = pl.cdiv(depth, tiles.contracted) * pl.cdiv(width, tiles.width)
    shape = [depth, width]
    shape.insert(dim, len(sizes))
    stops = jnp.cumsum(sizes)
    with jax.named_scope(scopes.flops(2 * filled * rows.size * cotangents.shape[1])):
        return pl.pallas_call(
            partial(_outer_kernel, tiles=tiles, dim=dim),
            out_shape=jax.typeof(rows).update(shape=tuple(shape)),
            grid=(len(sizes) * num_tiles,),
            compiler_params=_parameters(tiles),
            interpret=interpret,
            name="grouped_outer",
        )(stops - sizes, stops, rows, cotangents)


def _outer_kernel(
    first_ref: Any,
    stop_ref: Any,
    rows_ref: Any,
    cotangents_ref: Any,
    out_ref: Any,
    *,
    tiles: Tiles,
    dim: int,
) -> None:
    rows, cotangents = (Matrix(ref, ref.shape) for ref in (rows_ref, cotangents_ref))
    depth, width = rows.shape[1], cotangents.shape[1]
    num_columns = pl.cdiv(width, tiles.width)
    num_tiles = pl.cdiv(depth, tiles.contracted) * num_columns
    expert, tile = pl.program_id(0) // num_tiles, pl.program_id(0) % num_tiles
    first, stop = first_ref[expert], stop_ref[expert]
    inner = tile // num_columns * tiles.contracted + jnp.arange(tiles.contracted)
    columns = tile % num_columns * tiles.width + jnp.arange(tiles.width)

    def add(number: Array, total: Array) -> Array:
        row = first + number * tiles.rows + jnp.arange(tiles.rows)
        # Both operands are masked, because rows without an expert can hold arbitrary values.
        block = rows.load(row, inner, row < stop)
        return total + _dot(block.T, cotangents.load(row, columns, row < stop))

    total = jnp.zeros((tiles.contracted, tiles.width), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(stop - first, tiles.rows), add, total)
    mask = (inner < depth)[:, None] & (columns < width)[None]
    target = Matrix(out_ref, (depth, width), expert, dim).at(inner, columns)
    triton.store(target, total.astype(out_ref.dtype), mask=mask)


class Matrix(NamedTuple):
    """A matrix in memory: an array with two dims, or the matrix of one expert."""

    ref: Any
    shape: tuple[int, int]
    expert: Array | None = None
    dim: int = 0
    """Expert dim of the array."""

    def at(self, row: Array, column: Array) -> Any:
        """Return the reference to a tile."""
        index = [row[:, None], column[None]]
        if self.expert is not None:
            index.insert(self.dim, self.expert)
        return self.ref.at[tuple(index)]

    def load(self, row: Array, column: Array, mask: Array | None = None) -> Array:
        """Load a tile. Elements outside of the matrix, and rows outside of `mask`, are zero.

        Masks that cannot exclude an element are omitted, because they make loads slower.
        """
        inside = jnp.ones((1, 1), jnp.bool_)
        if mask is not None:
            inside &= mask[:, None]
        if mask is not None or self.shape[0] % len(row):
            inside &= (row < self.shape[0])[:, None]
        if self.shape[1] % len(column):
            inside &= (column < self.shape[1])[None]
        if inside.size == 1:
            return triton.load(self.at(row, column))
        inside = jnp.broadcast_to(inside, (len(row), len(column)))
        return triton.load(self.at(row, column), mask=inside, other=0.0)


def _dot(first: Array, second: Array) -> Array:
    """Multiply two tiles with float32 sums. Float32 operands are not rounded to fewer bits."""
    exact = lax.Precision.HIGHEST if first.dtype == jnp.float32 else None
    return triton.dot(first, second, precision=exact)


def _parameters(tiles: Tiles) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
