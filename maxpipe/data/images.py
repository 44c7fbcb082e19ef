"""Images of chat records: decoding, resizing, and their tokens.

Images are resized with Pillow, as the image processors of transformers do with the PIL backend. The
rest of the preprocessing runs on devices. Images are decoded when conversations are indexed, so
that unusable images are found before training starts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from maxpipe.config.image_format import ImageFormat, PatchFormat
from maxpipe.data.formats.record_text import BadRecord, shorten
from maxpipe.data.image_grids import (
    MAX_ASPECT_RATIO,
    resized_shape,
    rotary_positions,
    to_patches,
)
from maxpipe.data.tokenizers.chat import ImageReference, Message
from maxpipe.io import files

IMAGES, IMAGE_TOKENS_LEFT = "images", "image_tokens_left"
"""Names of the arrays of a sequence that contain its images (uint8 `[N, H, W, 3]`, or patches `[N,
P, S, S, 3]`) and the number of tokens of an image from each of its tokens to its last token (int32
`[T]`, 0 for text)."""
IMAGE_GRIDS, ROTARY_POSITIONS = "image_grids", "rotary_positions"
"""Names of the arrays of a sequence with images of different sizes: the number of patches per
column and per row of each image (int32 `[N, 2]`), and 3-D positions of tokens (int32 `[T, 3]`)."""

MAX_FILE_BYTES = 1 << 26
"""Maximum size of an image file in bytes."""
_MAX_PIXELS = 1 << 26
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Modes with 8 bits per channel. Pillow would clip wider channels instead of scaling them."""
_PARTS = ("image", "image_url", "input_image")
"""Types of content parts that contain images."""
_SOURCES = ("image", "path", "bytes", "image_url", "url")
"""Keys of a content part that contain the image."""
_FIELD = "images"
"""Record field with the images of content parts that contain no image themselves."""
_DATA_URL = "data:image/"
_ACTION = "Correct the image, or remove the record."


class BadImage(BadRecord):
    """Raised for a record with an image that cannot be used."""


class RecordImages(NamedTuple):
    """Images of a record, and whether they were read from the field `images`."""

    references: tuple[ImageReference, ...]
    uses_field: bool


def take_images(messages: list[Message], fields: Mapping[str, Any]) -> RecordImages:
    """Return the images of the messages, and replace their parts by `{"type": "image"}`.

    The n-th part without an image receives the n-th image of the field `images`.

    Raises:
        BadImage: a part has no image, or the field has images without a part.
    """
    more = fields.get(_FIELD)
    listed = list(more) if isinstance(more, list | tuple) else []
    used, found = 0, list[ImageReference]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        parts = list(content)
        for place, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
                continue
            which = f"message {number + 1}"
            value = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
            if value is None and used < len(listed):
                value, used = listed[used], used + 1
            if value is None:
                rule = f"must contain the image: parts of type {part['type']} are not supported "
                rule += f"without a path, bytes, or an entry of the field {_FIELD}."
                raise BadImage(which, rule, 'Write {"type": "image", "path": "a.png"}.')
            found.append(_reference(value, number, which))
            parts[place] = {"type": "image"}
        message["content"] = parts
    if used and used < len(listed):
        rule = f"must have one part of type image for each of the {len(listed)} images in {_FIELD}."
        raise BadImage(f"{used} parts of type image", rule, _ACTION)
    return RecordImages(tuple(found), uses_field=bool(used))


def _reference(value: Any, number: int, which: str) -> ImageReference:
    if isinstance(value, Mapping):
        raw, path = value.get("bytes"), value.get("path") or value.get("url")
        value = path if raw is None else raw
    if isinstance(value, bytes | bytearray):
        return ImageReference(number, "", bytes(value))
    if isinstance(value, str) and value.startswith(_DATA_URL):
        try:
            raw = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError as error:
            rule = f"must have valid base64 in the data URL of an image: {error}."
            raise BadImage(which, rule, _ACTION) from error
        return ImageReference(number, "", raw)
    if isinstance(value, str) and value:
        return ImageReference(number, value, None)
    rule = f"must have a path or bytes for each image; found {type(value).__name__}."
    raise BadImage(which, rule, 'Write {"type": "image", "path": "a.png"}.')


class DecodedImages(NamedTuple):
    """Images of a document."""

    pixels: np.ndarray
    """uint8 `[n, *ImageFormat.shape]`."""
    num_tokens: np.ndarray
    """Number of tokens of each image, int64 `[n]`."""
    digest: bytes
    """Digest of the encoded images."""
    grids: np.ndarray | None = None
    """Number of patches per column and per row, int32 `[n, 2]`; None if all images have the same
    size."""

    def rotary_positions(self, tokens_left: np.ndarray, image: ImageFormat) -> np.ndarray | None:
        """Return the 3-D positions of the tokens of the document, or None if the model has none."""
        if self.grids is None or image.patches is None or not image.patches.has_rotary_positions:
            return None
        return rotary_positions(tokens_left, self.grids, image.patches)


def decode_images(
    references: tuple[ImageReference, ...], folder: Callable[[], str], image: ImageFormat
) -> DecodedImages:
    """Return the images, resized as the model requires.

    `folder` returns the folder of the record's file, to which paths are relative.

    Raises:
        BadImage: an image cannot be read or is not supported.
    """
    total, pixels = hashlib.blake2b(digest_size=16), list[np.ndarray]()
    for number, reference in enumerate(references):
        which = f"image {number + 1}, message {reference.message + 1}"
        if reference.path:
            which += f", {shorten(reference.path)}"
        raw = reference.raw
        if raw is None:
            raw = _read_file(reference.path, folder, which)
        total.update(hashlib.blake2b(raw, digest_size=16).digest())
        pixels.append(decode_image(raw, image.patches or image.size, which))
    if (form := image.patches) is None:
        counts = np.full(len(pixels), image.num_tokens)
        return DecodedImages(np.stack(pixels), counts, total.digest())
    grids = np.array([each.shape[:2] for each in pixels], np.int32) // form.patch_size
    patches = [to_patches(each, form, image.shape[0]) for each in pixels]
    counts = grids.prod(1) // form.merge_size**2
    return DecodedImages(np.stack(patches), counts, total.digest(), grids)


def _read_file(path: str, folder: Callable[[], str], which: str) -> bytes:
    if "://" in path:
        rule = "must be a file: maxpipe does not download images."
        raise BadImage(which, rule, "Store the image next to the records, and write its path.")
    parts = posixpath.normpath(path.replace(os.sep, "/")).split("/")
    if os.path.isabs(path) or posixpath.isabs(path) or ".." in parts or "\0" in path:
        rule = "must have a path inside the folder of the record's file, without `..`."
        raise BadImage(which, rule, "Write a path relative to the folder of the record's file.")
    full = os.path.join(folder(), path)
    try:
        return files.read(full, MAX_FILE_BYTES)
    except OSError as error:
        rule = f"must be a readable file at {full}: {error.strerror or error}."
        action = "Correct the path, which is relative to the folder of the record's file."
        raise BadImage(which, rule, action) from error


def decode_image(raw: bytes, size: int | PatchFormat, which: str = "image") -> np.ndarray:
    """Return an image as uint8 `[h, w, 3]`; transparent pixels become white.

    The height and width are both `size`, or follow from the size of the image.

    Raises:
        BadImage: the image is damaged, exceeds a limit, is animated, or has an unsupported format.
    """
    if not raw or len(raw) > MAX_FILE_BYTES:
        rule = f"must have from 1 to {MAX_FILE_BYTES} bytes; found {len(raw)}."
        raise BadImage(which, rule, _ACTION)
    try:
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as image:
            _check_header(image, which)
            image.load()
            turned = ImageOps.exif_transpose(image)
            if isinstance(size, PatchFormat):
                shape, filter_ = _shape_in_patches(turned, size, which), Image.Resampling.BICUBIC
            else:
                shape, filter_ = (size, size), Image.Resampling.BILINEAR
            return np.asarray(_to_rgb(turned).resize(shape, filter_), np.uint8)
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large("the header states more", which) from error
    except Exception as error:  # Pillow raises various types for damaged files
        text = " ".join(str(error).split())[:200].rstrip(".")
        text = text.partition(" <_io.BytesIO")[0]  # the file is named at the start of the message
        rule = f"must be a complete image in one of the formats {', '.join(_FORMATS)}: {text}."
        raise BadImage(which, rule, _ACTION) from error


def _check_header(image: Image.Image, which: str) -> None:
    width, height = image.size
    if width * height > _MAX_PIXELS or min(width, height) < 1:
        raise _too_large(f"found {width} x {height}", which)
    if getattr(image, "n_frames", 1) > 1:
        rule = f"must be a single image; found {getattr(image, 'n_frames', 1)} frames."
        raise BadImage(which, rule, "Extract one frame, or remove the record.")
    if image.mode not in _MODES:
        rule = f"must have 8 bits per channel; found mode {image.mode}."
        raise BadImage(which, rule, "Convert the image to 8-bit RGB, or remove the record.")


def _shape_in_patches(image: Image.Image, form: PatchFormat, which: str) -> tuple[int, int]:
    """Return the width and height to which an image is resized."""
    width, height = image.size
    found = f"found {width} x {height}"
    if form.min_pixels and max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        rule = f"must have sides with a ratio of at most {MAX_ASPECT_RATIO}: {found}."
        raise BadImage(which, rule, "Crop the image, or remove the record.")
    rows, columns = resized_shape(height, width, form)
    if rows * columns > form.max_pixels:
        rule = f"must have at most max_pixels ({form.max_pixels}) pixels when its sides are "
        rule += f"multiples of {form.patch_size * form.merge_size}: {found}, which becomes "
        rule += f"{columns} x {rows}."
        enough = math.prod(resized_shape(height, width, form._replace(max_pixels=_MAX_PIXELS)))
        key = f"model.{form.family}.max_pixels"
        raise BadImage(which, rule, f"Crop the image, or set {key}={enough}.")
    return columns, rows


def _too_large(found: str, which: str) -> BadImage:
    rule = f"must have at most {_MAX_PIXELS} pixels: {found}."
    return BadImage(which, rule, "Reduce the size of the image, or remove the record.")


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


class ImageText(NamedTuple):
    """Text with the tokens of images, and character spans in this text."""

    text: str
    spans: list[tuple[int, int]]


def expand_image_tokens(
    text: str,
    spans: list[tuple[int, int]],
    num_tokens: Sequence[int] | np.ndarray,
    image: ImageFormat,
    special: Mapping[str, int],
) -> ImageText:
    """Replace the placeholder of each image in rendered text by the complete tokens of the image.

    `ImageFormat.placeholder` is the placeholder. An image consists of the begin token, the image
    tokens and the end token. Images of one size also have two line breaks before and after these
    tokens, as in the processor of Gemma 3. `num_tokens` is the number of image tokens per image.
    `special` maps the text of control tokens to IDs.

    Raises:
        BadImage: the text does not have one placeholder per image.
    """
    texts, count = {number: name for name, number in special.items()}, len(num_tokens)
    begin, one, end = (texts[each] for each in (image.begin_id, image.token_id, image.end_id))
    placeholder = "".join(texts[each] for each in image.placeholder)
    around = "\n\n"
    if image.patches is not None:
        around = ""
        _check_videos(text, texts.get(image.patches.video_token_id))
    pieces = text.split(placeholder)
    if len(pieces) != count + 1 or any(
        token in piece for piece in pieces for token in (begin, one, end)
    ):
        number = f"{count} time" if count == 1 else f"{count} times"
        rule = (
            f"must render {placeholder} {number}, once for each image, and no other image token; "
        )
        rule += f"the rendered text contains {placeholder} {len(pieces) - 1} times."
        action = "Remove image tokens from the text, or correct the chat template."
        raise BadImage("the rendered conversation", rule, action)
    complete = [f"{around}{begin}{one * number}{end}{around}" for number in num_tokens]
    # Characters after an image move by the additional characters of all images before them.
    ends = np.cumsum([len(piece) + len(placeholder) for piece in pieces[:-1]], dtype=np.int64)
    more = np.cumsum([0, *(len(each) - len(placeholder) for each in complete)])

    def moved(place: int) -> int:
        return place + int(more[np.searchsorted(ends, place, "right")])

    parts = [text for pair in zip(complete, pieces[1:], strict=True) for text in pair]
    joined = "".join([pieces[0], *parts])
    return ImageText(joined, [(moved(first), moved(last)) for first, last in spans])


def _check_videos(text: str, video: str | None) -> None:
    if video is not None and video in text:
        rule = f"must not contain {video}: videos are not supported."
        raise BadImage("the rendered conversation", rule, "Replace the video by images.")


def image_tokens_left(
    ids: np.ndarray, image: ImageFormat, num_tokens: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return the array `image_tokens_left` of a document. `num_tokens` is the number of image
    tokens per image.

    Raises:
        BadImage: the document does not have this number of image tokens.
    """
    is_image, total = ids == image.token_id, int(np.sum(num_tokens))
    if (number := int(is_image.sum())) != total:
        rule = f"must have {total} image tokens; the tokenizer produces {number}"
        action = "Use the tokenizer of the model."
        raise BadImage("the rendered conversation", f"{rule}.", action)
    left = np.zeros(len(ids), np.int32)
    left[is_image] = np.concatenate([np.arange(each, 0, -1) for each in num_tokens])
    return left
