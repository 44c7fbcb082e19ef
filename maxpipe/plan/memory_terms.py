"""Terms of a device's memory, and the config keys that shrink each.

Plans and the compiler's out-of-memory messages use one table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.hardware import GIB


@dataclass(frozen=True)
class Term:
    """One use of device memory."""

    about: str
    keys: str
    """The keys that make it smaller."""


TERMS: dict[str, Term] = {
    "state": Term(
        "parameters and the optimizer's moments",
        "more mesh.ici_fsdp, mesh.ici_stage or mesh.ici_tensor",
    ),
    "gradients": Term(
        "gradient accumulators",
        "pipeline.weight_gather=iteration (sharded over fsdp), more mesh.ici_fsdp or "
        "mesh.ici_stage",
    ),
    "copies": Term(
        "the parameters' shards in compute type",
        "pipeline.remat=chunk (not kept on TPUs), more mesh.ici_fsdp",
    ),
    "turned": Term(
        "transposed shards of parameters, for GPUs gather over the first dim",
        "more mesh.ici_fsdp or mesh.ici_stage",
    ),
    "widened": Term(
        "float32 copies of what is narrower, for CPUs compute in float32",
        "model.compute_dtype=float32",
    ),
    "held": Term(
        "whole weights of a stage, gathered once for the step",
        "pipeline.weight_gather=visit or iteration",
    ),
    "window": Term(
        "whole weights of the chunks in use",
        "pipeline.weight_gather=iteration, or more pipeline.repeats (shorter chunks)",
    ),
    "partial": Term(
        "gradients of whole chunks before their reduction",
        "pipeline.weight_gather=iteration, or more pipeline.repeats (shorter chunks)",
    ),
    "stash": Term(
        "activations that forwards save for their backwards",
        "pipeline.remat=full or chunk, pipeline.offloaded_names, more pipeline.microbatches of "
        "fewer rows, a smaller pipeline.group",
    ),
    "deferred": Term(
        "inputs of deferred weight gradients",
        "a schedule with whole backwards (pipeline.schedule=interleaved), more "
        "pipeline.microbatches of fewer rows",
    ),
    "inbox": Term("messages that wait in inboxes", "more pipeline.microbatches of fewer rows"),
    "sent": Term("messages that are being sent", "more pipeline.microbatches of fewer rows"),
    "outside": Term(
        "activations of the layers outside the ring",
        "pipeline.prologue_layers=0, pipeline.remat=chunk",
    ),
    "reports": Term("losses and statistics that layers report", "more mesh.ici_stage"),
    "ahead": Term("losses and statistics of heads ahead", "fewer model.mtp_heads"),
    "update": Term(
        "copies of gradients, while they are summed or parameters updated",
        "more mesh.ici_fsdp or mesh.ici_stage, optim.name=adamw",
    ),
    "logits": Term(
        "logits of a microbatch, or of a block of its tokens, and their gradient",
        "a smaller pipeline.loss_block_tokens, more mesh.ici_stage or mesh.ici_tensor (they share "
        "the vocabulary), more pipeline.microbatches of fewer rows",
    ),
    "layer": Term(
        "one layer's whole weights, their gradient, and its activations",
        "more mesh.ici_tensor, more mesh.ici_context for long sequences, more "
        "pipeline.microbatches of fewer rows, a shorter train.sequence_length",
    ),
    "reference": Term(
        "the parameters that grpo.kl_coef compares with",
        "grpo.kl_coef=0, or adapters (adapter.rank)",
    ),
    "batch": Term("token ids of the step", "a smaller train.batch_size"),
}


USABLE_MEMORY_FRACTION = 0.92
"""Share of a device's memory that a forecast may take. The rest is for the program itself, for what
the allocator leaves free between buffers, and for the forecast's error."""


def verdict(predicted: float, memory: float) -> str:
    """Whether a step that is predicted to take `predicted` bytes fits a device."""
    if predicted <= USABLE_MEMORY_FRACTION * memory:
        return "fits"
    return "may not fit" if predicted <= memory else "does not fit"


def gib(size: float) -> str:
    """Bytes as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def explain_out_of_memory(
    message: str, buffers: Mapping[str, tuple[tuple[int, ...], ...]], tensor: int = 1
) -> str:
    """The compiler's message in model terms: the largest, and the keys that shrink them; empty
    if it lists nothing, as when compiling for absent devices.

    `buffers` maps names of `TERMS` to the shapes of their arrays, of which a device may hold only
    its part of `tensor`.
    """
    found = _allocations(message)
    total: dict[str, float] = {}
    for size, shape, origin in found:
        name = _classify_allocation(shape, origin, buffers, tensor)
        total[name] = total.get(name, 0.0) + size
    return describe_largest(total)


def describe_largest(terms: Mapping[str, float]) -> str:
    """The four largest terms, and which keys make them smaller."""
    ordered = sorted(terms.items(), key=lambda item: -item[1])[:4]
    return "\n".join(
        f"  {gib(size):>10}  {TERMS[name].about}; smaller with {TERMS[name].keys}"
        for name, size in ordered
    )


def parse_out_of_memory(message: str) -> tuple[float, float] | None:
    """(bytes needed, bytes there are) in a compiler's out-of-memory message."""
    number = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"[Uu]sed {number} of {number}", message) or re.search(
        rf"required for HLO temporaries \({number}\) exceeds available HBM \({number}\)", message
    )
    return found and (_bytes(found[1], found[2]), _bytes(found[3], found[4]))


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** " KMGT".index(unit or " ")


def _allocations(message: str) -> list[tuple[float, tuple[int, ...], str]]:
    """(bytes, dims, origin) of the allocations that the compiler lists."""
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
    # The compiler may drop dims of size one, or merge neighbours.
    sizes = {math.prod(dims), math.prod(dims) * tensor} if dims else set()
    for name, shapes in buffers.items():
        if any(math.prod(shape) in sizes for shape in shapes):
            return name
    if "/head/" in origin:
        return "logits"
    return "layer" if "/while/body" in origin else "state"
