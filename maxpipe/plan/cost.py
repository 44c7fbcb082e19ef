"""Predicted time of a step: the work of its ticks, and the traffic that nothing overlaps.

Stages advance in lockstep through the ticks of the table: in each tick the busiest one counts, or
all of them where they share cores. Messages travel behind the work of a tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from operator import attrgetter

import numpy as np

from maxpipe.hardware import MIB, Hardware
from maxpipe.models.count import train_flops_per_token
from maxpipe.plan.cost_model import CostModel
from maxpipe.plan.memory import Memory, memory, state
from maxpipe.plan.sizes import Sizes
from maxpipe.plan.traffic import HeadTraffic, at_the_end, joined, traffic, turns
from maxpipe.schedule.table import Schedule, Slots


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on one device."""

    parts: dict[str, float]
    """By cause; they add up to the step."""
    model_flops: float
    """What the model needs of one device in a step."""
    peak_flops: float
    traffic: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes that a device sends in a step, by axes and link."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311)."""
        return self.model_flops / self.seconds / self.peak_flops


def cost(sizes: Sizes, schedule: Schedule, hardware: Hardware, held: Memory | None = None) -> Cost:
    """What a step of this run costs; `held` is its memory, where that is known already."""
    sizes = sizes.on(hardware.platform)
    model = CostModel(sizes, hardware)
    ticks, behind = _ticks(model, schedule)
    hop = model.hop if sizes.stages > 1 else 0.0
    exposed = np.maximum(0.0, hop - behind * model.hides)
    work = float(ticks.sum())
    ideal = min(work, _ideal(model, schedule))
    exchanged = min(ideal, _exchanged(model, schedule))
    loss = np.asarray(schedule.loss_microbatch) >= 0
    train = sizes.config.train
    parts = {
        "layers": ideal - exchanged,
        "exchange": exchanged,
        "bubble": work - ideal,
        "outside": _outside(model, schedule),
        "head": float(loss.sum()) * model.head,
        "messages": float(exposed.sum()),
        "gathers": _gathers(model, schedule),
        "reductions": _reductions(model, schedule),
        "update": model.contention * _update(model),
        "ticks": schedule.num_ticks * hardware.tick_us * 1e-6,
        "memory": _fresh(model, schedule, held),
    }
    tokens = train.batch_size * train.sequence_length
    needed = train_flops_per_token(sizes.model, train.sequence_length) * tokens
    return Cost(
        {name: seconds for name, seconds in parts.items() if seconds},
        needed / sizes.num_devices,
        hardware.flops,
        traffic(sizes, schedule, model.recomputed),
    )


def _ticks(model: CostModel, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """`[K]`: seconds of layers in each tick, and of what hides a message."""
    sizes, computes = model.sizes, model.sizes.config.pipeline.idle == "compute"
    total = np.zeros(schedule.num_ticks)
    everyone = np.zeros((schedule.num_ticks, sizes.stages))
    for action, slots in schedule.kinds:
        spent = _in_slots(model, schedule, action, slots, computes=computes)
        everyone += spent
        if not schedule.mixed:
            total += spent.max(axis=1)
    if schedule.mixed:
        total = everyone.max(axis=1)
    if shared := model.hardware.shared_by:
        everyone = everyone.sum(axis=1) * sizes.num_devices / sizes.stages / shared
        total = np.maximum(total, everyone)
    # A message has the next slot to travel behind, with typed ticks half of the tick.
    return total, total if schedule.mixed or schedule.delayed else total / 2


def _in_slots(
    model: CostModel, schedule: Schedule, action: str, slots: Slots, *, computes: bool
) -> np.ndarray:
    """`[K, P]`: seconds of each stage's layers in slots of one kind.

    Stages that compute where they idle run, in each tick in which one has a slot of the kind, what
    any of them has at each place of its chunk.
    """
    sizes, ring = model.sizes, schedule.ring
    kinds, stages = list(sizes.ring), range(sizes.stages)
    chunk_at = np.array([[ring.chunk(p, r) for p in stages] for r in range(sizes.repeats)])
    here = chunk_at[np.maximum(slots.repeat, 0), stages]
    if not computes:
        seconds = np.array([model.slots(action, chunk) for chunk in sizes.chunks])
        return np.where(slots.active, seconds[here], 0.0)
    seconds = np.array([model.layers[kind].slot(action) for kind in kinds])
    ends = accumulate(sizes.cut, initial=sizes.config.pipeline.layers_outside)
    layers = [sizes.model.layers[start:end] for start, end in pairwise(ends)]
    chunks = np.array(list(zip_longest(*layers))).T
    run = slots.active[:, :, None, None] & (chunks[here][..., None] == np.array(kinds))
    if len(kinds) == 1:  # padded chunks, too, are as long as the longest
        run |= slots.active[:, :, None, None]
    return np.broadcast_to((run.any(axis=1).sum(axis=1) @ seconds)[:, None], slots.active.shape)


def _ideal(model: CostModel, schedule: Schedule) -> float:
    """Seconds of layers if no stage ever waited."""
    sizes = model.sizes
    layers = sum(model.slots(action, sizes.ring) for action, _ in schedule.kinds)
    return sizes.microbatches * layers / sizes.stages * model.contention


def _exchanged(model: CostModel, schedule: Schedule) -> float:
    """Of these, seconds of what tokens exchange between devices."""
    actions = [action for action, _ in schedule.kinds]
    exchanged = lambda layer: sum(map(layer.exchanged, actions))  # noqa: E731
    layers = model.total(model.sizes.ring, exchanged)
    return model.sizes.microbatches * layers / model.sizes.stages * model.contention


def _outside(model: CostModel, schedule: Schedule) -> float:
    """Seconds of the layers outside the ring: all stages run them at once, a round at a time."""
    rounds, layers = schedule.outside, model.sizes.outside
    columns = (("F", rounds.forward), ("B", rounds.backward))
    return model.contention * sum(
        np.count_nonzero(column >= 0) * model.slots(action, layers) for action, column in columns
    )


def _gathers(model: CostModel, schedule: Schedule) -> float:
    """Of weights, where that is not done layer by layer."""
    if model.sizes.config.pipeline.weight_gather == "iteration":
        return 0.0
    layers = model.total(turns(model.sizes, schedule).gathered, attrgetter("gather"))
    return layers + model.moves(HeadTraffic(model.sizes).gathered)


def _reductions(model: CostModel, schedule: Schedule) -> float:
    """Of gradients, to shards where it is not done layer by layer, and over what they leave."""
    sizes, found = model.sizes, model.moves(joined(at_the_end(model.sizes)))
    if sizes.config.pipeline.weight_gather == "iteration":
        return found
    found += model.total(turns(sizes, schedule).scattered, attrgetter("scatter"))
    return found + model.scatters(HeadTraffic(sizes).scattered)


def _update(model: CostModel) -> float:
    """The optimizer reads and writes the state of what is trained, and reads gradients."""
    moved = 2.4 * state(model.sizes.trained)["state"]
    return moved / (model.hardware.memory_gb_per_second * 1e9)


def _fresh(model: CostModel, schedule: Schedule, held: Memory | None) -> float:
    """To be given the memory of a step, on devices that give it back after each."""
    rate = model.hardware.fresh_gb_per_second
    if not rate:
        return 0.0
    held = held or memory(model.sizes, schedule, platform=model.hardware.platform)
    share, kept = 1.0, model.hardware.fresh_from_mib * MIB
    if kept:
        share = min(1.0, max(0.0, held.temporary / kept - 1.0)) ** 2
    return share * held.temporary / (rate * 1e9)
