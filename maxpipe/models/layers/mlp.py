"""The gated MLP.

Normalisation over the model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from maxpipe.models.spec import (
    NOTHING,
    Constant,
    Dims,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
)


class ClampedSilu(NamedTuple):
    """`g * sigmoid(slope * g) * (u + 1)` of a gate g, at most `limit`, and u within `limit` of 0.

    As in the released models of arXiv:2508.10925.
    """

    slope: float
    limit: float


Gate = Literal["silu", "gelu"] | ClampedSilu
"""What is done with gate and up: `f(gate) * up` by the name of f, or all of it."""


@dataclass(frozen=True)
class GatedMLP(Part):
    """`(f(x W_gate) * (x W_up)) W_down`, SwiGLU and GEGLU of arXiv:2002.05202."""

    d_model: int
    d_mlp: int
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    function: Gate = "silu"
    """Of the gate; GELU by its approximation with tanh, as released models have it."""

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections."""
        embed, mlp = (self.d_model, "embed"), (self.d_mlp, "mlp")
        return {
            "gate": Param((embed, mlp), Normal(self.d_model), num_contracted_dims=1),
            "up": Param((embed, mlp), Normal(self.d_model), num_contracted_dims=1),
            "down": Param((mlp, embed), Normal(self.d_mlp, self.out_gain), num_contracted_dims=1),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Both inputs of the gate."""
        return {"gate": self._hidden, "up": self._hidden}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Three projections."""
        return Matmul("gate"), Matmul("up"), Matmul("down")

    @property
    def traffic(self) -> Held:
        """Input and output; the gate's inputs are written and read."""
        return Held(compute_dtype=((2.0, self._width), (4.0, self._hidden)))

    @property
    def backward_peak(self) -> Held:
        """The gate's inputs and output, and their gradients."""
        return Held(compute_dtype=((6.0, self._hidden),))

    @property
    def barrier_copies(self) -> Held:
        """Behind a barrier, gradients are there once: transposed when their inputs are gone."""
        return Held(compute_dtype=((2.0, self._hidden),))

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls, and of the gate."""
        return Held(compute_dtype=((1.0, self._width), (3.0, self._hidden)))

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of all matmuls and cotangents of their outputs.

        Recomputed, the gate's output follows from its inputs once more, unless it has been needed.
        """
        if recomputed:
            return Held(compute_dtype=((1.0, self._width), (3.0 if normed else 4.0, self._hidden)))
        return Held(compute_dtype=((2.0, self._width), (3.0, self._hidden)))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _hidden(self) -> Dims:
        return ((self.d_mlp, "mlp"),)


@dataclass(frozen=True)
class Norm(Part):
    """What all norms have in common."""

    d_model: int
    epsilon: float
    """Added to the mean of squares."""

    @property
    def activations(self) -> Mapping[str, Dims]:
        """None."""
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """No matmuls."""
        return ()

    @property
    def traffic(self) -> Held:
        """Input and output."""
        return Held(compute_dtype=((2.0, self._width),))

    @property
    def backward_peak(self) -> Held:
        """Nothing that counts: it is fused with its neighbours."""
        return NOTHING

    @property
    def residuals(self) -> Held:
        """See `residuals_of`."""
        return self.residuals_of((), self._width)

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """See `deferred_of`."""
        del normed
        return self.deferred_of((), self._width, recomputed=recomputed)

    def residuals_of(self, each: Dims, over: Dims) -> Held:
        """What is scaled; in float32 the input, twice the input, and two statistics.

        `over`: dims that are normed together, once for `each` of the dims in front of them.
        """
        dims = (*each, *over)
        return Held(float32=((2.0, dims), (2.0, each))) + self._scaled(dims)

    def deferred_of(self, each: Dims, over: Dims, *, recomputed: bool) -> Held:
        """Its parameters; where nothing is recomputed what is scaled, and a cotangent of that."""
        if recomputed:
            return Held(token_independent=(over,) * len(self.params))
        dims = (*each, *over)
        return Held(compute_dtype=((1.0, dims),)) + self._scaled(dims)

    def _scaled(self, dims: Dims) -> Held:
        """What the scale is multiplied with, in float32."""
        return Held(float32=((1.0, dims),))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "norm"),)


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Scales by the root mean square (arXiv:1910.07467)."""

    offset: float = 0.0
    """Added to the stored scale: 1 where a scale of 0 stands for no change."""

    @property
    def params(self) -> Mapping[str, Param]:
        """The scale."""
        return {"scale": Param(self._width, Constant(1.0 - self.offset), decays=False)}

    def _scaled(self, dims: Dims) -> Held:
        """Without an offset it is scaled in the compute type."""
        return super()._scaled(dims) if self.offset else Held(compute_dtype=((1.0, dims),))


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Subtracts the mean, and scales by the standard deviation (arXiv:1607.06450)."""

    bias: bool = True
    """Whether one is added."""

    @property
    def params(self) -> Mapping[str, Param]:
        """The scale, and the bias."""
        scale = Param(self._width, Constant(1.0), decays=False)
        bias = Param(self._width, Constant(0.0), decays=False)
        return {"scale": scale} | ({"bias": bias} if self.bias else {})
