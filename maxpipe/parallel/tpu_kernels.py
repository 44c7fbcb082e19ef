"""Parts that the Pallas kernels for TPUs share: the cores of a device, and matmuls."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from maxpipe.parallel.mesh import mesh_device_kind


class TpuCores(NamedTuple):
    """Cores of a device, with published rates, to compare tile sizes."""

    number: int
    """Number of cores of a device. Each of them processes different heads or columns of the
    output."""
    macs: int
    """Multiply-adds of one core per cycle."""
    num_bytes: int
    """Bytes that one core reads or writes per cycle."""
    vmem_mib: int = 32
    """Memory of one core in MiB that a kernel can use: half of the memory, or all of it on v4."""
    matmul_step: int = 150
    """Cycles by which a grid step of `grouped_matmul` exceeds the time of the matrix units in
    compiled kernels."""
    outer_step: int = 700
    """Cycles of a grid step of `grouped_outer` outside of the matrix units. It also transposes rows
    and adds to sums in memory."""
    matrix_width: int = 128
    """Number of columns of a matrix unit."""


_CORES = {
    r"TPU v4": TpuCores(2, 2**16, 570, vmem_mib=16),
    r"TPU v5p?": TpuCores(2, 2**16, 790),
    r"TPU v5 ?(lite|e)": TpuCores(1, 2**16, 550, vmem_mib=64),
    r"TPU v6 ?(lite|e)": TpuCores(
        1, 2**18, 940, vmem_mib=64, matmul_step=350, outer_step=900, matrix_width=256
    ),
    r"TPU ?7x": TpuCores(1, 2**18, 1680, matmul_step=350, outer_step=900, matrix_width=256),
}
"""Cores, keyed by pattern of device kinds."""
_OTHER_CORES = TpuCores(1, 2**16, 550, vmem_mib=16)


def tpu_cores() -> TpuCores:
    """Return the cores of the devices of the current mesh."""
    kind = mesh_device_kind()
    return next((each for name, each in _CORES.items() if re.fullmatch(name, kind)), _OTHER_CORES)


def has_tpu_devices() -> bool:
    """Return whether the devices of the current mesh are TPUs."""
    return mesh_device_kind().startswith("TPU")


def usable_vmem() -> float:
    """Return the number of bytes of a core's memory that the arrays of a kernel can occupy. The
    compiler needs the other memory.
    """
    return 0.9 * tpu_cores().vmem_mib * 2**20


def dot(first: Array, second: Array, first_dim: int, second_dim: int) -> Array:
    """Contract one dim of each operand, with float32 sums."""
    dims = (((first_dim,), (second_dim,)), ((), ()))
    return lax.dot_general(first, second, dims, preferred_element_type=jnp.float32)


def compiler_parameters(*semantics: Any) -> tpu.CompilerParams:
    """Return the parameters of a kernel that can use half of the memory of a core. `semantics` are
    those of the grid dims.
    """
    return tpu.CompilerParams(
        dimension_semantics=semantics, vmem_limit_bytes=tpu_cores().vmem_mib * 2**20
    )


def cost_estimate(
    flops: float, arrays: Iterable[Any], transcendentals: float = 0.0
) -> pl.CostEstimate:
    """Return the work of a kernel call that reads or writes these arrays.

    Without an estimate, the scheduler of XLA assumes that a kernel needs no time, and completes
    collectives before the kernel that could overlap with them.
    """
    moved = sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays)
    return pl.CostEstimate(
        flops=round(flops), bytes_accessed=moved, transcendentals=round(transcendentals)
    )
