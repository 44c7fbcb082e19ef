"""Start, monitor and restart the processes of a run on this machine.

Every process has one log file for all attempts. The launcher prints the first process's log.
This module does not import jax, so the launcher uses no devices and survives crashes of the
processes that it starts.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.load import LoadedConfig
from maxpipe.distributed import protocol
from maxpipe.distributed.coordinator import free_port
from maxpipe.errors import ExitCode, StorageError
from maxpipe.io import files, redact
from maxpipe.launch.job import RestartPolicy, check_local, describe_exit_code

_MAX_LINES = 40
_MOST_BYTES = 1 << 28
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*$", re.MULTILINE
)
_MAXPIPE_ERROR = re.compile(r"(?:^\S.*\n(?:  \S.*\n){2,})+", re.MULTILINE)
"""Pattern of maxpipe's error messages: location and value, then indented rule and action."""


class ProcessLog:
    """The log file of one process, with a header line before each attempt."""

    def __init__(self, path: Path):
        self.path = path
        self._start = 0

    def open_attempt(self, attempt: int, command: str) -> BinaryIO:
        """Write a header line and return the log file, open for appending.

        Raises:
            StorageError: the log cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(
                files.open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab"
            )
            self._start = file.tell()
            header = f"=== {datetime.now():%Y-%m-%d %H:%M:%S} attempt {attempt}: {command}\n"
            file.write(header.encode())
            file.flush()
        except OSError as error:
            raise StorageError.unwritable(self.path, error) from error
        self._start += len(header.encode())
        return file

    def text(self) -> str:
        """Return the output of the latest attempt."""
        with open(files.open_regular(self.path), "rb") as file:
            file.seek(self._start)
            return file.read(_MOST_BYTES).decode(errors="replace")

    def first_error(self) -> str:
        """Return the first traceback or error message of the latest attempt, or else its last 10
        log lines.
        """
        text = self.text()
        found = min(
            filter(None, (_TRACEBACK.search(text), _MAXPIPE_ERROR.search(text))),
            key=lambda match: match.start(),
            default=None,
        )
        lines = (found[0] if found else "\n".join(text.splitlines()[-10:])).rstrip().splitlines()
        if len(lines) > _MAX_LINES:
            lines = [*lines[: _MAX_LINES // 2], "  ...", *lines[-_MAX_LINES // 2 :]]
        return "\n".join(lines)

    def follow(self) -> LogFollower:
        """Return a `LogFollower` for the latest attempt's output."""
        return LogFollower(self.path, self._start)


class LogFollower:
    """Copies new content of a file to stdout."""

    def __init__(self, path: Path, start: int):
        self._file = os.fdopen(files.open_regular(path), "rb")
        self._file.seek(start)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def copy(self) -> None:
        """Copy the content appended since the last call."""
        new = self._file.read()
        if not new:
            return
        try:
            sys.stdout.write(self._decode(new))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has exited, but the run continues
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Copy the remaining content and close the file."""
        self.copy()
        self._file.close()


GRACE_SECONDS = 5.0
"""Time in seconds for the other processes to report and exit after one process has failed.
Afterwards they are killed, because they would wait for the failed process in a collective."""
_POLL_SECONDS = 0.1
_PARENT_DEATH_SIGNAL = 1  # the value of PR_SET_PDEATHSIG for prctl(2)


@dataclass(frozen=True)
class Failure:
    """The first process that exited with a nonzero exit code."""

    process: int
    code: int


def launch(loaded: LoadedConfig, inputs: Sequence[str], processes: int) -> int:
    """Run `maxpipe train` on the given inputs in `processes` processes, and return the exit code.

    Raises:
        ConfigError: the run cannot start.
        StorageError: logs cannot be written.
    """
    print(check_local(loaded, processes), file=sys.stderr, flush=True)
    config = loaded.config
    folder = run_folder(config.run)
    # If this is one process of a multi-host run, the run folder is shared with other hosts.
    alone = processes == 1 and config.runtime.num_processes != 1
    names = [socket.gethostname()] if alone else [str(rank) for rank in range(processes)]
    logs = [ProcessLog(folder / "logs" / f"process-{name}.log") for name in names]
    elsewhere = config.checkpoint.dir or config.checkpoint.local_dir
    restarts = RestartPolicy(config.launch.restarts, folder, elsewhere)
    attempt = 0
    # Stopping processes wait for each other at a barrier, which times out after this many seconds.
    patience = float(config.runtime.heartbeat_timeout_seconds)
    with _StopSignals() as requests:
        while True:
            attempt += 1
            commands = _commands(inputs, processes, config.mesh.cpu_devices)
            failure = _attempt(commands, logs, attempt, requests, patience)
            if failure is None:
                return ExitCode.DONE
            if requests.count:
                return _stopped(failure, requests, restarts.newest_step())
            again = restarts.should_restart(failure.code)
            _report(failure, logs, again, attempt, restarts)
            if not again:
                return 128 - failure.code if failure.code < 0 else failure.code


def _commands(inputs: Sequence[str], processes: int, devices: int) -> list[list[str]]:
    """Return the command of every process. If there are several processes, they share a free
    coordinator port.
    """
    train = [sys.executable, "-m", "maxpipe", "train", *inputs]
    if processes == 1:
        return [train]
    shared = (
        f"mesh.cpu_devices={devices // processes}",
        f"runtime.num_processes={processes}",
        f"runtime.coordinator=127.0.0.1:{free_port()}",
    )
    return [[*train, *shared, f"runtime.process_id={rank}"] for rank in range(processes)]


class _StopSignals:
    """Signal handler that counts SIGTERM, SIGHUP and SIGINT signals instead of exiting, and records
    SIGUSR1.
    """

    def __init__(self) -> None:
        self.count = 0
        self.signal_number = signal.SIGTERM
        """The most recently received signal."""
        self.requests_profile = False
        """Whether SIGUSR1 was received and has not been forwarded."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> _StopSignals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._receive_profile)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.signal_number = signal.Signals(number)

    def _receive_profile(self, number: int, frame: FrameType | None) -> None:
        self.requests_profile = True

    @property
    def code(self) -> int:
        """Exit code of the launcher, which depends on the received signals."""
        by_key = self.signal_number == signal.SIGINT
        if self.count > 1:
            return ExitCode.INTERRUPTED if by_key else 128 + signal.SIGKILL
        return ExitCode.INTERRUPTED if by_key else ExitCode.PREEMPTED


def _attempt(
    commands: Sequence[Sequence[str]],
    logs: Sequence[ProcessLog],
    attempt: int,
    requests: _StopSignals,
    patience: float,
) -> Failure | None:
    with (
        _start_processes(commands, logs, attempt) as processes,
        contextlib.closing(logs[0].follow()) as out,
    ):
        # Threads wait rather than poll, so the queue preserves the order in which processes exit.
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()

        def report_exit(rank: int, process: subprocess.Popen[bytes]) -> None:
            process.wait()
            ends.put(rank)

        for number_and_process in enumerate(processes):
            threading.Thread(target=report_exit, args=number_and_process, daemon=True).start()
        running, passed_on = set(range(len(processes))), 0
        failure, deadline = None, float("inf")
        while running:
            if requests.count > passed_on:
                passed_on = requests.count
                _send(requests.signal_number if passed_on == 1 else signal.SIGKILL, processes)
                if passed_on == 1:
                    by_key = requests.signal_number == signal.SIGINT
                    again = "press Ctrl-C again" if by_key else "send the signal again"
                    _print_status(
                        f"stopping after this step, and saving a checkpoint; "
                        f"{again} to kill all processes"
                    )
            if requests.requests_profile:
                requests.requests_profile = False
                _send(signal.SIGUSR1, processes)
            with contextlib.suppress(queue.Empty):
                rank = ends.get(timeout=_POLL_SECONDS)
                running.discard(rank)
                code = processes[rank].returncode
                if code != 0 and failure is None:
                    failure = Failure(rank, code)
                    is_saved = code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
                    deadline = time.monotonic() + (patience if is_saved else GRACE_SECONDS)
            if time.monotonic() > deadline:
                deadline = float("inf")
                _send(signal.SIGKILL, processes)
            out.copy()
    return failure


@contextlib.contextmanager
def _start_processes(
    commands: Sequence[Sequence[str]], logs: Sequence[ProcessLog], attempt: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes; on exit from the context, kill those that remain."""
    processes: list[subprocess.Popen[bytes]] = []
    variables = _variables(len(commands))
    try:
        for command, log in zip(commands, logs, strict=True):
            shown = shlex.join(["maxpipe", *redact.redact_argv(command[3:])])
            with log.open_attempt(attempt, shown) as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=os.environ | variables,
                        # Ctrl-C reaches only the launcher, which forwards it to the processes.
                        start_new_session=True,
                        preexec_fn=_set_process_signals,
                    )
                )
        yield processes
    finally:
        _send(signal.SIGKILL, processes)
        for process in processes:
            process.wait()


def _variables(processes: int) -> dict[str, str]:
    """Return the additional environment variables for the processes.

    Several local processes share a generated secret. A single process receives none, because it may
    belong to a multi-host run, in which all hosts must have the same secret.
    """
    variables = {"PYTHONUNBUFFERED": "1"}
    if processes > 1 and protocol.secret_from_environment() is None:
        variables[protocol.VARIABLE] = protocol.generate_secret()
    return variables


def _set_process_signals() -> None:
    """Ignore SIGUSR1 until the process can start a profile, and make the kernel send SIGTERM to the
    calling process when the launcher dies (Linux only).
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _send(number: signal.Signals, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(number)  # this has no effect if the process has exited


def _stopped(failure: Failure, requests: _StopSignals, step: int | None) -> int:
    """Print the result of a requested stop, and return the exit code of the launcher."""
    saved = "no checkpoint is saved" if step is None else f"step {step} is saved"
    if requests.count > 1:
        _print_status(f"killed: {saved}")
        return requests.code
    # During startup, a process has no state to save, and the signal ends the process.
    if failure.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, -requests.signal_number):
        again = "" if step is None else " to resume"
        _print_status(f"stopped: {saved}; run the same command again{again}")
        return requests.code
    _print_status(
        f"process {failure.process} failed instead of stopping: "
        f"{describe_exit_code(failure.code)}; {saved}"
    )
    return 128 - failure.code if failure.code < 0 else failure.code


def _report(
    failure: Failure,
    logs: Sequence[ProcessLog],
    again: bool,
    attempt: int,
    restarts: RestartPolicy,
) -> None:
    log, step = logs[failure.process], restarts.newest_step()
    point = "the beginning" if step is None else f"step {step}"
    what = f"process {failure.process} of {len(logs)}: {describe_exit_code(failure.code)}"
    if again:
        _print_status(f"{what}\nlaunch: restarting from {point}, attempt {attempt + 1}")
        return
    if restarts.failures_without_progress:
        what += (
            f"; {restarts.failures_without_progress} times in a row without a newer "
            f"checkpoint than {point}"
        )
    _print_status(
        f"{what}\nlaunch: this process failed first; log: {log.path}\n{log.first_error()}"
    )


def _print_status(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
