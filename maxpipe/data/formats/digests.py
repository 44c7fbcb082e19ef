"""Content digests of data files.

Any change in a file's content changes its digest. Each file is read once to compute the digest.
Every write changes the inode, the size or a timestamp of the file. Later runs compare these values,
and read the file again only if a value differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypedDict

from maxpipe.data.formats.disk_cache import lock_file
from maxpipe.data.formats.files import (
    SETTLED_SECONDS,
    File,
    Stat,
    check_size,
    common_folder,
    digest,
    file_changed_error,
    version_of,
    wrap_read_errors,
)
from maxpipe.data.formats.source import Heartbeat, Progress
from maxpipe.io import files
from maxpipe.io.files import open_regular
from maxpipe.io.typed_json import dump_checksummed
from maxpipe.io.typed_json import parse_checksummed as verified

_LOG = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 23
"""Size in bytes of the blocks that are hashed in parallel."""
_MAX_THREADS = 8
_MAX_STORED_BYTES = 1 << 28
_MAX_NAMED_FILES = 64
_STAT_THREADS = 32
_LARGE_BYTES = 1 << 26
"""Minimum size in bytes of a file that is treated as large. Large files are read only when settled
(see `Stat.is_settled`), so that later runs do not read them again.
"""


class _Entry(NamedTuple):
    """Stat result of a file, and the digest of the file's content at that time.

    `is_settled` is true if the file was settled when its content was read; see `Stat.is_settled`.
    """

    stat: Stat
    sha256: str
    is_settled: bool


class _Stored(TypedDict):
    files: dict[str, tuple[int, int, int, int, str]]


class Digests:
    """Digests of a source's files, which are stored in `folder` if `keep` is set."""

    def __init__(self, folder: str | None, *, keep: bool):
        self._folder = None if folder is None else os.path.expanduser(folder)
        self._keep = keep and folder is not None
        self._known: dict[str, _Entry] = {}
        self._is_stored = True

    def get(self, file: File) -> str | None:
        """Return the digest of a file; None if the file has not been read since its last change."""
        entry = self._known.get(file.path)
        return entry.sha256 if entry is not None and entry.stat == file.stat else None

    def stat(self, file: File) -> Stat:
        """Return the stat result that a local file had when its digest was computed."""
        return self._known[file.path].stat

    def add(self, file: File, sha256: str, *, is_settled: bool) -> None:
        """Add a digest. `is_settled` is true if the file was settled before the pass that computed
        the digest.
        """
        assert file.stat is not None
        self._known[file.path] = _Entry(file.stat, sha256, is_settled)
        self._is_stored = False

    def load(self, sources: Sequence[File]) -> None:
        """Load stored digests of these files from the folder."""
        local = _local(sources)
        if self._folder is None or not local:
            return
        stored = _read(self._path(local))
        for file, name in zip(local, _names(local), strict=True):
            if self.get(file) is None and (entry := stored.get(name)) is not None:
                self._known[file.path] = entry

    def compute(self, sources: Sequence[File], moved: Heartbeat | None = None) -> list[str]:
        """Return the digest of each file. Only new and changed files are read.

        Raises:
            ConfigError: a file cannot be read, or changes while it is being read.
        """
        local = _local(sources)
        if any(self.get(file) is None for file in local):
            self.load(local)
        if not self._is_stored or any(self.get(file) is None for file in local):
            with self._locked(local, moved) as moved:
                self._read_unknown(local, moved)
                self._save(local)
        return [
            file.version if file.in_bucket else self._known[file.path].sha256 for file in sources
        ]

    def content(self, sources: Sequence[File], moved: Heartbeat | None = None) -> dict[str, str]:
        """Return digests keyed by file name, or by group of files if the source has many files."""
        return _group_digests(sources, self.compute(sources, moved))

    def _read_unknown(self, local: Sequence[File], moved: Heartbeat | None) -> None:
        if any(self.get(file) is None for file in local):
            self.load(local)  # another process may have read the files in the meantime
        unknown = [file for file in local if self.get(file) is None]
        for file in unknown:
            if file.path in self._known:
                _LOG.info("%s may have changed since it was last read: reading it again", file.path)
            if file.size_bytes >= _LARGE_BYTES and self._keep:
                wait_until_settled(file)
        for file, entry in zip(unknown, hash_files(unknown, moved), strict=True):
            before = self._known.get(file.path)
            if before is not None and before.sha256 != entry.sha256:
                _LOG.warning("%s has changed since it was last read", file.path)
            self._known[file.path] = entry

    def check(self, sources: Sequence[File], moved: Heartbeat | None = None) -> None:
        """Raise ConfigError if a file changed after its digest was computed."""
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            objects = [file for file in sources if file.in_bucket]
            versions = pool.map(lambda file: version_of(file.path), objects)
            for file, version in zip(objects, versions, strict=True):
                if version != file.version:
                    raise file_changed_error(file)
        for file in _local(sources):
            before = self._known[file.path]
            if stat_of(file) == before.stat:
                continue
            now = stat_of(file)
            check_size(file, now.size_bytes)
            [entry] = hash_files([dataclasses.replace(file, stat=now)], moved)
            if entry.sha256 != before.sha256:
                raise file_changed_error(file)
            self._known[file.path] = entry

    @contextlib.contextmanager
    def _locked(self, local: Sequence[File], moved: Heartbeat | None) -> Iterator[Heartbeat | None]:
        with contextlib.ExitStack() as stack:
            if local and self._keep:
                path = self._path(local)
                try:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    task = f"reading {local[0].path}"
                    moved = stack.enter_context(
                        lock_file(f"{path}.lock", task, moved, removes=True)
                    )
                except OSError as error:
                    _LOG.info("%s cannot be locked (%s)", path, error)
            yield moved

    def _path(self, local: Sequence[File]) -> str:
        assert self._folder is not None
        place = os.path.realpath(common_folder(local))
        return os.path.join(self._folder, f"digests-{digest([place])[:32]}.json")

    def _save(self, local: Sequence[File]) -> None:
        self._is_stored = True
        if not self._keep or not local:
            return
        path = self._path(local)
        stored = _read(path)
        before = dict(stored)
        for file, name in zip(local, _names(local), strict=True):
            entry = self._known[file.path]
            if entry.is_settled:
                stored[name] = entry
        if stored == before:
            return
        place = os.path.realpath(common_folder(local))
        # Remove entries of deleted files, but keep entries of files from another source.
        for name in set(before) - set(_names(local)):
            if not os.path.exists(os.path.join(place, name)):
                del stored[name]
        content = {name: (*entry.stat, entry.sha256) for name, entry in stored.items()}
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.write(path, dump_checksummed({"files": content}, indent=None))
        except OSError as error:
            _LOG.warning(
                "%s cannot be written (%s): all files will be read on the next start", path, error
            )


def _local(sources: Sequence[File]) -> list[File]:
    return [file for file in sources if not file.in_bucket]


def _names(local: Sequence[File]) -> list[str]:
    place = os.path.realpath(common_folder(local))
    return [os.path.relpath(os.path.realpath(file.path), place) for file in local]


def _read(path: str) -> dict[str, _Entry]:
    try:
        content = verified(files.read(path, _MAX_STORED_BYTES), _Stored)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _LOG.warning("%s cannot be used (%s): reading all files again", path, error)
        return {}
    return {
        name: _Entry(Stat(*entry[:4]), entry[4], True) for name, entry in content["files"].items()
    }


def stat_of(file: File) -> Stat:
    """Return the stat result of a local file; raise ConfigError if the file cannot be accessed."""
    with wrap_read_errors(file.path):
        return Stat.from_stat_result(os.stat(file.path))


def wait_until_settled(file: File) -> None:
    """Wait until any further write to a local file is guaranteed to change its stat result."""
    assert file.stat is not None
    if not file.stat.is_settled:
        time.sleep(min(SETTLED_SECONDS, SETTLED_SECONDS - file.stat.age_seconds))


def _group_digests(sources: Sequence[File], digests: Sequence[str]) -> dict[str, str]:
    size = -(-len(sources) // _MAX_NAMED_FILES)
    by_name: dict[str, str] = {}
    for first in range(0, len(sources), size or 1):
        group, parts = sources[first : first + size], digests[first : first + size]
        name = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
        while name in by_name:  # files in different folders may have the same name
            name += "'"
        by_name[name] = (
            parts[0] if len(parts) == 1 else digest([[file.name for file in group], *parts])
        )
    return by_name


# Hashing.


def hash_files(sources: Sequence[File], moved: Heartbeat | None) -> Iterator[_Entry]:
    """Yield the stat result and digest of each local file; several threads compute the digests."""
    total = sum(file.size_bytes for file in sources)
    progress = Progress("reading files to compute their digests (bytes)", total, moved)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    waiting: deque[tuple[File, Stat, bool, int, Future[bytes]]] = deque()
    parts, done = b"", 0

    def take() -> _Entry | None:
        nonlocal parts, done
        file, stat, is_settled, stop, future = waiting.popleft()
        parts += future.result()
        done += min(BLOCK_BYTES, file.size_bytes)
        progress.update(min(done, total))
        if stop < file.size_bytes:
            return None
        if stat_of(file) != stat:
            raise file_changed_error(file)
        whole, parts = hashlib.sha256(parts).hexdigest(), b""
        return _Entry(stat, whole, is_settled)

    with ThreadPoolExecutor(threads, "digests") as pool:
        try:
            for file in sources:
                stat = file.stat
                assert stat is not None
                is_settled = stat.is_settled
                for start in range(0, max(1, file.size_bytes), BLOCK_BYTES):
                    future = pool.submit(_block, file, start, stat)
                    waiting.append((file, stat, is_settled, start + BLOCK_BYTES, future))
                    if len(waiting) > 2 * threads and (entry := take()) is not None:
                        yield entry
            while waiting:
                if (entry := take()) is not None:
                    yield entry
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _block(file: File, start: int, stat: Stat) -> bytes:
    stop = min(start + BLOCK_BYTES, file.size_bytes)
    with wrap_read_errors(file.path), open(open_regular(file.path), "rb", buffering=0) as content:
        if Stat.from_stat_result(os.fstat(content.fileno())) != stat:
            raise file_changed_error(file)
        total, at = hashlib.sha256(), start
        while at < stop and (piece := os.pread(content.fileno(), stop - at, at)):
            total.update(piece)
            at += len(piece)
    if at < stop:
        raise file_changed_error(file)
    return total.digest()


class ContentHasher:
    """Hasher that runs in a thread while a reader consumes the chunks of a file."""

    _MAX_PENDING = 8

    def __init__(self, file: File):
        self._file = file
        self._block, self._size, self._parts = hashlib.sha256(), 0, b""
        self.sha256 = ""
        """Digest of the file; set after the last chunk."""

    def hash_pieces(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks while they are hashed; raise ConfigError if the file changes."""
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, "digest") as pool:
            for piece in pieces:
                waiting.append(pool.submit(self._add, piece))
                if len(waiting) > self._MAX_PENDING:
                    waiting.popleft().result()
                yield piece
            for future in waiting:
                future.result()
        if stat_of(self._file) != self._file.stat:
            raise file_changed_error(self._file)
        if self._size or not self._parts:
            self._parts += self._block.digest()
        self.sha256 = hashlib.sha256(self._parts).hexdigest()

    def _add(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            part = view[: BLOCK_BYTES - self._size]
            self._block.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size == BLOCK_BYTES:
                self._parts += self._block.digest()
                self._block, self._size = hashlib.sha256(), 0
