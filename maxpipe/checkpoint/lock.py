"""One run per folder: a lock that says who holds it, and that a dead holder loses.

`lock.json` names run, host and process. Its time of change is the heartbeat, refreshed
by a thread. A lock is taken over when its process is dead on this host, or when it is of
another host and its heart has not beaten for `STALE_SECONDS`; a start waits to see whether
it does, so that a run whose host was lost can be restarted at once. Ages are differences
between times that the file system itself has given: clocks of hosts need not agree.

Taking over (and releasing) is done under a claim, a file named after the lock's token
that only one process can create: of two that find the same dead lock, one gets it.

In a bucket all this is the same, but for a time of change, which only writing anew refreshes.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, cast

from etils import epath

from maxpipe.checkpoint.place import create, first_line, in_bucket, located, reaching, remedy
from maxpipe.errors import StorageError

FILE = "lock.json"
BEAT_SECONDS = 30.0
STALE_SECONDS = 150.0
"""After five beats that did not come."""

_LOG = logging.getLogger(__name__)
_CLAIM_SECONDS = 60.0
_ATTEMPTS, _PAUSE_SECONDS = 20, 0.05


class RunLock:
    """Held between `__enter__` and `__exit__`; `note` is what to tell about its last holder.

    `key` of the config led to the folder.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        *,
        key: str = "run.dir",
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        folder = located(run_dir)
        # In a bucket it has the methods of a Path that are used here, but for those below.
        self.path = cast(Path, folder) / FILE if in_bucket(folder) else Path(folder) / FILE
        self._key = key
        self.note = ""
        self._token = secrets.token_hex(8)
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> RunLock:
        try:
            with reaching(self.path):
                if not in_bucket(self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                self._acquire()
        except OSError as error:
            said = OSError(first_line(error))
            action = remedy(self.path, self._key)
            raise StorageError.unwritable(self.path, said, action) from error
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._released.set()
        self._heart.join()
        with (
            contextlib.suppress(OSError),
            reaching(self.path),
            _claim(self.path, self._token) as claimed,
        ):
            if claimed and _token(_read(self.path)) == self._token:
                self.path.unlink()

    def check(self) -> None:
        """Ask whether the lock is still ours: a process that was stopped for long has lost it.

        Raises:
            StorageError: another run has taken the folder over.
        """
        try:
            with reaching(self.path):
                holder = _read(self.path)
        except OSError:  # storage that is away for a moment says nothing about who holds it
            return
        if _token(holder) != self._token:
            raise StorageError(
                f"{self.path}: was taken over by another run\n"
                f"  it is held by {_words(holder)} now; this one gave no sign of life for more "
                f"than {self._stale_seconds:.0f} s.\n"
                "  Let that run go on, or stop it and start this one again."
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
        """Whether the lock was dead and is ours now; False when it is gone or someone is faster."""
        mine = self.path.with_name(f"{FILE}.{self._token}")
        try:
            _write(mine, self._token)
            holder = _read(self.path)
            if _token(holder) == self._token:  # a request was repeated that had been heard
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
        self.note = f"{self.path} was left behind by {_words(holder)}: {reason}"
        return True

    def _why_dead(self, holder: dict[str, Any], mine: Path) -> str:
        """The reason, empty when someone else has the lock now. `mine` tells the time.

        Waits as long as the holder may be dead or alive.

        Raises:
            StorageError: the holder lives.
        """
        beat, told = _beaten(self.path), False
        while True:
            _touch(mine)
            age = max(0.0, _beaten(mine) - beat)
            if _is_here(holder):
                if reason := _why_dead_here(holder):
                    return reason
                break
            if age > self._stale_seconds:
                return f"no sign of life for {age:.0f} s"
            if _token(_read(self.path)) != _token(holder):
                return ""
            if _beaten(self.path) != beat:
                age = 0.0
                break
            if not told:
                told = True
                _LOG.warning(
                    "%s is held by %s, last sign of life %.0f s ago; waiting for another one, or "
                    "%.0f s of silence",
                    self.path,
                    _words(holder),
                    age,
                    self._stale_seconds,
                )
            time.sleep(min(1.0, self._beat_seconds / 2))
        raise StorageError(
            f"{self.path.parent}: is in use by another run\n"
            f"  {_words(holder)}; last sign of life {age:.0f} s ago.\n"
            "  Stop that run, or set run.name to a new name."
        )

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            # A lock that was taken over is not ours to keep alive.
            with contextlib.suppress(OSError), reaching(self.path):
                if _token(_read(self.path)) == self._token:
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
    if in_bucket(path):  # whose time is that of writing
        path.write_text(path.read_text())
    else:
        os.utime(path)


def _beaten(path: Path) -> float:
    """When the file was last touched, by the clock of what holds it."""
    return epath.Path(path).stat().mtime if in_bucket(path) else os.stat(path).st_mtime


def _replace(mine: Path, path: Path) -> None:
    if in_bucket(path):
        path.write_text(mine.read_text())
    else:
        os.replace(mine, path)


def _read(path: Path) -> dict[str, Any]:
    """What a lock says; nothing, of one that is not readable as a lock."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _token(holder: dict[str, Any]) -> str:
    token = holder.get("token")
    return token if isinstance(token, str) and token.isalnum() else "unknown"


def _words(holder: dict[str, Any]) -> str:
    return (
        f"run {holder.get('run', '?')} on host {holder.get('host', '?')}, process "
        f"{holder.get('pid', '?')}, started {holder.get('started', '?')}"
    )


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether the number of the lock's process means something on this machine."""
    return (
        isinstance(holder.get("pid"), int)
        and holder.get("host") == platform.node()
        and holder.get("namespace") == _namespace()
    )


def _why_dead_here(holder: dict[str, Any]) -> str:
    start = _process_start(holder["pid"])
    if start == "" or (start is None and not _lives(holder["pid"])):
        return "that process is dead"
    if start != holder.get("process_start"):
        return "that process is dead, and another one has its number"
    return ""


def _namespace() -> str | None:
    """What the number of a process refers to: containers of one host may share its name."""
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
    # The name of the program, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _now_at(lock: Path) -> float:
    """The time by the clock that marks files there: those of hosts need not agree."""
    probe = lock.with_name(f"{FILE}.time-{secrets.token_hex(8)}")
    _write(probe, "now")
    try:
        return _beaten(probe)
    finally:
        probe.unlink()


@contextlib.contextmanager
def _claim(lock: Path, token: str) -> Iterator[bool]:
    """True inside for the one process that may replace or remove the lock with this token."""
    path = lock.with_name(f"{FILE}.claim-{token}")
    try:
        with contextlib.suppress(FileNotFoundError):
            # Whoever claims is done in milliseconds, or dead.
            begun = _beaten(path)
            if _now_at(lock) - begun > _CLAIM_SECONDS:
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
