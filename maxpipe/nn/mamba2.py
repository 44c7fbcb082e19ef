"""Mamba-2 over packed sequences (arXiv:2405.21060).

The tokens of a chunk are processed with matmuls, and `chunked_scan` passes the recurrent state from
chunk to chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import mamba2
from maxpipe.nn import convolution_kernel, recurrent_kernels
from maxpipe.nn.chunked_scan import (
    HeadConvolution,
    RecurrentCache,
    StateUpdate,
    Weights,
    causal_convolution,
    chunk_size,
    cut,
    decay_in_chunks,
    decay_rows,
    empty_cache,
    heads_first,
)
from maxpipe.nn.convolution_kernel import Columns
from maxpipe.nn.delta_rule_tile import stacked_rows
from maxpipe.nn.mamba2_tile import Mamba2Tile
from maxpipe.nn.module import LayerContext, Output, SpecModule
from maxpipe.nn.recurrent_backends import kernel_shards
from maxpipe.nn.recurrent_context import scan_sequences
from maxpipe.nn.recurrent_kernels import Layout, Operands, TokenMatrices
from maxpipe.parallel.sharding import AxisRules, constrain
from maxpipe.parallel.tpu_kernels import tpu_cores

_CONVOLVED = ("value", "key", "query")
_PAIRS_PER_MIB, _HEADS_PER_MIB = 2**13, 0.25
"""Largest numbers of token pairs of all heads in a group, and of joined heads, per MiB of memory
that a kernel can use. For v5p, kernels with twice as many did not compile."""


class Chunk(NamedTuple):
    """Float32 arrays of a chunk. Entries for pairs of tokens from different documents are 0."""

    query: Float[Array, "B K C dk"]
    key: Float[Array, "B K C dk"]
    value: Float[Array, "B K r C dv"]
    """Values multiplied by their time steps and by their decay until the end of the chunk."""
    since: Float[Array, "B K r C"]
    """Decay from the start of the chunk to each token."""
    keep: Float[Array, "B K r"]
    """Factor by which the state decays over the chunk."""
    inside: Float[Array, "B K r C dv"]
    """Part of the output that does not depend on the state."""
    gate: Float[Array, "B K r C dv"]
    """Output gate, in the compute dtype."""


class Mamba2(SpecModule):
    """State-space layer with a state of constant size."""

    out: nnx.Param

    def __init__(self, part: mamba2.Mamba2, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the recurrence within document segments. Each segment must be contiguous."""
        part, rules, dtype = self.part, self.rules, x.dtype
        split = context.split(rules)
        x = split.gather_tokens(x)

        def project(name: str) -> Array:
            y = split.unsharded_matmul(x, getattr(self, name)[...].astype(dtype))
            factor = getattr(part.multipliers, name)
            return y if factor == 1.0 else y * factor

        heads = (None, None, "heads", None)
        gate, value = (
            checkpoint_name(constrain(project(name), heads, rules), "gate_value")
            for name in ("gate", "value")
        )
        key, query = (checkpoint_name(project(name), "key_query") for name in ("key", "query"))
        step = checkpoint_name(constrain(project("time_step"), heads[:3], rules), "time_step")
        weights = {
            name: getattr(self, name)[...] for name in part.params if name not in _PROJECTIONS
        }
        mixed, rule = (value, key, query), _StateSpace(part)
        inputs = (gate, *mixed, step)
        read, cache = scan_sequences(rule, weights, inputs, mixed, context, rules)
        read = checkpoint_name(constrain(read, heads, rules), "state_read")
        out = split.reduce_scatter_tokens(
            split.unsharded_matmul(read, self.out[...].astype(dtype), 2)
        )
        return Output(checkpoint_name(out, "mamba_out"), cache=cache)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache, whose size does not depend on `tokens`."""
        del tokens
        value = jnp.zeros((rows, 0, part.num_heads, part.head_dim), dtype)
        key = jnp.zeros((rows, 0, part.num_groups, part.state_size), dtype)
        return empty_cache((value, key, key), part.kernel - 1, part.state_shape)

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `RecurrentCache` array."""
        value, key = ("batch", None, "heads", None), ("batch", None, None, None)
        # The number of heads per group may not be a multiple of the tensor size.
        heads = "heads" if part.num_groups == 1 else None
        state = ("batch", None, heads, None, None)
        return RecurrentCache((value, key, key), ("batch", None), state)  # type: ignore[arg-type]


_PROJECTIONS = ("gate", "value", "key", "query", "time_step", "out")


@dataclass(frozen=True)
class _StateSpace:
    """The recurrence of Mamba-2. Its inputs are gates, values, keys, queries and time steps."""

    part: mamba2.Mamba2
    step_weights: ClassVar[tuple[str, ...]] = ("norm",)

    @property
    def _joined(self) -> int:
        """Return the number of heads that the TPU kernels process as one matrix."""
        return max(recurrent_kernels.LANES // self.part.head_dim, 1)

    def step(
        self, weights: Weights, state: Float[Array, "B K r dk dv"], chunk: Chunk
    ) -> tuple[Float[Array, "B K r dk dv"], Float[Array, "B K r C dv"]]:
        """Return the state at the end of a chunk, and the chunk's gated and normalized output."""
        read = jnp.einsum("bkcd,bkrdv->bkrcv", chunk.query, state)
        read = read * chunk.since[..., None] + chunk.inside
        written = jnp.einsum("bkcd,bkrcv->bkrdv", chunk.key, chunk.value)
        state = chunk.keep[..., None, None] * state + written
        read = read * jax.nn.silu(chunk.gate.astype(jnp.float32))
        if self.part.norm is not None:
            # The mean covers all heads of a group.
            square = jnp.mean(jnp.square(read), axis=(2, 4), keepdims=True)
            scale = weights["norm"].astype(jnp.float32)
            scale = scale.reshape(self.part.num_groups, self.part.group, 1, self.part.head_dim)
            read = read * lax.rsqrt(square + self.part.norm.epsilon) * scale
        return state, read.astype(chunk.gate.dtype)

    def state_updates(self, chunks: Chunk) -> StateUpdate:
        """Return the arrays of `chunks` that update the state."""
        key, keep = chunks.key[..., None, :, :], chunks.keep[..., None]
        return StateUpdate(key, chunks.value, None, keep)

    def layout(self, inputs: Any, tokens: int) -> Layout | None:
        """Return the options of the TPU kernels, or None if they do not support the sizes.

        The heads of a group share keys and a norm, so each device needs complete groups.
        """
        part, gate = self.part, inputs[0]
        joined, size = self._joined, self._kernel_chunk
        shards = kernel_shards(len(gate), part.num_heads // joined).number
        groups, sizes = part.num_groups // shards, (part.state_size, joined * part.head_dim)
        if part.num_groups % shards or part.group % joined or not size or tokens < size:
            return None
        if not convolution_kernel.supports(part.kernel, bias=part.conv_bias):
            return None
        if any(each % recurrent_kernels.LANES for each in (size, *sizes)):
            return None
        epsilon = None if part.norm is None else part.norm.epsilon
        tile = Mamba2Tile(size, joined, part.head_dim, epsilon, gate.dtype)
        widths = (part.state_size, part.state_size, sizes[1], sizes[1])
        matrices = tuple(TokenMatrices(array, width) for array, width in enumerate(widths))
        return Layout(tile, size, matrices, groups, tile.flops(part.state_size, part.group), joined)

    @property
    def _kernel_chunk(self) -> int:
        """Return the number of tokens per chunk of the TPU kernels, or 0 if the heads of a group do
        not fit in the memory of a core.
        """
        heads = max(self.part.group * self.part.head_dim // recurrent_kernels.LANES, 1)
        size, vmem = self.part.chunk, tpu_cores().vmem_mib
        while heads * size**2 > _PAIRS_PER_MIB * vmem:
            size //= 2
        return size if heads <= _HEADS_PER_MIB * vmem else 0

    def operands(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Operands:
        """Return the arrays of the TPU kernels."""
        part, (gate, value, key, query, time_step) = self.part, inputs
        joined, size = self._joined, self._kernel_chunk
        time_step, forget = self._decay(weights, time_step)
        decay = decay_rows(forget, segments, before, size)
        time_step = cut(time_step.reshape(forget.shape)[..., None], size)[..., 0]
        rows = [decay.total, decay.since, decay.until, time_step]

        count, convolution = part.num_heads // joined, HeadConvolution(before, segments, size)

        def convolve(name: str, x: Array, tail: Array, heads: int) -> Array:
            kernel, bias = weights[f"conv_{name}"], weights.get(f"conv_{name}_bias")
            x, tail = (each.reshape(*each.shape[:2], heads, -1) for each in (x, tail))
            kernel = kernel.reshape(heads, -1, part.kernel)
            bias = None if bias is None else bias.reshape(heads, -1)
            return convolution([Columns(x.shape[-1])], x, tail, kernel, bias)

        value, key, query = (
            convolve(name, x, tail, heads)
            for name, x, tail, heads in zip(
                _CONVOLVED,
                (value, key, query),
                before.tail,
                (count, part.num_groups, part.num_groups),
                strict=True,
            )
        )
        gate = heads_first(gate.reshape(*gate.shape[:2], count, -1), size)
        skip = jnp.repeat(weights["skip"][:, None], part.head_dim, axis=1)
        factors = (skip,) if part.norm is None else (skip, weights["norm"])
        shared = (x.reshape(-1, 1, joined * part.head_dim) for x in factors)
        tokens = (query, key, gate, value)
        return Operands(tuple(shared), tokens, stacked_rows(rows, decay.document, 1))

    def chunks(
        self, weights: Weights, inputs: Any, segments: Int[Array, "B T"], before: RecurrentCache
    ) -> Chunk:
        """Return all chunks of the sequences."""
        part, (gate, *mixed, time_step) = self.part, inputs
        size = chunk_size(part, gate.shape[1])
        rows, of = before.prepend_tail(tuple(mixed), segments)
        value, key, query = (
            causal_convolution(
                weights[f"conv_{name}"], weights.get(f"conv_{name}_bias"), row, of, segments
            )
            for name, row in zip(_CONVOLVED, rows, strict=True)
        )
        time_step, forget = self._decay(weights, time_step)
        grouped, skip = forget.shape, weights["skip"].astype(jnp.float32)
        decay = decay_in_chunks(forget, segments, before, size)
        key, query = cut(key, size), cut(query, size)
        written = cut((value * time_step[..., None]).reshape(*grouped, -1), size)
        scores = jnp.einsum("nbkcd,nbked->nbkce", query, key)[:, :, :, None] * decay.between
        kept = cut((value * skip[:, None]).reshape(*grouped, -1), size)
        return Chunk(
            query=query,
            key=key,
            value=written * decay.until[..., None],
            since=decay.since,
            keep=decay.over_chunk,
            inside=scores @ written + kept,
            gate=cut(gate.reshape(*grouped, -1), size),
        )

    def _decay(
        self, weights: Weights, time_step: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T K r"]]:
        """Return the float32 time steps, and the log decay of the state."""
        part = self.part
        bias, rate = (weights[name].astype(jnp.float32) for name in ("time_step_bias", "decay"))
        time_step = jax.nn.softplus(time_step.astype(jnp.float32) + bias)
        if part.min_time_step:
            time_step = jnp.maximum(time_step, part.min_time_step)
        forget = (-jnp.exp(rate) * time_step).reshape(
            *time_step.shape[:2], part.num_groups, part.group
        )
        return time_step, forget
