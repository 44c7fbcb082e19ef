"""Exchange authenticated messages with the coordinator, and listen for connections from processes.

Both ends have the run's secret, and each proves that it has the secret before it sends any other
data:

    member -> hub   protocol name, nonce of the member
    hub -> member   nonce of the hub, HMAC(secret, "hub", both nonces)
    member -> hub   HMAC(secret, "member", both nonces)

The hub is the coordinator in process 0, and a member is any other process. A proof is valid only
for its nonces and role, so replayed or reflected proofs are rejected. After the handshake, every
message carries its length and an HMAC of its sequence number and content. Each connection has a
separate HMAC key for each direction. Messages are unencrypted JSON.

Only `connect` and `flush` block. Messages that the peer has not read yet are queued. If the queue
exceeds a limit, the connection is closed.

The secret is never part of a config, a command line or a log. A launcher passes the secret to all
processes in an environment variable, or in a private file whose path is in an environment variable.
Otherwise, process 0 writes a secret to the run folder, readable only by the user who started
the run, and removes it after all processes have joined.

`Listener` accepts connections from the other processes on a port of process 0. Any host can connect
to the port, so unauthenticated connections are limited in number, in lifetime and in the bytes
that they may send.
After each poll of the port, the listener pauses for a multiple of the CPU time that the poll used.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.typed_json import parse_json

_T = TypeVar("_T")

MAX_MEMBER_MESSAGE_BYTES, MAX_COORDINATOR_MESSAGE_BYTES = 1 << 18, 1 << 24
"""Maximum message sizes. Messages from the coordinator may be larger, because they can list all
processes."""
PIECE_BYTES = 1 << 16

_NAME = b"maxpipe1"
_NONCE, _DIGEST = 32, 32
_HELLO, _CHALLENGE = len(_NAME) + _NONCE, _NONCE + _DIGEST
_HEAD = struct.Struct(f">I{_DIGEST}s")
_MAX_UNSENT_BYTES = 1 << 25
_CONNECT_SECONDS, _ANSWER_SECONDS, _LOOK_SECONDS = 5.0, 15.0, 0.2
_MAX_DRAINED_READS = 64


class PeerAuthenticationError(ConnectionError):
    """Raised if the peer does not have the run's secret."""


def _digest(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of `parts`. All parts except the last must have a fixed size."""
    return hmac.digest(key, b"\0".join(parts), "sha256")


class AuthenticatedConnection:
    """An authenticated connection that sends and receives messages over a socket."""

    def __init__(self, sock: socket.socket, key: bytes, nonces: bytes, *, is_hub: bool):
        self._socket, self._lock = sock, threading.Lock()
        out, back = (b"from hub", b"from member")[:: 1 if is_hub else -1]
        self._key_out, self._key_in = (_digest(key, name, nonces) for name in (out, back))
        self._longest = MAX_MEMBER_MESSAGE_BYTES if is_hub else MAX_COORDINATOR_MESSAGE_BYTES
        self._unsent, self._unread = bytearray(), bytearray()
        self._num_sent = self._num_received = 0
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether unsent data is queued."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue and send a message. Return False if the connection is closed."""
        text = json.dumps(message).encode()
        with self._lock:
            number = struct.pack(">Q", self._num_sent)
            self._num_sent += 1
            self._unsent += _HEAD.pack(len(text), _digest(self._key_out, number, text)) + text
        return self.send_pending()

    def send_pending(self) -> bool:
        """Send queued data without blocking. Return False if the connection is closed."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                if len(self._unsent) <= _MAX_UNSENT_BYTES:
                    return True
                self._end()
                return False
            except OSError:
                self._unsent.clear()
                return False
        return True

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` for all data to be sent."""
        end = time.monotonic() + seconds
        while self.send_pending() and self.has_unsent and time.monotonic() < end:
            time.sleep(0.01)

    def receive(self, kind: type[_T]) -> list[_T] | None:
        """Return the complete messages received so far, or None if the connection has ended.

        The connection is closed if the peer sends invalid data.
        """
        try:
            data = self._socket.recv(PIECE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unread += data
        found = []
        while len(self._unread) >= _HEAD.size:
            size, proof = _HEAD.unpack_from(self._unread)
            if size > self._longest:
                self._end()
                break
            if len(self._unread) < _HEAD.size + size:
                break
            text = bytes(self._unread[_HEAD.size : _HEAD.size + size])
            del self._unread[: _HEAD.size + size]
            number = struct.pack(">Q", self._num_received)
            self._num_received += 1
            try:
                if not hmac.compare_digest(proof, _digest(self._key_in, number, text)):
                    raise ValueError("the HMAC does not match")
                found.append(parse_json(text, kind))
            except ValueError:
                self._end()
                break
        return found

    def _end(self) -> None:
        """Shut down the connection. The next read detects the end of the stream."""
        self._unread.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket without losing data that was already sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            # Closing a socket with unread data would reset the connection and discard data already
            # sent.
            for _ in range(_MAX_DRAINED_READS):
                if not self._socket.recv(PIECE_BYTES):
                    break
        self._socket.close()


class UnauthenticatedPeer:
    """A connection to a peer that has not been authenticated yet."""

    def __init__(self, sock: socket.socket, address: str):
        self.address, self.since = address, time.monotonic()
        self._socket, self._read, self._nonces = sock, b"", b""
        sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def advance(self, secret: bytes) -> AuthenticatedConnection | None:
        """Continue the handshake with the received data. Return the connection once it succeeds.

        Raises:
            OSError: the peer failed to authenticate or disconnected.
        """
        wanted = _DIGEST if self._nonces else _HELLO
        try:
            piece = self._socket.recv(wanted - len(self._read))
        except BlockingIOError:
            return None
        self._read += piece
        if not piece or not (self._nonces or _is_beginning(self._read)):
            raise PeerAuthenticationError
        if len(self._read) < wanted:
            return None
        said, self._read = self._read, b""
        if not self._nonces:
            own = secrets.token_bytes(_NONCE)
            self._nonces = said[len(_NAME) :] + own
            self._socket.sendall(own + _digest(secret, b"hub", self._nonces))
            return None
        if not hmac.compare_digest(said, _digest(secret, b"member", self._nonces)):
            raise PeerAuthenticationError
        return AuthenticatedConnection(self._socket, secret, self._nonces, is_hub=True)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _is_beginning(text: bytes) -> bool:
    return text[: len(_NAME)] == _NAME[: len(text)]


def connect(
    address: tuple[str, int], secret: bytes, end: Callable[[], float]
) -> AuthenticatedConnection:
    """Connect to the coordinator.

    Args:
        address: host and port.
        secret: secret of the run.
        end: function that returns the deadline in seconds, as measured by `time.monotonic`.

    Raises:
        PeerAuthenticationError: the peer does not have the secret.
        OSError: the coordinator is unreachable or does not respond.
    """
    begin = time.monotonic()
    sock = socket.create_connection(address, max(0.1, min(_CONNECT_SECONDS, end() - begin)))
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("no listener: the socket connected to itself")
        sock.settimeout(_LOOK_SECONDS)
        own, answer = secrets.token_bytes(_NONCE), b""
        sock.sendall(_NAME + own)
        while len(answer) < _CHALLENGE:
            if time.monotonic() >= min(end(), begin + _ANSWER_SECONDS):
                raise TimeoutError("no response")
            with contextlib.suppress(TimeoutError):
                piece = sock.recv(_CHALLENGE - len(answer))
                if not piece:
                    raise ConnectionResetError("the peer closed the connection")
                answer += piece
        nonces = own + answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _digest(secret, b"hub", nonces)):
            raise PeerAuthenticationError("the peer does not have the run's secret")
        sock.sendall(_digest(secret, b"member", nonces))
        return AuthenticatedConnection(sock, secret, nonces, is_hub=False)
    except BaseException:
        sock.close()
        raise


VARIABLE = "MAXPIPE_RUN_SECRET"
FILE_VARIABLE = "MAXPIPE_RUN_SECRET_FILE"

_SECRET_PREFIX = ".secret-"
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 32, 1024
"""Length limits of a secret in bytes. An attacker who records one handshake could find a short
secret by brute force."""
_ACTION = (
    f"Run `openssl rand -hex 32` once, and set {VARIABLE} to its output in the environment of "
    "every process."
)


def generate_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def secret_from_environment(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret from the environment, or from the file named in the environment.

    Return None if neither variable is set.

    Raises:
        ConfigError: the secret has an invalid length, or its file is not private.
    """
    if (text := environment.get(VARIABLE)) is not None:
        found = os.fsencode(text).strip()
        if not _MIN_SECRET_BYTES <= len(found) <= _MAX_SECRET_BYTES:
            rule = (
                f"must have {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} characters, but has "
                f"{len(found)}."
            )
            raise ConfigError.one(Code.NET_SECRET, VARIABLE, None, rule, _ACTION)
        return found
    if (path := environment.get(FILE_VARIABLE)) is None:
        return None
    try:
        return _read(Path(path))
    except OSError as error:
        # The path is not shown, because the variable's name marks its value as a secret.
        rule = f"must name a private file with the run's secret: {error.strerror or error}."
        action = "Create the file with `(umask 077; openssl rand -hex 32 > FILE)` and copy it to "
        action += "every host."
        if isinstance(error, PermissionError):
            action = "On every host, make this user the owner and the only reader of the file "
            action += "(`chmod 600`)."
        raise ConfigError.one(Code.NET_SECRET, FILE_VARIABLE, None, rule, action) from error


def secret_path(folder: Path, port: int) -> Path:
    """Return the path of the file in which process 0 publishes the secret for a port."""
    return folder / f"{_SECRET_PREFIX}{port}"


@contextlib.contextmanager
def publish_secret(folder: Path, port: int) -> Iterator[bytes]:
    """Write a secret file for the other processes; remove the file when the context exits.

    Raises:
        StorageError: the folder cannot be written.
        ConfigError: the file system does not support private files.
    """
    path, text = secret_path(folder, port), generate_secret()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "w", encoding="ascii") as stream:
            stream.write(text)
        # Replace any existing file, which may be a link or part of a copied folder.
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StorageError.unwritable(folder, error) from error
    try:
        read_published_secret(folder, port)  # check that the other processes can read the secret
        yield text.encode()
    finally:
        remove_secret(folder, port)


def remove_secret(folder: Path, port: int) -> None:
    """Remove the file with the published secret, if it exists."""
    with contextlib.suppress(OSError):
        secret_path(folder, port).unlink()


def remove_stale_secrets(folder: Path) -> None:
    """Remove all secret files that killed processes left in the folder.

    The caller must hold the lock on the folder. All processes of the caller's run have then
    connected and no longer read the secret.
    """
    for path in folder.glob(f"{_SECRET_PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def read_published_secret(folder: Path, port: int) -> bytes | None:
    """Return the secret published by process 0, or None if it has not been published yet.

    Raises:
        ConfigError: other users could have read the secret.
    """
    path = secret_path(folder, port)
    try:
        os.listdir(folder)  # otherwise, NFS may cache the absence of the file for a minute
        return _read(path)
    except PermissionError as error:
        rule = f"must be readable only by the user that runs the processes: {error.strerror}."
        raise ConfigError.one(Code.NET_SECRET, str(path), None, rule, _ACTION) from error
    except OSError:  # the file has not been written yet or is being replaced
        return None


def _read(path: Path) -> bytes:
    """Read the secret from a file.

    Raises:
        PermissionError: other users can access the file.
        OSError: the file cannot be read, or does not contain a secret of valid length.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "the path is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the file belongs to another user")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(
                errno.EPERM, f"the file mode is {mode:o}, which gives other users access"
            )
        content = stream.read(_MAX_SECRET_BYTES + 1).strip()
    if not _MIN_SECRET_BYTES <= len(content) <= _MAX_SECRET_BYTES:
        raise OSError(
            errno.EINVAL, f"the file must have {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes"
        )
    return content


# --- listener -----------------------------------------------------------------

_MAX_UNAUTHENTICATED, _AUTHENTICATION_SECONDS = 64, 10.0
"""Maximum number of unauthenticated connections in addition to one per process, and the time limit
for authentication in seconds."""
_ACCEPTS = 16
"""Maximum number of connections accepted per poll of the port."""
_PAUSE_FACTOR, _MIN_PAUSE_SECONDS = 30.0, 0.01
"""Pause after a poll, as a multiple of its CPU time, and the minimum pause in seconds."""
_BACKLOG = 512
_OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def own_addresses(host: str) -> list[str]:
    """Return the local addresses to which `host` resolves; empty if it does not resolve."""
    try:
        found = list(dict.fromkeys(str(each[4][0]) for each in _resolve(host, 0)))
    except socket.gaierror:  # other hosts may be able to resolve the name
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
    """Sockets that accept connections from the other processes. `say` prints a line.

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
        """Poll the port and return newly authenticated connections; none before `paused_until`."""
        now, begin = time.monotonic(), time.thread_time()
        if now < self.paused_until:
            return []
        proved = []
        for key, _ in self._selector.select(0):
            source: Any = key.fileobj
            if source in self._opened:
                self._accept(source)
            elif source in self._unauthenticated:  # this loop may have evicted the connection
                proved += self._authenticate(source)
        for stranger in [
            each for each in self._unauthenticated if now - each.since > _AUTHENTICATION_SECONDS
        ]:
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
