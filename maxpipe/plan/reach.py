"""What reaches other devices: keys for attention over rows that are divided, and experts' rows.

No jax.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from maxpipe.models.count import tokens_before
from maxpipe.models.layers.experts import Experts
from maxpipe.models.spec import Model, Part, Scores
from maxpipe.parallel.axes import MeshConfig, takes_heads


class Reach(NamedTuple):
    """Of one attention."""

    method: Literal["own", "heads", "ring", "near", "gather"]
    """`own`: a device has all tokens of its rows."""
    share: float = 0.0
    """Of its keys and values what a device sends to all others at once."""
    far: float = 0.0
    """Keys and values of other devices that it holds then, as a multiple of its own."""


def reach(
    mesh: MeshConfig, model: Model, scores: Scores, context: int, tensor: int, run: int
) -> Reach:
    """As `model.attention.over_context` chooses; `run` tokens stand next to each other."""
    if context == 1:
        return Reach("own")
    kv_heads = scores.keys[0][0][0]
    if takes_heads(mesh.context_attention, scores.heads, kv_heads, context, tensor):
        return Reach("heads")
    if mesh.context_attention == "ring":
        return Reach("ring")
    windows = map(int, model.values[scores.window]) if scores.window else ()
    before = tokens_before(windows, run)
    if before < run:
        return Reach("near", before / run, before / run)
    return Reach("gather", 1.0, context - 1.0)


@lru_cache(maxsize=64)
def with_rows_of_experts(model: Model, shards: int, rows: int, tokens: int, whole: int) -> Model:
    """The model with its experts on `shards` devices.

    Each device has `tokens` of the `whole` tokens of `rows` rows. One object for equal arguments,
    as what is counted of it is cached.
    """

    def divided(part: Part) -> Part:
        return part.over(shards, rows, tokens, whole) if isinstance(part, Experts) else part

    return model.with_parts(divided)
