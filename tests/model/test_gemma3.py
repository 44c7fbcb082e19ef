"""Gemma 3 compared with an independent forward pass that follows its released code."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models.config import ModelConfig
from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.registry import describe
from maxpipe.nn.decoder import Decoder
from tests.nn.parts import RULES, assert_close, packed

OWN = Gemma3Config(
    sliding_window=3,
    sliding_window_pattern=3,
    local_rope_theta=20.0,
    rope_factor=4.0,
    query_pre_attn_scalar=11.0,
)
CONFIG = ModelConfig(
    family="gemma3",
    num_layers=4,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=28,
    vocab_size=37,
    tied_embeddings=True,
    rope_theta=300.0,
    norm_epsilon=1e-4,
    compute_dtype="float32",
    own=OWN,
)
LENGTHS = [[9], [2, 4, 3]]


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * (1 + weight)


def rotated(x: np.ndarray, theta: float, factor: float) -> np.ndarray:
    """`x [tokens, heads, size]` of one document that starts at position 0."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(np.arange(half) / half) / factor
    angles = np.arange(len(x))[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(w: dict[str, np.ndarray], x: np.ndarray, is_global: bool) -> np.ndarray:
    theta, factor = (300.0, 4.0) if is_global else (20.0, 1.0)
    query = normed(np.einsum("td,dnh->tnh", x, w["query"]), w["query_norm"])
    key = normed(np.einsum("td,dgh->tgh", x, w["key"]), w["key_norm"])
    value = np.einsum("td,dgh->tgh", x, w["value"])
    query, key = rotated(query, theta, factor), rotated(key, theta, factor)
    key, value = (np.repeat(each, 3, axis=1) for each in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / math.sqrt(11.0)
    tokens = np.arange(len(x))
    distance = tokens[:, None] - tokens
    seen = (distance >= 0) & (is_global | (distance < 3))
    shares = np.exp(np.where(seen, scores, -np.inf))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("nts,snh,nhd->td", shares, value, w["out"])


def mlp(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate = x @ w["gate"]
    gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * (x @ w["up"])) @ w["down"]


def document_logits(params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    x = params["embedding"][tokens] * math.sqrt(CONFIG.d_model)
    for layer in range(CONFIG.num_layers):
        w = jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]["layer"])
        inner = attention(w["attention"], normed(x, w["attention_norm"]["scale"]), layer == 2)
        x = x + normed(inner, w["attention_after_norm"]["scale"])
        inner = mlp(w["mlp"], normed(x, w["mlp_norm"]["scale"]))
        x = x + normed(inner, w["mlp_after_norm"]["scale"])
    return normed(x, params["final_norm"]["scale"]) @ params["embedding"].T


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    """Random parameters, including the norm scales."""
    drawn = jax.jit(Decoder(CONFIG, RULES).init)(jax.random.key(3))
    generator = np.random.default_rng(0)

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        is_scale = "norm" in jax.tree_util.keystr(path)
        return leaf + 0.3 * generator.normal(size=leaf.shape) if is_scale else leaf

    return jax.tree_util.tree_map_with_path(changed, drawn)


def batch_of(lengths: list[list[int]]) -> dict[str, Any]:
    segments, positions = packed(lengths)
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, segments.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def test_logits_equal_released_code(params: dict[str, Any]) -> None:
    batch = batch_of(LENGTHS)
    got = jax.jit(Decoder(CONFIG, RULES).apply)(params, batch)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            wanted = document_logits(wide, batch["tokens"][row, start:end])
            assert_close(got[row, start:end], wanted)


def test_cached_decoding_equals_full_forward(params: dict[str, Any]) -> None:
    decoder, batch = Decoder(CONFIG, RULES), batch_of(LENGTHS)
    whole = jax.jit(decoder.apply)(params, batch)
    caches, parts = decoder.empty_caches(2, 10), []
    extend = jax.jit(decoder.extend)
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        piece = {name: leaf[:, start:stop] for name, leaf in batch.items()}
        logits, caches = extend(params, piece, caches)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole)


def test_layers_share_one_type_and_differ_only_in_values() -> None:
    model = describe(CONFIG)
    assert model.layers == ("layer",) * 4
    assert model.values["window"] == (3, 3, 0, 3)
    assert model.values["rope_theta"] == (20.0, 20.0, 300.0, 20.0)
    assert model.values["rope_factor"] == (1.0, 1.0, 4.0, 1.0)
    large = describe(load(["gemma3-27b", "train.steps=1"]).config.model)
    sees_all = [number for number, window in enumerate(large.values["window"], 1) if not window]
    assert sees_all == list(range(6, 62, 6))


def test_untied_embeddings_are_rejected() -> None:
    with pytest.raises(ConfigError, match="must be true with model.family=gemma3"):
        load(["gemma3-1b", "train.steps=1", "model.tied_embeddings=false"])
