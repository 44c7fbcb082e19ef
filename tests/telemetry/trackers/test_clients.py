"""Values in the services, read with their own clients, equal `metrics.jsonl`.

The clients are not among the development tools. Install them to a folder, and name it:

    pip install --target clients wandb mlflow trackio opentelemetry-exporter-otlp-proto-http
    TRACKERS=clients pytest -m trackers tests/telemetry/trackers
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.trackers.stub import Tracking, recorded, wait_until

FOLDER = os.path.abspath(os.environ.get("TRACKERS", "/nowhere"))
pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(not os.path.isdir(FOLDER), reason="TRACKERS names no folder of clients"),
]
SCRIPT = Path(__file__).with_name("read_back.py")
SECONDS = 120.0


@pytest.fixture(autouse=True)
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the clients, and no client reads the user's files or variables."""
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def read_back(service: str, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": FOLDER}
    command = [sys.executable, str(SCRIPT), service, *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stderr.decode()
    found = json.loads(ran.stdout[ran.stdout.index(b'{"values"') :])
    found["values"] = {int(step): values for step, values in found["values"].items()}
    return found


def assert_equal(found: dict[int, dict[str, float]], folder: Path) -> None:
    expected = recorded(folder)
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step].keys() == values.keys(), step
        for tag, value in values.items():
            other = found[step][tag]
            assert other == value or (math.isnan(value) and math.isnan(other)), (step, tag)


def drop_removed(found: dict[int, dict[str, float]]) -> None:
    """Remove the evaluation of step 12, which only the killed attempt recorded: services do not
    delete values.
    """
    found[12].pop("eval/loss", None)


def track(folder: Path, name: str, **settings: Any) -> Tracking:
    """Track a run that is killed after step 12 and resumes after step 8, with all kinds of
    values.
    """
    settings = {"exit_timeout_seconds": SECONDS, "project": "p", **settings}
    tracking = Tracking(folder, [name], **settings)
    tracking.open()
    for step in range(1, 13):
        tracking.writer.write(step, {"train/loss": math.pi / step, "perf/step_s": time.time()})
    tracking.writer.write(12, {"eval/loss": 1e-300})
    wait_until(lambda: tracking.trackers._deliveries[0]._reader.step == 12, SECONDS)
    delivery = tracking.trackers._deliveries[0]
    delivery._is_abandoned = True
    assert delivery._process is not None
    delivery._process.kill()
    again = Tracking(folder, [name], **settings)
    again.open(resume_step=8)
    for step in range(9, 21):
        again.writer.write(step, {"train/loss": math.e / step, "perf/step_s": time.time()})
        again.writer.write(step, {"train/grad_norm": math.nan})
    again.writer.write(20, {"eval/loss": 5e-324, "train/tokens": 2.0**53 + 2})
    again.trackers.log_artifact("config.yml", "run: {name: a}\n")
    again.trackers.log_checkpoint(20, "/runs/a/checkpoints", 7)
    again.close()
    assert not again.warnings
    return again


def test_wandb_offline(tmp_path: Path):
    tracking = track(tmp_path, "wandb")
    found = read_back("wandb", str(tracking.folder))
    drop_removed(found["values"])
    assert_equal(found["values"], tracking.folder)
    [run_id] = found["ids"]
    assert run_id == tracking.cursor["run_id"] == tracking.cursor["key"]
    assert found["config"]["optim.learning_rate"] == 0.25
    assert found["config"]["maxpipe/git_commit"] == "0" * 40
    assert found["artifacts"] == [f"config-{run_id}", f"checkpoint-{run_id}"]


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    if importlib.util.find_spec("mlflow") is None and not (Path(FOLDER) / "mlflow").exists():
        pytest.skip("TRACKERS contains no mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--default-artifact-root", f"file://{tmp_path}/artifacts"]
    environment = os.environ | {"PYTHONPATH": FOLDER}
    with open(tmp_path / "mlflow.log", "wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "mlflow.log").read_text()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return True
        return False

    try:
        wait_until(answers, SECONDS)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_mlflow_server(tmp_path: Path, mlflow_server: str):
    tracking = track(tmp_path, "mlflow", mlflow_uri=mlflow_server)
    found = read_back("mlflow", mlflow_server)
    drop_removed(found["values"])
    assert_equal(found["values"], tracking.folder)
    [run_id] = found["ids"]
    assert run_id == tracking.cursor["run_id"]
    assert found["config"]["optim.learning_rate"] == "0.25" and found["status"] == "FINISHED"
    assert found["tags"]["mlflow.source.git.commit"] == "0" * 40
    assert found["tags"]["checkpoint.20"] == "/runs/a/checkpoints/20"
    assert "config.yml" in found["artifacts"]


def test_trackio(tmp_path: Path):
    tracking = track(tmp_path, "trackio")
    found = read_back("trackio", "p")
    drop_removed(found["values"])
    assert_equal(found["values"], tracking.folder)
    [name] = found["ids"]
    assert name == tracking.cursor["run_id"]
    assert found["artifacts"] == [[f"checkpoint-{name}"], [f"config-{name}"]]
    assert found["config"]["optim.learning_rate"] == 0.25


class Collector:
    """Collector that stores OTLP requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/metrics"


def test_otlp_collector(tmp_path: Path):
    collector = Collector()
    tracking = track(tmp_path, "otlp", otlp_endpoint=collector.url)
    collector.server.shutdown()
    collector.server.server_close()
    request = __import__(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", fromlist=["x"]
    ).ExportMetricsServiceRequest
    found: dict[int, dict[str, float]] = {}
    units = {}
    for body in collector.bodies:
        for resource in request.FromString(body).resource_metrics:
            attributes = {
                each.key: each.value.string_value for each in resource.resource.attributes
            }
            assert attributes["service.name"] == "maxpipe"
            for metric in resource.scope_metrics[0].metrics:
                tag = metric.name.removeprefix("maxpipe.").replace(".", "/")
                units[tag] = metric.unit
                for point in metric.gauge.data_points:
                    labels = {each.key: each.value for each in point.attributes}
                    step = labels["step"].int_value
                    assert labels["run"].string_value == "run"
                    assert abs(point.time_unix_nano / 1e9 - time.time()) < 600
                    found.setdefault(step, {})[tag] = point.as_double
    drop_removed(found)
    assert_equal(found, tracking.folder)
    assert units["train/loss"] == "nats per token"
