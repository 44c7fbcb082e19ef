"""Kimi delta attention: the gated delta rule with one decay gate per key dim."""

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

BLOCK = 16
"""Number of tokens whose scores are computed by one matmul for each smaller block size."""


@dataclass(frozen=True)
class KimiDelta(Recurrent):
    """Kimi delta attention (arXiv:2510.26692).

    Each head has a state `S [d, d]`. A query reads from the state. A key corrects the state by the
    difference between v and the value stored for the key: `S = a S + b k (v - (a S)' k)'`,
    `o = S' q`. The decay a is a vector with one entry per key dim, so `a S` scales the rows of S.
    Queries, keys and values pass through a short convolution over tokens. The output is normalized
    and multiplied by a sigmoid gate. The logits of the decay and of the output gate are projected
    from latents of dimension d.
    """

    d_model: int
    num_heads: int
    head_dim: int
    """Dimension d of queries, keys and values, and of the latents of the gates."""
    kernel: int
    """Width of the convolution in tokens, including the current token."""
    norm: RMSNorm
    """Norm applied to each head's output."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    chunk: int = 64
    """Number of tokens per chunk, a power of two."""
    shard: SequenceShard | None = None
    """Tokens on one device if sequences are sharded."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence."""
        return (self.num_heads, 1, self.head_dim, self.head_dim)

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections, convolution kernels, gates and the norm's scale."""
        embed, latent = (self.d_model, "embed"), (self.head_dim, "latent")
        count, out_of = self.num_heads, self.num_heads * self.head_dim

        def project(*dims: tuple[int, str]) -> Param:
            return Param((embed, *dims), Normal(self.d_model), linear=1)

        up = Param((latent, *self._heads), Normal(self.head_dim), linear=1)
        down = project((self.head_dim, "norm"))
        kernel = Param((*self._heads, (self.kernel, "")), Normal(self.kernel))
        return {
            **dict.fromkeys(("query", "key", "value"), project(*self._heads)),
            **{"forget_down": down, "forget_up": up, "gate_down": down, "gate_up": up},
            "write": project(*self._per_head),
            **dict.fromkeys(("conv_query", "conv_key", "conv_value"), kernel),
            "decay": Param(self._per_head, Entries(decay_rates(count)), decays=False),
            "decay_bias": Param(self._heads, Entries(time_steps(out_of)), decays=False),
            "norm": self.norm.params["scale"],
            "out": Param((*self._heads, embed), Normal(out_of, self.out_gain), linear=2),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the latents of the gates, the projections of the input and the latents, the output
        projection's input, and the output.
        """
        return {
            "forget_latent": self._latent,
            "gate_latent": self._latent,
            "kda_inputs": self._inputs,
            "kda_write": self._per_head,
            "state_read": self._heads,
            "kda_out": self.width_dims,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projections, the convolution, the matmuls with the state, and the matmuls
        within chunks.

        The model FLOPs are those of the recurrence: reading the state with the key and the query,
        and writing the state.
        """
        size, chunk = self.head_dim, self.chunk
        block = min(chunk, BLOCK)
        needed = 3.0 * size * size
        # Scores of queries and of keys: each matmul of smaller blocks multiplies all tokens with
        # BLOCK tokens, and larger blocks multiply half of the tokens with one block.
        pairs = block * max(math.log2(block) - 1, 0) + (chunk - block / 2) / 2
        # Sums of log decays: half of the tokens of each block until its end, the other half since
        # its start, and all tokens of the chunk since the start and until the end.
        sums = chunk - 1 + 2 * chunk
        # The other matmuls are those of `GatedDelta`.
        inside = size * (2 * pairs + sums + 3 * chunk)
        inside += 2 * max(math.log2(chunk) - 1, 0) * chunk**2
        computed = needed + inside + self.effect_products
        products = Products(self.num_heads, "heads", needed, computed)
        *projections, out = map(Matmul, self.projections)
        kernels = (Matmul(f"conv_{name}") for name in ("query", "key", "value"))
        return *projections, *kernels, products, out

    @property
    def backward_peak(self) -> Held:
        """Return the chunk arrays and their gradients, per token and per token pair, and the
        recurrent states.
        """
        # Each doubling of the block size saves the decay of all tokens.
        wide = 10.0 + 3.0 * math.log2(self.chunk)
        arrays = ((wide, self._heads), (8.0, self._pairs), (1.0 / self.chunk, self.state_dims))
        return Held(compute_dtype=((2.0, self._inputs),), float32=arrays) + self.effect_peak

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the arrays of all recurrent layers, and the latents, which are the inputs of
        projections.
        """
        arrays = super().deferred(recomputed=recomputed, normed=normed)
        return arrays + Held(compute_dtype=((2.0, self._latent),))

    @property
    def projections(self) -> tuple[str, ...]:
        matrices = ("query", "key", "value", "forget_down", "forget_up", "gate_down", "gate_up")
        return *matrices, "write", "out"

    @property
    def projected(self) -> tuple[Dims, ...]:
        return self._inputs, self._latent, self._latent, self._per_head

    @property
    def read_dims(self) -> Dims:
        return self._heads

    @property
    def state_dims(self) -> Dims:
        return (*self._heads, (self.head_dim, ""))

    @property
    def mixed_dims(self) -> tuple[Dims, ...]:
        return (self._heads,) * 3

    @property
    def _latent(self) -> Dims:
        return ((self.head_dim, "norm"),)

    @property
    def _per_head(self) -> Dims:
        return ((self.num_heads, "heads"),)

    @property
    def _heads(self) -> Dims:
        return (*self._per_head, (self.head_dim, "head_dim"))

    @property
    def _inputs(self) -> Dims:
        return (*self._per_head, (5 * self.head_dim, "head_dim"))

    @property
    def _pairs(self) -> Dims:
        return (*self._per_head, (self.chunk, ""))
