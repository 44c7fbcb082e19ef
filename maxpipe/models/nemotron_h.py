"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import deepseek, family, huggingface, mamba2_config, moe
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Row,
    Tensor,
    Theirs,
    UnsupportedError,
)
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import MLP, RMSNorm, Ungated
from maxpipe.models.mamba2_config import Mamba2Config
from maxpipe.models.moe import RouterConfig
from maxpipe.models.spec import Branch, LayerType, Model, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronHConfig(RouterConfig, Mamba2Config):
    """Keys that only Nemotron-H and Nemotron 3 models use. MLPs and experts have no gate, and their
    activation is the squared ReLU. Attention has no rotary positions.
    """

    hybrid_override_pattern: str = "M-M*-"
    """Types of the layers, with one letter per layer: `M` for Mamba-2, `*` for attention, `-` for
    an MLP, and `E` for experts. The pattern is repeated until it covers `model.num_layers`."""
    d_shared_expert: int = 0
    """Hidden width of the shared expert, which processes all tokens. 0 disables the shared
    expert."""
    mamba_min_time_step: float = 0.0
    """Minimum of the time steps in Mamba-2 layers, which are positive. transformers uses the key
    `time_step_min` of config.json."""


_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"
_NAMES = {_MAMBA: "mamba", _ATTENTION: "attention", _MLP: "mlp", _EXPERTS: "experts"}
_RELU2 = Ungated("relu2")


def _pattern(repeated: str, num_layers: int) -> str:
    """Return one letter for each layer."""
    return (repeated * -(-num_layers // len(repeated)))[:num_layers]


def describe(config: ModelConfig) -> Model:
    """Return a model whose layers each have one branch: `mamba`, `attention`, `mlp` or
    `experts`.
    """
    own = own_keys(config, NemotronHConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon, scales_in_float32=True)
    letters = _pattern(own.hybrid_override_pattern, config.num_layers)
    types: dict[str, LayerType] = {}
    for letter in dict.fromkeys(letters):
        branch = Branch(_NAMES[letter], _part(config, letter), norm, dropout=config.dropout)
        types[_NAMES[letter]] = LayerType((branch,))
    values = {"has_rope": family.same_everywhere(config, 0.0)}
    layers = tuple(_NAMES[letter] for letter in letters)
    return Model(types, layers, family.ends(config, norm), values)


def _part(config: ModelConfig, letter: str) -> Part:
    own = own_keys(config, NemotronHConfig)
    if letter == _MAMBA:
        return mamba2_config.mamba2(config, own, min_time_step=own.mamba_min_time_step)
    if letter == _ATTENTION:
        return family.attention(config, Rope(config.rope_theta, enabled="has_rope"))
    if letter == _MLP:
        return family.mlp(config, function=_RELU2)
    shared = None
    if own.d_shared_expert:
        gain = family.residual_gain(config)
        shared = MLP(config.d_model, own.d_shared_expert, gain, function=_RELU2)
    return moe.routed_experts(config, own, shared=shared, function=_RELU2)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own, key = own_keys(config, NemotronHConfig), "model.nemotron_h.hybrid_override_pattern"
    pattern = own.hybrid_override_pattern
    if not pattern or not {*pattern} <= {*_NAMES}:
        letters = "".join(letter for letter in pattern if letter in _NAMES)
        yield RuleViolation(
            Code.CFG_VALUE,
            key,
            "must consist of the letters M (Mamba-2), * (attention), - (MLP) and E (experts).",
            f"Set {key}='{letters or 'M-M*-'}'.",
        )
    elif len(pattern) > config.num_layers:
        yield RuleViolation(
            Code.MODEL_SIZES,
            key,
            f"must have at most model.num_layers ({config.num_layers}) letters, but has "
            f"{len(pattern)}.",
            f"Set model.num_layers={len(pattern)}.",
        )
    yield from mamba2_config.rules(config, own)
    yield from moe.router_rules(config, own)


_TYPES = {_MAMBA: "mamba", _ATTENTION: "attention", _MLP: "mlp", _EXPERTS: "moe"}
"""Names of the layer types in `config.json`. Newer releases of transformers also read these."""
_LETTERS = {name: letter for letter, name in _TYPES.items()} | {
    "linear_attention": _MAMBA,
    huggingface.FULL: _ATTENTION,
}
"""Letters of the layer types of all transformers releases."""


class _Layers:
    """Key-table row for the list of layers, whose length determines the number of layers."""

    names = ("num_hidden_layers", "hybrid_override_pattern", "layers_block_type", "layer_types")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of layers and the letter of each layer."""
        del ours
        key = "layers_block_type" if theirs.get("layers_block_type") is not None else "layer_types"
        types, pattern = theirs.get(key), theirs.get("hybrid_override_pattern")
        if types is None and pattern is None:
            types = ["mamba", "moe", "attention", "mlp"]  # as in transformers
        if types is not None:
            if not isinstance(types, list) or not types or not {*map(str, types)} <= {*_LETTERS}:
                rule = "must list the layers, each 'mamba', 'attention', 'mlp' or 'moe'."
                raise UnsupportedError(key, types, rule)
            pattern = "".join(_LETTERS[name] for name in types)
        if not isinstance(pattern, str) or not pattern or not {*pattern} <= {*_NAMES}:
            rule = "must consist of the letters M, *, - and E."
            raise UnsupportedError("hybrid_override_pattern", pattern, rule)
        count = theirs.get("num_hidden_layers")
        if count is not None and (type(count) is not int or count != len(pattern)):
            rule = f"must be {len(pattern)}, the number of listed layers, or absent."
            raise UnsupportedError("num_hidden_layers", count, rule)
        return {"num_layers": len(pattern), "nemotron_h.hybrid_override_pattern": pattern}

    def write(self, ours: Ours) -> Theirs:
        """Return the layers in the notations of all transformers releases."""
        count = ours["num_layers"]
        pattern = _pattern(ours["nemotron_h.hybrid_override_pattern"], count)
        types = [_TYPES[letter] for letter in pattern]
        return {
            "num_hidden_layers": count,
            "hybrid_override_pattern": pattern,
            "layers_block_type": types,
        }


@dataclass(frozen=True)
class _IfExperts:
    """Key-table rows that are read and written only if the model has experts."""

    rows: tuple[Row, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for row in self.rows for name in row.names)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the values of all rows."""
        values: dict[str, Any] = {}
        for row in self.rows if self._apply(ours) else ():
            values |= row.read(theirs, {**ours, **values})
        return values

    def write(self, ours: Ours) -> Theirs:
        """Return the keys of all rows."""
        return huggingface.written(self.rows if self._apply(ours) else (), ours)

    def _apply(self, ours: Ours) -> bool:
        pattern = ours["nemotron_h.hybrid_override_pattern"]
        return _EXPERTS in _pattern(pattern, ours["num_layers"])


def _sizes() -> tuple[Row, ...]:
    rows = huggingface.sizes(kv_heads=8, mlp=21504, vocab=131072)
    replaced = ("num_hidden_layers", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    return tuple(row for row in rows if not {*row.names} & {*replaced})


_EXPERT_KEYS: tuple[Row, ...] = (
    Key("n_routed_experts", "nemotron_h.num_experts", 8, also="num_local_experts"),
    Key("num_experts_per_tok", "nemotron_h.top_k", 2),
    Key("moe_intermediate_size", "nemotron_h.d_expert", 7688, zero_means="d_mlp"),
    deepseek.SharedExperts(
        "moe_shared_expert_intermediate_size", "nemotron_h.d_shared_expert", 7688
    ),
    Key("routed_scaling_factor", "nemotron_h.routed_scaling_factor", 1.0),
    Key("n_group", "nemotron_h.num_expert_groups", 1),
    Key("topk_group", "nemotron_h.expert_groups_per_token", 1),
    Key("norm_topk_prob", "nemotron_h.norm_topk_prob", True),
    Only("nemotron_h.group_scores", "top2"),
    Only("nemotron_h.score_func", "sigmoid"),
    Only("nemotron_h.expert_bias", True),
    Fixed("moe_latent_size", (None,)),
    Fixed("n_shared_experts", (1,), 1),
)

_KEYS: tuple[Row, ...] = (
    *_sizes(),
    _Layers(),
    Key("head_dim", "head_dim", 128, also="attention_head_dim"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    # transformers never ties the embeddings of this class.
    Fixed("tie_word_embeddings", (False,), False),
    Only("tied_embeddings", False),
    Key("mamba_num_heads", "nemotron_h.mamba_num_heads", 128),
    Key("mamba_head_dim", "nemotron_h.mamba_head_dim", 64),
    Key("n_groups", "nemotron_h.mamba_num_groups", 8),
    Key("ssm_state_size", "nemotron_h.mamba_state_dim", 128),
    Key("conv_kernel", "nemotron_h.mamba_conv_kernel_dim", 4),
    Key("use_conv_bias", "nemotron_h.mamba_conv_bias", True),
    Key("time_step_min", "nemotron_h.mamba_min_time_step", 0.001),
    _IfExperts(_EXPERT_KEYS),
    Fixed("mlp_hidden_act", ("relu2",), "relu2"),
    Fixed("mamba_hidden_act", ("silu",), "silu"),
    Fixed("sliding_window", (None,)),
    Fixed("attention_bias", (False,), False),
    Fixed("mlp_bias", (False,), False),
    Fixed("use_bias", (False,), False),
    Fixed("mamba_proj_bias", (False,), False),
    mamba2_config.NO_TIME_LIMIT,
    *map(
        Kept,
        (
            *("rms_norm_eps", "norm_eps", "rope_theta", "rope_parameters", "partial_rotary_factor"),
            *("chunk_size", "expand", "time_step_max", "time_step_floor"),
            *("residual_in_fp32", "rescale_prenorm_residual", "hidden_dropout"),
            *("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
            *("moe_shared_expert_overlap", "output_router_logits", "num_nextn_predict_layers"),
            *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        ),
    ),
)

_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
_RENAMED = {
    "model.layers.{layer}.self_attn.": _MIXER,
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
}


def _renamed(row: Tensor) -> Tensor:
    for llama, name in _RENAMED.items():
        row = replace(row, theirs=row.theirs.replace(llama, name))
    return row


_HUGGINGFACE = HuggingFace(
    "NemotronHForCausalLM",
    "nemotron_h",
    keys=_KEYS,
    tensors=(
        *map(_renamed, (*huggingface.ENDS, *huggingface.ATTENTION)),
        *(
            Tensor(f"{name}_norm.scale", _LAYER + "norm.weight", "d -> d")
            for name in _NAMES.values()
        ),
        *mamba2_config.tensors(_MIXER),
        Tensor("mlp.up", _MIXER + "up_proj.weight", "d f -> f d"),
        Tensor("mlp.down", _MIXER + "down_proj.weight", "f d -> d f"),
        Tensor("experts.router", _MIXER + "gate.weight", "d e -> e d"),
        Tensor("experts.router_bias", _MIXER + "gate.e_score_correction_bias", "e -> e"),
        Tensor("experts.up", _MIXER + "experts.{expert}.up_proj.weight", "d expert f -> f d"),
        Tensor("experts.down", _MIXER + "experts.{expert}.down_proj.weight", "expert f d -> d f"),
        Tensor("experts.shared_up", _MIXER + "shared_experts.up_proj.weight", "d f -> f d"),
        Tensor("experts.shared_down", _MIXER + "shared_experts.down_proj.weight", "f d -> d f"),
    ),
    # The kernels of Mamba layers bypass the module of the output projection.
    modules_without_peft=("out_proj",),
    # Tensors of multi-token prediction layers, which transformers also ignores.
    unused=("*.rotary_emb.inv_freq", "mtp.*"),
    duplicate_keys=(huggingface.Twice("num_local_experts", "n_routed_experts"),),
)

FAMILY = Family(
    "nemotron_h",
    NemotronHConfig,
    describe,
    bounds=(
        *moe.ROUTER_BOUNDS,
        *mamba2_config.BOUNDS,
        Bound("d_shared_expert", 0, 0, why="0 means no shared expert", axis="mlp"),
        Bound("mamba_min_time_step", 0.001, 0, 1, "0 disables the minimum"),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
