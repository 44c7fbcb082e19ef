"""Self-attention in which few key/value heads serve many query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.model.spec import Dims, Matmul, Normal, Operation, Param, Scores


@dataclass(frozen=True)
class Attention:
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
        size = (self.head_size, "head_size")
        heads, kv_heads = (self.num_heads, "heads"), (self.num_kv_heads, "kv_heads")
        return {
            "query": (heads, size),
            "key": (kv_heads, size),
            "value": (kv_heads, size),
            "context": (heads, size),
            "attention_out": ((self.d_model, "embed"),),
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Four projections and the two products with the scores."""
        scores = Scores(self.num_heads, "heads", self.head_size)
        return Matmul("query"), Matmul("key"), Matmul("value"), scores, Matmul("out")
