"""Attention against plain numpy loops that follow the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxpipe.config.schema import MeshConfig, ModelConfig
from maxpipe.model.attention import Attention, attend, rotary_frequencies, rotate
from maxpipe.parallel.sharding import AxisRules

RULES = AxisRules.from_config(MeshConfig())


def make_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "d_model": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "d_mlp": 24,
        "vocab_size": 32,
        "compute_dtype": "float32",
    }
    return ModelConfig(**sizes | changes)


def assert_close(got: Any, wanted: Any) -> None:
    """Float32: 1e-5 of the largest value."""
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def angles_of(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair, after the released Llama 3.1 code."""
    angles = []
    for pair in range(config.head_size // 2):
        angle = 1.0 / config.rope_theta ** (2 * pair / config.head_size)
        wave_tokens = 2 * math.pi / angle
        original = config.rope_original_tokens
        if config.rope_scaling == 1.0 or wave_tokens < original / 4:
            angles.append(angle)
        elif wave_tokens > original / 1:
            angles.append(angle / config.rope_scaling)
        else:
            smooth = (original / wave_tokens - 1) / (4 - 1)
            angles.append((1 - smooth) * angle / config.rope_scaling + smooth * angle)
    return np.array(angles)


def turned(vector: np.ndarray, position: int, angles: np.ndarray) -> np.ndarray:
    """One head's vector with pair (i, i + H/2) as a complex number."""
    half = len(vector) // 2
    pairs = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * angles)
    return np.concatenate([pairs.real, pairs.imag])


def reference(
    weights: dict[str, np.ndarray],
    x: np.ndarray,
    segments: np.ndarray,
    positions: np.ndarray,
    config: ModelConfig,
) -> np.ndarray:
    """Token by token and head by head in float64."""
    angles = angles_of(config)
    share = config.num_heads // config.num_kv_heads
    out = np.zeros_like(x)
    for b, t, n in np.ndindex(*x.shape[:2], config.num_heads):
        g = n // share
        query = turned(x[b, t] @ weights["query"][:, n], int(positions[b, t]), angles)
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        scores = np.array(
            [
                query @ turned(x[b, s] @ weights["key"][:, g], int(positions[b, s]), angles)
                for s in seen
            ]
        ) / math.sqrt(config.head_size)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        mixed = sum(
            p * (x[b, s] @ weights["value"][:, g]) for p, s in zip(shares, seen, strict=True)
        )
        out[b, t] += mixed @ weights["out"][n]
    return out


def packed(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions of rows that hold documents of these lengths."""
    ids = [np.repeat(1 + np.arange(len(row)), row) for row in lengths]
    positions = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    return np.stack(ids), np.stack(positions)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 4, "num_kv_heads": 2},
        {"num_heads": 6, "num_kv_heads": 1},
        {"rope_scaling": 8.0, "rope_original_tokens": 32, "rope_theta": 50.0},
    ],
    ids=["full heads", "grouped", "one kv head", "stretched"],
)
def test_attention_equals_the_plain_loops(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    module = Attention(config, RULES, nnx.Rngs(params=jax.random.key(0)))
    weights = {
        name: np.asarray(getattr(module, name)[...], np.float64)
        for name in ("query", "key", "value", "out")
    }
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 9, config.d_model)))
    segments, positions = packed([[9], [2, 4, 3]])
    positions = positions + np.array([[40], [0]])  # a cut document goes on where it stopped
    got = jax.jit(module.__call__)(x, segments, positions)
    assert got.dtype == jnp.float32
    assert_close(got, reference(weights, x.astype(np.float64), segments, positions, config))


def test_a_token_sees_the_past_of_its_own_document_only() -> None:
    config = make_config()
    module = Attention(config, RULES, nnx.Rngs(params=jax.random.key(0)))
    segments, positions = packed([[3, 5]])

    def last_token(x: jax.Array, t: int) -> jax.Array:
        return module(x, jnp.asarray(segments), jnp.asarray(positions))[0, t].sum()

    x = jax.random.normal(jax.random.key(1), (1, 8, config.d_model))
    influence = jax.jit(jax.vmap(jax.grad(last_token), in_axes=(None, 0)))(x, jnp.arange(8))
    sees = np.abs(np.asarray(influence[:, 0])).max(axis=-1) > 0
    causal = np.tril(np.ones((8, 8), bool))
    np.testing.assert_array_equal(sees, causal & (segments == segments.T))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500000.0, "head_size": 64},
        {"rope_theta": 500000.0, "head_size": 128, "rope_scaling": 8.0},
        {"rope_theta": 500000.0, "head_size": 64, "rope_scaling": 32.0},
        {"head_size": 32, "rope_scaling": 4.0, "rope_original_tokens": 64},
    ],
)
def test_rotary_frequencies_follow_llama(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    got = rotary_frequencies(config)
    assert got.shape == (config.head_size // 2,) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, angles_of(config), rtol=1e-5)


def test_stretching_leaves_short_waves_and_divides_long_ones() -> None:
    plain = make_config(rope_theta=500000.0, head_size=128)
    stretched = make_config(rope_theta=500000.0, head_size=128, rope_scaling=8.0)
    before, after = np.asarray(rotary_frequencies(plain)), np.asarray(rotary_frequencies(stretched))
    waves = 2 * np.pi / before
    np.testing.assert_array_equal(after[waves < 8192 / 4], before[waves < 8192 / 4])
    np.testing.assert_allclose(after[waves > 8192], before[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert (after < before)[between].all() and (after > before / 8)[between].all()


def test_rotation_keeps_lengths_and_depends_on_distances_only() -> None:
    config = make_config()
    frequencies = rotary_frequencies(config)
    query, key = np.asarray(jax.random.normal(jax.random.key(0), (2, 1, 6, 3, config.head_size)))
    positions = jnp.arange(6)[None]
    at = rotate(jnp.asarray(query), positions, frequencies)
    assert_close(np.linalg.norm(at, axis=-1), np.linalg.norm(query, axis=-1))
    np.testing.assert_array_equal(at[:, 0], query[:, 0])

    def scores(shift: int) -> jax.Array:
        turned_query = rotate(jnp.asarray(query), positions + shift, frequencies)
        turned_key = rotate(jnp.asarray(key), positions + shift, frequencies)
        return jnp.einsum("btnh,bsnh->bnts", turned_query, turned_key)

    assert_close(scores(17), scores(0))


def test_rotation_of_half_precision_is_done_in_float32() -> None:
    config = make_config()
    x = jax.random.normal(jax.random.key(0), (1, 4, 1, config.head_size)).astype(jnp.bfloat16)
    positions = jnp.array([[0, 1, 500, 8191]])
    got = rotate(x, positions, rotary_frequencies(config))
    exact = rotate(x.astype(jnp.float32), positions, rotary_frequencies(config))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("block", [2, 4, 6])
def test_blocks_of_queries_change_nothing(block: int) -> None:
    """Value and gradients, across segments that end inside a block."""
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, 12, 4, 8))
    key, value = (jax.random.normal(k, (2, 12, 2, 8)) for k in keys[1:3])
    weight = jax.random.normal(keys[3], query.shape)
    segments = jnp.array([[1] * 5 + [2] * 7, [1] * 9 + [2] * 3])

    def total(query: jax.Array, key: jax.Array, value: jax.Array, block: int) -> jax.Array:
        return (attend(query, key, value, segments, "xla", block) * weight).sum()

    run = jax.value_and_grad(total, argnums=(0, 1, 2))
    wanted_value, wanted = run(query, key, value, 12)
    found_value, found = run(query, key, value, block)
    np.testing.assert_allclose(found_value, wanted_value, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)


def test_long_sequences_go_through_blocks() -> None:
    """A block scores no key behind its own end: fewer operations than the whole square."""
    shape = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def flops(block: int) -> float:
        run = lambda q, k, v, ids: attend(q, k, v, ids, "xla", block)  # noqa: E731
        cost: Any = jax.jit(run).lower(shape, shape, shape, ids).compile().cost_analysis()
        return cost["flops"]

    assert flops(0) < 0.7 * flops(1024)
