"""Messages between two processes of a run, authenticated against any third.

Both ends hold the run's secret, and both prove it before either sends anything else:

    member -> hub   the protocol's name, the member's nonce
    hub -> member   the hub's nonce, HMAC(secret, "hub", both nonces)
    member -> hub   HMAC(secret, "member", both nonces)

A proof holds for these nonces and this role only: repeated, reflected or sent elsewhere it proves
nothing. Messages follow, each with its length and an HMAC of its number and content under a key of
this connection and direction. They are JSON and not encrypted.

Only `reach` and `flush` block: what a peer does not read is queued up to a limit, at
which the connection is dropped.

The secret by which the processes of a run authenticate each other.

It is never in a config, a command line or a log. A launcher gives it to all processes in
their environment, or in a private file that the environment names. Without either, process 0 leaves
one in the run's folder, which all processes see and only their user can read, for as long as they
are waited for.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.typed_json import parse_json

_T = TypeVar("_T")

MAX_MEMBER_MESSAGE_BYTES, MAX_COORDINATOR_MESSAGE_BYTES = 1 << 18, 1 << 24
"""The longest messages: a member sends its own state, the hub that of all."""
PIECE_BYTES = 1 << 16

_NAME = b"maxpipe1"
_NONCE, _DIGEST = 32, 32
_HELLO, _CHALLENGE = len(_NAME) + _NONCE, _NONCE + _DIGEST
_HEAD = struct.Struct(f">I{_DIGEST}s")
_MAX_UNSENT_BYTES = 1 << 25
_CONNECT_SECONDS, _ANSWER_SECONDS, _LOOK_SECONDS = 5.0, 15.0, 0.2
_MAX_DRAINED_READS = 64


class PeerAuthenticationError(ConnectionError):
    """The peer does not know the run's secret."""


def _digest(key: bytes, *parts: bytes) -> bytes:
    """A greeting's parts; all but the last have a fixed length for each role."""
    return hmac.digest(key, b"\0".join(parts), "sha256")


class AuthenticatedConnection:
    """Messages over a socket whose other end has proved itself."""

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
        """For a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something is to be sent as soon as the peer reads."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Whether it is on its way; False when the connection is over."""
        text = json.dumps(message).encode()
        with self._lock:
            number = struct.pack(">Q", self._num_sent)
            self._num_sent += 1
            self._unsent += _HEAD.pack(len(text), _digest(self._key_out, number, text)) + text
        return self.send_pending()

    def send_pending(self) -> bool:
        """Sends what is queued, as far as the network accepts it."""
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
        """Waits until all is sent, at most these seconds."""
        end = time.monotonic() + seconds
        while self.send_pending() and self.has_unsent and time.monotonic() < end:
            time.sleep(0.01)

    def receive(self, kind: type[_T]) -> list[_T] | None:
        """Whole messages that have come; None when there will be no more.

        Any other data ends the connection.
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
                    raise ValueError("not of the peer")
                found.append(parse_json(text, kind))
            except ValueError:
                self._end()
                break
        return found

    def _end(self) -> None:
        """The next read finds the end."""
        self._unread.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. What was sent arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            for _ in range(
                _MAX_DRAINED_READS
            ):  # unread bytes would make the network drop the others
                if not self._socket.recv(PIECE_BYTES):
                    break
        self._socket.close()


class UnauthenticatedPeer:
    """A connection whose other end has not proved that it is of this run."""

    def __init__(self, sock: socket.socket, address: str):
        self.address, self.since = address, time.monotonic()
        self._socket, self._read, self._nonces = sock, b"", b""
        sock.setblocking(False)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def advance(self, secret: bytes) -> AuthenticatedConnection | None:
        """Reads what has arrived; the wire, once it has proved to be of the run.

        Raises:
            OSError: it is not of the run, or is gone.
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
        """Closes the socket."""
        self._socket.close()


def _is_beginning(text: bytes) -> bool:
    return text[: len(_NAME)] == _NAME[: len(text)]


def connect(
    address: tuple[str, int], secret: bytes, end: Callable[[], float]
) -> AuthenticatedConnection:
    """A member's wire to the hub at this host and port.

    Args:
        address: host and port.
        secret: of the run.
        end: the time, of the monotonic clock, at which waiting is over.

    Raises:
        NotOfThisRun: the answer is from another program.
        OSError: there is no answer.
    """
    begin = time.monotonic()
    sock = socket.create_connection(address, max(0.1, min(_CONNECT_SECONDS, end() - begin)))
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("there is no listener, and the socket connected to itself")
        sock.settimeout(_LOOK_SECONDS)
        own, answer = secrets.token_bytes(_NONCE), b""
        sock.sendall(_NAME + own)
        while len(answer) < _CHALLENGE:
            if time.monotonic() >= min(end(), begin + _ANSWER_SECONDS):
                raise TimeoutError("no answer")
            with contextlib.suppress(TimeoutError):
                piece = sock.recv(_CHALLENGE - len(answer))
                if not piece:
                    raise ConnectionResetError("it was closed")
                answer += piece
        nonces = own + answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _digest(secret, b"hub", nonces)):
            raise PeerAuthenticationError("it does not know the run's secret")
        sock.sendall(_digest(secret, b"member", nonces))
        return AuthenticatedConnection(sock, secret, nonces, is_hub=False)
    except BaseException:
        sock.close()
        raise


VARIABLE = "MAXPIPE_RUN_SECRET"
FILE_VARIABLE = "MAXPIPE_RUN_SECRET_FILE"

_SECRET_PREFIX = ".secret-"
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 32, 1024
"""Bytes. One recorded greeting is enough to try short secrets offline."""
_ACTION = (
    f"Run `openssl rand -hex 32` once, and set {VARIABLE} to what it prints in the environment of "
    "every process."
)


def generate_secret() -> str:
    """A new random one."""
    return secrets.token_hex(32)


def secret_from_environment(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that the environment holds or names; None where it does neither.

    Raises:
        ConfigError: it is too short, or its file is not private.
    """
    if (text := environment.get(VARIABLE)) is not None:
        found = os.fsencode(text).strip()
        if not _MIN_SECRET_BYTES <= len(found) <= _MAX_SECRET_BYTES:
            rule = (
                f"must have {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} characters, it has "
                f"{len(found)}."
            )
            raise ConfigError.one(VARIABLE, None, rule, _ACTION)
        return found
    if (path := environment.get(FILE_VARIABLE)) is None:
        return None
    try:
        return _read(Path(path))
    except OSError as error:
        # The path is not shown: by the variable's name it counts as a secret.
        rule = f"must name a private file that holds the run's secret: {error.strerror or error}."
        action = "Make it on every host, by `(umask 077; openssl rand -hex 32 > FILE)` and a copy."
        if isinstance(error, PermissionError):
            action = (
                "Let it belong to this user and be readable by no other (`chmod 600`), on every "
                "host."
            )
        raise ConfigError.one(FILE_VARIABLE, None, rule, action) from error


def secret_path(folder: Path, port: int) -> Path:
    """Where process 0 leaves a secret for those that come to this port."""
    return folder / f"{_SECRET_PREFIX}{port}"


@contextlib.contextmanager
def publish_secret(folder: Path, port: int) -> Iterator[bytes]:
    """Writes a new secret for the other processes; it exists until the block ends.

    Raises:
        StorageError: the folder cannot be written.
        ConfigError: its file system does not keep files private.
    """
    path, text = secret_path(folder, port), generate_secret()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "w", encoding="ascii") as stream:
            stream.write(text)
        # An existing file, perhaps a link or from a copied folder, is not used.
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StorageError.unwritable(folder, error) from error
    try:
        read_published_secret(folder, port)  # or else the others would be refused
        yield text.encode()
    finally:
        remove_secret(folder, port)


def remove_secret(folder: Path, port: int) -> None:
    """Removes the file, if it exists."""
    with contextlib.suppress(OSError):
        secret_path(folder, port).unlink()


def remove_stale_secrets(folder: Path) -> None:
    """Removes the files of processes that were killed while they waited, at any port.

    For the holder of the folder's lock: all processes of its run have connected.
    """
    for path in folder.glob(f"{_SECRET_PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def read_published_secret(folder: Path, port: int) -> bytes | None:
    """The secret that process 0 wrote; None before that.

    Raises:
        ConfigError: others than the user of this process could have read it.
    """
    path = secret_path(folder, port)
    try:
        os.listdir(folder)  # else NFS may cache for a minute that there is no such file
        return _read(path)
    except PermissionError as error:
        rule = f"must be readable by the user of all processes, and no other: {error.strerror}."
        raise ConfigError.one(str(path), None, rule, _ACTION) from error
    except OSError:  # not there yet, or being replaced
        return None


def _read(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        PermissionError: it is not this user's alone.
        OSError: it cannot be read, or holds no secret.
    """
    # Opening a pipe without a writer would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"its mode is {mode:o}, others may use it")
        content = stream.read(_MAX_SECRET_BYTES + 1).strip()
    if not _MIN_SECRET_BYTES <= len(content) <= _MAX_SECRET_BYTES:
        raise OSError(
            errno.EINVAL, f"it must hold {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes"
        )
    return content
