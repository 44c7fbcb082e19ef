"""Base class of sublayers with a recurrent state, and the initial values of its decay."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Self

from maxpipe.models.spec import NOTHING, Dims, Held, Part

# The decay is initialized as in Mamba 2 (arXiv:2405.21060). The decay rate of a head is the
# product of a rate of at most `_FASTEST` and a time step between `_SHORTEST` and `_LONGEST`.
_FASTEST = 16.0
_SHORTEST, _LONGEST = 1e-3, 1e-1
_GOLDEN = (5**0.5 - 1) / 2


class SequenceShard(NamedTuple):
    """Tokens of a sequence on one device of the context axis: two pieces of equal length."""

    devices: int
    """Number of devices along the context axis."""
    tokens: int
    """Number of tokens per piece."""


class Recurrent(Part):
    """Sublayer that passes a state from token to token. The tokens of a chunk are processed at
    once.
    """

    d_model: int
    kernel: int
    """Width of the convolution in tokens, including the current token."""
    chunk: int
    """Number of tokens per chunk, a power of two."""
    shard: SequenceShard | None
    """Tokens on one device if sequences are sharded. Counts of memory and operations depend on
    it."""

    def with_shard(self, devices: int, tokens: int) -> Self:
        """Return the sublayer with sequences sharded over `devices` devices, in pieces of `tokens`
        tokens.
        """
        layer: Any = self
        return replace(layer, shard=SequenceShard(devices, tokens))

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""

    @property
    def transition_columns(self) -> int:
        """Return the number of columns of the matrix by which some tokens multiply the state; 1 if
        the matrix is a multiple of the identity.
        """
        return self.state_shape[-2]

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
    @abstractmethod
    def mixed_dims(self) -> tuple[Dims, ...]:
        """Return the dims of the convolution's inputs."""

    @property
    def effect_dims(self) -> Dims:
        """Return the dims of the effect of tokens on the state: the state after these tokens if
        they start from an empty state, and the matrix that multiplies the state before them.
        """
        size, width = self.state_shape[-2:]
        heads = self.state_dims[0]
        return heads, (size, ""), (width + self.transition_columns, "")

    @property
    def effect_products(self) -> float:
        """Return the multiply-adds per token and head for the effects of sharded sequences.

        A delta rule reads the state and writes to it. All devices compose all effects.
        """
        if self.shard is None:
            return 0.0
        size, width = self.state_shape[-2:]
        columns = self.transition_columns
        if columns == 1:
            return float(size * (width + 1))
        composed = self.shard.devices / self.shard.tokens * size * size * width
        return 2.0 * size * (width + columns) + composed

    @property
    def effect_residuals(self) -> Held:
        """Return the additional residuals of sharded sequences: the effect before each chunk, and
        for each piece the matrix that multiplies the state, the state before the piece, and the
        tokens before the piece that the convolution reads, with their segment IDs.
        """
        if self.shard is None:
            return NOTHING
        tokens = self.shard.tokens
        chunks = -(-tokens // min(self.chunk, 1 << (tokens - 1).bit_length()))
        transition = (*self.effect_dims[:2], (self.transition_columns, ""))
        read = (self.kernel - 1) / tokens
        return Held(
            compute_dtype=tuple((read, dims) for dims in self.mixed_dims),
            float32=(
                (chunks / tokens, self.effect_dims),
                (chunks / tokens - 1.0 / self.chunk, self.state_dims),
                (1.0 / tokens, transition),
                (1.0 / tokens, self.state_dims),
                (read, ((1, ""),)),
            ),
        )

    @property
    def effect_peak(self) -> Held:
        """Return the additional arrays of sharded sequences at the peak of the backward pass: the
        effects before each chunk and of all pieces, with gradients.
        """
        if self.shard is None:
            return NOTHING
        copies = 1.0 / self.chunk + 2.0 * self.shard.devices / self.shard.tokens
        return Held(float32=((copies, self.effect_dims),))

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
        return (
            Held(
                compute_dtype=tuple((1.0, dims) for dims in arrays),
                float32=((1.0 / self.chunk, self.state_dims),),
            )
            + self.effect_residuals
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
