"""Names of the batch arrays of images, without jax."""

from collections.abc import Mapping
from typing import TypeVar

IMAGES = "images"
"""Images, uint8 `[B, N, H, W, 3]`, or patches of images, uint8 `[B, N, P, S, S, 3]`. Unused entries
are 0."""
IMAGE_GRIDS = "image_grids"
"""Number of patches per column and per row of each image, int32 `[B, N, 2]`; 0 for unused images.
Only for models with images of different sizes."""
IMAGE_FEATURES = "image_features"
"""Embeddings of the images `[B, N, K, F]`, which replace `images` before the tick loop."""
IMAGE_TOKENS_LEFT = "image_tokens_left"
"""Number of tokens of an image from each of its tokens to its last token, int32 `[B, T]`; 0 for
text."""
ROTARY_POSITIONS = "rotary_positions"
"""Temporal, vertical and horizontal position of each token, int32 `[B, T, 3]`. Only for models with
images of different sizes; rotary embeddings then use them in place of `positions`."""

_Array = TypeVar("_Array")


def image_arrays(batch: Mapping[str, _Array]) -> dict[str, _Array]:
    """Return the arrays of a batch from which image embeddings are computed."""
    return {name: batch[name] for name in (IMAGES, IMAGE_GRIDS) if name in batch}


def without_images(batch: Mapping[str, _Array]) -> dict[str, _Array]:
    """Return the other arrays of a batch."""
    return {name: array for name, array in batch.items() if name not in (IMAGES, IMAGE_GRIDS)}
