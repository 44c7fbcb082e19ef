"""The `maxpipe` command, and `python -m maxpipe`, which is the same."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

_SUPPRESSED_CALLBACKS = {"_xla_gc_callback", "__del__"}
"""Python calls these between any two lines, and drops what they raise."""
_UNSAFE_CODE = ("<frozen importlib", os.path.join("jax", "_src", "compiler.py"))
"""Code in which an exception crashes Python: imports of native modules, and the compiler of jax,
whose half-made programs crash when a traceback lets go of them."""
_RESUMABLE = (["train"], ["data", "prepare"])
"""Commands that go on where they were stopped."""


def main() -> int:
    """Runs the command; Ctrl-C ends it without a traceback, wherever it is."""
    code = 128 + signal.SIGINT
    ends: list[int] = []
    atexit.register(_end_now, ends)  # the first of these functions runs last
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, handle_interrupt)
    if any(sys.argv[1 : 1 + len(words)] == words for words in _RESUMABLE):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # else it is ignored
                signal.signal(number, handle_stop)
    try:
        from maxpipe import cli

        code = cli.main()
    except KeyboardInterrupt:
        pass
    if signal.getsignal(signal.SIGINT) == handle_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Python prints a traceback
    if code == 128 + signal.SIGINT:
        ends.append(code)
    return code


def _end_now(codes: list[int]) -> None:
    """Ends an interrupted process with this code, if there is one.

    Where jax was interrupted it leaves objects behind that crash while Python takes modules apart.
    """
    if codes:
        os._exit(codes[0])


def handle_stop(number: int, frame: FrameType | None) -> None:
    """Ends the process with the code of a stop: nothing is begun yet, or all is done.

    In between the command has handlers of its own.
    """
    text = b"asked to stop\n  Nothing is lost. Run the same command again to go on.\n"
    with contextlib.suppress(OSError):
        os.write(2, text)
    os._exit(75)  # `ExitCode.PREEMPTED`, which is perhaps not imported yet


def handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt where that propagates; elsewhere it ends the process.

    A native module that is being imported turns the exception into an ImportError, or crashes.
    Commands that have something to save have handlers of their own.
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
