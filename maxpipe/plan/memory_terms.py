"""Define the terms of device memory, and the config keys that reduce each term.

Plans and explanations of out-of-memory errors share this table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.hardware import GIB


@dataclass(frozen=True)
class Term:
    """A term of device memory."""

    about: str
    keys: str
    """Config keys that reduce the term."""


TERMS: dict[str, Term] = {
    "state": Term(
        "parameters and optimizer state",
        "more mesh.ici_fsdp, mesh.ici_stage or mesh.ici_tensor",
    ),
    "gradients": Term(
        "gradient accumulators",
        "pipeline.weight_gather=iteration (sharded over fsdp), more mesh.ici_fsdp or "
        "mesh.ici_stage",
    ),
    "copies": Term(
        "parameter shards in the compute dtype",
        "pipeline.remat=chunk (no copies on TPUs), more mesh.ici_fsdp",
    ),
    "turned": Term(
        "transposed parameter shards, because GPUs gather along the first dimension",
        "more mesh.ici_fsdp or mesh.ici_stage",
    ),
    "widened": Term(
        "float32 copies of narrower arrays, because CPUs compute in float32",
        "model.compute_dtype=float32",
    ),
    "held": Term(
        "unsharded weights of a stage, gathered once per step",
        "pipeline.weight_gather=visit or iteration",
    ),
    "window": Term(
        "unsharded weights of the chunks in use",
        "pipeline.weight_gather=iteration, or more pipeline.repeats (shorter chunks)",
    ),
    "partial": Term(
        "unreduced gradients of complete chunks",
        "pipeline.weight_gather=iteration, or more pipeline.repeats (shorter chunks)",
    ),
    "stash": Term(
        "activations saved for the backward pass",
        "pipeline.remat=full or chunk, pipeline.offloaded_names, more (smaller) "
        "pipeline.microbatches, a smaller pipeline.group",
    ),
    "deferred": Term(
        "inputs of deferred weight gradients",
        "a schedule without split backwards (pipeline.schedule=interleaved), more (smaller) "
        "pipeline.microbatches",
    ),
    "inbox": Term("receive buffers", "more (smaller) pipeline.microbatches"),
    "sent": Term("send buffers", "more (smaller) pipeline.microbatches"),
    "outside": Term(
        "activations of the prologue layers",
        "pipeline.prologue_layers=0, pipeline.remat=chunk",
    ),
    "reports": Term("losses and statistics of layers", "more mesh.ici_stage"),
    "ahead": Term("losses and statistics of MTP heads", "fewer model.mtp_heads"),
    "update": Term(
        "copies of gradients during their reduction and the optimizer update",
        "more mesh.ici_fsdp or mesh.ici_stage, optim.name=adamw",
    ),
    "logits": Term(
        "logits of a microbatch or a block of its tokens, and their gradient",
        "a smaller pipeline.loss_block_tokens, more mesh.ici_stage or mesh.ici_tensor (which shard "
        "the vocabulary), more (smaller) pipeline.microbatches",
    ),
    "layer": Term(
        "unsharded weights, gradient and activations of one layer",
        "more mesh.ici_tensor, more mesh.ici_context for long sequences, more (smaller) "
        "pipeline.microbatches, a shorter train.sequence_length",
    ),
    "reference": Term(
        "reference parameters for grpo.kl_coef", "grpo.kl_coef=0, or adapters (adapter.rank)"
    ),
    "batch": Term("token ids of a step", "a smaller train.batch_size"),
}


USABLE_MEMORY_FRACTION = 0.92
"""Maximum fraction of device memory that a forecast may use and still count as fitting. The rest is
reserved for the program, allocator fragmentation and the error of the forecast."""


def verdict(predicted: float, memory: float) -> str:
    """Return a text that states whether a step with `predicted` bytes fits on a device."""
    if predicted <= USABLE_MEMORY_FRACTION * memory:
        return "fits"
    return "may not fit" if predicted <= memory else "does not fit"


def gib(size: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def explain_out_of_memory(
    message: str, buffers: Mapping[str, tuple[tuple[int, ...], ...]], tensor: int = 1
) -> str:
    """Explain an out-of-memory message: the largest terms and the config keys that reduce them.

    Return an empty text if the message lists no allocations, as in compilation for absent devices.
    `buffers` maps names in `TERMS` to array shapes, which may be sharded over `tensor` devices.
    """
    found = _allocations(message)
    total: dict[str, float] = {}
    for size, shape, origin in found:
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
    """Return the required and available bytes in the compiler's out-of-memory message."""
    number = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"[Uu]sed {number} of {number}", message) or re.search(
        rf"required for HLO temporaries \({number}\) exceeds available HBM \({number}\)", message
    )
    return found and (_bytes(found[1], found[2]), _bytes(found[3], found[4]))


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** " KMGT".index(unit or " ")


def _allocations(message: str) -> list[tuple[float, tuple[int, ...], str]]:
    """Return (bytes, dims, origin) of each allocation in an out-of-memory message."""
    found = []
    for block in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", block)
        shape = re.search(r"Shape: \w+\[([\d,]*)\]", block)
        origin = re.search(r'op_name="([^"]*)"', block)
        dims = tuple(int(dim) for dim in shape[1].split(",") if dim) if shape else ()
        if size:
            found.append((_bytes(size[1], size[2]), dims, origin[1] if origin else ""))
    return found


def _classify_allocation(
    dims: tuple[int, ...],
    origin: str,
    buffers: Mapping[str, tuple[tuple[int, ...], ...]],
    tensor: int,
) -> str:
    # The compiler may drop dimensions of size one, or merge adjacent dimensions.
    sizes = {math.prod(dims), math.prod(dims) * tensor} if dims else set()
    for name, shapes in buffers.items():
        if any(math.prod(shape) in sizes for shape in shapes):
            return name
    if "/head/" in origin:
        return "logits"
    return "layer" if "/while/body" in origin else "state"
