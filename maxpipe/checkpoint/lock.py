"""Lock a run folder against other runs. The lock expires when its process dies.

`lock.json` names the run, host and process. A heartbeat thread updates the file's modification
time, or its size if the file system does not allow setting times. A new process may replace the
lock if the holder was a process on the same host and is dead, or if a holder on another host has
sent no heartbeat for `STALE_SECONDS`. A starting run waits until the holder sends a heartbeat or
the lock expires, so after a host failure the same command can be started again at once.

The initial age of a lock is measured with the file system's clock, because host clocks may differ.
From then on, the waiting process uses its own monotonic clock, so a lock file with a modification
time in the future does not prolong the wait.

If a run's folder or lock file is moved, deleted or replaced, the run has lost the lock and stops
writing. The folder is identified by device and inode, and the inode is not reused while the folder
is open. The lock is identified by its token.

A process replaces or releases a lock only while it holds a claim. A claim is a file named after the
lock's token, which only one process can create. If two processes try to replace the same expired
lock, exactly one of them succeeds. `maxpipe.io.files.lock` is not used here, because
operating-system locks do not exist in buckets and may not be visible to other hosts.

Locks in a bucket work in the same way, except that heartbeats rewrite the object and folders have
no inode to compare.
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
    create_folder,
    in_bucket,
    modified_seconds,
    remedy,
    root_cause_text,
    to_epath,
    translate_bucket_errors,
)
from maxpipe.errors import Code, StorageError
from maxpipe.io.files import check_regular_files, read
from maxpipe.io.typed_json import parse_json

FILE = "lock.json"
BEAT_SECONDS = 30.0
STALE_SECONDS = 150.0
"""A lock expires if its last heartbeat is older than this number of seconds (five missed
heartbeats)."""

_LOG = logging.getLogger(__name__)
_CLAIM_SECONDS = 60.0
_ATTEMPTS, _PAUSE_SECONDS = 20, 0.05
_MAX_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 100
_LARGEST_PID = 2**31 - 1
_GONE = (FileNotFoundError, NotADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LockContent(TypedDict):
    """Content of `lock.json`."""

    token: str
    run: NotRequired[str]
    host: NotRequired[str]
    namespace: NotRequired[str | None]
    pid: NotRequired[int]
    process_start: NotRequired[str | None]
    started: NotRequired[str]


_UNREADABLE: LockContent = {"token": ""}
"""Placeholder returned as the content of a lock file that cannot be parsed."""


class _NotALockError(OSError):
    """Raised if the lock file cannot be a lock, because it is a pipe, a folder or too large."""


class RunLock:
    """Context manager that holds the lock of a run folder.

    `key` is the config key that sets the folder. Commands that delete files set `to_free`, so that
    they continue without a lock if the disk is full and no live process holds the lock. `note` is a
    message about the previous holder. `lost_reason` is empty until a check finds that the lock was
    lost; it is then the error message.
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
        # A bucket path has all `Path` methods that this class calls.
        self.path = cast(Path, folder) / FILE if in_bucket(folder) else Path(folder) / FILE
        self._key, self._to_free = key, to_free
        self.note = self.lost_reason = ""
        self._folder = -1  # keep the folder open, so that the inode is not reused
        self._identity: tuple[int, int] | None = None
        self._token = secrets.token_hex(8)
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._released = threading.Event()
        # Some stores write in place, so the lock must not be read while a heartbeat writes it.
        self._access = threading.RLock()
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
                Code.CKPT_LOCKED,
                f"{self.path}: is not a valid lock file\n"
                f"  {root_cause_text(error)}.\n"
                "  Remove the file if no run uses the folder, and start again.",
            ) from error
        except OSError as error:
            self._close_folder()
            cause, action = OSError(root_cause_text(error)), remedy(self.path.parent, self._key)
            raise StorageError.unwritable(self.path, cause, action) from error
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
                # If the lock was lost, do not write to the folder, not even a claim, because it may
                # belong to another run.
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
            self.path.unlink()  # on a full disk, no other process can claim or replace the lock

    def _is_free(self) -> bool:
        """Return True if no lock exists, or if its holder was a process on this host that died."""
        try:
            holder = _read(self.path)
        except FileNotFoundError:
            return True
        return _is_on_this_host(holder) and bool(_dead_reason_on_this_host(holder))

    def _open_folder(self) -> None:
        """Create the folder and record its identity. No other method creates the folder."""
        folder = self.path.parent
        create_folder(folder)
        check_regular_files(folder, [FILE])
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._identity = _identity(os.fstat(self._folder))

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def check_held(self) -> bool:
        """Return whether this run still has its folder and lock, using only a few system calls.

        Temporary storage failures are ignored. A lost lock is never regained.
        """
        if not self.lost_reason:
            with self._access, contextlib.suppress(OSError), translate_bucket_errors(self.path):
                self.lost_reason = self._why_lost()
        return not self.lost_reason

    def check(self) -> None:
        """Check that this run still has its folder and lock. Must be called before every write.

        Raises:
            StorageError: the lock was lost.
        """
        self.check_held()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise an error, without I/O, if an earlier check found that the lock was lost.

        Raises:
            StorageError: the lock was lost.
        """
        if self.lost_reason:
            raise StorageError(Code.CKPT_LOCKED, self.lost_reason)

    def _why_lost(self) -> str:
        try:
            holder = _read(self.path)
        except _GONE:
            return self._why_folder_lost() or (
                f"{self.path}: no longer exists\n"
                "  the lock was moved or deleted while the run was using it. Another run may have "
                "started, so this run stopped writing.\n"
                "  Do not remove the lock of a running run. Start the same command again to "
                "resume from the newest checkpoint."
            )
        except _NotALockError as error:
            return self._why_folder_lost() or (
                f"{self.path}: is no longer the lock of this run\n"
                f"  {root_cause_text(error)}. The run stopped writing.\n"
                "  Remove the file, and start the same command again to resume from the newest "
                "checkpoint."
            )
        if (why := self._why_folder_lost()) or _token(holder) == self._token:
            return why
        return (
            f"{self.path}: was replaced by the lock of another run\n"
            f"  the lock now belongs to {_describe_holder(holder)}; this run sent no heartbeat for "
            f"more than {self._stale_seconds:.0f} s, or its lock was removed.\n"
            "  Let that run continue, or stop it and start this one again."
        )

    def _why_folder_lost(self) -> str:
        if self._identity is None:  # in a bucket
            return ""
        try:
            what = "is not the same folder as when the run started"
            if _identity(os.stat(self.path.parent)) == self._identity:
                return ""
        except _GONE:
            what = "was moved or deleted while the run was using it"
        return (
            f"{self.path.parent}: {what}\n"
            "  a run's folder must not be moved during the run. The run stopped writing to the old "
            "and the new folder.\n"
            f"  Move the original folder back, or set {self._key} to its new path, and start the "
            "same command again to resume from the newest checkpoint."
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
        raise OSError(f"other processes held the lock at each of {_ATTEMPTS} attempts")

    def _take_over(self) -> bool:
        """Try to replace the lock of a dead process, and return whether this was successful."""
        candidate = self.path.with_name(f"{FILE}.{self._token}")
        try:
            _write(candidate, self._token)
            holder = _read(self.path)
            if _token(holder) == self._token:  # an earlier attempt at this write succeeded
                return True
            if not (reason := self._why_dead(holder, candidate)):
                return False
            with _claim(self.path, _token(holder)) as claimed:
                if not claimed or _token(_read(self.path)) != _token(holder):
                    return False
                if in_bucket(self.path):
                    self.path.write_text(candidate.read_text())
                else:
                    os.replace(candidate, self.path)
        except FileNotFoundError:  # the holder released the lock in the meantime
            return False
        finally:
            candidate.unlink(missing_ok=True)
        self.note = f"{self.path} was left by {_describe_holder(holder)}: {reason}"
        return True

    def _why_dead(self, holder: LockContent, candidate: Path) -> str:
        """Return why the holder is considered dead, or "" if another process has acquired the lock.
        This method waits until it is known whether the holder is alive. The modification time of
        the file `candidate` gives the current time on the file system's clock.

        Raises:
            StorageError: the holder is alive.
        """
        stamp, is_logged, begin = _heartbeat_stamp(self.path), False, time.monotonic()
        age = before = max(0.0, _heartbeat_stamp(candidate)[0] - stamp[0])
        while True:
            if _is_on_this_host(holder):
                if reason := _dead_reason_on_this_host(holder):
                    return reason
                break
            if _token(_read(self.path)) != _token(holder):
                return ""
            # Read the heartbeat before the clock, because the clock advances while this process is
            # stopped.
            if _heartbeat_stamp(self.path) != stamp:
                age = 0.0
                break
            if age > self._stale_seconds:
                return f"no heartbeat for {age:.0f} s"
            if not is_logged:
                is_logged = True
                _LOG.warning(
                    "%s is held by %s, last heartbeat %.0f s ago; waiting for the next heartbeat, "
                    "or until %.0f s have passed without one",
                    self.path,
                    _describe_holder(holder),
                    age,
                    self._stale_seconds,
                )
            time.sleep(min(1.0, self._beat_seconds / 2))
            age = before + time.monotonic() - begin
        raise StorageError(
            Code.CKPT_LOCKED,
            f"{self.path.parent}: is in use by another run\n"
            f"  {_describe_holder(holder)}; last heartbeat {age:.0f} s ago.\n"
            "  Stop that run, or set run.name to a new name.",
        )

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            # Do not refresh a lock that another process has replaced.
            with self._access:
                if self.check_held():
                    with contextlib.suppress(OSError), translate_bucket_errors(self.path):
                        _touch(self.path)


def _write(path: Path, token: str) -> None:
    """Create the lock file.

    Raises:
        FileExistsError: the file exists.
    """
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
    if in_bucket(path):  # an object's modification time changes only when it is written
        path.write_text(path.read_text())
        return
    before = _heartbeat_stamp(path)
    with contextlib.suppress(OSError):  # some file systems do not allow setting times
        os.utime(path)
    if _heartbeat_stamp(path) == before:  # change the size instead: JSON allows trailing blanks
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)


def _heartbeat_stamp(path: Path) -> tuple[float, int]:
    """Return the modification time and size; every heartbeat changes at least one of them."""
    if in_bucket(path):
        return modified_seconds(path), epath.Path(path).stat().length
    stat = os.stat(path)
    return stat.st_mtime, stat.st_size


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _read(path: Path) -> LockContent:
    """Read a lock file; return `_UNREADABLE` if its content is not a valid lock.

    Raises:
        _NotALockError: the file is a pipe, a folder or too large, and waiting would not help.
        OSError: the file cannot be read.
    """
    try:
        if not in_bucket(path):
            return parse_json(read(path, _MAX_BYTES), LockContent)
        with path.open("rb") as file:
            return parse_json(file.read(_MAX_BYTES), LockContent)
    except ValueError:
        return _UNREADABLE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise _NotALockError(error.errno, error.strerror) from error
        raise


def _token(holder: LockContent) -> str:
    token = holder["token"]
    return token if token.isalnum() and len(token) <= _MAX_SHOWN_CHARS else "unknown"


def _describe_holder(holder: LockContent) -> str:
    run, host, pid, started = (
        "".join(c if c.isprintable() else "?" for c in str(holder.get(key, "?"))[:_MAX_SHOWN_CHARS])
        for key in ("run", "host", "pid", "started")
    )
    return f"run {run} on host {host}, process {pid}, started {started}"


def _is_on_this_host(holder: LockContent) -> bool:
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
        return "that process is dead, and another process reused its PID"
    return ""


def _namespace() -> str | None:
    """Return the PID namespace, which distinguishes containers with the same host name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot.

    The result is "" if the process does not exist, and None if the start time cannot be determined.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    # The program name, in parentheses, may contain any character.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextlib.contextmanager
def _claim(lock: Path, token: str) -> Iterator[bool]:
    """Claim the right to replace or remove this lock; yield True in only one process."""
    path = lock.with_name(f"{FILE}.claim-{token}")
    try:
        with contextlib.suppress(FileNotFoundError):
            # A live process releases its claim within milliseconds. A claim whose modification time
            # is in the future was created before the file system's clock was set back. Host clocks
            # may differ, so the current time is read from the modification time of a new file.
            probe = lock.with_name(f"{FILE}.time-{secrets.token_hex(8)}")
            _write(probe, "now")
            try:
                now = _heartbeat_stamp(probe)[0]
            finally:
                probe.unlink()
            if abs(now - _heartbeat_stamp(path)[0]) > _CLAIM_SECONDS:
                path.unlink()
        _write(path, secrets.token_hex(8))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
