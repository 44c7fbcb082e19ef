"""Qwen3 with experts (arXiv:2505.09388): query and key norms, and experts in selected layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, layer_type_rows, moe_base, rope_config
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept, Key, Twice
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeConfig(MixtureConfig, RopeConfig):
    """Keys that only Qwen3 models with experts use."""

    moe_layer_interval: int = field(default=1, metadata=renamed_from("expert_period"))
    """Interval between layers with experts. With interval n, every n-th layer has experts and all
    others have one MLP of width `model.d_mlp`."""
    dense_layers: list[int] = field(default_factory=list, hash=False)  # lists are not hashable
    """Zero-based indices of layers that have an MLP instead of experts, regardless of
    `moe_layer_interval`."""
    norm_topk_prob: bool = field(default=True, metadata=renamed_from("normalised_weights"))
    """Normalize the probabilities of each token's selected experts so that they sum to 1."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only one of the two."""
    own = own_keys(config, Qwen3MoeConfig)
    head_norm = RMSNorm(config.head_dim, config.norm_epsilon)
    attention = family.attention(config, rope_config.rope(config, own), head_norm=head_norm)
    experts = moe_base.experts(config, own, normalised=own.norm_topk_prob)
    return moe_base.moe_model(config, attention, experts, _dense(config, own))


def _dense(config: ModelConfig, own: Qwen3MoeConfig) -> list[bool]:
    """Return one flag per layer: true if the layer has an MLP instead of experts."""
    return [
        layer in own.dense_layers or (layer + 1) % own.moe_layer_interval != 0
        for layer in range(config.num_layers)
    ]


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Qwen3MoeConfig)
    yield from moe_base.moe_rules(config, own)
    yield from rope_config.rules(config, own)
    if violations := [*family.layer_indices(config, "dense_layers", own.dense_layers)]:
        yield from violations
    elif all(_dense(config, own)):
        name = "moe_layer_interval" if own.moe_layer_interval > 1 else "dense_layers"
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"model.qwen3_moe.{name}",
            f"must leave experts in at least one of {config.num_layers} layers.",
            "Set model.qwen3_moe.moe_layer_interval=1 and model.qwen3_moe.dense_layers=[], or "
            "model.family=qwen3 for a model without experts.",
        )


_HUGGINGFACE = HuggingFace(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    keys=(
        *huggingface.sizes(layers=24, width=2048, kv_heads=4, mlp=6144, vocab=151936),
        Key("moe_intermediate_size", "qwen3_moe.d_expert", 768, zero_means="d_mlp"),
        Key("num_experts", "qwen3_moe.num_experts", 128, also="num_local_experts"),
        Key("num_experts_per_tok", "qwen3_moe.top_k", 8),
        Key("decoder_sparse_step", "qwen3_moe.moe_layer_interval", 1),
        Key("mlp_only_layers", "qwen3_moe.dense_layers", []),
        Key("norm_topk_prob", "qwen3_moe.norm_topk_prob", False),
        rope_config.row("qwen3_moe", 32768),
        layer_type_rows.NoWindow(None),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        *huggingface.BALANCED,
    ),
    duplicate_keys=(Twice("num_local_experts", "num_experts"),),
    tensors=(
        *huggingface.LLAMA,
        *huggingface.HEAD_NORMS,
        *huggingface.norms(experts_norm="post_attention_layernorm"),
        *huggingface.experts("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    ),
)


FAMILY = Family(
    "qwen3_moe",
    Qwen3MoeConfig,
    describe,
    bounds=(
        *moe_base.MOE_BOUNDS,
        *rope_config.BOUNDS,
        Bound("moe_layer_interval", 1, 1),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
