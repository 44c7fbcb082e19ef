"""Llama 2 and 3: attention and a gated MLP, each normed first."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig, was
from maxpipe.model.parts.attention import Attention, Rope
from maxpipe.model.parts.mlp import GatedMLP
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Branch, Ends, Family, Kind, Model, Normal, Param, own_keys


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
    d, norm = config.d_model, RMSNorm(config.d_model, config.norm_epsilon)
    gain = (2 * config.num_layers) ** -0.5  # keeps the residual stream's variance near 1
    attention = Attention(
        d,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        gain,
        config.attention,
        Rope(config.rope_theta, own.rope_scaling, "llama3", own.rope_original_tokens),
    )
    branches = (
        Branch("attention", attention, norm, dropout=config.dropout),
        Branch("mlp", GatedMLP(d, config.d_mlp, gain), norm, dropout=config.dropout),
    )
    table, vocab = (d, "embed"), (config.vocab_size, "vocab")
    ends = Ends(
        embedding=Param((vocab, table), Normal(d)),
        norm=norm,
        head=None if config.tied_embeddings else Param((table, vocab), Normal(d)),
    )
    return Model({"layer": Kind(branches)}, ("layer",) * config.num_layers, ends)


FAMILY = Family(
    "llama",
    LlamaConfig,
    describe,
    bounds=(
        Bound("rope_scaling", 1.0, 1, LARGEST, "wavelengths are stretched, 1 leaves them alone"),
        Bound("rope_original_tokens", 8192, 1),
    ),
)
