"""Run the coordinator in process 0: track all processes of a run, and decide when they stop.

`control_channel` is the client side. `protocol` accepts connections and authenticates messages.
"""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from maxpipe.distributed.phases import SAVE, UNTIMED
from maxpipe.distributed.protocol import AuthenticatedConnection, Listener
from maxpipe.errors import Code, ExitCode, escape_control_chars, with_code
from maxpipe.io.formatting import pluralize

_STRAGGLER_STEPS = 20
"""Number of steps between comparisons of step times across processes."""
_STRAGGLER_SECONDS, _STRAGGLER_SHARE = 0.005, 0.05
"""Minimum straggler delay to report, in seconds and as a fraction of the step time."""
_REPORT_EVERY_SECONDS = 10.0
_RESEND_SECONDS = 0.05
"""Time in seconds between attempts to send queued data."""
_AGAIN = "  Start the same command again: it resumes from the newest checkpoint, if there is one."
STOPPED_BEFORE_FIRST_STEP = (
    "stopped before the first step\n  There is nothing new to save.\n"
    "  Start the same command again."
)


def free_port() -> int:
    """Return a free port for the coordinator of a run that is about to start.

    The port is outside the ephemeral range, so no outgoing connection can use the port in the
    meantime.
    """
    for port in random.sample(range(61_000, 65_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Timeouts:
    """Time limits after which the run ends."""

    init_seconds: float = 300.0
    heartbeat_seconds: float = 100.0
    """Maximum time without a message from a process."""
    stall_seconds: float = 0.0
    """Maximum time during which no process makes progress. 0 disables the limit."""
    grace_seconds: float = 0.0
    """Maximum time from a stop request to the exit, even if no checkpoint has been saved. 0
    disables the limit."""


@dataclass(frozen=True)
class JoinFailure:
    """Reason why the processes cannot run together."""

    text: str
    late: bool = False
    """True if processes did not connect or are unreachable; false if their settings differ."""
    action: str = ""
    """Suggested action, if known."""


class Hello(TypedDict):
    """Identity and settings of a process, sent as the first message."""

    index: int
    count: int
    host: str
    pid: int
    facts: dict[str, str]


class Heartbeat(TypedDict):
    """Progress of a process, sent about once per second."""

    phase: str
    step: int
    seconds: float
    own: float
    waits: bool
    detail: NotRequired[str]


class FailureMessage(TypedDict):
    """Failure of a process."""

    code: int
    text: str


StopCode = Literal[75, 130]
"""Exit code of all processes after a stop: `ExitCode.PREEMPTED` or `ExitCode.INTERRUPTED`."""


class MemberMessage(TypedDict):
    """A message from a process to the coordinator. Its type is defined by the fields that are
    set.
    """

    hello: NotRequired[Hello]
    beat: NotRequired[Heartbeat]
    failed: NotRequired[FailureMessage]
    bye: NotRequired[Literal[True]]
    stop: NotRequired[StopCode]
    profile: NotRequired[int]
    at: NotRequired[int]
    same: NotRequired[str]
    value: NotRequired[str]


class ExitMessage(TypedDict):
    """Request to exit, sent to all processes."""

    code: int
    text: str
    stacks: bool


class CoordinatorMessage(TypedDict):
    """A message from the coordinator to a process. Its type is defined by the fields that are
    set.
    """

    welcome: NotRequired[Literal[True]]
    refused: NotRequired[str]
    late: NotRequired[bool]
    heard: NotRequired[Literal[True]]
    ask: NotRequired[StopCode]
    stop_at: NotRequired[int]
    profile_at: NotRequired[int]
    agreed: NotRequired[str]
    values: NotRequired[list[tuple[str, list[int]]]]
    leave: NotRequired[ExitMessage]


def sanitize_peer_text(text: str, most: int) -> str:
    """Return the last `most` characters of a string from a peer, with control characters
    escaped.
    """
    return escape_control_chars(text[-most:])


def sanitize_exit_code(code: int) -> int:
    """Return the exit code of a failed peer, or `ExitCode.BUG` if it is not from 1 to 255."""
    return code if 0 < code < 256 else int(ExitCode.BUG)


@dataclass
class Member:
    """A process of the run."""

    index: int
    host: str = ""
    pid: int = 0
    connection: AuthenticatedConnection | None = None
    """Connection to the process, or None for process 0."""
    settings: dict[str, str] = field(default_factory=dict)
    heard: float = 0.0
    beat: dict[str, Any] = field(default_factory=dict)
    num_beats: int = 0
    mark: tuple[int, float, float] | None = None
    """Step, total step time excluding waits, and clock time at the last straggler check."""
    left: bool = False

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class Coordinator:
    """Tracks the processes of a run and decides when they stop. `say` prints a line.

    Args:
        count: number of processes.
        limits: time limits.
        tell_self: function that delivers a message to process 0.
        selector: selector of the thread that reads messages.
    """

    def __init__(
        self,
        count: int,
        limits: Timeouts,
        tell_self: Callable[[CoordinatorMessage], None],
        say: Callable[[str], None],
        selector: selectors.BaseSelector,
    ):
        self._count, self._limits, self._tell_self, self._say = count, limits, tell_self, say
        self._members = {0: Member(0)} if count == 1 else {}
        self._listener: Listener | None = None
        self._selector = selector
        self._unknown: dict[AuthenticatedConnection, float] = {}
        """Authenticated connections that have not sent `hello` yet, with the time of
        authentication."""
        self._refusal = ""
        self._lock = threading.RLock()
        self._goodbye = threading.Condition(self._lock)
        self._first_goodbye = 0.0
        self._welcomed = count == 1
        self._is_ending = False
        self._asked = False
        self._stop_code: StopCode = 75
        """Exit code of all processes, set by the first stop request."""
        self._answers: dict[int, int] = {}
        self._values: dict[str, dict[int, str]] = {}
        self._last_report = time.monotonic()
        self._suspected: dict[int, int] = {}
        """Number of heartbeats of each process when a stall was first suspected, keyed by index."""

    # Connections.

    def listen(self, address: tuple[str, int], secret: bytes) -> None:
        """Open the port for the other processes. The port is closed after all processes have
        connected.

        Raises:
            OSError: the port is in use.
        """
        self._listener = Listener(address, secret, self._count, self._say)

    def _close_port(self) -> None:
        if self._listener is not None:
            self._unregister(self._listener)
            self._listener.close()
            self._listener = None
        for wire in list(self._unknown):
            self._disconnect(wire)

    def _unregister(self, source: Listener | AuthenticatedConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def flush_pending(self) -> float:
        """Send queued data and resume a paused listener. Return the seconds until the next call."""
        # Copy the members, because the main thread may add process 0 at the same time.
        wires = [each.connection for each in list(self._members.values())]
        behind = [wire for wire in wires if wire and wire.has_unsent]
        for wire in behind:
            wire.send_pending()
        soon = _RESEND_SECONDS if behind else math.inf
        if self._listener is None:
            return soon
        if (rest := self._listener.paused_until - time.monotonic()) > 0:
            return min(soon, rest)
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        return soon

    def read(self, source: Any) -> None:
        """Read from a socket that has data."""
        if isinstance(source, Listener):
            self._unregister(source)  # pause the listener
            self._poll_listener()
        else:
            self._receive(source)

    def _poll_listener(self) -> None:
        if self._listener is None:
            return
        for wire in self._listener.accept_authenticated():
            self._unknown[wire] = time.monotonic()
            self._selector.register(wire, selectors.EVENT_READ)
        limit = time.monotonic() - self._limits.heartbeat_seconds
        for wire in [wire for wire, since in self._unknown.items() if since < limit]:
            self._disconnect(wire)

    def _receive(self, wire: AuthenticatedConnection) -> None:
        messages = wire.receive(MemberMessage)
        member = next((each for each in self._members.values() if each.connection is wire), None)
        for message in messages or ():
            if member is not None:
                self.handle(member.index, message)
            elif "hello" in message:
                member = self._admit(wire, message["hello"])
        if messages is None or (messages and member is None):
            self._disconnect(wire)
            if member is not None and not member.left:
                member.left = True
                self._handle_disconnect(member)
                with self._goodbye:
                    self._goodbye.notify_all()

    def _disconnect(self, wire: AuthenticatedConnection) -> None:
        self._unknown.pop(wire, None)
        self._unregister(wire)
        wire.close()

    def _admit(self, wire: AuthenticatedConnection, hello: Hello) -> Member | None:
        """Admit a process based on its `hello` message, or reject it if its settings differ."""
        index, count = hello["index"], hello["count"]
        came = Member(
            index, sanitize_peer_text(hello["host"], 255), hello["pid"], wire, hello["facts"]
        )
        if count != self._count or not 0 < index < self._count:
            told = f"has num_processes={count}, but process 0 has {self._count}"
            return self._refuse(came, f"{came} {told}")
        before, limit = self._members.get(index), self._limits.heartbeat_seconds
        # A new process may replace one that stopped responding, for example after a host failure.
        if before and (self._welcomed or time.monotonic() - before.heard < limit):
            return self._refuse(came, f"{came} has the same process_id as {before}")
        self._unknown.pop(wire, None)
        self.join(came)
        return came

    def _refuse(self, came: Member, text: str) -> None:
        """Reject one process. The run continues, because the process can be started again."""
        if came.connection is not None:
            came.connection.send({"refused": text})
        self._refusal = f"; {text}"
        self._say(f"rejected: {text}")

    def reject_incomplete_group(self) -> JoinFailure:
        """Report the missing processes to the connected processes, and return the failure."""
        with self._lock:
            missing = f"{self._format_processes(self._missing())} of {self._count}"
            text = f"{missing} did not join within {self._limits.init_seconds:g} s"
            text += self._refusal + (
                f"; {strangers}" if (strangers := self._describe_rejected()) else ""
            )
            self._broadcast({"refused": text, "late": True})
        return JoinFailure(text, late=True)

    def close(self) -> None:
        """Close all connections. A peer that has not sent `bye` treats its closed connection as a
        failure.
        """
        wires = [
            member.connection for member in self._members.values() if member.connection is not None
        ]
        for wire in (*wires, *self._unknown):
            wire.close()
        if self._listener is not None:
            self._listener.close()

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait up to `seconds` for all other processes to leave."""
        with self._goodbye:
            others = [member for member in self._members.values() if member.connection is not None]
            if self._welcomed:
                limit = None if seconds == math.inf else seconds
                self._goodbye.wait_for(lambda: all(each.left for each in others), limit)

    def wait_for_disconnects(self, seconds: float) -> None:
        """Wait up to `seconds` for all other processes to disconnect. The channel's thread calls
        this method.
        """
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for member in self._members.values():
                if member.connection is not None and not member.left:
                    selector.register(member.connection, selectors.EVENT_READ)
            while selector.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, self.flush_pending())):
                    wire: Any = key.fileobj
                    if wire.receive(MemberMessage) is None:
                        selector.unregister(wire)

    # Messages.

    def join(self, member: Member) -> None:
        """Add a connected process to the run."""
        with self._lock:
            member.heard = time.monotonic()
            self._members[member.index] = member
            self._try_welcome()

    def handle(self, index: int, message: MemberMessage) -> None:
        """Handle a message from a process."""
        with self._lock:
            member = self._members.get(index)
            if member is None:
                return
            member.heard = time.monotonic()
            if "beat" in message:
                member.beat = {**message["beat"]}
                member.num_beats += 1
                member.beat["phase"] = sanitize_peer_text(member.beat["phase"], 40)
                member.beat["detail"] = sanitize_peer_text(member.beat.get("detail", ""), 300)
                if member.connection is not None:
                    member.connection.send({"heard": True})
            elif "failed" in message:
                code = sanitize_exit_code(message["failed"]["code"])
                text = sanitize_peer_text(message["failed"]["text"], 4000)
                self._end(code, f"{member} failed first:\n{text}", but=index)
            elif "bye" in message:
                member.left = True
                self._first_goodbye = self._first_goodbye or time.monotonic()
                self._goodbye.notify_all()
            elif "stop" in message and not self._asked:
                self._asked, self._stop_code = True, message["stop"]
                if self._welcomed:
                    self._broadcast({"ask": self._stop_code})
                else:  # no process has started yet, and missing processes cannot respond
                    self._end(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
            elif "profile" in message:
                self._broadcast({"profile_at": message["profile"]})
            elif "at" in message:
                self._answers[index] = message["at"]
                if len(self._answers) == self._count:
                    self._decide_stop_step()
            elif "same" in message:
                values = self._values.setdefault(message["same"], {})
                values[index] = message.get("value", "")
                if len(values) == self._count:
                    del self._values[message["same"]]
                    groups: dict[str, list[int]] = {}
                    for process, value in sorted(values.items()):
                        groups.setdefault(value, []).append(process)
                    self._broadcast({"agreed": message["same"], "values": list(groups.items())})

    def _decide_stop_step(self) -> None:
        """Choose the stop step of all processes: the step after the latest step that any process
        has started.
        """
        furthest = max(self._answers.values())
        if furthest == 0:
            self._end(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
        else:
            self._broadcast({"stop_at": furthest + 1})

    def _broadcast(self, message: CoordinatorMessage, but: int = -1) -> None:
        """Send a message to all processes except `but`, and to process 0 last."""
        for member in sorted(self._members.values(), key=lambda each: -each.index):
            if member.index == but:
                continue
            if member.connection is None:  # process 0 continues until all other processes have left
                self._tell_self(message)
            elif not member.left:
                member.connection.send(message)

    def _try_welcome(self) -> None:
        if len(self._members) < self._count or self._silent():
            return
        first = self._members[0].settings
        for member in self._members.values():
            for name, value in first.items():
                if member.settings.get(name) != value:
                    theirs = sanitize_peer_text(member.settings.get(name, "unknown"), 500)
                    text = f"{name} is {value} in process 0 and {theirs} in {member}"
                    self._broadcast({"refused": text})
                    return
        self._welcomed = True
        self._close_port()  # jax's service uses the same port afterwards
        for member in self._members.values():
            member.heard = time.monotonic()
        self._broadcast({"welcome": True})

    def _missing(self) -> list[int]:
        silent = {each.index for each in self._silent()}
        return [i for i in range(self._count) if i not in self._members or i in silent]

    def _silent(self) -> list[Member]:
        """Return the processes that sent no message within the heartbeat limit."""
        now, limit = time.monotonic(), self._limits.heartbeat_seconds
        return [
            each
            for each in self._members.values()
            if not each.left and each.connection is not None and now - each.heard > limit
        ]

    @staticmethod
    def _format_processes(indices: Iterable[int]) -> str:
        listed = list(indices)
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        names = ", ".join(map(str, listed[:8])) + more
        return f"process {names}" if len(listed) == 1 else f"processes {names}"

    # Timeouts.

    def check_timeouts(self) -> None:
        """Check all processes; this method is called about once per second."""
        with self._lock:
            if not self._welcomed:
                self._poll_listener()  # close unauthenticated connections that timed out
                self._try_welcome()  # a silent process may have resumed sending
                self._report_missing()
            elif not self._is_ending:
                self._check_silence()
                self._check_early_exits()
                self._check_stall()
                self._check_stragglers()

    def _report_missing(self) -> None:
        now = time.monotonic()
        if now - self._last_report < _REPORT_EVERY_SECONDS:
            return
        self._last_report = now
        missing = self._missing()
        if self._welcomed or not missing:
            return
        there = f"{self._count - len(missing)}/{self._count}"
        text = (
            f"waiting for {self._format_processes(missing)} ({there} joined): check that they "
            "are running and "
        )
        text += "can reach this host at runtime.coordinator."
        if strangers := self._describe_rejected():
            text += f" {strangers}."
        self._say(text)

    def _describe_rejected(self) -> str:
        """Describe rejected connections, which may come from the missing processes."""
        if self._listener is None or not self._listener.num_refused:
            return ""
        return (
            f"{self._listener.num_refused} connections without the run's secret were rejected, the "
            f"last from {self._listener.last_refused}"
        )

    def _handle_disconnect(self, member: Member) -> None:
        beat = member.beat
        where = f"It was in {beat['phase']} at step {beat['step']}; its" if beat else "Its"
        if self._welcomed:
            text = f"{member} disconnected\n  {where} output shows the reason.\n{_AGAIN}"
            self._end(ExitCode.HANG, with_code(Code.NET_LOST, text))
            return
        with self._lock:
            if self._members.get(member.index) is member:
                del self._members[member.index]  # allow a restarted process to join again

    def _check_silence(self) -> None:
        if silent := self._silent():
            names = ", ".join(map(str, silent))
            text = f"{names} did not respond for {self._limits.heartbeat_seconds:g} s\n"
            text += f"  The limit is runtime.heartbeat_timeout_seconds.\n{_AGAIN}"
            self._end(ExitCode.HANG, with_code(Code.NET_LOST, text))

    def _check_early_exits(self) -> None:
        """End the run if a process has left early and other processes are waiting for it.

        The run continues while the other processes make progress or save, because process 0 may
        still be verifying the files of all processes.
        """
        limit, alone = self._limits.heartbeat_seconds, time.monotonic() - self._first_goodbye
        rest = [each for each in self._members.values() if not each.left]
        if not rest or not self._first_goodbye or alone <= limit:
            return
        beats = [each.beat for each in rest if each.beat]
        if any(beat["phase"] == SAVE or beat["seconds"] <= limit for beat in beats):
            return
        gone = self._format_processes(each.index for each in self._members.values() if each.left)
        others = self._format_processes(each.index for each in rest)
        text = f"{gone} exited {alone:.0f} s ago, but {others} did not\n"
        text += f"  The remaining processes would wait forever.\n{_AGAIN}"
        self._end(ExitCode.HANG, with_code(Code.NET_LOST, text))

    def _check_stall(self) -> None:
        """End the run if no process makes progress.

        As long as one process makes progress, all other processes may be waiting for that process.
        Heartbeats can be a second old, or older if a host was frozen, so every process must confirm
        the stall with a new heartbeat.
        """
        limit = self._limits.stall_seconds
        here = [each for each in self._members.values() if each.beat and not each.left]
        idle = min((each.beat["seconds"] for each in here), default=0.0)
        if not limit or idle <= limit or any(each.beat["phase"] in UNTIMED for each in here):
            self._suspected = {}
            return
        if not self._suspected:
            self._suspected = {each.index: each.num_beats for each in here}
        if any(each.num_beats <= self._suspected.get(each.index, 0) for each in here):
            return
        # A process reading data delays the other processes, even in a phase that all processes
        # enter together.
        holding = [each for each in here if each.beat["detail"] or not each.beat["waits"]]
        behind = min(each.beat["step"] for each in here)
        holding = holding or [each for each in here if each.beat["step"] == behind]
        words = "; ".join(
            f"{each} has been in {each.beat['phase']} for {each.beat['seconds']:.0f} s at step "
            f"{each.beat['step']}" + (f" ({each.beat['detail']})" if each.beat["detail"] else "")
            for each in holding[:8]
        )
        text = f"no progress for {limit:g} s (runtime.stall_timeout_seconds)\n  {words}.\n{_AGAIN}"
        self._end(ExitCode.HANG, with_code(Code.NET_STALL, text), stacks=True)

    def _check_stragglers(self) -> None:
        here = [each for each in self._members.values() if each.beat]
        if self._count == 1 or len(here) < self._count:
            return
        now = time.monotonic()
        for each in here:
            if each.mark is None or each.beat["step"] < each.mark[0]:
                each.mark = (each.beat["step"], each.beat["own"], now)
        steps = [each.beat["step"] - each.mark[0] for each in here if each.mark]
        if min(steps) < _STRAGGLER_STEPS:
            return
        own = [
            (each.beat["own"] - each.mark[1]) / (each.beat["step"] - each.mark[0])
            for each in here
            if each.mark
        ]
        seconds = max(
            (now - each.mark[2]) / (each.beat["step"] - each.mark[0]) for each in here if each.mark
        )
        for each in here:
            each.mark = (each.beat["step"], each.beat["own"], now)
        delay = max(own) - statistics.median_low(own)
        if delay > max(_STRAGGLER_SECONDS, _STRAGGLER_SHARE * seconds):
            slow = here[own.index(max(own))]
            self._say(
                f"{slow} delays the other processes: {1e3 * delay:.0f} ms of {1e3 * seconds:.0f} "
                f"ms per step, averaged over the last {pluralize(min(steps), 'step')}"
            )

    def _end(self, code: int, text: str, *, but: int = -1, stacks: bool = False) -> None:
        """End all processes. Only the first reason is reported."""
        if not self._is_ending:
            self._is_ending = True
            self._broadcast({"leave": {"code": int(code), "text": text, "stacks": stacks}}, but)
