"""Work that one process of several does for all of them: a lock, with signs that its holder moves.

It holds among processes that see the same file. Where a folder is not shared, or its file system
has no such locks, each does the work for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from io import FileIO

from maxpipe.data.formats.reads import reading
from maxpipe.data.formats.source import Moved
from maxpipe.io import redact
from maxpipe.io.files import opened

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_SIGN_SECONDS = 0.5
"""Between two signs of the holder, which are times of its file."""
_SAY_SECONDS = 30.0
_LONGEST_NAME = 300


@contextlib.contextmanager
def locked(path: str, task: str, moved: Moved | None, *, removes: bool = False) -> Iterator[Moved]:
    """Holds a lock among processes; one that ends in any way lets it go.

    What is yielded is called for each part of the work that is done. Processes that wait call their
    own `moved` then: they stall with the one that they wait for, and not before. `task` is for
    people, as in `indexing documents of jsonl`.

    With `removes` the file is removed at the end. Hosts that see a shared folder late may hold two
    locks at a time then: for work that may be done twice.

    Raises:
        OSError: the file cannot be opened, or not locked.
    """
    with contextlib.ExitStack() as stack:
        while True:
            stream = stack.enter_context(_opened(path))
            _wait(stream, moved)
            if _is_at(path, stream):
                break
            stream.close()
        if removes:
            stack.callback(_remove, path)
        with contextlib.suppress(OSError):  # a name for people
            stream.truncate(0)
            os.pwrite(stream.fileno(), f"{os.uname().nodename} {os.getpid()} {task}".encode(), 0)
        signed = 0.0

        def sign() -> None:
            nonlocal signed
            if moved is not None:
                moved()
            if (now := time.monotonic()) - signed > _SIGN_SECONDS:
                signed = now
                with contextlib.suppress(OSError):
                    os.utime(stream.fileno())

        yield sign


def _opened(path: str) -> FileIO:
    try:
        return open(opened(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    except PermissionError:
        # A file of another user can be locked all the same, if it can be read.
        with contextlib.suppress(OSError):
            return open(opened(path), "rb", buffering=0)
        raise


def _is_at(path: str, stream: FileIO) -> bool:
    """Whether the file was not removed, by the one that had the lock before."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _wait(stream: FileIO, moved: Moved | None) -> None:
    seen, since = 0, time.monotonic()
    said = since
    with reading(lambda: _holder(stream), "waiting for"):
        while not _taken(stream):
            time.sleep(_POLL_SECONDS)
            now, sign = time.monotonic(), os.fstat(stream.fileno()).st_mtime_ns
            if sign != seen:
                seen, since = sign, now
                if moved is not None:
                    moved()
            if now - said > _SAY_SECONDS:
                said = now
                words = f"waiting for {_holder(stream)}"
                if now - since > _SAY_SECONDS:
                    _LOG.warning("%s, which has not moved for %.0f s", words, now - since)
                else:
                    _LOG.info("%s", words)


def _taken(stream: FileIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(stream: FileIO) -> str:
    """The process that has the lock, for people."""
    try:
        raw = os.pread(stream.fileno(), _LONGEST_NAME, 0).decode(errors="replace")
    except OSError:
        raw = ""
    host, pid, task = (*raw.split(" ", 2), "", "", "")[:3]
    return redact.shown(f"process {pid or 'unknown'} on {host or 'a host'}, {task or 'at work'}")
