"""Loss over a fixed number of validation batches, weighted by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over batches: `loss` in nats, `targets` tokens, `bytes` of text they stand for."""

    loss: float
    targets: float
    bytes: float

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/loss` in nats per target token and `eval/nats_per_byte` of the text."""
        return {
            "eval/loss": self.loss / max(self.targets, 1.0),
            "eval/nats_per_byte": self.loss / max(self.bytes, 1.0),
        }

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
) -> Totals | None:
    """Sums over the batches. Nothing if `stops`, which is asked after each batch, says so.

    No device computes when it is over: Python that ends meanwhile may crash.
    """
    total = dict.fromkeys(("loss", "targets", "bytes"), 0.0)

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name in total:
            total[name] += float(sums[name])

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
    return Totals(**total)
