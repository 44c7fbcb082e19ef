"""Disk caches for folders and arrays that are slow to compute, shared by several processes.

Each folder or file is created only once, by the process that holds its lock file. The timestamps of
the lock file show that this process is making progress. The lock is effective between processes
that see the same lock file. If the cache is not shared, or its file system does not support locks,
each process creates the folder itself. Names of folders and files contain a digest of the inputs.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from typing import NamedTuple, TypeVar

import numpy as np

from maxpipe.data.formats.files import File
from maxpipe.data.formats.source import Heartbeat, track_read
from maxpipe.io import redact
from maxpipe.io.files import lock, open_regular

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 0.5
"""Interval in seconds at which the lock holder updates the timestamps of the lock file."""
_LOG_SECONDS = 30.0
_LONGEST_NAME = 300
_TEMPORARY_SUFFIX = ".tmp"
_READABLE = os.R_OK | os.X_OK


@contextlib.contextmanager
def lock_file(
    path: str, task: str, moved: Heartbeat | None, *, removes: bool = False
) -> Iterator[Heartbeat]:
    """Hold an interprocess lock. The lock is released when the process ends for any reason.

    The yielded function must be called after each unit of work. While the holder makes progress,
    waiting processes call their own `moved`, so that they are not treated as stalled. `task`
    describes the work in messages, for example `indexing documents of jsonl`.

    If `removes` is true, the lock file is removed when the lock is released. A host that sees
    changes to a shared folder late may then hold the lock at the same time as another host. The
    work must therefore be safe to repeat.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    with contextlib.ExitStack() as stack:
        while True:
            stream = stack.enter_context(_open_lock_file(path))
            _wait(stream, moved)
            if _is_same_file(path, stream):
                break
            stream.close()
        if removes:
            stack.callback(_remove, path)
        with contextlib.suppress(OSError):  # holder information for messages
            stream.truncate(0)
            os.pwrite(stream.fileno(), f"{os.uname().nodename} {os.getpid()} {task}".encode(), 0)
        signed = 0.0

        def sign() -> None:
            nonlocal signed
            if moved is not None:
                moved()
            if (now := time.monotonic()) - signed > _HEARTBEAT_SECONDS:
                signed = now
                with contextlib.suppress(OSError):
                    os.utime(stream.fileno())

        yield sign


def _open_lock_file(path: str) -> FileIO:
    try:
        return open(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    except PermissionError:
        # A lock file of another user can be locked if it is readable.
        with contextlib.suppress(OSError):
            return open(open_regular(path), "rb", buffering=0)
        raise


def _is_same_file(path: str, stream: FileIO) -> bool:
    """Return whether `path` still refers to the open file; another holder may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _wait(stream: FileIO, moved: Heartbeat | None) -> None:
    seen, since = 0, time.monotonic()
    said = since
    with track_read(lambda: _holder(stream), "waiting for"):
        while not lock(stream):
            time.sleep(_POLL_SECONDS)
            now, sign = time.monotonic(), os.fstat(stream.fileno()).st_mtime_ns
            if sign != seen:
                seen, since = sign, now
                if moved is not None:
                    moved()
            if now - said > _LOG_SECONDS:
                said = now
                words = f"waiting for {_holder(stream)}"
                if now - since > _LOG_SECONDS:
                    _LOG.warning("%s, which has made no progress for %.0f s", words, now - since)
                else:
                    _LOG.info("%s", words)


def _holder(stream: FileIO) -> str:
    try:
        raw = os.pread(stream.fileno(), _LONGEST_NAME, 0).decode(errors="replace")
    except OSError:
        raw = ""
    host, pid, task = (*raw.split(" ", 2), "", "", "")[:3]
    return redact.redact_for_terminal(
        f"process {pid or 'unknown'} on {host or 'a host'}, {task or 'working'}"
    )


FillFolder = Callable[[str, Heartbeat], None]
"""Function (folder, moved) that fills the folder, and calls `moved` after each unit of work."""


class FolderCache:
    """Cache of folders, each created once by one of the processes that need it.

    If `keep` is true, new folders are stored in `folder`. Otherwise, existing folders are used, and
    missing folders are created in a temporary folder that is removed when the process ends.
    """

    def __init__(self, folder: str | None, *, keep: bool):
        self._folder = None if folder is None else os.path.expanduser(folder)
        self._keep = keep
        self._own: str | None = None

    @property
    def active_folder(self) -> str:
        """Folder in which this cache creates new folders."""
        if self._own is not None or self._folder is None or not self._keep:
            return self._own or tempfile.gettempdir()
        return self._folder

    def get_or_make(
        self, name: str, file: File, make: FillFolder, moved: Heartbeat | None = None
    ) -> str:
        """Return the folder with this name; if it is missing, create it and call `make` to fill it.

        `name` must identify the content uniquely.

        Raises:
            OSError: neither `folder` nor the temporary folder can be written.
        """
        for root in (self._folder, self._own):
            folder = os.path.join(root or "", name)
            if root is not None and os.path.isdir(folder) and os.access(folder, _READABLE):
                return folder
        if self._folder is not None and self._keep:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self._folder)
            final = os.path.join(self._folder, name)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                unusable = f"{self._folder} cannot be written"
            elif os.path.lexists(final):
                unusable = f"{final} cannot be read"
            else:
                return _make_folder(self._folder, name, file, make, moved)
            _LOG.warning("%s: all files will be read on the next start", unusable)
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="maxpipe-")
            weakref.finalize(self, shutil.rmtree, self._own, True)
        return _make_folder(self._own, name, file, make, moved)


def _make_folder(
    root: str, name: str, file: File, make: FillFolder, moved: Heartbeat | None
) -> str:
    final = os.path.join(root, name)
    with contextlib.ExitStack() as stack:
        try:
            task = f"reading {file.path}"
            moved = stack.enter_context(lock_file(f"{final}.lock", task, moved))
        except OSError as error:  # without locks, each process creates the folder itself
            _LOG.info("%s cannot be locked (%s)", final, error)
        else:
            if os.path.isdir(final):
                return final
            for left in glob.glob(f"{glob.escape(final)}.partial-*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
        partial = f"{final}.partial-{secrets.token_hex(8)}"
        os.mkdir(partial)  # mkdtemp would create a folder that other users of `root` cannot read
        try:
            make(partial, moved or (lambda: None))
            try:
                os.rename(partial, final)
            except OSError:
                if not os.path.isdir(final):
                    raise
                # Another process created the folder without a lock.
                shutil.rmtree(partial, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


Value = TypeVar("Value")
Arrays = Mapping[str, np.ndarray]


class CacheMessages(NamedTuple):
    """Phrases for the log messages about cached arrays."""

    task: str
    """Name of the computation, as shown in messages."""
    unreadable: str
    """End of the message that is logged if the arrays cannot be read."""
    unwritable: str
    """End of the message that is logged if the arrays cannot be written."""


def load_or_compute(
    path: str,
    made_of: Callable[[Arrays], Value],
    make: Callable[[Heartbeat | None], Value],
    arrays_of: Callable[[Value], Arrays],
    words: CacheMessages,
    *,
    keep: bool,
    moved: Heartbeat | None,
) -> Value:
    """Return the value built from the arrays in a file, or compute the value with `make`.

    If `keep` is true, a computed value is written to the file. Processes that need the same file
    wait for the process that computes it. If this process is killed, another waiting process
    computes the file. `make` calls its argument after each unit of work.
    """
    if (value := load(path, made_of, words.unreadable)) is not None:
        return value
    if not keep:
        return make(moved)
    before = _state(path)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            moved = stack.enter_context(lock_file(f"{path}.lock", words.task, moved, removes=True))
        except OSError as error:
            # The value is computed without a lock. `save` warns if the file cannot be written.
            _LOG.info("%s cannot be locked (%s)", path, error)
        else:
            # Another process may have written the file while this process waited.
            if (
                _state(path) != before
                and (value := load(path, made_of, words.unreadable)) is not None
            ):
                return value
            for part in glob.glob(f"{glob.escape(path)}.*{_TEMPORARY_SUFFIX}"):
                with contextlib.suppress(OSError):
                    os.unlink(part)  # left by a killed process
        computed = make(moved)
        save(path, arrays_of(computed), words.unwritable)
    return computed


def _state(path: str) -> tuple[int, int] | None:
    """Return the inode and the modification time of a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def load(path: str, made_of: Callable[[Arrays], Value], otherwise: str) -> Value | None:
    """Return the value that `made_of` builds from the arrays in a file, or None if the file is
    missing. If the file cannot be used, log a warning and return None.
    """
    try:
        # The file is opened here, because numpy does not close a damaged file.
        with (
            open(open_regular(path), "rb") as stream,
            np.load(stream, allow_pickle=False) as arrays,
        ):
            return made_of(arrays)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        _LOG.warning("%s cannot be used (%s): %s", path, error, otherwise)
        return None


def save(path: str, arrays: Arrays, otherwise: str) -> None:
    """Write arrays to a temporary file and rename it, so that no process reads a partial file."""
    # The tempfile module is not used, because its files are not readable by other users of the
    # folder.
    temporary = f"{path}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "xb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): %s", path, error, otherwise)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
