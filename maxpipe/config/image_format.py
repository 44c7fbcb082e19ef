"""Format of images in batches, derived from a config."""

from __future__ import annotations

from typing import NamedTuple

from maxpipe.config.schema import Config
from maxpipe.models.config import ModelConfig
from maxpipe.models.registry import describe


class PatchFormat(NamedTuple):
    """Sizes of images that are stored as patches, because they have different sizes."""

    patch_size: int
    """Height and width of a patch in pixels."""
    merge_size: int
    """Height and width in patches of the square that becomes one token."""
    min_pixels: int
    """Minimum number of pixels of a resized image. If 0, every image is resized to the largest size
    within `max_pixels`."""
    max_pixels: int
    video_token_id: int
    family: str
    """Model family, whose config section has these sizes."""
    has_rotary_positions: bool = True
    """Whether tokens have 3-D positions."""


class ImageFormat(NamedTuple):
    """Sizes and token IDs of images in batches."""

    size: int
    """Height and width in pixels. 0 if images have different sizes."""
    num_tokens: int
    """Maximum number of tokens per image, without the tokens before and after these tokens. All
    images of the same size have this number."""
    token_id: int
    """Token ID of the positions whose embeddings are replaced."""
    begin_id: int
    end_id: int
    max_images: int
    """Maximum number of images per sequence."""
    placeholder: tuple[int, ...]
    """Token IDs that chat templates render for an image."""
    patches: PatchFormat | None = None
    """Sizes of patches, or None if all images have the same size."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an image in a batch."""
        if (patches := self.patches) is None:
            return (self.size, self.size, 3)
        count = self.num_tokens * patches.merge_size**2
        return (count, patches.patch_size, patches.patch_size, 3)

    def fingerprint(self) -> list[int]:
        """Return the values that determine the tokens and the pixels of a document."""
        ids = (self.token_id, self.begin_id, self.end_id)
        values = [self.size, self.num_tokens, *ids]
        if (patches := self.patches) is not None:
            values += [patches.patch_size, patches.merge_size, patches.min_pixels]
            values += [patches.max_pixels, patches.video_token_id]
        return values


def image_format(config: Config) -> ImageFormat | None:
    """Return the format of the images in a run's batches, or None if its data has no images."""
    return model_image_format(config.model, config.data.max_images_per_sequence)


def model_image_format(model: ModelConfig, max_images: int) -> ImageFormat | None:
    """Return the format of up to `max_images` images per sequence, or None without images."""
    tower = describe(model).ends.vision
    if not max_images or tower is None:
        return None
    patches = None
    if tower.has_grids:
        sizes = (tower.patch_size, tower.merge_size, tower.min_pixels, tower.max_pixels)
        other = (tower.video_token_id, model.family, tower.has_rotary_positions)
        patches = PatchFormat(*sizes, *other)
    return ImageFormat(
        0 if patches else tower.image_size,
        tower.tokens_per_image,
        tower.image_token_id,
        tower.image_begin_token_id,
        tower.image_end_token_id,
        max_images,
        tower.placeholder,
        patches,
    )
