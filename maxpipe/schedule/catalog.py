"""Schedules by name: which there are, and how each becomes a table.

A schedule is a generator of orders, the ring it runs on, and what a user should know. Everything
else follows: `build` places the orders, and the engine runs the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maxpipe.errors import ConfigError
from maxpipe.schedule import orders
from maxpipe.schedule.notation import read_orders
from maxpipe.schedule.placement import place
from maxpipe.schedule.table import Orders, Ring, Schedule
from maxpipe.schedule.verify import verify

FILE_PREFIX = "file:"
"""`file:PATH` is the schedule that the CSV file describes."""


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule's generator and what it needs."""

    generate: Callable[[Ring, int, int], Orders]
    summary: str
    group: Literal["stages", "microbatches", "chosen"] = "microbatches"
    shape: Literal["loop", "v"] = "loop"
    repeats: int | None = None
    """The only number of repeats it has, if it has only one."""
    delays: bool = False
    """Messages may take two ticks."""
    idle: Callable[[int, int, int], float] | None = None
    """Closed form of the idle time at (stages, repeats, microbatches), with F = I = W."""


def _fill(stages: int, repeats: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches * repeats + stages - 1)


def _first_fill(stages: int, repeats: int, microbatches: int) -> float:
    return (stages - 1) / (3 * microbatches + stages - 1)


SCHEDULES: dict[str, Family] = {
    "gpipe": Family(
        orders.forward_then_backward,
        "all forwards, then all backwards; one repeat",
        repeats=1,
        delays=True,
        idle=_fill,
    ),
    "circular": Family(
        orders.forward_then_backward,
        "forward sweep over all repeats, then backward",
        delays=True,
        idle=_fill,
    ),
    "1f1b": Family(
        orders.one_forward_one_backward,
        "one forward, one backward; groups of P",
        group="stages",
        idle=_fill,
    ),
    "interleaved": Family(
        orders.one_forward_one_backward,
        "1F1B with a chosen group, by default P",
        group="chosen",
        idle=_fill,
    ),
    "breadth_first": Family(
        orders.one_forward_one_backward,
        "one group, backward as early as possible",
        idle=_fill,
    ),
    "zb_h1": Family(
        orders.zero_bubble_h1, "split backward fills the bubble; memory of 1F1B", repeats=1
    ),
    "zb_h2": Family(
        orders.zero_bubble_h2,
        "split backward, twice the memory, no bubble but the first fill",
        repeats=1,
        idle=_first_fill,
    ),
    "zb_v": Family(
        orders.zero_bubble_v, "split backward on a V, almost no bubble", shape="v", repeats=2
    ),
    "v_half": Family(
        orders.v_half, "split backward on a V, half the memory of 1F1B", shape="v", repeats=2
    ),
    "v_min": Family(
        orders.v_min, "split backward on a V, a third of the memory", shape="v", repeats=2
    ),
    "dualpipe_v": Family(
        orders.dualpipe_v, "forwards beside backwards on a V", shape="v", repeats=2
    ),
}


def build(
    name: str,
    *,
    stages: int,
    repeats: int = 1,
    microbatches: int,
    group: int = 0,
    delayed: bool = False,
) -> Schedule:
    """The named schedule, placed and verified.

    Raises:
        ConfigError: unknown name, or sizes that the schedule does not allow.
        OrderError: the orders in a file wait for each other.
    """
    closed_form = None
    if name.startswith(FILE_PREFIX):
        path = Path(name.removeprefix(FILE_PREFIX))
        ring, order = read_orders(path, stages, repeats, microbatches)
        largest = microbatches
    else:
        _check_sizes(name, stages, repeats, microbatches, group, delayed)
        family = SCHEDULES[name]
        ring = Ring(stages, repeats, _shape(family, stages))
        size = {"stages": stages, "microbatches": microbatches, "chosen": group or stages}
        largest = min(size[family.group], microbatches)
        order = family.generate(ring, microbatches, largest)
        largest = max(orders.group_sizes(microbatches, stages, largest))
        if family.idle is not None and microbatches >= stages and not delayed:
            closed_form = family.idle(stages, repeats, microbatches)
    schedule = place(
        name, ring, order, num_microbatches=microbatches, group=largest, delayed=delayed
    )
    verify(schedule, idle=closed_form)
    return schedule


def forward_only(ring: Ring, microbatches: int) -> Schedule:
    """A forward sweep over the ring, for evaluation: any number of microbatches."""
    group = min(ring.num_stages, microbatches)
    order = orders.forward_sweep(ring, microbatches, group)
    largest = max(orders.group_sizes(microbatches, ring.num_stages, group))
    schedule = place("forward", ring, order, num_microbatches=microbatches, group=largest)
    verify(schedule)
    return schedule


def _shape(family: Family, stages: int) -> Literal["loop", "v"]:
    return family.shape if stages > 1 else "loop"  # on one stage both are the same


def _check_sizes(
    name: str, stages: int, repeats: int, microbatches: int, group: int, delayed: bool
) -> None:
    if name not in SCHEDULES:
        raise ConfigError.one(
            "pipeline.schedule",
            name,
            f"must be one of {', '.join(SCHEDULES)}, or {FILE_PREFIX}PATH.",
            "Set pipeline.schedule=interleaved.",
        )
    for key, value in (
        ("mesh.ici_stage", stages),
        ("pipeline.repeats", repeats),
        ("pipeline.microbatches", microbatches),
    ):
        if value < 1:
            raise ConfigError.one(key, value, "must be at least 1.", f"Set {key}=1.")
    family = SCHEDULES[name]
    if family.repeats is not None and repeats != family.repeats:
        raise ConfigError.one(
            "pipeline.repeats",
            repeats,
            repeats_rule(name, family),
            f"Set pipeline.repeats={family.repeats}, or another pipeline.schedule.",
        )
    if delayed and not family.delays:
        allowed = ", ".join(each for each, other in SCHEDULES.items() if other.delays)
        raise ConfigError.one(
            "pipeline.delayed_forwarding",
            delayed,
            f"is read by {allowed} and {FILE_PREFIX}PATH only, and the schedule is {name}.",
            "Set pipeline.delayed_forwarding=false.",
        )
    if group and not (min(stages, microbatches) <= group <= microbatches):
        raise ConfigError.one(
            "pipeline.group",
            group,
            f"must lie between the stages ({stages}) and the microbatches ({microbatches}): "
            "a shorter group would stall the ring.",
            "Set pipeline.group=0 for the default, the number of stages.",
        )


def repeats_rule(name: str, family: Family) -> str:
    """Why a schedule has one number of repeats only."""
    reason = "which visits each stage once" if family.repeats == 1 else "which turns back once, a V"
    return f"must be {family.repeats} with pipeline.schedule={name}, {reason}."
