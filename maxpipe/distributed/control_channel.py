"""Connect every process of a run to the coordinator in process 0 through a control channel.

The processes monitor each other through this channel. The channel uses only threads and sockets, so
a process responds even while its main thread compiles, waits in a collective or blocks in a data
reader. Peers authenticate with the run's secret. In a single-process run, the process is its own
coordinator. The coordinator ends the run if a process reports a failure, disconnects or does not
respond, or if no process makes progress. The conditions are checked in this order.

jax has a similar service, which aborts processes with SIGABRT and does not report the cause. The
control channel has shorter time limits, so that it can report the cause first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from maxpipe.distributed.coordinator import (
    STOPPED_BEFORE_FIRST_STEP,
    Coordinator,
    CoordinatorMessage,
    Heartbeat,
    Hello,
    JoinFailure,
    Member,
    MemberMessage,
    StopCode,
    Timeouts,
    sanitize_exit_code,
    sanitize_peer_text,
)
from maxpipe.distributed.phases import WAITING, Phases
from maxpipe.distributed.protocol import (
    VARIABLE,
    AuthenticatedConnection,
    PeerAuthenticationError,
    connect,
)
from maxpipe.errors import (
    Code,
    DivergenceError,
    ExitCode,
    MaxpipeError,
    Preemption,
    ReplicaError,
    UserInterrupt,
    with_code,
)
from maxpipe.io import redact

_AGAIN = "  Start the same command again: it resumes from the newest checkpoint, if there is one."
_COORDINATOR_GONE = with_code(
    Code.NET_LOST, f"process 0 disconnected\n  See its output for the reason.\n{_AGAIN}"
)
_NO_TIME = (
    "the time limit for saving has expired\n"
    f"  The stop request was more than runtime.stop_grace_seconds ago.\n{_AGAIN}"
)
_STOPPED_TWICE = (
    f"stopped immediately by a second stop request\n  Nothing more was saved.\n{_AGAIN}"
)
_ONE_REQUEST_SECONDS = 1.0
"""Time in seconds within which repeated signals count as one request. Shells, launchers and
`timeout` may signal a process first and then its process group."""
_ONE_KEY_SECONDS = 0.25
"""Time in seconds within which repeated Ctrl-C counts as one request. This interval is shorter than
that for signals, because a user may press Ctrl-C twice.
"""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that request a stop, from a scheduler, a closed terminal or Ctrl-C."""
PROFILE_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""Signal that requests a profile. Windows has no such signal."""
_PROFILE_DELAY_SECONDS = 1.0
"""Time in seconds between a request for a profile and its first step, in which all processes
receive the request."""
_VERDICT_SECONDS = 2.0
_GOODBYE_SECONDS = 5.0
"""Time in seconds to deliver pending messages before a process exits."""
_NO_SECRET = "; process 0 has not written a secret to the run folder"
_OTHER_SECRET = "; the program at this address does not have the secret of this run"
_SAME_SECRET = (
    f"Start all processes with the same value of {VARIABLE}. Or leave it unset, and set run.dir to "
    "a folder on a disk that all hosts share."
)
_RESEND_SECONDS = 0.05
_MAX_TEXT = 8000
_MAX_DETAIL = 300


@dataclass
class CoordinatorState:
    """State received from the coordinator, guarded by the condition of the channel."""

    welcome: bool = False
    refused: JoinFailure | None = None
    asked: bool = False
    """Whether a stop was requested. The coordinator then collects the progress of all processes."""
    code: StopCode = 75
    """Exit code of all processes after the stop."""
    stop_at: int | None = None
    profile_at: int = 0
    """Step at which the next requested profile starts; 0 without a request."""
    agreed: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Process indices, keyed first by the name of a compared value and then by the value itself."""


class ControlChannel:
    """The control channel of this process.

    While the context is active, a thread serves the channel and `SIGNALS` are caught. `say` prints
    a line for the user, who sees the output of process 0.

    Args:
        phases: phases of this process, reported to the coordinator.
        limits: time limits after which the run ends.
        index: index of this process.
        count: number of processes.
    """

    def __init__(
        self,
        phases: Phases,
        limits: Timeouts,
        *,
        index: int = 0,
        count: int = 1,
        say: Callable[[str], None] = lambda text: _print(text),
    ):
        self.index, self.count, self.say = index, count, say
        self.tell: Callable[[str], None] = say
        """Function that prints a line, no matter which process calls it."""
        self.on_leave: Callable[[int, str], None] = lambda code, text: None
        """Function that is called before the channel ends the process."""
        self._defers_profile = False
        self.step_seconds = 0.0
        """Time of a recent step, or 0 if unknown."""
        self._phases, self._limits = phases, limits
        self._selector = selectors.DefaultSelector()
        self._coordinator = None
        if index == 0:
            self._coordinator = Coordinator(
                count, limits, self._handle_message, lambda text: self.say(text), self._selector
            )
        self._connection: AuthenticatedConnection | None = None
        self._last_heard = 0.0
        self._state, self._changed = CoordinatorState(), threading.Condition()
        self._answered = 0
        self._failing = self._closed = self._comparing = False
        self._stop_requested_at = 0.0
        self._stop_code: StopCode = 75
        self._wake, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="maxpipe link", daemon=True)
        self._before: dict[int, Any] = {}

    # Start and end.

    def __enter__(self) -> ControlChannel:
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self.catch_signals()
        if self.index > 0:
            _delay_aborts()
        self._thread.start()
        return self

    def catch_signals(self) -> None:
        """Install the signal handlers, or reinstall those that libraries may have replaced."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            # Signals that are already ignored remain ignored, as under `nohup` or in a script's
            # background jobs.
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                self._before.setdefault(number, signal.signal(number, self._note_signal))
        if PROFILE_SIGNAL is not None:
            before = signal.signal(PROFILE_SIGNAL, lambda number, frame: None)
            self._before.setdefault(PROFILE_SIGNAL, before)
        # Python calls a handler only when the main thread next runs Python code, possibly after a
        # compilation. Through the wakeup descriptor, the channel's thread receives the signal
        # number immediately.
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # The coordinator ends after it has received `bye` from every process.
        self._closed = self._coordinator is None
        self._send({"bye": True})
        if self._connection is not None:
            self._connection.flush(_GOODBYE_SECONDS)
        if self._coordinator is not None:
            self._coordinator.wait_for_goodbyes(_GOODBYE_SECONDS if self._failing else math.inf)
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for number, before in self._before.items():
                signal.signal(number, before)
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")
        if self.index > 0:
            _delay_aborts(False)
        self._thread.join(_GOODBYE_SECONDS)
        if self._coordinator is not None:
            self._coordinator.close()
        if self._connection is not None:
            self._connection.close()
        self._wake.close()
        self._wakes.close()
        self._selector.close()

    def connect(
        self,
        address: tuple[str, int],
        facts: Mapping[str, str],
        secret: Callable[[], bytes | None],
    ) -> JoinFailure | None:
        """Wait until all processes have joined; return a failure if they cannot run together.

        Args:
            address: host and port at which the coordinator listens until all processes have joined.
            facts: values, keyed by name, that must be equal in all processes.
            secret: function that returns the run's secret, or None if it is not available yet.
        """
        hello: Hello = {
            "index": self.index,
            "count": self.count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "facts": dict(facts),
        }
        if self._coordinator is not None:
            key = secret()
            assert key is not None, "process 0 must have the secret"
            self._coordinator.join(Member(0, hello["host"], hello["pid"], settings=hello["facts"]))
            self._coordinator.listen(address, key)
        else:
            found = self._connect_to_coordinator(address, hello, secret)
            if isinstance(found, JoinFailure):
                if self._stop_requested_at:
                    self._exit(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
                return found
            self._last_heard, self._connection = time.monotonic(), found
            self._selector.register(found, selectors.EVENT_READ)
        if self._stop_requested_at:  # a stop was requested before the connection existed
            self._send({"stop": self._stop_code})
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")  # wakes the thread
        end = time.monotonic() + self._limits.init_seconds + (5 if self.index else 0)
        with self._changed:
            self._changed.wait_for(
                lambda: self._state.welcome or self._state.refused, end - time.monotonic()
            )
            if self._state.welcome or self._state.refused:
                return self._state.refused
        if self._coordinator is None:
            return JoinFailure("process 0 stopped responding", late=True)
        return self._coordinator.reject_incomplete_group()

    def _connect_to_coordinator(
        self, address: tuple[str, int], hello: Hello, secret: Callable[[], bytes | None]
    ) -> AuthenticatedConnection | JoinFailure:
        """Connect to process 0, authenticate it and send `hello`, or return the failure."""
        begin = told = time.monotonic()
        where = f"{address[0]}:{address[1]}"

        def end() -> float:
            limit = begin + self._limits.init_seconds
            return (
                min(limit, self._stop_requested_at + _GOODBYE_SECONDS)
                if self._stop_requested_at
                else limit
            )

        reason = _NO_SECRET
        while time.monotonic() < end():
            try:
                # The secret has not been written yet, or process 0 has removed it.
                if (key := secret()) is None:
                    raise ConnectionRefusedError
                reason = "" if reason == _NO_SECRET else reason
                wire = connect(address, key, end)
            except OSError as error:
                if isinstance(error, PeerAuthenticationError):
                    reason = _OTHER_SECRET
                elif isinstance(error, socket.gaierror):
                    reason = f"; this host cannot resolve the name: {error.strerror}"
                if time.monotonic() - told > 10:
                    self.say(f"process {self.index} is waiting for process 0 at {where}{reason}")
                    told = time.monotonic()
                time.sleep(0.1)
                continue
            if wire.send({"hello": hello}):
                return wire
            wire.close()
        limit = f"within {self._limits.init_seconds:g} s"
        text = f"process 0 was not reachable at {where} {limit}{reason}"
        about_secret = reason in (_NO_SECRET, _OTHER_SECRET)
        return JoinFailure(text, late=True, action=_SAME_SECRET if about_secret else "")

    # Methods that the training loop calls.

    def should_stop(self) -> bool:
        """Return whether to stop now. This collective call has the same result on all processes."""
        with self._changed:
            while self._state.asked and self._state.stop_at is None and not self._closed:
                self._changed.wait(1.0)  # channel threads respond while main threads are busy
            self._answered += 1
            return self._state.stop_at is not None and self._answered >= self._state.stop_at

    def is_stop_requested(self) -> bool:
        """Return whether this process has received a request to stop, which other processes may not
        have received yet.
        """
        return self._state.asked

    def request_profile(self) -> None:
        """Request a profile of the same steps on all processes.

        It starts about a second later, because a process must not receive the request after the
        step. Before the first steps, the request is deferred until the step time is known.
        """
        where = self._phases.status()
        if self._state.profile_at > where.step:  # already requested, possibly by another process
            self._defers_profile = False
            return
        self._defers_profile = not self.step_seconds
        if self._defers_profile:
            return
        steps = math.ceil(_PROFILE_DELAY_SECONDS / max(self.step_seconds, 1e-3))
        self._send({"profile": where.step + 1 + steps})

    @property
    def profile_at(self) -> int:
        """Step at which the requested profile starts; 0 without a request."""
        return self._state.profile_at

    def clear_profile_request(self) -> None:
        """Remove the request for a profile, which has been started or ignored."""
        self._state.profile_at = 0

    def stop_error(self, text: str) -> Preemption:
        """Return the exception that ends a run after a stop request and a save."""
        interrupted = self._state.code == ExitCode.INTERRUPTED
        return UserInterrupt(text) if interrupted else Preemption(text)

    def compare_across_processes(self, name: str, value: str) -> dict[str, list[int]]:
        """Compare a value across all processes. This is a collective call.

        Returns:
            The process indices, keyed by value. There is a single entry if all processes agree.
        """
        self._comparing = True
        self._send({"same": name, "value": value})
        with self._changed:
            while name not in self._state.agreed:
                self._changed.wait(1.0)
            self._comparing = False
            return self._state.agreed.pop(name)

    @contextlib.contextmanager
    def propagate_failure(self) -> Iterator[None]:
        """If the body fails, end all other processes with the same reason and exit code."""
        try:
            yield
        except Preemption:  # all processes stop together
            raise
        except BaseException as error:
            if isinstance(error, DivergenceError | ReplicaError) and self.index != 0:
                # All processes fail in the same way, and process 0 records the reason.
                time.sleep(_VERDICT_SECONDS)
            cause = error.__cause__ if isinstance(error, MaxpipeError) else error
            if isinstance(cause, Exception):
                # A collective may have failed because another process died. The coordinator then
                # reports which process died.
                time.sleep(_VERDICT_SECONDS if self.count > 1 else 0)
            code = error.exit_code if isinstance(error, MaxpipeError) else ExitCode.BUG
            if isinstance(error, KeyboardInterrupt):
                code = 128 + signal.SIGINT
            self.fail(int(code), _format_error(error))
            raise

    def fail(self, code: int, text: str) -> None:
        """Report a failure to all other processes, and end this process even if jax is blocked."""
        self._failing = True
        self._send({"failed": {"code": code, "text": redact.redact_text(text)[-4000:]}})
        if self.count == 1:
            return
        # Let the other processes exit first: jax aborts any process that loses its connection to
        # process 0.
        if self._coordinator is not None:
            self._coordinator.wait_for_goodbyes(_GOODBYE_SECONDS / 2)
        # At exit, jax would wait for the other processes, which have ended.
        atexit.register(_exit_now, code)
        _exit_later(_GOODBYE_SECONDS, code)

    # The thread.

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException:
            # Without this exit, the main thread would wait for messages that never arrive.
            self._exit(ExitCode.BUG, traceback.format_exc())

    def _watch(self) -> None:
        period = min(1.0, self._limits.heartbeat_seconds / 5)
        last = 0.0
        while not self._closed:
            tending = (
                self._coordinator.flush_pending()
                if self._coordinator is not None
                else self._flush_pending()
            )
            for key, _ in self._selector.select(min(period, tending)):
                self._read(key.fileobj)
            if self._closed:
                return
            now = time.monotonic()
            if self._defers_profile and self.step_seconds:
                self.request_profile()
            if now - last >= period:
                last = now
                self._send({"beat": self._heartbeat()})
                if self._coordinator is not None:
                    self._coordinator.check_timeouts()
                else:
                    self._check_coordinator(now)
                if (
                    self._stop_requested_at
                    and now - self._stop_requested_at > self._limits.grace_seconds > 0
                ):
                    self._exit(self._stop_code, _NO_TIME)

    def _flush_pending(self) -> float:
        """Send queued messages. Return the time in seconds until the next call."""
        if self._connection is None or not self._connection.has_unsent:
            return math.inf
        self._connection.send_pending()
        return _RESEND_SECONDS

    def _check_coordinator(self, now: float) -> None:
        """Check that process 0 responds. The coordinator checks the other processes."""
        limit = self._limits.heartbeat_seconds
        if (
            self._connection is None
            or self._closed
            or self._failing
            or now - self._last_heard <= limit
        ):
            return
        text = f"process 0 did not respond for {limit:g} s\n"
        text += f"  Process 0 was stopped, or its host is down or unreachable.\n{_AGAIN}"
        self._exit(ExitCode.HANG, with_code(Code.NET_LOST, text))

    def _heartbeat(self) -> Heartbeat:
        """Return this process's state, which is sent to the coordinator about once per second."""
        where = self._phases.status()
        return {
            "phase": where.phase,
            "step": where.step,
            "seconds": where.seconds,
            "own": where.own_seconds,
            "waits": self._comparing or where.phase in WAITING,
            "detail": where.detail[:_MAX_DETAIL],
        }

    def _read(self, source: Any) -> None:
        if source is self._wake:
            for number in self._wake.recv(64):
                if number == PROFILE_SIGNAL:
                    self.request_profile()
                elif number in self._before:
                    self._on_signal(signal.Signals(number))
        elif self._connection is not None and source is self._connection:
            messages = self._connection.receive(CoordinatorMessage)
            if messages is None:
                self._selector.unregister(self._connection)
                if not (self._closed or self._failing or self._state.refused):
                    if self._stop_requested_at and not self._state.welcome:
                        self._exit(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
                    self._exit(ExitCode.HANG, _COORDINATOR_GONE)
                return
            self._last_heard = time.monotonic()
            for message in messages:
                self._handle_message(message)
        elif self._coordinator is not None:
            self._coordinator.read(source)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The next call that checks for a stop waits for the coordinator's
        decision.
        """
        self._state.asked = True

    def _on_signal(self, number: signal.Signals) -> None:
        now, by_key = time.monotonic(), number == signal.SIGINT
        if not self._stop_requested_at:
            self._stop_requested_at = now
            self._stop_code = 130 if by_key else 75
            self._send({"stop": self._stop_code})
            again = "press Ctrl-C again" if by_key else f"send {number.name} again"
            self.tell(f"stopping after this step and saving; {again} to exit immediately")
        elif now - self._stop_requested_at > (_ONE_KEY_SECONDS if by_key else _ONE_REQUEST_SECONDS):
            self._exit(ExitCode.INTERRUPTED if by_key else ExitCode.PREEMPTED, _STOPPED_TWICE)

    def _send(self, message: MemberMessage) -> None:
        if self._coordinator is not None:
            self._coordinator.handle(0, message)
        elif self._connection is not None:
            self._connection.send(message)

    def _handle_message(self, message: CoordinatorMessage) -> None:
        """Handle a message from the coordinator."""
        with self._changed:
            at = self._answered
            if "welcome" in message:
                self._state.welcome = True
            elif "refused" in message:
                text = sanitize_peer_text(message["refused"], _MAX_TEXT)
                self._state.refused = JoinFailure(text, message.get("late", False))
            elif "ask" in message:
                self._state.asked, self._state.code = True, message["ask"]
            elif "stop_at" in message:
                self._state.stop_at = message["stop_at"]
            elif "profile_at" in message:
                self._state.profile_at = max(self._state.profile_at, message["profile_at"])
            elif "agreed" in message:
                self._state.agreed[message["agreed"]] = dict(message.get("values", []))
            self._changed.notify_all()
        if "ask" in message:
            self._send({"at": at})
        elif "leave" in message and not self._failing and not self._closed:
            if message["leave"]["stacks"]:
                self._show_stacks()
            text = sanitize_peer_text(message["leave"]["text"], _MAX_TEXT)
            self._exit(sanitize_exit_code(message["leave"]["code"]), text)

    def _show_stacks(self) -> None:
        where = self._phases.status()
        self.say(
            f"process {self.index} on {socket.gethostname()}: {where.seconds:.0f} s in "
            f"{where.phase} at step {where.step}"
        )
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)

    def _exit(self, code: int, text: str) -> None:
        """End the process from this thread, because the main thread or a disk may be hung."""

        def tell_ledger() -> None:
            with contextlib.suppress(Exception):
                self.on_leave(int(code), text)

        try:
            # Threads cannot be started while the Python interpreter is shutting down.
            with contextlib.suppress(RuntimeError):
                _exit_later(2 * _GOODBYE_SECONDS, int(code))
                telling = threading.Thread(target=tell_ledger, daemon=True)
                telling.start()
                telling.join(_GOODBYE_SECONDS / 2)
            with contextlib.suppress(Exception):
                if self._coordinator is not None:
                    self._coordinator.wait_for_disconnects(_GOODBYE_SECONDS / 2)
            with contextlib.suppress(OSError, ValueError):
                _print(redact.redact_text(text))
                sys.stdout.flush()
        finally:
            os._exit(int(code))


def _print(text: str) -> None:
    """Print a line in a single write, so that lines from several threads are not interleaved."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def _format_error(error: BaseException) -> str:
    if isinstance(error, MaxpipeError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _delay_aborts(delay: bool = True) -> None:
    """Delay an abort by jax, so that the control channel can report the reason first.

    A jax thread calls abort if process 0 is lost. Python handlers cannot run in that thread, so the
    signal handler is the C library's `sleep`. The argument of `sleep` is the signal number, which
    is 6 for SIGABRT, so the thread waits for six seconds. Afterwards, the abort continues. The
    handler applies once, so a second SIGABRT ends the process at once. If Python's faulthandler is
    enabled, its handler is not replaced.
    """
    if faulthandler.is_enabled():
        return
    libc = ctypes.CDLL(None)
    once = getattr(libc, "sysv_signal", libc.signal)  # sysv_signal sets SA_RESETHAND
    once.argtypes = ctypes.c_int, ctypes.c_void_p
    handler = ctypes.cast(libc.sleep, ctypes.c_void_p) if delay else None  # SIG_DFL
    once(signal.SIGABRT, handler)


def _exit_now(code: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_later(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, lambda: os._exit(code))
    timer.daemon = True
    timer.start()
