"""The endpoint and the file have the text format of Prometheus."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.telemetry.trackers import prometheus
from maxpipe.telemetry.trackers.interface import Record, TrackedRun
from maxpipe.telemetry.trackers.prometheus import exposition
from tests.telemetry.trackers.stub import Tracking, wait_until


def parsed(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_exposition_has_names_help_units_and_values():
    values = {
        "train/loss": 0.1 + 0.2,
        "perf/step_s": 5e-324,
        "train/grad_norm": math.nan,
        "eval/my-task/accuracy": 0.5,
        "eval/my_task/accuracy": 0.25,
        "other/metric": math.inf,
        'eval/a "b"\\c\n/score': 0.75,
        "train/tokens": 2.0**53,
    }
    families = parsed(exposition('a "b"\\c', 7, values))
    assert families["maxpipe_step"].samples[0].value == 7
    loss = families["maxpipe_train_loss"]
    assert loss.type == "gauge" and loss.documentation.endswith("[nats per token]")
    assert loss.samples[0].labels == {"run": 'a "b"\\c', "tag": "train/loss"}
    found = {
        sample.labels["tag"]: sample.value
        for family in families.values()
        for sample in family.samples
        if "tag" in sample.labels
    }
    assert math.isnan(found.pop("train/grad_norm"))
    del values["train/grad_norm"]
    assert found == values
    assert len(families["maxpipe_eval_my_task_accuracy"].samples) == 2


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def scrape(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return parsed(response.read().decode())
    except OSError:
        return {}


def test_endpoint_and_file_show_the_newest_record(tmp_path: Path):
    port, file = free_port(), tmp_path / "maxpipe.prom"
    tracking = Tracking(tmp_path, ["prometheus"], prometheus_port=port, prometheus_file=str(file))
    tracking.open()
    tracking.write(1, 2, 3)
    wait_until(lambda: (found := scrape(port)) and found["maxpipe_step"].samples[0].value == 3)
    loss = scrape(port)["maxpipe_train_loss"].samples[0]
    assert loss.value == 1 / 3 and loss.labels["run"] == "run"
    wait_until(lambda: file.exists() and "maxpipe_step" in file.read_text())
    assert parsed(file.read_text())["maxpipe_train_loss"].samples[0].value == 1 / 3
    tracking.close()
    assert not scrape(port)
    assert [path.name for path in tmp_path.glob("maxpipe.prom*")] == ["maxpipe.prom"]
    again = Tracking(tmp_path, ["prometheus"], prometheus_port=port)
    again.open(resume_step=2)  # the newest values are shown before the first new record
    wait_until(lambda: (found := scrape(port)) and found["maxpipe_step"].samples[0].value == 2)
    again.close()
    assert not tracking.warnings and not again.warnings


def test_port_that_is_in_use_is_a_warning_with_an_action(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        tracking = Tracking(
            tmp_path, ["prometheus"], prometheus_port=port, exit_timeout_seconds=1.0
        )
        tracking.open()
        tracking.write(1)
        wait_until(lambda: tracking.warnings)
        tracking.close()
    assert f"port {port} of 127.0.0.1 is in use" in tracking.warnings[0]
    assert "set tracker.prometheus_port to another port" in tracking.warnings[0]


def test_file_is_written_while_the_port_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "maxpipe.prom"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        tracking = Tracking(
            tmp_path, ["prometheus"], prometheus_port=port, prometheus_file=str(file)
        )
        tracking.open()
        for step in (1, 2, 3):
            tracking.write(step)
            wait_until(lambda step=step: f'run="run"}} {step}\n' in _text(file))
        assert tracking.close() < 5.0
    assert len(tracking.warnings) == 1
    assert f"port {port} of 127.0.0.1 is in use" in tracking.warnings[0]
    assert "Only tracker.prometheus_file is written." in tracking.warnings[0]
    assert not (tracking.folder / "events.jsonl").exists()  # no failure and no undelivered record


def test_endpoint_opens_when_the_port_becomes_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "_RETRY_SECONDS", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = TrackerConfig(prometheus_port=port, prometheus_file=str(tmp_path / "m.prom"))
        tracker = prometheus.PrometheusTracker()
        tracker.open(TrackedRun("run", "project", "key", "", {}, {}, config), "")
        assert tracker.warning and tracker.address == config.prometheus_file
    tracker.log([Record(1, 0.0, {"train/loss": 1.0})])
    assert not tracker.warning and tracker.address.endswith(f":{port}/metrics")
    assert scrape(port)["maxpipe_step"].samples[0].value == 1
    tracker.close(True)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_the_endpoint_is_local_by_default():
    assert TrackerConfig().prometheus_host == "127.0.0.1"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="requires IPv6")
def test_the_endpoint_supports_ipv6(tmp_path: Path):
    port = free_port()
    tracking = Tracking(tmp_path, ["prometheus"], prometheus_port=port, prometheus_host="::1")
    tracking.open()
    tracking.write(1)
    wait_until(lambda: (found := scrape(port, "[::1]")) and found["maxpipe_step"].samples)
    tracking.close()


def test_slow_and_numerous_clients_do_not_exhaust_the_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "_MAX_CONNECTIONS", 4)
    monkeypatch.setattr(prometheus, "_REQUEST_SECONDS", 1.0)
    config = TrackerConfig(prometheus_port=free_port())
    run = TrackedRun("run", "project", "key", "", {}, {}, config)
    tracker, threads = prometheus.PrometheusTracker(), threading.active_count()
    tracker.open(run, "")
    tracker.log([Record(1, 0.0, {"train/loss": 1.0})])
    clients = [socket.create_connection(("127.0.0.1", config.prometheus_port)) for _ in range(20)]
    start = time.monotonic()

    def drip() -> bool:
        for each in clients:
            with contextlib.suppress(OSError):
                each.sendall(b"G")  # no read times out
        return bool(scrape(config.prometheus_port))

    wait_until(drip)
    assert time.monotonic() - start < 5.0
    assert threading.active_count() - threads <= 1 + 2 * 4  # each connection also has a timer
    for each in clients:
        each.close()
    tracker.close(True)
