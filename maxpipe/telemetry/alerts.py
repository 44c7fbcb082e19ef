"""Evaluate alert rules on the records of a run, and perform the actions of alerts.

A daemon thread evaluates the rules, and two further threads send webhooks and run commands, so that
neither can slow training. After a resume or a rollback, the state of the rules is computed again
from `metrics.jsonl`, and `events.jsonl` contains the alerts that were raised already.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from maxpipe.config.config_files import EVENTS_FILE, METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.config.sections.alerts import (
    AlertRule,
    AlertsConfig,
    actions_of,
    enabled_rules,
    is_webhook_url,
)
from maxpipe.io import files, redact
from maxpipe.io.formatting import pluralize
from maxpipe.telemetry.background import BackgroundWorker, RateLimiter
from maxpipe.telemetry.metrics import METRICS, Metric, metric_of
from maxpipe.telemetry.writers import EventLog

_MAX_RECORDS, _MAX_ACTIONS = 1024, 64
"""Capacities of the queues."""
_ATTEMPTS, _PAUSE_SECONDS = 3, 1.0
_RECORDS_BEFORE_WARNING = 50
_WAIT_FRACTION, _DISK, _AGE = (
    "perf/data_wait_fraction",
    "disk/used_fraction",
    "checkpoint/age_seconds",
)

ALERT_METRICS = (
    Metric(_WAIT_FRACTION, "fraction", "`perf/data_wait_s` divided by `perf/step_s`."),
    Metric(_DISK, "fraction", "Used fraction of the file system that contains the run folder."),
    Metric(
        _AGE,
        "seconds",
        "Time since the last completed checkpoint of this process, or since its start.",
    ),
)
"""Metrics that only alerts use. They are computed when a rule reads them."""


def find_unknown_metrics(alerts: AlertsConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield the key, the metric, the violated rule and an action for each rule whose metric no run
    records.
    """
    known = [each.tag for each in (*METRICS, *ALERT_METRICS)]
    for name, rule in alerts.rules.items():
        if not rule.metric or _is_known(rule.metric):
            continue
        key = f"alerts.rules.{name}.metric"
        guess = did_you_mean(rule.metric, known) or "train/loss"
        yield key, rule.metric, "is not a metric of a run.", f"Set {key}={guess}."


def _is_known(tag: str) -> bool:
    numbered = re.sub(r"\d+$", "1", tag)  # such as train/loss_ahead_2
    is_own = any(tag == each.tag for each in ALERT_METRICS)
    return is_own or metric_of(tag) is not None or metric_of(numbered) is not None


@dataclass(frozen=True)
class Alert:
    """An alert that a rule has raised."""

    name: str
    metric: str
    value: float | None
    """Value of the metric; None if the metric is missing."""
    condition: str
    step: int

    @property
    def text(self) -> str:
        """Description of the alert for people."""
        value = "no value" if self.value is None else f"{self.value:.6g}"
        return (
            f"alert {self.name}: {self.metric} = {value} after step {self.step} ({self.condition})"
        )


class RuleState:
    """State of one rule: recent values, and whether the rule has raised an alert."""

    def __init__(self, name: str, rule: AlertRule):
        self._name, self._rule = name, rule
        self._values: deque[float] = deque(maxlen=rule.window)
        self._hits = self._misses = 0
        self._is_active = self._is_raised = False
        self.last_time, self.last_step = -math.inf, -1
        """Time in seconds since 1970 and step of the last alert."""
        self.has_value = False
        """Whether a record contained the metric."""

    def update(self, step: int, seconds: float, value: float | None) -> Iterator[Alert]:
        """Evaluate the rule on the value of one record, which is None if the metric is missing.
        Yield an alert if one begins.
        """
        condition = self._met_condition(value)
        if condition is None:
            self._misses, self._hits = self._misses + 1, 0
            if self._misses >= self._rule.records:
                self._is_active = self._is_raised = False
            return
        self._hits, self._misses = self._hits + 1, 0
        self._is_active = self._is_active or self._hits >= self._rule.records
        if not self._is_active or self._is_raised:
            return
        if step <= self.last_step:  # raised before the step was repeated
            self._is_raised = True
        elif seconds - self.last_time >= self._rule.cooldown_seconds:
            self._is_raised, self.last_time, self.last_step = True, seconds, step
            yield Alert(self._name, self._rule.metric, value, condition, step)

    def _met_condition(self, value: float | None) -> str | None:
        """Return the condition with its numbers if it is met, else None."""
        rule, threshold = self._rule, self._rule.threshold
        self.has_value = self.has_value or value is not None
        if rule.condition == "missing":
            return "missing" if value is None else None
        if value is None:
            return None
        if not math.isfinite(value):
            return "not finite"
        if rule.condition == "above":
            return f"above {threshold:g}" if value > threshold else None
        if rule.condition == "below":
            return f"below {threshold:g}" if value < threshold else None
        if rule.condition in ("above_median", "below_median"):
            return self._compare_with_median(value)
        return self._compare_halves(value)

    def _compare_with_median(self, value: float) -> str | None:
        rule, previous = self._rule, [*self._values]
        self._values.append(value)
        if len(previous) < rule.window // 2:
            return None
        median = statistics.median(previous)
        limit, is_above = rule.threshold * median, rule.condition == "above_median"
        if (value > limit) if is_above else (value < limit):
            side = "above" if is_above else "below"
            return f"{side} {rule.threshold:g} x the median {median:.6g}"
        return None

    def _compare_halves(self, value: float) -> str | None:
        rule = self._rule
        self._values.append(value)
        if len(self._values) < rule.window:
            return None
        values = [*self._values]
        older = statistics.median(values[: rule.window // 2])
        newer = statistics.median(values[rule.window // 2 :])
        percent = 100.0 * (newer - older) / abs(older) if older else 0.0
        if (percent if rule.condition == "rise_percent" else -percent) > rule.threshold:
            verb = "rose" if percent > 0 else "fell"
            return f"{verb} by {abs(percent):.3g}% over {pluralize(rule.window, 'record')}"
        return None


class _Item(NamedTuple):
    """Metrics of one step, on the way to the thread that evaluates rules."""

    generation: int
    step: int
    seconds: float
    values: Mapping[str, float]


class _AlertEvent(TypedDict):
    """An alert in `events.jsonl`."""

    event: Literal["alert"]
    time: str
    name: str
    step: int


class Alerts:
    """Evaluates the enabled rules on each record, in a background thread."""

    def __init__(
        self,
        config: AlertsConfig,
        run_dir: Path,
        events: EventLog,
        warn: Callable[[str], None],
    ):
        self._config, self._rules = config, enabled_rules(config)
        self._run_dir, self._events, self._warn = run_dir, events, warn
        if config.webhook.startswith("$") and is_webhook_url(url := _resolve(config.webhook)):
            redact.register_secret(url)
        self._states: dict[str, RuleState] = {}
        self._metrics = {each.metric for each in self._rules.values()}
        self._generation, self._resume_step, self._replayed = 0, 0, 0
        self._step, self._step_tags = -1, set[str]()
        self._records, self._is_warned = 0, False
        self._saved_at = time.monotonic()
        self._thread = BackgroundWorker[_Item]("alerts", self._handle, _MAX_RECORDS)
        self._webhooks = BackgroundWorker[Alert]("alerts.webhook", self._post, _MAX_ACTIONS)
        self._commands = BackgroundWorker[Alert]("alerts.command", self._execute, _MAX_ACTIONS)
        self._limiters = {"webhook": RateLimiter(), "command": RateLimiter()}
        self._is_started = self._is_abandoned = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_rules(self) -> bool:
        """Whether any rule is enabled."""
        return bool(self._rules)

    def restart(self, step: int) -> None:
        """Compute the state of the rules from the records up to `step`."""
        self._resume_step = step
        self._generation += 1  # last: the thread reads the step after it
        if not self._is_started:
            self._is_started = True
            uses_webhook = any(
                "webhook" in actions_of(self._config, r) for r in self._rules.values()
            )
            if uses_webhook and not is_webhook_url(_resolve(self._config.webhook)):
                self._warn(
                    f"alerts.webhook = {self._config.webhook}: the environment variable contains "
                    "no URL, so no alert can be sent. Set it, and start the run again."
                )
            for each in (self._thread, self._webhooks, self._commands):
                each.start()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Evaluate the rules on metrics of a step; returns immediately."""
        self._thread.put(_Item(self._generation, step, time.time(), values))

    def observe_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Receive an event of the run; returns immediately."""
        if event == "checkpoint":
            self._saved_at = time.monotonic()

    def close(self) -> None:
        """Evaluate the remaining records, and wait for pending actions at most
        `alerts.timeout_seconds`.
        """
        if not self._is_started:
            return
        deadline = time.monotonic() + self._config.timeout_seconds
        self._thread.end()
        self._thread.join(deadline - time.monotonic())
        self._warn_about_missing(is_end=True)
        actions = {"webhook": self._webhooks, "command": self._commands}
        for each in actions.values():
            each.end()  # a thread without pending actions ends while another one is awaited
        for name, each in actions.items():
            if not each.join(deadline - time.monotonic()) or each.dropped:
                self._warn(f"alerts.{name}: not all alerts were processed before the run ended")
        self._is_abandoned = True
        if (process := self._process) is not None:
            _kill(process)
        if lost := self._thread.dropped:
            self._warn(f"alerts: {pluralize(lost, 'record')} were not evaluated")

    def _handle(self, item: _Item | None) -> None:
        if self._replayed != self._generation:
            self._replayed = self._generation
            self._replay(self._resume_step)
        if item is None or item.generation != self._generation:
            return
        self._records += item.step != self._step
        for alert in self._evaluate(item.step, item.seconds, self._with_derived(item.values)):
            self._act(alert)
        if self._records > _RECORDS_BEFORE_WARNING:
            self._warn_about_missing(is_end=False)

    def _replay(self, step: int) -> None:
        self._states = {name: RuleState(name, rule) for name, rule in self._rules.items()}
        self._step, self._step_tags = -1, set()
        with contextlib.suppress(OSError):
            for record in files.read_json_lines(self._run_dir / METRICS_FILE, dict[str, Any]):
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    at, seconds = int(record.pop("step")), _seconds(record.pop("time"))
                    values = {k: math.nan if v is None else float(v) for k, v in record.items()}
                    if at <= step:
                        deque(self._evaluate(at, seconds, self._with_fraction(values)), maxlen=0)
        with contextlib.suppress(OSError):
            for event in files.read_json_lines(self._run_dir / EVENTS_FILE, _AlertEvent):
                if (state := self._states.get(event["name"])) is not None:
                    state.last_step = max(state.last_step, event["step"])
                    with contextlib.suppress(ValueError, OverflowError):
                        state.last_time = max(state.last_time, _seconds(event["time"]))

    def _evaluate(self, step: int, seconds: float, values: Mapping[str, float]) -> Iterator[Alert]:
        """Yield the alerts that begin. Several calls may contain metrics of the same step."""
        if step != self._step:
            tags = self._step_tags
            for name, rule in self._rules.items():
                is_missing = self._step >= 0 and rule.metric not in tags
                if is_missing and rule.condition == "missing":
                    yield from self._states[name].update(self._step, seconds, None)
            self._step, self._step_tags = step, set()
        self._step_tags.update(values)
        for name, rule in self._rules.items():
            if rule.metric in values:
                yield from self._states[name].update(step, seconds, values[rule.metric])

    def _with_fraction(self, values: Mapping[str, float]) -> dict[str, float]:
        result, step_seconds = dict(values), values.get("perf/step_s")
        if step_seconds and "perf/data_wait_s" in values:
            result[_WAIT_FRACTION] = values["perf/data_wait_s"] / step_seconds
        return result

    def _with_derived(self, values: Mapping[str, float]) -> dict[str, float]:
        result = self._with_fraction(values)
        if _DISK in self._metrics:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(self._run_dir)
                result[_DISK] = 1.0 - usage.free / usage.total
        if _AGE in self._metrics:
            result[_AGE] = time.monotonic() - self._saved_at
        return result

    def _warn_about_missing(self, *, is_end: bool) -> None:
        if self._is_warned or not self._records:
            return
        self._is_warned = True
        for name, rule in self._rules.items():
            state, is_rare = self._states.get(name), "eval" in rule.metric
            if state is None or state.has_value or rule.condition == "missing":
                continue
            if is_end or not is_rare:
                self._warn(f"alert {name}: no record of this run contains {rule.metric}")

    def _act(self, alert: Alert) -> None:
        actions = actions_of(self._config, self._rules[alert.name])
        if "event" in actions:
            self._events.write("alert", **_fields(alert))
        if "console" in actions:
            self._warn(alert.text)
        if "webhook" in actions:
            self._webhooks.put(alert)
        if "command" in actions:
            self._commands.put(alert)

    def _post(self, alert: Alert | None) -> None:
        reason = ""
        for attempt in range(_ATTEMPTS):
            if alert is None or self._is_abandoned:
                return
            time.sleep(attempt * _PAUSE_SECONDS)
            try:
                return self._post_once(alert)
            except urllib.error.HTTPError as error:
                error.close()
                is_redirect = 300 <= error.code < 400
                reason = f"HTTP {error.code}{', and redirects are not followed' * is_redirect}"
            except http.client.InvalidURL:  # the message contains the URL
                reason = "the URL is not valid"
            except http.client.HTTPException as error:
                reason = f"no valid HTTP response ({type(error).__name__})"
            except (OSError, ValueError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        if alert is not None:
            self._fail("webhook", alert, reason)

    def _post_once(self, alert: Alert) -> None:
        url = _resolve(self._config.webhook)
        if not is_webhook_url(url):
            raise ValueError(f"the environment variable {self._config.webhook} contains no URL")
        request = urllib.request.Request(
            url,
            data=self._payload(alert),
            headers={"Content-Type": "application/json", "User-Agent": "maxpipe"},
        )
        _open(request, self._config.timeout_seconds)

    def _execute(self, alert: Alert | None) -> None:
        if alert is None or self._is_abandoned:
            return
        seconds = self._config.timeout_seconds
        try:
            process = subprocess.Popen(
                [*self._config.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment_without_secrets(),
                start_new_session=True,
            )
        except OSError as error:
            return self._fail("command", alert, error.strerror or str(error))
        self._process = process
        try:
            process.communicate(self._payload(alert), timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            return self._fail("command", alert, f"exceeded alerts.timeout_seconds={seconds:g}")
        finally:
            self._process = None
        if process.returncode:
            self._fail("command", alert, f"exit code {process.returncode}")

    def _payload(self, alert: Alert) -> bytes:
        fields = {"run": self._run_dir.name, "text": alert.text, **_fields(alert)}
        return json.dumps(redact.redact_value(fields), allow_nan=False).encode()

    def _fail(self, action: str, alert: Alert, reason: str) -> None:
        """Record that an action failed. The message does not contain the URL, which may be
        secret.
        """
        reason = redact.redact_text(reason)
        self._events.write("alert_failed", name=alert.name, action=action, reason=reason)
        if self._limiters[action].allows():
            self._warn(f"alerts.{action}: {reason} (alert {alert.name})")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises `HTTPError` for a redirect, which would send an empty GET request."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str):
        return None


class _Deadline(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Ends a request at a deadline. The time limit of `urllib` applies to each read, so a server
    that sends single bytes could exceed it without end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._connection: http.client.HTTPConnection | None = None
        self.is_over = False

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect_http, req)  # type: ignore[arg-type]

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect_https, req)  # type: ignore[arg-type]

    def _connect_http(self, host: str, **options: Any) -> http.client.HTTPConnection:
        self._connection = http.client.HTTPConnection(host, **options)
        return self._connection

    def _connect_https(self, host: str, **options: Any) -> http.client.HTTPConnection:
        self._connection = http.client.HTTPSConnection(host, **options)
        return self._connection

    def end(self) -> None:
        """Close the connection, so that a pending read fails."""
        self.is_over = True
        if self._connection is not None and (connected := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # also below TLS


def _open(request: urllib.request.Request, seconds: float) -> None:
    """Send a request and wait at most `seconds` for the status of the response."""
    handler = _Deadline()
    timer = threading.Timer(seconds, handler.end)
    timer.daemon = True
    timer.start()
    try:
        opener = urllib.request.build_opener(handler, _NoRedirect())
        with opener.open(request, timeout=seconds):
            pass
    except (OSError, ValueError, http.client.HTTPException):
        if handler.is_over:
            raise TimeoutError(f"exceeded alerts.timeout_seconds={seconds:g}") from None
        raise
    finally:
        timer.cancel()


def _resolve(webhook: str) -> str:
    """Return the URL of a webhook, or an empty string if its environment variable is not set."""
    return os.environ.get(webhook[1:], "") if webhook.startswith("$") else webhook


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def environment_without_secrets() -> dict[str, str]:
    """Return the environment variables whose names and values contain no secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not redact.is_secret_name(name) and redact.redact_text(value) == value
    }


def _fields(alert: Alert) -> dict[str, Any]:
    value = alert.value if alert.value is not None and math.isfinite(alert.value) else None
    return {
        "name": alert.name,
        "metric": alert.metric,
        "value": value,
        "condition": alert.condition,
        "step": alert.step,
    }


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
