"""Multi-head latent attention compared with numpy loops that follow the paper's formulas."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import latent_attention
from maxpipe.models.layers.attention import Rope
from maxpipe.nn.latent_attention import LatentAttention
from tests.nn.parts import RULES, assert_close, context, packed, with_values

D, ROPE, REST, VALUE, RANK = 18, 4, 6, 10, 7
EPSILON = 1e-3
LENGTHS = [[9], [2, 4, 3]]


def part_with(
    q_lora_rank: int = 5, heads: int = 3, length: float = 1.3
) -> latent_attention.LatentAttention:
    rope = Rope(50.0, rotary_dims=ROPE, attention_factor=length)
    return latent_attention.LatentAttention(
        D, heads, REST + ROPE, VALUE, RANK, q_lora_rank, 0.5, "xla", rope, 0.3, EPSILON
    )


def values(part: latent_attention.LatentAttention) -> dict[str, Any]:
    """Return norm scales that differ from their initial values."""
    scales = {"key_value_norm": np.linspace(-0.5, 1, RANK)}
    if part.q_lora_rank:
        scales["query_norm"] = np.linspace(1, -0.3, part.q_lora_rank)
    return scales


def turned(vector: np.ndarray, position: int, length: float) -> np.ndarray:
    """Rotate a vector; pairs (2i, 2i + 1) are complex numbers."""
    angles = 50.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    pairs = (vector[0::2] + 1j * vector[1::2]) * np.exp(1j * position * angles) * length
    return np.stack([pairs.real, pairs.imag], -1).ravel()


def normed(vector: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return vector / math.sqrt((vector**2).mean() + EPSILON) * scale


def reference(
    w: dict[str, np.ndarray],
    x: np.ndarray,
    segments: np.ndarray,
    positions: np.ndarray,
    part: latent_attention.LatentAttention,
) -> np.ndarray:
    """Compute latent attention by token and head in float64."""

    def query(b: int, t: int, n: int) -> np.ndarray:
        if part.q_lora_rank:
            vector = normed(x[b, t] @ w["query_down"], w["query_norm"]) @ w["query_up"][:, n]
        else:
            vector = x[b, t] @ w["query"][:, n]
        last = turned(vector[REST:], int(positions[b, t]), part.rope.attention_factor)
        return np.concatenate([vector[:REST], last])

    def key_and_value(b: int, s: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        small = normed(x[b, s] @ w["key_value_down"], w["key_value_norm"])
        both = small @ w["key_value_up"][:, n]
        last = turned(x[b, s] @ w["rope_key"], int(positions[b, s]), part.rope.attention_factor)
        return np.concatenate([both[:REST], last]), both[REST:]

    out = np.zeros_like(x)
    for b, t, n in np.ndindex(*x.shape[:2], part.num_heads):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        keys, mixed = zip(*(key_and_value(b, s, n) for s in seen), strict=True)
        scores = np.stack(keys) @ query(b, t, n) * part.scale
        shares = np.exp(scores - scores.max())
        out[b, t] += (shares / shares.sum()) @ np.stack(mixed) @ w["out"][n]
    return out


@pytest.mark.parametrize("part", [part_with(), part_with(0, 4, 1.0)], ids=["low rank", "direct"])
def test_latent_attention_equals_numpy_reference(part: latent_attention.LatentAttention) -> None:
    module = LatentAttention(part, RULES)
    weights = with_values(module, **values(part))
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 9, D)))
    segments, positions = packed(LENGTHS)
    positions = positions + np.array([[40], [0]])
    got = jax.jit(lambda x: module(x, context(segments, positions)).x)(jnp.asarray(x))
    assert got.dtype == jnp.float32
    assert_close(got, reference(weights, x.astype(np.float64), segments, positions, part))


@pytest.mark.parametrize("part", [part_with(), part_with(0, 4, 1.0)], ids=["low rank", "direct"])
def test_decoding_from_latent_cache_equals_full_forward(
    part: latent_attention.LatentAttention,
) -> None:
    """Decode chunks of different sizes across a document boundary, with spare cache capacity."""
    module = LatentAttention(part, RULES)
    with_values(module, **values(part))
    x = jax.random.normal(jax.random.key(1), (2, 9, D))
    segments, positions = packed(LENGTHS)
    whole = jax.jit(lambda x: module(x, context(segments, positions)).x)(x)
    cache = module.empty_cache(part, 2, 11, jnp.dtype("float32"))
    assert sum(leaf.size for leaf in (cache.key, cache.value)) == 2 * 11 * (RANK + ROPE)
    parts = []

    @jax.jit
    def extended(x: Any, segments: Any, positions: Any, cache: Any) -> Any:
        return module(x, context(segments, positions, cache=cache))

    for start, stop in ((0, 4), (4, 5), (5, 9)):
        piece = slice(start, stop)
        found = extended(x[:, piece], segments[:, piece], positions[:, piece], cache)
        cache = found.cache
        parts.append(found.x)
    assert cache is not None and int(cache.length) == 9
    assert_close(jnp.concatenate(parts, axis=1), whole)


def test_cudnn_backend_does_not_support_smaller_value_size() -> None:
    assert part_with().unsupported == frozenset()
    fused = latent_attention.LatentAttention(
        D, 2, 8, 6, 7, 0, 1.0, "cudnn", Rope(1e4, rotary_dims=4), 0.3, 1e-6
    )
    assert fused.unsupported == {"value_size"}
