"""The secret by which the processes of a run authenticate each other.

It is never in a config, a command line or a log. A launcher gives it to all processes in
their environment, or in a private file that the environment names. Without either, process 0 leaves
one in the run's folder, which all processes see and only their user can read, for as long as they
are waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxpipe.errors import ConfigError, StorageError

VARIABLE = "MAXPIPE_RUN_SECRET"
FILE_VARIABLE = "MAXPIPE_RUN_SECRET_FILE"

_LEFT = ".secret-"
_SHORTEST, _LONGEST = 32, 1024
"""Bytes. One recorded greeting is enough to try short secrets offline."""
_ACTION = (
    f"Run `openssl rand -hex 32` once, and set {VARIABLE} to what it prints in the environment of "
    "every process."
)


def new() -> str:
    """A new random one."""
    return secrets.token_hex(32)


def given(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that the environment holds or names; None where it does neither.

    Raises:
        ConfigError: it is too short, or its file is not private.
    """
    if (text := environment.get(VARIABLE)) is not None:
        found = os.fsencode(text).strip()
        if not _SHORTEST <= len(found) <= _LONGEST:
            rule = f"must have {_SHORTEST} to {_LONGEST} characters, it has {len(found)}."
            raise ConfigError.one(VARIABLE, None, rule, _ACTION)
        return found
    if (path := environment.get(FILE_VARIABLE)) is None:
        return None
    try:
        return _read(Path(path))
    except OSError as error:
        # The path is not shown: by the variable's name it counts as a secret.
        rule = f"must name a private file that holds the run's secret: {error.strerror or error}."
        action = "Make it on every host, by `(umask 077; openssl rand -hex 32 > FILE)` and a copy."
        if isinstance(error, PermissionError):
            action = (
                "Let it belong to this user and be readable by no other (`chmod 600`), on every "
                "host."
            )
        raise ConfigError.one(FILE_VARIABLE, None, rule, action) from error


def file_in(folder: Path, port: int) -> Path:
    """Where process 0 leaves a secret for those that come to this port."""
    return folder / f"{_LEFT}{port}"


@contextlib.contextmanager
def left_in(folder: Path, port: int) -> Iterator[bytes]:
    """Writes a new secret for the other processes; it exists until the block ends.

    Raises:
        StorageError: the folder cannot be written.
        ConfigError: its file system does not keep files private.
    """
    path, text = file_in(folder, port), new()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "w", encoding="ascii") as stream:
            stream.write(text)
        # An existing file, perhaps a link or from a copied folder, is not used.
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StorageError.unwritable(folder, error) from error
    try:
        found_in(folder, port)  # or else the others would be refused
        yield text.encode()
    finally:
        take_back(folder, port)


def take_back(folder: Path, port: int) -> None:
    """Removes the file, if it exists."""
    with contextlib.suppress(OSError):
        file_in(folder, port).unlink()


def sweep(folder: Path) -> None:
    """Removes the files of processes that were killed while they waited, at any port.

    For the holder of the folder's lock: all processes of its run have connected.
    """
    for path in folder.glob(f"{_LEFT}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def found_in(folder: Path, port: int) -> bytes | None:
    """The secret that process 0 wrote; None before that.

    Raises:
        ConfigError: others than the user of this process could have read it.
    """
    path = file_in(folder, port)
    try:
        os.listdir(folder)  # else NFS may cache for a minute that there is no such file
        return _read(path)
    except PermissionError as error:
        rule = f"must be readable by the user of all processes, and no other: {error.strerror}."
        raise ConfigError.one(str(path), None, rule, _ACTION) from error
    except OSError:  # not there yet, or being replaced
        return None


def _read(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        PermissionError: it is not this user's alone.
        OSError: it cannot be read, or holds no secret.
    """
    # Opening a pipe without a writer would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"its mode is {mode:o}, others may use it")
        content = stream.read(_LONGEST + 1).strip()
    if not _SHORTEST <= len(content) <= _LONGEST:
        raise OSError(errno.EINVAL, f"it must hold {_SHORTEST} to {_LONGEST} bytes")
    return content
