"""What each optimizer keeps for every parameter. No jax.

State in memory and in checkpoints, the predictions of `plan` and the room that a checkpoint needs
follow from this; `train.optim` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.config.schema import OptimConfig


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's state, as far as it is as large as the parameters."""

    trees: tuple[str, ...]
    """Names of its trees in checkpoints; each has the parameters' shapes and types."""
    momentum: str
    """The tree of averaged gradients, whose size bounds the next update."""

    @property
    def num_saved(self) -> int:
        """Arrays that a checkpoint holds for each trained parameter, the parameter included."""
        return 1 + len(self.trees)

    def saved(self, params: int, trained: int) -> int:
        """Entries that a checkpoint holds of this number of parameters, and of trained ones."""
        return params + len(self.trees) * trained


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(trees=("mu", "nu"), momentum="mu"),
    "lion": Optimizer(trees=("mu",), momentum="mu"),
}
"""By `optim.name`. `mu` and `nu` are means of gradients and of their squares."""


def optimizer_of(config: OptimConfig) -> Optimizer:
    """The one that a config chooses."""
    return OPTIMIZERS[config.name]
