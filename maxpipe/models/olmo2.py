"""OLMo 2 (arXiv:2501.00656): post-norms only, and joint norms over all query and key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo2Config(RopeConfig):
    """Keys that only OLMo 2 models use."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = rope_config.rope(config, own_keys(config, Olmo2Config))
    attention = family.attention(config, rope, head_norm=norm, joint_norm=True)
    return family.alike(config, attention, norm, before=False, after=True)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Olmo2Config))


TENSORS = (
    *huggingface.ENDS,
    *huggingface.norms(
        attention_after_norm="post_attention_layernorm",
        mlp_after_norm="post_feedforward_layernorm",
    ),
    *huggingface.ATTENTION,
    *huggingface.JOINT_NORMS,
    *huggingface.MLP,
)
"""Tensor table of OLMo 2, which OLMo 3 shares."""

_HUGGINGFACE = HuggingFace(
    "Olmo2ForCausalLM",
    "olmo2",
    keys=(
        *huggingface.sizes(mlp=11008, vocab=50304, epsilon=1e-5),
        rope_config.row("olmo2", 2048),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=TENSORS,
)


FAMILY = Family(
    "olmo2",
    Olmo2Config,
    describe,
    bounds=rope_config.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
