"""Dense Qwen3 (arXiv:2505.09388): Llama with query and key norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, layer_type_rows, rope_config
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config(RopeConfig):
    """Keys that only Qwen3 models use."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own, epsilon = own_keys(config, Qwen3Config), config.norm_epsilon
    rope = rope_config.rope(config, own)
    attention = family.attention(config, rope, head_norm=RMSNorm(config.head_dim, epsilon))
    return family.alike(config, attention, RMSNorm(config.d_model, epsilon))


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Qwen3Config))


_HUGGINGFACE = HuggingFace(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=(
        *huggingface.sizes(kv_heads=32, head_dim=128, mlp=22016, vocab=151936),
        rope_config.row("qwen3", 32768),
        layer_type_rows.LayerTypes((huggingface.FULL,)),
        layer_type_rows.NoWindow(28),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=(*huggingface.LLAMA, *huggingface.HEAD_NORMS),
)


FAMILY = Family(
    "qwen3",
    Qwen3Config,
    describe,
    bounds=rope_config.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
