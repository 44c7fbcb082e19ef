"""Sizes and token IDs that all vision towers for images of different sizes have, without jax.

An image is a list of square patches, followed by unused patches. The patches of an image token,
which form a square, are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from maxpipe.models.layers.vision import CHANNELS
from maxpipe.models.spec import Param


@dataclass(frozen=True, kw_only=True)
class PatchTower:
    """A vision tower for images of different sizes, without its parameters."""

    d_model: int
    """Width of the language model."""
    width: int
    """Width of the tower."""
    num_layers: int
    num_heads: int
    d_mlp: int
    patch_size: int
    """Height and width of a patch in pixels."""
    merge_size: int
    """Height and width in patches of the square that becomes one image embedding."""
    num_positions: int
    """Number of learned positions."""
    max_pixels: int
    """Maximum number of pixels of a resized image."""
    min_pixels: int = 0
    """Minimum number of pixels of a resized image. If 0, every image is resized to the largest size
    within `max_pixels`."""
    image_token_id: int
    """Token ID of the positions whose embeddings are replaced."""
    image_begin_token_id: int
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int
    """Token ID that follows the tokens of an image."""
    video_token_id: int
    """Token ID of video embeddings, which are not supported."""
    norm_epsilon: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def tokens_per_image(self) -> int:
        """Return the maximum number of image embeddings of an image."""
        return self.max_pixels // (self.merge_size * self.patch_size) ** 2

    @property
    def num_patches(self) -> int:
        """Return the maximum number of patches of an image."""
        return self.tokens_per_image * self.merge_size**2

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of an image: patches, height, width and channels."""
        return (self.num_patches, self.patch_size, self.patch_size, CHANNELS)

    @property
    def has_grids(self) -> bool:
        """Return whether images have different sizes."""
        return True


def stacked(
    name: str, count: int, params: Mapping[tuple[str, ...], Param]
) -> dict[tuple[str, ...], Param]:
    """Return the parameters of `count` layers, stacked along the first dim."""
    dims = (count, "vision")
    return {(name, *key): replace(param, dims=(dims, *param.dims)) for key, param in params.items()}
