"""Multi-head latent attention: one small latent per token encodes all keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from maxpipe.models.layer_reports import Summary
from maxpipe.models.layers.attention import CANNOT, Rope, kept_with_context, score_storage
from maxpipe.models.layers.indexer import INDEX_TOPK, LOSS, Indexer
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import (
    NOTHING,
    Dims,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
    Scores,
)


@dataclass(frozen=True)
class LatentAttention(Part):
    """Causal multi-head latent attention within document segments (arXiv:2405.04434, section 2.1).

    Each head's keys and values are projected from the token's latent. Positions are encoded in
    additional RoPE dims: each query head has separate RoPE dims, and all heads share the RoPE dims
    of the key.
    """

    d_model: int
    num_heads: int
    head_dim: int
    """Dimension of a query or key head, including the RoPE dims."""
    value_size: int
    """Dimension of a value head."""
    rank: int
    """Dimension of each token's key-value latent."""
    q_lora_rank: int
    """Dimension of each token's query latent. If 0, queries are projected from the layer's
    input."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    """Rotary positions. The projections store the RoPE dims at the end of each head, as pairs (2i,
    2i+1)."""
    scale: float
    """Factor by which the attention scores are multiplied."""
    epsilon: float
    """Epsilon of the RMSNorms on the latents."""
    indexer: Indexer | None = None
    """Indexer that selects the keys of each query token. None for attention to all keys."""

    metrics: ClassVar[Mapping[str, Summary]] = {
        "attention/indexer_loss": Summary(
            LOSS,
            "mean",
            "nats",
            "Divergence of the indexer's distribution over keys from the mean attention "
            "distribution of all heads, before multiplication by its coefficient, averaged over "
            "layers.",
        )
    }

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficient of the indexer's loss."""
        weight = 0.0 if self.indexer is None else self.indexer.loss_weight
        return {LOSS: weight} if weight else {}

    @property
    def is_sparse(self) -> bool:
        """Return whether query tokens attend only to selected keys."""
        return self.indexer is not None and self.indexer.is_sparse

    @property
    def is_absorbed(self) -> bool:
        """Return whether the keys of training are the selected latents, so that the up projections
        are applied to the queries and to the attention output.
        """
        return self.is_sparse and self.backend == "blockwise"

    @property
    def options(self) -> frozenset[str]:
        """Return the enabled options that some backends do not support."""
        return frozenset({"value_size", *((INDEX_TOPK,) if self.is_sparse else ())})

    @property
    def unsupported(self) -> frozenset[str]:
        """Return the enabled options that the backend does not support."""
        return CANNOT[self.backend] & self.options

    @property
    def rope_size(self) -> int:
        """Return the number of RoPE dims per head."""
        return self.rope.rotary_dims

    @property
    def rest_size(self) -> int:
        """Return the number of query or key dims that are not rotated."""
        return self.head_dim - self.rope_size

    @cached_property
    def norm(self) -> RMSNorm:
        """Return the norm of the key-value latent."""
        return RMSNorm(self.rank, self.epsilon)

    @cached_property
    def query_norm(self) -> RMSNorm:
        """Return the norm of the query latent."""
        return RMSNorm(self.q_lora_rank, self.epsilon)

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the down projections, their norms, and the up projections to the heads.

        In `key_value_up`, the leading dims of each head are the head's key without the RoPE dims.
        """
        embed, heads = (self.d_model, "embed"), (self.num_heads, "heads")
        size, into = (self.head_dim, "head_dim"), Normal(self.d_model)
        both = (self.rest_size + self.value_size, "head_dim")
        params: dict[str, Param] = {"query": Param((embed, heads, size), into, linear=1)}
        if self.q_lora_rank:
            rank = (self.q_lora_rank, "latent")
            params = {
                "query_down": Param((embed, (self.q_lora_rank, "norm")), into, linear=1),
                "query_norm": self.query_norm.params["scale"],
                "query_up": Param((rank, heads, size), Normal(self.q_lora_rank), linear=1),
            }
        rank = (self.rank, "latent")
        out_of = self.num_heads * self.value_size
        return params | {
            "key_value_down": Param((embed, (self.rank, "norm")), into, linear=1),
            "rope_key": Param((embed, (self.rope_size, "head_dim")), into, linear=1),
            "key_value_norm": self.norm.params["scale"],
            "key_value_up": Param((rank, heads, both), Normal(self.rank), linear=1),
            "out": Param((heads, self._value[1], embed), Normal(out_of, self.out_gain), linear=2),
            **({} if self.indexer is None else self.indexer.params),
        }

    @property
    def quantized_dims(self) -> Mapping[str, int]:
        """Return the sizes of the dims along which `model.matmul` quantizes weights in blocks.

        These are the last contracted dims of the matmuls, forward and backward, except `d_model`.
        """
        dims = {"q_lora_rank": self.q_lora_rank} if self.q_lora_rank else {}
        return dims | {
            "kv_lora_rank": self.rank,
            "head_dim": self.head_dim,
            "head_dim without qk_rope_head_dim": self.rest_size,
            "v_head_dim": self.value_size,
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named activations. The latents are not yet normalized; RoPE has already been
        applied to `query` and `key`.

        `context` is the attention output.
        """
        latents = {"query_latent": self._query_latent} if self.q_lora_rank else {}
        explicit = {} if self.is_absorbed else {"key": self._query, "value": self._value}
        return latents | {
            "query": self._query,
            "latent": self._latent,
            **explicit,
            **({} if self.indexer is None else self.indexer.activations),
            "context": self._context,
            "attention_out": self._width,
        }

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """Return the log-sum-exp, saved along with `context` if the backward pass reads it."""
        return kept_with_context(self.backend, ((self.num_heads, "heads"),))

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return all projections and the two matmuls that compute and apply the scores."""
        mean = (self.head_dim + self.value_size) / 2
        scores = Scores(
            self.num_heads,
            "heads",
            mean,
            INDEX_TOPK if self.is_sparse else "",
            storage="none" if self.is_absorbed else score_storage(self.backend),
            query=self._absorbed_query if self.is_absorbed else self._query,
            keys=(self._shared_key,) if self.is_absorbed else (self._query, self._value),
            mixed=self._context,
        )
        selecting = () if self.indexer is None else self.indexer.operations
        outside = ("norm", "out", *(() if self.indexer is None else self.indexer.params))
        weights = [name for name in self.params if not name.endswith(outside)]
        return *map(Matmul, weights), *selecting, scores, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Return the input, the output, the latents before and after their norms, the queries, and
        the attention output.
        """
        latents = tuple((4.0, dims) for _, dims in self._normed)
        mixed = ((1.0, self._query), (1.0, self._value))
        held = Held(compute_dtype=((2.0, self._width), *latents, *mixed))
        return held if self.indexer is None else held + self.indexer.traffic

    @property
    def backward_peak(self) -> Held:
        """Return the score and the probability of each token pair.

        Sparse attention computes few pairs at once, and holds the gradients of its inputs.
        Blockwise attention adds block-ordered copies of the attention inputs. Kernels that need a
        dense mask add gradient arrays for each packed document.
        """
        held = NOTHING if self.indexer is None else self.indexer.backward_peak
        if self.is_absorbed:
            wide = (1.0, self._absorbed_query), (1.0, self._shared_key)
            return Held(
                compute_dtype=((1.0, self._absorbed_query), (1.0, self._context)), float32=wide
            )
        if score_storage(self.backend) == "mask":
            return held + Held(pairs=(1.0, 0.0, 0.0), documents=((4.0, self._query),))
        held += Held(pairs=(1.0, 1.0, 0.0))
        if score_storage(self.backend) == "block":
            narrow = ((1.5, self._query), (1.5, self._value))
            held += Held(compute_dtype=narrow, float32=((1.0, self._value),))
        return held

    @property
    def residuals(self) -> Held:
        """Return the inputs of all matmuls, the rotation angles, and two float32 statistics of each
        softmax.

        Each token pair has a mask bit, a float32 score and a probability. Each query block saves
        the keys and values that it reads. Backends that recompute scores save one statistic per
        query token and nothing per pair.
        """
        narrow = ((1.0, self._width), (1.0, self._query), (1.0, self._value))
        keys = ((1.0, self._query), (1.0, self._value))
        turned, heads = (2.0, ((self.rope_size, ""),)), ((self.num_heads, "heads"),)
        if self.is_absorbed:
            queries = (1.0, self._absorbed_query), (1.0, self._unrotated)
            inputs = (1.0, self._width), (1.0, self._shared_key), *queries
            held = Held(compute_dtype=(*inputs, (1.0, self._context), (1.0, self._value)))
            held += Held(float32=(turned, (1.0, heads)), selections=1)
        elif score_storage(self.backend) == "scores":
            wide, pairs = (turned, (2.0, heads)), (1.0, 1.0, 1.0)
            held = Held(compute_dtype=narrow, float32=wide, blocks=keys, pairs=pairs)
        else:
            held = Held(compute_dtype=(*narrow, *keys), float32=(turned, (1.0, heads)))
        for norm, dims in self._normed:
            held += norm.residuals_of((), dims)
            if dims != self._latent or not self.is_absorbed:  # latents are part of the shared key
                held += Held(compute_dtype=((1.0, dims),))
        return held if self.indexer is None else held + self.indexer.residuals

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of the projections, the cotangents of their outputs, and the arrays
        that the norms save.
        """
        del normed
        turned = ((self.rope_size, "head_dim"),)
        width = (1.0 if recomputed else 2.0, self._width)
        held = Held(compute_dtype=(width, (2.0, self._value)))
        held += Held(compute_dtype=((1.0, self._query), (1.0, self._unrotated)))
        if self.is_absorbed:
            key = self._shared_key if recomputed else turned
            held += Held(compute_dtype=((2.0, self._context), (1.0, key)))
        else:
            held += Held(compute_dtype=((1.0, self._latent), (1.0, turned)))
        for norm, dims in self._normed:
            # If `recomputed` is set, the input of each norm is counted instead of its output.
            held += norm.deferred_of((), dims, recomputed=recomputed)
            held += Held(compute_dtype=((1.0 if dims == self._latent else 2.0, dims),))
        return held if self.indexer is None else held + self.indexer.deferred(recomputed=recomputed)

    @property
    def _normed(self) -> tuple[tuple[RMSNorm, Dims], ...]:
        """Return the norm of each latent and the dims of that norm's input."""
        own = ((self.query_norm, self._query_latent),) if self.q_lora_rank else ()
        return (*own, (self.norm, self._latent))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _latent(self) -> Dims:
        return ((self.rank, "norm"),)

    @property
    def _query_latent(self) -> Dims:
        return ((self.q_lora_rank, "norm"),)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_dim, "head_dim"))

    @property
    def _unrotated(self) -> Dims:
        return ((self.num_heads, "heads"), (self.rest_size, "head_dim"))

    @property
    def _absorbed_query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.rope_size + self.rank, "head_dim"))

    @property
    def _shared_key(self) -> Dims:
        return ((self.rope_size + self.rank, "head_dim"),)

    @property
    def _context(self) -> Dims:
        """Return the dims of the attention output, which consists of latents if absorbed."""
        latents = ((self.num_heads, "heads"), (self.rank, "head_dim"))
        return latents if self.is_absorbed else self._value

    @property
    def _value(self) -> Dims:
        return ((self.num_heads, "heads"), (self.value_size, "head_dim"))
