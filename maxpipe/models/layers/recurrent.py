"""Base class of sublayers with a recurrent state, and the initial values of its decay."""

from __future__ import annotations

import math
from abc import abstractmethod

from maxpipe.models.spec import Part

# The decay is initialized as in Mamba 2 (arXiv:2405.21060). The decay rate of a head is the
# product of a rate of at most `_FASTEST` and a time step between `_SHORTEST` and `_LONGEST`.
_FASTEST = 16.0
_SHORTEST, _LONGEST = 1e-3, 1e-1
_GOLDEN = (5**0.5 - 1) / 2


class Recurrent(Part):
    """Sublayer that passes a state from token to token, so that a device needs all tokens of a
    sequence. The tokens of a chunk are processed at once.
    """

    chunk: int
    """Number of tokens per chunk, a power of two."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""


def decay_rates(heads: int) -> tuple[float, ...]:
    """Return the logarithms of evenly spaced decay rates, one per head."""
    return tuple(math.log(_FASTEST * (number + 0.5) / heads) for number in range(heads))


def time_steps(heads: int) -> tuple[float, ...]:
    """Return the inverse softplus of logarithmically spaced time steps.

    The spacing uses multiples of the golden ratio, so that time steps and decay rates are ordered
    differently.
    """
    span = math.log(_LONGEST / _SHORTEST)
    steps = (_SHORTEST * math.exp(span * (number * _GOLDEN % 1)) for number in range(heads))
    return tuple(step + math.log(-math.expm1(-step)) for step in steps)
