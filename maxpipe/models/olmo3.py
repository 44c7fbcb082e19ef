"""OLMo 3: OLMo 2 with sliding windows in most layers and RoPE scaling in the other layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, olmo2, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import FULL, WINDOWED, Fixed, HuggingFace, Key, Rotary
from maxpipe.models.layer_type_rows import Period
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo3Config(RopeConfig):
    """Keys that only OLMo 3 models use. RoPE scaling applies to global layers only."""

    sliding_window: int = 4096
    """Attention window of local layers in tokens, including the query token."""
    sliding_window_pattern: int = 4
    """Interval between global layers, which attend to all tokens. With interval n, every n-th layer
    is global and all others are local."""
    local_rope_theta: float = 500000.0
    """Base of the rotary embedding frequencies (RoPE theta) in local layers. Global layers use
    `model.rope_theta`."""
    original_max_position_embeddings: int = 8192
    """Original context length in tokens. Ignored unless `rope_factor` is above 1 or `rope_type` is
    `longrope`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type, whose window and RoPE frequencies differ between
    layers.
    """
    own = own_keys(config, Olmo3Config)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    rope = replace(rope_config.rope(config, own), theta="rope_theta", scaled="rope_scaled")
    attention = family.attention(config, rope, window="window", head_norm=norm, joint_norm=True)
    sees_all = [
        number % own.sliding_window_pattern == 0 for number in range(1, config.num_layers + 1)
    ]
    values = {
        "window": tuple(0.0 if is_global else own.sliding_window for is_global in sees_all),
        "rope_theta": tuple(
            config.rope_theta if is_global else own.local_rope_theta for is_global in sees_all
        ),
        "rope_scaled": tuple(map(float, sees_all)),
    }
    return family.alike(config, attention, norm, before=False, after=True, values=values)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Olmo3Config))


_HUGGINGFACE = HuggingFace(
    "Olmo3ForCausalLM",
    "olmo3",
    keys=(
        *huggingface.sizes(mlp=11008, vocab=50304, epsilon=1e-5),
        Key("sliding_window", "olmo3.sliding_window", 4096),
        Period("olmo3.sliding_window_pattern", WINDOWED, 4, "sliding_window_pattern"),
        rope_config.row("olmo3", 2048, 500000.0, layers=FULL),
        Rotary(
            "olmo3.local_rope_theta",
            500000.0,
            {},
            unscaled={},
            layers=WINDOWED,
            has_legacy_keys=False,
        ),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=olmo2.TENSORS,
)


FAMILY = Family(
    "olmo3",
    Olmo3Config,
    describe,
    bounds=(
        Bound("sliding_window", 4096, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("sliding_window_pattern", 4, 1),
        Bound("local_rope_theta", 500000.0, 1, LARGEST, "the value must fit in float32", False),
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
