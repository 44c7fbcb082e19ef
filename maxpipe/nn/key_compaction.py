"""Lists of the keys that a block of query tokens selects, in sequence order.

The Pallas kernel for TPUs moves every selected key to the front of the list. A key moves by the
number of keys before it that are not selected. All keys with bit k of this number set move by 2**k
places at once, starting with the lowest bit, so that no two keys meet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Int, UInt32

from maxpipe.nn.indexer import running_count
from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import compiler_parameters, cost_estimate, dot, usable_vmem

_LANES = 128
_LANE_MOVE, _GROUP_MOVE, _KEY = 172 / 2**14, 58 / 2**14, 233 / 2**14
"""Instructions for each key: for a move by less than a group of 128 keys, for a move by groups, and
outside of these loops."""
_BLOCK = 700
"""Instructions for each block. `benchmarks/kernel_schedules.py --sparse` prints the schedule."""


def compact(
    members: UInt32[Array, "i B S"],
    block: Int[Array, ""],
    size: int,
    *,
    interpret: bool = False,
) -> tuple[Int[Array, "B P"], UInt32[Array, "B P"], Int[Array, " B"]]:
    """Return the indices of the keys of a block with nonzero words, these words, and their number.

    P is the smallest multiple of `size` that is at least S. Places after the last key have the
    index S and the word 0.
    """
    padding = -members.shape[2] % size
    fits = _fits(members.shape[2] + padding) and size % _LANES == 0

    def kernel(members: Array, block: Array) -> tuple[Array, Array, Array]:
        return _call(members, block, padding, interpret)

    def plain(members: Array, block: Array) -> tuple[Array, Array, Array]:
        return _plain(members, block, padding)

    if interpret and fits:
        return kernel(members, block)
    if not fits:
        return plain(members, block)
    return lax.platform_dependent(members, block, tpu=kernel, default=plain)


def _plain(members: Array, block: Array, padding: int) -> tuple[Array, Array, Array]:
    words = lax.dynamic_index_in_dim(members, block, 0, keepdims=False)
    num_keys, selected = words.shape[1], words != 0
    ranks = jnp.where(selected, running_count(selected) - 1, num_keys + padding)

    def compact_row(words: Array, ranks: Array) -> tuple[Array, Array]:
        empty = jnp.full_like(ranks, num_keys, shape=(num_keys + padding,))
        places = empty.at[ranks].set(jnp.arange(num_keys, dtype=jnp.int32), mode="drop")
        return places, words.at[places].get(mode="fill", fill_value=0)

    return *jax.vmap(compact_row)(words, ranks), selected.sum(1, dtype=jnp.int32)


def _fits(num_keys: int) -> bool:
    """Return whether the list fits the memory of a core, with two copies of each operand."""
    return 4 * num_keys * (2 + 4 + 3) <= usable_vmem()


def _tile_size(groups: int) -> int:
    """Return the number of groups of keys that a loop iteration processes."""
    return next((size for size in (128, 64, 32, 16, 8) if groups % size == 0), groups)


def _call(
    members: Array, block: Array, padding: int, interpret: bool
) -> tuple[Array, Array, Array]:
    num_keys = members.shape[2]
    words = lax.bitcast_convert_type(members, jnp.int32)
    if padding:
        words = jnp.pad(words, ((0, 0), (0, 0), (0, padding)))
    words = words.reshape(*words.shape[:2], -1, _LANES)
    batch, groups = words.shape[1:3]
    shape = jax.typeof(words).update(shape=(batch, groups, _LANES))
    number = shape.update(shape=(batch, 1, _LANES))
    spec = pl.BlockSpec((None, groups, _LANES), lambda b, _: (b, 0, 0))
    flops = 2 * batch * groups * _LANES * (2 * _LANES + _tile_size(groups))
    scratch = tpu.VMEM((groups + max(8, _largest_shift(groups)), _LANES), jnp.int32)
    with jax.named_scope(scopes.cycles(batch * kernel_cycles(num_keys + padding))):
        places, found, count = pl.pallas_call(
            partial(_kernel, num_keys),
            out_shape=[shape, shape, number],
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[
                    pl.BlockSpec((None, None, groups, _LANES), lambda b, block: (block[0], b, 0, 0))
                ],
                out_specs=[spec, spec, pl.BlockSpec((None, 1, _LANES), lambda b, _: (b, 0, 0))],
                grid=(batch,),
                scratch_shapes=[scratch, scratch],
            ),
            compiler_params=compiler_parameters("arbitrary"),
            cost_estimate=cost_estimate(flops, (shape, shape, shape)),
            interpret=interpret,
            name="compact_keys",
        )(block[None], words)
    found = lax.bitcast_convert_type(found, jnp.uint32)
    return places.reshape(batch, -1), found.reshape(batch, -1), count[:, 0, 0]


def kernel_cycles(num_keys: int) -> float:
    """Return the number of instructions in the schedule of the kernel for v5p, for one block."""
    bits, lane_bits = (num_keys - 1).bit_length(), (_LANES - 1).bit_length()
    moves = lane_bits * _LANE_MOVE + (bits - lane_bits) * _GROUP_MOVE
    return num_keys * (moves + _KEY) + _BLOCK


def _largest_shift(groups: int) -> int:
    """Return the largest number of groups by which a key moves at once."""
    return 1 << max(0, (groups - 1).bit_length() - 1)


def _kernel(
    num_keys: int, _: Any, members: Any, places: Any, words: Any, count: Any, moves: Any, found: Any
) -> None:
    groups = members.shape[0]
    tile = _tile_size(groups)
    row, lane = (lax.broadcasted_iota(jnp.int32, (tile, _LANES), dim) for dim in (0, 1))

    def triangle(size: int, first: int) -> Array:
        """Return a matrix that sums the entries before each entry of dim `1 - first`."""
        order = [lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1)]
        return jnp.where(order[first] < order[1 - first], 1.0, 0.0).astype(jnp.bfloat16)

    in_group, in_tile = triangle(_LANES, 0), triangle(tile, 1)
    ones = jnp.ones((_LANES, _LANES), jnp.bfloat16)

    def start(number: Any, before: Array) -> Array:
        """Compute the moves of a tile of keys. Counts are exact in the matmuls."""
        at = pl.ds(pl.multiple_of(number * tile, tile), tile)
        x = members[at]
        selected = jnp.where(x != 0, 1.0, 0.0).astype(jnp.bfloat16)
        totals = dot(selected, ones, 1, 0)
        ranks = dot(selected, in_group, 1, 0) + dot(in_tile, totals.astype(jnp.bfloat16), 1, 0)
        place = (number * tile + row) * _LANES + lane
        moves[at] = jnp.where(x != 0, place - ranks.astype(jnp.int32) - before, 0)
        found[at] = x
        return before + totals.sum(0, keepdims=True).astype(jnp.int32)

    empty = jnp.zeros((moves.shape[0] - groups, _LANES), jnp.int32)
    moves[groups:], found[groups:] = empty, empty
    none = jnp.zeros((1, _LANES), jnp.int32)
    count[...] = lax.fori_loop(0, groups // tile, start, none)

    for bit in range((groups * _LANES - 1).bit_length()):

        def move(number: Any, _: Any, bit: int = bit) -> None:
            """Move keys to a tile from later tiles, which still have their previous contents."""
            at = pl.ds(pl.multiple_of(number * tile, tile), tile)
            old_moves, old_found = moves[at], found[at]
            new_moves, new_found = (_later(x, number * tile, tile, bit) for x in (moves, found))
            arrives = (new_moves >> bit) & 1 == 1
            leaves = (old_moves >> bit) & 1 == 1
            found[at] = jnp.where(arrives, new_found, jnp.where(leaves, 0, old_found))
            moves[at] = jnp.where(arrives, new_moves, jnp.where(leaves, 0, old_moves))

        lax.fori_loop(0, groups // tile, move, None)

    def write(number: Any, _: Any) -> None:
        at = pl.ds(pl.multiple_of(number * tile, tile), tile)
        place = (number * tile + row) * _LANES + lane + moves[at]
        places[at] = jnp.where(found[at] != 0, place, num_keys)
        words[at] = found[at]

    lax.fori_loop(0, groups // tile, write, None)


def _later(x: Any, first: Any, tile: int, bit: int) -> Int[Array, "g 128"]:
    """Return the entries `2**bit` places after those of a tile."""
    rows, lanes = divmod(1 << bit, _LANES)
    if rows:
        return x[pl.ds(first + rows, tile)]
    same, following = (tpu.roll(x[pl.ds(first + n, tile)], _LANES - lanes, 1) for n in (0, 1))
    lane = lax.broadcasted_iota(jnp.int32, (tile, _LANES), 1)
    return jnp.where(lane < _LANES - lanes, same, following)
