"""Memory of one device, predicted from the config alone, term by term.

What the train step holds is counted: state, buffers of the table, gradient accumulators. What it
needs besides at its fullest moment is a sum of arrays that are alive then; `benchmarks/`
holds the total against the peak that the compiler states. No jax.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from maxpipe.models.adapters import is_held
from maxpipe.models.resolve_auto import loss_block
from maxpipe.models.spec import Held, Kind, Part
from maxpipe.plan.optimizer_memory import (
    gathered_bytes,
    gathers_weights,
    gradient_copy_bytes,
    optimizer_bytes,
    optimizer_layer_bytes,
)
from maxpipe.plan.sizes import BYTES, Sizes
from maxpipe.schedule.table import Schedule

REFERENCE = "reference"
ARGUMENTS = ("state", "batch", REFERENCE)
"""Terms that are there before the step starts; the others are temporary."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by term; the terms are those of `plan.advice`."""

    terms: dict[str, float]
    host: float
    """In host memory."""

    @property
    def arguments(self) -> float:
        """State and batch, and what a run has beside them."""
        return sum(self.terms.get(name, 0.0) for name in ARGUMENTS)

    @property
    def reference(self) -> float:
        """What is there while the step runs and is no argument of it."""
        return self.terms.get(REFERENCE, 0.0)

    @property
    def temporary(self) -> float:
        """Everything else."""
        return self.total - self.arguments

    @property
    def total(self) -> float:
        """All terms."""
        return sum(self.terms.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Terms that count, the largest first."""
        ordered = sorted(self.terms.items(), key=lambda item: -item[1])
        return [(name, size) for name, size in ordered if size > 0.001 * self.total]


def predict_memory(sizes: Sizes, schedule: Schedule, *, platform: str) -> Memory:
    """What the train step of a config takes on devices of a platform, as jax names it."""
    sizes = sizes.on_platform(platform)
    if not gathers_weights(sizes):  # all modes are one, but for the buffers of visits
        pipeline = sizes.config.pipeline
        mode = "visit" if pipeline.weight_gather == "visit" else "step"
        pipeline = replace(pipeline, weight_gather=mode)
        sizes = replace(sizes, config=replace(sizes.config, pipeline=pipeline))
    terms = state(sizes) | {REFERENCE: reference(sizes)} | buffers(sizes, schedule)
    terms |= _gathered_weights(sizes, schedule)
    working = sizes
    if platform == "tpu":
        terms["copies"] = _copies(sizes)
    if platform not in ("cpu", "tpu"):
        terms["turned"] = _transposed_shards(sizes, schedule)
    if platform == "cpu":
        narrow, older = sizes.config.model.compute_dtype != "float32", _has_older_cpu_compiler()
        if narrow and older:
            working = _with_float32(sizes)
            terms["widened"] = _float32_copies(sizes, working, schedule)
        else:
            terms["window"] += _weight_window_on_cpu(sizes, schedule, narrow=narrow)
        spared = CPU_BARRIER_COPIES * (sizes.token_shards == 1) if older else 1.0
        layer = _layer_on_cpu(working, score_bytes=4, spared=spared)
        moments = {"layer": layer, "held": _gathering_on_cpu(working, schedule)}
    else:
        layer = _layer_on_tpu(sizes, schedule)
        if platform != "tpu":  # the larger of the two
            size = BYTES[sizes.config.model.compute_dtype]
            layer = max(layer, _layer_on_cpu(sizes, score_bytes=size, spared=0.0))
        moments = {"layer": layer, "window": _arriving_bytes(sizes, schedule)}
    moments["logits"] = _logits(working, platform)
    fullest = max(moments, key=moments.__getitem__)
    terms[fullest] = terms.get(fullest, 0.0) + moments[fullest]
    if platform not in ("cpu", "tpu"):
        terms[fullest] += WORKSPACE
    free = sum(size for name, size in terms.items() if name not in (*ARGUMENTS, "gradients"))
    terms["update"] = max(0.0, gradient_copy_bytes(sizes) - free)
    on_host = optimizer_bytes(sizes) if _on_host(sizes) else 0.0
    on_host += schedule.num_stash * sum(
        length * sizes.saved_activation_bytes(kind)[1]
        for kind, length in sizes.chunk_layer_slots.items()
    )
    return Memory({name: size for name, size in terms.items() if size}, on_host)


def state(sizes: Sizes) -> dict[str, float]:
    """Arguments of the step."""
    train = sizes.config.train
    # Four arrays of ids and the mask, int32 and float32.
    batch = sizes.batch_per_device * (5 * 4 * train.sequence_length + 4)
    kept = 0.0 if _on_host(sizes) else optimizer_bytes(sizes)
    return {
        "state": float(_parameters(sizes) + kept + 12),
        "batch": float(batch),
    }


def _on_host(sizes: Sizes) -> bool:
    """Whether the optimizer's state is in other memory than a device's, which CPUs share."""
    return sizes.config.optim.offload_state and sizes.platform != "cpu"


def reference(sizes: Sizes) -> float:
    """A copy of the trained parameters, which `grpo.kl_coef` compares with."""
    config = sizes.config
    is_kept = config.train.objective == "grpo" and config.grpo.kl_coef > 0
    return _parameters(sizes.trained) if is_kept else 0.0


def attention_workspace_bytes(sizes: Sizes) -> float:
    """What a kernel of attention works in at most, of which XLA does not know without a GPU."""
    parts = [part for kind in sizes.model.layer_types.values() for part in kind.parts.values()]
    own = (Held(documents=part.backward_peak.documents) for part in parts)
    return max(map(sizes.declared_bytes, parts, own))


def _parameters(sizes: Sizes) -> float:
    """All of one device, as they are stored."""
    ends = sizes.norm_elements + sizes.embedding_elements() + sizes.mtp_elements()
    ends += 0 if sizes.model.ends.head is None else sizes.head_elements()
    layers = _stored_bytes(sizes, sizes.layer_slots) + _stored_bytes(sizes, sizes.prologue_layers)
    return layers + BYTES[sizes.config.model.param_dtype] * ends


def _stored_bytes(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Parameters of this number of layers of each kind on one device, as they are stored."""
    return float(
        sum(
            count
            * BYTES[param.own_dtype or sizes.config.model.param_dtype]
            * sizes.elements(param.dims)
            for kind, count in layers.items()
            for param in sizes.model.layer_types[kind].params.values()
            if sizes.includes(param)
        )
    )


def buffers(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """What the loop over ticks carries, as the engine allocates it."""
    pipeline, model = sizes.config.pipeline, sizes.config.model
    size, by_chunk = BYTES[model.compute_dtype], pipeline.remat == "chunk"
    message = float(size * sizes.activation)
    visits, by_visit = schedule.weight_window, _uses_weight_window(sizes, schedule)
    # What a chunk keeps that has as many layers of each kind as any.
    kept = sum(
        length * sizes.saved_activation_bytes(kind)[0]
        for kind, length in sizes.chunk_layer_slots.items()
    )
    found = {
        "inbox": schedule.num_inbox * message,
        "stash": schedule.num_stash * (message if by_chunk else kept),
        "sent": message * (1 if schedule.mixed else 2 if schedule.delayed else 1),
        "gradients": 4.0 * _gradient_elements(sizes.trained, schedule),
        "deferred": 0.0,
        "window": 0.0,
        "partial": 0.0,
        "outside": 0.0,
        "reports": sizes.report_bytes(sizes.layer_slots),
        "ahead": 0.0,
    }
    if heads := sizes.mtp_heads:
        found["ahead"] = 4.0 * heads + sizes.report_bytes(sizes.mtp_layers)
    if schedule.mixed:
        found["deferred"] = schedule.num_deferred * sum(
            length * sizes.deferred_bytes(kind) for kind, length in sizes.chunk_layer_slots.items()
        )
    if by_visit:
        found["window"] = visits.num_chunk_slots * gathered_bytes(sizes, sizes.chunk_layer_slots)
        found["partial"] = 4.0 * visits.num_gradient_slots * sizes.trained.chunk_elements()
    if outside := sizes.prologue_layers:
        kept = sum(count * sizes.saved_activation_bytes(kind)[0] for kind, count in outside.items())
        kept = message if by_chunk else kept
        found["outside"] = schedule.prologue.num_slots * (message + kept)
        found["outside"] += sizes.report_bytes(outside)
    return found


def prologue_bytes(sizes: Sizes, schedule: Schedule) -> float:
    """Of all terms what the layers outside the ring take: state, gradients, whole weights, buffers.

    What one layer's backward needs besides is not theirs alone, and left out.
    """
    once = sizes.config.pipeline.weight_gather != "iteration"
    found = _stored_bytes(sizes, sizes.prologue_layers)
    found += optimizer_layer_bytes(sizes, sizes.prologue_layers)
    found += 4.0 * sizes.trained.prologue_elements(whole=once)
    if once:
        found += gathered_bytes(sizes, sizes.prologue_layers)
    return found + buffers(sizes, schedule)["outside"]


def _uses_weight_window(sizes: Sizes, schedule: Schedule) -> bool:
    return (
        sizes.config.pipeline.weight_gather == "visit"
        and schedule.weight_window.num_chunk_slots > 0
    )


def _gathers_per_step(sizes: Sizes, schedule: Schedule) -> bool:
    mode = sizes.config.pipeline.weight_gather
    return mode == "step" or (mode == "visit" and not _uses_weight_window(sizes, schedule))


def _gradient_elements(sizes: Sizes, schedule: Schedule) -> int:
    pipeline = sizes.config.pipeline
    once = pipeline.weight_gather != "iteration"
    layers = sizes.stage_elements(whole=_gathers_per_step(sizes, schedule))
    layers += sizes.prologue_elements(whole=once)
    ends = sizes.embedding_elements(whole=not sizes.splits_columns)
    heads = sizes.head_elements(whole=once) + sizes.mtp_elements(whole=once)
    return layers + ends + heads + sizes.norm_elements


def _gathered_weights(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """Whole weights that are held from start to end."""
    if sizes.config.pipeline.weight_gather == "iteration":
        return {"held": 0.0}
    size, held = BYTES[sizes.config.model.compute_dtype], sizes
    if _read_in_place(sizes):
        if sizes.platform == "cpu":
            return {"held": 0.0}
        held = sizes.trained
    # A table that is the output projection, too, is there in the order of its products.
    head = sizes if sizes.model.ends.head is None else held
    found = float(size * (head.head_elements(whole=True) + held.mtp_elements(whole=True)))
    found += gathered_bytes(held, sizes.prologue_layers)
    if _gathers_per_step(sizes, schedule):
        found += gathered_bytes(held, sizes.layer_slots)
    return {"held": found}


def _read_in_place(sizes: Sizes) -> bool:
    """Whether frozen weights are read where they are: whole, and in the type of products.

    Trained ones are read there on CPUs alone.
    """
    model = sizes.config.model
    is_right = model.param_dtype == model.compute_dtype and model.matmul == "default"
    return is_right and not gathers_weights(sizes)


ARRIVING = 0.8
"""Of a chunk's whole weights, those that are gathered at once and not yet in the window: on TPUs,
fitted."""


def _arriving_bytes(sizes: Sizes, schedule: Schedule) -> float:
    return (
        ARRIVING * gathered_bytes(sizes, sizes.chunk_layer_slots)
        if _uses_weight_window(sizes, schedule)
        else 0.0
    )


def _copies(sizes: Sizes) -> float:
    """Shards in compute type, which XLA for TPU keeps throughout the step.

    None of what is stored in that type: it is read where it is.
    """
    pipeline, model = sizes.config.pipeline, sizes.config.model
    if model.compute_dtype == model.param_dtype:
        return 0.0
    elements = sizes.embedding_elements()
    if pipeline.remat != "chunk" and pipeline.weight_gather != "step":
        elements += sum(
            count * sizes.elements(param.dims)
            for kind, count in sizes.layer_slots.items()
            for param in sizes.model.layer_types[kind].params.values()
            if not param.own_dtype
        )
        if pipeline.weight_gather == "iteration":
            elements += sizes.head_elements()
    return float(BYTES[model.compute_dtype] * elements)


WORKSPACE = 32.0 * 2**20
"""Of matmuls by cuBLAS, on GPUs of the Hopper generation; on others less."""


def _transposed_shards(sizes: Sizes, schedule: Schedule) -> float:
    """Shards of layers that XLA for GPUs keeps transposed throughout the step, as they are stored.

    It gathers over the first dim only, and takes the transposition of the others out of the loops.
    """
    stays = not _gathers_per_step(sizes, schedule)
    return float(stays * BYTES[sizes.config.model.param_dtype] * sizes.transposed_elements)


def _with_float32(sizes: Sizes) -> Sizes:
    config = sizes.config
    return Sizes(replace(config, model=replace(config.model, compute_dtype="float32")))


@cache
def _has_older_cpu_compiler() -> bool:
    """Whether the jax at hand has an older compiler for CPUs; jax is not imported for it."""
    try:
        major, minor, *_ = importlib.metadata.version("jax").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) < _NEWER_ON_CPU


_NEWER_ON_CPU = (0, 12)
"""Version of jax from which on XLA for CPU keeps activations and buffers in bfloat16, and
optimization barriers until it has fused; 0.10 did neither."""


def _float32_copies(sizes: Sizes, wide: Sizes, schedule: Schedule) -> float:
    """Older XLA for CPU computes in float32: it widens gathered weights and copies of buffers."""
    both = (sizes, wide)
    held, held_wide = (sum(_gathered_weights(each, schedule).values()) for each in both)
    carried, carried_wide = (sum(buffers(each, schedule).values()) for each in both)
    # A float32 copy is twice what its original would grow by.
    return held_wide - held + 2 * (carried_wide - carried)


WEIGHT_COPIES = {"iteration": 2.0, "visit": 0.8, "step": 0.8}
"""Copies in compute type of a layer's whole weights that its backward holds, gathered ones and
gradients together. These and the next two: on TPUs, fitted."""
SCORE_COPIES = 2.9 / 2
"""The same of each pair of query and key that is scored, for each copy that is declared: all blocks
of attention are there at once."""
REDUCED_COPIES = 1.2
"""The same of whole activations that are on their way to be summed over tensor beside scores."""


REMOTE_KEY_COPIES = 2.0
"""Of keys and values of other devices' tokens: gathered, and their gradients."""


def _layer_on_tpu(sizes: Sizes, schedule: Schedule) -> float:
    """The backward of the largest layer, whose parts take the memory in turn."""
    size = BYTES[sizes.config.model.compute_dtype]
    mode = "step" if _gathers_per_step(sizes, schedule) else sizes.config.pipeline.weight_gather

    def needed(name: str, kind: Kind) -> float:
        weights = WEIGHT_COPIES[mode] * (
            gathered_bytes(sizes, {name: 1}) + _dequantized_bytes(sizes, kind)
        )
        return weights + max(_part_on_tpu(sizes, part) for part in kind.parts.values())

    ring = max(needed(*kind) for kind in sizes.model.layer_types.items()) + _chunk_inputs(sizes)
    kinds, waiting = sizes.model.layer_types, size * (MTP_PENDING_ACTIVATIONS + 2 * sizes.mtp_heads)
    behind = [needed(name, kinds[name]) for name in sizes.mtp_layers]
    return max([ring, *(each + waiting * sizes.activation for each in behind)])


def _dequantized_bytes(sizes: Sizes, kind: Kind) -> float:
    """Matrices of a layer that are held in few bits, in compute type."""
    held = [param for key, param in kind.declared.items() if is_held(kind, key)]
    size = BYTES[sizes.config.model.compute_dtype]
    return float(size * sum(sizes.elements(each.dims, whole=True) for each in held))


def _part_on_tpu(sizes: Sizes, part: Part) -> float:
    """The backward of a part at its fullest moment, besides weights."""
    size, held = BYTES[sizes.config.model.compute_dtype], part.backward_peak
    narrow, wide, other = held.pairs
    found = (wide * 4 + narrow * SCORE_COPIES * size + other) * sizes.stored_scores(part)
    found += REMOTE_KEY_COPIES * size * sizes.remote_key_elements(part)
    if found and sizes.tensor > 1:
        found += REDUCED_COPIES * size * sizes.whole_activation
    return found + sizes.declared_bytes(part, replace(held, pairs=(0.0, 0.0, 0.0)))


CPU_WEIGHTS, CPU_ACTIVATIONS = 0.8, 2.5
"""Of a layer, and for each of its parts."""
CPU_GATHERED = 4.0
"""Whole activations, where their tokens are split between matmuls: gathered, and not summed yet."""
CPU_KEPT, CPU_RECOMPUTED = 5 / 6, 1.25
"""Of each array that a part declares: where its activations are kept, and where they are computed
again."""
CPU_SCORES, CPU_SCORES_ALONE = 0.95, 1.6
"""The same of pairs: beside those arrays, and while attention's backward is at work."""
CPU_BARRIER_COPIES = 0.6
"""Of arrays that barriers spare, where the compiler drops barriers: operands of matmuls by matrices
are in the right order, unless tokens are split between them. Fitted."""
CPU_GATHERING = 2 / 3
"""Of a stage's whole weights in float32, what stands beside narrow ones while these are made: all
have been gathered when the first is converted. Fitted."""


def _gathering_on_cpu(sizes: Sizes, schedule: Schedule) -> float:
    """Collectives are in float32: of weights that are held for the step, what is not held then."""
    narrow = sizes.config.model.compute_dtype != "float32"
    if not (narrow and _gathers_per_step(sizes, schedule) and gathers_weights(sizes)):
        return 0.0
    return CPU_GATHERING * 4 * sizes.stage_elements(whole=True)


def _weight_window_on_cpu(sizes: Sizes, schedule: Schedule, *, narrow: bool) -> float:
    """A copy of the window, beside it a chunk in float32, and shards that are not in float32."""
    if not _uses_weight_window(sizes, schedule):
        return 0.0
    chunk = sizes.chunk_elements()
    window = (
        BYTES[sizes.config.model.compute_dtype] * schedule.weight_window.num_chunk_slots * chunk
    )
    return float(window + 4 * chunk + 4 * sizes.stage_elements() * narrow)


def _layer_on_cpu(sizes: Sizes, *, score_bytes: int, spared: float) -> float:
    """The same where most of a layer is held at once; copies fitted as above.

    `score_bytes`: of a pair, whatever the compute type. `spared`: share of what parts say of it.
    """
    size = BYTES[sizes.config.model.compute_dtype]

    def arrays_of(part: Part) -> float:
        arrays = (*part.backward_peak.compute_dtype, *part.backward_peak.float32)
        found = sum(copies * sizes.activation_elements(dims) for copies, dims in arrays)
        found -= spared * sum(
            c * sizes.activation_elements(dims) for c, dims in part.barrier_copies.compute_dtype
        )
        return (CPU_KEPT if sizes.saves_all(part) else CPU_RECOMPUTED) * found

    def needed(name: str, kind: Kind) -> float:
        parts = kind.parts.values()
        pairs = sum(sum(part.backward_peak.pairs) * sizes.stored_scores(part) for part in parts)
        pairs *= score_bytes / size
        arrays = sum(map(arrays_of, parts))
        alive = REMOTE_KEY_COPIES * sum(map(sizes.remote_key_elements, parts))
        alive += max(CPU_SCORES_ALONE * pairs, CPU_SCORES * pairs + arrays)
        alive += CPU_ACTIVATIONS * len(parts) * sizes.activation
        alive += CPU_GATHERED * (sizes.token_shards > 1) * sizes.whole_activation
        return alive + CPU_WEIGHTS * sizes.layer_elements(name, whole=True)

    ring = size * max(needed(*kind) for kind in sizes.model.layer_types.items()) + _chunk_inputs(
        sizes
    )
    kinds = sizes.model.layer_types
    behind = [size * needed(name, kinds[name]) for name in sizes.mtp_layers]
    return max([ring, *(each + _mtp_layer_bytes(sizes) for each in behind)])


CPU_MTP_ACTIVATIONS = 28.0
"""Activations beside those of a layer that is a head ahead: projection, norms, embeddings, and what
waits for other heads; fitted as above."""


def _mtp_layer_bytes(sizes: Sizes) -> float:
    size = BYTES[sizes.config.model.compute_dtype]
    return size * (CPU_MTP_ACTIVATIONS + 2 * sizes.mtp_heads) * sizes.activation


MTP_PENDING_ACTIVATIONS = 8.0
"""Activations that wait beside logits of heads that are layers, besides two for each."""


def _mtp_pending_bytes(sizes: Sizes) -> float:
    """Beside logits where layers predict further ahead: the matrix's gradient, once more."""
    if not sizes.mtp_layers:
        return 0.0
    size = BYTES[sizes.config.model.compute_dtype]
    waiting = size * (MTP_PENDING_ACTIVATIONS + 2 * sizes.mtp_heads) * sizes.activation
    return waiting + 2 * 4.0 * sizes.trained.head_elements(whole=True)


def _chunk_inputs(sizes: Sizes) -> float:
    """Of the layers of a chunk whose forward has just been run again."""
    pipeline, size = sizes.config.pipeline, BYTES[sizes.config.model.compute_dtype]
    layers = sum(sizes.chunk_layer_slots.values()) if pipeline.remat == "chunk" else 0
    return float(layers * size * sizes.activation)


def loss_tokens(sizes: Sizes) -> int:
    """Tokens whose logits a device has in memory at once."""
    setting = sizes.config.pipeline.loss_block_tokens
    return loss_block(setting, sizes.tokens, sizes.vocabulary) or sizes.tokens


def loss_blocks(sizes: Sizes) -> int:
    """Blocks of tokens in which the loss of a microbatch is computed."""
    return -(-sizes.tokens // loss_tokens(sizes))


UNFUSED_LOGITS = 3.0
"""Copies of the logits in float32 where XLA does not fuse the loss and its gradient: on CPUs."""


def _logits(sizes: Sizes, platform: str) -> float:
    """The loss head's backward."""
    model, gathers = sizes.config.model, sizes.config.pipeline.weight_gather == "iteration"
    size, pairs = BYTES[model.compute_dtype], loss_tokens(sizes) * sizes.vocabulary
    matrix = sizes.head_elements(whole=True)
    gradient = 4.0 * sizes.trained.head_elements(whole=True)
    # The matrix's gradient, after the other copies of the logits.
    with_gradient = 4.0 * pairs + gradient
    if platform == "tpu":
        # Whole accumulators take it where they are; shards of them, after it was summed. Over
        # blocks it adds up elsewhere, in place.
        most = with_gradient if gathers or loss_blocks(sizes) > 1 else 4.0 * pairs
    elif platform == "cpu":
        most = max(with_gradient, UNFUSED_LOGITS * 4.0 * pairs)
    else:  # beside the logits their gradient in compute type, of which the matrix's is made
        most = size * pairs + max(4.0 * pairs, gradient)
    if loss_blocks(sizes) > 1:
        # What blocks are cut from, and what they give; sums, also those over heads.
        sums = (platform != "tpu") + (sizes.mtp_heads > 0)
        most += gradient * sums + 2 * size * sizes.whole_activation
    return most + size * matrix * gathers + _mtp_pending_bytes(sizes)
