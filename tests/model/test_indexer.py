"""DeepSeek sparse attention compared with a float64 reference that follows the paper's formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxpipe.models.layers.attention import CANNOT, Rope
from maxpipe.models.layers.indexer import LOSS, Indexer
from maxpipe.models.layers.latent_attention import LatentAttention as LatentAttentionSpec
from maxpipe.nn import indexer as indexer_module
from maxpipe.nn import sparse_attention
from maxpipe.nn.attention.interface import Mask
from maxpipe.nn.indexer import IndexArrays, largest_entries, running_count, select_keys
from maxpipe.nn.latent_attention import LatentAttention
from maxpipe.nn.module import LayerContext
from maxpipe.nn.sparse_attention import largest_keys
from tests.nn.parts import RULES, assert_close, context, packed, with_values

D, ROPE, REST, VALUE, RANK, Q_RANK = 18, 4, 6, 10, 7, 11
HEADS, INDEX_HEADS, INDEX_DIM = 3, 5, 6
EPSILON = 1e-3
LENGTHS = [[9], [2, 4, 3]]
LENGTH = 1.3


def part_with(
    stage: Any = "sparse", top_k: int = 3, backend: str = "xla", **changes: Any
) -> LatentAttentionSpec:
    indexer = Indexer(D, Q_RANK, INDEX_HEADS, INDEX_DIM, ROPE, False, top_k, stage, 0.7)
    rope = Rope(50.0, rotary_dims=ROPE, attention_factor=LENGTH)
    sizes = (D, HEADS, REST + ROPE, VALUE, RANK, Q_RANK)
    indexer = replace(indexer, **changes)
    return LatentAttentionSpec(*sizes, 0.5, backend, rope, 0.3, EPSILON, indexer)


def values() -> dict[str, Any]:
    """Return parameters of the norms that differ from their initial values."""
    return {
        "key_value_norm": np.linspace(-0.5, 1, RANK),
        "query_norm": np.linspace(1, -0.3, Q_RANK),
        "index_key_norm": np.linspace(1.2, 0.3, INDEX_DIM),
        "index_key_norm_bias": np.linspace(-0.4, 0.5, INDEX_DIM),
    }


def arrays() -> tuple[Any, Any, Any, Any]:
    """Return inputs, segments, positions and the loss mask; padding ends the second sequence."""
    x = np.random.default_rng(1).standard_normal((2, 9, D))
    segments, positions = packed(LENGTHS)
    segments[1, 6:], loss_mask = 0, np.ones((2, 9))
    loss_mask[1, 5:] = 0
    loss_mask[0, 3] = 0
    return x, segments, positions + np.array([[40], [0]]), loss_mask


def turned(x: Any, positions: Any, interleaved: bool) -> Any:
    """Rotate the last dim of `[B, T, ..., h]`."""
    angles = 50.0 ** (-np.arange(0, ROPE, 2) / ROPE) * positions[..., None]
    angles = angles.reshape(*angles.shape[:2], *[1] * (x.ndim - 3), -1)
    cos, sin = np.cos(angles) * LENGTH, np.sin(angles) * LENGTH
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(pairs, -1).reshape(x.shape)
    return jnp.concatenate(pairs, -1)


def normed(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def reference(w: Any, x: Any, part: LatentAttentionSpec) -> tuple[Any, Any]:
    """Return the output and the summed loss of the indexer."""
    indexer, (_, segments, positions, loss_mask), stop = (
        part.indexer,
        arrays(),
        jax.lax.stop_gradient,
    )
    assert indexer is not None
    latent = normed(x @ w["query_down"], w["query_norm"])
    query = jnp.einsum("btr,rnh->btnh", latent, w["query_up"])
    both = jnp.einsum(
        "btr,rnh->btnh", normed(x @ w["key_value_down"], w["key_value_norm"]), w["key_value_up"]
    )
    shared = turned(x @ w["rope_key"], positions, True)
    scores = jnp.einsum("btnh,bsnh->bnts", query[..., :REST], both[..., :REST])
    scores += jnp.einsum("btnh,bsh->bnts", turned(query[..., REST:], positions, True), shared)

    x, latent = stop(x), stop(latent)
    index_query = jnp.einsum("btr,rhd->bthd", latent, w["index_query"])
    index_key = x @ w["index_key"]
    index_key -= index_key.mean(-1, keepdims=True)
    index_key /= jnp.sqrt((index_key**2).mean(-1, keepdims=True) + 1e-6)
    index_key = index_key * w["index_key_norm"] + w["index_key_norm_bias"]
    index_query, index_key = (
        jnp.concatenate(
            [turned(each[..., :ROPE], positions, indexer.interleaved), each[..., ROPE:]], -1
        )
        for each in (index_query, index_key)
    )
    heads = jax.nn.relu(jnp.einsum("bthd,bsd->btsh", index_query, index_key) * INDEX_DIM**-0.5)
    index = jnp.einsum("btsh,bth->bts", heads, x @ w["index_weights"] * INDEX_HEADS**-0.5)

    seen = (segments[:, :, None] == segments[:, None]) & np.tri(9, dtype=bool)
    if indexer.is_sparse:
        ranks = jnp.argsort(-jnp.where(seen, index, -jnp.inf), axis=-1, stable=True)
        chosen = jnp.zeros(seen.shape, bool)
        for rank in range(indexer.top_k):
            chosen |= ranks[..., rank, None] == np.arange(9)
        seen &= stop(chosen)
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores * part.scale, -jnp.inf))
    mixed = jnp.einsum("bnts,bsnv->btnv", shares, both[..., REST:])
    target = stop(shares.sum(1))
    target /= target.sum(-1, keepdims=True)
    logs = jnp.log(jnp.where(seen, target, 1.0))
    guess = jax.nn.log_softmax(jnp.where(seen, index, -jnp.inf))
    loss = (jnp.where(seen, target * (logs - guess), 0.0).sum(-1) * loss_mask).sum()
    return jnp.einsum("btnv,nvd->btd", mixed, w["out"]), loss


def apply(part: LatentAttentionSpec, w: Any, x: Any, **inputs: Any) -> Any:
    """Return the output of a module with the parameters `w`."""
    module = LatentAttention(part, RULES)
    for name, value in w.items():
        setattr(module, name, nnx.Param(value))
    return module(x, LayerContext(jax.tree.map(jnp.asarray, inputs), jnp.asarray(0)))


def run(part: LatentAttentionSpec, w: Any, x: Any) -> tuple[Any, Any]:
    _, segments, positions, mask = arrays()
    found = apply(part, w, x, segment_ids=segments, positions=positions, loss_mask=mask)
    return found.x, found.losses[LOSS]


BLOCKS = [(0, 3), (3, 6), (6, 9)]


@pytest.mark.parametrize(
    ("part", "blocks"),
    [
        (part_with(), BLOCKS),
        (part_with("dense"), BLOCKS),
        (part_with(top_k=2, interleaved=True), [(0, 9)]),
        (part_with(top_k=9), [(0, 9)]),
        (part_with("dense", interleaved=True), [(0, 9)]),
        (part_with(backend="blockwise"), BLOCKS),
        (part_with(top_k=2, interleaved=True, backend="blockwise"), BLOCKS),
        (part_with(top_k=9, backend="blockwise"), BLOCKS),
    ],
    ids=[
        "sparse",
        "dense",
        "two keys, interleaved",
        "all keys",
        "dense, interleaved",
        "blockwise",
        "blockwise, two keys",
        "blockwise, all keys",
    ],
)
def test_output_loss_and_gradients_equal_float64_reference(
    part: LatentAttentionSpec, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_module, "query_blocks", lambda tokens: blocks)
    sizes = (("SELECTION_BLOCK", 4), ("_CHUNK", 2), ("_INDEX_CHUNK", 5))
    for name, size in sizes:
        monkeypatch.setattr(sparse_attention, name, size)
    w = with_values(LatentAttention(part, RULES), **values())
    x = arrays()[0]
    cotangent = np.random.default_rng(3).standard_normal(x.shape)

    def objective(of: Any, w: Any, x: Any) -> Any:
        out, loss = of(w, x)
        assert part.indexer is not None
        return (out * cotangent).sum() + part.indexer.loss_weight * loss, (out, loss)

    with jax.enable_x64(True):
        exact = jax.jit(
            jax.value_and_grad(
                lambda w, x: objective(lambda w, x: reference(w, x, part), w, x),
                argnums=(0, 1),
                has_aux=True,
            )
        )
        wanted = jax.device_get(exact(w, x))
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (w, x))
    cotangent = cotangent.astype(np.float32)
    narrow_run = jax.value_and_grad(
        lambda w, x: objective(lambda w, x: run(part, w, x), w, x), argnums=(0, 1), has_aux=True
    )
    with jax.default_matmul_precision("highest"):
        found = jax.jit(narrow_run)(*narrow)
    for got, exact_value in zip(found[0][1], wanted[0][1], strict=True):
        assert_close(got, exact_value)
    assert float(wanted[0][1][1]) > 0.01
    assert found[1][0].keys() == wanted[1][0].keys()
    for name, leaf in wanted[1][0].items():
        error = np.abs(found[1][0][name] - leaf).max()
        assert error <= 1e-5 * np.abs(leaf).max(), name
        assert np.abs(leaf).max() > 1e-3, name
    assert_close(found[1][1], wanted[1][1])


def test_top_k_covering_all_keys_equals_plain_latent_attention() -> None:
    """Compare the output and all gradients of the shared parameters, within 1e-6."""
    sparse = part_with(top_k=9, loss_weight=0.0)
    parts = replace(sparse, indexer=None), sparse
    x, segments, positions, _ = arrays()
    found = []
    for part in parts:
        module = LatentAttention(part, RULES)
        w = with_values(module, **{k: v for k, v in values().items() if k in part.params})

        def total(w: Any, x: Any, part: Any = part) -> Any:
            out = apply(part, w, x, segment_ids=segments, positions=positions).x
            return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out

        narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (w, x))
        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
        found.append(jax.device_get(run(*narrow)))
    (plain, plain_gradients), (own, gradients) = found
    np.testing.assert_allclose(own[1], plain[1], rtol=1e-6, atol=1e-6)
    for name, leaf in plain_gradients[0].items():
        np.testing.assert_allclose(gradients[0].pop(name), leaf, rtol=1e-6, atol=1e-6)
    assert all(not leaf.any() for leaf in gradients[0].values()) and len(gradients[0]) == 5
    np.testing.assert_allclose(gradients[1], plain_gradients[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_decoding_with_index_cache_equals_full_forward(stage: Any) -> None:
    """Decode chunks of different sizes across a document boundary, with spare cache capacity."""
    part = part_with(stage)
    module = LatentAttention(part, RULES)
    with_values(module, **values())
    x, (segments, positions) = jnp.asarray(arrays()[0], jnp.float32), packed(LENGTHS)
    whole = jax.jit(lambda x: module(x, context(segments, positions)).x)(x)
    cache = module.empty_cache(part, 2, 11, jnp.dtype("float32"))
    stored = RANK + ROPE + INDEX_DIM
    assert sum(leaf.size for leaf in (cache.key, cache.value)) == 2 * 11 * stored
    parts = []

    @jax.jit
    def extended(x: Any, segments: Any, positions: Any, cache: Any) -> Any:
        return module(x, context(segments, positions, cache=cache))

    for start, stop in ((0, 4), (4, 5), (5, 9)):
        piece = slice(start, stop)
        found = extended(x[:, piece], segments[:, piece], positions[:, piece], cache)
        cache = found.cache
        parts.append(found.x)
    assert_close(jnp.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("select", [largest_entries, largest_keys])
def test_lower_positions_win_ties(select: Any) -> None:
    scores = jnp.asarray(
        [
            [2.0, 1.0, 1.0, 3.0, 1.0, 1.0],
            [0.0, -0.0, 0.0, -0.0, 0.0, -1.0],
            [-jnp.inf, 5.0, -jnp.inf, 5.0, 5.0, 5.0],
        ]
    )
    found = jax.jit(select, static_argnums=1)(scores[None], 3)[0]
    assert found.astype(int).tolist() == [
        [1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 0, 1, 1, 0],
    ]


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_running_count_equals_cumulative_sum(size: int) -> None:
    entries = np.random.default_rng(size).random((2, 3, size)) < 0.7
    found = running_count(jnp.asarray(entries))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, entries.cumsum(axis=-1))


@pytest.mark.parametrize("by_blocks", [False, True])
def test_selection_respects_documents_and_order(
    by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All scores are equal, so that each token selects the first keys of its document."""
    if by_blocks:
        monkeypatch.setattr(indexer_module, "query_blocks", lambda tokens: BLOCKS)
    segments, _ = packed(LENGTHS)
    index = IndexArrays(jnp.zeros((2, 9, 3, 4)), jnp.ones((2, 9, 4)), jnp.ones((2, 9, 3)))
    found = np.asarray(select_keys(index, Mask(jnp.asarray(segments)), 2, RULES))
    for row, token in np.ndindex(2, 9):
        start = int(np.argmax(segments[row] == segments[row, token]))
        wanted = np.zeros(9, bool)
        wanted[start : min(start + 2, token + 1)] = True
        assert found[row, token].tolist() == wanted.tolist()
    assert select_keys(index, Mask(jnp.asarray(segments)), 9, RULES) is None


def test_empty_slots_and_zero_inputs_give_finite_results() -> None:
    part = part_with()
    w = with_values(LatentAttention(part, RULES))
    zeros = np.zeros((2, 9), np.int32)

    def total(w: Any, x: Any) -> Any:
        found = apply(part, w, x, segment_ids=zeros, positions=zeros, loss_mask=0.0 * zeros)
        return found.x.sum() + found.losses[LOSS]

    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), w)
    found = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(narrow, jnp.zeros((2, 9, D)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_backends_without_selected_keys_are_unsupported() -> None:
    sparse, dense = part_with(), part_with("dense")
    backends = {name: replace(sparse, backend=name).unsupported for name in CANNOT}
    assert {name for name, lacks in backends.items() if "index_topk" not in lacks} == {
        "auto",
        "xla",
        "blockwise",
    }
    assert replace(dense, backend="splash").unsupported == frozenset()
