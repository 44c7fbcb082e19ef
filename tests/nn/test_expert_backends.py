"""Each implementation of grouped matmuls, compared with one matmul per expert."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn.expert_backends import blocks, megablox, ragged_dot, triton
from tests.cases import keeping
from tests.nn.parts import assert_close

BACKENDS: Mapping[str, Any] = {
    "loop": blocks,
    "megablox": megablox,
    "ragged_dot": ragged_dot,
    "triton": triton,
}
WITHOUT_LIMITS = ("loop", "ragged_dot", "triton")
"""Backends that support all sizes."""
SIZES = [[3, 0, 5, 120], [0, 0, 0, 128], [128, 0, 0, 0], [37, 27, 0, 64]]


class Operands(NamedTuple):
    """Random operands for rows of width K and outputs of width J."""

    rows: np.ndarray
    weights: np.ndarray
    """Weights [E, K, J]."""
    cotangents: np.ndarray


def draw(sizes: list[int], num_rows: int, first: int, second: int) -> Operands:
    random = np.random.default_rng(0)
    shapes = ((num_rows, first), (len(sizes), first, second), (num_rows, second))
    found = Operands(*(random.normal(size=shape).astype(np.float32) for shape in shapes))
    used = sum(sizes)
    found.rows[used:] = np.nan  # rows without an expert can hold arbitrary values
    found.cotangents[used:] = np.inf
    return found


def options_of(
    name: str, num_rows: int, num_experts: int, first: int, second: int
) -> dict[str, Any]:
    """Return options with which a backend runs on a CPU."""
    if name == "triton":
        return {"interpret": True}
    if name == "megablox":
        tiles = megablox.matmul_tiles(num_rows, num_experts, first, second, np.float32)
        assert tiles == (128, first, second)
        return {"interpret": True, "tiles": tiles}
    return {}


def check(name: str, sizes: list[int], num_rows: int, first: int, second: int) -> None:
    """Compare all products of a backend with one matmul per expert."""
    backend, given = BACKENDS[name], draw(sizes, num_rows, first, second)
    counts, used = jnp.asarray(sizes, jnp.int32), sum(sizes)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    for dim in (0, 1):
        weights = jnp.moveaxis(jnp.asarray(given.weights), 0, dim)
        for transposed in (False, True):
            inputs, dims = given.rows, (first, second)
            if transposed:
                inputs, dims = given.cotangents, (second, first)
            each = given.weights.swapaxes(1, 2) if transposed else given.weights
            wanted = np.concatenate([inputs[g] @ w for g, w in zip(groups, each, strict=True)])
            how = options_of(name, num_rows, len(sizes), *dims)
            run = partial(backend.grouped_matmul, dim=dim, transposed=transposed, **how)
            found = jax.jit(run)(jnp.asarray(inputs), weights, counts)
            assert found.shape == (num_rows, dims[1])
            if used:
                assert_close(found[:used], wanted)
        outer = np.stack([given.rows[g].T @ given.cotangents[g] for g in groups], dim)
        how = options_of(name, num_rows, len(sizes), first, second)
        run = jax.jit(partial(backend.grouped_outer, dim=dim, **how))
        assert_close(run(given.rows, given.cotangents, counts), outer)


@pytest.mark.parametrize("sizes", keeping(SIZES, 3), ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_products_equal_separate_matmuls(name: str, sizes: list[int]) -> None:
    """Kernels run in interpret mode."""
    check(name, sizes, 128, 128, 256)


@pytest.mark.parametrize(
    ("sizes", "num_rows", "dims"),
    [
        ([7, 2, 0], 12, (6, 10)),  # smaller than all tiles, with unused rows
        ([100, 90, 13], 203, (48, 72)),
        ([0, 0, 0], 5, (16, 16)),
        ([1], 1, (1, 3)),
        ([300, 1, 0, 2], 320, (130, 258)),  # tiles are incomplete in every dim
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WITHOUT_LIMITS)
def test_all_sizes_are_supported(
    name: str, sizes: list[int], num_rows: int, dims: tuple[int, int]
) -> None:
    check(name, sizes, num_rows, *dims)


def test_many_row_tiles_are_processed_in_any_order() -> None:
    """The number of row tiles is not a multiple of the tiles per group."""
    sizes = [32 * each for each in (3, 1, 0, 5, 2, 2, 7, 1, 1, 1)]
    check("triton", sizes, sum(sizes) + 3, 32, 200)


@pytest.mark.parametrize(
    ("num_rows", "dims"), [(8, (128, 128)), (384, (96, 128)), (384, (128, 200))]
)
def test_megablox_requires_whole_tiles(num_rows: int, dims: tuple[int, int]) -> None:
    assert megablox.matmul_tiles(num_rows, 3, *dims, np.float32) is None
    assert megablox.outer_tiles(num_rows, 3, *dims, np.float32) is None


def test_megablox_tile_sizes() -> None:
    """Small experts fit in one tile, and few rows are computed twice."""
    bf16, fp32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert megablox.matmul_tiles(65536, 128, 2048, 768, bf16) == (128, 2048, 768)
    assert megablox.matmul_tiles(65536, 128, 768, 2048, bf16) == (128, 768, 1024)
    assert megablox.matmul_tiles(16384, 8, 4096, 14336, bf16) == (256, 4096, 256)
    assert megablox.matmul_tiles(16384, 8, 14336, 4096, bf16) == (256, 1024, 1024)
    assert megablox.matmul_tiles(16384, 8, 4096, 14336, fp32) == (256, 512, 512)
    assert megablox.outer_tiles(16384, 8, 4096, 14336, bf16) == (256, 1024, 1024)
    assert megablox.outer_tiles(16384, 8, 4096, 14336, fp32) == (256, 512, 512)
    assert megablox.outer_tiles(384, 3, 640, 1408, bf16) == (128, 640, 128)


KINDS = {"NVIDIA L4": 99, "NVIDIA A100-SXM4-80GB": 163, "NVIDIA H100 80GB HBM3": 227, "": 99}


@pytest.mark.parametrize("kind", KINDS)
def test_triton_tiles_fit_into_shared_memory(kind: str) -> None:
    """Operands of all stages are in the shared memory of a multiprocessor."""
    shared = triton.shared_bytes(kind)
    assert shared == KINDS[kind] * 1024
    shapes = [(65536, 128, 2048, 768), (16384, 8, 4096, 14336), (64, 128, 2048, 768), (9, 3, 6, 10)]
    for dtype in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        for num_rows, num_experts, first, second in shapes:
            tiles = triton.matmul_tiles(num_rows, num_experts, first, second, dtype, shared)
            m, k, n, _, stages = tiles
            assert (m * k + k * n) * dtype.itemsize * stages <= shared
            m, k, n, _, stages = triton.outer_tiles(first, second, dtype)
            assert m * (k + n) * dtype.itemsize * stages <= shared


def test_triton_tile_sizes() -> None:
    bf16, large, small = jnp.dtype("bfloat16"), 227 * 1024, 99 * 1024
    assert triton.matmul_tiles(65536, 128, 2048, 768, bf16, large)[:3] == (128, 64, 256)
    assert triton.matmul_tiles(65536, 128, 2048, 768, bf16, small)[:3] == (128, 64, 128)
    assert triton.matmul_tiles(65536, 128, 2048, 640, bf16, large)[:3] == (128, 64, 128)
    assert triton.matmul_tiles(64, 128, 2048, 768, bf16, large)[0] == 16


def test_wasted_rows_are_bounded() -> None:
    for num_rows in (1, 37, 4096, 100_000):
        for num_experts in (1, 3, 64):
            even = num_rows / num_experts
            waste = blocks.num_multiplied_rows(num_rows, num_experts) / num_rows
            assert even < 32 or waste < 1.5
    assert blocks.num_multiplied_rows(16384, 16) <= 1.25 * 16384
