"""Attention with one key/value head, a sliding window, and compressed entries of earlier tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from maxpipe.models.layers.attention import CANNOT, Rope
from maxpipe.models.layers.indexer import LOSS, IndexerStage
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import (
    Constant,
    Dims,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
    Products,
    Scores,
    Summary,
)

INDEX_TOKENS = "index_tokens"
"""Name of the per-layer value (`Model.values`) with the number of tokens that the selected entries
of a query token represent."""


@dataclass(frozen=True)
class EntryIndexer:
    """Index scores of all pairs of a query token and an entry of an earlier window.

    The score is the sum over index heads of `weight * relu(query . key)`, as in DeepSeek sparse
    attention. Index keys are entries of a separate, smaller compression of the same windows.
    """

    num_heads: int
    head_dim: int
    """Dimension of an index query and of an index key, including the RoPE dims, which come last."""
    top_k: int
    """Maximum number of entries that a query token attends to."""
    stage: IndexerStage
    """`dense`: attention uses all entries. `sparse`: attention uses the selected entries."""
    loss_weight: float
    """Coefficient of the indexer's loss. 0 omits the loss."""

    @property
    def is_sparse(self) -> bool:
        """Return whether attention uses only the selected entries."""
        return self.stage == "sparse"


@dataclass(frozen=True)
class Compression:
    """Compression of each window of consecutive tokens of a document to one entry.

    The first window of a document starts with its first token. An entry is the weighted sum of the
    projections of its tokens. The weights of each dim are a softmax over the tokens of projected
    gates and a learned bias per token of the window.
    """

    rate: int
    """Number of tokens per window."""
    overlaps: bool
    """Whether an entry also contains the tokens of the preceding window, with separate
    projections."""
    indexer: EntryIndexer | None = None
    """Indexer that selects the entries of each query token. None for attention to all entries."""

    @property
    def num_series(self) -> int:
        """Return the number of entries to which a token contributes."""
        return 2 if self.overlaps else 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that an entry contains."""
        return self.rate * self.num_series


@dataclass(frozen=True)
class CompressedAttention(Part):
    """Causal attention to a sliding window and to compressed entries, as in DeepSeek-V4.

    All query heads share one vector per token or entry, which is both the key and the value. RoPE
    is applied to the last dims of this vector, and its inverse at the query position to the output.
    Each head has a learned sink logit. The output projection consists of one projection for each
    group of heads and a projection of all groups.
    """

    d_model: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    """Dimension of each token's query latent."""
    num_groups: int
    """Number of groups of heads with separate output projections."""
    group_rank: int
    """Dimension of the projected output of a group."""
    window: int
    """Attention window in tokens, including the query token."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    """Rotary positions. The RoPE dims are the last dims of a head, as pairs (2i, 2i+1)."""
    epsilon: float
    """Epsilon of all norms."""
    compression: Compression | None = None
    """Compression of earlier tokens. None for attention to the window only."""

    metrics: ClassVar[Mapping[str, Summary]] = {
        "attention/entry_indexer_loss": Summary(
            LOSS,
            "mean",
            "nats",
            "Divergence of the indexer's distribution over compressed entries from the mean "
            "attention distribution of all heads, before multiplication by its coefficient, "
            "averaged over layers.",
        )
    }

    @property
    def indexer(self) -> EntryIndexer | None:
        """Return the indexer that selects entries, if any."""
        return None if self.compression is None else self.compression.indexer

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficient of the indexer's loss."""
        weight = 0.0 if self.indexer is None else self.indexer.loss_weight
        return {LOSS: weight} if weight else {}

    @property
    def options(self) -> frozenset[str]:
        """Return the enabled options that some backends do not support."""
        return frozenset({"compressed_entries"})

    @property
    def unsupported(self) -> frozenset[str]:
        """Return the enabled options that the backend does not support."""
        return CANNOT[self.backend] & self.options

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads."""
        return 1

    @property
    def rope_size(self) -> int:
        """Return the number of RoPE dims per head."""
        return self.rope.rotary_dims

    @property
    def scale(self) -> float:
        """Return the factor by which the attention scores are multiplied."""
        return self.head_dim**-0.5

    @property
    def cached_tokens(self) -> int:
        """Return the number of earlier tokens whose projections decoding reads."""
        reach = 0 if self.compression is None else self.compression.num_tokens
        return max(self.window, reach) - 1

    @cached_property
    def query_norm(self) -> RMSNorm:
        """Return the norm of the query latent."""
        return RMSNorm(self.q_lora_rank, self.epsilon, scales_in_float32=True)

    @cached_property
    def head_norm(self) -> RMSNorm:
        """Return the norm of each query, which has no scale."""
        return RMSNorm(self.head_dim, self.epsilon, scaled=False)

    @cached_property
    def key_norm(self) -> RMSNorm:
        """Return the norm of keys and of entries."""
        return RMSNorm(self.head_dim, self.epsilon, scales_in_float32=True)

    @cached_property
    def index_norm(self) -> RMSNorm:
        """Return the norm of index keys."""
        size = 0 if self.indexer is None else self.indexer.head_dim
        return RMSNorm(size, self.epsilon, scales_in_float32=True)

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections and norms of queries and keys, the sinks, the output projections,
        and the parameters of the compression and of the indexer.
        """
        embed, heads = (self.d_model, "embed"), (self.num_heads, "heads")
        size, into = (self.head_dim, "head_dim"), Normal(self.d_model)
        rank, groups = (self.q_lora_rank, "latent"), (self.num_groups, "heads")
        inside = self.num_heads // self.num_groups * self.head_dim
        outside = self.num_groups * self.group_rank
        params = {
            "query_down": Param((embed, (self.q_lora_rank, "norm")), into, linear=1),
            "query_norm": self.query_norm.params["scale"],
            "query_up": Param((rank, heads, size), Normal(self.q_lora_rank), linear=1),
            "key_value": Param((embed, size), into, linear=1),
            "key_value_norm": self.key_norm.params["scale"],
            "sinks": Param((heads,), Constant(0.0), decays=False),
            "group_out": Param(
                (groups, (inside, "head_dim"), (self.group_rank, "latent")), Normal(inside)
            ),
            "out": Param(
                (groups, (self.group_rank, "norm"), embed),
                Normal(outside, self.out_gain),
                linear=2,
            ),
        }
        if self.compression is not None:
            params |= self._compressing("entry", self.key_norm, self.compression)
        if self.indexer is not None and self.compression is not None:
            count, index_size = self.indexer.num_heads, (self.indexer.head_dim, "head_dim")
            query = (rank, (count, "heads"), index_size)
            params |= {
                "index_query": Param(query, Normal(self.q_lora_rank), linear=1),
                **self._compressing("index", self.index_norm, self.compression),
                "index_weights": Param((embed, (count, "norm")), into, linear=1),
            }
        return params

    def _compressing(self, name: str, norm: RMSNorm, how: Compression) -> dict[str, Param]:
        """Return the projections, the gate bias and the norm of a compression."""
        embed, size = (self.d_model, "embed"), (how.num_series * norm.d_model, "head_dim")
        matrix = Param((embed, size), Normal(self.d_model), linear=1)
        return {
            f"{name}_value": matrix,
            f"{name}_gate": matrix,
            f"{name}_bias": Param(((how.rate, ""), size), Constant(0.0), decays=False),
            f"{name}_norm": norm.params["scale"],
        }

    @property
    def quantized_dims(self) -> Mapping[str, int]:
        """Return the sizes of the dims along which `model.matmul` quantizes weights in blocks."""
        return {
            "q_lora_rank": self.q_lora_rank,
            "head_dim": self.head_dim,
            "o_lora_rank": self.group_rank,
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named activations. `query_latent`, `key` and the projections of the
        compression are named before their norms, and `query` and `index_query` after RoPE.
        """
        named = {"query_latent": self._query_latent, "query": self._query, "key": self._key}
        if self.compression is not None:
            named |= {"entry_value": self._entry_series, "entry_gate": self._entry_series}
        if self.indexer is not None:
            named |= {
                "index_query": self._index_query,
                "index_value": self._index_series,
                "index_gate": self._index_series,
                "index_weights": self._index_weights,
            }
        return named | {
            "context": self._query,
            "group_out": self._groups,
            "attention_out": self._width,
        }

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return all projections, and the matmuls that compute and apply the scores.

        Each query token has scores for a constant number of tokens in the window. The number of
        entries is that of earlier tokens divided by the rate.
        """
        window = 2.0 * self.head_dim * self.window
        operations: list[Operation] = [
            *map(Matmul, self._matrices),
            Products(self.num_heads, "heads", window, 2 * window),
        ]
        if (how := self.compression) is None:
            return tuple(operations)
        if (indexer := self.indexer) is not None:
            # The scores have no values.
            index = (self._index_query, (self._entry_key(indexer.head_dim),))
            mean = indexer.head_dim / 2 / how.rate
            operations.append(self._scores(indexer.num_heads, mean, "", *index))
        name = INDEX_TOKENS if indexer is not None and indexer.is_sparse else ""
        keys = (self._entry_key(self.head_dim),) * 2
        operations.append(
            self._scores(self.num_heads, self.head_dim / how.rate, name, self._query, keys)
        )
        return tuple(operations)

    @property
    def traffic(self) -> Held:
        """Return the input, the output, the latents before and after their norms, the queries, the
        projections of the compression, and the attention output.
        """
        arrays = (2.0, self._width), (4.0, self._query_latent), (4.0, self._key)
        mixed = (2.0, self._query), (2.0, self._groups)
        return Held(compute_dtype=(*arrays, *mixed, *self._projected(2.0)))

    @property
    def backward_peak(self) -> Held:
        """Return the scores and probabilities of the window and of the entries for each token."""
        tokens = 2 * self.window
        scores = ((self.num_heads, "heads"), (tokens, ""))
        held = Held(compute_dtype=((1.0, scores),), float32=((2.0, scores),))
        if (how := self.compression) is None:
            return held
        # Blocks of query tokens are processed one after another, the last with half of all scores.
        scored, shared = self.num_heads / how.rate / 2, 3.0 if self.losses else 0.0
        return held + Held(shared_pairs=(scored, 2 * scored + shared / how.rate, 0.0))

    @property
    def residuals(self) -> Held:
        """Return the inputs of all matmuls, of attention and of the compression, and the rotation
        angles. Scores and the sums of each window are recomputed.
        """
        turned = ((self.rope_size // 2, ""),)
        arrays = (1.0, self._width), (2.0, self._query), (1.0, self._key), (1.0, self._groups)
        held = Held(compute_dtype=(*arrays, *self._projected(1.0)), float32=((3.0, turned),))
        held += self.query_norm.residuals_of((), self._query_latent)
        held += Held(compute_dtype=((1.0, self._query_latent),))
        held += self.head_norm.residuals_of(self._query[:1], ((self.head_dim, "norm"),))
        held += self.key_norm.residuals_of((), self._key)
        if (how := self.compression) is None:
            return held
        held += Held(
            compute_dtype=((1.0 / how.rate, self._key),), float32=((2.0 / how.rate, turned),)
        )
        if self.indexer is None:
            return held
        selected = 1.0 / how.rate if self.indexer.is_sparse else 0.0
        held += Held(shared_pairs=(0.0, 0.0, selected))
        if not self.losses:
            return held
        index_key = self._entry_key(self.indexer.head_dim)
        query = (1.0, self._index_query), (1.0, self._index_weights)
        return held + Held(compute_dtype=(*query, (1.0 / how.rate, index_key)))

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of the projections, the cotangents of their outputs, and the gradients
        of the other parameters.
        """
        del normed
        width = (1.0 if recomputed else 2.0, self._width)
        arrays = (1.0, self._query), (1.0, self._key), (2.0, self._groups), (1.0, self._query)
        held = Held(compute_dtype=(width, *arrays, *self._projected(1.0)))
        latent = self.query_norm.deferred_of((), self._query_latent, recomputed=recomputed)
        held += latent + Held(compute_dtype=((2.0, self._query_latent),))
        held += self.key_norm.deferred_of((), self._key, recomputed=recomputed)
        if self.losses:
            index = (1.0, self._index_query), (1.0, self._index_weights)
            held += Held(compute_dtype=index)
        others = (param.dims for name, param in self.params.items() if name not in self._matrices)
        return held + Held(token_independent=tuple(others))

    def _scores(
        self, heads: int, head_dim: float, window: str, query: Dims, keys: tuple[Dims, ...]
    ) -> Scores:
        return Scores(
            heads,
            "heads",
            head_dim,
            window,
            storage="none",
            query=query,
            keys=keys,
            mixed=query,
        )

    def _projected(self, copies: float) -> tuple[tuple[float, Dims], ...]:
        """Return copies of the projections of the compression and of the indexer."""
        if self.compression is None:
            return ()
        arrays = [(2.0 * copies, self._entry_series)]
        if self.indexer is not None and self.losses:
            arrays.append((2.0 * copies, self._index_series))
        return tuple(arrays)

    @property
    def _matrices(self) -> tuple[str, ...]:
        others = ("norm", "bias", "sinks")
        return tuple(name for name in self.params if not name.endswith(others))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _query_latent(self) -> Dims:
        return ((self.q_lora_rank, "norm"),)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_dim, "head_dim"))

    @property
    def _key(self) -> Dims:
        return ((self.head_dim, "head_dim"),)

    @staticmethod
    def _entry_key(size: int) -> Dims:
        return ((size, "head_dim"),)

    @property
    def _groups(self) -> Dims:
        return ((self.num_groups, "heads"), (self.group_rank, "norm"))

    @property
    def _entry_series(self) -> Dims:
        return self._series(self.head_dim)

    @property
    def _index_series(self) -> Dims:
        return self._series(0 if self.indexer is None else self.indexer.head_dim)

    def _series(self, size: int) -> Dims:
        count = 1 if self.compression is None else self.compression.num_series
        return ((count * size, "head_dim"),)

    @property
    def _index_query(self) -> Dims:
        indexer = self.indexer
        assert indexer is not None
        return ((indexer.num_heads, "heads"), (indexer.head_dim, "head_dim"))

    @property
    def _index_weights(self) -> Dims:
        return ((0 if self.indexer is None else self.indexer.num_heads, "norm"),)
