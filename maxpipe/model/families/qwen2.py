"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.model.families import formats, generic
from maxpipe.model.huggingface import Fixed, HuggingFace, Kept
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Family, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Config:
    """Keys of Qwen2 and Qwen2.5 models only."""

    rope_scaling: float = 1.0
    """Factor by which the context is longer than the one of the training before (YaRN). 1 is that
    context itself."""
    rope_original_tokens: int = 32768
    """Length of that context. Read when `model.qwen2.rope_scaling` is not 1."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own = own_keys(config, Qwen2Config)
    rope = generic.yarn(config.rope_theta, own.rope_scaling, own.rope_original_tokens)
    attention = generic.attention(config, rope, biased=("query", "key", "value"))
    return generic.alike(config, attention, RMSNorm(config.d_model, config.norm_epsilon))


_HUGGINGFACE = HuggingFace(
    "Qwen2ForCausalLM",
    "qwen2",
    keys=(
        *formats.sizes(kv_heads=32, mlp=22016, vocab=151936),
        formats.yarn("qwen2"),
        formats.LayerTypes((formats.FULL,)),
        Fixed("use_sliding_window", (False,), False),
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
    bounds=(
        Bound("rope_scaling", 1.0, 1, LARGEST, "1 is the original context"),
        Bound("rope_original_tokens", 32768, 1),
    ),
    huggingface=(_HUGGINGFACE,),
)
