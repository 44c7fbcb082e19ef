"""Config section `tracker`: settings of the experiment trackers in `log.trackers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maxpipe.config.rules import add_nonempty_rule, add_ranges, rule, unknown_names
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

ARTIFACTS = ("config", "plan", "schedule", "checkpoints")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig:
    """Settings of the experiment trackers in `log.trackers`.

    The environment variables of the clients, such as `WANDB_MODE`, `MLFLOW_TRACKING_URI` and
    `OTEL_EXPORTER_OTLP_ENDPOINT`, apply as usual. Credentials are read from the environment only.
    """

    project: str = "maxpipe"
    """Project of the run in W&B and trackio, and its experiment in MLflow. The environment
    variables `WANDB_PROJECT` and `MLFLOW_EXPERIMENT_NAME` take precedence over the default
    value."""
    artifacts: list[str] = field(default_factory=lambda: ["config"], hash=False)
    """Artifacts that W&B, MLflow and trackio store: `config` (the resolved config without secrets),
    `plan` (`forecast.json`: the predicted memory and time, and the memory of the compiled step),
    `schedule` (a picture of the pipeline schedule) and `checkpoints` (path, step and size of each
    checkpoint, but no weights). OTLP and Prometheus have no artifacts."""
    exit_timeout_seconds: float = 30.0
    """Maximum time in seconds for which the end of a run waits until all records are delivered.
    Records that are not delivered by then are sent when the same run resumes."""
    request_timeout_seconds: float = 60.0
    """Time limit in seconds for one request to a tracker. After a timeout, the process of the
    client is restarted, and the records are sent again."""
    wandb_entity: str = ""
    """W&B user or team. If empty, W&B uses `WANDB_ENTITY` or the default of the account."""
    mlflow_uri: str = ""
    """Tracking URI of MLflow, such as `http://127.0.0.1:5000` or `sqlite:///mlflow.db`. If empty,
    MLflow uses `MLFLOW_TRACKING_URI` or its default."""
    trackio_space: str = ""
    """Hugging Face Space for trackio, as OWNER/NAME. If empty, trackio uses `TRACKIO_SPACE_ID` or
    stores records on this machine."""
    prometheus_host: str = "127.0.0.1"
    """Address on which process 0 serves metrics to Prometheus. `0.0.0.0` also accepts connections
    from other machines. The endpoint has no authentication."""
    prometheus_port: int = 9464
    """Port of the endpoint for Prometheus. 0 serves no endpoint."""
    prometheus_file: str = ""
    """File for the textfile collector of node_exporter, such as
    `/var/lib/node_exporter/maxpipe.prom`. The file is replaced atomically after each record. If
    empty, no file is written."""
    otlp_endpoint: str = ""
    """URL that receives metrics by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/metrics`. If
    empty, the exporter uses `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT` or
    its default."""


add_ranges(
    Bound("tracker.exit_timeout_seconds", 30.0, 0, 240, "other processes wait for process 0"),
    Bound("tracker.request_timeout_seconds", 60.0, 1, 3600),
    Bound("tracker.prometheus_port", 9464, 0, 65535, "0 serves no endpoint"),
)


add_nonempty_rule("tracker.project")


@rule("tracker.artifacts")
def _artifacts_exist(config: Config) -> Iterator[RuleViolation]:
    yield from unknown_names("tracker.artifacts", config.tracker.artifacts, ARTIFACTS, "config")


@rule("log.trackers", "tracker.prometheus_port", "tracker.prometheus_file")
def _prometheus_has_an_output(config: Config) -> Iterator[RuleViolation]:
    section = config.tracker
    if "prometheus" not in config.log.trackers:
        return
    if not section.prometheus_port and not section.prometheus_file:
        yield RuleViolation(
            Code.CFG_MISSING,
            "tracker.prometheus_port",
            "must not be 0 if tracker.prometheus_file is empty: metrics need an endpoint or file.",
            "Set tracker.prometheus_port=9464, or tracker.prometheus_file=maxpipe.prom.",
        )
