"""Images of different sizes: resizing, patches and 3-D positions of tokens.

The order of patches and the positions are those of Qwen2-VL and later models (arXiv:2409.12191).
The sizes are those of these models or of Gemma 4.
"""

from __future__ import annotations

import math

import numpy as np

from maxpipe.config.image_format import PatchFormat

MAX_ASPECT_RATIO = 200
"""Maximum ratio of the longer side of an image to the shorter side."""


def resized_shape(height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Return the height and width to which an image is resized.

    Both are multiples of the size of an image token, and their product is from `min_pixels` to
    `max_pixels`, except for images with an extreme aspect ratio.
    """
    unit = form.patch_size * form.merge_size
    if not form.min_pixels:
        return _largest_shape(height, width, form.max_pixels, unit)
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > form.max_pixels:
        factor = math.sqrt(height * width / form.max_pixels)
        sides = (max(1, math.floor(side / factor / unit)) for side in (height, width))
    elif rows * columns < form.min_pixels:
        factor = math.sqrt(form.min_pixels / (height * width))
        sides = (math.ceil(side * factor / unit) for side in (height, width))
    else:
        return rows, columns
    rows, columns = (count * unit for count in sides)
    return rows, columns


def _largest_shape(height: int, width: int, max_pixels: int, unit: int) -> tuple[int, int]:
    """Return the largest height and width within `max_pixels` that are multiples of `unit`.

    Both sides are rounded down. A side of less than one unit becomes one unit, and the other side
    then has as many units as the aspect ratio, within `max_pixels`.
    """
    factor = math.sqrt(max_pixels / (height * width))
    rows, columns = (math.floor(factor * side / unit) for side in (height, width))
    most = max_pixels // unit**2
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * unit, columns * unit


def to_patches(pixels: np.ndarray, form: PatchFormat, num_patches: int) -> np.ndarray:
    """Return the patches of an image `[h, w, 3]` as `[num_patches, S, S, 3]`, padded with zeros.

    The patches of an image token are consecutive.
    """
    size, side = form.patch_size, form.merge_size
    rows, columns = (length // (size * side) for length in pixels.shape[:2])
    split = pixels.reshape(rows, side, size, columns, side, size, 3)
    patches = split.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, size, size, 3)
    padding = ((0, num_patches - len(patches)), *((0, 0),) * 3)
    return np.pad(patches, padding)


def rotary_positions(tokens_left: np.ndarray, grids: np.ndarray, form: PatchFormat) -> np.ndarray:
    """Return the temporal, vertical and horizontal position of each token of a document, int32
    `[T, 3]`.

    `tokens_left` is the array `image_tokens_left`, and `grids` contains the number of patches per
    column and per row of each image. All positions of a text token are equal. The tokens of an
    image have the same temporal position, and the next token follows the largest position.
    """
    result = np.empty((len(tokens_left), 3), np.int32)
    before = np.concatenate([[0], tokens_left[:-1]])
    begins = np.flatnonzero((tokens_left > 0) & (before <= 1))
    place = position = 0
    for begin, (rows, columns) in zip(begins.tolist(), grids // form.merge_size, strict=True):
        result[place:begin] = position + np.arange(begin - place)[:, None]
        position += begin - place
        place, inside = begin + rows * columns, np.arange(rows * columns)
        result[begin:place] = position
        result[begin:place, 1] += inside // columns
        result[begin:place, 2] += inside % columns
        position += max(rows, columns)
    result[place:] = position + np.arange(len(result) - place)[:, None]
    return result
