"""Pallas kernel for TPUs that adds to scattered rows of an array in place.

XLA's scatter reads and writes the full array. The kernel transfers only the rows that change.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Float, Int

from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import compiler_parameters, cost_estimate, tpu_cores

_MAX_GROUP = 512
"""Number of rows of a grid step."""
_AT_ONCE = 8
"""Number of transfers that one iteration of a loop starts."""
_ROW = 15
"""Instructions for each row: to start both transfers, to wait for them, and to add.
`benchmarks/kernel_schedules.py --sparse` prints the schedule."""


def new_rows(count: int, width: int) -> Float[Array, "r 1 w"]:
    """Return `count` rows of zeros, and one row to which rows without a place are added.

    The dim of size 1 makes every row contiguous on TPUs.
    """
    return jnp.zeros((count + 1, 1, width))


def add_rows(
    x: Float[Array, "r 1 w"],
    places: Int[Array, " n"],
    rows: Float[Array, "n w"],
    *,
    interpret: bool = False,
) -> Float[Array, "r 1 w"]:
    """Add each of `rows` to the row of `x` with the given index.

    Indices are unique, except that of the last row of `x`, whose sum is undefined.
    """

    def kernel(x: Array, places: Array, rows: Array) -> Array:
        return _add_by_kernel(x, places, rows, interpret)

    def scatter(x: Array, places: Array, rows: Array) -> Array:
        dropped = jnp.arange(len(x), len(x) + len(places), dtype=jnp.int32)
        places = jnp.where(places < len(x) - 1, places, dropped)
        return x.at[places, 0].add(rows, mode="drop", unique_indices=True)

    if interpret:
        return kernel(x, places, rows)
    return lax.platform_dependent(x, places, rows, tpu=kernel, default=scatter)


def _add_by_kernel(x: Array, places: Array, rows: Array, interpret: bool) -> Array:
    group = min(_MAX_GROUP, -(-len(places) // _AT_ONCE) * _AT_ONCE)
    padding = -len(places) % group
    places = jnp.pad(places, (0, padding), constant_values=len(x) - 1)
    rows = jnp.pad(rows, ((0, padding), (0, 0)))
    width, steps = x.shape[2], len(places) // group
    with jax.named_scope(scopes.cycles(kernel_cycles(len(places)))):
        return pl.pallas_call(
            partial(_kernel, group),
            out_shape=jax.typeof(x),
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[
                    pl.BlockSpec((group, width), lambda n, _: (n, 0)),
                    pl.BlockSpec(memory_space=pl.ANY),
                ],
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                grid=(steps,),
                scratch_shapes=[
                    tpu.VMEM((group, 1, width), jnp.float32),
                    tpu.SemaphoreType.DMA,
                    tpu.SemaphoreType.DMA,
                ],
            ),
            input_output_aliases={2: 0},
            # Checks of the addresses would triple the cycles of the loops.
            compiler_params=replace(compiler_parameters("parallel"), disable_bounds_checks=True),
            cost_estimate=cost_estimate(rows.size, (rows, rows, rows)),
            interpret=interpret,
            name="add_rows",
        )(places, rows, x)


def kernel_cycles(num_rows: int) -> float:
    """Return the number of instructions in the schedule of the kernel for v5p.

    Waits for transfers, which are not in the schedule, are not included.
    """
    return num_rows * _ROW / tpu_cores().number


def _kernel(
    group: int, places: Any, rows: Any, _: Any, x: Any, buffer: Any, reads: Any, writes: Any
) -> None:
    """Read a group of rows, add to them, and write them."""
    first = pl.program_id(0) * group

    def read(n: Any) -> Any:
        row = x.at[pl.ds(places[first + n], 1)]
        return tpu.make_async_copy(row, buffer.at[pl.ds(n, 1)], reads)

    def write(n: Any) -> Any:
        row = x.at[pl.ds(places[first + n], 1)]
        return tpu.make_async_copy(buffer.at[pl.ds(n, 1)], row, writes)

    def start_all(copy: Any) -> None:
        def start(n: Any, _: Any) -> None:
            for at in range(_AT_ONCE):
                copy(n * _AT_ONCE + at).start()

        lax.fori_loop(0, group // _AT_ONCE, start, None)

    def wait_all(copy: Any) -> None:
        def wait(n: Any, _: Any) -> None:
            for at in range(_AT_ONCE):
                copy(n * _AT_ONCE + at).wait()

        lax.fori_loop(0, group // _AT_ONCE, wait, None)

    start_all(read)
    wait_all(read)
    buffer[...] += rows[...][:, None]
    start_all(write)
    wait_all(write)
