"""Attention compared with numpy loops that follow the papers' formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.schema import KEYS
from maxpipe.models.layers.attention import CANNOT, QueryScaling, Rope
from maxpipe.models.layers.attention import Attention as Part
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.attention import BACKENDS, blockwise, cudnn, splash
from maxpipe.nn.attention.interface import KVCache, Mask
from maxpipe.nn.attention.xla import attend
from maxpipe.nn.attention_layer import Attention, rotary_frequencies, rotate
from tests.nn.parts import RULES, assert_close, context, packed, with_values

D = 16
NO_CONTEXT = context([[0]], [[0]])


def part_with(num_heads: int = 4, num_kv_heads: int = 2, size: int = 8, **options: Any) -> Part:
    given: dict[str, Any] = {"rope": Rope(10000.0), **options}
    return Part(D, num_heads, num_kv_heads, size, 0.5, "xla", **given)


def angles_of(rope: Rope, size: int, theta: float, factor: float) -> np.ndarray:
    """Return the angle per position of each pair, as in the released Llama 3.1 code."""
    angles = []
    for pair in range(size // 2):
        angle = 1.0 / theta ** (2 * pair / size)
        wave_tokens = 2 * math.pi / angle
        original = rope.original_tokens
        if rope.scaling == "linear":
            angles.append(angle / factor)
        elif factor == 1.0 or wave_tokens < original / 4:
            angles.append(angle)
        elif wave_tokens > original / 1:
            angles.append(angle / factor)
        else:
            smooth = (original / wave_tokens - 1) / (4 - 1)
            angles.append((1 - smooth) * angle / factor + smooth * angle)
    return np.array(angles)


def turned(vector: np.ndarray, position: int, angles: np.ndarray) -> np.ndarray:
    """Rotate one head's vector; pairs (i, i + H/2) are complex numbers."""
    half = len(vector) // 2
    pairs = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * angles)
    return np.concatenate([pairs.real, pairs.imag])


def turned_adjacent(vector: np.ndarray, position: int, angles: np.ndarray) -> np.ndarray:
    """Rotate one head's vector; pairs (2i, 2i + 1) are complex numbers."""
    pairs = (vector[::2] + 1j * vector[1::2]) * np.exp(1j * position * angles)
    return np.stack([pairs.real, pairs.imag], -1).reshape(-1)


def reference(
    weights: dict[str, np.ndarray],
    x: np.ndarray,
    segments: np.ndarray,
    positions: np.ndarray,
    part: Part,
    numbers: Mapping[str, float],
) -> np.ndarray:
    """Compute attention by token and head in float64; `numbers` are the layer's values."""
    rope = part.rope
    theta, factor = (numbers.get(str(each), each) for each in (rope.theta, rope.factor))
    angles = angles_of(rope, rope.rotary_dims or part.head_dim, float(theta), float(factor))
    has_rope = bool(numbers.get(rope.enabled, 1.0))
    turn = turned_adjacent if rope.interleaved else turned
    window = numbers.get(part.window, 0)
    scale = part.head_dim**-0.5 if part.scale is None else part.scale

    def head(b: int, t: int, name: str, n: int) -> np.ndarray:
        vector = (x[b, t] @ weights[name][:, n])[: part.head_dim]
        if part.head_norm is not None:
            norm = part.head_norm
            vector = vector / math.sqrt((vector**2).mean() + norm.epsilon)
            vector = vector * (norm.offset + weights[f"{name}_norm"])
        end = rope.rotary_dims or part.head_dim
        if has_rope:
            first = turn(vector[:end], int(positions[b, t]), angles)
            vector = np.concatenate([first, vector[end:]])
        if part.rotary_norm is not None and has_rope:
            vector = vector / math.sqrt((vector**2).mean() + part.rotary_norm.epsilon)
        if part.query_scaling is not None and name == "query":
            scaling, place = part.query_scaling, int(positions[b, t])
            beta = float(numbers.get(str(scaling.beta), scaling.beta))
            periods = (place + scaling.offset) // scaling.tokens
            vector = vector * (1 + beta * math.log(1 + periods))
        return vector

    share = part.num_heads // part.num_kv_heads
    out = np.zeros_like(x)
    for b, t, n in np.ndindex(*x.shape[:2], part.num_heads):
        g = n // share
        query = head(b, t, "query", n)
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        if window and part.chunked:
            seen = [s for s in seen if positions[b, s] // window == positions[b, t] // window]
        elif window:
            seen = [s for s in seen if t - s < window]
        scores = np.array([query @ head(b, s, "key", g) for s in seen]) * scale
        if part.soft_cap:
            scores = part.soft_cap * np.tanh(scores / part.soft_cap)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        mixed = sum(
            p * (x[b, s] @ weights["value"][:, g]) for p, s in zip(shares, seen, strict=True)
        )
        if part.gated:
            gate = (x[b, t] @ weights["query"][:, n])[part.head_dim :]
            mixed = mixed / (1 + np.exp(-gate))
        out[b, t] += mixed @ weights["out"][n]
    return out


VALUES = {"window": (0.0, 3.0), "theta": (50.0, 7.0), "factor": (8.0, 1.0)}
VALUES |= {"has_rope": (0.0, 1.0), "scaling": (0.7, 0.0)}
"""Values of two layers."""
NORM = RMSNorm(8, 1e-3, offset=1.0)
L2 = RMSNorm(8, 1e-3, scaled=False)


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        (part_with(4, 4), [0]),
        (part_with(4, 2), [0]),
        (part_with(6, 1), [0]),
        (part_with(rope=Rope(50.0, 8.0, "llama3", 32)), [0]),
        (part_with(rope=Rope(50.0, 8.0)), [0]),
        (part_with(6, 2, window="window", rope=Rope("theta", "factor"), scale=0.2), [0, 1]),
        (part_with(soft_cap=0.7, head_norm=NORM, window="window"), [1]),
        (part_with(6, 2, gated=True, head_norm=NORM, rope=Rope(50.0, rotary_dims=2)), [0]),
        (part_with(rope=Rope(50.0, enabled="has_rope")), [0, 1]),
        (part_with(rope=Rope(50.0, interleaved=True)), [0]),
        (part_with(query_scaling=QueryScaling(0.7, 3)), [0]),
        (part_with(query_scaling=QueryScaling("scaling", 3, 1)), [0, 1]),
        (part_with(rotary_norm=L2), [0]),
        (part_with(rotary_norm=L2, rope=Rope(50.0, enabled="has_rope")), [0, 1]),
        (part_with(window="window", chunked=True), [0, 1]),
        (
            part_with(
                *(6, 2),
                **{"rope": Rope(50.0, enabled="has_rope", interleaved=True), "rotary_norm": L2},
                **{"query_scaling": QueryScaling("scaling", 3, 1)},
                **{"window": "window", "chunked": True},
            ),
            [0, 1],
        ),
    ],
    ids=[
        *("full heads", "grouped", "one kv head", "stretched", "linear"),
        *("by layer", "soft cap", "gated"),
        *("layers without rope", "adjacent pairs", "scaled queries", "scaled queries by layer"),
        *("rotary norm", "rotary norm by layer", "chunks", "llama 4"),
    ],
)
def test_attention_equals_numpy_reference(part: Part, layers: list[int]) -> None:
    module = Attention(part, RULES)
    change: dict[str, Any] = {
        "query_norm": np.linspace(-0.5, 1, 8),
        "key_norm": np.linspace(1, -0.3, 8),
    }
    weights = with_values(module, **(change if part.head_norm else {}))
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 9, D)))
    segments, positions = packed([[9], [2, 4, 3]])
    positions = positions + np.array([[40], [0]])  # a document that was cut continues its positions
    run = jax.jit(lambda x, i: module(x, context(segments, positions, i, VALUES)).x)
    for layer in layers:
        got = run(x, layer)
        assert got.dtype == jnp.float32
        numbers = {name: values[layer] for name, values in VALUES.items()}
        wide = x.astype(np.float64)
        assert_close(got, reference(weights, wide, segments, positions, part, numbers))


@pytest.mark.parametrize("backend", ["blockwise", "splash"])
def test_chunks_are_equal_for_all_backends(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks span blocks of tokens; one of the two layers has no chunks."""
    monkeypatch.setitem(BACKENDS, "splash", partial(splash.attend, interpret=True))
    monkeypatch.setattr(blockwise, "unrolled_blocks", lambda *_: ())
    values = {"window": (0.0, 90.0)}
    segments, positions = packed([[256], [60, 196]])
    x = jax.random.normal(jax.random.key(1), (2, 256, D))

    def run_with(backend: str) -> Any:
        part = dataclasses.replace(part_with(window="window", chunked=True), backend=backend)
        module = Attention(part, RULES)
        with_values(module)

        def both(x: jax.Array, layer: int) -> tuple[jax.Array, jax.Array]:
            here = context(segments, positions, layer, values)
            out, pullback = jax.vjp(lambda x: module(x, here).x, x)
            return out, pullback(x)[0]

        return jax.jit(both)

    own, plain, found = run_with(backend), run_with("xla"), []
    for layer in (0, 1):
        with jax.default_matmul_precision("highest"):
            found.append(own(x, layer))
            for pair in zip(found[-1], plain(x, layer), strict=True):
                assert_close(*pair)
    assert np.abs(found[0][0] - found[1][0])[:, 90:].max() > 0.01


def test_chunks_are_contiguous_documents_for_cudnn() -> None:
    module = Attention(part_with(window="window", chunked=True), RULES)
    segments, positions = packed([[10, 3, 7], [4, 16, 0]])
    segments[1, -5:] = positions[1, -5:] = 0
    for layer, wanted in ((0, (3, 3)), (1, (4 + 1 + 3, 2 + 4 + 1))):
        inputs = context(segments, positions, layer, {"window": (0.0, 3.0)})
        ids = module._with_chunks(inputs.inputs, inputs)["segment_ids"]
        assert cudnn._documents_are_contiguous(ids)
        assert tuple(cudnn._document_starts(ids).sum(1)) == wanted
        np.testing.assert_array_equal(ids == 0, segments == 0)


def test_token_attends_only_to_past_of_own_document() -> None:
    module = Attention(part_with(), RULES)
    with_values(module)
    segments, positions = packed([[3, 5]])

    def last_token(x: jax.Array, t: int) -> jax.Array:
        return module(x, context(segments, positions)).x[0, t].sum()

    x = jax.random.normal(jax.random.key(1), (1, 8, D))
    influence = jax.jit(jax.vmap(jax.grad(last_token), in_axes=(None, 0)))(x, jnp.arange(8))
    sees = np.abs(np.asarray(influence[:, 0])).max(axis=-1) > 0
    causal = np.tril(np.ones((8, 8), bool))
    np.testing.assert_array_equal(sees, causal & (segments == segments.T))


# Rotation.


@pytest.mark.parametrize(
    ("rope", "size"),
    [
        (Rope(10000.0), 8),
        (Rope(500000.0), 64),
        (Rope(500000.0, 8.0, "llama3", 8192), 128),
        (Rope(500000.0, 32.0, "llama3", 8192), 64),
        (Rope(10000.0, 4.0, "llama3", 64), 32),
        (Rope(1000000.0, 8.0, "linear"), 256),
    ],
)
def test_rotary_frequencies_match_released_models(rope: Rope, size: int) -> None:
    got = rotary_frequencies(rope, size, NO_CONTEXT)
    assert got.shape == (size // 2,) and got.dtype == jnp.float32
    wanted = angles_of(rope, size, float(rope.theta), float(rope.factor))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths() -> None:
    before = np.asarray(rotary_frequencies(Rope(500000.0), 128, NO_CONTEXT))
    stretched = Rope(500000.0, 8.0, "llama3", 8192)
    after = np.asarray(rotary_frequencies(stretched, 128, NO_CONTEXT))
    waves = 2 * np.pi / before
    np.testing.assert_array_equal(after[waves < 8192 / 4], before[waves < 8192 / 4])
    np.testing.assert_allclose(after[waves > 8192], before[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert (after < before)[between].all() and (after > before / 8)[between].all()


def test_rotation_preserves_norms_and_depends_only_on_distance() -> None:
    frequencies = rotary_frequencies(Rope(10000.0), 8, NO_CONTEXT)
    query, key = np.asarray(jax.random.normal(jax.random.key(0), (2, 1, 6, 3, 8)))
    positions = jnp.arange(6)[None]
    at = rotate(jnp.asarray(query), positions, frequencies)
    assert_close(np.linalg.norm(at, axis=-1), np.linalg.norm(query, axis=-1))
    np.testing.assert_array_equal(at[:, 0], query[:, 0])

    def scores(shift: int) -> jax.Array:
        turned_query = rotate(jnp.asarray(query), positions + shift, frequencies)
        turned_key = rotate(jnp.asarray(key), positions + shift, frequencies)
        return jnp.einsum("btnh,bsnh->bnts", turned_query, turned_key)

    assert_close(scores(17), scores(0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("turned", "interleaved"), [(0, False), (6, False), (0, True), (6, True)])
def test_rotation_by_matmul_equals_elementwise(dtype: Any, turned: int, interleaved: bool) -> None:
    """The TPU backend gives equal values and gradients up to rounding of sums."""
    x, grad = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 8)).astype(dtype)
    positions = jnp.arange(5)[None] + jnp.asarray([[0], [700]])
    angles = rotary_frequencies(Rope(10000.0, rotary_dims=turned), 8, NO_CONTEXT)
    (wanted, back), (found, own) = (
        jax.vjp(partial(rotate_with, backend, positions, angles, interleaved), x)
        for backend in ("xla", "splash")
    )
    assert found.dtype == dtype
    rtol, atol = (2.0**-7, 2.0**-9) if dtype == jnp.bfloat16 else (0, 1e-6)
    for pair in ((found, wanted), (own(grad)[0], back(grad)[0])):
        ours, plain = (np.asarray(each, np.float32) for each in pair)
        np.testing.assert_allclose(ours, plain, rtol=rtol, atol=atol)


def rotate_with(
    backend: str, positions: jax.Array, angles: jax.Array, interleaved: bool, x: jax.Array
) -> jax.Array:
    return rotate(x, positions, angles, 1.25, backend, interleaved=interleaved)


def test_bfloat16_rotation_is_computed_in_float32() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 4, 1, 8)).astype(jnp.bfloat16)
    positions = jnp.array([[0, 1, 500, 8191]])
    frequencies = rotary_frequencies(Rope(10000.0), 8, NO_CONTEXT)
    got = rotate(x, positions, frequencies)
    exact = rotate(x.astype(jnp.float32), positions, frequencies)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


# Backends.

KEYS_OF_TEST = jax.random.split(jax.random.key(0), 4)
QUERY = jax.random.normal(KEYS_OF_TEST[0], (2, 12, 4, 8))
KEY, VALUE = (jax.random.normal(each, (2, 12, 2, 8)) for each in KEYS_OF_TEST[1:3])
SEGMENTS = jnp.array([[1] * 5 + [2] * 7, [1] * 9 + [2] * 3])
SINKS = jnp.array([0.3, -1.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (2, {}),
        (4, {"window": 3, "soft_cap": 0.9}),
        (6, {"window": jnp.int32(5), "sinks": SINKS}),
    ],
    ids=["plain", "soft cap", "sinks"],
)
def test_query_block_size_does_not_change_result(block: int, options: dict[str, Any]) -> None:
    """Compare values and gradients for segments that end inside a block."""
    weight = jax.random.normal(KEYS_OF_TEST[3], QUERY.shape)

    def total(query: jax.Array, key: jax.Array, value: jax.Array, block: int) -> jax.Array:
        return (attend(query, key, value, Mask(SEGMENTS, **options), block) * weight).sum()

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)), static_argnums=3)
    wanted_value, wanted = run(QUERY, KEY, VALUE, 12)
    found_value, found = run(QUERY, KEY, VALUE, block)
    np.testing.assert_allclose(found_value, wanted_value, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("cap", [0.05, 0.9, 20.0])
def test_soft_cap_gradients_equal_formula(cap: float) -> None:
    """Scores range from far above the cap to far below it."""
    weight = jax.random.normal(KEYS_OF_TEST[3], QUERY.shape)
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]
    seen = same & jnp.tri(12, dtype=bool)

    def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(each, 2, axis=2) for each in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 8**-0.5
        shares = jax.nn.softmax(jnp.where(seen, cap * jnp.tanh(scores / cap), -1e30), axis=-1)
        return (jnp.einsum("bnts,bsnh->btnh", shares, value) * weight).sum()

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return (attend(query, key, value, Mask(SEGMENTS, soft_cap=cap)) * weight).sum()

    found, wanted = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(QUERY, KEY, VALUE) for f in (total, plain)
    )
    jax.tree.map(assert_close, found, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": False, "window": 4, "scale": 0.3},
        {"window": 1},
        {"sinks": SINKS, "soft_cap": 2.0},
        {"window": jnp.int32(0)},
    ],
    ids=["both ways", "window both ways", "itself alone", "sinks", "whole window"],
)
def test_masks_equal_numpy_reference(options: dict[str, Any]) -> None:
    mask = Mask(SEGMENTS, **options)
    run = jax.jit(lambda query, key, value: attend(query, key, value, mask))
    got = run(QUERY, KEY, VALUE)
    query, key, value = (np.asarray(each, np.float64) for each in (QUERY, KEY, VALUE))
    wanted = np.zeros_like(query)
    for b, t, n in np.ndindex(*query.shape[:3]):
        seen = [s for s in range(12) if SEGMENTS[b, s] == SEGMENTS[b, t]]
        if mask.causal:
            seen = [s for s in seen if s <= t]
        if int(mask.window):
            seen = [s for s in seen if t - s < int(mask.window)]
        scores = key[b, seen, n // 2] @ query[b, t, n] * (mask.scale or 8**-0.5)
        if mask.soft_cap:
            scores = mask.soft_cap * np.tanh(scores / mask.soft_cap)
        shares = np.exp(scores)
        sink = 0.0 if mask.sinks is None else np.exp(float(mask.sinks[n]))
        wanted[b, t, n] = shares @ value[b, seen, n // 2] / (shares.sum() + sink)
    assert_close(got, wanted)


def test_long_sequences_use_blocks() -> None:
    """A block computes no scores beyond its end, which takes fewer FLOPs than the full square."""
    shape = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def flops(block: int) -> float:
        run = lambda q, k, v, ids: attend(q, k, v, Mask(ids), block)  # noqa: E731
        cost: Any = jax.jit(run).lower(shape, shape, shape, ids).compile().cost_analysis()
        return cost["flops"]

    assert flops(0) < 0.7 * flops(1024)


def test_every_backend_is_declared() -> None:
    assert set(BACKENDS) == set(CANNOT) == set(KEYS["model.attention"].__args__)
    assert part_with(soft_cap=1.0).unsupported == frozenset()
    fused = Part(D, 2, 1, 8, 0.5, "cudnn", Rope(10.0), soft_cap=1.0, window="window")
    assert fused.unsupported == {"soft_cap"}
    assert dataclasses.replace(fused, sinks=True).unsupported == {"soft_cap", "sinks"}


# Decoding.


@pytest.mark.parametrize(
    "part",
    [part_with(), part_with(6, 2, window="window", soft_cap=0.8, head_norm=NORM)],
    ids=["plain", "options"],
)
def test_cached_decoding_equals_full_forward(part: Part) -> None:
    """Decode chunks of different sizes across a document boundary, with spare cache capacity."""
    module = Attention(part, RULES)
    with_values(module)
    x = jax.random.normal(jax.random.key(1), (2, 9, D))
    segments, positions = packed([[9], [2, 4, 3]])
    whole = jax.jit(lambda x: module(x, context(segments, positions, 1, VALUES)).x)(x)
    cache = KVCache.empty((2, 11, part.num_kv_heads, part.head_dim), jnp.dtype("float32"))
    parts = []

    @jax.jit
    def extended(x: Any, segments: Any, positions: Any, cache: KVCache) -> Any:
        return module(x, context(segments, positions, 1, VALUES, cache))

    for start, stop in ((0, 4), (4, 5), (5, 9)):
        piece = slice(start, stop)
        found = extended(x[:, piece], segments[:, piece], positions[:, piece], cache)
        assert found.cache is not None
        cache = found.cache
        parts.append(found.x)
    assert int(cache.length) == 9
    assert_close(jnp.concatenate(parts, axis=1), whole)


def test_subset_of_queries_equals_rows_of_full_result():
    """As on a device that holds two chunks of the queries, but all keys."""
    tokens, run = 12, 2
    key = jax.random.split(jax.random.key(3), 3)
    query, keys, values = (jax.random.normal(each, (2, tokens, 2, 4)) for each in key)
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (2, tokens))))
    places = jnp.asarray([2, 3, 8, 9])

    @partial(jax.jit, static_argnums=3)
    def both(query: Any, keys: Any, values: Any, window: int) -> Any:
        whole = attend(query, keys, values, Mask(segments, window=window))
        mine = Mask(
            segments[:, places], key_segments=segments, places=places, run=run, window=window
        )
        return whole, attend(query[:, places], keys, values, mine)

    for window in (0, 3):
        whole, part = both(query, keys, values, window)
        np.testing.assert_allclose(part, whole[:, places], rtol=1e-6, atol=1e-6)
