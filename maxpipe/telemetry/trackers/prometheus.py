"""Tracker for Prometheus: an HTTP endpoint with the newest value of each metric, and a file.

Both have the text format of Prometheus. The file is for the textfile collector of node_exporter.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import math
import re
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.io import files
from maxpipe.telemetry.metrics import metric_of
from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[^a-zA-Z0-9_]")
_MAX_CONNECTIONS = 32
"""Maximum number of open connections. Further connections are closed."""
_REQUEST_SECONDS = 10.0
"""Maximum duration of a connection."""
_RETRY_SECONDS = 10.0
"""Pause between attempts to open the endpoint, if a file is written as well."""


class _Server(http.server.ThreadingHTTPServer):
    """HTTP server that limits the number and the duration of connections, so that a client cannot
    exhaust threads and file descriptors.
    """

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]):
        [(self.address_family, _, _, _, place), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((str(place[0]), port), handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without the DNS request of HTTPServer
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        def end() -> None:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(_REQUEST_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback if a client closes its connection."""


class PrometheusTracker(Tracker):
    """Serves the newest values. Each metric has the label `run`."""

    keeps_history: ClassVar[bool] = False

    def __init__(self) -> None:
        self._run, self._file, self._warning = "", "", ""
        self._config, self._retry_at = TrackerConfig(), 0.0
        self._values: dict[str, float] = {}
        self._step, self._text = -1, ""
        self._server: _Server | None = None

    def open(self, run: TrackedRun, run_id: str) -> str:
        self._run, self._config = run.name, run.tracker_config
        self._file = self._config.prometheus_file
        self._open_endpoint()
        return run.name

    def _open_endpoint(self) -> None:
        """Open the endpoint if it is enabled and not open. With a file, a failure is a warning."""
        port = self._config.prometheus_port
        if not port or self._server is not None or time.monotonic() < self._retry_at:
            return
        try:
            self._server = self._serve(self._config.prometheus_host, port)
        except (OSError, RuntimeError) as error:
            if not self._file:
                raise
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._warning = f"{error}. Only tracker.prometheus_file is written."
        else:
            self._warning = ""

    def _serve(self, host: str, port: int) -> _Server:
        tracker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                body = tracker._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print no line per request."""

        try:
            server = _Server(host, port, Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                words = f"port {port} of {host} is in use; set tracker.prometheus_port to another "
                raise RuntimeError(f"{words}port, or to 0 to serve no endpoint") from error
            raise
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._step = record.step
            self._values |= record.values
        self._text = exposition(self._run, self._step, self._values)
        if self._file:
            files.write(self._file, self._text)
        self._open_endpoint()

    def close(self, is_complete: bool) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def warning(self) -> str:
        return self._warning

    @property
    def address(self) -> str:
        if self._server is None:
            return self._file
        host, port = self._config.prometheus_host, self._config.prometheus_port
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def exposition(run: str, step: int, values: Mapping[str, float]) -> str:
    """Return the newest values of a run in the text format of Prometheus."""
    label = _escape(run)
    lines = [
        "# HELP maxpipe_step Step of the newest record.",
        "# TYPE maxpipe_step gauge",
        f'maxpipe_step{{run="{label}"}} {step}',
    ]
    tags_of: dict[str, list[str]] = {}
    for tag in values:
        tags_of.setdefault(f"maxpipe_{_NAME.sub('_', tag)}", []).append(tag)
    for name, tags in tags_of.items():
        if (metric := metric_of(tags[0])) is not None:
            unit = f" [{metric.unit}]" if metric.unit else ""
            text = " ".join(f"{metric.meaning}{unit}".replace("\\", r"\\").split())
            lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} gauge")
        # The label `tag` separates metrics whose tags differ only in characters such as `-`.
        lines += [f'{name}{{run="{label}",tag="{_escape(t)}"}} {_number(values[t])}' for t in tags]
    return "\n".join([*lines, ""])


def _escape(label: str) -> str:
    label = label.encode("utf-8", "replace").decode()  # without surrogates
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
