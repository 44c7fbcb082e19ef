"""Self-attention in which few key/value heads serve many query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.model.spec import Dims, Held, Matmul, Normal, Operation, Param, Part, Scores


@dataclass(frozen=True)
class Attention(Part):
    """Causal attention within segments, with rotary positions (arXiv:2305.13245)."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    backend: str

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections."""
        embed, size = (self.d_model, "embed"), (self.head_size, "head_size")
        heads, kv_heads = (self.num_heads, "heads"), (self.num_kv_heads, "kv_heads")
        into, out_of = Normal(self.d_model), self.num_heads * self.head_size
        return {
            "query": Param((embed, heads, size), into),
            "key": Param((embed, kv_heads, size), into),
            "value": Param((embed, kv_heads, size), into),
            "out": Param((heads, size, embed), Normal(out_of, self.out_gain)),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """`query` and `key` are rotated; `context` is what attention mixes."""
        return {
            "query": self._query,
            "key": self._key,
            "value": self._key,
            "context": self._query,
            "attention_out": self._width,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Four projections and the two products with the scores."""
        fused = self.backend != "xla"
        scores = Scores(self.num_heads, "heads", self.head_size, fused=fused)
        return Matmul("query"), Matmul("key"), Matmul("value"), scores, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Input and output, and what is mixed: queries and keys stay near the scores."""
        return Held(narrow=((2.0, self._width), (2.0, self._query)))

    @property
    def working(self) -> Held:
        """Of each pair its score and its probability."""
        return Held(pairs=(1.0, 1.0, 0.0))

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls; angles, and two statistics of each softmax, in float32.

        Of each pair whether it counts, its score in float32 and its probability.
        """
        narrow = ((1.0, self._width), (2.0, self._query), (2.0, self._key))
        wide = ((2.0, ((self.head_size, ""),)), (2.0, ((self.num_heads, "heads"),)))
        return Held(narrow=narrow, wide=wide, pairs=(1.0, 1.0, 1.0))

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of the projections and cotangents of their outputs."""
        del normed
        width = (1.0 if recomputed else 2.0, self._width)
        return Held(narrow=(width, (2.0, self._query), (2.0, self._key)))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_size, "head_size"))

    @property
    def _key(self) -> Dims:
        return ((self.num_kv_heads, "kv_heads"), (self.head_size, "head_size"))
