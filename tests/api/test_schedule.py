"""Schedules by name, from CSV files and from actions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxpipe
from maxpipe.errors import Code
from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.schedule.placement import OrderError
from maxpipe.schedule.verify import ScheduleError
from tests.errors import assert_error


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


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"stages": "2"}, "stages"),
        ({"stages": 2.0}, "stages"),
        ({"stages": True}, "stages"),
        ({"microbatches": None}, "microbatches"),
        ({"microbatches": 0}, "microbatches"),
        ({"repeats": "1"}, "repeats"),
        ({"group": -1}, "group"),
        ({"name": 5}, "name"),
    ],
)
def test_size_of_other_type_is_config_error(more: dict[str, Any], key: str) -> None:
    arguments: dict[str, Any] = {"name": "interleaved", "stages": 2, "microbatches": 4} | more
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.Schedule.named(**arguments)
    assert_error(error.value, f"Schedule.named: {key}", code=Code.API_ARGUMENT)


@pytest.mark.parametrize("size", ["stages", "microbatches", "repeats"])
def test_size_above_limit_of_command_is_config_error(size: str) -> None:
    sizes: dict[str, Any] = {"stages": 2, "microbatches": 4, "repeats": 1} | {size: 10**6}
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.Schedule.named("interleaved", **sizes)
    assert_error(error.value, "Schedule.named", names="300,000", code=Code.SCHED_SIZES)
    stages = [[("F", 10**6, 0)]]
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.Schedule.from_actions("own", stages)  # type: ignore[arg-type]
    assert_error(error.value, "Schedule.from_actions", code=Code.SCHED_SIZES)


def test_numpy_sizes_are_accepted() -> None:
    sizes: dict[str, Any] = {"stages": np.int64(2), "microbatches": np.int32(4)}
    assert maxpipe.Schedule.named("1f1b", **sizes).num_ticks


@pytest.mark.parametrize(
    "actions",
    [
        *(5, None, "F", [], [[]], [5], [[5]], [["F00"]]),
        *([[("F", 0)]], [[("X", 0, 0)]], [[([], 0, 0)]]),
        *([[("F", -1, 0)]], [[("F", 0.0, 0)]], [[("F", 0, 0)], []]),
    ],
    ids=repr,
)
def test_actions_of_other_form_are_config_errors(actions: Any) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.Schedule.from_actions("own", actions)
    assert "from_actions: actions" in error.value.problems[0].where
    assert error.value.code is Code.API_ARGUMENT
