"""Slow or hanging reads are reported with source, file and duration."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxpipe.data.formats.source import longest_active_read, take_read_times, track_read
from maxpipe.distributed.phases import DATA, LOOP, Phases
from maxpipe.train import data_end
from maxpipe.train.data_end import SlowDataMonitor
from tests.train.runs import Start, start_pair, wait_for_outputs, write_module
from tests.waiting import wait_until


@pytest.fixture
def slow() -> Iterator[tuple[SlowDataMonitor, Phases, list[str]]]:
    phases, messages = Phases(), []
    take_read_times()
    yield SlowDataMonitor(phases, messages.append, 2), phases, messages
    take_read_times()


def test_slow_document_is_reported_with_backoff(
    slow: tuple[SlowDataMonitor, Phases, list[str]],
) -> None:
    found, phases, messages = slow
    with phases.enter(LOOP), phases.enter(DATA), track_read("data.mixture.web"):
        read = track_read(lambda: "a.jsonl: record 7")
        with read:
            for seconds in (1, 9, 10, 11, 19, 21, 41, 43):
                found._poll(read.begun + seconds)
            name = "reading data.mixture.web, a.jsonl: record 7"
            assert phases.status().detail == name
        assert len(messages) == 3
        for text, seconds in zip(messages, (10, 21, 43), strict=True):  # the interval doubles
            assert text.startswith(f"{name}, has lasted {seconds} s so far, and the run waits for")
        found._poll(read.begun + 50)
        assert phases.status().detail == ""
        with track_read(lambda: "b.jsonl: record 1") as _:
            newest = longest_active_read()
            assert newest is not None
            found._poll(newest.begun + 12)
    assert "b.jsonl: record 1, has lasted 12 s" in messages[-1] and len(messages) == 4


def test_waiting_for_another_process_is_not_reported_as_read(
    slow: tuple[SlowDataMonitor, Phases, list[str]],
) -> None:
    found, phases, messages = slow
    wait = track_read(lambda: "process 3 on host, indexing", "waiting for")
    with wait:
        found._poll(wait.begun + 100)
        assert phases.status().detail == "waiting for process 3 on host, indexing" and not messages


def test_data_bound_steps_are_reported(
    slow: tuple[SlowDataMonitor, Phases, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _, messages = slow
    found.record_steps(9.0, 9.5)  # the first steps include the start of the readers
    for source, file in (("data.mixture.code", "b.py"), ("data.mixture.web", "a.jsonl: record 7")):
        with track_read(source), track_read(lambda file=file: file):  # type: ignore[misc]
            if source.endswith("web"):
                threading.Event().wait(0.02)
    for _ in range(3):
        found.record_steps(2.0, 3.0)
    assert not messages
    found.record_steps(2.0, 3.0)
    [text] = messages
    assert "waited for data for 67% of the last 12 s: reading data.mixture.web used 0.0 s" in text
    assert (
        "across 2 threads, including 0.02 s for reading data.mixture.web, a.jsonl: record 7" in text
    )
    # Not repeated for a while, and not reported if steps wait less.
    for quiet, waited in ((data_end._QUIET_SECONDS, 9.0), (0.0, 4.0)):
        monkeypatch.setattr(found, "_quiet_until", 0.0 if not quiet else found._quiet_until)
        with track_read("data"), track_read(lambda: "a"):
            pass
        found.record_steps(waited, 10.0)
    assert len(messages) == 1


HANGS = """
import sys
if {rank} in sys.argv:
    import threading
    from maxpipe.data.sources import TextFiles
    from maxpipe.train import data_end
    data_end._SLOW_SECONDS = 2.0
    read, count = TextFiles.read, [0]
    def hangs(self, index, columns=None):
        found = read(self, index, columns)
        if threading.current_thread() is not threading.main_thread():
            count[0] += 1
            if count[0] > 30:
                threading.Event().wait()
        return found
    TextFiles.read = hangs
"""


@pytest.mark.faults
@pytest.mark.multihost
@pytest.mark.fault("F21")
def test_stall_report_names_source_and_file(start: Start, tiny: Path, tmp_path: Path) -> None:
    """Reads of the second of two processes hang."""
    source = re.search(r"path: ([^,]+),", tiny.read_text())
    assert source is not None
    mixed = [f"data.mixture.only.path={source[1]}", "data.mixture.only.source=text", "data.path="]
    more = ["train.steps=100000", "log.every=1", f"run.dir={tmp_path}", "eval.batches=0"]
    more += ["runtime.stall_timeout_seconds=40", "checkpoint.every=0", "data.validation_fraction=0"]
    module = write_module(tmp_path / "modules", HANGS.format(rank=repr("runtime.process_id=1")))
    with start_pair(
        lambda *given: start(*given, modules=module),
        *(tiny, *mixed, *more, "mesh.cpu_devices=2"),
    ) as processes:
        outputs = wait_for_outputs(processes)
    assert [each.returncode for each in processes] == [71, 71], outputs
    name = rf"reading data\.mixture\.only, {re.escape(source[1])}/\d+\.txt"
    for output in outputs:
        assert re.search(rf"process 1 \(.*\) has been in data for .* \({name}\)\.", output), output
    assert re.search(rf"warning: {name}, has lasted \d+ s so far, and the run waits", outputs[1])


def test_monitor_thread_stops_on_exit(slow: tuple[SlowDataMonitor, Phases, list[str]]) -> None:
    found, phases, _ = slow
    found._thread.name = "slow data of a test"
    with found:
        assert any(each.name == found._thread.name for each in threading.enumerate())
        phases.detail = "x"
        wait_until(lambda: not phases.detail)
        assert not phases.detail
    found._thread.join(10)
    assert not found._thread.is_alive()
