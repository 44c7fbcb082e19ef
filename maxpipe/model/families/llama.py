"""Llama 2 and 3: attention and a gated MLP, each normed first."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig, was
from maxpipe.model.families import generic
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


FAMILY = Family(
    "llama",
    LlamaConfig,
    describe,
    bounds=(
        Bound("rope_scaling", 1.0, 1, LARGEST, "wavelengths are stretched, 1 leaves them alone"),
        Bound("rope_original_tokens", 8192, 1),
    ),
)
