"""Placement: action ticks and buffer sizes follow the closed forms."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from maxpipe.errors import ConfigError
from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule, make_schedule
from maxpipe.schedule.placement import OrderError, place_orders
from maxpipe.schedule.table import IDLE, Action, Ring, Schedule, SlotColumns

SMALL = [
    (stages, repeats, group)
    for stages in (1, 2, 3, 4, 8)
    for repeats in (1, 2, 3)
    for group in sorted({stages, stages + 1, 2 * stages})
]
"""(P, R, N)."""
GROUPS = (1, 2, 3)


def interleaved(stages: int, repeats: int, group: int, num_groups: int) -> Schedule:
    microbatches = group * num_groups
    return make_schedule(
        "interleaved", stages=stages, repeats=repeats, microbatches=microbatches, group=group
    )


def ticks_of(slots: SlotColumns) -> dict[tuple[int, int, int], int]:
    """(stage, microbatch, repeat) -> tick."""
    return {
        (stage, int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage])): tick
        for tick, stage in np.argwhere(slots.active).tolist()
    }


def check_closed_forms(schedule: Schedule, group: int) -> None:
    stages, repeats = schedule.num_stages, schedule.num_repeats
    work = schedule.num_microbatches * repeats
    assert schedule.group == group
    assert schedule.num_ticks == work + (repeats - 1) * group + 2 * stages - 2
    # Every stage saves 2 chunks fewer than the previous stage.
    for stage, depth in enumerate(schedule.stash_depth().max(axis=0)):
        assert depth == min(work, (repeats - 1) * group + 2 * (stages - 1 - stage) + 1)
    assert schedule.num_stash == schedule.stash_depth().max()
    if stages > 1:
        # Messages wait only from last to first stage.
        assert schedule.num_inbox == (group - stages + 1 if repeats > 1 else 1)
    assert schedule.num_deferred == 1 and not schedule.weight.active.any()
    assert schedule.idle_fraction() == pytest.approx((stages - 1) / (work + stages - 1), rel=1e-12)


@pytest.mark.parametrize(("stages", "repeats", "group"), SMALL)
def test_interleaved_sizes_match_closed_forms(stages: int, repeats: int, group: int) -> None:
    for num_groups in GROUPS:
        check_closed_forms(interleaved(stages, repeats, group, num_groups), group)


@pytest.mark.parametrize(("stages", "repeats"), [(1, 1), (2, 1), (4, 1), (3, 2), (4, 3), (8, 2)])
def test_default_group_and_breadth_first_are_extreme_group_sizes(stages: int, repeats: int) -> None:
    for num_groups in (1, 2, 4):
        sizes: dict[str, Any] = {
            "stages": stages,
            "repeats": repeats,
            "microbatches": stages * num_groups,
        }
        check_closed_forms(make_schedule("interleaved", **sizes), stages)
        check_closed_forms(make_schedule("breadth_first", **sizes), stages * num_groups)


@pytest.mark.parametrize(("stages", "repeats", "group"), SMALL)
def test_interleaved_action_ticks_match_closed_form(stages: int, repeats: int, group: int) -> None:
    for num_groups in GROUPS:
        schedule = interleaved(stages, repeats, group, num_groups)
        delay = (repeats - 1) * group + stages - 1
        forward, backward = {}, {}
        for microbatch in range(group * num_groups):
            g, j = divmod(microbatch, group)
            for repeat in range(repeats):
                forward_index = (g * repeats + repeat) * group + j
                backward_index = (g * repeats + repeats - 1 - repeat) * group + j
                for stage in range(stages):
                    forward[stage, microbatch, repeat] = forward_index + stage
                    tick = delay + backward_index + stages - 1 - stage
                    backward[stage, microbatch, repeat] = tick
        assert ticks_of(schedule.forward) == forward
        assert ticks_of(schedule.backward) == backward
        for microbatch in range(group * num_groups):
            last = (stages - 1, microbatch, repeats - 1)
            assert forward[last] == backward[last], "the loss gradient is used in its own tick"


@pytest.mark.parametrize(
    ("name", "stages", "repeats"),
    [
        *(("1f1b", stages, 1) for stages in (1, 2, 4)),
        *(("interleaved", *sizes) for sizes in ((1, 1), (2, 1), (4, 1), (2, 3), (4, 2), (8, 3))),
    ],
)
def test_memory_does_not_depend_on_microbatch_count(name: str, stages: int, repeats: int) -> None:
    sizes = {
        (schedule.num_stash, schedule.num_inbox)
        for num_groups in (2, 3, 8)
        for schedule in [
            make_schedule(
                name, stages=stages, repeats=repeats, microbatches=(repeats + num_groups) * stages
            )
        ]
    }
    assert len(sizes) == 1
    (num_stash, _) = sizes.pop()
    assert num_stash == stages * (repeats + 1) - 1


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 12])
@pytest.mark.parametrize(("name", "repeats"), [("gpipe", 1), ("circular", 1), ("circular", 3)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_forward_then_backward_saves_every_chunk(
    name: str, repeats: int, stages: int, microbatches: int
) -> None:
    schedule = make_schedule(name, stages=stages, repeats=repeats, microbatches=microbatches)
    assert schedule.num_stash == microbatches * repeats
    assert (schedule.stash_depth().max(axis=0) == microbatches * repeats).all()
    # No stage starts its backward passes before it has run all its forward passes.
    last_forward = max(ticks_of(schedule.forward).values())
    assert min(ticks_of(schedule.backward).values()) >= last_forward - (stages - 1)


# Orders that no generator makes.


def orders(*lines: str) -> list[list[Action]]:
    """Parse lines such as `F0 I0 W0`, one per stage of a ring without repeats."""
    return [[Action(a[0], int(a[1:]), 0) for a in line.split()] for line in lines]  # type: ignore[arg-type]


def actions_by_tick(*lines: str, delayed: bool = False) -> list[list[str]]:
    """Return the actions of each stage by tick."""
    count = 1 + max(action.microbatch for order in orders(*lines) for action in order)
    ring = Ring(len(lines), 1)
    schedule = place_orders(
        "by hand", ring, orders(*lines), num_microbatches=count, group=count, delayed=delayed
    )
    return [
        [
            "".join(
                f"{kind}{slots.microbatch[tick, stage]}"
                for kind, slots in schedule.kinds
                if slots.active[tick, stage]
            )
            for stage in range(len(lines))
        ]
        for tick in range(schedule.num_ticks)
    ]


def test_typed_tick_has_forward_then_backward() -> None:
    # F, loss head and B of the last stage share a tick; each hop takes one more tick.
    assert actions_by_tick("F0 B0", "F0 B0") == [["F0", ""], ["", "F0B0"], ["B0", ""]]
    assert actions_by_tick("F0 F1 B0 B1", "F0 B0 F1 B1") == [
        ["F0", ""],
        ["F1", "F0B0"],
        ["B0", "F1B1"],
        ["B1", ""],
    ]
    # An order with B before the next F has both in one tick if inputs allow.
    assert actions_by_tick("F0 B0 F1 B1") == [["F0B0"], ["F1B1"]]


def test_mixed_tick_has_one_action() -> None:
    assert actions_by_tick("F0 I0 W0", "F0 I0 W0") == [
        ["F0", ""],
        ["", "F0"],
        ["", "I0"],
        ["I0", "W0"],
        ["W0", ""],
    ]


def test_delayed_messages_take_two_ticks() -> None:
    assert actions_by_tick("F0 B0", "F0 B0", delayed=True) == [
        ["F0", ""],
        ["", ""],
        ["", "F0B0"],
        ["", ""],
        ["B0", ""],
    ]


def test_actions_run_as_early_as_order_and_inputs_allow() -> None:
    for name, spec in SCHEDULES.items():
        schedule = make_schedule(name, stages=3, repeats=spec.repeats or 2, microbatches=5)
        at = {
            (kind, *key): tick
            for kind, slots in schedule.kinds
            for key, tick in ticks_of(slots).items()
        }
        for (kind, stage, microbatch, repeat), tick in at.items():
            position = {"F": 0, "B": 1}.get(kind, 0) if not schedule.mixed else 0
            earlier = [
                2 * other_tick + ({"F": 0, "B": 1}[other[0]] if not schedule.mixed else 0)
                for other, other_tick in at.items()
                if other[1] == stage
            ]
            own = 2 * tick + position
            before = max((when for when in earlier if when < own), default=-2)
            ready = before + (1 if not schedule.mixed and before % 2 != own % 2 else 2)
            ring, hop = schedule.ring, 2
            if kind == "W":
                ready = max(ready, 2 * at["I", stage, microbatch, repeat] + hop)
            else:
                source = (ring.previous_chunk if kind == "F" else ring.next_chunk)(stage, repeat)
                if source is not None:
                    sent = at[kind, source[0], microbatch, source[1]]
                    ready = max(ready, 2 * (sent + 1) + position)
                if kind != "F":
                    ready = max(ready, 2 * (at["F", stage, microbatch, repeat] + schedule.mixed))
            assert tick == -(-(ready - position) // 2), (name, kind, stage, microbatch, repeat)


@pytest.mark.parametrize(
    ("lines", "stuck"),
    [
        (["B0 F0"], "stage 0 with 0B0."),
        (["W0 F0 I0"], "stage 0 with 0W0."),
        (["F0 B0 F1 B1", "F1 B1 F0 B0"], "stage 0 with 0B0, stage 1 with 1F1."),
        (["F0 B0", "B0 F0"], "stage 0 with 0B0, stage 1 with 1B0."),
        (["F0"] * 2 + ["F1 F0"], "stage 2 with 2F1."),
    ],
)
@pytest.mark.parametrize("delayed", [False, True])
def test_deadlocked_orders_are_rejected(lines: list[str], stuck: str, delayed: bool) -> None:
    with pytest.raises(OrderError) as caught:
        actions_by_tick(*lines, delayed=delayed)
    assert isinstance(caught.value, ConfigError)
    (problem,) = caught.value.problems
    assert problem.where == "by hand"
    assert f"the stages wait for each other: {stuck}" in problem.rule


# Weight prefetch window.


def test_up_to_two_repeats_need_no_weight_window() -> None:
    for repeats in (1, 2):
        visits = make_schedule(
            "interleaved", stages=3, repeats=repeats, microbatches=6
        ).weight_window
        assert visits.num_chunk_slots == visits.num_gradient_slots == 0
        assert not visits.gather_tick.size and not visits.reduce_tick.size


@pytest.mark.parametrize(
    ("stages", "repeats", "group"), [(2, 3, 2), (3, 4, 5), (4, 8, 8), (8, 3, 8)]
)
def test_window_gathers_and_reduces_once_per_repeat(stages: int, repeats: int, group: int) -> None:
    for num_groups in GROUPS:
        schedule = interleaved(stages, repeats, group, num_groups)
        visits = schedule.weight_window
        # F and B run each chunk once per group.
        assert len(visits.gather_tick) <= 2 * num_groups * repeats
        assert len(visits.reduce_tick) == num_groups * repeats
        for stage in range(stages):
            runs = [
                repeat
                for _, slots in schedule.kinds
                for repeat, _ in itertools.groupby(
                    slots.repeat[slots.active[:, stage], stage].tolist()
                )
            ]
            assert len(runs) == 2 * num_groups * repeats
        # Holds the current and next chunk of F and of B, never all chunks of the stage.
        assert 2 <= visits.num_chunk_slots <= 4
        assert 1 <= visits.num_gradient_slots <= 3
        assert (np.diff(visits.gather_tick) >= 0).all()
        assert (visits.reduce_tick <= schedule.num_ticks).all()


def test_forward_only_window_has_no_reductions() -> None:
    visits = make_forward_schedule(Ring(2, 4), 6).weight_window
    # Three groups of two microbatches; a chunk is gathered again for each.
    assert len(visits.gather_tick) == 3 * 4 and visits.num_chunk_slots == 2
    assert not visits.reduce_tick.size and visits.num_gradient_slots == 0


# Prologue layers.


def test_prologue_rounds_example() -> None:
    outside = make_schedule("1f1b", stages=2, microbatches=3).prologue
    # Microbatches 0, 1, 2 enter the ring in ticks 0, 1, 2 and return in ticks 2, 3, 4.
    assert outside.forward.tolist() == [0, IDLE, 1, IDLE, IDLE]
    assert outside.forward_slot.tolist() == [0, 0, 1, 0, 0]
    assert outside.backward.tolist() == [IDLE, IDLE, IDLE, 0, 1]
    assert outside.backward_slot.tolist() == [0, 0, 0, 0, 1]
    assert outside.num_slots == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_prologue_round_spans_first_to_last_microbatch(name: str) -> None:
    stages, microbatches = 3, 7
    repeats = SCHEDULES[name].repeats or 2
    schedule = make_schedule(name, stages=stages, repeats=repeats, microbatches=microbatches)
    entering, returning = schedule.embed_microbatch, schedule.embed_grad_microbatch
    for number in range(3):
        own = np.arange(number * stages, min(microbatches, (number + 1) * stages))
        (goes,) = np.flatnonzero(schedule.prologue.forward == number)
        assert goes == np.flatnonzero(np.isin(entering, own)).min()
        (comes_back,) = np.flatnonzero(schedule.prologue.backward == number)
        assert comes_back == np.flatnonzero(np.isin(returning, own)).max()
    assert (schedule.prologue.forward >= 0).sum() == (schedule.prologue.backward >= 0).sum() == 3
    forward = make_forward_schedule(schedule.ring, microbatches).prologue
    assert (forward.backward == IDLE).all() and forward.num_slots == 1


@pytest.mark.parametrize(("stages", "repeats"), [(1, 1), (2, 1), (4, 1), (2, 3), (4, 2), (8, 3)])
def test_prologue_rounds_in_flight(stages: int, repeats: int) -> None:
    sizes: dict[str, Any] = {"stages": stages, "repeats": repeats}
    for rounds in (4, 8):
        outside = make_schedule("interleaved", microbatches=rounds * stages, **sizes).prologue
        # A round is in the ring for (2R+1)*P - 2 ticks, and a new round starts every P*R ticks.
        away = (2 * repeats + 1) * stages - 2
        assert outside.num_slots == -(-away // (stages * repeats)) <= 3
        sweep = make_schedule("circular", microbatches=rounds * stages, **sizes).prologue
        assert sweep.num_slots == rounds
