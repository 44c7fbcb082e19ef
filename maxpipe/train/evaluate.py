"""Loss over a fixed number of validation batches, weighted by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from maxpipe.telemetry.metrics import of_source


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over batches: `loss` in nats, `targets` tokens, `bytes` of text they stand for."""

    loss: float
    targets: float
    bytes: float
    of_sources: Mapping[str, Totals] = field(default_factory=dict)
    """Those of each source of a mixture, by name."""

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/loss` in nats per target token and `eval/nats_per_byte` of the text."""
        found = {
            "eval/loss": self.loss / max(self.targets, 1.0),
            "eval/nats_per_byte": self.loss / max(self.bytes, 1.0),
        }
        for name, each in self.of_sources.items():
            if each.targets:
                found[of_source(name, "eval_loss")] = each.loss / each.targets
                found[of_source(name, "eval_nats_per_byte")] = each.loss / max(each.bytes, 1.0)
        return found


def evaluate(
    step: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    batches: Iterable[Any],
    stops: Callable[[], bool] = lambda: False,
    sources: Sequence[str] = (),
) -> Totals | None:
    """Sums over the batches. Nothing if `stops`, which is asked after each batch, says so.

    `sources` are those of a mixture, of which the step has sums for each.

    No device computes when it is over: Python that ends meanwhile may crash.
    """
    shape = (len(sources),) if sources else ()
    total = {name: np.zeros(shape) for name in ("loss", "targets", "bytes")}

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name in total:
            total[name] = total[name] + np.asarray(sums[name], np.float64)

    # Added one batch late: at most two are on the devices.
    before: Mapping[str, jax.Array] | None = None
    try:
        for batch in batches:
            started, before = before, step(params, batch)
            if started is not None:
                add(started)
            if stops():
                return None
        if before is not None:
            add(before)
    finally:
        jax.block_until_ready(before)
    of_sources = (
        {}
        if not sources
        else {
            name: Totals(float(loss), float(targets), float(num_bytes))
            for name, loss, targets, num_bytes in zip(sources, *total.values(), strict=True)
        }
    )
    loss, targets, num_bytes = (float(each.sum()) for each in total.values())
    return Totals(loss, targets, num_bytes, of_sources)
