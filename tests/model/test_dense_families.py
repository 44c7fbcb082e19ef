"""Features of the dense model families compared with numpy formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.config import ModelConfig
from maxpipe.models.gemma2 import Gemma2Config
from maxpipe.models.granite import GraniteConfig
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.mistral import MistralConfig
from maxpipe.models.registry import describe
from maxpipe.nn.attention_layer import rotary_frequencies, rotate
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.module import LayerContext, rms_norm
from tests.nn.parts import RULES, assert_close

CONFIG = ModelConfig(
    num_layers=3,
    d_model=24,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=52,
    vocab_size=77,
    compute_dtype="float32",
)
NOWHERE = LayerContext({}, jnp.int32(0))


def frequencies(rope: Rope, size: int) -> np.ndarray:
    return np.asarray(rotary_frequencies(rope, size, NOWHERE), np.float64)


def test_yarn_keeps_fast_pairs_and_stretches_slow_pairs() -> None:
    theta, factor, tokens, size = 500.0, 4.0, 64, 20
    found = frequencies(Rope(theta, factor, "yarn", tokens), size)
    plain = theta ** -(np.arange(0, size, 2) / size)

    def pair(turns: float) -> float:
        return size * math.log(tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    assert 0 < low + 1 < high < size // 2  # the ramp has all three parts
    np.testing.assert_allclose(found, plain * (1 - ramp) + plain / factor * ramp, rtol=1e-5)


def test_longrope_stretches_each_pair_separately() -> None:
    plain, stretch = frequencies(Rope(500.0), 6), (1.5, 2.0, 7.0)
    found = frequencies(Rope(500.0, stretch=stretch), 6)
    np.testing.assert_allclose(found, plain / stretch, rtol=1e-6)
    longer = (2.0, 3.0, 11.0)
    rope = Rope(500.0, original_tokens=8, stretch=stretch, stretch_beyond=longer)
    for tokens, factors in ((8, stretch), (9, longer)):
        inputs = {"positions": jnp.zeros((2, tokens), jnp.int32)}
        found = rotary_frequencies(rope, 6, LayerContext(inputs, jnp.int32(0)))
        np.testing.assert_allclose(found, plain / factors, rtol=1e-6)


def test_dynamic_scaling_increases_base_with_length() -> None:
    """The slowest pair is divided by `factor * length / original - (factor - 1)`."""
    theta, factor, original = 500.0, 3.0, 8
    for tokens, size in ((5, 6), (8, 6), (9, 6), (24, 10)):
        inputs = {"positions": jnp.zeros((2, tokens), jnp.int32)}
        rope = Rope(theta, factor, "dynamic", original)
        found = rotary_frequencies(rope, size, LayerContext(inputs, jnp.int32(0)))
        more = factor * max(tokens, original) / original - (factor - 1)
        base = theta * more ** (size / (size - 2))
        np.testing.assert_allclose(found, base ** -(np.arange(0, size, 2) / size), rtol=1e-6)
        np.testing.assert_allclose(found[-1] * more, theta ** -((size - 2) / size), rtol=1e-5)


def test_partial_rotation_keeps_remaining_dims() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 10))
    positions = jnp.arange(5)[None] + jnp.asarray([[0], [7]])
    angles = rotary_frequencies(Rope(500.0, rotary_dims=6), 10, NOWHERE)
    found = rotate(x, positions, angles, 1.25)
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    assert_close(found[..., :6], 1.25 * np.asarray(rotate(x[..., :6], positions, angles)))
    assert np.abs(found[1, 1:, :, :6] - x[1, 1:, :, :6]).min() > 0


def test_joint_norm_normalizes_over_all_heads() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 5, 6, 10)), np.float64)
    scale = np.asarray(jax.random.normal(jax.random.key(2), (6, 10)), np.float64)
    found = rms_norm(jnp.asarray(x), jnp.asarray(scale), RMSNorm(60, 1e-3))
    size = np.sqrt((x**2).mean((-2, -1), keepdims=True) + 1e-3)
    assert_close(found, x / size * scale)


def test_granite_scales_embeddings_scores_branches_and_logits() -> None:
    """Folding each factor into the weights that it multiplies gives the same logits."""
    own = GraniteConfig(
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.3,
        logit_divisor=1.6,
    )
    decoder = Decoder(replace(CONFIG, family="granite", own=own), RULES)
    params = jax.jit(decoder.init)(jax.random.key(3))
    plain = Decoder(CONFIG, RULES)
    layer = params["layers"]["layer"]
    moved = params | {
        "embedding": params["embedding"] * 3.0,
        "head": params["head"] / 1.6,
        "layers": {
            "layer": layer
            | {
                "attention": layer["attention"]
                | {
                    "query": layer["attention"]["query"] * 0.4 * math.sqrt(10),
                    "out": layer["attention"]["out"] * 0.3,
                },
                "mlp": layer["mlp"] | {"down": layer["mlp"]["down"] * 0.3},
            }
        },
    }
    found, wanted = (
        jax.jit(each.apply)(given, batch()) for each, given in ((decoder, params), (plain, moved))
    )
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("own", "family", "windows"),
    [
        (MistralConfig(sliding_window=4), "mistral", (4, 4, 4)),
        (MistralConfig(), "mistral", ()),
        (Gemma2Config(sliding_window=5), "gemma2", (5, 0, 5)),
    ],
)
def test_layer_windows(own: Any, family: str, windows: tuple[int, ...]) -> None:
    config = replace(CONFIG, family=family, own=own, tied_embeddings=True)
    assert describe(config).values.get("window", ()) == windows


def test_qwen2_biases_are_added_without_weight_decay() -> None:
    decoder = Decoder(replace(CONFIG, family="qwen2"), RULES)
    params = jax.jit(decoder.init)(jax.random.key(4))
    attention = params["layers"]["layer"]["attention"]
    assert attention["query_bias"].shape == (3, 6, 10) and not attention["query_bias"].any()
    params_of = decoder.model.layer_types["layer"].parts["attention"].params
    assert [name for name, each in params_of.items() if not each.decays] == [
        "query_bias",
        "key_bias",
        "value_bias",
    ]
    # A bias of the values passes through attention unchanged: its weights sum to 1.
    bias = jax.random.normal(jax.random.key(5), (3, 2, 10))
    part = decoder.model.layer_types["layer"].parts["attention"]
    assert isinstance(part, Attention)
    shifted = attention | {"value_bias": bias}
    for_heads = np.repeat(np.asarray(bias[0], np.float64), 3, axis=0)
    wanted = np.einsum("nh,nhd->d", for_heads, np.asarray(attention["out"][0], np.float64))
    x = jax.random.normal(jax.random.key(6), (2, 7, 24))
    got = np.subtract(*run_attention(decoder, params, (shifted, attention), x))
    assert_close(got, np.broadcast_to(wanted, got.shape))


def run_attention(decoder: Decoder, params: Any, stacked: Any, x: jax.Array) -> list[np.ndarray]:
    """Return layer 0's update of x for each set of attention weights, with the MLP zeroed."""
    inputs = {name: leaf for name, leaf in batch().items() if name != "tokens"}
    layer, changes = jax.jit(decoder.layer("layer")), []
    for attention in stacked:
        one = params["layers"]["layer"] | {"attention": attention}
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[0], one)
        one["mlp"] = jax.tree.map(np.zeros_like, one["mlp"])
        changes.append(np.asarray(layer(one, x, inputs, jnp.int32(0), None)[0] - x, np.float64))
    return changes


def batch() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(7), (2, 7), 0, 77)
    return {
        "tokens": tokens,
        "segment_ids": jnp.ones((2, 7), jnp.int32),
        "positions": jnp.tile(jnp.arange(7), (2, 1)),
        "example_ids": jnp.arange(2),
    }
