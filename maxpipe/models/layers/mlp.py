"""MLP, RMSNorm and LayerNorm."""

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
    """Clamped gate, `g * sigmoid(slope * g) * (u + offset)`, as in GPT-OSS and DeepSeek-V4.

    The gate g is clamped from above at `limit`, and u is clamped to the range from `-limit` to
    `limit`, as in the released models of arXiv:2508.10925.
    """

    slope: float
    limit: float
    offset: float = 1.0


class ScaledInput(NamedTuple):
    """Gate of experts whose routing weight w multiplies the input, `f(w * g) * (w * u)`, as in
    Llama 4.
    """

    function: Literal["silu", "gelu"]


class ScaledGate(NamedTuple):
    """Gate that is multiplied by a constant, `silu(scale * g) * u`, as in Falcon-H1."""

    scale: float


class Ungated(NamedTuple):
    """Activation of an MLP without a gate, `f(u)`, as in Nemotron-H."""

    function: Literal["relu2"]
    """Name of f: the squared ReLU (arXiv:2109.08668)."""


Activation = Literal["silu", "gelu"] | ClampedSilu | ScaledInput | ScaledGate | Ungated
"""Activation that combines the gate and up projections: `f(gate) * up` for a named f, or a class
that defines the complete formula."""


def input_projections(function: Activation) -> tuple[str, ...]:
    """Return the names of the projections of an MLP's input."""
    return ("up",) if isinstance(function, Ungated) else ("gate", "up")


@dataclass(frozen=True)
class MLP(Part):
    """Gated MLP `(f(x W_gate) * (x W_up)) W_down`, that is, SwiGLU or GEGLU of arXiv:2002.05202, or
    an MLP without a gate, `f(x W_up) W_down`.
    """

    d_model: int
    d_mlp: int
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    function: Activation = "silu"
    """Activation function. GELU uses the tanh approximation, as in the released models."""

    @property
    def params(self) -> Mapping[str, Param]:
        embed, mlp = (self.d_model, "embed"), (self.d_mlp, "mlp")
        into = Param((embed, mlp), Normal(self.d_model), num_contracted_dims=1)
        out = Param((mlp, embed), Normal(self.d_mlp, self.out_gain), num_contracted_dims=1)
        return {**dict.fromkeys(self._inputs, into), "down": out}

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the inputs of the activation: the gate and up projections."""
        return dict.fromkeys(self._inputs, self._hidden)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projections."""
        return tuple(map(Matmul, (*self._inputs, "down")))

    @property
    def traffic(self) -> Held:
        """Return the input, the output, and the inputs of the activation, which are written to
        memory and read back.
        """
        return Held(compute_dtype=((2.0, self._width), (2.0 * len(self._inputs), self._hidden)))

    @property
    def backward_peak(self) -> Held:
        """Return the inputs and the output of the activation, and their gradients."""
        return Held(compute_dtype=((2.0 * len(self._inputs) + 2.0, self._hidden),))

    @property
    def backward_moments(self) -> tuple[tuple[Held, float | None], ...]:
        """Return the arrays after the activation has been differentiated, and the arrays while the
        gradients of the input projections are held in float32.
        """
        inputs = len(self._inputs)
        share = inputs / len(self.params)
        return tuple(
            (Held(compute_dtype=((copies, self._hidden),)), share)
            for copies, share in ((inputs + 1.0, share), (1.0 * inputs, 2 * share))
        )

    @property
    def barrier_copies(self) -> Held:
        """Return the additional gradient copies that exist without optimization barriers. With
        barriers, the inputs are freed before the transposes run.
        """
        return Held(compute_dtype=((1.0 * len(self._inputs), self._hidden),))

    @property
    def residuals(self) -> Held:
        """Return the inputs of all matmuls and of the activation."""
        return Held(compute_dtype=((1.0, self._width), (len(self._inputs) + 1.0, self._hidden)))

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of all matmuls and the cotangents of their outputs.

        If `recomputed` is set, the output of the activation is recomputed from its inputs, unless
        it has been saved.
        """
        inputs = len(self._inputs)
        hidden = 2.0 * inputs if recomputed and not normed else inputs + 1.0
        width = 1.0 if recomputed else 2.0
        return Held(compute_dtype=((width, self._width), (hidden, self._hidden)))

    @property
    def _inputs(self) -> tuple[str, ...]:
        return input_projections(self.function)

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _hidden(self) -> Dims:
        return ((self.d_mlp, "mlp"),)


@dataclass(frozen=True)
class Norm(Part):
    """Base class for the normalization sublayers."""

    d_model: int
    epsilon: float
    """Epsilon added to the mean square (the variance for LayerNorm)."""

    @property
    def activations(self) -> Mapping[str, Dims]:
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        return ()

    @property
    def traffic(self) -> Held:
        """Return the input and the output of the norm."""
        return Held(compute_dtype=((2.0, self._width),))

    @property
    def backward_peak(self) -> Held:
        """Return nothing, because norms are fused with adjacent operations."""
        return NOTHING

    @property
    def residuals(self) -> Held:
        return self.residuals_of((), self._width)

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        del normed
        return self.deferred_of((), self._width, recomputed=recomputed)

    def residuals_of(self, each: Dims, over: Dims) -> Held:
        """Return the scaled array and, in float32, two copies of the input and two statistics.

        `over` are the dims over which the norm reduces. The norm is applied separately for each
        index along the dims `each`.
        """
        dims = (*each, *over)
        return Held(float32=((2.0, dims), (2.0, each))) + self._scaled(dims)

    def deferred_of(self, each: Dims, over: Dims, *, recomputed: bool) -> Held:
        """Return the norm's parameters and, unless the forward pass is recomputed, also the scaled
        array and a cotangent.
        """
        if recomputed:
            return Held(token_independent=(over,) * len(self.params))
        dims = (*each, *over)
        return Held(compute_dtype=((1.0, dims),)) + self._scaled(dims)

    def _scaled(self, dims: Dims) -> Held:
        """Return the float32 array that is multiplied by the scale."""
        return Held(float32=((1.0, dims),))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "norm"),)


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Normalization by the root mean square (arXiv:1910.07467)."""

    offset: float = 0.0
    """Constant added to the stored scale. If 1, a stored scale of 0 leaves the normalized input
    unchanged."""
    scaled: bool = True
    """Whether the normalized input is multiplied by a stored scale."""
    scales_in_float32: bool = False
    """Whether the normalized input is multiplied by the scale before it is rounded to the compute
    dtype. An offset always has this effect."""

    @property
    def params(self) -> Mapping[str, Param]:
        if not self.scaled:
            return {}
        return {"scale": Param(self._width, Constant(1.0 - self.offset), decays=False)}

    @property
    def is_wide(self) -> bool:
        """Return whether the multiplication by the scale is in float32."""
        return bool(self.offset or self.scales_in_float32)

    def _scaled(self, dims: Dims) -> Held:
        """Return the array that is multiplied by the scale, in the compute dtype unless the
        multiplication is in float32.
        """
        if not self.scaled:
            return NOTHING
        return super()._scaled(dims) if self.is_wide else Held(compute_dtype=((1.0, dims),))


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Normalization by the mean and the standard deviation (arXiv:1607.06450)."""

    bias: bool = True
    """Whether the norm has a bias."""

    @property
    def params(self) -> Mapping[str, Param]:
        scale = Param(self._width, Constant(1.0), decays=False)
        bias = Param(self._width, Constant(0.0), decays=False)
        return {"scale": scale} | ({"bias": bias} if self.bias else {})


@dataclass(frozen=True)
class LayerScalar(Part):
    """Multiplication of a layer's output by a stored number. The number is not trained."""

    @property
    def params(self) -> Mapping[str, Param]:
        scalar = Param(((1, "norm"),), Constant(1.0), decays=False, trainable=False)
        return {"scale": scalar}

    @property
    def activations(self) -> Mapping[str, Dims]:
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        return ()

    @property
    def traffic(self) -> Held:
        """Return nothing, because the multiplication is fused with the residual sum."""
        return NOTHING

    @property
    def backward_peak(self) -> Held:
        return NOTHING

    @property
    def residuals(self) -> Held:
        return NOTHING

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        del recomputed, normed
        return NOTHING
