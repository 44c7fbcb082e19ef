"""Schedules by name: valid and invalid sizes, and idle time in closed form."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest

from maxpipe.errors import ConfigError
from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule, make_schedule, repeats_rule
from maxpipe.schedule.table import IDLE, Costs, Ring, Schedule, SlotColumns

SMALL, LARGE = (1, 2, 3, 4), (5, 6, 7, 8)
every_stages = pytest.mark.parametrize(
    "stages",
    [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large", marks=pytest.mark.long)],
)


def all_sizes(name: str, all_stages: tuple[int, ...] = SMALL) -> list[dict[str, Any]]:
    spec = SCHEDULES[name]
    return [
        {"stages": stages, "repeats": repeats, "microbatches": microbatches}
        for stages in all_stages
        for repeats in ((spec.repeats,) if spec.repeats else (1, 2, 3))
        for microbatches in sorted(
            {1, stages - 1, stages, stages + 1, 2 * stages, 2 * stages + 1, 3 * stages + 2} - {0}
        )
    ]


def items(slots: SlotColumns) -> set[tuple[int, int, int]]:
    """Return (stage, microbatch, repeat) of every active slot."""
    return {
        (stage, int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]))
        for tick, stage in np.argwhere(slots.active).tolist()
    }


@every_stages
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_built_and_verified(name: str, stages: tuple[int, ...]) -> None:
    # `make_schedule` verifies the schedule and compares idle time with the closed form.
    for sizes in all_sizes(name, stages):
        schedule = make_schedule(name, **sizes)
        assert schedule.name == name and schedule.trains and not schedule.delayed
        assert schedule.num_microbatches == sizes["microbatches"]
        assert (schedule.num_stages, schedule.num_repeats) == (sizes["stages"], sizes["repeats"])
        # The tick count is at least the work of a stage, and no stage waits forever.
        work = sizes["microbatches"] * sizes["repeats"]
        assert (3 if schedule.mixed else 1) * work <= schedule.num_ticks
        assert schedule.num_ticks <= 3 * (work + schedule.ring.num_chunks) + schedule.num_stages


@pytest.mark.parametrize("shape", ["loop", "v"])
def test_forward_only_schedule_saves_no_activations(shape: Literal["loop", "v"]) -> None:
    for stages, repeats, microbatches in itertools.product(range(1, 6), (1, 2, 3), range(1, 12)):
        only = make_forward_schedule(Ring(stages, repeats, shape), microbatches)
        assert not only.trains and not only.mixed
        assert not only.backward.active.any() and not only.weight.active.any()
        assert only.num_stash == only.num_deferred == 1 and not only.forward.stash.any()
        wanted = {
            (p, m, r) for m in range(microbatches) for r in range(repeats) for p in range(stages)
        }
        assert items(only.forward) == wanted
        if microbatches >= stages and shape == "loop":
            # Forward passes run without gaps.
            assert only.num_ticks == microbatches * repeats + stages - 1
            assert only.idle_fraction() == pytest.approx((stages - 1) / only.num_ticks)


@pytest.mark.parametrize("name", ["gpipe", "circular", "1f1b", "interleaved", "breadth_first"])
def test_typed_schedules_have_idle_fraction_of_interleaved_1f1b(name: str) -> None:
    for sizes in all_sizes(name):
        stages, work = sizes["stages"], sizes["microbatches"] * sizes["repeats"]
        if sizes["microbatches"] >= stages:
            ideal = (stages - 1) / (work + stages - 1)
            schedule = make_schedule(name, **sizes)
            for costs in (Costs(), Costs(1.0, 2.0, 2.0), Costs(2.0, 1.0, 0.5)):
                assert schedule.idle_fraction(costs) == pytest.approx(ideal, rel=1e-12)


@every_stages
@pytest.mark.parametrize("name", ["gpipe", "circular"])
def test_delayed_messages_double_the_bubble(name: str, stages: tuple[int, ...]) -> None:
    for sizes in all_sizes(name, stages):
        schedule = make_schedule(name, **sizes, delayed=True)
        assert schedule.delayed
        num_stages, repeats, microbatches = sizes.values()
        # Delay doubles a round, so only a repeat twice as long as the ring can hide it.
        if microbatches >= 2 * num_stages or (repeats == 1 and microbatches >= num_stages):
            bubble, work = 2 * (num_stages - 1), microbatches * repeats
            assert schedule.idle_fraction() == pytest.approx(bubble / (work + bubble))
        assert schedule.num_stash == microbatches * repeats


def test_embedding_and_loss_are_at_first_and_last_chunk() -> None:
    schedule = make_schedule("interleaved", stages=3, repeats=2, microbatches=6)
    entered = schedule.embed_microbatch
    left = schedule.loss_microbatch
    returned = schedule.embed_grad_microbatch
    for column in (entered, left, returned):
        assert column[column != IDLE].tolist() == list(range(6))
    for m in range(6):
        enter, leave, back = (
            int(np.flatnonzero(column == m)[0]) for column in (entered, left, returned)
        )
        # Six chunks are five hops, and the backward pass starts in the tick of the loss head.
        assert leave - enter == 5 and back - leave == 5


def test_v_ring_ends_on_first_stage() -> None:
    schedule = make_schedule("zb_v", stages=3, repeats=2, microbatches=6)
    assert schedule.ring.last_stage == 0
    for m in range(6):
        (leave,) = np.flatnonzero(schedule.loss_microbatch == m)
        # With mixed ticks, the loss head runs at the start of the next tick.
        assert schedule.forward.microbatch[leave - 1, 0] == m
        assert schedule.forward.repeat[leave - 1, 0] == 1


def depth_by_hand(schedule: Schedule) -> np.ndarray:
    """Return the chunks on each stage between F and the end of B or W, counted tick by tick."""
    live = np.zeros(schedule.num_stages, int)
    found = []
    last = schedule.kinds[-1][1]
    for tick in range(schedule.num_ticks):
        live += schedule.forward.active[tick]
        found.append(live.copy())
        live -= last.active[tick]
    return np.array(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stash_depth_counts_from_forward_to_last_use(name: str) -> None:
    repeats = SCHEDULES[name].repeats or 2
    schedule = make_schedule(name, stages=4, repeats=repeats, microbatches=7)
    assert np.array_equal(schedule.stash_depth(), depth_by_hand(schedule))


ILLEGAL: list[tuple[str, dict[str, Any], str]] = [
    ("2f2b", {}, "pipeline.schedule"),
    ("1f1b", {"stages": 0}, "mesh.ici_stage"),
    ("1f1b", {"repeats": 0}, "pipeline.repeats"),
    ("1f1b", {"microbatches": 0}, "pipeline.microbatches"),
    ("gpipe", {"repeats": 2}, "pipeline.repeats"),
    ("1f1b", {"repeats": 2}, "pipeline.repeats"),
    ("zb_h1", {"repeats": 2}, "pipeline.repeats"),
    ("zb_v", {"repeats": 3}, "pipeline.repeats"),
    ("dualpipe_v", {"repeats": 1}, "pipeline.repeats"),
    ("1f1b", {"delayed": True}, "pipeline.delayed_forwarding"),
    ("interleaved", {"group": 3}, "pipeline.group"),
    ("interleaved", {"group": 9}, "pipeline.group"),
    ("interleaved", {"group": -1}, "pipeline.group"),
    ("interleaved", {"microbatches": 2, "group": 1}, "pipeline.group"),
]


@pytest.mark.parametrize(("name", "change", "key"), ILLEGAL)
def test_invalid_sizes_raise_config_error(name: str, change: dict[str, Any], key: str) -> None:
    sizes: dict[str, Any] = {"stages": 4, "repeats": 1, "microbatches": 8} | change
    with pytest.raises(ConfigError) as caught:
        make_schedule(name, **sizes)
    (problem,) = caught.value.problems
    assert problem.where == key
    *_, value = (name, *change.values())
    assert problem.value == str(value)
    assert problem.rule.endswith(".") and problem.action.startswith("Set ")


@pytest.mark.parametrize("shape", ["loop", "v"])
def test_forward_schedule_runs_on_any_ring(shape: Literal["loop", "v"]) -> None:
    for stages, repeats in ((1, 1), (1, 3), (2, 2), (3, 2), (4, 3)):
        ring = Ring(stages, repeats, shape)
        for microbatches in (1, 2, 3, 5, 8, 13):
            schedule = make_forward_schedule(ring, microbatches)
            assert schedule.ring == ring and not schedule.trains
            assert schedule.num_microbatches == microbatches
            everything = itertools.product(range(stages), range(microbatches), range(repeats))
            assert items(schedule.forward) == set(everything)
            if shape == "loop" and microbatches >= stages:
                assert schedule.num_ticks == microbatches * repeats + stages - 1


def test_v_ring_on_one_stage_is_loop() -> None:
    assert make_schedule("zb_v", stages=1, repeats=2, microbatches=3).ring.shape == "loop"
    assert make_schedule("zb_v", stages=2, repeats=2, microbatches=3).ring.shape == "v"


def test_repeats_rule_states_reason() -> None:
    assert "one chunk per stage" in repeats_rule("gpipe", SCHEDULES["gpipe"])
    assert "a V" in repeats_rule("zb_v", SCHEDULES["zb_v"])
