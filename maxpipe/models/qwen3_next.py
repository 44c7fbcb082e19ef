"""Qwen3-Next: the gated delta rule in most layers, and full attention in every fourth layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, moe_base
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Rotary,
    Tensor,
    Theirs,
    Twice,
    UnsupportedError,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.gated_delta import GatedDelta
from maxpipe.models.layers.mlp import GatedMLP, RMSNorm
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextConfig(MixtureConfig):
    """Keys that only Qwen3-Next models use. `model.num_heads`, `num_kv_heads` and `head_dim` apply
    to the layers with attention. Every layer has experts.
    """

    full_attention_interval: int = field(default=4, metadata=renamed_from("attention_period"))
    """Interval between layers with full attention. With interval n, every n-th layer has full
    attention and all others use the gated delta rule."""
    linear_num_key_heads: int = field(default=16, metadata=renamed_from("num_key_heads"))
    """Number of query and key heads in delta-rule layers."""
    linear_num_value_heads: int = field(default=32, metadata=renamed_from("num_value_heads"))
    """Number of value heads in delta-rule layers, a multiple of `linear_num_key_heads`. Each value
    head has a separate state."""
    linear_key_head_dim: int = field(default=128, metadata=renamed_from("key_size"))
    """Dimension of a query or key head in delta-rule layers."""
    linear_value_head_dim: int = field(default=128, metadata=renamed_from("value_size"))
    """Dimension of a value head in delta-rule layers."""
    linear_conv_kernel_dim: int = field(default=4, metadata=renamed_from("kernel"))
    """Width in tokens of the convolution over queries, keys and values, including the current
    token."""
    gdn_chunk_size: int = field(default=64, metadata=renamed_from("chunk"))
    """Number of tokens per chunk of the delta rule, a power of two. Larger chunks lead to larger
    matmuls but more FLOPs. The chunk size affects results only through rounding."""
    rotary_dim: int = field(default=0, metadata=renamed_from("rope_size"))
    """Number of leading dims of each attention head that are rotated. Must be even. If 0, all dims
    are rotated."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length (YaRN). 1 disables the
    scaling."""
    original_max_position_embeddings: int = field(
        default=262144, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `model.qwen3_next.rope_factor` is above
    1."""
    d_shared_expert: int = field(default=512, metadata=renamed_from("d_shared"))
    """Hidden width of the shared expert, which processes all tokens and has a separate gate."""
    norm_topk_prob: bool = field(default=True, metadata=renamed_from("normalised_weights"))
    """Normalize the probabilities of each token's selected experts so that they sum to 1."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `delta` and `full`, or only one of the two."""
    own = own_keys(config, Qwen3NextConfig)
    epsilon, gain = config.norm_epsilon, family.residual_gain(config)
    norm = RMSNorm(config.d_model, epsilon, offset=1.0)
    rope = family.yarn(config.rope_theta, own.rope_factor, own.original_max_position_embeddings)
    attention = family.attention(
        config,
        replace(rope, rotary_dims=own.rotary_dim),
        head_norm=RMSNorm(config.head_dim, epsilon, offset=1.0),
        gated=True,
    )
    delta = GatedDelta(
        config.d_model,
        own.linear_num_key_heads,
        own.linear_num_value_heads,
        own.linear_key_head_dim,
        own.linear_value_head_dim,
        own.linear_conv_kernel_dim,
        RMSNorm(own.linear_value_head_dim, epsilon),
        gain,
        own.gdn_chunk_size,
    )
    experts = moe_base.experts(
        config,
        own,
        shared=GatedMLP(config.d_model, own.d_shared_expert, gain),
        shared_gated=True,
        normalised=own.norm_topk_prob,
    )
    routed = Branch("experts", experts, norm, dropout=config.dropout)
    mixing = {
        _DELTA: Branch("delta", delta, norm, dropout=config.dropout),
        _FULL: Branch("attention", attention, norm, dropout=config.dropout),
    }
    layers = tuple(
        _DELTA if number % own.full_attention_interval else _FULL
        for number in range(1, config.num_layers + 1)
    )
    layer_types = {name: LayerType((mixing[name], routed)) for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, family.ends(config, norm))


_DELTA, _FULL = "delta", "full"


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Qwen3NextConfig)
    yield from moe_base.moe_rules(config, own)
    if own.linear_num_value_heads % own.linear_num_key_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.qwen3_next.linear_num_value_heads",
            "must be a multiple of model.qwen3_next.linear_num_key_heads "
            f"({own.linear_num_key_heads}), because every key head serves the same number of "
            "value heads.",
            f"Set model.qwen3_next.linear_num_value_heads={2 * own.linear_num_key_heads}.",
        )
    if own.rotary_dim > config.head_dim or own.rotary_dim % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.qwen3_next.rotary_dim",
            f"must be even and at most model.head_dim ({config.head_dim}), because dims are "
            "rotated in pairs.",
            "Set model.qwen3_next.rotary_dim=0 to rotate all dims.",
        )
    if own.gdn_chunk_size & (own.gdn_chunk_size - 1):
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.qwen3_next.gdn_chunk_size",
            "must be a power of two, because chunks are computed by recursive halving.",
            f"Set model.qwen3_next.gdn_chunk_size={1 << own.gdn_chunk_size.bit_length() - 1}.",
        )


@dataclass(frozen=True)
class _Turning:
    """Key-table row for `partial_rotary_factor`, the fraction of rotated dims per head."""

    beside: bool = False
    """Whether this row handles the key in `rope_parameters`, which takes precedence."""
    names = ("partial_rotary_factor",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of rotated dims."""
        if self.beside:
            return {}
        stated = theirs.get(self.names[0])
        factor = 0.25 if stated is None else stated
        head = ours["head_dim"]
        if type(factor) not in (int, float) or not 0 < factor <= 1 or not isinstance(head, int):
            raise UnsupportedError(
                "partial_rotary_factor", factor, "must be greater than 0 and at most 1."
            )
        if (size := int(head * factor)) < 2 or size % 2:
            rule = (
                f"must rotate a positive even number of the {head} dims of a head, but rotates "
                f"{size}."
            )
            raise UnsupportedError("partial_rotary_factor", factor, rule)
        return {"qwen3_next.rotary_dim": size}

    def write(self, ours: Ours) -> Theirs:
        """Return a fraction that yields the same number of rotated dims in transformers."""
        head = ours["head_dim"]
        size = ours["qwen3_next.rotary_dim"] or head
        factor = size / head
        if int(head * factor) < size:
            factor = math.nextafter(factor, 1.0)
        return {"partial_rotary_factor": factor}


_LINEAR_ATTENTION = "model.layers.{layer}.linear_attn."
_SHARED = "model.layers.{layer}.mlp.shared_expert"

_DELTA_TENSORS = (
    Tensor("delta.qkvz", _LINEAR_ATTENTION + "in_proj_qkvz.weight", "d k e -> (k e) d"),
    Tensor("delta.ba", _LINEAR_ATTENTION + "in_proj_ba.weight", "d k e -> (k e) d"),
    Tensor("delta.conv_query", _LINEAR_ATTENTION + "conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_key", _LINEAR_ATTENTION + "conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_value", _LINEAR_ATTENTION + "conv1d.weight", "v h c -> (v h) () c"),
    Tensor("delta.decay", _LINEAR_ATTENTION + "A_log", "v -> v"),
    Tensor("delta.decay_bias", _LINEAR_ATTENTION + "dt_bias", "v -> v"),
    Tensor("delta.norm", _LINEAR_ATTENTION + "norm.weight", "h -> h"),
    Tensor("delta.out", _LINEAR_ATTENTION + "out_proj.weight", "v h d -> d (v h)"),
)
"""The queries, keys, values and gates of each key head are concatenated, both in transformers and
in maxpipe."""

_SHARED_EXPERT = (
    Tensor("experts.shared_gate", _SHARED + ".gate_proj.weight", "d f -> f d"),
    Tensor("experts.shared_up", _SHARED + ".up_proj.weight", "d f -> f d"),
    Tensor("experts.shared_down", _SHARED + ".down_proj.weight", "f d -> d f"),
    Tensor("experts.shared_weight", _SHARED + "_gate.weight", "d -> () d"),
)

_SCALING = "qwen3_next.rope_factor"

_HUGGINGFACE = HuggingFace(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    keys=(
        *huggingface.sizes(
            layers=48, width=2048, heads=16, kv_heads=2, head_dim=256, mlp=5632, vocab=151936
        ),
        huggingface.Period(
            "qwen3_next.full_attention_interval", "linear_attention", 4, "full_attention_interval"
        ),
        Key("linear_num_key_heads", "qwen3_next.linear_num_key_heads", 16),
        Key("linear_num_value_heads", "qwen3_next.linear_num_value_heads", 32),
        Key("linear_key_head_dim", "qwen3_next.linear_key_head_dim", 128),
        Key("linear_value_head_dim", "qwen3_next.linear_value_head_dim", 128),
        Key("linear_conv_kernel_dim", "qwen3_next.linear_conv_kernel_dim", 4),
        Key("moe_intermediate_size", "qwen3_next.d_expert", 512, zero_means="d_mlp"),
        Key("shared_expert_intermediate_size", "qwen3_next.d_shared_expert", 512),
        Key("num_experts", "qwen3_next.num_experts", 512, also="num_local_experts"),
        Key("num_experts_per_tok", "qwen3_next.top_k", 10),
        Key("norm_topk_prob", "qwen3_next.norm_topk_prob", True),
        _Turning(),
        Rotary(
            "rope_theta",
            10000.0,
            {
                "default": (_Turning(beside=True), Only(_SCALING, 1.0)),
                "yarn": (
                    _Turning(beside=True),
                    Key("factor", _SCALING),
                    Key(
                        "original_max_position_embeddings",
                        "qwen3_next.original_max_position_embeddings",
                    ),
                    *huggingface.YARN,
                ),
            },
            unscaled={},
            select_type=lambda ours: "default" if ours[_SCALING] == 1 else "yarn",
        ),
        Fixed("decoder_sparse_step", (1,), 1),
        Fixed("mlp_only_layers", ([],), []),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        Kept("use_sliding_window"),
        *huggingface.BALANCED,
    ),
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            delta_norm="input_layernorm",
            attention_norm="input_layernorm",
            experts_norm="post_attention_layernorm",
        ),
        *_DELTA_TENSORS,
        *huggingface.ATTENTION,
        *huggingface.HEAD_NORMS,
        *huggingface.experts("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        *_SHARED_EXPERT,
    ),
    duplicate_keys=(Twice("num_experts", "num_local_experts", is_read=False, default=512),),
    # Tensors of multi-token prediction layers, which transformers also ignores.
    unused=("*.rotary_emb.inv_freq", "mtp.*"),
)


FAMILY = Family(
    "qwen3_next",
    Qwen3NextConfig,
    describe,
    bounds=(
        *moe_base.MOE_BOUNDS,
        Bound("full_attention_interval", 4, 1),
        Bound("linear_num_key_heads", 16, 1, axis="kv_heads"),
        Bound("linear_num_value_heads", 32, 1, axis="heads"),
        Bound("linear_key_head_dim", 128, 1, axis="head_dim"),
        Bound("linear_value_head_dim", 128, 1, axis="head_dim"),
        Bound("linear_conv_kernel_dim", 4, 2, 64),
        Bound("gdn_chunk_size", 64, 1, 1024),
        Bound("rotary_dim", 0, 0, why="0 rotates all entries"),
        Bound("rope_factor", 1.0, 1, LARGEST, "1 disables the scaling"),
        Bound("original_max_position_embeddings", 262144, 1),
        Bound("d_shared_expert", 512, 1, axis="mlp"),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
