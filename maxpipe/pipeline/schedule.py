"""Schedules as data: which stage does what in which slot, and in which buffers.

A *generator* says only in which order each stage computes. Passes then place the
actions on ticks and give every message and every saved activation a buffer slot.
The result is a `Schedule` of int32 arrays, which `verify` checks, `draw` renders
and `executor` runs. A new schedule is a new generator and nothing else.

A tick is: a forward slot, the loss head, a backward slot. A forward message
travels while the backward slot computes, a backward message during the next
tick's forward slot, so a hop takes one tick and is hidden behind work.

Stage p in repeat r runs chunk c = r * P + p of the network's C = P * R chunks.
Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from maxpipe.errors import ConfigError

IDLE = -1


class Action(NamedTuple):
    """One chunk's forward (`F`) or backward (`B`) for one microbatch."""

    kind: Literal["F", "B"]
    microbatch: int
    repeat: int


Orders = list[list[Action]]
"""For each stage, its actions in the order in which it computes them."""


@dataclass(frozen=True, slots=True)
class Slots:
    """One kind of slot as arrays `[K, P]`; buffer columns are always legal indices.

    A ring message is written in every tick; where it carries nothing, `arrive` names a
    slot that is dead at that moment.
    """

    microbatch: np.ndarray
    """Microbatch computed, or `IDLE`."""
    repeat: np.ndarray
    """Repeat computed (0 when idle)."""
    stash: np.ndarray
    """Slot of the saved activations that F writes and B reads."""
    inbox: np.ndarray
    """Slot from which the message (activation or cotangent) is read."""
    arrive: np.ndarray
    """Slot into which the ring's message of this tick is written."""

    @property
    def active(self) -> np.ndarray:
        """bool `[K, P]`: there is work in the slot."""
        return self.microbatch != IDLE


@dataclass(frozen=True, slots=True)
class Schedule:
    """A placed schedule: everything the engine needs to know about time and buffers."""

    name: str
    num_stages: int
    num_repeats: int
    num_microbatches: int
    group: int
    """Microbatches a stage runs back to back before the next repeat."""
    forward: Slots
    backward: Slots
    loss_inbox: np.ndarray
    """`[K, P]`: slot of the backward inbox into which the loss head's cotangent is written."""
    num_stash: int
    num_forward_inbox: int
    num_backward_inbox: int

    @property
    def num_ticks(self) -> int:
        """Number of ticks K."""
        return self.forward.microbatch.shape[0]

    @property
    def embed_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch that enters the network in this tick, or `IDLE`."""
        first = self.forward.repeat[:, 0] == 0
        return np.where(first, self.forward.microbatch[:, 0], IDLE)

    @property
    def loss_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch that leaves the network in this tick, or `IDLE`."""
        last = self.forward.repeat[:, -1] == self.num_repeats - 1
        return np.where(last, self.forward.microbatch[:, -1], IDLE)

    @property
    def embed_grad_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch whose gradient reaches the embedding in this tick, or `IDLE`."""
        first = self.backward.repeat[:, 0] == 0
        return np.where(first, self.backward.microbatch[:, 0], IDLE)

    def idle_fraction(self, backward_cost: float = 2.0) -> float:
        """Share of the step in which a stage waits, with a forward slot costing 1.

        Stages advance in lockstep, so a slot costs its time when any stage works in it.
        """
        work = self.num_microbatches * self.num_repeats
        forward = int(self.forward.active.any(axis=1).sum())
        backward = int(self.backward.active.any(axis=1).sum())
        done = work + (backward_cost * work if backward else 0)
        total = forward + backward_cost * backward
        return 1.0 - done / total if total else 1.0

    def stash_depth(self) -> np.ndarray:
        """`[K, P]`: chunks whose activations a stage holds while it computes tick k."""
        written = np.cumsum(self.forward.active, axis=0)
        freed = np.cumsum(self.backward.active, axis=0)
        return written - np.concatenate([np.zeros_like(freed[:1]), freed[:-1]])


def group_sizes(num_microbatches: int, num_stages: int, group: int) -> list[int]:
    """Sizes of the groups, as even as possible and longer ones first.

    A group shorter than the stages would stall the ring, so a remainder is spread
    over the groups: none is longer than `group` unless one would be shorter than
    the number of stages.
    """
    count = -(-num_microbatches // group)
    if num_microbatches // count < num_stages:
        count = max(1, num_microbatches // group)
    short, longer = divmod(num_microbatches, count)
    return [short + 1] * longer + [short] * (count - longer)


def _ring_sequence(sizes: Sequence[int], num_repeats: int, *, backward: bool) -> list[Action]:
    """Order in which every stage of the ring meets (microbatch, repeat)."""
    repeats = range(num_repeats)
    kind: Literal["F", "B"] = "B" if backward else "F"
    sequence: list[Action] = []
    start = 0
    for size in sizes:
        for repeat in reversed(repeats) if backward else repeats:
            sequence += [Action(kind, start + j, repeat) for j in range(size)]
        start += size
    return sequence


def forward_then_backward(
    num_stages: int, num_repeats: int, num_microbatches: int, group: int
) -> Orders:
    """All forwards, then all backwards: memory grows with the microbatches.

    Source: GPipe (arXiv:1811.06965); with repeats, the circular order of praxis and MaxText.
    """
    sizes = group_sizes(num_microbatches, num_stages, group)
    forward = _ring_sequence(sizes, num_repeats, backward=False)
    backward = _ring_sequence(sizes, num_repeats, backward=True)
    return [forward + backward for _ in range(num_stages)]


def one_forward_one_backward(
    num_stages: int, num_repeats: int, num_microbatches: int, group: int
) -> Orders:
    """Warm-up forwards, then one forward and one backward in turn, then the rest.

    The warm-up is the shortest that keeps every slot full when a hop takes one tick:
    (R-1) * N forwards until the first microbatch leaves the network, and two ticks for
    each stage between this one and the last. Memory does not depend on the microbatches.

    Source: PipeDream-flush and Megatron-LM's interleaved order (arXiv:2104.04473); with one
    group, breadth-first (arXiv:2211.05953).
    """
    sizes = group_sizes(num_microbatches, num_stages, group)
    forward = _ring_sequence(sizes, num_repeats, backward=False)
    backward = _ring_sequence(sizes, num_repeats, backward=True)
    until_loss = (num_repeats - 1) * max(*sizes, num_stages if num_repeats > 1 else 0)
    orders: Orders = []
    for stage in range(num_stages):
        warmup = min(len(forward), until_loss + 2 * (num_stages - 1 - stage))
        order = forward[:warmup]
        for index, action in enumerate(backward):
            order += [*forward[warmup + index : warmup + index + 1], action]
        orders.append(order)
    return orders


@dataclass(frozen=True, slots=True)
class _Family:
    """A schedule's generator, the group it uses, and what a user should know."""

    generate: Callable[[int, int, int, int], Orders]
    group: Literal["stages", "microbatches", "chosen"]
    summary: str


SCHEDULES: dict[str, _Family] = {
    "gpipe": _Family(
        forward_then_backward, "microbatches", "all forwards, then all backwards; one repeat"
    ),
    "circular": _Family(
        forward_then_backward, "microbatches", "forward sweep over all repeats, then backward"
    ),
    "1f1b": _Family(one_forward_one_backward, "stages", "one forward, one backward; groups of P"),
    "interleaved": _Family(
        one_forward_one_backward, "chosen", "1F1B with a chosen group, by default P"
    ),
    "breadth_first": _Family(
        one_forward_one_backward, "microbatches", "one group, backward as early as possible"
    ),
}


def build(
    name: str,
    *,
    stages: int,
    repeats: int = 1,
    microbatches: int,
    group: int = 0,
    backward: bool = True,
) -> Schedule:
    """The named schedule, placed. `backward=False` keeps the forwards only, for evaluation.

    Raises:
        ConfigError: unknown name, or sizes that the schedule does not allow.
    """
    _check_sizes(name, stages, repeats, microbatches, group)
    family = SCHEDULES[name]
    size = {"stages": stages, "microbatches": microbatches, "chosen": group or stages}[family.group]
    size = min(size, microbatches)
    orders = family.generate(stages, repeats, microbatches, size)
    if not backward:
        orders = [[action for action in order if action.kind == "F"] for order in orders]
    largest = max(group_sizes(microbatches, stages, size))
    return place(name, orders, num_repeats=repeats, num_microbatches=microbatches, group=largest)


def _check_sizes(name: str, stages: int, repeats: int, microbatches: int, group: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError.one(
            "pipeline.schedule",
            name,
            f"must be one of {', '.join(SCHEDULES)}.",
            "Set pipeline.schedule=interleaved.",
        )
    for key, value in (
        ("mesh.ici_stage", stages),
        ("pipeline.repeats", repeats),
        ("pipeline.microbatches", microbatches),
    ):
        if value < 1:
            raise ConfigError.one(key, value, "must be at least 1.", f"Set {key}=1.")
    if name == "gpipe" and repeats > 1:
        raise ConfigError.one(
            "pipeline.repeats",
            repeats,
            "must be 1 with pipeline.schedule=gpipe, which visits each stage once.",
            "Set pipeline.schedule=circular, or pipeline.repeats=1.",
        )
    if group and not (min(stages, microbatches) <= group <= microbatches):
        raise ConfigError.one(
            "pipeline.group",
            group,
            f"must lie between the stages ({stages}) and the microbatches ({microbatches}): "
            "a shorter group would stall the ring.",
            "Set pipeline.group=0 for the default, the number of stages.",
        )


# Passes: from orders to a placed table.

_Cell = tuple[int, int]
"""(tick, stage)."""


def place(
    name: str, orders: Orders, *, num_repeats: int, num_microbatches: int, group: int
) -> Schedule:
    """Put each action into the earliest slot of its kind that its inputs allow."""
    num_stages = len(orders)
    at = _earliest_ticks(orders, num_repeats)
    num_ticks = 1 + max(tick for tick, _ in at.values())
    shape = (num_ticks, num_stages)
    columns = {
        kind: {
            "microbatch": np.full(shape, IDLE, np.int32),
            **{
                column: np.zeros(shape, np.int32)
                for column in ("repeat", "stash", "inbox", "arrive")
            },
        }
        for kind in "FB"
    }
    for (action, _), cell in at.items():
        columns[action.kind]["microbatch"][cell] = action.microbatch
        columns[action.kind]["repeat"][cell] = action.repeat
    schedule = Schedule(
        name=name,
        num_stages=num_stages,
        num_repeats=num_repeats,
        num_microbatches=num_microbatches,
        group=group,
        forward=Slots(**columns["F"]),
        backward=Slots(**columns["B"]),
        loss_inbox=np.zeros(shape, np.int32),
        num_stash=1,
        num_forward_inbox=1,
        num_backward_inbox=1,
    )
    return _assign_buffers(schedule, at)


def next_chunk(stage: int, repeat: int, num_stages: int, num_repeats: int) -> _Cell | None:
    """(stage, repeat) that consumes this chunk's output, or None after the last chunk."""
    if stage + 1 < num_stages:
        return stage + 1, repeat
    return (0, repeat + 1) if repeat + 1 < num_repeats else None


def _earliest_ticks(orders: Orders, num_repeats: int) -> dict[tuple[Action, int], _Cell]:
    num_stages = len(orders)
    at: dict[tuple[Action, int], _Cell] = {}
    position = [0] * num_stages
    remaining = sum(map(len, orders))
    tick = 0
    while remaining:
        done_before = remaining
        for kind in "FB":
            # A message leaves after its slot, so nothing placed in this slot feeds another
            # stage in the same slot; the loss head sits between F and B of one tick.
            for stage, order in enumerate(orders):
                if position[stage] == len(order) or order[position[stage]].kind != kind:
                    continue
                action = order[position[stage]]
                if _is_ready(action, stage, tick, at, num_stages, num_repeats):
                    at[action, stage] = (tick, stage)
                    position[stage] += 1
                    remaining -= 1
        assert remaining < done_before, "the generator's orders wait for each other"
        tick += 1
    return at


def _is_ready(
    action: Action,
    stage: int,
    tick: int,
    at: dict[tuple[Action, int], _Cell],
    num_stages: int,
    num_repeats: int,
) -> bool:
    def finished(kind: Literal["F", "B"], producer: int, repeat: int, before: int) -> bool:
        cell = at.get((Action(kind, action.microbatch, repeat), producer))
        return cell is not None and cell[0] < before

    if action.kind == "F":
        if stage > 0:
            return finished("F", stage - 1, action.repeat, tick)
        return action.repeat == 0 or finished("F", num_stages - 1, action.repeat - 1, tick)
    if not finished("F", stage, action.repeat, tick + 1):
        return False
    consumer = next_chunk(stage, action.repeat, num_stages, num_repeats)
    return consumer is None or finished("B", *consumer, tick)


class _Colouring:
    """Gives each interval of one stage's buffer the lowest slot that is free throughout."""

    def __init__(self) -> None:
        self.intervals: list[tuple[int, int, np.ndarray, list[_Cell]]] = []

    def add(self, start: int, end: int, column: np.ndarray, *cells: _Cell) -> None:
        """A value lives from `start` to `end`; its slot is written to the column's cells."""
        self.intervals.append((start, end, column, list(cells)))

    def assign(self, reads: dict[int, tuple[np.ndarray, _Cell]]) -> int:
        """Fill the columns; `reads` maps an interval's index to one more cell. Returns slots."""
        busy_until: list[int] = []
        order = sorted(range(len(self.intervals)), key=lambda i: self.intervals[i][:2])
        for index in order:
            start, end, column, cells = self.intervals[index]
            slot = next((s for s, busy in enumerate(busy_until) if busy < start), len(busy_until))
            if slot == len(busy_until):
                busy_until.append(end)
            busy_until[slot] = end
            for cell in cells:
                column[cell] = slot
            if index in reads:
                read_column, cell = reads[index]
                read_column[cell] = slot
        return len(busy_until)


def _assign_buffers(schedule: Schedule, at: dict[tuple[Action, int], _Cell]) -> Schedule:
    """Interval colouring per stage; a buffer's size is the maximum over stages.

    A write with nothing to keep is an interval of one moment: it needs a slot that is
    dead then, which is usually one that something else uses at another time.
    """
    stages = range(schedule.num_stages)
    sizes = [
        (
            _assign_stash(schedule, at, stage),
            _assign_forward_inbox(schedule, at, stage),
            _assign_backward_inbox(schedule, at, stage),
        )
        for stage in stages
    ]
    stash, forward, backward = (max(column) for column in zip(*sizes, strict=True))
    return dataclasses.replace(
        schedule, num_stash=stash, num_forward_inbox=forward, num_backward_inbox=backward
    )


def _assign_stash(schedule: Schedule, at: dict, stage: int) -> int:
    # Moments: F writes at 2k, B reads at 2k + 1. An idle F writes nothing.
    colouring, reads = _Colouring(), {}
    forward, backward = schedule.forward, schedule.backward
    for tick in range(schedule.num_ticks):
        cell = (tick, stage)
        action = Action("B", int(forward.microbatch[cell]), int(forward.repeat[cell]))
        consumer = at.get((action, stage))
        if consumer is not None:
            reads[len(colouring.intervals)] = (backward.stash, consumer)
            colouring.add(2 * tick, 2 * consumer[0] + 1, forward.stash, cell)
    return max(1, colouring.assign(reads))


def _assign_forward_inbox(schedule: Schedule, at: dict, stage: int) -> int:
    # Moments: F reads at 2k, the message of the tick is written at 2k + 1.
    colouring, reads = _Colouring(), {}
    forward = schedule.forward
    sender = (stage - 1) % schedule.num_stages
    for tick in range(schedule.num_ticks):
        end = 2 * tick + 1
        if forward.active[tick, sender]:
            repeat = int(forward.repeat[tick, sender])
            consumer = next_chunk(sender, repeat, schedule.num_stages, schedule.num_repeats)
            if consumer is not None:
                action = Action("F", int(forward.microbatch[tick, sender]), consumer[1])
                cell = at[action, consumer[0]]
                end = 2 * cell[0]
                reads[len(colouring.intervals)] = (forward.inbox, cell)
        colouring.add(2 * tick + 1, end, forward.arrive, (tick, stage))
    return colouring.assign(reads)


def _assign_backward_inbox(schedule: Schedule, at: dict, stage: int) -> int:
    # Moments of tick k: the loss head writes at 3k, the message that B sent in tick k - 1 is
    # written at 3k + 1, B reads at 3k + 2.
    colouring, reads = _Colouring(), {}
    backward = schedule.backward
    sender = (stage + 1) % schedule.num_stages
    loss = schedule.loss_microbatch
    for tick in range(schedule.num_ticks):
        end = 3 * tick
        if stage == schedule.num_stages - 1 and loss[tick] != IDLE:
            consumer = at.get((Action("B", int(loss[tick]), schedule.num_repeats - 1), stage))
            if consumer is not None:
                end = 3 * consumer[0] + 2
                reads[len(colouring.intervals)] = (backward.inbox, consumer)
        colouring.add(3 * tick, end, schedule.loss_inbox, (tick, stage))
        end = 3 * tick + 1
        if tick > 0 and backward.active[tick - 1, sender]:
            # The sender's chunk follows the one that takes the message.
            repeat = int(backward.repeat[tick - 1, sender]) - (stage == schedule.num_stages - 1)
            if repeat >= 0:
                action = Action("B", int(backward.microbatch[tick - 1, sender]), repeat)
                consumer = at[action, stage]
                end = 3 * consumer[0] + 2
                reads[len(colouring.intervals)] = (backward.inbox, consumer)
        colouring.add(3 * tick + 1, end, backward.arrive, (tick, stage))
    return colouring.assign(reads)
