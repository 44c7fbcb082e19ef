"""Expand paths of data files, and identify, read and decompress the files.

Compressed content is read in chunks of bounded size.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import hashlib
import io
import json
import lzma
import os
import posixpath
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from maxpipe.config.config_files import broken_link, is_hub_id
from maxpipe.config.rules import did_you_mean
from maxpipe.errors import Code, ConfigError, MaxpipeError, StorageError
from maxpipe.io import stores
from maxpipe.io.files import open_regular, url_scheme

_EDGE_BYTES = 1 << 16
_OWN_FOLDER = ".index"
_MAXPIPE_FOLDER_FILES = ({"config.yml", "events.jsonl"}, {"manifest.json", "spans"}, {"unfinished"})
"""Sets of file names that identify run folders, prepared folders and incomplete prepared
folders."""
_PREFETCH_BYTES = 1 << 23
"""Read-ahead size in bytes when a bucket object is read from beginning to end."""


SETTLED_SECONDS = 2.0
"""Minimum age in seconds of a file's last write. Two writes within this time may produce the same
stat result, so a file with a more recent write is read again by the next run.
"""


class Stat(NamedTuple):
    """Stat result of a file. A write changes at least `ctime_ns`, which programs cannot set."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat_result(cls, found: os.stat_result) -> Stat:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def age_seconds(self) -> float:
        """Time in seconds since the last change; negative if the storage clock is ahead."""
        return (time.time_ns() - max(self.mtime_ns, self.ctime_ns)) / 1e9

    @property
    def is_settled(self) -> bool:
        """Whether any further write is guaranteed to change the stat result."""
        return self.age_seconds >= SETTLED_SECONDS


@dataclass(frozen=True, slots=True)
class File:
    """File of a source. `name` is independent of the location of the data folder."""

    name: str
    path: str
    size_bytes: int
    version: str = ""
    """Digest of a bucket object, as reported by the bucket."""
    stat: Stat | None = None
    """Stat of a local file at the time it was listed."""

    @property
    def in_bucket(self) -> bool:
        """Whether the file is a bucket object."""
        return url_scheme(self.path) != ""


def find_files(paths: str | Sequence[str], suffixes: tuple[str, ...]) -> list[File]:
    """Expand files, folders and glob patterns, local or in a bucket, to a list of files.

    Files are listed in the order of `paths`, and sorted by name within each path. `suffixes`
    filters the files of folders, but not the matches of patterns.

    Raises:
        ConfigError: a path matches no files, or two paths contain the same file.
    """
    matches: list[File] = []
    for path in [paths] if isinstance(paths, str) else paths:
        if not path:
            raise ConfigError.one(
                Code.DATA_MISSING,
                "data.path",
                '""',
                "must name a file, a folder or a glob pattern.",
                "Set data.path.",
            )
        matches += (
            _find_in_bucket(path, suffixes) if url_scheme(path) else _find_on_disk(path, suffixes)
        )
    seen: set[str] = set()
    for file in matches:
        place = file.path if file.in_bucket else os.path.realpath(file.path)
        if place in seen and not isinstance(paths, str):
            rule = "must be matched by only one path: otherwise, its documents would be read twice."
            action = "Remove one of the paths that match this file."
            raise ConfigError.one(Code.CFG_CONFLICT, "data.paths", file.path, rule, action)
        seen.add(place)
    return matches


def _find_on_disk(path: str, suffixes: tuple[str, ...]) -> list[File]:
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return stat_files([expanded], os.path.dirname(expanded))
    if os.path.isdir(expanded):
        paths = [
            os.path.join(folder, name)
            for folder, names in _folders(expanded)
            for name in names
            if _fits(name, suffixes)
        ]
    else:
        paths = [name for name in glob.glob(expanded, recursive=True) if os.path.isfile(name)]
    if not paths:
        is_folder = os.path.isdir(expanded)
        other = broken_link(expanded) or (
            "" if is_folder or not os.path.exists(expanded) else "not a regular file"
        )
        but = f"the path is {other}" if other else f"0 files match in {os.getcwd()}"
        raise _no_files_error(path, but, suffixes, is_folder=is_folder)
    if os.path.isdir(expanded):
        return stat_files(paths, expanded)
    return stat_files(paths, os.path.commonpath([os.path.dirname(name) for name in paths]))


def _folders(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders with their file names. Folders that maxpipe writes are
    skipped.

    Otherwise, with `data.path=.`, a run would read its own event files, and `prepare` would read
    prepared data.
    """
    for folder, below, names in os.walk(root):
        is_own = os.path.basename(folder) == _OWN_FOLDER or any(
            own <= {*names} for own in _MAXPIPE_FOLDER_FILES
        )
        if folder != root and is_own:
            below.clear()
        else:
            yield folder, names


def _find_in_bucket(path: str, suffixes: tuple[str, ...]) -> list[File]:
    check_store("data.path", path)
    with wrap_read_errors(path):
        objects = _objects(path.removesuffix("/"), suffixes)
    if not objects:
        raise _no_files_error(path, "0 objects match", suffixes, is_folder="*" not in path)
    root = posixpath.commonpath([posixpath.dirname(name) for name in objects])
    return [
        File(
            posixpath.relpath(name, root),
            f"{url_scheme(path)}://{name.lstrip('/')}",
            int(objects[name]["size"]),
            _version(objects[name]),
        )
        for name in sorted(objects)
    ]


def check_store(key: str, path: str) -> None:
    """Check that a URL names an object store and a bucket.

    Raises:
        ConfigError: the scheme of the URL is not that of a store, or the URL has no bucket.
    """
    if not stores.is_store(path):
        rule = f"must be in a file system or an object store: {url_scheme(path)}:// is not a store."
        action = "Use a path of the form gs://, s3:// or az://BUCKET/PATH, or copy the files to a "
        raise ConfigError.one(Code.DATA_FORMAT, key, path, rule, f"{action}local folder.")
    if not path.partition("://")[2].strip("/"):
        action = f"Use a path such as {url_scheme(path)}://my-bucket/data."
        raise ConfigError.one(Code.DATA_FORMAT, key, path, "must contain a bucket name.", action)


def _objects(path: str, suffixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the objects that match an object name, folder or glob pattern, keyed by bucket and
    name.
    """
    store = stores.store_filesystem(path)
    if any(letter in path for letter in "*?["):
        objects = store.glob(path, detail=True)
    else:
        try:
            about = store.info(path)
        except FileNotFoundError:
            return {}
        if about["type"] == "file":
            return {about["name"]: about}
        objects = store.find(path, detail=True)
        objects = {
            name: about
            for name, about in objects.items()
            if _fits(posixpath.basename(name), suffixes)
        }
    return {name: about for name, about in objects.items() if about["type"] == "file"}


def _version(about: Mapping[str, Any]) -> str:
    for key in ("crc32c", "md5Hash", "generation", "ETag", "etag"):
        if about.get(key):
            return f"{key}:{about[key]}"
    return ""


def version_of(path: str) -> str:
    """Return the current `version` of a bucket object."""
    with wrap_read_errors(path):
        return _version(stores.store_filesystem(path).info(path))


def _fits(name: str, suffixes: tuple[str, ...]) -> bool:
    return not name.startswith(".") and (not suffixes or any(suffix in name for suffix in suffixes))


def _no_files_error(
    path: str, but: str, suffixes: tuple[str, ...], *, is_folder: bool
) -> ConfigError:
    what = "a file, a folder or a glob pattern that matches files"
    if is_folder:
        what = f"a folder with {' or '.join(suffixes)} files" if suffixes else "a folder with files"
    return ConfigError.one(
        Code.DATA_MISSING, "data.path", path, f"must be {what}; {but}.", _action(path, suffixes)
    )


_SOURCES = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
"""Maps file name suffixes to the source that reads such files."""


def _action(path: str, suffixes: tuple[str, ...]) -> str:
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        ends = {os.path.splitext(name)[1] for _, names in _folders(expanded) for name in names}
        if fitting := sorted({_SOURCES[end] for end in ends & _SOURCES.keys()}):
            return f"Set data.source={fitting[0]}, which reads the files in {path}."
    elif is_hub_id(path):
        return (
            f"Download the data first: run `maxpipe fetch hf:datasets/{path} --out data`, and set "
            "data.path=data."
        )
    elif not os.path.lexists(expanded) and (
        guess := did_you_mean(os.path.basename(expanded), _siblings(expanded))
    ):
        return f"Did you mean data.path={os.path.join(os.path.dirname(path), guess)}?"
    return (
        "Set data.path to an existing path, or use data.source=corpus data.path='' for a trial run."
    )


def _siblings(path: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.dirname(path) or "."))
    except OSError:
        return []


def stat_files(paths: Iterable[str], root: str) -> list[File]:
    """Return the files at these paths, named relative to `root` and sorted by name."""
    files = []
    for path in paths:
        with wrap_read_errors(path):
            stat = os.stat(path)
        name = os.path.relpath(path, root or ".")
        files.append(File(name, path, stat.st_size, stat=Stat.from_stat_result(stat)))
    return sorted(files, key=lambda file: file.name)


@contextlib.contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert any error raised while reading a file.

    Raises:
        ConfigError: the file is missing, or a local file cannot be read.
        StorageError: an object store failed. Restarting the run may help.
    """
    try:
        yield
    except MaxpipeError:
        raise
    except ImportError as error:
        rule, action = stores.missing_package(path)
        raise ConfigError.one(Code.ENV_PACKAGE, "data.path", path, rule, action) from error
    except Exception as error:
        if not isinstance(error, OSError) and not url_scheme(path):
            raise
        # Bucket access raises errors of many types, from HTTP and from the library.
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        said = " ".join(said.split())
        if url_scheme(path) and not isinstance(error, FileNotFoundError):
            raise StorageError(
                Code.DATA_UNREADABLE,
                f"data.path {path}: cannot be read\n"
                f"  the store reports: {said or type(error).__name__}.\n"
                "  Check data.path, the network, and the credentials of the store.",
            ) from error
        rule = f"must be readable: {said or type(error).__name__}."
        action = "Restore the file or its permissions, or change data.path."
        raise ConfigError.one(Code.DATA_UNREADABLE, "data.path", path, rule, action) from error


def read(file: File, start: int = 0, stop: int | None = None) -> bytes:
    """Return bytes `start` to `stop` - 1 of a file; by default, all bytes.

    Raises:
        ConfigError: the file cannot be read, or its size has changed.
    """
    stop = file.size_bytes if stop is None else stop
    if start >= stop:
        return b""
    with wrap_read_errors(file.path):
        if file.in_bucket:
            content = _read_object(file, start, stop)
        else:
            with open(open_regular(file.path), "rb") as stream:
                check_size(file, os.fstat(stream.fileno()).st_size)
                stream.seek(start)
                content = stream.read(stop - start)
    if len(content) != stop - start:
        check_size(file, start + len(content))
    return content


def _read_object(file: File, start: int, stop: int) -> bytes:
    store = stores.store_filesystem(file.path)
    try:
        return store.cat_file(file.path, start=start, end=stop)
    except Exception:
        with contextlib.suppress(OSError):  # a store also rejects a range that it no longer has
            check_size(file, store.info(file.path)["size"])
        raise


def check_size(file: File, size_bytes: int) -> None:
    """Raise ConfigError if the size changed after the source was opened."""
    if size_bytes != file.size_bytes:
        rule = f"must not change while in use: the size was {file.size_bytes} bytes and is now "
        rule += f"{size_bytes} bytes."
        action = "Restore the file, or restart with the changed file."
        raise ConfigError.one(Code.DATA_CHANGED, "data.path", file.path, rule, action)


def file_changed_error(file: File) -> ConfigError:
    """Return the error for a file whose content changed after the first read."""
    rule = "must not change while in use: the content has changed since the start."
    action = "Restore the file, or restart with the changed file."
    return ConfigError.one(Code.DATA_CHANGED, "data.path", file.path, rule, action)


def open_file(file: File) -> BinaryIO:
    """Open a file for reading. Reads must be inside a `wrap_read_errors` block."""
    if not file.in_bucket:
        return open(open_regular(file.path), "rb")
    options = {"block_size": _PREFETCH_BYTES, "cache_type": "readahead"}
    store = stores.store_filesystem(file.path)
    return cast(BinaryIO, io.BufferedReader(store.open(file.path, "rb", **options)))


def edges(file: File) -> str:
    """Return a digest of the first and last bytes of a file."""
    head = read(file, 0, min(_EDGE_BYTES, file.size_bytes))
    tail = read(file, max(len(head), file.size_bytes - _EDGE_BYTES))
    return hashlib.sha256(head + tail).hexdigest()


def identities(files: Sequence[File]) -> list[tuple[str, int, str]]:
    """Return (name, size, digest of first and last bytes) for each file."""
    return [(file.name, file.size_bytes, edges(file)) for file in files]


def digest(parts: Iterable[object]) -> str:
    """Return the SHA-256 digest of JSON values."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def common_folder(files: Sequence[File]) -> str:
    """Return the common parent folder of local files, or the path of the first bucket object."""
    if any(file.in_bucket for file in files):
        return files[0].path
    return os.path.commonpath([os.path.abspath(file.path) for file in files])


PIECE_BYTES = 1 << 20
"""Maximum size in bytes of one chunk of content; zstd chunks may be larger."""

_READ_BYTES = 1 << 18
_ZSTD_READ_BYTES = 1 << 10
"""Number of input bytes per zstd step; a few input bytes may expand to 128 KiB of output."""
_WINDOW_BYTES = 1 << 27
"""Memory limit of a decompressor in bytes, which is sufficient for `zstd --long=27` and `xz -9`."""


class _Gzip:
    """zlib decompressor with the interface of the bz2 and lzma decompressors."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._is_full = False

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail and not self._is_full

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        # zlib may produce more output even without further input.
        self._is_full = len(piece) == max_length
        return piece


class _Zstd:
    """zstandard decompressor with the interface of the bz2 and lzma decompressors."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._frame.decompress(data)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": _Gzip,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW_BYTES),
    ".zst": _Zstd,
}
SUFFIXES = tuple(_DECOMPRESSORS)
"""File name suffixes of compressed files."""


def decompress(file: File) -> Generator[bytes]:
    """Yield the decompressed content of all members; raise ConfigError for a damaged file."""
    suffix = next(end for end in SUFFIXES if file.path.endswith(end))
    size = _ZSTD_READ_BYTES if suffix == ".zst" else _READ_BYTES
    with wrap_read_errors(file.path), open_file(file) as packed:
        try:
            yield from _contents(_DECOMPRESSORS[suffix], packed, size)
        except ImportError as error:
            rule = f"requires the package zstandard: {error}."
            action = "Run: pip install 'maxpipe[zstandard]'"
            raise ConfigError.one(Code.ENV_PACKAGE, "data.path", file.path, rule, action) from error
        except EOFError as error:
            raise _damaged_error(file, suffix, "the file is truncated") from error
        except Exception as error:
            if isinstance(error, ConfigError) or not _is_decompression_error(error):
                raise
            raise _damaged_error(file, suffix, str(error)) from error


def _is_decompression_error(error: Exception) -> bool:
    # bz2 has no error class: it raises OSError without an errno.
    is_bz2 = isinstance(error, OSError) and error.errno is None
    is_known = isinstance(error, (zlib.error, lzma.LZMAError, EOFError, ValueError))
    return is_known or is_bz2 or type(error).__name__ == "ZstdError"


def _contents(new: Callable[[], Any], packed: BinaryIO, size: int) -> Iterator[bytes]:
    decompressor, data, begun, whole = new(), b"", False, False
    while data := data or packed.read(size):
        # A member may be followed by zero bytes, but a file must not begin with zero bytes.
        if whole and not begun and not (data := data.lstrip(b"\0")):
            continue
        begun = True
        piece, data = decompressor.decompress(data, PIECE_BYTES), b""
        while piece or not (decompressor.eof or decompressor.needs_input):
            yield piece
            if decompressor.eof or decompressor.needs_input:
                break
            piece = decompressor.decompress(b"", PIECE_BYTES)
        if decompressor.eof:
            data, decompressor, begun, whole = decompressor.unused_data, new(), False, True
    if begun or not whole:
        raise EOFError


def _damaged_error(file: File, suffix: str, how: str) -> ConfigError:
    rule = f"must be a complete {suffix} file: {how}."
    action = "Copy the file again from an intact source, or remove it from data.path."
    return ConfigError.one(Code.DATA_DAMAGED, "data.path", file.path, rule, action)
