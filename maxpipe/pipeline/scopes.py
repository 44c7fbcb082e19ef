"""Names of the per-device program's pieces, by which a compiled program is read. No jax."""

from __future__ import annotations

FORWARD, BACKWARD = "forward", "backward"
INPUT_GRAD, WEIGHT_GRAD = "input_grad", "weight_grad"
RECOMPUTE = "recompute"
"""A chunk's forward that is run again, inside a backward."""
EMBED, EMBED_GRAD, HEAD = "embed", "embed_grad", "head"
AHEAD = "ahead"
"""Heads that predict further ahead, inside the head."""
SEND = "send"
OUTSIDE = "outside"
"""Around what the layers outside the ring do."""
GATHER, REDUCE, TICKS = "gather", "reduce", "ticks"
"""Between two gathers of `visit`: the next gather, reductions that are due, and the ticks."""
UPDATE = "update"
"""Outside of the per-device program: what follows the gradients."""


def of_kind(kind: str) -> str:
    """Of one kind of layers, where there are several."""
    return f"kind_{kind}"
