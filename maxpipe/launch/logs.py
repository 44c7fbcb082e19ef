"""Log files of processes, one for each over all attempts."""

from __future__ import annotations

import codecs
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from maxpipe.errors import StorageError
from maxpipe.io import files

_MAX_LINES = 40
_MOST_BYTES = 1 << 28
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*$", re.MULTILINE
)
_EXPLAINED = re.compile(r"(?:^\S.*\n(?:  \S.*\n){2,})+", re.MULTILINE)
"""Errors of four parts in three lines: where and what, rule, action."""


class Log:
    """One process's file; the newest attempt begins at its header."""

    def __init__(self, path: Path):
        self.path = path
        self._start = 0

    def begin(self, attempt: int, command: str) -> BinaryIO:
        """The file to append to, after a header line.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(files.opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
            self._start = file.tell()
            header = f"=== {datetime.now():%Y-%m-%d %H:%M:%S} attempt {attempt}: {command}\n"
            file.write(header.encode())
            file.flush()
        except OSError as error:
            raise StorageError.unwritable(self.path, error) from error
        self._start += len(header.encode())
        return file

    def text(self) -> str:
        """The output of the newest attempt."""
        with open(files.opened(self.path), "rb") as file:
            file.seek(self._start)
            return file.read(_MOST_BYTES).decode(errors="replace")

    def first_error(self) -> str:
        """The first traceback or explained error of the newest attempt, else its last lines."""
        text = self.text()
        found = min(
            filter(None, (_TRACEBACK.search(text), _EXPLAINED.search(text))),
            key=lambda match: match.start(),
            default=None,
        )
        lines = (found[0] if found else "\n".join(text.splitlines()[-10:])).rstrip().splitlines()
        if len(lines) > _MAX_LINES:
            lines = [*lines[: _MAX_LINES // 2], "  ...", *lines[-_MAX_LINES // 2 :]]
        return "\n".join(lines)

    def follow(self) -> Follower:
        """Shows the output of the newest attempt."""
        return Follower(self.path, self._start)


class Follower:
    """Copies what is appended to a file to this process's stdout."""

    def __init__(self, path: Path, start: int):
        self._file = os.fdopen(files.opened(path), "rb")
        self._file.seek(start)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def copy(self) -> None:
        """Shows what is new."""
        new = self._file.read()
        if not new:
            return
        try:
            sys.stdout.write(self._decode(new))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader is gone; the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Shows the rest."""
        self.copy()
        self._file.close()
