"""Schedules against their closed forms: time, memory, placement, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.errors import ConfigError
from maxpipe.pipeline.schedule import IDLE, SCHEDULES, Schedule, Slots, build, group_sizes

SMALL = [
    (stages, repeats, group, num_groups)
    for stages in (1, 2, 3, 4, 8)
    for repeats in (1, 2, 3)
    for group in sorted({stages, stages + 1, 2 * stages})
    for num_groups in (1, 2, 3)
]
"""(P, R, N, groups), so that M = N * groups."""


def ticks_of(slots: Slots) -> dict[tuple[int, int, int], int]:
    """(stage, microbatch, repeat) -> tick."""
    return {
        (int(stage), int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage])): int(tick)
        for tick, stage in np.argwhere(slots.active)
    }


def check_closed_forms(schedule: Schedule, group: int) -> None:
    stages, repeats = schedule.num_stages, schedule.num_repeats
    work = schedule.num_microbatches * repeats
    assert schedule.group == group
    assert schedule.num_ticks == work + (repeats - 1) * group + 2 * stages - 2
    assert schedule.num_stash == min(work, (repeats - 1) * group + 2 * (stages - 1) + 1)
    assert schedule.stash_depth().max() == schedule.num_stash
    assert schedule.num_forward_inbox == (group - stages + 1 if repeats > 1 else 1)
    for backward_cost in (1.0, 2.0, 3.0):
        ideal = (stages - 1) / (work + stages - 1)
        assert schedule.idle_fraction(backward_cost) == pytest.approx(ideal, rel=1e-12)


@pytest.mark.parametrize(("stages", "repeats", "group", "num_groups"), SMALL)
def test_interleaved_has_the_closed_forms(
    stages: int, repeats: int, group: int, num_groups: int
) -> None:
    microbatches = group * num_groups
    schedule = build(
        "interleaved", stages=stages, repeats=repeats, microbatches=microbatches, group=group
    )
    check_closed_forms(schedule, group)
    # Every stage keeps fewer chunks than the one before it: 2 less for each hop.
    for stage, depth in enumerate(schedule.stash_depth().max(axis=0)):
        wanted = (repeats - 1) * group + 2 * (stages - 1 - stage) + 1
        assert depth == min(microbatches * repeats, wanted)


@pytest.mark.parametrize(("stages", "repeats"), [(1, 1), (2, 1), (4, 1), (3, 2), (4, 3), (8, 2)])
def test_1f1b_and_breadth_first_are_the_two_ends(stages: int, repeats: int) -> None:
    for num_groups in (1, 2, 4):
        sizes: dict[str, Any] = {
            "stages": stages,
            "repeats": repeats,
            "microbatches": stages * num_groups,
        }
        check_closed_forms(build("1f1b", **sizes), stages)
        check_closed_forms(build("breadth_first", **sizes), stages * num_groups)


@pytest.mark.parametrize(("stages", "repeats", "group", "num_groups"), SMALL)
def test_every_action_stands_where_the_formula_says(
    stages: int, repeats: int, group: int, num_groups: int
) -> None:
    microbatches = group * num_groups
    schedule = build(
        "interleaved", stages=stages, repeats=repeats, microbatches=microbatches, group=group
    )
    delay = (repeats - 1) * group + stages - 1
    forward, backward = {}, {}
    for microbatch in range(microbatches):
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
    for microbatch in range(microbatches):
        last = (stages - 1, microbatch, repeats - 1)
        assert forward[last] == backward[last], "the loss gradient is used in its own tick"


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize(("stages", "repeats"), [(1, 1), (2, 1), (4, 1), (2, 3), (4, 2)])
def test_memory_is_independent_of_the_microbatches(name: str, stages: int, repeats: int) -> None:
    sizes = {
        (schedule.num_stash, schedule.num_forward_inbox, schedule.num_backward_inbox)
        for num_groups in (2, 3, 8, 20)
        for schedule in [
            build(
                name, stages=stages, repeats=repeats, microbatches=(repeats + num_groups) * stages
            )
        ]
    }
    assert len(sizes) == 1
    (num_stash, _, _) = sizes.pop()
    assert num_stash == stages * (repeats + 1) - 1


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 12])
@pytest.mark.parametrize(("name", "repeats"), [("gpipe", 1), ("circular", 1), ("circular", 3)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_forward_then_backward_saves_every_chunk(
    name: str, repeats: int, stages: int, microbatches: int
) -> None:
    schedule = build(name, stages=stages, repeats=repeats, microbatches=microbatches)
    assert schedule.num_stash == microbatches * repeats
    depth = schedule.stash_depth()
    assert (depth.max(axis=0) == microbatches * repeats).all()
    if microbatches >= stages:
        work = microbatches * repeats
        assert schedule.idle_fraction() == pytest.approx((stages - 1) / (work + stages - 1))
    # No stage turns back before it has done all its forwards.
    last_forward = max(ticks_of(schedule.forward).values())
    assert min(ticks_of(schedule.backward).values()) >= last_forward - (stages - 1)


def test_the_edges_of_the_network_are_the_first_and_the_last_chunk() -> None:
    schedule = build("interleaved", stages=3, repeats=2, microbatches=6)
    entered = schedule.embed_microbatch
    left = schedule.loss_microbatch
    returned = schedule.embed_grad_microbatch
    for column in (entered, left, returned):
        assert column[column != IDLE].tolist() == list(range(6))
    for m in range(6):
        enter, leave, back = (
            int(np.flatnonzero(column == m)[0]) for column in (entered, left, returned)
        )
        # Six chunks to the loss head, in whose tick the way back begins: five hops.
        assert leave - enter == 5 and back - leave == 5


@given(st.integers(1, 60), st.integers(1, 12), st.data())
@settings(max_examples=300, deadline=None)
def test_group_sizes_are_even_and_never_stall_the_ring(
    num_microbatches: int, num_stages: int, data: st.DataObject
) -> None:
    shortest = min(num_stages, num_microbatches)
    group = data.draw(st.integers(shortest, num_microbatches))
    sizes = group_sizes(num_microbatches, num_stages, group)
    assert sum(sizes) == num_microbatches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= shortest
    avoidable = [
        count
        for count in range(1, num_microbatches + 1)
        if num_microbatches // count >= shortest and -(-num_microbatches // count) <= group
    ]
    if avoidable:
        assert max(sizes) <= group and len(sizes) == min(avoidable), "as few groups as possible"
    if num_microbatches % group == 0:
        assert sizes == [group] * (num_microbatches // group)


ILLEGAL: list[tuple[str, dict[str, Any], str]] = [
    ("2f2b", {}, "pipeline.schedule"),
    ("1f1b", {"stages": 0}, "mesh.ici_stage"),
    ("1f1b", {"repeats": 0}, "pipeline.repeats"),
    ("1f1b", {"microbatches": 0}, "pipeline.microbatches"),
    ("gpipe", {"repeats": 2}, "pipeline.repeats"),
    ("interleaved", {"group": 3}, "pipeline.group"),
    ("interleaved", {"group": 9}, "pipeline.group"),
    ("interleaved", {"group": -1}, "pipeline.group"),
    ("interleaved", {"microbatches": 2, "group": 1}, "pipeline.group"),
]


@pytest.mark.parametrize(("name", "change", "key"), ILLEGAL)
def test_illegal_sizes_are_config_errors(name: str, change: dict[str, Any], key: str) -> None:
    sizes: dict[str, Any] = {"stages": 4, "repeats": 1, "microbatches": 8} | change
    with pytest.raises(ConfigError) as caught:
        build(name, **sizes)
    (problem,) = caught.value.problems
    assert problem.where == key
    *_, value = (name, *change.values())
    assert problem.given == str(value)
    assert problem.rule.endswith(".") and problem.action.startswith("Set ")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "repeats", "microbatches"), [(1, 1, 3), (4, 1, 2), (3, 2, 7)])
def test_forward_only_tables_do_the_forwards_and_keep_nothing(
    name: str, stages: int, repeats: int, microbatches: int
) -> None:
    repeats = 1 if name == "gpipe" else repeats
    whole = build(name, stages=stages, repeats=repeats, microbatches=microbatches)
    only = build(name, stages=stages, repeats=repeats, microbatches=microbatches, backward=False)
    assert not only.backward.active.any()
    assert only.num_stash == 1 and not only.forward.stash.any()
    assert set(ticks_of(only.forward)) == set(ticks_of(whole.forward))
    # Without backwards in between, the forwards follow each other without a gap.
    last = max(ticks_of(only.forward).values())
    assert only.num_ticks == last + 1
    if microbatches >= stages:
        assert only.idle_fraction() == pytest.approx(
            (stages - 1) / (microbatches * repeats + stages - 1)
        )
    assert only.num_ticks <= whole.num_ticks
