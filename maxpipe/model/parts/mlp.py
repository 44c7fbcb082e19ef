"""The gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from maxpipe.model.spec import Dims, Matmul, Normal, Operation, Param


@dataclass(frozen=True)
class GatedMLP:
    """`(f(x W_gate) * (x W_up)) W_down`, SwiGLU and GEGLU of arXiv:2002.05202."""

    d_model: int
    d_mlp: int
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    function: Literal["silu", "gelu"] = "silu"
    """Of the gate; GELU by its approximation with tanh, as released models have it."""

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections."""
        embed, mlp = (self.d_model, "embed"), (self.d_mlp, "mlp")
        return {
            "gate": Param((embed, mlp), Normal(self.d_model)),
            "up": Param((embed, mlp), Normal(self.d_model)),
            "down": Param((mlp, embed), Normal(self.d_mlp, self.out_gain)),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Both inputs of the gate."""
        hidden = ((self.d_mlp, "mlp"),)
        return {"gate": hidden, "up": hidden}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Three projections."""
        return Matmul("gate"), Matmul("up"), Matmul("down")
