"""Tracker for OpenTelemetry collectors: OTLP over HTTP with protocol buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import maxpipe
from maxpipe.telemetry.metrics import metric_of
from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker


class OtlpTracker(Tracker):
    """Sends one gauge per tag, with the attributes `run` and `step` and the time of the record.

    The exporter is called directly: the metrics API of OpenTelemetry aggregates values in memory
    and exports them periodically.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http import (  # pyright: ignore[reportMissingImports]
            metric_exporter,
        )
        from opentelemetry.sdk import resources  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.metrics import export  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.util import instrumentation  # pyright: ignore[reportMissingImports]

        self._metric_exporter: Any = metric_exporter
        self._resources: Any = resources
        self._export: Any = export
        self._instrumentation: Any = instrumentation
        self._exporter: Any = None
        self._resource: Any = None
        self._run, self._endpoint = "", ""

    def open(self, run: TrackedRun, run_id: str) -> str:
        self._run, self._endpoint = run.name, run.tracker_config.otlp_endpoint
        self._exporter = self._metric_exporter.OTLPMetricExporter(endpoint=self._endpoint or None)
        attributes = {f"maxpipe.{key}": text for key, text in run.tags.items()}
        attributes |= {"maxpipe.key": run.key}
        named = self._resources.Resource.create({"service.name": "maxpipe"})
        # Variables such as OTEL_SERVICE_NAME take precedence.
        named = named.merge(self._resources.OTELResourceDetector().detect())
        self._resource = named.merge(self._resources.Resource(attributes))
        return run.key

    def log(self, records: Sequence[Record]) -> None:
        points: dict[str, list[Any]] = {}
        for record in records:
            for tag, value in record.values.items():
                points.setdefault(tag, []).append(
                    self._export.NumberDataPoint(
                        attributes={"run": self._run, "step": record.step},
                        start_time_unix_nano=0,
                        time_unix_nano=round(1e9 * record.time),
                        value=value,
                    )
                )
        result = self._exporter.export(self._data(points))
        if result is not self._export.MetricExportResult.SUCCESS:
            raise ConnectionError("the collector did not accept the metrics")

    def _data(self, points: dict[str, list[Any]]) -> Any:
        export = self._export
        metrics = []
        for tag, values in points.items():
            known = metric_of(tag)
            metrics.append(
                export.Metric(
                    name=f"maxpipe.{tag.replace('/', '.')}",
                    description=known.meaning if known else "",
                    unit=known.unit if known else "",
                    data=export.Gauge(data_points=values),
                )
            )
        scope = self._instrumentation.InstrumentationScope("maxpipe", maxpipe.__version__)
        return export.MetricsData(
            resource_metrics=[
                export.ResourceMetrics(
                    resource=self._resource,
                    scope_metrics=[
                        export.ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
                    ],
                    schema_url="",
                )
            ]
        )

    def close(self, is_complete: bool) -> None:
        self._exporter.shutdown()

    @property
    def address(self) -> str:
        return self._endpoint
