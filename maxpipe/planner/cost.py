"""Predict the step time from the compute time of ticks and the exposed communication.

Stages advance in lockstep through the ticks of the schedule table. The duration of a tick is the
time of its busiest stage, or the sum over all stages if devices share cores. Messages between
stages overlap with the compute in a tick. `cost_model` predicts the times of layers and transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from operator import attrgetter

import numpy as np

from maxpipe.hardware import MIB, Hardware
from maxpipe.models.count import train_flops_per_token
from maxpipe.planner.cost_model import CostModel, LayerCost
from maxpipe.planner.memory import Memory, predict_memory, state_bytes
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.traffic import (
    HeadTraffic,
    layer_executions,
    merge_by_axes,
    step_end_traffic,
    step_traffic,
    update_host_copies,
)
from maxpipe.schedule.table import Schedule, SlotColumns


@dataclass(frozen=True)
class Cost:
    """Predicted time of one step on one device."""

    parts: dict[str, float]
    """Time in seconds, keyed by cause. The step time is the sum of these times."""
    model_flops: float
    """Model FLOPs per step on one device."""
    peak_flops: float
    traffic: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes that a device sends per step, keyed by axes and link."""

    @property
    def seconds(self) -> float:
        """Return the step time in seconds."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization (PaLM, arXiv:2204.02311)."""
        return self.model_flops / self.seconds / self.peak_flops


def predict_cost(
    sizes: Sizes, schedule: Schedule, hardware: Hardware, held: Memory | None = None
) -> Cost:
    """Predict the cost of a step. `held` is the predicted memory, if already known."""
    sizes = sizes.on_platform(hardware.platform)
    model = CostModel(sizes, hardware)
    ticks, behind = _ticks(model, schedule)
    hop = model.message_seconds if sizes.mesh.stages > 1 else 0.0
    exposed = np.maximum(0.0, hop - behind * model.overlaps)
    work = float(ticks.sum())
    ideal = min(work, _ideal(model, schedule))
    exchanged = min(ideal, _exposed_in_slots(model, schedule, LayerCost.exchange_seconds))
    hosted = min(ideal - exchanged, _exposed_in_slots(model, schedule, LayerCost.host_seconds))
    loss = np.asarray(schedule.loss_microbatch) >= 0
    train = sizes.config.train
    parts = {
        "layers": ideal - exchanged - hosted,
        "exchange": exchanged,
        "host": hosted + model.host_seconds(sum(update_host_copies(sizes))),
        "bubble": work - ideal,
        "outside": _prologue_seconds(model, schedule),
        "head": float(loss.sum()) * model.head_seconds,
        "messages": float(exposed.sum()),
        "gathers": _gathers(model, schedule),
        "reductions": _reductions(model, schedule),
        "update": model.contention * _update(model),
        "ticks": schedule.num_ticks * hardware.tick_us * 1e-6,
        "memory": _allocation_seconds(model, schedule, held),
    }
    tokens = train.batch_size * train.sequence_length
    needed = train_flops_per_token(sizes.model, train.sequence_length) * tokens
    return Cost(
        {name: seconds for name, seconds in parts.items() if seconds},
        needed / sizes.mesh.num_devices,
        hardware.flops,
        step_traffic(sizes, schedule, model.recomputed),
    )


def _ticks(model: CostModel, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return the layer time of each tick `[K]`, and the part of that time that can overlap with
    messages, in seconds.
    """
    sizes, computes = model.sizes, model.sizes.config.pipeline.idle == "compute"
    total = np.zeros(schedule.num_ticks)
    everyone = np.zeros((schedule.num_ticks, sizes.mesh.stages))
    for action, slots in schedule.kinds:
        spent = _slot_seconds(model, schedule, action, slots, computes=computes)
        everyone += spent
        if not schedule.mixed:
            total += spent.max(axis=1)
    if schedule.mixed:
        total = everyone.max(axis=1)
    if shared := model.hardware.shared_by:
        everyone = everyone.sum(axis=1) * sizes.mesh.num_devices / sizes.mesh.stages / shared
        total = np.maximum(total, everyone)
    # A transfer has a full tick to overlap with if a tick can mix forward and backward work, or if
    # forwarding is delayed by a tick. Otherwise, it has half a tick.
    return total, total if schedule.mixed or schedule.delayed else total / 2


def _slot_seconds(
    model: CostModel, schedule: Schedule, action: str, slots: SlotColumns, *, computes: bool
) -> np.ndarray:
    """Return the time in seconds `[K, P]` of each stage's layers in slots of one type.

    If `computes` is set, idle stages also compute. In every tick with a slot of this type, all
    stages then run each layer type that any stage has at the same position in its chunk.
    """
    sizes, ring = model.sizes, schedule.ring
    kinds, stages = list(sizes.layers.pipelined), range(sizes.mesh.stages)
    repeats = range(sizes.config.pipeline.repeats)
    chunk_at = np.array([[ring.chunk(p, r) for p in stages] for r in repeats])
    chunk_of_slot = chunk_at[np.maximum(slots.repeat, 0), stages]
    if not computes:
        seconds = np.array([model.pipelined_slots(action, chunk) for chunk in sizes.layers.chunks])
        return np.where(slots.active, seconds[chunk_of_slot], 0.0)
    seconds = np.array([model.layers[kind].pipelined_slot(action) for kind in kinds])
    ends = accumulate(sizes.layers.partition, initial=sizes.config.pipeline.prologue_layers)
    layers = [sizes.model.layers[start:end] for start, end in pairwise(ends)]
    chunks = np.array(list(zip_longest(*layers))).T
    run = slots.active[:, :, None, None] & (chunks[chunk_of_slot][..., None] == np.array(kinds))
    if len(kinds) == 1:  # padded chunks run as many layers as the longest chunk
        run |= slots.active[:, :, None, None]
    return np.broadcast_to((run.any(axis=1).sum(axis=1) @ seconds)[:, None], slots.active.shape)


def _ideal(model: CostModel, schedule: Schedule) -> float:
    """Return the total compute time of all layers in seconds, excluding idle time."""
    sizes = model.sizes
    layers = sum(
        model.pipelined_slots(action, sizes.layers.pipelined) for action, _ in schedule.kinds
    )
    return sizes.batch.microbatches * layers / sizes.mesh.stages * model.contention


def _exposed_in_slots(
    model: CostModel, schedule: Schedule, seconds: Callable[[LayerCost, str], float]
) -> float:
    """Return the total exposed time in seconds of one cause in all layers' slots."""
    actions = [action for action, _ in schedule.kinds]
    exposed = lambda layer: sum(seconds(layer, action) for action in actions)  # noqa: E731
    layers = model.total(model.sizes.layers.pipelined, exposed)
    return model.sizes.batch.microbatches * layers / model.sizes.mesh.stages * model.contention


def _prologue_seconds(model: CostModel, schedule: Schedule) -> float:
    """Return the time in seconds of the prologue layers, which are run by all stages in
    parallel.
    """
    rounds, layers = schedule.prologue, model.sizes.layers.prologue
    columns = (("F", rounds.forward), ("B", rounds.backward))
    return model.contention * sum(
        np.count_nonzero(column >= 0) * model.slots(action, layers) for action, column in columns
    )


def _gathers(model: CostModel, schedule: Schedule) -> float:
    """Return the time in seconds of weight gathers outside the layers' slots."""
    if model.sizes.config.pipeline.weight_gather == "iteration":
        return 0.0
    layers = model.total(layer_executions(model.sizes, schedule).gathered, attrgetter("gather"))
    return layers + model.total_send_seconds(HeadTraffic(model.sizes).gathered)


def _reductions(model: CostModel, schedule: Schedule) -> float:
    """Return the time in seconds of gradient reductions outside the layers' slots."""
    sizes = model.sizes
    seconds = model.total_send_seconds(merge_by_axes(step_end_traffic(sizes)))
    if sizes.config.pipeline.weight_gather == "iteration":
        return seconds
    seconds += model.total(layer_executions(sizes, schedule).scattered, attrgetter("scatter"))
    return seconds + model.reduce_scatter_seconds(HeadTraffic(sizes).scattered)


def _update(model: CostModel) -> float:
    """Return the time in seconds of the optimizer update, which is limited by memory bandwidth."""
    moved = 2.4 * state_bytes(model.sizes, model.sizes.trained)
    return moved / (model.hardware.memory_gb_per_second * 1e9)


def _allocation_seconds(model: CostModel, schedule: Schedule, held: Memory | None) -> float:
    """Return the time in seconds to allocate memory for a step, or 0 if memory stays allocated
    between steps.
    """
    rate = model.hardware.fresh_gb_per_second
    if not rate:
        return 0.0
    held = held or predict_memory(model.sizes, schedule, platform=model.hardware.platform)
    share, kept = 1.0, model.hardware.fresh_from_mib * MIB
    if kept:
        share = min(1.0, max(0.0, held.temporary / kept - 1.0)) ** 2
    return share * held.temporary / (rate * 1e9)
