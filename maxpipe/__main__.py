"""The `maxpipe` command, and `python -m maxpipe`, which is the same."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command; Ctrl-C ends it without a traceback, wherever it is."""
    code = 128 + signal.SIGINT
    try:
        from maxpipe import cli

        code = cli.main()
    except KeyboardInterrupt:
        pass
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would say what it was cleaning up
    return code


if __name__ == "__main__":
    sys.exit(main())
