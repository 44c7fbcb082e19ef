"""Mixture of experts: leading dense layers, followed by layers with routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, moe_base, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Key, Only, Twice
from maxpipe.models.layers.experts import Experts, Groups, RouterScores
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(MixtureConfig):
    """Config keys of routers with expert groups."""

    score_func: RouterScores = field(default="softmax", metadata=renamed_from("scores"))
    """Activation of the router logits: `softmax` probabilities, or independent scores, which are
    `sigmoid` or `sqrtsoftplus`, the square root of softplus."""
    routed_scaling_factor: float = field(default=1.0, metadata=renamed_from("weight_scale"))
    """Factor that multiplies the routing weights of each token's experts."""
    norm_topk_prob: bool = field(default=True, metadata=renamed_from("normalised_weights"))
    """Normalize the scores of each token's selected experts so that they sum to 1."""
    num_expert_groups: int = field(default=1, metadata=renamed_from("num_groups"))
    """Number of expert groups of equal size. If above 1, each token is routed only to experts in
    `expert_groups_per_token` of these groups."""
    expert_groups_per_token: int = field(default=1, metadata=renamed_from("groups_per_token"))
    """Number of expert groups to which each token is routed. The groups with the largest scores are
    selected."""
    group_scores: Literal["max", "top2"] = "max"
    """Score of an expert group: the largest expert score (`max`), or the sum of the two largest
    expert scores (`top2`)."""
    expert_bias: bool = field(default=False, metadata=renamed_from("router_bias"))
    """Add a bias to expert scores when experts are selected, but not when expert outputs are
    weighted. The bias has no gradient. Each step updates the bias to balance expert loads without
    an auxiliary loss."""
    expert_bias_update_rate: float = field(default=0.001, metadata=renamed_from("balance_rate"))
    """Step size of the expert bias update. The bias increases for experts that received fewer
    tokens than the mean, and decreases for the others. Ignored unless `expert_bias` is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedConfig(RouterConfig):
    """Config keys of families with shared experts and expert groups."""

    num_dense_layers: int = 1
    """Number of leading layers that have one MLP of width `model.d_mlp` instead of experts."""
    num_shared_experts: int = 0
    """Number of shared experts, which process all tokens. Shared experts have the same width as
    routed experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(RoutedConfig, RopeConfig):
    """Keys that only the `moe` family uses."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    rope = rope_config.rope(config, own_keys(config, MoeConfig))
    return layered(config, family.attention(config, rope))


def layered(config: ModelConfig, attention: Part) -> Model:
    """Return a model with the given attention, for a family whose section extends
    `RoutedConfig`.
    """
    dense = (True,) * own_keys(config, RoutedConfig).num_dense_layers
    return moe_base.moe_model(config, attention, all_experts(config), dense)


def all_experts(config: ModelConfig) -> Experts:
    """Return routed and shared experts, for a family whose section extends `RoutedConfig`."""
    own = own_keys(config, RoutedConfig)
    shared = own.num_shared_experts * moe_base.expert_width(config, own)
    part = MLP(config.d_model, shared, family.residual_gain(config)) if shared else None
    return routed_experts(config, own, shared=part)


def routed_experts(config: ModelConfig, own: RouterConfig, **options: Any) -> Experts:
    """Return experts with the router that the config's keys describe; `options` are additional
    fields of `Experts`.
    """
    groups = Groups(own.num_expert_groups, own.expert_groups_per_token, own.group_scores)
    return moe_base.experts(
        config,
        own,
        scores=own.score_func,
        weight_scale=own.routed_scaling_factor,
        normalised=own.norm_topk_prob,
        groups=groups if own.num_expert_groups > 1 else None,
        expert_bias_update_rate=own.expert_bias_update_rate if own.expert_bias else None,
        **options,
    )


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys in the family's section."""
    own, section = own_keys(config, RoutedConfig), f"model.{config.family}"
    yield from router_rules(config, own)
    if own.num_dense_layers >= config.num_layers:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.num_dense_layers",
            f"must be less than model.num_layers ({config.num_layers}), because only the layers "
            "after the dense ones have experts.",
            f"Set {section}.num_dense_layers={min(1, config.num_layers - 1)}, or "
            "model.family=llama for a model without experts.",
        )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from rules(config)
    yield from rope_config.rules(config, own_keys(config, MoeConfig))


def router_rules(config: ModelConfig, own: RouterConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys in `RouterConfig`."""
    yield from moe_base.moe_rules(config, own)
    section = f"model.{config.family}"
    size = own.num_experts // own.num_expert_groups
    if own.num_experts % own.num_expert_groups:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.num_expert_groups",
            f"must divide {section}.num_experts ({own.num_experts}), because all groups have the "
            "same size.",
            f"Set {section}.num_expert_groups=1, or {section}.num_experts="
            f"{-(-own.num_experts // own.num_expert_groups) * own.num_expert_groups}.",
        )
    elif own.expert_groups_per_token > own.num_expert_groups:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.expert_groups_per_token",
            f"must be at most {section}.num_expert_groups ({own.num_expert_groups}), because a "
            "token cannot select a group more than once.",
            f"Set {section}.expert_groups_per_token={own.num_expert_groups}.",
        )
    elif own.top_k <= own.num_experts and own.expert_groups_per_token * size < own.top_k:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.expert_groups_per_token",
            f"must provide at least {section}.top_k={own.top_k} experts per token, but covers "
            f"only {own.expert_groups_per_token * size} of {own.num_experts} experts.",
            f"Set {section}.expert_groups_per_token={-(-own.top_k // size)}.",
        )
    elif own.group_scores == "top2" and own.num_expert_groups > 1 and size < 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.group_scores",
            f"must be max, because each of the {own.num_expert_groups} groups has only one expert.",
            f"Set {section}.group_scores=max, or use fewer groups.",
        )


_MIXTRAL = HuggingFace(
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *huggingface.sizes(kv_heads=8, mlp=14336, epsilon=1e-5),
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
        *huggingface.BALANCED,
    ),
    duplicate_keys=(Twice("num_experts", "num_local_experts"),),
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            attention_norm="input_layernorm", experts_norm="post_attention_layernorm"
        ),
        *huggingface.ATTENTION,
        *huggingface.experts("block_sparse_moe", router="gate", gate="w1", up="w3", down="w2"),
    ),
)

ROUTER_BOUNDS = (
    *moe_base.MOE_BOUNDS,
    Bound(
        "routed_scaling_factor", 1.0, 0, LARGEST, "experts with weight 0 have no gradient", False
    ),
    Bound("num_expert_groups", 1, 1),
    Bound("expert_groups_per_token", 1, 1),
    Bound("expert_bias_update_rate", 0.001, 0, 1, "0 keeps biases constant"),
)
"""Allowed ranges of the keys in `RouterConfig`."""

BOUNDS = (
    *ROUTER_BOUNDS,
    Bound("num_dense_layers", 1, 0),
    Bound("num_shared_experts", 0, 0),
)
"""Allowed ranges of the keys in `RoutedConfig`."""

FAMILY = Family(
    "moe",
    MoeConfig,
    describe,
    bounds=(*BOUNDS, *rope_config.BOUNDS),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_MIXTRAL,),
)
