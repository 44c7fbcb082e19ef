"""Llama 2 and 3: attention and a gated MLP, each normed first."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig, was
from maxpipe.model.families import formats, generic
from maxpipe.model.huggingface import Fixed, HuggingFace, Key, Rotary
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Family, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Keys of Llama models only."""

    rope_scaling: float = field(default=1.0, metadata=was("model.rope_scaling"))
    """Factor by which long wavelengths are stretched (Llama 3.1). 1 leaves them alone."""
    rope_original_tokens: int = field(default=8192, metadata=was("model.rope_original_tokens"))
    """Context length that the unscaled wavelengths were made for. Read when
    `model.llama.rope_scaling` is not 1."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own = own_keys(config, LlamaConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = Rope(config.rope_theta, own.rope_scaling, "llama3", own.rope_original_tokens)
    return generic.alike(config, generic.attention(config, rope), norm)


_LLAMA3 = (
    Key("factor", "llama.rope_scaling"),
    Key("original_max_position_embeddings", "llama.rope_original_tokens"),
    Fixed("low_freq_factor", (1.0,)),
    Fixed("high_freq_factor", (4.0,)),
)

_HUGGINGFACE = HuggingFace(
    "LlamaForCausalLM",
    "llama",
    keys=(
        *formats.sizes(mlp=11008),
        Rotary(
            "rope_theta",
            10000.0,
            {"llama3": _LLAMA3},
            unscaled={"llama.rope_scaling": 1.0},
            chosen=lambda ours: "default" if ours["llama.rope_scaling"] == 1 else "llama3",
        ),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        Fixed("mlp_bias", (False,), False),
    ),
    tensors=(
        *formats.ENDS,
        *formats.norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        *formats.ATTENTION,
        *formats.MLP,
    ),
)

FAMILY = Family(
    "llama",
    LlamaConfig,
    describe,
    bounds=(
        Bound("rope_scaling", 1.0, 1, LARGEST, "wavelengths are stretched, 1 leaves them alone"),
        Bound("rope_original_tokens", 8192, 1),
    ),
    huggingface=(_HUGGINGFACE,),
)
