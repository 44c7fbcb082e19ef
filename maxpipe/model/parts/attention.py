"""Self-attention in which few key/value heads serve many query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Dims, Matmul, Normal, Number, Operation, Param, Scores

CANNOT: Mapping[str, frozenset[str]] = {
    "xla": frozenset(),
    "cudnn": frozenset({"soft_cap", "sinks"}),
}
"""For each backend (`model.attention`) the options of attention that it cannot compute."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pairs turn by `position * theta ** -exponent`."""

    theta: Number
    factor: Number = 1.0
    """By which wavelengths are stretched."""
    scaling: Literal["linear", "llama3"] = "linear"
    """`linear` stretches all; `llama3` those that do not fit `original_tokens` four times."""
    original_tokens: int = 0
    """Context length that the wavelengths were made for."""


@dataclass(frozen=True)
class Attention:
    """Causal attention within segments; query heads share key/value heads (arXiv:2305.13245)."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    scale: float | None = None
    """Of the scores. None: `head_size ** -0.5`."""
    window: str = ""
    """Per-layer value: tokens that a query sees, itself included; 0 for all."""
    soft_cap: float = 0.0
    """Scores become `cap * tanh(scores / cap)`. 0: as they are."""
    head_norm: RMSNorm | None = None
    """Of each query and key, in front of the rotation."""

    @property
    def unsupported(self) -> frozenset[str]:
        """Options that its backend cannot compute."""
        used = {"soft_cap"} if self.soft_cap else set()
        return CANNOT[self.backend] & used

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections, and scales of the norms of queries and keys."""
        embed, size = (self.d_model, "embed"), (self.head_size, "head_size")
        heads, kv_heads = (self.num_heads, "heads"), (self.num_kv_heads, "kv_heads")
        into, out_of = Normal(self.d_model), self.num_heads * self.head_size
        found = {
            "query": Param((embed, heads, size), into),
            "key": Param((embed, kv_heads, size), into),
            "value": Param((embed, kv_heads, size), into),
            "out": Param((heads, size, embed), Normal(out_of, self.out_gain)),
        }
        if self.head_norm is not None:
            scale = self.head_norm.params["scale"]
            found |= {"query_norm": scale, "key_norm": scale}
        return found

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
        scores = Scores(self.num_heads, "heads", self.head_size, self.window)
        return Matmul("query"), Matmul("key"), Matmul("value"), scores, Matmul("out")
