"""Attention of a block to gathered keys, compared with a dense float64 reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn import gathered_attention, sparse_attention
from maxpipe.nn.attention.interface import Mask
from maxpipe.nn.gathered_attention import BlockOptions, OutputGradient, Softmax
from maxpipe.nn.indexer import IndexArrays
from maxpipe.nn.sparse_attention import sparse_attend
from maxpipe.parallel import tpu_kernels
from maxpipe.parallel.tpu_kernels import TpuCores

SCALE, VALUE = 0.3, 8


def block_arrays(heads: int) -> tuple[Any, ...]:
    """Return a block of 16 query tokens of two sequences, two chunks of keys, and a cotangent.

    The first query token of the first sequence has no keys.
    """
    draw = np.random.default_rng(heads)
    query, keys, d_mixed = (
        draw.standard_normal(shape)
        for shape in ((2, heads, 16, 12), (2, 512, 12), (2, heads, 16, VALUE))
    )
    chosen = draw.random((2, 16, 512)) < 0.1
    chosen[0, 0] = False
    words = (chosen << np.arange(16)[:, None]).sum(1).astype(np.uint32)
    return query, keys, chosen, words, d_mixed


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("heads", [3, 4], ids=["odd", "groups"])
def test_block_equals_float64_reference(
    heads: int, interpret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grid steps have at most two heads and 128 keys, on two cores."""
    monkeypatch.setattr(gathered_attention, "_MAX_ROWS", 32)
    monkeypatch.setattr(gathered_attention, "_TILE", 128)
    monkeypatch.setattr(gathered_attention, "tpu_cores", lambda: TpuCores(2, 2**16, 790))
    query, keys, chosen, words, d_mixed = block_arrays(heads)
    options = BlockOptions(SCALE, VALUE, interpret)

    def attend(query: Any, keys: Any) -> tuple[Any, Any]:
        scores = jnp.einsum("bnth,bsh->bnts", query, keys) * SCALE
        scores = jnp.where(chosen[:, None], scores, -1e30)
        shares = jnp.where(chosen[:, None], jax.nn.softmax(scores), 0.0)
        return jnp.einsum("bnts,bsr->bntr", shares, keys[..., :VALUE]), shares.sum(1)

    with jax.enable_x64(True):
        (exact, exact_shares), pull = jax.vjp(attend, jnp.asarray(query), jnp.asarray(keys))
        exact_gradients = pull((jnp.asarray(d_mixed), jnp.zeros_like(exact_shares)))

    @jax.jit
    def run(query: Any, keys: Any, words: Any, d_mixed: Any) -> tuple[Any, ...]:
        chunks = [(keys[:, at], words[:, at]) for at in (slice(256), slice(256, None))]
        state = Softmax.empty(query, VALUE)
        for chunk in chunks:
            state = gathered_attention.add_keys(state, query, *chunk, options)
        mixed, log_sum = state.finish()
        shares = [
            gathered_attention.sum_shares(query, *chunk, log_sum, options) for chunk in chunks
        ]
        output = OutputGradient(d_mixed, log_sum, (mixed * d_mixed).sum(-1))
        d_query, d_keys = gathered_attention.empty_gradient(query), []
        for chunk in chunks:
            d_query, d_chunk = gathered_attention.gradients(d_query, query, *chunk, output, options)
            d_keys.append(d_chunk)
        return mixed, jnp.concatenate(shares, 2), d_query.sum(0), jnp.concatenate(d_keys, 1)

    narrow = (jnp.asarray(x, jnp.float32) for x in (query, keys))
    with jax.default_matmul_precision("highest"):
        results = run(*narrow, jnp.asarray(words), jnp.asarray(d_mixed, jnp.float32))
    for result, expected in zip(results, (exact, exact_shares, *exact_gradients), strict=True):
        expected = np.asarray(expected)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not np.asarray(results[0])[0, :, 0].any()


def test_kernels_fit_the_memory_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are those of DeepSeek-V3.2. Blocks of 8 tokens use plain JAX."""
    keys = (1, 2048, 576)
    monkeypatch.setattr(tpu_kernels, "tpu_cores", lambda: TpuCores(2, 2**16, 790))
    for heads, tokens, expected in ((16, 32, True), (128, 32, True), (1, 16, True), (16, 8, False)):
        assert gathered_attention.fits((1, heads, tokens, 576), keys) == expected
    small = TpuCores(1, 2**16, 550, vmem_mib=8)
    monkeypatch.setattr(tpu_kernels, "tpu_cores", lambda: small)
    assert not gathered_attention.fits((1, 16, 32, 576), keys)


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])
def test_nan_in_padding_does_not_change_other_tokens(interpret: bool) -> None:
    """Compare outputs and gradients with those of zeros, with documents and 19 padding tokens."""
    draw = np.random.default_rng(11)
    shapes = ((1, 45, 2, 12), (1, 45, 12), (1, 45, 3, 8), (1, 45, 8), (1, 45, 3))
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    segments = np.repeat([1, 2, 0], [20, 6, 19])[None].astype(np.int32)
    cotangent = draw.standard_normal((1, 45, 2, VALUE)).astype(np.float32)
    loss_mask = jnp.asarray(segments != 0, jnp.float32)

    @jax.jit
    def run(arrays: Any, cotangent: Any) -> Any:
        def attend(query: Any, key: Any, *index: Any) -> Any:
            mask = Mask(segments=jnp.asarray(segments), scale=SCALE)
            index = IndexArrays(*index)
            sizes: Any = {"top_k": 5, "rope_size": 4, "interpret": interpret}
            return sparse_attend(query, key, index, mask, loss_mask, **sizes)

        (mixed, loss), pull = jax.vjp(attend, *arrays)
        return mixed[:, :26], loss, *(x[:, :26] for x in pull((cotangent, jnp.ones_like(loss))))

    results = []
    for padding in (0.0, np.nan):
        for x in (*arrays, cotangent):
            x[:, 26:] = padding
        results.append(jax.device_get(run(list(map(jnp.asarray, arrays)), jnp.asarray(cotangent))))
    for expected, result in zip(*results, strict=True):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_array_equal(result, expected)


def test_blocks_of_long_runs_have_a_multiple_of_16_tokens() -> None:
    sizes = [sparse_attention._Blocks(tokens, tokens).size for tokens in (8, 16, 45, 48, 480)]
    assert sizes == [8, 16, 32, 32, 32]
