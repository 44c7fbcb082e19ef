"""Static proof that a schedule computes the network, in milliseconds and without jax.

The table is replayed on strings with the engine's own rules for messages and
buffers: every read must find exactly the value that the unpipelined network would
have there. A dependency broken by one tick, a message into the wrong slot, a live
slot overwritten or a dead one read all show up as a wrong string. On failure the
error draws the grid around the bad cell.
"""

from __future__ import annotations

import numpy as np

from maxpipe.errors import MaxpipeError
from maxpipe.pipeline import draw
from maxpipe.pipeline.schedule import IDLE, Schedule, next_chunk


class ScheduleError(MaxpipeError):
    """A table that would compute something else than the network."""

    def __init__(self, schedule: Schedule, tick: int, stage: int, kind: str, reason: str):
        self.tick, self.stage, self.kind = tick, stage, kind
        place = f"schedule {schedule.name}: {kind} slot of stage {stage} in tick {tick}"
        grid = draw.text(schedule, mark=(tick, stage, kind))
        super().__init__(f"{place}: {reason}\n{grid}")


def verify(schedule: Schedule) -> None:
    """Check the whole table.

    Raises:
        ScheduleError: the first cell that is wrong, with the grid around it.
    """
    _check_columns(schedule)
    _check_completeness(schedule)
    _Replay(schedule).run()


def _check_columns(schedule: Schedule) -> None:
    """Every index within its declared buffer, and no declared slot without a use."""
    bounds = [
        ("F", "microbatch", schedule.forward.microbatch, IDLE, schedule.num_microbatches),
        ("B", "microbatch", schedule.backward.microbatch, IDLE, schedule.num_microbatches),
        ("F", "repeat", schedule.forward.repeat, 0, schedule.num_repeats),
        ("B", "repeat", schedule.backward.repeat, 0, schedule.num_repeats),
        ("F", "stash", schedule.forward.stash, 0, schedule.num_stash),
        ("B", "stash", schedule.backward.stash, 0, schedule.num_stash),
        ("F", "inbox", schedule.forward.inbox, 0, schedule.num_forward_inbox),
        ("F", "arrive", schedule.forward.arrive, 0, schedule.num_forward_inbox),
        ("B", "inbox", schedule.backward.inbox, 0, schedule.num_backward_inbox),
        ("B", "arrive", schedule.backward.arrive, 0, schedule.num_backward_inbox),
        ("B", "loss inbox", schedule.loss_inbox, 0, schedule.num_backward_inbox),
    ]
    for kind, column, array, low, high in bounds:
        wrong = np.argwhere((array < low) | (array >= high))
        if len(wrong):
            tick, stage = map(int, wrong[0])
            value = int(array[tick, stage])
            reason = f"{column} {value} must be from {low} to {high - 1}."
            raise ScheduleError(schedule, tick, stage, kind, reason)
    peaks = (
        ("stash", schedule.num_stash, schedule.forward.stash),
        ("forward inbox", schedule.num_forward_inbox, schedule.forward.arrive),
        (
            "backward inbox",
            schedule.num_backward_inbox,
            np.maximum(schedule.backward.arrive, schedule.loss_inbox),
        ),
    )
    for buffer, declared, array in peaks:
        used = int(array.max()) + 1
        if used != declared:
            reason = f"{buffer} has {declared} slots and uses {used}."
            raise ScheduleError(schedule, 0, 0, "F", reason)


def _check_completeness(schedule: Schedule) -> None:
    """Each stage computes each (microbatch, repeat) exactly once in each direction."""
    has_backward = bool(schedule.backward.active.any())
    for kind, slots in (("F", schedule.forward), ("B", schedule.backward)):
        if kind == "B" and not has_backward:
            continue
        for stage in range(schedule.num_stages):
            seen: dict[tuple[int, int], int] = {}
            for tick in np.flatnonzero(slots.active[:, stage]):
                item = (int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]))
                if item in seen:
                    reason = f"microbatch {item[0]}, repeat {item[1]} ran in tick {seen[item]}."
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


_DEAD = "nothing"


class _Replay:
    """The engine's tick on strings instead of arrays."""

    def __init__(self, schedule: Schedule):
        stages = range(schedule.num_stages)
        self.schedule = schedule
        self.stash = [[_DEAD] * schedule.num_stash for _ in stages]
        self.forward_inbox = [[_DEAD] * schedule.num_forward_inbox for _ in stages]
        self.backward_inbox = [[_DEAD] * schedule.num_backward_inbox for _ in stages]

    def run(self) -> None:
        """Replay every tick; at the end nothing that was saved may be left unread."""
        schedule = self.schedule
        sent_back = [_DEAD] * schedule.num_stages
        for tick in range(schedule.num_ticks):
            sent = [self._forward(tick, stage) for stage in range(schedule.num_stages)]
            self._loss(tick)
            for stage in range(schedule.num_stages):
                message = sent_back[(stage + 1) % schedule.num_stages]
                self.backward_inbox[stage][schedule.backward.arrive[tick, stage]] = message
            sent_back = [self._backward(tick, stage) for stage in range(schedule.num_stages)]
            for stage in range(schedule.num_stages):
                message = sent[(stage - 1) % schedule.num_stages]
                self.forward_inbox[stage][schedule.forward.arrive[tick, stage]] = message
        for stage, slots in enumerate(self.stash):
            left = [value for value in slots if value != _DEAD]
            if left:
                last = schedule.num_ticks - 1
                raise ScheduleError(schedule, last, stage, "B", f"{left[0]} is never used.")

    def _expect(self, found: str, wanted: str, tick: int, stage: int, kind: str) -> None:
        if found != wanted:
            reason = f"needs {wanted} and finds {found}."
            raise ScheduleError(self.schedule, tick, stage, kind, reason)

    def _forward(self, tick: int, stage: int) -> str:
        schedule, slots = self.schedule, self.schedule.forward
        microbatch = int(slots.microbatch[tick, stage])
        if microbatch == IDLE:
            return _DEAD
        chunk = int(slots.repeat[tick, stage]) * schedule.num_stages + stage
        if chunk > 0:
            found = self.forward_inbox[stage][slots.inbox[tick, stage]]
            self._expect(found, f"output {chunk - 1} of {microbatch}", tick, stage, "F")
        if schedule.backward.active.any():
            slot = slots.stash[tick, stage]
            self._expect(self.stash[stage][slot], _DEAD, tick, stage, "F")
            self.stash[stage][slot] = f"activations {chunk} of {microbatch}"
        return f"output {chunk} of {microbatch}"

    def _loss(self, tick: int) -> None:
        schedule = self.schedule
        microbatch = int(schedule.loss_microbatch[tick])
        last = schedule.num_stages - 1
        for stage in range(schedule.num_stages):
            chunk = schedule.num_stages * schedule.num_repeats
            wanted = stage == last and microbatch != IDLE
            value = f"cotangent {chunk} of {microbatch}" if wanted else _DEAD
            self.backward_inbox[stage][schedule.loss_inbox[tick, stage]] = value

    def _backward(self, tick: int, stage: int) -> str:
        schedule, slots = self.schedule, self.schedule.backward
        microbatch = int(slots.microbatch[tick, stage])
        if microbatch == IDLE:
            return _DEAD
        repeat = int(slots.repeat[tick, stage])
        chunk = repeat * schedule.num_stages + stage
        found = self.backward_inbox[stage][slots.inbox[tick, stage]]
        self._expect(found, f"cotangent {chunk + 1} of {microbatch}", tick, stage, "B")
        slot = slots.stash[tick, stage]
        wanted = f"activations {chunk} of {microbatch}"
        self._expect(self.stash[stage][slot], wanted, tick, stage, "B")
        self.stash[stage][slot] = _DEAD
        following = next_chunk(stage, repeat, schedule.num_stages, schedule.num_repeats)
        assert following is None or following[1] * schedule.num_stages + following[0] == chunk + 1
        return f"cotangent {chunk} of {microbatch}"
