"""Placed schedules: int32 arrays with the action and buffer slots of each stage in each tick.

Stages advance in ticks. There are two types of schedules:

- *typed* slots: a tick consists of a forward slot, the loss head, and a slot for full backward
  passes. Slots of one type cost the same on every stage, so no stage waits for a neighbor. The
  transfer of a message that one slot type sends overlaps with the slot of the other type.
- *mixed* slots: a tick is one action of any type on each stage. An action is a forward pass (F),
  the gradient of a chunk's input (I), or the gradient of a chunk's weights (W). Weight gradients
  fill ticks that would otherwise be idle.

A message needs one tick to reach the neighbor. In a *delayed* schedule, a message needs two ticks,
so that a full tick of work can hide the transfer. `placement` creates tables, `verify` checks them,
`draw` displays them, and `pipeline.engine` runs them.

`balance_layers` partitions the layers into chunks of similar cost.

This module does not import jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from maxpipe.io.formatting import pluralize

IDLE = -1
DISCARD = -1
"""Inbox slot of a message that is not stored."""

ActionKind = Literal["F", "B", "I", "W"]
"""F: forward; B: full backward; I: input gradients; W: weight gradients."""


class Action(NamedTuple):
    """Work of one type on one chunk for one microbatch."""

    kind: ActionKind
    microbatch: int
    repeat: int


Orders = list[list[Action]]
"""List of each stage's actions, in execution order."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring of stages, which determines the stage of each chunk and the direction of messages.

    In a `loop`, every repeat runs through the stages in the same direction. In a `v`, the direction
    alternates, and each repeat starts on the stage where the previous repeat ended.
    """

    num_stages: int
    num_repeats: int
    shape: Literal["loop", "v"] = "loop"

    @property
    def num_chunks(self) -> int:
        """Return the total number of chunks, over all stages and repeats."""
        return self.num_stages * self.num_repeats

    def chunk(self, stage: int, repeat: int) -> int:
        """Return the network index of the chunk that the stage runs in this repeat."""
        turned = self.shape == "v" and repeat % 2 == 1
        return repeat * self.num_stages + (self.num_stages - 1 - stage if turned else stage)

    def locate_chunk(self, chunk: int) -> tuple[int, int]:
        """Return the (stage, repeat) of a chunk."""
        repeat, position = divmod(chunk, self.num_stages)
        turned = self.shape == "v" and repeat % 2 == 1
        return (self.num_stages - 1 - position if turned else position), repeat

    def next_chunk(self, stage: int, repeat: int) -> tuple[int, int] | None:
        """Return the (stage, repeat) of the next chunk in the network; None for the last chunk."""
        chunk = self.chunk(stage, repeat) + 1
        return self.locate_chunk(chunk) if chunk < self.num_chunks else None

    def previous_chunk(self, stage: int, repeat: int) -> tuple[int, int] | None:
        """Return the (stage, repeat) of the previous chunk in the network; None for the first
        chunk.
        """
        chunk = self.chunk(stage, repeat) - 1
        return self.locate_chunk(chunk) if chunk >= 0 else None

    def direction(self, repeat: int, *, turns: bool, backward: bool) -> int:
        """Return the direction of a message: +1 to the next stage, -1 to the previous stage, 0
        within the same stage.

        `repeat` is the sender's repeat; `turns` is true if the receiver's repeat is different.
        """
        if self.shape == "v" and turns:
            return 0
        up = self.shape == "loop" or repeat % 2 == 0
        return +1 if up != backward else -1

    @property
    def last_stage(self) -> int:
        """Return the stage of the network's last chunk. The first chunk is on stage 0."""
        return self.locate_chunk(self.num_chunks - 1)[0]


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """All slots of one type in a schedule, as arrays `[K, P]`. Buffer columns contain valid indices
    even in idle slots.
    """

    microbatch: np.ndarray
    """Microbatch index, or `IDLE`."""
    repeat: np.ndarray
    """Repeat index (0 if idle)."""
    inbox: np.ndarray
    """Inbox slot that contains the input of F, or the cotangent for B or I."""
    stash: np.ndarray
    """Stash slot of the activations that F saves and B or I uses."""
    deferred: np.ndarray
    """Buffer slot in which I (input gradient) stores the inputs of W (weight gradient)."""
    window: np.ndarray
    """Window slot that contains the gathered weights of the chunk for F, B or I, if there is a
    prefetch window."""
    gradient: np.ndarray
    """Slot that contains the gradient accumulator of the chunk for B or W, if there is a prefetch
    window."""

    @property
    def active(self) -> np.ndarray:
        """Return whether each slot contains work, as a bool array `[K, P]`."""
        return self.microbatch != IDLE

    @property
    def at_first_chunk(self) -> np.ndarray:
        """Return the microbatch that the network's first chunk processes in each tick `[K]`, or
        `IDLE`.
        """
        return np.where(self.repeat[:, 0] == 0, self.microbatch[:, 0], IDLE)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Messages from one direction, written to inbox slots.

    The inbox is written in every tick. If no message arrives, `slot` is an inbox slot that is free
    at that time, or `DISCARD`.
    """

    port: Literal["F", "B", "X", "loss"]
    """Source of the messages: F slots, B slots, slots of mixed ticks (X), or the loss head."""
    direction: int
    """Direction on the ring: +1, -1, or 0 for a message from a stage to itself."""
    slot: np.ndarray
    """`[K, P]`: inbox slot in which each stage stores the message, or `DISCARD`."""

    @property
    def discards(self) -> bool:
        """Return whether a stage discards a message in any tick."""
        return bool((self.slot == DISCARD).any())


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """Ticks at which chunks are gathered into the prefetch window and gradients are reduced.

    Event e gathers one chunk on every stage at the same time. Stage p gathers its chunk of repeat
    `gather_repeat[e, p]`. The gather overlaps with the ticks before `gather_tick[e]`, and the chunk
    can be used from tick `gather_tick[e]`. The gradients of reduction e are complete before
    `reduce_tick[e]`.
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
    """Ticks at which prologue layers run, if any; arrays `[K]` that are identical on all stages.

    The layers process a round of P microbatches at a time: in round i, stage p processes microbatch
    i*P + p. A round runs forward when its first microbatch enters the ring, and backward when its
    last microbatch has returned. Between the two passes, each stage stores its microbatch of the
    round in one slot.
    """

    forward: np.ndarray
    """Round whose forward pass runs before this tick's microbatch enters, or `IDLE`."""
    forward_slot: np.ndarray
    """Slot that stores the round of the microbatch that enters the pipeline."""
    backward: np.ndarray
    """Round whose backward pass runs after this tick's microbatch has returned, or `IDLE`."""
    backward_slot: np.ndarray
    """Slot that stores the returned microbatch's round."""
    num_slots: int


@dataclass(frozen=True)
class Schedule:
    """A placed schedule: the timing and the buffer slots that the engine needs."""

    name: str
    ring: Ring
    num_microbatches: int
    group: int
    """Number of consecutive microbatches that a stage runs before the next repeat."""
    mixed: bool
    """Whether a tick is a single action of any type (F, I or W) instead of an F slot and a B
    slot."""
    delayed: bool
    """Whether a message needs two ticks instead of one."""
    trains: bool
    """Whether the schedule has backward slots. If false, the schedule is forward-only and is used
    for evaluation.
    """
    forward: SlotColumns
    backward: SlotColumns
    """B slots in typed schedules, I slots in mixed schedules."""
    weight: SlotColumns
    """W slots in mixed schedules; always idle in typed schedules."""
    arrivals: tuple[Arrival, ...]
    num_inbox: int
    num_stash: int
    num_deferred: int
    weight_window: WeightWindow
    prologue: PrologueRounds

    @property
    def num_stages(self) -> int:
        """Return the number of stages (P)."""
        return self.ring.num_stages

    @property
    def num_repeats(self) -> int:
        """Return the number of repeats (R)."""
        return self.ring.num_repeats

    @property
    def num_ticks(self) -> int:
        """Return the number of ticks (K)."""
        return self.forward.microbatch.shape[0]

    @property
    def kinds(self) -> tuple[tuple[ActionKind, SlotColumns], ...]:
        """Return the slot types of this schedule, in the order in which they run within a tick."""
        if not self.trains:
            return (("F", self.forward),)
        if self.mixed:
            return (("F", self.forward), ("I", self.backward), ("W", self.weight))
        return (("F", self.forward), ("B", self.backward))

    @property
    def embed_microbatch(self) -> np.ndarray:
        """Return the microbatch that enters the network in each tick `[K]`, or `IDLE`."""
        return self.forward.at_first_chunk

    @cached_property
    def loss_microbatch(self) -> np.ndarray:
        """Return the microbatch whose loss is computed in each tick `[K]`, or `IDLE`.

        In mixed ticks, the loss head uses the outputs of the previous tick: all stages compute the
        loss head together, so it must not depend on a slot in the same tick.
        """
        stage = self.ring.last_stage
        last = self.forward.repeat[:, stage] == self.num_repeats - 1
        leaving = np.where(last, self.forward.microbatch[:, stage], IDLE)
        return np.concatenate([[IDLE], leaving[:-1]]) if self.mixed else leaving

    @property
    def embed_grad_microbatch(self) -> np.ndarray:
        """Return the microbatch whose gradient reaches the embedding in each tick, or `IDLE`."""
        return self.backward.at_first_chunk

    def tick_costs(self, costs: Costs) -> np.ndarray:
        """Return the duration of each tick `[K]`, which is determined by the slowest stage."""
        spent = [costs.of(kind) * slots.active for kind, slots in self.kinds]
        if self.mixed:
            return np.sum(spent, axis=0).max(axis=1)
        return np.sum([kind.max(axis=1) for kind in spent], axis=0)

    def describe_sizes(self) -> str:
        """Return text that states the numbers of stages and repeats, as in `4 stages x 2
        repeats`.
        """
        return f"{pluralize(self.num_stages, 'stage')} x {pluralize(self.num_repeats, 'repeat')}"

    def idle_fraction(self, costs: Costs | None = None) -> float:
        """Return the fraction of a step during which each stage is idle."""
        costs = costs or Costs()
        total = float(self.tick_costs(costs).sum())
        work = self.num_microbatches * self.num_repeats
        busy = work * (costs.forward + (costs.backward if self.trains else 0.0))
        return 1.0 - busy / total if total else 0.0

    def stash_depth(self) -> np.ndarray:
        """Return the number of chunks with saved activations in each tick on each stage `[K, P]`.

        Deferred inputs of W are counted as saved activations, because both have the same size.
        """
        written = np.cumsum(self.forward.active, axis=0)
        freed = np.cumsum((self.weight if self.mixed else self.backward).active, axis=0)
        return written - np.concatenate([np.zeros_like(freed[:1]), freed[:-1]])

    def deferred_depth(self) -> np.ndarray:
        """Return the number of chunks whose W is deferred in each tick on each stage `[K, P]`.

        These chunks are part of `stash_depth`.
        """
        written = np.cumsum(self.backward.active, axis=0)
        freed = np.cumsum(self.weight.active, axis=0)
        return written - np.concatenate([np.zeros_like(freed[:1]), freed[:-1]])


class Costs(NamedTuple):
    """Duration of each slot type for one chunk, in any unit. A full backward pass is I plus W."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def backward(self) -> float:
        """Return the duration of a full backward pass."""
        return self.input + self.weight

    def of(self, kind: ActionKind) -> float:
        """Return the duration of a slot of this type."""
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[kind]


def balance_layers(
    costs: Sequence[float], num_chunks: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return the sizes of chunks, in layers, that minimize the cost of the most expensive chunk.

    Every chunk has at least one layer. `costs` contains the cost of each layer. `first` and `last`
    are added to the cost of the first and the last chunk, respectively, for an embedding and a loss
    head that only one stage computes. Among equally good partitions, the most even partition is
    returned, with longer chunks first. Stages advance in lockstep, so all long chunks should run at
    the same time.

    Source: dynamic programming over contiguous partitions, as in Alpa (arXiv:2201.12023).
    """
    if not first and not last and min(costs, default=0.0) == max(costs, default=0.0):
        size, longer = divmod(len(costs), num_chunks)
        return (size + 1,) * longer + (size,) * (num_chunks - longer)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    ends = np.zeros(num_chunks)
    ends[0] += first
    ends[-1] += last
    points = np.arange(len(total))
    # cost of the layers between two boundaries; infinite unless the first boundary precedes the
    # second
    spans = np.where(points[:, None] > points, total[:, None] - total, np.inf)

    def best(limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the minimum cost of dividing the first n layers into k chunks, and the size of the
        last chunk.

        This cost is the largest cost of a chunk, or the sum of squared costs if `limit` is finite.
        """
        value = np.full((num_chunks + 1, len(total)), np.inf)
        taken = np.zeros(value.shape, np.int32)
        value[0, 0] = 0.0
        for chunk in range(1, num_chunks + 1):
            before, cost = value[chunk - 1], spans + ends[chunk - 1]
            if np.isinf(limit):
                total_cost = np.maximum(before, cost)
            else:
                total_cost = np.where(cost <= limit * (1 + 1e-9), before + cost**2, np.inf)
            # Break ties in favor of the shortest last chunk, so that longer chunks come first.
            start = points[-1] - np.argmin(total_cost[:, ::-1], axis=1)
            value[chunk], taken[chunk] = total_cost[points, start], points - start
        return value, taken

    limit = best(np.inf)[0][-1, -1]
    taken = best(float(limit))[1]
    sizes, end = [], len(costs)
    for chunk in range(num_chunks, 0, -1):
        sizes.append(int(taken[chunk, end]))
        end -= sizes[-1]
    return tuple(reversed(sizes))
