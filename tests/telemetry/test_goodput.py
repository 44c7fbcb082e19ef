"""Goodput of hand-written event records: every second is attributed to one cause."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.telemetry import goodput

MIDNIGHT = datetime(2026, 3, 1, 23, 59, 30, tzinfo=UTC)


class Ledger:
    """Writes event records like a run."""

    def __init__(self, folder: Path):
        self.folder, self.now, self.begun = folder, MIDNIGHT, MIDNIGHT

    def write(self, event: str, after: float = 0.0, **fields: Any) -> None:
        self.now += timedelta(seconds=after)
        if event == "begin":
            self.begun = self.now
        record = {"time": self.now.isoformat(), "event": event} | fields
        record["uptime"] = (self.now - self.begun).total_seconds()
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.fixture
def killed_once(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path)
    ledger.write("begin")
    ledger.write("start", 20, step=0, seconds={"start": 5, "data set-up": 3, "compile": 12})
    ledger.write("time", 100, step=10, seconds={"step": 80, "loop": 5, "data": 15})
    ledger.write("checkpoint", 5, step=10)
    ledger.write("time", 105, step=20, seconds={"step": 90, "data": 5, "eval": 10, "save": 5})
    ledger.write("gc", 7)  # a record of another type, then a kill
    ledger.write("begin", 60)
    ledger.write("start", 10, step=15, seconds={"start": 4, "restore": 6})
    ledger.write("time", 50, step=20, seconds={"step": 45, "data": 5})
    ledger.write("done", 1, step=20)
    return tmp_path


@pytest.mark.fault("F20")
def test_every_second_is_counted_once(killed_once: Path) -> None:
    found = goodput.read_goodput(killed_once)
    assert found.seconds == pytest.approx(
        {
            "productive": 85 + 45 + 45,  # steps 11 to 15 of the second record count
            "redone": 45,
            "data": 15 + 5 + 5,
            "eval": 10,
            "save": 5,
            "start": 5 + 4,
            "data set-up": 3,
            "compile": 12,
            "restore": 6,
            "down": 60,
            "unknown": 7 + 1,
        }
    )
    assert found.total == pytest.approx(358)  # across midnight
    assert [each.ended for each in found.attempts] == ["killed", "done"]
    assert found.share == pytest.approx(175 / 358)


@pytest.mark.fault("F20")
def test_clock_set_back_does_not_reduce_total_time(killed_once: Path) -> None:
    lines = (killed_once / "events.jsonl").read_text().splitlines()
    second = next(place for place, line in enumerate(lines) if place and '"begin"' in line)
    for place in range(second, len(lines)):
        record = json.loads(lines[place])
        earlier = datetime.fromisoformat(record["time"]) - timedelta(hours=5)
        lines[place] = json.dumps(record | {"time": earlier.isoformat()})
    (killed_once / "events.jsonl").write_text("\n".join(lines))
    found = goodput.read_goodput(killed_once)
    assert "down" not in found.seconds and found.total == pytest.approx(298)


def test_restarted_finished_run_redoes_no_step(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write("begin")
    ledger.write("start", 4, step=0, seconds={"start": 4})
    ledger.write("time", 10, step=20, seconds={"step": 10})
    ledger.write("time", 2, step=20, seconds={"save": 1, "loop": 1})
    ledger.write("done", step=20)
    ledger.write("begin")
    ledger.write("start", 3, step=20, seconds={"start": 3})
    ledger.write("time", 2, step=20, seconds={"loop": 2})
    ledger.write("done", step=20)
    found = goodput.read_goodput(tmp_path)
    assert found.seconds == {"productive": 11, "save": 1, "start": 4 + 3 + 2}


@pytest.mark.parametrize("event", ["rollback", "roll_back"], ids=["now", "earlier release"])
def test_steps_undone_by_rollback_count_as_redone(tmp_path: Path, event: str) -> None:
    ledger = Ledger(tmp_path)
    ledger.write("begin")
    ledger.write("start", step=0, seconds={})
    ledger.write("time", 10, step=10, seconds={"step": 10})
    ledger.write(event, step=10, to=5)
    ledger.write("time", 10, step=15, seconds={"step": 10})
    assert goodput.read_goodput(tmp_path).seconds == pytest.approx({"productive": 15, "redone": 5})


def test_goodput_command_prints_text_and_json(
    killed_once: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["goodput", str(killed_once)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("5m58s in 2 attempts, 48.9% of the time spent on productive steps")
    assert "redone" in text and "15 to 20" in text
    assert main(["goodput", str(killed_once), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["productive_share"] == pytest.approx(175 / 358)


def test_folder_without_events_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must contain the file events.jsonl"):
        goodput.read_goodput(tmp_path)


def test_incomplete_record_is_skipped(killed_once: Path) -> None:
    with (killed_once / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-03')
    assert goodput.read_goodput(killed_once).total == pytest.approx(358)


@pytest.mark.parametrize("number", ["NaN", "1e308", "-1e400", "9" * 400, "9" * 5000, "1e11"])
@pytest.mark.parametrize("key", ["uptime", "step", "seconds", "to"])
def test_records_with_invalid_numbers_are_skipped(key: str, number: str, killed_once: Path) -> None:
    before = goodput.read_goodput(killed_once)
    value = f'{{"step": {number}}}' if key == "seconds" else number
    event = "rollback" if key == "to" else "time"
    fields = {"time": '"2026-03-01T23:59:30+00:00"', "event": f'"{event}"', "step": "20"}
    line = ", ".join(f'"{name}": {given}' for name, given in (fields | {key: value}).items())
    with (killed_once / "events.jsonl").open("a") as file:
        file.write(f"{{{line}}}\n")
    assert goodput.read_goodput(killed_once) == before
    assert main(["goodput", str(killed_once)]) == 0
