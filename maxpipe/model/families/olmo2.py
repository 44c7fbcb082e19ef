"""OLMo 2 (arXiv:2501.00656): norms behind the branches only, and of all queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.config.schema import ModelConfig
from maxpipe.model.families import formats, generic
from maxpipe.model.family import Family
from maxpipe.model.huggingface import Fixed, HuggingFace
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo2Config:
    """OLMo 2 models have no keys of their own."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    attention = generic.attention(config, Rope(config.rope_theta), head_norm=norm, joint_norm=True)
    return generic.alike(config, attention, norm, before=False, after=True)


_HUGGINGFACE = HuggingFace(
    "Olmo2ForCausalLM",
    "olmo2",
    keys=(
        *formats.sizes(mlp=11008, vocab=50304, epsilon=1e-5),
        formats.plain_rope(),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=(
        *formats.ENDS,
        *formats.norms(
            attention_after_norm="post_attention_layernorm",
            mlp_after_norm="post_feedforward_layernorm",
        ),
        *formats.ATTENTION,
        *formats.JOINT_NORMS,
        *formats.MLP,
    ),
)


FAMILY = Family("olmo2", Olmo2Config, describe, huggingface=(_HUGGINGFACE,))
