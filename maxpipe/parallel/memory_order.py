"""Arrays whose place in a TPU's memory is said, and not left to the compiler."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint


def laid_out(value: Array, order: Sequence[int]) -> Array:
    """The value, on TPUs laid out with its dims in this order, from major to minor."""
    layout = Layout(tuple(order))
    return lax.platform_dependent(
        value, tpu=lambda value: with_layout_constraint(value, layout), default=lambda value: value
    )
