"""Predict the step time from the compute time of ticks and the exposed communication.

Stages advance in lockstep through the ticks of the schedule table. The duration of a tick is the
time of its busiest stage, or the sum over all stages if devices share cores. Messages between
stages overlap with the compute in a tick.

The compute time of a layer follows a roofline model. Weight gathers overlap with a fraction of the
layer's compute that depends on `pipeline.weight_gather`. Token exchanges do not overlap with
compute, except for keys and values in ring attention. Device and link parameters come from
`configs/hardware/` or from a calibration.
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
from maxpipe.models.spec import LayerType, Param, Scores
from maxpipe.planner.memory import Memory, loss_blocks, predict_memory, state_bytes
from maxpipe.planner.memory_terms import is_multiplied_in_few_bits
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.traffic import (
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
"""Number of forward passes that a layer's backward pass recomputes, keyed by `pipeline.remat`;
device-dependent for `names`. Compilers skip trailing operations whose results are unused: see
`LayerCost.recompute_seconds`."""
SCORE_TRAFFIC = 12
"""Bytes per query-key pair that plain attention moves in one pass of the softmax or of the softmax
gradient. Fitted to the TPU compiler's cycle estimates at 2048 and 8192 tokens."""
ACTIONS = "FBIW"
"""Slot types: forward, full backward, and the two halves of a split backward pass (input gradient
and weight gradient)."""
OVERLAPPED_SHARE = {"iteration": 0.5, "window": 0.0, "step": 0.0}
"""Fraction of a layer's compute that overlaps with its weight gather."""
KERNEL_BACKWARD = {"tpu": 3.5}
"""Cost of an attention kernel's backward pass relative to its forward pass, keyed by platform
(default: 2.5). On TPU, the backward pass consists of two kernels that both recompute the scores."""


@dataclass(frozen=True)
class CostModel:
    """Predicted times of the components of a step on given hardware."""

    sizes: Sizes
    hardware: Hardware

    @property
    def contention(self) -> float:
        """Return the compute slowdown when all devices are busy; above 1 only if devices share
        cores.
        """
        shared = self.hardware.shared_by
        return max(1.0, self.sizes.mesh.num_devices / shared) if shared else 1.0

    @property
    def overlaps(self) -> bool:
        """Return whether communication can overlap with compute; false if devices share cores."""
        return not self.hardware.shared_by

    # Links.

    def send_seconds(self, sent: CommVolume) -> float:
        """Return the time in seconds of one transfer in which all devices send at the same time."""
        if not sent.axes or not sent.num_bytes:
            return 0.0
        hardware, mesh = self.hardware, self.sizes.config.mesh
        dcn = math.prod(getattr(mesh, f"dcn_{axis}") for axis in sent.axes)
        latency = sent.num_collectives * hardware.latency_us * 1e-6
        seconds = sent.num_bytes / (hardware.ways * hardware.link_gb_per_second * 1e9)
        if sent.is_all_to_all:
            inside = self.sizes.mesh.shards(sent.axes) // dcn
            seconds *= hardware.hops(inside) / hardware.exchange_rate
        if sent.of_tokens:
            seconds /= hardware.tokens_rate
        if dcn > 1:
            crossing = sent.num_bytes * (dcn - 1) / dcn
            seconds += crossing / (hardware.network_gb_per_second * 1e9)
            latency += sent.num_collectives * hardware.network_latency_us * 1e-6
        return seconds + latency

    def total_send_seconds(self, sent: Iterable[CommVolume]) -> float:
        """Return the total time in seconds of several consecutive transfers."""
        return sum(map(self.send_seconds, sent))

    def reduce_scatter_seconds(self, sent: Iterable[CommVolume]) -> float:
        """Return the time in seconds spent in reduce-scatters.

        XLA for TPU implements a reduce-scatter over all devices as an all-reduce followed by a
        slice. Measured bandwidths already include this cost.
        """
        published = self.hardware.is_tpu and not self.hardware.measured
        mesh = self.sizes.mesh
        whole = mesh.num_devices if published else 0
        return sum(
            self.send_seconds(volume * (1 + (mesh.shards(volume.axes) == whole))) for volume in sent
        )

    def exposed_seconds(self, seconds: float, work: float) -> float:
        """Return the exposed time of a transfer that overlaps with `work` seconds of compute."""
        return max(0.0, seconds - work * self.overlaps)

    # Work.

    def roofline_seconds(self, flops: float, moved: float) -> float:
        """Return the roofline time: the larger of the matmul time and the memory time.

        If devices share cores, the two times are added.
        """
        arithmetic = flops / (self.hardware.flops * self.hardware.matmul_efficiency)
        traffic = moved / (self.hardware.memory_gb_per_second * 1e9)
        return max(arithmetic, traffic) if self.overlaps else arithmetic + traffic

    @cached_property
    def layers(self) -> Mapping[str, LayerCost]:
        """Return the costs of a layer of each type."""
        return {kind: LayerCost(self, kind) for kind in self.sizes.model.layer_types}

    @property
    def most_common_layer(self) -> LayerCost:
        """Return the costs of a layer of the most common type."""
        return self.layers[self.sizes.layers.most_common]

    def total(self, layers: Mapping[str, float], cost: Callable[[LayerCost], float]) -> float:
        """Return the total cost, given the number of layers of each type."""
        return sum(count * cost(self.layers[kind]) for kind, count in layers.items())

    def slots(self, action: str, layers: Mapping[str, int]) -> float:
        """Return the time in seconds of a slot, given its type and its number of layers of each
        type.
        """
        return self.total(layers, lambda layer: layer.slot(action))

    @property
    def recomputed(self) -> float:
        """Return the number of forward passes that a backward pass recomputes."""
        remat = self.sizes.config.pipeline.remat
        return (RECOMPUTED_FORWARDS | {"names": self.hardware.names_recomputed})[remat]

    @cached_property
    def message_seconds(self) -> float:
        """Return the time in seconds to send a message to the next stage."""
        return self.send_seconds(
            CommVolume(self.sizes.mesh.nontrivial_axes(["stage"]), 2 * message(self.sizes), 2)
        )

    @cached_property
    def head_seconds(self) -> float:
        """Return the time in seconds to compute the loss for one microbatch, including MTP heads.

        All stages share the work of the loss head.
        """
        sizes = self.sizes
        matrix, heads = sizes.params.head_elements(whole=True), 1 + sizes.layers.mtp_heads
        trained, ahead = sizes.trained.head_elements(whole=True), sizes.params.mtp_matrix_elements()
        trained_ahead = sizes.trained.mtp_matrix_elements()
        tokens = sizes.batch.tokens
        flops = 4.0 * (heads * matrix + ahead) + 2.0 * (heads * trained + trained_ahead)
        flops *= tokens
        # Every additional token block reads the head matrix again, and reads and writes the
        # matrix's gradient.
        again = (4.0 + 8.0) * (loss_blocks(sizes) - 1) * matrix
        moved = heads * (4.0 * 4 * tokens * sizes.params.vocabulary + 4.0 * matrix + again)
        work, gathers = self.contention * self.roofline_seconds(flops, moved), 0.0
        if sizes.config.pipeline.weight_gather == "iteration":
            # The loss is inside a conditional, where compilers do not start gathers early.
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
        """Return the time in seconds of the MTP layers for one microbatch, including embedding
        lookups.

        The forward pass of MTP layers runs twice in every `pipeline.remat` mode.
        """
        if not (layers := self.sizes.layers.mtp):
            return 0.0
        once = self.slots("F", layers) + self.slots("B", layers)
        again = self.total(layers, lambda layer: layer.forward - layer.recompute_seconds)
        return self.contention * (once + again) + self.embed_seconds

    @cached_property
    def embed_seconds(self) -> float:
        """Return the time in seconds to look up a microbatch's embeddings, forward and backward."""
        return self.total_send_seconds(lookup(self.sizes))


@dataclass(frozen=True)
class LayerCost:
    """Predicted times of one layer of a given type for one microbatch."""

    model: CostModel
    name: str

    @property
    def _kind(self) -> LayerType:
        return self.model.sizes.model.layer_types[self.name]

    @cached_property
    def traffic(self) -> LayerTraffic:
        """Return the layer's communication for one microbatch."""
        return LayerTraffic(self.model.sizes, self.name)

    @cached_property
    def forward(self) -> float:
        """Return the time in seconds of a forward pass, including tensor-parallel reductions."""
        return self.kernel_seconds + self._with_sums(1.0)

    def _with_sums(self, forwards: float) -> float:
        """Return the time in seconds of `forwards` forward passes, including tensor-parallel
        reductions but excluding custom kernels.
        """
        matmuls, scores = forwards * self.matmul_seconds, forwards * self.score_seconds
        if not self._uses_collective_matmul:
            return matmuls + scores + self._sums
        matmuls *= 1.0 + self.model.hardware.ring_cost * (self.model.sizes.mesh.token_shards - 1)
        both = max(matmuls, self._sums) if self.model.overlaps else matmuls + self._sums
        return scores + both

    @cached_property
    def recompute_seconds(self) -> float:
        """Return the time in seconds that a backward pass spends on recomputation.

        The backward pass does not use the output of a layer's last branch. The last projection and
        its reduction are therefore not recomputed and are excluded.
        """
        remat, recomputed = self.model.sizes.config.pipeline.remat, self.model.recomputed
        if remat == "none":  # no communication, and no waiting for other devices
            return self.model.hardware.none_recomputed * self.seconds / self.split_factor
        if remat == "names":
            unsaved = self.model.sizes.activations.unsaved_elements(self.name)
            return recomputed * self.forward + self._product_seconds(unsaved)
        return recomputed * self.forward - self._skipped_recompute_seconds

    def _product_seconds(self, elements: float) -> float:
        """Return the time in seconds of matmuls with this number of parameters per token."""
        flops = 2.0 * self.model.sizes.batch.tokens * elements
        return self.size_factor * self.split_factor * self.model.roofline_seconds(flops, 0.0)

    @cached_property
    def _skipped_recompute_seconds(self) -> float:
        last, sizes = self._kind.branches[-1], self.model.sizes
        if last.post_norm is not None or not isinstance(last.part, GatedMLP):
            return 0.0
        down = sizes.mesh.elements(last.part.params["down"].dims, whole=True)
        flops = 2.0 * sizes.batch.tokens * down
        flops *= self._relative_duration(last.part.params["down"])
        matmul = self.model.roofline_seconds(flops, 0.0)
        return matmul + self._sums / len(self._kind.branches)

    @cached_property
    def _sums(self) -> float:
        """Return the time in seconds of the tensor-parallel reductions in a forward pass."""
        return (
            self.model.send_seconds(tensor_sums(self.model.sizes, self.name))
            / self.model.contention
        )

    @property
    def _uses_collective_matmul(self) -> bool:
        """Return whether collective matmuls gather the tokens in chunks."""
        sizes = self.model.sizes
        return sizes.config.mesh.collective_matmul and sizes.mesh.token_shards > 1

    @property
    def seconds(self) -> float:
        """Return the time in seconds of a forward pass while all other devices are idle."""
        return self.matmul_seconds + self.score_seconds + self.kernel_seconds

    @cached_property
    def score_seconds(self) -> float:
        """Return the time in seconds spent on attention-score memory traffic in one forward
        pass.
        """
        pairs = sum(map(self.model.sizes.activations.stored_scores, self._kind.parts.values()))
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return self.size_factor * self.split_factor * SCORE_TRAFFIC * pairs / rate

    @cached_property
    def matmul_seconds(self) -> float:
        """Return the time in seconds of a forward pass, excluding attention scores and kernels.

        Quantized matmuls run at the peak rate of their format. The time to quantize activations is
        not included.
        """
        return self._matmul_seconds(self._saved_flops)

    def _matmul_seconds(self, saved_flops: float) -> float:
        model, sizes, parts = self.model, self.model.sizes, self._kind.parts.values()
        elements = sizes.params.computed_elements(self.name)
        flops = 2.0 * sizes.batch.tokens * elements + self._plain_flops
        flops += 2.0 * sum(map(sizes.activations.products, parts))
        weights = sizes.params.layer_elements(self.name, whole=True)
        moved = sizes.activations.itemsize * weights + self.moved_bytes
        seconds = model.roofline_seconds(flops - saved_flops, moved)
        return self.size_factor * self.split_factor * seconds

    @cached_property
    def _saved_flops(self) -> float:
        """Return the time that quantized matmuls save in a forward pass, in bf16 FLOPs."""
        sizes = self.model.sizes
        params = (param for param in self._kind.params.values() if sizes.params.includes(param))
        saved = sum(
            (1 - self._relative_duration(param)) * sizes.mesh.elements(param.dims, whole=True)
            for param in params
        )
        return 2.0 * sizes.batch.tokens * saved

    def _relative_duration(self, param: Param) -> float:
        """Return the duration of a parameter's matmul, relative to its duration in bf16."""
        config = self.model.sizes.config.model
        in_few_bits = is_multiplied_in_few_bits(config, param)
        return 1 / self.model.hardware.matmul_speedup(config.matmul) if in_few_bits else 1.0

    @cached_property
    def _weight_grad_seconds(self) -> float:
        """Return the time in seconds of the weight gradients of a fully trained layer."""
        is_same = self.model.sizes.config.model.matmul_weight_gradients == "same"
        matmuls = self.matmul_seconds if is_same else self._matmul_seconds(0.0)
        return self.model.hardware.weight_grad_cost * (matmuls + self.score_seconds)

    @cached_property
    def moved_bytes(self) -> float:
        """Return the size in bytes of the activations that a forward pass reads and writes."""
        activations = self.model.sizes.activations
        return sum(
            activations.declared_bytes(part, part.traffic, padded=False)
            for part in self._kind.parts.values()
        )

    @cached_property
    def size_factor(self) -> float:
        """Return the time per token, relative to that at the fastest microbatch size."""
        hardware = self.model.hardware
        if not hardware.fastest_mib:
            return 1.0
        doublings = math.log2(self.moved_bytes / (hardware.fastest_mib * 2**20))
        growth = hardware.growth_above if doublings > 0 else hardware.growth_below
        return 1.0 + growth * abs(doublings)

    @property
    def split_factor(self) -> float:
        """Return the time of a tensor-parallel layer relative to an unsharded layer."""
        return 1.0 + self.model.hardware.split_cost * math.log2(self.model.sizes.mesh.tensor)

    @cached_property
    def score_recompute_seconds(self) -> float:
        """Return the time in seconds to recompute attention scores in a backward pass.

        The result is 0 if measured costs already include this time.
        """
        flops = sum(flops for scores, flops in self._scored if scores.storage == "block") / 2
        return 0.0 if self.model.hardware.measured else self.model.roofline_seconds(flops, 0.0)

    @cached_property
    def kernel_seconds(self) -> float:
        """Return the time in seconds of the attention kernels in a forward pass.

        The result is 0 if measured rates already include this time.
        """
        if self.model.hardware.measured:
            return 0.0
        hardware = self.model.hardware
        return sum(
            flops / (hardware.flops * hardware.attention_efficiency(scores.head_dim))
            for scores, flops in self._scored
            if scores.storage == "mask"
        )

    @property
    def _kernel_flops(self) -> float:
        return sum(flops for scores, flops in self._scored if scores.storage == "mask")

    @property
    def _plain_flops(self) -> float:
        """Return the FLOPs of attention matmuls outside custom kernels."""
        kernels = 0.0 if self.model.hardware.measured else self._kernel_flops
        return sum(flops for _, flops in self._scored) - kernels

    @cached_property
    def _scored(self) -> list[tuple[Scores, float]]:
        """Return the attention operations of a layer, each with its FLOPs in a forward pass."""
        sizes = self.model.sizes
        return [
            (operation, 4.0 * sizes.activations.scores(part) * operation.head_dim)
            for part in self._kind.parts.values()
            for operation in part.operations
            if isinstance(operation, Scores)
        ]

    @property
    def accumulation(self) -> float:
        """Return the time in seconds of gradient accumulation, or 0 if matmuls overlap
        accumulation.
        """
        moved = 3 * 4.0 * self.model.sizes.trained.layer_elements(self.name, whole=True)
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return 0.0 if self.model.overlaps else moved / rate

    def exchange_seconds(self, action: str) -> float:
        """Return the exposed time in seconds of token exchanges in a slot of this type."""
        return self._exchange_seconds[action]

    @cached_property
    def _exchange_seconds(self) -> Mapping[str, float]:
        return {action: self._exchange_seconds_in(action) for action in ACTIONS}

    def _exchange_seconds_in(self, action: str) -> float:
        model, remat = self.model, self.model.sizes.config.pipeline.remat
        forwards = {"F": 1.0, "W": 0.0}.get(action, 2.0 + model.recomputed)
        scoring = forwards * (model.roofline_seconds(self._plain_flops, 0.0) + self.kernel_seconds)
        owned = model.sizes.params.computed_elements(self.name, only_owned=True)
        experts, exposed = forwards * self._product_seconds(owned), 0.0
        for exchange in self.traffic.exchanges:
            sent = model.total_send_seconds(exchange.in_slot(action, remat)) / model.contention
            # The first chunk is sent before any expert starts; a single chunk has no overlap.
            first = sent / exchange.chunks if exchange.chunks > 1 else 0.0
            work = experts * (1.0 - 1.0 / exchange.chunks) + scoring * exchange.overlaps
            exposed += first + model.exposed_seconds(sent - first, work)
        return exposed

    def slot(self, action: str) -> float:
        """Return the time in seconds of a slot of this type, including exposed communication.

        The other devices are assumed to be idle; see `contention`.
        """
        return self._slots[action]

    @cached_property
    def _slots(self) -> Mapping[str, float]:
        return {action: self._in_slot(action) for action in ACTIONS}

    def _in_slot(self, action: str) -> float:
        hardware, model = self.model.hardware, self.model
        pipeline = model.sizes.config.pipeline
        # A kernel's backward pass computes only input gradients.
        kernel = self.kernel_seconds
        inputs = (
            self._with_sums(hardware.input_grad_cost)
            + self.recompute_seconds
            + self.score_recompute_seconds
        )
        inputs += KERNEL_BACKWARD.get(hardware.platform, 2.5) * kernel
        weights = self._trained_share * self._weight_grad_seconds
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
            own += scatter  # not overlapped by XLA for TPU: see `benchmarks/compile_reports.md`
        else:
            traffic += scatter
        left = model.exposed_seconds(
            traffic / model.contention, OVERLAPPED_SHARE["iteration"] * own
        )
        return own + exchanged + left

    @cached_property
    def _trained_share(self) -> float:
        """Return the trained fraction of the weights that are applied to each token."""
        sizes = self.model.sizes
        computed = sizes.params.computed_elements(self.name)
        return sizes.trained.computed_elements(self.name) / computed if computed else 0.0

    def _stash_seconds(self, action: str) -> float:
        """Return the time in seconds to save or load activations.

        The result is 0 if measured costs already include this time.
        """
        if self.model.hardware.measured:
            return 0.0
        sizes = self.model.sizes
        by_chunk = sizes.config.pipeline.remat == "chunk"
        stash = 0.0 if by_chunk else sum(sizes.activations.saved_bytes(self.name))
        deferred = sizes.activations.deferred_bytes(self.name)
        moved = {"F": stash, "B": stash, "I": stash + deferred, "W": deferred}[action]
        hardware = self.model.hardware
        # A copy into or out of a buffer slice reads and writes each byte.
        return 2 * moved / (hardware.memory_gb_per_second * hardware.copy_efficiency * 1e9)

    @cached_property
    def gather(self) -> float:
        """Return the time in seconds to gather the layer's weights."""
        return self.model.total_send_seconds(self.traffic.gathered)

    @cached_property
    def scatter(self) -> float:
        """Return the time in seconds to reduce-scatter the layer's gradient."""
        return self.model.reduce_scatter_seconds(self.traffic.scattered)


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
        seconds = np.array([model.slots(action, chunk) for chunk in sizes.layers.chunks])
        return np.where(slots.active, seconds[chunk_of_slot], 0.0)
    seconds = np.array([model.layers[kind].slot(action) for kind in kinds])
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
    layers = sum(model.slots(action, sizes.layers.pipelined) for action, _ in schedule.kinds)
    return sizes.batch.microbatches * layers / sizes.mesh.stages * model.contention


def _exchange_seconds(model: CostModel, schedule: Schedule) -> float:
    """Return the exposed time in seconds of token exchanges between devices."""
    actions = [action for action, _ in schedule.kinds]
    exchanged = lambda layer: sum(map(layer.exchange_seconds, actions))  # noqa: E731
    layers = model.total(model.sizes.layers.pipelined, exchanged)
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
