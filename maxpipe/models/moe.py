"""A mixture of experts: dense layers in front, then layers that send tokens to a few experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface_tables, moe_base, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Key, Only, Twice
from maxpipe.models.layers.experts import Experts, Groups
from maxpipe.models.layers.mlp import GatedMLP
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedConfig(MixtureConfig):
    """Keys of families with shared experts and groups of experts."""

    num_dense_layers: int = 1
    """Layers in front that have one MLP of width `model.d_mlp` instead of experts."""
    num_shared_experts: int = 0
    """Experts beside those, of the same width, that all tokens pass through."""
    score_func: Literal["softmax", "sigmoid"] = field(
        default="softmax", metadata=renamed_from("scores")
    )
    """What the router's logits become: probabilities that compete, or scores that do not."""
    routed_scaling_factor: float = field(default=1.0, metadata=renamed_from("weight_scale"))
    """Factor of the weights of a token's experts."""
    norm_topk_prob: bool = field(default=True, metadata=renamed_from("normalised_weights"))
    """Divide the scores of a token's experts by their sum, so that its weights add up to 1."""
    num_expert_groups: int = field(default=1, metadata=renamed_from("num_groups"))
    """Groups of experts, of one size. With several a token goes to experts of a few groups only."""
    expert_groups_per_token: int = field(default=1, metadata=renamed_from("groups_per_token"))
    """Groups that a token is sent to: those with the largest scores."""
    group_scores: Literal["max", "top2"] = "max"
    """What a group's score is: its largest score, or the sum of its two largest."""
    expert_bias: bool = field(default=False, metadata=renamed_from("router_bias"))
    """Add a bias to each expert's score where experts are chosen, and not where they are weighted.
    It has no gradient: steps move it so that experts get equally many tokens, without a loss for
    that."""
    expert_bias_update_rate: float = field(default=0.001, metadata=renamed_from("balance_rate"))
    """By how much each step moves an expert's bias: up where it got fewer tokens than the mean,
    else down. Read with `router_bias`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(RoutedConfig, RopeConfig):
    """Keys of mixtures of experts only."""


def describe(config: ModelConfig) -> Model:
    """Two kinds of layers, `dense` and `experts`; without dense layers one."""
    rope = rope_config.rope(config, own_keys(config, MoeConfig))
    return layered(config, family.attention(config, rope))


def layered(config: ModelConfig, attention: Part) -> Model:
    """The model with this attention, of a family that has these keys and perhaps more."""
    own = own_keys(config, RoutedConfig)
    shared = own.num_shared_experts * moe_base.width(config, own)
    groups = Groups(own.num_expert_groups, own.expert_groups_per_token, own.group_scores)
    experts = moe_base.experts(
        config,
        own,
        scores=own.score_func,
        weight_scale=own.routed_scaling_factor,
        shared=GatedMLP(config.d_model, shared, family.residual_gain(config)) if shared else None,
        normalised=own.norm_topk_prob,
        groups=groups if own.num_expert_groups > 1 else None,
        expert_bias_update_rate=own.expert_bias_update_rate if own.expert_bias else None,
    )
    return moe_base.model(config, attention, experts, (True,) * own.num_dense_layers)


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """What is wrong with these keys, in the section of the config's family."""
    own, section = own_keys(config, RoutedConfig), f"model.{config.family}"
    yield from moe_base.rules(config, own)
    yield from _grouped(own, section)
    if own.num_dense_layers >= config.num_layers:
        yield RuleViolation(
            f"{section}.num_dense_layers",
            f"must be less than model.num_layers ({config.num_layers}): the layers behind them "
            "have the experts.",
            f"Set {section}.num_dense_layers={min(1, config.num_layers - 1)}, or "
            "model.family=llama for a model without experts.",
        )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from rules(config)
    yield from rope_config.rules(config, own_keys(config, MoeConfig))


def _grouped(own: RoutedConfig, section: str) -> Iterator[RuleViolation]:
    """Groups are of one size, and those of a token have experts enough."""
    size = own.num_experts // own.num_expert_groups
    if own.num_experts % own.num_expert_groups:
        yield RuleViolation(
            f"{section}.num_expert_groups",
            f"must divide {section}.num_experts ({own.num_experts}): groups are of one size.",
            f"Set {section}.num_expert_groups=1, or {section}.num_experts="
            f"{-(-own.num_experts // own.num_expert_groups) * own.num_expert_groups}.",
        )
    elif own.expert_groups_per_token > own.num_expert_groups:
        yield RuleViolation(
            f"{section}.expert_groups_per_token",
            f"is more than {section}.num_expert_groups ({own.num_expert_groups}): a token is sent to different "
            "groups.",
            f"Set {section}.expert_groups_per_token={own.num_expert_groups}.",
        )
    elif own.top_k <= own.num_experts and own.expert_groups_per_token * size < own.top_k:
        yield RuleViolation(
            f"{section}.expert_groups_per_token",
            f"leaves a token {own.expert_groups_per_token * size} of the {own.num_experts} experts, and "
            f"{section}.top_k is {own.top_k}.",
            f"Set {section}.expert_groups_per_token={-(-own.top_k // size)}.",
        )
    elif own.group_scores == "top2" and own.num_expert_groups > 1 and size < 2:
        yield RuleViolation(
            f"{section}.group_scores",
            f"asks for two experts in a group, and each of the {own.num_expert_groups} has one.",
            f"Set {section}.group_scores=max, or fewer groups.",
        )


_MIXTRAL = HuggingFace(
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *huggingface_tables.sizes(kv_heads=8, mlp=14336, epsilon=1e-5),
        Key("intermediate_size", "moe.d_expert", 14336, zero_means="d_mlp"),
        Key("num_local_experts", "moe.num_experts", 8, also="num_experts"),
        Key("num_experts_per_tok", "moe.top_k", 2),
        Only("moe.num_dense_layers", 0),
        Only("moe.num_shared_experts", 0),
        Only("moe.score_func", "softmax"),
        Only("moe.routed_scaling_factor", 1.0),
        Only("moe.norm_topk_prob", True),
        Only("moe.num_expert_groups", 1),
        Only("moe.expert_bias", False),
        rope_config.row("moe", 131072, 1e6),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("sliding_window", (None,)),
        *huggingface_tables.BALANCED,
    ),
    duplicate_keys=(Twice("num_experts", "num_local_experts"),),
    tensors=(
        *huggingface_tables.ENDS,
        *huggingface_tables.norms(
            attention_norm="input_layernorm", experts_norm="post_attention_layernorm"
        ),
        *huggingface_tables.ATTENTION,
        *huggingface_tables.experts(
            "block_sparse_moe", router="gate", gate="w1", up="w3", down="w2"
        ),
    ),
)

BOUNDS = (
    *moe_base.BOUNDS,
    Bound("num_dense_layers", 1, 0),
    Bound("num_shared_experts", 0, 0),
    Bound(
        "routed_scaling_factor", 1.0, 0, LARGEST, "experts with a weight of 0 train nothing", False
    ),
    Bound("num_expert_groups", 1, 1),
    Bound("expert_groups_per_token", 1, 1),
    Bound("expert_bias_update_rate", 0.001, 0, 1, "0 leaves biases as they are"),
)
"""Of these keys."""

FAMILY = Family(
    "moe",
    MoeConfig,
    describe,
    bounds=(*BOUNDS, *rope_config.BOUNDS),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_MIXTRAL,),
)
