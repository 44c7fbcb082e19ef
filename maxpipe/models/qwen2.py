"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import formats, generic, ropes
from maxpipe.models.config import ModelConfig
from maxpipe.models.generic import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.ropes import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Config(RopeConfig):
    """Keys of Qwen2 and Qwen2.5 models only."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own = own_keys(config, Qwen2Config)
    rope = ropes.rope(config, own)
    attention = generic.attention(config, rope, biased=("query", "key", "value"))
    return generic.alike(config, attention, RMSNorm(config.d_model, config.norm_epsilon))


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return ropes.rules(config, own_keys(config, Qwen2Config))


_HUGGINGFACE = HuggingFace(
    "Qwen2ForCausalLM",
    "qwen2",
    keys=(
        *formats.sizes(kv_heads=32, mlp=22016, vocab=151936),
        ropes.row("qwen2", 32768),
        formats.LayerTypes((formats.FULL,)),
        formats.NoWindow(28),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=(*formats.LLAMA, *formats.BIASES),
)


FAMILY = Family(
    "qwen2",
    Qwen2Config,
    describe,
    bounds=ropes.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
