"""Base class of sublayers with a recurrent state, and the initial values of its decay."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cache

from maxpipe.models.spec import Dims, Held, Part

# The decay is initialized as in Mamba 2 (arXiv:2405.21060). The decay rate of a head is the
# product of a rate of at most `_FASTEST` and a time step between `_SHORTEST` and `_LONGEST`.
_FASTEST = 16.0
_SHORTEST, _LONGEST = 1e-3, 1e-1
_GOLDEN = (5**0.5 - 1) / 2


class Recurrent(Part):
    """Sublayer that passes a state from token to token, so that a device needs all tokens of a
    sequence. The tokens of a chunk are processed at once.
    """

    d_model: int
    chunk: int
    """Number of tokens per chunk, a power of two."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""

    @property
    @abstractmethod
    def projections(self) -> tuple[str, ...]:
        """Return the names of the weights that are multiplied with activations."""

    @property
    @abstractmethod
    def projected(self) -> tuple[Dims, ...]:
        """Return the outputs of the input projections: first the wide ones, and last the gates that
        have one entry per head.
        """

    @property
    @abstractmethod
    def read_dims(self) -> Dims:
        """Return the dims of the values read from the state, the output projection's input."""

    @property
    @abstractmethod
    def state_dims(self) -> Dims:
        """Return the dims of the recurrent state."""

    @property
    def width_dims(self) -> Dims:
        """Return the dims of the input and the output."""
        return ((self.d_model, "embed"),)

    @property
    def traffic(self) -> Held:
        """Return the input, the output, the wide projections, and the values read from the
        state.
        """
        arrays = (self.width_dims, *self.projected[:-1], self.read_dims)
        return Held(compute_dtype=tuple((2.0, dims) for dims in arrays))

    @property
    def residuals(self) -> Held:
        """Return the inputs of all matmuls, and the float32 state before each chunk."""
        arrays = (self.width_dims, *self.projected, self.read_dims)
        return Held(
            compute_dtype=tuple((1.0, dims) for dims in arrays),
            float32=((1.0 / self.chunk, self.state_dims),),
        )

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of the projections, the cotangents of their outputs, and the gradients
        of the other parameters.
        """
        del normed
        width = (1.0 if recomputed else 2.0, self.width_dims)
        arrays = (*self.projected, self.read_dims)
        others = {
            name: param for name, param in self.params.items() if name not in self.projections
        }
        return Held(
            compute_dtype=(width, *((1.0, dims) for dims in arrays)),
            token_independent=tuple(param.dims for param in others.values()),
        )


@cache
def decay_rates(heads: int) -> tuple[float, ...]:
    """Return the logarithms of evenly spaced decay rates, one per head."""
    return tuple(math.log(_FASTEST * (number + 0.5) / heads) for number in range(heads))


@cache
def time_steps(count: int) -> tuple[float, ...]:
    """Return the inverse softplus of logarithmically spaced time steps.

    The spacing uses multiples of the golden ratio, so that time steps and decay rates are ordered
    differently.
    """
    span = math.log(_LONGEST / _SHORTEST)
    steps = (_SHORTEST * math.exp(span * (number * _GOLDEN % 1)) for number in range(count))
    return tuple(step + math.log(-math.expm1(-step)) for step in steps)
