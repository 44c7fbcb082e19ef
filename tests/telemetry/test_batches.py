"""Batch index of a step after rollbacks and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxpipe.data.inspect_batch import batch_of


def write(folder: Path, *events: tuple[str, dict[str, Any]]) -> Path:
    """Write the event records of a run."""
    lines = [json.dumps({"time": "", "event": event, **fields}) for event, fields in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, "half a li"]))
    return folder


def start(step: int) -> tuple[str, dict[str, Any]]:
    return "start", {"step": step}


def back(step: int, to: int) -> tuple[str, dict[str, Any]]:
    return "rollback", {"step": step, "to": to}


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ((), {1: 0, 7: 6}),
        ((start(0),), {1: 0, 7: 6}),
        # Step 11 (batch 10) diverged; batches 8 and 9, already used, are skipped as well.
        ((start(0), back(11, 8)), {8: 7, 9: 11, 10: 12}),
        ((start(0), back(11, 8), back(20, 16)), {8: 7, 9: 11, 16: 18, 17: 23}),
        # A rollback to before an earlier rollback: all skipped batches stay skipped.
        ((start(0), back(11, 8), back(10, 4)), {4: 3, 5: 13, 9: 17}),
        # Killed before a checkpoint, or after one.
        ((start(0), back(11, 8), start(8)), {8: 7, 9: 8}),
        ((start(0), back(11, 8), start(12)), {8: 7, 9: 11, 13: 15}),
        ((start(0), back(3, 0), start(0)), {1: 0}),
        ((start(0), back(3, 0)), {1: 3}),
    ],
)
def test_batch_of_step_after_rollbacks_and_restarts(
    events: tuple[tuple[str, dict[str, Any]], ...], wanted: dict[int, int], tmp_path: Path
) -> None:
    folder = write(tmp_path, *events)
    assert {step: batch_of(folder, step) for step in wanted} == wanted


def test_batch_of_step_without_events(tmp_path: Path) -> None:
    assert batch_of(tmp_path, 5) == 4
