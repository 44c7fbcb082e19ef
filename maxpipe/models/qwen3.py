"""Dense Qwen3 (arXiv:2505.09388): Llama with query and key norms.

Qwen3-VL (arXiv:2511.21631) adds a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family, huggingface, layer_type_rows, qwen_vision, rope_config
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept, Key, Whole
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.qwen_vision import QwenVisionConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model

_IDS = (151655, 151652, 151653)
_SECTIONS = (24, 20, 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config(RopeConfig, QwenVisionConfig):
    """Keys that only Qwen3 models use. Models with a vision tower are Qwen3-VL."""

    image_token_id: int = _IDS[0]
    """Token ID of the positions at which image embeddings replace token embeddings."""
    image_begin_token_id: int = _IDS[1]
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int = _IDS[2]
    """Token ID that follows the tokens of an image."""
    video_token_id: int = _IDS[0] + 1
    """Token ID of videos, which are not supported."""
    mrope_section: list[int] = field(
        default_factory=lambda: list(_SECTIONS), hash=False
    )  # lists are not hashable
    """Numbers of pairs of dims that temporal, vertical and horizontal positions rotate. Without
    images, all three positions of a token are equal, and this key has no effect."""
    deepstack_visual_indexes: list[int] = field(
        default_factory=list, hash=False
    )  # lists are not hashable
    """Indices of the layers of the vision tower whose outputs are also merged into image
    embeddings (DeepStack, arXiv:2406.04334), in increasing order. The n-th of these embeddings is
    added to the output of the n-th layer of the language model."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own, epsilon = own_keys(config, Qwen3Config), config.norm_epsilon
    tower = qwen_vision.vision_tower(config, tuple(own.deepstack_visual_indexes))
    rope = rope_config.rope(config, own)
    if tower is not None:
        rope = replace(rope, sections=tuple(own.mrope_section))
    attention = family.attention(config, rope, head_norm=RMSNorm(config.head_dim, epsilon))
    count = 0 if tower is None else len(tower.deepstack_layers)
    added = tuple(f"deepstack_{number}" for number in range(count))
    norm = RMSNorm(config.d_model, epsilon)
    return family.alike(config, attention, norm, added_arrays=added, vision=tower)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Qwen3Config)
    yield from rope_config.rules(config, own)
    yield from qwen_vision.rules(config)
    indices, count = own.deepstack_visual_indexes, own.num_vision_layers
    most = min(count, config.num_layers)
    if count and (indices != sorted({*indices} & {*range(count)}) or len(indices) > most):
        yield RuleViolation(
            Code.MODEL_IMAGES,
            "model.qwen3.deepstack_visual_indexes",
            f"must contain at most {most} layers of the vision tower, from 0 to {count - 1}, in "
            "increasing order.",
            f"Set model.qwen3.deepstack_visual_indexes={sorted({*indices} & {*range(most)})}.",
        )


_HUGGINGFACE = HuggingFace(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=(
        *huggingface.sizes(kv_heads=32, head_dim=128, mlp=22016, vocab=151936),
        rope_config.row("qwen3", 32768),
        layer_type_rows.LayerTypes((huggingface.FULL,)),
        layer_type_rows.NoWindow(28),
        Kept("sliding_window"),
        Kept("max_window_layers"),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=(*huggingface.LLAMA, *huggingface.HEAD_NORMS),
)

_VISION = qwen_vision.vision_table(
    "qwen3",
    "qwen3_vl_vision",
    *_IDS,
    Key("deepstack_visual_indexes", "qwen3.deepstack_visual_indexes", lambda _: [8, 16, 24]),
    tensors=qwen_vision.DEEPSTACK_TENSORS,
)
_MROPE = Key("mrope_section", "qwen3.mrope_section", lambda _: list(_SECTIONS))
_HUGGINGFACE_VL = HuggingFace(
    "Qwen3VLTextModel",
    "qwen3_vl_text",
    keys=(
        *huggingface.sizes(kv_heads=32, head_dim=128, mlp=22016, vocab=151936),
        rope_config.row("qwen3", 128000, 500000.0, always=(_MROPE, Kept("mrope_interleaved"))),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
    ),
    tensors=_HUGGINGFACE.tensors,
    containers=(
        Whole(
            "Qwen3VLForConditionalGeneration",
            "text_config",
            "qwen3_vl",
            ("model.visual.*", "visual.*"),
            vision=_VISION,
        ),
    ),
)

FAMILY = Family(
    "qwen3",
    Qwen3Config,
    describe,
    bounds=(*rope_config.BOUNDS, *qwen_vision.bounds(*_IDS)),
    rules=_rules,
    huggingface=(_HUGGINGFACE, _HUGGINGFACE_VL),
)
