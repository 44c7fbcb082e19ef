"""Read the records of a run folder into the data of a report page.

Records may be damaged or still being written: invalid lines are skipped and counted. Large runs are
reduced to at most `MAX_POINTS` points per metric, each with mean, minimum and maximum.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.config.config_files import EVENTS_FILE, METRICS_FILE
from maxpipe.errors import Code, ConfigError
from maxpipe.io import redact
from maxpipe.io.files import read, read_json_lines, read_lines
from maxpipe.telemetry import goodput
from maxpipe.telemetry.curves import MAX_VALUE
from maxpipe.telemetry.metrics import Metric

MAX_POINTS = 20_000
"""Maximum number of points per metric. Longer series are averaged over consecutive records."""
_MAX_EVENTS = 3_000
_MAX_SAMPLE_STEPS, _MAX_SAMPLE_TEXT = 200, 20_000
_MAX_LAYER_STEPS, _MAX_LAYER_BYTES, _MAX_EXPERT_ROWS = 300, 1 << 26, 2048
_RUNNING_SECONDS = 600.0
"""Age of the newest record up to which an attempt without an end is shown as running."""
_PROGRESS_LINES = 10_000
Report = Callable[[str, int, int], None]
"""Progress callback: task, number of units done, total number of units."""


@dataclass
class MetricTable:
    """The values of `metrics.jsonl` by tag. Values that JSON stores as null are NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    """Step of each record."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """Unix time of each record in seconds; NaN if unknown."""
    records: dict[str, array[int]] = field(default_factory=dict)
    """Indices of the records that contain the tag."""
    values: dict[str, array[float]] = field(default_factory=dict)
    num_invalid: int = 0
    """Number of lines that are not valid records."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, or count it as invalid."""
        step = record.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            self.num_invalid += 1
            return
        index = len(self.steps)
        self.steps.append(step)
        self.times.append(_unix_time(record.get("time")))
        for tag, value in record.items():
            if tag in ("step", "time"):
                continue
            if value is None:
                value = math.nan
            elif type(value) is not float and type(value) is not int:
                continue
            elif not -MAX_VALUE <= value <= MAX_VALUE:
                value = math.nan
            if tag not in self.values:
                self.records[tag], self.values[tag] = array("q"), array("d")
            self.records[tag].append(index)
            self.values[tag].append(value)

    def last(self, tag: str) -> float | None:
        """Return the newest finite value of a tag, or None."""
        return next((each for each in reversed(self.values.get(tag, ())) if each == each), None)


def _unix_time(text: object) -> float:
    """Return the Unix time of an ISO 8601 time, or NaN."""
    if isinstance(text, str):
        with contextlib.suppress(ValueError, OverflowError):
            time = datetime.fromisoformat(text)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return math.nan


def read_metrics(path: Path, report: Report | None = None) -> MetricTable:
    """Read `metrics.jsonl`. A missing file has no records.

    Raises:
        OSError: the file cannot be read.
    """
    table, size, count = MetricTable(), 0, 0
    try:
        size = path.stat().st_size
        for offset, line in read_lines(path):
            count += 1
            if report is not None and count % _PROGRESS_LINES == 0:
                report(f"reading {path}", offset >> 20, size >> 20)
            try:
                # `parse_json` is three times slower, which matters for a million records.
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = {}
            if line.strip():
                table.add(record if isinstance(record, dict) else {})
    except FileNotFoundError:
        pass
    return table


def encode_series(table: MetricTable, most: int = MAX_POINTS) -> dict[str, Any]:
    """Return the series of all tags as base64 arrays: `axes`, which several tags may share, and
    `tags`.
    """
    axes: list[dict[str, Any]] = []
    known: dict[bytes, int] = {}
    tags: dict[str, dict[str, Any]] = {}
    steps, times = np.array(table.steps, np.float64), np.array(table.times)
    start = np.nanmin(times) if np.isfinite(times).any() else 0.0
    for tag, indices in table.records.items():
        values, places = np.array(table.values[tag]), np.array(indices)
        bucket = -(-len(values) // most)
        if (key := places.tobytes()) not in known:
            known[key] = len(axes)
            ends = np.minimum(
                np.arange(bucket - 1, len(values) + bucket - 1, bucket), len(values) - 1
            )
            last = places[ends]
            axes.append(
                {
                    "steps": _base64(steps[last], "<f8"),
                    "hours": _base64((times[last] - start) / 3600, "<f4"),
                    "bucket": bucket,
                }
            )
        entry: dict[str, Any] = {"axis": known[key]}
        if bucket == 1:
            entry["mean"] = _base64(values, "<f4")
        else:
            mean, low, high = _bucket(values, bucket)
            entry |= {"mean": _base64(mean, "<f4"), "low": _base64(low, "<f4")}
            entry["high"] = _base64(high, "<f4")
        tags[tag] = entry
    return {"axes": axes, "tags": tags}


def _bucket(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, minimum and maximum of consecutive groups of values, without NaN values."""
    padding = -len(values) % size
    groups = np.append(values, np.full(padding, math.nan)).reshape(-1, size)
    known = np.isfinite(groups)
    count = known.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, groups, 0).sum(1) / count
    low = np.where(known, groups, np.inf).min(1)
    high = np.where(known, groups, -np.inf).max(1)
    missing = count == 0
    return mean, np.where(missing, math.nan, low), np.where(missing, math.nan, high)


def _base64(values: np.ndarray, dtype: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the newest events except time records, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        records = (
            each
            for each in read_json_lines(path, dict[str, Any])
            if isinstance(each.get("event"), str) and each["event"] != "time"
        )
        return [redact.redact_value(each) for each in records][-_MAX_EVENTS:]
    return []


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the newest samples: step, and the prompt, text and reward of each sample."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for record in read_json_lines(path, dict[str, Any]):
            step, samples = record.get("step"), record.get("samples")
            if type(step) is not int or not isinstance(samples, list):
                continue
            found.append(
                {
                    "step": step,
                    "samples": [
                        {str(key): _shorten(value) for key, value in sample.items()}
                        for sample in samples
                        if isinstance(sample, dict)
                    ],
                }
            )
    return found[-_MAX_SAMPLE_STEPS:]


def _shorten(value: object) -> object:
    if isinstance(value, str) and len(value) > _MAX_SAMPLE_TEXT:
        return value[:_MAX_SAMPLE_TEXT] + "..."
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def read_layers(path: Path) -> dict[str, Any] | None:
    """Read the layer statistics as matrices: `steps`, `rows` by matrix and base64 `values` by name,
    `[steps, rows]` in row-major order; None without values.

    At most `_MAX_LAYER_STEPS` evenly spaced records are used.
    """
    records: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        for _, line in read_lines(path, longest=_MAX_LAYER_BYTES):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append({key: record.get(key) for key in ("step", *_LAYER_FIELDS)})
    if len(records) > _MAX_LAYER_STEPS:
        chosen = np.linspace(0, len(records) - 1, _MAX_LAYER_STEPS).round().astype(int)
        records = [records[index] for index in chosen]
    rows: dict[str, list[str]] = {}
    columns: dict[str, list[list[float]]] = {}
    for number, record in enumerate(records):
        for name, values in _layer_values(record).items():
            names = [label for label, _ in values]
            if name not in rows:
                rows[name] = names
                columns[name] = [[math.nan] * len(names) for _ in range(number)]
            if len(names) == len(rows[name]):
                columns[name].append([value for _, value in values])
        for name, column in columns.items():
            column += [[math.nan] * len(rows[name])] * (number + 1 - len(column))
    if not rows:
        return None
    return {
        "steps": [record["step"] for record in records],
        "rows": rows,
        "values": {name: _base64(np.array(column), "<f4") for name, column in columns.items()},
    }


_LAYER_FIELDS = ("values", "outside", "experts")


def _layer_values(record: Mapping[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Return the labeled values of each statistic: one per layer, or one per layer and expert."""

    def number(value: object) -> float:
        # Integers have no limit in JSON, and `float` rejects large ones.
        known = type(value) is float or (type(value) is int and -MAX_VALUE <= value <= MAX_VALUE)
        return float(value) if known else math.nan  # type: ignore[arg-type]

    found: dict[str, list[tuple[str, float]]] = {}
    values, outside, experts = (record.get(field) or {} for field in _LAYER_FIELDS)
    for name, layers in values.items() if isinstance(values, dict) else ():
        if layers and isinstance(layers, list):
            found[name] = [(f"layer {index}", number(each)) for index, each in enumerate(layers)]
    for name, value in outside.items() if isinstance(outside, dict) else ():
        found[name] = [("outside the layers", number(value))]
    for name, layers in experts.items() if isinstance(experts, dict) else ():
        entries = [
            (f"layer {index}, expert {expert}", number(load))
            for index, each in enumerate(layers if isinstance(layers, list) else ())
            for expert, load in enumerate(each if isinstance(each, list) else ())
        ]
        if 0 < len(entries) <= _MAX_EXPERT_ROWS:
            found[name] = entries
    return found


def evaluations(table: MetricTable, best: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the first, best and last value of each evaluation metric."""
    rows = []
    for tag, values in table.values.items():
        if not (tag.startswith("eval/") or re.fullmatch(r"source/.*/eval_\w+", tag)):
            continue
        points = [
            (table.steps[record], value)
            for record, value in zip(table.records[tag], values, strict=True)
            if math.isfinite(value)
        ]
        if points:
            select = max if best(tag) == "max" else min
            chosen = select(points, key=lambda point: point[1])
            rows.append({"tag": tag, "first": points[0], "best": chosen, "last": points[-1]})
    return rows


SHARE = Metric(
    "source/NAME/share",
    "fraction",
    "Fraction of the tokens since the previous record that are from the source, computed from "
    "`source/NAME/tokens`.",
)
"""Metric that only the page contains."""


def add_token_shares(table: MetricTable) -> None:
    """Add the metric `SHARE` of each source to the records that contain the tokens of all sources.

    A record has no shares if the number of tokens did not increase.
    """
    tokens = {m[1]: tag for tag in table.values if (m := re.fullmatch(r"source/(.+)/tokens", tag))}
    if not tokens:
        return
    indices = {tag: np.array(table.records[tag]) for tag in tokens.values()}
    common = functools.reduce(np.intersect1d, indices.values())
    totals = np.array(
        [
            np.array(table.values[tag])[np.searchsorted(places, common)]
            for tag, places in indices.items()
        ]
    )
    added = np.diff(totals, axis=1, prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        shares = added / added.sum(0)
    is_valid = np.isfinite(shares).all(0) & (added >= 0).all(0)
    for name, share in zip(tokens, shares, strict=True):
        tag = SHARE.tag.replace("NAME", name)
        table.records[tag] = array("q", common[is_valid].tolist())
        table.values[tag] = array("d", share[is_valid].tolist())


def data_shares(table: MetricTable) -> list[dict[str, Any]]:
    """Return the tokens and epochs read from each source, largest first."""
    shares = []
    for tag in table.values:
        if match := re.fullmatch(r"source/(.+)/tokens", tag):
            name = match[1]
            epochs = table.last(f"source/{name}/epochs")
            shares.append({"name": name, "tokens": table.last(tag) or 0.0, "epochs": epochs})
    return sorted(shares, key=lambda share: -share["tokens"])


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a run's `config.yml`, or no keys if the file is damaged."""
    import yaml

    from maxpipe.config.yaml_values import load_yaml

    try:
        values = load_yaml(read(path, 1 << 22))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return redact.redact_value(_flatten(values)) if isinstance(values, dict) else {}


def _flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in sorted(keys):
        values = [_show(config[key]) if key in config else None for config in configs]
        if len(set(values)) > 1 and key != "run.name":
            rows.append({"key": key, "values": values})
    return rows


def _show(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "null"
    return str(value)


def status_of(attempts: Sequence[goodput.Attempt], now: datetime) -> str:
    """Return the status of a run: `running`, or how its last attempt ended."""
    if not attempts:
        return "no attempt recorded"
    last = attempts[-1]
    age = (now - last.end).total_seconds()
    if last.ended != "killed":
        return last.ended
    if age < _RUNNING_SECONDS:
        return "running"
    return "killed, or running without new records"


def read_goodput(run_dir: Path) -> goodput.Goodput | None:
    """Return the goodput of a run, or None without events."""
    try:
        return goodput.read_goodput(run_dir)
    except ConfigError:
        return None


def check_records(run_dir: Path, name: str) -> None:
    """Check that a folder contains the records of a run.

    Raises:
        ConfigError: the folder has neither metrics nor events.
    """
    if not any((run_dir / file).is_file() for file in (METRICS_FILE, EVENTS_FILE)):
        raise ConfigError.one(
            Code.RUN_RECORDS,
            f"run folder {name}",
            None,
            f"must contain {METRICS_FILE} or {EVENTS_FILE}, which `maxpipe train` writes.",
            "Give the folder of a run (default: runs/<run.name>).",
        )
