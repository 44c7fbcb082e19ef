"""Granite 4: Mamba-2 in most layers, attention in the others, with or without experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maxpipe.errors import RuleViolation
from maxpipe.models import family, granite, huggingface, mamba2_config, moe_base, rope_config
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.granite import MultiplierConfig
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
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.mamba2_config import Mamba2Config
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Granite4Config(MixtureConfig, Mamba2Config, MultiplierConfig, RopeConfig):
    """Keys that only Granite 4 models use. `model.d_mlp` is the width of the MLP in layers without
    experts, and of the shared expert in layers with experts.
    """

    attention_layers: list[int] = field(default_factory=list, hash=False)  # lists are not hashable
    """Zero-based indices of the layers with attention. All other layers use Mamba-2."""
    num_experts: int = 0
    """Number of experts per layer. If 0, all layers have an MLP."""
    rotary_positions: bool = False
    """Rotate queries and keys by their positions in layers with attention."""


_MAMBA, _ATTENTION = "mamba", "attention"
_TOP_K = 2
"""Number of experts per token in transformers if `config.json` lacks the key."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `mamba` and `attention`, or only one of the two."""
    own = own_keys(config, Granite4Config)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = replace(rope_config.rope(config, own), enabled="has_rope")
    attention = family.attention(config, rope, scale=own.attention_multiplier or None)
    scale = own.residual_multiplier

    def branch(name: str, part: object) -> Branch:
        return Branch(name, part, norm, dropout=config.dropout, scale=scale)  # type: ignore[arg-type]

    mlp = family.mlp(config)
    last = branch("mlp", mlp)
    if own.num_experts:
        last = branch("experts", moe_base.experts(config, own, shared=mlp))
    mixing = {
        _MAMBA: branch("mamba", mamba2_config.mamba2(config, own)),
        _ATTENTION: branch("attention", attention),
    }
    layers = tuple(
        _ATTENTION if layer in own.attention_layers else _MAMBA
        for layer in range(config.num_layers)
    )
    ends = family.ends(
        config,
        norm,
        embed_scale=own.embedding_multiplier,
        logit_scale=1.0 / own.logit_divisor,
    )
    values = {"has_rope": family.same_everywhere(config, float(own.rotary_positions))}
    layer_types = {name: LayerType((mixing[name], last)) for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, ends, values)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Granite4Config)
    yield from family.layer_indices(config, "attention_layers", own.attention_layers)
    yield from mamba2_config.rules(config, own)
    yield from rope_config.rules(config, own)
    if own.num_experts:
        yield from moe_base.moe_rules(config, own)


class _ExpertsPerToken:
    """Key-table row for the number of experts per token, which is 0 in models without experts."""

    names = ("num_experts_per_tok",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of experts per token, or no value for a model without experts."""
        if not ours["granite4.num_experts"]:
            return {}
        count = theirs.get("num_experts_per_tok")
        return {"granite4.top_k": _TOP_K if count is None else count}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of experts per token."""
        return {
            "num_experts_per_tok": ours["granite4.top_k"] if ours["granite4.num_experts"] else 0
        }


class _LayerTypes:
    """Key-table row for `layer_types`, with the names of all transformers releases."""

    names = ("layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the indices of the layers with attention."""
        types, count = theirs.get("layer_types"), ours["num_layers"]
        if types is None:
            return {"granite4.attention_layers": []}
        known = {"mamba": False, "linear_attention": False, "attention": True, FULL: True}
        if not isinstance(types, list) or len(types) != count or not set(types) <= set(known):
            rule = f"must list {count} layers, each 'mamba' or 'attention'."
            raise UnsupportedError("layer_types", types, rule)
        layers = [number for number, name in enumerate(types) if known[name]]
        return {"granite4.attention_layers": layers}

    def write(self, ours: Ours) -> Theirs:
        """Return the type of each layer."""
        layers = ours["granite4.attention_layers"]
        types = [_ATTENTION if n in layers else _MAMBA for n in range(ours["num_layers"])]
        return {"layer_types": types}


class _MambaWidth:
    """Key-table row for the size of Mamba-2 layers, a multiple of the model's width."""

    names = ("mamba_expand", "mamba_d_head")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the dimension of a head, which `config.json` may omit."""
        heads, expand = ours["granite4.mamba_num_heads"], theirs.get("mamba_expand", 2)
        size = theirs.get("mamba_d_head", "auto")
        if type(expand) is not int or type(heads) is not int or heads < 1:
            raise UnsupportedError("mamba_expand", expand, "must be a whole number.")
        width = expand * ours["d_model"]
        if size == "auto":
            size = width // heads
        if type(size) is not int or size * heads != width:
            rule = f"must be {width / heads:g}, so that all heads have the width {width}."
            raise UnsupportedError("mamba_d_head", size, rule)
        return {"granite4.mamba_head_dim": size}

    def write(self, ours: Ours) -> Theirs:
        """Return the dimension of a head, and the ratio of the widths."""
        size = ours["granite4.mamba_head_dim"]
        expand, rest = divmod(size * ours["granite4.mamba_num_heads"], ours["d_model"])
        if rest or not expand:
            rule = "times model.granite4.mamba_num_heads must be a multiple of model.d_model."
            raise UnsupportedError("model.granite4.mamba_head_dim", size, rule)
        return {"mamba_expand": expand, "mamba_d_head": size}


class _Positions:
    """Key-table row for the type of position embedding."""

    names = ("position_embedding_type",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return whether attention uses rotary positions."""
        del ours
        kind = theirs.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise UnsupportedError("position_embedding_type", kind, "must be null or 'rope'.")
        return {"granite4.rotary_positions": kind == "rope"}

    def write(self, ours: Ours) -> Theirs:
        """Return the type, or null without rotary positions."""
        rotates = ours["granite4.rotary_positions"]
        return {"position_embedding_type": "rope" if rotates else None}


_LAYER = "model.layers.{layer}."
_SHARED, _ROUTED = _LAYER + "shared_mlp.", _LAYER + "block_sparse_moe."


def _shared(part: str) -> tuple[Tensor, ...]:
    """Return the tensor-table rows of the MLP; `part` precedes the parameter names."""
    return (
        Tensor(f"{part}gate", _SHARED + "input_linear.weight", "d f -> f d"),
        Tensor(f"{part}up", _SHARED + "input_linear.weight", "d f -> f d"),
        Tensor(f"{part}down", _SHARED + "output_linear.weight", "f d -> d f"),
    )


_KEYS: tuple[Row, ...] = (
    *huggingface.sizes(mlp=1024, mlp_key="shared_intermediate_size"),
    Key("intermediate_size", "granite4.d_expert", 11008, zero_means="d_mlp"),
    Key("num_local_experts", "granite4.num_experts", 8, also="num_experts"),
    _ExpertsPerToken(),
    *granite.multiplier_rows("granite4"),
    Key("mamba_n_heads", "granite4.mamba_num_heads", 128),
    Key("mamba_n_groups", "granite4.mamba_num_groups", 1),
    Key("mamba_d_state", "granite4.mamba_state_dim", 256),
    Key("mamba_d_conv", "granite4.mamba_conv_kernel_dim", 4),
    Key("mamba_conv_bias", "granite4.mamba_conv_bias", True),
    _MambaWidth(),
    _LayerTypes(),
    _Positions(),
    rope_config.row("granite4", 2048),
    mamba2_config.NO_TIME_LIMIT,
    Fixed("mamba_proj_bias", (False,), False),
    Fixed("hidden_act", ("silu",), "silu"),
    Fixed("attention_bias", (False,), False),
    Kept("mamba_chunk_size"),
    *huggingface.BALANCED,
)

_HUGGINGFACE = HuggingFace(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    keys=_KEYS,
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            mamba_norm="input_layernorm",
            attention_norm="input_layernorm",
            mlp_norm="post_attention_layernorm",
            experts_norm="post_attention_layernorm",
        ),
        *mamba2_config.tensors(_LAYER + "mamba."),
        *huggingface.ATTENTION,
        *_shared("mlp."),
        *_shared("experts.shared_"),
        Tensor("experts.router", _ROUTED + "router.layer.weight", "d e -> e d"),
        Tensor("experts.gate", _ROUTED + "input_linear.weight", "d e f -> f d"),
        Tensor("experts.up", _ROUTED + "input_linear.weight", "d e f -> f d"),
        Tensor("experts.down", _ROUTED + "output_linear.weight", "e f d -> d f"),
    ),
)

_EXPERT_BOUNDS = (
    Bound("num_experts", 8, 0, why="0 means an MLP in all layers", axis="experts"),
    *(bound for bound in moe_base.MOE_BOUNDS if bound.key != "num_experts"),
)

FAMILY = Family(
    "granite4",
    Granite4Config,
    describe,
    bounds=(
        *_EXPERT_BOUNDS,
        *mamba2_config.BOUNDS,
        *granite.MULTIPLIER_BOUNDS,
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
