"""Lightning indexer of DeepSeek sparse attention, which selects the keys of each query token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from maxpipe.models.layers.mlp import LayerNorm
from maxpipe.models.spec import (
    NOTHING,
    Dims,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Scores,
)

IndexerStage = Literal["dense", "sparse"]
INDEX_TOPK = "index_topk"
"""Name of the per-layer value (`Model.values`) that limits the number of keys of a query token, and
of the attention option that backends must support (`CANNOT`)."""
LOSS = "indexer"
"""Name of the loss that trains the indexer."""


@dataclass(frozen=True)
class Indexer:
    """Index scores of all pairs of a query token and an earlier token (arXiv:2512.02556, section
    2.1).

    The score is the sum over index heads of `weight * relu(query . key)`. All heads share one key
    per token. Queries are projected from the query latent of latent attention.
    """

    d_model: int
    q_lora_rank: int
    """Dimension of each token's query latent."""
    num_heads: int
    head_dim: int
    """Dimension of an index query and of an index key, including the RoPE dims, which come
    first."""
    rope_size: int
    """Number of RoPE dims."""
    interleaved: bool
    """Whether the RoPE dims are pairs (2i, 2i+1) instead of (i, i + half)."""
    top_k: int
    """Maximum number of keys that a query token attends to."""
    stage: IndexerStage
    """`dense`: attention uses all keys, and the target of the indexer is a distribution over all
    keys. `sparse`: attention and the target use the selected keys."""
    loss_weight: float
    """Coefficient of the indexer's loss. 0 omits the loss."""
    epsilon: float = 1e-6
    """Epsilon of the LayerNorm of the index keys."""

    @property
    def is_sparse(self) -> bool:
        """Return whether attention uses only the selected keys."""
        return self.stage == "sparse"

    @cached_property
    def norm(self) -> LayerNorm:
        """Return the norm of the index keys."""
        return LayerNorm(self.head_dim, self.epsilon)

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections to queries, keys and head weights, and the norm of the keys."""
        embed, size = (self.d_model, "embed"), (self.head_dim, "head_dim")
        latent, heads = (self.q_lora_rank, "latent"), (self.num_heads, "heads")
        into, norm = Normal(self.d_model), self.norm.params
        return {
            "index_query": Param((latent, heads, size), Normal(self.q_lora_rank), linear=1),
            "index_key": Param((embed, size), into, linear=1),
            "index_key_norm": norm["scale"],
            "index_key_norm_bias": norm["bias"],
            "index_weights": Param((embed, (self.num_heads, "norm")), into, linear=1),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named activations. `index_query` and `index_key` are named after RoPE."""
        return {
            "index_query": self._query,
            "index_key": self._key,
            "index_weights": self._weights,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the projections and the matmul of the scores, which has no values."""
        scores = Scores(
            self.num_heads,
            "heads",
            self.head_dim / 2,
            storage="none",
            query=self._query,
            keys=(self._key,),
            mixed=self._key,
        )
        return *map(Matmul, ("index_query", "index_key", "index_weights")), scores

    @property
    def traffic(self) -> Held:
        """Return the queries, the keys before and after their norm, and the head weights."""
        return Held(compute_dtype=((1.0, self._query), (4.0, self._key), (2.0, self._weights)))

    @property
    def backward_peak(self) -> Held:
        """Return the scores and the target distribution of each pair, summed over heads."""
        return Held(shared_pairs=(0.0, 3.0, 0.0)) if self.loss_weight else NOTHING

    @property
    def residuals(self) -> Held:
        """Return the gradients of a unit loss for the inputs of the scores, the rotation angles,
        and the arrays that the norm of the keys saves.
        """
        if not self.loss_weight:
            return NOTHING
        held = Held(compute_dtype=((1.0, self._query), (1.0, self._key), (1.0, self._weights)))
        held += Held(float32=((2.0, ((self.rope_size, ""),)),))
        return held + self.norm.residuals_of((), self._key)

    def deferred(self, *, recomputed: bool) -> Held:
        """Return the residuals and the gradient of the norm's scale. If the forward pass is
        recomputed, the cotangents of the projections and of the norm replace the residuals.
        """
        if not self.loss_weight:
            return NOTHING
        scale = Held(token_independent=(self._key,))
        if not recomputed:
            return scale + self.residuals
        cotangents = (1.0, self._query), (2.0, self._key), (1.0, self._weights)
        return scale + Held(compute_dtype=cotangents)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_dim, "head_dim"))

    @property
    def _key(self) -> Dims:
        return ((self.head_dim, "head_dim"),)

    @property
    def _weights(self) -> Dims:
        return ((self.num_heads, "norm"),)
