"""Ministral 3: Mistral, with YaRN and queries that are scaled by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Key, Whole
from maxpipe.models.layers.attention import QueryScaling
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Ministral3Config(RopeConfig):
    """Keys that only Ministral 3 models use."""

    llama_4_scaling_beta: float = 0.1
    """Strength of the scaling of queries by position. A query at position p is multiplied by
    `1 + llama_4_scaling_beta * log(1 + floor(p / original_max_position_embeddings))`. 0 disables
    the scaling."""
    rope_type: Literal["llama3", "yarn"] = "yarn"
    """RoPE scaling method. Both methods scale only wavelengths that are long relative to the
    original context."""
    original_max_position_embeddings: int = 16384
    """Original context length in tokens. Used to scale queries, and by `yarn` and `llama3`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, Ministral3Config)
    scaling = QueryScaling(own.llama_4_scaling_beta, own.original_max_position_embeddings)
    attention = family.attention(
        config,
        rope_config.rope(config, own),
        query_scaling=scaling if own.llama_4_scaling_beta else None,
    )
    return family.alike(config, attention, RMSNorm(config.d_model, config.norm_epsilon))


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Ministral3Config))


_ORIGINAL = "original_max_position_embeddings"

_HUGGINGFACE = HuggingFace(
    "Ministral3ForCausalLM",
    "ministral3",
    keys=(
        *huggingface.sizes(
            layers=34, kv_heads=8, head_dim=128, mlp=14336, vocab=131072, epsilon=1e-5
        ),
        rope_config.row(
            "ministral3",
            262144,
            types=("llama3", "yarn"),
            more=(
                Key("llama_4_scaling_beta", "ministral3.llama_4_scaling_beta"),
                Key(_ORIGINAL, f"ministral3.{_ORIGINAL}"),
            ),
            defaults={
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _ORIGINAL: 16384},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                "llama_4_scaling_beta": 0.1,
            },
        ),
        Fixed("sliding_window", (None,)),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=huggingface.LLAMA,
    containers=(
        Whole(
            "Mistral3ForConditionalGeneration",
            "text_config",
            "mistral3",
            other_tensors=(
                *("vision_tower.*", "model.vision_tower.*"),
                *("multi_modal_projector.*", "model.multi_modal_projector.*"),
            ),
            inner_type="ministral3",
        ),
    ),
)

FAMILY = Family(
    "ministral3",
    Ministral3Config,
    describe,
    bounds=(
        Bound("llama_4_scaling_beta", 0.1, 0, LARGEST, "0 disables the scaling of queries"),
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
