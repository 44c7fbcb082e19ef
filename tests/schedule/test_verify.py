"""The verifier accepts valid schedules and marks the bad cell of corrupted ones."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule, make_schedule
from maxpipe.schedule.placement import place_orders
from maxpipe.schedule.table import (
    DISCARD,
    IDLE,
    Action,
    ActionKind,
    Orders,
    Ring,
    Schedule,
    SlotColumns,
)
from maxpipe.schedule.verify import ScheduleError, verify

NUM_VALID = 1000
PER_CORRUPTION = 50

Random = random.Random
Cell = tuple[int, int]
"""(tick, stage)."""


# Valid tables.


def generated_schedule(rng: Random) -> Schedule:
    """Return a named schedule with random valid sizes."""
    name = rng.choice(sorted(SCHEDULES))
    spec = SCHEDULES[name]
    stages, microbatches = rng.randint(1, 6), rng.randint(1, 10)
    if rng.random() < 0.2:
        return make_forward_schedule(Ring(stages, rng.randint(1, 4), spec.shape), microbatches)
    group = rng.choice([0, rng.randint(min(stages, microbatches), microbatches)])
    return make_schedule(
        name,
        stages=stages,
        repeats=spec.repeats or rng.randint(1, 4),
        microbatches=microbatches,
        group=group if spec.group == "chosen" else 0,
        delayed=spec.supports_delay and rng.random() < 0.5,
    )


def any_order(rng: Random) -> Schedule:
    """Return a schedule with random action orders that no generator produces."""
    ring = Ring(rng.randint(1, 4), rng.randint(1, 4), rng.choice(["loop", "v"]))
    microbatches, mixed = rng.randint(1, 5), rng.random() < 0.5
    kinds: tuple[ActionKind, ...] = ("F", "I", "W") if mixed else ("F", "B")
    # Random eagerness per action kind gives very different schedules.
    eager = {kind: rng.choice([0.05, 1.0, 20.0]) for kind in kinds}
    orders: Orders = [[] for _ in range(ring.num_stages)]
    done: set[tuple[ActionKind, int, int]] = set()
    ready: list[tuple[ActionKind, int, int]] = [("F", 0, m) for m in range(microbatches)]
    while ready:
        weights = [eager[kind] for kind, _, _ in ready]
        (picked,) = rng.choices(range(len(ready)), weights)
        kind, chunk, microbatch = ready.pop(picked)
        stage, repeat = ring.locate_chunk(chunk)
        orders[stage].append(Action(kind, microbatch, repeat))
        done.add((kind, chunk, microbatch))
        last = chunk == ring.num_chunks - 1
        if kind == "F" and last:
            ready.append((kinds[1], chunk, microbatch))
        elif kind == "F":
            ready.append((kind, chunk + 1, microbatch))
        elif kind != "W":
            if chunk:
                ready.append((kind, chunk - 1, microbatch))
            if mixed:
                ready.append(("W", chunk, microbatch))
    if rng.random() < 0.2:
        orders = [[action for action in order if action.kind == "F"] for order in orders]
    return place_orders(
        "any order",
        ring,
        orders,
        num_microbatches=microbatches,
        group=microbatches,
        delayed=rng.random() < 0.5,
    )


@cache
def valid(number: int) -> Schedule:
    """Return a random schedule; two thirds come from generators."""
    rng = Random(number)
    return any_order(rng) if number % 3 == 0 else generated_schedule(rng)


def test_valid_tables_are_accepted() -> None:
    found = []
    for number in range(NUM_VALID):
        schedule = valid(number)
        try:
            verify(schedule)
        except ScheduleError as error:
            raise AssertionError(f"table {number}") from error
        found.append((schedule.mixed, schedule.delayed, schedule.ring.shape, schedule.trains))
        visits = schedule.weight_window.num_chunk_slots > 0
        assert visits == (schedule.num_repeats > 2)
    # Every combination occurs except mixed ticks without a backward pass.
    assert len(set(found)) == 2 * 2 * (2 + 1)


# Corruptions. Each one changes a value that is read, or the set of actions, as its docstring
# describes. It returns None if the schedule has nothing to corrupt in this way.


FIELDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
BUFFERS = ("inbox", "stash", "deferred", "window", "gradient")


def slots_of(schedule: Schedule, kind: ActionKind) -> SlotColumns:
    return getattr(schedule, FIELDS[kind])


def with_cells(
    schedule: Schedule, kind: ActionKind, column: str, changes: dict[Cell, int]
) -> Schedule:
    """Return the schedule with these cells of one column replaced."""
    array = getattr(slots_of(schedule, kind), column).copy()
    for cell, value in changes.items():
        array[cell] = value
    slots = dataclasses.replace(slots_of(schedule, kind), **{column: array})
    return dataclasses.replace(schedule, **{FIELDS[kind]: slots})


def with_arrival_slot(schedule: Schedule, way: int, cell: Cell, slot: int) -> Schedule:
    """Return the schedule with one arrival stored in another inbox slot."""
    arrivals = list(schedule.arrivals)
    column = arrivals[way].slot.copy()
    column[cell] = slot
    arrivals[way] = dataclasses.replace(arrivals[way], slot=column)
    return dataclasses.replace(schedule, arrivals=tuple(arrivals))


def with_window_entry(schedule: Schedule, column: str, index: Any, value: int) -> Schedule:
    """Return the schedule with one entry of its weight window replaced."""
    array = getattr(schedule.weight_window, column).copy()
    array[index] = value
    visits = dataclasses.replace(schedule.weight_window, **{column: array})
    return dataclasses.replace(schedule, weight_window=visits)


def with_prologue_entry(schedule: Schedule, column: str, tick: int, value: int) -> Schedule:
    """Return the schedule with one entry of its prologue rounds replaced."""
    array = getattr(schedule.prologue, column).copy()
    array[tick] = value
    outside = dataclasses.replace(schedule.prologue, **{column: array})
    return dataclasses.replace(schedule, prologue=outside)


def active_cells(schedule: Schedule, kind: ActionKind) -> list[Cell]:
    return [(int(k), int(p)) for k, p in np.argwhere(slots_of(schedule, kind).active)]


def item(schedule: Schedule, kind: ActionKind, cell: Cell) -> tuple[int, int]:
    """Return (microbatch, repeat) of a cell."""
    slots = slots_of(schedule, kind)
    return int(slots.microbatch[cell]), int(slots.repeat[cell])


class Message(NamedTuple):
    """A value in an inbox, from its arrival until it is read."""

    kind: ActionKind
    """Action kind of sender and reader. The reader of the loss head's output is B or I."""
    sent: int
    way: int
    """Index in the schedule's arrivals."""
    written: Cell
    read: int
    slot: int


def messages(schedule: Schedule) -> Iterator[Message]:
    """Yield every message that is read."""
    ring = schedule.ring
    backward: ActionKind = "I" if schedule.mixed else "B"
    ticks: dict[tuple[ActionKind, int, int, int], int] = {
        (kind, stage, repeat, microbatch): tick
        for kind, _ in schedule.kinds
        for tick, stage in active_cells(schedule, kind)
        for microbatch, repeat in [item(schedule, kind, (tick, stage))]
    }
    ways = {(a.port, a.direction): number for number, a in enumerate(schedule.arrivals)}
    for (kind, stage, repeat, microbatch), tick in ticks.items():
        if kind == "W":
            continue
        target = (
            ring.next_chunk(stage, repeat) if kind == "F" else ring.previous_chunk(stage, repeat)
        )
        if target is None and kind == "F" and schedule.trains:
            way, written = ways["loss", 0], (tick + schedule.mixed, stage)
            reader, kind = ticks[backward, stage, repeat, microbatch], backward
        elif target is not None:
            step = ring.direction(repeat, turns=target[1] != repeat, backward=kind != "F")
            late = step != 0 and (schedule.delayed or kind == "B")
            way = ways["X" if schedule.mixed else kind, step]
            written = (tick + late, target[0])
            reader = ticks[kind, *target, microbatch]
        else:
            continue
        slot = int(schedule.arrivals[way].slot[written])
        yield Message(kind, tick, way, written, reader, slot)


Corruption = Callable[[Schedule, Random], Schedule | None]
"""Makes a corrupted schedule from a valid one, or None."""
CORRUPTIONS: list[Corruption] = []


def corruption(corrupt: Corruption) -> Corruption:
    CORRUPTIONS.append(corrupt)
    return corrupt


def other_index(rng: Random, size: int, value: int) -> int | None:
    """Return an index below `size` other than `value`."""
    return None if size < 2 else (value + rng.randint(1, size - 1)) % size


def pick(schedule: Schedule, rng: Random, *kinds: str) -> tuple[ActionKind, Cell]:
    """Return an action of one of these kinds, or of any kind if none is given."""
    own: list[ActionKind] = [kind for kind, _ in schedule.kinds if not kinds or kind in kinds]
    kind = rng.choice(own) if own else "F"
    return kind, rng.choice(active_cells(schedule, kind))


@corruption
def other_microbatch(schedule: Schedule, rng: Random) -> Schedule | None:
    """One action runs twice and another one never runs."""
    kind, cell = pick(schedule, rng)
    value = other_index(rng, schedule.num_microbatches, item(schedule, kind, cell)[0])
    return None if value is None else with_cells(schedule, kind, "microbatch", {cell: value})


@corruption
def other_repeat(schedule: Schedule, rng: Random) -> Schedule | None:
    """One action runs twice and another one never runs."""
    kind, cell = pick(schedule, rng)
    value = other_index(rng, schedule.num_repeats, item(schedule, kind, cell)[1])
    return None if value is None else with_cells(schedule, kind, "repeat", {cell: value})


@corruption
def dropped_action(schedule: Schedule, rng: Random) -> Schedule | None:
    """An action never runs."""
    kind, cell = pick(schedule, rng)
    return with_cells(schedule, kind, "microbatch", {cell: IDLE})


@corruption
def doubled_action(schedule: Schedule, rng: Random) -> Schedule | None:
    """An idle slot repeats an action that its stage also runs in another tick."""
    kind, cell = pick(schedule, rng)
    idle = np.flatnonzero(~slots_of(schedule, kind).active[:, cell[1]])
    if not len(idle):
        return None
    return move_action(schedule, kind, cell, (rng.choice(idle.tolist()), cell[1]), leave=True)


def move_action(
    schedule: Schedule, kind: ActionKind, start: Cell, end: Cell, *, leave: bool = False
) -> Schedule:
    for column in ("microbatch", "repeat", *BUFFERS):
        value = int(getattr(slots_of(schedule, kind), column)[start])
        schedule = with_cells(schedule, kind, column, {end: value})
    return schedule if leave else with_cells(schedule, kind, "microbatch", {start: IDLE})


@corruption
def two_actions_in_a_tick(schedule: Schedule, rng: Random) -> Schedule | None:
    """An action moves to a tick in which its stage already runs another action."""
    if not schedule.mixed:
        return None
    kind, cell = pick(schedule, rng)
    others: list[ActionKind] = [other for other, _ in schedule.kinds if other != kind]
    ticks = [k for other in others for k, p in active_cells(schedule, other) if p == cell[1]]
    return move_action(schedule, kind, cell, (rng.choice(ticks), cell[1]))


@corruption
def moved_action(schedule: Schedule, rng: Random) -> Schedule | None:
    """An action moves to an idle slot, so its message is stored where nothing reads it."""
    sent = [message for message in messages(schedule) if schedule.arrivals[message.way].direction]
    if not sent:
        return None
    message = rng.choice(sent)
    way = schedule.arrivals[message.way]
    stage = (message.written[1] - way.direction) % schedule.num_stages
    tick = rng.randrange(schedule.num_ticks)
    late = message.written[0] - message.sent
    busy = any(slots.active[tick, stage] for kind, slots in schedule.kinds if schedule.mixed)
    if busy or slots_of(schedule, message.kind).active[tick, stage]:
        return None
    if (
        tick + late < schedule.num_ticks
        and way.slot[tick + late, message.written[1]] == message.slot
    ):
        return None
    return move_action(schedule, message.kind, (message.sent, stage), (tick, stage))


@corruption
def swapped_names(schedule: Schedule, rng: Random) -> Schedule | None:
    """Two actions of one stage swap names but not buffers, so each reads the other's values."""
    kind, cell = pick(schedule, rng)
    others = [c for c in active_cells(schedule, kind) if c[1] == cell[1] and c != cell]
    if not others or not schedule.trains:
        return None
    return swap_cells(schedule, kind, cell, rng.choice(others), ("microbatch", "repeat"))


@corruption
def swapped_stages(schedule: Schedule, rng: Random) -> Schedule | None:
    """Two stages swap different actions, so each runs one action twice."""
    kind, cell = pick(schedule, rng)
    own = item(schedule, kind, cell)
    others = [
        c
        for c in active_cells(schedule, kind)
        if c[1] != cell[1] and item(schedule, kind, c) != own
    ]
    if not others:
        return None
    columns = ("microbatch", "repeat", *BUFFERS)
    return swap_cells(schedule, kind, cell, rng.choice(others), columns)


def swap_cells(
    schedule: Schedule, kind: ActionKind, one: Cell, two: Cell, columns: tuple[str, ...]
) -> Schedule:
    for column in columns:
        array = getattr(slots_of(schedule, kind), column)
        changes = {one: int(array[two]), two: int(array[one])}
        schedule = with_cells(schedule, kind, column, changes)
    return schedule


@corruption
def other_stash(schedule: Schedule, rng: Random) -> Schedule | None:
    """F and B use different slots; each value is written once, so no other slot holds it."""
    kind, cell = pick(schedule, rng, "F", "B", "I")
    value = other_index(rng, schedule.num_stash, int(slots_of(schedule, kind).stash[cell]))
    return None if value is None else with_cells(schedule, kind, "stash", {cell: value})


@corruption
def other_deferred(schedule: Schedule, rng: Random) -> Schedule | None:
    """I and W use different slots."""
    if not schedule.mixed:
        return None
    kind, cell = pick(schedule, rng, "I", "W")
    value = other_index(rng, schedule.num_deferred, int(slots_of(schedule, kind).deferred[cell]))
    return None if value is None else with_cells(schedule, kind, "deferred", {cell: value})


@corruption
def other_inbox(schedule: Schedule, rng: Random) -> Schedule | None:
    """An action reads a slot without its message; the model's first chunk reads no message."""
    kind, cell = pick(schedule, rng, "F", "B", "I")
    if kind == "F" and schedule.ring.previous_chunk(cell[1], item(schedule, kind, cell)[1]) is None:
        return None
    value = other_index(rng, schedule.num_inbox, int(slots_of(schedule, kind).inbox[cell]))
    return None if value is None else with_cells(schedule, kind, "inbox", {cell: value})


@corruption
def lost_message(schedule: Schedule, rng: Random) -> Schedule | None:
    """A message that is read later is stored in another slot."""
    found = list(messages(schedule))
    if not found:
        return None
    message = rng.choice(found)
    slot = other_index(rng, schedule.num_inbox, message.slot)
    slot = DISCARD if slot is None else slot
    return with_arrival_slot(schedule, message.way, message.written, slot)


@corruption
def discarded_message(schedule: Schedule, rng: Random) -> Schedule | None:
    """A message that is read later is not stored."""
    found = list(messages(schedule))
    if not found:
        return None
    message = rng.choice(found)
    return with_arrival_slot(schedule, message.way, message.written, DISCARD)


@corruption
def overwritten_message(schedule: Schedule, rng: Random) -> Schedule | None:
    """An arrival overwrites a stored message before it is read."""
    found = list(messages(schedule))
    waited_for = {(message.way, message.written) for message in found}
    targets = [
        (way, (tick, message.written[1]), message.slot)
        for message in found
        for tick in range(message.written[0] + 1, message.read)
        for way in range(len(schedule.arrivals))
        if (way, (tick, message.written[1])) not in waited_for
    ]
    return with_arrival_slot(schedule, *rng.choice(targets)) if targets else None


@corruption
def missing_way(schedule: Schedule, rng: Random) -> Schedule | None:
    """No messages arrive from one direction."""
    ways = {message.way for message in messages(schedule)}
    if not ways:
        return None
    lost = rng.choice(sorted(ways))
    arrivals = tuple(a for way, a in enumerate(schedule.arrivals) if way != lost)
    return dataclasses.replace(schedule, arrivals=arrivals)


@corruption
def other_kind_of_ticks(schedule: Schedule, rng: Random) -> Schedule | None:
    """Typed slots are treated as mixed ones, or the reverse."""
    return dataclasses.replace(schedule, mixed=not schedule.mixed)


@corruption
def other_training(schedule: Schedule, rng: Random) -> Schedule | None:
    """The schedule declares a backward pass that it lacks, or omits one that it has."""
    return dataclasses.replace(schedule, trains=not schedule.trains)


@corruption
def other_delay(schedule: Schedule, rng: Random) -> Schedule | None:
    """Messages arrive a tick too late for an immediate reader, or too early in another slot."""
    moving = [m for m in messages(schedule) if schedule.arrivals[m.way].direction]
    if schedule.delayed:
        matters = any(
            schedule.arrivals[m.way].slot[m.sent, m.written[1]] != m.slot
            for m in moving
            if schedule.arrivals[m.way].port != "B"
        )
    else:
        matters = any(m.read == m.sent + 1 for m in moving)
    return dataclasses.replace(schedule, delayed=not schedule.delayed) if matters else None


@corruption
def other_ring(schedule: Schedule, rng: Random) -> Schedule | None:
    """A loop is treated as a V, or the reverse; needs at least two repeats and two stages."""
    ring = schedule.ring
    if ring.num_stages == 1 or ring.num_repeats == 1:
        return None
    turned = dataclasses.replace(ring, shape="v" if ring.shape == "loop" else "loop")
    return dataclasses.replace(schedule, ring=turned)


@corruption
def wrong_size(schedule: Schedule, rng: Random) -> Schedule | None:
    """A buffer is declared larger or smaller than required."""
    name = rng.choice(["num_inbox", "num_stash", "num_deferred", "num_microbatches"])
    size = getattr(schedule, name) + rng.choice([-1, 1, 5])
    return dataclasses.replace(schedule, **{name: size})


@corruption
def wrong_window_size(schedule: Schedule, rng: Random) -> Schedule | None:
    """The window has more or fewer chunk slots than the gathers and reductions use."""
    name = rng.choice(["num_chunk_slots", "num_gradient_slots"])
    size = getattr(schedule.weight_window, name)
    if not size:
        return None
    visits = dataclasses.replace(schedule.weight_window, **{name: size + rng.choice([-1, 1])})
    return dataclasses.replace(schedule, weight_window=visits)


@corruption
def out_of_range(schedule: Schedule, rng: Random) -> Schedule | None:
    """An index is outside its buffer, which is invalid even if nothing uses it."""
    kind, _ = rng.choice(schedule.kinds)
    cell = (rng.randrange(schedule.num_ticks), rng.randrange(schedule.num_stages))
    visits = schedule.weight_window
    bounds = {
        "microbatch": (IDLE, schedule.num_microbatches),
        "repeat": (0, schedule.num_repeats),
        "inbox": (0, schedule.num_inbox),
        "stash": (0, schedule.num_stash),
        "deferred": (0, schedule.num_deferred),
        "window": (0, max(1, visits.num_chunk_slots)),
        "gradient": (0, max(1, visits.num_gradient_slots)),
    }
    column = rng.choice([*bounds, "arrival"])
    low, high = bounds.get(column, (DISCARD, schedule.num_inbox))
    value = rng.choice([low - 1, high])
    if column != "arrival":
        return with_cells(schedule, kind, column, {cell: value})
    if not schedule.arrivals:
        return None
    return with_arrival_slot(schedule, rng.randrange(len(schedule.arrivals)), cell, value)


@corruption
def visit_out_of_range(schedule: Schedule, rng: Random) -> Schedule | None:
    """A gather or reduction has a tick, chunk or slot that does not exist."""
    visits, last = schedule.weight_window, schedule.num_ticks - 1
    bounds = {
        "gather_tick": last,
        "gather_repeat": schedule.num_repeats - 1,
        "gather_slot": visits.num_chunk_slots - 1,
        "reduce_tick": last + 1,
        "reduce_repeat": schedule.num_repeats - 1,
        "reduce_slot": visits.num_gradient_slots - 1,
    }
    column = rng.choice(sorted(bounds))
    array = getattr(visits, column)
    if not array.size:
        return None
    index = tuple(rng.randrange(size) for size in array.shape)
    return with_window_entry(schedule, column, index, rng.choice([-1, bounds[column] + 1]))


def ends(schedule: Schedule) -> list[str]:
    """Return the directions of prologue rounds; only training has a backward direction."""
    return ["forward", "backward"] if schedule.trains else ["forward"]


@corruption
def other_round(schedule: Schedule, rng: Random) -> Schedule | None:
    """A prologue round runs too early, too late, twice or never."""
    column, tick = rng.choice(ends(schedule)), rng.randrange(schedule.num_ticks)
    rounds = -(-schedule.num_microbatches // schedule.num_stages)
    old = int(getattr(schedule.prologue, column)[tick])
    value = rng.choice([number for number in range(IDLE, rounds) if number != old])
    return with_prologue_entry(schedule, column, tick, value)


@corruption
def other_slot_of_a_round(schedule: Schedule, rng: Random) -> Schedule | None:
    """A microbatch reads from another round's slot, or returns to it."""
    column = rng.choice(ends(schedule))
    passing = schedule.embed_microbatch
    if column == "backward":
        passing = schedule.embed_grad_microbatch
    tick = rng.choice(np.flatnonzero(passing != IDLE).tolist())
    old = int(getattr(schedule.prologue, f"{column}_slot")[tick])
    value = other_index(rng, schedule.prologue.num_slots, old)
    return None if value is None else with_prologue_entry(schedule, f"{column}_slot", tick, value)


@corruption
def round_out_of_range(schedule: Schedule, rng: Random) -> Schedule | None:
    """A prologue round or slot does not exist."""
    rounds = -(-schedule.num_microbatches // schedule.num_stages)
    column, tick = rng.choice(ends(schedule)), rng.randrange(schedule.num_ticks)
    if rng.random() < 0.5:
        return with_prologue_entry(schedule, column, tick, rng.choice([IDLE - 1, rounds]))
    value = rng.choice([-1, schedule.prologue.num_slots])
    return with_prologue_entry(schedule, f"{column}_slot", tick, value)


@corruption
def wrong_number_of_rounds(schedule: Schedule, rng: Random) -> Schedule | None:
    """The prologue has more or fewer slots than its rounds need."""
    size = schedule.prologue.num_slots + rng.choice([-1, 1])
    outside = dataclasses.replace(schedule.prologue, num_slots=size)
    return dataclasses.replace(schedule, prologue=outside)


# Weight window: weights are wrong if the schedule uses a chunk other than the last one gathered.
# Gradients are wrong if they are reduced as another chunk's, or never.


def weights_are_wrong(schedule: Schedule) -> bool:
    visits = schedule.weight_window
    held = np.full((schedule.num_stages, visits.num_chunk_slots), -1)
    stages = np.arange(schedule.num_stages)
    for tick in range(schedule.num_ticks):
        for event in np.flatnonzero(visits.gather_tick == tick):
            held[stages, visits.gather_slot[event]] = visits.gather_repeat[event]
        for kind, slots in schedule.kinds:
            wrong = held[stages, slots.window[tick]] != slots.repeat[tick]
            if kind != "W" and (wrong & slots.active[tick]).any():
                return True
    return False


def gradients_are_wrong(schedule: Schedule) -> bool:
    visits = schedule.weight_window
    _, slots = schedule.kinds[-1]
    held: dict[tuple[int, int], set[int]] = {}
    for tick in range(schedule.num_ticks + 1):
        for event in np.flatnonzero(visits.reduce_tick == tick):
            for stage in range(schedule.num_stages):
                found = held.pop((stage, int(visits.reduce_slot[event, stage])), set())
                if found - {int(visits.reduce_repeat[event, stage])}:
                    return True
        for stage in np.flatnonzero(slots.active[tick]) if tick < schedule.num_ticks else ():
            key = (int(stage), int(slots.gradient[tick, stage]))
            held.setdefault(key, set()).add(int(slots.repeat[tick, stage]))
    return bool(held)


@corruption
def other_window(schedule: Schedule, rng: Random) -> Schedule | None:
    """An action uses the weights of another chunk."""
    kind, cell = pick(schedule, rng, "F", "B", "I")
    value = other_index(
        rng, schedule.weight_window.num_chunk_slots, int(slots_of(schedule, kind).window[cell])
    )
    wrong = None if value is None else with_cells(schedule, kind, "window", {cell: value})
    return wrong if wrong and weights_are_wrong(wrong) else None


def other_event(
    schedule: Schedule, rng: Random, event: str, num_slots: int, num_ticks: int
) -> Schedule | None:
    """Change one entry of the gathers or reductions, as named by `event`."""
    shape = getattr(schedule.weight_window, f"{event}_repeat").shape
    if 0 in shape:
        return None
    index = tuple(rng.randrange(size) for size in shape)
    name, size = rng.choice([("repeat", schedule.num_repeats), ("slot", num_slots)])
    if rng.random() < 0.3:
        name, size, index = "tick", num_ticks, index[0]
    column = f"{event}_{name}"
    value = other_index(rng, size, int(getattr(schedule.weight_window, column)[index]))
    return None if value is None else with_window_entry(schedule, column, index, value)


@corruption
def other_gather(schedule: Schedule, rng: Random) -> Schedule | None:
    """Weights are gathered at another tick, from another chunk, or into another slot."""
    slots, ticks = schedule.weight_window.num_chunk_slots, schedule.num_ticks
    wrong = other_event(schedule, rng, "gather", slots, ticks)
    return wrong if wrong and weights_are_wrong(wrong) else None


@corruption
def other_gradient(schedule: Schedule, rng: Random) -> Schedule | None:
    """A gradient is added to that of another chunk."""
    kind, cell = pick(schedule, rng, "B", "W")
    old = int(slots_of(schedule, kind).gradient[cell])
    value = other_index(rng, schedule.weight_window.num_gradient_slots, old)
    wrong = None if value is None else with_cells(schedule, kind, "gradient", {cell: value})
    return wrong if wrong and gradients_are_wrong(wrong) else None


@corruption
def other_reduction(schedule: Schedule, rng: Random) -> Schedule | None:
    """Gradients are reduced too early, as another chunk's, or from another slot."""
    slots, ticks = schedule.weight_window.num_gradient_slots, schedule.num_ticks + 1
    wrong = other_event(schedule, rng, "reduce", slots, ticks)
    return wrong if wrong and gradients_are_wrong(wrong) else None


def marked_cell(message: str) -> tuple[int, int, str]:
    """Return (tick, stage, kind) of the one bracketed cell in the drawing.

    The kind is empty if ticks are mixed and the cell is idle.
    """
    lines = message.splitlines()
    (header,) = (line.split()[1:] for line in lines if line.startswith("tick "))
    found, stage = [], -1
    for line in lines:
        row = re.match(r"(?:stage +(\d+)|        ) ( |[FB]) (.*)", line)
        if row is None:
            continue
        stage = int(row[1]) if row[1] else stage
        for tick, text in zip(header, row[3].split(), strict=True):
            if bracketed := re.fullmatch(r"\[([^][]+)\]", text):
                kind = row[2].strip() or bracketed[1].rstrip("0123456789abcdefghijklmnop.-/")
                found.append((int(tick), stage, kind))
    assert len(found) == 1, message
    return found[0]


def check_rejected(wrong: Schedule) -> ScheduleError:
    """Verify a corrupted schedule; return the error, whose message marks the bad cell."""
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    error = caught.value
    tick, stage, kind = marked_cell(str(error))
    assert (tick, stage) == (error.tick, error.stage)
    assert wrong.mixed or kind == error.kind
    assert f"{error.kind} slot of stage {error.stage} in tick {error.tick}: " in str(error)
    return error


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_tables_are_rejected_with_bad_cell_marked(corrupt: Corruption) -> None:
    rng = Random(corrupt.__name__)
    found = 0
    for _ in range(100 * PER_CORRUPTION):
        number = rng.randrange(NUM_VALID // 2)
        wrong = corrupt(valid(number), rng)
        if wrong is not None:
            try:
                check_rejected(wrong)
            except pytest.fail.Exception as error:
                raise AssertionError(f"table {number} is accepted") from error
            found += 1
        if found == PER_CORRUPTION:
            break
    assert found == PER_CORRUPTION, "too few tables have anything to corrupt"


def test_corruptions_number_at_least_one_thousand() -> None:
    assert len(CORRUPTIONS) * PER_CORRUPTION >= 1000


def test_error_has_slot_reason_and_grid() -> None:
    schedule = make_schedule("interleaved", stages=3, repeats=2, microbatches=4, group=4)
    slot = (int(schedule.forward.inbox[2, 2]) + 1) % schedule.num_inbox
    error = check_rejected(with_cells(schedule, "F", "inbox", {(2, 2): slot}))
    first, *rest = str(error).splitlines()
    assert first == (
        "schedule interleaved: F slot of stage 2 in tick 2: needs output 1 of 0 but finds nothing."
        "  [MP-SCHED-004]"
    )
    assert any(line.startswith("stage  2 F") and "[0a]" in line for line in rest)


def test_error_marks_forward_that_overwrites_saved_chunk() -> None:
    schedule = make_schedule("1f1b", stages=2, microbatches=4)
    taken = int(schedule.forward.stash[0, 0])
    error = check_rejected(with_cells(schedule, "F", "stash", {(1, 0): taken}))
    assert "needs nothing but finds activations 0 of 0" in str(error)
    assert marked_cell(str(error)) == (1, 0, "F")


def test_error_marks_arrival_that_overwrites_message() -> None:
    schedule = make_schedule("circular", stages=2, repeats=2, microbatches=4)
    message = next(m for m in messages(schedule) if m.kind == "F" and m.read > m.written[0] + 2)
    tick, stage = message.written[0] + 1, message.written[1]
    error = check_rejected(with_arrival_slot(schedule, message.way, (tick, stage), message.slot))
    assert "overwrites output 1 of 0 in the inbox before it is read" in str(error)
    assert (error.tick, error.stage) == (tick, stage)


def test_idle_time_is_compared_with_the_closed_form() -> None:
    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    found = schedule.idle_fraction()
    verify(schedule, idle=found + 0.0009)
    with pytest.raises(
        ScheduleError, match=r"idle 27\.27% of the time, but the closed form gives 27\.38%"
    ):
        verify(schedule, idle=found + 0.0011)


def test_verify_is_fast_and_does_not_import_jax() -> None:
    code = (
        "import sys, time\n"
        "from maxpipe.schedule.catalog import make_schedule, verify\n"
        "schedule = make_schedule('interleaved', stages=4, repeats=2, microbatches=32)\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    start = time.perf_counter(); verify(schedule)\n"
        "    times.append(time.perf_counter() - start)\n"
        "print('jax' in sys.modules, min(times) < 0.1)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == ["False", "True"]
