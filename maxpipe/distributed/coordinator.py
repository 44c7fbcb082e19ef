"""The hub in process 0: the state of all processes of a run, and the decisions for them.

`link` is the other end, `wire` is between them, and `listener` lets the others in.
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

from maxpipe.distributed.listener import Listener
from maxpipe.distributed.phases import SAVE, UNTIMED
from maxpipe.distributed.protocol import AuthenticatedConnection
from maxpipe.errors import ExitCode, escape_control_chars
from maxpipe.io.formatting import pluralize

_STRAGGLER_STEPS = 20
"""Steps between comparisons of the processes' own times."""
_STRAGGLER_SECONDS, _STRAGGLER_SHARE = 0.005, 0.05
"""A step's delay that is reported: at least these seconds, and this share of the step."""
_REPORT_EVERY_SECONDS = 10.0
_RESEND_SECONDS = 0.05
"""Seconds after which a partly sent message is continued."""
_AGAIN = "  Start the same command again: it resumes from the newest checkpoint, if there is one."
STOPPED_BEFORE_FIRST_STEP = (
    f"asked to stop before the first step\n  There is nothing new to save.\n{_AGAIN}"
)


def free_port() -> int:
    """A port without a listener, for the meeting point of processes that start next.

    Outside the range for outgoing connections, which could take it meanwhile.
    """
    for port in random.sample(range(61_000, 65_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Timeouts:
    """Time limits after which a process gives up the others, or the run."""

    init_seconds: float = 300.0
    heartbeat_seconds: float = 100.0
    """Without a message of a process."""
    stall_seconds: float = 0.0
    """Without progress of a process; 0 waits forever."""
    grace_seconds: float = 0.0
    """From being asked to stop to leaving without having saved; 0 is no limit."""


@dataclass(frozen=True)
class JoinFailure:
    """Why processes cannot run together."""

    text: str
    late: bool = False
    """Some did not connect, or cannot be reached; else their settings disagree."""
    action: str = ""
    """The action to take, where it is known."""


class Hello(TypedDict):
    """A process's identity and settings, sent first."""

    index: int
    count: int
    host: str
    pid: int
    facts: dict[str, str]


class Heartbeat(TypedDict):
    """Its progress, about once a second."""

    phase: str
    step: int
    seconds: float
    own: float
    waits: bool
    detail: NotRequired[str]


class FailureMessage(TypedDict):
    """Why it leaves."""

    code: int
    text: str


StopCode = Literal[75, 130]
"""`ExitCode.PREEMPTED` or `ExitCode.INTERRUPTED`: the exit code of all after a stop."""


class MemberMessage(TypedDict):
    """One of these messages from a process to the hub."""

    hello: NotRequired[Hello]
    beat: NotRequired[Heartbeat]
    failed: NotRequired[FailureMessage]
    bye: NotRequired[Literal[True]]
    stop: NotRequired[StopCode]
    at: NotRequired[int]
    same: NotRequired[str]
    value: NotRequired[str]


class ExitMessage(TypedDict):
    """That all leave."""

    code: int
    text: str
    stacks: bool


class CoordinatorMessage(TypedDict):
    """One of these messages from the hub to a process."""

    welcome: NotRequired[Literal[True]]
    refused: NotRequired[str]
    late: NotRequired[bool]
    heard: NotRequired[Literal[True]]
    ask: NotRequired[StopCode]
    stop_at: NotRequired[int]
    agreed: NotRequired[str]
    values: NotRequired[list[tuple[str, list[int]]]]
    leave: NotRequired[ExitMessage]


def sanitize_peer_text(text: str, most: int) -> str:
    """A peer's text for display: its end, without terminal control characters."""
    return escape_control_chars(text[-most:])


def sanitize_exit_code(code: int) -> int:
    """An exit code from a peer. It never means "done" for a run that is ended."""
    return code if 0 < code < 256 else int(ExitCode.BUG)


@dataclass
class Member:
    """One process."""

    index: int
    host: str = ""
    pid: int = 0
    connection: AuthenticatedConnection | None = None
    """None for the hub's own process."""
    settings: dict[str, str] = field(default_factory=dict)
    heard: float = 0.0
    beat: dict[str, Any] = field(default_factory=dict)
    num_beats: int = 0
    mark: tuple[int, float, float] | None = None
    """Step, own seconds and time at which the processes' times were last compared."""
    left: bool = False

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class Coordinator:
    """The processes of a run, as process 0 sees them.

    Args:
        count: of processes.
        limits: when one of them, or the run, is given up.
        tell_self: hands a message to this process.
        say: prints a line.
        selector: of the thread that reads.
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
        """Proved connections and their times; their hello is still to come."""
        self._refusal = ""
        self._lock = threading.RLock()
        self._goodbye = threading.Condition(self._lock)
        self._first_goodbye = 0.0
        self._welcomed = count == 1
        self._is_ending = False
        self._asked = False
        self._stop_code: StopCode = 75
        """The exit code of the first stop request: all leave with it."""
        self._answers: dict[int, int] = {}
        self._values: dict[str, dict[int, str]] = {}
        self._last_report = time.monotonic()
        self._suspected: dict[int, int] = {}
        """Processes that seemed stuck at the last check, and the number of their beats then."""

    # Connections.

    def listen(self, address: tuple[str, int], secret: bytes) -> None:
        """Opens the port for the others; it is closed when all have connected.

        Raises:
            OSError: the port is taken.
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
        """The thread's work between messages; the seconds until the next time."""
        wires = [each.connection for each in list(self._members.values())]  # the main thread joins
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
        """Reads what a socket has."""
        if isinstance(source, Listener):
            self._unregister(source)  # it rests
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
        """Admits a process by its hello, unless its settings are wrong."""
        index, count = hello["index"], hello["count"]
        came = Member(
            index, sanitize_peer_text(hello["host"], 255), hello["pid"], wire, hello["facts"]
        )
        if count != self._count or not 0 < index < self._count:
            told = f"has num_processes={count}, process 0 has {self._count}"
            return self._refuse(came, f"{came} {told}")
        before, limit = self._members.get(index), self._limits.heartbeat_seconds
        # The silent one's host was lost, and this is its replacement.
        if before and (self._welcomed or time.monotonic() - before.heard < limit):
            return self._refuse(came, f"{came} has the number of {before}")
        self._unknown.pop(wire, None)
        self.join(came)
        return came

    def _refuse(self, came: Member, text: str) -> None:
        """Only it leaves: the others may be right, and it may be started again."""
        if came.connection is not None:
            came.connection.send({"refused": text})
        self._refusal = f"; {text}"
        self._say(f"refused: {text}")

    def reject_incomplete_group(self) -> JoinFailure:
        """Tells those that connected which are missing; returns the same text."""
        with self._lock:
            missing = f"{self._format_processes(self._missing())} of {self._count}"
            text = f"{missing} did not come within {self._limits.init_seconds:g} s"
            text += self._refusal + (
                f"; {strangers}" if (strangers := self._describe_rejected()) else ""
            )
            self._broadcast({"refused": text, "late": True})
        return JoinFailure(text, late=True)

    def close(self) -> None:
        """Closes every connection; peers have read `bye` or will see the end of the stream."""
        wires = [
            member.connection for member in self._members.values() if member.connection is not None
        ]
        for wire in (*wires, *self._unknown):
            wire.close()
        if self._listener is not None:
            self._listener.close()

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Waits until all others have left, which the thread watches."""
        with self._goodbye:
            others = [member for member in self._members.values() if member.connection is not None]
            if self._welcomed:
                limit = None if seconds == math.inf else seconds
                self._goodbye.wait_for(lambda: all(each.left for each in others), limit)

    def wait_for_disconnects(self, seconds: float) -> None:
        """Gives the others time to read why they leave; for the thread that reads."""
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
        """One more of the run's processes has connected."""
        with self._lock:
            member.heard = time.monotonic()
            self._members[member.index] = member
            self._try_welcome()

    def handle(self, index: int, message: MemberMessage) -> None:
        """A message of a process."""
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
                else:  # none has begun, and those that did not connect yet cannot answer
                    self._end(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
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
        """The step at which all stop: after any that was started."""
        furthest = max(self._answers.values())
        if furthest == 0:
            self._end(self._stop_code, STOPPED_BEFORE_FIRST_STEP)
        else:
            self._broadcast({"stop_at": furthest + 1})

    def _broadcast(self, message: CoordinatorMessage, but: int = -1) -> None:
        """To all, this process last."""
        for member in sorted(self._members.values(), key=lambda each: -each.index):
            if member.index == but:
                continue
            if member.connection is None:  # which is there until all others have left
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
        self._close_port()  # an admitted process joins jax's service next, at the same port
        for member in self._members.values():
            member.heard = time.monotonic()
        self._broadcast({"welcome": True})

    def _missing(self) -> list[int]:
        silent = {each.index for each in self._silent()}
        return [i for i in range(self._count) if i not in self._members or i in silent]

    def _silent(self) -> list[Member]:
        """The processes without a message for too long."""
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
        """Checks all processes, about once a second."""
        with self._lock:
            if not self._welcomed:
                self._poll_listener()  # closes connections whose time is over
                self._try_welcome()  # one that was silent may have sent again
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
            f"waiting for {self._format_processes(missing)} ({there}): are they started, and "
            "can they reach "
        )
        text += "this host at runtime.coordinator?"
        if strangers := self._describe_rejected():
            text += f" {strangers}."
        self._say(text)

    def _describe_rejected(self) -> str:
        """Connections that were not of this run; perhaps the missing ones."""
        if self._listener is None or not self._listener.num_refused:
            return ""
        return (
            f"{self._listener.num_refused} connections did not know the run's secret, the last "
            f"from {self._listener.last_refused}"
        )

    def _handle_disconnect(self, member: Member) -> None:
        beat = member.beat
        where = f"It was in {beat['phase']} at step {beat['step']}; its" if beat else "Its"
        if self._welcomed:
            text = f"{member} is gone\n  {where} own output says why.\n{_AGAIN}"
            self._end(ExitCode.HANG, text)
            return
        with self._lock:
            if self._members.get(member.index) is member:
                del self._members[member.index]  # started again, it comes again

    def _check_silence(self) -> None:
        if silent := self._silent():
            names = ", ".join(map(str, silent))
            text = f"{names} did not answer for {self._limits.heartbeat_seconds:g} s\n"
            text += f"  All may take runtime.heartbeat_timeout_seconds to answer.\n{_AGAIN}"
            self._end(ExitCode.HANG, text)

    def _check_early_exits(self) -> None:
        """Processes end together: the others would wait for one that left alone.

        Not while the rest moves, or saves: process 0 reads back what all have written.
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
        text = f"{gone} ended {alone:.0f} s ago, and {others} did not\n"
        text += f"  Processes of a run end together.\n{_AGAIN}"
        self._end(ExitCode.HANG, text)

    def _check_stall(self) -> None:
        """Only when no process moves: what one process does, the others wait for.

        Beats are up to a second old, and older after a host was frozen: all must say it again.
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
        # One that reads holds the others up, also where it reads for what all do together.
        holding = [each for each in here if each.beat["detail"] or not each.beat["waits"]]
        behind = min(each.beat["step"] for each in here)
        holding = holding or [each for each in here if each.beat["step"] == behind]
        words = "; ".join(
            f"{each} has been in {each.beat['phase']} for {each.beat['seconds']:.0f} s at step "
            f"{each.beat['step']}" + (f" ({each.beat['detail']})" if each.beat["detail"] else "")
            for each in holding[:8]
        )
        text = (
            f"nothing moved for {limit:g} s (runtime.stall_timeout_seconds)\n  {words}.\n{_AGAIN}"
        )
        self._end(ExitCode.HANG, text, stacks=True)

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
                f"{slow} holds the others up: {1e3 * delay:.0f} ms in each of the last "
                f"{pluralize(min(steps), 'step')}, of {1e3 * seconds:.0f} ms a step"
            )

    def _end(self, code: int, text: str, *, but: int = -1, stacks: bool = False) -> None:
        """All leave; the first reason is the one that is reported."""
        if not self._is_ending:
            self._is_ending = True
            self._broadcast({"leave": {"code": int(code), "text": text, "stacks": stacks}}, but)
