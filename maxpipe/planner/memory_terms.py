"""Components of device memory usage, and the config keys that reduce each component.

Plans and explanations of out-of-memory errors share this table. This module also predicts the bytes
of optimizer state and gathered weights on one device, without jax. Weights are gathered in the
compute dtype, or in an 8-bit dtype with scales.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxpipe.hardware import GIB, USABLE_MEMORY_FRACTION
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.vision import QUERY_BLOCK
from maxpipe.models.spec import Param
from maxpipe.optim.state_spec import BYTES, is_orthogonalised, state_arrays
from maxpipe.parallel.axes import BLOCK_SIZES, axis_table, find_zero1_dim
from maxpipe.planner.sizes import ParameterCounts, Sizes


@dataclass(frozen=True)
class Term:
    """A component of device memory."""

    about: str
    keys: str
    """Config keys that reduce the term."""


TERMS: dict[str, Term] = {
    "state": Term(
        "parameters and optimizer state",
        "a larger mesh.ici_fsdp, mesh.ici_stage or mesh.ici_tensor",
    ),
    "gradients": Term(
        "gradient accumulators",
        "pipeline.weight_gather=iteration (sharded over fsdp), a larger mesh.ici_fsdp or "
        "mesh.ici_stage",
    ),
    "copies": Term(
        "parameter shards in the compute dtype",
        "pipeline.remat=chunk (no copies on TPUs), a larger mesh.ici_fsdp",
    ),
    "turned": Term(
        "transposed parameter shards, because GPUs gather along the first dimension",
        "a larger mesh.ici_fsdp or mesh.ici_stage",
    ),
    "widened": Term(
        "float32 copies of narrower arrays, because CPUs compute in float32",
        "model.compute_dtype=float32",
    ),
    "held": Term(
        "unsharded weights of a stage, gathered once per step",
        "pipeline.weight_gather=window or iteration",
    ),
    "window": Term(
        "unsharded weights of the chunks in use",
        "pipeline.weight_gather=iteration, or a larger pipeline.repeats (shorter chunks)",
    ),
    "partial": Term(
        "unreduced gradients of complete chunks",
        "pipeline.weight_gather=iteration, or a larger pipeline.repeats (shorter chunks)",
    ),
    "stash": Term(
        "activations saved for the backward pass",
        "pipeline.remat=full or chunk, pipeline.offloaded_names, a larger "
        "pipeline.microbatches, a smaller pipeline.group",
    ),
    "deferred": Term(
        "inputs of deferred weight gradients",
        "a schedule without split backwards (pipeline.schedule=interleaved), a larger "
        "pipeline.microbatches",
    ),
    "inbox": Term("receive buffers", "a larger pipeline.microbatches"),
    "sent": Term("send buffers", "a larger pipeline.microbatches"),
    "vision": Term(
        "image embeddings, gathered weights and activations of the vision tower",
        "a smaller data.max_images_per_sequence, or model.frozen=[vision.*]",
    ),
    "outside": Term(
        "activations of the prologue layers",
        "pipeline.prologue_layers=0, pipeline.remat=chunk",
    ),
    "reports": Term("losses and statistics of layers", "a larger mesh.ici_stage"),
    "ahead": Term("losses and statistics of MTP heads", "a smaller model.mtp_heads"),
    "update": Term(
        "copies of gradients during their reduction and the optimizer update",
        "a larger mesh.ici_fsdp or mesh.ici_stage, optim.name=adamw",
    ),
    "logits": Term(
        "logits of a microbatch or of a token block, and their gradient",
        "a smaller pipeline.loss_block_tokens, a larger mesh.ici_stage or mesh.ici_tensor (which "
        "shard the vocabulary), a larger pipeline.microbatches",
    ),
    "layer": Term(
        "unsharded weights, gradient and activations of one layer",
        "a larger mesh.ici_tensor, a larger mesh.ici_context for long sequences, a larger "
        "pipeline.microbatches, a shorter train.sequence_length",
    ),
    "reference": Term(
        "reference parameters for grpo.kl_coef", "grpo.kl_coef=0, or adapters (adapter.rank)"
    ),
    "batch": Term("token IDs of a step", "a smaller train.batch_size"),
}


def verdict(predicted: float, memory: float) -> str:
    """Return text that states whether a step with `predicted` bytes fits in a device's `memory`."""
    if predicted <= USABLE_MEMORY_FRACTION * memory:
        return "fits"
    return "may not fit" if predicted <= memory else "does not fit"


def gib(size: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether XLA reports that an allocation on a device failed."""
    # A kernel that exceeds the shared memory of a multiprocessor has the same status.
    return "RESOURCE_EXHAUSTED" in str(error) and "Shared memory" not in str(error)


def explain_out_of_memory(
    message: str, buffers: Mapping[str, tuple[tuple[int, ...], ...]], tensor: int = 1
) -> str:
    """Explain an out-of-memory message: list the largest memory terms, and the config keys that
    reduce them.

    Return an empty string if the message lists no allocations, as when compiling for absent
    devices. `buffers` maps names in `TERMS` to array shapes, which can be sharded over `tensor`
    devices.
    """
    total: dict[str, float] = {}
    for size, shape, origin in _allocations(message):
        name = _classify_allocation(shape, origin, buffers, tensor)
        total[name] = total.get(name, 0.0) + size
    return describe_largest(total)


def describe_largest(terms: Mapping[str, float]) -> str:
    """Format the four largest terms, and the config keys that reduce them."""
    ordered = sorted(terms.items(), key=lambda item: -item[1])[:4]
    return "\n".join(
        f"  {gib(size):>10}  {TERMS[name].about}; reduce with {TERMS[name].keys}"
        for name, size in ordered
    )


def parse_out_of_memory(message: str) -> tuple[float, float] | None:
    """Return the required and available bytes stated in the compiler's out-of-memory message."""
    number = r"([\d.]+)([KMGT]?)"
    match = re.search(rf"[Uu]sed {number} of {number}", message) or re.search(
        rf"required for HLO temporaries \({number}\) exceeds available HBM \({number}\)", message
    )
    return match and (_bytes(match[1], match[2]), _bytes(match[3], match[4]))


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** " KMGT".index(unit or " ")


def _allocations(message: str) -> list[tuple[float, tuple[int, ...], str]]:
    """Return (bytes, dims, origin) of each allocation listed in an out-of-memory message."""
    allocations = []
    for block in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", block)
        shape = re.search(r"Shape: \w+\[([\d,]*)\]", block)
        origin = re.search(r'op_name="([^"]*)"', block)
        dims = tuple(int(dim) for dim in shape[1].split(",") if dim) if shape else ()
        if size:
            allocations.append((_bytes(size[1], size[2]), dims, origin[1] if origin else ""))
    return allocations


def _classify_allocation(
    dims: tuple[int, ...],
    origin: str,
    buffers: Mapping[str, tuple[tuple[int, ...], ...]],
    tensor: int,
) -> str:
    # The compiler may drop dimensions of size one or merge adjacent dimensions.
    sizes = {math.prod(dims), math.prod(dims) * tensor} if dims else set()
    for name, shapes in buffers.items():
        if any(math.prod(shape) in sizes for shape in shapes):
            return name
    if "/head/" in origin:
        return "logits"
    return "layer" if "/while/body" in origin else "state"


def optimizer_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of the optimizer state on one device."""
    ends = (_optimizer_memory_bytes(sizes, param) for param in sizes.model.ends.params.values())
    layers = optimizer_layer_bytes(sizes, sizes.layers.slots)
    return layers + optimizer_layer_bytes(sizes, sizes.layers.prologue) + sum(ends)


def optimizer_layer_bytes(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Return the size in bytes of optimizer state, given the number of layers of each type."""
    return sum(
        count * _optimizer_memory_bytes(sizes, param)
        for kind, count in layers.items()
        for param in sizes.model.layer_types[kind].params.values()
    )


CPU_COPIES = {"adafactor": 1.0, "lion": 0.6}
"""Number of gradient copies that XLA for CPU keeps during an update. This constant and the next two
are fitted to measurements."""
MUON_WHOLE_COPIES, MUON_SHARDED_COPIES = 1.0, 1.6
"""Number of gradient copies in a Muon update, for unsharded and for sharded matrices."""


def gradient_copy_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of float32 gradient copies during the reduction or the update."""
    optim, is_cpu = sizes.config.optim, sizes.platform == "cpu"

    def in_update(param: Param) -> float:
        if not is_orthogonalised(optim, param):
            return CPU_COPIES.get(optim.name, 0.0) * is_cpu
        return (
            MUON_SHARDED_COPIES
            if sizes.mesh.elements(param.dims) < math.prod(param.shape)
            else MUON_WHOLE_COPIES
        )

    sums = _copies(sizes, lambda param: is_cpu and bool(sizes.mesh.reduced_over(param.dims)))
    return max(sums, _copies(sizes, in_update))


def _copies(sizes: Sizes, number: Callable[[Param], float]) -> float:
    """Return the total bytes of `number(param)` float32 copies of each gradient."""
    counted = [
        (count, param)
        for kind, count in (Counter(sizes.layers.slots) + sizes.layers.prologue).items()
        for param in sizes.model.layer_types[kind].params.values()
    ]
    counted += [(1, param) for param in sizes.model.ends.params.values()]
    return 4.0 * sum(
        count * number(param) * sizes.mesh.elements(sizes.mesh.padded(param.dims))
        for count, param in counted
        if param.trainable
    )


def zero1_dim(sizes: Sizes, param: Param) -> int | None:
    """Return the dimension along which ZeRO-1 shards a parameter's optimizer state, or None."""
    if not sizes.config.optim.zero1:
        return None
    table = axis_table(sizes.config.mesh)
    return find_zero1_dim(param.dims, [table.get(axis, ()) for axis in param.axes], sizes.mesh.axes)


def _optimizer_memory_bytes(sizes: Sizes, param: Param) -> float:
    config, total = sizes.config, 0.0
    dim, data = zero1_dim(sizes, param), sizes.mesh.axes["data"]
    for array in state_arrays(config.optim, param, config.model.param_dtype).values():
        size = sizes.mesh.elements(sizes.mesh.padded(array.dims)) * BYTES[array.dtype]
        is_shared = dim is not None and dim not in array.dropped_dims
        total += size / data if is_shared else size
    return total


def gathers_weights(sizes: Sizes) -> bool:
    """Return whether any parameter is gathered before it is used."""
    groups = (sizes.model.ends, *sizes.model.layer_types.values())
    params = (param for group in groups for param in group.params.values())
    return any(sizes.mesh.gathered_over(param.dims) for param in params)


def gathered_bytes(
    sizes: Sizes, layers: Mapping[str, int], params: ParameterCounts | None = None
) -> float:
    """Return the size in bytes of gathered weights, given the number of layers of each type.

    Only the parameters included in `params` are counted (default: all parameters).
    """
    params = params or sizes.params
    if sizes.config.model.matmul == "default" and not sizes.config.adapter.rank:
        return float(gathered_itemsize(sizes) * params.elements(layers, whole=True))
    return float(
        sum(
            count
            * (
                gathered_itemsize(sizes, param) * sizes.mesh.elements(param.dims, whole=True)
                + _scale_bytes(sizes, param)
            )
            for kind, count in layers.items()
            for param in sizes.model.layer_types[kind].params.values()
            if params.includes(param)
        )
    )


def gathered_itemsize(sizes: Sizes, param: Param | None = None) -> int:
    """Return the number of bytes per element of a gathered parameter, excluding scales.

    Quantized parameters are stored twice, for the forward and backward matmuls, unless the complete
    matrix has one 8-bit scale.
    """
    if param is not None and param.own_dtype:
        return BYTES[param.own_dtype]
    if param is None or not is_quantized(sizes, param):
        return sizes.activations.itemsize
    return 1 if sizes.config.model.matmul == "nvfp4" else _num_gathered_arrays(sizes, param)


def _num_gathered_arrays(sizes: Sizes, param: Param) -> int:
    """Return 2 if a parameter is quantized separately for the forward and the backward matmul,
    otherwise 1.
    """
    model = sizes.config.model
    is_shared = model.matmul_scales == "tensor" and model.matmul not in BLOCK_SIZES
    return 2 if is_quantized(sizes, param) and not is_shared else 1


def is_quantized(sizes: Sizes, param: Param) -> bool:
    """Return whether a parameter is gathered in 4 or 8 bits; see `Decoder.contracted_dims`."""
    model = sizes.config.model
    return is_multiplied_in_few_bits(model, param) and not sizes.config.mesh.sequence_parallel


def is_multiplied_in_few_bits(model: ModelConfig, param: Param) -> bool:
    """Return whether the matmul of a parameter multiplies numbers of 4 or 8 bits."""
    rounded = model.matmul != "default" and model.matmul_scales != "block"
    rounded &= model.matmul_parts == "all" or not param.is_of_heads
    return rounded and param.num_contracted_dims > 0


def block_scale_bytes(sizes: Sizes, param: Param) -> float:
    """Return the bytes of the block scales that are gathered with a parameter: one byte per block,
    for the forward and the backward matmul.
    """
    matmul = sizes.config.model.matmul
    if matmul not in BLOCK_SIZES or not is_quantized(sizes, param):
        return 0.0
    # The blocks of nvfp4 weights have two dims.
    block = BLOCK_SIZES[matmul] ** (2 if matmul == "nvfp4" else 1)
    return 2 * sizes.mesh.elements(param.dims, whole=True) / block


def _scale_bytes(sizes: Sizes, param: Param) -> float:
    """Return the bytes of the scales of a quantized parameter."""
    if not is_quantized(sizes, param):
        return 0.0
    model = sizes.config.model
    if model.matmul in BLOCK_SIZES:
        return block_scale_bytes(sizes, param)
    if model.matmul_scales == "tensor":
        return 4.0
    sides = param.dims[: param.num_contracted_dims], param.dims[param.num_contracted_dims :]
    return 4.0 * sum(sizes.mesh.elements(dims, whole=True) for dims in sides)


def image_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of the images in a batch on one device."""
    count, tower = sizes.config.data.max_images_per_sequence, sizes.model.ends.vision
    if not count or tower is None:
        return 0.0
    # The number of remaining image tokens, and 3-D positions if the model has them.
    tokens = (16 if tower.has_rotary_positions else 4) * sizes.config.train.sequence_length
    return float(sizes.batch.per_device * (count * math.prod(tower.image_shape) + tokens))


def vision_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of image embeddings and of the vision tower at work on one device.

    The tower processes one image at a time. If it is trained, its float32 weights and gradients are
    gathered, and the inputs of its layers and the gradients of the embeddings are saved.
    """
    count, tower = sizes.config.data.max_images_per_sequence, sizes.model.ends.vision
    if not count or tower is None:
        return 0.0
    itemsize = sizes.activations.itemsize
    embeddings = itemsize * count * tower.tokens_per_image * tower.feature_width
    trained = sizes.trained.vision_elements(whole=True)
    total = float(sizes.batch.per_device * embeddings * (2 if trained else 1))
    stored = 4 if trained else BYTES[sizes.config.model.param_dtype]
    total += stored * sizes.params.vision_elements(whole=True) + 4.0 * trained
    patches = tower.num_patches
    scores = 2 * 4 * tower.num_heads * min(patches, QUERY_BLOCK) * patches
    layers = tower.num_layers if trained else 1
    return total + scores + itemsize * layers * patches * tower.width
