"""The manifest of a checkpoint: size and SHA-256 of each of its files.

Neither the file system nor orbax notices when a bit of an array's bytes has turned.
The manifest is written last, as one atomic replacement, when everything else is in
place; it holds a digest of itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

from etils import epath

from maxpipe.checkpoint.place import exists, files, in_bucket, open_file, read, reading
from maxpipe.files import Unfit
from maxpipe.typed import parse

FILE = "manifest.json"

_VERSION = 1
_DAMAGE = {errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_READING_ATTEMPTS, _PAUSE_SECONDS = 3, 1.0
_PARTIAL = f"{FILE}.partial"
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 1 << 26
# Reading is what takes time, on network file systems most of all.
_NUM_THREADS = 16


class _File(TypedDict):
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    """What is in the file."""

    version: int
    step: int
    files: dict[str, _File]
    sha256: str


def write(folder: epath.Path, step: int) -> int:
    """Write the manifest of everything in `folder`; returns the bytes of all files.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    listed, names = {}, _names(folder)
    for name, found in zip(names, _digests(folder, names), strict=True):
        if isinstance(found, OSError):
            raise found
        listed[name] = {"bytes": found[0], "sha256": found[1]}
    content: dict[str, Any] = {"version": _VERSION, "step": step, "files": listed}
    text = json.dumps(content | {"sha256": _own_digest(content)}, indent=1)
    partial = folder / _PARTIAL
    partial.write_text(text)
    _flush(partial)
    partial.replace(folder / FILE)
    return sum(file["bytes"] for file in listed.values())


def is_in(folder: epath.Path) -> bool:
    """Whether `folder` has a manifest."""
    return exists(folder / FILE)


def faults(folder: epath.Path, step: int, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files of `folder`, which has a manifest: file and reason each.

    `share` (i, n) reads the bytes of each n-th file only, from the i-th: n processes which
    do that for every i have read all.

    Raises:
        OSError: the files cannot be reached, which says nothing about what is in them.
    """
    try:
        listed = _read(folder, step)
        present = files(folder)
    except OSError as error:
        if not is_damage(error):
            raise
        return [f"{FILE} cannot be read: {error.strerror or error}"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{FILE} cannot be used: {error}"]
    wrong = [f"{name} is missing" for name in listed if name not in present]
    index, count = share
    names = [name for name in listed if name in present][index::count]
    for name in [name for name in names if present[name] > listed[name]["bytes"]]:
        names.remove(name)  # nobody waits for what is gigantic
        size = listed[name]["bytes"]
        wrong.append(f"{name} has {present[name]} bytes, not the {size} that were saved")
    for name, found in zip(names, _digests(folder, names), strict=True):
        size, sha256 = listed[name]["bytes"], listed[name]["sha256"]
        if isinstance(found, OSError):
            if not is_damage(found):
                raise found
            wrong.append(f"{name} cannot be read: {found.strerror or found}")
        elif found[0] != size:
            wrong.append(f"{name} has {found[0]} bytes, not the {size} that were saved")
        elif found[1] != sha256:
            wrong.append(f"{name} has other content than was saved")
    return wrong


def is_damage(error: OSError) -> bool:
    """Whether a file that cannot be read is lost. A server that does not answer loses nothing."""
    return isinstance(error, FileNotFoundError | Unfit) or error.errno in _DAMAGE


def _read(folder: epath.Path, step: int) -> dict[str, dict[str, Any]]:
    content: dict[str, Any] = {**parse(read(folder / FILE, _MOST_BYTES), _Manifest)}
    if content.pop("sha256") != _own_digest(content):
        raise ValueError("its content is not what was saved")
    if content["version"] != _VERSION:
        raise ValueError(f"it has version {content['version']}, this release reads {_VERSION}")
    if content["step"] != step:
        raise ValueError(f"it is of step {content['step']}")
    return content["files"]


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _names(folder: epath.Path) -> list[str]:
    """Names below `folder` of all files but the manifest, sorted."""
    return [name for name in sorted(files(folder)) if name not in (FILE, _PARTIAL)]


def _digests(folder: epath.Path, names: Sequence[str]) -> list[tuple[int, str] | OSError]:
    """Size and SHA-256 of each file, or why it cannot be read."""

    def one(name: str) -> tuple[int, str] | OSError:
        attempt = 1
        while True:
            try:
                return _digest(folder / name)
            except OSError as error:
                if attempt == _READING_ATTEMPTS or isinstance(error, FileNotFoundError | Unfit):
                    return error
            attempt += 1
            time.sleep(_PAUSE_SECONDS)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(one, names))


def _digest(path: epath.Path) -> tuple[int, str]:
    total, size = hashlib.sha256(), 0
    with reading(path), open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            total.update(chunk)
            size += len(chunk)
    return size, total.hexdigest()


def _flush(path: epath.Path) -> None:
    """To the disk itself, if it is one of ours: a power cut leaves all or nothing."""
    if not in_bucket(path):
        with path.open("rb") as file:
            os.fsync(file.fileno())
