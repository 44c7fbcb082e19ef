"""Helpers that advance train states and compare them bitwise."""

from __future__ import annotations

from typing import Any

import jax

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.step.step import Steps
from tests.cases import batch_of

ROWS = 8


def trained_on(steps: Steps, run: Any, state: Any, first: int, last: int) -> tuple[Any, list[Any]]:
    """Train from step `first` to `last`; return the state and the losses."""
    found = []
    for step in range(first, last):
        batch = jax.device_put(batch_of(ROWS, step), steps.batch_sharding)
        state, metrics = run(state, batch)
        found.append(float(metrics["train/loss"]))
    return state, found


def same_bits(first: Any, second: Any) -> dict[str, bool]:
    a, b = leaves_by_name(jax.device_get(first)), leaves_by_name(jax.device_get(second))
    assert a.keys() == b.keys()
    return {name: a[name].tobytes() == b[name].tobytes() for name in a}
