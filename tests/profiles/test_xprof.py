"""Times of operations equal those of XProf on the same trace (`pip install xprof`)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from maxpipe.profiles import capture
from maxpipe.profiles.report import summarize
from tests.profiles.planted import planted_step
from tests.profiles.test_results import STEPS, write_profile
from tests.profiles.traces import STAGES

pytestmark = pytest.mark.oracle
TOLERANCE = 0.02


def tool_data(folder: Path, tool: str) -> Any:
    """Return the data of one of XProf's tools as JSON."""
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    (path,) = folder.rglob("*.xplane.pb")
    data, _ = convert.xspace_to_tool_data([str(path)], tool, {"use_saved_result": False})
    return json.loads(data)


def rows(table: Any) -> list[dict[str, Any]]:
    names = [column["id"] for column in table["cols"]]
    return [
        dict(zip(names, [cell.get("v") for cell in row["c"]], strict=True)) for row in table["rows"]
    ]


def own_seconds(folder: Path) -> dict[str, float]:
    """Return the own time of each operation in seconds, summed over steps and devices."""
    found = capture.read_capture(folder)
    scale = found.metadata.num_steps * len(found.devices)
    return {each.operation.name: each.seconds * scale for each in summarize(found).operations}


def test_tpu_times_equal_hlo_stats(tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu", slow_stage=1)
    table = rows(tool_data(tmp_path, "hlo_stats"))
    expected = {row["hlo_op_name"]: 1e-6 * row["total_self_time"] for row in table}
    found = own_seconds(tmp_path)
    assert len(expected) == 10 and found == pytest.approx(expected, rel=TOLERANCE)
    by_program = tool_data(tmp_path, "op_profile")["byProgramExcludeIdle"]["metrics"]["rawTime"]
    assert sum(found.values()) == pytest.approx(by_program * 1e-12, rel=TOLERANCE)


def test_gpu_times_equal_kernel_stats(tmp_path: Path) -> None:
    write_profile(tmp_path, "gpu", slow_stage=1)
    table = rows(tool_data(tmp_path, "kernel_stats"))
    expected = {
        row["kernel_name"].removeprefix("kernel_"): 1e-6 * row["total_duration_us"] for row in table
    }
    assert len(expected) == 6
    assert own_seconds(tmp_path) == pytest.approx(expected, rel=TOLERANCE)
    counts = {row["kernel_name"]: row["occurrences"] for row in table}
    assert counts["kernel_copy.t"] == 10 * STEPS * STAGES


def test_cpu_times_equal_trace_viewer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XProf's operation tools ignore CPU devices, so its trace viewer is compared."""
    step = planted_step(monkeypatch, schedule="1f1b", stages=4, repeats=1)
    found = step.profile(tmp_path, num_steps=1)
    expected: dict[str, float] = defaultdict(float)
    for event in tool_data(tmp_path, "trace_viewer")["traceEvents"]:
        op = event.get("args", {}).get("hlo_op")
        if op and not found.capture.program.operation(op).is_container:
            expected[op] += 1e-6 * event["dur"]
    assert sum(own_seconds(tmp_path).values()) == pytest.approx(
        sum(expected.values()), rel=TOLERANCE
    )
    largest = sorted(expected, key=lambda op: -expected[op])[:20]
    own = own_seconds(tmp_path)
    assert {op: own[op] for op in largest} == pytest.approx(
        {op: expected[op] for op in largest}, rel=TOLERANCE
    )
