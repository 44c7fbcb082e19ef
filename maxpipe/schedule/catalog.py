"""Catalog of schedules, keyed by name, and the functions that construct them.

Each entry defines a generator of execution orders, the ring's shape, and metadata. `make_schedule`
places and verifies the execution orders, and the engine runs the resulting table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maxpipe.errors import Code, ConfigError
from maxpipe.schedule import orders
from maxpipe.schedule.orders import read_orders
from maxpipe.schedule.placement import place_orders
from maxpipe.schedule.table import Orders, Ring, Schedule
from maxpipe.schedule.verify import verify

FILE_PREFIX = "file:"
"""Prefix of schedule names that refer to a CSV file, as in `file:PATH`."""
GPIPE, ONE_FORWARD_ONE_BACKWARD, CIRCULAR, INTERLEAVED = "gpipe", "1f1b", "circular", "interleaved"
"""Schedules suggested in messages and forecasts: 1F1B, which has one repeat, and two schedules that
support any number of repeats."""

MAX_FORWARDS = 300_000
"""Maximum value of stages x repeats x microbatches. At this limit, placement needs about 30 s and 1
GiB of memory."""


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Generator of a schedule's execution orders, and properties of the schedule."""

    generate: Callable[[Ring, int, int], Orders]
    summary: str
    group: Literal["stages", "microbatches", "chosen"] = "microbatches"
    shape: Literal["loop", "v"] = "loop"
    repeats: int | None = None
    """Required number of repeats. If None, any number of repeats is allowed."""
    split: bool = False
    """Whether backward passes are split into I and W, so that a slot can hold different types of
    work."""
    dominated: bool = False
    """Whether another schedule is equally fast and needs less memory. Searches skip dominated
    schedules."""
    supports_delay: bool = False
    """Whether the schedule supports delayed messages, which need two ticks."""
    idle: Callable[[int, int, int], float] | None = None
    """Closed-form idle fraction as a function of (stages, repeats, microbatches), for F = I = W."""

    @property
    def uses_group(self) -> bool:
        """Return whether the schedule uses `pipeline.group`."""
        return self.group == "chosen"


def _bubble_fraction(stages: int, repeats: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches * repeats + stages - 1)


def _zero_bubble_fraction(stages: int, repeats: int, microbatches: int) -> float:
    return (stages - 1) / (3 * microbatches + stages - 1)


SCHEDULES: dict[str, ScheduleSpec] = {
    GPIPE: ScheduleSpec(
        orders.forward_then_backward,
        "all forwards, then all backwards; one repeat",
        repeats=1,
        dominated=True,
        supports_delay=True,
        idle=_bubble_fraction,
    ),
    CIRCULAR: ScheduleSpec(
        orders.forward_then_backward,
        "forward sweep over all repeats, then backward",
        dominated=True,
        supports_delay=True,
        idle=_bubble_fraction,
    ),
    ONE_FORWARD_ONE_BACKWARD: ScheduleSpec(
        orders.one_forward_one_backward,
        "one forward, one backward; one repeat",
        group="stages",
        repeats=1,
        idle=_bubble_fraction,
    ),
    INTERLEAVED: ScheduleSpec(
        orders.one_forward_one_backward,
        "1F1B with a configurable group size (default: P)",
        group="chosen",
        idle=_bubble_fraction,
    ),
    "breadth_first": ScheduleSpec(
        orders.one_forward_one_backward,
        "one group, backward as early as possible",
        dominated=True,
        idle=_bubble_fraction,
    ),
    "zb_h1": ScheduleSpec(
        orders.zero_bubble_h1,
        "split backward fills the bubble; same memory as 1F1B",
        repeats=1,
        split=True,
    ),
    "zb_h2": ScheduleSpec(
        orders.zero_bubble_h2,
        "split backward, twice the memory, only the initial fill idle",
        repeats=1,
        split=True,
        idle=_zero_bubble_fraction,
    ),
    "zb_v": ScheduleSpec(
        orders.zero_bubble_v,
        "split backward on a V, almost no bubble",
        shape="v",
        repeats=2,
        split=True,
    ),
    "v_half": ScheduleSpec(
        orders.v_half,
        "split backward on a V, half the saved activations of published 1F1B",
        shape="v",
        repeats=2,
        split=True,
    ),
    "v_min": ScheduleSpec(
        orders.v_min,
        "split backward on a V, a third of the saved activations of published 1F1B",
        shape="v",
        repeats=2,
        split=True,
    ),
    "dualpipe_v": ScheduleSpec(
        orders.dualpipe_v,
        "forwards of one chunk paired with backwards of the other, on a V",
        shape="v",
        repeats=2,
        split=True,
        dominated=True,
    ),
}


def make_schedule(
    name: str,
    *,
    stages: int,
    repeats: int = 1,
    microbatches: int,
    group: int = 0,
    delayed: bool = False,
) -> Schedule:
    """Return the named schedule, placed and verified.

    Raises:
        ConfigError: the name is unknown, or the schedule does not support these sizes.
        OrderError: the execution orders in a file cause a deadlock.
    """
    closed_form = None
    if name.startswith(FILE_PREFIX):
        path = Path(name.removeprefix(FILE_PREFIX))
        ring, order = read_orders(path, stages, repeats, microbatches)
        largest = microbatches
    else:
        _check_sizes(name, stages, repeats, microbatches, group, delayed)
        spec = SCHEDULES[name]
        ring = Ring(stages, repeats, _shape(spec, stages))
        size = {"stages": stages, "microbatches": microbatches, "chosen": group or stages}
        largest = min(size[spec.group], microbatches)
        order = spec.generate(ring, microbatches, largest)
        largest = max(orders.group_sizes(microbatches, stages, largest))
        if spec.idle is not None and microbatches >= stages and not delayed:
            closed_form = spec.idle(stages, repeats, microbatches)
    schedule = place_orders(
        name, ring, order, num_microbatches=microbatches, group=largest, delayed=delayed
    )
    verify(schedule, idle=closed_form)
    return schedule


def check_num_forwards(where: str, stages: int, repeats: int, microbatches: int) -> None:
    """Check the number of forward passes of a schedule before it is built.

    Raises:
        ConfigError: the schedule would need too much memory and time.
    """
    if (count := stages * repeats * microbatches) > MAX_FORWARDS:
        raise ConfigError.one(
            Code.SCHED_SIZES,
            where,
            f"stages={stages:,} repeats={repeats:,} microbatches={microbatches:,}",
            f"has {count:,} forward passes, more than the limit of {MAX_FORWARDS:,}.",
            "Reduce one of the sizes: a smaller schedule has the same pattern.",
        )


def make_forward_schedule(ring: Ring, microbatches: int) -> Schedule:
    """Return a forward-only schedule for evaluation, with any number of microbatches."""
    group = min(ring.num_stages, microbatches)
    order = orders.forward_sweep(ring, microbatches, group)
    largest = max(orders.group_sizes(microbatches, ring.num_stages, group))
    schedule = place_orders("forward", ring, order, num_microbatches=microbatches, group=largest)
    verify(schedule)
    return schedule


def _shape(spec: ScheduleSpec, stages: int) -> Literal["loop", "v"]:
    return spec.shape if stages > 1 else "loop"  # a loop and a V are identical on one stage


def _check_sizes(
    name: str, stages: int, repeats: int, microbatches: int, group: int, delayed: bool
) -> None:
    if name not in SCHEDULES:
        raise ConfigError.one(
            Code.SCHED_NAME,
            "pipeline.schedule",
            name,
            f"must be one of {', '.join(SCHEDULES)}, or {FILE_PREFIX}PATH.",
            f"Set pipeline.schedule={INTERLEAVED}.",
        )
    for key, value in (
        ("mesh.ici_stage", stages),
        ("pipeline.repeats", repeats),
        ("pipeline.microbatches", microbatches),
    ):
        if value < 1:
            raise ConfigError.one(
                Code.SCHED_SIZES, key, value, "must be at least 1.", f"Set {key}=1."
            )
    spec = SCHEDULES[name]
    if spec.repeats is not None and repeats != spec.repeats:
        raise ConfigError.one(
            Code.SCHED_SIZES,
            "pipeline.repeats",
            repeats,
            repeats_rule(name, spec),
            f"Set pipeline.repeats={spec.repeats}, or pipeline.schedule={INTERLEAVED}, which has "
            "any number of repeats.",
        )
    if delayed and not spec.supports_delay:
        allowed = ", ".join(each for each, other in SCHEDULES.items() if other.supports_delay)
        raise ConfigError.one(
            Code.SCHED_SIZES,
            "pipeline.delayed_forwarding",
            delayed,
            f"is supported only by {allowed} and {FILE_PREFIX}PATH; pipeline.schedule is {name}.",
            "Set pipeline.delayed_forwarding=false.",
        )
    if group and not (min(stages, microbatches) <= group <= microbatches):
        raise ConfigError.one(
            Code.SCHED_SIZES,
            "pipeline.group",
            group,
            f"must be between the number of stages ({stages}) and the number of microbatches "
            f"({microbatches}), because a shorter group would stall the ring.",
            "Set pipeline.group=0 to use the default, the number of stages.",
        )


def repeats_rule(name: str, spec: ScheduleSpec) -> str:
    """Return the error message that states the number of repeats required by a schedule."""
    reason = "which has one chunk per stage" if spec.repeats == 1 else "whose chunks form a V"
    return f"must be {spec.repeats} with pipeline.schedule={name}, {reason}."
