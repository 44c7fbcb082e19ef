"""An S3 server on 127.0.0.1 (moto) behind a proxy that counts, fails and changes requests."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "a-secret-access-key-of-a-test"
KEY = "AKIAFAKEFAKEFAKEFAKE"


@dataclass
class Store:
    """An S3 server. `fault` may answer a request before it reaches the server, and `lost` selects
    requests whose response is lost.
    """

    url: str = ""
    fault: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
    lost: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
    requests: list[str] = field(default_factory=list)
    filesystem: Any = None

    def names(self, folder: str) -> set[str]:
        """Return the names of all objects in a folder, relative to it."""
        found = self.filesystem.find(folder)
        return {name[len(folder) :].lstrip("/") for name in found}


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store
    port = 0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.store.requests.append(f"{self.command} {self.path}")
        if self.store.fault(self):
            return
        connection = HTTPConnection("127.0.0.1", self.port)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if self.store.lost(self):
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        if not answer.getheader("Content-Length"):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def variables(store: Store) -> dict[str, str]:
    """Return the environment variables that redirect `s3://` to the server."""
    return {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def served_s3() -> Iterator[Store]:
    """Serve S3 with an empty bucket `bucket`."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    store = Store()
    handler = type("Handler", (_Proxy,), {"store": store, "port": moto.get_host_and_port()[1]})
    with _Server(("127.0.0.1", 0), handler) as server:
        store.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
            moto.stop()
