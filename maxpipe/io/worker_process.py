"""A worker subprocess that reads one request per line on stdin and writes one response per line.

Callers never hang: a worker that exits or exceeds its time or output limit raises an error.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence

_READ_BYTES = 1 << 16


class WorkerProcess:
    """A worker subprocess that responds to requests. The class is not thread-safe. The subprocess
    is terminated when the object is garbage-collected.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        most_answer_bytes: int,
        shows_errors: bool = False,
        own_session: bool = False,
    ):
        """Start the worker process.

        If `shows_errors` is set, the worker's stderr is shown to the user. If `own_session` is set,
        the worker does not receive signals that the terminal or cluster sends to this process.
        """
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
            start_new_session=own_session,
        )
        self.close = weakref.finalize(self, _terminate, self._process)
        """Function that terminates the worker process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._max_response_bytes = most_answer_bytes

    @property
    def is_alive(self) -> bool:
        """True if the worker process accepts further requests."""
        return self.close.alive

    @property
    def exit_code(self) -> int | None:
        """Exit code of the worker process, or the negated number of the signal that terminated it.
        None while the process is running.
        """
        return self._process.poll()

    def kill(self) -> None:
        """Kill the worker process from any thread. A pending request raises OSError."""
        self._process.kill()

    def request(self, line: bytes, seconds: float) -> bytes:
        """Write a request line and return the response line.

        Raises:
            TimeoutError: no complete response arrives within `seconds`.
            OSError: the process has exited.
            ValueError: the response exceeds the size limit.
        """
        deadline = time.monotonic() + seconds
        parts, size, left = [], 0, memoryview(line)
        with selectors.DefaultSelector() as ready:
            ready.register(self._out, selectors.EVENT_READ)
            ready.register(self._in, selectors.EVENT_WRITE)
            while True:
                events = ready.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise TimeoutError
                for key, _ in events:
                    if key.fd == self._in:
                        left = left[os.write(self._in, left[:_READ_BYTES]) :]
                        if not left:
                            ready.unregister(self._in)
                        continue
                    part = os.read(self._out, _READ_BYTES)
                    size += len(part)
                    if not part:
                        raise OSError("it has ended")
                    if size > self._max_response_bytes:
                        raise ValueError("its response is too long")
                    parts.append(part)
                    if part.endswith(b"\n"):
                        return b"".join(parts)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()
