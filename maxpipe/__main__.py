"""Entry point of `maxpipe` and `python -m maxpipe`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

_SUPPRESSED_CALLBACKS = {"_xla_gc_callback", "__del__"}
"""Callbacks and finalizers that Python may call at any point in the code. Python discards their
exceptions."""
_UNSAFE_CODE = ("<frozen importlib", os.path.join("jax", "_src", "compiler.py"))
"""Code where an exception would crash Python: imports of native modules, and jax's compiler,
because partially compiled programs crash when the traceback is released."""
_RESUMABLE = (["train"], ["data", "prepare"])
"""Commands that resume if they are run again after a stop."""
_PROFILED = (["train"], ["launch"])
"""Commands that SIGUSR1 must never end. A running step handles the signal, and it is ignored during
the start and the end of the command."""


def main() -> int:
    """Run the command and return its exit code. Ctrl-C never prints a traceback."""
    code = 128 + signal.SIGINT
    ends: list[int] = []
    atexit.register(_end_now, ends)  # registered first, so it runs last
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else SIGINT is ignored
        signal.signal(signal.SIGINT, handle_interrupt)
    if any(sys.argv[1 : 1 + len(words)] == words for words in _RESUMABLE):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # otherwise, the signal is ignored
                signal.signal(number, handle_stop)
    number = getattr(signal, "SIGUSR1", None)  # Windows has no such signal
    if number and sys.argv[1:2] in _PROFILED and signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, signal.SIG_IGN)
    try:
        from maxpipe import cli

        code = cli.main()
    except KeyboardInterrupt:
        pass
    if signal.getsignal(signal.SIGINT) == handle_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise, Python prints a traceback
    if code == 128 + signal.SIGINT:
        ends.append(code)
    return code


def _end_now(codes: list[int]) -> None:
    """Exit immediately with the first exit code in `codes`; do nothing if the list is empty.

    After an interrupt, some jax objects remain and would crash Python when modules are unloaded at
    exit.
    """
    if codes:
        os._exit(codes[0])


def handle_stop(number: int, frame: FrameType | None) -> None:
    """Exit with code 75 if a signal arrives before the command starts its work or after it
    finishes.

    While the command works, its own signal handlers are active.
    """
    text = b"stop requested\n  There is nothing new to save. Run the same command again.\n"
    with contextlib.suppress(OSError):
        os.write(2, text)
    os._exit(75)  # `ExitCode.PREEMPTED`, which may not be imported yet


def handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt where the exception can propagate; otherwise exit.

    During the import of a native module, the exception becomes an ImportError or crashes Python.
    Commands that save their state install their own handlers.
    """
    while frame is not None:
        code = frame.f_code
        if (
            any(each in code.co_filename for each in _UNSAFE_CODE)
            or code.co_name in _SUPPRESSED_CALLBACKS
        ):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
