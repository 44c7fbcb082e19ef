"""Llama 2 and 3: attention and a gated MLP, each normed first."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.config.schema import ModelConfig
from maxpipe.model.parts.attention import Attention
from maxpipe.model.parts.mlp import GatedMLP
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Branch, Ends, Kind, Model, Normal, Param


@dataclass(frozen=True)
class Llama:
    """The family `llama`."""

    name = "llama"

    def describe(self, config: ModelConfig) -> Model:
        """One kind of layer."""
        d, norm = config.d_model, RMSNorm(config.d_model, config.norm_epsilon)
        gain = (2 * config.num_layers) ** -0.5  # keeps the residual stream's variance near 1
        attention = Attention(
            d, config.num_heads, config.num_kv_heads, config.head_size, gain, config.attention
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
