"""An HTTP server that stores records, and a plug-in with a tracker that sends records to it."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLUGIN = '''
import json, os, random, urllib.request

from maxpipe.config.plugins import register_tracker
from maxpipe.telemetry.trackers.interface import Tracker


class Stub(Tracker):
    """Sends records to the URL in the file `url` next to the run folder."""

    def open(self, run, run_id):
        self._folder = os.path.dirname(run.folder)
        self._post("open", {"run_id": run_id, "key": run.key, "config": dict(run.config)})
        return run_id or f"id-{run.key}"

    def log(self, records):
        if os.path.exists(os.path.join(self._folder, "raise")) and random.random() < 0.5:
            raise RuntimeError("the client failed")
        self._post("log", [[each.step, each.time, dict(each.values)] for each in records])

    def log_artifact(self, name, text):
        self._post("artifact", [name, text])

    def log_checkpoint(self, step, folder, num_bytes):
        self._post("checkpoint", [step, folder, num_bytes])

    def close(self, is_complete):
        self._post("close", is_complete)

    def _post(self, call, content):
        with open(os.path.join(self._folder, "url")) as file:
            url = f"{file.read()}/{call}"
        urllib.request.urlopen(url, json.dumps(content).encode()).close()  # without a time limit


register_tracker("stub", Stub)
'''


class Server:
    """A server whose behavior can change: `ok`, `slow`, `hang` or an HTTP status."""

    def __init__(self, port: int = 0):
        self.mode, self.slow_seconds = "ok", 0.5
        self.calls: list[tuple[str, Any]] = []
        self.ended = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.mode == "hang":
                    server.ended.wait()
                if server.mode == "slow":
                    time.sleep(server.slow_seconds)
                is_ok = server.mode in ("ok", "slow")
                if is_ok:
                    server.calls.append((self.path.strip("/"), content))
                self.send_response(200 if is_ok else int(server.mode))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # client was killed
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def values(self) -> dict[int, dict[str, float]]:
        """Return the stored metrics of each step; the newest value is valid."""
        found: dict[int, dict[str, float]] = {}
        for call, content in self.calls:
            for step, _, values in content if call == "log" else ():
                found.setdefault(step, {}).update(values)
        return found

    def contents(self, call: str) -> list[Any]:
        """Return the contents of all calls of a kind."""
        return [content for name, content in self.calls if name == call]

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def served() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


def write_plugin(folder: Path) -> Path:
    """Write the plug-in to a folder, and return its path."""
    path = folder / "stub_tracker.py"
    path.write_text(PLUGIN)
    return path


def recorded(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step in `metrics.jsonl`; values that are not finite are NaN."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        del record["time"]
        step = record.pop("step")
        found[step] = {tag: float("nan") if v is None else v for tag, v in record.items()}
    return found
