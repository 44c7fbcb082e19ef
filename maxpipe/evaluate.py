"""Loss over a fixed number of validation batches, weighted by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np


def evaluate(
    step: Callable[[Any, Any], dict[str, jax.Array]], params: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """`eval/loss` in nats per target token and `eval/nats_per_byte` of the text."""
    sums = [step(params, batch) for batch in batches]
    total = {
        name: float(np.sum([np.asarray(part[name], np.float64) for part in sums]))
        for name in ("loss", "targets", "bytes")
    }
    return {
        "eval/loss": total["loss"] / max(total["targets"], 1.0),
        "eval/nats_per_byte": total["loss"] / max(total["bytes"], 1.0),
    }
