"""Hyper-connections: maps between several residual streams and the branches of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from maxpipe.models.spec import (
    NOTHING,
    Constant,
    Dims,
    Entries,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
    Products,
)

_SCALE = 0.01
"""Initial factor of the maps' dependence on the token (arXiv:2512.24880)."""
_OTHER_STREAMS = -8.0
"""Initial bias of the logits that mix a stream into other streams; the bias of the stream itself is
0."""


@dataclass(frozen=True)
class StreamMap(Part):
    """Base class of the sublayers that read several residual streams.

    The n residual streams of a token are one vector x of n * D entries, one stream after the other.
    A float32 projection of the normalized vector, `z = rms_norm(x) W`, determines the coefficients
    with which streams are summed. The norm has no scale.
    """

    d_model: int
    num_streams: int
    norm_epsilon: float
    """Epsilon added to the mean square of x."""
    epsilon: float
    """Epsilon added to the coefficients and to the sums of the Sinkhorn iterations."""

    @property
    def num_coefficients(self) -> int:
        """Return the number of entries of z."""
        return self.num_streams

    @property
    def scale_counts(self) -> tuple[int, ...]:
        """Return the number of entries of z that share each entry of `scale`."""
        return (self.num_coefficients,)

    @property
    def initial_bias(self) -> tuple[float, ...]:
        """Return the initial bias, with which the streams are averaged."""
        return (-math.log(self.num_streams - 1.0),) * self.num_streams

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projection, its bias and its scales, in float32.

        Weight decay applies to the projection only.
        """
        outputs = (self.num_coefficients, "norm")
        width, scales = self.num_streams * self.d_model, ((len(self.scale_counts), "norm"),)
        params = {
            "project": Param(((width, self._logical), outputs), Normal(width), linear=1),
            "bias": Param((outputs,), Entries(self.initial_bias), decays=False),
            "scale": Param(scales, Constant(_SCALE), decays=False),
        }
        return {name: replace(param, own_dtype="float32") for name, param in params.items()}

    @property
    def _logical(self) -> str:
        return "embed"

    @property
    def activations(self) -> Mapping[str, Dims]:
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projection and the weighted sum of the streams."""
        return Matmul("project"), self._sums(self.num_streams)

    def _sums(self, coefficients: int) -> Products:
        count = float(coefficients * self.d_model)
        return Products(1, "norm", count, count)

    @property
    def traffic(self) -> Held:
        """Return the streams, which are read twice, and the output."""
        return Held(compute_dtype=((2.0, self._streams), (1.0, self._width)))

    @property
    def backward_peak(self) -> Held:
        return NOTHING

    @property
    def residuals(self) -> Held:
        """Return the streams, z and the inverse root mean square."""
        return Held(compute_dtype=((1.0, self._streams),), float32=self._projected)

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return z and the cotangent of the logits. If `recomputed` is not set, also return the
        streams and the inverse root mean square.

        The parameters that compute the logits are also included.
        """
        del normed
        z = ((self.num_coefficients, "norm"),)
        scales = ((len(self.scale_counts), "norm"),)
        if recomputed:
            return Held(float32=((2.0, z),), token_independent=(z, scales))
        return Held(
            compute_dtype=((1.0, self._streams),),
            float32=((2.0, z), (1.0, ())),
            token_independent=(scales,),
        )

    @property
    def _projected(self) -> tuple[tuple[float, Dims], ...]:
        return ((1.0, ((self.num_coefficients, "norm"),)), (1.0, ()))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "norm"),)

    @property
    def _streams(self) -> Dims:
        return ((self.num_streams * self.d_model, "norm"),)


@dataclass(frozen=True)
class StreamHead(StreamMap):
    """Weighted sum of all streams, with weights `sigmoid(scale z + bias) + epsilon`. The sum is the
    input of the final norm.
    """

    @property
    def _logical(self) -> str:
        """The parameters are replicated, like those of the final norm."""
        return "norm"


@dataclass(frozen=True)
class HyperConnection(StreamMap):
    """Manifold-constrained hyper-connection of a branch (arXiv:2512.24880).

    With streams x_1 to x_n, the branch f computes the new streams
    `x_j' = post_j * f(sum_i pre_i x_i) + sum_i comb_ij x_i`. The entries of z are, in this order,
    the logits of `pre`, `post` and `comb` (row by row); each group has an entry of `scale`.

    - `pre = sigmoid(scale z + bias) + epsilon`
    - `post = 2 sigmoid(scale z + bias)`
    - `comb` starts as `softmax(scale z + bias) + epsilon` over j. Sinkhorn iterations then divide
      the columns and the rows in turn by their sums plus epsilon, so that comb is approximately
      doubly stochastic. The first iteration divides the columns only.

    At initialization, all streams are equal to the residual stream of an ordinary network, up to
    1%: `pre` averages the streams, `post` is 1, and `comb` is close to the identity matrix. As in
    the paper, the scales start at 0.01. The random projection makes the streams differ.
    """

    num_iterations: int
    """Number of Sinkhorn iterations."""

    @property
    def num_coefficients(self) -> int:
        return sum(self.scale_counts)

    @property
    def scale_counts(self) -> tuple[int, ...]:
        return (self.num_streams, self.num_streams, self.num_streams**2)

    @property
    def initial_bias(self) -> tuple[float, ...]:
        """Return the initial bias of `pre`, `post` and `comb`."""
        streams = range(self.num_streams)
        comb = tuple(0.0 if i == j else _OTHER_STREAMS for i in streams for j in streams)
        return (*super().initial_bias, *(0.0 for _ in streams), *comb)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projection, the weighted sums of the streams, and the products of the branch's
        output with `post`.
        """
        return Matmul("project"), self._sums(self.num_coefficients)

    @property
    def traffic(self) -> Held:
        """Return the streams, which are read three times and written once, and the input and the
        output of the branch.
        """
        return Held(compute_dtype=((4.0, self._streams), (2.0, self._width)))

    @property
    def backward_peak(self) -> Held:
        """Return the cotangents of the new streams and of the streams."""
        return Held(compute_dtype=((2.0, self._streams),))

    @property
    def residuals(self) -> Held:
        """Return the streams, the branch's output, z and the inverse root mean square."""
        return super().residuals + Held(compute_dtype=((1.0, self._width),))
