"""What an operation states of its own work, in its name, for the reader of the compiled program.

The compiler has no estimate for a kernel, and no count for a loop whose trips are data. Who writes
such an operation knows the work; its scope keeps that in every `op_name`, through differentiation,
partition and optimization. No jax.

    with jax.named_scope(stated.flops(4 * pairs * head_dim)):
        kernel(query, key, value)

Names of the per-device program's pieces, by which a compiled program is read. No jax.
"""

from __future__ import annotations

import re

_FLOPS = re.compile(r"(\btranspose\((?:\w+\()*)?\bflops_(\d+)(?:_(\d+))?\b")
_TRIPS = re.compile(r"\btrips_([\d.]+)\)*/while$")


def flops(count: float, backward: float = 0.0) -> str:
    """Scope of one kernel that does this number of operations, a multiply-add counting 2.

    `backward`: of the kernel that jax puts in its place where it is transposed.
    """
    return f"flops_{round(count)}_{round(backward)}" if backward else f"flops_{round(count)}"


def trips(mean: float) -> str:
    """Scope of one loop that turns so often on average."""
    return f"trips_{mean:.4f}"


def parse_flops(op_name: str) -> float | None:
    """Operations of one execution of a kernel, as the innermost scope states them."""
    found = _FLOPS.findall(op_name)
    if not found:
        return None
    transposed, forward, backward = found[-1]
    return float(backward if transposed and backward else forward)


def parse_trips(op_name: str) -> float | None:
    """Mean trips of a loop, as the scope right around it states them."""
    found = _TRIPS.search(op_name)
    return float(found.group(1)) if found else None


_PART = re.compile(r"\bpart_(\w+?)\b")
ROTARY = "rotary"
"""Of attention, what turns queries and keys."""


def part(name: str) -> str:
    """Scope of one part of a layer."""
    return f"part_{name}"


def parse_part(op_name: str) -> str:
    """The innermost part that an operation belongs to; empty outside of layers."""
    found = _PART.findall(op_name)
    return found[-1] if found else ""


_WINDOW = re.compile(r"\bwindow_(\d+)\b")
WINDOW_SWITCH = "windows"
"""Scope of a choice between branches for windows of several sizes."""


def window(size: int) -> str:
    """Scope of what is in the branch for this size."""
    return f"window_{size}"


def is_window_switch(op_name: str) -> bool:
    """Whether a conditional is the one right in that scope."""
    return re.search(rf"\b{WINDOW_SWITCH}\)*/cond$", op_name) is not None


def parse_window(op_name: str) -> int | None:
    """The size that an operation is for."""
    found = _WINDOW.findall(op_name)
    return int(found[-1]) if found else None


FORWARD, BACKWARD = "forward", "backward"
INPUT_GRAD, WEIGHT_GRAD = "input_grad", "weight_grad"
RECOMPUTE = "recompute"
"""A chunk's forward that is run again, inside a backward."""
EMBED, EMBED_GRAD, HEAD = "embed", "embed_grad", "head"
MTP = "ahead"
"""Heads that predict further ahead, inside the head."""
SEND = "send"
PROLOGUE = "outside"
"""Around what the layers outside the ring do."""
GATHER, REDUCE, TICKS = "gather", "reduce", "ticks"
"""Between two gathers of `visit`: the next gather, reductions that are due, and the ticks."""
UPDATE = "update"
"""Outside of the per-device program: what follows the gradients."""


def layer_type(kind: str) -> str:
    """Of one kind of layers, where there are several."""
    return f"kind_{kind}"
