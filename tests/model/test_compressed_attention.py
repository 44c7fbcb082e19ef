"""Attention to compressed entries compared with a float64 reference that loops over windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxpipe.models.layers.attention import CANNOT, Rope
from maxpipe.models.layers.compressed_attention import CompressedAttention as Spec
from maxpipe.models.layers.compressed_attention import Compression, EntryIndexer
from maxpipe.models.layers.indexer import LOSS
from maxpipe.nn import compressed_entries
from maxpipe.nn.compressed_attention import CompressedAttention
from maxpipe.nn.module import LayerContext
from tests.nn.parts import RULES, assert_close, context, packed, with_values

D, HEADS, SIZE, ROPE, RANK, GROUPS, GROUP_RANK = 12, 4, 10, 4, 7, 2, 5
INDEX_HEADS, INDEX_SIZE, WINDOW, EPSILON = 3, 6, 5, 1e-3
LENGTHS, TOKENS = [[24], [3, 9, 4, 8]], 24


def indexer(stage: Any = "sparse", top_k: int = 2, weight: float = 0.7) -> EntryIndexer:
    return EntryIndexer(INDEX_HEADS, INDEX_SIZE, top_k, stage, weight)


def part_with(compression: Compression | None) -> Spec:
    rope = Rope(50.0, 4.0, "yarn", 16, rotary_dims=ROPE)
    sizes = (D, HEADS, SIZE, RANK, GROUPS, GROUP_RANK, WINDOW)
    return Spec(*sizes, 0.5, "xla", rope, EPSILON, compression)


SPARSE = part_with(Compression(3, overlaps=True, indexer=indexer()))
PARTS = {
    "window": part_with(None),
    "heavy": part_with(Compression(4, overlaps=False)),
    "overlapping": part_with(Compression(3, overlaps=True)),
    "sparse": SPARSE,
    "all entries": part_with(Compression(3, overlaps=True, indexer=indexer(top_k=8))),
    "dense stage": part_with(Compression(2, overlaps=True, indexer=indexer("dense"))),
    "without overlap": part_with(Compression(2, overlaps=False, indexer=indexer(top_k=3))),
}


def values(part: Spec) -> dict[str, Any]:
    """Return parameters that differ from their initial values."""
    random = np.random.default_rng(7)
    return {
        name: 1 + 0.5 * random.standard_normal(param.shape)
        if name.endswith("norm")
        else random.standard_normal(param.shape)
        for name, param in part.params.items()
        if name.endswith(("norm", "bias", "sinks"))
    }


def arrays() -> tuple[Any, Any, Any, Any]:
    """Return inputs, segments, positions and the loss mask; padding ends the second sequence.

    The first sequence continues a document, and does not start with the first token of a window.
    """
    x = np.random.default_rng(1).standard_normal((2, TOKENS, D))
    segments, positions = packed(LENGTHS)
    segments[1, 21:], loss_mask = 0, np.ones((2, TOKENS))
    loss_mask[1, 19:] = 0
    loss_mask[0, 3] = 0
    return x, segments, positions + np.array([[41], [0]]), loss_mask


def frequencies() -> np.ndarray:
    """Return the angles per position of YaRN with a factor of 4."""
    plain = 50.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    low, high = (
        ROPE * np.log(16 / (turns * 2 * np.pi)) / (2 * np.log(50.0)) for turns in (32.0, 1.0)
    )
    low, high = max(np.floor(low), 0), min(np.ceil(high), ROPE - 1)
    ramp = np.clip((np.arange(ROPE // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - ramp + ramp / 4)


def turned(x: Any, positions: Any) -> Any:
    """Rotate the last dims of `[T, ..., h]`."""
    split = x.shape[-1] - ROPE
    angles = positions[:, None] * frequencies()
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
    first, second = x[..., split::2], x[..., split + 1 :: 2]
    cos, sin = np.cos(angles), np.sin(angles)
    pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return jnp.concatenate([x[..., :split], pairs.reshape(*x.shape[:-1], ROPE)], -1)


def normed(x: Any, scale: Any = 1.0) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def entries_of(
    w: Any, name: str, x: Any, of: Any, places: Any, how: Compression
) -> tuple[list[int], Any]:
    """Return the index of the last token, and the entry, of each complete window of a sequence."""
    value, gate = x @ w[f"{name}_value"], x @ w[f"{name}_gate"]
    size, ends, first, totals = value.shape[-1] // how.num_series, [], [], []
    for last in range(how.rate - 1, len(x)):
        tokens = range(last - how.rate + 1, last + 1)
        complete = of[last] > 0 and all(of[token] == of[last] for token in tokens)
        if not complete or places[last] % how.rate != how.rate - 1:
            continue
        parts = [(slice(tokens[0], last + 1), slice(-size, None))]
        earlier = range(tokens[0] - how.rate, tokens[0])
        if how.overlaps and earlier[0] >= 0 and all(of[token] == of[last] for token in earlier):
            parts.append((slice(earlier[0], tokens[0]), slice(size)))
        gates = [gate[rows, dims] + w[f"{name}_bias"][:, dims] for rows, dims in parts]
        shares = jax.nn.softmax(jnp.concatenate(gates), 0)
        totals.append((jnp.concatenate([value[part] for part in parts]) * shares).sum(0))
        ends.append(last)
        first.append(places[tokens[0]])
    return ends, turned(normed(jnp.stack(totals), w[f"{name}_norm"]), np.array(first))


def reference(w: Any, x: Any, part: Spec, inputs: Any) -> tuple[Any, Any]:
    """Return the output and the summed loss of the indexer."""
    stop, out, loss, how = jax.lax.stop_gradient, [], 0.0, part.compression
    for row, of, places, mask in zip(x, *inputs, strict=True):
        latent = normed(row @ w["query_down"], w["query_norm"])
        query = turned(normed(jnp.einsum("tr,rnh->tnh", latent, w["query_up"])), places)
        keys = turned(normed(row @ w["key_value"], w["key_value_norm"]), places)
        seen = np.array(
            [[0 <= t - s < WINDOW and of[t] == of[s] for s in range(TOKENS)] for t in range(TOKENS)]
        )
        log_guess, visible = None, seen[:, :0]
        if how is not None:
            ends, entries = entries_of(w, "entry", row, of, places, how)
            keys = jnp.concatenate([keys, entries])
            visible = np.array(
                [[end <= t and of[t] == of[end] for end in ends] for t in range(TOKENS)]
            )
            if part.indexer is not None:
                _, index = entries_of(w, "index", stop(row), of, places, how)
                heads = jnp.einsum("tr,rhd->thd", stop(latent), w["index_query"])
                scores = jnp.einsum("thd,ed->the", turned(heads, places), index)
                scores = jax.nn.relu(scores) * INDEX_SIZE**-0.5
                weights = stop(row) @ w["index_weights"] * INDEX_HEADS**-0.5
                scores = jnp.einsum("th,the->te", weights, scores)
                if part.indexer.is_sparse:
                    order = jnp.argsort(-jnp.where(visible, stop(scores), -jnp.inf), stable=True)
                    ranks = jnp.argsort(order, axis=-1)
                    visible = visible & (ranks < part.indexer.top_k)
                log_guess = jax.nn.log_softmax(jnp.where(visible, scores, -1e30))
            seen = jnp.concatenate([seen, visible], axis=1)
        logits = jnp.einsum("tnh,sh->nts", query, keys) * SIZE**-0.5
        logits = jnp.where(seen, logits, -jnp.inf)
        sinks = jnp.broadcast_to(w["sinks"][:, None, None], (HEADS, TOKENS, 1))
        shares = jax.nn.softmax(jnp.concatenate([logits, sinks], -1))[..., :-1]
        if log_guess is not None and part.losses:
            target = stop(shares[..., TOKENS:].sum(0))
            target /= jnp.maximum(target.sum(-1, keepdims=True), 1e-30)
            logs = jnp.log(jnp.where(visible, target, 1.0)) - log_guess
            loss += (jnp.where(visible, target * logs, 0.0).sum(-1) * mask).sum()
        mixed = turned(jnp.einsum("nts,sh->tnh", shares, keys), -places)
        mixed = jnp.einsum("tgk,gkr->tgr", mixed.reshape(TOKENS, GROUPS, -1), w["group_out"])
        out.append(jnp.einsum("tgr,grd->td", mixed, w["out"]))
    return jnp.stack(out), loss


def apply(part: Spec, w: Any, x: Any, **inputs: Any) -> Any:
    """Return the output of a module with the parameters `w`."""
    module = CompressedAttention(part, RULES)
    for name, value in w.items():
        setattr(module, name, nnx.Param(value))
    return module(x, LayerContext(jax.tree.map(jnp.asarray, inputs), jnp.asarray(0)))


BLOCKS = [(0, 6), (6, 12), (12, 18), (18, 24)]


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_output_loss_and_gradients_equal_float64_reference(
    name: str, by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_blocks:
        monkeypatch.setattr(compressed_entries, "query_blocks", lambda tokens: BLOCKS)
    part = PARTS[name]
    w = with_values(CompressedAttention(part, RULES), **values(part))
    x, segments, positions, loss_mask = arrays()
    cotangent = np.random.default_rng(3).standard_normal(x.shape)
    cotangent[segments == 0] = 0
    weight = part.losses.get(LOSS, 0.0)

    def objective(of: Any, w: Any, x: Any) -> Any:
        out, loss = of(w, x)
        return (out * cotangent).sum() + weight * loss, (out, loss)

    def run(w: Any, x: Any) -> Any:
        inputs = {"segment_ids": segments, "positions": positions, "loss_mask": loss_mask}
        found = apply(part, w, x, **inputs)
        return found.x, found.losses.get(LOSS, 0.0)

    def exact(w: Any, x: Any) -> Any:
        return reference(w, x, part, (segments, positions, loss_mask))

    grad = lambda of: jax.value_and_grad(  # noqa: E731
        lambda w, x: objective(of, w, x), argnums=(0, 1), has_aux=True
    )
    with jax.enable_x64(True):
        wanted = jax.device_get(jax.jit(grad(exact))(w, x))
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (w, x))
    cotangent = cotangent.astype(np.float32)
    with jax.default_matmul_precision("highest"):
        found = jax.device_get(jax.jit(grad(run))(*narrow))
    real = segments > 0
    assert_close(found[0][1][0][real], wanted[0][1][0][real])
    assert_close(found[0][1][1], wanted[0][1][1])
    assert (float(wanted[0][1][1]) > 0.01) == bool(weight)
    assert found[1][0].keys() == wanted[1][0].keys()
    for leaf_name, leaf in wanted[1][0].items():
        error = np.abs(found[1][0][leaf_name] - leaf).max()
        assert error <= 1e-5 * np.abs(leaf).max(), leaf_name
        assert np.abs(leaf).max() > 1e-3, leaf_name
    assert_close(found[1][1], wanted[1][1])


def outputs(part: Spec, x: Any, segments: Any, positions: Any) -> tuple[Any, Any]:
    """Return the output of a module, and the gradient of a sum of the output for the input."""
    module = CompressedAttention(part, RULES)
    with_values(module, **values(part))

    def total(x: Any) -> Any:
        out = module(x, context(segments, positions)).x
        return (jnp.sin(out) * (segments > 0)[..., None]).sum(), out

    return jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(x, jnp.float32))


@pytest.mark.parametrize("name", ["window", "heavy", "sparse"])
def test_packed_documents_equal_separate_sequences(name: str) -> None:
    """Windows start with the first token of each document, wherever it is in the sequence."""
    part = PARTS[name]
    x, (segments, positions) = arrays()[0], packed(LENGTHS)
    gradient, whole = outputs(part, x, segments, positions)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            tokens = slice(start, start + length)
            alone = outputs(
                part, x[row : row + 1, tokens], np.ones((1, length), int), np.arange(length)[None]
            )
            assert_close(whole[row : row + 1, tokens], alone[1])
            assert_close(gradient[row : row + 1, tokens], alone[0])
            start += length


@pytest.mark.parametrize("name", PARTS)
def test_later_tokens_have_no_influence(name: str) -> None:
    """The output of a token depends on exactly itself and earlier tokens."""
    part = PARTS[name]
    module = CompressedAttention(part, RULES)
    with_values(module, **values(part))
    segments, positions = packed([[TOKENS]])
    run = jax.jit(lambda x: module(x, context(segments, positions)).x)
    x = np.random.default_rng(4).standard_normal((1, TOKENS, D)).astype(np.float32)
    plain = np.asarray(run(x))
    for token in range(0, TOKENS, 5):
        changed = x.copy()
        changed[:, token] += 1.0
        differs = np.abs(np.asarray(run(changed)) - plain).max(-1)[0] > 0
        assert not differs[:token].any() and differs[token]


def test_selection_of_all_entries_equals_attention_without_indexer() -> None:
    sparse, plain = PARTS["all entries"], PARTS["overlapping"]
    assert sparse.compression is not None
    sparse = replace(
        sparse, compression=replace(sparse.compression, indexer=indexer(top_k=8, weight=0.0))
    )
    x, segments, positions, _ = arrays()
    found = []
    for part in (plain, sparse):
        module = CompressedAttention(part, RULES)
        w = with_values(module, **values(plain))

        def total(w: Any, x: Any, part: Any = part) -> Any:
            out = apply(part, w, x, segment_ids=segments, positions=positions).x
            return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out

        narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (w, x))
        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
        found.append(jax.device_get(run(*narrow)))
    (wanted, gradients), (got, own) = found
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(own[1], gradients[1], rtol=1e-6, atol=1e-5)
    for name, leaf in gradients[0].items():
        np.testing.assert_allclose(own[0].pop(name), leaf, rtol=1e-6, atol=1e-5)
    assert len(own[0]) == 6 and all(not leaf.any() for leaf in own[0].values())


@pytest.mark.parametrize("pieces", [(1,) * TOKENS, (4, 1, 7, 2, 1, 9), (TOKENS,)])
@pytest.mark.parametrize("name", PARTS)
def test_decoding_with_caches_equals_full_forward(name: str, pieces: tuple[int, ...]) -> None:
    """Decode pieces of different sizes across document boundaries, with spare cache capacity."""
    part = PARTS[name]
    module = CompressedAttention(part, RULES)
    with_values(module, **values(part))
    x, (segments, positions) = jnp.asarray(arrays()[0], jnp.float32), packed(LENGTHS)
    whole = jax.jit(lambda x: module(x, context(segments, positions)).x)(x)
    cache = module.empty_cache(part, 2, TOKENS + 5, jnp.dtype("float32"))
    assert cache.keys.shape[1] == part.cached_tokens < TOKENS

    @jax.jit
    def extended(x: Any, segments: Any, positions: Any, cache: Any) -> Any:
        return module(x, context(segments, positions, cache=cache))

    found, start = [], 0
    for size in pieces:
        piece = slice(start, start + size)
        output = extended(x[:, piece], segments[:, piece], positions[:, piece], cache)
        assert jax.tree.map(jnp.shape, output.cache) == jax.tree.map(jnp.shape, cache)
        cache, start = output.cache, start + size
        found.append(output.x)
    assert_close(jnp.concatenate(found, axis=1), whole)
    axes = CompressedAttention.cache_axes(part)
    leaves = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple) and "batch" in x[:1])
    assert len(leaves) >= len(jax.tree.leaves(cache)) - 1


def test_padding_and_zero_inputs_give_finite_results() -> None:
    w = with_values(CompressedAttention(SPARSE, RULES))
    zeros = np.zeros((2, 9), np.int32)

    def total(w: Any, x: Any) -> Any:
        found = apply(SPARSE, w, x, segment_ids=zeros, positions=zeros, loss_mask=0.0 * zeros)
        return found.x.sum() + found.losses[LOSS]

    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), w)
    found = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(narrow, jnp.zeros((2, 9, D)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_kernels_without_entries_are_unsupported() -> None:
    backends = {name: replace(SPARSE, backend=name).unsupported for name in CANNOT}
    assert {name for name, lacks in backends.items() if not lacks} == {"auto", "xla"}
