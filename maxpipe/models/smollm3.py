"""SmolLM3: Llama, without rotary positions in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, layer_type_rows, rope_config, rotary_layers
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Smollm3Config(RopeConfig):
    """Keys that only SmolLM3 models use."""

    no_rope_layer_interval: int = 4
    """Interval between layers without rotary positions (NoPE). With interval n, every n-th layer
    has none. If 0, all layers have rotary positions."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type; some layers have no rotary positions."""
    own = own_keys(config, Smollm3Config)
    rope = replace(rope_config.rope(config, own), enabled="has_rope")
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    flags = rotary_layers.rotary_flags(config.num_layers, own.no_rope_layer_interval)
    values = {"has_rope": tuple(map(float, flags))}
    return family.alike(config, family.attention(config, rope), norm, values=values)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, Smollm3Config))


_HUGGINGFACE = HuggingFace(
    "SmolLM3ForCausalLM",
    "smollm3",
    keys=(
        *huggingface.sizes(
            layers=36, width=2048, heads=16, kv_heads=4, mlp=11008, vocab=128256, tied=True
        ),
        rotary_layers.RotaryLayers("smollm3.no_rope_layer_interval"),
        rope_config.row("smollm3", 32768, 2e6),
        layer_type_rows.LayerTypes((huggingface.FULL,)),
        layer_type_rows.NoWindow(None),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        Fixed("mlp_bias", (False,), False),
    ),
    tensors=huggingface.LLAMA,
)

FAMILY = Family(
    "smollm3",
    Smollm3Config,
    describe,
    bounds=(rotary_layers.BOUND, *rope_config.BOUNDS),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
