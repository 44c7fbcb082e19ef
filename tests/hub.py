"""A fake Hugging Face Hub on 127.0.0.1, with a second server for large files."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_INFO = re.compile(r"/api/(models|datasets)/(.+?)(?:/revision/(.+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")

TOKEN = "hf_" + "A1b2C3d4" * 4
WEIGHTS = "model.safetensors"
LARGE = bytes(range(256)) * 4000


@dataclass
class Repository:
    """Files of one commit. The names in `large` are stored on the second server."""

    files: dict[str, bytes]
    large: frozenset[str] = frozenset()
    revisions: tuple[str, ...] = ("main",)
    is_private: bool = False
    commit: str = "c" * 40
    stated: dict[str, str] = field(default_factory=dict)
    """Wrong digests by name."""

    def info(self, name: str) -> dict[str, Any]:
        siblings = []
        for path, content in self.files.items():
            one: dict[str, Any] = {"rfilename": path, "size": len(content)}
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if path in self.large:
                digest = self.stated.get(path, hashlib.sha256(content).hexdigest())
                one["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 100}
                git = "0" * 40
            one["blobId"] = self.stated.get(path, git)
            siblings.append(one)
        return {"id": name, "sha": self.commit, "siblings": siblings}


@dataclass
class Request:
    """A request that a server received."""

    server: str
    path: str
    headers: dict[str, str]

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "")

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class Hub:
    """Repositories, the requests so far, and faults: lists of functions by name of a file.

    A fault is called with the handler and the content, and answers one request. The fault of the
    name `info` answers a request for the list of files.
    """

    url: str = ""
    store: str = ""
    token: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def of(self, name: str) -> list[Request]:
        """Return the requests for a file that were not redirected."""
        return [r for r in self.requests if unquote(urlsplit(r.path).path).endswith(f"/{name}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    server_name = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(self.server_name, self.path, headers))
        path = unquote(urlsplit(self.path).path)
        if self.server_name == "store":
            kind, name, file = path[1:].split("//")
            repositories = self.hub.datasets if kind == "datasets" else self.hub.models
            return self.file(repositories[name], file)
        if found := _INFO.fullmatch(path):
            repositories = self.hub.datasets if found[1] == "datasets" else self.hub.models
            repository = repositories.get(found[2])
            if self.hub.faults["info"]:
                return self.hub.faults["info"].pop(0)(self, b"")
            if repository is None or (repository.is_private and not self.has_token()):
                return self.reply(401, {"error": "no"}, X_Error_Code="RepoNotFound")
            revision = found[3] or "main"
            if revision not in (*repository.revisions, repository.commit):
                return self.reply(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
            return self.reply(200, repository.info(found[2]))
        if found := _FILE.fullmatch(path):
            repositories = self.hub.datasets if found[1] else self.hub.models
            repository = repositories[found[2]]
            if repository.is_private and not self.has_token():
                return self.reply(401)
            if found[3] != repository.commit:
                return self.reply(404)
            if found[4] in repository.large:
                kind = "datasets" if found[1] else "models"
                place = f"{self.hub.store}/{quote(f'{kind}//{found[2]}//{found[4]}')}"
                return self.reply(302, Location=f"{place}?X-Amz-Signature=signed-{'s' * 20}")
            return self.file(repository, found[4])
        return self.reply(404)

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def file(self, repository: Repository, name: str) -> None:
        content = repository.files[name]
        if self.hub.faults[name]:
            return self.hub.faults[name].pop(0)(self, content)
        return self.range(content)

    def range(self, content: bytes, count: int | None = None) -> None:
        """Answer with the requested range, of which only `count` bytes are sent."""
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        rest = content[first:]
        headers = {"Content_Length": str(len(rest))}
        if asked:
            headers["Content_Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.reply(206 if asked else 200, rest[:count], **headers)


def status(code: int, **headers: str) -> Any:
    """Return a fault that answers with a status."""
    return lambda handler, content: handler.reply(code, b"{}", **headers)


def reset_after(count: int) -> Any:
    """Return a fault that sends `count` bytes and resets the connection."""

    def answer(handler: Handler, content: bytes) -> None:
        handler.range(content, count)
        handler.wfile.flush()
        time.sleep(0.1)  # otherwise, the reset discards bytes that were not read yet
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.close_connection = True

    return answer


def stall_after(count: int, stalled: threading.Event, ended: threading.Event) -> Any:
    """Return a fault that sends `count` bytes, sets `stalled` and waits for `ended`."""

    def answer(handler: Handler, content: bytes) -> None:
        handler.reply(200, content[:count], Content_Length=str(len(content)))
        handler.wfile.flush()
        stalled.set()
        ended.wait(60)
        handler.close_connection = True

    return answer


def whole(handler: Handler, content: bytes) -> None:
    """Answer with the whole file and ignore the range."""
    handler.reply(200, content)


def redirect(location: str) -> Any:
    """Return a fault that redirects."""
    return lambda handler, content: handler.reply(302, Location=location)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def served_hub() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    servers, threads = [], []
    for name in ("hub", "store"):
        handler = type("Handler", (Handler,), {"hub": hub, "server_name": name})
        servers.append(_Server(("127.0.0.1", 0), handler))
        threads.append(threading.Thread(target=servers[-1].serve_forever, args=(0.05,)))
        threads[-1].start()
    hub.url, hub.store = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def model(**changes: object) -> Repository:
    """Return a model with files of all types."""
    files = {
        "config.json": b"{}",
        WEIGHTS: LARGE,
        "tokenizer.json": b'{"a": 1}',
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "README.md": b"text",
        "original/params.json": b"{}",
        "consolidated.safetensors": b"twice",
    }
    return Repository(files, frozenset({WEIGHTS}), **changes)  # type: ignore[arg-type]
