"""Readers for byte ranges of files on disk or in a bucket, with checksum verification.

Files are read without mmap: if a file is truncated during a read, an error is raised. With mmap,
the process would be killed by a signal.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxpipe.data.formats.files import Stat
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import open_regular, url_scheme
from maxpipe.io.stores import is_store, missing_package, store_filesystem

BLOCK_BYTES = 1 << 16
"""Number of bytes that one CRC covers."""

_PIECE_BYTES = 1 << 20
"""Size in bytes of one bucket request; a multiple of the block size."""
_CACHED_PIECES = 256
_ATTEMPTS, _PAUSE_SECONDS, _MAX_SECONDS = 3, 1.0, 20.0


class RangeReader(Protocol):
    """File of `size` bytes that supports range reads."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` - 1; raise StorageError if they cannot be read."""
        ...

    def read_with_stat(self, start: int, stop: int) -> tuple[bytes, Stat | None]:
        """Return the bytes and the file's stat result. The stat result is None for bucket objects,
        or if the file changes during the read.
        """
        ...


class DiskFile:
    """Local file, opened for each read, because a folder may have too many files to keep open."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.size = os.stat(path).st_size
        except OSError as error:
            raise unreadable_error(path, error) from error

    def read(self, start: int, stop: int) -> bytes:
        return self.read_with_stat(start, stop)[0]

    def read_with_stat(self, start: int, stop: int) -> tuple[bytes, Stat | None]:
        try:
            with open(open_regular(self.path), "rb", buffering=0) as file:
                before = Stat.from_stat_result(os.fstat(file.fileno()))
                file.seek(start)
                parts: list[bytes] = []
                while start < stop and (part := file.read(stop - start)):
                    parts.append(part)
                    start += len(part)
                after = Stat.from_stat_result(os.fstat(file.fileno()))
        except OSError as error:
            raise unreadable_error(self.path, error) from error
        if start < stop:
            raise _truncated_error(self.path, start)
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        return content, after if after == before else None


class BucketFile:
    """Object in a store."""

    def __init__(self, path: str):
        self.path = path
        self.size = int(_retry(path, lambda: store_filesystem(path).info(path))["size"])

    def read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        content = _retry(
            self.path,
            lambda: store_filesystem(self.path).cat_file(self.path, start=start, end=stop),
        )
        if len(content) != stop - start:
            raise _truncated_error(self.path, start + len(content))
        return content

    def read_with_stat(self, start: int, stop: int) -> tuple[bytes, Stat | None]:
        return self.read(start, stop), None


def _retry(path: str, call: Callable[[], Any]) -> Any:
    begin = time.monotonic()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except ImportError as error:
            rule, action = missing_package(path)
            raise StorageError(
                Code.ENV_PACKAGE, f"{path}: cannot be read\n  {rule}\n  {action}"
            ) from error
        except Exception as error:  # stores raise various types of exceptions
            missing = isinstance(error, FileNotFoundError)
            # The library of the store already retries requests that time out.
            late = time.monotonic() - begin > _MAX_SECONDS
            if missing or late or attempt == _ATTEMPTS:
                cause = error if isinstance(error, OSError) else OSError(str(error))
                raise unreadable_error(path, cause) from error
        time.sleep(_PAUSE_SECONDS)


def open_range_reader(path: str) -> RangeReader:
    """Open a local file or an object in a store.

    Raises:
        ConfigError: the URL scheme is not supported.
        StorageError: the file cannot be read.
    """
    if not (scheme := url_scheme(path)):
        return DiskFile(path)
    if not is_store(path):
        rule = f"must be a folder or a path in an object store: {scheme}:// is not a store."
        action = "Set data.path=gs://my-bucket/tokens or s3://my-bucket/tokens, or to a folder."
        raise ConfigError.one(Code.IO_PATH, "data.path", path, rule, action)
    return BucketFile(path)


def join_path(folder: str, name: str) -> str:
    """Return the path of the file `name` in a folder or bucket."""
    if url_scheme(folder):
        return f"{folder.rstrip('/')}/{name}"
    return os.path.join(os.path.expanduser(folder), name)


class _VerifiedBlocks(NamedTuple):
    """Stat result of a file, and the blocks whose CRCs were verified with this stat result."""

    stat: Stat | None
    seen: np.ndarray


class ChecksummedReader:
    """Reader that compares each block of a file with its CRC when the block is first read.

    After any write to the file, blocks are verified again. Blocks from a bucket are verified on
    every download, and recently downloaded chunks are cached.
    """

    def __init__(self, file: RangeReader, size: int, crcs: np.ndarray, kept: PieceCache | None):
        self.path, self.size = file.path, size
        self._file, self._crcs, self._piece_cache = file, crcs, kept
        self._state = _VerifiedBlocks(None, np.zeros(len(crcs), bool))
        if file.size != size:
            raise damaged_error(file.path, f"the file has {file.size} bytes instead of {size}")

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` - 1; raise StorageError if a checksum differs."""
        if start >= stop:
            return b""
        if self._piece_cache is None:
            return self._read(start, stop)
        first, last = start // _PIECE_BYTES, -(-stop // _PIECE_BYTES)
        pieces = [self._cached_piece(number, self._piece_cache) for number in range(first, last)]
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        begin = first * _PIECE_BYTES
        return content[start - begin : stop - begin]

    def _cached_piece(self, number: int, kept: PieceCache) -> bytes:
        piece = kept.get((self.path, number))
        if piece is None:
            begin = number * _PIECE_BYTES
            end = min(begin + _PIECE_BYTES, self.size)
            piece, _ = self._read_and_verify(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
            kept.put((self.path, number), piece)
        return piece

    def _read(self, start: int, stop: int) -> bytes:
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        state = self._state  # another thread may replace the state after a write
        if state.seen[first:last].all():
            content, stat = self._file.read_with_stat(start, stop)
            if stat == state.stat:
                return content
        content, stat = self._read_and_verify(first, last)
        # If two writes occur in quick succession, the second may not change the stat.
        if stat is not None and stat.is_settled:
            if stat != state.stat:
                state = self._state = _VerifiedBlocks(stat, np.zeros(len(self._crcs), bool))
            state.seen[first:last] = True
        return content[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _read_and_verify(self, first: int, last: int) -> tuple[bytes, Stat | None]:
        begin = first * BLOCK_BYTES
        content, stat = self._file.read_with_stat(begin, min(last * BLOCK_BYTES, self.size))
        if stat is not None and stat.size_bytes != self.size:
            raise damaged_error(
                self.path, f"the file has {stat.size_bytes} bytes instead of {self.size}"
            )
        view = memoryview(content)
        for number in range(first, last):
            at = number * BLOCK_BYTES - begin
            if zlib.crc32(view[at : at + BLOCK_BYTES]) != self._crcs[number]:
                end = min(begin + at + BLOCK_BYTES, self.size)
                raise damaged_error(
                    self.path, f"the checksum of bytes {begin + at} to {end} does not match"
                )
        return content, stat


class PieceCache:
    """Cache of recently read file chunks. Thread-safe."""

    def __init__(self, most: int = _CACHED_PIECES):
        self._most = most
        self._pieces: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> bytes | None:
        """Return a chunk, or None if the chunk is not cached."""
        with self._lock:
            if key in self._pieces:
                self._pieces.move_to_end(key)
            return self._pieces.get(key)

    def put(self, key: tuple[str, int], piece: bytes) -> None:
        """Cache a chunk; above the size limit, evict the least recently used chunks."""
        with self._lock:
            self._pieces[key] = piece
            while len(self._pieces) > self._most:
                self._pieces.popitem(last=False)


def unreadable_error(path: str, error: OSError) -> StorageError:
    """Return the error for a file that cannot be read."""
    return StorageError(
        Code.DATA_UNREADABLE,
        f"{path}: cannot be read\n"
        f"  {error.strerror or error}.\n"
        "  Restore the file or its permissions, or set data.path to another folder.",
    )


def damaged_error(path: str, what: str) -> StorageError:
    """Return the error for a damaged file of a prepared folder."""
    return StorageError(
        Code.DATA_DAMAGED,
        f"{path}: is damaged\n"
        f"  {what}.\n"
        "  Copy the file again from an intact source, or prepare the documents again; "
        "`maxpipe data verify` lists all damaged files.",
    )


def _truncated_error(path: str, at: int) -> StorageError:
    return StorageError(
        Code.DATA_DAMAGED,
        f"{path}: is truncated\n"
        f"  The file ends after {at} bytes, before its recorded size.\n"
        "  Copy the file again from an intact source.",
    )
