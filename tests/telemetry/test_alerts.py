"""Alert rules, their episodes, and actions that hang or fail."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.load import load
from maxpipe.config.sections.alerts import BUILT_IN_RULES, AlertRule, AlertsConfig
from maxpipe.errors import ConfigError
from maxpipe.telemetry import alerts as module
from maxpipe.telemetry.alerts import Alerts, RuleState, find_unknown_metrics
from maxpipe.telemetry.writers import EventLog, MetricWriter
from tests.errors import raises
from tests.telemetry.trackers.stub import wait_until


def fired(rule: AlertRule, *values: float | None, seconds: float = 1e6) -> list[int]:
    """Return the steps at which the rule raises an alert, for values `seconds` apart."""
    state = RuleState("rule", rule)
    return [
        alert.step
        for step, value in enumerate(values, 1)
        for alert in state.update(step, step * seconds, value)
    ]


@pytest.mark.parametrize(
    ("condition", "threshold", "values", "expected"),
    [
        ("above", 2.0, [1, 2, 3, 4, 1, 3], [3, 6]),
        ("below", 2.0, [3, 2, 1, 1, 3, 0], [3, 6]),
        ("above", 2.0, [1, math.nan, 1, math.inf], [2, 4]),
        ("below", 2.0, [3, math.inf], [2]),
        ("missing", 0.0, [1, None, None, 1, None], [2, 5]),
        ("above_median", 1.5, [2, 2, 2, 2, 3.1, 2, 2, 2.9], [5]),
        ("below_median", 0.5, [2, 2, 2, 2, 0.9, 2], [5]),
        ("rise_percent", 50.0, [1, 1, 1, 1, 1, 1, 2, 2], [8]),
        ("fall_percent", 40.0, [2, 2, 2, 2, 2, 2, 1, 1], [8]),
        ("rise_percent", 50.0, [2, 2, 2, 2, 2, 2, 1, 1], []),
    ],
)
def test_conditions(condition: Any, threshold: float, values: list[Any], expected: list[int]):
    rule = AlertRule(metric="a", condition=condition, threshold=threshold, window=4)
    assert fired(rule, *values) == expected


def test_an_episode_begins_and_ends_after_the_number_of_records():
    rule = AlertRule(metric="a", threshold=1.0, records=3)
    assert fired(rule, 2, 2, 0, 2, 2, 2, 2) == [6]
    # Two records below the threshold do not end the episode; three records do.
    assert fired(rule, 2, 2, 2, 0, 0, 2, 2, 2, 0, 0, 0, 2, 2, 2) == [3, 14]


def test_cooldown_limits_alerts_but_a_long_episode_is_raised_after_it():
    rule = AlertRule(metric="a", threshold=1.0, cooldown_seconds=100.0)
    assert fired(rule, 2, 0, 2, 0, 2, seconds=30.0) == [1, 5]
    assert fired(rule, 2, 0, 2, 2, 2, 2, seconds=30.0) == [1, 5]


class Server:
    """A webhook that stores alerts, answers with a status, or hangs."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status, self.ended = 200, threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not server.status:
                    server.ended.wait()
                server.received.append(content)
                self.send_response(server.status or 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/secret-path"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.ended.set()
    server.server.shutdown()
    server.server.server_close()


class Alerting:
    """A run whose records are evaluated."""

    def __init__(self, folder: Path, resume_step: int = 0, **settings: Any):
        self.folder, self.warnings = folder, list[str]()
        rules = {"big": AlertRule(metric="train/loss", threshold=5.0, cooldown_seconds=0.0)}
        self.config = AlertsConfig(**{"rules": rules, "timeout_seconds": 5.0, **settings})
        self.alerts = Alerts(self.config, folder, EventLog(folder), self.warnings.append)
        self.writer = MetricWriter(
            folder, tensorboard=False, resume_step=resume_step, observers=[self.alerts]
        )

    def write(self, *losses: float, first: int = 1, **others: float) -> None:
        for step, loss in enumerate(losses, first):
            self.writer.write(step, {"train/loss": loss, **others})

    def close(self) -> float:
        start = time.monotonic()
        self.alerts.close()
        return time.monotonic() - start

    def events(self, name: str = "alert") -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [each for each in map(json.loads, lines) if each["event"] == name]


def test_an_alert_is_printed_and_recorded_once_per_episode(tmp_path: Path):
    run = Alerting(tmp_path)
    run.write(1.0, 6.0, 7.0, 1.0, 8.0)
    run.close()
    assert [(each["name"], each["metric"], each["step"]) for each in run.events()] == [
        ("big", "train/loss", 2),
        ("big", "train/loss", 5),
    ]
    assert run.events()[0]["value"] == 6.0 and run.events()[0]["condition"] == "above 5"
    assert run.warnings[0] == "alert big: train/loss = 6 after step 2 (above 5)"


def test_a_resumed_run_continues_an_episode(tmp_path: Path):
    """Neither the episode before the checkpoint nor repeated steps raise an alert again."""
    run = Alerting(tmp_path)
    run.write(1.0, 6.0, 7.0, 7.0, 1.0, 8.0)
    run.close()
    again = Alerting(tmp_path, resume_step=3)
    again.write(7.0, 1.0, 8.0, 1.0, 9.0, first=4)
    again.close()
    assert [each["step"] for each in again.events()] == [2, 6, 8]


def test_a_rollback_computes_medians_again(tmp_path: Path):
    rule = AlertRule(metric="train/loss", condition="above_median", threshold=2.0, window=4)
    run = Alerting(tmp_path, rules={"spike": rule})
    run.write(1.0, 1.0, 1.0, 1.0, 100.0, 100.0, 100.0)
    time.sleep(0.2)
    run.writer = MetricWriter(
        tmp_path, tensorboard=False, resume_step=4, observers=run.writer.observers
    )
    run.write(1.0, 1.0, 1.0, 1.0, 3.0, first=5)
    run.close()
    assert [each["step"] for each in run.events()] == [5]  # 9 is within the cooldown
    state = run.alerts._states["spike"]
    assert [*state._values] == [1.0, 1.0, 1.0, 3.0]


def test_missing_metric_is_evaluated_when_the_step_is_complete(tmp_path: Path):
    rule = AlertRule(metric="eval/loss", condition="missing", records=2)
    run = Alerting(tmp_path, rules={"no_eval": rule})
    for step in range(1, 6):
        run.writer.write(step, {"train/loss": 1.0})
        if step < 3:
            run.writer.write(step, {"eval/loss": 1.0})
    run.close()
    assert [each["step"] for each in run.events()] == [4]
    assert run.events()[0]["value"] is None


def test_webhook_receives_the_alert(tmp_path: Path, server: Server, monkeypatch: Any):
    monkeypatch.setenv("ALERT_URL", server.url)
    run = Alerting(tmp_path, actions=["webhook"], webhook="$ALERT_URL")
    run.write(math.nan)
    run.close()
    [received] = server.received
    assert received["text"].startswith("alert big: train/loss = nan after step 1")
    del received["text"]
    assert received == {
        **{"run": tmp_path.name, "name": "big", "metric": "train/loss", "value": None},
        **{"condition": "not finite", "step": 1},
    }
    assert not run.warnings and not run.events()


@pytest.mark.parametrize("status", [0, 500])
def test_a_webhook_that_hangs_or_fails_delays_nothing(
    status: int, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    server.status = status
    run = Alerting(tmp_path, actions=["webhook", "event"], webhook=server.url, timeout_seconds=0.3)
    start = time.perf_counter()
    run.write(*(9.0 if step % 2 else 1.0 for step in range(400)))
    assert time.perf_counter() - start < 5.0
    assert run.close() < 2.0
    assert len(run.events()) == 200
    if status:
        assert "alerts.webhook: HTTP 500 (alert big)" in run.warnings
    else:
        assert any("not all alerts were processed" in each for each in run.warnings)
    assert not any("secret-path" in each for each in run.warnings)
    assert "secret-path" not in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
            "HTTP 302, and redirects are not followed",
        ),
        (b"\0\xff no HTTP\r\n\r\n", "no valid HTTP response (BadStatusLine)"),
        (None, "exceeded alerts.timeout_seconds=0.5"),  # single bytes without end
    ],
)
def test_a_webhook_with_an_unusual_response_is_reported(
    response: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_ATTEMPTS", 1)
    requests: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = listener.accept()
                with connected:
                    requests.append(connected.recv(1 << 16))
                    if response is not None:
                        connected.sendall(response)
                    else:
                        for _ in range(100):
                            connected.sendall(b"H")
                            time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/secret-path"
        run = Alerting(tmp_path, actions=["webhook"], webhook=url, timeout_seconds=0.5)
        run.write(6.0)
        wait_until(lambda: run.events("alert_failed"))
        assert run.close() < 2.0
    assert [each["reason"] for each in run.events("alert_failed")] == [reason]
    assert len([each for each in requests if each]) == 1
    assert "secret-path" not in (tmp_path / "events.jsonl").read_text()


def test_the_end_of_a_run_stops_a_command_and_warns_only_about_it(tmp_path: Path):
    pid_file = tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-c", code, str(pid_file)]
    run = Alerting(tmp_path, actions=["command"], command=command, allow_code=True)
    run.write(6.0)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    object.__setattr__(run.alerts._config, "timeout_seconds", 0.2)
    run.close()
    assert run.warnings == ["alerts.command: not all alerts were processed before the run ended"]
    status = Path(f"/proc/{pid_file.read_text()}/status")
    wait_until(lambda: not status.exists() or "(zombie)" in status.read_text())


def test_the_variable_of_the_webhook_is_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.redact, "_registered_secrets", ())
    monkeypatch.setenv("ALERT_URL", "https://host/services/abc")
    Alerting(tmp_path, webhook="$ALERT_URL")
    assert "ALERT_URL" not in module.environment_without_secrets()


def test_a_webhook_variable_without_url_is_a_warning(tmp_path: Path):
    run = Alerting(tmp_path, actions=["webhook"], webhook="$MAXPIPE_TEST_NO_URL")
    run.write(1.0)
    run.close()
    [warning] = run.warnings
    assert warning.startswith("alerts.webhook = $MAXPIPE_TEST_NO_URL: the environment variable")
    run = Alerting(tmp_path / "other", webhook="$MAXPIPE_TEST_NO_URL")  # no rule uses it
    run.write(1.0)
    run.close()
    assert not run.warnings


COMMAND = """
import json, os, sys
record = json.load(sys.stdin)
record["environment"] = dict(os.environ)
open(sys.argv[1], "w").write(json.dumps(record))
"""


def test_command_receives_the_alert_without_secrets(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HARMLESS", "yes")
    monkeypatch.setenv("ADDRESS", "https://user:password@host/path")
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", COMMAND, str(out)]
    run = Alerting(tmp_path, actions=["command"], command=command, allow_code=True)
    run.write(6.0)
    run.close()
    found = json.loads(out.read_text())
    assert found["name"] == "big" and found["step"] == 1 and found["value"] == 6.0
    assert found["environment"]["HARMLESS"] == "yes"
    assert not {"WANDB_API_KEY", "ADDRESS"} & found["environment"].keys()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["sleep", "60"], "exceeded alerts.timeout_seconds=0.3"),
        (["false"], "exit code 1"),
        (["./nowhere"], "No such file or directory"),
    ],
)
def test_a_command_that_fails_is_reported(command: list[str], reason: str, tmp_path: Path):
    run = Alerting(
        tmp_path, actions=["command"], command=command, allow_code=True, timeout_seconds=0.3
    )
    run.write(6.0)
    time.sleep(0.6)
    assert run.close() < 2.0
    assert f"alerts.command: {reason} (alert big)" in run.warnings
    assert [each["reason"] for each in run.events("alert_failed")] == [reason]


def test_derived_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rules = {
        "wait": AlertRule(metric="perf/data_wait_fraction", threshold=0.4),
        "disk": AlertRule(metric="disk/used_fraction", threshold=-1.0),
        "age": AlertRule(metric="checkpoint/age_seconds", threshold=0.2),
    }
    run = Alerting(tmp_path, rules=rules)
    run.writer.write(1, {"perf/step_s": 2.0, "perf/data_wait_s": 1.0})
    time.sleep(0.4)
    run.writer.write(2, {"perf/step_s": 2.0})
    run.close()
    found = {each["name"]: each for each in run.events()}
    assert found["wait"]["value"] == 0.5 and found["wait"]["step"] == 1
    assert 0 <= found["disk"]["value"] <= 1
    assert found["age"]["value"] > 0.2 and found["age"]["step"] == 2


def test_a_checkpoint_resets_its_age(tmp_path: Path):
    run = Alerting(
        tmp_path, rules={"age": AlertRule(metric="checkpoint/age_seconds", threshold=0.3)}
    )
    time.sleep(0.4)
    run.alerts.observe_event("checkpoint", {"step": 1})
    run.write(1.0)
    run.close()
    assert not run.events()


@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_built_in_rules_read_known_metrics(name: str, tmp_path: Path):
    assert not [*find_unknown_metrics(AlertsConfig(rules={name: BUILT_IN_RULES[name]}))]


BUILT_IN_RUNS: dict[str, tuple[str, list[float]]] = {
    "loss_spike": ("train/loss", [2.0] * 40 + [3.5]),
    "grad_norm_trend": ("train/grad_norm", [1.0] * 75 + [2.5] * 40),
    "throughput_drop": ("perf/tokens_per_s", [1000.0] * 40 + [600.0] * 3),
}


@pytest.mark.parametrize("name", BUILT_IN_RUNS)
def test_built_in_rules_detect_their_problem(name: str):
    metric, values = BUILT_IN_RUNS[name]
    rule = BUILT_IN_RULES[name]
    assert rule.metric == metric
    assert len(fired(rule, *values, seconds=1.0)) == 1
    assert fired(rule, *values[:40], seconds=1.0) == []


def test_unknown_metrics_are_found_with_a_suggestion():
    rules = {
        "a": AlertRule(metric="train/los"),
        "b": AlertRule(metric="source/web/loss"),
        "c": AlertRule(metric="train/loss_ahead_2"),
        "d": AlertRule(metric="disk/used_fraction"),
    }
    [(key, metric, _, action)] = find_unknown_metrics(AlertsConfig(rules=rules))
    assert (key, metric) == ("alerts.rules.a.metric", "train/los")
    assert action == "Set alerts.rules.a.metric=train/loss."


def test_a_metric_that_no_record_contains_is_a_warning(tmp_path: Path):
    run = Alerting(tmp_path, rules={"mfu": AlertRule(metric="perf/mfu", condition="below")})
    run.write(1.0, 2.0)
    run.close()
    assert run.warnings == ["alert mfu: no record of this run contains perf/mfu"]


def test_evaluation_does_not_delay_training(tmp_path: Path):
    run = Alerting(tmp_path)
    times = []
    for step in range(1000):
        start = time.perf_counter()
        run.alerts.record(step, {"train/loss": 1.0})
        times.append(time.perf_counter() - start)
    run.close()
    assert sum(times) / len(times) < 1e-4


@pytest.mark.parametrize(
    ("webhook", "is_valid"),
    [
        ("http://127.0.0.1:8080/a?b=c", True),
        ("https://host", True),
        ("http://[::1]:80/", True),
        ("$ALERT_URL", True),
        ("http://", False),
        ("ftp://host", False),
        ("http://[::1", False),
        ("http://host:99999/", False),
        ("http://user:password@host/", False),
        ("http://host/a b", False),
        ("$", False),
    ],
)
def test_webhook_that_cannot_receive_a_request_is_rejected(webhook: str, is_valid: bool):
    given = ["tiny", "alerts.enable=[loss_spike]", "alerts.actions=[webhook]"]
    if is_valid:
        load([*given, f"alerts.webhook={webhook}"])
        return
    with raises(ConfigError, "alerts.webhook", names=["must be a URL"]):
        load([*given, f"alerts.webhook={webhook}"])


def test_a_rule_without_an_action_is_rejected():
    with raises(ConfigError, "alerts.actions", suggests="alerts.actions=[console, event]"):
        load(["tiny", "alerts.enable=[loss_spike]", "alerts.actions=[]"])
    load(["tiny", "alerts.actions=[]"])
