"""Qwen3 (arXiv:2505.09388), dense: Llama with a norm of each query and key."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.model.families import formats, generic
from maxpipe.model.huggingface import Fixed, HuggingFace, Kept
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Family, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config:
    """Keys of Qwen3 models only."""

    rope_scaling: float = 1.0
    """Factor by which the context is longer than the one of the training before (YaRN). 1 is that
    context itself."""
    rope_original_tokens: int = 32768
    """Length of that context. Read when `model.qwen3.rope_scaling` is not 1."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own, epsilon = own_keys(config, Qwen3Config), config.norm_epsilon
    rope = generic.yarn(config.rope_theta, own.rope_scaling, own.rope_original_tokens)
    attention = generic.attention(config, rope, head_norm=RMSNorm(config.head_size, epsilon))
    return generic.alike(config, attention, RMSNorm(config.d_model, epsilon))


_HUGGINGFACE = HuggingFace(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=(
        *formats.sizes(kv_heads=32, head_size=128, mlp=22016, vocab=151936),
        formats.yarn("qwen3"),
        formats.LayerTypes((formats.FULL,)),
        Fixed("use_sliding_window", (False,), False),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=(*formats.LLAMA, *formats.HEAD_NORMS),
)


FAMILY = Family(
    "qwen3",
    Qwen3Config,
    describe,
    bounds=(
        Bound("rope_scaling", 1.0, 1, LARGEST, "1 is the original context"),
        Bound("rope_original_tokens", 32768, 1),
    ),
    huggingface=(_HUGGINGFACE,),
)
