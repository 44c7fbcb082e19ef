"""Gated delta rule: linear attention whose state decays and is updated by error correction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.layers.recurrent import (
    Recurrent,
    SequenceShard,
    decay_rates,
    time_steps,
)
from maxpipe.models.spec import (
    Dims,
    Entries,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Products,
)


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """Gated delta rule (arXiv:2412.06464) as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    Each value head has a state `S [dk, dv]`. A query reads from the state. A key corrects the state
    by the difference between v and the value stored for the key: `S = a S + b k (v - (a S)' k)'`,
    `o = S' q`. Each key head has one query, one key and several value heads. Queries, keys and
    values pass through a short convolution over tokens. The output is normalized and gated.
    """

    d_model: int
    num_key_heads: int
    num_value_heads: int
    key_size: int
    """Key dimension dk."""
    value_size: int
    """Value dimension dv."""
    kernel: int
    """Width of the convolution in tokens, including the current token."""
    norm: RMSNorm
    """Norm applied to each value head's output."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    chunk: int = 64
    """Number of tokens per chunk, a power of two."""
    fused: bool = True
    """Whether `qkvz` and `ba` are one matrix each, or consist of separate matrices."""
    allow_neg_eigval: bool = False
    """Whether write gates range from 0 to 2 instead of from 0 to 1, so that the transition matrix
    of the state can have negative eigenvalues (arXiv:2411.12537)."""
    shard: SequenceShard | None = None
    """Tokens on one device if sequences are sharded."""

    @property
    def group(self) -> int:
        """Return the number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def mixed_size(self) -> int:
        """Return the number of query, key and value channels per key head that pass through the
        convolution.
        """
        return 2 * self.key_size + self.group * self.value_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""
        return (self.num_key_heads, self.group, self.key_size, self.value_size)

    @property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the matrices that compute each projection.

        For each key head, `qkvz` concatenates the query, key, values and output gates, and `ba`
        concatenates the logits of the write gates and decay gates.
        """
        if self.fused:
            return {"qkvz": ("qkvz",), "ba": ("ba",)}
        return {"qkvz": ("query", "key", "value", "gate"), "ba": ("write", "forget")}

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections, convolution kernels, gates and the norm's scale."""
        embed, size = (self.d_model, "embed"), (self.value_size, "head_dim")
        heads, taps = (self.num_value_heads, "heads"), (self.kernel, "")
        into = Normal(self.d_model)
        out_of = self.num_value_heads * self.value_size

        def kernel(*dims: tuple[int, str]) -> Param:
            return Param((*dims, taps), Normal(self.kernel))

        matrices = {"qkvz": self._qkvz, "ba": self._ba}
        if not self.fused:
            matrices = {"query": self._key, "key": self._key, "value": self._value}
            matrices |= {"gate": self._value, "write": (heads,), "forget": (heads,)}
        return {
            **{name: Param((embed, *dims), into, linear=1) for name, dims in matrices.items()},
            "conv_query": kernel(*self._key),
            "conv_key": kernel(*self._key),
            "conv_value": kernel(*self._value),
            "decay": Param((heads,), Entries(decay_rates(self.num_value_heads)), decays=False),
            "decay_bias": Param((heads,), Entries(time_steps(self.num_value_heads)), decays=False),
            "norm": self.norm.params["scale"],
            "out": Param((heads, size, embed), Normal(out_of, self.out_gain), linear=2),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the projections `qkvz` and `ba`, and the output projection's input `read`."""
        return {
            "qkvz": self._qkvz,
            "ba": self._ba,
            "read": self._value,
            "delta_out": self.width_dims,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projections, the convolution, the matmuls with the state, and the matmuls
        within chunks.

        The model FLOPs are those of the recurrence: reading the state with the key and the query,
        and writing the state.
        """
        dk, dv, chunk = self.key_size, self.value_size, self.chunk
        needed = 3.0 * dk * dv
        # The matmuls between the tokens of a chunk compute key and query scores (once per key
        # head), the inverse times values and keys, and the output values. The inverse needs two
        # matmuls each time its block size doubles.
        inside = chunk * (2 * dk / self.group + dk + 2 * dv)
        inside += 2 * max(math.log2(chunk) - 1, 0) * chunk**2
        computed = needed + inside + self.effect_products
        products = Products(self.num_value_heads, "heads", needed, computed)
        *projections, out = map(Matmul, self.projections)
        kernels = (Matmul(f"conv_{name}") for name in ("query", "key", "value"))
        return *projections, *kernels, products, out

    @property
    def backward_peak(self) -> Held:
        """Return the chunk arrays and their gradients, per token and per token pair, and the
        recurrent states.
        """
        wide = ((10.0, self._value), (8.0, self._pairs), (1.0 / self.chunk, self.state_dims))
        return Held(compute_dtype=((2.0, self._qkvz),), float32=wide) + self.effect_peak

    @property
    def projections(self) -> tuple[str, ...]:
        return *self.sources["qkvz"], *self.sources["ba"], "out"

    @property
    def projected(self) -> tuple[Dims, ...]:
        return self._qkvz, self._ba

    @property
    def read_dims(self) -> Dims:
        return self._value

    @property
    def state_dims(self) -> Dims:
        return (*self._value, (self.key_size, ""))

    @property
    def mixed_dims(self) -> tuple[Dims, ...]:
        return (((self.num_key_heads, "kv_heads"), (self.mixed_size, "head_dim")),)

    @property
    def _qkvz(self) -> Dims:
        size = self.mixed_size + self.group * self.value_size
        return ((self.num_key_heads, "kv_heads"), (size, "head_dim"))

    @property
    def _ba(self) -> Dims:
        return ((self.num_key_heads, "kv_heads"), (2 * self.group, ""))

    @property
    def _key(self) -> Dims:
        return ((self.num_key_heads, "kv_heads"), (self.key_size, "head_dim"))

    @property
    def _value(self) -> Dims:
        return ((self.num_value_heads, "heads"), (self.value_size, "head_dim"))

    @property
    def _pairs(self) -> Dims:
        return ((self.num_value_heads, "heads"), (self.chunk, ""))
