"""Build the HTML page of one or more runs: one file without external resources.

The page contains the records as JSON and base64 arrays, and draws them in the browser. A
Content-Security-Policy allows only the scripts of this package, and the scripts insert records as
text, so records cannot run code.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import maxpipe
from maxpipe.config.config_files import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
)
from maxpipe.config.sections.eval import best_mode_of
from maxpipe.errors import Code, MaxpipeError, StorageError
from maxpipe.io.files import read
from maxpipe.profiles.capture import PICTURE_FILE, profiled_steps, step_folder
from maxpipe.report import records
from maxpipe.report.records import Report
from maxpipe.telemetry import goodput
from maxpipe.telemetry.metrics import CHARTS, METRICS, tag_pattern

_SCRIPTS = ("uplot.min.js", "report.js")
_STYLES = ("uplot.min.css", "report.css")
_CHARTS = (*CHARTS, ("data shares", (records.SHARE.tag,)))
_MAX_PICTURE_BYTES = 4 << 20
_MAX_PROFILES = 5
_LARGE_TIMELINE = 4_000
"""Number of slots above which only the first ticks of the planned timeline are drawn."""


def read_run(run_dir: Path, name: str, report: Report | None = None) -> dict[str, Any]:
    """Return all data that the page shows of one run.

    Raises:
        ConfigError: the folder contains no records.
        StorageError: the records cannot be read.
    """
    records.check_records(run_dir, name)
    try:
        table = records.read_metrics(run_dir / METRICS_FILE, report)
        records.add_token_shares(table)
        events = records.read_events(run_dir / EVENTS_FILE)
        samples = records.read_samples(run_dir / SAMPLES_FILE)
        layers = records.read_layers(run_dir / "layers.jsonl")
    except OSError as error:
        raise StorageError(
            Code.RUN_RECORDS,
            f"{run_dir}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files.",
        ) from error
    wall_time = records.read_goodput(run_dir)
    attempts = wall_time.attempts if wall_time else []
    status = records.status_of(attempts, datetime.now(UTC))
    return {
        "name": name,
        "folder": str(run_dir),
        "status": status,
        "last_step": table.steps[-1] if table.steps else None,
        "tokens": table.last("train/tokens"),
        "loss": table.last("train/loss"),
        "invalid_lines": table.num_invalid,
        "num_records": len(table.steps),
        "series": records.encode_series(table),
        "events": events,
        "samples": samples,
        "layers": layers,
        "evaluations": records.evaluations(table, best_mode_of),
        "sources": records.data_shares(table),
        "goodput": wall_time and _wall_time(wall_time),
        "pictures": [*_planned_timeline(run_dir), *_profile_pictures(run_dir)],
        "config": records.read_config(run_dir / CONFIG_FILE),
        "forecast": _forecast(run_dir),
    }


def is_running(run: Mapping[str, Any]) -> bool:
    """Return whether a run from `read_run` may still write records."""
    return run["status"] == "running"


def _forecast(run_dir: Path) -> dict[str, Any] | None:
    """Return predicted and measured time and memory, or None if the run recorded no forecast."""
    with contextlib.suppress(MaxpipeError):
        from maxpipe.profiles.run_comparison import compare_run, comparison_values

        return comparison_values(compare_run(run_dir))
    return None


def _wall_time(found: goodput.Goodput) -> dict[str, Any]:
    values = goodput.goodput_to_dict(found)
    values["causes"] = [
        {"name": name, "about": about, "seconds": found.seconds[name]}
        for name, about in goodput.CAUSES.items()
        if name in found.seconds
    ]
    return values


def _planned_timeline(run_dir: Path) -> list[dict[str, str]]:
    """Return the planned timeline of the run's schedule, unless its config cannot be loaded."""
    with contextlib.suppress(MaxpipeError, OSError):
        from maxpipe.config.load import load
        from maxpipe.planner.sizes import build_schedule
        from maxpipe.schedule.draw import summary
        from maxpipe.schedule.pictures import draw_overview, draw_schedule

        schedule = build_schedule(load([str(run_dir / CONFIG_FILE)]).config)
        small = schedule.num_ticks * schedule.num_stages <= _LARGE_TIMELINE
        drawing = draw_schedule(schedule) if small else draw_overview(schedule)
        title = "Planned timeline, all slots of equal cost"
        return [_picture(title, summary(schedule), drawing.svg().encode())]
    return []


def _profile_pictures(run_dir: Path) -> list[dict[str, str]]:
    """Return the measured timelines of the newest profiles."""
    found = []
    for step in profiled_steps(run_dir)[-_MAX_PROFILES:]:
        with contextlib.suppress(OSError):
            svg = read(step_folder(run_dir, step) / PICTURE_FILE, _MAX_PICTURE_BYTES)
            found.append(_picture(f"Profile of step {step:,}", "", svg))
    return found


def _picture(title: str, about: str, svg: bytes) -> dict[str, str]:
    return {"title": title, "about": about, "svg": base64.b64encode(svg).decode()}


def render(runs: Sequence[Mapping[str, Any]], refresh_seconds: int = 0) -> str:
    """Return the HTML page of runs from `read_run`.

    If `refresh_seconds` is set, the page reloads itself at this interval.
    """
    data = {
        "version": maxpipe.__version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "refresh": refresh_seconds,
        "runs": runs,
        "charts": [[title, [f"^{tag_pattern(tag)}$" for tag in tags]] for title, tags in _CHARTS],
        "metrics": [
            [f"^{tag_pattern(each.tag)}$", each.unit, each.meaning]
            for each in (*METRICS, records.SHARE)
        ],
        "differences": records.config_differences([run["config"] for run in runs]),
    }
    # In JSON, "<" occurs only inside strings, where it can be escaped.
    text = json.dumps(_finite(data), allow_nan=False, default=str).replace("<", "\\u003c")
    scripts = [_asset(name) for name in _SCRIPTS]
    allowed = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; "
        "base-uri 'none'; form-action 'none'"
    )
    # The name of a folder may contain bytes that are not UTF-8.
    names = ", ".join(run["name"] for run in runs).encode("utf-8", "replace").decode()
    title = html.escape(names)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title} - maxpipe report</title>",
        *(f"<style>{_asset(name)}</style>" for name in _STYLES),
        "</head><body>",
        '<noscript>This page requires JavaScript to draw its charts.</noscript><main id="page">',
        "</main>",
        f'<script type="application/json" id="data">{text}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>",
        "",
    ]
    return "\n".join(parts)


def _asset(name: str) -> str:
    return resources.files("maxpipe.report").joinpath("assets", name).read_text("utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _finite(value: Any) -> Any:
    """Return the value with null instead of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
