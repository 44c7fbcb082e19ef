from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from maxpipe.telemetry import writers
from maxpipe.telemetry.writers import EventLog, MetricWriter


def _records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch):
    """`full_disk(True)`: every write fails after ten bytes. `full_disk(False)`: writes succeed."""
    write = os.pwrite

    def failing(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:10], offset)

    return lambda full: monkeypatch.setattr(os, "pwrite", failing if full else write)


# --- metrics.jsonl -----------------------------------------------------------


def test_one_json_object_per_step_with_all_tags(tmp_path: Path):
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    writer.write(10, {"train/loss": 2.5})
    writer.write(20, {"train/loss": 2.25, "perf/step_s": 0.5})
    writer.write(20, {"eval/loss": 2.75})
    writer.write(30, {"train/loss": float("nan")})
    writer.close()
    found = _records(tmp_path / "metrics.jsonl")
    times = [datetime.fromisoformat(str(record.pop("time"))) for record in found]
    assert times == sorted(times) and abs((datetime.now(UTC) - times[0]).total_seconds()) < 60
    assert found == [
        {"step": 10, "train/loss": 2.5},
        {"step": 20, "train/loss": 2.25, "perf/step_s": 0.5, "eval/loss": 2.75},
        {"step": 30, "train/loss": None},
    ]


def test_shorter_record_replaces_longer_record_of_step(tmp_path: Path):
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    writer.write(1, {"train/loss": 1.23456789012345})
    writer.write(1, {"train/loss": 1.0})
    (record,) = _records(tmp_path / "metrics.jsonl")
    assert {tag: record[tag] for tag in record if tag != "time"} == {"step": 1, "train/loss": 1.0}


def test_resume_drops_later_steps_and_incomplete_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "a": 1.0}\n{"step": 20, "a": 2.0}\n{"step": 30}\n{"step": 4')
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=20)
    assert _records(path) == [{"step": 10, "a": 1.0}, {"step": 20, "a": 2.0}]
    writer.write(20, {"b": 3.0})
    writer.write(30, {"a": 4.0})
    assert [(r["step"], len(r)) for r in _records(path)] == [(10, 2), (20, 4), (30, 3)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_keeps_long_records_of_layer_statistics(tmp_path: Path):
    """Histograms make records longer than the limit for other files."""
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    counts = [float("nan")] + [1] * 500_000
    for step in (10, 20, 30):
        writer.layers(step, {"layers": 1, "values": {}, "histograms": {"x": counts}})
    MetricWriter(tmp_path, tensorboard=False, resume_step=20)
    records = _records(tmp_path / "layers.jsonl")
    assert [record["step"] for record in records] == [10, 20]
    assert records[0]["histograms"] == {"x": [None, *counts[1:]]}
    MetricWriter(tmp_path, tensorboard=False, resume_step=0, process_index=1).layers(1, {})
    assert len(_records(tmp_path / "layers.jsonl")) == 2


def test_start_without_checkpoint_drops_old_records(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.fault("O1")
def test_full_disk_loses_records_but_does_not_end_run(tmp_path: Path, full_disk, caplog):
    writer = MetricWriter(tmp_path, tensorboard=True, resume_step=0)
    writer.write(1, {"train/loss": 1.0})
    full_disk(True)
    with caplog.at_level(logging.WARNING, "maxpipe"):
        for step in range(2, 50):
            writer.write(step, {"train/loss": 1.0})
    files = sorted(record.getMessage().split(":")[0] for record in caplog.records)
    assert len(files) == 2, "one warning per file and minute"
    assert files[0].startswith("cannot write ") and "metrics.jsonl" in files[0]
    full_disk(False)
    writer.write(50, {"train/loss": 2.0})
    assert [record["step"] for record in _records(tmp_path / "metrics.jsonl")] == [1, 50]
    assert _scalars(tmp_path)["train/loss"] == [(1, 1.0), (50, 2.0)]


@pytest.mark.fault("O1")
def test_warning_is_repeated_after_one_minute(tmp_path: Path, full_disk, caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(writers.time, "monotonic", lambda: now)
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    full_disk(True)
    writer.write(1, {"train/loss": 1.0})
    writer.write(2, {"train/loss": 1.0})
    assert len(caplog.records) == 1
    now += 61
    writer.write(3, {"train/loss": 1.0})
    assert len(caplog.records) == 2


def test_removed_run_folder_does_not_end_run(tmp_path: Path, caplog):
    (tmp_path / "run").mkdir()
    writer = MetricWriter(tmp_path / "run", tensorboard=True, resume_step=0)
    (tmp_path / "run").rename(tmp_path / "moved")
    writer.write(1, {"train/loss": 1.0})
    assert "No such file" in caplog.text
    MetricWriter(tmp_path / "run", tensorboard=True, resume_step=0).write(2, {"train/loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_to_folder_of_other_run(tmp_path: Path):
    held = True
    every = {"tensorboard": True, "resume_step": 0, "ours": lambda: held}
    events, writer = EventLog(tmp_path, ours=lambda: held), MetricWriter(tmp_path, **every)
    events.write("start")
    writer.write(1, {"train/loss": 1.0})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) == 3
    held = False
    events.write("done")
    writer.write(2, {"train/loss": 1.0})
    writer.text("config", "text")
    MetricWriter(tmp_path, **every).write(3, {"train/loss": 1.0})
    EventLog(tmp_path, ours=lambda: held).write("begin")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_only_process_0_writes(tmp_path: Path):
    writer = MetricWriter(tmp_path, tensorboard=True, resume_step=0, process_index=1)
    writer.write(1, {"train/loss": 1.0})
    writer.text("config", "text")
    writer.close()
    EventLog(tmp_path, process_index=1).write("start")
    assert list(tmp_path.iterdir()) == []


# --- TensorBoard -------------------------------------------------------------


def _scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "tensorboard"))
    read.Reload()
    tensors = {tag: read.Tensors(tag) for tag in read.Tags()["tensors"]}
    return {
        tag: [(event.step, event.tensor_proto.float_val[0]) for event in events]
        for tag, events in tensors.items()
        if events[0].tensor_proto.float_val
    } | {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_tensorboard_reads_scalars_and_text(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricWriter(tmp_path, tensorboard=True, resume_step=0)
    writer.write(10, {"train/loss": 2.5, "train/lr": 0.25})
    writer.write(20, {"train/loss": 1.5})
    assert _scalars(tmp_path) == {"train/loss": [(10, 2.5), (20, 1.5)], "train/lr": [(10, 0.25)]}
    writer.text("config", "# run")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.Tensors("config")[0].tensor_proto.string_val[0] == b"# run"
    assert read.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_tensorboard_discards_steps_after_resume_step(tmp_path: Path):
    before = MetricWriter(tmp_path, tensorboard=True, resume_step=0)
    for step in (10, 20, 30):
        before.write(step, {"train/loss": float(step)})
    after = MetricWriter(tmp_path, tensorboard=True, resume_step=20)
    after.write(40, {"train/loss": 4.0})
    assert _scalars(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0), (40, 4.0)]


# --- events.jsonl ------------------------------------------------------------


def test_events_are_kept_across_restarts(tmp_path: Path):
    EventLog(tmp_path).write("start", step=0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"torn')
    EventLog(tmp_path).write("save", where=tmp_path, seconds=float("inf"), parts=[1, float("nan")])
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert len(lines) == 3
    assert (first["event"], first["step"]) == ("start", 0)
    assert first["time"].endswith("Z")
    assert (last["where"], last["seconds"], last["parts"]) == (str(tmp_path), None, [1, None])


def test_importing_telemetry_loads_no_heavy_modules():
    code = (
        "import sys, maxpipe.telemetry.console, maxpipe.telemetry.writers; "
        "print([m for m in ('jax', 'tensorboard', 'rich', 'numpy', 'absl') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.strip() == "[]"
