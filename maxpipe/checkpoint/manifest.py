"""The manifest of a checkpoint: digests of its files and of its arrays.

The size and SHA-256 of every file detect changes on disk and identify the changed file. Neither the
file system nor orbax detects a flipped bit in an array. Array digests are computed in memory at the
save. The manifest is written last, by atomic replacement, after the arrays were read back and
compared. The manifest contains its own checksum. Version 1 listed only files.
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
"""Number of finished writers between two scans for new files."""
_MAX_BYTES = 1 << 26
# Digesting spends most of its time reading, in particular on network file systems.
_NUM_THREADS = 16
# Files that must be listed in every manifest.
_REQUIRED_FILES = ("facts/metadata", "state/_METADATA", "state/manifest.ocdbt")


class ManifestFile(TypedDict):
    """Manifest entry of one file."""

    bytes: int
    sha256: str


class _ManifestContent(TypedDict):
    version: Literal[1, 2]
    step: int
    files: dict[str, ManifestFile]
    arrays: NotRequired[dict[str, ArrayEntry]]


class BackgroundDigester:
    """Digests the files of a local folder in the background while other files are being written.

    Each file must be written by one call inside `writing`, which several threads may use at once.
    A digested file is flushed to disk and dropped from the page cache, so later reads are from
    disk.
    """

    def __init__(self, folder: epath.Path):
        self._folder, self._lock = folder, threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._writers: set[object] = set()
        self._ended = 0
        self._seen: list[tuple[list[str], set[object]]] = []
        """Pairs of file names and the writers that must finish before these files are complete."""
        self._found: dict[str, Future[ManifestFile]] = {}

    def __enter__(self) -> BackgroundDigester:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which the caller writes files."""
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
            new = [name for name in _complete_files(self._folder) if name not in known]
            self._seen.append((new, set(self._writers)))

    def results(self) -> dict[str, ManifestFile]:
        """Wait for pending digests, and return (possibly not all) sizes and digests by file name.

        Raises:
            OSError: a file cannot be read or flushed to disk.
        """
        found = {name: one.result() for name, one in self._found.items()}
        if found:
            _flush_folder(self._folder)
        return found


def _complete_files(folder: epath.Path) -> list[str]:
    # The name of a file contains a dot until the file is complete and renamed.
    return [name for name in os.listdir(folder) if "." not in name] if folder.is_dir() else []


def _flush_and_digest(path: epath.Path) -> ManifestFile:
    _flush(path)
    found = call_with_retries(lambda: _digest(path, False))
    _drop(path)
    return found


def digest_files(
    folder: epath.Path, ahead: Mapping[str, ManifestFile] | None = None
) -> dict[str, ManifestFile]:
    """Flush all files of a folder to disk, and return their sizes and digests.

    Files in `ahead` are already flushed, so they are not read again.

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
    """Read the listed files again and return their differences from the digests.

    Without the second read, a bit that flips while a file is digested would mark an intact
    checkpoint as damaged permanently.

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
    """Write a manifest, read it back, and return its faults.

    Raises:
        OSError: the manifest cannot be written.
    """
    text = dump_checksummed(
        {"version": _VERSION, "step": step, "files": dict(files), "arrays": dict(arrays)}
    )
    partial = folder / _PARTIAL
    partial.write_text(text)
    _flush(partial)
    if partial.read_text() != text:
        return [f"{FILE} differs from the written content"]
    partial.replace(folder / FILE)
    return []


def has_manifest(folder: epath.Path) -> bool:
    """Return whether `folder` contains a manifest."""
    return exists(folder / FILE)


def read_arrays(folder: epath.Path, step: int) -> dict[str, ArrayEntry] | None:
    """Return the array entries of a manifest, or None for version 1.

    Raises:
        ValueError: the manifest is not valid.
        OSError: the manifest cannot be read.
        StorageError: a later release wrote the manifest.
    """
    return _read(folder, step).get("arrays")


def verify_files(
    folder: epath.Path,
    step: int,
    share: tuple[int, int] = (0, 1),
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Compare the files of `folder` with its manifest, and return each fault as file and reason.

    `share` (i, n) restricts the check to every n-th file, starting at file i, so that n processes
    can divide the work. Other processes may read the files at the same time.

    Raises:
        InterruptedError: `stopped` returned true.
        OSError: the storage is not reachable, so the state of the files is unknown.
        StorageError: a later release wrote the manifest.
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
        # Unknown files are harmless, unless they are in a folder that orbax reads.
        if "/" in name and not os.path.basename(name).startswith("."):
            wrong.append(f"{name} is not in {FILE}")
    index, count = share
    names = [name for name in expected if name in present][index::count]
    for name in [name for name in names if present[name] > expected[name]["bytes"]]:
        names.remove(name)  # do not read a file that may be very large
        size = expected[name]["bytes"]
        wrong.append(f"{name} has {present[name]} bytes instead of {size}")
    # Drop all files from the page cache first, so that processes that read the same files share
    # one read from disk.
    for name in names:
        with contextlib.suppress(OSError):  # an unreadable file is reported below
            _drop(folder / name)
    return wrong + _changed(folder, names, expected, stopped)


def _read(folder: epath.Path, step: int) -> _ManifestContent:
    text = call_with_retries(lambda: read(folder / FILE, _MAX_BYTES))
    found = parse_checksummed(text, dict[str, Any])
    if isinstance(version := found.get("version"), int) and version > _VERSION:
        raise StorageError(
            f"{folder}: cannot be read\n"
            f"  {FILE} has version {version}; this release reads versions 1 to {_VERSION}.\n"
            "  Use the release of maxpipe that saved the checkpoint, or a later one."
        )
    content = check_type(found, _ManifestContent)
    if content["step"] != step:
        raise ValueError(f"the manifest belongs to step {content['step']}")
    if lacking := [name for name in _REQUIRED_FILES if name not in content["files"]]:
        raise ValueError(f"the manifest does not list {lacking[0]}")
    if content["version"] > 1 and not content.get("arrays"):
        raise ValueError("the manifest lists no arrays")
    return content


def _names(folder: epath.Path) -> list[str]:
    """Return the sorted relative names of all files except the manifest."""
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
            wrong.append(f"{name} has {found['bytes']} bytes instead of {size}")
        elif found != expected[name]:
            wrong.append(f"{name} differs from the saved content")
    return wrong


def _digests(
    folder: epath.Path,
    names: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
    *,
    flush: bool = False,
) -> list[ManifestFile | OSError]:
    """Return the size and SHA-256 of every file, or the error that occurred.

    With `flush`, every file is first flushed to disk and then read from disk.
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
    """Return the size and SHA-256 of a file. With `drop`, bypass the page cache."""
    with translate_read_errors(path):
        if drop:
            _drop(path)
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _drop(path: epath.Path) -> None:
    """Drop a local file from the page cache."""
    if not in_bucket(path) and hasattr(os, "posix_fadvise"):
        with open_file(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flush(path: epath.Path) -> None:
    """Flush a local file to disk, so that the file survives a power failure.

    A failure is not retried, because the kernel may drop pages that it could not write.
    """
    if not in_bucket(path):
        with open_file(path) as file:
            os.fsync(file.fileno())


def _flush_folder(path: epath.Path) -> None:
    """Flush the directory entries of a folder to disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
