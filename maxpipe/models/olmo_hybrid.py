"""OLMo Hybrid: the gated delta rule with pre-norms, and attention with post-norms as in OLMo 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maxpipe.errors import RuleViolation
from maxpipe.models import family, gated_delta_config, huggingface, rope_config
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.gated_delta_config import GatedDeltaConfig
from maxpipe.models.huggingface import (
    FULL,
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Ours,
    Row,
    Tensor,
    Theirs,
    UnsupportedError,
)
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class OlmoHybridConfig(GatedDeltaConfig, RopeConfig):
    """Keys that only OLMo Hybrid models use. `model.num_heads`, `num_kv_heads` and `head_dim` apply
    to the layers with attention.
    """

    attention_layers: list[int] = field(default_factory=list, hash=False)  # lists are not hashable
    """Zero-based indices of the layers with attention. All other layers use the gated delta
    rule."""
    linear_allow_neg_eigval: bool = True
    """Double the write gates of delta-rule layers, so that the state's transition matrix can have
    negative eigenvalues (arXiv:2411.12537)."""
    rotary_positions: bool = False
    """Rotate queries and keys by their positions in layers with attention."""


_DELTA, _ATTENTION = "delta", "attention"
_EPSILON = 1e-5
"""Epsilon of the output norm in delta-rule layers, which `config.json` does not define."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `delta` and `attention`, or only one of the two."""
    own = own_keys(config, OlmoHybridConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = replace(rope_config.rope(config, own), enabled="has_rope")
    attention = family.attention(config, rope, head_norm=norm, joint_norm=True)
    delta = gated_delta_config.gated_delta(
        config, own, _EPSILON, fused=False, allow_neg_eigval=own.linear_allow_neg_eigval
    )
    mlp, dropout = family.mlp(config), config.dropout
    types = {
        _DELTA: LayerType(
            (
                Branch("delta", delta, norm, dropout=dropout),
                Branch("mlp", mlp, norm, dropout=dropout),
            )
        ),
        _ATTENTION: LayerType(
            (
                Branch("attention", attention, None, norm, dropout),
                Branch("mlp", mlp, None, norm, dropout),
            )
        ),
    }
    layers = tuple(
        _ATTENTION if layer in own.attention_layers else _DELTA
        for layer in range(config.num_layers)
    )
    values = {"has_rope": family.same_everywhere(config, float(own.rotary_positions))}
    layer_types = {name: types[name] for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, family.ends(config, norm), values)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, OlmoHybridConfig)
    yield from family.layer_indices(config, "attention_layers", own.attention_layers)
    yield from gated_delta_config.rules(config, own)
    yield from rope_config.rules(config, own)


_SECTION, _LINEAR = "olmo_hybrid", "linear_attention"


class _LayerTypes:
    """Key-table row for `layer_types`. transformers requires at least one layer of each type."""

    names = ("layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the indices of the layers with attention."""
        types, count = theirs.get("layer_types"), ours["num_layers"]
        if types is None:  # as in transformers
            types = [_LINEAR if number % 4 else FULL for number in range(1, count + 1)]
            if FULL not in types:
                types[-1:] = [FULL]
        known = {_LINEAR, FULL}
        if not isinstance(types, list) or len(types) != count or {*map(str, types)} != known:
            rule = f"must list {count} layers, each {_LINEAR!r} or {FULL!r}, with both types."
            raise UnsupportedError("layer_types", types, rule)
        layers = [number for number, name in enumerate(types) if name == FULL]
        return {f"{_SECTION}.attention_layers": layers}

    def write(self, ours: Ours) -> Theirs:
        """Return the type of each layer."""
        key = f"{_SECTION}.attention_layers"
        types = [FULL if n in ours[key] else _LINEAR for n in range(ours["num_layers"])]
        if {*types} != {_LINEAR, FULL}:
            rule = "must contain at least one layer, but not all layers."
            raise UnsupportedError(f"model.{key}", ours[key], rule)
        return {"layer_types": types}


def _key_dim(ours: Ours) -> int:
    return int(0.75 * ours["d_model"] / max(ours[f"{_SECTION}.linear_num_key_heads"], 1))


_KEYS: tuple[Row, ...] = (
    *huggingface.sizes(width=3840, heads=30, mlp=11008, vocab=100352),
    *gated_delta_config.rows(
        _SECTION,
        linear_num_key_heads=lambda ours: ours["num_heads"],
        linear_num_value_heads=lambda ours: ours["num_heads"],
        linear_key_head_dim=_key_dim,
        linear_value_head_dim=lambda ours: 2 * ours[f"{_SECTION}.linear_key_head_dim"],
    ),
    Key("linear_allow_neg_eigval", f"{_SECTION}.linear_allow_neg_eigval", True),
    _LayerTypes(),
    rope_config.row(_SECTION, 65536, enabled=f"{_SECTION}.rotary_positions"),
    Fixed("hidden_act", ("silu",), "silu"),
    Fixed("attention_bias", (False,), False),
    *(
        Kept(f"linear_{name}")
        for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
)

_DELTA_RULE = "model.layers.{layer}.linear_attn."
_CONVOLUTIONS = tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv")

_DELTA_TENSORS = (
    Tensor("delta.query", f"{_DELTA_RULE}q_proj.weight", "d k h -> (k h) d"),
    Tensor("delta.key", f"{_DELTA_RULE}k_proj.weight", "d k h -> (k h) d"),
    Tensor("delta.value", f"{_DELTA_RULE}v_proj.weight", "d v h -> (v h) d"),
    Tensor("delta.gate", f"{_DELTA_RULE}g_proj.weight", "d v h -> (v h) d"),
    Tensor("delta.write", f"{_DELTA_RULE}b_proj.weight", "d v -> v d"),
    Tensor("delta.forget", f"{_DELTA_RULE}a_proj.weight", "d v -> v d"),
    Tensor("delta.conv_query", f"{_DELTA_RULE}q_conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_key", f"{_DELTA_RULE}k_conv1d.weight", "k h c -> (k h) () c"),
    Tensor("delta.conv_value", f"{_DELTA_RULE}v_conv1d.weight", "v h c -> (v h) () c"),
    Tensor("delta.decay", f"{_DELTA_RULE}A_log", "v -> v"),
    Tensor("delta.decay_bias", f"{_DELTA_RULE}dt_bias", "v -> v"),
    Tensor("delta.norm", f"{_DELTA_RULE}o_norm.weight", "h -> h"),
    Tensor("delta.out", f"{_DELTA_RULE}o_proj.weight", "v h d -> d (v h)"),
)

_HUGGINGFACE = HuggingFace(
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    keys=_KEYS,
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            delta_norm="attention_layer_norm",
            mlp_norm="feedforward_layer_norm",
            attention_after_norm="post_attention_layernorm",
            mlp_after_norm="post_feedforward_layernorm",
        ),
        *_DELTA_TENSORS,
        *huggingface.ATTENTION,
        *huggingface.JOINT_NORMS,
        *huggingface.MLP,
    ),
    # transformers 5.24 saves parts of equal size, and concatenates parts of any size.
    split_tensors=(("linear_attn.conv1d.weight", _CONVOLUTIONS),),
)

FAMILY = Family(
    "olmo_hybrid",
    OlmoHybridConfig,
    describe,
    bounds=(*gated_delta_config.BOUNDS, *rope_config.BOUNDS),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
