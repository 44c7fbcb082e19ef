"""Qwen3-Next: the gated delta rule in most layers, and full attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import (
    family,
    gated_delta_config,
    huggingface,
    layer_type_rows,
    moe_base,
    partial_rope,
)
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.gated_delta_config import GatedDeltaConfig
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept, Key, Row, Tensor, Twice
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import MLP, RMSNorm
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.partial_rope import PartialRopeConfig
from maxpipe.models.spec import Branch, LayerType, Model, Part


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class HybridConfig(GatedDeltaConfig, PartialRopeConfig):
    """Config keys shared by Qwen families that combine the gated delta rule with full attention."""

    full_attention_interval: int = field(default=4, metadata=renamed_from("attention_period"))
    """Interval between layers with full attention. With interval n, every n-th layer has full
    attention and all others use the gated delta rule."""


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class HybridMoeConfig(MixtureConfig, HybridConfig):
    """Config keys shared by such families with experts."""

    d_shared_expert: int = field(default=512, metadata=renamed_from("d_shared"))
    """Hidden width of the shared expert, which processes all tokens and has a separate gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextConfig(HybridMoeConfig):
    """Keys that only Qwen3-Next models use. `model.num_heads`, `num_kv_heads` and `head_dim` apply
    to the layers with attention. Every layer has experts.
    """

    norm_topk_prob: bool = field(default=True, metadata=renamed_from("normalised_weights"))
    """Normalize the probabilities of each token's selected experts so that they sum to 1."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `delta` and `full`, or only one of the two."""
    own = own_keys(config, Qwen3NextConfig)
    return hybrid(config, "experts", experts(config, own.norm_topk_prob), fused=True)


def experts(config: ModelConfig, normalised: bool = True) -> Experts:
    """Return the experts of a layer, with a gated shared expert."""
    own = own_keys(config, HybridMoeConfig)
    shared = MLP(config.d_model, own.d_shared_expert, family.residual_gain(config))
    return moe_base.experts(config, own, shared=shared, shared_gated=True, normalised=normalised)


def hybrid(
    config: ModelConfig,
    name: str,
    part: Part,
    *,
    fused: bool,
    sections: Sequence[int] = (),
    **of_ends: Any,
) -> Model:
    """Return a model whose layers combine the delta rule or full attention with `part`.

    `name` is the name of the branch with `part`. `fused` is passed to `GatedDelta`, `sections` to
    `Rope`, and `of_ends` to `Ends`.
    """
    own = own_keys(config, HybridConfig)
    epsilon = config.norm_epsilon
    norm = RMSNorm(config.d_model, epsilon, offset=1.0)
    attention = family.attention(
        config,
        replace(partial_rope.rope(config), sections=tuple(sections)),
        head_norm=RMSNorm(config.head_dim, epsilon, offset=1.0),
        gated=True,
    )
    delta = gated_delta_config.gated_delta(config, own, epsilon, fused=fused)
    last = Branch(name, part, norm, dropout=config.dropout)
    mixing = {
        _DELTA: Branch("delta", delta, norm, dropout=config.dropout),
        _FULL: Branch("attention", attention, norm, dropout=config.dropout),
    }
    layers = tuple(
        _DELTA if number % own.full_attention_interval else _FULL
        for number in range(1, config.num_layers + 1)
    )
    layer_types = {name: LayerType((mixing[name], last)) for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, family.ends(config, norm, **of_ends))


_DELTA, _FULL = "delta", "full"


def moe_rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for a family with experts."""
    yield from moe_base.moe_rules(config, own_keys(config, HybridMoeConfig))
    yield from rules(config)


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys of `HybridConfig`."""
    yield from gated_delta_config.rules(config, own_keys(config, HybridConfig))
    yield from partial_rope.rules(config)


_LINEAR_ATTENTION = "model.layers.{layer}.linear_attn."
_SHARED = "model.layers.{layer}.mlp.shared_expert"

_OUTSIDE_PROJECTIONS = (
    Tensor("delta.conv_query", _LINEAR_ATTENTION + "conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_key", _LINEAR_ATTENTION + "conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_value", _LINEAR_ATTENTION + "conv1d.weight", "v h c -> (v h) () c"),
    Tensor("delta.decay", _LINEAR_ATTENTION + "A_log", "v -> v"),
    Tensor("delta.decay_bias", _LINEAR_ATTENTION + "dt_bias", "v -> v"),
    Tensor("delta.norm", _LINEAR_ATTENTION + "norm.weight", "h -> h"),
    Tensor("delta.out", _LINEAR_ATTENTION + "out_proj.weight", "v h d -> d (v h)"),
)

FUSED = (
    Tensor("delta.qkvz", _LINEAR_ATTENTION + "in_proj_qkvz.weight", "d k e -> (k e) d"),
    Tensor("delta.ba", _LINEAR_ATTENTION + "in_proj_ba.weight", "d k e -> (k e) d"),
    *_OUTSIDE_PROJECTIONS,
)
"""Tensor-table rows for the delta rule in Qwen3-Next. The queries, keys, values and gates of each
key head are concatenated, both in transformers and in maxpipe."""

SEPARATE = (
    Tensor("delta.query", _LINEAR_ATTENTION + "in_proj_qkv.weight", "d k h -> (k h) d"),
    Tensor("delta.key", _LINEAR_ATTENTION + "in_proj_qkv.weight", "d k h -> (k h) d"),
    Tensor("delta.value", _LINEAR_ATTENTION + "in_proj_qkv.weight", "d v h -> (v h) d"),
    Tensor("delta.gate", _LINEAR_ATTENTION + "in_proj_z.weight", "d v h -> (v h) d"),
    Tensor("delta.write", _LINEAR_ATTENTION + "in_proj_b.weight", "d v -> v d"),
    Tensor("delta.forget", _LINEAR_ATTENTION + "in_proj_a.weight", "d v -> v d"),
    *_OUTSIDE_PROJECTIONS,
)
"""Tensor-table rows for the delta rule in Qwen3.5."""

SHARED_EXPERT = (
    Tensor("experts.shared_gate", _SHARED + ".gate_proj.weight", "d f -> f d"),
    Tensor("experts.shared_up", _SHARED + ".up_proj.weight", "d f -> f d"),
    Tensor("experts.shared_down", _SHARED + ".down_proj.weight", "f d -> d f"),
    Tensor("experts.shared_weight", _SHARED + "_gate.weight", "d -> () d"),
)


def tensors(delta: tuple[Tensor, ...], *others: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor table of a family; `others` are the rows of the last branch."""
    return (
        *huggingface.ENDS,
        *huggingface.norms(
            delta_norm="input_layernorm",
            attention_norm="input_layernorm",
            mlp_norm="post_attention_layernorm",
            experts_norm="post_attention_layernorm",
        ),
        *delta,
        *huggingface.ATTENTION,
        *huggingface.HEAD_NORMS,
        *others,
    )


EXPERTS = (
    *huggingface.experts("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    *SHARED_EXPERT,
)
"""Tensor-table rows for the experts of a layer and their shared expert."""


def keys(
    section: str, ignored: tuple[str, ...] = (), rotary: tuple[Row, ...] = ()
) -> tuple[Row, ...]:
    """Return the key-table rows that all families with the delta rule share.

    `section` is the name of the family's config section. `ignored` and `rotary` are passed to
    `partial_rope`.
    """
    return (
        layer_type_rows.Period(
            f"{section}.full_attention_interval", "linear_attention", 4, "full_attention_interval"
        ),
        *gated_delta_config.rows(section),
        *partial_rope.table_rows(section, 0.25, ignored=ignored, more=rotary),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    )


def expert_keys(section: str, num_experts: int, per_token: int) -> tuple[Row, ...]:
    """Return the key-table rows for experts. The numbers are the defaults in transformers."""
    return (
        Key("moe_intermediate_size", f"{section}.d_expert", 512, zero_means="d_mlp"),
        Key("shared_expert_intermediate_size", f"{section}.d_shared_expert", 512),
        Key("num_experts", f"{section}.num_experts", num_experts, also="num_local_experts"),
        Key("num_experts_per_tok", f"{section}.top_k", per_token),
        Fixed("mlp_only_layers", ([],), []),
        *huggingface.BALANCED,
    )


_HUGGINGFACE = HuggingFace(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    keys=(
        *huggingface.sizes(
            layers=48, width=2048, heads=16, kv_heads=2, head_dim=256, mlp=5632, vocab=151936
        ),
        *keys("qwen3_next"),
        *expert_keys("qwen3_next", 512, 10),
        Key("norm_topk_prob", "qwen3_next.norm_topk_prob", True),
        Fixed("decoder_sparse_step", (1,), 1),
        Kept("use_sliding_window"),
    ),
    tensors=tensors(FUSED, *EXPERTS),
    duplicate_keys=(Twice("num_experts", "num_local_experts", is_read=False, default=512),),
    # Tensors of multi-token prediction layers, which transformers also ignores.
    unused=("*.rotary_emb.inv_freq", "mtp.*"),
)

BOUNDS = (
    Bound("full_attention_interval", 4, 1),
    *gated_delta_config.BOUNDS,
    *partial_rope.BOUNDS,
)
"""Allowed ranges of the keys in `HybridConfig`."""

MOE_BOUNDS = (*moe_base.MOE_BOUNDS, *BOUNDS, Bound("d_shared_expert", 512, 1, axis="mlp"))
"""Allowed ranges of the keys in `HybridMoeConfig`."""

FAMILY = Family(
    "qwen3_next",
    Qwen3NextConfig,
    describe,
    bounds=MOE_BOUNDS,
    rules=moe_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
