"""Kimi Linear (arXiv:2510.26692): Kimi delta attention, latent attention and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from maxpipe.errors import RuleViolation
from maxpipe.models import deepseek, deepseek_v32, family, huggingface, moe
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.deepseek import LatentConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    FULL,
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Row,
    Tensor,
    Theirs,
    Twice,
    UnsupportedError,
)
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.kda import KimiDelta
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiLinearConfig(LatentConfig):
    """Keys that only Kimi Linear models use. `model.num_heads` and `model.head_dim` apply to the
    layers with latent attention, which has no rotary positions. `model.head_dim` is the query/key
    head dim, including the `qk_rope_head_dim` dims that all heads share in keys.
    """

    attention_layers: list[int] = field(default_factory=list, hash=False)  # lists are not hashable
    """Zero-based indices of the layers with latent attention. All other layers use Kimi delta
    attention."""
    linear_num_heads: int = 32
    """Number of heads in layers with Kimi delta attention. Each head has a separate state."""
    linear_head_dim: int = 128
    """Dimension of queries, keys and values in layers with Kimi delta attention."""
    linear_conv_kernel_dim: int = 4
    """Width in tokens of the convolution over queries, keys and values, including the current
    token."""
    kda_chunk_size: int = 64
    """Number of tokens per chunk of Kimi delta attention, a power of two. Larger chunks lead to
    larger matmuls but more FLOPs. The chunk size affects results only through rounding."""


_DELTA, _DENSE = "kda", "_dense"
_NAMES = {True: "full", False: _DELTA}
"""Layer types with and without latent attention. Layers with an MLP have the suffix `_dense`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `kda` and `full`, and with `kda_dense` and `full_dense`
    for the leading layers without experts.
    """
    own, norm = own_keys(config, KimiLinearConfig), RMSNorm(config.d_model, config.norm_epsilon)
    delta = KimiDelta(
        config.d_model,
        own.linear_num_heads,
        own.linear_head_dim,
        own.linear_conv_kernel_dim,
        RMSNorm(own.linear_head_dim, config.norm_epsilon, scales_in_float32=True),
        family.residual_gain(config),
        own.kda_chunk_size,
    )
    rope = Rope(config.rope_theta, rotary_dims=own.qk_rope_head_dim, enabled="has_rope")
    mixing = {
        True: Branch("attention", deepseek.with_rope(config, rope), norm, dropout=config.dropout),
        False: Branch("kda", delta, norm, dropout=config.dropout),
    }
    last = {
        True: Branch("mlp", family.mlp(config), norm, dropout=config.dropout),
        False: Branch("experts", moe.all_experts(config), norm, dropout=config.dropout),
    }
    layers, types = [], {}
    for number in range(config.num_layers):
        is_full, is_dense = number in own.attention_layers, number < own.num_dense_layers
        name = _NAMES[is_full] + _DENSE * is_dense
        types[name] = LayerType((mixing[is_full], last[is_dense]))
        layers.append(name)
    values = {"has_rope": family.same_everywhere(config, 0.0)}
    return Model(types, tuple(layers), family.ends(config, norm), values)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, KimiLinearConfig)
    yield from family.layer_indices(config, "attention_layers", own.attention_layers)
    yield from deepseek.latent_rules(config)
    yield from family.chunk_rule("model.kimi_linear", "kda_chunk_size", own.kda_chunk_size)


_LINEAR = "linear_attention"
_SIZES = {
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
"""Key in `linear_attn_config` and default of each size of the layers with Kimi delta attention."""
_FULL_LAYERS, _DELTA_LAYERS = "full_attn_layers", "kda_layers"


class _LinearAttention:
    """Key-table row for the layer types, and for the sizes of layers with Kimi delta attention.

    Published folders have the object `linear_attn_config`, whose layer numbers start at 1.
    transformers writes `layer_types` and `linear_*` keys, and prefers the sizes of the object.
    """

    names = ("layer_types", "linear_attn_config", *_SIZES)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the sizes and the indices of the layers with latent attention."""
        inner, count = huggingface.an_object(theirs, "linear_attn_config"), ours["num_layers"]
        values: dict[str, Any] = {}
        for name, (inner_name, default) in _SIZES.items():
            value, other = inner.get(inner_name), theirs.get(name)
            if value is not None and other not in (None, value):
                rule = f"must be {value!r} to match linear_attn_config.{inner_name}."
                raise UnsupportedError(name, other, rule)
            first = (each for each in (value, other, default) if each is not None)
            values[f"kimi_linear.{name}"] = next(first)
        types = theirs.get("layer_types")
        if types is not None:
            known = (FULL, _LINEAR)
            if (
                not isinstance(types, list)
                or len(types) != count
                or not {*map(str, types)} <= {*known}
            ):
                rule = f"must list {count} layers, each {_LINEAR!r} or {FULL!r}."
                raise UnsupportedError("layer_types", types, rule)
            layers = [number for number, name in enumerate(types) if name == FULL]
        elif (listed := self._listed(inner)) is not None:
            layers, others = listed
            if sorted([*layers, *others]) != [*range(1, len(layers) + len(others) + 1)] or (
                len(layers) + len(others) != count
            ):
                rule = f"and {_DELTA_LAYERS} must list each layer from 1 to {count} once."
                key = f"linear_attn_config.{_FULL_LAYERS}"
                raise UnsupportedError(key, layers, rule)
            layers = sorted(number - 1 for number in layers)
        else:  # as in transformers
            layers = [*range(4, count, 4)] if type(count) is int else []
        return values | {"kimi_linear.attention_layers": layers}

    def write(self, ours: Ours) -> Theirs:
        """Return the layer types and sizes, in both notations of the layer types."""
        layers = {*ours["kimi_linear.attention_layers"]}
        numbers = range(ours["num_layers"])
        inner = {
            inner_name: ours[f"kimi_linear.{name}"] for name, (inner_name, _) in _SIZES.items()
        }
        inner[_FULL_LAYERS] = [number + 1 for number in numbers if number in layers]
        inner[_DELTA_LAYERS] = [number + 1 for number in numbers if number not in layers]
        types = [FULL if number in layers else _LINEAR for number in numbers]
        return {"layer_types": types, "linear_attn_config": inner}

    def restated(self, theirs: Theirs) -> tuple[str, Any] | None:
        """Return the layers in `linear_attn_config` that contradict `layer_types`, or None."""
        types, inner = theirs.get("layer_types"), theirs.get("linear_attn_config")
        listed = self._listed(inner) if isinstance(inner, dict) else None
        if not isinstance(types, list) or listed is None:
            return None
        layers = [number for number, name in enumerate(types, 1) if name == FULL]
        if sorted(listed[0]) == layers:
            return None
        return f"linear_attn_config.{_FULL_LAYERS}", listed[0]

    @staticmethod
    def _listed(inner: Theirs) -> tuple[list[int], list[int]] | None:
        """Return the numbers of the layers with and without latent attention, if both are
        listed.
        """
        lists = []
        for name in (_FULL_LAYERS, _DELTA_LAYERS):
            numbers = inner.get(name)
            if numbers is None:
                return None
            if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
                rule = "must be a list of layer numbers."
                raise UnsupportedError(f"linear_attn_config.{name}", numbers, rule)
            lists.append(numbers)
        return lists[0], lists[1]


_SECTION = "kimi_linear"
_SIZE_ROWS = huggingface.sizes(layers=27, width=2304, mlp=9216, vocab=163840, epsilon=1e-5)
_KEYS: tuple[Row, ...] = (
    *(row for row in _SIZE_ROWS if "head_dim" not in row.names),
    deepseek.HeadSizes(_SECTION, reads_head_dim=False),
    Key("v_head_dim", f"{_SECTION}.v_head_dim", 128),
    Key("kv_lora_rank", f"{_SECTION}.kv_lora_rank", 512),
    huggingface.OrNone("q_lora_rank", f"{_SECTION}.q_lora_rank", 0),
    _LinearAttention(),
    Key("first_k_dense_replace", f"{_SECTION}.num_dense_layers", 1),
    deepseek_v32.MlpLayerTypes(_SECTION),
    Key("moe_intermediate_size", f"{_SECTION}.d_expert", 1024, zero_means="d_mlp"),
    deepseek.SharedExperts("num_shared_experts", f"{_SECTION}.num_shared_experts", 1),
    Key("routed_scaling_factor", f"{_SECTION}.routed_scaling_factor", 2.446),
    Key("num_experts", f"{_SECTION}.num_experts", 256),
    Key("num_experts_per_token", f"{_SECTION}.top_k", 8),
    Key("num_expert_group", f"{_SECTION}.num_expert_groups", 1),
    Key("topk_group", f"{_SECTION}.expert_groups_per_token", 1),
    Only(f"{_SECTION}.group_scores", "top2"),
    Fixed("moe_router_activation_func", ("sigmoid",), "sigmoid"),
    Only(f"{_SECTION}.score_func", "sigmoid"),
    Key("moe_renormalize", f"{_SECTION}.norm_topk_prob", True),
    Only(f"{_SECTION}.expert_bias", True),
    Fixed("use_grouped_topk", (True,), True),
    Fixed("mla_use_nope", (True,), True),
    Fixed("moe_layer_freq", (1,), 1),
    Fixed("num_nextn_predict_layers", (0,), 0),
    Fixed("hidden_act", ("silu",), "silu"),
    Fixed("attention_bias", (False,), False),
    *map(
        Kept,
        (
            *("head_dim", "model_max_length", "rope_theta", "rope_scaling", "rope_parameters"),
            "output_router_logits",
        ),
    ),
)

_LAYER = "model.layers.{layer}."
_DELTA_RULE, _SPARSE = f"{_LAYER}self_attn.", f"{_LAYER}block_sparse_moe."

_DELTA_TENSORS = (
    *(
        Tensor(f"kda.{name}", f"{_DELTA_RULE}{name[0]}_proj.weight", "d h k -> (h k) d")
        for name in ("query", "key", "value")
    ),
    *(
        Tensor(f"kda.conv_{name}", f"{_DELTA_RULE}{name[0]}_conv1d.weight", "h k c -> (h k) () c")
        for name in ("query", "key", "value")
    ),
    Tensor("kda.forget_down", f"{_DELTA_RULE}f_a_proj.weight", "d r -> r d"),
    Tensor("kda.forget_up", f"{_DELTA_RULE}f_b_proj.weight", "r h k -> (h k) r"),
    Tensor("kda.gate_down", f"{_DELTA_RULE}g_a_proj.weight", "d r -> r d"),
    Tensor("kda.gate_up", f"{_DELTA_RULE}g_b_proj.weight", "r h k -> (h k) r"),
    Tensor("kda.write", f"{_DELTA_RULE}b_proj.weight", "d h -> h d"),
    Tensor("kda.decay", f"{_DELTA_RULE}A_log", "h -> () () h ()"),
    Tensor("kda.decay_bias", f"{_DELTA_RULE}dt_bias", "h k -> (h k)"),
    Tensor("kda.norm", f"{_DELTA_RULE}o_norm.weight", "k -> k"),
    Tensor("kda.out", f"{_DELTA_RULE}o_proj.weight", "h k d -> d (h k)"),
)

_HUGGINGFACE = HuggingFace(
    "KimiLinearForCausalLM",
    "kimi_linear",
    keys=_KEYS,
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            kda_norm="input_layernorm",
            attention_norm="input_layernorm",
            mlp_norm="post_attention_layernorm",
            experts_norm="post_attention_layernorm",
        ),
        *_DELTA_TENSORS,
        *deepseek.ATTENTION_TENSORS,
        *huggingface.MLP,
        *huggingface.experts("block_sparse_moe", router="gate", gate="w1", up="w3", down="w2"),
        Tensor("experts.router_bias", f"{_SPARSE}gate.e_score_correction_bias", "e -> e"),
        *(
            Tensor(f"experts.shared_{name}", f"{_SPARSE}shared_experts.{name}_proj.weight", dims)
            for name, dims in (("gate", "d f -> f d"), ("up", "d f -> f d"), ("down", "f d -> d f"))
        ),
    ),
    modules=(
        (".block_sparse_moe.", ".mlp."),
        *(
            (f".self_attn.{name}", f".self_attn.forget_gate.{name}")
            for name in ("f_a_proj.", "f_b_proj.", "A_log", "dt_bias")
        ),
    ),
    duplicate_keys=(
        Twice("num_experts", "num_local_experts"),
        Twice("num_experts_per_token", "num_experts_per_tok"),
        Twice("num_shared_experts", "n_shared_experts"),
        Twice("num_expert_group", "n_group"),
        Twice("moe_renormalize", "norm_topk_prob"),
        Twice("model_max_length", "max_position_embeddings"),
    ),
)

FAMILY = Family(
    "kimi_linear",
    KimiLinearConfig,
    describe,
    bounds=(
        *deepseek.LATENT_BOUNDS,
        Bound("linear_num_heads", 32, 1, axis="heads"),
        Bound("linear_head_dim", 128, 1, axis="head_dim latent"),
        Bound("linear_conv_kernel_dim", 4, 2, 64),
        Bound("kda_chunk_size", 64, 1, 1024),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
