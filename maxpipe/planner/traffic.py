"""Compute the number of bytes that a device sends in one step.

The number and types of collectives match those that `pipeline` and `nn` execute. Tests check the
counts against compiled programs. Reductions of losses and statistics are not included. This module
does not import jax.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from maxpipe.models.count import matrices_ahead
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.recurrent import Recurrent
from maxpipe.models.spec import Param, Scores
from maxpipe.optim.state_spec import BYTES, is_orthogonalised, matrix_dims
from maxpipe.parallel.axes import BLOCK_SIZES, axis_table
from maxpipe.planner.memory import loss_blocks, offloaded_weight_bytes, offloads_state
from maxpipe.planner.memory_terms import (
    gathered_itemsize,
    is_quantized,
    optimizer_bytes,
    zero1_dim,
)
from maxpipe.planner.sizes import Sizes
from maxpipe.schedule.table import Schedule

INTEGER = 4
"""Size in bytes of a token ID or an expert index."""
FLOAT32_BYTES = 4
Pass = Literal["forward", "backward"]
BOTH_PASSES: tuple[Pass, ...] = ("forward", "backward")


class CommVolume(NamedTuple):
    """Bytes that one device sends to the other devices along the given mesh axes."""

    axes: tuple[str, ...]
    num_bytes: float
    num_collectives: float = 1
    """Number of collectives."""
    is_all_reduce: bool = False
    """Whether the collectives are all-reduces. Compilers merge all-reduces, so their final number
    is unknown."""
    is_all_to_all: bool = False
    """Whether the collectives are all-to-alls."""
    of_tokens: bool = False
    """Whether the collectives gather or reduce-scatter tokens along a dimension other than the
    first."""
    group: int = 0
    """Number of adjacent devices along the axes between which data is sent; 0 means all devices."""

    def __mul__(self, times: float) -> CommVolume:  # type: ignore[override]
        return self._replace(num_bytes=times * self.num_bytes)


class TokenExchange(NamedTuple):
    """Token exchange of a layer, which sends tokens to other devices and returns the results."""

    forward: CommVolume
    recompute: CommVolume
    """Token exchange in a recomputed forward pass, where some transfers can be omitted."""
    backward: CommVolume
    overlaps: bool = False
    """Whether the exchange overlaps with the attention scores of the same sublayer."""
    chunks: int = 1
    """Number of independent chunks. A chunk can be exchanged while the experts process another
    chunk."""

    def in_slot(self, action: str, remat: str) -> list[CommVolume]:
        """Return the token exchanges in a slot of type `F`, `B`, `I` or `W`."""
        if action in "FW":
            return [self.forward] if action == "F" else []
        recomputed = {"none": [], "chunk": [self.forward, self.recompute]}.get(
            remat, [self.recompute]
        )
        return [*recomputed, self.backward]


@dataclass(frozen=True)
class LayerTraffic:
    """Communication of one layer for one microbatch."""

    sizes: Sizes
    name: str

    @property
    def _params(self) -> Iterable[Param]:
        return self.sizes.model.layer_types[self.name].params.values()

    @cached_property
    def gathered(self) -> tuple[CommVolume, ...]:
        """Return the collectives that gather the layer's weights for both passes."""
        return self._gathered_for(lambda _: BOTH_PASSES)

    @cached_property
    def gathered_forward(self) -> tuple[CommVolume, ...]:
        """Return the collectives that gather the weights of a forward pass, which does not use the
        arrays that are quantized for the backward matmuls.
        """
        return self._gathered_for(lambda _: ("forward",))

    @cached_property
    def gathered_backward(self) -> tuple[CommVolume, ...]:
        """Return the collectives that gather the weights of a backward pass, which uses the arrays
        that are quantized for the forward matmuls only to repeat these matmuls.
        """
        repeated = self.sizes.activations.repeated_matmuls(self.name)
        return self._gathered_for(lambda key: BOTH_PASSES if key in repeated else ("backward",))

    def _gathered_for(
        self, passes: Callable[[tuple[str, str]], Iterable[Pass]]
    ) -> tuple[CommVolume, ...]:
        """Return the collectives that gather weights, each for the passes of its (sublayer,
        name).
        """
        params = self.sizes.model.layer_types[self.name].params
        return _gather_traffic(self.sizes, ((param, passes(key)) for key, param in params.items()))

    def gathered_in(self, action: str) -> list[CommVolume]:
        """Return the all-gathers in a slot of type `F`, `B`, `I` or `W` with
        `pipeline.weight_gather=iteration`.
        """
        if action in "FW":
            return [*self.gathered_forward] if action == "F" else []
        by_chunk = self.sizes.config.pipeline.remat == "chunk"
        return [*(self.gathered_forward if by_chunk else ()), *self.gathered_backward]

    @cached_property
    def scattered(self) -> tuple[CommVolume, ...]:
        """Return the reduce-scatters of the layer's gradient."""
        size = gradient_itemsize(self.sizes)
        return _scatter_traffic(self.sizes, _trainable(self._params), size)

    @cached_property
    def reduced(self) -> tuple[CommVolume, ...]:
        """Return the end-of-step reductions of the layer's gradient over the axes that do not shard
        it.
        """
        return _reduction_traffic(self.sizes, self._params)

    @cached_property
    def exchanges(self) -> tuple[TokenExchange, ...]:
        """Return the exchanges of attention, recurrent and expert layers."""
        exchanges = []
        for part in self.sizes.model.layer_types[self.name].parts.values():
            if isinstance(part, Experts):
                exchanges += _expert_exchanges(self.sizes, part)
            if isinstance(part, Recurrent):
                exchanges += _state_exchanges(self.sizes, part)
            for operation in part.operations:
                if isinstance(operation, Scores):
                    exchanges += _context_exchanges(self.sizes, operation)
        return tuple(exchanges)


def merge_by_axes(sent: Iterable[CommVolume]) -> tuple[CommVolume, ...]:
    """Merge the communication volumes that use the same mesh axes and group size."""
    total: dict[tuple[tuple[str, ...], int], float] = defaultdict(float)
    for volume in sent:
        total[volume.axes, volume.group] += volume.num_bytes
    return tuple(
        CommVolume(axes, num_bytes, group=group) for (axes, group), num_bytes in total.items()
    )


def _gather_traffic(
    sizes: Sizes, params: Iterable[tuple[Param, Iterable[Pass]]]
) -> tuple[CommVolume, ...]:
    """Return the collectives that gather parameters for the given passes, merged if they have the
    same axes and type.
    """
    volumes: list[CommVolume] = []
    for param, passes in params:
        arrays = _gathered_arrays(sizes, param)
        volumes += {name: sent for each in passes for name, sent in arrays[each].items()}.values()
    return _merge_collectives(volumes)


def _gathered_arrays(sizes: Sizes, param: Param) -> dict[Pass, dict[str, CommVolume]]:
    """Return the collectives that gather a parameter for each pass, keyed by array.

    Both passes share arrays with the same key. Scales of complete channels and matrices need the
    maximum over the shards; see `pipeline.weights` and `MatmulQuantizer.quantize_weight`.
    """
    mesh, model = sizes.mesh, sizes.config.model
    axes, elements = mesh.gathered_over(param.dims), mesh.elements(param.dims, whole=True)

    def gather(num_bytes: float) -> CommVolume:
        return CommVolume(axes, mesh.ring_share(axes) * num_bytes)

    if not is_quantized(sizes, param):
        values = {"values": gather(gathered_itemsize(sizes, param) * elements)}
        return {"forward": values, "backward": values}
    inside = param.dims[: param.num_contracted_dims]
    outputs = param.dims[param.num_contracted_dims :]
    if model.matmul == "mxfp8":
        scales = gather(elements / BLOCK_SIZES["mxfp8"])
        return {each: {each: gather(elements), f"{each} scales": scales} for each in BOTH_PASSES}
    if model.matmul == "nvfp4":
        scales = {"scales": gather(elements / BLOCK_SIZES["nvfp4"] ** 2)}
        scales |= {"maximum": _scale_maximum(sizes, axes, 1)}
        return {each: {each: gather(elements / 2), **scales} for each in BOTH_PASSES}
    if model.matmul_scales == "tensor":
        values = {"values": gather(elements), "maximum": _scale_maximum(sizes, axes, 1)}
        return {"forward": values, "backward": values}
    sides = (inside, outputs), (outputs, inside)
    arrays: dict[Pass, dict[str, CommVolume]] = {"forward": {}, "backward": {}}
    for each, (summed, others) in zip(BOTH_PASSES, sides, strict=True):
        arrays[each][each] = gather(elements)
        if mesh.gathered_over(summed):
            maximum = _scale_maximum(sizes, axes, mesh.elements(others))
            arrays[each][f"{each} maximum"] = maximum
        else:
            whole = gather(FLOAT32_BYTES * mesh.elements(others, whole=True))
            arrays[each][f"{each} scales"] = whole
        if divided := mesh.nontrivial_axes({"tensor"} & mesh.axes_of(summed)):
            maximum = _scale_maximum(sizes, divided, mesh.elements(others))
            arrays[each][f"{each} tensor maximum"] = maximum
    return arrays


def _scale_maximum(sizes: Sizes, axes: tuple[str, ...], count: int) -> CommVolume:
    """Return the all-reduce of the maxima from which `count` float32 scales are computed."""
    sent = 2 * sizes.mesh.ring_share(axes) * FLOAT32_BYTES * count
    return CommVolume(axes, sent, is_all_reduce=True)


def _scatter_traffic(sizes: Sizes, params: Iterable[Param], size: int) -> tuple[CommVolume, ...]:
    """Return the reduce-scatters of gradients with elements of `size` bytes, merged if they use the
    same axes.
    """
    mesh = sizes.mesh
    shared = [(param, axes) for param in params if (axes := mesh.gathered_over(param.dims))]
    return _merge_collectives(
        CommVolume(axes, mesh.ring_share(axes) * size * mesh.elements(param.dims, whole=True))
        for param, axes in shared
    )


def _merge_collectives(volumes: Iterable[CommVolume]) -> tuple[CommVolume, ...]:
    """Merge the collectives that have the same axes and type. All-reduces become one collective, as
    in compiled programs.
    """
    merged: dict[tuple[tuple[str, ...], bool], CommVolume] = {}
    for volume in volumes:
        if not volume.axes:
            continue
        key = volume.axes, volume.is_all_reduce
        before = merged.get(key, volume._replace(num_bytes=0.0, num_collectives=0))
        count = 1 if volume.is_all_reduce else before.num_collectives + volume.num_collectives
        merged[key] = before._replace(
            num_bytes=before.num_bytes + volume.num_bytes, num_collectives=count
        )
    return tuple(merged.values())


def _reduction_traffic(sizes: Sizes, params: Iterable[Param]) -> tuple[CommVolume, ...]:
    """Return the reductions of gradients over the axes that do not shard the gradients."""
    return tuple(sent for param in _trainable(params) for sent in _param_reductions(sizes, param))


def _trainable(params: Iterable[Param]) -> list[Param]:
    return [param for param in params if param.trainable]


def _param_reductions(sizes: Sizes, param: Param) -> Iterator[CommVolume]:
    mesh = sizes.mesh
    axes, size = mesh.reduced_over(param.dims), gradient_itemsize(sizes)
    elements, data = mesh.elements(param.dims), mesh.nontrivial_axes(["data"])
    if data and zero1_dim(sizes, param) is not None:
        # Reduce-scatter gradients to the shard that a device updates, then all-gather the
        # parameters.
        axes = tuple(axis for axis in axes if axis not in data)
        stored = BYTES[sizes.config.model.param_dtype]
        yield CommVolume(data, mesh.ring_share(data) * size * elements)
        yield CommVolume(data, mesh.ring_share(data) * stored * elements)
    if axes:
        yield CommVolume(axes, 2 * mesh.ring_share(axes) * size * elements, is_all_reduce=True)
    if is_orthogonalised(sizes.config.optim, param):
        yield from _muon_traffic(sizes, param)


def _muon_traffic(sizes: Sizes, param: Param) -> Iterator[CommVolume]:
    """Yield the all-to-alls that unshard matrices for Muon, and those that reshard the results.

    The number of matrices may be padded (see `optim.muon`).
    """
    mesh, matrix, table = sizes.mesh, matrix_dims(param), axis_table(sizes.config.mesh)
    assert matrix is not None
    dim, data = zero1_dim(sizes, param), mesh.nontrivial_axes(["data"])
    shard = FLOAT32_BYTES * mesh.elements(param.dims) / (1 if dim is None else mesh.shards(data))
    for side in matrix:
        over = {axis for number in side for axis in table.get(param.axes[number], ())}
        axes = mesh.nontrivial_axes(over | ({*data} if dim in side else set()))
        if axes:
            yield CommVolume(axes, 2 * mesh.ring_share(axes) * shard, 2, is_all_to_all=True)


def gradient_itemsize(sizes: Sizes) -> int:
    """Return the size in bytes of one gradient element in reductions."""
    return BYTES[sizes.config.optim.reduce_dtype]


# Sequences sharded over the context axis.


def _context_exchanges(sizes: Sizes, scores: Scores) -> Iterator[TokenExchange]:
    mesh, activations = sizes.mesh, sizes.activations
    if not (axes := mesh.nontrivial_axes(["context"])):
        return
    context, size = mesh.axes["context"], activations.itemsize
    keys = sum(map(activations.elements, scores.keys))
    method = activations.context_method(scores)
    if (group := method.exchange_size) > 1:
        keys *= 1.0 + method.remote
        all_heads = keys + activations.elements(scores.query) + activations.elements(scores.mixed)
        sent = (1.0 - 1.0 / group) * size * all_heads
        once = CommVolume(axes, sent, 2 + len(scores.keys), is_all_to_all=True, group=group)
        yield TokenExchange(once, once, once)
    if (ring := method.ring_size) > 1:
        # Float32 gradients travel around the ring together with keys and values.
        hops = ring * len(scores.keys)
        around = CommVolume(axes, ring * keys * size, hops)
        back = CommVolume(axes, ring * keys * (size + FLOAT32_BYTES), 2 * hops)
        saves = sizes.config.pipeline.remat == "names" and "context" in activations.saved_names
        yield TokenExchange(around, around * (not saves), back, overlaps=True)
    if method.share:
        sent = (context - 1) * method.share * size * keys
        once = CommVolume(axes, sent, len(scores.keys))
        yield TokenExchange(once, once, once)


def _state_exchanges(sizes: Sizes, part: Recurrent) -> Iterator[TokenExchange]:
    """Yield the exchange of the effects of all tokens on the state, and of the tokens before each
    piece. The backward pass exchanges gradients of the same size.
    """
    axes, shard = sizes.mesh.nontrivial_axes(["context"]), part.shard
    if not axes or shard is None:
        return
    elements, others = sizes.activations.elements, shard.devices - 1
    effects = FLOAT32_BYTES * elements(part.effect_dims)
    tokens = sizes.activations.itemsize * sum(map(elements, part.mixed_dims))
    sent = others * (effects + min(part.kernel - 1, shard.tokens) * tokens) / shard.tokens
    once = CommVolume(axes, sent, 1 + len(part.mixed_dims))
    yield TokenExchange(once, once, once)


# Experts sharded over the expert axis.


def _expert_exchanges(sizes: Sizes, part: Experts) -> Iterator[TokenExchange]:
    mesh = sizes.mesh
    context = mesh.nontrivial_axes(["context"])
    if part.capacity and context:
        # Expert capacity is allocated for full sequences.
        choices = INTEGER * sizes.batch.tokens * part.per_token
        places = CommVolume(context, (mesh.axes["context"] - 1) * choices)
        yield TokenExchange(places, places, CommVolume(context, 0.0, 0))
    if not (axes := mesh.nontrivial_axes(["expert"])):
        return
    size, around = sizes.activations.itemsize, mesh.ring_share(axes)
    if part.permutes_tokens:
        # Send only the used rows, or padded buffers.
        ragged = sizes.platform in ("tpu", "cuda") and part.all_to_all == "auto"
        rows = sizes.batch.tokens * (part.per_token if ragged else part.rows_received or 0.0)
        width, routes = around * size * rows * part.d_model, around * rows * FLOAT32_BYTES
        # The forward pass exchanges token counts, which are needed by ragged transfers and the
        # backward pass.
        counted = ragged or sizes.config.pipeline.remat == "none"
        calls, chunks = (4 + counted, 3 + ragged, 3), part.all_to_all_chunks
        yield TokenExchange(
            CommVolume(axes, 2 * width + 2 * routes, chunks * calls[0], is_all_to_all=True),
            CommVolume(axes, width + 2 * routes, chunks * calls[1], is_all_to_all=True),
            CommVolume(axes, 2 * width + routes, chunks * calls[2], is_all_to_all=True),
            chunks=chunks if sizes.platform == "cuda" else 1,
        )
        return
    # All-gather the tokens along the axis, and reduce-scatter the expert outputs.
    width = around * size * mesh.axes["expert"] * sizes.activations.whole_hidden
    weights = around * FLOAT32_BYTES * sizes.batch.tokens * part.num_experts
    once = CommVolume(axes, 2 * width + weights, 3)
    yield TokenExchange(once, CommVolume(axes, width + weights, 2), once)


# Tensor parallelism.


def tensor_sums(sizes: Sizes, kind: str) -> CommVolume:
    """Return the tensor-parallel reductions, or token gathers, in a layer's forward pass."""
    mesh = sizes.mesh
    axes = mesh.nontrivial_axes(["tensor"])
    whole = sizes.activations.itemsize * sizes.activations.whole_hidden
    branches = len(sizes.model.layer_types[kind].branches)
    sent, gathers = branches * 2 * mesh.ring_share(axes) * whole, mesh.token_shards > 1
    rounds = 2 * branches if gathers else branches
    return CommVolume(axes, sent, rounds, is_all_reduce=not gathers, of_tokens=gathers)


def regather_traffic(sizes: Sizes, kind: str, action: str, recomputed: float) -> CommVolume:
    """Return the additional token gathers for weight gradients in a slot of this type.

    An unsplit backward pass gathers cotangents once, and gathers inputs in its recomputed forward
    pass.
    """
    sums = tensor_sums(sizes, kind)
    if sizes.mesh.token_shards == 1 or action not in "BW":
        return sums * 0.0
    return sums * (1.0 if action == "W" else 0.5 * max(0.0, 1.0 - recomputed))


# Embedding, loss head, and messages between stages.


def message(sizes: Sizes) -> float:
    """Return the size in bytes of a message between two stages."""
    return float(sizes.activations.itemsize * sizes.activations.stream)


def lookup(sizes: Sizes) -> list[CommVolume]:
    """Return the communication to look up one microbatch's embeddings, including the gradient."""
    mesh = sizes.mesh
    stage, columns = (
        mesh.nontrivial_axes(["stage"]),
        mesh.gathered_over(sizes.model.ends.embedding.dims),
    )
    rows = float(sizes.activations.itemsize * sizes.activations.whole_hidden)
    ids = CommVolume(columns, INTEGER * sizes.batch.tokens * (mesh.shards(columns) - 1.0))
    travelled = CommVolume(columns, mesh.ring_share(columns) * rows, is_all_to_all=True)
    summed = CommVolume(stage, 2 * mesh.ring_share(stage) * rows, is_all_reduce=True)
    once = [ids, travelled, summed]
    # With prologue layers, each stage looks up embeddings for a different microbatch and later
    # sends the result to the ring.
    if sizes.layers.prologue:
        part = 1 / mesh.stages
        own = CommVolume(stage, mesh.ring_share(stage) * rows, part)
        width = sizes.model.stream_width / sizes.config.model.d_model
        once = [
            ids._replace(num_collectives=part),
            travelled._replace(num_collectives=part) * part,
            own,
            summed * width,
        ]
    return once * (2 if sizes.trained.embedding_elements() else 1)


def loss_head_traffic(sizes: Sizes) -> CommVolume:
    """Return the all-reduces in the loss head for one microbatch.

    The all-reduces cover the output, its float32 cotangent, and three scalars per token and head.
    """
    stage, size = sizes.mesh.nontrivial_axes(["stage"]), sizes.activations.itemsize
    numbers = FLOAT32_BYTES * 3 * (1 + sizes.layers.mtp_heads) * sizes.batch.tokens
    sent = (size + FLOAT32_BYTES) * sizes.activations.hidden + numbers
    return CommVolume(
        stage,
        2 * sizes.mesh.ring_share(stage) * sent,
        1 + 4 * loss_blocks(sizes),
        is_all_reduce=True,
    )


@dataclass(frozen=True)
class HeadTraffic:
    """Communication to gather the head and MTP matrices once and to scatter their gradients once.

    Matrices inside MTP layers are not included.
    """

    sizes: Sizes

    @property
    def _params(self) -> tuple[Param, ...]:
        sizes, ends = self.sizes, self.sizes.model.ends
        own = ends.params["embedding" if ends.head is None else "head",]
        ahead = (ends.params[name] for name in matrices_ahead(sizes.model))
        return (replace(own, dims=sizes.mesh.padded(own.dims)), *ahead)

    @cached_property
    def gathered(self) -> tuple[CommVolume, ...]:
        """Return the all-gathers of the head weights."""
        return _gather_traffic(self.sizes, ((param, BOTH_PASSES) for param in self._params))

    @cached_property
    def scattered(self) -> tuple[CommVolume, ...]:
        """Return the reduce-scatters of the head gradients."""
        size = gradient_itemsize(self.sizes)
        return _scatter_traffic(self.sizes, _trainable(self._params), size)

    @cached_property
    def reduced(self) -> tuple[CommVolume, ...]:
        """Return the reductions of gradients at the end of a step, including embedding and norm
        gradients.
        """
        sizes, ends = self.sizes, self.sizes.model.ends
        embedding = replace(ends.params["embedding",], dims=sizes.mesh.padded(ends.embedding.dims))
        norms = [param for (name, *_), param in ends.params.items() if name == "final_norm"]
        return _reduction_traffic(sizes, (*self._params, embedding, *norms))


# Complete step.


class LayerExecutions(NamedTuple):
    """Execution counts per device and step, keyed by layer type."""

    run: Mapping[str, float]
    """Number of times that the average stage runs a layer, forward and backward, for one
    microbatch."""
    gathered: Mapping[str, float]
    """Number of gathers outside of the layers' slots."""
    scattered: Mapping[str, float]
    head: float
    """Number of gathers of the output projection, and number of scatters of the projection's
    gradient."""
    num_grouped: Mapping[str, float] | None = None
    """Number of collectives for gathers and for scatters, or None if every layer uses separate
    collectives."""


def layer_executions(sizes: Sizes, schedule: Schedule) -> LayerExecutions:
    """Return the execution counts under the configured `pipeline.weight_gather`."""
    pipeline = sizes.config.pipeline
    # Every stage runs the MTP layers for all microbatches.
    ahead = {kind: count * sizes.mesh.stages for kind, count in sizes.layers.mtp.items()}
    runs = sizes.batch.microbatches / sizes.mesh.stages
    layers = sizes.layers.pipelined + sizes.layers.prologue + Counter(ahead)
    run = {kind: runs * count for kind, count in layers.items()}
    if pipeline.weight_gather == "iteration":
        return LayerExecutions(run, {}, run, sizes.batch.microbatches)
    once = sizes.layers.prologue + Counter(sizes.layers.mtp)
    if pipeline.weight_gather == "step" or not schedule.weight_window.num_chunk_slots:
        held = once + Counter(sizes.layers.slots)
        stacks = (sizes.layers.slots, sizes.layers.prologue, sizes.layers.mtp)
        together = {kind: float(sum(kind in stack for stack in stacks)) for kind in held}
        return LayerExecutions(run, held, held, 1.0, together)
    ticks = (schedule.weight_window.gather_tick, schedule.weight_window.reduce_tick)
    chunk = Counter(sizes.layers.chunk_slots)
    gathered, scattered = (
        once + Counter({kind: len(column) * chunk[kind] for kind in chunk}) for column in ticks
    )
    return LayerExecutions(run, gathered, scattered, 1.0)


def step_end_traffic(sizes: Sizes) -> Iterator[CommVolume]:
    """Yield the reductions of gradients at the end of a step."""
    held = Counter(sizes.layers.slots) + sizes.layers.prologue + Counter(sizes.layers.mtp)
    for kind, count in held.items():
        yield from (sent * count for sent in LayerTraffic(sizes, kind).reduced)
    yield from HeadTraffic(sizes).reduced
    stage, trained = sizes.mesh.nontrivial_axes(["stage"]), sizes.trained
    elements = trained.prologue_elements() + trained.mtp_elements() + trained.norm_elements
    yield CommVolume(
        stage, 2 * sizes.mesh.ring_share(stage) * FLOAT32_BYTES * elements, is_all_reduce=True
    )


def num_slices(sizes: Sizes, sent: CommVolume) -> int:
    """Return the number of slices between which each device sends data."""
    slices = math.prod(getattr(sizes.config.mesh, f"dcn_{axis}") for axis in sent.axes)
    inside = sizes.mesh.shards(sent.axes) // slices
    return slices if not sent.group else max(1, sent.group // inside)


def count_collectives(sizes: Sizes, schedule: Schedule, recomputed: float) -> dict[str, float]:
    """Return the number of collectives per device and step, keyed by axes, excluding all-reduces.

    Keys have the form `fsdp+context`.
    """
    counts: dict[str, float] = defaultdict(float)
    for sent, times, together in _all_traffic(sizes, schedule, recomputed):
        if sent.axes and sent.num_bytes and not sent.is_all_reduce:
            number = times if together is None else together
            counts["+".join(sent.axes)] += sent.num_collectives * number
    return dict(counts)


def step_traffic(
    sizes: Sizes, schedule: Schedule, recomputed: float
) -> dict[tuple[str, str], float]:
    """Return the number of bytes that a device sends per step, keyed by axes and link, and the
    bytes copied from and to host memory.

    Axes have the form `fsdp+context`. `recomputed` is the number of forward passes that a backward
    pass recomputes.
    """
    volumes = (sent * times for sent, times, _ in _all_traffic(sizes, schedule, recomputed))
    traffic: dict[tuple[str, str], float] = defaultdict(float)
    for total in merge_by_axes(volumes):
        if total.axes and total.num_bytes:
            link = "dcn" if num_slices(sizes, total) > 1 else "ici"
            traffic["+".join(total.axes), link] += total.num_bytes
    traffic |= {(name, "host"): size for name, size in host_traffic(sizes).items() if size}
    return dict(traffic)


class HostCopies(NamedTuple):
    """Bytes that a device copies from and to host memory."""

    from_host: float = 0.0
    to_host: float = 0.0


def layer_host_copies(sizes: Sizes, kind: str, action: str) -> HostCopies:
    """Return the copies of one pipelined layer's weights and saved activations in a slot of type
    `F`, `B`, `I` or `W`. Offloaded weights are read for each gather.
    """
    if sizes.platform == "cpu" or action == "W":
        return HostCopies()
    weights = offloaded_weight_bytes(sizes, {kind: 1})
    _, saved = sizes.activations.saved_bytes(kind)
    if action == "F":
        return HostCopies(weights, saved)
    return HostCopies((1 + (sizes.config.pipeline.remat == "chunk")) * weights + saved)


def update_host_copies(sizes: Sizes) -> HostCopies:
    """Return the copies of weights and optimizer state in an update. Rare passes that check the
    update are not included.
    """
    if sizes.platform == "cpu":
        return HostCopies()
    updated = offloaded_weight_bytes(sizes, sizes.layers.slots, sizes.trained)
    updated += optimizer_bytes(sizes) if offloads_state(sizes) else 0.0
    return HostCopies(updated, updated)


def host_traffic(sizes: Sizes) -> dict[str, float]:
    """Return the bytes that a device copies from and to host memory per step."""
    runs, total = sizes.batch.microbatches / sizes.mesh.stages, update_host_copies(sizes)
    for kind, count in sizes.layers.pipelined.items():
        for action in "FB":
            copies = layer_host_copies(sizes, kind, action)
            total = HostCopies(
                total.from_host + runs * count * copies.from_host,
                total.to_host + runs * count * copies.to_host,
            )
    return {"from host": total.from_host, "to host": total.to_host}


def _all_traffic(
    sizes: Sizes, schedule: Schedule, recomputed: float
) -> Iterator[tuple[CommVolume, float, float | None]]:
    """Yield each volume with the number of times it is sent per step and, if collectives are
    merged, the number of merged collectives.
    """
    of, remat = layer_executions(sizes, schedule), sizes.config.pipeline.remat
    for kind in sizes.model.layer_types:
        layer, run = LayerTraffic(sizes, kind), of.run.get(kind, 0.0)
        once = None if of.num_grouped is None else of.num_grouped.get(kind, 0.0)
        yield from ((sent, of.gathered.get(kind, 0.0), once) for sent in layer.gathered)
        if sizes.config.pipeline.weight_gather == "iteration":
            slots = (*layer.gathered_in("F"), *layer.gathered_in("B"))
            yield from ((sent, run, None) for sent in slots)
        yield from ((sent, of.scattered.get(kind, 0.0), once) for sent in layer.scattered)
        for exchange in layer.exchanges:
            for action in "FB":
                yield from ((sent, run, None) for sent in exchange.in_slot(action, remat))
        yield tensor_sums(sizes, kind), (2 + recomputed) * run, None
        yield regather_traffic(sizes, kind, "W" if schedule.mixed else "B", recomputed), run, None
    head, lookups = HeadTraffic(sizes), sizes.batch.microbatches * (2 if sizes.layers.mtp else 1)
    yield from ((sent, of.head, None) for sent in (*head.gathered, *head.scattered))
    yield from ((sent, lookups, None) for sent in lookup(sizes))
    yield loss_head_traffic(sizes), sizes.batch.microbatches, None
    # The two neighbors of a stage in a ring of two are equal, so that the compiler merges messages.
    ways = len(
        {
            (way.port, way.direction % sizes.mesh.stages)
            for way in schedule.arrivals
            if way.direction
        }
    )
    yield (
        CommVolume(sizes.mesh.nontrivial_axes(["stage"]), message(sizes)),
        schedule.num_ticks * ways,
        None,
    )
    yield from ((sent, 1.0, None) for sent in step_end_traffic(sizes))
