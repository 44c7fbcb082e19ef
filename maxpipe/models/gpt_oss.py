"""GPT-OSS (arXiv:2508.10925): experts with biases, alternating sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface_tables, moe_base
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

    window: int = 128
    """Attention window in tokens, including the query, of every other layer, starting with the
    first. The remaining layers attend to all tokens."""
    gate_slope: float = 1.702
    """Slope of the gate's sigmoid. A gate g becomes `g * sigmoid(gate_slope * g)`."""
    gate_limit: float = 7.0
    """Clamping limit of the experts' activations. Gates are at most this value, and the values that
    they multiply are within this distance of 0."""
    rope_scaling: float = 1.0
    """Ratio of the context length to the original context length (YaRN). 1 disables the scaling."""
    rope_original_tokens: int = 4096
    """Original context length in tokens. Ignored unless `model.gpt_oss.rope_scaling` is above 1."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type; the window differs between layers."""
    own = own_keys(config, GptOssConfig)
    attention = family.attention(
        config,
        family.yarn(config.rope_theta, own.rope_scaling, own.rope_original_tokens, whole=False),
        window="window",
        biased=("query", "key", "value", "out"),
        sinks=True,
    )
    gate = ClampedSilu(own.gate_slope, own.gate_limit)
    experts = moe_base.experts(config, own, function=gate, biased=True)
    windows = tuple(float(own.window * (1 - layer % 2)) for layer in range(config.num_layers))
    return moe_base.model(config, attention, experts, values={"window": windows})


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return moe_base.rules(config, own_keys(config, GptOssConfig))


_YARN = (
    Key("factor", "gpt_oss.rope_scaling"),
    Key("original_max_position_embeddings", "gpt_oss.rope_original_tokens"),
    *huggingface_tables.YARN,
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
        *huggingface_tables.sizes(
            layers=36,
            width=2880,
            heads=64,
            kv_heads=8,
            head_size=64,
            mlp=2880,
            vocab=201088,
            epsilon=1e-5,
        ),
        Key("intermediate_size", "gpt_oss.d_expert", 2880, stands_for="d_mlp"),
        Key("num_local_experts", "gpt_oss.num_experts", 128, also="num_experts"),
        Key("num_experts_per_tok", "gpt_oss.top_k", 4, also="experts_per_token"),
        Key("sliding_window", "gpt_oss.window", 128),
        Key("swiglu_alpha", "gpt_oss.gate_slope", 1.702),
        Key("swiglu_limit", "gpt_oss.gate_limit", 7.0),
        Rotary(
            "rope_theta",
            150000.0,
            {"yarn": _YARN},
            unscaled={"gpt_oss.rope_scaling": 1.0},
            chosen=lambda ours: "default" if ours["gpt_oss.rope_scaling"] == 1 else "yarn",
            absent=_ABSENT,
        ),
        huggingface_tables.LayerTypes((huggingface_tables.WINDOWED, huggingface_tables.FULL)),
        Kept("initial_context_length"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (True,), True),
        *huggingface_tables.BALANCED,
    ),
    twice=(
        Twice("num_experts", "num_local_experts"),
        Twice("num_experts_per_tok", "experts_per_token", is_read=False, default=4),
    ),
    tensors=(
        *huggingface_tables.ENDS,
        *huggingface_tables.norms(
            attention_norm="input_layernorm", experts_norm="post_attention_layernorm"
        ),
        *huggingface_tables.ATTENTION,
        *huggingface_tables.BIASES,
        *huggingface_tables.SINKS,
        *huggingface_tables.JOINED_EXPERTS,
    ),
)


FAMILY = Family(
    "gpt_oss",
    GptOssConfig,
    describe,
    bounds=(
        *moe_base.BOUNDS,
        Bound("window", 128, 1, 2**31 - 1, "devices count tokens in int32"),
        Bound("gate_slope", 1.702, 0, LARGEST, "0 makes the gate linear"),
        Bound("gate_limit", 7.0, 0, LARGEST, "gates of 0 have no gradient", False),
        Bound("rope_scaling", 1.0, 1, LARGEST, "1 disables the scaling"),
        Bound("rope_original_tokens", 4096, 1),
    ),
    rules=_rules,
    reporting=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
