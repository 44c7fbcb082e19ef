"""The verifier accepts every generated table and names the cell that spoils one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maxpipe.pipeline.schedule import IDLE, SCHEDULES, Schedule, Slots, build, next_chunk
from maxpipe.pipeline.verify import ScheduleError, verify

Kind = Literal["F", "B"]
Cell = tuple[int, int]
"""(tick, stage)."""
COLUMNS = ("microbatch", "repeat", "stash", "inbox")
"""What moves when an action moves."""


@st.composite
def schedules(draw: st.DrawFn, *, backward: bool | None = None) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, 8))
    repeats = 1 if name == "gpipe" else draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 20))
    group = draw(st.sampled_from([0, -1]))
    if group:
        group = draw(st.integers(min(stages, microbatches), microbatches))
    return build(
        name,
        stages=stages,
        repeats=repeats,
        microbatches=microbatches,
        group=group,
        backward=draw(st.booleans()) if backward is None else backward,
    )


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_generated_tables_are_accepted(schedule: Schedule) -> None:
    verify(schedule)


# Corruptions. Each is only made where the valid table shows that it changes a value which is
# read, or the set of actions; its docstring says why. None means: nothing to corrupt here.


def slots_of(schedule: Schedule, kind: Kind) -> Slots:
    return schedule.forward if kind == "F" else schedule.backward


def edited(schedule: Schedule, kind: Kind, column: str, changes: dict[Cell, int]) -> Schedule:
    """The table with these cells of one column replaced."""
    if column == "loss_inbox":
        array = schedule.loss_inbox.copy()
    else:
        array = getattr(slots_of(schedule, kind), column).copy()
    for cell, value in changes.items():
        array[cell] = value
    if column == "loss_inbox":
        return dataclasses.replace(schedule, loss_inbox=array)
    slots = dataclasses.replace(slots_of(schedule, kind), **{column: array})
    return dataclasses.replace(schedule, **{"forward" if kind == "F" else "backward": slots})


def active_cells(schedule: Schedule, kind: Kind) -> list[Cell]:
    return [(int(k), int(p)) for k, p in np.argwhere(slots_of(schedule, kind).active)]


def item(schedule: Schedule, kind: Kind, cell: Cell) -> tuple[int, int]:
    """(microbatch, repeat) of a cell."""
    slots = slots_of(schedule, kind)
    return int(slots.microbatch[cell]), int(slots.repeat[cell])


def chunk(schedule: Schedule, kind: Kind, cell: Cell) -> int:
    return int(slots_of(schedule, kind).repeat[cell]) * schedule.num_stages + cell[1]


class Life(NamedTuple):
    """A value in an inbox: written by a column's cell, alive until it is read."""

    writer: Literal["arrive", "loss_inbox"]
    written: Cell
    read: int
    """Tick."""
    slot: int


def inbox_lives(schedule: Schedule, kind: Kind) -> Iterator[Life]:
    """Every message that some action reads, and the cell that stores it."""
    ticks = {
        (cell[1], *item(schedule, k, cell), k): cell[0]
        for k in ("F", "B")
        for cell in active_cells(schedule, k)
    }
    last = schedule.num_stages - 1, schedule.num_repeats - 1
    for cell in active_cells(schedule, "F"):
        microbatch, repeat = item(schedule, "F", cell)
        after = next_chunk(cell[1], repeat, schedule.num_stages, schedule.num_repeats)
        if kind == "F" and after is not None:
            written = (cell[0], after[0])
            read = ticks[after[0], microbatch, after[1], "F"]
            yield Life("arrive", written, read, int(schedule.forward.arrive[written]))
        if kind == "B":
            own = ticks[cell[1], microbatch, repeat, "B"]
            if (cell[1], repeat) == last:
                yield Life("loss_inbox", cell, own, int(schedule.loss_inbox[cell]))
            elif after is not None:
                sent = ticks[after[0], microbatch, after[1], "B"]
                written = (sent + 1, cell[1])
                yield Life("arrive", written, own, int(schedule.backward.arrive[written]))


Draw = Callable[[st.SearchStrategy[Any]], Any]
Corruption = Callable[[Schedule, Draw], Schedule | None]
"""A wrong table made from a valid one, or None."""


def another(draw: Draw, size: int, value: int) -> int | None:
    """An index below `size` that is not `value`."""
    return None if size < 2 else (value + draw(st.integers(1, size - 1))) % size


def pick_action(schedule: Schedule, draw: Draw) -> tuple[Kind, Cell]:
    kind: Kind = draw(st.sampled_from(["F", "B"]))
    return kind, draw(st.sampled_from(active_cells(schedule, kind)))


def other_microbatch(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Some action runs twice and another one never."""
    kind, cell = pick_action(schedule, draw)
    value = another(draw, schedule.num_microbatches, item(schedule, kind, cell)[0])
    return None if value is None else edited(schedule, kind, "microbatch", {cell: value})


def other_repeat(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Some action runs twice and another one never."""
    kind, cell = pick_action(schedule, draw)
    value = another(draw, schedule.num_repeats, item(schedule, kind, cell)[1])
    return None if value is None else edited(schedule, kind, "repeat", {cell: value})


def dropped_action(schedule: Schedule, draw: Draw) -> Schedule | None:
    """An action never runs. A table without any backward would mean evaluation."""
    kind, cell = pick_action(schedule, draw)
    if kind == "B" and len(active_cells(schedule, "B")) == 1:
        return None
    return edited(schedule, kind, "microbatch", {cell: IDLE})


def doubled_action(schedule: Schedule, draw: Draw) -> Schedule | None:
    """An idle slot runs what its stage runs in another tick anyway."""
    kind, cell = pick_action(schedule, draw)
    idle = np.flatnonzero(~slots_of(schedule, kind).active[:, cell[1]])
    if not len(idle):
        return None
    copy = (int(draw(st.sampled_from(idle.tolist()))), cell[1])
    for column in COLUMNS:
        value = int(getattr(slots_of(schedule, kind), column)[cell])
        schedule = edited(schedule, kind, column, {copy: value})
    return schedule


def other_stash(schedule: Schedule, draw: Draw) -> Schedule | None:
    """F and B disagree on the slot: each value is written once, so no other slot has it."""
    kind, cell = pick_action(schedule, draw)
    value = another(draw, schedule.num_stash, int(slots_of(schedule, kind).stash[cell]))
    return None if value is None else edited(schedule, kind, "stash", {cell: value})


def other_inbox(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Reads a slot that does not have the message. The network's first chunk reads none."""
    kind, cell = pick_action(schedule, draw)
    if kind == "F" and chunk(schedule, kind, cell) == 0:
        return None
    size = schedule.num_forward_inbox if kind == "F" else schedule.num_backward_inbox
    value = another(draw, size, int(slots_of(schedule, kind).inbox[cell]))
    return None if value is None else edited(schedule, kind, "inbox", {cell: value})


def _inbox(schedule: Schedule, draw: Draw) -> tuple[Kind, int, list[Life]]:
    kind: Kind = draw(st.sampled_from(["F", "B"]))
    size = schedule.num_forward_inbox if kind == "F" else schedule.num_backward_inbox
    return kind, size, list(inbox_lives(schedule, kind))


def lost_message(schedule: Schedule, draw: Draw) -> Schedule | None:
    """A message that is read later goes to another slot."""
    kind, size, lives = _inbox(schedule, draw)
    if size < 2 or not lives:
        return None
    life = draw(st.sampled_from(lives))
    value = (life.slot + draw(st.integers(1, size - 1))) % size
    return edited(schedule, kind, life.writer, {life.written: value})


def overwritten_message(schedule: Schedule, draw: Draw) -> Schedule | None:
    """A write lands in a slot whose message is stored already and read later.

    In a tick the loss head writes, then messages arrive, then B reads; an arriving forward
    message is written after F has read.
    """
    kind, _, lives = _inbox(schedule, draw)
    column = draw(st.sampled_from(["arrive", "loss_inbox"])) if kind == "B" else "arrive"
    targets: dict[Cell, list[int]] = {}
    for life in lives:
        start, stage = life.written
        first = start + (life.writer == "arrive" or column == "loss_inbox")
        until = life.read if kind == "F" else life.read + 1
        for tick in range(first, until):
            targets.setdefault((tick, stage), []).append(life.slot)
    if not targets:
        return None
    cell = draw(st.sampled_from(sorted(targets)))
    return edited(schedule, kind, column, {cell: draw(st.sampled_from(targets[cell]))})


def swapped_actions(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Two slots of one stage trade places, buffers and all; one of them may be idle.

    The output of the one that moves away is expected in a slot that is written in every tick
    and stays its own until it is read, so it cannot come from any other tick. Only the
    gradient of the first chunk is not sent on: its place may be free.
    """
    kind, cell = pick_action(schedule, draw)
    if kind == "B" and chunk(schedule, kind, cell) == 0:
        return None
    tick = another(draw, schedule.num_ticks, cell[0])
    if tick is None:
        return None
    return traded(schedule, kind, cell, (tick, cell[1]), COLUMNS)


def swapped_names(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Two actions of one stage trade names but not buffers: each finds the other's."""
    kind, cell = pick_action(schedule, draw)
    others = [c for c in active_cells(schedule, kind) if c[1] == cell[1] and c != cell]
    if not others:
        return None
    return traded(schedule, kind, cell, draw(st.sampled_from(others)), COLUMNS[:2])


def swapped_stages(schedule: Schedule, draw: Draw) -> Schedule | None:
    """Two stages trade different work: each now runs something twice."""
    kind, cell = pick_action(schedule, draw)
    own = item(schedule, kind, cell)
    others = [
        c
        for c in active_cells(schedule, kind)
        if c[1] != cell[1] and item(schedule, kind, c) != own
    ]
    if not others:
        return None
    return traded(schedule, kind, cell, draw(st.sampled_from(others)), COLUMNS)


def traded(
    schedule: Schedule, kind: Kind, one: Cell, two: Cell, columns: tuple[str, ...]
) -> Schedule:
    for column in columns:
        array = getattr(slots_of(schedule, kind), column)
        changes = {one: int(array[two]), two: int(array[one])}
        schedule = edited(schedule, kind, column, changes)
    return schedule


def late_stage(schedule: Schedule, draw: Draw) -> Schedule | None:
    """One stage of several is a tick late in everything it computes and stores."""
    if schedule.num_stages == 1:
        return None
    stage = draw(st.integers(0, schedule.num_stages - 1))

    def shifted(array: np.ndarray, idle: int = 0) -> np.ndarray:
        longer = np.concatenate([array, np.full_like(array[:1], idle)])
        longer[1:, stage] = array[:, stage]
        longer[0, stage] = idle
        return longer

    def shifted_slots(slots: Slots) -> Slots:
        columns = {name: shifted(getattr(slots, name)) for name in (*COLUMNS, "arrive")}
        return Slots(**columns | {"microbatch": shifted(slots.microbatch, IDLE)})

    return dataclasses.replace(
        schedule,
        forward=shifted_slots(schedule.forward),
        backward=shifted_slots(schedule.backward),
        loss_inbox=shifted(schedule.loss_inbox),
    )


def wrong_size(schedule: Schedule, draw: Draw) -> Schedule | None:
    """A buffer is declared larger or smaller than what its columns use."""
    name = draw(st.sampled_from(["num_stash", "num_forward_inbox", "num_backward_inbox"]))
    size = getattr(schedule, name) + draw(st.sampled_from([-1, 1, 5]))
    return dataclasses.replace(schedule, **{name: size})


def out_of_range(schedule: Schedule, draw: Draw) -> Schedule | None:
    """An index outside its buffer, which is illegal even where nothing uses it."""
    kind: Kind = draw(st.sampled_from(["F", "B"]))
    size = schedule.num_forward_inbox if kind == "F" else schedule.num_backward_inbox
    column, low, high = draw(
        st.sampled_from(
            [
                ("microbatch", IDLE, schedule.num_microbatches),
                ("repeat", 0, schedule.num_repeats),
                ("stash", 0, schedule.num_stash),
                ("inbox", 0, size),
                ("arrive", 0, size),
                ("loss_inbox", 0, schedule.num_backward_inbox),
            ]
        )
    )
    tick = draw(st.integers(0, schedule.num_ticks - 1))
    stage = draw(st.integers(0, schedule.num_stages - 1))
    return edited(schedule, kind, column, {(tick, stage): draw(st.sampled_from([low - 1, high]))})


CORRUPTIONS: list[Corruption] = [
    other_microbatch,
    other_repeat,
    dropped_action,
    doubled_action,
    other_stash,
    other_inbox,
    lost_message,
    overwritten_message,
    swapped_actions,
    swapped_names,
    swapped_stages,
    late_stage,
    wrong_size,
    out_of_range,
]


def marked_cell(message: str) -> tuple[int, int, str]:
    """(tick, stage, kind) of the one cell in brackets, read off the drawing."""
    lines = message.splitlines()
    (header,) = (line.split()[1:] for line in lines if line.startswith("tick "))
    found, stage = [], -1
    for line in lines:
        row = re.match(r"(?:stage +(\d+)|        ) ([FB]) (.*)", line)
        if row is None:
            continue
        stage = int(row[1]) if row[1] else stage
        for tick, text in zip(header, row[3].split(), strict=True):
            if re.fullmatch(r"\[[^][]+\]", text):
                found.append((int(tick), stage, row[2]))
    assert len(found) == 1, message
    return found[0]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_wrong_tables_are_refused_with_the_bad_cell_marked(
    corrupt: Corruption, data: st.DataObject
) -> None:
    schedule = data.draw(schedules(backward=True))
    wrong = corrupt(schedule, data.draw)
    assume(wrong)
    assert wrong
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    error = caught.value
    assert marked_cell(str(error)) == (error.tick, error.stage, error.kind)
    assert f"{error.kind} slot of stage {error.stage} in tick {error.tick}: " in str(error)


@given(schedules(backward=False), st.data())
@settings(max_examples=60, deadline=None)
def test_wrong_forward_only_tables_are_refused(schedule: Schedule, data: st.DataObject) -> None:
    cell = data.draw(st.sampled_from(active_cells(schedule, "F")))
    wrong = edited(schedule, "F", "microbatch", {cell: IDLE})
    if data.draw(st.booleans()):
        wrong = edited(schedule, "B", "arrive", {cell: schedule.num_backward_inbox})
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    error = caught.value
    assert marked_cell(str(error)) == (error.tick, error.stage, error.kind)


def test_the_message_names_slot_reason_and_grid() -> None:
    schedule = build("interleaved", stages=3, repeats=2, microbatches=4, group=4)
    bad = edited(schedule, "F", "inbox", {(2, 2): 1})
    with pytest.raises(ScheduleError) as caught:
        verify(bad)
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "schedule interleaved: F slot of stage 2 in tick 2: needs output 1 of 0 and finds nothing."
    )
    assert any(line.startswith("stage  2 F") and "[0a]" in line for line in rest)


def test_an_overwritten_chunk_is_blamed_on_the_forward_that_does_it() -> None:
    schedule = build("1f1b", stages=2, microbatches=4)
    taken = int(schedule.forward.stash[0, 0])
    with pytest.raises(ScheduleError, match="needs nothing and finds activations 0 of 0") as caught:
        verify(edited(schedule, "F", "stash", {(1, 0): taken}))
    assert marked_cell(str(caught.value)) == (1, 0, "F")
