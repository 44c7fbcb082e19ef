"""The `maxpipe` command, and `python -m maxpipe`, which is the same."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_DROPS_ERRORS = {"_xla_gc_callback", "__del__"}
"""Python calls these between any two lines, and drops what they raise."""


def main() -> int:
    """Runs the command; Ctrl-C ends it without a traceback, wherever it is."""
    code = 128 + signal.SIGINT
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, interrupted)
    try:
        from maxpipe import cli

        code = cli.main()
    except KeyboardInterrupt:
        pass
    if signal.getsignal(signal.SIGINT) == interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Python prints a traceback
    return code


def interrupted(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt where that propagates; elsewhere it ends the process.

    A native module that is being imported turns the exception into an ImportError, or crashes.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name in _DROPS_ERRORS:
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
