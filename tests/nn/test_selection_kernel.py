"""Kernel for the selection of keys, in interpret mode, compared with plain JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn import selection_kernel, sparse_attention
from maxpipe.nn.attention.interface import Mask
from maxpipe.nn.indexer import IndexArrays
from maxpipe.nn.selection_kernel import SelectionInputs, sort_keys
from maxpipe.nn.sparse_attention import SparseOptions, sparse_attend
from maxpipe.parallel.tpu_kernels import TpuCores

SCALE = 0.25


def selection_inputs(
    tokens: int, block: int, batch: int, heads: int, documents: int, *, ties: bool
) -> SelectionInputs:
    """Return random inputs. With `ties`, all numbers are small integers."""
    draw = np.random.default_rng(tokens)
    blocks, size = -(-tokens // block), 8
    query, key, weights = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in (
            (blocks, batch, block, heads, size),
            (batch, tokens, size),
            (blocks, batch, block, heads),
        )
    )
    if ties:
        query, key, weights = map(np.round, (query, key, weights))
    segments = np.sort(draw.integers(0, documents, (batch, tokens)), 1).astype(np.int32)
    padding = blocks * block - tokens
    padded = np.pad(segments, ((0, 0), (0, padding)), constant_values=-3)
    places = np.pad(np.arange(tokens, dtype=np.int32), (0, padding), "edge")
    arrays = (
        query,
        weights,
        np.moveaxis(padded.reshape(batch, blocks, block), 1, 0),
        places.reshape(blocks, block),
        key,
        segments,
    )
    return SelectionInputs(*map(jnp.asarray, arrays))


@pytest.mark.parametrize(
    ("tokens", "block", "batch", "heads", "top_k", "rows", "documents", "ties"),
    [
        (70, 24, 2, 3, 5, 32, 3, True),
        (300, 30, 1, 9, 20, 8, 2, True),
        (40, 20, 1, 3, 64, 8, 2, True),
        (1100, 32, 1, 2, 37, 16, 1, False),
    ],
    ids=["ties", "parts of blocks", "all keys", "two tiles"],
)
def test_selection_equals_plain_selection_bit_for_bit(
    tokens: int,
    block: int,
    batch: int,
    heads: int,
    top_k: int,
    rows: int,
    documents: int,
    ties: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integers and their scores are exact in float32, so that both paths have equal scores."""
    monkeypatch.setattr(selection_kernel, "tpu_cores", lambda: TpuCores(2, 2**16, 790))
    inputs = selection_inputs(tokens, block, batch, heads, documents, ties=ties)
    options = SparseOptions(1.0, SCALE, top_k, 4, tokens)
    run = partial(sparse_attention._select_by_kernel, options._replace(interpret=True), rows)
    with jax.default_matmul_precision("highest"):
        members, log_sum = jax.jit(run)(*inputs)
        plain = jax.jit(partial(sparse_attention._select_by_loop, options))(*inputs)
    np.testing.assert_array_equal(members, plain[0])
    np.testing.assert_allclose(log_sum, plain[1], rtol=1e-5, atol=1e-5)
    assert np.asarray(members).any()


def test_sharded_index_heads_give_the_selection_of_one_device() -> None:
    """Five blocks are divided over two devices with two of four index heads."""
    inputs = selection_inputs(40, 8, 2, 4, 2, ties=True)
    options = SparseOptions(1.0, SCALE, 5, 4, 40, interpret=True)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tensor",))
    heads = jax.P(None, None, None, "tensor")
    sharded = jax.shard_map(
        partial(sparse_attention._select_by_kernel, options._replace(index_axis="tensor"), 8),
        mesh=mesh,
        in_specs=(heads, heads, *(jax.P(),) * 4),
        out_specs=jax.P(),
        check_vma=False,
    )
    with jax.default_matmul_precision("highest"):
        members, log_sum = jax.jit(sharded)(*inputs)
        plain = jax.jit(partial(sparse_attention._select_by_loop, options))(*inputs)
    np.testing.assert_array_equal(members, plain[0])
    np.testing.assert_allclose(log_sum, plain[1], rtol=1e-5, atol=1e-5)


def test_sort_keys_have_the_order_of_scores() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    x = np.asarray([-nan, -inf, -3.5, -1e-30, 0.0, 1e-30, 2.0, inf, nan], np.float32)
    keys = np.asarray(sort_keys(jnp.asarray(x))).astype(np.int64)
    assert (np.diff(keys) > 0).all()
    zeros = np.asarray(sort_keys(jnp.asarray([-0.0, 0.0], jnp.float32)))
    assert zeros[0] == zeros[1] == keys[4]
    # Programs may replace numbers that are too small to be normalized by zeros.
    small = np.asarray(sort_keys(jnp.asarray([-1e-40, 1e-40], jnp.float32)))
    assert keys[3] < small[0] <= keys[4] <= small[1] < keys[5]
    assert int(sort_keys(jnp.float32(-inf))) == selection_kernel._NEGATIVE_INFINITY
    assert int(sort_keys(jnp.float32(inf))) == selection_kernel._INFINITY


def test_rows_at_once_fit_the_memory_of_a_core() -> None:
    """The default core has 16 MiB, and scores need four bytes per pair."""
    rows = [selection_kernel.rows_at_once(keys, 8, 128) for keys in (2**15, 2**17, 2**18, 2**20)]
    assert rows == [32, 16, 8, 0]


def test_attention_with_kernels_equals_plain_attention() -> None:
    """Compare outputs, the loss and all gradients for 45 tokens in blocks of 23, with documents."""
    draw = np.random.default_rng(7)
    tokens, shapes = 45, ((2, 45, 3, 12), (2, 45, 12), (2, 45, 4, 8), (2, 45, 8), (2, 45, 4))
    arrays = [jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes]
    segments = jnp.asarray(np.sort(draw.integers(0, 3, (2, tokens)), 1), jnp.int32)
    loss_mask = jnp.asarray(draw.integers(0, 2, (2, tokens)), jnp.float32)

    def attend(interpret: bool, query: Any, key: Any, *index: Any) -> tuple[Any, Any]:
        mask = Mask(segments=segments, scale=0.3)
        mixed, loss = sparse_attend(
            *(query, key, IndexArrays(*index), mask, loss_mask),
            top_k=5,
            rope_size=4,
            interpret=interpret,
        )
        return (jnp.sin(mixed) * jnp.arange(8)).sum() + loss, (mixed, loss)

    results = []
    for interpret in (False, True):
        run = jax.value_and_grad(partial(attend, interpret), argnums=range(5), has_aux=True)
        with jax.default_matmul_precision("highest"):
            results.append(jax.device_get(jax.jit(run)(*arrays)))
    plain, kernels = map(jax.tree.leaves, results)
    for expected, value in zip(plain, kernels, strict=True):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
