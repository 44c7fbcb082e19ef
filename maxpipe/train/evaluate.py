"""Loss over a fixed number of validation batches, weighted by tokens."""

from __future__ import annotations

import math
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
        """`eval/loss` in nats per target token and `eval/nats_per_byte` of the text.

        NaN where there is none, as of conversations without an answer: 0 would be the best loss.
        """
        found = {
            "eval/loss": self.loss / self.targets if self.targets else math.nan,
            "eval/nats_per_byte": self.loss / max(self.bytes, 1.0) if self.targets else math.nan,
        }
        for name, each in self.of_sources.items():
            if each.targets:
                found[of_source(name, "eval_loss")] = each.loss / each.targets
                found[of_source(name, "eval_nats_per_byte")] = each.loss / max(each.bytes, 1.0)
        return found

    def named(self, name: str) -> dict[str, float]:
        """The same of a set of documents that has a name, or none: `eval/NAME/loss`."""
        inner = f"eval/{name}/" if name else "eval/"
        return {tag.replace("eval/", inner): value for tag, value in self.metrics.items()}

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.loss + other.loss, self.targets + other.targets, self.bytes + other.bytes
        )


def evaluate(
    step: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    batches: Iterable[Any],
    stops: Callable[[], bool] = lambda: False,
    sources: Sequence[str] = (),
) -> Totals | None:
    """Sums over the batches. Nothing if `stops`, which is asked after each batch, says so.

    `sources` are those of a mixture, of which the step has sums for each; none where the documents
    are of no source of it.

    No device computes when it is over: Python that ends meanwhile may crash.
    """
    total = {name: np.zeros(()) for name in ("loss", "targets", "bytes")}

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
    loss, targets, num_bytes = total.values()
    of_sources = {
        name: Totals(float(loss[number]), float(targets[number]), float(num_bytes[number]))
        for number, name in enumerate(sources)
    }
    return Totals(float(loss.sum()), float(targets.sum()), float(num_bytes.sum()), of_sources)
