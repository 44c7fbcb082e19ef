"""Llama 2 and 3: attention and a gated MLP, each with a pre-norm.

`maxpipe/nn/decoder.py` contains the forward pass. `docs/concepts/model.md` explains both files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(RopeConfig):
    """Keys that only Llama models use."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = "llama3"
    """RoPE scaling method. `llama3` (Llama 3.1) scales only wavelengths that fit fewer than four
    times into the original context. `yarn` also scales only long wavelengths, with a linear ramp.
    `linear` multiplies all wavelengths by `rope_factor`. `dynamic` (NTK) increases the base for
    sequences longer than `original_max_position_embeddings`. `longrope` multiplies each wavelength
    by a separate factor."""
    rope_factor: float = field(
        default=1.0, metadata=renamed_from("model.rope_scaling", "rope_scaling")
    )
    """Ratio of the extended context length to the original context length. 1 disables the scaling,
    except for `longrope`."""
    original_max_position_embeddings: int = field(
        default=8192, metadata=renamed_from("model.rope_original_tokens", "rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `rope_factor` is above 1 or `rope_type` is
    `longrope`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, LlamaConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    return family.alike(config, family.attention(config, rope_config.rope(config, own)), norm)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, LlamaConfig))


_HUGGINGFACE = HuggingFace(
    "LlamaForCausalLM",
    "llama",
    keys=(
        *huggingface.sizes(mlp=11008),
        rope_config.row("llama", 2048),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        Fixed("mlp_bias", (False,), False),
    ),
    tensors=huggingface.LLAMA,
)

FAMILY = Family(
    "llama",
    LlamaConfig,
    describe,
    bounds=rope_config.BOUNDS,
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
