"""Predicted time of a step: work by a roofline, and the traffic that nothing overlaps.

Stages advance in lockstep through the ticks of the table: in each tick the busiest one counts.
Messages travel behind the work of a tick; gathers behind as much of a layer as their mode
allows. The figures of devices and links are those of `configs/hardware/`, or measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from maxpipe.hardware import Hardware
from maxpipe.model.count import train_flops_per_token
from maxpipe.plan.memory import Memory, memory, state
from maxpipe.plan.sizes import BYTES, Sizes, layer_weights
from maxpipe.schedule.table import Schedule

REPLAYS = {"none": 0.0, "full": 1.0, "chunk": 2.0}
"""Forwards that a layer's backward runs again; with names that depends on the device."""
SCORE_TRAFFIC = 12
"""Moved for each pair of query and key by the softmax of plain attention and its gradient, a pass:
fitted to the TPU compiler's cycles at 2048 and 8192 tokens."""
HIDDEN = {"iteration": 0.5, "visit": 0.0, "step": 0.0}
"""Share of a layer's work behind which its gather travels."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on one device."""

    parts: dict[str, float]
    """By cause; they add up to the step."""
    model_flops: float
    """What the model needs of one device in a step."""
    peak_flops: float
    traffic: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes that a device sends in a step, by axis and link."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311)."""
        return self.model_flops / self.seconds / self.peak_flops


@dataclass(frozen=True)
class Model:
    """Times of a run's pieces on some hardware."""

    sizes: Sizes
    hardware: Hardware

    @property
    def crowd(self) -> float:
        """How much longer work takes while all devices work, because they share cores."""
        shared = self.hardware.shared_by
        return max(1.0, self.sizes.num_devices / shared) if shared else 1.0

    @property
    def hides(self) -> bool:
        """Whether traffic can travel behind work: not if the same cores do both."""
        return not self.hardware.shared_by

    # Links.

    @property
    def _size(self) -> int:
        return BYTES[self.sizes.config.model.compute_dtype]

    def link(self, axis: str) -> str:
        """`dcn` if the axis crosses slices."""
        return "dcn" if getattr(self.sizes.config.mesh, f"dcn_{axis}") > 1 else "ici"

    def move(self, axis: str, sent: float, *, rounds: int = 1) -> float:
        """Seconds to send this many bytes along an axis, from every device at once."""
        if self.sizes.axes[axis] == 1 or not sent:
            return 0.0
        hardware, dcn = self.hardware, getattr(self.sizes.config.mesh, f"dcn_{axis}")
        latency = rounds * hardware.latency_us * 1e-6
        seconds = sent / (hardware.ways * hardware.link_gb_per_second * 1e9)
        if dcn > 1:
            crossing = sent * (dcn - 1) / dcn
            seconds += crossing / (hardware.network_gb_per_second * 1e9)
            latency += rounds * hardware.network_latency_us * 1e-6
        return seconds + latency

    def _around(self, axis: str) -> float:
        """Share of an array that a device sends to gather or scatter it."""
        return 1.0 - 1.0 / self.sizes.axes[axis]

    # Work.

    def work(self, flops: float, moved: float) -> float:
        """The roofline: matmuls at the rate they reach, or bytes through memory.

        Cores that devices share do one after the other.
        """
        arithmetic = flops / (self.hardware.flops * self.hardware.matmul_efficiency)
        traffic = moved / (self.hardware.memory_gb_per_second * 1e9)
        return max(arithmetic, traffic) if self.hides else arithmetic + traffic

    @cached_property
    def forward(self) -> float:
        """One layer's forward of a microbatch, its tensor-parallel sums included."""
        return self.layer_seconds + 2 * self._tensor_sum / self.crowd

    @property
    def layer_seconds(self) -> float:
        """One layer's forward of a microbatch on a device that works alone."""
        return self.matmul_seconds + self.score_seconds

    @property
    def score_seconds(self) -> float:
        """Of that, what attention's scores take on their way through memory."""
        return SCORE_TRAFFIC * self.sizes.held_scores / (self.hardware.memory_gb_per_second * 1e9)

    @cached_property
    def matmul_seconds(self) -> float:
        """Of that, the rest."""
        sizes, model = self.sizes, self.sizes.config.model
        flops = 2.0 * sizes.tokens * sizes.layer_elements(whole=True)
        flops += 4.0 * sizes.scores * model.head_size
        moved = self._size * sizes.layer_elements(whole=True)
        moved += self._size * (8 * sizes.activation + 2 * sizes.named(("query", "gate", "up")))
        return self.work(flops, moved)

    @property
    def accumulation(self) -> float:
        """Adding a layer's gradient to the sum of the step, where no matmul hides it."""
        moved = 3 * 4.0 * self.sizes.layer_elements(whole=True)
        return 0.0 if self.hides else moved / (self.hardware.memory_gb_per_second * 1e9)

    @cached_property
    def _tensor_sum(self) -> float:
        bytes_sent = 2 * self._around("tensor") * self._size * self.sizes.activation
        return self.move("tensor", bytes_sent)

    @property
    def replays(self) -> float:
        """Forwards run again in a backward."""
        return (REPLAYS | {"names": self.hardware.names_replay})[self.sizes.config.pipeline.remat]

    def slot(self, kind: str) -> float:
        """One layer in a slot of this kind, gathers and reductions in the slot included.

        On a device that works alone: see `crowd`.
        """
        hardware = self.hardware
        inputs = (hardware.input_grad_cost + self.replays) * self.forward
        weights = hardware.weight_grad_cost * self.layer_seconds + self.accumulation
        own = {"F": self.forward, "B": inputs + weights, "I": inputs, "W": weights}[kind]
        own += self._kept(kind)
        if self.sizes.config.pipeline.weight_gather != "iteration" or self.sizes.fsdp == 1:
            return own
        gathers = {"F": 1, "B": 1, "I": 1, "W": 0}[kind]
        if self.sizes.config.pipeline.remat == "chunk" and kind in "BI":
            gathers += 1
        traffic = gathers * self.gather + (self.scatter if kind in "BW" else 0.0)
        behind = HIDDEN["iteration"] * own if self.hides else 0.0
        return own + max(0.0, traffic / self.crowd - behind)

    def _kept(self, kind: str) -> float:
        """Writing or reading what waits between slots."""
        sizes = self.sizes
        stash = 0.0 if sizes.config.pipeline.remat == "chunk" else sum(sizes.kept_bytes())
        deferred = sizes.deferred_bytes()
        moved = {"F": stash, "B": stash, "I": stash + deferred, "W": deferred}[kind]
        return moved / (self.hardware.memory_gb_per_second * 1e9)

    @cached_property
    def _layer_bytes(self) -> float:
        return self._size * self.sizes.layer_elements(whole=True) * self._around("fsdp")

    @cached_property
    def gather(self) -> float:
        """One layer's weights over fsdp."""
        return self.move("fsdp", self._layer_bytes, rounds=len(layer_weights(self._model)))

    @cached_property
    def scatter(self) -> float:
        """One layer's gradient, in float32."""
        sent = self._layer_bytes * 4 / self._size
        return self.move("fsdp", sent, rounds=len(layer_weights(self._model)))

    @property
    def _model(self):
        return self.sizes.config.model

    @cached_property
    def hop(self) -> float:
        """A message to the next stage."""
        return self.move("stage", 2.0 * self._size * self.sizes.activation, rounds=2)

    @cached_property
    def head(self) -> float:
        """Loss head of a microbatch: all stages share it."""
        sizes = self.sizes
        matrix = sizes.matrix_elements(whole=True)
        flops = 6.0 * sizes.tokens * matrix
        moved = 4.0 * 4 * sizes.tokens * matrix / self._model.d_model + 4.0 * matrix
        sums = 2 * self.move(
            "stage", 2 * self._around("stage") * self._size * sizes.activation, rounds=2
        )
        return self.crowd * self.work(flops, moved) + sums + self.embed

    @cached_property
    def embed(self) -> float:
        """Lookup of a microbatch, and its gradient."""
        message = self._size * self.sizes.activation
        once = self.move("stage", 2 * self._around("stage") * message / self.sizes.fsdp)
        return 2 * (once + self.move("fsdp", self._around("fsdp") * message))


def cost(sizes: Sizes, schedule: Schedule, hardware: Hardware, held: Memory | None = None) -> Cost:
    """What a step of this run costs; `held` is its memory, where that is known already."""
    model = Model(sizes, hardware)
    ticks, behind = _ticks(model, schedule)
    hop = model.hop if sizes.stages > 1 else 0.0
    exposed = np.maximum(0.0, hop - behind * model.hides)
    work = float(ticks.sum())
    ideal = min(work, _ideal(model, schedule))
    loss = np.asarray(schedule.loss_microbatch) >= 0
    train = sizes.config.train
    parts = {
        "layers": ideal,
        "bubble": work - ideal,
        "head": float(loss.sum()) * model.head,
        "messages": float(exposed.sum()),
        "gathers": _gathers(model, schedule),
        "reductions": _reductions(model, schedule),
        "update": model.crowd * _update(model),
        "ticks": schedule.num_ticks * hardware.tick_us * 1e-6,
        "memory": _fresh(model, schedule, held),
    }
    tokens = train.batch_size * train.sequence_length
    needed = train_flops_per_token(sizes.config.model, train.sequence_length) * tokens
    return Cost(
        {name: seconds for name, seconds in parts.items() if seconds},
        needed / sizes.num_devices,
        hardware.flops,
        traffic(model, schedule),
    )


def _ticks(model: Model, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """`[K]`: seconds of layers in each tick, and of what hides a message."""
    sizes = model.sizes
    layers = np.array(sizes.cut)
    ring = schedule.ring
    chunk = np.array(
        [[ring.chunk(p, r) for p in range(sizes.stages)] for r in range(sizes.repeats)]
    )
    total = np.zeros(schedule.num_ticks)
    stages = np.arange(sizes.stages)
    everyone = np.zeros((schedule.num_ticks, sizes.stages))
    for kind, slots in schedule.kinds:
        size = np.where(slots.active, layers[chunk[np.maximum(slots.repeat, 0), stages]], 0)
        spent = size * model.slot(kind)
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


def _ideal(model: Model, schedule: Schedule) -> float:
    """Seconds of layers if no stage ever waited."""
    sizes = model.sizes
    chunk = sum(model.slot(kind) for kind, _ in schedule.kinds)
    return sizes.microbatches * chunk * sum(sizes.cut) / sizes.stages * model.crowd


def _gathers(model: Model, schedule: Schedule) -> float:
    sizes, mode = model.sizes, model.sizes.config.pipeline.weight_gather
    if mode == "iteration":
        return 0.0
    if mode == "step" or not schedule.visits.num_window:
        return sizes.layer_slots * model.gather
    return len(schedule.visits.gather_tick) * sizes.layers_per_chunk * model.gather


def _reductions(model: Model, schedule: Schedule) -> float:
    """Of gradients, over fsdp where it is not done layer by layer, and over data."""
    sizes, mode = model.sizes, model.sizes.config.pipeline.weight_gather
    layers = 0
    if mode == "step" or (mode == "visit" and not schedule.visits.num_window):
        layers = sizes.layer_slots
    elif mode == "visit":
        layers = len(schedule.visits.reduce_tick) * sizes.layers_per_chunk
    over_data = model.move("data", 2 * model._around("data") * 4.0 * sizes.shard_elements)
    return layers * model.scatter + over_data


def _update(model: Model) -> float:
    """The optimizer reads and writes the state, and reads gradients."""
    moved = 2.4 * state(model.sizes)["state"]
    return moved / (model.hardware.memory_gb_per_second * 1e9)


def _fresh(model: Model, schedule: Schedule, held: Memory | None) -> float:
    """To be given the memory of a step, on devices that give it back after each."""
    rate = model.hardware.fresh_gb_per_second
    if not rate:
        return 0.0
    held = held or memory(model.sizes, schedule, platform=model.hardware.platform)
    return held.temporary / (rate * 1e9)


def traffic(model: Model, schedule: Schedule) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by axis and link."""
    sizes, size = model.sizes, model._size
    micro, pipeline = sizes.microbatches, sizes.config.pipeline
    layers = sum(sizes.cut) / sizes.stages
    gather, scatter = model._layer_bytes, model._layer_bytes * 4 / size
    if pipeline.weight_gather == "iteration":
        again = 3 if pipeline.remat == "chunk" else 2
        fsdp = micro * layers * (again * gather + scatter)
    elif pipeline.weight_gather == "visit" and schedule.visits.num_window:
        visits, length = schedule.visits, sizes.layers_per_chunk
        fsdp = length * (len(visits.gather_tick) * gather + len(visits.reduce_tick) * scatter)
    else:
        fsdp = sizes.layer_slots * (gather + scatter)
    message = size * sizes.activation
    ways = sum(1 for way in schedule.arrivals if way.step)
    found: Mapping[str, float] = {
        "fsdp": fsdp,
        "stage": schedule.num_ticks * ways * message if sizes.stages > 1 else 0.0,
        "tensor": micro * layers * (4 + 2 * model.replays) * 2 * model._around("tensor") * message,
        "data": 2 * model._around("data") * 4.0 * sizes.shard_elements,
    }
    return {(axis, model.link(axis)): sent for axis, sent in found.items() if sent}
