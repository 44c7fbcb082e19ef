"""Attention with splash kernels for TPUs. Scores never leave on-chip memory.

This module shards the kernels of `splash_kernels` over the mesh, selects their block sizes, and
defines their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import interface, splash_kernels, xla
from maxpipe.nn.attention.interface import Mask, switch_window
from maxpipe.nn.attention.splash_kernels import LANES, BlockSizes, ScoreFunction
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import map_shards, mark_varying

_SHORT_WINDOW = 512
"""Maximum window size for which small blocks are used. Larger blocks need fewer kernel steps, each
with a fixed overhead, but compute more scores outside of the window."""


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    mask: Mask,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N v"]:
    """Compute attention with splash kernels.

    If there is a cache, or the sequence length is not a multiple of the block size, attention in
    plain JAX is used. Config rules exclude both of these cases during training. `interpret` runs
    the kernels as JAX operations on any device.
    """
    tokens, keys = query.shape[1], key.shape[1]
    if not mask.has_places or (mask.run or tokens) % LANES or keys % LANES:
        return xla.attend(query, key, value, mask)
    key_segments = mask.segments if mask.key_segments is None else mask.key_segments
    window = None if isinstance(mask.window, int) else mask.window
    call = SplashOptions(
        windows=(mask.window,) if isinstance(mask.window, int) else mask.windows,
        causal=mask.causal,
        scale=key.shape[-1] ** -0.5 if mask.scale is None else mask.scale,
        soft_cap=mask.soft_cap,
        run=mask.run or tokens,
        shared_dims=mask.shared_dims,
        interpret=interpret,
    )
    seen = _SplashMask(mask.segments, key_segments, mask.places, window)
    key, value = (interface.repeat_kv_heads(array, query.shape[2]) for array in (key, value))
    # The transpose of `mark_varying` sums the gradients of inputs that are replicated across
    # devices.
    return _attention(*mark_varying((query, key, value, mask.sinks, seen)), call)


@dataclass(frozen=True)
class SplashOptions:
    """Static options of a kernel."""

    windows: tuple[int, ...]
    """Window sizes used by the layers. If there are several, the program selects the layer's window
    at run time."""
    causal: bool
    scale: float
    soft_cap: float
    run: int
    """Length of each contiguous run of query tokens."""
    shared_dims: int
    """Number of dims at the end of each key that are equal in all heads."""
    interpret: bool

    def function(self, window: int) -> ScoreFunction:
        """Return the score function of layers with this window."""
        return ScoreFunction(self.causal, window, self.scale, self.soft_cap)


class _SplashMask(NamedTuple):
    """Arrays that determine which keys are visible, as in `Mask`."""

    segments: Int[Array, "B T"]
    key_segments: Int[Array, "B S"]
    places: Int[Array, " T"] | None
    window: Int[Array, ""] | None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    sinks: Float[Array, " N"] | None,
    seen: _SplashMask,
    call: SplashOptions,
) -> Float[Array, "B T N v"]:
    """Compute attention. The differentiation rules run the kernels on each device, within
    `on_shards`.
    """
    return _forward(query, key, value, sinks, seen, call)[0]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    seen: _SplashMask,
    call: SplashOptions,
) -> tuple[Array, tuple[Any, ...]]:
    arrays, heads, _, beside = _specs(query)
    run = map_shards(
        partial(local_forward, call=call),
        (arrays, arrays, arrays, heads, beside),
        (arrays, _heads_first(arrays)),
    )
    mixed, sums = run(query, key, value, sinks, seen)
    # Both arrays get checkpoint names, so that the kernel is not rerun if the output is saved.
    mixed, sums = checkpoint_name(mixed, "context"), checkpoint_name(sums, LOG_SUM)
    return mixed, (query, key, value, sinks, seen, mixed, sums)


def _backward(call: SplashOptions, saved: tuple[Any, ...], d_mixed: Array) -> tuple[Any, ...]:
    query, key, value, sinks, seen, mixed, sums = saved
    arrays, heads, rows, beside = _specs(query)

    def run(*arguments: Any) -> tuple[Any, ...]:
        d_sinks = _sink_gradients(arguments[3], *arguments[5:])
        # The sum is computed here, so that a split backward pass saves the sum instead of its
        # inputs.
        d_sinks = lax.psum(d_sinks, rows) if rows and d_sinks is not None else d_sinks
        return *local_backward(*arguments, call=call), d_sinks

    run = map_shards(
        run,
        (arrays, arrays, arrays, heads, beside, arrays, _heads_first(arrays), arrays),
        (arrays, arrays, arrays, heads),
    )
    gradients = run(query, key, value, sinks, seen, mixed, sums, d_mixed)
    return *gradients, None


_attention.defvjp(_forward, _backward)


def _sink_gradients(
    sinks: Float[Array, " N"] | None,
    mixed: Float[Array, "B T N v"],
    sums: Float[Array, "B N T"],
    d_mixed: Float[Array, "B T N v"],
) -> Float[Array, " N"] | None:
    """Return the gradients of the sinks. A sink has a probability but no value vector."""
    if sinks is None:
        return None
    shares = jnp.exp(sinks.astype(jnp.float32)[:, None] - sums)
    wide = mixed.astype(jnp.float32), d_mixed.astype(jnp.float32)
    return -jnp.einsum("bnt,btnv,btnv->n", shares, *wide).astype(sinks.dtype)


# Sharding over the mesh.


def _specs(query: Array) -> tuple[PartitionSpec, PartitionSpec, tuple[str, ...], _SplashMask]:
    """Return the partition specs of arrays with heads and of per-head arrays, the mesh axes that
    shard sequences, and the partition specs of the mask.
    """
    rows, heads = interface.query_axes(query)
    batch, whole = PartitionSpec(rows), PartitionSpec()
    beside: Any = (batch, batch, whole, whole)
    return PartitionSpec(rows, None, heads), PartitionSpec(heads), rows, _SplashMask(*beside)


def _heads_first(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(spec[0], spec[2], None)


# Computation on one device.


def local_forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    sinks: Float[Array, " N"] | None,
    seen: _SplashMask,
    *,
    call: SplashOptions,
) -> tuple[Float[Array, "B T N v"], Float[Array, "B N T"]]:
    """Compute the output and the float32 log-sum-exp on one device."""

    def run(window: int, *arrays: Any) -> tuple[Array, Array]:
        scored, operands, options = _kernel_call(window, arrays, seen, call)
        scored *= query.shape[-1] + value.shape[-1]
        with jax.named_scope(scopes.flops(2 * scored)):
            return splash_kernels.forward(*operands, sinks=sinks, **options)

    arrays = _kernel_arrays(query, key, value, call)
    mixed, sums = switch_window(run, seen.window, call.windows, arrays)
    return _swap_heads_and_tokens(mixed), sums


def local_backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    sinks: Float[Array, " N"] | None,
    seen: _SplashMask,
    mixed: Float[Array, "B T N v"],
    sums: Float[Array, "B N T"],
    d_mixed: Float[Array, "B T N v"],
    *,
    call: SplashOptions,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G v"]]:
    """Compute the gradients of queries, keys and values on one device."""
    del sinks  # already included in `sums`

    def run(window: int, *arrays: Any) -> tuple[list[Array], list[Array], Array]:
        scored, operands, options = _kernel_call(window, arrays[:3], seen, call)
        scored *= 3 * query.shape[-1] + 2 * value.shape[-1]
        with jax.named_scope(scopes.flops(2 * scored)):
            return splash_kernels.backward(*operands, *arrays[3:], **options)

    arrays = _kernel_arrays(query, key, value, call)
    results = _swap_heads_and_tokens(mixed), sums, _swap_heads_and_tokens(d_mixed)
    gradients = switch_window(run, seen.window, call.windows, (*arrays, *results))
    d_queries, d_keys, d_value = jax.tree.map(_swap_heads_and_tokens, gradients)
    return jnp.concatenate(d_queries, -1), jnp.concatenate(d_keys, -1), d_value


def _kernel_arrays(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G v"],
    call: SplashOptions,
) -> tuple[list[Array], list[Array], Array]:
    """Return the queries, keys and values of a kernel, with heads before tokens.

    The dims that all heads share are separate arrays. The layer concatenated them with the other
    dims, and XLA removes both operations.
    """
    queries, keys = [query], [key]
    if shared := call.shared_dims:
        queries = [query[..., :-shared], query[..., -shared:]]
        keys = [key[..., :-shared], key[..., -shared:][:, :, :1]]
    return jax.tree.map(_swap_heads_and_tokens, (queries, keys, value))


def _kernel_call(
    window: int, arrays: Sequence[Any], seen: _SplashMask, call: SplashOptions
) -> tuple[float, tuple[Any, ...], dict[str, Any]]:
    """Return the number of scored pairs, and the operands and options that both kernels share.

    `arrays` are those of `_kernel_arrays`.
    """
    queries, keys, value = arrays
    sizes, function = _blocks(queries[0], keys[0], value, window, call), call.function(window)
    first = _first_tokens(queries[0], seen, sizes)
    operands = (queries, keys, value, seen.segments, seen.key_segments, first)
    options = {"function": function, "sizes": sizes, "interpret": call.interpret}
    return _num_scored_pairs(queries[0], keys[0], window, call, sizes), operands, options


def _swap_heads_and_tokens(x: Array) -> Array:
    """Swap [B, T, N, H] and [B, N, T, H]."""
    return jnp.swapaxes(x, 1, 2)


def _first_tokens(query: Array, seen: _SplashMask, sizes: BlockSizes) -> Int[Any, " I"]:
    """Return the sequence index of the first token of each query block."""
    if seen.places is not None:
        return seen.places[:: sizes.queries]
    return np.arange(0, query.shape[2], sizes.queries, dtype=np.int32)


# Blocks.


def attention_block_size(tokens: int, head_dim: int, window: int = 0) -> int:
    """Return the query or key block size for `tokens` contiguous tokens."""
    most = 512 if head_dim > LANES or 0 < window <= _SHORT_WINDOW else 1024
    sizes = range(LANES, min(tokens, most) + 1, LANES)
    return max(size for size in sizes if tokens % size == 0)


def _blocks(query: Array, key: Array, value: Array, window: int, call: SplashOptions) -> BlockSizes:
    """Return the block sizes for queries [B, N, T, H] and keys and values [B, G, S, ...]."""
    size = max(query.shape[-1], value.shape[-1])
    keys = attention_block_size(key.shape[-2], size, window)
    at_once = keys // 2 if keys % (2 * LANES) == 0 and keys > 512 else keys
    return BlockSizes(attention_block_size(call.run, size, window), keys, at_once)


def _num_scored_pairs(
    query: Array, key: Array, window: int, call: SplashOptions, sizes: BlockSizes
) -> float:
    """Return the number of (query, key) pairs in the blocks for which a kernel computes scores.

    The number covers all sequences and heads, and does not exclude blocks of different documents.
    For query tokens with explicit indices, the result is the mean over devices.
    """
    rows, heads, tokens, _ = query.shape
    first = np.arange(0, key.shape[-2], sizes.queries)
    first_keys = np.arange(0, key.shape[-2], sizes.keys)
    seen = call.function(window).intersects_block(first, sizes.queries, first_keys, sizes.keys)
    weights = np.where(first[:, None] == first_keys, sizes.diagonal_share, 1) if call.causal else 1
    return rows * heads * tokens * key.shape[-2] * float((seen * weights).mean())
