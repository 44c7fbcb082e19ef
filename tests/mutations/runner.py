"""Run commands in processes that are forked from one that has imported maxpipe.

Importing JAX and Orbax takes seconds; rejecting a mutated config takes milliseconds. Nothing here
starts a JAX backend, which would not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CODES = {0, 1, 2, 71, 74, 75}
"""Allowed exit codes; 1 is the code of `checkpoints diff --exit-code`."""
MOST_CPU_SECONDS = 60
MOST_BYTES = 2 << 30
_MOST_SECONDS = 180
_MOST_ADDRESSES = 24 << 30
"""Address-space limit in bytes, so that a command cannot use all memory of the machine."""
_IMPORTED = ("jax", "orbax.checkpoint", "maxpipe.cli", "maxpipe.commands.eval")
_IMPORTED += ("maxpipe.generation.completions", "maxpipe.train.loop")
MOST_OUTPUT = 200_000
"""Maximum output in bytes."""


@dataclass(frozen=True)
class Outcome:
    """Exit code, resource use and output of one command."""

    code: int
    """Negative if a signal ended the process."""
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str

    @property
    def fault(self) -> str:
        """Return a description of the fault, or an empty string."""
        if self.code not in CODES:
            return f"exit code {self.code}"
        if "Traceback (most recent call last)" in self.output:
            return "traceback"
        if self.cpu_seconds > MOST_CPU_SECONDS:
            return f"{self.cpu_seconds:.0f} s of CPU"
        if self.peak_bytes > MOST_BYTES:
            return f"{self.peak_bytes / 2**30:.1f} GiB"
        if len(self.output) > MOST_OUTPUT:
            return f"{len(self.output)} bytes of output"
        bad = {each for each in self.output if not each.isprintable()} - {"\n", "\r", "\t"}
        if bad - ({"\x1b"} if "\x1b" not in self.output.replace("\x1b[", "") else set()):
            return f"control characters: {sorted(bad)}"
        return ""


def prepare() -> None:
    """Import the modules that commands import."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.conftest import FAST_COMPILE

    os.environ.update(FAST_COMPILE)
    for name in _IMPORTED:
        importlib.import_module(name)


def run(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run one command in a folder, which is also its home directory."""
    path = folder.parent / f"{folder.name}.output"
    started = time.monotonic()
    child = os.fork()
    if not child:
        _become(folder, path, arguments)
    status, usage = _waited(child, started + _MOST_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # processes that it left behind
    output = path.read_bytes().decode(errors="backslashreplace")
    path.unlink()
    code = os.waitstatus_to_exitcode(status)
    if output and time.monotonic() - started > _MOST_SECONDS:
        output += "\nended by the harness: it took too long"
    return Outcome(
        code,
        time.monotonic() - started,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        output,
    )


def _waited(child: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    pause = 0.002
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)


def _become(folder: Path, output: Path, arguments: Sequence[str]) -> None:
    """Run the command in the child process; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["HOME"] = str(folder)
        null = os.open(os.devnull, os.O_RDONLY)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(null, 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS + 5, MOST_CPU_SECONDS + 10))
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_ADDRESSES, _MOST_ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
        sys.argv = ["maxpipe", *arguments]
        from maxpipe.__main__ import main

        code = main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(code))
