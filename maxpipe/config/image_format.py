"""Format of images in batches, derived from a config."""

from __future__ import annotations

from typing import NamedTuple

from maxpipe.config.schema import Config
from maxpipe.models.config import ModelConfig
from maxpipe.models.registry import describe


class ImageFormat(NamedTuple):
    """Sizes and token IDs of images in batches."""

    size: int
    """Height and width in pixels."""
    num_tokens: int
    """Number of tokens per image, without the tokens before and after these tokens."""
    token_id: int
    """Token ID of the positions whose embeddings are replaced."""
    begin_id: int
    end_id: int
    max_images: int
    """Maximum number of images per sequence."""


def image_format(config: Config) -> ImageFormat | None:
    """Return the format of the images in a run's batches, or None if its data has no images."""
    return model_image_format(config.model, config.data.max_images_per_sequence)


def model_image_format(model: ModelConfig, max_images: int) -> ImageFormat | None:
    """Return the format of up to `max_images` images per sequence, or None without images."""
    tower = describe(model).ends.vision
    if not max_images or tower is None:
        return None
    return ImageFormat(
        tower.image_size,
        tower.tokens_per_image,
        tower.image_token_id,
        tower.image_begin_token_id,
        tower.image_end_token_id,
        max_images,
    )
