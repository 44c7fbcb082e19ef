"""Mamba-2: a linear recurrence whose state decays by an amount that depends on the token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.layers.recurrent import (
    Recurrent,
    SequenceShard,
    decay_rates,
    time_steps,
)
from maxpipe.models.spec import (
    Constant,
    Dims,
    Entries,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Products,
)


class Multipliers(NamedTuple):
    """Constants that multiply the projections of the input of a Mamba-2 sublayer."""

    gate: float = 1.0
    value: float = 1.0
    key: float = 1.0
    query: float = 1.0
    time_step: float = 1.0


_NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """State-space layer of Mamba-2 (arXiv:2405.21060), as in Granite 4, Nemotron-H and Falcon-H1.

    Each head has a state `S [dk, dv]`, where dk is `state_size` and dv is `head_dim`. With keys k
    and queries q, which the heads of a group share, values v and a time step t > 0 for each head:
    `S = exp(-t r) S + t k v'` and `o = S' q + d v`, where r and d are parameters of the head. Keys,
    queries and values pass through a short convolution over tokens. The output is multiplied by a
    gate and, with a norm, normalized over the heads of a group.
    """

    d_model: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups of heads with common keys and queries."""
    state_size: int
    """Dimension of keys and queries."""
    kernel: int
    """Width of the convolution in tokens, including the current token."""
    conv_bias: bool
    """Whether the convolution has a bias for each channel."""
    norm: RMSNorm | None
    """Norm of the gated output, or None. Its statistics cover the heads of one group."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    chunk: int = 256
    """Number of tokens per chunk, a power of two."""
    min_time_step: float = 0.0
    """Minimum of the time steps."""
    multipliers: Multipliers = _NO_MULTIPLIERS
    """Constants that multiply the projections of the input."""
    shard: SequenceShard | None = None
    """Tokens on one device if sequences are sharded."""

    @property
    def group(self) -> int:
        """Return the number of heads per group."""
        return self.num_heads // self.num_groups

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""
        return (self.num_groups, self.group, self.state_size, self.head_dim)

    @property
    def transition_columns(self) -> int:
        return 1

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections, convolutions, the parameters of each head, and any norm."""
        embed, taps = (self.d_model, "embed"), (self.kernel, "")
        into, heads = Normal(self.d_model), self._heads
        matrices = {"gate": self._value, "value": self._value}
        matrices |= {"key": self._key, "query": self._key, "time_step": heads}
        convolved = {"value": self._value, "key": self._key, "query": self._key}
        biases = {
            f"conv_{name}_bias": Param(dims, Constant(0.0), decays=False)
            for name, dims in convolved.items()
            if self.conv_bias
        }
        count = self.num_heads
        scale = Param(self._value, Constant(1.0), decays=False)
        norm = {} if self.norm is None else {"norm": scale}
        return {
            **{name: Param((embed, *dims), into, linear=1) for name, dims in matrices.items()},
            **{
                f"conv_{name}": Param((*dims, taps), Normal(self.kernel))
                for name, dims in convolved.items()
            },
            **biases,
            "decay": Param(heads, Entries(decay_rates(count)), decays=False),
            "time_step_bias": Param(heads, Entries(time_steps(count)), decays=False),
            "skip": Param(heads, Constant(1.0), decays=False),
            **norm,
            "out": Param(
                (*self._value, embed),
                Normal(self.num_heads * self.head_dim, self.out_gain),
                linear=2,
            ),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the projections, the output projection's input, and the output."""
        return {
            "gate_value": self._gate_value,
            "key_query": self._key_query,
            "time_step": self._heads,
            "state_read": self._value,
            "mamba_out": self.width_dims,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projections, the convolutions, the matmuls with the state, and the matmuls
        within chunks.

        The model FLOPs are those of the recurrence: writing and reading the state.
        """
        needed = 2.0 * self.state_size * self.head_dim
        # Within a chunk, scores of all pairs of tokens (once per group) multiply the values.
        inside = self.chunk * (self.state_size / self.group + self.head_dim)
        computed = needed + inside + self.effect_products
        products = Products(self.num_heads, "heads", needed, computed)
        *projections, out = map(Matmul, self.projections)
        kernels = (Matmul(f"conv_{name}") for name in ("value", "key", "query"))
        return *projections, *kernels, products, out

    @property
    def backward_peak(self) -> Held:
        """Return the chunk arrays and their gradients, per token and per token pair, and the
        recurrent states.
        """
        wide = ((6.0, self._value), (6.0, self._pairs), (1.0 / self.chunk, self.state_dims))
        narrow = ((2.0, self._gate_value), (2.0, self._key_query))
        return Held(compute_dtype=narrow, float32=wide) + self.effect_peak

    @property
    def projections(self) -> tuple[str, ...]:
        return ("gate", "value", "key", "query", "time_step", "out")

    @property
    def projected(self) -> tuple[Dims, ...]:
        return self._gate_value, self._key_query, self._heads

    @property
    def read_dims(self) -> Dims:
        return self._value

    @property
    def state_dims(self) -> Dims:
        return (*self._value, (self.state_size, ""))

    @property
    def mixed_dims(self) -> tuple[Dims, ...]:
        return self._value, self._key, self._key

    @property
    def _heads(self) -> Dims:
        return ((self.num_heads, "heads"),)

    @property
    def _value(self) -> Dims:
        return (*self._heads, (self.head_dim, "head_dim"))

    @property
    def _gate_value(self) -> Dims:
        return (*self._heads, (2 * self.head_dim, "head_dim"))

    @property
    def _key(self) -> Dims:
        # All devices of the tensor axis compute the keys, because there may be a single group.
        return ((self.num_groups, ""), (self.state_size, ""))

    @property
    def _key_query(self) -> Dims:
        return ((self.num_groups, ""), (2 * self.state_size, ""))

    @property
    def _pairs(self) -> Dims:
        return (*self._heads, (self.chunk, ""))
