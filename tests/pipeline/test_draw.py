"""Drawings: one golden file per schedule, and blocks that fit a width."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from maxpipe.pipeline import draw
from maxpipe.pipeline.schedule import SCHEDULES, build

Golden = Callable[[str, str], None]

DRAWN: dict[str, dict[str, Any]] = {
    "gpipe": {"stages": 4, "microbatches": 6},
    "circular": {"stages": 3, "repeats": 2, "microbatches": 6},
    "1f1b": {"stages": 4, "microbatches": 8},
    "interleaved": {"stages": 3, "repeats": 2, "microbatches": 8, "group": 4},
    "breadth_first": {"stages": 3, "repeats": 2, "microbatches": 6},
}


def cells(drawing: str) -> dict[str, list[str]]:
    """Row title -> cells of all blocks, one after the other."""
    rows: dict[str, list[str]] = {}
    stage = ""
    for line in drawing.splitlines()[2:]:
        title, text = line[:11].strip(), line[11:].split()
        if title.startswith("stage"):
            stage = title[:-1].strip()
        name = f"{stage} {title}" if title == "B" else title
        rows.setdefault(name, []).extend(text)
    rows.pop("", None)
    return rows


def test_every_schedule_is_drawn() -> None:
    assert set(DRAWN) == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_is_the_golden_one(name: str, golden: Golden) -> None:
    golden(f"schedule-{name}.txt", draw.text(build(name, **DRAWN[name])) + "\n")


def test_forward_only_tables_have_no_backward_rows(golden: Golden) -> None:
    schedule = build("interleaved", stages=3, repeats=2, microbatches=5, backward=False)
    golden("schedule-forward-only.txt", draw.text(schedule) + "\n")


@pytest.mark.parametrize("width", [1, 20, 40, 79, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_blocks_fit_the_width_and_lose_nothing(name: str, width: int) -> None:
    schedule = build(name, **DRAWN[name])
    whole, cut = draw.text(schedule), draw.text(schedule, width=width)
    assert cells(cut) == cells(whole)
    if width > 1:  # one column does not fit: a block has at least one tick
        assert all(len(line) <= width for line in cut.splitlines()[2:])
    ticks = [line.split()[1:] for line in cut.splitlines() if line.startswith("tick")]
    assert len(ticks) == len(cut.split("\n\n")) - 1
    assert [int(tick) for block in ticks for tick in block] == list(range(schedule.num_ticks))
    assert {len(block) for block in ticks[:-1]} <= {len(ticks[0])}


def test_the_summary_counts_what_the_table_needs() -> None:
    schedule = build("interleaved", stages=4, repeats=2, microbatches=8)
    first, second = draw.summary(schedule).splitlines()
    assert first == "interleaved: 4 stages x 2 repeats, 8 microbatches in groups of 4"
    assert second == (
        "26 ticks, idle 15.8%, at most 11 saved chunks on a stage, inboxes 1 forward and 2 backward"
    )


@pytest.mark.parametrize("tick", [0, 15, 16, 25])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_mark_shows_one_block_with_one_cell_in_brackets(tick: int, kind: str) -> None:
    schedule = build("interleaved", stages=4, repeats=2, microbatches=8)
    drawing = draw.text(schedule, mark=(tick, 2, kind))
    (bracketed,) = re.findall(r"\[\S+\]", drawing)
    rows = cells(drawing)
    assert len(drawing.split("\n\n")) == 2 and len(rows["tick"]) <= 16
    row = rows["stage  2 F" if kind == "F" else "stage  2 B"]
    assert row[rows["tick"].index(str(tick))] == bracketed


def test_many_repeats_run_out_of_letters() -> None:
    drawing = draw.text(build("1f1b", stages=1, repeats=28, microbatches=1))
    row = cells(drawing)["stage  0 F"]
    assert row[0] == "0a" and row[25:28] == ["0z", "0/26", "0/27"]
