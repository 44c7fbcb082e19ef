"""Kimi delta attention over packed sequences (arXiv:2510.26692).

The decay between two tokens is a vector. Its logarithm can be arbitrarily negative, so factors that
compensate a decay would overflow. Scores are therefore computed from pairs of adjacent blocks: the
decay from a token of the earlier block to a token of the later block is the product of the decay
until the boundary and the decay since the boundary, and both factors are at most 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import kda
from maxpipe.nn.chunked_scan import (
    HeadConvolution,
    RecurrentCache,
    StateUpdate,
    Weights,
    causal_convolution,
    chunk_size,
    cut,
    empty_cache,
    heads_first,
)
from maxpipe.nn.convolution_kernel import Columns
from maxpipe.nn.delta_rule import Chunk, ChunkDecay, l2_normalize, make_chunks
from maxpipe.nn.delta_rule_tile import (
    KimiDeltaTile,
    delta_rule_stack,
    stacked_rows,
    supports_delta_rule,
)
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.nn.recurrent_backends import kernel_shards
from maxpipe.nn.recurrent_context import scan_sequences
from maxpipe.nn.recurrent_kernels import Layout, Operands, TokenMatrices
from maxpipe.parallel.sharding import AxisRules, constrain

_KERNELS = ("conv_query", "conv_key", "conv_value")
_HEADS = (None, None, "heads", None)
_RESET = -1e30
"""Log decay that clears the state. The number is finite, because masks are multiplied with it."""


class KimiDelta(SpecModule):
    """Linear attention with a state of constant size, whose rows decay at different rates."""

    out: nnx.Param

    def __init__(self, part: kda.KimiDelta, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the delta rule causally within document segments. Each segment must be
        contiguous.
        """
        part, rules, dtype = self.part, self.rules, x.dtype
        split = context.split(rules)
        x = split.gather_tokens(x)

        def project(name: str, x: Array) -> Array:
            return split.unsharded_matmul(x, getattr(self, name)[...].astype(dtype))

        latents = [
            checkpoint_name(project(f"{name}_down", x), f"{name}_latent")
            for name in ("forget", "gate")
        ]
        projected = [project(name, x) for name in ("query", "key", "value")]
        projected += [project("forget_up", latents[0]), project("gate_up", latents[1])]
        wide = [checkpoint_name(constrain(x, _HEADS, rules), "kda_inputs") for x in projected]
        write = checkpoint_name(constrain(project("write", x), _HEADS[:3], rules), "kda_write")
        weights = {
            name: getattr(self, name)[...] for name in part.params if name not in part.projections
        }
        rule = _DeltaRule(part)
        read, cache = scan_sequences(rule, weights, (*wide, write), tuple(wide[:3]), context, rules)
        read = checkpoint_name(constrain(read, _HEADS, rules), "state_read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
        return Output(checkpoint_name(out, "kda_out"), cache=cache)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache, whose size does not depend on `tokens`."""
        del tokens
        mixed = jnp.zeros((rows, 0, part.num_heads, part.head_dim), dtype)
        return empty_cache((mixed,) * 3, part.kernel - 1, part.state_shape)

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `RecurrentCache` array."""
        del part
        tail, state = ("batch", None, "heads", None), ("batch", "heads", None, None, None)
        return RecurrentCache((tail,) * 3, ("batch", None), state)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _DeltaRule:
    """The recurrence of Kimi delta attention.

    Its inputs are queries, keys, values, decay logits and output gates, and the logits of the write
    gates.
    """

    part: kda.KimiDelta
    step_weights: ClassVar[tuple[str, ...]] = ("norm",)

    def step(
        self, weights: Weights, state: Float[Array, "B H 1 d d"], chunk: Chunk
    ) -> tuple[Float[Array, "B H 1 d d"], Float[Array, "B H 1 C d"]]:
        """Return the state at the end of a chunk, and the chunk's normalized and gated output."""
        state, read = chunk.pass_state(state)
        read = rms_norm(read, weights["norm"].astype(jnp.float32), self.part.norm)
        gate = jax.nn.sigmoid(chunk.gate.astype(jnp.float32))
        return state, (read * gate).astype(chunk.gate.dtype)

    def state_updates(self, chunks: Chunk) -> StateUpdate:
        """Return the arrays of `chunks` that update the state."""
        return StateUpdate(chunks.key, chunks.value, chunks.known, chunks.keep)

    def chunks(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Chunk:
        """Return all chunks of the sequences."""
        part, (*mixed, forget, gate, write) = self.part, inputs
        head_dim, size = part.head_dim, chunk_size(part, segments.shape[1])
        rows, of = before.prepend_tail(tuple(mixed), segments)
        query, key, value = (
            causal_convolution(weights[name], None, row, of, segments)
            for name, row in zip(_KERNELS, rows, strict=True)
        )
        query, key = l2_normalize(query), l2_normalize(key)
        query, key, value, forget, gate = (
            cut(x, size)
            for x in (
                query * head_dim**-0.5,
                key,
                value,
                _log_decay(weights, forget, segments, before),
                gate,
            )
        )
        own = jnp.eye(size) * (query * key).sum(-1)[..., None]
        mixing = decayed_scores(query, key, forget) + own
        overlap = decayed_scores(key, key, forget)
        decay = ChunkDecay(decay_since_start(forget), decay_until_end(forget))
        write = cut(jax.nn.sigmoid(write.astype(jnp.float32))[..., None], size)
        # Each key head has one value head.
        arrays = (query, key, value, write, (mixing, overlap), decay, gate)
        return make_chunks(*jax.tree.map(lambda x: x[:, :, :, None], arrays))

    def layout(self, inputs: Any, tokens: int) -> Layout | None:
        """Return the options of the TPU kernels, or None if they do not support the sizes."""
        part, query = self.part, inputs[0]
        stack = delta_rule_stack(part)
        heads = part.num_heads // kernel_shards(len(query), part.num_heads).number
        if not supports_delta_rule(part, tokens) or heads % stack:
            return None
        tile = KimiDeltaTile(part.chunk, stack, part.norm, query.dtype)
        matrices = tuple(TokenMatrices(array, part.head_dim) for array in range(5))
        return Layout(tile, part.chunk, matrices, heads // stack, tile.flops(part.head_dim))

    def operands(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Operands:
        """Return the arrays of the TPU kernels."""
        part, (*mixed, forget, gate, write) = self.part, inputs
        head_dim, size = part.head_dim, part.chunk
        convolution = HeadConvolution(before, segments, size)
        tokens = [
            convolution([Columns(head_dim, norm=norm)], x, tail, weights[name])
            for name, x, tail, norm in zip(
                _KERNELS, mixed, before.tail, (head_dim**-0.5, 1.0, 0.0), strict=True
            )
        ]
        forget = _log_decay(weights, forget, segments, before)
        tokens += [heads_first(x, size) for x in (forget, gate)]
        write = cut(jax.nn.sigmoid(write.astype(jnp.float32))[:, :, :, None, None], size)[..., 0]
        stack = delta_rule_stack(part)
        index = jnp.zeros((*write.shape[:2], 1, 1, size), jnp.int32)
        rows = stacked_rows([write], index, stack)
        return Operands((weights["norm"][None, None],), tuple(tokens), rows)


def _log_decay(
    weights: Weights,
    forget: Float[Array, "B T H d"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
) -> Float[Array, "B T H d"]:
    """Return the log decay of the state before each token. At the start of a document, `_RESET`
    clears the state.
    """
    rate, bias = (weights[name].astype(jnp.float32) for name in ("decay", "decay_bias"))
    decay = -jnp.exp(rate)[:, None] * jax.nn.softplus(forget.astype(jnp.float32) + bias)
    last = jnp.concatenate([before.segments[:, -1:], segments[:, :-1]], axis=1)
    return jnp.where((segments != last)[:, :, None, None], _RESET, jnp.maximum(decay, _RESET))


def decayed_scores(
    left: Float[Array, "*dims C d"],
    right: Float[Array, "*dims C d"],
    decay: Float[Array, "*dims C d"],
) -> Float[Array, "*dims C C"]:
    """Return the scores of each token with the earlier tokens of its chunk.

    A score is the sum over d of `left` times `right` times the decay between both tokens. `decay`
    is the log decay of each token. The number of tokens C is a power of two.
    """
    size, block = right.shape[-2], 1
    scores = jnp.zeros((*left.shape[:-1], size), left.dtype)
    while block < size:
        inside = _blocks(decay, block)
        later = _blocks(left, block)[..., 1::2, :, :] * decay_since_start(inside[..., 1::2, :, :])
        earlier = _blocks(right, block)[..., 0::2, :, :] * decay_until_end(inside[..., 0::2, :, :])
        scores += _scores_of_pairs(later, earlier, min(size, kda.BLOCK))
        block *= 2
    return scores


def _scores_of_pairs(
    later: Float[Array, "*dims pairs s d"], earlier: Float[Array, "*dims pairs s d"], base: int
) -> Float[Array, "*dims C C"]:
    """Return the scores of the tokens in the later block of each pair (rows) with the tokens in
    the earlier block (columns), in a matrix of all tokens.
    """
    *dims, pairs, block, head_dim = later.shape
    width = max(2 * block, base)
    rows, columns = [(block, 0), (0, 0)], [(0, block), (0, 0)]
    edges = [(0, 0)] * (len(dims) + 1)
    if width > 2 * block:
        # One matmul for several pairs is faster, although most products are not used.
        later, earlier = jnp.pad(later, edges + rows), jnp.pad(earlier, edges + columns)
        grouped = (*dims, 2 * block * pairs // width, width, head_dim)
        later, earlier = later.reshape(grouped), earlier.reshape(grouped)
    products = jnp.einsum("...cd,...ed->...ce", later, earlier)
    if width > 2 * block:
        pair = jnp.arange(width) // (2 * block)
        products = jnp.where(pair[:, None] == pair, products, 0.0)
    else:
        products = jnp.pad(products, [*edges, (block, 0), (0, block)])
    diagonal = jnp.eye(products.shape[-3], dtype=bool)[:, None, :, None]
    products = jnp.where(diagonal, products[..., None, :], 0.0)
    return products.reshape(*dims, 2 * block * pairs, 2 * block * pairs)


def decay_since_start(decay: Float[Array, "*dims s d"]) -> Float[Array, "*dims s d"]:
    """Return the decay from the start of a block to each token, including the token."""
    return jnp.exp(_masked_sums(jnp.tri(decay.shape[-2]), decay))


def decay_until_end(decay: Float[Array, "*dims s d"]) -> Float[Array, "*dims s d"]:
    """Return the decay from each token, excluding the token, to the end of a block."""
    return jnp.exp(_masked_sums(jnp.tri(decay.shape[-2], k=-1).T, decay))


def _masked_sums(mask: Float[Array, "s s"], decay: Float[Array, "*dims s d"]) -> Array:
    """Return sums of log decays, which have no cancellation, unlike differences of cumulative
    sums.
    """
    return jnp.einsum("ts,...sd->...td", mask, decay, precision=lax.Precision.HIGHEST)


def _blocks(x: Float[Array, "*dims C d"], size: int) -> Float[Array, "*dims blocks size d"]:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])
