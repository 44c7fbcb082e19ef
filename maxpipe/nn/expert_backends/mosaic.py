"""Grouped matmuls by Pallas kernels, for TPUs.

The kernels extend the idea of megablox: a row tile that contains rows of several experts is
processed once per expert. In such a tile, `grouped_matmul` multiplies only a part that contains the
expert's rows. The tiles of `grouped_outer` start near the expert's first row, so they are not
aligned to each other.

References:
    MegaBlocks (arXiv:2211.15841), and the megablox kernels of JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Float, Int

from maxpipe.nn.expert_backends.blocks import BlockSteps, make_block_steps
from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import compiler_parameters, cost_estimate, dot, tpu_cores


class Tiles(NamedTuple):
    """Tile sizes of one kernel."""

    rows: int
    """Rows of a tile; contracted rows in weight gradients."""
    contracted: int
    """Contracted elements; input width of a tile in weight gradients."""
    width: int
    """Output width of a tile."""


_LANES = 128
_PART_ALIGNMENT = 32
"""A multiplied part of a row tile starts at a multiple of it."""
_ROW_ALIGNMENT = 16
"""Rows of bfloat16 in one register; tiles of weight gradients start at multiples of it."""
_TILES_OF_VMEM = 0.9
"""Largest part of the usable memory that the tiles of one kernel occupy."""
_BOUNDARY_TILES = 0.375
"""Mean number of additional row tiles to multiply per boundary between experts. The two parts of
a tile at such a boundary are multiplied separately. One of them is a full tile, and the other one
is half of a tile or a quarter."""


def grouped_matmul(
    rows: Sequence[Float[Array, "N K"]],
    weights: Sequence[Float[Array, "_ _ _"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    transposed: bool,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, and sum over the pairs of rows and weights.

    Rows without an expert are uninitialized in the result. `dim` is the expert dim of the weights.
    `filled` is the mean fraction of rows that have an expert, for the FLOPs in reports.
    """
    weights = [jnp.moveaxis(weight, dim, 0) for weight in weights]
    num_rows, contracted = rows[0].shape
    width = weights[0].shape[1 if transposed else 2]
    num_inner = contracted // tiles.contracted
    steps = make_block_steps(sizes, num_rows, tiles.rows)

    def weight_index(n: Any, step: Any, k: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        return (at[step], n, k) if transposed else (at[step], k, n)

    def row_index(n: Any, step: Any, k: Any, expert: Any, tile: Any, *_: Any) -> tuple[Any, ...]:
        return tile[step], k

    def out_index(n: Any, step: Any, k: Any, expert: Any, tile: Any, *_: Any) -> tuple[Any, ...]:
        return tile[step], n

    block = tiles[:0:-1] if transposed else tiles[1:]
    flops = 2 * filled * len(rows) * num_rows * contracted * width
    out = jax.typeof(rows[0]).update(shape=(num_rows, width))
    with jax.named_scope(scopes.flops(flops)):
        return pl.pallas_call(
            partial(_matmul_kernel, tiles, num_inner, transposed, len(rows)),
            out_shape=out,
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(steps),
                in_specs=[pl.BlockSpec(tiles[:2], row_index)] * len(rows)
                + [pl.BlockSpec((None, *block), weight_index)] * len(rows),
                out_specs=pl.BlockSpec((tiles.rows, tiles.width), out_index),
                grid=(width // tiles.width, (steps.first < steps.stop).sum(), num_inner),
                scratch_shapes=[tpu.VMEM((tiles.rows, tiles.width), jnp.float32)] * (num_inner > 1),
            ),
            compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
            cost_estimate=cost_estimate(flops, (*rows, *weights, out)),
            interpret=interpret,
            name="grouped_matmul",
        )(*steps._replace(start=steps.start // tiles.rows), *rows, *weights)


def _matmul_kernel(
    tiles: Tiles, num_inner: int, transposed: bool, num_pairs: int, *refs: Any
) -> None:
    """Multiply the part of a row tile that contains the expert's rows.

    Other rows of the output tile keep their values, which a previous step computed.
    """
    at, refs = BlockSteps(*refs[:4]), refs[4:]
    rows, weights = refs[:num_pairs], refs[num_pairs : 2 * num_pairs]
    out, *total = refs[2 * num_pairs :]
    step, inner = pl.program_id(1), pl.program_id(2)
    start = at.start[step] * tiles.rows
    first = at.first[step] - start
    stop = jnp.minimum(at.stop[step] - start, tiles.rows)

    def multiply(begin: Array | int, size: int) -> None:
        part = pl.ds(begin, size)
        product = jnp.zeros((size, tiles.width), jnp.float32)
        for row, weight in zip(rows, weights, strict=True):
            product += dot(row[part], weight[...], 1, 1 if transposed else 0)
        if num_inner == 1:
            store(begin, size, product)
            return
        (sums,) = total
        product = product + jnp.where(inner == 0, 0, sums[part])
        sums[part] = product
        pl.when(inner == num_inner - 1)(partial(store, begin, size, product))

    def store(begin: Array | int, size: int, product: Array) -> None:
        row = begin + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        part = pl.ds(begin, size)
        kept = out[part].astype(jnp.float32)
        out[part] = jnp.where((row >= first) & (row < stop), product, kept).astype(out.dtype)

    smaller = jnp.bool_(False)
    for size in _part_sizes(tiles.rows):
        begin = jnp.minimum(first // _PART_ALIGNMENT * _PART_ALIGNMENT, tiles.rows - size)
        fits = stop - begin <= size
        begin = 0 if size == tiles.rows else pl.multiple_of(begin, _PART_ALIGNMENT)
        pl.when(fits & ~smaller)(partial(multiply, begin, size))
        smaller |= fits


def _part_sizes(rows: int) -> list[int]:
    """Return the possible sizes of the multiplied part of a row tile."""
    return [rows // 4, rows // 2, rows]


def grouped_outer(
    rows: Float[Array, "N K"],
    cotangents: Sequence[Float[Array, "N J"]],
    sizes: Int[Array, " E"],
    *,
    dim: int,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> tuple[Float[Array, "_ _ _"], ...]:
    """Sum the outer products of rows and each array of cotangents for each expert, in float32.

    The expert dim of the results is `dim`. Experts without rows have zeros.
    """
    depth, width, number = rows.shape[1], cotangents[0].shape[1], len(cotangents)
    steps, num_steps = _outer_steps(sizes, len(rows), tiles.rows)

    def index(size: int, column: Callable[..., Any], *grid: Any) -> tuple[Any, ...]:
        step, (_, start, *_) = grid[2], grid[3:]
        return pl.multiple_of(start[step], _ROW_ALIGNMENT), column(*grid) * size

    def out_index(n: Any, k: Any, step: Any, expert: Any, *_: Any) -> tuple[Any, ...]:
        return expert[step], k, n

    def spec(size: int, column: Callable[..., Any]) -> pl.BlockSpec:
        return pl.BlockSpec(
            (pl.Element(tiles.rows), pl.Element(size)), partial(index, size, column)
        )

    flops = 2 * filled * rows.size * width * number
    outs = [jax.typeof(rows).update(shape=(len(sizes), depth, width))] * number
    with jax.named_scope(scopes.flops(flops)):
        products = pl.pallas_call(
            partial(_outer_kernel, tiles, number),
            out_shape=outs,
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(steps),
                in_specs=[
                    spec(tiles.contracted, lambda n, k, *_: k),
                    *[spec(tiles.width, lambda n, k, *_: n)] * number,
                ],
                out_specs=[pl.BlockSpec((None, tiles.contracted, tiles.width), out_index)] * number,
                grid=(width // tiles.width, depth // tiles.contracted, num_steps),
                scratch_shapes=[tpu.VMEM((tiles.contracted, tiles.width), jnp.float32)] * number,
            ),
            compiler_params=compiler_parameters("parallel", "arbitrary", "arbitrary"),
            cost_estimate=cost_estimate(flops, (rows, *cotangents, *outs)),
            interpret=interpret,
            name="grouped_outer",
        )(*steps, rows, *cotangents)
    return tuple(jnp.moveaxis(product, 0, dim) for product in products)


class _OuterSteps(NamedTuple):
    """Steps of `grouped_outer`. Each expert has at least one step, which writes its result."""

    expert: Int[Array, " V"]
    start: Int[Array, " V"]
    """First row of the tile, a multiple of the alignment."""
    first: Int[Array, " V"]
    """First row of the expert processed in this step."""
    stop: Int[Array, " V"]
    opens: Int[Array, " V"]
    """1 in the first step of each expert, and 0 in all other steps."""
    closes: Int[Array, " V"]


def _outer_steps(sizes: Int[Array, " E"], num_rows: int, block: int) -> tuple[_OuterSteps, Array]:
    """Return the steps of `grouped_outer` and their number."""
    stops = jnp.cumsum(sizes)
    firsts = stops - sizes
    begins = firsts // _ROW_ALIGNMENT * _ROW_ALIGNMENT
    blocks = jnp.maximum(1, -(-(stops - begins) // block))
    ends = jnp.cumsum(blocks)
    turns = jnp.arange(num_rows // block + 2 * len(sizes))
    expert = jnp.minimum((turns[:, None] >= ends).sum(1), len(sizes) - 1)
    begin = begins[expert] + (turns - (ends - blocks)[expert]) * block
    steps = _OuterSteps(
        expert,
        jnp.minimum(begin, num_rows - block),
        jnp.maximum(firsts[expert], begin),
        jnp.minimum(stops[expert], begin + block),
        (turns == (ends - blocks)[expert]).astype(jnp.int32),
        (turns == ends[expert] - 1).astype(jnp.int32),
    )
    return steps, ends[-1]


def _outer_kernel(tiles: Tiles, number: int, *refs: Any) -> None:
    at, rows, refs = _OuterSteps(*refs[:6]), refs[6], refs[7:]
    cotangents, outputs, totals = refs[:number], refs[number : 2 * number], refs[2 * number :]
    step = pl.program_id(2)
    row = at.start[step] + lax.broadcasted_iota(jnp.int32, (tiles.rows, 1), 0)
    used = (row >= at.first[step]) & (row < at.stop[step])
    # Both operands are masked, because rows without an expert can hold arbitrary values.
    block = jnp.where(used, rows[...], 0)
    for cotangent, total in zip(cotangents, totals, strict=True):
        product = dot(block, jnp.where(used, cotangent[...], 0), 0, 0)
        total[...] = product + jnp.where(at.opens[step] == 1, 0, total[...])

    @pl.when(at.closes[step] == 1)
    def _() -> None:
        for out, total in zip(outputs, totals, strict=True):
            out[...] = total[...].astype(out.dtype)


def matmul_tiles(
    num_rows: int, num_experts: int, contracted: int, width: int, dtype: Any, *, num_pairs: int = 1
) -> Tiles | None:
    """Return the tile sizes of `grouped_matmul` with the lowest estimated time.

    Returns None if no multiple of the lane count divides a dim. If the contracted dim is a single
    tile, the expert's weights remain in memory from one row tile to the next.
    """
    size = jnp.dtype(dtype).itemsize

    def cost(tiles: Tiles) -> float:
        rows, inner, columns = tiles
        num_tiles, visits = num_rows // rows, num_rows // rows + num_experts - 1
        steps = visits * (contracted // inner)
        loads = num_experts if inner == contracted else steps
        loaded = steps * rows * inner + loads * inner * columns + num_tiles * rows * columns
        macs = (num_rows + _BOUNDARY_TILES * (num_experts - 1) * rows) * contracted * columns
        one = _cycles(num_pairs * macs, num_pairs * size * loaded, steps * tpu_cores().matmul_step)
        return one * _turns(width // columns)

    def num_bytes(tiles: Tiles) -> int:
        rows, inner, columns = tiles
        moved = num_pairs * (rows * inner + inner * columns) + rows * columns
        return 2 * size * moved + 4 * rows * columns * (1 + (inner < contracted))

    found = _candidates(_row_tiles(num_rows, num_experts), contracted, width)
    fitting = [tiles for tiles in found if num_bytes(tiles) <= _vmem_bytes()]
    return min(fitting, key=cost, default=None)


def outer_tiles(
    num_rows: int, num_experts: int, first: int, second: int, dtype: Any, *, number: int = 1
) -> Tiles | None:
    """Return the tile sizes of `grouped_outer` with the lowest estimated time, or None.

    `number` is the number of arrays of cotangents.
    """
    size = jnp.dtype(dtype).itemsize

    def cost(tiles: Tiles) -> float:
        rows, depth, columns = tiles
        steps = num_rows / rows + num_experts * (0.5 + _ROW_ALIGNMENT / 2 / rows)
        loaded = steps * rows * (depth + number * columns) + num_experts * depth * columns * number
        one = _cycles(
            number * steps * rows * depth * columns, size * loaded, steps * tpu_cores().outer_step
        )
        return one * first // depth * _turns(second // columns)

    def num_bytes(tiles: Tiles) -> int:
        rows, depth, columns = tiles
        moved = rows * (depth + number * columns) + number * depth * columns
        return 2 * size * moved + 4 * number * depth * columns

    found = _candidates(_row_tiles(num_rows, num_experts), first, second)
    fitting = [tiles for tiles in found if num_bytes(tiles) <= _vmem_bytes()]
    return min(fitting, key=cost, default=None)


def _vmem_bytes() -> float:
    return _TILES_OF_VMEM * tpu_cores().vmem_mib * 2**20


def _cycles(macs: float, num_bytes: float, overhead: float) -> float:
    cores = tpu_cores()
    return max(macs / cores.macs, num_bytes / cores.num_bytes) + overhead


def _turns(num_columns: int) -> int:
    """Return the number of column tiles that one core processes."""
    return -(-num_columns // tpu_cores().number)


def _candidates(rows: Sequence[int], first: int, second: int) -> Iterator[Tiles]:
    for each in itertools.product(rows, _divisors(first), _divisors(second)):
        yield Tiles(*each)


def _row_tiles(num_rows: int, num_experts: int) -> list[int]:
    """Return the sizes of row tiles to consider, largest first.

    Larger tiles need fewer steps, and load weights less often if these do not remain in memory.
    They are at most half as large as the mean number of rows per expert.
    """
    most = max(_LANES, num_rows // num_experts // 2)
    return [size for size in (512, 256, 128) if size <= most and num_rows % size == 0]


def _divisors(size: int) -> list[int]:
    """Return the multiples of the lane count that divide `size`."""
    return [tile for tile in range(_LANES, size + 1, _LANES) if size % tile == 0]
