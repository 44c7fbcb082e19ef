"""One run per folder: a lock that names its holder, and that a dead holder loses.

`lock.json` names run, host and process. A thread refreshes its time of change, or its size
where that time cannot be set: the heartbeat. A lock is taken over when its process is dead on
this host, or when it is of another host without a heartbeat for `STALE_SECONDS`; a
start waits for one, so that a run whose host was lost can be restarted at once.
How old a lock is at the start is a difference between times that the file system itself has
set: clocks of hosts need not agree. From then on the waiting process uses its own clock, so
that a lock with a time in the future is waited for no longer than another one.

A run whose folder or lock was moved, deleted or replaced has lost it, and stops writing:
the folder is known by device and inode, which cannot be given to another one while it is open
here, the lock by its token.

Taking over (and releasing) is done under a claim, a file named after the lock's token
that only one process can create: of two that find the same dead lock, one wins.

In a bucket all this is the same, except for a time of change, which only writing again refreshes,
and for the folder, which has no inode.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from etils import epath

from maxpipe.checkpoint.storage import (
    create,
    in_bucket,
    remedy,
    root_cause_text,
    to_epath,
    translate_bucket_errors,
)
from maxpipe.errors import StorageError
from maxpipe.io.files import check_regular_files, read
from maxpipe.io.typed_json import parse_json

FILE = "lock.json"
BEAT_SECONDS = 30.0
STALE_SECONDS = 150.0
"""Five missed heartbeats."""

_LOG = logging.getLogger(__name__)
_CLAIM_SECONDS = 60.0
_ATTEMPTS, _PAUSE_SECONDS = 20, 0.05
_MAX_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 100
_LARGEST_PID = 2**31 - 1
_GONE = (FileNotFoundError, NotADirectoryError)


class LockContent(TypedDict):
    """The content of `lock.json`."""

    token: str
    run: NotRequired[str]
    host: NotRequired[str]
    namespace: NotRequired[str | None]
    pid: NotRequired[int]
    process_start: NotRequired[str | None]
    started: NotRequired[str]


_UNREADABLE: LockContent = {"token": ""}
"""The content of a lock that is not readable as one."""


_FULL = {errno.ENOSPC, errno.EDQUOT}


class _NotALockError(OSError):
    """The file with the name of a lock cannot be one."""


class RunLock:
    """Held between `__enter__` and `__exit__`; `note` is a message about its last holder.

    `key` of the config led to the folder. With `to_free`, for commands that delete, a full disk is
    no obstacle: where no lock can be written, a command that finds none, or a dead one, is alone.
    `lost` is empty, or says why the folder is no longer this run's, as of the last check.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        *,
        key: str = "run.dir",
        to_free: bool = False,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        folder = to_epath(run_dir)
        # In a bucket it has the methods of a Path that are used here, except for those below.
        self.path = cast(Path, folder) / FILE if in_bucket(folder) else Path(folder) / FILE
        self._key, self._to_free = key, to_free
        self.note = self.lost_reason = ""
        self._folder = -1  # open, so that no other folder gets its inode
        self._identity: tuple[int, int] | None = None
        self._token = secrets.token_hex(8)
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> RunLock:
        try:
            with translate_bucket_errors(self.path):
                if not in_bucket(self.path):
                    self._open_folder()
                try:
                    self._acquire()
                except OSError as error:
                    if not (self._to_free and error.errno in _FULL and self._is_free()):
                        raise
                    return self
        except _NotALockError as error:
            self._close_folder()
            raise StorageError(
                f"{self.path}: is not the lock of a run\n"
                f"  {root_cause_text(error)}.\n"
                "  Remove it if no run uses the folder, and start again."
            ) from error
        except OSError as error:
            self._close_folder()
            said = OSError(root_cause_text(error))
            action = remedy(self.path, self._key)
            raise StorageError.unwritable(self.path, said, action) from error
        except BaseException:
            self._close_folder()
            raise
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._released.set()
        if self._heart.ident is not None:
            self._heart.join()
            with contextlib.suppress(OSError), translate_bucket_errors(self.path):
                # A folder that is not ours is left alone: a claim, too, would be written there.
                if self.check_held():
                    self._release()
        self._close_folder()

    def _release(self) -> None:
        try:
            with _claim(self.path, self._token) as claimed:
                if claimed and _token(_read(self.path)) == self._token:
                    self.path.unlink()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.path.unlink()  # no other process can claim or replace it now

    def _is_free(self) -> bool:
        """Whether there is no lock, or one of a process that died on this machine."""
        try:
            holder = _read(self.path)
        except FileNotFoundError:
            return True
        return _is_on_this_host(holder) and bool(_dead_reason_on_this_host(holder))

    def _open_folder(self) -> None:
        """Make the folder, for the last time in this run, and remember which it is."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        check_regular_files(folder, [FILE])
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._identity = _identity(os.fstat(self._folder))

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def check_held(self) -> bool:
        """Check whether folder and lock are still ours; costs some system calls.

        A short failure of storage says nothing about that. A lost lock stays lost.
        """
        if not self.lost_reason:
            with contextlib.suppress(OSError), translate_bucket_errors(self.path):
                self.lost_reason = self._why_lost()
        return not self.lost_reason

    def check(self) -> None:
        """Check, as `held` does, before something is written.

        Raises:
            StorageError: the folder is not this run's any more.
        """
        self.check_held()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise if an earlier check found it lost; costs nothing.

        Raises:
            StorageError: it was.
        """
        if self.lost_reason:
            raise StorageError(self.lost_reason)

    def _why_lost(self) -> str:
        try:
            holder = _read(self.path)
        except _GONE:
            return self._why_folder_lost() or (
                f"{self.path}: is gone\n"
                "  it was moved or deleted while the run was using it. Another start would have "
                "been let in, so this run has written nothing more.\n"
                "  Leave it to the run that it belongs to. Start the same command again to go on "
                "from the newest checkpoint."
            )
        except _NotALockError as error:
            return self._why_folder_lost() or (
                f"{self.path}: is not this run's lock any more\n"
                f"  {root_cause_text(error)}. The run has written nothing more.\n"
                "  Remove it, and start the same command again to go on from the newest checkpoint."
            )
        if (why := self._why_folder_lost()) or _token(holder) == self._token:
            return why
        return (
            f"{self.path}: was taken over by another run\n"
            f"  it is held by {_describe_holder(holder)} now; this one sent no heartbeat for more "
            f"than {self._stale_seconds:.0f} s, or its lock was removed.\n"
            "  Let that run go on, or stop it and start this one again."
        )

    def _why_folder_lost(self) -> str:
        if self._identity is None:  # in a bucket
            return ""
        try:
            what = "is another folder now than when the run started"
            if _identity(os.stat(self.path.parent)) == self._identity:
                return ""
        except _GONE:
            what = "was moved or deleted while the run was using it"
        return (
            f"{self.path.parent}: {what}\n"
            "  a run's folder must stay where it is. Nothing more was written, there or here.\n"
            f"  Put the folder that was there back, or set {self._key} to where it is, and start "
            "the same command again to go on from the newest checkpoint."
        )

    def _acquire(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                _write(self.path, self._token)
            except FileExistsError:
                if self._take_over():
                    return
                time.sleep(_PAUSE_SECONDS)
            else:
                return
        raise OSError(f"others take and release it all the time ({_ATTEMPTS} attempts)")

    def _take_over(self) -> bool:
        """Whether the lock was dead and is ours now; False when it is gone or taken by another."""
        mine = self.path.with_name(f"{FILE}.{self._token}")
        try:
            _write(mine, self._token)
            holder = _read(self.path)
            if _token(holder) == self._token:  # a repeated request, whose first one had succeeded
                return True
            if not (reason := self._why_dead(holder, mine)):
                return False
            with _claim(self.path, _token(holder)) as claimed:
                if not claimed or _token(_read(self.path)) != _token(holder):
                    return False
                _replace(mine, self.path)
        except FileNotFoundError:  # released meanwhile
            return False
        finally:
            mine.unlink(missing_ok=True)
        self.note = f"{self.path} was left behind by {_describe_holder(holder)}: {reason}"
        return True

    def _why_dead(self, holder: LockContent, mine: Path) -> str:
        """The reason, empty when another process has the lock now. `mine` gives the time.

        Waits while it is unknown whether the holder is alive.

        Raises:
            StorageError: the holder is alive.
        """
        sign, told, begin = _heartbeat_stamp(self.path), False, time.monotonic()
        age = before = max(0.0, _last_heartbeat(mine) - sign[0])
        while True:
            if _is_on_this_host(holder):
                if reason := _dead_reason_on_this_host(holder):
                    return reason
                break
            if _token(_read(self.path)) != _token(holder):
                return ""
            # Read before the clock, which goes on while this process is stopped.
            if _heartbeat_stamp(self.path) != sign:
                age = 0.0
                break
            if age > self._stale_seconds:
                return f"no heartbeat for {age:.0f} s"
            if not told:
                told = True
                _LOG.warning(
                    "%s is held by %s, last heartbeat %.0f s ago; waiting for the next one, or "
                    "%.0f s without one",
                    self.path,
                    _describe_holder(holder),
                    age,
                    self._stale_seconds,
                )
            time.sleep(min(1.0, self._beat_seconds / 2))
            age = before + time.monotonic() - begin
        raise StorageError(
            f"{self.path.parent}: is in use by another run\n"
            f"  {_describe_holder(holder)}; last heartbeat {age:.0f} s ago.\n"
            "  Stop that run, or set run.name to a new name."
        )

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            # A lock that was taken over is not refreshed.
            if self.check_held():
                with contextlib.suppress(OSError), translate_bucket_errors(self.path):
                    _touch(self.path)


def _write(path: Path, token: str) -> None:
    """Create the file; FileExistsError when there is one."""
    pid = os.getpid()
    content = {
        "token": token,
        "run": path.parent.name,
        "host": platform.node(),
        "namespace": _namespace(),
        "pid": pid,
        "process_start": _process_start(pid),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(content)
    if in_bucket(path):
        return create(path, text)
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _touch(path: Path) -> None:
    """Write a heartbeat that other processes can see."""
    if in_bucket(path):  # whose time is that of the last write
        path.write_text(path.read_text())
        return
    before = _heartbeat_stamp(path)
    with contextlib.suppress(OSError):  # not every file system lets a time be set
        os.utime(path)
    if _heartbeat_stamp(path) == before:  # the size changes instead: JSON may end with blanks
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)


def _heartbeat_stamp(path: Path) -> tuple[float, int]:
    """What every heartbeat changes: time of change, and size."""
    if in_bucket(path):
        found = epath.Path(path).stat()
        return found.mtime, found.length
    stat = os.stat(path)
    return stat.st_mtime, stat.st_size


def _last_heartbeat(path: Path) -> float:
    """When the file was last touched, by the clock of its file system."""
    return _heartbeat_stamp(path)[0]


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _replace(mine: Path, path: Path) -> None:
    if in_bucket(path):
        path.write_text(mine.read_text())
    else:
        os.replace(mine, path)


def _read(path: Path) -> LockContent:
    """What a lock says; `_VOID`, of one that is not readable as a lock.

    Raises:
        _NoLock: it is a pipe, a folder, or too large; waiting would not change that.
        OSError: it cannot be read.
    """
    try:
        return parse_json(_bytes(path), LockContent)
    except ValueError:
        return _UNREADABLE


def _bytes(path: Path) -> bytes:
    try:
        if not in_bucket(path):
            return read(path, _MAX_BYTES)
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise _NotALockError(error.errno, error.strerror) from error
        raise


def _token(holder: LockContent) -> str:
    token = holder["token"]
    return token if token.isalnum() and len(token) <= _MAX_SHOWN_CHARS else "unknown"


def _describe_holder(holder: LockContent) -> str:
    def one(key: str) -> str:
        text = str(holder.get(key, "?"))[:_MAX_SHOWN_CHARS]
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    return f"run {one('run')} on host {one('host')}, process {one('pid')}, started {one('started')}"


def _is_on_this_host(holder: LockContent) -> bool:
    """Whether the lock's process id is valid on this machine."""
    return (
        0 < holder.get("pid", 0) <= _LARGEST_PID
        and holder.get("host") == platform.node()
        and holder.get("namespace") == _namespace()
    )


def _dead_reason_on_this_host(holder: LockContent) -> str:
    pid = holder.get("pid", 0)
    start = _process_start(pid)
    if start == "" or (start is None and not _is_alive(pid)):
        return "that process is dead"
    if start != holder.get("process_start"):
        return "that process is dead, and another one has its id"
    return ""


def _namespace() -> str | None:
    """The namespace of process ids: containers of one host may share its name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """When a process started, in ticks since boot; empty if there is none, None if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    # The name of the program, in parentheses, may hold any character.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _file_system_time(lock: Path) -> float:
    """The time by the file system's clock: those of hosts need not agree."""
    probe = lock.with_name(f"{FILE}.time-{secrets.token_hex(8)}")
    _write(probe, "now")
    try:
        return _last_heartbeat(probe)
    finally:
        probe.unlink()


@contextlib.contextmanager
def _claim(lock: Path, token: str) -> Iterator[bool]:
    """True inside for the one process that may replace or remove the lock with this token."""
    path = lock.with_name(f"{FILE}.claim-{token}")
    try:
        with contextlib.suppress(FileNotFoundError):
            # A process that claims is done in milliseconds, or dead. A claim of the future was made
            # before the clock of the file system was set back.
            if abs(_file_system_time(lock) - _last_heartbeat(path)) > _CLAIM_SECONDS:
                path.unlink()
        _write(path, token)
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
