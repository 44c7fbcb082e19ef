"""Files from outside: read up to a size limit, and never written through a link.

Device files of TPUs and GPUs: whether a machine has accelerators, without jax.

Buckets of Google Cloud Storage, `gs://BUCKET/PATH`, as fsspec gives them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.typed_json import parse_json

T = TypeVar("T")


def url_scheme(path: str | os.PathLike[str]) -> str:
    """`gs` of `gs://bucket/name`; empty of a path in a file system.

    A `://` elsewhere is part of a name.
    """
    found = re.match(r"([a-z][a-z0-9+.-]*)://", os.fspath(path))
    return found[1] if found else ""


def expand_path(path: str | Path, where: str = "path") -> Path:
    """The path with `~` or `~name` in front as the home folder that it stands for.

    `where` names what gave the path: a key or an option.

    Raises:
        ConfigError: there is no such folder, or an option was given nothing.
    """
    if where.startswith("command line") and not os.fspath(path):
        rule = "must name a file or a folder."
        raise ConfigError.one(where, "''", rule, "Write its path; . is this folder.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        rule = "must begin with a home folder that is known here, or not with ~."
        raise ConfigError.one(where, path, rule, "Write the path in full.") from error


def has_home() -> bool:
    """Whether `~` is a folder: not without HOME for a user id that this machine does not know."""
    return os.path.expanduser("~") != "~"


class UnsafeFileError(OSError):
    """A file that is not read or written here: not a regular one, too large, or a link."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file; what is written is never reached through a link.

    Raises:
        Unfit: it is not a regular file. Opening a pipe without a writer would block for ever, and
            reading a device may never end.
        OSError: it cannot be opened.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    try:
        # Truncated only after the check.
        descriptor = os.open(os.path.expanduser(path), flags & ~os.O_TRUNC, mode)
    except ValueError as error:
        raise UnsafeFileError(errno.EINVAL, "it is not a path", repr(path)) from error
    except OSError as error:
        if writes and error.errno == errno.ELOOP:
            words = "it is a symbolic link, and nothing is written through one"
            raise UnsafeFileError(errno.ELOOP, words, str(path)) from error
        if error.errno == errno.ENXIO:  # a pipe without a reader
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
    """The content of a file of at most `most` bytes.

    Raises:
        Unfit: it is larger, which must not fill the memory, or no regular file.
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb") as stream:
        large = os.fstat(stream.fileno()).st_size > most
        content = b"" if large else stream.read(most + 1)
    if large or len(content) > most:
        raise UnsafeFileError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return content


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Whether a file can be written there, as far as that is known before; nothing is changed.

    Raises:
        OSError: it cannot.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    folder = os.path.dirname(path) or "."
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a whole file, not through a link: afterwards it has the new content, or the old one.

    Raises:
        OSError: it cannot be written, or is no regular file.
    """
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


def read_lines(
    path: str | os.PathLike[str], *, longest: int = 1 << 20, most: int = 1 << 32
) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each line with its end, but of none longer than `longest` bytes.

    Raises:
        Unfit: it has more than `most` bytes, or is no regular file.
        OSError: it cannot be read.
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
    """The JSON values of a file with one a line; other lines are left out.

    A kill or a full disk leaves half a line, another release may write other records.

    Raises:
        OSError: it cannot be read.
    """
    for _, line in read_lines(path):
        try:
            yield parse_json(line, kind)
        except ValueError:
            continue


def check_regular_files(folder: Path, names: Iterable[str]) -> None:
    """Checks that those of these files that exist are regular: no links, no pipes.

    A folder that was copied or unpacked may hold one; what follows a link writes to its target.

    Raises:
        StorageError: one is something else.
    """
    for path in (folder / name for name in names):
        try:
            found = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISLNK(found.st_mode):
            raise StorageError(
                f"{path}: is a symbolic link to {os.readlink(path)}\n"
                "  a run writes this file, and never through a link.\n"
                f"  Remove the link, or move its target to {path}."
            )
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(
                f"{path}: is not a regular file\n"
                "  a run writes this file.\n"
                "  Remove what is there, or move it away."
            )


_GPUS = ("nvidia[0-9]*",)
_ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", *_GPUS)


def accelerators() -> list[Path]:
    """The device files of this machine's TPUs and GPUs."""
    return _files(_ACCELERATORS)


def gpus() -> list[Path]:
    """The device files of this machine's NVIDIA GPUs."""
    return _files(_GPUS)


def _files(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(Path("/dev").glob(pattern))]


@functools.cache
def gcs_filesystem() -> Any:
    """All buckets as one file system, whose paths may begin with `gs://`.

    Raises:
        ImportError: gcsfs is not installed.
    """
    import fsspec
    from fsspec.config import conf

    # It logs, with tracebacks, errors that it also raises or handles.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Its cache of listings would miss what tensorstore and other hosts write.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
