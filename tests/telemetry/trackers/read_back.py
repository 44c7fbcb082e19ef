"""Print the metrics in a tracker as JSON. Usage: read_back.py SERVICE ARGUMENTS.

The result maps steps to values by tag; the newest value of a step is valid. The client of the
service must be importable. NaN is printed as NaN.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[int, dict[str, float]]


_BLOCK, _HEADER = 32768, 7
"""Sizes of W&B's file format, which is the log format of LevelDB."""


def _log_records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    offset, parts = _HEADER, []
    while offset < len(content):
        if (left := _BLOCK - offset % _BLOCK) < _HEADER:
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, offset)
        parts.append(content[offset + _HEADER : offset + _HEADER + size])
        offset += _HEADER + size
        if kind in (1, 4):  # complete, or the last part
            yield b"".join(parts)
            parts = []


def wandb(folder: str) -> dict[str, Any]:
    """Read all offline runs below a folder."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    found: Values = {}
    ids, config, artifacts = set(), {}, []
    for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                for item in record.run.config.update:
                    name = item.key or "/".join(item.nested_key)
                    config[name] = json.loads(item.value_json)
            elif kind == "history":
                row = {}
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    row[name] = json.loads(item.value_json)
                step = row.pop("step")
                values = {k: float(v) for k, v in row.items() if not k.startswith("_")}
                found.setdefault(step, {}).update(values)
            elif kind == "artifact":
                artifacts.append(record.artifact.name)
            elif kind == "request" and record.request.HasField("log_artifact"):
                artifacts.append(record.request.log_artifact.artifact.name)
    return {"values": found, "ids": sorted(ids), "config": config, "artifacts": artifacts}


def mlflow(uri: str) -> dict[str, Any]:
    """Read all runs of the experiment `p`."""
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("p")
    runs = client.search_runs([experiment.experiment_id])
    found: Values = {}
    for run in runs:
        for tag in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, tag)
            for each in sorted(history, key=lambda each: each.timestamp):
                found.setdefault(each.step, {})[tag] = each.value
    artifacts = [each.path for each in client.list_artifacts(runs[0].info.run_id)]
    return {
        "values": found,
        "ids": [run.info.run_id for run in runs],
        "config": runs[0].data.params,
        "tags": runs[0].data.tags,
        "status": runs[0].info.status,
        "artifacts": artifacts,
    }


def trackio(project: str) -> dict[str, Any]:
    """Read all runs of a project."""
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    found: Values = {}
    names = SQLiteStorage.get_runs(project)
    for name in names:
        for row in SQLiteStorage.get_logs(project, name):
            values = {tag: v for tag, v in row.items() if tag not in ("step", "timestamp")}
            numbers = {t: float(v) for t, v in values.items() if not isinstance(v, dict)}
            found.setdefault(row["step"], {}).update(numbers)
    config = SQLiteStorage.get_run_config(project, names[0])
    with sqlite3.connect(SQLiteStorage.get_project_db_path(project)) as database:
        artifacts = database.execute("SELECT name FROM artifacts ORDER BY name").fetchall()
    return {"values": found, "ids": names, "config": config, "artifacts": artifacts}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
