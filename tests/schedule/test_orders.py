"""Schedule generators: short, complete for every size, with their published properties."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.schedule.catalog import SCHEDULES, make_schedule
from maxpipe.schedule.orders import group_sizes
from maxpipe.schedule.table import Action, ActionKind, Orders, Ring, Schedule

MICROBATCHES = (1, 2, 5, 13)


def orders_of(name: str, stages: int, repeats: int, microbatches: int) -> Orders:
    spec = SCHEDULES[name]
    return spec.generate(Ring(stages, repeats, spec.shape), microbatches, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_generators_are_short_and_cite_source(name: str) -> None:
    source = inspect.getsource(SCHEDULES[name].generate)
    assert source.count("\n") < 40
    assert "Source: " in source


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_runs_each_action_once(name: str) -> None:
    spec = SCHEDULES[name]
    split = any(a.kind == "W" for order in orders_of(name, 2, spec.repeats or 1, 2) for a in order)
    assert split == spec.split
    kinds: tuple[ActionKind, ...] = ("F", "I", "W") if split else ("F", "B")
    for stages in range(1, 9):
        for repeats in (spec.repeats,) if spec.repeats else (1, 3):
            for microbatches in MICROBATCHES:
                wanted = {
                    Action(kind, microbatch, repeat)
                    for kind in kinds
                    for microbatch in range(microbatches)
                    for repeat in range(repeats)
                }
                for order in orders_of(name, stages, repeats, microbatches):
                    assert len(order) == len(wanted) and set(order) == wanted


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_1f1b_warmup_has_two_forwards_per_later_stage(stages: int) -> None:
    for stage, order in enumerate(orders_of("1f1b", stages, 1, 3 * stages)):
        kinds = "".join(action.kind for action in order)
        behind = stages - 1 - stage
        steady = 3 * stages - 2 * behind
        assert kinds == "F" * 2 * behind + "FB" * steady + "B" * 2 * behind


@pytest.mark.parametrize("name", ["gpipe", "circular"])
def test_gpipe_runs_all_forwards_before_backwards(name: str) -> None:
    for order in orders_of(name, 3, SCHEDULES[name].repeats or 2, 4):
        kinds = "".join(action.kind for action in order)
        assert kinds == "F" * (len(order) // 2) + "B" * (len(order) // 2)


# Zero-bubble schedules.


def zero_bubble(name: str, stages: int, microbatches: int) -> Schedule:
    repeats = SCHEDULES[name].repeats
    assert repeats is not None
    return make_schedule(name, stages=stages, repeats=repeats, microbatches=microbatches)


def most_kept(schedule: Schedule) -> int:
    """Return the most chunks that any stage saves at once, from F to W."""
    return int(schedule.stash_depth().max())


@pytest.mark.parametrize("stages", range(1, 9))
def test_zb_h2_bubble_is_only_initial_fill(stages: int) -> None:
    for microbatches in (stages, 2 * stages, 3 * stages + 2):
        schedule = zero_bubble("zb_h2", stages, microbatches)
        assert schedule.num_ticks == 3 * microbatches + stages - 1
        assert most_kept(schedule) <= 2 * stages - 1


@pytest.mark.parametrize("stages", range(1, 9))
def test_zb_h1_has_memory_of_1f1b_and_third_of_bubble(stages: int) -> None:
    for microbatches in (stages, 2 * stages, 3 * stages + 2):
        schedule = zero_bubble("zb_h1", stages, microbatches)
        assert most_kept(schedule) <= stages
        # 1F1B waits for F, I and W of earlier and later stages.
        assert schedule.num_ticks - 3 * microbatches <= max(stages + 2, 3 * (stages - 1) / 2)


def test_zb_v_has_memory_of_1f1b_and_small_bubble() -> None:
    assert zero_bubble("zb_v", 8, 16).idle_fraction() <= 0.10
    for stages in range(1, 9):
        for microbatches in (stages, 2 * stages, 4 * stages):
            schedule = zero_bubble("zb_v", stages, microbatches)
            # A stage has two chunks, so this is the memory of 1F1B.
            assert most_kept(schedule) <= 2 * stages
            assert schedule.num_ticks - 6 * microbatches <= 1.25 * stages


@pytest.mark.parametrize("stages", range(1, 9))
def test_v_half_and_v_min_save_half_and_third_of_activations(stages: int) -> None:
    for microbatches in (stages, 2 * stages, 4 * stages):
        half, least = (zero_bubble(name, stages, microbatches) for name in ("v_half", "v_min"))
        assert most_kept(half) <= stages + 3
        assert half.num_stash <= stages + 1
        assert most_kept(least) <= 2 * stages / 3 + 3
        for schedule in (half, least):
            assert schedule.num_deferred <= 2, "W follows its I closely"
    if stages >= 4:
        assert most_kept(least) < most_kept(zero_bubble("zb_v", stages, 4 * stages)) / 1.5


@pytest.mark.parametrize("stages", range(1, 9))
def test_dualpipe_v_saves_one_more_chunk_than_1f1b(stages: int) -> None:
    for microbatches in (stages, 2 * stages, 4 * stages):
        assert most_kept(zero_bubble("dualpipe_v", stages, microbatches)) <= 2 * stages + 1


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_memory_does_not_depend_on_microbatch_count(name: str) -> None:
    found = {
        (most_kept(schedule), schedule.num_stash, schedule.num_deferred, schedule.num_inbox)
        for groups in (3, 4, 7, 10)
        for schedule in [zero_bubble(name, 4, 4 * groups)]
    }
    assert len(found) == 1


def test_idle_fraction_decreases_with_microbatch_count() -> None:
    for name in ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"):
        short, long = (zero_bubble(name, 4, count).idle_fraction() for count in (8, 40))
        assert long < short / 2


# Groups.


@given(st.integers(1, 60), st.integers(1, 12), st.data())
@settings(max_examples=300, deadline=None)
def test_group_sizes_are_balanced_and_do_not_stall_ring(
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


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_groups_run_repeats_in_order(repeats: int) -> None:
    (order, *_) = SCHEDULES["interleaved"].generate(Ring(2, repeats), 7, 3)
    forward = [(a.microbatch, a.repeat) for a in order if a.kind == "F"]
    # Seven microbatches in groups of 3, 2 and 2.
    groups = [[0, 1, 2], [3, 4], [5, 6]]
    assert forward == [(m, r) for group in groups for r in range(repeats) for m in group]
    backward = [(a.microbatch, a.repeat) for a in order if a.kind == "B"]
    assert backward == [(m, r) for group in groups for r in reversed(range(repeats)) for m in group]
    assert Counter(forward) == Counter(backward)
