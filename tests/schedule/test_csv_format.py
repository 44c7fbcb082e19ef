"""Schedules as CSV: exact round trips, handwritten files and error messages."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.schedule.catalog import SCHEDULES, make_schedule
from maxpipe.schedule.orders import read_orders, to_csv
from maxpipe.schedule.placement import OrderError
from maxpipe.schedule.table import Action, Schedule
from maxpipe.schedule.verify import ScheduleError
from tests.errors import without_codes

HANDWRITTEN = Path(__file__).parents[1] / "golden/handwritten.csv"


def assert_same(one: Any, two: Any) -> None:
    """Compare all fields except name and group, which the CSV file does not store."""
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if field.name in ("name", "group"):
            continue
        if isinstance(a, np.ndarray):
            assert np.array_equal(a, b), field.name
        elif field.name == "arrivals":
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert_same(x, y)
        elif dataclasses.is_dataclass(a):
            assert_same(a, b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize(
    "all_stages",
    [
        pytest.param((1, 2, 3, 4), id="small"),
        pytest.param((5, 8), id="large", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip_is_exact(name: str, all_stages: tuple[int, ...], tmp_path: Path) -> None:
    spec, file = SCHEDULES[name], tmp_path / "schedule.csv"
    for stages in all_stages:
        for repeats in (spec.repeats,) if spec.repeats else (1, 2, 3):
            for microbatches in sorted({1, stages - 1, stages + 1, 2 * stages + 1} - {0}):
                for delayed in {False, spec.supports_delay}:
                    sizes: dict[str, Any] = {
                        "stages": stages,
                        "repeats": repeats,
                        "microbatches": microbatches,
                        "delayed": delayed,
                    }
                    schedule = make_schedule(name, **sizes)
                    file.write_text(to_csv(schedule))
                    assert_same(make_schedule(f"file:{file}", **sizes), schedule)


def test_csv_schedule_can_be_delayed(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    sizes: dict[str, Any] = {"stages": 3, "repeats": 2, "microbatches": 4}
    file.write_text(to_csv(make_schedule("zb_v", **sizes)))
    # Generated zero-bubble schedules cannot be delayed, but the same actions in a file can.
    prompt, delayed = (
        make_schedule(f"file:{file}", **sizes, delayed=late) for late in (False, True)
    )
    assert delayed.delayed and delayed.num_ticks > prompt.num_ticks


def test_csv_uses_standard_notation() -> None:
    assert to_csv(make_schedule("gpipe", stages=2, microbatches=2)) == (
        "0F0,,0F1,,,,,0B0,,0B1\n"
        ",,1F0,,1F1,1B0,,1B1,,\n"
    )  # fmt: skip
    assert to_csv(make_schedule("zb_h1", stages=2, microbatches=2)) == (
        "0F0,0F1,,0I0,0W0,,0I1,0W1\n"
        ",1F0,1I0,1W0,1F1,1I1,1W1,\n"
    )  # fmt: skip


def test_handwritten_csv_is_valid_schedule() -> None:
    ring, orders = read_orders(HANDWRITTEN)
    assert (ring.num_stages, ring.num_repeats, ring.shape) == (2, 2, "v")
    # In a file with I and W, a B is read as I followed by W.
    assert orders[0][7:9] == [Action("I", 0, 0), Action("W", 0, 0)]
    schedule = make_schedule(f"file:{HANDWRITTEN}", stages=2, repeats=2, microbatches=2)
    assert schedule.mixed and schedule.trains
    assert schedule.num_ticks == 14
    # Empty cells are ignored: an action runs as soon as its order and inputs allow.
    assert schedule.forward.microbatch[:, 0].tolist()[:4] == [0, 1, -1, 0]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("prefix", ["", "\ufeff", "\n , \n"])
def test_blank_lines_spaces_and_spreadsheet_artifacts_are_ignored(
    prefix: str, newline: str, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.csv"
    text = prefix + '0F0, "0B0" ,,\n\n, "1F0",1B0\n\n'
    file.write_text(text.replace("\n", newline), encoding="utf-8", newline="")
    schedule = make_schedule(f"file:{file}", stages=2, microbatches=1)
    assert_same(schedule, make_schedule("gpipe", stages=2, microbatches=1))


# (file contents, parts of the message). Every message has four parts: the location with line and
# cell, the given value, the rule with its numbers, and an action.
WRONG: list[tuple[str, list[str]]] = [
    ("", ["FILE\n", "contains no actions", "Write one line per stage"]),
    (" ,,\n\n", ["FILE\n", "contains no actions"]),
    ("0F0,0X0", ["FILE: line 1, cell 2 = 0X0\n", "must be an action", "Write 2F0"]),
    ("0F0,0B0\n\n1F0,hello", ["FILE: line 3, cell 2 = hello\n", "must be an action"]),
    ("0F0;0B0", ["FILE: line 1, cell 1 = 0F0;0B0\n", "must be an action"]),
    ("0f0,0b0", ["FILE: line 1, cell 1 = 0f0\n"]),
    ("0F-1,0B0", ["FILE: line 1, cell 1 = 0F-1\n"]),
    ("0F0,0B0,0F\u0661", [r"FILE: line 1, cell 3 = 0F\u0661"]),
    ("0F0,\x00", [r"FILE: line 1, cell 2 = \x00"]),
    ("0F" + "9" * 5000, ["FILE: line 1, cell 1 = 0F" + "9" * 38 + "...\n", "at most 9 digits"]),
    ("0F0," + "9" * 200_000, ["FILE: line 1\n", "is not CSV: field larger than field limit"]),
    ("0F0,0F0,0B0", ["FILE: line 1, cell 2 = 0F0\n", "repeats 0F0 in cell 1", "Remove one"]),
    ("0F0,,0I0,0W0,0W0", ["FILE: line 1, cell 5 = 0W0\n", "repeats 0W0 in cell 4"]),
    ("0F0,0I0,0W0,0B0", ["FILE: line 1, cell 4 = 0B0\n", "repeats 0I0 in cell 2"]),
    ("0F0,0B0,0W0", ["FILE: line 1, cell 3 = 0W0\n", "repeats 0B0 in cell 2"]),
    ("0F0", ["FILE: line 1 = no 0B0\n", "each of 1 microbatch", "Add 0B0", "or its I and W"]),
    ("0B0", ["FILE: line 1 = no 0F0\n", "Add 0F0 to the line.\n"]),
    ("0F0,0I0", ["FILE: line 1 = no 0W0\n", "Add 0W0 to the line.\n"]),
    ("0F0,0W0", ["FILE: line 1 = no 0I0\n"]),
    ("0F0,0F1,0B0", ["FILE: line 1 = no 0B1\n", "each of 2 microbatches (0 to 1)"]),
    ("0F0,0F1,0B1,0B0\n1F0,1B0", ["FILE: line 2 = no 1F1\n"]),
    ("0F0,0B0,2F0\n1F0,1B0,3F0,3B0", ["FILE: line 1 = no 2B0\n", "the line's 2 chunks"]),
    ("0F99999999,0B99999999", ["FILE: line 1 = no 0F0\n", "(0 to 99999999)"]),
    ("99999999F0", ["FILE: line 1 = no 0F0\n", "each of the line's 100000000 chunks"]),
    ("0F0,0B0\n2F0,2B0", ["FILE = 3 chunks on 2 lines\n", "a multiple of the number of lines"]),
    ("0F0,0B0\n", ["mesh.ici_stage = 2\n", "must be 1, as in FILE", "Set mesh.ici_stage=1."]),
    (
        "1F0,1B0\n0F0,0B0",
        [
            "FILE: line 1, cell 1 = 1F0\n",
            "chunk 1 of 2 belongs to line 2 in a loop",
            "Move this action to line 2.",
        ],
    ),
    (
        "0F0,0B0,3F0,3B0\n\n1F0,2F0,1B0,2B0\n,5F0,5B0,,4F0,4B0",
        ["FILE: line 3, cell 2 = 2F0\n", "chunk 2 of 6 belongs to line 4 in a loop over 3 stages"],
    ),
    (
        "0F0,0B0,3F0,3B0,2F0\n1F0,1B0,2B0",
        ["FILE: line 1, cell 5 = 2F0\n", "belongs to line 2 in a V over 2 stages"],
    ),
    (
        "0B0,0F0",
        ["file:FILE\n", "wait for each other: stage 0 with 0B0. An action", "Move these actions"],
    ),
    ("0F0,0W0,0I0", ["wait for each other: stage 0 with 0W0"]),
    (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        ["wait for each other: stage 0 with 0B0, stage 1 with 1F1. An action"],
    ),
]


def error_message(file: Path, **sizes: Any) -> str:
    """Return the error message and check that it has all four parts."""
    defaults: dict[str, Any] = {"stages": 2, "repeats": 1, "microbatches": 1}
    with pytest.raises(ConfigError) as caught:
        make_schedule(f"file:{file}", **defaults | sizes)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert caught.value.code in (Code.SCHED_FILE, Code.SCHED_SIZES)
    message = without_codes(caught.value)
    where, rule, action = message.split("\n")
    assert where and not where.startswith(" ")
    assert rule.startswith("  ") and rule.endswith(".")
    assert action.startswith("  ") and action.endswith(".")
    assert len(message) < 600
    return f"{message}\n".replace(str(file), "FILE")


@pytest.mark.parametrize(("text", "parts"), WRONG, ids=lambda value: repr(value)[:40])
def test_invalid_csv_is_rejected(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text, encoding="utf-8")
    sizes = {}
    if any("wait for each other" in part for part in parts):
        sizes = {"stages": 1 + text.count("\n"), "microbatches": 1 + text.count("0F1")}
    message = error_message(file, **sizes)
    for part in parts:
        assert part in message


def test_unreadable_schedule_file_is_rejected(tmp_path: Path) -> None:
    assert "FILE\n  cannot be read: No such file" in error_message(tmp_path / "nothing.csv")
    assert "cannot be read: Is a directory." in error_message(tmp_path)
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    message = error_message(binary)
    assert message.startswith("pipeline.schedule = file:FILE\n")
    assert (
        "the file is not UTF-8 text" in message and "maxpipe schedule interleaved --csv" in message
    )
    assert "it is not a path" in error_message(Path("a\0b"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"stages": 4}, "mesh.ici_stage = 4\n  must be 2"),
        ({"repeats": 1}, "pipeline.repeats = 1\n  must be 2"),
        ({"microbatches": 3}, "pipeline.microbatches = 3\n  must be 2"),
    ],
)
def test_config_sizes_must_match_csv(sizes: dict[str, int], message: str) -> None:
    fitting = {"stages": 2, "repeats": 2, "microbatches": 2}
    assert error_message(HANDWRITTEN, **fitting | sizes).startswith(message)


def test_randomly_edited_csv_is_valid_or_rejected(tmp_path: Path) -> None:
    """An edited file is either still valid or raises ConfigError, never ScheduleError."""
    rng, file = random.Random(0), tmp_path / "schedule.csv"
    sizes: dict[str, Any] = {"stages": 3, "repeats": 2, "microbatches": 3}
    outcomes: dict[type, int] = {}
    for _ in range(200):
        name = rng.choice(["interleaved", "zb_v"])
        rows = [line.split(",") for line in to_csv(make_schedule(name, **sizes)).splitlines()]
        for _ in range(rng.randint(1, 2)):
            row = rng.choice(rows)
            one, two = rng.randrange(len(row)), rng.randrange(len(row))
            change = rng.choice(["swap", "swap", "swap", "near", "drop", "copy", "move"])
            if change == "swap":
                row[one], row[two] = row[two], row[one]
            elif change == "near" and one:
                row[one - 1], row[one] = row[one], row[one - 1]
            elif change == "drop":
                row[one] = ""
            elif change == "copy":
                row[one] = row[two]
            elif change == "move":
                rng.choice(rows).append(row.pop(one))
        file.write_text("\n".join(",".join(row) for row in rows))
        try:
            found: Schedule | ConfigError = make_schedule(f"file:{file}", **sizes)
        except ScheduleError as error:
            raise AssertionError(file.read_text()) from error
        except ConfigError as error:
            found = error
        outcomes[type(found)] = outcomes.get(type(found), 0) + 1
    assert min(outcomes[kind] for kind in (Schedule, ConfigError, OrderError)) > 10, outcomes
