"""Tracker for MLflow.

MLflow keeps every value of a metric. If a step is repeated after a resume, MLflow therefore holds
several values for the step, and the value with the newest timestamp is valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker

_KEY_TAG = "maxpipe.key"
_MAX_METRICS, _MAX_PARAMS, _MAX_CHARS = 1000, 100, 500
"""Limits of one request, and of the length of a parameter."""
_REQUEST_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Defaults of the client, with which a call would take minutes while the server is down."""


class MlflowTracker(Tracker):
    """Writes the records to an MLflow run, and the config to its parameters."""

    def __init__(self) -> None:
        for name, value in _REQUEST_VARIABLES.items():
            os.environ.setdefault(name, value)
        import mlflow
        import mlflow.entities  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        self._entities: Any = mlflow.entities
        self._client: Any = None
        self._run_id = ""

    def open(self, run: TrackedRun, run_id: str) -> str:
        uri = run.tracker_config.mlflow_uri or None
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if not run_id:
            run_id = self._find_or_create(run)
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _find_or_create(self, run: TrackedRun) -> str:
        """Return the run with the key of this run, which a previous call may have created."""
        name = run.project
        if name == "maxpipe":
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        runs = self._client.search_runs(
            [experiment], filter_string=f"tags.`{_KEY_TAG}` = '{run.key}'", max_results=1
        )
        if runs:
            return runs[0].info.run_id
        tags = {_KEY_TAG: run.key, **run.tags}
        if "git_commit" in run.tags:
            tags["mlflow.source.git.commit"] = run.tags["git_commit"]
        run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [
            self._entities.Param(key, str(value)[:_MAX_CHARS]) for key, value in run.config.items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
        return run_id

    def log(self, records: Sequence[Record]) -> None:
        metrics = [*self._metrics(records)]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def _metrics(self, records: Sequence[Record]) -> Iterator[Any]:
        for record in records:
            for tag, value in record.values.items():
                milliseconds = round(1000 * record.time)
                yield self._entities.Metric(tag, value, milliseconds, record.step)

    def log_artifact(self, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, name)

    def log_checkpoint(self, step: int, folder: str, num_bytes: int) -> None:
        self._client.set_tag(self._run_id, f"checkpoint.{step}", f"{folder}/{step}")

    def close(self, is_complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_complete else "KILLED")

    @property
    def address(self) -> str:
        run = self._client.get_run(self._run_id)
        uri = self._client.tracking_uri
        if not uri.startswith("http"):
            return uri
        return f"{uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{self._run_id}"
