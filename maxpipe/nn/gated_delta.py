"""Gated delta rule over packed sequences (arXiv:2412.06464).

`delta_rule` processes all tokens of a chunk at once, and `chunked_scan` passes the recurrent state
from chunk to chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import gated_delta
from maxpipe.nn.chunked_scan import (
    HeadConvolution,
    RecurrentCache,
    StateUpdate,
    Weights,
    chunk_size,
    cut,
    decay_in_chunks,
    decay_rows,
    empty_cache,
)
from maxpipe.nn.convolution_kernel import Columns
from maxpipe.nn.delta_rule import Chunk, ChunkDecay, convolve, joined_kernels, make_chunks
from maxpipe.nn.delta_rule_tile import (
    GatedDeltaTile,
    delta_rule_stack,
    stacked_rows,
    supports_delta_rule,
)
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.nn.recurrent_backends import kernel_shards
from maxpipe.nn.recurrent_context import scan_sequences
from maxpipe.nn.recurrent_kernels import Layout, Operands, TokenMatrices
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_NAMES = ("conv_query", "conv_key", "conv_value", "decay", "decay_bias", "norm")


class GatedDelta(SpecModule):
    """Linear attention with a state of constant size (arXiv:2412.06464)."""

    conv_query: nnx.Param
    conv_key: nnx.Param
    conv_value: nnx.Param
    decay: nnx.Param
    decay_bias: nnx.Param
    norm: nnx.Param
    out: nnx.Param

    def __init__(self, part: gated_delta.GatedDelta, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the delta rule causally within document segments. Each segment must be
        contiguous.
        """
        part, rules, dtype = self.part, self.rules, x.dtype
        split = context.split(rules)
        x = split.gather_tokens(x)
        qkvz, ba = (self._projected(name, x, split) for name in ("qkvz", "ba"))
        mixed = qkvz[..., : part.mixed_size]
        weights = {name: getattr(self, name)[...] for name in _NAMES}
        rule = _DeltaRule(part)
        read, cache = scan_sequences(rule, weights, (qkvz, ba), mixed, context, rules)
        read = checkpoint_name(constrain(read, (None, None, "heads", None), rules), "read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
        return Output(checkpoint_name(out, "delta_out"), cache=cache)

    def _projected(
        self, name: str, x: Float[Array, "B T D"], split: SequenceParallel
    ) -> Float[Array, "B T K E"]:
        """Return a projection, split into key heads."""
        by_key = (*x.shape[:2], self.part.num_key_heads, -1)
        projected = [
            split.unsharded_matmul(x, getattr(self, source)[...].astype(x.dtype)).reshape(by_key)
            for source in self.part.sources[name]
        ]
        joined = projected[0] if len(projected) == 1 else jnp.concatenate(projected, axis=-1)
        return checkpoint_name(constrain(joined, (None, None, "kv_heads", None), self.rules), name)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache, whose size does not depend on `tokens`."""
        del tokens
        mixed = jnp.zeros((rows, 0, part.num_key_heads, part.mixed_size), dtype)
        return empty_cache(mixed, part.kernel - 1, part.state_shape)

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `RecurrentCache` array."""
        del part
        tail, state = ("batch", None, "kv_heads", None), ("batch", "kv_heads", None, None, None)
        return RecurrentCache(tail, ("batch", None), state)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _DeltaRule:
    """The recurrence of the gated delta rule; its inputs are `qkvz` and `ba`."""

    part: gated_delta.GatedDelta
    step_weights: ClassVar[tuple[str, ...]] = ("norm",)

    def step(
        self, weights: Weights, state: Float[Array, "B K r dk dv"], chunk: Chunk
    ) -> tuple[Float[Array, "B K r dk dv"], Float[Array, "B K r C dv"]]:
        """Return the state at the end of a chunk, and the chunk's normalized and gated output."""
        state, read = chunk.pass_state(state)
        dtype = chunk.gate.dtype
        read = rms_norm(read.astype(dtype), weights["norm"], self.part.norm).astype(jnp.float32)
        return state, (read * jax.nn.silu(chunk.gate.astype(jnp.float32))).astype(dtype)

    def state_updates(self, chunks: Chunk) -> StateUpdate:
        """Return the arrays of `chunks` that update the state."""
        return StateUpdate(chunks.key, chunks.value, chunks.known, chunks.keep)

    def chunks(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Chunk:
        """Return all chunks of the sequences."""
        part, (qkvz, ba) = self.part, inputs
        size = chunk_size(part, qkvz.shape[1])
        by_value = (*qkvz.shape[:3], part.group, part.value_size)
        mixed, gate = jnp.split(qkvz, (part.mixed_size,), axis=-1)
        heads = (part.num_key_heads, part.key_size)
        query, key, value = convolve(weights, heads, mixed, segments, before)
        key = cut(key, size)
        query = cut(query * part.key_size**-0.5, size)
        write, forget = _gates(part, weights, ba.astype(jnp.float32))
        decay = decay_in_chunks(forget, segments, before, size)
        scores = [
            jnp.einsum("nbkcd,nbked->nbkce", left, key)[:, :, :, None] * decay.between
            for left in (query, key)
        ]
        return make_chunks(
            query[:, :, :, None],
            key[:, :, :, None],
            cut(value.reshape(by_value), size),
            cut(write[..., None], size),
            (scores[0], scores[1]),
            ChunkDecay(decay.since[..., None], decay.until[..., None]),
            cut(gate.reshape(by_value), size),
        )

    def layout(self, inputs: Any, tokens: int) -> Layout | None:
        """Return the options of the TPU kernels, or None if they do not support the sizes."""
        part, qkvz = self.part, inputs[0]
        stack = delta_rule_stack(part)
        shards = kernel_shards(len(qkvz), part.num_value_heads).number
        if not supports_delta_rule(part, tokens) or part.num_key_heads % shards:
            return None
        heads = part.num_value_heads // shards
        per_step = math.lcm(stack, part.group)
        if heads % per_step:
            return None
        if per_step <= 2 and heads % (2 * per_step) == 0:
            # Instructions of independent heads overlap.
            per_step *= 2
        tile = GatedDeltaTile(part.chunk, stack, part.group, part.norm, qkvz.dtype)
        matrices = (
            TokenMatrices(0, part.key_size),
            TokenMatrices(0, part.key_size, part.key_size),
            TokenMatrices(0, part.value_size, 2 * part.key_size, part.group),
            TokenMatrices(0, part.value_size, part.mixed_size, part.group),
        )
        flops = tile.flops(part.key_size, part.value_size)
        return Layout(tile, part.chunk, matrices, heads // per_step, flops)

    def operands(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Operands:
        """Return the arrays of the TPU kernels."""
        part, (qkvz, ba) = self.part, inputs
        stack = delta_rule_stack(part)
        values = part.group * part.value_size
        columns = (
            Columns(part.key_size, norm=part.key_size**-0.5),
            Columns(part.key_size, norm=1.0),
            *(Columns(values), Columns(values, convolved=False)),
        )
        kernels = joined_kernels(weights, part.num_key_heads)
        convolution = HeadConvolution(before, segments, part.chunk)
        tokens = convolution(columns, qkvz, before.tail, kernels)
        write, forget = _gates(part, weights, ba.astype(jnp.float32))
        decay = decay_rows(forget, segments, before, part.chunk)
        write = cut(write[..., None], part.chunk)[..., 0]
        rows = stacked_rows([decay.total, decay.since, decay.until, write], decay.document, stack)
        return Operands((weights["norm"][None, None],), (tokens,), rows)


def _gates(
    part: gated_delta.GatedDelta, weights: Weights, ba: Float[Array, "B T K e"]
) -> tuple[Float[Array, "B T K r"], Float[Array, "B T K r"]]:
    """Return the write gate and the log decay of the state."""
    heads = (part.num_key_heads, part.group)
    rate, bias = (
        weights[name].reshape(heads).astype(jnp.float32) for name in ("decay", "decay_bias")
    )
    write, forget = jnp.split(ba, 2, axis=-1)
    largest = 2.0 if part.allow_neg_eigval else 1.0
    return largest * jax.nn.sigmoid(write), -jnp.exp(rate) * jax.nn.softplus(forget + bias)
