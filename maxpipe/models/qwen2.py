"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with query, key and value biases."""

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
class Qwen2Config(RopeConfig):
    """Keys that only Qwen2 and Qwen2.5 models use."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, Qwen2Config)
    rope = rope_config.rope(config, own)
    attention = family.attention(config, rope, biased=("query", "key", "value"))
    return family.alike(config, attention, RMSNorm(config.d_model, config.norm_epsilon))


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Qwen2Config))


_HUGGINGFACE = HuggingFace(
    "Qwen2ForCausalLM",
    "qwen2",
    keys=(
        *huggingface.sizes(kv_heads=32, mlp=22016, vocab=151936),
        rope_config.row("qwen2", 32768),
        layer_type_rows.LayerTypes((huggingface.FULL,)),
        layer_type_rows.NoWindow(28),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=(*huggingface.LLAMA, *huggingface.BIASES),
)


FAMILY = Family(
    "qwen2",
    Qwen2Config,
    describe,
    bounds=rope_config.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
