"""OLMo 2 (arXiv:2501.00656): norms behind the branches only, and of all queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import formats, generic, ropes
from maxpipe.models.config import ModelConfig
from maxpipe.models.generic import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.ropes import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo2Config(RopeConfig):
    """Keys of OLMo 2 models only."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = ropes.rope(config, own_keys(config, Olmo2Config))
    attention = generic.attention(config, rope, head_norm=norm, joint_norm=True)
    return generic.alike(config, attention, norm, before=False, after=True)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return ropes.rules(config, own_keys(config, Olmo2Config))


_HUGGINGFACE = HuggingFace(
    "Olmo2ForCausalLM",
    "olmo2",
    keys=(
        *formats.sizes(mlp=11008, vocab=50304, epsilon=1e-5),
        ropes.row("olmo2", 2048),
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


FAMILY = Family(
    "olmo2",
    Olmo2Config,
    describe,
    bounds=ropes.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
