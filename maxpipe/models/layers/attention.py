"""Grouped-query self-attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import (
    NOTHING,
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
    ScoreStorage,
)

AUTO = "auto"
"""Placeholder for a backend that has not been selected yet (`maxpipe.models.resolve_auto`). Memory
estimates assume `xla` in this case."""

CANNOT: Mapping[str, frozenset[str]] = {
    AUTO: frozenset(),
    "xla": frozenset(),
    "blockwise": frozenset({"compressed_entries", "image_tokens"}),
    "cudnn": frozenset(
        {"soft_cap", "sinks", "value_size", "index_topk", "compressed_entries", "image_tokens"}
    ),
    "splash": frozenset({"index_topk", "compressed_entries", "image_tokens"}),
}
"""Unsupported attention options, keyed by backend (`model.attention`)."""


LOG_SUM = "attention_lse"
"""Name passed to `jax.ad_checkpoint.checkpoint_name` for the float32 log-sum-exp of each query
token's scores. Backends with a custom gradient save this array with `context`, to recompute the
probabilities."""

_SCORE_STORAGE: Mapping[str, ScoreStorage] = {AUTO: "scores", "xla": "scores", "cudnn": "mask"}


def score_storage(backend: str) -> ScoreStorage:
    """Return the type of the token-pair arrays that a backend stores in memory."""
    return _SCORE_STORAGE.get(backend, "block")


def kept_with_context(backend: str, heads: Dims) -> Mapping[str, Mapping[str, Dims]]:
    """Return the arrays that a backend saves along with `context`, for `Part.saved_with`."""
    return {} if score_storage(backend) == "scores" else {"context": {LOG_SUM: heads}}


Scaling = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): each pair of dims is rotated by `position * theta **
    -exponent`.
    """

    theta: Number
    factor: Number = 1.0
    """Factor by which the wavelengths are multiplied."""
    scaling: Scaling = "linear"
    """RoPE scaling method. `linear` multiplies all wavelengths by `factor`. `dynamic` increases the
    base for sequences (or, in decoding, caches) longer than `original_tokens`. `llama3` multiplies
    wavelengths that fit fewer than four times into `original_tokens`. `yarn` (arXiv:2309.00071)
    multiplies wavelengths that fit fewer than 32 times and also scales the rotated queries and
    keys."""
    original_tokens: int = 0
    """Context length for which the wavelengths were designed."""
    rotary_dims: int = 0
    """Number of leading dims of each head that are rotated. If 0, all dims are rotated."""
    rotated_pairs: int = 0
    """Number of pairs of dims that are rotated, starting with the pair that rotates fastest. The
    other pairs have frequency 0. If 0, all pairs are rotated."""
    stretch: tuple[float, ...] = ()
    """Additional factor for the wavelength of each pair of dims (arXiv:2402.13753). An empty tuple
    means that all factors are 1."""
    stretch_beyond: tuple[float, ...] = ()
    """Replaces `stretch` for sequences (or, in decoding, caches) longer than `original_tokens`."""
    attention_factor: float = 1.0
    """Factor by which the rotated dims are multiplied. A part of the scaling method."""
    truncate: bool = True
    """Whether the boundaries of the YaRN ramp are rounded to integer pair indices."""
    fast: float = 0.0
    """Minimum number of rotations over `original_tokens` for pairs that `llama3` and `yarn` do not
    scale. 0 selects the published value: 4 for `llama3`, 32 for `yarn`."""
    slow: float = 0.0
    """Maximum number of rotations over `original_tokens` for pairs that are scaled by the full
    factor. 0 selects the published value, which is 1."""
    scaled: str = ""
    """Name of the per-layer value that is 1 in layers to which the scaling method applies and 0 in
    all others. If empty, the method applies to all layers."""
    enabled: str = ""
    """Name of the per-layer value that is 1 in layers with rotary positions and 0 in layers without
    (NoPE, arXiv:2305.19466). If empty, all layers have rotary positions."""
    interleaved: bool = False
    """Whether the dims of a pair are adjacent, instead of half of the rotated dims apart."""
    sections: tuple[int, ...] = ()
    """Numbers of pairs that temporal, vertical and horizontal positions rotate (interleaved MRoPE,
    arXiv:2511.21631). Pair 3i + 1 uses vertical positions if i is below the second number, pair
    3i + 2 horizontal positions if i is below the third, and all others temporal positions. An
    empty tuple means that tokens have one position."""


@dataclass(frozen=True)
class QueryScaling:
    """Scaling of queries by position, which sharpens attention over long contexts
    (arXiv:2501.19399).

    A query is multiplied by `1 + beta * log(1 + floor((position + offset) / tokens))`.
    """

    beta: Number
    tokens: int
    """Number of tokens after which the factor first increases."""
    offset: int = 0


@dataclass(frozen=True)
class Attention(Part):
    """Causal grouped-query attention within document segments (arXiv:2305.13245)."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    scale: float | None = None
    """Factor by which the attention scores are multiplied. None selects `head_dim ** -0.5`."""
    window: str = ""
    """Name of the per-layer value that stores the attention window in tokens, including the query
    token. A window of 0 means all tokens."""
    chunked: bool = False
    """Whether each document is divided into chunks of `window` tokens, and a query token attends
    only to tokens of its chunk."""
    soft_cap: float = 0.0
    """Soft cap on the scores: `cap * tanh(scores / cap)`. 0 disables the cap."""
    head_norm: RMSNorm | None = None
    """Norm applied to each query and key before RoPE."""
    joint_norm: bool = False
    """Whether `head_norm` normalizes all heads of a token together, with one scale per dim."""
    value_norm: RMSNorm | None = None
    """Norm without a scale, applied to each value."""
    values_are_keys: bool = False
    """Whether the values are the projected keys before `head_norm` and RoPE, so that values have no
    separate projection."""
    stored_as: str = ""
    """Prefix of the names of the carried arrays (`Model.carried`) that the sublayer sets to its
    keys and values."""
    shared_from: str = ""
    """Prefix of the names of the carried arrays from which the sublayer reads keys and values of an
    earlier layer. The sublayer then projects only queries."""
    rotary_norm: RMSNorm | None = None
    """Norm without a scale, applied to each query and key after RoPE in layers with rotary
    positions."""
    query_scaling: QueryScaling | None = None
    """Scaling of the queries by position, after RoPE."""
    biased: tuple[str, ...] = ()
    """Names of the projections with a bias."""
    gated: bool = False
    """Whether the attention output is multiplied by sigmoid gates (arXiv:2505.06708). The query
    projection also produces the gate logits, as the second half of each head's dims."""
    sinks: bool = False
    """Whether each head has a learned sink logit in the softmax (arXiv:2309.17453, learned as in
    arXiv:2508.10925)."""
    image_tokens: int = 0
    """Number of tokens of an image, which attend to all tokens of the same image. 0 if the model
    has no images."""

    @property
    def options(self) -> frozenset[str]:
        """Return the enabled options that some backends do not support."""
        used = {"soft_cap": self.soft_cap, "sinks": self.sinks, "image_tokens": self.image_tokens}
        return frozenset(name for name, value in used.items() if value)

    @property
    def unsupported(self) -> frozenset[str]:
        """Return the enabled options that the backend does not support."""
        return CANNOT[self.backend] & self.options

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the projections and the scales of the query and key norms."""
        embed, size = (self.d_model, "embed"), (self.head_dim, "head_dim")
        heads, kv_heads = (self.num_heads, "heads"), (self.num_kv_heads, "kv_heads")
        into, out_of = Normal(self.d_model), self.num_heads * self.head_dim
        params = {
            "query": Param(
                (embed, heads, (self._projected, "head_dim")), into, num_contracted_dims=1
            ),
            "key": Param((embed, kv_heads, size), into, num_contracted_dims=1),
            "value": Param((embed, kv_heads, size), into, num_contracted_dims=1),
            "out": Param(
                (heads, size, embed), Normal(out_of, self.out_gain), num_contracted_dims=2
            ),
        }
        params = {name: param for name, param in params.items() if name in (*self.inputs, "out")}
        for name in self.biased:
            dims = (embed,) if name == "out" else params[name].dims[1:]
            params[f"{name}_bias"] = Param(dims, Constant(0.0), decays=False)
        if self.sinks:
            params["sinks"] = Param((heads,), Constant(0.0), decays=False)
        if self.head_norm is not None:
            scale = self.head_norm.params["scale"]
            for name, dims in self._normed_inputs.items():
                norm_scale = replace(scale, dims=dims) if self.joint_norm else scale
                params[f"{name}_norm"] = norm_scale
        return params

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named activations. RoPE has already been applied to `query` and `key`;
        `context` is the attention output.
        """
        activations = {"query": self._query, "key": self._key, "value": self._key}
        activations |= {"query_gate": self._query} if self.gated else {}
        return activations | {"context": self._query, "attention_out": self._width}

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """Return the log-sum-exp, saved along with `context` if the backward pass reads it."""
        return kept_with_context(self.backend, self._heads)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the four projections and the two matmuls that compute and apply the scores."""
        scores = Scores(
            self.num_heads,
            "heads",
            self.head_dim,
            self.window,
            storage=score_storage(self.backend),
            query=self._query,
            keys=(self._key, self._key),
            mixed=self._query,
            chunked=self.chunked,
        )
        inputs = [Matmul(name) for name in self.inputs]
        return *inputs, scores, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Return the input, the output and the activation `context`. The memory traffic of queries
        and keys is counted as part of the scores.
        """
        return Held(compute_dtype=((2.0, self._width), (2.0, self._query)))

    @property
    def backward_peak(self) -> Held:
        """Return the score and the probability of each token pair.

        Blockwise attention adds block-ordered queries and output cotangents, copies of keys and
        values, and the float32 gradients of keys and values. Kernels that need a dense mask add key
        and value gradients for each query head.
        """
        if score_storage(self.backend) == "mask":
            return Held(pairs=(1.0, 0.0, 0.0), documents=((4.0, self._query),))
        held = Held(pairs=(1.0, 1.0, 0.0))
        if score_storage(self.backend) == "block":
            held += Held(
                compute_dtype=((2.0, self._query), (1.0, self._key)), float32=((1.0, self._key),)
            )
        return held

    @property
    def residuals(self) -> Held:
        """Return the inputs of all matmuls, the rotation angles, and two float32 statistics of each
        softmax.

        A sink adds one statistic. Each token pair has a mask bit, a float32 score, the slope of the
        soft cap (if any) and a probability. Each query block saves the keys and values that it
        reads. Backends that recompute scores save one statistic per query token and nothing per
        pair.
        """
        # Gating saves the gate logits, their sigmoids and the gated output.
        narrow = ((1.0, self._width), (5.0 if self.gated else 2.0, self._query))
        # One of the arrays that an earlier layer computed is part of the layer's input.
        shared = 1.0 if self.shared_from else 0.0
        keys = ((2.0 - shared, self._key),)
        turned = self.rope.rotary_dims or self.head_dim
        wide, statistics = ((2.0, ((turned, ""),)),), 2.0 + self.sinks
        held = Held(compute_dtype=narrow, float32=wide)
        if score_storage(self.backend) == "scores":
            pairs = (1.0, 2.0 if self.soft_cap else 1.0, 1.0)
            # Only the last query block reads all keys and values.
            held += Held(
                compute_dtype=((-shared, self._key),),
                float32=((statistics, self._heads),),
                blocks=((2.0, self._key),),
                pairs=pairs,
            )
        else:
            window: tuple[Dims, ...] = ((),) if self.window else ()
            held += Held(
                compute_dtype=keys, float32=((1.0, self._heads),), float32_token_independent=window
            )
        if self.query_scaling is not None:
            held += Held(float32=((1.0, ()),))
        if self.chunked and score_storage(self.backend) != "scores":
            held += Held(float32=((1.0, ()),))  # the segment IDs of chunks
        if self.rotary_norm is not None:
            if self.rope.enabled:
                held += Held(token_independent=((), ()) * 2)
            for dims in (self._query, self._key):
                held += self.rotary_norm.residuals_of(*self._normed(dims))
        if self.head_norm is not None:
            for dims in self._normed_inputs.values():
                held += self.head_norm.residuals_of(*self._normed(dims))
        if self.value_norm is not None and not self.shared_from:
            held += self.value_norm.residuals_of(*self._normed(self._key))
        return held

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of the projections and the cotangents of their outputs.

        Head norms add the arrays that they save. For an attention sink, blockwise backends add only
        its gradient; other backends add its probability and the cotangent of that probability.
        """
        del normed
        width = (1.0 if recomputed else 2.0, self._width)
        gates = (2.0 if recomputed else 1.0) if self.gated else 0.0
        # Without recomputation, one cotangent serves keys and values with a common projection.
        keys = 0.0 if self.shared_from else 2.0
        if "key" in self.inputs and self.values_are_keys and not recomputed:
            keys = 1.0
        held = Held(compute_dtype=(width, (2.0 + gates, self._query), (keys, self._key)))
        if self.sinks:
            both = ((2.0, self._heads),)
            by_blocks = score_storage(self.backend) == "block"
            held += (
                Held(float32_token_independent=(self._heads,)) if by_blocks else Held(float32=both)
            )
        if self.head_norm is None:
            return held
        for name, dims in self._normed_inputs.items():
            norm = self.head_norm.deferred_of(*self._normed(dims), recomputed=recomputed)
            if recomputed:
                held += Held(compute_dtype=((1.0, dims),))  # the norm's input
                # The cotangent of a common projection is saved, not computed from the norm's scale.
                held += NOTHING if self.values_are_keys and name == "key" else norm
            else:
                held += norm
        return held

    def deferred_if_unread(self, saved: frozenset[str]) -> Held:
        """Return the values and probabilities, from which the weight gradient recomputes the input
        of the output projection, minus that input.

        Backends that do not store scores compute this input for the input gradients too.
        """
        if "context" in saved or score_storage(self.backend) == "block":
            return NOTHING
        return Held(compute_dtype=((-1.0, self._query), (1.0, self._key)), pairs=(1.0, 0.0, 0.0))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the projections of the sublayer's input."""
        if self.shared_from:
            return ("query",)
        return ("query", "key") if self.values_are_keys else ("query", "key", "value")

    @property
    def carried(self) -> Mapping[str, Dims]:
        """Return the carried arrays that the sublayer sets or reads, keyed by name."""
        prefix = self.stored_as or self.shared_from
        return {f"{prefix}_key": self._key, f"{prefix}_value": self._key} if prefix else {}

    @property
    def _normed_inputs(self) -> Mapping[str, Dims]:
        """Return the dims of the projections that `head_norm` normalizes."""
        dims = {"query": self._query, "key": self._key}
        return {name: dims[name] for name in self.inputs if name in dims}

    def _normed(self, dims: Dims) -> tuple[Dims, Dims]:
        """Return the dims that index separate norms and the dims over which each norm reduces."""
        if self.joint_norm:
            return (), dims
        return dims[:1], ((self.head_dim, "norm"),)

    @property
    def _projected(self) -> int:
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
