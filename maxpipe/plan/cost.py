"""Predicted time of a step: the work of its ticks, and the traffic that nothing overlaps.

Stages advance in lockstep through the ticks of the table: in each tick the busiest one counts, or
all of them where they share cores. Messages travel behind the work of a tick.

Predicted times of a run's pieces, layers above all: work by a roofline, and traffic.

Gathers travel behind as much of a layer as their mode allows; what a layer's tokens exchange
behind nothing, but for the keys of a ring. The figures of devices and links are those of
`configs/hardware/`, or measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from operator import attrgetter

import numpy as np

from maxpipe.hardware import MIB, Hardware
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.layers.mlp import GatedMLP
from maxpipe.models.spec import Kind, Scores
from maxpipe.plan.memory import Memory, loss_blocks, predict_memory, state
from maxpipe.plan.sizes import BYTES, Sizes
from maxpipe.plan.traffic import (
    CommVolume,
    HeadTraffic,
    LayerTraffic,
    layer_executions,
    lookup,
    loss_head_traffic,
    merge_by_axes,
    message,
    regather_traffic,
    step_end_traffic,
    step_traffic,
    tensor_sums,
)
from maxpipe.schedule.table import Schedule, SlotColumns

RECOMPUTED_FORWARDS = {"none": 0.0, "full": 1.0, "chunk": 2.0}
"""Forwards that a layer's backward runs again; with names that depends on the device. What follows
the last array that a backward reads is left out by compilers: see `LayerCost.again`."""
SCORE_TRAFFIC = 12
"""Moved for each pair of query and key by the softmax of plain attention and its gradient, a pass:
fitted to the TPU compiler's cycles at 2048 and 8192 tokens."""
ACTIONS = "FBIW"
"""Kinds of slots: forward, backward, and its halves for inputs and for weights."""
OVERLAPPED_SHARE = {"iteration": 0.5, "visit": 0.0, "step": 0.0}
"""Share of a layer's work behind which its gather travels."""
KERNEL_BACKWARD = {"tpu": 3.5}
"""Products of an attention kernel's backward, in forwards, 2.5 where none is named: on TPUs two
kernels compute the scores each."""


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
    def overlaps(self) -> bool:
        """Whether traffic can travel behind work: not if the same cores do both."""
        return not self.hardware.shared_by

    # Links.

    @property
    def itemsize(self) -> int:
        """Bytes of a number in compute type."""
        return BYTES[self.sizes.config.model.compute_dtype]

    def send_seconds(self, sent: CommVolume) -> float:
        """Seconds to send this from every device at once."""
        if not sent.axes or not sent.num_bytes:
            return 0.0
        hardware, mesh = self.hardware, self.sizes.config.mesh
        dcn = math.prod(getattr(mesh, f"dcn_{axis}") for axis in sent.axes)
        latency = sent.num_collectives * hardware.latency_us * 1e-6
        seconds = sent.num_bytes / (hardware.ways * hardware.link_gb_per_second * 1e9)
        if sent.is_all_to_all:
            seconds *= hardware.hops(self.sizes.shards(sent.axes) // dcn) / hardware.exchange_rate
        if sent.of_tokens:
            seconds /= hardware.tokens_rate
        if dcn > 1:
            crossing = sent.num_bytes * (dcn - 1) / dcn
            seconds += crossing / (hardware.network_gb_per_second * 1e9)
            latency += sent.num_collectives * hardware.network_latency_us * 1e-6
        return seconds + latency

    def total_send_seconds(self, sent: Iterable[CommVolume]) -> float:
        """The same of several, one after the other."""
        return sum(map(self.send_seconds, sent))

    def reduce_scatter_seconds(self, sent: Iterable[CommVolume]) -> float:
        """Seconds of sums to shards.

        XLA for TPU makes one over all devices an all-reduce, of which each keeps a shard. Measured
        rates are of sums over all devices, and have that in them.
        """
        published = self.hardware.is_tpu and not self.hardware.measured
        whole = self.sizes.num_devices if published else 0
        return sum(
            self.send_seconds(each * (1 + (self.sizes.shards(each.axes) == whole))) for each in sent
        )

    def exposed_seconds(self, seconds: float, work: float) -> float:
        """What is left of traffic that travels behind this much work."""
        return max(0.0, seconds - work * self.overlaps)

    # Work.

    def roofline_seconds(self, flops: float, moved: float) -> float:
        """The roofline: matmuls at the rate they reach, or bytes through memory.

        Cores that devices share do one after the other.
        """
        arithmetic = flops / (self.hardware.flops * self.hardware.matmul_efficiency)
        traffic = moved / (self.hardware.memory_gb_per_second * 1e9)
        return max(arithmetic, traffic) if self.overlaps else arithmetic + traffic

    @cached_property
    def layers(self) -> Mapping[str, LayerCost]:
        """Of each kind of layer."""
        return {kind: LayerCost(self, kind) for kind in self.sizes.model.layer_types}

    @property
    def most_common_layer(self) -> LayerCost:
        """Of the kind of most layers."""
        return self.layers[self.sizes.most_common_layer_type]

    def total(self, layers: Mapping[str, float], cost: Callable[[LayerCost], float]) -> float:
        """Of this number of layers of each kind."""
        return sum(count * cost(self.layers[kind]) for kind, count in layers.items())

    def slots(self, action: str, layers: Mapping[str, int]) -> float:
        """This number of layers of each kind, each in a slot of this kind."""
        return self.total(layers, lambda layer: layer.slot(action))

    @property
    def recomputed(self) -> float:
        """Forwards run again in a backward."""
        remat = self.sizes.config.pipeline.remat
        return (RECOMPUTED_FORWARDS | {"names": self.hardware.names_recomputed})[remat]

    @cached_property
    def message_seconds(self) -> float:
        """A message to the next stage."""
        return self.send_seconds(
            CommVolume(self.sizes.nontrivial_axes(["stage"]), 2 * message(self.sizes), 2)
        )

    @cached_property
    def head_seconds(self) -> float:
        """Loss head of a microbatch: all stages share it. Heads ahead, of which each does all."""
        sizes = self.sizes
        matrix, heads = sizes.head_elements(whole=True), 1 + sizes.mtp_heads
        trained, ahead = sizes.trained.head_elements(whole=True), sizes.mtp_matrix_elements()
        trained_ahead = sizes.trained.mtp_matrix_elements()
        flops = 4.0 * (heads * matrix + ahead) + 2.0 * (heads * trained + trained_ahead)
        flops *= sizes.tokens
        # Each further block reads the matrix again, and reads and writes its gradient.
        again = (4.0 + 8.0) * (loss_blocks(sizes) - 1) * matrix
        moved = heads * (4.0 * 4 * sizes.tokens * sizes.vocabulary + 4.0 * matrix + again)
        work, gathers = self.contention * self.roofline_seconds(flops, moved), 0.0
        if sizes.config.pipeline.weight_gather == "iteration":
            # Inside a conditional, in which compilers start nothing early.
            weights = HeadTraffic(sizes)
            gathers = self.total_send_seconds(weights.gathered) + self.reduce_scatter_seconds(
                weights.scattered
            )
        return (
            work
            + gathers
            + self.send_seconds(loss_head_traffic(sizes))
            + self.embed_seconds
            + self.mtp_seconds
        )

    @property
    def mtp_seconds(self) -> float:
        """Layers of heads ahead, of a microbatch, and another lookup for them.

        They go forward twice, whatever is kept of others.
        """
        if not (layers := self.sizes.mtp_layers):
            return 0.0
        once = self.slots("F", layers) + self.slots("B", layers)
        again = self.total(layers, lambda layer: layer.forward - layer.recompute_seconds)
        return self.contention * (once + again) + self.embed_seconds

    @cached_property
    def embed_seconds(self) -> float:
        """Lookup of a microbatch, and its gradient."""
        return self.total_send_seconds(lookup(self.sizes))


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer of a kind, on a microbatch."""

    model: CostModel
    name: str

    @property
    def _kind(self) -> Kind:
        return self.model.sizes.model.layer_types[self.name]

    @property
    def _whole(self) -> int:
        return self.model.sizes.layer_elements(self.name, whole=True)

    @property
    def _trained(self) -> int:
        return self.model.sizes.trained.layer_elements(self.name, whole=True)

    @cached_property
    def traffic(self) -> LayerTraffic:
        """What it sends."""
        return LayerTraffic(self.model.sizes, self.name)

    @cached_property
    def forward(self) -> float:
        """A forward, its tensor-parallel sums included."""
        return self.kernel_seconds + self._with_sums(1.0)

    def _with_sums(self, forwards: float) -> float:
        """As much work as of these forwards, without kernels, and the sums of one."""
        matmuls, scores = forwards * self.matmul_seconds, forwards * self.score_seconds
        if not self._uses_collective_matmul:
            return matmuls + scores + self._sums
        matmuls *= 1.0 + self.model.hardware.ring_cost * (self.model.sizes.token_shards - 1)
        both = max(matmuls, self._sums) if self.model.overlaps else matmuls + self._sums
        return scores + both

    @cached_property
    def recompute_seconds(self) -> float:
        """What a backward runs again of forwards, but for what nothing reads then.

        Of a branch that ends a layer, nothing of a backward reads the output: a network's last
        projection is not multiplied again, and its sums are not sent.
        """
        remat, recomputed = self.model.sizes.config.pipeline.remat, self.model.recomputed
        if remat == "none":  # nothing is sent, and nothing waits for other devices
            return self.model.hardware.none_recomputed * self.seconds / self.split_factor
        unread = self._skipped_recompute_seconds if remat in ("full", "chunk") else 0.0
        return recomputed * self.forward - unread

    @cached_property
    def _skipped_recompute_seconds(self) -> float:
        last, sizes = self._kind.branches[-1], self.model.sizes
        if last.post_norm is not None or not isinstance(last.part, GatedMLP):
            return 0.0
        down = sizes.elements(last.part.params["down"].dims, whole=True)
        matmul = self.model.roofline_seconds(2.0 * sizes.tokens * down, 0.0)
        return matmul + self._sums / len(self._kind.branches)

    @cached_property
    def _sums(self) -> float:
        """Tensor-parallel sums of a forward."""
        return (
            self.model.send_seconds(tensor_sums(self.model.sizes, self.name))
            / self.model.contention
        )

    @property
    def _uses_collective_matmul(self) -> bool:
        """Whether tokens travel to matmuls part by part."""
        sizes = self.model.sizes
        return sizes.config.mesh.collective_matmul and sizes.token_shards > 1

    @property
    def seconds(self) -> float:
        """A forward on a device that works alone."""
        return self.matmul_seconds + self.score_seconds + self.kernel_seconds

    @cached_property
    def score_seconds(self) -> float:
        """Of that, what attention's scores take on their way through memory."""
        pairs = sum(map(self.model.sizes.stored_scores, self._kind.parts.values()))
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return self.size_factor * self.split_factor * SCORE_TRAFFIC * pairs / rate

    @cached_property
    def matmul_seconds(self) -> float:
        """Of that, the rest."""
        model, sizes, parts = self.model, self.model.sizes, self._kind.parts.values()
        flops = 2.0 * sizes.tokens * sizes.computed_elements(self.name) + self._plain_flops
        flops += 2.0 * sum(map(sizes.products, parts))
        moved = model.itemsize * self._whole + self.moved_bytes
        return self.size_factor * self.split_factor * model.roofline_seconds(flops, moved)

    @cached_property
    def moved_bytes(self) -> float:
        """Bytes of activations that a forward moves through memory."""
        sizes = self.model.sizes
        return sum(sizes.declared_bytes(part, part.traffic) for part in self._kind.parts.values())

    @cached_property
    def size_factor(self) -> float:
        """Time of a token beside that in a microbatch of the size that is the fastest."""
        hardware = self.model.hardware
        if not hardware.fastest_mib:
            return 1.0
        doublings = math.log2(self.moved_bytes / (hardware.fastest_mib * 2**20))
        growth = hardware.growth_above if doublings > 0 else hardware.growth_below
        return 1.0 + growth * abs(doublings)

    @property
    def split_factor(self) -> float:
        """Time of a layer beside that of one whose width is not split."""
        return 1.0 + self.model.hardware.split_cost * math.log2(self.model.sizes.tensor)

    @cached_property
    def score_recompute_seconds(self) -> float:
        """Of a backward, the scores that were not kept; measured costs of a backward have them."""
        flops = sum(flops for each, flops in self._scored if each.storage == "block") / 2
        return 0.0 if self.model.hardware.measured else self.model.roofline_seconds(flops, 0.0)

    @cached_property
    def kernel_seconds(self) -> float:
        """Of a forward, attention's products in a kernel; measured rates of a layer have them."""
        if self.model.hardware.measured:
            return 0.0
        hardware = self.model.hardware
        return self._kernel_flops / (hardware.flops * hardware.kernel_efficiency)

    @property
    def _kernel_flops(self) -> float:
        return sum(flops for each, flops in self._scored if each.storage == "mask")

    @property
    def _plain_flops(self) -> float:
        """Of attention's products those that are matmuls like others."""
        kernels = 0.0 if self.model.hardware.measured else self._kernel_flops
        return self._score_flops - kernels

    @cached_property
    def _scored(self) -> list[tuple[Scores, float]]:
        """Of each attention the operations of a forward's products."""
        sizes = self.model.sizes
        return [
            (each, 4.0 * sizes.scores(part) * each.head_dim)
            for part in self._kind.parts.values()
            for each in part.operations
            if isinstance(each, Scores)
        ]

    @property
    def _score_flops(self) -> float:
        return sum(flops for _, flops in self._scored)

    @property
    def accumulation(self) -> float:
        """Adding its gradient to the sum of the step, where no matmul hides it."""
        moved = 3 * 4.0 * self._trained
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return 0.0 if self.model.overlaps else moved / rate

    def exchange_seconds(self, action: str) -> float:
        """In a slot of this kind, what its tokens exchange with other devices, behind no work."""
        return self._exchange_seconds[action]

    @cached_property
    def _exchange_seconds(self) -> Mapping[str, float]:
        return {action: self._exchange_seconds_in(action) for action in ACTIONS}

    def _exchange_seconds_in(self, action: str) -> float:
        model, remat = self.model, self.model.sizes.config.pipeline.remat
        forwards = {"F": 1.0, "W": 0.0}.get(action, 2.0 + model.recomputed)
        scoring = forwards * (model.roofline_seconds(self._plain_flops, 0.0) + self.kernel_seconds)
        return sum(
            model.exposed_seconds(
                model.total_send_seconds(each.in_slot(action, remat)) / model.contention,
                scoring if each.overlaps else 0.0,
            )
            for each in self.traffic.exchanges
        )

    def slot(self, action: str) -> float:
        """In a slot of this kind, with what it gathers, reduces and exchanges.

        On a device that works alone: see `contention`.
        """
        return self._slots[action]

    @cached_property
    def _slots(self) -> Mapping[str, float]:
        return {action: self._in_slot(action) for action in ACTIONS}

    def _in_slot(self, action: str) -> float:
        hardware, model = self.model.hardware, self.model
        pipeline = model.sizes.config.pipeline
        # A kernel's backward has inputs only.
        kernel = self.kernel_seconds
        inputs = (
            self._with_sums(hardware.input_grad_cost)
            + self.recompute_seconds
            + self.score_recompute_seconds
        )
        inputs += KERNEL_BACKWARD.get(hardware.platform, 2.5) * kernel
        weights = hardware.weight_grad_cost * self._trained_share * (self.seconds - kernel)
        weights += self.accumulation
        both = max(inputs, inputs + weights - hardware.deferred_cost * self.seconds)
        own = {"F": self.forward, "B": both, "I": inputs, "W": weights}[action]
        own += self._stash_seconds(action)
        if not self._uses_collective_matmul:
            again = regather_traffic(model.sizes, self.name, action, model.recomputed)
            own += model.send_seconds(again) / model.contention
        exchanged = self.exchange_seconds(action)
        if pipeline.weight_gather != "iteration":
            return own + exchanged
        gathers = {"F": 1, "B": 1, "I": 1, "W": 0}[action]
        if pipeline.remat == "chunk" and action in "BI":
            gathers += 1
        traffic, scatter = gathers * self.gather, self.scatter if action in "BW" else 0.0
        if hardware.is_tpu:
            own += scatter  # which XLA for TPU waits for: `benchmarks/compile_reports.md`
        else:
            traffic += scatter
        left = model.exposed_seconds(
            traffic / model.contention, OVERLAPPED_SHARE["iteration"] * own
        )
        return own + exchanged + left

    @cached_property
    def _trained_share(self) -> float:
        """Of the weights that meet each token, those that have a gradient."""
        sizes = self.model.sizes
        computed = sizes.computed_elements(self.name)
        return sizes.trained.computed_elements(self.name) / computed if computed else 0.0

    def _stash_seconds(self, action: str) -> float:
        """Writing or reading what waits between slots; measured costs of a backward have that."""
        if self.model.hardware.measured:
            return 0.0
        sizes = self.model.sizes
        by_chunk = sizes.config.pipeline.remat == "chunk"
        stash = 0.0 if by_chunk else sum(sizes.saved_activation_bytes(self.name))
        deferred = sizes.deferred_bytes(self.name)
        moved = {"F": stash, "B": stash, "I": stash + deferred, "W": deferred}[action]
        hardware = self.model.hardware
        # Copied into a buffer's slice, or out of it: read and written.
        return 2 * moved / (hardware.memory_gb_per_second * hardware.copy_efficiency * 1e9)

    @cached_property
    def gather(self) -> float:
        """Its weights, from shards on other devices."""
        return self.model.total_send_seconds(self.traffic.gathered)

    @cached_property
    def scatter(self) -> float:
        """Its gradient, to shards."""
        return self.model.reduce_scatter_seconds(self.traffic.scattered)


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


def predict_cost(
    sizes: Sizes, schedule: Schedule, hardware: Hardware, held: Memory | None = None
) -> Cost:
    """What a step of this run costs; `held` is its memory, where that is known already."""
    sizes = sizes.on_platform(hardware.platform)
    model = CostModel(sizes, hardware)
    ticks, behind = _ticks(model, schedule)
    hop = model.message_seconds if sizes.stages > 1 else 0.0
    exposed = np.maximum(0.0, hop - behind * model.overlaps)
    work = float(ticks.sum())
    ideal = min(work, _ideal(model, schedule))
    exchanged = min(ideal, _exchange_seconds(model, schedule))
    loss = np.asarray(schedule.loss_microbatch) >= 0
    train = sizes.config.train
    parts = {
        "layers": ideal - exchanged,
        "exchange": exchanged,
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
        needed / sizes.num_devices,
        hardware.flops,
        step_traffic(sizes, schedule, model.recomputed),
    )


def _ticks(model: CostModel, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """`[K]`: seconds of layers in each tick, and of what hides a message."""
    sizes, computes = model.sizes, model.sizes.config.pipeline.idle == "compute"
    total = np.zeros(schedule.num_ticks)
    everyone = np.zeros((schedule.num_ticks, sizes.stages))
    for action, slots in schedule.kinds:
        spent = _slot_seconds(model, schedule, action, slots, computes=computes)
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


def _slot_seconds(
    model: CostModel, schedule: Schedule, action: str, slots: SlotColumns, *, computes: bool
) -> np.ndarray:
    """`[K, P]`: seconds of each stage's layers in slots of one kind.

    Stages that compute where they idle run, in each tick in which one has a slot of the kind, what
    any of them has at each place of its chunk.
    """
    sizes, ring = model.sizes, schedule.ring
    kinds, stages = list(sizes.ring_layers), range(sizes.stages)
    chunk_at = np.array([[ring.chunk(p, r) for p in stages] for r in range(sizes.repeats)])
    here = chunk_at[np.maximum(slots.repeat, 0), stages]
    if not computes:
        seconds = np.array([model.slots(action, chunk) for chunk in sizes.chunks])
        return np.where(slots.active, seconds[here], 0.0)
    seconds = np.array([model.layers[kind].slot(action) for kind in kinds])
    ends = accumulate(sizes.layer_partition, initial=sizes.config.pipeline.prologue_layers)
    layers = [sizes.model.layers[start:end] for start, end in pairwise(ends)]
    chunks = np.array(list(zip_longest(*layers))).T
    run = slots.active[:, :, None, None] & (chunks[here][..., None] == np.array(kinds))
    if len(kinds) == 1:  # padded chunks, too, are as long as the longest
        run |= slots.active[:, :, None, None]
    return np.broadcast_to((run.any(axis=1).sum(axis=1) @ seconds)[:, None], slots.active.shape)


def _ideal(model: CostModel, schedule: Schedule) -> float:
    """Seconds of layers if no stage ever waited."""
    sizes = model.sizes
    layers = sum(model.slots(action, sizes.ring_layers) for action, _ in schedule.kinds)
    return sizes.microbatches * layers / sizes.stages * model.contention


def _exchange_seconds(model: CostModel, schedule: Schedule) -> float:
    """Of these, seconds of what tokens exchange between devices."""
    actions = [action for action, _ in schedule.kinds]
    exchanged = lambda layer: sum(map(layer.exchange_seconds, actions))  # noqa: E731
    layers = model.total(model.sizes.ring_layers, exchanged)
    return model.sizes.microbatches * layers / model.sizes.stages * model.contention


def _prologue_seconds(model: CostModel, schedule: Schedule) -> float:
    """Seconds of the layers outside the ring: all stages run them at once, a round at a time."""
    rounds, layers = schedule.prologue, model.sizes.prologue_layers
    columns = (("F", rounds.forward), ("B", rounds.backward))
    return model.contention * sum(
        np.count_nonzero(column >= 0) * model.slots(action, layers) for action, column in columns
    )


def _gathers(model: CostModel, schedule: Schedule) -> float:
    """Of weights, where that is not done layer by layer."""
    if model.sizes.config.pipeline.weight_gather == "iteration":
        return 0.0
    layers = model.total(layer_executions(model.sizes, schedule).gathered, attrgetter("gather"))
    return layers + model.total_send_seconds(HeadTraffic(model.sizes).gathered)


def _reductions(model: CostModel, schedule: Schedule) -> float:
    """Of gradients, to shards where it is not done layer by layer, and over what they leave."""
    sizes, found = (
        model.sizes,
        model.total_send_seconds(merge_by_axes(step_end_traffic(model.sizes))),
    )
    if sizes.config.pipeline.weight_gather == "iteration":
        return found
    found += model.total(layer_executions(sizes, schedule).scattered, attrgetter("scatter"))
    return found + model.reduce_scatter_seconds(HeadTraffic(sizes).scattered)


def _update(model: CostModel) -> float:
    """The optimizer reads and writes the state of what is trained, and reads gradients."""
    moved = 2.4 * state(model.sizes.trained)["state"]
    return moved / (model.hardware.memory_gb_per_second * 1e9)


def _allocation_seconds(model: CostModel, schedule: Schedule, held: Memory | None) -> float:
    """To be given the memory of a step, on devices that give it back after each."""
    rate = model.hardware.fresh_gb_per_second
    if not rate:
        return 0.0
    held = held or predict_memory(model.sizes, schedule, platform=model.hardware.platform)
    share, kept = 1.0, model.hardware.fresh_from_mib * MIB
    if kept:
        share = min(1.0, max(0.0, held.temporary / kept - 1.0)) ** 2
    return share * held.temporary / (rate * 1e9)
