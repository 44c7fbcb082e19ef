"""GPT-OSS (arXiv:2508.10925): experts with biases, alternating sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, layer_type_rows, moe_base
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept, Key, Rotary, Twice
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import ClampedSilu
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig(MixtureConfig):
    """Keys that only GPT-OSS models use."""

    sliding_window: int = field(default=128, metadata=renamed_from("window"))
    """Attention window in tokens, including the query token. The window applies to every other
    layer, starting with the first; the remaining layers attend to all tokens."""
    swiglu_alpha: float = field(default=1.702, metadata=renamed_from("gate_slope"))
    """Slope of the gate's sigmoid. A gate g becomes `g * sigmoid(swiglu_alpha * g)`."""
    swiglu_limit: float = field(default=7.0, metadata=renamed_from("gate_limit"))
    """Clamp limit for expert activations. Gates are clamped from above at this limit. The up
    projections are clamped to the range from `-swiglu_limit` to `swiglu_limit`."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length (YaRN). 1 disables the
    scaling."""
    original_max_position_embeddings: int = field(
        default=4096, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `model.gpt_oss.rope_factor` is above 1."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type, whose attention window differs between layers."""
    own = own_keys(config, GptOssConfig)
    attention = family.attention(
        config,
        family.yarn(
            config.rope_theta, own.rope_factor, own.original_max_position_embeddings, truncate=False
        ),
        window="window",
        biased=("query", "key", "value", "out"),
        sinks=True,
    )
    gate = ClampedSilu(own.swiglu_alpha, own.swiglu_limit)
    experts = moe_base.experts(config, own, function=gate, biased=True)
    windows = tuple(
        float(own.sliding_window * (1 - layer % 2)) for layer in range(config.num_layers)
    )
    return moe_base.moe_model(config, attention, experts, values={"window": windows})


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return moe_base.moe_rules(config, own_keys(config, GptOssConfig))


_YARN = (
    Key("factor", "gpt_oss.rope_factor"),
    Key("original_max_position_embeddings", "gpt_oss.original_max_position_embeddings"),
    *huggingface.YARN,
    Fixed("truncate", (False,), True),
)
_ABSENT = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

_HUGGINGFACE = HuggingFace(
    "GptOssForCausalLM",
    "gpt_oss",
    keys=(
        *huggingface.sizes(
            layers=36,
            width=2880,
            heads=64,
            kv_heads=8,
            head_dim=64,
            mlp=2880,
            vocab=201088,
            epsilon=1e-5,
        ),
        Key("intermediate_size", "gpt_oss.d_expert", 2880, zero_means="d_mlp"),
        Key("num_local_experts", "gpt_oss.num_experts", 128, also="num_experts"),
        Key("num_experts_per_tok", "gpt_oss.top_k", 4, also="experts_per_token"),
        Key("sliding_window", "gpt_oss.sliding_window", 128),
        Key("swiglu_alpha", "gpt_oss.swiglu_alpha", 1.702),
        Key("swiglu_limit", "gpt_oss.swiglu_limit", 7.0),
        Rotary(
            "rope_theta",
            150000.0,
            {"yarn": _YARN},
            unscaled={"gpt_oss.rope_factor": 1.0},
            select_type=lambda ours: "default" if ours["gpt_oss.rope_factor"] == 1 else "yarn",
            defaults=_ABSENT,
        ),
        layer_type_rows.LayerTypes((huggingface.WINDOWED, huggingface.FULL)),
        Kept("initial_context_length"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (True,), True),
        *huggingface.BALANCED,
    ),
    duplicate_keys=(
        Twice("num_experts", "num_local_experts"),
        Twice("num_experts_per_tok", "experts_per_token", is_read=False, default=4),
    ),
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            attention_norm="input_layernorm", experts_norm="post_attention_layernorm"
        ),
        *huggingface.ATTENTION,
        *huggingface.BIASES,
        *huggingface.SINKS,
        *huggingface.JOINED_EXPERTS,
    ),
    has_transposed_experts=True,
)


FAMILY = Family(
    "gpt_oss",
    GptOssConfig,
    describe,
    bounds=(
        *moe_base.MOE_BOUNDS,
        Bound("sliding_window", 128, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("swiglu_alpha", 1.702, 0, LARGEST, "0 makes the gate linear"),
        Bound("swiglu_limit", 7.0, 0, LARGEST, "gates clamped to 0 have no gradient", False),
        Bound("rope_factor", 1.0, 1, LARGEST, "1 disables the scaling"),
        Bound("original_max_position_embeddings", 4096, 1),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
