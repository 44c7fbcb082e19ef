"""Mistral (arXiv:2310.06825): Llama, with a sliding window in the first version of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class MistralConfig(RopeConfig):
    """Keys that only Mistral models use."""

    sliding_window: int = field(default=0, metadata=renamed_from("window"))
    """Attention window in tokens, including the query token. If 0, all layers attend to all tokens,
    as in version 0.2 and later."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, MistralConfig)
    values = (
        {"window": family.same_everywhere(config, own.sliding_window)} if own.sliding_window else {}
    )
    rope, window = rope_config.rope(config, own), "window" * bool(own.sliding_window)
    attention = family.attention(config, rope, window=window)
    return family.alike(
        config, attention, RMSNorm(config.d_model, config.norm_epsilon), values=values
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, MistralConfig))


_HUGGINGFACE = HuggingFace(
    "MistralForCausalLM",
    "mistral",
    keys=(
        *huggingface.sizes(kv_heads=8, mlp=14336),
        huggingface.OrNone("sliding_window", "mistral.sliding_window", 4096),
        rope_config.row("mistral", 131072),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=huggingface.LLAMA,
)


FAMILY = Family(
    "mistral",
    MistralConfig,
    describe,
    bounds=(
        Bound(
            "sliding_window",
            0,
            0,
            2**31 - 1,
            "token counts are int32 on devices; 0 disables the window",
        ),
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
