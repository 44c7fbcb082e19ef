"""What a device sends in a step, byte by byte: of weights, gradients, messages, tokens and rows.

The same collectives as in `pipeline` and `model`, and as many: held against compiled programs.
Sums of losses and of statistics are left out. No jax.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from maxpipe.models.count import matrices_ahead
from maxpipe.models.layers.experts import Experts
from maxpipe.models.spec import Param, Scores
from maxpipe.optim.state_spec import is_orthogonalised, matrix_dims
from maxpipe.parallel.axes import axis_table
from maxpipe.plan.memory import loss_blocks
from maxpipe.plan.optimizer_memory import gathered_itemsize, zero1_dim
from maxpipe.plan.sizes import BYTES, Sizes
from maxpipe.schedule.table import Schedule

INTEGER = 4
"""Bytes of a token, of an expert's number, and of a number in float32."""
FLOAT32_BYTES = 4


class CommVolume(NamedTuple):
    """By one device, along mesh axes that are more than one device together."""

    axes: tuple[str, ...]
    num_bytes: float
    num_collectives: float = 1
    """Collectives."""
    is_all_reduce: bool = False
    """Whether they are all-reduces, which compilers merge: their number is not known."""
    is_all_to_all: bool = False
    """Whether each device gets something else from each other one: all-to-all."""
    of_tokens: bool = False
    """Whether they are split tokens, along a dim that is not the first: to gather or to sum."""

    def __mul__(self, times: float) -> CommVolume:  # type: ignore[override]
        return self._replace(num_bytes=times * self.num_bytes)


class TokenExchange(NamedTuple):
    """What a layer sends of its tokens, on the way to others and back."""

    forward: CommVolume
    recompute: CommVolume
    """Of a forward that is run again for a backward, which does not need all of it."""
    backward: CommVolume
    overlaps: bool = False
    """Whether it travels behind the work that it is for."""

    def in_slot(self, action: str, remat: str) -> list[CommVolume]:
        """In a slot of a schedule: `F`, `B`, `I` or `W`."""
        if action in "FW":
            return [self.forward] if action == "F" else []
        recomputed = {"none": [], "chunk": [self.forward, self.recompute]}.get(
            remat, [self.recompute]
        )
        return [*recomputed, self.backward]


@dataclass(frozen=True)
class LayerTraffic:
    """Of one layer of a kind, on a microbatch."""

    sizes: Sizes
    name: str

    @property
    def _params(self) -> Iterable[Param]:
        return self.sizes.model.layer_types[self.name].params.values()

    @cached_property
    def gathered(self) -> tuple[CommVolume, ...]:
        """For its weights."""
        return _gather_traffic(self.sizes, self._params)

    @cached_property
    def scattered(self) -> tuple[CommVolume, ...]:
        """To sum its gradient, as shards."""
        return _gather_traffic(self.sizes.trained, self._params, size=gradient_itemsize(self.sizes))

    @cached_property
    def reduced(self) -> tuple[CommVolume, ...]:
        """To sum its gradient at the end of a step over what is left."""
        return _reduction_traffic(self.sizes.trained, self._params)

    @cached_property
    def exchanges(self) -> tuple[TokenExchange, ...]:
        """Of its parts."""
        found = []
        for part in self.sizes.model.layer_types[self.name].parts.values():
            if isinstance(part, Experts):
                found += _expert_exchanges(self.sizes, part)
            for each in part.operations:
                if isinstance(each, Scores):
                    found += _context_exchanges(self.sizes, each)
        return tuple(found)


def merge_by_axes(sent: Iterable[CommVolume]) -> tuple[CommVolume, ...]:
    """What goes along the same axes at once."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for each in sent:
        found[each.axes] += each.num_bytes
    return tuple(CommVolume(axes, num_bytes) for axes, num_bytes in found.items())


def _gather_traffic(sizes: Sizes, params: Iterable[Param], size: int = 0) -> tuple[CommVolume, ...]:
    """To gather shards of parameters, or to scatter whole ones; those with the same axes as one."""
    found: dict[tuple[str, ...], CommVolume] = {}
    for param in params:
        if sizes.includes(param) and (axes := sizes.gathered_over(param.dims)):
            entry = size or gathered_itemsize(sizes, param)
            whole = entry * sizes.elements(param.dims, whole=True)
            before = found.get(axes, CommVolume(axes, 0.0, 0))
            sent = before.num_bytes + sizes.ring_share(axes) * whole
            found[axes] = CommVolume(axes, sent, before.num_collectives + 1)
    return tuple(found.values())


def _reduction_traffic(sizes: Sizes, params: Iterable[Param]) -> tuple[CommVolume, ...]:
    """To sum gradients, each over the axes that its shards leave."""
    return tuple(
        sent for param in filter(sizes.includes, params) for sent in _param_reductions(sizes, param)
    )


def _param_reductions(sizes: Sizes, param: Param) -> Iterator[CommVolume]:
    axes, size = sizes.reduced_over(param.dims), gradient_itemsize(sizes)
    elements, data = sizes.elements(param.dims), sizes.nontrivial_axes(["data"])
    if data and zero1_dim(sizes, param) is not None:
        # To the part that a device updates; what is updated goes to all.
        axes = tuple(axis for axis in axes if axis not in data)
        stored = BYTES[sizes.config.model.param_dtype]
        yield CommVolume(data, sizes.ring_share(data) * size * elements)
        yield CommVolume(data, sizes.ring_share(data) * stored * elements)
    if axes:
        yield CommVolume(axes, 2 * sizes.ring_share(axes) * size * elements, is_all_reduce=True)
    if is_orthogonalised(sizes.config.optim, param):
        yield from _muon_traffic(sizes, param)


def _muon_traffic(sizes: Sizes, param: Param) -> Iterator[CommVolume]:
    """Of Muon's matrices, to whole ones and back; their number may be padded (`optim.muon`)."""
    matrix, table = matrix_dims(param), axis_table(sizes.config.mesh)
    assert matrix is not None
    dim, data = zero1_dim(sizes, param), sizes.nontrivial_axes(["data"])
    shard = FLOAT32_BYTES * sizes.elements(param.dims) / (1 if dim is None else sizes.shards(data))
    for side in matrix:
        over = {axis for each in side for axis in table.get(param.axes[each], ())}
        axes = sizes.nontrivial_axes(over | ({*data} if dim in side else set()))
        if axes:
            yield CommVolume(axes, 2 * sizes.ring_share(axes) * shard, 2, is_all_to_all=True)


def gradient_itemsize(sizes: Sizes) -> int:
    """Of an entry of a gradient on its way to be summed."""
    return BYTES[sizes.config.optim.reduce_dtype]


# Tokens of rows that are divided over the context axis.


def _context_exchanges(sizes: Sizes, scores: Scores) -> Iterator[TokenExchange]:
    if not (axes := sizes.nontrivial_axes(["context"])):
        return
    context, size = sizes.axes["context"], BYTES[sizes.config.model.compute_dtype]
    keys = sum(map(sizes.activation_elements, scores.keys))
    found = sizes.context_method(scores)
    if found.method == "heads":
        all_heads = (
            keys + sizes.activation_elements(scores.query) + sizes.activation_elements(scores.mixed)
        )
        once = CommVolume(axes, sizes.ring_share(axes) * size * all_heads, 4, is_all_to_all=True)
        yield TokenExchange(once, once, once)
    elif found.method == "ring":
        # Gradients go around with keys and values, in float32.
        hops = context * len(scores.keys)
        around = CommVolume(axes, context * keys * size, hops)
        back = CommVolume(axes, context * keys * (size + FLOAT32_BYTES), 2 * hops)
        kept = {
            "context"
        } <= sizes.saved_activation_names and sizes.config.pipeline.remat == "names"
        yield TokenExchange(around, around * (not kept), back, overlaps=True)
    else:
        sent = (context - 1) * found.share * size * keys
        once = CommVolume(axes, sent, len(scores.keys))
        yield TokenExchange(once, once, once)


# Rows of experts that are divided over the expert axis.


def _expert_exchanges(sizes: Sizes, part: Experts) -> Iterator[TokenExchange]:
    context = sizes.nontrivial_axes(["context"])
    if part.capacity and context:
        # Who has room follows from whole rows.
        choices = INTEGER * sizes.tokens * part.per_token
        places = CommVolume(context, (sizes.axes["context"] - 1) * choices)
        yield TokenExchange(places, places, CommVolume(context, 0.0, 0))
    if not (axes := sizes.nontrivial_axes(["expert"])):
        return
    size, around = BYTES[sizes.config.model.compute_dtype], sizes.ring_share(axes)
    if part.permutes_tokens:
        # Padded, or on TPUs only what is in use.
        rows = sizes.tokens * (
            part.per_token if sizes.platform == "tpu" else part.rows_received or 0.0
        )
        width, routes = around * size * rows * part.d_model, around * rows * FLOAT32_BYTES
        # How many are sent is known where not all are, and kept where everything is.
        ragged = sizes.platform == "tpu"
        counted = ragged or sizes.config.pipeline.remat == "none"
        yield TokenExchange(
            CommVolume(axes, 2 * width + 2 * routes, 4 + counted, is_all_to_all=True),
            CommVolume(axes, width + 2 * routes, 3 + ragged, is_all_to_all=True),
            CommVolume(axes, 2 * width + routes, 3, is_all_to_all=True),
        )
        return
    # All tokens of the axis through all experts: gathered, and what becomes of them summed.
    width = around * size * sizes.axes["expert"] * sizes.whole_activation
    weights = around * FLOAT32_BYTES * sizes.tokens * part.num_experts
    once = CommVolume(axes, 2 * width + weights, 3)
    yield TokenExchange(once, CommVolume(axes, width + weights, 2), once)


# Tokens split over the tensor axis, or what is summed over it.


def tensor_sums(sizes: Sizes, kind: str) -> CommVolume:
    """Of a layer's forward: of each branch's output, or to gather and scatter its tokens."""
    axes = sizes.nontrivial_axes(["tensor"])
    whole = BYTES[sizes.config.model.compute_dtype] * sizes.whole_activation
    branches = len(sizes.model.layer_types[kind].branches)
    sent, gathers = branches * 2 * sizes.ring_share(axes) * whole, sizes.token_shards > 1
    rounds = 2 * branches if gathers else branches
    return CommVolume(axes, sent, rounds, is_all_reduce=not gathers, of_tokens=gathers)


def regather_traffic(sizes: Sizes, kind: str, action: str, recomputed: float) -> CommVolume:
    """To gather split tokens again, in a slot of this kind, for weight gradients.

    A whole backward gathers cotangents once, and inputs with the forward that it runs again.
    """
    sums = tensor_sums(sizes, kind)
    if sizes.token_shards == 1 or action not in "BW":
        return sums * 0.0
    return sums * (1.0 if action == "W" else 0.5 * max(0.0, 1.0 - recomputed))


# The two ends of the network, and messages between stages.


def message(sizes: Sizes) -> float:
    """Bytes of what a stage hands to the next."""
    return float(BYTES[sizes.config.model.compute_dtype] * sizes.activation)


def lookup(sizes: Sizes) -> list[CommVolume]:
    """Of a microbatch's embedding, and of its gradient."""
    stage, columns = (
        sizes.nontrivial_axes(["stage"]),
        sizes.gathered_over(sizes.model.ends.embedding.dims),
    )
    rows = float(BYTES[sizes.config.model.compute_dtype] * sizes.whole_activation)
    ids = CommVolume(columns, INTEGER * sizes.tokens * (sizes.shards(columns) - 1.0))
    travelled = CommVolume(columns, sizes.ring_share(columns) * rows, is_all_to_all=True)
    summed = CommVolume(stage, 2 * sizes.ring_share(stage) * rows, is_all_reduce=True)
    once = [ids, travelled, summed]
    if (
        sizes.prologue_layers
    ):  # each stage looks up its own microbatch, and hands it on when its turn comes
        part = 1 / sizes.stages
        own = CommVolume(stage, sizes.ring_share(stage) * rows, part)
        once = [
            ids._replace(num_collectives=part),
            travelled._replace(num_collectives=part) * part,
            own,
            summed,
        ]
    return once * (2 if sizes.trained.embedding_elements() else 1)


def loss_head_traffic(sizes: Sizes) -> CommVolume:
    """Of a microbatch's loss head: output, cotangent in float32 and three sums over logits."""
    stage, size = sizes.nontrivial_axes(["stage"]), BYTES[sizes.config.model.compute_dtype]
    numbers = FLOAT32_BYTES * 3 * (1 + sizes.mtp_heads) * sizes.tokens
    sent = (size + FLOAT32_BYTES) * sizes.activation + numbers
    return CommVolume(
        stage, 2 * sizes.ring_share(stage) * sent, 1 + 4 * loss_blocks(sizes), is_all_reduce=True
    )


@dataclass(frozen=True)
class HeadTraffic:
    """Of the output projection, and of the matrices of heads ahead; once gathered, once scattered.

    What those have in layers is not among it.
    """

    sizes: Sizes

    @property
    def _params(self) -> tuple[Param, ...]:
        sizes, ends = self.sizes, self.sizes.model.ends
        own = ends.params["embedding" if ends.head is None else "head",]
        ahead = (ends.params[name] for name in matrices_ahead(sizes.model))
        return (replace(own, dims=sizes.padded(own.dims)), *ahead)

    @cached_property
    def gathered(self) -> tuple[CommVolume, ...]:
        """For weights."""
        return _gather_traffic(self.sizes, self._params)

    @cached_property
    def scattered(self) -> tuple[CommVolume, ...]:
        """To sum gradients, as shards."""
        return _gather_traffic(self.sizes.trained, self._params, size=gradient_itemsize(self.sizes))

    @cached_property
    def reduced(self) -> tuple[CommVolume, ...]:
        """To sum gradients at the end of a step over what is left: with the embedding's."""
        sizes, ends = self.sizes.trained, self.sizes.model.ends
        embedding = replace(ends.params["embedding",], dims=sizes.padded(ends.embedding.dims))
        norms = [param for (name, *_), param in ends.params.items() if name == "final_norm"]
        return _reduction_traffic(sizes, (*self._params, embedding, *norms))


# All of a step.


class LayerExecutions(NamedTuple):
    """How often a device does something with a layer of each kind in a step."""

    run: Mapping[str, float]
    """Layers of a microbatch, forward and backward, on the average stage."""
    gathered: Mapping[str, float]
    scattered: Mapping[str, float]
    head: float
    """How often the output projection is gathered, and its gradient scattered."""
    num_grouped: Mapping[str, float] | None = None
    """In how many gathers, and scatters, that happens; None: each layer by itself."""


def layer_executions(sizes: Sizes, schedule: Schedule) -> LayerExecutions:
    """By the mode in which weights are gathered."""
    pipeline = sizes.config.pipeline
    # Every stage runs the heads ahead of all microbatches.
    ahead = {kind: count * sizes.stages for kind, count in sizes.mtp_layers.items()}
    each = sizes.microbatches / sizes.stages
    layers = sizes.ring_layers + sizes.prologue_layers + Counter(ahead)
    run = {kind: each * count for kind, count in layers.items()}
    if pipeline.weight_gather == "iteration":
        times = 3 if pipeline.remat == "chunk" else 2
        gathered = {kind: times * count for kind, count in run.items()}
        return LayerExecutions(run, gathered, run, sizes.microbatches)
    once = sizes.prologue_layers + Counter(sizes.mtp_layers)
    if pipeline.weight_gather == "step" or not schedule.weight_window.num_chunk_slots:
        held = once + Counter(sizes.layer_slots)
        stacks = (sizes.layer_slots, sizes.prologue_layers, sizes.mtp_layers)
        together = {kind: float(sum(kind in stack for stack in stacks)) for kind in held}
        return LayerExecutions(run, held, held, 1.0, together)
    ticks = (schedule.weight_window.gather_tick, schedule.weight_window.reduce_tick)
    chunk = Counter(sizes.chunk_layer_slots)
    gathered, scattered = (
        once + Counter({kind: len(column) * chunk[kind] for kind in chunk}) for column in ticks
    )
    return LayerExecutions(run, gathered, scattered, 1.0)


def step_end_traffic(sizes: Sizes) -> Iterator[CommVolume]:
    """To sum gradients over the devices that still have parts of them."""
    held = Counter(sizes.layer_slots) + sizes.prologue_layers + Counter(sizes.mtp_layers)
    for kind, count in held.items():
        yield from (sent * count for sent in LayerTraffic(sizes, kind).reduced)
    yield from HeadTraffic(sizes).reduced
    stage, trained = sizes.nontrivial_axes(["stage"]), sizes.trained
    elements = trained.prologue_elements() + trained.mtp_elements() + trained.norm_elements
    yield CommVolume(
        stage, 2 * sizes.ring_share(stage) * FLOAT32_BYTES * elements, is_all_reduce=True
    )


def link(sizes: Sizes, axes: Iterable[str]) -> str:
    """`dcn` if one of the axes crosses slices."""
    return "dcn" if any(getattr(sizes.config.mesh, f"dcn_{axis}") > 1 for axis in axes) else "ici"


def count_collectives(sizes: Sizes, schedule: Schedule, recomputed: float) -> dict[str, float]:
    """How many a device takes part in in a step, by axes (`fsdp+context`); all-reduces left out."""
    found: dict[str, float] = defaultdict(float)
    for sent, times, together in _all_traffic(sizes, schedule, recomputed):
        if sent.axes and sent.num_bytes and not sent.is_all_reduce:
            found["+".join(sent.axes)] += sent.num_collectives * (
                times if together is None else together
            )
    return dict(found)


def step_traffic(
    sizes: Sizes, schedule: Schedule, recomputed: float
) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by axes (`fsdp+context`) and link.

    `recomputed` are the forwards that a backward runs again.
    """
    found = merge_by_axes(
        sent * times for sent, times, _ in _all_traffic(sizes, schedule, recomputed)
    )
    return {
        ("+".join(each.axes), link(sizes, each.axes)): each.num_bytes
        for each in found
        if each.axes and each.num_bytes
    }


def _all_traffic(
    sizes: Sizes, schedule: Schedule, recomputed: float
) -> Iterator[tuple[CommVolume, float, float | None]]:
    """What is sent at once, how often, and in how many collectives if not in as many."""
    of, remat = layer_executions(sizes, schedule), sizes.config.pipeline.remat
    for kind in sizes.model.layer_types:
        layer, run = LayerTraffic(sizes, kind), of.run.get(kind, 0.0)
        once = None if of.num_grouped is None else of.num_grouped.get(kind, 0.0)
        yield from ((sent, of.gathered.get(kind, 0.0), once) for sent in layer.gathered)
        yield from ((sent, of.scattered.get(kind, 0.0), once) for sent in layer.scattered)
        for each in layer.exchanges:
            yield from (
                (sent, run, None) for action in "FB" for sent in each.in_slot(action, remat)
            )
        yield tensor_sums(sizes, kind), (2 + recomputed) * run, None
        yield regather_traffic(sizes, kind, "W" if schedule.mixed else "B", recomputed), run, None
    head, lookups = HeadTraffic(sizes), sizes.microbatches * (2 if sizes.mtp_layers else 1)
    yield from ((sent, of.head, None) for sent in (*head.gathered, *head.scattered))
    yield from ((sent, lookups, None) for sent in lookup(sizes))
    yield loss_head_traffic(sizes), sizes.microbatches, None
    ways = sum(1 for way in schedule.arrivals if way.direction)
    yield (
        CommVolume(sizes.nontrivial_axes(["stage"]), message(sizes)),
        schedule.num_ticks * ways,
        None,
    )
    yield from ((sent, 1.0, None) for sent in step_end_traffic(sizes))
