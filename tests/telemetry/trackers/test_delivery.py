"""Records reach a tracker through outages, and training never waits for it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.telemetry.trackers import delivery
from maxpipe.telemetry.trackers.delivery import RecordReader
from maxpipe.telemetry.writers import MetricWriter
from tests.telemetry.trackers.stub import SECONDS, Server, Tracking, recorded, served, wait_until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(delivery, "LAST_RETRY_SECONDS", 0.2)


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture
def tracking(tmp_path: Path, server: Server) -> Tracking:
    tracking = Tracking(tmp_path)
    tracking.serve_at(server.url)
    return tracking


def assert_delivered(tracking: Tracking, server: Server) -> None:
    """The server has exactly the values of `metrics.jsonl`, including NaN."""
    found, expected = server.values(), recorded(tracking.folder)
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step].keys() == values.keys()
        for tag, value in values.items():
            other = found[step][tag]
            assert other == value or (math.isnan(other) and math.isnan(value)), (step, tag)


def test_all_records_are_delivered(tracking: Tracking, server: Server):
    writer = tracking.open()
    tracking.write(*range(1, 30))
    writer.write(30, {"train/loss": 1 / 3, "train/grad_norm": math.inf})
    writer.write(30, {"eval/loss": 0.1 + 0.2})
    tracking.trackers.log_artifact("config.yml", "run: {}")
    tracking.trackers.log_checkpoint(30, "/runs/a", 5)
    assert tracking.close() < SECONDS
    assert_delivered(tracking, server)
    assert server.contents("artifact") == [["config.yml", "run: {}"]]
    assert server.contents("checkpoint") == [[30, "/runs/a", 5]]
    assert server.contents("close") == [True] and not tracking.warnings
    assert tracking.cursor["step"] == 30


def test_metrics_that_extend_a_record_are_sent_once(tracking: Tracking, server: Server):
    writer = tracking.open()
    tracking.write(1)
    wait_until(lambda: server.values())
    writer.write(1, {"eval/loss": 3.0})
    wait_until(lambda: "eval/loss" in server.values()[1])
    tracking.close()
    batches = [content for content in server.contents("log") if content]
    assert [sorted(values) for ((_, _, values),) in batches] == [
        ["perf/step_s", "train/loss"],
        ["eval/loss"],
    ]


def test_server_that_is_down_from_the_start_receives_everything_later(tmp_path: Path):
    tracking = Tracking(tmp_path)
    server = Server()
    server.close()
    tracking.serve_at(server.url)
    tracking.open()
    tracking.write(*range(1, 500))
    wait_until(lambda: tracking.warnings)
    tracking.write(*range(500, 1000))
    with_same_port = Server(server.port)
    try:
        tracking.close()
        assert_delivered(tracking, with_same_port)
    finally:
        with_same_port.close()
    assert [each["event"] for each in tracking.events("tracker_failed", "tracker_recovered")] == [
        "tracker_failed",
        "tracker_recovered",
    ]
    assert len(tracking.warnings) == 1 and "tracker stub: URLError" in tracking.warnings[0]


def test_server_that_never_comes_back_leaves_a_report_and_a_resume_sends_all(tmp_path: Path):
    tracking = Tracking(tmp_path, exit_timeout_seconds=1.0)
    server = Server()
    server.close()
    tracking.serve_at(server.url)
    tracking.open()
    tracking.write(1, 2, 3)
    assert tracking.close() < 4.0
    [event] = tracking.events("tracker_undelivered")
    assert event["tracker"] == "stub" and event["records"] == 3
    assert "3 records of metrics.jsonl not delivered" in tracking.warnings[-1]
    with served() as other:
        again = Tracking(tmp_path)
        again.serve_at(other.url)
        again.open(resume_step=3)
        again.close()
        assert_delivered(again, other)


@pytest.mark.parametrize("mode", ["500", "hang"])
def test_server_that_fails_in_the_middle_loses_nothing(mode: str, tmp_path: Path, server: Server):
    tracking = Tracking(tmp_path, request_timeout_seconds=1.0)
    tracking.serve_at(server.url)
    tracking.open()
    tracking.write(*range(1, 20))
    wait_until(lambda: len(server.values()) == 19)
    server.mode = mode
    tracking.write(*range(20, 40))
    wait_until(lambda: tracking.warnings)
    server.mode = "ok"
    tracking.write(*range(40, 60))
    tracking.close()
    assert_delivered(tracking, server)


def test_server_that_hangs_forever_does_not_delay_the_end(tracking: Tracking, server: Server):
    tracking.config = dataclasses.replace(tracking.config, exit_timeout_seconds=1.0)
    tracking.open()
    tracking.write(1)
    wait_until(lambda: server.values())
    server.mode = "hang"
    tracking.write(2, 3)
    assert tracking.close() < 4.0
    assert tracking.events("tracker_undelivered")[0]["records"] == 2
    assert tracking.cursor["step"] == 1


def test_slow_server_receives_batches(tracking: Tracking, server: Server):
    """A request that takes longer than a step delays no record, because requests contain several
    records.
    """
    server.mode = "slow"
    tracking.open()
    for step in range(1, 101):
        tracking.write(step)
        time.sleep(0.01)
    tracking.close()
    assert_delivered(tracking, server)
    assert len(server.contents("log")) < 20


@pytest.mark.long
def test_server_that_answers_after_ten_seconds_loses_nothing(tmp_path: Path, server: Server):
    """The end of the run keeps its limit, and a resume sends the remaining records."""
    server.mode, server.slow_seconds = "slow", 10.0
    short = Tracking(tmp_path, exit_timeout_seconds=1.0, request_timeout_seconds=15.0)
    short.serve_at(server.url)
    short.open()
    short.write(*range(1, 301))
    assert short.close() < 4.0
    again = Tracking(tmp_path, exit_timeout_seconds=60.0, request_timeout_seconds=15.0)
    again.serve_at(server.url)
    again.open(resume_step=300)
    again.write(*range(301, 311))
    assert again.close() < 60.0
    assert not again.warnings
    assert_delivered(again, server)


def test_client_that_raises_at_random_loses_nothing(tracking: Tracking, server: Server):
    (tracking.folder.parent / "raise").touch()
    tracking.open()
    for step in range(1, 41):
        tracking.write(step)
        time.sleep(0.01)
    tracking.close()
    assert_delivered(tracking, server)


@pytest.mark.parametrize(
    ("mode", "slow_seconds"),
    [("ok", 0.0), ("hang", 0.0), ("500", 0.0), ("slow", 0.5), ("slow", 10.0)],
)
def test_the_training_thread_does_not_wait(
    mode: str, slow_seconds: float, tracking: Tracking, server: Server
):
    """Notifying the trackers takes less than 1% of a step of 10 ms, at any state of the server."""
    server.mode, server.slow_seconds = mode, slow_seconds
    tracking.config = dataclasses.replace(tracking.config, exit_timeout_seconds=0.1)
    tracking.open()
    tracking.write(1)
    times = []
    for step in range(2, 2002):
        start = time.perf_counter()
        tracking.trackers.record(step, {"train/loss": 1.0})
        times.append(time.perf_counter() - start)
    tracking.close()
    assert sorted(times)[len(times) // 2] < 1e-4
    assert sum(times) / len(times) < 1e-4


def test_a_killed_run_continues_the_same_tracker_run(tracking: Tracking, server: Server):
    """Steps after the restored checkpoint are repeated, and the newest values are valid."""
    tracking.open()
    tracking.write(*range(1, 11))
    wait_until(lambda: len(server.values()) == 10)
    wait_until(lambda: tracking.cursor["step"] == 10)
    tracking.trackers._deliveries[0]._is_abandoned = True  # the process is killed
    again = Tracking(tracking.folder.parent)
    again.open(resume_step=6)
    again.write(*range(7, 15))
    again.close()
    assert_delivered(again, server)
    first, second = server.contents("open")
    assert second["run_id"] == f"id-{first['key']}" and second["key"] == first["key"]
    repeated = [step for content in server.contents("log") for step, _, _ in content]
    assert sorted(repeated) == sorted([*range(1, 11), *range(7, 15)])


def test_records_that_a_killed_client_had_not_stored_are_sent_again(
    tracking: Tracking, server: Server
):
    (tracking.folder.parent / "settle").touch()
    tracking.open()
    tracking.write(1, 2, 3)
    wait_until(lambda: len(server.values()) == 3)
    assert tracking.cursor["step"] == -1
    process = tracking.trackers._deliveries[0]._process
    assert process is not None
    process.kill()
    server.calls.clear()
    tracking.write(4)
    wait_until(lambda: len(server.values()) == 4)
    tracking.close()
    assert_delivered(tracking, server)
    assert tracking.cursor["step"] == 4


def test_an_artifact_that_is_not_accepted_delays_no_record(tracking: Tracking, server: Server):
    server.rejected.add("artifact")
    tracking.open()
    tracking.trackers.log_artifact("config.yml", "run: {}")
    tracking.write(1)
    wait_until(lambda: server.values())
    tracking.write(2)
    wait_until(lambda: len(server.values()) == 2)
    wait_until(lambda: tracking.warnings)
    server.rejected.clear()
    tracking.close()
    assert server.contents("artifact") == [["config.yml", "run: {}"]]
    [warning] = tracking.warnings
    assert "tracker stub: artifact not accepted: HTTPError" in warning
    assert not (tracking.folder / "events.jsonl").exists()


def test_rollback_during_a_run_repeats_steps(tracking: Tracking, server: Server):
    tracking.open()
    tracking.write(*range(1, 11))
    wait_until(lambda: len(server.values()) == 10)
    tracking.writer = MetricWriter(
        tracking.folder, tensorboard=False, resume_step=4, observers=tracking.writer.observers
    )
    tracking.write(*range(5, 13))
    tracking.close()
    assert_delivered(tracking, server)


def test_rollback_while_a_request_is_pending(tracking: Tracking, server: Server):
    """The position of a request that was sent before the rollback is not used after it."""
    tracking.open()
    tracking.write(1)
    wait_until(lambda: server.values())
    server.mode, server.slow_seconds = "slow", 1.0
    tracking.write(*range(2, 11))
    time.sleep(0.3)
    tracking.writer = MetricWriter(
        tracking.folder, tensorboard=False, resume_step=4, observers=tracking.writer.observers
    )
    tracking.write(*range(5, 9))
    tracking.close()
    server_values = server.values()
    expected = recorded(tracking.folder)
    assert {step: server_values[step] for step in expected} == expected


def test_a_lost_lock_keeps_the_cursor(tracking: Tracking, server: Server):
    tracking.open()
    cursors = tracking.trackers._deliveries[0]._cursors
    cursors._is_owned = lambda: False
    tracking.write(1)
    tracking.close()
    assert not os.path.exists(tracking.folder / "trackers.json") or tracking.cursor["step"] == -1


def test_cursor_that_cannot_be_written_is_a_warning(
    tracking: Tracking, server: Server, caplog: pytest.LogCaptureFixture
):
    (tracking.folder / "trackers.json.partial").mkdir()  # as root, no permission prevents a write
    tracking.open()
    tracking.write(1, 2, 3)
    tracking.close()
    assert_delivered(tracking, server)
    [message] = [each.getMessage() for each in caplog.records]
    assert "cannot write" in message and "records are sent again" in message


def test_damaged_cursor_file_starts_another_run(tracking: Tracking, server: Server):
    tracking.folder.joinpath("trackers.json").write_text('{"stub": 3}')
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(delivery._log, "warning", lambda text, *args: messages.append(text % args))
        tracking.open()
    tracking.write(1)
    tracking.close()
    assert_delivered(tracking, server)
    assert len(messages) == 1 and "Each tracker starts another run" in messages[0]


def test_no_process_of_a_client_is_left(tracking: Tracking, server: Server):
    tracking.open()
    tracking.write(1)
    wait_until(lambda: server.values())
    process = tracking.trackers._deliveries[0]._process
    assert process is not None
    tracking.close()
    assert process.exit_code is not None


HANGING_WORKER = """
import time
from maxpipe.telemetry.trackers import interface, worker

class Hanging(interface.Tracker):
    def open(self, run, run_id):
        time.sleep(600)

    def log(self, records):
        pass

worker._TRACKERS, worker._CLOSE_SECONDS = {"hanging": Hanging}, 0.1
worker.main()
"""


def test_a_client_that_hangs_ends_after_a_killed_run():
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_WORKER], stdin=pipe, stdout=pipe
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        client.stdin.write(b'{"tracker": "hanging", "plugins": []}\n')
        client.stdin.flush()
        assert b"keeps_history" in client.stdout.readline()
        opening = {"project": "p", "name": "n", "key": "k", "folder": "", "config": {}, "tags": {}}
        request = {"open": opening | {"tracker_config": {}}, "run_id": ""}
        client.stdin.write(json.dumps(request).encode() + b"\n")
        client.stdin.flush()
        time.sleep(0.5)
        assert client.poll() is None
        client.stdin.close()
        assert client.wait(timeout=SECONDS) == 1


def write_lines(path: Path, *records: dict[str, Any], end: str = "") -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records) + end)


def test_reader_ignores_incomplete_and_foreign_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    when = "2026-01-01T00:00:00Z"
    write_lines(path, {"step": 1, "time": when, "a/b": 1.0}, end='not JSON\n{"step": 2, "ti')
    reader = RecordReader(path, -1, None)
    [line] = reader.read()
    assert line.step == 1 and line.values == {"a/b": 1.0} and line.time == 1767225600.0
    reader.advance(line)
    assert reader.read() == [] and reader.count() == 0


def test_reader_returns_batches_in_order(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, *({"step": n, "time": "", "a/b": float(n)} for n in range(1, 1001)))
    reader, steps = RecordReader(path, 17, ["a/b"]), []
    while lines := reader.read(300):
        steps += [each.step for each in lines]
        reader.advance(lines[-1])
    assert steps == [*range(18, 1001)]
    reader.rewind(990)
    assert [each.step for each in reader.read()] == [*range(991, 1001)]
    reader.skip_to_tail()
    assert [each.step for each in reader.read(5000)][-1] == 1000


def test_reader_skips_holes_and_invalid_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line longer than a block, such as a hole after a crash, hides no later record."""
    monkeypatch.setattr(delivery, "_READ_BYTES", 256)
    path = tmp_path / "metrics.jsonl"

    def line(step: object, time: str = "2026-01-01T00:00:00+00:00") -> bytes:
        return f'{{"step": {step}, "time": "{time}", "a": 1}}\n'.encode()

    for size in range(0, 1200, 7):
        hole = b"\0" * size
        path.write_bytes(line(1) + hole + b"\n" + line(2) + line(3) + hole + line(4) + line(5))
        reader = RecordReader(path, -1, None)
        steps = [1, 2, 3, 5] if size else [1, 2, 3, 4, 5]
        assert [each.step for each in reader.read()] == steps, size
        assert [each.step for each in reader.read(1)] == [1]
        reader.advance(reader.read(2)[-1])
        assert reader.count() == len(steps) - 2
    path.write_bytes(
        line("1e999") + line(-5) + line("true") + line(1 << 60) + line(3, "0001-01-01")
    )
    path.write_bytes(path.read_bytes() + line(7, "9999-12-31T23:59:59-23:59") + line(8))
    assert RecordReader(path, -1, None).read()[-1].step == 8
    assert {each.step for each in RecordReader(path, -1, None).read()} <= {3, 7, 8}
