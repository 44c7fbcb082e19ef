"""Schedules by name, from CSV files and from actions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import maxpipe
from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.schedule.placement import OrderError
from maxpipe.schedule.verify import ScheduleError


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedule_is_read_back_from_its_csv(name: str, tmp_path: Path) -> None:
    schedule = maxpipe.Schedule.named(name, stages=4, microbatches=8)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule.csv())
    again = maxpipe.Schedule.from_csv(path)
    assert again.csv() == schedule.csv() and again.num_ticks == schedule.num_ticks


def test_drawings_show_every_stage() -> None:
    schedule = maxpipe.Schedule.named("1f1b", stages=3, microbatches=6)
    assert "stage  2" in schedule.text() and str(schedule) == schedule.text()
    assert schedule.svg().startswith("<svg") and schedule._repr_svg_() == schedule.svg()


def test_actions_in_deadlock_are_rejected() -> None:
    orders = [[("F", 0, 0), ("B", 0, 0)], [("B", 0, 0), ("F", 0, 0)]]
    with pytest.raises(OrderError, match="own"):
        maxpipe.Schedule.from_actions("own", orders)  # type: ignore[arg-type]


def test_missing_action_is_rejected() -> None:
    orders = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0)]]
    with pytest.raises(ScheduleError, match="own"):
        maxpipe.Schedule.from_actions("own", orders)  # type: ignore[arg-type]


def test_verify_rejects_changed_table() -> None:
    schedule = maxpipe.Schedule.named("gpipe", stages=2, microbatches=4)
    schedule.verify()
    column = schedule.forward.microbatch.copy()
    column[np.nonzero(column == 3)] = 2
    forward = dataclasses.replace(schedule.forward, microbatch=column)
    with pytest.raises(ScheduleError):
        dataclasses.replace(schedule, forward=forward).verify()


def test_unknown_name_suggests_schedule() -> None:
    with pytest.raises(maxpipe.ConfigError, match="must be one of gpipe"):
        maxpipe.Schedule.named("2f2b", stages=2, microbatches=4)
