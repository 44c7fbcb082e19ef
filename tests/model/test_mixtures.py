"""Families with experts other than `moe`: their layers, and decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import ConfigError
from maxpipe.model.decoder import Decoder
from maxpipe.model.families.gpt_oss import GptOssConfig
from maxpipe.model.families.qwen3_moe import Qwen3MoeConfig
from maxpipe.model.families.registry import describe
from maxpipe.model.modules.experts import Experts
from maxpipe.model.parts import experts
from maxpipe.model.parts.mlp import ClampedSilu
from tests.model.parts import RULES, assert_close, context, packed, with_values

CONFIG = ModelConfig(
    num_layers=5,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_size=10,
    d_mlp=28,
    vocab_size=37,
    compute_dtype="float32",
)
FAMILY = {"tiny-moe": "moe", "qwen3-30b-a3b": "qwen3_moe"}
OWN: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        num_experts=5, d_expert=14, expert_period=2, dense_layers=[1], normalised_weights=False
    ),
    "gpt_oss": GptOssConfig(num_experts=5, d_expert=14, window=3, rope_scaling=4.0),
}


@pytest.mark.parametrize("family", OWN)
def test_cached_decoding_equals_the_whole_row(family: str) -> None:
    decoder = Decoder(replace(CONFIG, family=family, own=OWN[family]), RULES)
    params = noisy(jax.jit(decoder.init)(jax.random.key(3)))
    segments, positions = packed([[9], [2, 4, 3]])
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, segments.shape)
    batch = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    whole = jax.jit(decoder.run)(params, batch).logits
    caches, parts = decoder.empty_caches(2, 10), []
    extend = jax.jit(decoder.extend)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        piece = {name: each[:, start:stop] for name, each in batch.items()}
        logits, caches = extend(params, piece, caches)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(("capacity", "per_token"), [(0.0, 2), (0.0, 4), (9.0, 2)])
def test_experts_with_biases_and_clamped_gates(capacity: float, per_token: int) -> None:
    """One token and one expert after the other."""
    gate = ClampedSilu(slope=1.3, limit=0.4)
    part = experts.Experts(
        6, 7, 5, per_token, 1.0, 0.1, capacity=capacity, function=gate, biased=True
    )
    module = Experts(part, RULES)
    generator = np.random.default_rng(4)
    w = with_values(
        module, **{name: generator.normal(size=p.shape) for name, p in part.params.items()}
    )
    x = generator.normal(size=(2, 5, 6))
    wanted, beyond = np.zeros_like(x), 0
    for row, token in np.ndindex(2, 5):
        logits = x[row, token] @ w["router"] + w["logit_bias"]
        best = np.argsort(-logits)[:per_token]
        weights = np.exp(logits[best]) / np.exp(logits[best]).sum()
        for expert, weight in zip(best, weights, strict=True):
            gates = x[row, token] @ w["gate"][:, expert] + w["gate_bias"][expert]
            ups = x[row, token] @ w["up"][:, expert] + w["up_bias"][expert]
            beyond += (gates > 0.4).sum() + (np.abs(ups) > 0.4).sum()
            gates, ups = np.minimum(gates, 0.4), np.clip(ups, -0.4, 0.4)
            hidden = gates / (1 + np.exp(-1.3 * gates)) * (ups + 1)
            out = hidden @ w["down"][expert] + w["down_bias"][expert]
            wanted[row, token] += weight * out
    assert beyond > 20
    found = module(jnp.asarray(x, jnp.float32), context([[1] * 5] * 2, [range(5)] * 2)).x
    assert_close(found, wanted)


def noisy(params: Any) -> Any:
    """The same with every parameter away from what it starts from, constants too."""
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + 0.3 * generator.normal(size=leaf.shape), params)


@pytest.mark.parametrize(
    ("period", "dense", "kinds"),
    [(1, [], "eeeee"), (2, [], "deded"), (1, [0, 3], "deede")],
)
def test_layers_have_experts_or_an_mlp(period: int, dense: list[int], kinds: str) -> None:
    own = Qwen3MoeConfig(expert_period=period, dense_layers=dense)
    found = describe(replace(CONFIG, family="qwen3_moe", own=own)).layers
    assert "".join(each[0] for each in found) == kinds


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("dense_layers=[48]", "holds 48, and layers are counted from 0 to 47."),
        ("expert_period=49", "leaves no layer of 48 with experts."),
        ("top_k=129", "is more than model.qwen3_moe.num_experts (128)"),
        ("expert_period=0", "must be at least 1."),
        ("num_experts_per_tok=3", "Did you mean model.qwen3_moe.top_k?"),
    ],
)
def test_keys_are_checked(given: str, text: str) -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    with pytest.raises(ConfigError) as caught:
        load(["qwen3-30b-a3b", *arguments, f"model.qwen3_moe.{given}"])
    assert text in str(caught.value)


def test_a_key_of_several_families_is_that_of_the_model() -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    for name in ("num_experts", "top_k", "experts_per_token", "capacity_factor"):
        for model in ("tiny-moe", "qwen3-30b-a3b"):
            with pytest.raises(ConfigError, match=rf"Did you mean model.{FAMILY[model]}\."):
                load([model, *arguments, f"model.{name}=3"])
