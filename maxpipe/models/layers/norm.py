"""Normalisation over the model's width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.spec import NOTHING, Constant, Dims, Held, Operation, Param, Part


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
        return Held(narrow=((2.0, self._width),))

    @property
    def working(self) -> Held:
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
        return Held(wide=((2.0, dims), (2.0, each))) + self._scaled(dims)

    def deferred_of(self, each: Dims, over: Dims, *, recomputed: bool) -> Held:
        """Its parameters; where nothing is recomputed what is scaled, and a cotangent of that."""
        if recomputed:
            return Held(once=(over,) * len(self.params))
        dims = (*each, *over)
        return Held(narrow=((1.0, dims),)) + self._scaled(dims)

    def _scaled(self, dims: Dims) -> Held:
        """What the scale is multiplied with, in float32."""
        return Held(wide=((1.0, dims),))

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
        return super()._scaled(dims) if self.offset else Held(narrow=((1.0, dims),))


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
