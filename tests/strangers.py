"""Unauthenticated peers that send random data to a port over many connections."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FACTS = {"train.steps": "10"}
HELLO = {"index": 1, "count": 2, "host": "far", "pid": 1, "facts": FACTS}


def _line(*messages: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in messages)


def _frame(chance: random.Random, text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + chance.randbytes(32) + text


def _greeting(chance: random.Random) -> bytes:
    return b"maxpipe1" + chance.randbytes(32)


def _mutated(chance: random.Random, text: bytes) -> bytes:
    found = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        where = chance.randrange(len(found))
        found[where : where + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
    return bytes(found) or b"\0"


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda chance: chance.randbytes(chance.choice([1, 7, 40, 64, 72, 1000, 70_000])),
    lambda chance: b"[" * chance.choice([10, 1000, 100_000]),
    lambda chance: b"\xff\xff\xff\xff" + b"x" * 1000,
    lambda chance: b"\0" * chance.choice([4, 40, 5000]),
    lambda chance: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda chance: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    lambda chance: b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + chance.randbytes(500),
    lambda chance: b"\x1b]0;gone\x07\x1b[2J\r\n",
    lambda chance: _line({"hello": HELLO | {"count": chance.choice([0, 1, 3, -1, 10**30])}}),
    lambda chance: _line({"hello": HELLO}, {"failed": {"code": 0, "text": "\x1b[31m"}}),
    lambda chance: _line({"leave": {"code": 0, "text": "", "stacks": True}}, {"welcome": True}),
    lambda chance: _mutated(chance, _line({"hello": HELLO}, {"stop": 75}, {"bye": True})),
    _greeting,
    lambda chance: _greeting(chance)[: chance.randint(1, 39)],
    lambda chance: _mutated(chance, _greeting(chance)),
    lambda chance: _greeting(chance) + chance.randbytes(32) + _frame(chance, b'{"bye": true}'),
    lambda chance: _greeting(chance) + _frame(chance, _line({"hello": HELLO})),
)


class Flood:
    """Up to `most` connections to a local port, each of which sends random data.

    Some peers send the response back, some send more data, some disconnect or reset the
    connection, and some stay connected without sending anything.
    """

    def __init__(self, port: int, seed: int, most: int):
        self._port, self._most = port, most
        self._chance = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, bytes] = {}
        self.num_messages = self.num_refused = 0

    def __enter__(self) -> Flood:
        return self

    def __exit__(self, *exception: object) -> None:
        for sock in list(self._open):
            self._close(sock)
        self._selector.close()

    def send(self, messages: int, seconds: float, *, a_second: float = math.inf) -> None:
        """Send `messages` messages over 1 to `most` connections, or until `seconds` have passed."""
        first, begin = self.num_messages, time.monotonic()
        wanted = self._most
        while self.num_messages < first + messages:
            passed = time.monotonic() - begin
            if passed > seconds:
                return
            time.sleep(max(0.0, (self.num_messages - first) / a_second - passed))
            if self._chance.random() < 0.005:
                wanted = self._chance.choice([1, 8, self._most // 2 or 1, self._most])
            while len(self._open) > wanted:
                self._close(next(iter(self._open)))
            for _ in range(16):
                if len(self._open) < wanted:
                    self._connect()
            for key, _ in self._selector.select(0.02):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                with contextlib.suppress(OSError):
                    if answer := sock.recv(4096):
                        if self._chance.random() < 0.5:
                            self._say(sock, answer[-32:])
                        continue
                self._close(sock)
            if self._open and self._chance.random() < 0.5:
                self._say(self._chance.choice(list(self._open)), self._message())

    def _connect(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if sock.connect_ex(("127.0.0.1", self._port)) not in (0, 115):
            self.num_refused += 1
            sock.close()
            return
        self._open[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)
        time.sleep(0.0005)
        if self._chance.random() < 0.9:  # else idle
            self._say(sock, self._message())

    def _message(self) -> bytes:
        return self._chance.choice(KINDS)(self._chance)

    def _say(self, sock: socket.socket, text: bytes) -> None:
        try:
            sock.send(text)
            self.num_messages += 1
        except BlockingIOError:
            return
        except OSError:
            self.num_refused += 1
            self._close(sock)
            return
        if self._chance.random() < 0.2:
            if self._chance.random() < 0.3:  # reset the connection
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if self._open.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()


def cpu_seconds(pid: int, threads: str = "") -> float:
    """Return the user and system CPU time of a process, or of its threads with this name."""
    folder = Path(f"/proc/{pid}")
    ticks = 0
    for path in (folder / "task").iterdir() if threads else [folder]:
        name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        if name == threads or not threads:
            ticks += sum(map(int, rest.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def measured(pid: int, threads: str = "") -> Iterator[list[float]]:
    """Yield a list, to which the CPU share of the process or threads during the block is added."""
    found: list[float] = []
    begin, used = time.monotonic(), cpu_seconds(pid, threads)
    yield found
    found.append((cpu_seconds(pid, threads) - used) / (time.monotonic() - begin))
