"""Predict the times of layers, slots and transfers from a roofline model of the devices and links.

The compute time of a layer follows a roofline model. Weight gathers overlap with a fraction of the
layer's compute that depends on `pipeline.weight_gather`. Token exchanges do not overlap with
compute, except for keys and values in ring attention and for chunks of expert tokens on GPUs.
Copies of a layer's arrays from and to host memory overlap with the layer's slot. Device and link
parameters come from `configs/hardware/` or from a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from maxpipe.hardware import Hardware
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.spec import LayerType, Param, Scores
from maxpipe.planner.memory import loss_blocks
from maxpipe.planner.memory_terms import is_multiplied_in_few_bits
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.traffic import (
    CommVolume,
    HeadTraffic,
    LayerTraffic,
    layer_host_copies,
    lookup,
    loss_head_traffic,
    message,
    num_slices,
    regather_traffic,
    tensor_sums,
)

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
KERNEL_BACKWARD = 2.5
"""FLOPs of the attention kernels in the backward pass, relative to those in the forward pass."""


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
        hardware, dcn = self.hardware, num_slices(self.sizes, sent)
        latency = sent.num_collectives * hardware.latency_us * 1e-6
        seconds = sent.num_bytes / (hardware.ways * hardware.link_gb_per_second * 1e9)
        if sent.is_all_to_all:
            inside = (sent.group or self.sizes.mesh.shards(sent.axes)) // dcn
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

    def host_seconds(self, num_bytes: float) -> float:
        """Return the time in seconds of copies from or to host memory."""
        rate = self.hardware.host_gb_per_second * 1e9
        return num_bytes / rate if rate else 0.0

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

    def pipelined_slots(self, action: str, layers: Mapping[str, int]) -> float:
        """Return the time in seconds of a slot with these pipelined layers, which can have arrays
        in host memory.
        """
        return self.total(layers, lambda layer: layer.pipelined_slot(action))

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
        is_read = last.post_norm is not None or last.connection is not None
        if is_read or not isinstance(last.part, MLP):
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

    @cached_property
    def _kernel_weight_seconds(self) -> Mapping[str, float]:
        """Return the time in seconds that a slot of each type spends on the weights of expert
        kernels.

        The weights of a stage are stacked. A matmul of XLA reads its slice and adds to the gradient
        accumulators in place, but a custom kernel needs a copy of the slice, and a separate pass
        adds the gradient. The result is 0 if measured costs already include this time.
        """
        hardware, sizes = self.model.hardware, self.model.sizes
        stacked = sizes.config.pipeline.weight_gather != "iteration"
        if hardware.measured or not hardware.is_tpu or not stacked:
            return dict.fromkeys(ACTIONS, 0.0)
        rate = hardware.memory_gb_per_second * 1e9
        weights = sizes.params.kernel_elements(self.name)
        copied = 2 * sizes.activations.itemsize * weights / (rate * hardware.copy_efficiency)
        added = 3 * 4.0 * sizes.trained.kernel_elements(self.name) / rate
        return {"F": copied, "B": copied + added, "I": copied, "W": added}

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

    def pipelined_slot(self, action: str) -> float:
        """Return the time in seconds of a slot of this type, including exposed communication and
        exposed copies from and to host memory.
        """
        return self.slot(action) + self.host_seconds(action)

    def host_seconds(self, action: str) -> float:
        """Return the exposed time in seconds of copies from and to host memory in a slot of this
        type. The copies in both directions overlap with each other and with the slot.
        """
        return self._host_seconds[action]

    @cached_property
    def _host_seconds(self) -> Mapping[str, float]:
        def exposed(action: str) -> float:
            copied = max(layer_host_copies(self.model.sizes, self.name, action))
            return self.model.exposed_seconds(self.model.host_seconds(copied), self.slot(action))

        return {action: exposed(action) for action in ACTIONS}

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
        inputs += KERNEL_BACKWARD * kernel
        weights = self._trained_share * self._weight_grad_seconds
        weights += self.accumulation
        both = max(inputs, inputs + weights - hardware.deferred_cost * self.seconds)
        own = {"F": self.forward, "B": both, "I": inputs, "W": weights}[action]
        own += self._stash_seconds(action) + self._kernel_weight_seconds[action]
        if not self._uses_collective_matmul:
            again = regather_traffic(model.sizes, self.name, action, model.recomputed)
            own += model.send_seconds(again) / model.contention
        exchanged = self.exchange_seconds(action)
        if pipeline.weight_gather != "iteration":
            return own + exchanged
        traffic = self.model.total_send_seconds(self.traffic.gathered_in(action))
        scatter = self.scatter if action in "BW" else 0.0
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
