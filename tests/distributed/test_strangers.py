"""Peers without the run's secret: as clients, as process 0, and as man in the middle."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import re
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from maxpipe.distributed import protocol
from maxpipe.distributed.coordinator import (
    Coordinator,
    CoordinatorMessage,
    Member,
    MemberMessage,
    Timeouts,
    free_port,
)
from maxpipe.distributed.protocol import (
    MAX_MEMBER_MESSAGE_BYTES,
    AuthenticatedConnection,
    Listener,
    PeerAuthenticationError,
    connect,
)
from maxpipe.errors import ExitCode
from maxpipe.io.typed_json import parse_json
from tests.distributed.test_control_channel import (
    SECRET,
    authenticated,
    joined,
    members,
    port_of,
    received,
    start_again,
    wait_for,
    wait_for_exit,
)
from tests.strangers import Flood, measured

KEY = SECRET.encode()


def deadline_soon() -> float:
    return time.monotonic() + 10


# --- as clients -------------------------------------------------------------------------------


@pytest.mark.fault("P1")
def test_random_messages_at_port_do_not_end_run_or_use_much_cpu() -> None:
    with members("steps(link, 5)", count=2, started=1) as (first,):
        wait_for(first, "linked")
        time.sleep(0.5)
        with measured(first.pid) as share:
            for seed, most in enumerate((1, 7, 40)):
                with Flood(port_of(first), seed, most) as flood:
                    flood.send(150, 2.0)
                    assert flood.num_messages > 50
        assert share[0] < 0.05
        with Flood(port_of(first), 9, 40) as flood:
            flood.send(40, 2.0)
            second = start_again(first, 1)
            codes, printed, errors = wait_for_exit([first, second])
    assert codes == [0, 0] and "together" in printed[0]
    assert "\x1b" not in errors[0] and "Traceback" not in errors[0]


@pytest.mark.fault("P2")
def test_idle_connections_do_not_block_processes_or_use_cpu() -> None:
    """There are more connections than the open-file limit of the process."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))"
    with members("steps(link, 5)", count=2, started=1, before=few) as (first,):
        wait_for(first, "linked")
        time.sleep(0.5)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                at = ("127.0.0.1", port_of(first))
                stack.enter_context(socket.create_connection(at, timeout=5))
            with measured(first.pid) as share:
                time.sleep(2)
            assert share[0] < 0.05
            codes, _, errors = wait_for_exit([first, start_again(first, 1)])
    assert codes == [0, 0], errors


@contextlib.contextmanager
def listening(count: int = 2) -> Iterator[tuple[Listener, tuple[str, int]]]:
    address = ("127.0.0.1", free_port())
    opened = Listener(address, KEY, count, print)
    try:
        yield opened, address
    finally:
        opened.close()


def accept_until(opened: Listener, until: Callable[[], bool]) -> list[AuthenticatedConnection]:
    found: list[AuthenticatedConnection] = []
    deadline = deadline_soon()
    while not until():
        assert time.monotonic() < deadline
        found += opened.accept_authenticated()
        time.sleep(0.005)
    return found


@pytest.mark.fault("P2")
def test_unauthenticated_peers_are_limited_in_number_size_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "_MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(protocol, "_AUTHENTICATION_SECONDS", 0.5)
    with listening() as (opened, address), contextlib.ExitStack() as stack:
        new = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
        accept_until(opened, lambda: opened.num_refused == 3)
        for sock in new[:3]:
            assert sock.recv(10) == b""  # the oldest connections are closed
        new[3].sendall(b"[" * 1000)
        accept_until(opened, lambda: opened.num_refused == 4)  # at its first invalid bytes
        new[4].sendall(b"maxpipe1")
        accept_until(opened, lambda: opened.num_refused == 8)  # the other peers time out
        assert opened.last_refused == "127.0.0.1"


def test_peers_of_busiest_address_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_UNAUTHENTICATED", 3)
    with listening() as (opened, address), contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(address, 5, ("127.0.0.9", 0)))
        accept_until(opened, lambda: bool(opened._unauthenticated))
        for _ in range(10):
            stack.enter_context(socket.create_connection(address))
        accept_until(opened, lambda: opened.num_refused == 6)
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.recv(1)


@pytest.mark.fault("P3")
def test_replayed_and_reflected_proofs_are_rejected() -> None:
    """Peers replay all messages of a member, and send the coordinator's challenge back."""
    with listening() as (opened, address):
        recorded = recording(address)
        wires: list[AuthenticatedConnection] = []
        thread = threading.Thread(
            target=lambda: wires.append(connect(recorded.address, KEY, deadline_soon)), daemon=True
        )
        thread.start()
        proved_wires: list[AuthenticatedConnection] = []
        deadline = deadline_soon()
        while not proved_wires:
            assert time.monotonic() < deadline
            proved_wires += opened.accept_authenticated()
            time.sleep(0.005)
        thread.join(10)
        wires[0].send({"stop": 75})
        while (messages := proved_wires[0].receive(MemberMessage)) == []:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert messages == [{"stop": 75}]
        said = recorded.sent()
        assert b"stop" in said and SECRET.encode() not in said
        with socket.create_connection(address, timeout=5) as sock:
            before = opened.num_refused
            sock.sendall(said)
            assert accept_until(opened, lambda: opened.num_refused > before) == []
        with socket.create_connection(address, timeout=0.05) as sock:
            sock.sendall(said[:40])
            before, answer = opened.num_refused, b""
            while len(answer) < 64:
                assert opened.accept_authenticated() == []
                with contextlib.suppress(TimeoutError):
                    answer += sock.recv(64)
            sock.sendall(answer[-32:])
            assert accept_until(opened, lambda: opened.num_refused > before) == []
        for wire in (*wires, *proved_wires):
            wire.close()


@pytest.mark.fault("P3")
def test_different_secret_is_rejected() -> None:
    with members("pass", count=2, started=1, limits="init_seconds=3") as (first,):
        wait_for(first, "linked")
        time.sleep(0.5)
        with pytest.raises(PeerAuthenticationError):
            connect(("127.0.0.1", port_of(first)), b"x" * 40, deadline_soon)
        codes, _, errors = wait_for_exit([first])
    told = "process 1 of 2 did not join within 3 s; 1 connections without the run's secret"
    assert codes == [71] and told in errors[0]


def test_listener_binds_only_coordinator_address() -> None:
    with listening() as (_, (_, port)), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=1)


def test_listener_binds_all_addresses_if_host_name_is_ambiguous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of 127.0.1.1, addresses of a router, and names that only other hosts can resolve."""
    names: dict[str, list[str]] = {
        "localhost": ["127.0.0.1"],
        "127.0.0.1": ["127.0.0.1"],
        "host0": ["127.0.1.1"],
        "outside": ["192.0.2.7"],
        "192.0.2.7": ["192.0.2.7"],
        "both": ["192.0.2.7", "127.0.0.1"],
    }

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in names[host]]

    names |= {"127.0.1.1": ["127.0.1.1"]}
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host, found in [
        ("localhost", ["127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        *((host, []) for host in ("host0", "outside", "both", "unknown")),
    ]:
        assert protocol.own_addresses(host) == found, host
    said: list[str] = []
    port = free_port()
    opened = Listener(("outside", port), KEY, 2, said.append)
    try:
        (text,) = said
        assert text.endswith("all addresses: outside is not an address of this machine")
        with socket.socket() as sock:
            sock.connect(("127.0.0.2", port))
    finally:
        opened.close()


def test_listener_does_not_share_port_in_use() -> None:
    with listening() as (_, address), pytest.raises(OSError) as caught:
        Listener(address, KEY, 2, print)
    assert caught.value.errno == errno.EADDRINUSE


# --- as process 0 -----------------------------------------------------------------


@pytest.mark.fault("P4")
@pytest.mark.parametrize(
    "says", ["nothing", pytest.param("noise", marks=pytest.mark.long), "its greeting", "welcome"]
)
def test_false_process_0_learns_nothing_and_ends_no_process(says: str) -> None:
    texts = {
        "noise": b"\xff" * 64,
        "its greeting": None,
        "welcome": b'{"welcome": true}\n{"leave": {"code": 0, "text": "", "stacks": false}}\n',
    }
    heard_by_it: list[bytes] = []
    port = free_port()

    def answer(opened: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = opened.accept()
                with sock:
                    sock.settimeout(0.5)
                    heard_by_it.append(sock.recv(1000))
                    if says != "nothing":
                        sock.sendall(texts[says] or (heard_by_it[-1] * 2)[:64])
                    with contextlib.suppress(OSError):
                        heard_by_it.append(sock.recv(1000))

    for_ever = says == "noise"
    with member_at(port, f"init_seconds={3 if for_ever else 30}") as member:
        with socket.create_server(("127.0.0.1", port)) as opened:
            threading.Thread(target=answer, args=(opened,), daemon=True).start()
            deadline = deadline_soon()
            while len(heard_by_it) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if for_ever:
                member.wait(20)
            opened.shutdown(socket.SHUT_RDWR)
        codes, _, errors = wait_for_exit([member] if for_ever else [member, start_again(member, 0)])
    assert codes == ([71] if for_ever else [0, 0]), errors
    if for_ever:
        assert f"process 0 was not reachable at 127.0.0.1:{port} within 3 s; " in errors[0]
        assert "does not have the secret of this run" in errors[0]
    assert all(text[:8] in (b"maxpipe1", b"") and len(text) <= 40 for text in heard_by_it)


@contextlib.contextmanager
def member_at(port: int, limits: str) -> Iterator[Any]:
    """Start process 1 of two, with this port of process 0."""
    with members("steps(link, 5)", count=2, started=1, limits=limits) as (first,):
        first.send_signal(signal.SIGKILL)
        first.wait()
        arguments: list[Any] = list(first.args)  # type: ignore[arg-type]
        arguments[-2] = str(port)
        first.args = arguments
        member = start_again(first, 1)
        try:
            yield member
        finally:
            member.kill()
            member.communicate()


# --- as man in the middle -------------------------------------------------------------------------


class Recording:
    """A proxy that forwards data in both directions, and records data from members."""

    def __init__(self, target: tuple[str, int], change: Callable[[bytes], bytes]):
        self._target, self._change = target, change
        self._sent: list[bytes] = []
        self._opened = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._opened.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def sent(self) -> bytes:
        return b"".join(self._sent)

    def _run(self) -> None:
        while True:
            near, _ = self._opened.accept()
            far = socket.create_connection(self._target)
            for source, sink, keep in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._hand, args=(source, sink, keep), daemon=True).start()

    def _hand(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    self._sent.append(data)
                    data = self._change(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def recording(
    target: tuple[str, int], change: Callable[[bytes], bytes] = lambda data: data
) -> Recording:
    return Recording(target, change)


def cut_in(data: bytes) -> bytes:
    text = b'{"failed": {"code": 2, "text": "false"}}'
    return data + struct.pack(">I", len(text)) + b"\0" * 32 + text


@pytest.mark.fault("P3")
@pytest.mark.parametrize(
    ("after", "change"),
    [
        (b"beat", cut_in),
        (b"beat", lambda data: data.replace(b'"beat"', b'"bye!"')),
        (b"beat", lambda data: data + data),  # duplicated
        (b"hello", lambda data: data.replace(b'"10"', b'"11"')),
    ],
)
def test_modified_messages_are_rejected(after: bytes, change: Callable[[bytes], bytes]) -> None:
    """Injected messages are never processed, and the connection is closed."""
    done: list[int] = []

    def once(data: bytes) -> bytes:
        if after not in data or done:
            return data
        done.append(1)
        return change(data)

    body = "steps(link, 1000)" if after == b"beat" else "steps(link, 5)"
    with members(body, count=2, started=1, limits="init_seconds=15") as (first,):
        wait_for(first, "linked")
        between = recording(("127.0.0.1", port_of(first)), once)
        with member_at(between.address[1], "init_seconds=15") as second:
            if after == b"beat":
                codes, _, errors = wait_for_exit([first, second])
                assert codes == [71, 71]
                assert "process 1 (" in errors[0] and "disconnected" in errors[0]
            else:
                codes, _, errors = wait_for_exit([second])
                assert codes == [71] and "process 0 disconnected" in errors[0]
                codes, _, errors = wait_for_exit([first, start_again(first, 1)])
                assert codes == [0, 0]
    assert done and not any("false" in text for text in errors)


# --- messages of authenticated processes ----------------------------------------------------------


@pytest.mark.fault("P5")
@pytest.mark.parametrize(
    "message",
    [
        *([], 3, "hello", {"hello": 3}, {"hello": {"index": 1}}, {"beat": {"step": "x"}}),
        {"hello": {"index": True, "count": 2, "host": "", "pid": 1, "facts": {}}},
        {"hello": {"index": 2**70, "count": 2, "host": "", "pid": 1, "facts": {}}},
        {"hello": {"index": 1, "count": 2, "host": "", "pid": 1, "facts": {"a": [1]}}},
        {"stop": 75, "deep": json.loads("[" * 40 + "]" * 40)},
        {"text": "x" * MAX_MEMBER_MESSAGE_BYTES},
        {"stop": 75},  # before the hello message
    ],
)
def test_invalid_messages_close_only_their_connection(message: Any) -> None:
    with hub_of_one() as (hub, selector, told):
        here, there = socket.socketpair()
        with here, there:
            near = AuthenticatedConnection(here, KEY, b"nonces", is_hub=True)
            far = AuthenticatedConnection(there, KEY, b"nonces", is_hub=False)
            hub._unknown[near] = time.monotonic()
            selector.register(near, selectors.EVENT_READ)
            far.send(message)
            deadline = deadline_soon()
            while near in hub._unknown:
                assert time.monotonic() < deadline
                far.send_pending()
                for key, _ in selector.select(0.05):
                    hub.read(key.fileobj)
            assert far.receive(CoordinatorMessage) is None
        assert told == [] and len(hub._members) == 1


@pytest.mark.fault("P5")
def test_random_messages_of_authenticated_process_cause_no_bug() -> None:
    """Messages have valid types, but arbitrary order and values."""
    chance = random.Random(5)
    numbers = (0, 1, -1, 7, 2**62, -(2**62))
    texts = ("", "x", "save", "\x1b[2J", "step", "\u2028" * 300)

    def number() -> float:
        return chance.choice([*numbers, 0.5, -1e308, 1e308, 1e-300])

    def beat() -> dict[str, Any]:
        words = {"phase": chance.choice(texts), "step": chance.choice(numbers)}
        return words | {"seconds": number(), "own": number(), "waits": chance.random() < 0.5}

    makes: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"beat": beat()},
        lambda: {"at": chance.choice(numbers)},
        lambda: {"same": chance.choice(texts), "value": chance.choice(texts)},
        lambda: {"same": chance.choice(texts)},
        lambda: {"stop": 75},
        lambda: {"bye": True},
        lambda: {"value": "", "other": [None]},
        lambda: {"failed": {"code": chance.choice(numbers), "text": chance.choice(texts)}},
    )
    for _ in range(40):
        with hub_of_one() as (hub, _, told):
            hub.join(Member(1))
            for _ in range(50):
                index, message = chance.randrange(2), chance.choice(makes)()
                hub.handle(index, parse_json(json.dumps(message), MemberMessage))
                hub.check_timeouts()
        ended = [message["leave"]["code"] for message in told if "leave" in message]
        assert told[0] == {"welcome": True} and all(0 < code < 256 for code in ended)


@contextlib.contextmanager
def hub_of_one() -> Iterator[tuple[Any, selectors.BaseSelector, list[Any]]]:
    """Yield the coordinator of two processes, without a port, and the messages to process 0."""
    told: list[Any] = []
    with selectors.DefaultSelector() as selector:
        hub = Coordinator(2, Timeouts(), told.append, print, selector)
        hub.join(Member(0))
        try:
            yield hub, selector, told
        finally:
            hub.close()


@pytest.mark.fault("P5")
@pytest.mark.parametrize(
    "code", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (-1, 256, 2**40))]
)
def test_no_message_of_process_ends_run_with_exit_code_0(code: int) -> None:
    with (
        members("steps(link, 1000)", count=2, started=1) as (first,),
        joined(first, 1, count=2) as wire,
    ):
        assert received(wire, "welcome")
        wire.send({"failed": {"code": code, "text": "\x1b]0;owned\x07done\r\n" + "x" * 9000}})
        codes, _, errors = wait_for_exit([first])
    assert codes == [int(ExitCode.BUG)]
    text = errors[0]
    assert re.search(r"^process 1 \(far, pid 1\) failed first:$", text, re.M)
    assert "\x1b" not in text and "\r" not in text and len(text) < 6000


@pytest.mark.fault("P5")
def test_peer_that_reads_nothing_does_not_block_others() -> None:
    here, there = socket.socketpair()
    with here, there:
        wire = AuthenticatedConnection(here, KEY, b"nonces", is_hub=True)
        begin = time.monotonic()
        while wire.send({"refused": "x" * (1 << 20)}):
            assert time.monotonic() - begin < 20
        assert wire.receive(MemberMessage) is None
    with (
        members("steps(link, 5)", count=3, started=1) as (first,),
        authenticated(first),  # sends and reads nothing
    ):
        codes, _, errors = wait_for_exit([first, start_again(first, 1), start_again(first, 2)])
    assert codes == [0, 0, 0], errors
