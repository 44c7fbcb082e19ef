"""Disk cache for arrays that are slow to compute.

Callers choose file names that contain a digest of the inputs. If several processes that share the
folder start together, only one process computes the arrays.
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
    """Texts of log messages about cached arrays."""

    task: str
    """Name of the computation, for messages."""
    unreadable: str
    """Log text used if the arrays cannot be read."""
    unwritable: str
    """Log text used if the arrays cannot be written."""


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
    """Return the value built from the arrays in a file, or compute the value with `make`.

    With `keep`, a computed value is written to the file. Processes that need the same file wait for
    the process that computes it. If this process is killed, another waiting process computes the
    file. `make` calls its argument after each part of its work.
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
            # The value is computed without a lock. `save` warns if the file cannot be written.
            _LOG.info("%s cannot be locked (%s)", path, error)
        else:
            if _state(path) != before:  # another process wrote the file while this process waited
                found = load(path, made_of, words.unreadable)
                if found is not None:
                    return found
            _remove_temporary_files(path)
        made = make(moved)
        save(path, arrays_of(made), words.unwritable)
    return made


def _state(path: str) -> tuple[int, int] | None:
    """Return the inode and the modification time of a file, which change when the file is
    replaced.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _remove_temporary_files(path: str) -> None:
    """Remove temporary files left by killed processes."""
    for part in glob.glob(f"{glob.escape(path)}.*{_TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):
            os.unlink(part)


def load(path: str, made_of: Callable[[Arrays], Value], otherwise: str) -> Value | None:
    """Return the value built from the arrays in a file. If the arrays cannot be used, log a warning
    and return None.

    `made_of` builds the value, and raises ValueError or KeyError for unusable arrays.
    """
    try:
        # The file is opened here, because numpy does not close a damaged file.
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


def save(path: str, arrays: Arrays, otherwise: str) -> None:
    """Write arrays to a temporary file and rename it, so that no process reads a partial file."""
    # The tempfile module is not used, because its files are not readable for other users of the
    # folder.
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
