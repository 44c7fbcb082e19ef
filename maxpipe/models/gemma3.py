"""Gemma 3 (arXiv:2503.19786): sliding windows in most layers, pre-norms and post-norms."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Key,
    Rotary,
    Twice,
    Whole,
)
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3Config:
    """Keys that only Gemma 3 models use. Gemma 3 always ties the output projection to the embedding
    table.
    """

    sliding_window: int = field(default=1024, metadata=renamed_from("window"))
    """Attention window of local layers in tokens, including the query token."""
    sliding_window_pattern: int = field(default=6, metadata=renamed_from("period"))
    """Interval between global layers, which attend to all tokens. With interval n, every n-th layer
    is global and all others are local."""
    local_rope_theta: float = 10000.0
    """Base of the rotary embedding frequencies (RoPE theta) in local layers. Global layers use
    `model.rope_theta`."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Factor that multiplies all rotary wavelengths in global layers. 1 disables the scaling."""
    query_pre_attn_scalar: float = field(default=0.0, metadata=renamed_from("query_scale"))
    """Attention scores are divided by the square root of this value. If 0, `model.head_dim` is
    used."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type, whose window and RoPE frequencies differ between
    layers.
    """
    own = own_keys(config, Gemma3Config)
    d, epsilon = config.d_model, config.norm_epsilon
    norm = RMSNorm(d, epsilon, offset=1.0)
    attention = family.attention(
        config,
        Rope("rope_theta", "rope_factor"),
        scale=(own.query_pre_attn_scalar or config.head_dim) ** -0.5,
        window="window",
        head_norm=RMSNorm(config.head_dim, epsilon, offset=1.0),
    )
    sees_all = [
        number % own.sliding_window_pattern == 0 for number in range(1, config.num_layers + 1)
    ]

    def by_layer(of_global: float, of_local: float) -> tuple[float, ...]:
        return tuple(of_global if is_global else of_local for is_global in sees_all)

    values = {
        "window": by_layer(0, own.sliding_window),
        "rope_theta": by_layer(config.rope_theta, own.local_rope_theta),
        "rope_factor": by_layer(own.rope_factor, 1.0),
    }
    return family.alike(
        config, attention, norm, after=True, function="gelu", values=values, embed_scale=d**0.5
    )


_GLOBAL, _LOCAL = huggingface.FULL, huggingface.WINDOWED


_HUGGINGFACE = HuggingFace(
    "Gemma3ForCausalLM",
    "gemma3_text",
    keys=(
        *huggingface.sizes(
            layers=26,
            width=2304,
            heads=8,
            kv_heads=4,
            head_dim=256,
            mlp=9216,
            vocab=262208,
            tied=True,
        ),
        Key("sliding_window", "gemma3.sliding_window", 4096),
        huggingface.Period(
            "gemma3.sliding_window_pattern",
            _LOCAL,
            6,
            "sliding_window_pattern",
            also=("_sliding_window_pattern",),
        ),
        Key(
            "query_pre_attn_scalar",
            "gemma3.query_pre_attn_scalar",
            256,
            "head_dim",
            is_integer=True,
        ),
        Rotary(
            "rope_theta",
            1e6,
            {"linear": (Key("factor", "gemma3.rope_factor"),)},
            unscaled={"gemma3.rope_factor": 1.0},
            select_type=lambda ours: "default" if ours["gemma3.rope_factor"] == 1 else "linear",
            layers=_GLOBAL,
        ),
        Rotary(
            "gemma3.local_rope_theta",
            10000.0,
            {},
            unscaled={},
            layers=_LOCAL,
            legacy_theta_key="rope_local_base_freq",
        ),
        Fixed("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        Fixed("attention_bias", (False,), False),
        Fixed("final_logit_softcapping", (None,)),
        Fixed("attn_logit_softcapping", (None,)),
        Fixed("use_bidirectional_attention", (False,), False),
    ),
    duplicate_keys=(
        Twice("hidden_activation", "hidden_act", is_read=False, default="gelu_pytorch_tanh"),
    ),
    tensors=(
        *huggingface.ENDS,
        *huggingface.SANDWICH,
        *huggingface.ATTENTION,
        *huggingface.HEAD_NORMS,
        *huggingface.MLP,
    ),
    containers=(
        Whole(
            "Gemma3ForConditionalGeneration",
            "text_config",
            "gemma3",
            other_tensors=(
                *("vision_tower.*", "model.vision_tower.*"),
                *("multi_modal_projector.*", "model.multi_modal_projector.*"),
            ),
        ),
    ),
)

FAMILY = Family(
    "gemma3",
    Gemma3Config,
    describe,
    bounds=(
        Bound("sliding_window", 1024, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("sliding_window_pattern", 6, 1),
        Bound("local_rope_theta", 10000.0, 1, LARGEST, "the value must fit in float32", False),
        Bound(
            "rope_factor", 1.0, 1, LARGEST, "multiplies RoPE wavelengths; 1 disables the scaling"
        ),
        Bound("query_pre_attn_scalar", 256.0, 0, LARGEST, "0 uses model.head_dim"),
    ),
    rules=family.embeddings_are_tied,
    huggingface=(_HUGGINGFACE,),
)
