"""Falcon-H1: Mamba-2 and attention side by side in each layer, followed by an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family, huggingface, mamba2_config, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
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
from maxpipe.models.layers.mamba2 import Multipliers
from maxpipe.models.layers.mlp import RMSNorm, ScaledGate
from maxpipe.models.mamba2_config import Mamba2Config
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconH1Config(Mamba2Config, RopeConfig):
    """Keys that only Falcon-H1 models use. The multipliers are constants of arXiv:2507.22448, whose
    values depend on the width of the model.
    """

    mamba_rms_norm: bool = False
    """Normalize the gated output of Mamba-2, with one group of heads at a time."""
    embedding_multiplier: float = 1.0
    """Scalar that multiplies the embeddings."""
    lm_head_multiplier: float = 1.0
    """Scalar that multiplies the logits."""
    attention_in_multiplier: float = 1.0
    """Scalar that multiplies the input of attention."""
    attention_out_multiplier: float = 1.0
    """Scalar that multiplies the output of attention."""
    key_multiplier: float = 1.0
    """Scalar that multiplies the keys of attention."""
    ssm_in_multiplier: float = 1.0
    """Scalar that multiplies the input of Mamba-2."""
    ssm_out_multiplier: float = 1.0
    """Scalar that multiplies the output of Mamba-2."""
    ssm_multipliers: list[float] = field(
        default_factory=lambda: [1.0] * 5, hash=False
    )  # lists are not hashable
    """Scalars that multiply the gates, values, keys, queries and time steps of Mamba-2, in this
    order."""
    mlp_multipliers: list[float] = field(default_factory=lambda: [1.0] * 2, hash=False)
    """Scalars that multiply the gate projection and the output of the MLP."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type, whose branches are `mamba`, `attention` and `mlp`.

    Linear projections follow the multipliers of inputs and keys, so these multipliers are applied
    to other arrays: those of Mamba-2 to its projections, and those of attention to its scores and
    its output.
    """
    own = own_keys(config, FalconH1Config)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    into = own.attention_in_multiplier
    attention = family.attention(
        config,
        rope_config.rope(config, own),
        scale=own.key_multiplier * into**2 * config.head_dim**-0.5,
    )
    gate, down = own.mlp_multipliers
    mlp = family.mlp(config, function="silu" if gate == 1.0 else ScaledGate(gate))

    def branch(name: str, part: Any, scale: float, **options: Any) -> Branch:
        before = None if options else norm
        return Branch(name, part, before, dropout=config.dropout, scale=scale, **options)

    branches = (
        branch("mamba", _mamba2(config, own), own.ssm_out_multiplier),
        branch("attention", attention, into * own.attention_out_multiplier, shares_input=True),
        branch("mlp", mlp, down),
    )
    ends = family.ends(
        config,
        norm,
        embed_scale=own.embedding_multiplier,
        logit_scale=own.lm_head_multiplier,
    )
    return Model({"layer": LayerType(branches)}, ("layer",) * config.num_layers, ends)


def _mamba2(config: ModelConfig, own: FalconH1Config) -> Any:
    multipliers = Multipliers(*(own.ssm_in_multiplier * each for each in own.ssm_multipliers))
    options: dict[str, Any] = {} if own.mamba_rms_norm else {"norm": None}
    return mamba2_config.mamba2(config, own, multipliers=multipliers, **options)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own, section = own_keys(config, FalconH1Config), "model.falcon_h1"
    for key, names in (
        ("ssm_multipliers", "gates, values, keys, queries and time steps"),
        ("mlp_multipliers", "gates and outputs"),
    ):
        values, count = getattr(own, key), 5 if key == "ssm_multipliers" else 2
        if len(values) != count or not all(0 < value <= LARGEST for value in values):
            yield RuleViolation(
                Code.CFG_TYPE,
                f"{section}.{key}",
                f"must contain {count} positive numbers, for {names}.",
                f"Set {section}.{key}=[{','.join(['1.0'] * count)}].",
            )
    yield from mamba2_config.rules(config, own)
    yield from rope_config.rules(config, own)


class _MambaWidth:
    """Key-table row for the size of Mamba-2, with the number of heads and their dimension."""

    names = ("mamba_d_ssm", "mamba_n_heads", "mamba_d_head")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of heads and their dimension, which `config.json` may omit."""
        heads, size = theirs.get("mamba_n_heads", 128), theirs.get("mamba_d_head", "auto")
        width = theirs.get("mamba_d_ssm", 1024)
        if width is None:
            expand = theirs.get("mamba_expand", 2)
            if type(expand) is not int:
                raise UnsupportedError("mamba_expand", expand, "must be a whole number.")
            width = expand * ours["d_model"]
        if type(heads) is not int or heads < 1:
            raise UnsupportedError("mamba_n_heads", heads, "must be a positive integer.")
        if type(width) is not int or width % heads:
            raise UnsupportedError("mamba_d_ssm", width, f"must be a multiple of {heads} heads.")
        if size not in ("auto", width // heads):
            rule = f"must be {width // heads}, so that all heads have the width {width}."
            raise UnsupportedError("mamba_d_head", size, rule)
        return {
            "falcon_h1.mamba_num_heads": heads,
            "falcon_h1.mamba_head_dim": width // heads,
        }

    def write(self, ours: Ours) -> Theirs:
        """Return the number of heads, their dimension and the width of all heads."""
        heads, size = ours["falcon_h1.mamba_num_heads"], ours["falcon_h1.mamba_head_dim"]
        return {"mamba_d_ssm": heads * size, "mamba_n_heads": heads, "mamba_d_head": size}


class _GatedNorm:
    """Key-table row for the norm of the gated output of Mamba-2."""

    names = ("mamba_rms_norm", "mamba_norm_before_gate")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return whether there is a norm. A norm before the gate is not supported."""
        del ours
        norm = theirs.get("mamba_rms_norm")
        before = theirs.get("mamba_norm_before_gate")
        if norm not in (None, False, True):
            raise UnsupportedError("mamba_rms_norm", norm, "must be true or false.")
        if norm and before is not False:
            rule = (
                "must be false with mamba_rms_norm = true: a norm before the gate is unsupported."
            )
            raise UnsupportedError("mamba_norm_before_gate", before, rule)
        return {"falcon_h1.mamba_rms_norm": bool(norm)}

    def write(self, ours: Ours) -> Theirs:
        """Return whether there is a norm, and its place after the gate."""
        return {
            "mamba_rms_norm": ours["falcon_h1.mamba_rms_norm"],
            "mamba_norm_before_gate": False,
        }


_MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)

_KEYS: tuple[Row, ...] = (
    *huggingface.sizes(kv_heads=8, mlp=14336, vocab=128000, epsilon=1e-5),
    _MambaWidth(),
    _GatedNorm(),
    Key("mamba_n_groups", "falcon_h1.mamba_num_groups", 1),
    Key("mamba_d_state", "falcon_h1.mamba_state_dim", 256),
    Key("mamba_d_conv", "falcon_h1.mamba_conv_kernel_dim", 4),
    Key("mamba_conv_bias", "falcon_h1.mamba_conv_bias", True),
    *(Key(name, f"falcon_h1.{name}", 1.0) for name in _MULTIPLIERS),
    Key("ssm_multipliers", "falcon_h1.ssm_multipliers", [1.0] * 5),
    Key("mlp_multipliers", "falcon_h1.mlp_multipliers", [1.0] * 2),
    rope_config.row("falcon_h1", 8192),
    mamba2_config.NO_TIME_LIMIT,
    Fixed("hidden_act", ("silu",), "silu"),
    Fixed("attention_bias", (False,), False),
    Fixed("mlp_bias", (False,), False),
    Fixed("projectors_bias", (False,), False),
    Fixed("mamba_proj_bias", (False,), False),
    Fixed("attn_layer_indices", (None,)),
    *map(
        Kept,
        (
            *("mamba_chunk_size", "mamba_expand", "mamba_use_mlp", "num_logits_to_keep"),
            *("expansion_factor", "mlp_expansion_factor", "layers_block_type", "layer_types"),
            *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
        ),
    ),
)

_LAYER = "model.layers.{layer}."

_HUGGINGFACE = HuggingFace(
    "FalconH1ForCausalLM",
    "falcon_h1",
    keys=_KEYS,
    tensors=(
        Tensor("embedding", "model.embed_tokens.weight", "v d -> v d"),
        Tensor("final_norm.scale", "model.final_layernorm.weight", "d -> d"),
        Tensor("head", "lm_head.weight", "d v -> v d"),
        *huggingface.norms(mamba_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        *mamba2_config.tensors(_LAYER + "mamba."),
        *huggingface.ATTENTION,
        Tensor("mlp.gate", _LAYER + "feed_forward.gate_proj.weight", "d f -> f d"),
        Tensor("mlp.up", _LAYER + "feed_forward.up_proj.weight", "d f -> f d"),
        Tensor("mlp.down", _LAYER + "feed_forward.down_proj.weight", "f d -> d f"),
    ),
    # The kernels of Mamba layers bypass the module of the output projection.
    modules_without_peft=("out_proj",),
    unused=("*.rotary_emb.inv_freq", "*.mup_vector"),
)


def _multiplier(name: str, value: float) -> Bound:
    return Bound(name, value, 0, LARGEST, "arrays multiplied by 0 have no gradient", False)


FAMILY = Family(
    "falcon_h1",
    FalconH1Config,
    describe,
    bounds=(
        *mamba2_config.BOUNDS,
        *(_multiplier(name, 0.5) for name in _MULTIPLIERS),
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
