"""A folder that a command fills file by file; after a stop the same command goes on.

A file that is on the disk is entered in a journal; what is behind the last entry is done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from maxpipe.checkpoint.address import check_outside
from maxpipe.data.prepared.manifest import JOURNAL
from maxpipe.errors import ConfigError, Interrupted, Preempted
from maxpipe.io import files
from maxpipe.io.signed import signed

OUT = "command line: --out"
_LONGEST_LINE = 1 << 24


def check_folder(folder: Path, manifest: str) -> None:
    """Raises ConfigError if something else is there than what has, or will have, this manifest."""
    check_outside(folder, OUT)
    if not os.path.lexists(folder):
        return
    action = f"Name another folder, such as --out {other(folder)}."
    if not folder.is_dir():
        raise ConfigError.one(OUT, folder, "is there already, and is no folder.", action)
    names = os.listdir(folder)
    if names and manifest not in names and JOURNAL not in names:
        rule = f"must be new or empty, or prepared by this command: it has {sorted(names)[0]}."
        raise ConfigError.one(OUT, folder, rule, action)


def other(folder: Path) -> str:
    """The name of another folder, for advice."""
    return f"{folder}-2" if folder.name not in ("", "..") else "tokens"


def elsewhere(folder: Path) -> str:
    """What to do about a folder that holds something else."""
    return f"Name another folder, such as --out {other(folder)}, or remove this one."


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[BinaryIO]:
    """The journal, for one process at a time."""
    with open(files.opened(folder / JOURNAL, os.O_RDWR | os.O_CREAT), "r+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            rule = "is being prepared by another process."
            action = "Wait for it, or name another folder with --out."
            raise ConfigError.one(OUT, folder, rule, action) from error
        yield journal


def resume(
    journal: BinaryIO, begin: Callable[[bytes], object], add: Callable[[bytes], object]
) -> bool:
    """Whether the journal has begun; `begin` takes its first line, and `add` each other one.

    Ends it in front of a line for which they raise OSError or ValueError.
    """
    end = 0
    while line := journal.readline(_LONGEST_LINE):
        # A kill or a power failure leaves half a line, or files that have lost their end.
        try:
            if not line.endswith(b"\n"):
                break
            add(line) if end else begin(line)
        except (OSError, ValueError):
            break
        end += len(line)
    journal.truncate(end)
    return bool(end)


def enter(journal: BinaryIO, line: Mapping[str, Any]) -> None:
    """Appends a line, and brings it to the disk."""
    journal.seek(0, os.SEEK_END)
    journal.write(signed(line, indent=None).encode() + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


class _Terminated(BaseException):
    """SIGTERM or SIGHUP. Nothing takes it for a failure of what it interrupts."""


@contextlib.contextmanager
def stops(folder: Path) -> Iterator[None]:
    """Turns SIGTERM, SIGHUP and Ctrl-C into errors that say how to go on."""
    words = f"{folder}: preparing was stopped\n  Shards that are complete are kept.\n"
    words += "  Run the same command again: it goes on behind them."

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # An ignored signal stays ignored: that of a closed terminal, by `nohup`.
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield
    except _Terminated:
        raise Preempted(words) from None
    except KeyboardInterrupt:
        raise Interrupted(words) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bring_to_disk(folder: Path) -> None:
    """The names of its files."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
