"""Place execution orders in a table: assign ticks to actions and buffer slots to arrays.

1. `_earliest_ticks` assigns to each action the first tick allowed by its inputs and by the
   execution order of its stage.
2. `_BufferAllocator` treats every stored array (a message, saved activations, inputs of W) as a
   time interval on one stage. Interval coloring then assigns the smallest possible number of slots.
3. `_weight_window` schedules a gather before each run of consecutive work on a chunk, and a
   reduction of the chunk's gradients after the run.
4. `_prologue_rounds` groups the microbatches that enter the pipeline into rounds. The prologue
   layers run once per round.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.schedule.table import (
    DISCARD,
    IDLE,
    Action,
    ActionKind,
    Arrival,
    Orders,
    PrologueRounds,
    Ring,
    Schedule,
    SlotColumns,
    WeightWindow,
)

WINDOW_REPEATS = 2
"""Number of chunks in a prefetch window: the current chunk and the next one. If a stage has at most
this many repeats, its window is never refilled."""


class OrderError(ConfigError):
    """Raised if the execution orders cause a deadlock, in which every stage waits for another
    stage.
    """


def place_orders(
    name: str,
    ring: Ring,
    orders: Orders,
    *,
    num_microbatches: int,
    group: int,
    delayed: bool = False,
) -> Schedule:
    """Build the schedule table from the per-stage execution orders.

    Raises:
        OrderError: the execution orders cause a deadlock.
    """
    kinds = {action.kind for order in orders for action in order}
    mixed = bool(kinds & {"I", "W"})
    at = _earliest_ticks(name, ring, orders, mixed=mixed, delayed=delayed)
    num_ticks = 1 + max(tick for tick, _ in at.values())
    slots = {kind: _empty_slots(num_ticks, ring.num_stages) for kind in ("F", "I", "W")}
    for (action, _), cell in at.items():
        columns = slots["I" if action.kind == "B" else action.kind]
        columns.microbatch[cell] = action.microbatch
        columns.repeat[cell] = action.repeat
    buffers = _BufferAllocator(ring, at, slots, num_ticks, mixed=mixed, delayed=delayed)
    arrivals, num_inbox = buffers.allocate_inbox()
    return Schedule(
        name=name,
        ring=ring,
        num_microbatches=num_microbatches,
        group=group,
        mixed=mixed,
        delayed=delayed,
        trains=kinds != {"F"},
        forward=slots["F"],
        backward=slots["I"],
        weight=slots["W"],
        arrivals=arrivals,
        num_inbox=num_inbox,
        num_stash=buffers.allocate_stash(),
        num_deferred=buffers.allocate_deferred(),
        weight_window=_weight_window(ring, slots, num_ticks, mixed=mixed),
        prologue=_prologue_rounds(ring, slots["F"].at_first_chunk, slots["I"].at_first_chunk),
    )


def _empty_slots(num_ticks: int, num_stages: int) -> SlotColumns:
    zeros = lambda: np.zeros((num_ticks, num_stages), np.int32)  # noqa: E731
    idle = np.full((num_ticks, num_stages), IDLE, np.int32)
    return SlotColumns(idle, *(zeros() for _ in range(6)))


# Ticks.

_Cell = tuple[int, int]
"""Table cell, as (tick, stage)."""
_Ticks = dict[tuple[Action, int], _Cell]
"""Table cell that is assigned to each (action, stage)."""


def _earliest_ticks(name: str, ring: Ring, orders: Orders, *, mixed: bool, delayed: bool) -> _Ticks:
    at: _Ticks = {}
    position = [0] * ring.num_stages
    remaining = sum(map(len, orders))
    slots: tuple[set[ActionKind], ...] = ({"F", "I", "W"},) if mixed else ({"F"}, {"B"})
    tick, last_progress = 0, 0
    while remaining:
        for kinds in slots:
            for stage, order in enumerate(orders):
                if position[stage] == len(order) or order[position[stage]].kind not in kinds:
                    continue
                action = order[position[stage]]
                if all(
                    cell is not None and cell[0] + wait <= tick
                    for cell, wait in _inputs(ring, action, stage, at, mixed, delayed)
                ):
                    at[action, stage] = (tick, stage)
                    position[stage] += 1
                    remaining -= 1
                    last_progress = tick
        if tick > last_progress + 2:
            raise _deadlock_error(name, ring, orders, position)
        tick += 1
    return at


def _inputs(
    ring: Ring, action: Action, stage: int, at: _Ticks, mixed: bool, delayed: bool
) -> Iterator[tuple[_Cell | None, int]]:
    """Yield the cells on which an action depends, each with a delay in ticks."""
    kind, microbatch, repeat = action
    own_forward = at.get((Action("F", microbatch, repeat), stage))
    if kind == "W":
        yield at.get((Action("I", microbatch, repeat), stage)), 1
        return
    source = ring.previous_chunk(stage, repeat) if kind == "F" else ring.next_chunk(stage, repeat)
    if source is not None:
        sender, sent_repeat = source
        step = ring.direction(sent_repeat, turns=sent_repeat != repeat, backward=kind != "F")
        yield (
            at.get((Action(kind, microbatch, sent_repeat), sender)),
            2 if delayed and step else 1,
        )
    if kind != "F":
        # In a typed tick, the backward slot runs after the forward slot and the loss head.
        yield own_forward, 1 if mixed else 0


def _deadlock_error(name: str, ring: Ring, orders: Orders, position: list[int]) -> OrderError:
    waiting = [
        f"stage {stage} with {ring.chunk(stage, action.repeat)}{action.kind}{action.microbatch}"
        for stage, (order, place) in enumerate(zip(orders, position, strict=True))
        for action in order[place : place + 1]
    ]
    problem = Problem(
        Code.SCHED_FILE,
        name,
        "",
        "the stages wait for each other: "
        + ", ".join(waiting)
        + (
            ". An action runs after the stage's earlier actions: F after F of the previous chunk, "
            "B or I after its own F and after B or I of the next chunk, W after its own I."
        ),
        "Move these actions, or the actions that they depend on, to a position that the execution "
        "order allows.",
    )
    return OrderError([problem])


# Buffer slots.


class _Interval(NamedTuple):
    """Lifetime of a stored array on one stage, from `start` to `end`. The assigned slot is written
    to `cells`.
    """

    start: int
    end: int
    cells: Sequence[tuple[np.ndarray, _Cell | int]]


def _colour(intervals: Iterable[_Interval]) -> int:
    """Assign the lowest free slot to each interval, and return the number of slots."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    used = 0
    for interval in sorted(intervals, key=lambda interval: interval[:2]):
        while busy and busy[0][0] < interval.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else used
        used = max(used, slot + 1)
        heapq.heappush(busy, (interval.end, slot))
        for column, cell in interval.cells:
            column[cell] = slot
    return used


def _discard_during(used: list[_Interval], unread: list[_Interval]) -> None:
    """Assign `DISCARD` to messages that would be written to a slot while the slot is in use. The
    `used` intervals do not overlap.
    """
    spans = np.array(sorted(interval[:2] for interval in used)).reshape(-1, 2)
    starts, ends = spans.T
    for interval in unread:
        last = np.searchsorted(starts, interval.start, side="right") - 1
        if last >= 0 and interval.start <= ends[last]:
            for column, cell in interval.cells:
                column[cell] = DISCARD


# Phases of a tick, in the order in which the engine accesses buffers.
_LOSS_MIXED, _FORWARD, _EARLY, _LOSS, _BACKWARD, _WEIGHT, _END = range(7)
_PHASES_PER_TICK = 8


class _BufferAllocator:
    """Assign buffer slots to all stored arrays, stage by stage."""

    def __init__(
        self,
        ring: Ring,
        at: _Ticks,
        slots: dict[str, SlotColumns],
        num_ticks: int,
        *,
        mixed: bool,
        delayed: bool,
    ):
        self.ring, self.at, self.slots, self.num_ticks = ring, at, slots, num_ticks
        self.mixed, self.delayed = mixed, delayed
        self.backward: ActionKind = "I" if mixed else "B"

    def _per_stage(self, intervals: dict[int, list[_Interval]]) -> int:
        """Return the number of slots in a buffer: the maximum over all stages, but at least one."""
        return max([1, *map(_colour, intervals.values())])

    def _spans(
        self, first: ActionKind, last: ActionKind
    ) -> Iterator[tuple[Action, int, _Cell, _Cell]]:
        """Yield each action of type `first` together with the action of type `last` on the same
        data.
        """
        for (action, stage), cell in self.at.items():
            if action.kind == first:
                end = self.at.get((action._replace(kind=last), stage))
                if end is not None:
                    yield action, stage, cell, end

    def allocate_stash(self) -> int:
        """Assign slots to saved activations, which live from F to B or I; return the number of
        slots.
        """
        intervals: dict[int, list[_Interval]] = {}
        f, b = self.slots["F"].stash, self.slots["I"].stash
        for _, stage, start, end in self._spans("F", self.backward):
            span = (_PHASES_PER_TICK * start[0] + _FORWARD, _PHASES_PER_TICK * end[0] + _BACKWARD)
            intervals.setdefault(stage, []).append(_Interval(*span, [(f, start), (b, end)]))
        return self._per_stage(intervals)

    def allocate_deferred(self) -> int:
        """Assign slots to the inputs of W, which live from I to W; return the number of slots."""
        intervals: dict[int, list[_Interval]] = {}
        i, w = self.slots["I"].deferred, self.slots["W"].deferred
        for _, stage, start, end in self._spans("I", "W"):
            span = (_PHASES_PER_TICK * start[0] + _BACKWARD, _PHASES_PER_TICK * end[0] + _WEIGHT)
            intervals.setdefault(stage, []).append(_Interval(*span, [(i, start), (w, end)]))
        return self._per_stage(intervals)

    def allocate_inbox(self) -> tuple[tuple[Arrival, ...], int]:
        """Assign slots to messages, which live from their arrival until a slot reads them.

        In every tick, the engine writes one message for each direction. A message that is never
        read has a lifetime of one phase, so it is written to a slot that is free during that phase.
        Only the last stage stores loss cotangents. If one slot is sufficient for the messages that
        are read, the inbox has only this slot, and other messages are discarded while the slot is
        in use. XLA then needs no copies to and from the inbox, which were 2% of the cycles of an 8B
        model on v6e.
        """
        ways = self._directions()
        stages = range(self.ring.num_stages)
        shape = (self.num_ticks, self.ring.num_stages)
        columns = {way: np.zeros(shape, np.int32) for way in ways}
        ends = {way: np.full(shape, -1) for way in ways}
        readers: dict[tuple[tuple[str, int], _Cell], list[tuple[np.ndarray, _Cell]]] = {}
        for way, arrival, reader, kind in self._messages():
            moment = _FORWARD if kind == "F" else _BACKWARD
            ends[way][arrival] = _PHASES_PER_TICK * reader[0] + moment
            readers[way, arrival] = [(self.slots["F" if kind == "F" else "I"].inbox, reader)]
        read: dict[int, list[_Interval]] = {stage: [] for stage in stages}
        unread: dict[int, list[_Interval]] = {stage: [] for stage in stages}
        for way, column in columns.items():
            for cell in np.ndindex(shape):
                start = _PHASES_PER_TICK * cell[0] + self._arrival_phase(way)
                end = max(start, int(ends[way][cell]))
                cells = [(column, cell), *readers.get((way, cell), [])]
                if (way, cell) in readers:
                    read[cell[1]].append(_Interval(start, end, cells))
                elif way[0] == "loss":
                    column[cell] = DISCARD
                else:
                    unread[cell[1]].append(_Interval(start, end, cells))
        num_slots = self._per_stage(read)
        if num_slots == 1:
            for stage in stages:
                _discard_during(read[stage], unread[stage])
        else:
            num_slots = self._per_stage({stage: read[stage] + unread[stage] for stage in stages})
        arrivals = tuple(Arrival(*way, column) for way, column in columns.items())  # type: ignore[arg-type]
        return arrivals, num_slots

    def _port(self, kind: str) -> str:
        return "X" if self.mixed else "F" if kind == "F" else "B"

    def _directions(self) -> list[tuple[str, int]]:
        """Return every message source (`Arrival.port`) together with the ring direction of its
        messages.
        """
        ring = self.ring
        directions = set()
        for kind in {action.kind for action, _ in self.at} - {"W"}:
            for chunk in range(ring.num_chunks - 1):
                pair = ring.locate_chunk(chunk), ring.locate_chunk(chunk + 1)
                (_, repeat), (_, other) = pair if kind == "F" else reversed(pair)
                step = ring.direction(repeat, turns=repeat != other, backward=kind != "F")
                directions.add((self._port(kind), step))
        order = sorted(directions, key=lambda way: ("FBX".index(way[0]), -way[1]))
        trains = any(action.kind != "F" for action, _ in self.at)
        return [("loss", 0), *order] if trains else order

    def _arrival_phase(self, way: tuple[str, int]) -> int:
        """Return the phase of a tick in which arriving messages are written."""
        port, step = way
        if port == "loss":
            return _LOSS_MIXED if self.mixed else _LOSS
        # The output of a B slot arrives in the next tick, before the B slot of that tick.
        return _EARLY if port == "B" and step and not self.delayed else _END

    def _messages(self) -> Iterator[tuple[tuple[str, int], _Cell, _Cell, ActionKind]]:
        """Yield (direction, arrival cell, reader cell, reader's slot type) for every message."""
        ring = self.ring
        for (action, stage), (tick, _) in self.at.items():
            kind, microbatch, repeat = action
            if kind == "W":
                continue
            target = (
                ring.next_chunk(stage, repeat)
                if kind == "F"
                else ring.previous_chunk(stage, repeat)
            )
            if target is None:
                if kind == "F":
                    reader = self.at.get((Action(self.backward, microbatch, repeat), stage))
                    if reader is not None:
                        yield ("loss", 0), (tick + self.mixed, stage), reader, self.backward
                continue
            receiver, received_repeat = target
            step = ring.direction(repeat, turns=repeat != received_repeat, backward=kind != "F")
            way = (self._port(kind), step)
            late = step != 0 and (self.delayed or (kind == "B"))
            reader = self.at[Action(kind, microbatch, received_repeat), receiver]
            yield way, (tick + late, receiver), reader, kind


# Weight prefetch window.


class _Run(NamedTuple):
    """Consecutive work of a stage on the chunk of one repeat, from tick `first` to `last`."""

    repeat: int
    first: int
    last: int
    column: np.ndarray
    stage: int


def _runs(slots: SlotColumns, column: np.ndarray) -> list[list[_Run]]:
    """Return each stage's maximal runs of consecutive work on one repeat, in slots of one type."""
    runs_of_stages: list[list[_Run]] = []
    for stage in range(column.shape[1]):
        runs: list[_Run] = []
        for tick in np.flatnonzero(slots.active[:, stage]):
            repeat = int(slots.repeat[tick, stage])
            if runs and runs[-1].repeat == repeat:
                runs[-1] = runs[-1]._replace(last=int(tick))
            else:
                runs.append(_Run(repeat, int(tick), int(tick), column, stage))
        runs_of_stages.append(runs)
    return runs_of_stages


def _align_runs(runs: list[list[_Run]]) -> list[list[_Run]]:
    """Return one list per event; list e contains the e-th run of every stage."""
    longest = max(map(len, runs), default=0)
    return [[per_stage[e] for per_stage in runs if e < len(per_stage)] for e in range(longest)]


def _merge_events(events: list[list[_Run]]) -> list[list[_Run]]:
    """Merge consecutive events that need the same chunks."""
    merged: list[list[_Run]] = []
    for runs in events:
        wanted = {(run.stage, run.repeat) for run in runs}
        if merged and {(run.stage, run.repeat) for run in merged[-1]} == wanted:
            merged[-1] = merged[-1] + runs
        else:
            merged.append(runs)
    return merged


def _weight_window(
    ring: Ring, slots: dict[str, SlotColumns], num_ticks: int, *, mixed: bool
) -> WeightWindow:
    """Return gathers and reductions, which occur in the same ticks on all stages."""
    empty = np.zeros((0, ring.num_stages), np.int32)
    if ring.num_repeats <= WINDOW_REPEATS:
        none = np.zeros(0, np.int32)
        return WeightWindow(none, empty, empty, 0, none, empty, empty, 0)
    forward = _align_runs(_runs(slots["F"], slots["F"].window))
    backward = _align_runs(_runs(slots["I"], slots["I"].window))
    events = _merge_events(
        sorted(forward + backward, key=lambda runs: min(run.first for run in runs))
    )
    gather_tick = np.array([min(run.first for run in runs) for runs in events], np.int32)
    starts = [_PHASES_PER_TICK * int(tick) - 1 for tick in gather_tick]
    ends = [[_PHASES_PER_TICK * run.last + _BACKWARD for run in runs] for runs in events]
    gathered = _event_slots(ring, events, starts, ends)

    trained = slots["W" if mixed else "I"]
    events = _align_runs(_runs(trained, trained.gradient))
    # Delay each reduction until the next gather, so that both are issued together.
    boundaries = np.append(gather_tick, num_ticks)
    done = [1 + max(run.last for run in runs) for runs in events]
    reduce_tick = boundaries[np.searchsorted(boundaries, done)].astype(np.int32)
    ends = [
        [_PHASES_PER_TICK * int(tick) - 1] * len(runs)
        for tick, runs in zip(reduce_tick, events, strict=True)
    ]
    starts = [min((_PHASES_PER_TICK * run.first for run in runs), default=0) for runs in events]
    reduced = _event_slots(ring, events, starts, ends)
    return WeightWindow(gather_tick, *gathered, reduce_tick, *reduced)


def _event_slots(
    ring: Ring, events: list[list[_Run]], starts: list[int], ends: list[list[int]]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the repeat and the slot of each event on each stage, and the number of slots."""
    repeat = np.zeros((len(events), ring.num_stages), np.int32)
    slot = np.zeros_like(repeat)
    found: dict[int, list[_Interval]] = {stage: [] for stage in range(ring.num_stages)}
    for event, runs in enumerate(events):
        for stage in range(ring.num_stages):
            cells = [(slot, (event, stage))]
            last = starts[event]
            for run, end in zip(runs, ends[event], strict=True):
                if run.stage == stage:
                    repeat[event, stage] = run.repeat
                    last = max(last, end)
                    ticks = range(run.first, run.last + 1)
                    cells += [(run.column, (tick, stage)) for tick in ticks]
            found[stage].append(_Interval(starts[event], last, cells))
    return repeat, slot, max(_colour(intervals) for intervals in found.values())


# Prologue layers.


def _prologue_rounds(ring: Ring, entering: np.ndarray, returning: np.ndarray) -> PrologueRounds:
    """Return the prologue rounds for the microbatches that enter and return in each tick `[K]`."""
    forward, backward = (np.full(len(entering), IDLE, np.int32) for _ in range(2))
    forward_slot, backward_slot = np.zeros_like(forward), np.zeros_like(backward)

    def by_round(microbatches: np.ndarray) -> dict[int, list[int]]:
        ticks: dict[int, list[int]] = {}
        for tick in np.flatnonzero(microbatches != IDLE).tolist():
            ticks.setdefault(int(microbatches[tick]) // ring.num_stages, []).append(tick)
        return ticks

    back = by_round(returning)
    found = []
    for number, ticks in by_round(entering).items():
        forward[ticks[0]] = number
        start, end = (_PHASES_PER_TICK * tick + _FORWARD for tick in (ticks[0], ticks[-1]))
        cells = [(forward_slot, tick) for tick in ticks]
        if number in back:
            backward[back[number][-1]] = number
            end = _PHASES_PER_TICK * back[number][-1] + _END
            cells += [(backward_slot, tick) for tick in back[number]]
        found.append(_Interval(start, end, cells))
    return PrologueRounds(forward, forward_slot, backward, backward_slot, _colour(found))
