"""Text timelines: golden files for every schedule, line wrapping and comparison tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maxpipe.schedule import draw
from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule, make_schedule
from maxpipe.schedule.table import Costs, Ring

Golden = Callable[[str, str], None]

DRAWN: dict[str, dict[str, Any]] = {
    "gpipe": {"stages": 4, "microbatches": 6},
    "circular": {"stages": 3, "repeats": 2, "microbatches": 6},
    "1f1b": {"stages": 4, "microbatches": 8},
    "interleaved": {"stages": 3, "repeats": 2, "microbatches": 8, "group": 4},
    "breadth_first": {"stages": 3, "repeats": 2, "microbatches": 6},
    "zb_h1": {"stages": 4, "microbatches": 8},
    "zb_h2": {"stages": 4, "microbatches": 8},
    "zb_v": {"stages": 3, "repeats": 2, "microbatches": 6},
    "v_half": {"stages": 4, "repeats": 2, "microbatches": 6},
    "v_min": {"stages": 4, "repeats": 2, "microbatches": 6},
    "dualpipe_v": {"stages": 3, "repeats": 2, "microbatches": 8},
}


def cells(drawing: str) -> dict[str, list[str]]:
    """Return {row title: cells of all blocks in order}."""
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


def test_every_schedule_has_golden_timeline() -> None:
    assert set(DRAWN) == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline_matches_golden(name: str, golden: Golden) -> None:
    golden(f"schedule-{name}.txt", draw.draw_timeline(make_schedule(name, **DRAWN[name])) + "\n")


def test_forward_only_timeline_has_no_backward_rows(golden: Golden) -> None:
    schedule = make_forward_schedule(Ring(3, 2), 5)
    golden("schedule-forward-only.txt", draw.draw_timeline(schedule) + "\n")


@pytest.mark.parametrize("width", [1, 20, 40, 79, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline_blocks_fit_width_and_keep_all_cells(name: str, width: int) -> None:
    schedule = make_schedule(name, **DRAWN[name])
    whole, cut = draw.draw_timeline(schedule), draw.draw_timeline(schedule, width=width)
    assert cells(cut) == cells(whole)
    if width > 1:  # width 1 cannot fit, because a block has at least one tick
        assert all(len(line) <= width for line in cut.splitlines()[2:])
    ticks = [line.split()[1:] for line in cut.splitlines() if line.startswith("tick")]
    assert len(ticks) == len(cut.split("\n\n")) - 1
    assert [int(tick) for block in ticks for tick in block] == list(range(schedule.num_ticks))
    assert {len(block) for block in ticks[:-1]} <= {len(ticks[0])}


def test_summary_states_ticks_idle_time_and_buffers() -> None:
    schedule = make_schedule("interleaved", stages=4, repeats=2, microbatches=8)
    first, second = draw.summary(schedule).splitlines()
    assert first == "interleaved: 4 stages x 2 repeats, 8 microbatches in groups of 4"
    assert second == ("26 ticks, idle 15.8%, at most 11 saved chunks on a stage, 1 message waiting")
    split = make_schedule("zb_v", stages=4, repeats=2, microbatches=8)
    assert draw.summary(split, Costs(1.0, 1.0, 1.5)).splitlines() == [
        "zb_v: 4 stages x 2 repeats in a V, 8 microbatches in groups of 8",
        "51 ticks, idle 5.9% (21.1% at 1:1:1.5), at most 8 saved chunks and 6 deferred weight "
        "gradients on a stage, 5 messages waiting",
    ]
    late = make_schedule("circular", stages=2, microbatches=2, delayed=True)
    first, _ = draw.summary(late).splitlines()
    assert first.endswith("groups of 2, messages delayed")
    assert "no saved chunks" in draw.summary(make_forward_schedule(Ring(2, 1), 2))


def test_timeline_rows_are_aligned_with_many_stages() -> None:
    drawing = draw.draw_timeline(make_schedule("1f1b", stages=101, microbatches=1))
    rows = [line for line in drawing.splitlines()[3:] if not line.startswith("kept")]
    assert {line.rstrip()[-3:].strip() for line in rows} <= {"200", ".", "0"}
    assert len({line.index(" . ") for line in rows if " . " in line}) <= 2


def test_mark_in_mixed_tick_is_on_stage_row() -> None:
    schedule = make_schedule("zb_v", stages=3, repeats=2, microbatches=6)
    drawing = draw.draw_timeline(schedule, mark=(20, 1, "W"))
    (line,) = (line for line in drawing.splitlines() if "[" in line)
    assert line.startswith("stage  1")


@pytest.mark.parametrize("tick", [0, 15, 16, 25])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_mark_draws_one_block_with_bracketed_cell(tick: int, kind: str) -> None:
    schedule = make_schedule("interleaved", stages=4, repeats=2, microbatches=8)
    drawing = draw.draw_timeline(schedule, mark=(tick, 2, kind))
    (bracketed,) = re.findall(r"\[\S+\]", drawing)
    rows = cells(drawing)
    assert len(drawing.split("\n\n")) == 2 and len(rows["tick"]) <= 16
    row = rows["stage  2 F" if kind == "F" else "stage  2 B"]
    assert row[rows["tick"].index(str(tick))] == bracketed


def test_timeline_uses_numbers_after_26_repeats() -> None:
    drawing = draw.draw_timeline(make_schedule("interleaved", stages=1, repeats=28, microbatches=1))
    row = cells(drawing)["stage  0 F"]
    assert row[0] == "0a" and row[25:28] == ["0z", "0/26", "0/27"]


def test_comparison_table_has_line_for_each_schedule(golden: Golden) -> None:
    schedules = [
        make_schedule(name, stages=4, repeats=spec.repeats or 3, microbatches=8)
        for name, spec in SCHEDULES.items()
    ]
    table = draw.comparison_table(schedules, Costs(1.0, 1.0, 1.5))
    golden("schedule-comparison.txt", table + "\n")
    rows = {line.split()[0]: line.split() for line in table.splitlines()[3 : 3 + len(schedules)]}
    assert list(rows) == list(SCHEDULES)
    # With 3 chunks per stage, 15 saved chunks are 5 times the layers of a stage.
    assert rows["interleaved"][1:-1] == ["3", "38", "11.1%", "11.1%", "15", "0", "5", "1", "48"]
    assert "at 1:1:1.5" in table
    assert "at 1:1:1.5" not in draw.comparison_table(schedules, Costs())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_comparison_counts_messages_between_stages(name: str, stages: int) -> None:
    repeats = SCHEDULES[name].repeats or 3
    schedule = make_schedule(name, stages=stages, repeats=repeats, microbatches=6)
    sent = [0] * stages
    for kind, slots in schedule.kinds:
        for tick, stage in np.argwhere(slots.active).tolist():
            ends = schedule.ring.previous_chunk if kind in "BI" else schedule.ring.next_chunk
            target = ends(stage, int(slots.repeat[tick, stage]))
            sent[stage] += kind != "W" and target is not None and target[0] != stage
    row = draw.comparison_table([schedule], Costs()).splitlines()[3].split()
    assert int(row[-2]) == max(sent)
    visits = len(schedule.weight_window.gather_tick)
    assert float(row[-1]) == pytest.approx(visits / repeats if visits else 1, rel=1e-3)


def test_gather_count_decreases_with_group_size() -> None:
    gathers = {}
    for group in (4, 8, 16):
        schedule = make_schedule("interleaved", stages=4, repeats=4, microbatches=16, group=group)
        line = draw.comparison_table([schedule], Costs()).splitlines()[3]
        gathers[group] = float(line.split()[-1])
    # Two gathers per group, minus those shared by adjacent forward and backward passes.
    assert all(0.75 * 32 / group <= found <= 32 / group for group, found in gathers.items())
