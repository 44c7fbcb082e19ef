"""Normalisation over the model's width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.model.spec import Constant, Dims, Operation, Param


@dataclass(frozen=True)
class RMSNorm:
    """Scales by the root mean square (arXiv:1910.07467)."""

    d_model: int
    epsilon: float
    offset: float = 0.0
    """Added to the stored scale: 1 where a scale of 0 stands for no change."""

    @property
    def params(self) -> Mapping[str, Param]:
        """The scale."""
        dims = ((self.d_model, "norm"),)
        return {"scale": Param(dims, Constant(1.0 - self.offset), decays=False)}

    @property
    def activations(self) -> Mapping[str, Dims]:
        """None."""
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """No matmuls."""
        return ()
