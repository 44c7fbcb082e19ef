"""Config keys, rules and Hugging Face tables of the vision tower in Qwen families, without jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import own_keys
from maxpipe.models.huggingface import (
    Fixed,
    Key,
    Ours,
    Row,
    Tensor,
    Theirs,
    UnsupportedError,
    VisionTable,
    an_object,
)
from maxpipe.models.layers.qwen_vision import FRAMES, QwenVisionTower
from maxpipe.models.vision_rules import tower_rules


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class QwenVisionConfig:
    """Config keys of a vision tower for images of different sizes."""

    num_vision_layers: int = 0
    """Number of layers of the vision tower, which computes embeddings of images. 0 means a model
    without images, and all other vision keys are then ignored."""
    d_vision: int = 1152
    """Width of the vision tower."""
    num_vision_heads: int = 16
    """Number of attention heads of the vision tower. The width per head must be a multiple of 4."""
    d_vision_mlp: int = 4304
    """Hidden width of the MLPs in the vision tower."""
    patch_size: int = 16
    """Height and width in pixels of the patches that the vision tower embeds."""
    spatial_merge_size: int = 2
    """Height and width in patches of the squares that become one image token each."""
    num_position_embeddings: int = 2304
    """Number of learned positions of the vision tower, which form a square grid. They are
    interpolated to the grid of each image."""
    min_pixels: int = 65536
    """Minimum number of pixels of an image. Smaller images are enlarged."""
    max_pixels: int = 1048576
    """Maximum number of pixels of an image. Larger images are reduced, with the same aspect ratio.
    Batches reserve memory for images of this size, and the vision tower processes as many
    patches for every image."""
    image_token_id: int = 248056
    """Token ID of the positions at which image embeddings replace token embeddings."""
    image_begin_token_id: int = 248053
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int = 248054
    """Token ID that follows the tokens of an image."""
    video_token_id: int = 248057
    """Token ID of videos, which are not supported."""
    mrope_section: list[int] = field(
        default_factory=lambda: [11, 11, 10], hash=False
    )  # lists are not hashable
    """Numbers of pairs of dims that temporal, vertical and horizontal positions rotate. Without
    images, all three positions of a token are equal, and this key has no effect."""


def vision_tower(
    config: ModelConfig, deepstack_layers: tuple[int, ...] = ()
) -> QwenVisionTower | None:
    """Return the vision tower of a config, or None for a model without images."""
    own = own_keys(config, QwenVisionConfig)
    if not own.num_vision_layers:
        return None
    return QwenVisionTower(
        d_model=config.d_model,
        width=own.d_vision,
        num_layers=own.num_vision_layers,
        num_heads=own.num_vision_heads,
        d_mlp=own.d_vision_mlp,
        patch_size=own.patch_size,
        merge_size=own.spatial_merge_size,
        num_positions=own.num_position_embeddings,
        min_pixels=own.min_pixels,
        max_pixels=own.max_pixels,
        image_token_id=own.image_token_id,
        image_begin_token_id=own.image_begin_token_id,
        image_end_token_id=own.image_end_token_id,
        video_token_id=own.video_token_id,
        deepstack_layers=deepstack_layers,
    )


def bounds(image: int = 248056, begin: int = 248053, end: int = 248054) -> tuple[Bound, ...]:
    """Return the allowed ranges of the keys in `QwenVisionConfig`, given the token IDs."""
    ids = {"image_token_id": image, "image_begin_token_id": begin, "image_end_token_id": end}
    return (
        Bound("num_vision_layers", 27, 0, 2048, "0 means a model without images"),
        Bound("d_vision", 1152, 1),
        Bound("num_vision_heads", 16, 1),
        Bound("d_vision_mlp", 4304, 1),
        Bound("patch_size", 16, 1, 4096, "a patch is part of an image"),
        Bound("spatial_merge_size", 2, 1, 64, "a square of patches is part of an image"),
        Bound("num_position_embeddings", 2304, 1, 2**31 - 1, "indices are int32 on devices"),
        Bound("min_pixels", 65536, 1, 2**26, "images are stored on hosts"),
        Bound("max_pixels", 1048576, 1, 2**26, "images are stored on hosts"),
        *(Bound(name, number, 0, 2**31 - 1, "token IDs are int32") for name, number in ids.items()),
        Bound("video_token_id", image + 1, 0, 2**31 - 1, "token IDs are int32"),
    )


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for a vision tower."""
    section, own = f"model.{config.family}", own_keys(config, QwenVisionConfig)
    code, sections = Code.MODEL_IMAGES, own.mrope_section
    if len(sections) != 3 or min(sections) < 0:
        rule = "must contain three numbers of at least 0: pairs of dims for temporal, vertical and "
        rule += "horizontal positions."
        default = ",".join(map(str, type(own)().mrope_section))
        action = f"Set {section}.mrope_section=[{default}]."
        yield RuleViolation(code, f"{section}.mrope_section", rule, action)
    if (tower := vision_tower(config)) is None:
        return
    yield from tower_rules(config, tower)
    if (side := math.isqrt(tower.num_positions)) ** 2 != tower.num_positions:
        rule, action = "must be a square number.", f"{section}.num_position_embeddings={side**2}"
        yield RuleViolation(code, f"{section}.num_position_embeddings", rule, f"Set {action}.")
    if tower.max_pixels < max(
        tower.min_pixels, square := (tower.patch_size * tower.merge_size) ** 2
    ):
        least = max(tower.min_pixels, square)
        rule = f"must be at least {least}: the minimum number of pixels, and one image token."
        yield RuleViolation(
            code, f"{section}.max_pixels", rule, f"Set {section}.max_pixels={least}."
        )


class _AxialRope:
    """Key-table row for the rotary positions of the tower, which have no settings."""

    names = ("rope_parameters",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the parameters, if there are any."""
        parameters = an_object(theirs, self.names[0])
        for name, value in _AXIAL.items():
            if (stated := parameters.get(name, value)) != value:
                key = f"vision_config.{self.names[0]}.{name}"
                raise UnsupportedError(key, stated, f"must be {value!r}.")
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the parameters."""
        return {self.names[0]: _AXIAL}


_AXIAL = {"rope_theta": 10000.0, "rope_type": "axial"}


class _OutputWidth:
    """Key-table row for the width of image embeddings, which is that of the language model."""

    names = ("out_hidden_size",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the width."""
        width = theirs.get(self.names[0], 3584)
        if width != ours["d_model"]:
            rule = f"must be hidden_size of the language model ({ours['d_model']})."
            raise UnsupportedError(f"vision_config.{self.names[0]}", width, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the width of the language model."""
        return {self.names[0]: ours["d_model"]}


def vision_table(
    section: str,
    model_type: str,
    image: int = 248056,
    begin: int = 248053,
    end: int = 248054,
    *more: Row,
    tensors: tuple[Tensor, ...] = (),
) -> VisionTable:
    """Return the conversion tables of the tower for a family's config section.

    The token IDs are the defaults in transformers. `more` and `tensors` are additional rows.
    """
    return VisionTable(
        model_type,
        keys=(
            Key("hidden_size", f"{section}.d_vision", 1152),
            Key("depth", f"{section}.num_vision_layers", 27),
            Key("num_heads", f"{section}.num_vision_heads", 16),
            Key("intermediate_size", f"{section}.d_vision_mlp", 4304),
            Key("patch_size", f"{section}.patch_size", 16),
            Key("spatial_merge_size", f"{section}.spatial_merge_size", 2),
            Key("num_position_embeddings", f"{section}.num_position_embeddings", 2304),
            Fixed("temporal_patch_size", (FRAMES,), FRAMES),
            Fixed("in_channels", (3,), 3),
            Fixed("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
            _OutputWidth(),
            _AxialRope(),
            *more,
        ),
        outer_keys=(
            Key("image_token_id", f"{section}.image_token_id", image),
            Key("vision_start_token_id", f"{section}.image_begin_token_id", begin),
            Key("vision_end_token_id", f"{section}.image_end_token_id", end),
            Key("video_token_id", f"{section}.video_token_id", image + 1),
        ),
        tensors=(*_TENSORS, *tensors),
        is_nested=True,
    )


def _linear(ours: str, theirs: str, dims: str, bias: str) -> tuple[Tensor, ...]:
    return (
        Tensor(f"vision.{ours}", f"visual.{theirs}.weight", dims),
        Tensor(f"vision.{ours}_bias", f"visual.{theirs}.bias", bias),
    )


def _norm(ours: str, theirs: str, stack: str = "") -> tuple[Tensor, ...]:
    return (
        Tensor(f"vision.{ours}.scale", f"visual.{theirs}.weight", f"{stack}w -> w"),
        Tensor(f"vision.{ours}.bias", f"visual.{theirs}.bias", f"{stack}w -> w"),
    )


def _merger(ours: str, theirs: str, stack: str = "") -> tuple[Tensor, ...]:
    return (
        *_norm(f"{ours}.norm", f"{theirs}.norm", stack),
        *_linear(f"{ours}.up", f"{theirs}.linear_fc1", f"{stack}m n -> n m", f"{stack}n -> n"),
        *_linear(f"{ours}.down", f"{theirs}.linear_fc2", f"{stack}m d -> d m", f"{stack}d -> d"),
    )


# Layers are stacked along the dim `expert`.
_BLOCK, _STACK = "blocks.{expert}", "expert "
_TENSORS = (
    Tensor("vision.patches.kernel", "visual.patch_embed.proj.weight", "c t y x w -> w c t y x"),
    Tensor("vision.patches.bias", "visual.patch_embed.proj.bias", "w -> w"),
    Tensor("vision.positions", "visual.pos_embed.weight", "p w -> p w"),
    *_norm("layers.attention_norm", f"{_BLOCK}.norm1", _STACK),
    *_norm("layers.mlp_norm", f"{_BLOCK}.norm2", _STACK),
    *(
        row
        for name in ("query", "key", "value")
        for row in _linear(
            f"layers.attention.{name}",
            f"{_BLOCK}.attn.qkv",
            "expert w n h -> (n h) w",
            "expert n h -> (n h)",
        )
    ),
    *_linear(
        "layers.attention.out",
        f"{_BLOCK}.attn.proj",
        "expert n h w -> w (n h)",
        "expert w -> w",
    ),
    *_linear("layers.mlp.up", f"{_BLOCK}.mlp.linear_fc1", "expert w f -> f w", "expert f -> f"),
    *_linear("layers.mlp.down", f"{_BLOCK}.mlp.linear_fc2", "expert f w -> w f", "expert w -> w"),
    *_merger("merger", "merger"),
)
DEEPSTACK_TENSORS = _merger("deepstack", "deepstack_merger_list.{expert}", _STACK)
"""Tensor-table rows of the DeepStack mergers."""
