"""Placed schedules: int32 arrays of each stage's action and buffer slots in each tick.

Stages advance in ticks. There are two kinds of schedules:

- *typed* slots: a tick is a forward slot, the loss head, and a slot for whole backwards. Slots of
  one kind cost the same on every stage, so no stage waits for a slower neighbour. A message travels
  while the other kind of slot computes.
- *mixed* slots: a tick is one action of any kind on each stage: a forward (F), the gradient of a
  chunk's input (I), or that of its weights (W). Weight gradients fill what would be idle time.

A message needs one tick to the neighbour, or two when the schedule is *delayed*, so that it can
travel behind a whole tick of work. `placement` makes tables, `verify` proves them, `draw` shows
them, and `executor` runs them. Nothing here imports jax.

The cut of the layer stack into chunks, as even as the layers' costs allow. No jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from maxpipe.io.formatting import pluralize

IDLE = -1

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; input gradients; weight gradients."""


class Action(NamedTuple):
    """One chunk's work of one kind for one microbatch."""

    kind: ActionKind
    microbatch: int
    repeat: int


Orders = list[list[Action]]
"""For each stage, its actions in the order in which it computes them."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring: the stage of each chunk of the network, and the direction of messages.

    In a `loop` every repeat runs over the stages in the same direction. In a `v` the direction
    alternates: where one repeat ends the next begins, on the same stage.
    """

    num_stages: int
    num_repeats: int
    shape: Literal["loop", "v"] = "loop"

    @property
    def num_chunks(self) -> int:
        """Chunks over all stages and repeats."""
        return self.num_stages * self.num_repeats

    def chunk(self, stage: int, repeat: int) -> int:
        """Position in the network of the chunk that the stage runs in this repeat."""
        turned = self.shape == "v" and repeat % 2 == 1
        return repeat * self.num_stages + (self.num_stages - 1 - stage if turned else stage)

    def locate_chunk(self, chunk: int) -> tuple[int, int]:
        """(stage, repeat) that runs the chunk."""
        repeat, position = divmod(chunk, self.num_stages)
        turned = self.shape == "v" and repeat % 2 == 1
        return (self.num_stages - 1 - position if turned else position), repeat

    def next_chunk(self, stage: int, repeat: int) -> tuple[int, int] | None:
        """(stage, repeat) that takes this chunk's output, or None after the last chunk."""
        chunk = self.chunk(stage, repeat) + 1
        return self.locate_chunk(chunk) if chunk < self.num_chunks else None

    def previous_chunk(self, stage: int, repeat: int) -> tuple[int, int] | None:
        """(stage, repeat) whose output this chunk takes, or None for the first chunk."""
        chunk = self.chunk(stage, repeat) - 1
        return self.locate_chunk(chunk) if chunk >= 0 else None

    def direction(self, repeat: int, *, turns: bool, backward: bool) -> int:
        """Direction of a message: +1 to the next stage of the ring, -1 to the previous, 0 stays.

        `repeat` is the sender's; `turns`: the receiver's differs.
        """
        if self.shape == "v" and turns:
            return 0
        up = self.shape == "loop" or repeat % 2 == 0
        return +1 if up != backward else -1

    @property
    def last_stage(self) -> int:
        """The stage on which the network ends. It begins on stage 0."""
        return self.locate_chunk(self.num_chunks - 1)[0]


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The slots of one kind as arrays `[K, P]`; buffer columns are always legal indices."""

    microbatch: np.ndarray
    """Microbatch computed, or `IDLE`."""
    repeat: np.ndarray
    """Repeat computed (0 when idle)."""
    inbox: np.ndarray
    """Inbox slot of F's input and of B's or I's cotangent."""
    stash: np.ndarray
    """Stash slot of the activations that F saves for B or I."""
    deferred: np.ndarray
    """Slot of W's inputs, which I writes."""
    window: np.ndarray
    """Slot of the chunk's gathered weights for F, B and I, when chunks are gathered by visit."""
    gradient: np.ndarray
    """Slot of the chunk's gradient accumulator for B or W, when chunks are gathered by visit."""

    @property
    def active(self) -> np.ndarray:
        """bool `[K, P]`: there is work in the slot."""
        return self.microbatch != IDLE

    @property
    def at_first_chunk(self) -> np.ndarray:
        """`[K]`: microbatch that is in the network's first chunk in this tick, or `IDLE`."""
        return np.where(self.repeat[:, 0] == 0, self.microbatch[:, 0], IDLE)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Messages from one direction, written to the inbox in every tick.

    Where a tick's message carries nothing, `slot` names an inbox slot that is free then.
    """

    port: Literal["F", "B", "X", "loss"]
    """The source: outputs of forwards, of backwards, of either (mixed), or of the loss head."""
    direction: int
    """Direction on the ring: +1, -1, or 0 for a message that stays on its stage."""
    slot: np.ndarray
    """`[K, P]`: inbox slot to which the stage writes the message."""


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """When whole chunks are gathered into the window, and their gradients reduced out of it.

    Event e gathers `gather_repeat[e, p]` on stage p, all stages at once, while the ticks before
    `gather_tick[e]` run; from that tick on it may be used. Gradients of event e are complete
    before `reduce_tick[e]`.
    """

    gather_tick: np.ndarray
    gather_repeat: np.ndarray
    gather_slot: np.ndarray
    num_chunk_slots: int
    reduce_tick: np.ndarray
    reduce_repeat: np.ndarray
    reduce_slot: np.ndarray
    num_gradient_slots: int


@dataclass(frozen=True, slots=True)
class PrologueRounds:
    """When layers outside the ring run, if there are any; arrays `[K]`, the same for all stages.

    They run for a round of P microbatches at a time: of round i, stage p has microbatch i*P + p.
    The round goes forward when the first of its microbatches enters the ring, and backward when the
    last of them is back. In between each stage keeps its part of the round in one slot.
    """

    forward: np.ndarray
    """Round that goes forward before this tick's microbatch enters, or `IDLE`."""
    forward_slot: np.ndarray
    """Slot of the round to which the entering microbatch belongs."""
    backward: np.ndarray
    """Round that goes backward after this tick's microbatch is back, or `IDLE`."""
    backward_slot: np.ndarray
    """Slot of the round to which the microbatch that is back belongs."""
    num_slots: int


@dataclass(frozen=True)
class Schedule:
    """A placed schedule: all that the engine needs of time and buffers."""

    name: str
    ring: Ring
    num_microbatches: int
    group: int
    """Microbatches a stage runs back to back before the next repeat."""
    mixed: bool
    """One action of any kind per tick, with F, I and W; else typed F and B slots."""
    delayed: bool
    """A message takes two ticks instead of one."""
    trains: bool
    """Has a backward; else forward only, for evaluation."""
    forward: SlotColumns
    backward: SlotColumns
    """B when typed, I when mixed."""
    weight: SlotColumns
    """W when mixed; else never active."""
    arrivals: tuple[Arrival, ...]
    num_inbox: int
    num_stash: int
    num_deferred: int
    weight_window: WeightWindow
    prologue: PrologueRounds

    @property
    def num_stages(self) -> int:
        """Number of stages P."""
        return self.ring.num_stages

    @property
    def num_repeats(self) -> int:
        """Number of repeats R."""
        return self.ring.num_repeats

    @property
    def num_ticks(self) -> int:
        """Number of ticks K."""
        return self.forward.microbatch.shape[0]

    @property
    def kinds(self) -> tuple[tuple[ActionKind, SlotColumns], ...]:
        """The kinds of slots that this schedule has, in the order of a tick."""
        if not self.trains:
            return (("F", self.forward),)
        if self.mixed:
            return (("F", self.forward), ("I", self.backward), ("W", self.weight))
        return (("F", self.forward), ("B", self.backward))

    @property
    def embed_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch that enters the network in this tick, or `IDLE`."""
        return self.forward.at_first_chunk

    @cached_property
    def loss_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch that the loss head takes in this tick, or `IDLE`.

        In mixed ticks the head takes the outputs of the tick before: all stages meet at the head,
        and at the start of a tick no stage waits for another stage's slot.
        """
        stage = self.ring.last_stage
        last = self.forward.repeat[:, stage] == self.num_repeats - 1
        leaving = np.where(last, self.forward.microbatch[:, stage], IDLE)
        return np.concatenate([[IDLE], leaving[:-1]]) if self.mixed else leaving

    @property
    def embed_grad_microbatch(self) -> np.ndarray:
        """`[K]`: microbatch whose gradient reaches the embedding in this tick, or `IDLE`."""
        return self.backward.at_first_chunk

    def tick_costs(self, costs: Costs) -> np.ndarray:
        """`[K]`: time of each tick. Stages advance in lockstep: the slowest one counts."""
        spent = [costs.of(kind) * slots.active for kind, slots in self.kinds]
        if self.mixed:
            return np.sum(spent, axis=0).max(axis=1)
        return np.sum([kind.max(axis=1) for kind in spent], axis=0)

    def describe_sizes(self) -> str:
        """`4 stages x 2 repeats`."""
        return f"{pluralize(self.num_stages, 'stage')} x {pluralize(self.num_repeats, 'repeat')}"

    def idle_fraction(self, costs: Costs | None = None) -> float:
        """Share of the step in which a stage waits."""
        costs = costs or Costs()
        total = float(self.tick_costs(costs).sum())
        work = self.num_microbatches * self.num_repeats
        done = work * (costs.forward + (costs.backward if self.trains else 0.0))
        return 1.0 - done / total if total else 0.0

    def stash_depth(self) -> np.ndarray:
        """`[K, P]`: chunks whose activations a stage holds while it computes tick k.

        Inputs of W, which I writes, count as well: they are of the same size.
        """
        written = np.cumsum(self.forward.active, axis=0)
        freed = np.cumsum((self.weight if self.mixed else self.backward).active, axis=0)
        return written - np.concatenate([np.zeros_like(freed[:1]), freed[:-1]])


class Costs(NamedTuple):
    """Time of one chunk's slot of each kind, in any unit; a whole backward is I and W."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def backward(self) -> float:
        """Time of a whole backward."""
        return self.input + self.weight

    def of(self, kind: ActionKind) -> float:
        """Time of a slot of this kind."""
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[kind]


def balance_layers(
    costs: Sequence[float], num_chunks: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Layers of each chunk, at least one, such that the costliest chunk is as cheap as possible.

    `costs` are those of the layers; `first` and `last` are added to the first and the last chunk,
    for an embedding and a loss head that one stage does alone. Among equally good cuts the most
    even one is taken, longer chunks first: stages advance in lockstep, so long chunks should meet.

    Source: dynamic programming over contiguous cuts, as in Alpa (arXiv:2201.12023).
    """
    if not first and not last and min(costs, default=0.0) == max(costs, default=0.0):
        size, longer = divmod(len(costs), num_chunks)
        return (size + 1,) * longer + (size,) * (num_chunks - longer)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    ends = np.zeros(num_chunks)
    ends[0] += first
    ends[-1] += last
    points = np.arange(len(total))
    # Of the layers from one point to a later one; to any other point there is no chunk.
    spans = np.where(points[:, None] > points, total[:, None] - total, np.inf)

    def best(limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Of the first n layers in k chunks: the worst chunk, or the squares when limited."""
        value = np.full((num_chunks + 1, len(total)), np.inf)
        taken = np.zeros(value.shape, np.int32)
        value[0, 0] = 0.0
        for chunk in range(1, num_chunks + 1):
            before, cost = value[chunk - 1], spans + ends[chunk - 1]
            if np.isinf(limit):
                found = np.maximum(before, cost)
            else:
                found = np.where(cost <= limit * (1 + 1e-9), before + cost**2, np.inf)
            # Of equals the last: the shortest last chunk, so the longer ones come first.
            start = points[-1] - np.argmin(found[:, ::-1], axis=1)
            value[chunk], taken[chunk] = found[points, start], points - start
        return value, taken

    limit = best(np.inf)[0][-1, -1]
    taken = best(float(limit))[1]
    sizes, end = [], len(costs)
    for chunk in range(num_chunks, 0, -1):
        sizes.append(int(taken[chunk, end]))
        end -= sizes[-1]
    return tuple(reversed(sizes))
