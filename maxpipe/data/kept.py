"""Arrays that took long to compute, kept on disk under the digest of what they follow from."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from maxpipe.boundary.files import opened

_LOG = logging.getLogger(__name__)

Made = TypeVar("Made")


def load(
    path: str,
    made_of: Callable[[Mapping[str, np.ndarray]], Made],
    otherwise: str = "reading all documents again",
) -> Made | None:
    """What is made of a file's arrays; None, and a warning, if they cannot be read or used.

    `made_of` raises ValueError or KeyError for arrays that it cannot use.
    """
    try:
        # Opened here, because numpy leaves a damaged file open.
        with open(opened(path), "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return made_of(arrays)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        _LOG.warning("%s cannot be used (%s): %s", path, error, otherwise)
        return None


def save(
    path: str,
    arrays: Mapping[str, np.ndarray],
    otherwise: str = "the next start reads all documents",
) -> None:
    """Written to a temporary name and renamed, so that no process reads half a file."""
    folder = os.path.dirname(path)
    temporary = None
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as stream:
            temporary = stream.name
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): %s", path, error, otherwise)
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
