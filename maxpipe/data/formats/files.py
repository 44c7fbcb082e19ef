"""The files of a source: what a path names, and what identifies them cheaply."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maxpipe.boundary.files import opened
from maxpipe.config.inputs import broken_link
from maxpipe.errors import ConfigError

_EDGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source. `name` does not depend on where the data folder is."""

    name: str
    path: str
    size_bytes: int


def find_files(path: str, suffixes: tuple[str, ...]) -> list[File]:
    """The files of a file, folder or glob pattern. `suffixes` narrows a folder, not a pattern."""
    if not path:
        raise ConfigError.one(
            "data.path", '""', "must name a file, a folder or a glob pattern.", "Set data.path."
        )
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return described([expanded], os.path.dirname(expanded))
    if os.path.isdir(expanded):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(expanded)
            for name in names
            if not name.startswith(".") and (not suffixes or any(s in name for s in suffixes))
        ]
        what = f"a folder with {' or '.join(suffixes)} files" if suffixes else "a folder with files"
    else:
        found = [name for name in glob.glob(expanded, recursive=True) if os.path.isfile(name)]
        what = "a file, a folder or a glob pattern that matches files"
    if not found:
        other = broken_link(expanded) or (
            "" if os.path.isdir(expanded) or not os.path.exists(expanded) else "no regular file"
        )
        but = f"it is {other}" if other else f"from {os.getcwd()} it gives 0 files"
        raise ConfigError.one(
            "data.path",
            path,
            f"must be {what}; {but}.",
            "Set data.path to a path that exists, or data.source=corpus to run without one.",
        )
    if os.path.isdir(expanded):
        return described(found, expanded)
    return described(found, os.path.commonpath([os.path.dirname(name) for name in found]))


def described(paths: Iterable[str], root: str) -> list[File]:
    """The files at these paths, named from `root` on and in the order of their names."""
    files = []
    for path in paths:
        try:
            size_bytes = os.path.getsize(path)
        except OSError as error:
            raise unreadable(path, error) from error
        files.append(File(os.path.relpath(path, root or "."), path, size_bytes))
    return sorted(files, key=lambda file: file.name)


def read(file: File, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes `start` to `stop` of a file, by default all.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(opened(file.path), "rb") as stream:
            stream.seek(start)
            return stream.read(-1 if stop is None else stop - start)
    except OSError as error:
        raise unreadable(file.path, error) from error


def unreadable(path: str, error: OSError) -> ConfigError:
    """The error for a file that cannot be read."""
    return ConfigError.one(
        "data.path",
        path,
        f"must be readable: {error.strerror or error}.",
        "Restore the file or its permissions, or set data.path to another one.",
    )


def edges(file: File) -> str:
    """Digest of a file's first and last bytes, which tells files of one size apart."""
    with open(opened(file.path), "rb") as stream:
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(len(head), os.path.getsize(file.path) - _EDGE_BYTES))
        return hashlib.sha256(head + stream.read()).hexdigest()


def identities(files: Sequence[File]) -> list[tuple[str, int, str]]:
    """What goes into a fingerprint of each file."""
    return [(file.name, file.size_bytes, edges(file)) for file in files]


def digest(parts: Iterable[object]) -> str:
    """SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
