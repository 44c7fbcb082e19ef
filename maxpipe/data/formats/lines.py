"""JSON Lines files, optionally compressed, with one object per line.

Lines are located by their offsets. Compressed files are read through an unpacked copy.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from maxpipe.data.formats.digests import ContentHasher, Digests, wait_until_settled
from maxpipe.data.formats.disk_cache import FillFolder, FolderCache
from maxpipe.data.formats.files import (
    SUFFIXES,
    File,
    check_size,
    decompress,
    digest,
    edges,
    identities,
    open_file,
    read,
    wrap_read_errors,
)
from maxpipe.data.formats.record_text import (
    MAX_RECORD_BYTES,
    BadRecord,
    check_length,
    from_json,
    shorten,
)
from maxpipe.data.formats.source import Heartbeat, Progress, Record, place_of
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import open_regular
from maxpipe.io.files import read as read_file
from maxpipe.io.formatting import pluralize

_PIECE_BYTES = 1 << 20
_MIN_CACHED_BYTES = 1 << 26
"""Minimum size in bytes of files whose line offsets are cached. Smaller files are scanned at each
start.
"""
_STARTS, _CONTENT, _DIGEST = "starts.npy", "lines.jsonl", "sha256"
_NEWLINE = ord("\n")
_IS_SOLID = np.ones(256, np.uint8)
_IS_SOLID[list(b" \t\n\r\v\f")] = 0


class LineOffsets:
    """Line offsets stored in a file, which is not memory-mapped because it may be truncated."""

    def __init__(self, folder: str, count: int, at: int):
        self.folder, self._count, self._at = folder, count, at
        self._path = os.path.join(folder, _STARTS)

    def __len__(self) -> int:
        return self._count

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the offset of a line and the offset of the next line."""
        try:
            with open(open_regular(self._path), "rb", buffering=0) as file:
                raw = os.pread(file.fileno(), 16, self._at + 8 * index)
            first, second = np.frombuffer(raw, "<i8").tolist()
        except (OSError, ValueError) as error:
            raise _unusable_cache_error(self.folder, str(error)) from error
        return first, second


class InMemoryLineOffsets:
    """Line offsets that are kept in memory, as an int64 array of shape [lines + 1]."""

    def __init__(self, offsets: np.ndarray):
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the offset of a line and the offset of the next line."""
        first, second = self._offsets[index : index + 2].tolist()
        return first, second


@dataclass(frozen=True, slots=True)
class Lines:
    """Non-blank lines of a file.

    `starts` contains the offset of each line in `content`, followed by the size of `content`.
    `content` is the file itself or an unpacked copy.
    """

    file: File
    content: File
    starts: LineOffsets | InMemoryLineOffsets
    has_blank_lines: bool

    def __len__(self) -> int:
        return len(self.starts) - 1

    def number(self, index: int) -> int:
        """Return the 1-based line number in the file, counting blank lines."""
        if not self.has_blank_lines:
            return index + 1
        number, offset = 1, self.starts.bounds(index)[0]
        with wrap_read_errors(self.content.path), open_file(self.content) as lines:
            while offset > 0 and (piece := lines.read(min(_PIECE_BYTES, offset))):
                number += piece.count(b"\n")
                offset -= len(piece)
        return number


def is_compressed(file: File) -> bool:
    """Return whether a file is compressed, according to its name."""
    return file.path.endswith(SUFFIXES)


def find_lines(
    file: File, cache: FolderCache, digests: Digests, most_bytes: int, moved: Heartbeat | None
) -> tuple[Lines, int]:
    """Return the lines of a file, and the size of the unpacked copy (at most `most_bytes`).

    For a compressed file, `digests` must contain its digest. For other files, the digest is added
    if the file is read completely.

    Raises:
        ConfigError: the file cannot be read, is damaged, or exceeds the limit.
        StorageError: there is not enough disk space for the copy.
    """
    if not is_compressed(file):
        if file.size_bytes < _MIN_CACHED_BYTES:
            starts, skips = _scan_lines(_read_and_hash(file, digests), file, moved)
            return Lines(file, file, InMemoryLineOffsets(starts), skips), 0
        return _load_or_index_lines(file, cache, digests, moved), 0

    def unpack(folder: str, moved: Heartbeat) -> None:
        with open(os.path.join(folder, _CONTENT), "xb") as copy:
            _save(folder, *_scan_lines(_decompress_to_copy(file, copy, most_bytes), file, moved))

    key = file.version if file.in_bucket else digests.get(file)
    assert key is not None
    folder = _make_cached(
        cache, f"unpacked-{digest([2, file.size_bytes, key])[:32]}", file, unpack, moved
    )
    path = os.path.join(folder, _CONTENT)
    content = File(file.name, path, os.path.getsize(path))
    if content.size_bytes > most_bytes:
        raise _too_large_error(file, most_bytes)
    return _load(folder, file, content), content.size_bytes


def _load_or_index_lines(
    file: File, cache: FolderCache, digests: Digests, moved: Heartbeat | None
) -> Lines:
    """Return the lines of a large file from the cache, which also stores the file's digest."""
    key = [2, file.size_bytes, edges(file), file.version, file.stat]

    def find(folder: str, moved: Heartbeat) -> None:
        if file.stat is not None:
            wait_until_settled(file)
        _save(folder, *_scan_lines(_read_and_hash(file, digests), file, moved))
        with open(os.path.join(folder, _DIGEST), "x") as out:
            out.write(digests.get(file) or "")

    folder = _make_cached(cache, f"lines-{digest(key)[:32]}", file, find, moved)
    if not file.in_bucket and digests.get(file) is None:
        try:
            sha256 = read_file(os.path.join(folder, _DIGEST), 64).decode("ascii")
        except (OSError, ValueError) as error:
            raise _unusable_cache_error(folder, str(error)) from error
        digests.add(file, sha256, is_settled=True)
    return _load(folder, file, file)


def _make_cached(
    cache: FolderCache, name: str, file: File, make: FillFolder, moved: Heartbeat | None
) -> str:
    try:
        return cache.get_or_make(name, file, make, moved)
    except OSError as error:
        action = f"Free disk space, or unpack {file.path} and set data.path to the unpacked file."
        raise StorageError.unwritable(
            error.filename or cache.active_folder, error, action
        ) from error


def _read_and_hash(file: File, digests: Digests) -> Iterator[bytes]:
    """Yield the content, and compute its digest in parallel unless the digest is known."""
    if file.in_bucket or digests.get(file) is not None:
        yield from _read_pieces(file)
        return
    assert file.stat is not None
    is_settled, hasher = file.stat.is_settled, ContentHasher(file)
    yield from hasher.hash_pieces(_read_pieces(file))
    digests.add(file, hasher.sha256, is_settled=is_settled)


def _read_pieces(file: File) -> Iterator[bytes]:
    size_bytes = 0
    with wrap_read_errors(file.path), open_file(file) as content:
        while piece := content.read(_PIECE_BYTES):
            size_bytes += len(piece)
            yield piece
    check_size(file, size_bytes)


def _decompress_to_copy(file: File, copy: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    left = most_bytes
    for piece in _merge_small_pieces(decompress(file)):
        left -= len(piece)
        if left < 0:
            raise _too_large_error(file, most_bytes)
        copy.write(piece)
        yield piece


def _merge_small_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            yield b"".join(kept)
            kept, size = [], 0
    if kept:
        yield b"".join(kept)


def _too_large_error(file: File, most_bytes: int) -> ConfigError:
    rule = f"must be at most {most_bytes} bytes when unpacked, which is the "
    rule += "unused part of data.max_decompressed_bytes."
    action = "Set a larger data.max_decompressed_bytes if <run.dir>/.index has enough space, or "
    action += "remove the file from data.path."
    return ConfigError.one(Code.DATA_RECORD, "data.path", file.path, rule, action)


def _scan_lines(
    pieces: Iterable[bytes], file: File, moved: Heartbeat | None
) -> tuple[np.ndarray, bool]:
    """Return the line offsets, and whether the file has blank lines (`starts` and
    `has_blank_lines` of `Lines`); raise ConfigError if a line is too long.
    """
    progress = Progress(f"finding lines of {file.name} (bytes)", file.size_bytes, moved)
    starts: list[np.ndarray] = []
    offset = begin = newlines = 0
    is_solid = skips = False
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        solid = _IS_SOLID[data]
        if not offset and piece.startswith(codecs.BOM_UTF8):
            begin = len(codecs.BOM_UTF8)
            solid[:begin] = 0
        # Lines that end in this chunk, and the line that continues after the chunk.
        ends = np.flatnonzero(data == _NEWLINE)
        begins = np.concatenate([[begin], offset + ends + 1])
        inside = np.concatenate([[0], ends + 1])
        any_solid = np.zeros(len(inside), bool)
        full = inside < len(data)
        any_solid[full] = np.maximum.reduceat(solid, inside[full]) > 0
        any_solid[0] |= is_solid
        kept = begins[:-1][any_solid[:-1]]
        skips |= len(kept) < len(ends)
        starts.append(kept)
        newlines += len(ends)
        begin, is_solid = int(begins[-1]), bool(any_solid[-1])
        offset += len(data)
        if offset - begin > MAX_RECORD_BYTES and (is_solid or is_compressed(file)):
            raise _long_line_error(file, newlines + 1)
        progress.update(min(offset, file.size_bytes))
    last = [begin] if is_solid else []
    return np.concatenate([*starts, last, [offset]]).astype(np.int64), bool(skips)


def _long_line_error(file: File, number: int) -> ConfigError:
    unpacked_file = " when the file is unpacked" if is_compressed(file) else ""
    rule = f"the line is longer than {MAX_RECORD_BYTES} bytes{unpacked_file}; a record must be "
    rule += f"at most {MAX_RECORD_BYTES} bytes long to fit in memory."
    action = "Split the document, or remove the file from data.path."
    return ConfigError.one(Code.DATA_RECORD, f"{file.path}:{number}", None, rule, action)


def _save(folder: str, starts: np.ndarray, skips: bool) -> None:
    with open(os.path.join(folder, _STARTS), "xb") as stream:
        np.save(stream, np.append(starts, int(skips)))


def _load(folder: str, file: File, content: File) -> Lines:
    try:
        with open(open_regular(os.path.join(folder, _STARTS)), "rb") as stored:
            if np.lib.format.read_magic(stored) != (1, 0):
                raise ValueError("the offsets have a different format version")
            shape, _, dtype = np.lib.format.read_array_header_1_0(stored)
            at = stored.tell()
            if dtype != np.dtype("<i8") or len(shape) != 1 or shape[0] < 2:
                raise ValueError("the offsets belong to a different file")
            stored.seek(at + 8 * (shape[0] - 2))
            size_bytes, skips = np.frombuffer(stored.read(16), "<i8").tolist()
        if size_bytes != content.size_bytes:
            raise ValueError("the offsets belong to a different file")
    except (OSError, ValueError, IndexError, EOFError) as error:
        raise _unusable_cache_error(folder, f"line offsets of {file.path}: {error}") from error
    return Lines(file, content, LineOffsets(folder, shape[0] - 1, at), bool(skips))


def _unusable_cache_error(folder: str, why: str) -> StorageError:
    return StorageError(
        Code.DATA_DAMAGED,
        f"{folder}: cannot be used\n  {why}.\n  Delete this folder; the next start recreates it.",
    )


class JsonLines:
    """Source with one document per line. Line offsets are kept, and content is read on demand."""

    name = "jsonl"

    def __init__(
        self,
        files: Sequence[File],
        cache: FolderCache,
        digests: Digests,
        most_bytes: int,
        moved: Heartbeat | None = None,
    ):
        self.files = files
        self._cache = cache  # keep a reference, because the cache may own a temporary folder
        self._lines: list[Lines] = []
        digests.load(files)
        packed = [file for file in files if is_compressed(file)]
        for file in packed:
            if not file.in_bucket and digests.get(file) is None:
                # Detect errors in the first bytes before reading the full file to compute its
                # digest.
                with contextlib.closing(decompress(file)) as content:
                    next(content, None)
        if packed:
            digests.compute(files, moved)
        for file in files:
            if file.path.endswith((".zip", ".tar", ".7z", ".rar", ".lz4", ".br", ".Z")):
                rule = f"must be JSON Lines, uncompressed or compressed as {' or '.join(SUFFIXES)}."
                action = "Unpack the file and set data.path to the result."
                raise ConfigError.one(Code.DATA_FORMAT, "data.path", file.path, rule, action)
            lines, unpacked_bytes = find_lines(file, cache, digests, most_bytes, moved)
            most_bytes -= unpacked_bytes
            self._lines.append(lines)
        # Exclusive end index of each file's documents.
        self._ends = np.cumsum([len(lines) for lines in self._lines])
        if not len(self):
            rule = "must contain JSON objects, one per line: found "
            rule += f"{pluralize(len(files), 'file')} without lines."
            action = "Set data.path to a file that contains lines, or data.source=corpus."
            raise ConfigError.one(Code.DATA_EMPTY, "data.path", files[0].path, rule, action)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[Lines, int]:
        which, number = place_of(self._ends, index)
        return self._lines[which], number

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        lines, number = self._place(index)
        start, stop = lines.starts.bounds(number)
        check_length(stop - start)
        line = read(lines.content, start, stop).partition(b"\n")[0]  # blank lines may follow
        try:
            return from_json(line)
        except ValueError as error:
            action = 'Write each document as an object such as {"text": "..."}, or remove the line.'
            raise BadRecord(shorten(line), f"must be a JSON object: {error}.", action) from error

    def file_of(self, index: int) -> File:
        """Return the file that contains a record."""
        return self._place(index)[0].file

    def where(self, index: int) -> str:
        lines, number = self._place(index)
        return f"{lines.file.path}:{lines.number(number)}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, *identities(self.files)])
