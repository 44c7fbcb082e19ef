"""Predicted time of a step: work by a roofline, and the traffic that nothing overlaps.

Stages advance in lockstep through the ticks of the table: in each tick the busiest one counts.
Messages travel behind the work of a tick; gathers behind as much of a layer as their mode
allows. The figures of devices and links are those of `configs/hardware/`, or measured ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from maxpipe.hardware import Hardware
from maxpipe.model.count import train_flops_per_token
from maxpipe.model.spec import Kind, Scores
from maxpipe.plan.memory import Memory, memory, state
from maxpipe.plan.sizes import BYTES, Sizes
from maxpipe.schedule.table import Schedule

RECOMPUTED = {"none": 0.0, "full": 1.0, "chunk": 2.0}
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
class CostModel:
    """Times of a run's pieces on some hardware."""

    sizes: Sizes
    hardware: Hardware

    @property
    def contention(self) -> float:
        """How much longer work takes while all devices work, because they share cores."""
        shared = self.hardware.shared_by
        return max(1.0, self.sizes.num_devices / shared) if shared else 1.0

    @property
    def hides(self) -> bool:
        """Whether traffic can travel behind work: not if the same cores do both."""
        return not self.hardware.shared_by

    # Links.

    @property
    def size(self) -> int:
        """Bytes of a number in compute type."""
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

    def around(self, axis: str) -> float:
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
    def layers(self) -> Mapping[str, LayerCost]:
        """Of each kind of layer."""
        return {kind: LayerCost(self, kind) for kind in self.sizes.model.kinds}

    @property
    def usual(self) -> LayerCost:
        """Of the kind of most layers."""
        return self.layers[self.sizes.usual_kind]

    def total(self, layers: Mapping[str, int], cost: Callable[[LayerCost], float]) -> float:
        """Of this number of layers of each kind."""
        return sum(count * cost(self.layers[kind]) for kind, count in layers.items())

    def slots(self, action: str, layers: Mapping[str, int]) -> float:
        """This number of layers of each kind, each in a slot of this kind."""
        return self.total(layers, lambda layer: layer.slot(action))

    @property
    def recomputed(self) -> float:
        """Forwards run again in a backward."""
        remat = self.sizes.config.pipeline.remat
        return (RECOMPUTED | {"names": self.hardware.names_recomputed})[remat]

    @cached_property
    def hop(self) -> float:
        """A message to the next stage."""
        return self.move("stage", 2.0 * self.size * self.sizes.activation, rounds=2)

    @cached_property
    def head(self) -> float:
        """Loss head of a microbatch: all stages share it. Heads ahead, of which each does all."""
        sizes = self.sizes
        matrix, heads = sizes.head_elements(whole=True), 1 + sizes.heads_ahead
        trained, ahead = sizes.trained.head_elements(whole=True), sizes.ahead_matrices()
        trained_ahead = sizes.trained.ahead_matrices()
        flops = 4.0 * (heads * matrix + ahead) + 2.0 * (heads * trained + trained_ahead)
        flops *= sizes.tokens
        moved = heads * (4.0 * 4 * sizes.tokens * sizes.vocabulary + 4.0 * matrix)
        sums = 2 * self.move(
            "stage", 2 * self.around("stage") * self.size * sizes.activation, rounds=2
        )
        return self.contention * self.work(flops, moved) + sums + self.embed + self.layers_ahead

    @property
    def layers_ahead(self) -> float:
        """Layers of heads ahead, of a microbatch, and another lookup for them.

        They go forward twice, whatever is kept of others.
        """
        if not (layers := self.sizes.layers_ahead):
            return 0.0
        once = self.slots("F", layers) + self.slots("B", layers)
        again = (1.0 - self.recomputed) * self.total(layers, attrgetter("forward"))
        return self.contention * (once + again) + self.embed

    @cached_property
    def embed(self) -> float:
        """Lookup of a microbatch, and its gradient."""
        message = self.size * self.sizes.activation
        once = self.move("stage", 2 * self.around("stage") * message / self.sizes.fsdp)
        directions = 2 if self.sizes.trained.embedding_elements() else 1
        return directions * (once + self.move("fsdp", self.around("fsdp") * message))


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer of a kind, on a microbatch."""

    model: CostModel
    name: str

    @property
    def _kind(self) -> Kind:
        return self.model.sizes.model.kinds[self.name]

    @property
    def _whole(self) -> int:
        return self.model.sizes.layer_elements(self.name, whole=True)

    @property
    def _trained(self) -> int:
        return self.model.sizes.trained.layer_elements(self.name, whole=True)

    @cached_property
    def forward(self) -> float:
        """A forward, its tensor-parallel sums included."""
        return self.seconds + self.num_sums * self._tensor_sum / self.model.contention

    @property
    def num_sums(self) -> int:
        """Tensor-parallel sums of a forward: of each branch's output."""
        return len(self._kind.branches)

    @property
    def seconds(self) -> float:
        """A forward on a device that works alone."""
        return self.matmul_seconds + self.score_seconds

    @cached_property
    def score_seconds(self) -> float:
        """Of that, what attention's scores take on their way through memory."""
        pairs = sum(map(self.model.sizes.held_scores, self._kind.parts.values()))
        return SCORE_TRAFFIC * pairs / (self.model.hardware.memory_gb_per_second * 1e9)

    @cached_property
    def matmul_seconds(self) -> float:
        """Of that, the rest."""
        model, sizes, parts = self.model, self.model.sizes, self._kind.parts.values()
        flops = 2.0 * sizes.tokens * sizes.computed_elements(self.name)
        flops += sum(
            4.0 * sizes.scores(part) * each.head_size
            for part in parts
            for each in part.operations
            if isinstance(each, Scores)
        )
        flops += 2.0 * sum(map(sizes.products, parts))
        moved = sum(sizes.held_bytes(part, part.traffic) for part in parts)
        return model.work(flops, model.size * self._whole + moved)

    @cached_property
    def rescored(self) -> float:
        """Of a backward, the scores that were not kept; measured costs of a backward have them."""
        flops = sum(
            2.0 * self.model.sizes.scores(part) * each.head_size
            for part in self._kind.parts.values()
            for each in part.operations
            if isinstance(each, Scores) and each.held != "scores"
        )
        return 0.0 if self.model.hardware.measured else self.model.work(flops, 0.0)

    @property
    def accumulation(self) -> float:
        """Adding its gradient to the sum of the step, where no matmul hides it."""
        moved = 3 * 4.0 * self._trained
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return 0.0 if self.model.hides else moved / rate

    @cached_property
    def _tensor_sum(self) -> float:
        return self.model.move("tensor", self.summed)

    @property
    def summed(self) -> float:
        """Bytes that a device sends for one tensor-parallel sum."""
        return 2 * self.model.around("tensor") * self.model.size * self.model.sizes.activation

    def slot(self, action: str) -> float:
        """In a slot of this kind, gathers and reductions in the slot included.

        On a device that works alone: see `contention`.
        """
        hardware, model = self.model.hardware, self.model
        pipeline = model.sizes.config.pipeline
        inputs = (hardware.input_grad_cost + model.recomputed) * self.forward + self.rescored
        weights = hardware.weight_grad_cost * self._trained_share * self.seconds + self.accumulation
        own = {"F": self.forward, "B": inputs + weights, "I": inputs, "W": weights}[action]
        own += self._kept(action)
        if pipeline.weight_gather != "iteration" or model.sizes.fsdp == 1:
            return own
        gathers = {"F": 1, "B": 1, "I": 1, "W": 0}[action]
        if pipeline.remat == "chunk" and action in "BI":
            gathers += 1
        traffic = gathers * self.gather + (self.scatter if action in "BW" else 0.0)
        behind = HIDDEN["iteration"] * own if model.hides else 0.0
        return own + max(0.0, traffic / model.contention - behind)

    @cached_property
    def _trained_share(self) -> float:
        """Of the weights that meet each token, those that have a gradient."""
        sizes = self.model.sizes
        computed = sizes.computed_elements(self.name)
        return sizes.trained.computed_elements(self.name) / computed if computed else 0.0

    def _kept(self, action: str) -> float:
        """Writing or reading what waits between slots."""
        sizes = self.model.sizes
        by_chunk = sizes.config.pipeline.remat == "chunk"
        stash = 0.0 if by_chunk else sum(sizes.kept_bytes(self.name))
        deferred = sizes.deferred_bytes(self.name)
        moved = {"F": stash, "B": stash, "I": stash + deferred, "W": deferred}[action]
        return moved / (self.model.hardware.memory_gb_per_second * 1e9)

    @property
    def gathered(self) -> float:
        """Bytes that a device sends to gather its weights."""
        return self.model.size * self._whole * self.model.around("fsdp")

    @property
    def scattered(self) -> float:
        """The same to sum its gradient, in float32."""
        return 4 * self._trained * self.model.around("fsdp")

    @cached_property
    def gather(self) -> float:
        """Its weights over fsdp."""
        return self.model.move("fsdp", self.gathered, rounds=len(self._kind.params))

    @cached_property
    def scatter(self) -> float:
        """Its gradient over fsdp."""
        trained = [param for param in self._kind.params.values() if param.trainable]
        return self.model.move("fsdp", self.scattered, rounds=len(trained))


def cost(sizes: Sizes, schedule: Schedule, hardware: Hardware, held: Memory | None = None) -> Cost:
    """What a step of this run costs; `held` is its memory, where that is known already."""
    sizes = sizes.on(hardware.platform)
    model = CostModel(sizes, hardware)
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
        traffic(model, schedule),
    )


def _ticks(model: CostModel, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """`[K]`: seconds of layers in each tick, and of what hides a message."""
    sizes, ring = model.sizes, schedule.ring
    chunk_at = np.array(
        [[ring.chunk(p, r) for p in range(sizes.stages)] for r in range(sizes.repeats)]
    )
    total = np.zeros(schedule.num_ticks)
    stages = np.arange(sizes.stages)
    everyone = np.zeros((schedule.num_ticks, sizes.stages))
    for action, slots in schedule.kinds:
        seconds = np.array([model.slots(action, chunk) for chunk in sizes.chunks])
        spent = np.where(slots.active, seconds[chunk_at[np.maximum(slots.repeat, 0), stages]], 0.0)
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


def _ideal(model: CostModel, schedule: Schedule) -> float:
    """Seconds of layers if no stage ever waited."""
    sizes = model.sizes
    layers = sum(model.slots(action, sizes.ring) for action, _ in schedule.kinds)
    return sizes.microbatches * layers / sizes.stages * model.contention


def _outside(model: CostModel, schedule: Schedule) -> float:
    """Seconds of the layers outside the ring: all stages run them at once, a round at a time."""
    rounds, layers = schedule.outside, model.sizes.outside
    columns = (("F", rounds.forward), ("B", rounds.backward))
    return model.contention * sum(
        np.count_nonzero(column >= 0) * model.slots(action, layers) for action, column in columns
    )


def _gathers(model: CostModel, schedule: Schedule) -> float:
    sizes, mode = model.sizes, model.sizes.config.pipeline.weight_gather
    if mode == "iteration":
        return 0.0
    gather = attrgetter("gather")
    outside = model.total(sizes.outside, gather) + model.total(sizes.layers_ahead, gather)
    if mode == "step" or not schedule.visits.num_window:
        return outside + model.total(sizes.layer_slots, gather)
    return outside + len(schedule.visits.gather_tick) * model.total(sizes.per_chunk, gather)


def _reductions(model: CostModel, schedule: Schedule) -> float:
    """Of gradients, over fsdp where it is not done layer by layer, and over data."""
    sizes, mode = model.sizes, model.sizes.config.pipeline.weight_gather
    scatter, layers = attrgetter("scatter"), 0.0
    if mode == "step" or (mode == "visit" and not schedule.visits.num_window):
        layers = model.total(sizes.layer_slots, scatter)
    elif mode == "visit":
        layers = len(schedule.visits.reduce_tick) * model.total(sizes.per_chunk, scatter)
    if mode != "iteration":
        layers += model.total(sizes.outside, scatter) + model.total(sizes.layers_ahead, scatter)
    layers += model.move("stage", _summed_over_stages(model))
    over_data = model.move("data", 2 * model.around("data") * 4.0 * sizes.trained.shard_elements)
    return layers + over_data


def _summed_over_stages(model: CostModel) -> float:
    """Bytes that a device sends to sum the gradients of layers outside the ring, and behind it."""
    trained = model.sizes.trained
    return 2 * model.around("stage") * 4.0 * (trained.outside_elements() + trained.ahead_elements())


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
    return held.temporary / (rate * 1e9)


def traffic(model: CostModel, schedule: Schedule) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by axis and link."""
    sizes, pipeline = model.sizes, model.sizes.config.pipeline
    gathered, scattered = attrgetter("gathered"), attrgetter("scattered")
    each, all_layers = sizes.microbatches / sizes.stages, sizes.ring + sizes.outside
    # Every stage runs those of all microbatches.
    further = {kind: count * sizes.stages for kind, count in sizes.layers_ahead.items()}
    all_layers += Counter(further)
    if pipeline.weight_gather == "iteration":
        again = 3 if pipeline.remat == "chunk" else 2
        sent = again * model.total(all_layers, gathered) + model.total(all_layers, scattered)
        fsdp = each * sent
    elif pipeline.weight_gather == "visit" and schedule.visits.num_window:
        visits, chunk = schedule.visits, sizes.per_chunk
        fsdp = len(visits.gather_tick) * model.total(chunk, gathered)
        fsdp += len(visits.reduce_tick) * model.total(chunk, scattered)
        held = sizes.outside + Counter(sizes.layers_ahead)
        fsdp += model.total(held, gathered) + model.total(held, scattered)
    else:
        held = sizes.outside + Counter(sizes.layers_ahead) + Counter(sizes.layer_slots)
        fsdp = model.total(held, gathered) + model.total(held, scattered)
    ways = sum(1 for way in schedule.arrivals if way.step)
    message = model.size * sizes.activation
    summed = model.total(all_layers, lambda layer: layer.num_sums * layer.summed)
    along = schedule.num_ticks * ways * message if sizes.stages > 1 else 0.0
    found: Mapping[str, float] = {
        "fsdp": fsdp,
        "stage": along + _summed_over_stages(model),
        "tensor": each * (2 + model.recomputed) * summed,
        "data": 2 * model.around("data") * 4.0 * sizes.trained.shard_elements,
    }
    return {(axis, model.link(axis)): sent for axis, sent in found.items() if sent}
