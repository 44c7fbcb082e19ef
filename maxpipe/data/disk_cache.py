"""Arrays that took long to compute, kept on disk under the digest of what they follow from.

Of several processes that start together one computes them, if they see the same folder.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from maxpipe.data.formats.folder_cache import lock_file
from maxpipe.data.sources import Heartbeat
from maxpipe.io.files import open_regular

_LOG = logging.getLogger(__name__)

_TEMPORARY_SUFFIX = ".tmp"

Value = TypeVar("Value")
Arrays = Mapping[str, np.ndarray]


class CacheMessages(NamedTuple):
    """What is said of arrays, and of having to make them again."""

    task: str
    """That of making them."""
    unreadable: str
    """What follows if they cannot be read."""
    unwritable: str
    """And if they cannot be written."""


def load_or_compute(
    path: str,
    made_of: Callable[[Arrays], Value],
    make: Callable[[Heartbeat | None], Value],
    arrays_of: Callable[[Value], Arrays],
    words: CacheMessages,
    *,
    keep: bool,
    moved: Heartbeat | None,
) -> Value:
    """What is made of the arrays of a file, or else what `make` makes; with `keep` these are kept.

    Processes that want the same file wait for the one that makes it; if it is killed, the next one
    does. `make` calls what it is given for each part of its work.
    """
    found = load(path, made_of, words.unreadable)
    if found is not None:
        return found
    if not keep:
        return make(moved)
    before = _state(path)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            moved = stack.enter_context(lock_file(f"{path}.lock", words.task, moved, removes=True))
        except OSError as error:
            # It is made all the same; if nothing can be written here, `save` says so.
            _LOG.info("%s cannot be locked (%s)", path, error)
        else:
            if _state(path) != before:  # by a process that had the lock before
                found = load(path, made_of, words.unreadable)
                if found is not None:
                    return found
            _remove_temporary_files(path)
        made = make(moved)
        save(path, arrays_of(made), words.unwritable)
    return made


def _state(path: str) -> tuple[int, int] | None:
    """Tells whether a file was replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _remove_temporary_files(path: str) -> None:
    """What processes that were killed have left of a file."""
    for part in glob.glob(f"{glob.escape(path)}.*{_TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):
            os.unlink(part)


def load(
    path: str,
    made_of: Callable[[Arrays], Value],
    otherwise: str,
) -> Value | None:
    """What is made of a file's arrays; None, and a warning, if they cannot be read or used.

    `made_of` raises ValueError or KeyError for arrays that it cannot use.
    """
    try:
        # Opened here, because numpy leaves a damaged file open.
        with (
            open(open_regular(path), "rb") as stream,
            np.load(stream, allow_pickle=False) as arrays,
        ):
            return made_of(arrays)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        _LOG.warning("%s cannot be used (%s): %s", path, error, otherwise)
        return None


def save(
    path: str,
    arrays: Arrays,
    otherwise: str,
) -> None:
    """Written to a temporary name and renamed, so that no process reads half a file."""
    # A file of the module tempfile could not be read by other users of the folder.
    temporary = f"{path}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "xb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): %s", path, error, otherwise)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
