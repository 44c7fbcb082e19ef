"""Predicted times of a run's pieces, layers above all: work by a roofline, and traffic.

Gathers travel behind as much of a layer as their mode allows; what a layer's tokens exchange
behind nothing, but for the keys of a ring. The figures of devices and links are those of
`configs/hardware/`, or measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from maxpipe.hardware import Hardware
from maxpipe.models.layers.mlp import GatedMLP
from maxpipe.models.spec import Kind, Scores
from maxpipe.plan.memory import loss_blocks
from maxpipe.plan.sizes import BYTES, Sizes
from maxpipe.plan.traffic import (
    HeadTraffic,
    LayerTraffic,
    Sent,
    lookup,
    message,
    regathered,
    scored,
    tensor_sums,
)

RECOMPUTED = {"none": 0.0, "full": 1.0, "chunk": 2.0}
"""Forwards that a layer's backward runs again; with names that depends on the device. What follows
the last array that a backward reads is left out by compilers: see `LayerCost.again`."""
SCORE_TRAFFIC = 12
"""Moved for each pair of query and key by the softmax of plain attention and its gradient, a pass:
fitted to the TPU compiler's cycles at 2048 and 8192 tokens."""
ACTIONS = "FBIW"
"""Kinds of slots: forward, backward, and its halves for inputs and for weights."""
HIDDEN = {"iteration": 0.5, "visit": 0.0, "step": 0.0}
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
    def hides(self) -> bool:
        """Whether traffic can travel behind work: not if the same cores do both."""
        return not self.hardware.shared_by

    # Links.

    @property
    def size(self) -> int:
        """Bytes of a number in compute type."""
        return BYTES[self.sizes.config.model.compute_dtype]

    def move(self, sent: Sent) -> float:
        """Seconds to send this from every device at once."""
        if not sent.axes or not sent.num_bytes:
            return 0.0
        hardware, mesh = self.hardware, self.sizes.config.mesh
        dcn = math.prod(getattr(mesh, f"dcn_{axis}") for axis in sent.axes)
        latency = sent.rounds * hardware.latency_us * 1e-6
        seconds = sent.num_bytes / (hardware.ways * hardware.link_gb_per_second * 1e9)
        if sent.to_each:
            seconds *= hardware.hops(self.sizes.shards(sent.axes) // dcn) / hardware.exchange_rate
        if sent.of_tokens:
            seconds /= hardware.tokens_rate
        if dcn > 1:
            crossing = sent.num_bytes * (dcn - 1) / dcn
            seconds += crossing / (hardware.network_gb_per_second * 1e9)
            latency += sent.rounds * hardware.network_latency_us * 1e-6
        return seconds + latency

    def moves(self, sent: Iterable[Sent]) -> float:
        """The same of several, one after the other."""
        return sum(map(self.move, sent))

    def scatters(self, sent: Iterable[Sent]) -> float:
        """Seconds of sums to shards.

        XLA for TPU makes one over all devices an all-reduce, of which each keeps a shard. Measured
        rates are of sums over all devices, and have that in them.
        """
        published = self.hardware.is_tpu and not self.hardware.measured
        whole = self.sizes.num_devices if published else 0
        return sum(self.move(each * (1 + (self.sizes.shards(each.axes) == whole))) for each in sent)

    def behind(self, seconds: float, work: float) -> float:
        """What is left of traffic that travels behind this much work."""
        return max(0.0, seconds - work * self.hides)

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
        return (RECOMPUTED | {"names": self.hardware.names_recomputed})[remat]

    @cached_property
    def hop(self) -> float:
        """A message to the next stage."""
        return self.move(Sent(self.sizes.present(["stage"]), 2 * message(self.sizes), 2))

    @cached_property
    def head(self) -> float:
        """Loss head of a microbatch: all stages share it. Heads ahead, of which each does all."""
        sizes = self.sizes
        matrix, heads = sizes.head_elements(whole=True), 1 + sizes.heads_ahead
        trained, ahead = sizes.trained.head_elements(whole=True), sizes.ahead_matrices()
        trained_ahead = sizes.trained.ahead_matrices()
        flops = 4.0 * (heads * matrix + ahead) + 2.0 * (heads * trained + trained_ahead)
        flops *= sizes.tokens
        # Each further block reads the matrix again, and reads and writes its gradient.
        again = (4.0 + 8.0) * (loss_blocks(sizes) - 1) * matrix
        moved = heads * (4.0 * 4 * sizes.tokens * sizes.vocabulary + 4.0 * matrix + again)
        work, gathers = self.contention * self.work(flops, moved), 0.0
        if sizes.config.pipeline.weight_gather == "iteration":
            # Inside a conditional, in which compilers start nothing early.
            weights = HeadTraffic(sizes)
            gathers = self.moves(weights.gathered) + self.scatters(weights.scattered)
        return work + gathers + self.move(scored(sizes)) + self.embed + self.layers_ahead

    @property
    def layers_ahead(self) -> float:
        """Layers of heads ahead, of a microbatch, and another lookup for them.

        They go forward twice, whatever is kept of others.
        """
        if not (layers := self.sizes.layers_ahead):
            return 0.0
        once = self.slots("F", layers) + self.slots("B", layers)
        again = self.total(layers, lambda layer: layer.forward - layer.again)
        return self.contention * (once + again) + self.embed

    @cached_property
    def embed(self) -> float:
        """Lookup of a microbatch, and its gradient."""
        return self.moves(lookup(self.sizes))


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
    def sent(self) -> LayerTraffic:
        """What it sends."""
        return LayerTraffic(self.model.sizes, self.name)

    @cached_property
    def forward(self) -> float:
        """A forward, its tensor-parallel sums included."""
        return self.kernel_seconds + self._with_sums(1.0)

    def _with_sums(self, forwards: float) -> float:
        """As much work as of these forwards, without kernels, and the sums of one."""
        matmuls, scores = forwards * self.matmul_seconds, forwards * self.score_seconds
        if not self._in_rings:
            return matmuls + scores + self._sums
        matmuls *= 1.0 + self.model.hardware.ring_cost * (self.model.sizes.token_shards - 1)
        both = max(matmuls, self._sums) if self.model.hides else matmuls + self._sums
        return scores + both

    @cached_property
    def again(self) -> float:
        """What a backward runs again of forwards, but for what nothing reads then.

        Of a branch that ends a layer, nothing of a backward reads the output: a network's last
        projection is not multiplied again, and its sums are not sent.
        """
        remat, recomputed = self.model.sizes.config.pipeline.remat, self.model.recomputed
        if remat == "none":  # nothing is sent, and nothing waits for other devices
            return self.model.hardware.none_recomputed * self.seconds / self.by_split
        unread = self._unread if remat in ("full", "chunk") else 0.0
        return recomputed * self.forward - unread

    @cached_property
    def _unread(self) -> float:
        last, sizes = self._kind.branches[-1], self.model.sizes
        if last.after is not None or not isinstance(last.part, GatedMLP):
            return 0.0
        down = sizes.elements(last.part.params["down"].dims, whole=True)
        matmul = self.model.work(2.0 * sizes.tokens * down, 0.0)
        return matmul + self._sums / len(self._kind.branches)

    @cached_property
    def _sums(self) -> float:
        """Tensor-parallel sums of a forward."""
        return self.model.move(tensor_sums(self.model.sizes, self.name)) / self.model.contention

    @property
    def _in_rings(self) -> bool:
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
        pairs = sum(map(self.model.sizes.held_scores, self._kind.parts.values()))
        rate = self.model.hardware.memory_gb_per_second * 1e9
        return self.by_size * self.by_split * SCORE_TRAFFIC * pairs / rate

    @cached_property
    def matmul_seconds(self) -> float:
        """Of that, the rest."""
        model, sizes, parts = self.model, self.model.sizes, self._kind.parts.values()
        flops = 2.0 * sizes.tokens * sizes.computed_elements(self.name) + self._plain_flops
        flops += 2.0 * sum(map(sizes.products, parts))
        moved = model.size * self._whole + self.moved
        return self.by_size * self.by_split * model.work(flops, moved)

    @cached_property
    def moved(self) -> float:
        """Bytes of activations that a forward moves through memory."""
        sizes = self.model.sizes
        return sum(sizes.held_bytes(part, part.traffic) for part in self._kind.parts.values())

    @cached_property
    def by_size(self) -> float:
        """Time of a token beside that in a microbatch of the size that is the fastest."""
        hardware = self.model.hardware
        if not hardware.fastest_mib:
            return 1.0
        doublings = math.log2(self.moved / (hardware.fastest_mib * 2**20))
        growth = hardware.growth_above if doublings > 0 else hardware.growth_below
        return 1.0 + growth * abs(doublings)

    @property
    def by_split(self) -> float:
        """Time of a layer beside that of one whose width is not split."""
        return 1.0 + self.model.hardware.split_cost * math.log2(self.model.sizes.tensor)

    @cached_property
    def rescored(self) -> float:
        """Of a backward, the scores that were not kept; measured costs of a backward have them."""
        flops = sum(flops for each, flops in self._scored if each.held == "block") / 2
        return 0.0 if self.model.hardware.measured else self.model.work(flops, 0.0)

    @cached_property
    def kernel_seconds(self) -> float:
        """Of a forward, attention's products in a kernel; measured rates of a layer have them."""
        if self.model.hardware.measured:
            return 0.0
        hardware = self.model.hardware
        return self._kernel_flops / (hardware.flops * hardware.kernel_efficiency)

    @property
    def _kernel_flops(self) -> float:
        return sum(flops for each, flops in self._scored if each.held == "mask")

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
            (each, 4.0 * sizes.scores(part) * each.head_size)
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
        return 0.0 if self.model.hides else moved / rate

    def exchanged(self, action: str) -> float:
        """In a slot of this kind, what its tokens exchange with other devices, behind no work."""
        return self._exchanged[action]

    @cached_property
    def _exchanged(self) -> Mapping[str, float]:
        return {action: self._exchanged_in(action) for action in ACTIONS}

    def _exchanged_in(self, action: str) -> float:
        model, remat = self.model, self.model.sizes.config.pipeline.remat
        forwards = {"F": 1.0, "W": 0.0}.get(action, 2.0 + model.recomputed)
        scoring = forwards * (model.work(self._plain_flops, 0.0) + self.kernel_seconds)
        return sum(
            model.behind(
                model.moves(each.in_slot(action, remat)) / model.contention,
                scoring if each.hides else 0.0,
            )
            for each in self.sent.exchanges
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
        inputs = self._with_sums(hardware.input_grad_cost) + self.again + self.rescored
        inputs += KERNEL_BACKWARD.get(hardware.platform, 2.5) * kernel
        weights = hardware.weight_grad_cost * self._trained_share * (self.seconds - kernel)
        weights += self.accumulation
        both = max(inputs, inputs + weights - hardware.deferred_cost * self.seconds)
        own = {"F": self.forward, "B": both, "I": inputs, "W": weights}[action]
        own += self._kept(action)
        if not self._in_rings:
            again = regathered(model.sizes, self.name, action, model.recomputed)
            own += model.move(again) / model.contention
        exchanged = self.exchanged(action)
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
        left = model.behind(traffic / model.contention, HIDDEN["iteration"] * own)
        return own + exchanged + left

    @cached_property
    def _trained_share(self) -> float:
        """Of the weights that meet each token, those that have a gradient."""
        sizes = self.model.sizes
        computed = sizes.computed_elements(self.name)
        return sizes.trained.computed_elements(self.name) / computed if computed else 0.0

    def _kept(self, action: str) -> float:
        """Writing or reading what waits between slots; measured costs of a backward have that."""
        if self.model.hardware.measured:
            return 0.0
        sizes = self.model.sizes
        by_chunk = sizes.config.pipeline.remat == "chunk"
        stash = 0.0 if by_chunk else sum(sizes.kept_bytes(self.name))
        deferred = sizes.deferred_bytes(self.name)
        moved = {"F": stash, "B": stash, "I": stash + deferred, "W": deferred}[action]
        hardware = self.model.hardware
        # Copied into a buffer's slice, or out of it: read and written.
        return 2 * moved / (hardware.memory_gb_per_second * hardware.copy_efficiency * 1e9)

    @cached_property
    def gather(self) -> float:
        """Its weights, from shards on other devices."""
        return self.model.moves(self.sent.gathered)

    @cached_property
    def scatter(self) -> float:
        """Its gradient, to shards."""
        return self.model.scatters(self.sent.scattered)
