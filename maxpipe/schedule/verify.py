"""Statically verify, in milliseconds and without JAX, that a schedule executes correctly.

The table is simulated on strings, using the engine's rules for messages and buffers. Every read
must return exactly the value that the unpipelined network has at that point. A violated dependency,
a message in the wrong slot, an overwritten live slot or a read from a dead slot results in a wrong
string. The error message then shows the part of the timeline around the offending cell.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxpipe.errors import Code, MaxpipeError
from maxpipe.schedule import draw
from maxpipe.schedule.table import DISCARD, IDLE, ActionKind, Schedule, SlotColumns

IDLE_TOLERANCE = 1e-3
"""Largest allowed difference between a schedule's idle fraction and its closed form."""


class ScheduleError(MaxpipeError):
    """Raised if a schedule's table does not execute the network correctly."""

    def __init__(self, schedule: Schedule, tick: int, stage: int, kind: str, reason: str):
        self.tick, self.stage, self.kind = tick, stage, kind
        where = f"schedule {schedule.name}: {kind} slot of stage {stage} in tick {tick}"
        grid = draw.draw_timeline(schedule, mark=(tick, stage, kind))
        super().__init__(Code.SCHED_INVALID, f"{where}: {reason}\n{grid}")


def verify(schedule: Schedule, *, idle: float | None = None) -> None:
    """Check the full table. `idle` is the closed form of the table's idle fraction, if known.

    Raises:
        ScheduleError: a cell is wrong. The message shows the first incorrect cell in the timeline.
    """
    _check_columns(schedule)
    _check_weight_window(schedule)
    _check_kinds(schedule)
    _check_completeness(schedule)
    _Simulation(schedule).run()
    _PrologueSimulation(schedule).run()
    found = schedule.idle_fraction()
    if idle is not None and abs(found - idle) > IDLE_TOLERANCE:
        reason = f"the table is idle {found:.2%} of the time, but the closed form gives {idle:.2%}."
        raise ScheduleError(schedule, 0, 0, "F", reason)


def _check_columns(schedule: Schedule) -> None:
    """Check that every index is within the declared size of its buffer."""
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
    for kind, slots in schedule.kinds:
        for column, (low, high) in bounds.items():
            _check_range(schedule, kind, column, getattr(slots, column), low, high)
    for arrival in schedule.arrivals:
        kind = "F" if arrival.port == "F" else schedule.kinds[-1][0]
        _check_range(schedule, kind, "arrival", arrival.slot, DISCARD, schedule.num_inbox)


def _check_range(
    schedule: Schedule, kind: str, column: str, array: np.ndarray, low: int, high: int
) -> None:
    wrong = np.argwhere((array < low) | (array >= high))
    if len(wrong):
        tick, stage = map(int, wrong[0])
        reason = f"{column} {int(array[tick, stage])} must be from {low} to {high - 1}."
        raise ScheduleError(schedule, tick, stage, kind, reason)


def _check_weight_window(schedule: Schedule) -> None:
    """Check that gathers and reductions have valid indices and use every declared window slot."""
    visits, last = schedule.weight_window, schedule.num_ticks - 1
    for column, high in (
        ("gather_tick", last),
        ("gather_repeat", schedule.num_repeats - 1),
        ("gather_slot", visits.num_chunk_slots - 1),
        ("reduce_tick", last + 1),
        ("reduce_repeat", schedule.num_repeats - 1),
        ("reduce_slot", visits.num_gradient_slots - 1),
    ):
        array = getattr(visits, column)
        wrong = np.argwhere((array < 0) | (array > high))
        if len(wrong):
            event, *stage = map(int, wrong[0])
            when = getattr(visits, f"{column.partition('_')[0]}_tick")[event]
            tick = min(max(0, int(when)), last)
            reason = f"{column} {int(array[tuple(wrong[0])])} must be from 0 to {high}."
            raise ScheduleError(schedule, tick, sum(stage), schedule.kinds[-1][0], reason)
    for buffer, used, declared in (
        ("window", visits.gather_slot, visits.num_chunk_slots),
        ("gradient", visits.reduce_slot, visits.num_gradient_slots),
    ):
        num_slots = int(used.max(initial=-1)) + 1
        if num_slots != declared:
            reason = f"{buffer} has {declared} slots but uses {num_slots}."
            raise ScheduleError(schedule, 0, 0, "F", reason)


def _check_kinds(schedule: Schedule) -> None:
    """Check that work is assigned only to slot types that exist, and that mixed ticks contain at
    most one action.
    """
    kinds = dict(schedule.kinds)
    last = schedule.kinds[-1][0]
    if schedule.mixed and not schedule.trains:
        raise ScheduleError(
            schedule, 0, 0, "F", "a forward-only schedule must not have mixed ticks."
        )
    for kind, slots in (("backward", schedule.backward), ("weight", schedule.weight)):
        wrong = np.argwhere(slots.active)
        if len(wrong) and not any(slots is own for own in kinds.values()):
            tick, stage = map(int, wrong[0])
            raise ScheduleError(
                schedule, tick, stage, last, f"has {kind} work that the engine never runs."
            )
    if not schedule.mixed:
        return
    busy = np.sum([slots.active for slots in kinds.values()], axis=0)
    wrong = np.argwhere(busy > 1)
    if len(wrong):
        tick, stage = map(int, wrong[0])
        names = [kind for kind, slots in kinds.items() if slots.active[tick, stage]]
        reason = f"runs {' and '.join(names)} in one tick."
        raise ScheduleError(schedule, tick, stage, names[-1], reason)


def _check_completeness(schedule: Schedule) -> None:
    """Check that each stage runs each (microbatch, repeat) exactly once per slot type."""
    for kind, slots in schedule.kinds:
        for stage in range(schedule.num_stages):
            seen: dict[tuple[int, int], int] = {}
            for tick in np.flatnonzero(slots.active[:, stage]):
                item = (int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]))
                if item in seen:
                    reason = (
                        f"microbatch {item[0]}, repeat {item[1]} already ran in tick {seen[item]}."
                    )
                    raise ScheduleError(schedule, int(tick), stage, kind, reason)
                seen[item] = int(tick)
            missing = [
                (m, r)
                for m in range(schedule.num_microbatches)
                for r in range(schedule.num_repeats)
                if (m, r) not in seen
            ]
            if missing:
                reason = f"microbatch {missing[0][0]}, repeat {missing[0][1]} never runs."
                raise ScheduleError(schedule, schedule.num_ticks - 1, stage, kind, reason)


class _Message(NamedTuple):
    """A message sent by a slot, and its direction (None if there is no receiver)."""

    value: str
    direction: int | None


_EMPTY = "nothing"
_NO_MESSAGE = _Message(_EMPTY, None)
_StageMessages = list[_Message]
"""Message sent by each stage."""


class _Simulation:
    """Simulate the engine's ticks on strings instead of arrays."""

    def __init__(self, schedule: Schedule):
        stages, visits = range(schedule.num_stages), schedule.weight_window
        self.schedule = schedule
        # Reading one element is much faster from a list than from an array.
        self.arrivals = [(a.port, a.direction, a.slot.tolist()) for a in schedule.arrivals]
        self.window_ticks = {*visits.gather_tick.tolist(), *visits.reduce_tick.tolist()}
        self.inbox = [[_EMPTY] * schedule.num_inbox for _ in stages]
        self.unread: list[set[int]] = [set() for _ in stages]
        # Contents of the used slots on each stage.
        self.stash: list[dict[int, str]] = [{} for _ in stages]
        self.deferred: list[dict[int, str]] = [{} for _ in stages]
        self.window = [[_EMPTY] * visits.num_chunk_slots for _ in stages]
        # (chunk, microbatch) of every gradient that is added to each accumulator.
        self.partial: list[list[list[tuple[int, int]]]] = [
            [[] for _ in range(visits.num_gradient_slots)] for _ in stages
        ]
        # Largest number of slots used at the same time, and the tick and stage at which this
        # occurs. A buffer has at least one slot.
        none = (1, 0, 0)
        self.peaks: dict[str, tuple[int, int, int]]
        self.peaks = {"inbox": none, "stash": none, "deferred": none}

    def run(self) -> None:
        """Simulate every tick, and check that every saved value is read."""
        schedule = self.schedule
        nothing = [_NO_MESSAGE] * schedule.num_stages
        before: dict[str, _StageMessages] = {"F": nothing, "B": nothing, "X": nothing}
        for tick in range(schedule.num_ticks):
            self._refill_window(tick)
            before = self._mixed(tick, before) if schedule.mixed else self._typed(tick, before)
        self._refill_window(schedule.num_ticks)
        self._check_end()

    # A tick.

    def _typed(self, tick: int, before: dict[str, _StageMessages]) -> dict[str, _StageMessages]:
        schedule = self.schedule
        stages = range(schedule.num_stages)
        sent = {"F": [self._forward(tick, stage) for stage in stages]}
        if not schedule.delayed:
            self._deliver(tick, {"B": before["B"]}, {})
        self._deliver(tick, {}, {"loss": self._loss(tick)})
        sent["B"] = [self._backward(tick, stage, "B") for stage in stages]
        self._deliver(tick, before if schedule.delayed else {"F": sent["F"]}, sent)
        return sent

    def _mixed(self, tick: int, before: dict[str, _StageMessages]) -> dict[str, _StageMessages]:
        schedule = self.schedule
        self._deliver(tick, {}, {"loss": self._loss(tick)})
        output: _StageMessages = []
        for stage in range(schedule.num_stages):
            forward = self._forward(tick, stage)
            backward = self._backward(tick, stage, "I")
            self._weight(tick, stage)
            output.append(backward if forward is _NO_MESSAGE else forward)
        sent = {"X": output}
        self._deliver(tick, before if schedule.delayed else sent, sent)
        return sent

    def _deliver(
        self, tick: int, travelling: dict[str, _StageMessages], staying: dict[str, _StageMessages]
    ) -> None:
        """Store the messages that arrive from these ports during one phase of the tick."""
        schedule = self.schedule
        for stage in range(schedule.num_stages):
            writes: list[tuple[bool, int, str, str]] = []
            for port, step, slots in self.arrivals:
                row = (travelling if step else staying).get(port)
                if row is not None and slots[tick][stage] != DISCARD:
                    message = row[(stage - step) % schedule.num_stages]
                    writes.append(
                        (message.direction != step, slots[tick][stage], message.value, port)
                    )
            if not writes:
                continue
            used = self.unread[stage] | {slot for _, slot, _, _ in writes}
            self._count("inbox", len(used), tick, stage)
            # Process expected messages first, so that an unexpected message in the same slot is
            # detected.
            for unwanted, slot, value, port in sorted(writes):
                if slot in self.unread[stage]:
                    kind = port if port in dict(schedule.kinds) else schedule.kinds[1][0]
                    held = self.inbox[stage][slot]
                    reason = f"{value} overwrites {held} in the inbox before it is read."
                    raise ScheduleError(schedule, tick, stage, kind, reason)
                self.inbox[stage][slot] = value
                if not unwanted:
                    self.unread[stage].add(slot)

    def _loss(self, tick: int) -> _StageMessages:
        """Return the cotangents that the loss head sends to the last stage."""
        ring, microbatch = self.schedule.ring, int(self.schedule.loss_microbatch[tick])
        row = [_NO_MESSAGE] * ring.num_stages
        if microbatch != IDLE:
            row[ring.last_stage] = _Message(f"cotangent {ring.num_chunks} of {microbatch}", 0)
        return row

    # Slots.

    def _forward(self, tick: int, stage: int) -> _Message:
        slots = self.schedule.forward
        work = self._start_action("F", slots, tick, stage)
        if work is None:
            return _NO_MESSAGE
        chunk, microbatch = work
        if chunk > 0:
            self._read_inbox(slots, f"output {chunk - 1} of {microbatch}", tick, stage, "F")
        if self.schedule.trains:
            saved = f"activations {chunk} of {microbatch}"
            self._store("stash", int(slots.stash[tick, stage]), saved, tick, stage, "F")
        way = self._direction(stage, chunk, backward=False)
        return _Message(f"output {chunk} of {microbatch}", way)

    def _backward(self, tick: int, stage: int, kind: ActionKind) -> _Message:
        slots = self.schedule.backward
        work = self._start_action(kind, slots, tick, stage)
        if work is None:
            return _NO_MESSAGE
        chunk, microbatch = work
        self._read_inbox(slots, f"cotangent {chunk + 1} of {microbatch}", tick, stage, kind)
        saved = f"activations {chunk} of {microbatch}"
        self._free("stash", int(slots.stash[tick, stage]), saved, tick, stage, kind)
        if kind == "I":
            kept = f"weight work {chunk} of {microbatch}"
            self._store("deferred", int(slots.deferred[tick, stage]), kept, tick, stage, kind)
        else:
            self._add_gradient(slots, chunk, microbatch, tick, stage, kind)
        way = self._direction(stage, chunk, backward=True)
        return _Message(f"cotangent {chunk} of {microbatch}", way)

    def _weight(self, tick: int, stage: int) -> None:
        slots = self.schedule.weight
        work = self._start_action("W", slots, tick, stage)
        if work is None:
            return
        chunk, microbatch = work
        kept = f"weight work {chunk} of {microbatch}"
        self._free("deferred", int(slots.deferred[tick, stage]), kept, tick, stage, "W")
        self._add_gradient(slots, chunk, microbatch, tick, stage, "W")

    def _start_action(
        self, kind: ActionKind, slots: SlotColumns, tick: int, stage: int
    ) -> tuple[int, int] | None:
        """Return the (chunk, microbatch) of the slot, and check that the window contains the
        chunk's weights.
        """
        microbatch = int(slots.microbatch[tick, stage])
        if microbatch == IDLE:
            return None
        chunk = self.schedule.ring.chunk(stage, int(slots.repeat[tick, stage]))
        if self.window[stage] and kind != "W":
            found = self.window[stage][slots.window[tick, stage]]
            self._expect(found, f"weights of chunk {chunk}", tick, stage, kind)
        return chunk, microbatch

    def _direction(self, stage: int, chunk: int, *, backward: bool) -> int | None:
        ring = self.schedule.ring
        _, repeat = ring.locate_chunk(chunk)
        target = (ring.previous_chunk if backward else ring.next_chunk)(stage, repeat)
        if target is None:
            return None
        return ring.direction(repeat, turns=target[1] != repeat, backward=backward)

    # Buffers.

    def _expect(self, found: str, wanted: str, tick: int, stage: int, kind: ActionKind) -> None:
        if found != wanted:
            reason = f"needs {wanted} but finds {found}."
            raise ScheduleError(self.schedule, tick, stage, kind, reason)

    def _count(self, buffer: str, used: int, tick: int, stage: int) -> None:
        if used > self.peaks[buffer][0]:
            self.peaks[buffer] = (used, tick, stage)

    def _read_inbox(
        self, slots: SlotColumns, wanted: str, tick: int, stage: int, kind: ActionKind
    ) -> None:
        slot = int(slots.inbox[tick, stage])
        self._expect(self.inbox[stage][slot], wanted, tick, stage, kind)
        self.unread[stage].discard(slot)

    def _store(
        self, buffer: str, slot: int, value: str, tick: int, stage: int, kind: ActionKind
    ) -> None:
        held: dict[int, str] = getattr(self, buffer)[stage]
        self._expect(held.get(slot, _EMPTY), _EMPTY, tick, stage, kind)
        held[slot] = value
        self._count(buffer, len(held), tick, stage)

    def _free(
        self, buffer: str, slot: int, value: str, tick: int, stage: int, kind: ActionKind
    ) -> None:
        held: dict[int, str] = getattr(self, buffer)[stage]
        self._expect(held.get(slot, _EMPTY), value, tick, stage, kind)
        del held[slot]

    def _add_gradient(
        self,
        slots: SlotColumns,
        chunk: int,
        microbatch: int,
        tick: int,
        stage: int,
        kind: ActionKind,
    ) -> None:
        if self.partial[stage]:
            held = self.partial[stage][slots.gradient[tick, stage]]
            self._expect_gradients(held, chunk, tick, stage, kind)
            held.append((chunk, microbatch))

    def _expect_gradients(
        self, held: list[tuple[int, int]], chunk: int, tick: int, stage: int, kind: ActionKind
    ) -> None:
        for other, _ in held:
            wanted, found = f"gradients of chunk {chunk}", f"gradients of chunk {other}"
            self._expect(found, wanted, tick, stage, kind)

    def _refill_window(self, tick: int) -> None:
        """Simulate the reductions and gathers that are due before this tick."""
        if tick not in self.window_ticks:
            return
        schedule, visits = self.schedule, self.schedule.weight_window
        for event in np.flatnonzero(visits.reduce_tick == tick):
            for stage in range(schedule.num_stages):
                held = self.partial[stage][visits.reduce_slot[event, stage]]
                chunk = schedule.ring.chunk(stage, int(visits.reduce_repeat[event, stage]))
                last = min(tick, schedule.num_ticks - 1)
                self._expect_gradients(held, chunk, last, stage, schedule.kinds[-1][0])
                held.clear()
        for event in np.flatnonzero(visits.gather_tick == tick):
            for stage in range(schedule.num_stages):
                chunk = schedule.ring.chunk(stage, int(visits.gather_repeat[event, stage]))
                slot = visits.gather_slot[event, stage]
                self.window[stage][slot] = f"weights of chunk {chunk}"

    def _check_end(self) -> None:
        """Check that every stored value was used, and that no buffer is larger than needed."""
        schedule = self.schedule
        last, kind = schedule.num_ticks - 1, schedule.kinds[-1][0]
        for stage in range(schedule.num_stages):
            left = [*self.stash[stage].values(), *self.deferred[stage].values()]
            left += [self.inbox[stage][slot] for slot in self.unread[stage]]
            left += [
                f"the gradient of chunk {chunk}, microbatch {microbatch},"
                for held in self.partial[stage]
                for chunk, microbatch in held
            ]
            if left:
                raise ScheduleError(schedule, last, stage, kind, f"{left[0]} is never used.")
        for buffer, (needed, tick, stage) in self.peaks.items():
            declared = getattr(schedule, f"num_{buffer}")
            if declared != needed:
                reason = f"the {buffer} has {declared} slots but needs {needed}."
                raise ScheduleError(schedule, tick, stage, "F", reason)


class _PrologueSimulation:
    """Simulate the prologue layers. A slot stores the microbatches of a round from the round's
    forward pass to its backward pass.
    """

    def __init__(self, schedule: Schedule):
        self.schedule, self.rounds = schedule, schedule.prologue
        # For each slot: the round (one pass of up to P microbatches), the microbatches that have
        # not yet entered the ring, and those that have not yet returned.
        self.live_rounds: dict[int, tuple[int, set[int], set[int]]] = {}
        self.peak = (0, 0)

    def run(self) -> None:
        """Check that every microbatch enters the ring from the slot of its round and returns to
        that slot.
        """
        schedule, outside = self.schedule, self.rounds
        for column in ("forward", "forward_slot", "backward", "backward_slot"):
            is_slot = column.endswith("slot")
            array = getattr(outside, column)[:, None]
            rounds = -(-schedule.num_microbatches // schedule.num_stages)
            bounds = (0, outside.num_slots) if is_slot else (IDLE, rounds)
            _check_range(schedule, "F", f"outside {column}", array, *bounds)
        for tick in range(schedule.num_ticks):
            self._forward(tick)
            self._pass(tick, "F", int(schedule.embed_microbatch[tick]))
            if schedule.trains:
                self._pass(tick, schedule.kinds[1][0], int(schedule.embed_grad_microbatch[tick]))
                self._backward(tick)
        for number, _, _ in self.live_rounds.values():
            self._fail(schedule.num_ticks - 1, "F", f"round {number} never completes.")
        needed, tick = self.peak
        if needed != outside.num_slots:
            reason = f"rounds have {outside.num_slots} slots but need {needed}."
            self._fail(tick, "F", reason)

    def _fail(self, tick: int, kind: ActionKind, reason: str) -> None:
        raise ScheduleError(self.schedule, tick, 0, kind, f"outside the ring, {reason}")

    def _forward(self, tick: int) -> None:
        number, slot = int(self.rounds.forward[tick]), int(self.rounds.forward_slot[tick])
        if number == IDLE:
            return
        if slot in self.live_rounds:
            self._fail(tick, "F", f"round {number} overwrites round {self.live_rounds[slot][0]}.")
        stages, count = self.schedule.num_stages, self.schedule.num_microbatches
        own = set(range(number * stages, min(count, (number + 1) * stages)))
        self.live_rounds[slot] = (number, own, set(own) if self.schedule.trains else set())
        if len(self.live_rounds) > self.peak[0]:
            self.peak = (len(self.live_rounds), tick)

    def _pass(self, tick: int, kind: ActionKind, microbatch: int) -> None:
        """Record that a microbatch enters the ring, or that its cotangent has returned."""
        if microbatch == IDLE:
            return
        column = self.rounds.forward_slot if kind == "F" else self.rounds.backward_slot
        slot = int(column[tick])
        _, entering, returning = self.live_rounds.get(slot, (IDLE, set(), set()))
        waiting = entering if kind == "F" else returning - entering
        if microbatch not in waiting:
            self._fail(tick, kind, f"microbatch {microbatch} is not in slot {slot}.")
        (entering if kind == "F" else returning).discard(microbatch)
        if not self.schedule.trains and not entering:
            del self.live_rounds[slot]

    def _backward(self, tick: int) -> None:
        number, slot = int(self.rounds.backward[tick]), int(self.rounds.backward_slot[tick])
        if number == IDLE:
            return
        found, _, returning = self.live_rounds.pop(slot, (IDLE, set(), set()))
        if found != number or returning:
            kind = self.schedule.kinds[1][0]
            self._fail(
                tick,
                kind,
                f"round {number} runs backward before all of its microbatches have returned.",
            )
