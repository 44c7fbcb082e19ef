"""The manifest of a checkpoint: digests of its files and of its arrays.

Size and SHA-256 of each file detect changes on disk, with a file's name; neither the file
system nor orbax detects a flipped bit in an array. The digest of each array is
that of memory when it was saved. The manifest is written last, as one atomic replacement, when
the arrays were read back and compared; it holds a digest of itself. Version 1 listed files only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NotRequired, TypedDict

from etils import epath

from maxpipe.checkpoint.digests import ArrayEntry
from maxpipe.checkpoint.storage import (
    call_with_retries,
    exists,
    files,
    in_bucket,
    is_damage,
    open_file,
    read,
    translate_read_errors,
)
from maxpipe.errors import StorageError
from maxpipe.io.typed_json import check_type, dump_checksummed, parse_checksummed

FILE = "manifest.json"

_VERSION = 2
_PARTIAL = f"{FILE}.partial"
_MANIFEST_FILES = (FILE, _PARTIAL)
_SCAN_EVERY = 8
"""Writers that end, before new files are looked for."""
_MAX_BYTES = 1 << 26
# Reading dominates, on network file systems most of all.
_NUM_THREADS = 16
# Required in every checkpoint, whatever the list says.
_REQUIRED_FILES = ("facts/metadata", "state/_METADATA", "state/manifest.ocdbt")


class ManifestFile(TypedDict):
    """One file, as it is listed."""

    bytes: int
    sha256: str


class _ManifestContent(TypedDict):
    version: Literal[1, 2]
    step: int
    files: dict[str, ManifestFile]
    arrays: NotRequired[dict[str, ArrayEntry]]


class BackgroundDigester:
    """Digests of the files of a folder on a local disk, taken while others are still written.

    Each file must be written by one call, inside `writing`; several threads may be there at once.
    Such a file is on the disk, and no longer in the page cache: who reads it, reads the disk.
    """

    def __init__(self, folder: epath.Path):
        self._folder, self._lock = folder, threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._writers: set[object] = set()
        self._ended = 0
        self._seen: list[tuple[list[str], set[object]]] = []
        """Names, and the writers that have to end before these files are whole."""
        self._found: dict[str, Future[ManifestFile]] = {}

    def __enter__(self) -> BackgroundDigester:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Files are written inside."""
        writer = object()
        with self._lock:
            self._writers.add(writer)
        try:
            yield
        finally:
            with self._lock:
                self._end(writer)

    def _end(self, writer: object) -> None:
        self._writers.remove(writer)
        self._ended += 1
        for _, writers in self._seen:
            writers.discard(writer)
        while self._seen and not self._seen[0][1]:
            for name in self._seen.pop(0)[0]:
                self._found[name] = self._pool.submit(_flush_and_digest, self._folder / name)
        if self._ended % _SCAN_EVERY == 0:
            known = {name for names, _ in self._seen for name in names} | self._found.keys()
            # Names with a dot are of files that get another name when they are whole.
            new = [name for name in _complete_files(self._folder) if name not in known]
            self._seen.append((new, set(self._writers)))

    def results(self) -> dict[str, ManifestFile]:
        """Size and digest by name; some files are not among them.

        Raises:
            OSError: a file cannot be read, or not be brought to the disk.
        """
        found = {name: one.result() for name, one in self._found.items()}
        if found:
            _flush_folder(self._folder)
        return found


def _complete_files(folder: epath.Path) -> list[str]:
    # Names with a dot are of files that get another one when they are whole.
    return [name for name in os.listdir(folder) if "." not in name] if folder.is_dir() else []


def _flush_and_digest(path: epath.Path) -> ManifestFile:
    _flush(path)
    found = call_with_retries(lambda: _digest(path, False))
    _drop(path)
    return found


def digest_files(
    folder: epath.Path, ahead: Mapping[str, ManifestFile] | None = None
) -> dict[str, ManifestFile]:
    """Size and digest of each file of `folder`, all of which are on the disk then.

    Those of `ahead` are, and are not read.

    Raises:
        OSError: a file cannot be read.
    """
    names, known = _names(folder), ahead or {}
    found = {name: known[name] for name in names if name in known}
    left = [name for name in names if name not in found]
    for name, file in zip(left, _digests(folder, left, flush=True), strict=True):
        if isinstance(file, OSError):
            raise file
        found[name] = file
    return found


def find_changed_files(folder: epath.Path, files: Mapping[str, ManifestFile]) -> list[str]:
    """What is wrong with the files that were listed, which are read once more.

    A bit that flipped while they were listed would make a good checkpoint look damaged for ever.

    Raises:
        OSError: a file cannot be read.
    """
    return _changed(folder, list(files), files)


def write(
    folder: epath.Path,
    step: int,
    files: Mapping[str, ManifestFile],
    arrays: Mapping[str, ArrayEntry],
) -> list[str]:
    """Write the manifest of files that have not changed; returns what is wrong with it.

    Raises:
        OSError: it cannot be written.
    """
    text = dump_checksummed(
        {"version": _VERSION, "step": step, "files": dict(files), "arrays": dict(arrays)}
    )
    partial = folder / _PARTIAL
    partial.write_text(text)
    _flush(partial)
    if partial.read_text() != text:
        return [f"{FILE} has other content than was written"]
    partial.replace(folder / FILE)
    return []


def has_manifest(folder: epath.Path) -> bool:
    """Whether `folder` has a manifest."""
    return exists(folder / FILE)


def read_arrays(folder: epath.Path, step: int) -> dict[str, ArrayEntry] | None:
    """The arrays that are listed; None of a manifest of version 1.

    Raises:
        ValueError: the manifest cannot be used.
        OSError: it cannot be read.
        StorageError: it was written by a later release.
    """
    return _read(folder, step).get("arrays")


def verify_files(
    folder: epath.Path,
    step: int,
    share: tuple[int, int] = (0, 1),
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    """What is wrong with the files of `folder`, which has a manifest: file and reason each.

    `share` (i, n) reads the bytes of each n-th file only, from the i-th: n processes which
    do that for every i have read all. Others may read the files meanwhile.

    Raises:
        InterruptedError: `stopped` is true.
        OSError: the files cannot be reached, which says nothing about what is in them.
        StorageError: the manifest was written by a later release.
    """
    try:
        expected = _read(folder, step)["files"]
        present = {
            name: size for name, size in files(folder).items() if name not in _MANIFEST_FILES
        }
    except OSError as error:
        if not is_damage(error):
            raise
        return [f"{FILE} cannot be read: {error.strerror or error}"]
    except ValueError as error:
        return [f"{FILE} cannot be used: {error}"]
    wrong = [f"{name} is missing" for name in expected if name not in present]
    for name in sorted(present.keys() - expected.keys()):
        # Unknown files do no harm, but orbax might read one that is among its own.
        if "/" in name and not os.path.basename(name).startswith("."):
            wrong.append(f"{name} is not in {FILE}")
    index, count = share
    names = [name for name in expected if name in present][index::count]
    for name in [name for name in names if present[name] > expected[name]["bytes"]]:
        names.remove(name)  # a file that has grown huge is not read
        size = expected[name]["bytes"]
        wrong.append(f"{name} has {present[name]} bytes, not the {size} that were saved")
    for name in names:  # all of them first: what others read meanwhile is read once
        with contextlib.suppress(OSError):  # of one that cannot be read, either
            _drop(folder / name)
    return wrong + _changed(folder, names, expected, stopped)


def _read(folder: epath.Path, step: int) -> _ManifestContent:
    text = call_with_retries(lambda: read(folder / FILE, _MAX_BYTES))
    found = parse_checksummed(text, dict[str, Any])
    if isinstance(version := found.get("version"), int) and version > _VERSION:
        raise StorageError(
            f"{folder}: cannot be read\n"
            f"  its {FILE} has version {version}, and this release reads 1 to {_VERSION}.\n"
            "  Use the release of maxpipe that has saved it, or a later one."
        )
    content = check_type(found, _ManifestContent)
    if content["step"] != step:
        raise ValueError(f"it is of step {content['step']}")
    if lacking := [name for name in _REQUIRED_FILES if name not in content["files"]]:
        raise ValueError(f"it does not list {lacking[0]}")
    if content["version"] > 1 and not content.get("arrays"):
        raise ValueError("it lists no arrays")
    return content


def _names(folder: epath.Path) -> list[str]:
    """Names below `folder` of all files but the manifest, sorted."""
    return [name for name in sorted(files(folder)) if name not in _MANIFEST_FILES]


def _changed(
    folder: epath.Path,
    names: list[str],
    expected: Mapping[str, ManifestFile],
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    wrong = []
    for name, found in zip(names, _digests(folder, names, stopped), strict=True):
        size = expected[name]["bytes"]
        if isinstance(found, OSError):
            if not is_damage(found):
                raise found
            wrong.append(f"{name} cannot be read: {found.strerror or found}")
        elif found["bytes"] != size:
            wrong.append(f"{name} has {found['bytes']} bytes, not the {size} that were saved")
        elif found != expected[name]:
            wrong.append(f"{name} has other content than was saved")
    return wrong


def _digests(
    folder: epath.Path,
    names: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
    *,
    flush: bool = False,
) -> list[ManifestFile | OSError]:
    """Size and SHA-256 of each file, or what went wrong.

    With `flush` the file is brought to the disk before, and read from there.
    """

    def one(name: str) -> ManifestFile | OSError:
        if stopped():
            return InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        try:
            if flush:
                _flush(folder / name)
            return call_with_retries(lambda: _digest(folder / name, flush))
        except OSError as error:
            return error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(one, names))


def _digest(path: epath.Path, drop: bool) -> ManifestFile:
    """Size and SHA-256; with `drop`, of the content on disk, not of the page cache."""
    with translate_read_errors(path):
        if drop:
            _drop(path)
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _drop(path: epath.Path) -> None:
    """Out of the page cache, if it can be in one."""
    if not in_bucket(path) and hasattr(os, "posix_fadvise"):
        with open_file(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flush(path: epath.Path) -> None:
    """fsync, for a file on a local disk: a power cut leaves all or nothing.

    Not retried: after a failure, the kernel may drop the pages that it could not write.
    """
    if not in_bucket(path):
        with open_file(path) as file:
            os.fsync(file.fileno())


def _flush_folder(path: epath.Path) -> None:
    """The same for the names of the files in it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
