"""Config keys, rules and Hugging Face tables of the vision tower in Gemma 4, without jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import LARGEST, SMALLEST, Bound, ModelConfig
from maxpipe.models.family import own_keys
from maxpipe.models.huggingface import (
    Fixed,
    Key,
    Ours,
    Tensor,
    Theirs,
    UnsupportedError,
    VisionTable,
    an_object,
)
from maxpipe.models.layers.gemma4_vision import LIMITS, Gemma4VisionTower
from maxpipe.models.vision_rules import tower_rules


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """Config keys of the vision tower, which processes images of different sizes."""

    num_vision_layers: int = 0
    """Number of layers of the vision tower, which computes embeddings of images. 0 means a model
    without images, and all other vision keys are then ignored."""
    d_vision: int = 768
    """Width of the vision tower."""
    num_vision_heads: int = 12
    """Number of attention heads of the vision tower. The width per head must be a multiple of 4."""
    d_vision_mlp: int = 3072
    """Hidden width of the MLPs in the vision tower."""
    patch_size: int = 16
    """Height and width in pixels of the patches that the vision tower embeds."""
    pooling_kernel_size: int = 3
    """Height and width in patches of the squares whose average becomes one image token."""
    max_soft_tokens: int = 280
    """Maximum number of tokens of an image. Every image is resized to the largest size with at most
    this number of tokens, with the same aspect ratio."""
    num_position_embeddings: int = 10240
    """Number of learned embeddings of columns, and of rows, in the vision tower."""
    vision_norm_epsilon: float = 1e-6
    """Epsilon of the norms in the vision tower and its projector."""
    use_clipped_linears: bool = False
    """Clip the inputs and outputs of the matmuls in the layers of the vision tower to stored
    limits. The limits are not trained."""
    standardize_images: bool = False
    """Subtract a stored bias from the averages of patches, and multiply them by a stored scale.
    Both are not trained."""
    bidirectional_images: bool = False
    """Attend from every token of an image to all tokens of this image in local layers. Otherwise,
    image tokens are causal."""
    image_token_id: int = 258880
    """Token ID of the positions at which image embeddings replace token embeddings."""
    image_begin_token_id: int = 255999
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int = 258882
    """Token ID that follows the tokens of an image."""
    video_token_id: int = 258884
    """Token ID of videos, which are not supported."""
    per_layer_pad_token_id: int = 0
    """Token ID whose per-layer embeddings image tokens use. They do not train these embeddings."""


def vision_tower(config: ModelConfig) -> Gemma4VisionTower | None:
    """Return the vision tower of a config, or None for a model without images."""
    own = own_keys(config, Gemma4VisionConfig)
    if not own.num_vision_layers:
        return None
    return Gemma4VisionTower(
        d_model=config.d_model,
        width=own.d_vision,
        num_layers=own.num_vision_layers,
        num_heads=own.num_vision_heads,
        d_mlp=own.d_vision_mlp,
        patch_size=own.patch_size,
        merge_size=own.pooling_kernel_size,
        num_positions=own.num_position_embeddings,
        max_pixels=own.max_soft_tokens * (own.pooling_kernel_size * own.patch_size) ** 2,
        image_token_id=own.image_token_id,
        image_begin_token_id=own.image_begin_token_id,
        image_end_token_id=own.image_end_token_id,
        video_token_id=own.video_token_id,
        norm_epsilon=own.vision_norm_epsilon,
        is_clipped=own.use_clipped_linears,
        is_standardized=own.standardize_images,
    )


_IDS = {
    "image_token_id": 258880,
    "image_begin_token_id": 255999,
    "image_end_token_id": 258882,
    "video_token_id": 258884,
    "per_layer_pad_token_id": 0,
}

BOUNDS = (
    Bound("num_vision_layers", 16, 0, 2048, "0 means a model without images"),
    Bound("d_vision", 768, 1),
    Bound("num_vision_heads", 12, 1),
    Bound("d_vision_mlp", 3072, 1),
    Bound("patch_size", 16, 1, 4096, "a patch is part of an image"),
    Bound("pooling_kernel_size", 3, 1, 64, "a square of patches is part of an image"),
    Bound("max_soft_tokens", 280, 1, 2**20, "images are stored on hosts"),
    Bound("num_position_embeddings", 10240, 1, 2**31 - 1, "indices are int32 on devices"),
    Bound("vision_norm_epsilon", 1e-6, SMALLEST, LARGEST, "0 would allow a division by 0"),
    *(Bound(name, number, 0, 2**31 - 1, "token IDs are int32") for name, number in _IDS.items()),
)
"""Allowed ranges of the keys in `Gemma4VisionConfig`."""


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for a vision tower."""
    section, own = f"model.{config.family}", own_keys(config, Gemma4VisionConfig)
    if (tower := vision_tower(config)) is None:
        return
    yield from tower_rules(config, tower)
    code, most = Code.MODEL_IMAGES, own.max_soft_tokens * own.pooling_kernel_size
    if tower.num_positions < most:
        rule = f"must be at least {most}: the number of patches per row of the widest image."
        action = f"Set {section}.num_position_embeddings={most}."
        yield RuleViolation(code, f"{section}.num_position_embeddings", rule, action)
    if own.per_layer_pad_token_id >= config.vocab_size:
        rule = f"must be less than model.vocab_size ({config.vocab_size})."
        action = f"Set {section}.per_layer_pad_token_id=0."
        yield RuleViolation(code, f"{section}.per_layer_pad_token_id", rule, action)


# Hugging Face format.


class _AxialRope:
    """Key-table row for the rotary positions of the tower, which have no settings."""

    names = ("rope_parameters",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the parameters, if there are any."""
        parameters = an_object(theirs, self.names[0])
        # Published configs contain `default`, which transformers replaces by `axial`.
        known = {"rope_type": ("axial", "default"), "rope_theta": (100.0,)}
        for name, values in known.items():
            if (stated := parameters.get(name, values[0])) not in values:
                allowed = " or ".join(repr(value) for value in values)
                key = f"vision_config.{self.names[0]}.{name}"
                raise UnsupportedError(key, stated, f"must be {allowed}.")
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the parameters."""
        return {self.names[0]: {"rope_theta": 100.0, "rope_type": "axial"}}


class _Heads:
    """Key-table row for the sizes of heads, which follow from the width and the number of heads."""

    names = ("num_key_value_heads", "head_dim")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the number of key/value heads and the head dim."""
        heads, width = ours["gemma4.num_vision_heads"], ours["gemma4.d_vision"]
        for name, default, wanted in zip(self.names, (12, 64), (heads, width / heads), strict=True):
            if (value := theirs.get(name, default)) != wanted:
                rule = f"must be {wanted:g}, because num_attention_heads is {heads} and "
                rule += f"hidden_size is {width}."
                raise UnsupportedError(f"vision_config.{name}", value, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of key/value heads and the head dim."""
        heads = ours["gemma4.num_vision_heads"]
        return dict(zip(self.names, (heads, ours["gemma4.d_vision"] // heads), strict=True))


class _SoftTokens:
    """Key-table row for the maximum number of image tokens, which transformers reads from the
    config of the image processor.
    """

    names = ("vision_soft_tokens_per_image",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of tokens that the model config states."""
        value = theirs.get(self.names[0])
        return {"gemma4.max_soft_tokens": 280 if value is None else value}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of tokens under the names of published configs."""
        return {self.names[0]: ours["gemma4.max_soft_tokens"]}


class _Bidirectional:
    """Key-table row for `use_bidirectional_attention` of models with a vision tower."""

    names = ("use_bidirectional_attention",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return whether image tokens attend to later tokens of their image."""
        return {"gemma4.bidirectional_images": theirs.get(self.names[0]) == "vision"}

    def write(self, ours: Ours) -> Theirs:
        """Return `vision` or null."""
        return {self.names[0]: "vision" if ours["gemma4.bidirectional_images"] else None}


_TOWER, _LAYER = "vision_tower.", "vision_tower.encoder.layers.{expert}."


def _matmul(ours: str, theirs: str, dims: str) -> tuple[Tensor, ...]:
    """Return rows for a matrix and its limits. Layers are stacked along the dim `expert`."""
    ours, theirs = f"vision.layers.{ours}", _LAYER + theirs
    return (
        Tensor(ours, f"{theirs}.linear.weight", f"expert {dims}"),
        *(
            Tensor(f"{ours}_{limit}", f"{theirs}.{limit}", "expert a -> a", is_scalar=True)
            for limit, _ in LIMITS
        ),
    )


def _norm(ours: str, theirs: str) -> Tensor:
    return Tensor(f"vision.layers.{ours}.scale", f"{_LAYER}{theirs}.weight", "expert w -> w")


TABLE = VisionTable(
    "gemma4_vision",
    keys=(
        Key("hidden_size", "gemma4.d_vision", 768),
        Key("num_hidden_layers", "gemma4.num_vision_layers", 16),
        Key("num_attention_heads", "gemma4.num_vision_heads", 12),
        _Heads(),
        Key("intermediate_size", "gemma4.d_vision_mlp", 3072),
        Key("patch_size", "gemma4.patch_size", 16),
        Key("pooling_kernel_size", "gemma4.pooling_kernel_size", 3),
        Key("position_embedding_size", "gemma4.num_position_embeddings", 10240),
        Key("rms_norm_eps", "gemma4.vision_norm_epsilon", 1e-6),
        Key("use_clipped_linears", "gemma4.use_clipped_linears", False),
        Key("standardize", "gemma4.standardize_images", False),
        Fixed("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        Fixed("attention_bias", (False,), False),
        _AxialRope(),
    ),
    text_keys=(
        _Bidirectional(),
        Key("pad_token_id", "gemma4.per_layer_pad_token_id", 0),
    ),
    outer_keys=(
        _SoftTokens(),
        Key("image_token_id", "gemma4.image_token_id", 258880),
        Key("boi_token_id", "gemma4.image_begin_token_id", 255999),
        Key("eoi_token_id", "gemma4.image_end_token_id", 258882),
        Key("video_token_id", "gemma4.video_token_id", 258884),
    ),
    tensors=(
        Tensor(
            "vision.patches.kernel",
            _TOWER + "patch_embedder.input_proj.weight",
            "y x c w -> w (y x c)",
        ),
        Tensor(
            "vision.positions",
            _TOWER + "patch_embedder.position_embedding_table",
            "a p w -> a p w",
        ),
        _norm("attention_norm", "input_layernorm"),
        _norm("attention_after_norm", "post_attention_layernorm"),
        _norm("mlp_norm", "pre_feedforward_layernorm"),
        _norm("mlp_after_norm", "post_feedforward_layernorm"),
        _norm("query_norm", "self_attn.q_norm"),
        _norm("key_norm", "self_attn.k_norm"),
        *(
            row
            for name in ("query", "key", "value")
            for row in _matmul(f"attention.{name}", f"self_attn.{name[0]}_proj", "w n h -> (n h) w")
        ),
        *_matmul("attention.out", "self_attn.o_proj", "n h w -> w (n h)"),
        *_matmul("mlp.gate", "mlp.gate_proj", "w f -> f w"),
        *_matmul("mlp.up", "mlp.up_proj", "w f -> f w"),
        *_matmul("mlp.down", "mlp.down_proj", "f w -> w f"),
        Tensor("vision.standardize.bias", _TOWER + "std_bias", "w -> w"),
        Tensor("vision.standardize.scale", _TOWER + "std_scale", "w -> w"),
        Tensor("vision.projector.kernel", "embed_vision.embedding_projection.weight", "w d -> d w"),
    ),
    is_nested=True,
    other_tensors=("model.audio_tower.*", "model.embed_audio.*"),
)
"""Conversion tables of the vision tower."""
