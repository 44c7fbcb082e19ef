"""Progress output of long commands."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any, Self

from maxpipe.errors import StorageError
from maxpipe.io import redact

_LINE_SECONDS = 5.0
_PHASE_SECONDS = 10.0


def print_line(text: str) -> None:
    """Print a line; the command continues if the reader of its output has exited.

    Raises:
        StorageError: standard output cannot be written, for example on a full disk.
    """
    try:
        print(redact.redact_for_terminal(text), flush=True)
    except BrokenPipeError:
        pass  # the reader may be `head`, but the command must still finish
    except OSError as error:
        action = "Free space there, or redirect the output."
        raise StorageError.unwritable("standard output", error, action) from error


class ProgressBar:
    """A progress bar on a terminal, or a line every few seconds otherwise, on standard error."""

    def __init__(self, unit: str = "") -> None:
        self._unit = unit
        self._bar: Any = None
        self._task: Any = None
        self._name = self._of = ""
        self._next = time.monotonic() + _LINE_SECONDS
        self._start = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import TextColumn

            columns = (*Bar.get_default_columns(), TextColumn("{task.fields[remark]}"))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()

    def report(self, task: str, done: int, total: int, remark: str = "") -> None:
        """Show the progress of a task, with a note such as the rate.

        An empty name means the previous task. A total of 0 means that the total is unknown.
        """
        if task:
            self._name, self._of = task, f"{done} of {total}{self._unit}, " if total else ""
            self._of += f"{remark}, " if remark else ""
        if self._bar is not None:
            if task and (self._task is None or task != self._bar.tasks[-1].description):
                self._task = self._bar.add_task(task, total=total or None, remark="")
            if task:
                self._bar.update(self._task, completed=done, remark=remark)
        elif self._name and (now := time.monotonic()) >= self._next:
            self._next = now + _LINE_SECONDS
            line = f"{self._name}: {self._of}{now - self._start:.0f} s"
            with contextlib.suppress(OSError):  # stderr is closed
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the progress bar."""
        if self._bar is not None:
            self._bar.stop()


class PhaseProgress:
    """Show the phase and elapsed time of a command with an unknown amount of work.

    A terminal shows one line that is updated in place. Other output gets one line every ten
    seconds. A thread prints the lines, because a phase is one long call into the compiler.
    """

    def __init__(self, command: str) -> None:
        self._command, self._phase = command, "starting"
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, phase: str) -> None:
        """Start a phase with this name."""
        self._phase = phase

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        is_terminal = sys.stderr.isatty()
        while not self._ended.wait(1.0 if is_terminal else _PHASE_SECONDS):
            self._write(f"\r\x1b[K{self._line()}" if is_terminal else f"{self._line()}\n")
        if is_terminal:
            self._write("\r\x1b[K")

    def _line(self) -> str:
        return f"{self._command}: {self._phase}, {time.monotonic() - self._start:.0f} s"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(text)
            sys.stderr.flush()
