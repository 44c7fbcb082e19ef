"""Config section `alerts`: rules over the metrics of a run, and actions when a rule is met."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from maxpipe.config.rules import add_ranges, rule, unknown_names
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

ACTIONS = ("console", "event", "webhook", "command")
Condition = Literal[
    "above", "below", "above_median", "below_median", "rise_percent", "fall_percent", "missing"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertRule:
    """Rule that raises an alert when a metric meets a condition."""

    metric: str = ""
    """Metric that the rule reads, such as `perf/mfu`."""
    condition: Condition = "above"
    """Condition on the metric. `above`, `below`: the value is compared with `threshold`.
    `above_median`, `below_median`: the value is compared with `threshold` times the median of the
    previous `window` values. `rise_percent`, `fall_percent`: the median of the newer half of the
    last `window` values differs from the median of the older half by more than `threshold` percent.
    `missing`: a record does not contain the metric. NaN and infinity meet every condition except
    `missing`."""
    threshold: float = 0.0
    """Threshold of the condition. Ignored by `missing`."""
    window: int = 50
    """Number of values for medians and trends. A condition on the median is evaluated after half
    this number, and a trend after all of them."""
    records: int = 1
    """Number of consecutive records that must meet the condition. The alert ends after the same
    number of records that do not meet the condition."""
    cooldown_seconds: float = 600.0
    """Minimum time in seconds between two alerts of the rule."""
    actions: list[str] = field(default_factory=list, hash=False)
    """Actions of this rule. If empty, `alerts.actions` applies."""


BUILT_IN_RULES: Mapping[str, AlertRule] = {
    "loss_spike": AlertRule(metric="train/loss", condition="above_median", threshold=1.5),
    "grad_norm_trend": AlertRule(
        metric="train/grad_norm", condition="rise_percent", threshold=100.0, window=100
    ),
    "throughput_drop": AlertRule(
        metric="perf/tokens_per_s", condition="below_median", threshold=0.7, records=3
    ),
    "data_wait": AlertRule(metric="perf/data_wait_fraction", threshold=0.2, records=3),
    "disk_full": AlertRule(metric="disk/used_fraction", threshold=0.95, cooldown_seconds=3600.0),
    "checkpoint_age": AlertRule(
        metric="checkpoint/age_seconds", threshold=7200.0, cooldown_seconds=3600.0
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertsConfig:
    """Rules over the metrics of a run, and actions when a rule is met.

    Rules are evaluated for each record of `metrics.jsonl`. A rule raises one alert per episode: the
    next alert requires that the condition was not met in between.
    """

    enable: list[str] = field(default_factory=list, hash=False)
    """Built-in rules to enable: `loss_spike`, `grad_norm_trend`, `throughput_drop`, `data_wait`,
    `disk_full` and `checkpoint_age`. [The guide](../../guides/trackers.md#alerts) lists their
    conditions."""
    rules: dict[str, AlertRule] = field(default_factory=dict)
    """Additional rules, keyed by name. A rule with the name of a built-in rule replaces the
    built-in rule."""
    actions: list[str] = field(default_factory=lambda: ["console", "event"], hash=False)
    """Actions of all rules. `console` prints a warning. `event` adds the event `alert` to
    `events.jsonl`. `webhook` sends the alert as JSON to `alerts.webhook`. `command` runs
    `alerts.command`."""
    webhook: str = ""
    """URL that receives alerts as JSON by POST, or `$NAME` to read the URL from the environment
    variable NAME. Redirects are not followed. `config.yml` and other records contain only the host
    of the URL."""
    command: list[str] = field(default_factory=list, hash=False)
    """Program and arguments that run for each alert, without a shell. The program receives the
    alert as JSON on standard input. Its environment contains no secrets."""
    allow_code: bool = False
    """Allow `alerts.command` to run. The command runs with your permissions. The value is read only
    from config files and from the command line, never from a checkpoint or the config.yml of a run
    folder, and is not saved."""
    timeout_seconds: float = 10.0
    """Time limit in seconds for one webhook request or command."""


add_ranges(
    Bound("alerts.timeout_seconds", 10.0, 0, 600, low_is_inside=False),
    Bound("alerts.rules.NAME.window", 50, 4, 100_000, "all values are kept in memory"),
    Bound("alerts.rules.NAME.records", 1, 1, 10**9),
    Bound("alerts.rules.NAME.cooldown_seconds", 600.0, 0, 10**9),
)

_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")


def is_webhook_url(text: str) -> bool:
    """Return whether a request can be sent to a URL. A user name is not supported."""
    try:
        parts = urlsplit(text)
        is_valid = bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:  # such as a port above 65535
        return False
    return is_valid and re.fullmatch(r"https?://\S+", text) is not None


def enabled_rules(alerts: AlertsConfig) -> dict[str, AlertRule]:
    """Return all enabled rules, keyed by name."""
    built_in = {name: BUILT_IN_RULES[name] for name in alerts.enable if name in BUILT_IN_RULES}
    return built_in | alerts.rules


def actions_of(alerts: AlertsConfig, rule: AlertRule) -> list[str]:
    """Return the actions of a rule."""
    return rule.actions or alerts.actions


@rule("alerts.enable")
def _built_in_rules_exist(config: Config) -> Iterator[RuleViolation]:
    yield from unknown_names("alerts.enable", config.alerts.enable, BUILT_IN_RULES, "loss_spike")


@rule("alerts.rules")
def _rules_are_valid(config: Config) -> Iterator[RuleViolation]:
    for name, alert in config.alerts.rules.items():
        key = f"alerts.rules.{name}"
        if not alert.metric:
            yield RuleViolation(
                Code.CFG_MISSING,
                f"{key}.metric",
                "must be the name of a metric.",
                f"Set {key}.metric=train/loss.",
            )


@rule("alerts.actions", "alerts.rules")
def _actions_exist(config: Config) -> Iterator[RuleViolation]:
    named = {"alerts.actions": config.alerts.actions}
    named |= {f"alerts.rules.{name}.actions": r.actions for name, r in config.alerts.rules.items()}
    for key, actions in named.items():
        yield from unknown_names(key, actions, ACTIONS, "console")


@rule("alerts.webhook", "alerts.command", "alerts.actions", "alerts.rules", "alerts.enable")
def _actions_have_targets(config: Config) -> Iterator[RuleViolation]:
    alerts = config.alerts
    for name, alert in enabled_rules(alerts).items():
        if not actions_of(alerts, alert):
            rule = f"must contain an action: otherwise the rule {name} has no effect."
            action = "Set alerts.actions=[console, event]."
            yield RuleViolation(Code.CFG_VALUE, "alerts.actions", rule, action)
            return
    used = {each for r in enabled_rules(alerts).values() for each in actions_of(alerts, r)}
    is_target = _VARIABLE.fullmatch(alerts.webhook) or is_webhook_url(alerts.webhook)
    if "webhook" in used and not is_target:
        yield RuleViolation(
            Code.CFG_MISSING,
            "alerts.webhook",
            "must be a URL that begins with http:// or https://, without a user name, or $NAME for "
            "the environment variable NAME: a rule has the action webhook.",
            "Set alerts.webhook=http://127.0.0.1:8080, or remove webhook from the actions.",
        )
    if "command" in used and not alerts.command:
        yield RuleViolation(
            Code.CFG_MISSING,
            "alerts.command",
            "must be a program and its arguments: a rule has the action command.",
            "Set alerts.command=[./alert.sh], or remove command from the actions.",
        )


def check_alert_permission(config: Config) -> Iterator[RuleViolation]:
    """Yield a rule violation if a run would execute a command without permission.

    This check is not a config rule, because commands other than `maxpipe train` read the same
    section from a run folder, which never contains the permission.
    """
    if config.alerts.command and not config.alerts.allow_code:
        yield RuleViolation(
            Code.PLUG_NOT_ALLOWED,
            "alerts.command",
            "requires alerts.allow_code=true: the run executes this command with your permissions.",
            "Read the command, and set alerts.allow_code=true on the command line if you trust it.",
        )
