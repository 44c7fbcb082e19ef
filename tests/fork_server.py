"""A process that has imported maxpipe, and forks to run each maxpipe command.

Importing jax and orbax takes most of the time of a small run. No backend of jax is started here,
because a backend does not survive a fork. Each line of standard input is a request.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

MODULES = (
    "jax",
    "orbax.checkpoint",
    "maxpipe.cli",
    "maxpipe.train.loop",
    "maxpipe.train.run",
    "maxpipe.evals.evaluate",
    "maxpipe.generation.completions",
    "maxpipe.api.generation",
)
HASH_SEEDS = (1, 2)
"""Values of PYTHONHASHSEED, each with a different iteration order of string sets."""

_PROGRAM = "from tests.fork_server import serve; serve()"
"""This file is not the main module, because the command's module would replace its names."""


class ServerError(RuntimeError):
    """Raised if a fork server has ended, so that it cannot run a command."""


@dataclass
class ForkServer:
    """Runs one command at a time."""

    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls,
        environment: Mapping[str, str],
        modules: Sequence[str] = MODULES,
        prefix: Sequence[str] = (),
    ) -> ForkServer:
        """Start the process, which imports `modules`.

        Variables that Python or jax read at start or import are taken from `environment`. `prefix`
        is a command that runs the server, such as `unshare`.
        """
        process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-c", _PROGRAM, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment},
        )
        return cls(process)

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        seconds: int,
        module: str = "maxpipe",
        file_bytes: int = 0,
    ) -> int:
        """Run `python -m module` with its output in a file, and return the exit code.

        The code is negative after a signal. After `seconds`, SIGALRM ends the command. Unless it
        is 0, `file_bytes` limits the size of each file that the command writes.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        request = [module, [*arguments], {**environment}, os.getcwd(), str(output), seconds]
        request += [file_bytes]
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            return int(answer)
        code = self.process.wait(timeout=60)
        words = " ".join((module, *arguments))
        raise ServerError(
            f"the fork server has ended with exit code {code}, and cannot run: {words}"
        )

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=60)


@contextlib.contextmanager
def running_servers(
    environment: Mapping[str, str], modules: Sequence[str] = MODULES
) -> Iterator[Callable[[], ForkServer]]:
    """Yield a function that returns the servers of `HASH_SEEDS` in turn.

    Each server is started when it is first needed.
    """
    servers: dict[int, ForkServer] = {}
    seeds = itertools.cycle(HASH_SEEDS)

    def next_server() -> ForkServer:
        seed = next(seeds)
        if seed not in servers:
            seeded = {**environment, "PYTHONHASHSEED": str(seed)}
            servers[seed] = ForkServer.start(seeded, modules)
        return servers[seed]

    try:
        yield next_server
    finally:
        for server in servers.values():
            server.close()


def _become_command(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    output: str,
    seconds: int,
    file_bytes: int,
) -> NoReturn:
    """Run the module in this forked process, and exit.

    `sys.stdout` and `sys.stderr` are the streams that Python opened for pipes, as in a process
    without a fork.
    """
    os.setsid()
    signal.alarm(seconds)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(opened, number)
    os.close(opened)
    sys.argv = ["-m", *arguments]
    sys.path.insert(0, folder)
    error = None
    try:
        runpy._run_module_as_main(module)  # pyright: ignore[reportAttributeAccessIssue]
    except BaseException as caught:
        error = caught
    _end_process(error)


def _end_process(error: BaseException | None) -> NoReturn:
    """Exit like Python after its main module has raised `error`."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code if error.code is not None else 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    elif error is not None:
        frames = (
            error.__traceback__ and error.__traceback__.tb_next
        )  # without the frame of this file
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = 1
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    except BaseException:  # an interrupt
        traceback.print_exc()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as closed:
        print(f"Exception ignored in: {sys.stdout!r}", file=sys.stderr)
        traceback.print_exception(closed.with_traceback(None))
        code = 120
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _run_child(request: list[Any], pipes: Sequence[IO[str]]) -> int:
    """Run a request in a forked process, kill its child processes, and return the exit code."""
    child = os.fork()
    if not child:
        for pipe in pipes:
            pipe.close()
        _become_command(*request)
    try:
        _, status = os.waitpid(child, 0)
    finally:  # the child has its own session
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        *_, output, seconds, _ = request
        with open(output, "a", encoding="utf-8") as file:
            file.write(f"\nthe fork server ended the command after {seconds} seconds\n")
    return code


def serve() -> None:
    """Import the modules named in the arguments, and run requests until the input ends."""
    # Requests use separate file descriptors; the streams of `sys` are reserved for the command.
    requests, answers = open(os.dup(0)), open(os.dup(1), "w")  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    for line in requests:
        print(_run_child(json.loads(line), (requests, answers)), file=answers, flush=True)
