"""An HTTP server that stores records, and a plug-in with a tracker that sends records to it."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.telemetry.trackers.delivery import Trackers, TrackingContext
from maxpipe.telemetry.trackers.interface import TrackedRun
from maxpipe.telemetry.writers import EventLog, MetricWriter

SECONDS = 20.0
"""Time limit of a delivery on a busy machine."""

PLUGIN = '''
import json, os, random, urllib.request

from maxpipe.config.plugins import register_tracker
from maxpipe.telemetry.trackers.interface import Tracker


class Stub(Tracker):
    """Sends records to the URL in the file `url` next to the run folder."""

    if os.path.exists(os.path.join(os.path.dirname(__file__), "settle")):
        settle_seconds = 1000.0

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
        self.rejected: set[str] = set()
        """Calls that are answered with status 500 in every mode."""
        self.ended = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.mode == "hang":
                    server.ended.wait()
                if server.mode == "slow":
                    time.sleep(server.slow_seconds)
                call = self.path.strip("/")
                status = 200 if server.mode in ("ok", "slow") else int(server.mode)
                status = 500 if call in server.rejected else status
                if status == 200:
                    server.calls.append((call, content))
                self.send_response(status)
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


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


class Tracking:
    """A run folder with a metrics file, and trackers that receive its records."""

    def __init__(self, folder: Path, names: Sequence[str] = ("stub",), **settings: Any):
        self._names = names
        self.folder = folder / "run"
        self.folder.mkdir(exist_ok=True)
        self._plugin = write_plugin(folder)
        defaults = TrackerConfig(exit_timeout_seconds=SECONDS, request_timeout_seconds=5.0)
        self.config = dataclasses.replace(defaults, **settings)
        self.warnings: list[str] = []

    def open(self, resume_step: int = 0) -> MetricWriter:
        described = TrackedRun(
            name="run",
            project="p",
            key="",
            folder=str(self.folder),
            config={"train.steps": 3, "optim.learning_rate": 0.25},
            tags={"git_commit": "0" * 40, "git_dirty": "false"},
            tracker_config=self.config,
        )
        context = TrackingContext(
            run_dir=self.folder,
            config=self.config,
            plugins=[str(self._plugin)] if "stub" in self._names else [],
            describe=lambda: described,
            events=EventLog(self.folder),
            warn=self.warnings.append,
            note=lambda _: None,
            ours=lambda: True,
        )
        self.trackers = Trackers(self._names, context)
        self.writer = MetricWriter(
            self.folder, tensorboard=False, resume_step=resume_step, observers=[self.trackers]
        )
        return self.writer

    def write(self, *steps: int) -> None:
        for step in steps:
            self.writer.write(step, {"train/loss": 1 / step, "perf/step_s": time.time()})

    def close(self) -> float:
        """Close the trackers, and return the time that this took in seconds."""
        start = time.monotonic()
        self.trackers.close(is_complete=True)
        return time.monotonic() - start

    def serve_at(self, url: str) -> None:
        (self.folder.parent / "url").write_text(url)

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] in names]

    @property
    def cursor(self) -> dict[str, Any]:
        path = self.folder / "trackers.json"
        return json.loads(path.read_text())[self._names[0]] if path.exists() else {"step": None}
