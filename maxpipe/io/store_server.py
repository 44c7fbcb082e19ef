"""S3 server on the loopback interface for stores that tensorstore has no driver for.

tensorstore writes arrays with its S3 driver, and the server performs the requests with the fsspec
file system of the store, in the same process. It implements only the requests of that driver: GET
with ranges, HEAD, PUT, DELETE and ListObjectsV2.

Every process has its own server with a random bucket name, which is the secret that other users of
the machine do not know. All other requests are denied.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from maxpipe.errors import exception_chain
from maxpipe.io.redact import register_secret
from maxpipe.io.stores import create_parent, find_objects, store_filesystem, strip_scheme

_BLOCK = 8 << 20
"""Bytes that a request reads or writes at once. Smaller objects are written atomically."""
CONTEXT: dict[str, Any] = {
    "s3_request_concurrency": {"limit": 16},
    "s3_request_retries": {"max_retries": 5, "initial_delay": "1s", "max_delay": "8s"},
}
"""tensorstore context of served arrays, which limits memory to two blocks per request. The library
of the store also repeats requests. Resources in a spec would make copies of indexes impossible."""


def served_array_store(path: str) -> dict[str, Any]:
    """Return the tensorstore spec for arrays below a folder of any store."""
    with _START:
        server = _server()
    register_secret(server.token)  # errors of tensorstore contain the spec
    return {
        "driver": "s3",
        "endpoint": server.endpoint,
        "bucket": server.token,
        "path": path.replace("://", "/", 1),
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
        "use_conditional_write": True,
    }


_START = threading.Lock()
"""Held while the server of the process is started, because its lock protects indexes only if all
requests use the same server."""


@functools.cache
def _server() -> _Server:
    server = _Server(("127.0.0.1", 0), _Request)
    for name in ("no_proxy", "NO_PROXY"):  # requests to the server bypass HTTP proxies
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    threading.Thread(target=server.serve_forever, name="store-server", daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.token = secrets.token_hex(16)
        self.lock = threading.Lock()
        """Held while an index is read or written, because some stores write in place. Only one
        process writes each index."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client closed the connection
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any
    _headers_sent = False

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        token, _, key = unquote(url.path).removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer_error(403, "AccessDenied", "the request has a wrong token")
        self._headers_sent = False
        try:
            if self.command == "GET" and "list-type" in (query := parse_qs(url.query)):
                return self._list(query.get("prefix", [""])[0])
            scheme, _, name = key.partition("/")
            path = f"{scheme}://{name}"
            match self.command:
                case "PUT":
                    self._write(path)
                case "DELETE":
                    self._delete(path)
                case _:
                    self._read(path)
        except Exception as error:
            if self._headers_sent:
                raise ConnectionError from error  # the body remains incomplete
            self._answer_error(*_describe(error))

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle

    def _answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self._headers_sent = True
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def _answer_error(self, status: int, code: str, message: str) -> None:
        self.close_connection = True  # the body of the request may be unread
        text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        self._answer(status, text.encode(), Connection="close")

    def _check_conditions(self, etag: str | None) -> int:
        """Return the status of a request whose conditions do not hold, or 0."""
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if match and match != etag and not (match == "*" and etag):
            return 412
        if etag and none_match in (etag, "*"):
            return 412 if self.command == "PUT" else 304
        return 0

    def _read(self, path: str) -> None:
        store, content = store_filesystem(path), b""
        if is_data := _is_data(path):
            info = store.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            size = info["size"]
        else:
            with self.server.lock:
                size = len(content := store.cat_file(path))
        headers: dict[str, Any] = {"ETag": _entity_tag(path, content)}
        if status := self._check_conditions(headers["ETag"]):
            return self._answer(status, **headers)
        status, start, end = 200, 0, size
        if found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = found.groups()
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            if start >= end:
                return self._answer(416, Content_Range=f"bytes */{size}")
            status, headers["Content_Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        self._answer(status, b"", Content_Length=end - start, **headers)
        if self.command == "HEAD":
            return
        for begin in range(start, end, _BLOCK):
            stop = min(end, begin + _BLOCK)
            block = store.cat_file(path, begin, stop) if is_data else content[begin:stop]
            if len(block) < stop - begin:
                raise ConnectionError("the object was changed")
            self.wfile.write(block)

    def _write(self, path: str) -> None:
        if _is_data(path):
            return self._answer(200, ETag=self._store(path))
        with self.server.lock:
            if self.headers.get("If-Match") or self.headers.get("If-None-Match"):
                try:
                    etag = _entity_tag(path, store_filesystem(path).cat_file(path))
                except FileNotFoundError:
                    etag = None
                if status := self._check_conditions(etag):
                    return self._answer_error(
                        status, "PreconditionFailed", "the object was changed"
                    )
            self._answer(200, ETag=self._store(path))

    def _store(self, path: str) -> str:
        """Store the body of the request as an object, and return its entity tag."""
        size = int(self.headers["Content-Length"])
        create_parent(path)
        store = store_filesystem(path)
        if size <= _BLOCK:
            content = next(self._blocks(size), b"")
            store.pipe_file(path, content)
            return _entity_tag(path, content)
        file = store.open(path, "wb", block_size=_BLOCK)
        try:
            for block in self._blocks(size):
                file.write(block)
        except BaseException:
            file.closed = True  # an incomplete object is not committed
            raise
        file.close()
        return _entity_tag(path, b"")

    def _blocks(self, size: int) -> Iterator[bytes]:
        for begin in range(0, size, _BLOCK):
            block = self.rfile.read(expected := min(_BLOCK, size - begin))
            if len(block) < expected:
                raise ConnectionError("the request is incomplete")
            yield block

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            store_filesystem(path).rm(path)
        self._answer(204)

    def _list(self, prefix: str) -> None:
        scheme, _, name = prefix.partition("/")
        above = f"{scheme}://{name.rpartition('/')[0]}"
        begin, objects = len(strip_scheme(above)), find_objects(above)
        keys = {
            f"{above}{found[begin:]}".replace("://", "/", 1): objects[found] for found in objects
        }
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{info['size']}</Size></Contents>"
            for key, info in keys.items()
            if key.startswith(prefix) and info["type"] == "file"
        )
        head = f"<KeyCount>{entries.count('<Key>')}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{head}{entries}</ListBucketResult>".encode())


def _is_data(path: str) -> bool:
    """Return whether an object is a data file of an OCDBT database, which never changes."""
    return re.search(r"/d/[0-9a-f]{32}$", path) is not None


def _entity_tag(path: str, content: bytes) -> str:
    """Return the entity tag of an object: the random name of data, or a digest of an index.

    The tags and times that stores record differ, and may be too coarse.
    """
    if _is_data(path):
        return f'"{path[-32:]}"'
    return f'"{hashlib.sha256(content).hexdigest()}"'


def _describe(error: Exception) -> tuple[int, str, str]:
    """Return the status, the S3 error code and the message for an error of a store."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    for cause in exception_chain(error):
        status = getattr(cause, "status_code", None)
        if isinstance(cause, FileNotFoundError) or status == 404:
            return 404, "NoSuchKey", text
        if isinstance(cause, PermissionError) or status in (401, 403):
            return 403, "AccessDenied", text
    return 503, "ServiceUnavailable", text
