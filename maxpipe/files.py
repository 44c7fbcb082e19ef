"""Files that others may have made: read up to a size, and never written through a link."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from maxpipe.errors import ConfigError, StorageError


def scheme(path: str | os.PathLike[str]) -> str:
    """`gs` of `gs://bucket/name`; empty of a path in a file system.

    A `://` further back is part of a name.
    """
    found = re.match(r"([a-z][a-z0-9+.-]*)://", os.fspath(path))
    return found[1] if found else ""


def full(path: str | Path, where: str = "path") -> Path:
    """The path with `~` or `~name` in front as the home folder that it stands for.

    `where` names what gave the path: a key or an option.

    Raises:
        ConfigError: there is no such folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        rule = "must begin with a home folder that is known here, or not with ~."
        raise ConfigError.one(where, path, rule, "Write the path in full.") from error


def read(path: str | Path, most: int) -> bytes:
    """The content of a file of at most so many bytes.

    Raises:
        OSError: it cannot be read, is no regular file (reading a pipe or a device may never
            end), or is larger: a file in the place of another must not fill the memory.
    """
    # Opening a pipe that nobody writes to would wait for ever.
    descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return content


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """No file of these names is a symbolic link, which could lead anywhere.

    A folder that was copied or unpacked may hold one; what follows it writes to its target.

    Raises:
        StorageError: one is.
    """
    for path in (folder / name for name in names):
        if os.path.islink(path):
            raise StorageError(
                f"{path}: is a symbolic link to {os.readlink(path)}\n"
                "  a run writes this file, and never through a link.\n"
                f"  Remove the link, or move its target to {path}."
            )
