"""Self-attention in which few key/value heads serve many query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import (
    Constant,
    Dims,
    Held,
    Matmul,
    Normal,
    Number,
    Operation,
    Param,
    Part,
    Scores,
    Stands,
)

AUTO = "auto"
"""A backend that is still to be chosen (`model.choice`): what is described of it is `xla`'s."""

CANNOT: Mapping[str, frozenset[str]] = {
    AUTO: frozenset(),
    "xla": frozenset(),
    "blockwise": frozenset(),
    "cudnn": frozenset({"soft_cap", "sinks", "value_size"}),
    "splash": frozenset(),
}
"""For each backend (`model.attention`) the options of attention that it cannot compute."""


LOG_SUM = "attention_lse"
"""Name of the logarithm of each query's sum of exponentials, in float32, which backends with a
backward of their own keep with `context`: from both the shares of all keys follow."""

_STANDS: Mapping[str, Stands] = {AUTO: "scores", "xla": "scores", "cudnn": "mask"}


def stands(backend: str) -> Stands:
    """What of its scores a backend has in memory."""
    return _STANDS.get(backend, "block")


def kept_with_context(backend: str, heads: Dims) -> Mapping[str, Mapping[str, Dims]]:
    """What a backend keeps where `context` is kept. `Part.kept_with` of attention."""
    return {} if stands(backend) == "scores" else {"context": {LOG_SUM: heads}}


Scaling = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pairs turn by `position * theta ** -exponent`."""

    theta: Number
    factor: Number = 1.0
    """By which wavelengths are stretched."""
    scaling: Scaling = "linear"
    """`linear` stretches all; `dynamic` takes a larger base in rows of more than `original_tokens`,
    when decoding in caches of more; `llama3` stretches those that do not fit `original_tokens` four
    times; `yarn` (arXiv:2309.00071) those that do not fit 32 times, and what turns is made longer.
    """
    original_tokens: int = 0
    """Context length that the wavelengths were made for."""
    rotary_dims: int = 0
    """How many of a head's entries turn, the first ones. 0: all."""
    stretch: tuple[float, ...] = ()
    """By which each pair's wavelength is stretched besides (arXiv:2402.13753). Empty: by 1."""
    stretch_beyond: tuple[float, ...] = ()
    """The same in rows of more than `original_tokens`; when decoding, in caches of more."""
    attention_factor: float = 1.0
    """Factor of what turns."""
    truncate: bool = True
    """Whether YaRN begins and ends to stretch at whole numbers of pairs."""
    fast: float = 0.0
    """Pairs that turn at least so often in `original_tokens` are not stretched by `llama3` and
    `yarn`. 0: as published, 4 and 32."""
    slow: float = 0.0
    """Pairs that turn at most so often are stretched by the whole factor. 0: as published, 1."""


@dataclass(frozen=True)
class Attention(Part):
    """Causal attention within segments; query heads share key/value heads (arXiv:2305.13245)."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    scale: float | None = None
    """Of the scores. None: `head_dim ** -0.5`."""
    window: str = ""
    """Per-layer value: tokens that a query sees, itself included; 0 for all."""
    soft_cap: float = 0.0
    """Scores become `cap * tanh(scores / cap)`. 0: as they are."""
    head_norm: RMSNorm | None = None
    """Of each query and key, in front of the rotation."""
    joint_norm: bool = False
    """Whether it norms the heads of a token together, with a scale for each entry of each head."""
    biased: tuple[str, ...] = ()
    """Projections to which a bias is added."""
    gated: bool = False
    """Whether what heads mix is multiplied by sigmoids (arXiv:2505.06708). Their logits are
    projected with the queries: the second half of each head's entries."""
    sinks: bool = False
    """Whether each head has a score that takes a share of each query and adds nothing
    (arXiv:2309.17453, learned as in arXiv:2508.10925)."""

    @property
    def options(self) -> frozenset[str]:
        """What it asks of a backend that not all of them can compute."""
        used = {"soft_cap": self.soft_cap, "sinks": self.sinks}
        return frozenset(name for name, value in used.items() if value)

    @property
    def unsupported(self) -> frozenset[str]:
        """Options that its backend cannot compute."""
        return CANNOT[self.backend] & self.options

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections, and scales of the norms of queries and keys."""
        embed, size = (self.d_model, "embed"), (self.head_dim, "head_dim")
        heads, kv_heads = (self.num_heads, "heads"), (self.num_kv_heads, "kv_heads")
        into, out_of = Normal(self.d_model), self.num_heads * self.head_dim
        found = {
            "query": Param(
                (embed, heads, (self._projected, "head_dim")), into, num_contracted_dims=1
            ),
            "key": Param((embed, kv_heads, size), into, num_contracted_dims=1),
            "value": Param((embed, kv_heads, size), into, num_contracted_dims=1),
            "out": Param(
                (heads, size, embed), Normal(out_of, self.out_gain), num_contracted_dims=2
            ),
        }
        for name in self.biased:
            dims = (embed,) if name == "out" else found[name].dims[1:]
            found[f"{name}_bias"] = Param(dims, Constant(0.0), decays=False)
        if self.sinks:
            found["sinks"] = Param((heads,), Constant(0.0), decays=False)
        if self.head_norm is not None:
            scale = self.head_norm.params["scale"]
            for name, dims in (("query", self._query), ("key", self._key)):
                one = replace(scale, dims=dims) if self.joint_norm else scale
                found[f"{name}_norm"] = one
        return found

    @property
    def activations(self) -> Mapping[str, Dims]:
        """`query` and `key` are rotated; `context` is what attention mixes."""
        found = {"query": self._query, "key": self._key, "value": self._key}
        found |= {"query_gate": self._query} if self.gated else {}
        return found | {"context": self._query, "attention_out": self._width}

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """Of `context` its sums, where its backward starts from them."""
        return kept_with_context(self.backend, self._heads)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Four projections and the two products with the scores."""
        scores = Scores(
            self.num_heads,
            "heads",
            self.head_dim,
            self.window,
            storage=stands(self.backend),
            query=self._query,
            keys=(self._key, self._key),
            mixed=self._query,
        )
        return Matmul("query"), Matmul("key"), Matmul("value"), scores, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Input and output, and what is mixed: queries and keys stay near the scores."""
        return Held(compute_dtype=((2.0, self._width), (2.0, self._query)))

    @property
    def backward_peak(self) -> Held:
        """Of each pair its score and its probability.

        By blocks, besides: queries and the cotangent of what is mixed in the order of blocks, and
        of keys and values what is not there anyway, their gradients in float32 among it. Behind a
        mask of numbers a kernel's gradients, of keys and values for each head of queries.
        """
        if stands(self.backend) == "mask":
            return Held(pairs=(1.0, 0.0, 0.0), documents=((4.0, self._query),))
        found = Held(pairs=(1.0, 1.0, 0.0))
        if stands(self.backend) == "block":
            found += Held(
                compute_dtype=((2.0, self._query), (1.0, self._key)), float32=((1.0, self._key),)
            )
        return found

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls; angles, and two statistics of each softmax, in float32.

        A sink keeps one statistic more. Of each pair whether it counts, its score in float32, with
        a soft cap its slope, and its probability. Each block of queries keeps the keys and values
        that it reads. What computes its scores again keeps one statistic and nothing of pairs.
        """
        # Gates keep what they multiply, their sigmoids, and the product.
        narrow = ((1.0, self._width), (5.0 if self.gated else 2.0, self._query))
        keys, turned = ((2.0, self._key),), self.rope.rotary_dims or self.head_dim
        wide, statistics = ((2.0, ((turned, ""),)),), 2.0 + self.sinks
        found = Held(compute_dtype=narrow, float32=wide)
        if stands(self.backend) == "scores":
            pairs = (1.0, 2.0 if self.soft_cap else 1.0, 1.0)
            found += Held(float32=((statistics, self._heads),), blocks=keys, pairs=pairs)
        else:
            window: tuple[Dims, ...] = ((),) if self.window else ()
            found += Held(
                compute_dtype=keys, float32=((1.0, self._heads),), float32_token_independent=window
            )
        if self.head_norm is not None:
            for dims in (self._query, self._key):
                found += self.head_norm.residuals_of(*self._normed(dims))
        return found

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of the projections and cotangents of their outputs.

        What head norms wait for; of each sink its share and the cotangent of that, or its gradient.
        """
        del normed
        width = (1.0 if recomputed else 2.0, self._width)
        gates = (2.0 if recomputed else 1.0) if self.gated else 0.0
        found = Held(compute_dtype=(width, (2.0 + gates, self._query), (2.0, self._key)))
        if self.sinks:
            both = ((2.0, self._heads),)
            by_blocks = stands(self.backend) == "block"
            found += (
                Held(float32_token_independent=(self._heads,)) if by_blocks else Held(float32=both)
            )
        for dims in (self._query, self._key):
            if self.head_norm is not None:
                found += self.head_norm.deferred_of(*self._normed(dims), recomputed=recomputed)
                if recomputed:
                    found += Held(compute_dtype=((1.0, dims),))  # its input
        return found

    def _normed(self, dims: Dims) -> tuple[Dims, Dims]:
        """Dims for each of which there is a norm, and those over which it norms."""
        if self.joint_norm:
            return (), dims
        return dims[:1], ((self.head_dim, "norm"),)

    @property
    def _projected(self) -> int:
        """Entries of a head in the projection of queries."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _heads(self) -> Dims:
        return ((self.num_heads, "heads"),)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_dim, "head_dim"))

    @property
    def _key(self) -> Dims:
        return ((self.num_kv_heads, "kv_heads"), (self.head_dim, "head_dim"))
