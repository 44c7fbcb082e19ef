"""Gemma 3 (arXiv:2503.19786): sliding windows, pre-norms and post-norms, and a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import format_divisors
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, layer_type_rows
from maxpipe.models.config import LARGEST, SMALLEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Key,
    Rotary,
    Tensor,
    Twice,
    VisionTable,
    Whole,
)
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.layers.vision import VisionTower
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
    num_vision_layers: int = 0
    """Number of layers of the vision tower, which computes embeddings of images. 0 means a model
    without images, and all other vision keys are then ignored."""
    d_vision: int = 1152
    """Width of the vision tower."""
    num_vision_heads: int = 16
    """Number of attention heads of the vision tower. Must divide `model.gemma3.d_vision`."""
    d_vision_mlp: int = 4304
    """Hidden width of the MLPs in the vision tower."""
    image_size: int = 896
    """Height and width in pixels to which images are resized."""
    patch_size: int = 14
    """Height and width in pixels of the patches that the vision tower embeds."""
    tokens_per_image: int = 256
    """Number of tokens of an image. Must be a square number whose root divides the number of
    patches per side."""
    vision_norm_epsilon: float = 1e-6
    """Epsilon of the norms in the vision tower and its projector."""
    image_token_id: int = 262144
    """Token ID of the positions at which image embeddings replace token embeddings."""
    image_begin_token_id: int = 255999
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int = 256000
    """Token ID that follows the tokens of an image."""


def vision_tower(config: ModelConfig) -> VisionTower | None:
    """Return the vision tower of a config, or None for a model without images."""
    own = own_keys(config, Gemma3Config)
    if not own.num_vision_layers:
        return None
    return VisionTower(
        config.d_model,
        own.d_vision,
        own.num_vision_layers,
        own.num_vision_heads,
        own.d_vision_mlp,
        own.image_size,
        own.patch_size,
        own.tokens_per_image,
        own.vision_norm_epsilon,
        own.image_token_id,
        own.image_begin_token_id,
        own.image_end_token_id,
    )


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
        image_tokens=own.tokens_per_image if own.num_vision_layers else 0,
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
        config,
        attention,
        norm,
        after=True,
        function="gelu",
        values=values,
        embed_scale=d**0.5,
        vision=vision_tower(config),
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from family.embeddings_are_tied(config)
    if (tower := vision_tower(config)) is None:
        return
    if tower.width % tower.num_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma3.num_vision_heads",
            f"must divide model.gemma3.d_vision ({tower.width}).",
            f"Set model.gemma3.num_vision_heads to {format_divisors(tower.width)}.",
        )
    side, patches = tower.tokens_per_side, tower.patches_per_side
    if side**2 != tower.tokens_per_image or patches % side:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma3.tokens_per_image",
            f"must be the square of a number that divides the {patches} patches per side.",
            f"Set model.gemma3.tokens_per_image={patches**2}, or another square.",
        )
    if tower.image_token_id >= config.vocab_size:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma3.image_token_id",
            f"must be less than model.vocab_size ({config.vocab_size}).",
            "Set model.gemma3.image_token_id to the ID of the tokenizer's image token.",
        )
    if config.mtp_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.mtp_heads",
            "must be 0 in models with a vision tower, because MTP heads cannot predict images.",
            "Set model.mtp_heads=0, or model.gemma3.num_vision_layers=0.",
        )


_GLOBAL, _LOCAL = huggingface.FULL, huggingface.WINDOWED


_TOWER = "vision_tower."
_TOWER_LAYER = _TOWER + "encoder.layers.{expert}."


def _with_bias(ours: str, theirs: str, dims: str, bias: str) -> tuple[Tensor, ...]:
    """Return rows for a matrix and its bias. Layers are stacked along the dim `expert`."""
    return (
        Tensor(f"vision.{ours}", f"{theirs}.weight", dims),
        Tensor(f"vision.{ours}_bias", f"{theirs}.bias", bias),
    )


def _norm(ours: str, theirs: str, stack: str = "") -> tuple[Tensor, ...]:
    return (
        Tensor(f"vision.{ours}.scale", f"{theirs}.weight", f"{stack}w -> w"),
        Tensor(f"vision.{ours}.bias", f"{theirs}.bias", f"{stack}w -> w"),
    )


_VISION = VisionTable(
    "siglip_vision_model",
    keys=(
        Key("hidden_size", "gemma3.d_vision", 768),
        Key("num_hidden_layers", "gemma3.num_vision_layers", 12),
        Key("num_attention_heads", "gemma3.num_vision_heads", 12),
        Key("intermediate_size", "gemma3.d_vision_mlp", 3072),
        Key("image_size", "gemma3.image_size", 224),
        Key("patch_size", "gemma3.patch_size", 16),
        Key("layer_norm_eps", "gemma3.vision_norm_epsilon", 1e-6),
        Fixed("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        Fixed("num_channels", (3,), 3),
        Fixed("vision_use_head", (False, True), False),
    ),
    outer_keys=(
        Key("mm_tokens_per_image", "gemma3.tokens_per_image", 256),
        Key("image_token_index", "gemma3.image_token_id", 262144),
        Key("boi_token_index", "gemma3.image_begin_token_id", 255999),
        Key("eoi_token_index", "gemma3.image_end_token_id", 256000),
    ),
    tensors=(
        Tensor(
            "vision.patches.kernel",
            _TOWER + "embeddings.patch_embedding.weight",
            "c y x w -> w c y x",
        ),
        Tensor("vision.patches.bias", _TOWER + "embeddings.patch_embedding.bias", "w -> w"),
        Tensor("vision.positions", _TOWER + "embeddings.position_embedding.weight", "p w -> p w"),
        *_norm("layers.attention_norm", _TOWER_LAYER + "layer_norm1", "expert "),
        *_norm("layers.mlp_norm", _TOWER_LAYER + "layer_norm2", "expert "),
        *(
            row
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
            for row in _with_bias(
                f"layers.attention.{ours}",
                f"{_TOWER_LAYER}self_attn.{theirs}_proj",
                "expert w n h -> (n h) w",
                "expert n h -> (n h)",
            )
        ),
        *_with_bias(
            "layers.attention.out",
            _TOWER_LAYER + "self_attn.out_proj",
            "expert n h w -> w (n h)",
            "expert w -> w",
        ),
        *_with_bias(
            "layers.mlp.up", _TOWER_LAYER + "mlp.fc1", "expert w f -> f w", "expert f -> f"
        ),
        *_with_bias(
            "layers.mlp.down", _TOWER_LAYER + "mlp.fc2", "expert f w -> w f", "expert w -> w"
        ),
        *_norm("norm", _TOWER + "post_layernorm"),
        Tensor("vision.projector.norm", "multi_modal_projector.mm_soft_emb_norm.weight", "w -> w"),
        Tensor(
            "vision.projector.kernel",
            "multi_modal_projector.mm_input_projection_weight",
            "w d -> w d",
        ),
    ),
)

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
        layer_type_rows.Period(
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
            vision=_VISION,
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
        Bound("num_vision_layers", 27, 0, 2048, "0 means a model without images"),
        Bound("d_vision", 1152, 1),
        Bound("num_vision_heads", 16, 1),
        Bound("d_vision_mlp", 4304, 1),
        Bound("image_size", 896, 1, 16384, "images are stored on hosts"),
        Bound("patch_size", 14, 1, 16384, "a patch is part of an image"),
        Bound("tokens_per_image", 256, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("vision_norm_epsilon", 1e-6, SMALLEST, LARGEST, "0 would allow a division by 0"),
        Bound("image_token_id", 262144, 0, 2**31 - 1, "token IDs are int32"),
        Bound("image_begin_token_id", 255999, 0, 2**31 - 1, "token IDs are int32"),
        Bound("image_end_token_id", 256000, 0, 2**31 - 1, "token IDs are int32"),
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
