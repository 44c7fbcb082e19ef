"""Named scopes that annotate operations for tools that analyze the compiled program.

XLA has no cost estimate for custom kernels, and no trip count for data-dependent loops. The author
of such an operation declares its cost in a scope. Differentiation, partitioning and optimization
preserve the scope in every `op_name`.

    with jax.named_scope(scopes.flops(4 * pairs * head_dim)):
        kernel(query, key, value)

Other scopes name regions of the per-device program. This module does not import jax.
"""

from __future__ import annotations

import re

_FLOPS = re.compile(r"(\btranspose\((?:\w+\()*)?\bflops_(\d+)(?:_(\d+))?\b")
_TRIPS = re.compile(r"\btrips_([\d.]+)\)*/while$")


def flops(count: float, backward: float = 0.0) -> str:
    """Return the scope of a kernel that performs `count` FLOPs; a multiply-add counts as 2.

    `backward` is the number of FLOPs of the backward kernel.
    """
    return f"flops_{round(count)}_{round(backward)}" if backward else f"flops_{round(count)}"


def trips(mean: float) -> str:
    """Return the scope of a loop with the mean trip count `mean`."""
    return f"trips_{mean:.4f}"


def parse_flops(op_name: str) -> float | None:
    """Return the FLOPs of one kernel execution, read from the innermost scope."""
    matches = _FLOPS.findall(op_name)
    if not matches:
        return None
    transposed, forward, backward = matches[-1]
    return float(backward if transposed and backward else forward)


def parse_trips(op_name: str) -> float | None:
    """Return the mean trip count of a loop, read from the innermost scope around it."""
    match = _TRIPS.search(op_name)
    return float(match.group(1)) if match else None


_CYCLES = re.compile(r"\bcycles_(\d+)\b")


def cycles(count: float) -> str:
    """Return the scope of a kernel with an instruction schedule of `count` cycles."""
    return f"cycles_{round(count)}"


def parse_cycles(op_name: str) -> float | None:
    """Return the cycles of one kernel execution, read from the innermost scope."""
    matches = _CYCLES.findall(op_name)
    return float(matches[-1]) if matches else None


_PART = re.compile(r"\bpart_(\w+?)\b")
ROTARY = "rotary"
"""Region of a layer that applies rotary position embeddings (RoPE) to queries and keys."""


def part(name: str) -> str:
    """Return the scope of one sublayer or region of a layer."""
    return f"part_{name}"


def parse_part(op_name: str) -> str:
    """Return the innermost sublayer or region that contains an operation, or an empty string."""
    parts = _PART.findall(op_name)
    return parts[-1] if parts else ""


_WINDOW = re.compile(r"\bwindow_(\d+)\b")
WINDOW_SWITCH = "windows"
"""Scope of a conditional that selects a branch by window size."""


def window(size: int) -> str:
    """Return the name scope of the branch that handles the given window size."""
    return f"window_{size}"


def is_window_switch(op_name: str) -> bool:
    """Return whether a conditional selects a branch by window size."""
    return re.search(rf"\b{WINDOW_SWITCH}\)*/cond$", op_name) is not None


def parse_window(op_name: str) -> int | None:
    """Return the window size of the branch that contains an operation, or None."""
    windows = _WINDOW.findall(op_name)
    return int(windows[-1]) if windows else None


FORWARD, BACKWARD = "forward", "backward"
INPUT_GRAD, WEIGHT_GRAD = "input_grad", "weight_grad"
RECOMPUTE = "recompute"
"""Scope of a chunk's forward pass that the backward pass recomputes."""
EMBED, EMBED_GRAD, HEAD = "embed", "embed_grad", "head"
MTP = "ahead"
"""Scope of the MTP heads, nested in the scope of the loss head."""
SEND = "send"
PROLOGUE = "outside"
"""Scope of the prologue layers."""
GATHER, REDUCE, TICKS = "gather", "reduce", "ticks"
"""Scopes of the weight prefetch loop (`pipeline.weight_gather=window`): gathers of chunks, gradient
reductions, and ticks."""
UPDATE = "update"
"""Scope of the optimizer update, which runs outside the per-device program."""
SAVED, DEFERRED, GRADIENTS = "saved_activations", "deferred_inputs", "gradients"
WINDOW, INBOX = "weight_window", "inbox"
"""Scopes in which the buffers of the tick loop are created."""
SLOTS = {"F": FORWARD, "B": BACKWARD, "I": INPUT_GRAD, "W": WEIGHT_GRAD}
"""Scope of a slot's layers, keyed by slot type."""
REGIONS = (
    RECOMPUTE,
    *SLOTS.values(),
    *(HEAD, EMBED, EMBED_GRAD, SEND, GATHER, REDUCE),
    UPDATE,
)
"""Scopes of the program regions in compile reports and profiles. The first match applies."""


def layer_type(kind: str) -> str:
    """Return the scope of a layer type, used if the model has several layer types."""
    return f"kind_{kind}"
