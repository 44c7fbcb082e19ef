"""The port of process 0 that accepts the other processes and rejects unauthenticated peers.

Any host can connect to the port, so the number, received bytes and lifetime of unauthenticated
connections are limited. After each check of the port, the listener pauses for a multiple of the CPU
time of the check.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from maxpipe.distributed.protocol import AuthenticatedConnection, UnauthenticatedPeer

_MAX_UNAUTHENTICATED, _SECONDS = 64, 10.0
"""Maximum number of unauthenticated connections in addition to one per process, and the time limit
for authentication in seconds."""
_ACCEPTS = 16
"""Maximum number of connections accepted per check."""
_PAUSE_FACTOR, _MIN_PAUSE_SECONDS = 30.0, 0.01
"""Pause after a check, as a multiple of its CPU time, and the minimum pause in seconds."""
_BACKLOG = 512
_OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def own_addresses(host: str) -> list[str]:
    """Return the local addresses to which `host` resolves, or nothing if it does not resolve."""
    try:
        found = list(dict.fromkeys(str(each[4][0]) for each in _resolve(host, 0)))
    except socket.gaierror:  # other hosts may resolve the name
        return []
    is_name = host not in found and host != "localhost"
    if is_name and any(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        return []  # many hosts map their names to 127.0.1.1, which other hosts cannot reach
    return [each for each in found if _is_local_address(each)]


def _resolve(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _is_local_address(address: str) -> bool:
    """Return whether the address belongs to an interface of this host, not to a router."""
    family, kind, _, _, where = _resolve(address, 0)[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


class Listener:
    """Sockets that accept the processes of the run. `say` prints a line.

    Args:
        address: host and port to which the other processes connect.
        secret: secret of the run.
        count: number of processes.

    Raises:
        OSError: the port is in use.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, count: int, say: Callable[[str], None]
    ):
        self._secret, self._most = secret, _MAX_UNAUTHENTICATED + count
        # The oldest connection is first.
        self._unauthenticated: dict[UnauthenticatedPeer, None] = {}
        self._opened: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self.num_refused, self.last_refused = 0, ""
        self.paused_until = 0.0
        try:
            self._open(address, count, say)
        except OSError:
            self.close()
            raise

    def _open(self, address: tuple[str, int], count: int, say: Callable[[str], None]) -> None:
        host, port = address
        hosts = own_addresses(host)
        if not hosts:
            say(f"process 0 listens on all addresses: {host} is not an address of this machine")
        dual = not hosts and socket.has_dualstack_ipv6()
        for each in hosts or [""]:
            family = socket.AF_INET6 if ":" in each or dual else socket.AF_INET
            opened = socket.create_server(
                (each, port), family=family, backlog=_BACKLOG + count, dualstack_ipv6=dual
            )
            opened.setblocking(False)
            self._opened.append(opened)
            self._selector.register(opened, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a connection is waiting."""
        return self._selector.fileno()

    def accept_authenticated(self) -> list[AuthenticatedConnection]:
        """Check the port and return newly authenticated processes; empty before `paused_until`."""
        now, begin = time.monotonic(), time.thread_time()
        if now < self.paused_until:
            return []
        proved = []
        for key, _ in self._selector.select(0):
            source: Any = key.fileobj
            if source in self._opened:
                self._accept(source)
            elif source in self._unauthenticated:  # not evicted meanwhile
                proved += self._authenticate(source)
        for stranger in [each for each in self._unauthenticated if now - each.since > _SECONDS]:
            self._reject(stranger)
        worked = time.thread_time() - begin
        self.paused_until = time.monotonic() + max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * worked)
        return proved

    def _accept(self, opened: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = opened.accept()
            except OSError as error:
                if error.errno in _OUT_OF_SOCKETS and self._unauthenticated:
                    self._reject(next(iter(self._unauthenticated)))
                return
            if len(self._unauthenticated) >= self._most:
                self._evict_oldest()
            stranger = UnauthenticatedPeer(sock, str(address[0]))
            self._unauthenticated[stranger] = None
            self._selector.register(stranger, selectors.EVENT_READ)

    def _evict_oldest(self) -> None:
        """Close the oldest connection from the address with the most connections."""
        ((busiest, _),) = Counter(each.address for each in self._unauthenticated).most_common(1)
        self._reject(next(each for each in self._unauthenticated if each.address == busiest))

    def _authenticate(self, stranger: UnauthenticatedPeer) -> list[AuthenticatedConnection]:
        try:
            wire = stranger.advance(self._secret)
        except OSError:
            self._reject(stranger)
            return []
        if wire is None:
            return []
        self._selector.unregister(stranger)
        del self._unauthenticated[stranger]
        return [wire]

    def _reject(self, stranger: UnauthenticatedPeer) -> None:
        self.num_refused, self.last_refused = self.num_refused + 1, stranger.address
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger)
        self._unauthenticated.pop(stranger, None)
        stranger.close()

    def close(self) -> None:
        """Close the port and all unauthenticated connections."""
        for each in (*self._opened, *self._unauthenticated):
            each.close()
        self._selector.close()
