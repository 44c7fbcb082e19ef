"""Each implementation of grouped matmuls, compared with one matmul per expert."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn.expert_backends import blocks, mosaic, ragged_dot, triton
from maxpipe.parallel import tpu_kernels
from tests.cases import keeping
from tests.nn.parts import assert_close

BACKENDS: Mapping[str, Any] = {
    "loop": blocks,
    "mosaic": mosaic,
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
    name: str, num_rows: int, num_experts: int, first: int, second: int, *, outer: bool = False
) -> dict[str, Any]:
    """Return options with which a backend runs on a CPU."""
    if name == "triton":
        return {"interpret": True}
    if name == "mosaic":
        tiles_of = mosaic.outer_tiles if outer else mosaic.matmul_tiles
        return {
            "interpret": True,
            "tiles": tiles_of(num_rows, num_experts, first, second, np.float32),
        }
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
            found = jax.jit(run)([jnp.asarray(inputs)], [weights], counts)
            assert found.shape == (num_rows, dims[1])
            if used:
                assert_close(found[:used], wanted)
        outer = np.stack([given.rows[g].T @ given.cotangents[g] for g in groups], dim)
        how = options_of(name, num_rows, len(sizes), first, second, outer=True)
        run = jax.jit(partial(backend.grouped_outer, dim=dim, **how))
        if name == "mosaic":
            pair = run(given.rows, [given.cotangents, -given.cotangents], counts)
            assert_close(pair[1], -outer)
            assert_close(pair[0], outer)
        else:
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
    "sizes",
    [
        [31, 1, 32, 40, 24, 100, 28, 0, 127, 1],  # parts of all sizes, at both ends of a tile
        [5, 3, 2, 1, 0, 7, 15, 16, 17, 318],  # several experts inside one part
        [16, 112, 240, 16],
        [3, 130],  # unused rows
    ],
    ids=str,
)
def test_parts_of_row_tiles(sizes: list[int]) -> None:
    check("mosaic", sizes, 384, 128, 128)


@pytest.mark.parametrize("rows", [256, 512])
def test_mosaic_kernels_with_several_tiles_in_every_dim(rows: int) -> None:
    """Sums over contracted tiles, and all parts of large row tiles, equal separate matmuls."""
    sizes = [rows - 70, 30, 0, 40 + rows // 2, rows // 2 - 9]
    one, counts = draw(sizes, 2 * rows, 256, 256), jnp.asarray(sizes, jnp.int32)
    tiles, used = mosaic.Tiles(rows, 128, 128), sum(sizes)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    options = {"dim": 0, "tiles": tiles, "interpret": True}
    for transposed in (False, True):
        run = jax.jit(partial(mosaic.grouped_matmul, transposed=transposed, **options))
        each = one.weights.swapaxes(1, 2) if transposed else one.weights
        pairs = zip(groups, each, strict=True)
        wanted = np.concatenate([one.rows[group] @ weight for group, weight in pairs])
        assert_close(run([one.rows], [one.weights], counts)[:used], wanted)
    outer = np.stack([one.rows[group].T @ one.cotangents[group] for group in groups])
    run = jax.jit(partial(mosaic.grouped_outer, **options))
    for found in run(one.rows, [one.cotangents, one.cotangents], counts):
        assert_close(found, outer)


@pytest.mark.parametrize("name", BACKENDS)
def test_pairs_of_rows_and_weights_are_summed(name: str) -> None:
    sizes = [40, 0, 85]
    one, counts = draw(sizes, 128, 128, 128), jnp.asarray(sizes, jnp.int32)
    how = options_of(name, 128, 3, 128, 128)
    run = jax.jit(partial(BACKENDS[name].grouped_matmul, dim=0, transposed=False, **how))
    rows, weights = (one.rows, 2 * one.rows), (one.weights, one.weights[::-1])
    summed = run(rows, weights, counts)
    parts = [run([each], [weight], counts) for each, weight in zip(rows, weights, strict=True)]
    assert_close(summed[:125], np.sum(parts, 0)[:125])


@pytest.mark.parametrize(
    ("num_rows", "dims"), [(8, (128, 128)), (384, (96, 128)), (384, (128, 200))]
)
def test_mosaic_requires_whole_tiles(num_rows: int, dims: tuple[int, int]) -> None:
    assert mosaic.matmul_tiles(num_rows, 3, *dims, np.float32) is None
    assert mosaic.outer_tiles(num_rows, 3, *dims, np.float32) is None


VMEM = {"TPU v4": 16, "TPU v5": 32, "TPU v5 lite": 64, "TPU v6 lite": 64, "TPU7x": 32, "": 16}
"""Memory in MiB that a kernel can use, keyed by device kind."""


@pytest.mark.parametrize("kind", VMEM)
def test_mosaic_tiles_fit_and_use_all_cores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices with two cores, each core processes half of the columns."""
    monkeypatch.setattr(tpu_kernels, "mesh_device_kind", lambda: kind)
    two_cores = kind in ("TPU v4", "TPU v5")
    for num_rows, num_experts, first, second in (
        (65536, 128, 2048, 768),
        (16384, 8, 4096, 14336),
        (65536, 64, 7168, 2048),
    ):
        for dtype in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
            sizes = num_rows, num_experts, first, second, dtype
            m, k, n = mosaic.matmul_tiles(*sizes) or (0, 0, 0)
            assert not (two_cores and second // n % 2)
            assert 2 * dtype.itemsize * (m * k + k * n + m * n) + 4 * m * n < VMEM[kind] * 2**20
            m, k, n = mosaic.outer_tiles(*sizes, number=2) or (0, 0, 0)
            assert not (two_cores and second // n % 2)
            moved = m * (k + 2 * n) + 2 * k * n
            assert 2 * dtype.itemsize * moved + 4 * 2 * k * n < VMEM[kind] * 2**20


def test_mosaic_tile_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of an expert remain in memory. Larger matrix units process more rows."""
    bf16, qwen3 = jnp.dtype("bfloat16"), (65536, 128, 2048, 768)
    monkeypatch.setattr(tpu_kernels, "mesh_device_kind", lambda: "TPU v5")
    assert mosaic.matmul_tiles(*qwen3, bf16) == (128, 2048, 384)
    assert mosaic.outer_tiles(*qwen3, bf16, number=2) == (128, 2048, 384)
    assert mosaic.matmul_tiles(16384, 8, 4096, 14336, bf16) == (128, 4096, 1024)
    monkeypatch.setattr(tpu_kernels, "mesh_device_kind", lambda: "TPU v6 lite")
    assert mosaic.matmul_tiles(*qwen3, bf16) == (256, 2048, 768)
    assert mosaic.outer_tiles(*qwen3, bf16, number=2) == (256, 2048, 768)


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
