"""Gemma 4 compared with an independent forward pass in numpy; each feature is enabled alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models.config import ModelConfig
from maxpipe.models.gemma4 import Gemma4Config
from maxpipe.models.registry import describe
from maxpipe.nn.decoder import Decoder
from tests.cases import keeping
from tests.nn.parts import RULES, assert_close, packed

PLAIN = Gemma4Config(
    sliding_window=64, sliding_window_pattern=3, global_head_dim=10, final_logit_softcapping=0.0
)
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 3},
    "pattern": {"sliding_window_pattern": 2},
    "local theta": {"local_rope_theta": 20.0},
    "global head dim": {"global_head_dim": 6},
    "global kv heads": {"num_global_kv_heads": 3},
    "proportional rope": {"global_rotary_dim": 4},
    "rope factor": {"rope_factor": 4.0},
    "keys as values": {"attention_k_eq_v": True},
    "soft cap": {"final_logit_softcapping": 1.5},
    "experts": {"num_experts": 5, "top_k": 2, "d_expert": 14},
    "shared keys and values": {"num_kv_shared_layers": 2},
    "wide mlp": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "per-layer embeddings": {"hidden_size_per_layer_input": 7},
    "larger tables": {"hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 41},
}
ALL = {name: value for feature in FEATURES.values() for name, value in feature.items()}
CONFIG = ModelConfig(
    family="gemma4",
    num_layers=5,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=28,
    vocab_size=37,
    tied_embeddings=True,
    rope_theta=300.0,
    norm_epsilon=0.01,  # bounds the rounding errors of small vectors
    compute_dtype="float32",
    own=PLAIN,
)
LENGTHS = [[9], [2, 4, 3]]
Weights = dict[str, Any]


def config_of(own: dict[str, Any]) -> ModelConfig:
    return replace(CONFIG, own=replace(PLAIN, **own))


def normed(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`x [tokens, heads, size]` of one document that starts at position 0."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def frequencies(own: Gemma4Config, size: int, is_global: bool) -> np.ndarray:
    half = size // 2
    theta = CONFIG.rope_theta if is_global else own.local_rope_theta
    found = theta ** -(np.arange(half) / half)
    if is_global:
        found[own.global_rotary_dim // 2 or half :] = 0
        found /= own.rope_factor
    return found


def attention(
    own: Gemma4Config, w: Weights, x: np.ndarray, is_global: bool, kept: dict[bool, Any]
) -> np.ndarray:
    """`kept` has the last keys and values of each type of layer."""
    query = np.einsum("td,dnh->tnh", x, w["query"])
    turns = frequencies(own, query.shape[-1], is_global)
    query = rotated(normed(query, w["query_norm"]), turns)
    if "key" in w:
        key = value = np.einsum("td,dgh->tgh", x, w["key"])
        if not (own.attention_k_eq_v and is_global):
            value = np.einsum("td,dgh->tgh", x, w["value"])
        kept[is_global] = rotated(normed(key, w["key_norm"]), turns), normed(value)
    key, value = kept[is_global]
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, groups, axis=1) for each in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key)
    tokens = np.arange(len(x))
    distance = tokens[:, None] - tokens
    seen = (distance >= 0) & (is_global | (distance < own.sliding_window))
    shares = np.exp(np.where(seen, scores, -np.inf))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("nts,snh,nhd->td", shares, value, w["out"])


def mlp(w: Weights, x: np.ndarray) -> np.ndarray:
    return (gelu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def experts(own: Gemma4Config, w: Weights, x: np.ndarray) -> np.ndarray:
    """Loop over tokens and their experts."""
    inputs, out = normed(x, w["input_norm"]), np.zeros_like(x)
    routed = normed(x, w["router_norm"]) / math.sqrt(CONFIG.d_model)
    for token in range(len(x)):
        logits = routed[token] @ w["router"]
        shares = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-shares)[: own.top_k]
        for expert in best:
            each = {name: np.moveaxis(w[name], 1, 0)[expert] for name in ("gate", "up")}
            weight = shares[expert] / shares[best].sum() * w["expert_scale"][expert]
            out[token] += weight * mlp({**each, "down": w["down"][expert]}, inputs[token])
    return out


def feed_forward(own: Gemma4Config, w: Weights, x: np.ndarray) -> np.ndarray:
    if not own.num_experts:
        inner = mlp(w["mlp"], normed(x, w["mlp_norm"]["scale"]))
        return normed(inner, w["mlp_after_norm"]["scale"])
    dense = mlp(w["dense"], normed(x, w["dense_norm"]["scale"]))
    total = normed(dense, w["dense_after_norm"]["scale"])
    total += normed(experts(own, w["experts"], x), w["experts_after_norm"]["scale"])
    return normed(total, w["experts_sum_norm"]["scale"])


def per_layer(
    w: Weights, x: np.ndarray, embedded: np.ndarray, scale: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """`embedded` is the output of the embedding; `scale` belongs to the first layer's norm."""
    own = normed(embedded @ w["project"] / math.sqrt(CONFIG.d_model), scale)
    own = (own + w["table"][tokens] * math.sqrt(w["table"].shape[1])) / math.sqrt(2)
    return (gelu(x @ w["gate"]) * own) @ w["out"]


def document_logits(own: Gemma4Config, params: Weights, tokens: np.ndarray) -> np.ndarray:
    x = embedded = params["embedding"][tokens] * math.sqrt(CONFIG.d_model)
    used = dict.fromkeys(params["layers"], 0)
    kept: dict[bool, Any] = {}
    scale = np.ones(())
    for layer in range(CONFIG.num_layers):
        is_global = layer == CONFIG.num_layers - 1 or (layer + 1) % own.sliding_window_pattern == 0
        kind = "global" if is_global else "local"
        kind += "_shared" * (layer >= CONFIG.num_layers - own.num_kv_shared_layers)
        kind = "first" if own.hidden_size_per_layer_input and not layer else kind
        w = jax.tree.map(lambda leaf, i=used[kind]: leaf[i], params["layers"][kind])
        used[kind] += 1
        inner = normed(x, w["attention_norm"]["scale"])
        inner = attention(own, w["attention"], inner, is_global, kept)
        x = x + normed(inner, w["attention_after_norm"]["scale"])
        x = x + feed_forward(own, w, x)
        if own.hidden_size_per_layer_input:
            scale = w["per_layer"].get("scale", scale)
            inner = per_layer(w["per_layer"], x, embedded, scale, tokens)
            x = x + normed(inner, w["per_layer_after_norm"]["scale"])
        x = x * w["output"]["scale"]
    logits = normed(x, params["final_norm"]["scale"]) @ params["embedding"].T
    cap = own.final_logit_softcapping
    return cap * np.tanh(logits / cap) if cap else logits


def params_of(config: ModelConfig) -> Weights:
    """Random parameters, including those that are initialized to constants."""
    drawn = jax.device_get(jax.jit(Decoder(config, RULES).init)(jax.random.key(3)))
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * generator.normal(size=leaf.shape).astype(leaf.dtype), drawn
    )


def batch_of(lengths: list[list[int]]) -> dict[str, Any]:
    segments, positions = packed(lengths)
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, segments.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def reference(own: Gemma4Config, params: Weights, batch: dict[str, Any]) -> np.ndarray:
    """Return the logits of all documents of a batch."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    rows = []
    for row, lengths in enumerate(LENGTHS):
        documents = np.split(batch["tokens"][row], np.cumsum(lengths)[:-1])
        rows.append(np.concatenate([document_logits(own, wide, each) for each in documents]))
    return np.stack(rows)


@pytest.mark.parametrize("feature", ["none", *FEATURES, "all"])
def test_each_feature_alone_equals_reference(feature: str) -> None:
    changed = {"none": {}, "all": ALL}.get(feature) or FEATURES.get(feature, {})
    config = config_of(changed)
    params, batch = params_of(config), batch_of(LENGTHS)
    found = np.asarray(jax.jit(Decoder(config, RULES).apply)(params, batch))
    assert_close(found, reference(config.own, params, batch))
    if changed and shapes(config.own) == shapes(PLAIN):
        without = reference(PLAIN, params, batch)
        assert np.abs(without - found).max() > 1e-3 * np.abs(found).max()


def shapes(own: Gemma4Config) -> Any:
    """Return the parameter shapes, which most features change."""
    build = Decoder(replace(CONFIG, own=own), RULES).init
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(build, jax.random.key(0)))


@pytest.mark.parametrize("feature", keeping(["none", "all"], 1))
def test_cached_decoding_equals_full_forward(feature: str) -> None:
    config = config_of(ALL if feature == "all" else {})
    decoder, params, batch = Decoder(config, RULES), params_of(config), batch_of(LENGTHS)
    whole = jax.jit(decoder.apply)(params, batch)
    caches, parts = decoder.empty_caches(2, 10), []
    extend = jax.jit(decoder.extend)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        piece = {name: leaf[:, start:stop] for name, leaf in batch.items()}
        logits, caches = extend(params, piece, caches)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("gemma4.num_kv_shared_layers=57", "Set model.gemma4.num_kv_shared_layers=54."),
        ("gemma4.vocab_size_per_layer_input=9", "must be at least model.vocab_size (262144)"),
        ("tied_embeddings=false", "must be true with model.family=gemma4"),
        ("gemma4.num_global_kv_heads=3", "must divide model.num_heads (32)"),
        ("gemma4.global_head_dim=3", "Set model.gemma4.global_head_dim=4."),
        ("gemma4.global_rotary_dim=514", "at most model.gemma4.global_head_dim (512)"),
        ("gemma4.global_rotary_dim=3", "Set model.gemma4.global_rotary_dim=0"),
        ("gemma4.num_experts=1", "must be at most model.gemma4.num_experts (1)"),
    ],
)
def test_invalid_keys_are_rejected(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["gemma4-31b", "train.steps=1", f"model.{key}"])
    assert text in str(caught.value)


def test_multi_token_prediction_layers_are_rejected_if_layers_use_earlier_arrays() -> None:
    with pytest.raises(ConfigError, match=r"Set model.mtp_kind=projection"):
        load(["gemma4-e2b", "train.steps=1", "model.mtp_heads=1", "model.mtp_kind=layer"])


def test_published_small_sizes_share_keys_and_values_in_the_last_layers() -> None:
    model = describe(load(["gemma4-e2b", "train.steps=1"]).config.model)
    assert model.layers[13:16] == ("local", "global", "local_shared")
    assert "key" not in model.layer_types["local_shared"].parts["attention"].params
    assert model.stream_width == 2 * 1536 + 256 + 2 * (256 + 512)
    wide = model.layer_types["global_shared"].parts["mlp"].params["up"]
    assert wide.shape == (1536, 2 * 6144)
