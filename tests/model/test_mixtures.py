"""Mixture-of-experts families other than `moe`: layers, and decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models import count
from maxpipe.models.config import ModelConfig
from maxpipe.models.glm4_moe import Glm4MoeConfig
from maxpipe.models.gpt_oss import GptOssConfig
from maxpipe.models.granite4 import Granite4Config
from maxpipe.models.kimi_linear import KimiLinearConfig
from maxpipe.models.layers import experts
from maxpipe.models.layers.mlp import MLP, ClampedSilu, ScaledInput
from maxpipe.models.llama4 import Llama4Config
from maxpipe.models.minimax_m2 import MinimaxM2Config
from maxpipe.models.nemotron_h import NemotronHConfig
from maxpipe.models.olmo_hybrid import OlmoHybridConfig
from maxpipe.models.qwen3_5 import Qwen35Config
from maxpipe.models.qwen3_5_moe import Qwen35MoeConfig
from maxpipe.models.qwen3_moe import Qwen3MoeConfig
from maxpipe.models.qwen3_next import Qwen3NextConfig
from maxpipe.models.registry import describe
from maxpipe.models.spec import Products
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.experts import Experts
from maxpipe.nn.router import route_tokens
from tests.cases import keeping
from tests.nn.parts import RULES, assert_close, context, packed, with_values

CONFIG = ModelConfig(
    num_layers=5,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=28,
    vocab_size=37,
    compute_dtype="float32",
)
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "gdn_chunk_size": 4,
    "rotary_dim": 4,
}
HYBRID_MOE: dict[str, Any] = {**HYBRID, "num_experts": 5, "d_expert": 14, "d_shared_expert": 11}
NEXT = Qwen3NextConfig(**HYBRID_MOE)
FAMILY = {"tiny-moe": "moe", "qwen3-30b-a3b": "qwen3_moe"}
OWN: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        num_experts=5, d_expert=14, moe_layer_interval=2, dense_layers=[1], norm_topk_prob=False
    ),
    "qwen3_next": NEXT,
    "qwen3_5": Qwen35Config(**HYBRID),
    "qwen3_5_moe": Qwen35MoeConfig(**HYBRID_MOE),
    "glm4_moe": Glm4MoeConfig(
        num_experts=5,
        d_expert=14,
        num_shared_experts=1,
        rotary_dim=4,
        attention_bias=True,
        use_qk_norm=True,
        score_func="sigmoid",
        expert_bias=True,
    ),
    "minimax_m2": MinimaxM2Config(num_experts=5, d_expert=14, rotary_dim=4, rope_factor=4.0),
    "gpt_oss": GptOssConfig(num_experts=5, d_expert=14, sliding_window=3, rope_factor=4.0),
    "nemotron_h": NemotronHConfig(
        hybrid_override_pattern="ME*-E",
        num_experts=6,
        d_expert=14,
        d_shared_expert=11,
        score_func="sigmoid",
        num_expert_groups=3,
        expert_groups_per_token=2,
        expert_bias=True,
        mamba_num_heads=6,
        mamba_head_dim=7,
        mamba_num_groups=2,
        mamba_state_dim=5,
        mamba_chunk_size=4,
        mamba_min_time_step=0.3,
    ),
    "granite4": Granite4Config(
        num_experts=5,
        d_expert=14,
        attention_layers=[1, 4],
        residual_multiplier=0.5,
        mamba_num_heads=6,
        mamba_head_dim=7,
        mamba_num_groups=2,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    ),
    "kimi_linear": KimiLinearConfig(
        attention_layers=[2, 4],
        linear_num_heads=3,
        linear_head_dim=5,
        kda_chunk_size=4,
        kv_lora_rank=7,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_experts=6,
        d_expert=14,
        num_shared_experts=1,
        score_func="sigmoid",
        expert_bias=True,
    ),
    "olmo_hybrid": OlmoHybridConfig(
        attention_layers=[2, 4],
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=5,
        linear_value_head_dim=7,
        gdn_chunk_size=4,
    ),
    "llama4": Llama4Config(
        num_experts=5,
        d_expert=14,
        moe_layer_interval=2,
        no_rope_layer_interval=3,
        attention_chunk_size=3,
        floor_scale=2,
    ),
}


MORE: dict[str, dict[str, Any]] = {"kimi_linear": {"num_kv_heads": CONFIG.num_heads}}
"""Sizes that differ from `CONFIG`."""


@pytest.mark.parametrize("family", keeping(OWN, 0))
def test_cached_decoding_equals_full_forward(family: str) -> None:
    decoder = Decoder(
        replace(CONFIG, family=family, own=OWN[family], **MORE.get(family, {})), RULES
    )
    params = noisy(jax.jit(decoder.init)(jax.random.key(3)))
    segments, positions = packed([[9], [2, 4, 3]])
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, segments.shape)
    batch = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    whole = jax.jit(decoder.run)(params, batch).logits
    caches, parts = decoder.empty_caches(2, 10), []
    extend = jax.jit(decoder.extend)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        piece = {name: each[:, start:stop] for name, each in batch.items()}
        logits, caches = extend(params, piece, caches)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(("capacity", "per_token"), keeping([(0.0, 2), (0.0, 4), (9.0, 2)], 1, 2))
def test_biased_experts_with_clamped_gates_equal_numpy_reference(
    capacity: float, per_token: int
) -> None:
    """The reference loops over tokens and experts."""
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
    here = context([[1] * 5] * 2, [range(5)] * 2)
    found = jax.jit(lambda x: module(x, here).x)(jnp.asarray(x, jnp.float32))
    assert_close(found, wanted)


@pytest.mark.parametrize(("capacity", "per_token"), [(0.0, 2), (0.0, 4), (9.0, 2)])
def test_routing_weights_that_scale_inputs_equal_numpy_reference(
    capacity: float, per_token: int
) -> None:
    """The reference loops over tokens and experts, as in Llama 4."""
    shared = MLP(6, 7, 1.0)
    part = experts.Experts(
        *(6, 7, 5, per_token, 1.0, 0.1),
        **{"capacity": capacity, "function": ScaledInput("silu"), "scores": "sigmoid"},
        **{"normalised": False, "shared": shared},
    )
    module = Experts(part, RULES)
    generator = np.random.default_rng(4)
    w = with_values(
        module, **{name: generator.normal(size=p.shape) for name, p in part.params.items()}
    )
    x = generator.normal(size=(2, 5, 6))

    def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gates = x @ gate
        return (gates / (1 + np.exp(-gates)) * (x @ up)) @ down

    wanted = mlp(x, *(w[f"shared_{name}"] for name in ("gate", "up", "down")))
    for row, token in np.ndindex(2, 5):
        logits = x[row, token] @ w["router"]
        for expert in np.argsort(-logits)[:per_token]:
            scaled = x[row, token] / (1 + np.exp(-logits[expert]))
            weights = (w["gate"][:, expert], w["up"][:, expert], w["down"][expert])
            wanted[row, token] += mlp(scaled, *weights)
    here = context([[1] * 5] * 2, [range(5)] * 2)
    found = jax.jit(lambda x: module(x, here).x)(jnp.asarray(x, jnp.float32))
    assert_close(found, wanted)


def test_experts_with_large_logits_are_ranked_by_logits() -> None:
    """The sigmoids of large logits are all 1."""
    part = experts.Experts(1, 7, 3, 1, 1.0, 0.1, scores="sigmoid", normalised=False)
    routes = route_tokens(jnp.ones((1, 1, 1)), jnp.asarray([[30.0, 50.0, 40.0]]), part)
    assert routes.expert_ids.tolist() == [[[1]]]
    np.testing.assert_array_equal(routes.weights, [[[0.0, 1.0, 0.0]]])


def noisy(params: Any) -> Any:
    """Add noise to every parameter, including those initialized to constants."""
    generator = np.random.default_rng(0)
    added = lambda leaf: leaf + 0.3 * generator.normal(size=leaf.shape).astype(leaf.dtype)  # noqa: E731
    return jax.tree.map(added, jax.device_get(params))


@pytest.mark.parametrize(
    ("period", "dense", "kinds"),
    [(1, [], "eeeee"), (2, [], "deded"), (1, [0, 3], "deede")],
)
def test_qwen3_moe_layers_alternate_experts_and_mlp(
    period: int, dense: list[int], kinds: str
) -> None:
    own = Qwen3MoeConfig(moe_layer_interval=period, dense_layers=dense)
    found = describe(replace(CONFIG, family="qwen3_moe", own=own)).layers
    assert "".join(each[0] for each in found) == kinds


@pytest.mark.parametrize(
    ("layers", "period", "kinds"), [(9, 4, "dddfdddfd"), (3, 4, "ddd"), (2, 1, "ff")]
)
def test_qwen3_next_full_attention_interval(layers: int, period: int, kinds: str) -> None:
    own = replace(NEXT, full_attention_interval=period)
    found = describe(replace(CONFIG, family="qwen3_next", own=own, num_layers=layers)).layers
    assert "".join(each[0] for each in found) == kinds


def test_delta_layer_cost_does_not_depend_on_length() -> None:
    model = describe(replace(CONFIG, family="qwen3_next", own=NEXT, num_layers=4))
    short, long = (count.layer_costs(model, tokens) for tokens in (256, 4096))
    assert short[:3] == long[:3] and short[3] < long[3]
    fewer = [count.forward_flops_per_token(model, tokens) for tokens in (64, 128)]
    attention = describe(
        replace(CONFIG, family="qwen3_next", own=replace(NEXT, full_attention_interval=1))
    )
    of_all = [count.forward_flops_per_token(attention, tokens) for tokens in (64, 128)]
    assert (fewer[1] - fewer[0]) * 5 == of_all[1] - of_all[
        0
    ]  # full attention in one of 4 layers, and in all of 5
    # For each value head and token, the recurrence reads the state twice and writes it once.
    states = 2 * 3 * 6 * 5 * 7
    without = describe(
        replace(
            CONFIG, family="qwen3_next", own=replace(NEXT, linear_value_head_dim=8), num_layers=4
        )
    )
    part, wider = (each.layer_types["delta"].parts["delta"] for each in (model, without))
    products = [
        next(each for each in one.operations if isinstance(each, Products)) for one in (part, wider)
    ]
    assert 2 * products[0].heads * products[0].needed == states
    assert products[1].needed == products[0].needed * 8 / 7
    assert products[0].computed > products[0].needed


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "linear_num_value_heads=24",
            "must be a multiple of model.qwen3_next.linear_num_key_heads (16)",
        ),
        ("rotary_dim=258", "must be even and at most model.head_dim (256)"),
        ("rotary_dim=63", "must be even and at most model.head_dim (256)"),
        ("gdn_chunk_size=48", "Set model.qwen3_next.gdn_chunk_size=32."),
        ("linear_conv_kernel_dim=1", "must be from 2 to 64."),
        ("gdn_num_key_heads=8", "Write model.qwen3_next.linear_num_key_heads=8."),
    ],
)
def test_invalid_qwen3_next_keys_are_rejected(given: str, text: str) -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    with pytest.raises(ConfigError) as caught:
        load(["qwen3-next-80b-a3b", *arguments, f"model.qwen3_next.{given}"])
    assert text in str(caught.value)


def test_delta_heads_must_be_divisible_by_tensor_size() -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    given = [*arguments, "mesh.ici_tensor=2", "mesh.cpu_devices=2"]
    load(["qwen3-next-80b-a3b", *given])
    with pytest.raises(ConfigError, match="must be a multiple of the tensor size"):
        wrong = [
            "model.qwen3_next.linear_num_key_heads=3",
            "model.qwen3_next.linear_num_value_heads=6",
        ]
        load(["qwen3-next-80b-a3b", *given, *wrong])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("dense_layers=[48]", "must contain layer indices from 0 to 47"),
        ("moe_layer_interval=49", "leave experts in at least one of 48 layers"),
        ("top_k=129", "must be at most model.qwen3_moe.num_experts (128)"),
        ("moe_layer_interval=0", "must be at least 1."),
        ("num_experts_per_tok=3", "Write model.qwen3_moe.top_k=3."),
    ],
)
def test_invalid_qwen3_moe_keys_are_rejected(given: str, text: str) -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    with pytest.raises(ConfigError) as caught:
        load(["qwen3-30b-a3b", *arguments, f"model.qwen3_moe.{given}"])
    assert text in str(caught.value)


def test_suggested_key_belongs_to_family_of_model() -> None:
    arguments = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    for name in ("num_experts", "top_k", "experts_per_token", "capacity_factor"):
        for model in ("tiny-moe", "qwen3-30b-a3b"):
            with pytest.raises(ConfigError, match=rf"(Did you mean|Write) model.{FAMILY[model]}\."):
                load([model, *arguments, f"model.{name}=3"])
