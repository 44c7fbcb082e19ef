"""The gated delta rule: linear attention whose state forgets and corrects itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import (
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

# What gates start from, as in Mamba 2 (arXiv:2405.21060): a head forgets at a rate up to
# `_FASTEST` times a step of time between these two.
_FASTEST = 16.0
_SHORTEST, _LONGEST = 1e-3, 1e-1
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class GatedDelta(Part):
    """The gated delta rule (arXiv:2412.06464) as in Qwen3-Next.

    Of each value head a state `S [dk, dv]` is read by queries, and corrected where a key finds
    another value than it should: `S = a S + b k (v - (a S)' k)'`, `o = S' q`. Each key head has a
    query, a key and several value heads. Queries, keys and values pass a short convolution over
    tokens; what is read is normed and gated.
    """

    d_model: int
    num_key_heads: int
    num_value_heads: int
    key_size: int
    """dk."""
    value_size: int
    """dv."""
    kernel: int
    """Tokens that the convolution sees, the token itself included."""
    norm: RMSNorm
    """Of what each value head reads."""
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    chunk: int = 64
    """Tokens that are computed at once, a power of two."""

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def mixed_size(self) -> int:
        """Entries of a key head that the convolution mixes: query, key and values."""
        return 2 * self.key_size + self.group * self.value_size

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections, the convolution's kernels, gates, the norm's scale.

        Of each key head `qkvz` holds query, key, values and output gates, side by side, and `ba`
        the logits of its write and forget gates.
        """
        embed, size = (self.d_model, "embed"), (self.value_size, "head_dim")
        heads, taps = (self.num_value_heads, "heads"), (self.kernel, "")
        into = Normal(self.d_model)
        out_of = self.num_value_heads * self.value_size

        def kernel(*dims: tuple[int, str]) -> Param:
            return Param((*dims, taps), Normal(self.kernel))

        return {
            "qkvz": Param((embed, *self._qkvz), into, linear=1),
            "ba": Param((embed, *self._ba), into, linear=1),
            "conv_query": kernel(*self._key),
            "conv_key": kernel(*self._key),
            "conv_value": kernel(*self._value),
            "decay": Param((heads,), Entries(_rates(self.num_value_heads)), decays=False),
            "decay_bias": Param((heads,), Entries(_times(self.num_value_heads)), decays=False),
            "norm": self.norm.params["scale"],
            "out": Param((heads, size, embed), Normal(out_of, self.out_gain), linear=2),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """`qkvz` and `ba` as they are projected; `read` is what the output projection takes."""
        return {
            "qkvz": self._qkvz,
            "ba": self._ba,
            "read": self._value,
            "delta_out": self._width,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Projections, the convolution, and the products with the state and inside chunks.

        Needed is what the recurrence does: it reads by key and query, and writes.
        """
        dk, dv, chunk = self.key_size, self.value_size, self.chunk
        needed = 3.0 * dk * dv
        # Between tokens of a chunk: keys and queries once for a key head; solved values and keys,
        # mixed values; the inverse, with two products for each doubling of its blocks.
        inside = chunk * (2 * dk / self.group + dk + 2 * dv)
        inside += 2 * max(math.log2(chunk) - 1, 0) * chunk**2
        products = Products(self.num_value_heads, "heads", needed, needed + inside)
        kernels = (Matmul(f"conv_{name}") for name in ("query", "key", "value"))
        return Matmul("qkvz"), Matmul("ba"), *kernels, products, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Input and output, what is projected, what is read."""
        return Held(compute_dtype=((2.0, self._width), (2.0, self._qkvz), (2.0, self._value)))

    @property
    def backward_peak(self) -> Held:
        """What chunks hold and its gradients, of each token and of pairs in a chunk; the states."""
        wide = ((10.0, self._value), (8.0, self._pairs), (1.0 / self.chunk, self._state))
        return Held(compute_dtype=((2.0, self._qkvz),), float32=wide)

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls; in float32 the state in front of each chunk."""
        return Held(
            compute_dtype=(
                (1.0, self._width),
                (1.0, self._qkvz),
                (1.0, self._ba),
                (1.0, self._value),
            ),
            float32=((1.0 / self.chunk, self._state),),
        )

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of the projections and cotangents of their outputs; all other gradients."""
        del normed
        width = (1.0 if recomputed else 2.0, self._width)
        narrow = (width, (1.0, self._qkvz), (1.0, self._ba), (1.0, self._value))
        others = {name: each for name, each in self.params.items() if name not in self._projections}
        return Held(
            compute_dtype=narrow, token_independent=tuple(each.dims for each in others.values())
        )

    _projections = ("qkvz", "ba", "out")

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

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
    def _state(self) -> Dims:
        return (*self._value, (self.key_size, ""))

    @property
    def _pairs(self) -> Dims:
        return ((self.num_value_heads, "heads"), (self.chunk, ""))


def _rates(heads: int) -> tuple[float, ...]:
    """Logarithms of rates, spread evenly."""
    return tuple(math.log(_FASTEST * (number + 0.5) / heads) for number in range(heads))


def _times(heads: int) -> tuple[float, ...]:
    """What softplus makes steps of time of, spread evenly by their logarithms.

    In another order than the rates: by multiples of the golden ratio.
    """
    span = math.log(_LONGEST / _SHORTEST)
    steps = (_SHORTEST * math.exp(span * (number * _GOLDEN % 1)) for number in range(heads))
    return tuple(step + math.log(-math.expm1(-step)) for step in steps)
