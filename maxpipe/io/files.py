"""File access: size-limited reads, and writes that never follow symbolic links.

This module also detects accelerators from their device files, without jax.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.typed_json import parse_json

T = TypeVar("T")


def url_scheme(path: str | os.PathLike[str]) -> str:
    """Return the scheme of a URL (`gs` for `gs://bucket/name`), or an empty string for a path.

    `://` anywhere else is treated as part of a file name.
    """
    match = re.match(r"([a-z][a-z0-9+.-]*)://", os.fspath(path))
    return match[1] if match else ""


def expand_path(path: str | Path, where: str = "path") -> Path:
    """Expand `~` or `~name` at the start of the path to a home folder.

    `where` is the config key or command-line option that holds the path; error messages name it.

    Raises:
        ConfigError: the home folder does not exist, or the option is empty or a URL.
    """
    if where.startswith("command line") and url_scheme(path):
        rule = "must be a path on this machine, not a URL."
        raise ConfigError.one(Code.IO_PATH, where, path, rule, "Specify a path such as ./out.")
    if where.startswith("command line") and not os.fspath(path):
        rule = "must be a file or a folder."
        raise ConfigError.one(
            Code.IO_PATH, where, "''", rule, "Specify a path, or . for the current folder."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        rule = "begins with ~, but this machine has no such home folder."
        raise ConfigError.one(
            Code.IO_PATH, where, path, rule, "Write the path without ~."
        ) from error


def has_home() -> bool:
    """Return True if `~` can be expanded, which requires HOME or a passwd entry for the user id."""
    return os.path.expanduser("~") != "~"


class UnsafeFileError(OSError):
    """Raised if a file is too large, is a symbolic link, or is not a regular file."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; writes never follow a symbolic link.

    Raises:
        UnsafeFileError: the path is not a regular file. Opening a pipe without a writer would block
            forever, and reading a device may never end.
        OSError: the file cannot be opened.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    try:
        # Truncate only after checking that the file is regular.
        descriptor = os.open(os.path.expanduser(path), flags & ~os.O_TRUNC, mode)
    except ValueError as error:
        raise UnsafeFileError(errno.EINVAL, "it is not a path", repr(path)) from error
    except OSError as error:
        if writes and error.errno == errno.ELOOP:
            words = "it is a symbolic link, and writes do not follow links"
            raise UnsafeFileError(errno.ELOOP, words, str(path)) from error
        if error.errno == errno.ENXIO:  # a named pipe without a reader
            raise UnsafeFileError(errno.EINVAL, "it is not a regular file", str(path)) from error
        raise
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise UnsafeFileError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise UnsafeFileError(errno.EINVAL, "it is not a regular file", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        UnsafeFileError: the file is larger than `most` bytes, or is not a regular file.
        OSError: the file cannot be read.
    """
    with open(open_regular(path), "rb") as stream:
        large = os.fstat(stream.fileno()).st_size > most
        content = b"" if large else stream.read(most + 1)
    if large or len(content) > most:
        raise UnsafeFileError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return content


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Check whether the file can be written, as far as possible without modifying anything.

    Raises:
        OSError: the file cannot be written.
    """
    _check_no_url(path)
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    folder = os.path.dirname(path) or "."
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file atomically: after a crash, it contains either the old or the new content.

    Raises:
        OSError: the file cannot be written, or is not a regular file.
    """
    _check_no_url(path)
    data = content.encode() if isinstance(content, str) else content
    path = os.path.expanduser(path)
    partial, mode = f"{path}.partial", None
    with (
        contextlib.suppress(FileNotFoundError),
        open(open_regular(path, os.O_WRONLY), "wb") as before,
    ):
        mode = stat.S_IMODE(os.fstat(before.fileno()).st_mode)
    try:
        with open(open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
        os.replace(partial, path)
    except UnsafeFileError:
        raise
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _check_no_url(path: str | os.PathLike[str]) -> None:
    if scheme := url_scheme(path):
        words = f"it must be a path on this machine, but {scheme}:// begins a URL"
        raise UnsafeFileError(errno.EINVAL, words, str(path))


def lock(file: int | IO[bytes], *, wait: bool = False) -> bool:
    """Try to lock an open file or folder for this process; return True if it was locked.

    The lock is released when the process ends for any reason. On some shared file systems, other
    hosts do not see the lock.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def read_lines(
    path: str | os.PathLike[str], *, longest: int = 1 << 20, most: int = 1 << 32
) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, content) of each line. Lines longer than `longest` bytes are skipped.

    Raises:
        UnsafeFileError: the file has more than `most` bytes, or is not a regular file.
        OSError: the file cannot be read.
    """
    with open(open_regular(path), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > most:
            raise UnsafeFileError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
        offset, too_long = 0, False
        while line := stream.readline(longest):
            ends = line.endswith(b"\n")
            if not too_long and (ends or len(line) < longest):
                yield offset, line
            too_long = not ends
            offset += len(line)


def read_json_lines(path: str | os.PathLike[str], kind: type[T]) -> Iterator[T]:
    """Yield the JSON value on each line, and skip invalid lines.

    A line may be incomplete because the process was killed or the disk was full, or it may be a
    record that another release wrote.

    Raises:
        OSError: the file cannot be read.
    """
    for _, line in read_lines(path):
        try:
            yield parse_json(line, kind)
        except ValueError:
            continue


def check_regular_files(folder: Path, names: Iterable[str]) -> None:
    """Check that each named file in the folder, if it exists, is a regular file (no link or pipe).

    A copied or unpacked folder may contain a link, and a write to the link would change its target.

    Raises:
        StorageError: a file is not regular.
    """
    for path in (folder / name for name in names):
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        if stat.S_ISLNK(mode):
            raise StorageError(
                Code.IO_UNSAFE,
                f"{path}: is a symbolic link to {os.readlink(path)}\n"
                "  A run writes this file, but does not follow links.\n"
                f"  Remove the link, or move its target to {path}.",
            )
        if not stat.S_ISREG(mode):
            raise StorageError(
                Code.IO_UNSAFE,
                f"{path}: is not a regular file\n"
                "  A run writes this file.\n"
                f"  Remove {path}, or move it elsewhere.",
            )


_GPUS = ("nvidia[0-9]*",)
_ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", *_GPUS)


def accelerators() -> list[Path]:
    """Return the device files of the TPUs and GPUs of this machine."""
    return _files(_ACCELERATORS)


def gpus() -> list[Path]:
    """Return the device files of the NVIDIA GPUs of this machine."""
    return _files(_GPUS)


def _files(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(Path("/dev").glob(pattern))]
