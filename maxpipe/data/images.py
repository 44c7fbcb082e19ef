"""Images of chat records: decoding, resizing, and their tokens.

Images are resized with Pillow, as the image processors of transformers do with the PIL backend. The
rest of the preprocessing runs on devices. Images are decoded when conversations are indexed, so
that unusable images are found before training starts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from maxpipe.config.image_format import ImageFormat
from maxpipe.data.formats.record_text import BadRecord, shorten
from maxpipe.data.tokenizers.chat import ImageReference, Message
from maxpipe.io import files

IMAGES, IMAGE_TOKENS_LEFT = "images", "image_tokens_left"
"""Names of the arrays of a sequence that contain its images (uint8 `[N, H, W, 3]`) and the number
of tokens of an image from each of its tokens to its last token (int32 `[T]`, 0 for text)."""

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
    """uint8 `[n, S, S, 3]`."""
    digest: bytes
    """Digest of the encoded images."""


def decode_images(
    references: tuple[ImageReference, ...], folder: Callable[[], str], size: int
) -> DecodedImages:
    """Return the images, resized to `size` x `size` pixels.

    `folder` returns the folder of the record's file, to which paths are relative.

    Raises:
        BadImage: an image cannot be read or is not supported.
    """
    total, pixels = hashlib.blake2b(digest_size=16), list[np.ndarray]()
    for number, reference in enumerate(references):
        which = f"image {number + 1}, message {reference.message + 1}"
        raw = reference.raw
        if raw is None:
            which += f", {shorten(reference.path)}"
            raw = _read_file(reference.path, folder, which)
        total.update(hashlib.blake2b(raw, digest_size=16).digest())
        pixels.append(decode_image(raw, size, which))
    return DecodedImages(np.stack(pixels), total.digest())


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


def decode_image(raw: bytes, size: int, which: str = "image") -> np.ndarray:
    """Return an image as uint8 `[size, size, 3]`; transparent pixels become white.

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
            resized = _to_rgb(turned).resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(resized, np.uint8)
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
    count: int,
    image: ImageFormat,
    special: Mapping[str, int],
) -> ImageText:
    """Replace each begin token in rendered text by the complete tokens of an image.

    An image consists of two line breaks, the begin token, the image tokens, the end token, and two
    line breaks, as in the processor of Gemma 3. `special` maps the text of control tokens to IDs.

    Raises:
        BadImage: the text does not have one begin token per image.
    """
    texts = {number: name for name, number in special.items()}
    begin, one, end = (texts[each] for each in (image.begin_id, image.token_id, image.end_id))
    pieces = text.split(begin)
    if len(pieces) != count + 1 or one in text or end in text:
        rule = f"must render {begin} once for each of its {count} images, and no other image "
        rule += f"token; the rendered text has it {len(pieces) - 1} times."
        action = "Remove image tokens from the text, or correct the chat template."
        raise BadImage("the rendered conversation", rule, action)
    full = f"\n\n{begin}{one * image.num_tokens}{end}\n\n"
    # Characters after an image move by the additional characters of all images before them.
    ends = np.cumsum([len(piece) + len(begin) for piece in pieces[:-1]], dtype=np.int64)

    def moved(place: int) -> int:
        return place + int(np.searchsorted(ends, place, "right")) * (len(full) - len(begin))

    return ImageText(full.join(pieces), [(moved(first), moved(last)) for first, last in spans])


def image_tokens_left(ids: np.ndarray, image: ImageFormat, count: int) -> np.ndarray:
    """Return the array `image_tokens_left` of a document.

    Raises:
        BadImage: the number of image tokens is not that of `count` images.
    """
    is_image = ids == image.token_id
    if (number := int(is_image.sum())) != count * image.num_tokens:
        rule = f"must have {count * image.num_tokens} image tokens; the tokenizer produces {number}"
        action = "Use the tokenizer of the model."
        raise BadImage("the rendered conversation", f"{rule}.", action)
    order = np.cumsum(is_image) - 1
    return np.where(is_image, image.num_tokens - order % image.num_tokens, 0).astype(np.int32)
