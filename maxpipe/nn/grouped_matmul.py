"""Grouped matmul, which multiplies each token only by the weights of its selected experts.

Each row holds one token-expert pair, and rows are sorted by expert. TPUs use megablox kernels
(arXiv:2211.15841). Other platforms use a loop over row blocks; a block that contains rows of
several experts is processed once per expert. The row gradients and the weight gradients are
separate matmuls, so a split backward pass can schedule them separately.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from maxpipe.nn.token_permutation import (
    TokenPermutation,
    custom_vjp_with_static,
    gather_tokens,
    sum_rows_by_token,
)
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.quantized_matmul import MatmulQuantizer
from maxpipe.parallel.sharding import AxisRules, auto_axes


class GroupedMatmulOptions(NamedTuple):
    """Static options of a grouped matmul."""

    axes: tuple[str, ...]
    """Mesh axes that shard the hidden width of an expert."""
    complete: bool = True
    """Whether every token-expert pair has a row, that is, no pair is dropped."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer for the matmul operands. Kernels multiply dequantized operands."""
    fill_fraction: float = 1.0
    """Mean fraction of rows that hold a token-expert pair. Kernels skip unused rows."""

    def quantize_rows(self, rows: Array, *, divided: bool = False, gradient: bool = False) -> Array:
        """Quantize rows that will be multiplied by weights.

        `divided` means that the rows' last dim is sharded over `axes`.
        """
        if self.quantizer is None:
            return rows
        return self.quantizer.quantize_dequantize(
            rows, (1,), over=self.axes if divided else (), gradient=gradient
        )

    def quantize_weights(self, weights: Array, dim: int, *, back: bool = False) -> Array:
        """Quantize weights whose expert dim is `dim`; the forward matmul contracts dim `1 - dim`.

        `back` means that the matmul computes the rows' gradient.
        """
        if self.quantizer is None:
            return weights
        over = () if dim == 1 else self.axes
        around = self.axes
        return self.quantizer.quantize_dequantize_weight(
            weights, (1 - dim,), each=(dim,), over=over, around=around, back=back
        )


# Matmuls of tokens with expert weights. The input projections return one result per row. The output
# projection sums the results over each token's rows. The hidden width of an expert is sharded over
# `axes`. Partial sums are reduced after the sum over each token's rows, so that communication is
# proportional to the number of tokens.


@custom_vjp_with_static(static=4)
def up_projection(
    x: Float[Array, "B T D"],
    weights: tuple[Float[Array, "D E F"], ...],
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
) -> tuple[Float[Array, "N F"], ...]:
    """Multiply the token in each row by its expert's weights, for each weight array."""

    def run(tokens: Array, weights: tuple[Array, ...], sizes: Array) -> tuple[Array, ...]:
        tokens = spread.quantize_rows(tokens)
        return tuple(
            _grouped_matmul(tokens, spread.quantize_weights(weight, 1), sizes, spread, dim=1)
            for weight in weights
        )

    split = PartitionSpec(None, spread.axes)
    run = map_shards(run, (_WHOLE, PartitionSpec(None, None, spread.axes), _WHOLE), split)
    return run(gather_tokens(x, rows), weights, sizes)


def _up_projection_backward(
    spread: GroupedMatmulOptions,
    saved: tuple[Any, ...],
    cotangents: tuple[Float[Array, "N F"], ...],
) -> tuple[Any, ...]:
    x, weights, rows, sizes = saved
    split, of_weights = PartitionSpec(None, spread.axes), PartitionSpec(None, None, spread.axes)

    def to_tokens(cotangents: Any, weights: Any, row: Array, sizes: Array) -> Array:
        outputs = [
            _grouped_matmul(
                spread.quantize_rows(cotangent, divided=True, gradient=True),
                spread.quantize_weights(weight, 1, back=True),
                sizes,
                spread,
                dim=1,
                transposed=True,
            )
            for cotangent, weight in zip(cotangents, weights, strict=True)
        ]
        return sum_rows_by_token(outputs, row, complete=spread.complete)[None]

    def to_weights(tokens: Array, cotangents: Any, sizes: Array) -> tuple[Array, ...]:
        return tuple(_outer(tokens, cotangent, sizes, spread, dim=1) for cotangent in cotangents)

    to_tokens = map_shards(
        to_tokens, (split, of_weights, _WHOLE, _WHOLE), PartitionSpec(spread.axes)
    )
    to_weights = map_shards(to_weights, (_WHOLE, split, _WHOLE), of_weights)
    d_x = to_tokens(cotangents, weights, rows.row_of_choice, sizes).sum(0).reshape(x.shape)
    return d_x, to_weights(gather_tokens(x, rows), cotangents, sizes), None, None


up_projection.defvjp(
    lambda x, weights, rows, sizes, spread: (
        up_projection(x, weights, rows, sizes, spread),
        (x, weights, rows, sizes),
    ),
    _up_projection_backward,
)


@custom_vjp_with_static(static=4)
def down_projection(
    hidden: Float[Array, "N F"],
    weight: Float[Array, "E F D"],
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
) -> Float[Array, "n D"]:
    """Multiply each row by its expert's weights, and sum over each token's rows."""

    def run(hidden: Array, weight: Array, row: Array, sizes: Array) -> Array:
        hidden, weight = (
            spread.quantize_rows(hidden, divided=True),
            spread.quantize_weights(weight, 0),
        )
        product = _grouped_matmul(hidden, weight, sizes, spread, dim=0)
        return sum_rows_by_token([product], row, complete=spread.complete)[None]

    split = PartitionSpec(None, spread.axes)
    run = map_shards(run, (split, split, _WHOLE, _WHOLE), PartitionSpec(spread.axes))
    return run(hidden, weight, rows.row_of_choice, sizes).sum(0)


def _down_projection_backward(
    spread: GroupedMatmulOptions, saved: tuple[Any, ...], cotangent: Float[Array, "n D"]
) -> tuple[Any, ...]:
    hidden, weight, rows, sizes = saved
    split = PartitionSpec(None, spread.axes)

    def to_hidden(cotangents: Array, weight: Array, sizes: Array) -> Array:
        cotangents = spread.quantize_rows(cotangents, gradient=True)
        weight = spread.quantize_weights(weight, 0, back=True)
        return _grouped_matmul(cotangents, weight, sizes, spread, dim=0, transposed=True)

    to_hidden = map_shards(to_hidden, (_WHOLE, split, _WHOLE), split)
    to_weight = map_shards(
        lambda hidden, cotangents, sizes: _outer(hidden, cotangents, sizes, spread, dim=0),
        (split, _WHOLE, _WHOLE),
        split,
    )
    cotangents = gather_tokens(cotangent, rows)
    d_hidden = to_hidden(cotangents, weight, sizes)
    return d_hidden, to_weight(hidden, cotangents, sizes), None, None


down_projection.defvjp(
    lambda hidden, weight, rows, sizes, spread: (
        down_projection(hidden, weight, rows, sizes, spread),
        (hidden, weight, rows, sizes),
    ),
    _down_projection_backward,
)


class RowProjection(NamedTuple):
    """Static options of `row_projection`."""

    options: GroupedMatmulOptions
    is_hidden_output: bool
    """Whether the hidden width of an expert is the output dim, with weights `[K, E, J]`. Otherwise,
    the hidden width is contracted, and weights have the dims `[E, K, J]`."""

    @property
    def dim(self) -> int:
        """Return the index of the weights' expert dim."""
        return int(self.is_hidden_output)

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Return the partition specs of the rows, the weights and the results."""
        split = PartitionSpec(None, self.options.axes)
        if self.is_hidden_output:
            return _WHOLE, PartitionSpec(None, None, self.options.axes), split
        return split, split, _WHOLE

    def summed(self, run: Callable[..., Array], specs: Any, out: PartitionSpec) -> Any:
        """Map `run` over shards. If the result is not sharded, it is summed over the shards."""
        if out != _WHOLE:
            return map_shards(run, specs, out)
        partial_sums = map_shards(
            lambda *arrays: run(*arrays)[None], specs, PartitionSpec(self.options.axes)
        )
        return lambda *arrays: partial_sums(*arrays).sum(0)


@custom_vjp_with_static(static=3)
def row_projection(
    rows: Float[Array, "N K"],
    weight: Float[Array, "_ _ _"],
    sizes: Int[Array, " E"],
    how: RowProjection,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, without gathering or summing a token's rows."""

    def run(rows: Array, weight: Array, sizes: Array) -> Array:
        return _grouped_matmul(rows, weight, sizes, how.options, dim=how.dim)

    of_rows, of_weight, of_results = how.specs
    return how.summed(run, (of_rows, of_weight, _WHOLE), of_results)(rows, weight, sizes)


def _row_projection_backward(
    how: RowProjection, saved: tuple[Any, ...], cotangent: Float[Array, "N J"]
) -> tuple[Any, ...]:
    rows, weight, sizes = saved
    of_rows, of_weight, of_results = how.specs

    def to_rows(cotangent: Array, weight: Array, sizes: Array) -> Array:
        return _grouped_matmul(cotangent, weight, sizes, how.options, dim=how.dim, transposed=True)

    to_weight = map_shards(
        lambda rows, cotangent, sizes: _outer(rows, cotangent, sizes, how.options, dim=how.dim),
        (of_rows, of_results, _WHOLE),
        of_weight,
    )
    to_rows = how.summed(to_rows, (of_results, of_weight, _WHOLE), of_rows)
    return to_rows(cotangent, weight, sizes), to_weight(rows, cotangent, sizes), None


row_projection.defvjp(
    lambda rows, weight, sizes, how: (
        row_projection(rows, weight, sizes, how),
        (rows, weight, sizes),
    ),
    _row_projection_backward,
)

_WHOLE = PartitionSpec()


def expert_width_axes(rules: AxisRules) -> tuple[str, ...]:
    """Return the mesh axes that shard the hidden width of an expert and are auto axes in the
    current program.
    """
    automatic = auto_axes()
    return tuple(axis for axis in dict(rules.table).get("mlp", ()) if axis in automatic)


# Computation on one device. `dim` (0 or 1) is the expert dim of the weights.


def _grouped_matmul(
    rows: Float[Array, "N K"],
    weights: Float[Array, "_ _ _"],
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
    *,
    dim: int,
    transposed: bool = False,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights or, if `transposed` is set, by the transposed
    weights.
    """
    loop = partial(grouped_matmul_loop, dim=dim, transposed=transposed)
    first, second = _without(weights.shape, dim)
    dims = (second, first) if transposed else (first, second)
    tiles = grouped_matmul_tiles(len(rows), len(sizes), *dims, rows.dtype)
    if tiles is None:
        return loop(rows, weights, sizes)
    kernel = partial(
        grouped_matmul_kernel,
        dim=dim,
        transposed=transposed,
        tiles=tiles,
        filled=spread.fill_fraction,
    )
    return lax.platform_dependent(rows, weights, sizes, tpu=kernel, default=loop)


def _outer(
    rows: Float[Array, "N K"],
    cotangents: Float[Array, "N J"],
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
    *,
    dim: int,
) -> Float[Array, "_ _ _"]:
    """Sum the outer products of rows and cotangents for each expert."""
    loop = partial(outer_by_blocks, dim=dim)
    dims = rows.shape[1], cotangents.shape[1]
    tiles = outer_tiles(len(rows), len(sizes), *dims, rows.dtype)
    if tiles is None:
        return loop(rows, cotangents, sizes)
    kernel = partial(outer_by_kernel, dim=dim, tiles=tiles, filled=spread.fill_fraction)
    return lax.platform_dependent(rows, cotangents, sizes, tpu=kernel, default=loop)


Tiles = tuple[int, int, int]
"""Tile sizes of the rows, the contracted dim and the output dim."""


def grouped_matmul_kernel(
    rows: Array,
    weights: Array,
    sizes: Array,
    *,
    dim: int,
    transposed: bool,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> Array:
    """Implement `_grouped_matmul` with a megablox kernel, for TPUs."""
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


def outer_by_kernel(
    rows: Array,
    cotangents: Array,
    sizes: Array,
    *,
    dim: int,
    tiles: Tiles,
    filled: float = 1.0,
    interpret: bool = False,
) -> Array:
    """Implement `_outer` with a megablox kernel, for TPUs."""
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


def grouped_matmul_tiles(
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


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


class _BlockSteps(NamedTuple):
    """Steps of a loop over row blocks."""

    expert: Int[Array, " V"]
    start: Int[Array, " V"]
    """First row of the block."""
    first: Int[Array, " V"]
    """First row of the expert processed in this step."""
    stop: Int[Array, " V"]


def row_block_size(num_rows: int, num_experts: int) -> int:
    """Return the number of rows per block: at most a quarter of the mean number of rows per
    expert.
    """
    quarter = max(1, num_rows // num_experts // 4)
    power = 1 << quarter.bit_length() - 1
    return min(num_rows, max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, power)))


_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 512


def num_block_steps(num_rows: int, num_experts: int) -> int:
    """Return the number of steps in a loop over row blocks. Each expert except the first can add a
    step, because its rows may start inside a block.
    """
    blocks = -(-num_rows // row_block_size(num_rows, num_experts))
    return blocks + min(num_experts, num_rows) - 1


def num_multiplied_rows(num_rows: int, num_experts: int) -> int:
    """Return the number of rows multiplied in a loop over row blocks."""
    return num_block_steps(num_rows, num_experts) * row_block_size(num_rows, num_experts)


def _make_block_steps(sizes: Int[Array, " E"], num_rows: int) -> _BlockSteps:
    """Return the steps of a loop over row blocks. Unused steps process no rows."""
    block = row_block_size(num_rows, len(sizes))
    stops = jnp.cumsum(sizes)
    firsts = stops - sizes
    blocks = jnp.where(sizes > 0, (stops - 1) // block - firsts // block + 1, 0)
    ends = jnp.cumsum(blocks)
    turns = jnp.arange(num_block_steps(num_rows, len(sizes)))
    expert = (turns[:, None] >= ends).sum(
        1
    )  # in unused steps, the index equals the number of experts
    expert, left = jnp.minimum(expert, len(sizes) - 1), expert < len(sizes)
    number = firsts[expert] // block + turns - (ends - blocks)[expert]
    # The last block ends at the last row and can overlap the previous block.
    start = jnp.clip(number * block, 0, num_rows - block)
    first = jnp.maximum(firsts[expert], number * block)
    return _BlockSteps(expert, start, first, jnp.where(left, stops[expert], 0))


def _expert_row_mask(step: _BlockSteps, block: int) -> Array:
    """Return the mask `[b, 1]` of the rows in the block that belong to the step."""
    row = step.start + jnp.arange(block)
    return ((row >= step.first) & (row < step.stop))[:, None]


def grouped_matmul_loop(
    rows: Array, weights: Array, sizes: Array, *, dim: int, transposed: bool
) -> Array:
    """Implement `_grouped_matmul` with a loop over row blocks, for any platform."""
    num_rows, block = len(rows), row_block_size(len(rows), len(sizes))
    width = _without(weights.shape, dim)[0 if transposed else 1]

    def add_block(output: Array, step: _BlockSteps) -> tuple[Array, None]:
        block_rows = lax.dynamic_slice_in_dim(rows, step.start, block)
        weight = lax.dynamic_index_in_dim(weights, step.expert, dim, keepdims=False)
        new = block_rows @ (weight.T if transposed else weight)
        old = lax.dynamic_slice_in_dim(output, step.start, block)
        new = jnp.where(_expert_row_mask(step, block), new, old)
        return lax.dynamic_update_slice_in_dim(output, new, step.start, 0), None

    empty = mark_varying(jnp.zeros((num_rows, width), rows.dtype))
    return lax.scan(add_block, empty, _make_block_steps(sizes, num_rows))[0]


def outer_by_blocks(rows: Array, cotangents: Array, sizes: Array, *, dim: int) -> Array:
    """Implement `_outer` with a loop over row blocks, for any platform; sums are accumulated in
    float32.
    """
    num_rows, block = len(rows), row_block_size(len(rows), len(sizes))

    def add_block(output: Array, step: _BlockSteps) -> tuple[Array, None]:
        block_rows, block_cotangents = (
            lax.dynamic_slice_in_dim(array, step.start, block) for array in (rows, cotangents)
        )
        # Both operands are masked, because rows without an expert can hold arbitrary values.
        block_rows, block_cotangents = (
            jnp.where(_expert_row_mask(step, block), array, 0)
            for array in (block_rows, block_cotangents)
        )
        added = jnp.einsum(
            "bk,bj->kj", block_rows, block_cotangents, preferred_element_type=jnp.float32
        )
        old = lax.dynamic_slice_in_dim(output, step.expert, 1, dim)
        new = old + jnp.expand_dims(added, dim)
        return lax.dynamic_update_slice_in_dim(output, new, step.expert, dim), None

    shape = [rows.shape[1], cotangents.shape[1]]
    shape.insert(dim, len(sizes))
    empty = mark_varying(jnp.zeros(shape, jnp.float32))
    return lax.scan(add_block, empty, _make_block_steps(sizes, num_rows))[0].astype(rows.dtype)
