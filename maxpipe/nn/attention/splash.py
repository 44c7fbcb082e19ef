"""Attention with jax's splash kernels for TPUs. Scores never leave on-chip memory.

The kernels read the indices of the query tokens and, for each query block, a list of its visible
key blocks. The lists and indices can be runtime arrays, so a device can hold any chunks of a
sequence. This module uses private entry points, because jax has no public entry point for the
backward pass. Tests check that these entry points are unchanged.

Source: FlashAttention-2 (arXiv:2307.08691), as in `jax.experimental.pallas.ops.tpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import interface, xla
from maxpipe.nn.attention.interface import Mask, switch_window
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import map_shards, mark_varying

LANES = 128
"""Every block size is a multiple of this number."""
_LONG = 4096
"""Minimum sequence length for which large blocks are used. Larger blocks need fewer kernel steps,
each with a fixed overhead, but waste a larger share of the work on the half-masked diagonal."""


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
    interpret: bool


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

    def run(window: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        kernel = _kernel(query, key, seen.places, window, call)

        def one(
            query: Array, key: Array, value: Array, ids: kernels.SegmentIds
        ) -> tuple[Array, Array]:
            mixed, (sums,) = kernel(query, key, value, segment_ids=ids, sinks=sinks)
            return mixed, sums

        scored = _num_scored_pairs(query, key, window, call) * (query.shape[-1] + value.shape[-1])
        with jax.named_scope(scopes.flops(2 * scored)):
            return jax.vmap(one)(query, key, value, _ids(seen))

    arrays = (
        _scale_queries(_swap_heads_and_tokens(query), call),
        _swap_heads_and_tokens(key),
        _swap_heads_and_tokens(value),
    )
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

    def run(window: int, *arrays: Array) -> tuple[Array, Array, Array]:
        query, key, value = arrays[:3]
        kernel = _kernel(query, key, seen.places, window, call)

        def one(ids: kernels.SegmentIds, *arrays: Array) -> tuple[Array, Array, Array]:
            query, key, value, mixed, sums, d_mixed = arrays
            lists = kernel.dq_mask_info, kernel.dkv_mask_info
            saved = (query, key, value, ids, None, mixed, sums, *lists)
            return _backward_kernels(kernel.kwargs, saved, d_mixed)

        # Two kernels run: one with three matmuls for query gradients, and one with four matmuls for
        # key gradients. The scope applies to each kernel, so it declares half of the total FLOPs.
        sizes = (4 * query.shape[-1] + 3 * value.shape[-1]) / 2
        with jax.named_scope(scopes.flops(2 * _num_scored_pairs(query, key, window, call) * sizes)):
            return jax.vmap(one)(_ids(seen), *arrays)

    arrays = (
        _scale_queries(_swap_heads_and_tokens(query), call),
        _swap_heads_and_tokens(key),
        _swap_heads_and_tokens(value),
    )
    results = _swap_heads_and_tokens(mixed), sums, _swap_heads_and_tokens(d_mixed)
    d_query, d_key, d_value = switch_window(run, seen.window, call.windows, (*arrays, *results))
    return (
        _swap_heads_and_tokens(_scale_queries(d_query, call)),
        _swap_heads_and_tokens(d_key),
        _swap_heads_and_tokens(d_value),
    )


def _backward_kernels(
    settings: dict[str, Any], saved: tuple[Any, ...], d_mixed: Array
) -> tuple[Array, Array, Array]:
    """Run the backward kernels for one sequence through jax's differentiation rule."""
    gradients = kernels._splash_attention_bwd(  # pyright: ignore[reportPrivateUsage]
        False,
        settings["mask_value"],
        settings["is_mqa"],
        settings["block_sizes"],
        None,
        settings["mask_function"],
        settings["attn_logits_soft_cap"],
        settings["interpret"],
        saved,
        d_mixed,
    )
    return gradients[3:6]


def _swap_heads_and_tokens(x: Array) -> Array:
    """Swap [B, T, N, H] and [B, N, T, H]."""
    return jnp.swapaxes(x, 1, 2)


def _scale_queries(x: Array, call: SplashOptions) -> Array:
    """Multiply queries or their gradients by the score scale, which the kernels do not apply."""
    return (x.astype(jnp.float32) * call.scale).astype(x.dtype)


def _ids(seen: _SplashMask) -> kernels.SegmentIds:
    return kernels.SegmentIds(seen.segments, seen.key_segments)


# Blocks.


@dataclass(frozen=True)
class CausalWindowMask:
    """Causal and window mask computed from token indices, ignoring document boundaries."""

    causal: bool
    window: int

    def __call__(self, places: Any, keys: Any) -> Any:
        """Return the mask of (query, key) pairs. The splash kernels call this method."""
        near = places - keys < self.window
        if not self.causal:
            return near
        return (places >= keys) & near if self.window else places >= keys

    def intersects_block(self, first: Any, size: int, first_keys: Any, size_keys: int) -> Any:
        """Return whether any query token of a query block attends to any key of a key block, given
        the start indices of both blocks.
        """
        if not (self.causal or self.window):
            return np.ones((len(first), len(first_keys)), bool)
        first, last = first[:, None], first[:, None] + size - 1
        near = first - (first_keys + size_keys - 1) < self.window
        if not self.causal:
            return near
        return (last >= first_keys) & near if self.window else last >= first_keys


def attention_block_size(tokens: int, head_dim: int) -> int:
    """Return the query or key block size for `tokens` contiguous tokens."""
    most = 1024 if tokens >= _LONG and head_dim <= LANES else 512
    sizes = range(LANES, min(tokens, most) + 1, LANES)
    return max(size for size in sizes if tokens % size == 0)


def _blocks(query: Array, key: Array, call: SplashOptions) -> tuple[int, int]:
    """Return the block sizes of query tokens and of keys."""
    size = max(query.shape[-1], key.shape[-1])
    return attention_block_size(call.run, size), attention_block_size(key.shape[-2], size)


def _num_scored_pairs(query: Array, key: Array, window: int, call: SplashOptions) -> float:
    """Return the number of (query, key) pairs in the blocks for which a kernel computes scores.

    The number covers all sequences and heads. For query tokens with explicit indices, the result is
    the mean over devices.
    """
    rows, heads, tokens, _ = query.shape
    size, size_keys = _blocks(query, key, call)
    first, first_keys = np.arange(0, key.shape[-2], size), np.arange(0, key.shape[-2], size_keys)
    seen = CausalWindowMask(call.causal, window).intersects_block(
        first, size, first_keys, size_keys
    )
    return rows * heads * tokens * key.shape[-2] * float(seen.mean())


def _kernel(
    query: Array, key: Array, places: Array | None, window: int, call: SplashOptions
) -> kernels.SplashAttentionKernel:
    """Return the kernel for queries [B, N, T, H] and keys [B, G, S, H]."""
    size, size_keys = _blocks(query, key, call)
    sees = CausalWindowMask(call.causal, window)
    where: Any = np.arange(query.shape[-2], dtype=np.int32) if places is None else places
    first, first_keys = where[::size], np.arange(0, key.shape[-2], size_keys)
    seen = sees.intersects_block(first, size, first_keys, size_keys)
    most = (len(first_keys), len(first))
    if call.causal and window:  # upper bounds that hold for any order of query blocks
        most = ((size + window - 2) // size_keys + 2, (size_keys + window - 2) // size + 2)
    plain = not (call.causal or window)  # keys are masked only across document boundaries
    by_query, by_key = _visible_blocks(seen, most[0]), _visible_blocks(seen.T, most[1])
    known = {"mask_next": None, "partial_mask_blocks": None}
    known |= {"q_sequence": None if plain else where}
    rows = MaskInfo(data_next=by_query[0][None], block_mask=by_query[1][None], **known)
    columns = MaskInfo(data_next=by_key[0].T[None], block_mask=by_key[1].T[None], **known)
    sizes = kernels.BlockSizes(
        block_q=size,
        block_kv=size_keys,
        block_kv_compute=_key_step_size(size_keys),
        block_q_dkv=size,
        block_kv_dkv=size_keys,
        block_kv_dkv_compute=_key_step_size(size_keys),
        block_q_dq=size,
        block_kv_dq=size_keys,
        use_fused_bwd_kernel=False,  # the fused kernel stores one query gradient per key block
    )
    return kernels.SplashAttentionKernel(
        rows,
        rows,
        columns,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=True,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=call.soft_cap or None,
        residual_checkpoint_name=None,
        mask_function=None if plain else sees,
        interpret=call.interpret,
    )


def _key_step_size(block: int) -> int:
    """Return the number of keys in a block for which a kernel computes scores at a time."""
    return block // 2 if block % (2 * LANES) == 0 and block > 512 else block


def _visible_blocks(seen: Bool[Any, "I J"], most: int) -> tuple[Any, Any]:
    """Return the indices `[I, j]` of each block's visible blocks, and a mask of the valid indices.

    Invalid indices repeat the last visible block, so the kernel fetches no additional block. `most`
    is the maximum number of visible blocks.
    """
    kind: Any = np if isinstance(seen, np.ndarray) else jnp
    count = seen.sum(1, keepdims=True)
    width = min(seen.shape[1], most)
    width = int(count.max()) if kind is np else width
    narrow = np.int8 if seen.shape[1] <= 128 else np.int16
    place = kind.minimum(np.arange(width), kind.maximum(count - 1, 0))
    order = kind.argsort(~seen, axis=1, stable=True)
    numbers = kind.take_along_axis(order, place, axis=1)
    return numbers.astype(narrow), (np.arange(width) < count).astype(np.int8)
