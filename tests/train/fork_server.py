"""A process that has imported the command, and forks for each run of it.

Importing jax and orbax takes most of the time of a small run. No backend of jax is started here,
because a backend does not survive a fork. Each line of standard input is a request.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = (
    "jax",
    "orbax.checkpoint",
    "maxpipe.cli",
    "maxpipe.train.loop",
    "maxpipe.train.run",
    "maxpipe.evals.evaluate_checkpoint",
    "maxpipe.generate.completions",
)


@dataclass
class ForkServer:
    """Runs commands one after the other."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> ForkServer:
        """Start the process. Variables that jax reads at import are taken from `environment`."""
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],
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
        seconds: float,
        file_bytes: int = 0,
    ) -> int:
        """Return the exit code of a command, whose output goes to a file.

        Unless `file_bytes` is 0, no file may become larger.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        request = [[*arguments], {**environment}, os.getcwd(), str(output), file_bytes, seconds]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=60)


def _become_command(
    arguments: list[str], environment: dict[str, str], folder: str, output: str, file_bytes: int
) -> None:
    """Run the command in this forked process, which ends with it."""
    code: Any = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), opened, opened)):
            os.dup2(source, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["maxpipe", *arguments]
        if file_bytes:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        from maxpipe.__main__ import main

        code = main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(code))


def _serve() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        *request, seconds = json.loads(line)
        child = os.fork()
        if not child:
            _become_command(*request)
        # The alarm of the child ends it, and everything that it started stays in its session.
        signal.signal(signal.SIGALRM, lambda *_, child=child: os.killpg(child, signal.SIGKILL))
        signal.alarm(int(seconds))
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
