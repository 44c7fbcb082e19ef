"""Predict the memory use of one device, term by term, from the config alone.

Persistent arrays of the train step are counted exactly: state, schedule buffers and gradient
accumulators. The additional memory at the peak is the total size of the arrays that are live at
that time. `benchmarks/` compares the total with the peak reported by the compiler. This module does
not import jax.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

from maxpipe.models.adapters import is_held
from maxpipe.models.layers.experts import Experts
from maxpipe.models.resolve_auto import loss_block
from maxpipe.models.spec import Held, LayerType, Part
from maxpipe.optim.state_spec import BYTES
from maxpipe.planner.memory_terms import (
    gathered_bytes,
    gathers_weights,
    gradient_copy_bytes,
    image_bytes,
    optimizer_bytes,
    optimizer_layer_bytes,
    vision_bytes,
)
from maxpipe.planner.sizes import ParameterCounts, Sizes
from maxpipe.schedule.table import Schedule

REFERENCE = "reference"
ARGUMENTS = ("state", "batch", REFERENCE)
"""Terms that are allocated before the step starts. All other terms are temporary."""


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one device, keyed by the terms in `plan.memory_terms`."""

    terms: dict[str, float]
    host: float
    """Total bytes in host memory."""

    @property
    def arguments(self) -> float:
        """Return the total bytes of state, batch and reference parameters."""
        return sum(self.terms.get(name, 0.0) for name in ARGUMENTS)

    @property
    def reference(self) -> float:
        """Return the bytes held in device memory during the step that are not step arguments."""
        return self.terms.get(REFERENCE, 0.0)

    @property
    def temporary(self) -> float:
        """Return the total bytes of all temporary terms."""
        return self.total - self.arguments

    @property
    def total(self) -> float:
        """Return the total bytes of all terms."""
        return sum(self.terms.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Return the terms above 0.1% of the total, in descending order."""
        ordered = sorted(self.terms.items(), key=lambda item: -item[1])
        return [(name, size) for name, size in ordered if size > 0.001 * self.total]


def predict_memory(sizes: Sizes, schedule: Schedule, *, platform: str) -> Memory:
    """Predict the memory use of a config's train step on a JAX platform."""
    sizes = sizes.on_platform(platform)
    if not gathers_weights(sizes):  # without gathers, both gather modes are equivalent
        pipeline = sizes.config.pipeline
        mode = "window" if pipeline.weight_gather == "window" else "step"
        pipeline = replace(pipeline, weight_gather=mode)
        sizes = replace(sizes, config=replace(sizes.config, pipeline=pipeline))
    terms = state(sizes) | {REFERENCE: reference(sizes)} | buffers(sizes, schedule)
    terms |= _gathered_weights(sizes, schedule)
    terms["vision"] = vision_bytes(sizes)
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
        spared = CPU_BARRIER_COPIES * (sizes.mesh.token_shards == 1) if older else 1.0
        layer = _layer_on_cpu(working, score_bytes=4, spared=spared)
        moments = {"layer": layer, "held": _gathering_on_cpu(working, schedule)}
    else:
        moments = {
            "layer": _layer_on_tpu(sizes, schedule),
            "window": _arriving_bytes(sizes, schedule),
            "mtp": _mtp_layer_on_tpu(sizes, schedule),
        }
        if platform != "tpu":  # GPUs: the larger of the TPU and CPU estimates
            size, kinds = sizes.activations.itemsize, sizes.model.layer_types
            names = [name for name, kind in kinds.items() if not _has_expert_kernels(kind)]
            on_cpu = _layer_on_cpu(sizes, score_bytes=size, spared=0.0, names=names)
            moments["layer"] = max(moments["layer"], on_cpu)
    moments["logits"] = _logits(working, platform)
    later = _gradients_after_loss(sizes, schedule) if platform == "tpu" else 0.0
    absent = {"mtp": later, "logits": later}
    fullest = max(moments, key=lambda name: moments[name] - absent.get(name, 0.0))
    terms["gradients"] -= absent.get(fullest, 0.0)
    fullest, size = "layer" if fullest == "mtp" else fullest, moments[fullest]
    terms[fullest] = terms.get(fullest, 0.0) + size
    if platform not in ("cpu", "tpu"):
        terms[fullest] += WORKSPACE
    free = sum(size for name, size in terms.items() if name not in (*ARGUMENTS, "gradients"))
    terms["update"] = max(0.0, gradient_copy_bytes(sizes) - free)
    on_host = optimizer_bytes(sizes) if offloads_state(sizes) else 0.0
    on_host += offloaded_weight_bytes(sizes, sizes.layers.slots)
    _, offloaded = _saved_bytes(sizes, sizes.layers.chunk_slots)
    on_host += schedule.num_stash * offloaded
    return Memory({name: size for name, size in terms.items() if size}, on_host)


def state(sizes: Sizes) -> dict[str, float]:
    """Return the size in bytes of the step's arguments: state and batch."""
    # The batch has four int32 arrays of IDs and a float32 mask.
    batch = sizes.batch.per_device * (5 * 4 * sizes.config.train.sequence_length + 4)
    batch += image_bytes(sizes)
    return {"state": state_bytes(sizes, sizes.params), "batch": float(batch)}


def state_bytes(sizes: Sizes, params: ParameterCounts) -> float:
    """Return the size in bytes of these parameters and their optimizer state on one device."""
    optimizer = 0.0 if offloads_state(sizes) else optimizer_bytes(sizes)
    weights = _parameter_bytes(sizes, params)
    weights -= offloaded_weight_bytes(sizes, sizes.layers.slots, params)
    return float(weights + optimizer + 12)


def offloaded_weight_bytes(
    sizes: Sizes, layers: Mapping[str, float], params: ParameterCounts | None = None
) -> float:
    """Return the size in bytes of the weights of these layers that one device stores in host
    memory; always 0 on CPU.
    """
    if not sizes.config.pipeline.offload_weights or sizes.platform == "cpu":
        return 0.0
    return _layer_bytes(sizes, layers, params or sizes.params, only_matrices=True)


def offloads_state(sizes: Sizes) -> bool:
    """Return whether the optimizer state is offloaded to host memory; always false on CPU."""
    return sizes.config.optim.offload_state and sizes.platform != "cpu"


def reference(sizes: Sizes) -> float:
    """Return the size in bytes of the reference parameters used with `grpo.kl_coef`."""
    config = sizes.config
    is_kept = config.train.objective == "grpo" and config.grpo.kl_coef > 0
    return _parameter_bytes(sizes, sizes.trained) if is_kept else 0.0


def attention_workspace_bytes(sizes: Sizes) -> float:
    """Return the maximum workspace in bytes of attention kernels, which XLA cannot determine
    without a GPU.
    """
    parts = [part for kind in sizes.model.layer_types.values() for part in kind.parts.values()]
    documents = (Held(documents=part.backward_peak.documents) for part in parts)
    return max(map(sizes.activations.declared_bytes, parts, documents))


def _parameter_bytes(sizes: Sizes, params: ParameterCounts) -> float:
    """Return the total size in bytes of stored parameters on one device."""
    ends = params.norm_elements + params.embedding_elements() + params.mtp_elements()
    ends += params.vision_elements()
    ends += 0 if sizes.model.ends.head is None else params.head_elements()
    layers = _layer_bytes(sizes, sizes.layers.slots, params)
    layers += _layer_bytes(sizes, sizes.layers.prologue, params)
    return layers + BYTES[sizes.config.model.param_dtype] * ends


def _layer_bytes(
    sizes: Sizes,
    layers: Mapping[str, float],
    params: ParameterCounts,
    *,
    only_matrices: bool = False,
) -> float:
    """Return the size in bytes of the stored parameters, given the number of layers of each
    type.
    """
    return float(
        sum(
            count
            * BYTES[param.own_dtype or sizes.config.model.param_dtype]
            * sizes.mesh.elements(param.dims)
            for kind, count in layers.items()
            for param in sizes.model.layer_types[kind].params.values()
            if params.includes(param) and len(param.dims) > only_matrices
        )
    )


def buffers(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """Return the sizes in bytes of the buffers carried by the tick loop, keyed by term."""
    layers, activations = sizes.layers, sizes.activations
    by_chunk = sizes.config.pipeline.remat == "chunk"
    message = float(activations.itemsize * activations.stream)
    # Count the saved activations of the largest chunk, separately for each layer type.
    saved, _ = _saved_bytes(sizes, layers.chunk_slots)
    terms = {
        "inbox": schedule.num_inbox * message,
        "stash": schedule.num_stash * (message if by_chunk else saved),
        "sent": message * (1 if schedule.mixed else 2 if schedule.delayed else 1),
        "gradients": 4.0 * _gradient_elements(sizes, schedule),
        "deferred": 0.0,
        "window": 0.0,
        "partial": 0.0,
        "outside": 0.0,
        "reports": activations.report_bytes(layers.slots),
        "ahead": 0.0,
    }
    if heads := layers.mtp_heads:
        terms["ahead"] = 4.0 * heads + activations.report_bytes(layers.mtp)
    if schedule.mixed:
        terms["deferred"] = schedule.num_deferred * sum(
            length * activations.deferred_bytes(kind) for kind, length in layers.chunk_slots.items()
        )
    if _uses_weight_window(sizes, schedule):
        window = schedule.weight_window
        terms["window"] = window.num_chunk_slots * gathered_bytes(sizes, layers.chunk_slots)
        terms["partial"] = 4.0 * window.num_gradient_slots * sizes.trained.chunk_elements()
    if layers.prologue:
        saved = message if by_chunk else _saved_bytes(sizes, layers.prologue)[0]
        terms["outside"] = schedule.prologue.num_slots * (message + saved)
        terms["outside"] += activations.report_bytes(layers.prologue)
    return terms


def _saved_bytes(sizes: Sizes, layers: Mapping[str, int]) -> tuple[float, float]:
    """Return the (device, host) bytes of saved activations, given the number of layers of each
    type.
    """
    saved = [(count, *sizes.activations.saved_bytes(kind)) for kind, count in layers.items()]
    return sum(count * here for count, here, _ in saved), sum(
        count * host for count, _, host in saved
    )


def prologue_bytes(sizes: Sizes, schedule: Schedule) -> float:
    """Return the total size of the prologue layers in bytes.

    The size includes state, gradients, gathered weights and buffers. The temporary memory of a
    layer's backward pass is excluded, because all layers share it.
    """
    once = sizes.config.pipeline.weight_gather != "iteration"
    total = _layer_bytes(sizes, sizes.layers.prologue, sizes.params)
    total += optimizer_layer_bytes(sizes, sizes.layers.prologue)
    total += 4.0 * sizes.trained.prologue_elements(whole=once)
    if once:
        total += gathered_bytes(sizes, sizes.layers.prologue)
    return total + buffers(sizes, schedule)["outside"]


def _uses_weight_window(sizes: Sizes, schedule: Schedule) -> bool:
    return (
        sizes.config.pipeline.weight_gather == "window"
        and schedule.weight_window.num_chunk_slots > 0
    )


def _gathers_per_step(sizes: Sizes, schedule: Schedule) -> bool:
    mode = sizes.config.pipeline.weight_gather
    return mode == "step" or (mode == "window" and not _uses_weight_window(sizes, schedule))


def _gradient_elements(sizes: Sizes, schedule: Schedule) -> int:
    once, params = sizes.config.pipeline.weight_gather != "iteration", sizes.trained
    layers = params.stage_elements(whole=_gathers_per_step(sizes, schedule))
    layers += params.prologue_elements(whole=once)
    ends = params.embedding_elements(whole=not sizes.mesh.splits_columns) + params.norm_elements
    return layers + ends + params.head_elements(whole=once) + params.mtp_elements(whole=once)


def _gradients_after_loss(sizes: Sizes, schedule: Schedule) -> float:
    """Return the size in bytes of the gradient accumulators that are not live during the loss.

    XLA removes a tick loop of one iteration. The accumulators of the layers and of the embedding
    are then allocated after the loss. With more iterations, the loop carries all accumulators.
    """
    if schedule.num_ticks > 1:
        return 0.0
    params = sizes.trained
    layers = params.stage_elements(whole=_gathers_per_step(sizes, schedule))
    return 4.0 * (layers + params.embedding_elements(whole=not sizes.mesh.splits_columns))


def _gathered_weights(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """Return the size in bytes of gathered weights that are kept for the entire step."""
    if sizes.config.pipeline.weight_gather == "iteration":
        return {"held": 0.0}
    params = sizes.params
    if _read_in_place(sizes):
        if sizes.platform == "cpu":
            return {"held": 0.0}
        params = sizes.trained
    # A tied output projection is stored in the layout that its matmuls expect.
    head = sizes.params if sizes.model.ends.head is None else params
    ends = head.head_elements(whole=True) + params.mtp_elements(whole=True)
    total = float(sizes.activations.itemsize * ends)
    total += gathered_bytes(sizes, sizes.layers.prologue, params)
    if _gathers_per_step(sizes, schedule):
        total += gathered_bytes(sizes, sizes.layers.slots, params)
    return {"held": total}


def _read_in_place(sizes: Sizes) -> bool:
    """Return whether weights can be used in place: unsharded and in the compute dtype.

    On TPUs and GPUs, only frozen weights are used in place. On CPU, trained weights are used in
    place as well.
    """
    model = sizes.config.model
    is_right = model.param_dtype == model.compute_dtype and model.matmul == "default"
    return is_right and not gathers_weights(sizes)


ARRIVING = 0.8
"""Fraction of a chunk's gathered weights that is in transit to the weight prefetch window; fitted
to measurements on TPU."""


def _arriving_bytes(sizes: Sizes, schedule: Schedule) -> float:
    return (
        ARRIVING * gathered_bytes(sizes, sizes.layers.chunk_slots)
        if _uses_weight_window(sizes, schedule)
        else 0.0
    )


def _copies(sizes: Sizes) -> float:
    """Return the bytes of parameter shards that XLA for TPU copies to the compute dtype.

    Parameters that are stored in the compute dtype need no copy. Offloaded weights are converted
    one layer at a time.
    """
    pipeline, model = sizes.config.pipeline, sizes.config.model
    if model.compute_dtype == model.param_dtype:
        return 0.0
    elements = sizes.params.embedding_elements()
    if pipeline.remat != "chunk" and pipeline.weight_gather != "step":
        elements += sum(
            count * sizes.mesh.elements(param.dims)
            for kind, count in sizes.layers.slots.items()
            for param in sizes.model.layer_types[kind].params.values()
            if not param.own_dtype and not (pipeline.offload_weights and len(param.dims) > 1)
        )
        if pipeline.weight_gather == "iteration":
            elements += sizes.params.head_elements()
    return float(BYTES[model.compute_dtype] * elements)


WORKSPACE = 32.0 * 2**20
"""Workspace of cuBLAS matmuls on Hopper GPUs, in bytes. Other GPUs use less."""


def _transposed_shards(sizes: Sizes, schedule: Schedule) -> float:
    """Return the size in bytes of transposed layer shards that XLA for GPU keeps during the step.

    XLA for GPU gathers only along the first dimension. XLA hoists the transposes for other
    dimensions out of the loops.
    """
    if _gathers_per_step(sizes, schedule):
        return 0.0
    return float(BYTES[sizes.config.model.param_dtype] * sizes.params.transposed_elements)


def _with_float32(sizes: Sizes) -> Sizes:
    config = sizes.config
    return Sizes(replace(config, model=replace(config.model, compute_dtype="float32")))


@cache
def _has_older_cpu_compiler() -> bool:
    """Return whether the installed jax has the older CPU compiler; does not import jax."""
    try:
        major, minor, *_ = importlib.metadata.version("jax").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) < _NEWER_ON_CPU


_NEWER_ON_CPU = (0, 12)
"""First jax version whose XLA for CPU keeps activations and buffers in bfloat16 and preserves
optimization barriers until fusion. JAX 0.10 did neither."""


def _float32_copies(sizes: Sizes, wide: Sizes, schedule: Schedule) -> float:
    """Return the size in bytes of the float32 copies that older versions of XLA for CPU make."""
    both = (sizes, wide)
    held, held_wide = (sum(_gathered_weights(each, schedule).values()) for each in both)
    carried, carried_wide = (sum(buffers(each, schedule).values()) for each in both)
    # A float32 buffer is twice as large as a 16-bit buffer, so a float32 copy is twice as large as
    # the difference between the two.
    return held_wide - held + 2 * (carried_wide - carried)


WEIGHT_COPIES = {"iteration": 2.0, "window": 0.8, "step": 0.8}
"""Number of compute-dtype copies of a layer's gathered weights and gradients during its backward
pass. This constant and the next two are fitted to measurements on TPU."""
SCORE_COPIES = 2.9 / 2
"""Number of attention-score copies in memory for each copy that a sublayer declares. The scores of
all attention blocks are live at the same time."""
REDUCED_COPIES = 1.2
"""Number of copies of unsharded activations held by tensor-parallel reductions, in addition to the
scores."""


REMOTE_KEY_COPIES = 2.0
"""Number of arrays that hold the keys and values gathered from other devices: the gathered arrays
themselves and their gradients."""


def _layer_on_tpu(sizes: Sizes, schedule: Schedule) -> float:
    """Return the peak bytes of the largest layer's backward pass. Sublayers share memory."""
    layers = (_layer_type_on_tpu(sizes, schedule, name) for name in sizes.model.layer_types)
    return max(layers) + _chunk_inputs(sizes)


def _mtp_layer_on_tpu(sizes: Sizes, schedule: Schedule) -> float:
    """Return the peak bytes of an MTP layer's backward pass.

    On TPUs, these bytes include the head gradient. If the logits are not computed in blocks, the
    ordinary head's gradient is computed after the MTP heads, so its inputs are also included.
    """
    layers = [_layer_type_on_tpu(sizes, schedule, name) for name in sizes.layers.mtp]
    if not layers:
        return 0.0
    total = max(layers) + _mtp_bytes(sizes, MTP_PENDING_ACTIVATIONS)
    if sizes.platform != "tpu":
        return total
    size, gathers = sizes.activations.itemsize, sizes.config.pipeline.weight_gather == "iteration"
    total += 4.0 * sizes.trained.head_elements(whole=True) * gathers
    if loss_blocks(sizes) == 1:
        total += size * sizes.params.head_elements(whole=True) * gathers
        total += size * loss_tokens(sizes) * sizes.params.vocabulary
    return total


def _layer_type_on_tpu(sizes: Sizes, schedule: Schedule, name: str) -> float:
    """Return the peak bytes of one layer's backward pass, which is at a moment of one sublayer.

    While a sublayer is differentiated, the recomputed residuals of earlier sublayers are live. If
    the sublayer is attention, those of later sublayers are also live, because the weight gradients
    are computed last. All weights of the layer are live at each moment, unless a sublayer declares
    the live fraction.
    """
    mode = "step" if _gathers_per_step(sizes, schedule) else sizes.config.pipeline.weight_gather
    kind, copies = sizes.model.layer_types[name], WEIGHT_COPIES[mode]
    weights = gathered_bytes(sizes, {name: 1}) + _dequantized_bytes(sizes, kind)
    parts = kind.parts
    # The moments describe trained weights. Frozen weights have no gradients.
    has_moments = any(part.backward_moments for part in parts.values()) and not kind.adapters
    if sizes.platform != "tpu" or not has_moments:
        kernels = sizes.platform == "cuda" and _has_expert_kernels(kind)
        arrays = (
            _part_on_tpu(sizes, part, part.gpu_peak)
            if kernels and isinstance(part, Experts)
            else _part_on_tpu(sizes, part, part.backward_peak)
            for part in parts.values()
        )
        return copies * weights + max(arrays)
    elements = Counter[str]()
    for (part_name, _), param in kind.params.items():
        elements[part_name] += sizes.mesh.elements(param.dims, whole=True)
    residuals = {
        name: sizes.activations.declared_bytes(part, replace(part.residuals, float32=()))
        * (not sizes.activations.saves_all(part))
        for name, part in parts.items()
    }
    most, earlier = 0.0, 0.0
    for name, part in parts.items():
        own = weights * elements[name] / elements.total()
        if not part.backward_moments:
            others = sum(residuals.values()) - residuals[name]
            arrays = _part_on_tpu(sizes, part, part.backward_peak)
            most = max(most, copies * own + others + arrays)
        for held, share in part.backward_moments:
            live = copies if share is None else share * (mode == "iteration")
            others = min(copies, 1.0) * (weights - own) + earlier
            most = max(most, live * own + others + _part_on_tpu(sizes, part, held))
        earlier += residuals[name]
    return most


def _has_expert_kernels(kind: LayerType) -> bool:
    """Return whether GPUs run kernels for the experts of a layer type, instead of a loop."""
    parts = (part for part in kind.parts.values() if isinstance(part, Experts))
    return any(part.grouped and part.backend == "auto" for part in parts)


def _dequantized_bytes(sizes: Sizes, kind: LayerType) -> float:
    """Return the size in bytes of a layer's dequantized matrices in the compute dtype."""
    elements = sum(
        sizes.mesh.elements(param.dims, whole=True)
        for key, param in kind.declared.items()
        if is_held(kind, key)
    )
    return float(sizes.activations.itemsize * elements)


def _part_on_tpu(sizes: Sizes, part: Part, held: Held) -> float:
    """Return the size in bytes of the arrays that a sublayer's backward pass holds, excluding
    weights.
    """
    activations = sizes.activations
    size, (narrow, wide, other) = activations.itemsize, held.pairs
    total = (wide * 4 + narrow * SCORE_COPIES * size + other) * activations.stored_scores(part)
    total += REMOTE_KEY_COPIES * size * activations.remote_key_elements(part)
    if total and sizes.mesh.tensor > 1:
        total += REDUCED_COPIES * size * activations.whole_hidden
    return total + activations.declared_bytes(part, replace(held, pairs=(0.0, 0.0, 0.0)))


CPU_WEIGHTS, CPU_ACTIVATIONS = 0.8, 2.5
"""Number of copies of a layer's weights, and number of copies of the stage activation per sublayer;
fitted to measurements."""
CPU_GATHERED = 4.0
"""Number of copies of gathered activations and of activations before their reduction, if tokens are
sharded between matmuls; fitted to measurements."""
CPU_KEPT, CPU_RECOMPUTED = 5 / 6, 1.25
"""Number of copies of each array that a sublayer declares, if activations are saved and if they are
recomputed. Fitted to measurements."""
CPU_SCORES, CPU_SCORES_ALONE = 0.95, 1.6
"""Number of copies of the attention scores while the sublayers' other arrays are live, and during
the backward pass of attention; fitted to measurements."""
CPU_BARRIER_COPIES = 0.6
"""Number of additional copies of each array if the compiler drops optimization barriers; fitted to
measurements. Matmul operands already have the right layout, unless tokens are sharded."""
CPU_GATHERING = 2 / 3
"""Fraction of a stage's gathered float32 weights that are live during their conversion to the
compute dtype; fitted to measurements. All weights are gathered before the first conversion."""


def _gathering_on_cpu(sizes: Sizes, schedule: Schedule) -> float:
    """Return the temporary bytes for gathering a stage's weights, which is done in float32."""
    narrow = sizes.config.model.compute_dtype != "float32"
    if not (narrow and _gathers_per_step(sizes, schedule) and gathers_weights(sizes)):
        return 0.0
    return CPU_GATHERING * 4 * sizes.params.stage_elements(whole=True)


def _weight_window_on_cpu(sizes: Sizes, schedule: Schedule, *, narrow: bool) -> float:
    """Return the bytes added by the weight prefetch window: a copy, a float32 chunk and float32
    shards.
    """
    if not _uses_weight_window(sizes, schedule):
        return 0.0
    chunk = sizes.params.chunk_elements()
    window = sizes.activations.itemsize * schedule.weight_window.num_chunk_slots * chunk
    return float(window + 4 * chunk + 4 * sizes.params.stage_elements() * narrow)


def _layer_on_cpu(
    sizes: Sizes, *, score_bytes: int, spared: float, names: Collection[str] | None = None
) -> float:
    """Return the peak bytes of the largest layer's backward pass on CPU.

    On CPU, most arrays are live at the same time. `score_bytes` is the size of one attention score,
    which does not depend on the compute dtype. `spared` is the fraction of each sublayer's
    `barrier_copies` that optimization barriers avoid. `names` are the layer types to consider; None
    means all of them.
    """
    activations, kinds = sizes.activations, dict(sizes.model.layer_types)
    if names is not None:
        kinds = {name: kind for name, kind in kinds.items() if name in names}
    size = activations.itemsize

    def arrays_of(part: Part) -> float:
        arrays = (*part.backward_peak.compute_dtype, *part.backward_peak.float32)
        elements = sum(copies * activations.elements(dims) for copies, dims in arrays)
        elements -= spared * sum(
            copies * activations.elements(dims)
            for copies, dims in part.barrier_copies.compute_dtype
        )
        return (CPU_KEPT if activations.saves_all(part) else CPU_RECOMPUTED) * elements

    def needed(name: str, kind: LayerType) -> float:
        parts = kind.parts.values()
        pairs = sum(
            sum(part.backward_peak.pairs) * activations.stored_scores(part) for part in parts
        )
        pairs *= score_bytes / size
        arrays = sum(map(arrays_of, parts))
        alive = REMOTE_KEY_COPIES * sum(map(activations.remote_key_elements, parts))
        alive += max(CPU_SCORES_ALONE * pairs, CPU_SCORES * pairs + arrays)
        alive += CPU_ACTIVATIONS * len(parts) * activations.hidden
        alive += CPU_GATHERED * (sizes.mesh.token_shards > 1) * activations.whole_hidden
        return alive + CPU_WEIGHTS * sizes.params.layer_elements(name, whole=True)

    ring = size * max((needed(*kind) for kind in kinds.items()), default=0.0)
    ring += _chunk_inputs(sizes)
    mtp = [size * needed(name, kinds[name]) for name in sizes.layers.mtp if name in kinds]
    return max([ring, *(layer + _mtp_bytes(sizes, CPU_MTP_ACTIVATIONS) for layer in mtp)])


CPU_MTP_ACTIVATIONS = 28.0
"""Number of additional activations of an MTP layer: projection, norms, embeddings, and inputs of
later heads; fitted to measurements."""


def _mtp_bytes(sizes: Sizes, copies: float) -> float:
    """Return the size in bytes of `copies` activations, plus two activations per MTP head."""
    size = sizes.activations.itemsize
    return size * (copies + 2 * sizes.layers.mtp_heads) * sizes.activations.hidden


MTP_PENDING_ACTIVATIONS = 8.0
"""Number of MTP activations that are live at the same time as the logits, in addition to two per
head."""


def _mtp_pending_bytes(sizes: Sizes, platform: str) -> float:
    """Return the bytes of MTP arrays that are live at the same time as the logits.

    TPUs add the gradients of all heads in place. GPUs need one more copy of the head gradient,
    unless the logits are computed in blocks, and CPUs need two. On TPUs, the logits of the ordinary
    head are kept for its gradient, which is computed after the MTP heads, unless the logits are
    computed in blocks.
    """
    if not sizes.layers.mtp:
        return 0.0
    copies = {"tpu": 0, "cpu": 2}.get(platform, int(loss_blocks(sizes) == 1))
    pending = copies * 4.0 * sizes.trained.head_elements(whole=True)
    if platform == "tpu" and loss_blocks(sizes) == 1:
        pending += 4.0 * loss_tokens(sizes) * sizes.params.vocabulary
    return _mtp_bytes(sizes, MTP_PENDING_ACTIVATIONS) + pending


def _chunk_inputs(sizes: Sizes) -> float:
    """Return the size in bytes of a chunk's layer inputs after its recomputed forward pass."""
    pipeline, size = sizes.config.pipeline, sizes.activations.itemsize
    layers = sum(sizes.layers.chunk_slots.values()) if pipeline.remat == "chunk" else 0
    return float(layers * size * sizes.activations.stream)


def loss_tokens(sizes: Sizes) -> int:
    """Return the number of tokens whose logits are in memory at the same time."""
    setting = sizes.config.pipeline.loss_block_tokens
    return loss_block(setting, sizes.batch.tokens, sizes.params.vocabulary) or sizes.batch.tokens


def loss_blocks(sizes: Sizes) -> int:
    """Return the number of token blocks in the loss of one microbatch."""
    return -(-sizes.batch.tokens // loss_tokens(sizes))


UNFUSED_LOGITS = 3.0
"""Number of float32 copies of the logits on CPU, where XLA does not fuse the loss with its
gradient."""


def _logits(sizes: Sizes, platform: str) -> float:
    """Return the peak size in bytes of the loss head's backward pass."""
    model, gathers = sizes.config.model, sizes.config.pipeline.weight_gather == "iteration"
    size, pairs = BYTES[model.compute_dtype], loss_tokens(sizes) * sizes.params.vocabulary
    matrix = sizes.params.head_elements(whole=True)
    gradient = 4.0 * sizes.trained.head_elements(whole=True)
    # The gradient of the head matrix becomes live after the other copies of the logits have been
    # freed.
    with_gradient = 4.0 * pairs + gradient
    if platform == "tpu":
        # Unsharded accumulators are updated in place. Sharded accumulators are updated after the
        # reduction. With several blocks, the gradient accumulates in place in a separate buffer.
        most = with_gradient if gathers or loss_blocks(sizes) > 1 else 4.0 * pairs
    elif platform == "cpu":
        most = max(with_gradient, UNFUSED_LOGITS * 4.0 * pairs)
    else:  # logits, and their gradient in the compute dtype
        most = size * pairs + max(4.0 * pairs, gradient)
    if loss_blocks(sizes) > 1:
        # Count the inputs and outputs of all blocks, and the sums over blocks and heads. GPUs use
        # one buffer for both sums.
        has_mtp = sizes.layers.mtp_heads > 0
        sums = {"tpu": has_mtp, "cpu": 1 + has_mtp}.get(platform, 1)
        most += gradient * sums + 2 * size * sizes.activations.whole_hidden
    return most + size * matrix * gathers + _mtp_pending_bytes(sizes, platform)
