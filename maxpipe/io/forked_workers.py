"""Call a function in forked processes, because Python threads cannot compute in parallel.

Forked processes inherit the function and its data, so nothing needs to be pickled and no module is
imported again. The function must not use libraries whose threads do not survive a fork, such as jax
and tensorstore.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import queue
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from maxpipe.errors import Code, ConfigError


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ForkedWorkers:
    """A pool of forked processes. `call` is thread-safe."""

    def __init__(self, function: Callable[[Any], Any], count: int):
        """Fork `count` processes, which call `function` with the arguments of `call`."""
        context, self.count = multiprocessing.get_context("fork"), count
        self._processes: list[Any] = []
        self._idle: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_serve, args=(function, theirs, self._connections), daemon=True
            )
            with warnings.catch_warnings():
                # Python 3.12 and jax warn of forks, because locks of other threads stay locked.
                warnings.simplefilter("ignore")
                process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.put((ours, process))

    def call(self, argument: Any) -> Any:
        """Return the result of the function, computed by an idle worker.

        Raises:
            OSError: the worker has ended, for example because memory is exhausted.
            Exception: the function raised an exception.
        """
        connection, process = self._idle.get()
        try:
            connection.send(argument)
            is_result, value = connection.recv()
        except (EOFError, OSError) as error:
            process.join(1)
            text = f"a worker process ended with exit code {process.exitcode}"
            raise OSError(errno.ECHILD, f"{text}; the machine may be out of memory") from error
        finally:
            self._idle.put((connection, process))
        if is_result:
            return value
        raise ConfigError(value) if isinstance(value, list) else value

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(
    function: Callable[[Any], Any], connection: Connection, inherited: list[Connection]
) -> None:
    """Respond to calls until the parent process closes its connection or ends."""
    # The terminal sends Ctrl-C to all processes. The parent process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection would copy the inherited pages
    for other in inherited:  # otherwise, the connections would outlive the parent process
        other.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            argument = connection.recv()
            try:
                answer = True, function(argument)
            except ConfigError as error:  # pickling the error would lose its problems
                answer = False, [*error.problems]
            except Exception as error:
                answer = False, _portable(error)
            connection.send(answer)
    os._exit(0)  # the parent process runs the exit handlers


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError if a connection cannot restore its type."""
    try:
        type(error)(*error.args)
        if all(isinstance(part, str | int | Code | None) for part in error.args):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
