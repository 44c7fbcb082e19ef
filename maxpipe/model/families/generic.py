"""What several families make of the generic keys of `model`."""

from __future__ import annotations

from typing import Any

from maxpipe.config.schema import ModelConfig
from maxpipe.model.parts.attention import Attention, Rope
from maxpipe.model.parts.mlp import GatedMLP
from maxpipe.model.spec import Dims, Ends, Normal, Param, Part


def residual_gain(config: ModelConfig) -> float:
    """Of projections that write to the residual stream: keeps its variance near 1."""
    return (2 * config.num_layers) ** -0.5


def attention(config: ModelConfig, rope: Rope, **options: Any) -> Attention:
    """Attention of the generic sizes; `options` are further fields of `Attention`."""
    return Attention(
        config.d_model,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        residual_gain(config),
        config.attention,
        rope,
        **options,
    )


def gated_mlp(config: ModelConfig, **options: Any) -> GatedMLP:
    """The gated MLP of the generic width; `options` are further fields of `GatedMLP`."""
    return GatedMLP(config.d_model, config.d_mlp, residual_gain(config), **options)


def ends(config: ModelConfig, norm: Part, **options: Any) -> Ends:
    """An embedding, and an output projection of its own unless embeddings are tied.

    `options` are further fields of `Ends`.
    """
    width, vocab = (config.d_model, "embed"), (config.vocab_size, "vocab")

    def table(*dims: tuple[int, str]) -> Param:
        found: Dims = dims
        return Param(found, Normal(config.d_model))

    head = None if config.tied_embeddings else table(width, vocab)
    return Ends(table(vocab, width), norm, head, **options)
