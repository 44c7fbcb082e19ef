"""JSON with a digest of itself: a flipped bit in it is detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from maxpipe.io.typed import parse

T = TypeVar("T")


def signed(content: Mapping[str, Any], *, indent: int | None = 1) -> str:
    """As JSON with a digest of itself; in one line without `indent`."""
    return json.dumps({**content, "sha256": _own_digest(content)}, indent=indent)


def opened(text: str | bytes, kind: type[T]) -> T:
    """The value that `signed` was given.

    Raises:
        ValueError: it is something else.
    """
    content = parse(text, dict[str, Any])
    if content.pop("sha256", None) != _own_digest(content):
        raise ValueError("its content is not what was saved")
    return parse(text, kind)


def _own_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
