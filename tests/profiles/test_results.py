"""Results of constructed TPU and GPU traces, in which the times of all operations are known."""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.errors import ConfigError
from maxpipe.profiles import capture, draw
from maxpipe.profiles.bubble import explain, unplanned_idle
from maxpipe.profiles.results import Results, analyze
from maxpipe.profiles.trace import covered, own_seconds, seconds_inside
from tests.profiles import traces

STEPS = 3
PLATFORMS = ("tpu", "gpu")


def write_profile(folder: Path, platform: str, **faults: float) -> list[list[traces.Span]]:
    """Write a profile of equal steps, and return the spans of each device in one step."""
    spans = traces.execute(**faults)  # type: ignore[arg-type]
    period = max(span.stop for device in spans for span in device) + 50
    encode = traces.tpu_trace if platform == "tpu" else traces.gpu_trace
    into = capture.trace_folder(folder, "2026_01_01_00_00_00")
    into.mkdir(parents=True)
    (into / capture.trace_name("host", 0)).write_bytes(encode([spans] * STEPS, period))
    capture.write_program(folder, traces.PROGRAM)
    capture.write_memory(folder, {"parameters": 2.0**30})
    capture.write_metadata(folder, traces.metadata(platform, STEPS, period * 1e-6))
    return spans


def results_of(folder: Path, platform: str, **faults: float) -> Results:
    write_profile(folder, platform, **faults)
    return analyze(capture.read_capture(folder))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_times_are_those_of_the_trace(platform: str, tmp_path: Path) -> None:
    spans = write_profile(tmp_path, platform)
    report = analyze(capture.read_capture(tmp_path)).report
    expected: dict[str, float] = defaultdict(float)
    for span in (inner for device in spans for outer in device for inner in outer.walk()):
        expected[span.op] += span.own * 1e-6 / traces.STAGES
    found = {each.operation.name: each.seconds for each in report.operations}
    if platform == "gpu":
        transfers = found.pop("collective-permute-start.1")
        assert transfers == pytest.approx(report.collectives[0].seconds)
        expected = {op: spent for op, spent in expected.items() if op in found}
    assert found == pytest.approx(expected)
    places = {name: spent for name, spent, _ in report.by_place()}
    assert places["attention"] == pytest.approx(4 * traces.BACKWARD * 1e-6)
    assert places["mlp"] == pytest.approx(4 * traces.FORWARD * 1e-6)
    assert places["optimizer update"] == pytest.approx(traces.UPDATE * 1e-6)
    (permutes,) = report.collectives
    assert (permutes.kind, permutes.axes, permutes.count) == ("collective-permute", "stage", 10)
    assert 0 < permutes.overlapped < permutes.seconds
    assert report.gap_seconds == pytest.approx(50e-6 * (STEPS - 1) / STEPS, rel=0.05) or (
        platform == "gpu"
    )


def test_pauses_between_steps_are_not_gaps(tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu")
    profile = capture.read_capture(tmp_path)
    gaps = analyze(profile).report.gap_seconds
    paused = replace(profile.metadata, paused_seconds=0.75 * gaps)
    report = analyze(replace(profile, metadata=paused)).report
    assert report.gap_seconds == pytest.approx(0.25 * gaps)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_slots_are_placed_in_their_ticks(platform: str, tmp_path: Path) -> None:
    timeline = results_of(tmp_path, platform).timeline
    assert timeline is not None
    table = traces.schedule()
    for kind, slots, seconds in (
        ("F", table.forward, traces.FORWARD),
        ("B", table.backward, traces.BACKWARD),
    ):
        expected = np.where(slots.active, seconds * 1e-6, 0.0)
        np.testing.assert_allclose(timeline.work[kind], expected)
        np.testing.assert_allclose(timeline.wall_work[kind], expected)
        assert (np.isnan(timeline.wall_begin[kind]) == ~slots.active).all()
    assert (np.diff(timeline.wall_ticks) > 0).all()
    assert timeline.num_steps == STEPS


@pytest.mark.parametrize("stage", range(traces.STAGES))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_slow_stage_and_slow_link_are_named(platform: str, stage: int, tmp_path: Path) -> None:
    slow = results_of(tmp_path / "stage", platform, slow_stage=stage)
    assert slow.bubble is not None and slow.bubble.fault is not None
    assert (slow.bubble.fault.kind, slow.bubble.fault.stage) == ("slow stage", stage)
    assert "1.50 x the median stage" in str(slow.bubble.fault)
    late = results_of(tmp_path / "link", platform, slow_link=stage)
    assert late.bubble is not None and late.bubble.fault is not None
    assert (late.bubble.fault.kind, late.bubble.fault.stage, late.bubble.fault.receiver) == (
        "exposed message",
        stage,
        (stage + 1) % traces.STAGES,
    )
    assert "150 us per message" in str(late.bubble.fault)
    assert slow.timeline is not None and late.timeline is not None
    assert (
        unplanned_idle(slow.timeline)[:, stage].sum() < unplanned_idle(slow.timeline).max(1).sum()
    )


@pytest.mark.parametrize(("scale", "stages"), [(10.0, [1]), (0.1, [])])
def test_short_slots_on_shared_cores_do_not_name_a_stage(
    scale: float, stages: list[int], tmp_path: Path
) -> None:
    timeline = results_of(tmp_path, "tpu", slow_stage=1).timeline
    assert timeline is not None
    work = {kind: scale * spent for kind, spent in timeline.work.items()}
    shared = replace(timeline, shares_cores=True, work=work, shared=scale * timeline.shared)
    bubble = explain(shared, capture.read_metadata(tmp_path))
    assert [cause.stage for cause in bubble.causes if cause.kind == "slow stage"] == stages


@pytest.mark.parametrize("platform", PLATFORMS)
def test_bubble_without_faults_is_that_of_the_wall_time(platform: str, tmp_path: Path) -> None:
    found = results_of(tmp_path, platform)
    bubble, timeline = found.bubble, found.timeline
    assert bubble is not None and timeline is not None and not bubble.causes
    assert bubble.planned == pytest.approx(traces.schedule().idle_fraction())
    per_stage = 4 * (traces.FORWARD + traces.BACKWARD) + 10 * (traces.TICK + traces.HEAD)
    expected = 1 - per_stage * 1e-6 / float(timeline.wall_ticks[-1])
    assert bubble.measured == pytest.approx(expected, abs=0.005)


def test_results_are_written(tmp_path: Path) -> None:
    found = results_of(tmp_path, "tpu", slow_stage=1)
    found.write()
    values = json.loads((tmp_path / capture.TIMELINE_FILE).read_text())
    waits = {cell["idle_cause"] for cell in values["cells"] if cell["stage"] != 1}
    assert waits == {"", "stage 1"}
    assert all(not cell["idle_cause"] for cell in values["cells"] if cell["stage"] == 1)
    assert values["bubble"]["causes"][0]["stage"] == 1
    svg = (tmp_path / capture.PICTURE_FILE).read_text()
    assert "planned" in svg and "measured" in svg and "slow stage 1" in svg
    assert "prefers-color-scheme:dark" in svg
    assert found.timeline is not None and found.bubble is not None
    trace = json.loads(draw.perfetto(found.timeline, found.bubble))["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert any(event["name"] == "idle: stage 1" for event in trace)


@pytest.mark.parametrize(
    "name", ["profile.json", "memory.json", "train_step.hlo.gz", "plugins/profile"]
)
def test_damaged_profile_is_an_error(name: str, tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu")
    path = tmp_path / name
    if path.is_dir():
        for trace in path.rglob("*.pb"):
            trace.write_bytes(b"no trace")
    else:
        path.write_text('{"step": "one"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        capture.read_capture(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_steps",), 0),
        (("mesh",), {}),
        (("mesh",), {"fsdp": traces.STAGES}),
        (("mesh", "stage"), -1),
        (("devices",), [[0, 0]]),
        (("devices", 0), [0, 0, 0]),
        (("table", "num_stages"), traces.STAGES - 1),
        (("table", "num_repeats"), 0),
        (("table", "slots"), []),
        (("table", "slots", 0, "microbatch"), [[]]),
        (("table", "slots", 0, "repeat", 0), [9] * traces.STAGES),
        (("table", "chunks"), [[0]]),
        (("table", "chunk_layers"), []),
        (("table", "chunk_costs"), [[0.0] * traces.STAGES]),
        (("table", "planned_bubble"), 1.0),
    ],
)
def test_metadata_that_does_not_match_is_an_error(
    path: tuple[Any, ...], value: object, tmp_path: Path
) -> None:
    write_profile(tmp_path, "tpu")
    values = json.loads((tmp_path / capture.METADATA_FILE).read_text())
    parent = functools.reduce(lambda inner, key: inner[key], path[:-1], values)
    parent[path[-1]] = value
    (tmp_path / capture.METADATA_FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"cannot be read: profile.json contains a"):
        capture.read_capture(tmp_path)


@pytest.mark.parametrize("text", ["", "HloModule train", "a" * 5000])
def test_damaged_program_is_an_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path, "tpu")
    monkeypatch.setattr(capture, "_MAX_PROGRAM_BYTES", 4000)
    capture.write_program(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        capture.read_capture(tmp_path)


def test_damaged_compression_is_an_error(tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu")
    path = tmp_path / capture.PROGRAM_FILE
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff\x00" * 40 + content[180:])
    with pytest.raises(ConfigError, match="cannot be read"):
        capture.read_capture(tmp_path)


def test_fifo_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu")
    (tmp_path / capture.MEMORY_FILE).unlink()
    os.mkfifo(tmp_path / capture.MEMORY_FILE)
    with pytest.raises(ConfigError, match="cannot be read"):
        capture.read_capture(tmp_path)


@pytest.mark.parametrize(("share", "causes"), [(0.04, []), (0.06, ["input wait"])])
def test_wait_for_input_is_compared_with_the_step(
    share: float, causes: list[str], tmp_path: Path
) -> None:
    write_profile(tmp_path, "tpu")
    metadata = capture.read_metadata(tmp_path)
    # a step of shared cores: the tick loop of typical durations is a tenth of the wall time
    seconds = 10 * metadata.step_seconds
    slow = replace(metadata, step_seconds=seconds, wait_seconds=share * seconds)
    capture.write_metadata(tmp_path, slow)
    bubble = analyze(capture.read_capture(tmp_path)).bubble
    assert bubble is not None and [cause.kind for cause in bubble.causes] == causes


def test_missing_stage_has_no_timeline(tmp_path: Path) -> None:
    write_profile(tmp_path, "tpu")
    metadata = capture.read_metadata(tmp_path)
    moved = [[0, 0], [1, 0], [0, 2], [0, 3]]
    values = metadata.to_json() | {"devices": moved}
    (tmp_path / capture.METADATA_FILE).write_text(json.dumps(values))
    found = analyze(capture.read_capture(tmp_path))
    assert found.bubble is None and found.reason == "the traces contain no complete step of stage 1"
    assert "no timeline: the traces contain" in found.lines()[-1]


def test_intervals() -> None:
    start, stop = np.array([0.0, 1.0, 4.0, 4.5]), np.array([2.0, 3.0, 5.0, 4.8])
    begin, end = covered(start, stop)
    assert begin.tolist() == [0.0, 4.0] and end.tolist() == [3.0, 5.0]
    inside = seconds_inside(np.array([-1.0, 2.5, 3.2]), np.array([1.0, 4.5, 3.9]), begin, end)
    assert inside.tolist() == pytest.approx([1.0, 1.0, 0.0])
    own = own_seconds(start, np.array([2.0, 1.5, 5.0, 4.8]), np.zeros(4, int))
    assert own.tolist() == pytest.approx([1.5, 0.5, 0.7, 0.3])
