"""Grouped-query attention with RoPE over packed sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import attention
from maxpipe.nn.attention import BACKENDS
from maxpipe.nn.attention.context_parallel import attend
from maxpipe.nn.attention.interface import KVCache, Mask
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel import scopes
from maxpipe.parallel.batch_arrays import IMAGE_TOKENS_LEFT, ROTARY_POSITIONS
from maxpipe.parallel.collectives import (
    FULL_SEGMENT_IDS,
    full_sequence_length,
    gather_sequences,
    mark_varying,
)
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

# Llama 3.1: wavelengths above the original context length are fully scaled. Wavelengths below a
# quarter of that length are not scaled.
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0
# YaRN's beta: pairs that rotate at least 32 times are not scaled, and pairs that rotate at most
# once are fully scaled.
_FAST_TURNS = 32.0
_SLOW_TURNS = 1.0


def rotary_frequencies(
    rope: attention.Rope, head_dim: int, context: LayerContext
) -> Float[Array, " half"]:
    """Return the rotation angle per position for each pair of dims, as a float32 array `[H / 2]`.

    The angles are 0 in layers without rotary positions.
    """
    frequencies = _scaled_frequencies(rope, head_dim, context)
    if rope.scaled:
        plain = attention.Rope(rope.theta, rotary_dims=rope.rotary_dims)
        unscaled = _scaled_frequencies(plain, head_dim, context)
        frequencies = jnp.where(context.number(rope.scaled) > 0, frequencies, unscaled)
    return frequencies * context.number(rope.enabled) if rope.enabled else frequencies


def rotary_positions(
    rope: attention.Rope, inputs: Mapping[str, Any], num_pairs: int
) -> Int[Array, "B T"] | Int[Array, "B T pairs"]:
    """Return the positions by which tokens are rotated: one position per token, or one per pair of
    dims if the batch has 3-D positions.
    """
    if not rope.sections or ROTARY_POSITIONS not in inputs:
        return inputs["positions"]
    pairs = np.arange(num_pairs)
    dims = np.zeros(num_pairs, np.int32)
    for dim in (1, 2):
        dims[(pairs % 3 == dim) & (pairs < 3 * rope.sections[dim])] = dim
    return inputs[ROTARY_POSITIONS][..., dims]


def rotary_length(rope: attention.Rope, context: LayerContext) -> float | Float[Array, ""]:
    """Return the factor by which the rotated dims of this layer are multiplied."""
    length = rope.attention_factor
    if length == 1.0:
        return length
    for name in (rope.scaled, rope.enabled):
        if name:
            length = jnp.where(context.number(name) > 0, length, 1.0)
    return length


def _scaled_frequencies(
    rope: attention.Rope, head_dim: int, context: LayerContext
) -> Float[Array, " half"]:
    """Return the rotation angles of layers with rotary positions and scaling.

    Source: arXiv:2104.09864; `llama3` follows the released Llama 3.1 models.
    """
    turned = rope.rotary_dims or head_dim
    exponent = jnp.arange(0, turned, 2, dtype=jnp.float32) / turned
    theta = context.number(rope.theta)
    if rope.scaling == "dynamic" and rope.factor != 1.0:
        theta *= _ntk_base_factor(rope, turned, context)
    frequencies = theta**-exponent
    stretch = rope.stretch
    if rope.stretch_beyond and _max_visible_tokens(context) > rope.original_tokens:
        stretch = rope.stretch_beyond
    if stretch:
        frequencies /= jnp.asarray(stretch, jnp.float32)
    if rope.rotated_pairs:
        is_rotated = np.arange(len(frequencies)) < rope.rotated_pairs
        frequencies = jnp.where(is_rotated, frequencies, 0.0)
    if rope.factor == 1.0 or rope.scaling == "dynamic":
        return frequencies
    factor = context.number(rope.factor)
    if rope.scaling == "linear":
        return frequencies / factor
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies, context)
    turns = rope.original_tokens * frequencies / (2 * math.pi)
    low, high = rope.slow or _LOW_FREQUENCY_FACTOR, rope.fast or _HIGH_FREQUENCY_FACTOR
    blend = (turns - low) / (high - low) if low < high else (turns > low).astype(jnp.float32)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / factor)


def scale_queries(
    query: Float[Array, "B T N H"], scaling: attention.QueryScaling, context: LayerContext
) -> Float[Array, "B T N H"]:
    """Multiply each query by a factor that grows with the logarithm of its position."""
    periods = (context.inputs["positions"] + scaling.offset) // scaling.tokens
    factor = 1.0 + context.number(scaling.beta) * jnp.log1p(periods.astype(jnp.float32))
    return (query.astype(jnp.float32) * factor[..., None, None]).astype(query.dtype)


def _ntk_base_factor(
    rope: attention.Rope, turned: int, context: LayerContext
) -> float | Float[Array, ""]:
    longer = max(_max_visible_tokens(context) / rope.original_tokens, 1.0)
    more = context.number(rope.factor) * (longer - 1.0) + 1.0
    return more ** (turned / (turned - 2))


def _max_visible_tokens(context: LayerContext) -> int:
    """Return the maximum number of tokens that a query token can attend to, as a static value."""
    cache = context.cache
    return full_sequence_length(context.inputs) if cache is None else cache.key.shape[1]


def _yarn(
    rope: attention.Rope, frequencies: Float[Array, " half"], context: LayerContext
) -> Float[Array, " half"]:
    """Interpolate between scaled and unscaled frequencies with a ramp over pair indices.

    The ramp is linear in the logarithm of a pair's rotation count. In most released models, the
    ramp boundaries are integers (arXiv:2309.00071).
    """
    turned, theta = 2 * len(frequencies), context.number(rope.theta)

    def pair(turns: float) -> Float[Array, ""]:
        """Return the fractional index of the pair that completes this many rotations over the
        original context.
        """
        wavelength = rope.original_tokens / (turns * 2 * math.pi)
        return turned * math.log(wavelength) / (2 * jnp.log(theta))

    low, high = pair(rope.fast or _FAST_TURNS), pair(rope.slow or _SLOW_TURNS)
    if rope.truncate:
        low, high = jnp.floor(low), jnp.ceil(high)
    low, high = jnp.maximum(low, 0), jnp.minimum(high, turned - 1)
    ramp = (jnp.arange(turned // 2) - low) / jnp.maximum(high - low, 1e-3)
    stretched = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (1.0 - stretched + stretched / context.number(rope.factor))


@jax.named_scope(scopes.part(scopes.ROTARY))
def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"] | Int[Array, "B T half"],
    frequencies: Float[Array, " half"],
    length: float | Float[Array, ""] = 1.0,
    backend: str = "xla",
    *,
    interleaved: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotate each pair of dims (i, i + half) by its token's angle; leave all other dims unchanged.

    `positions` can contain one position per pair. If `interleaved` is set, the pairs are (2i,
    2i + 1). The rotated dims are scaled by `length`. On TPU, a matmul with a permutation matrix
    swaps the dims of each pair, which is five times faster than moving data between lanes.
    """
    by_pair = positions if positions.ndim == 3 else positions[..., None]
    angles = by_pair.astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    if not isinstance(length, float) or length != 1.0:
        cos, sin = cos * length, sin * length
    if backend == "splash":
        return _rotate_by_matmul(interleaved, *mark_varying((x, cos, sin)))
    half = len(frequencies)
    turned, unrotated = jnp.split(x.astype(jnp.float32), (2 * half,), axis=-1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        parts = [pairs.reshape(turned.shape)]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*parts, *([unrotated] if unrotated.size else [])], axis=-1).astype(
        x.dtype
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_by_matmul(
    interleaved: bool,
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T 1 half"],
    sin: Float[Array, "B T 1 half"],
) -> Float[Array, "B T N H"]:
    """Rotate with a matmul, which is exact because each sum has only one nonzero term.

    The matmul is exact for bfloat16 at any precision setting, and for float32 at the highest
    precision.
    """
    half, size = cos.shape[-1], x.shape[-1]
    padding = [(0, 0)] * 3 + [(0, size - 2 * half)]
    pairs, order = [cos, cos, -sin, sin], np.arange(2 * half).reshape(2, half)
    if interleaved:
        pairs, order = [jnp.repeat(each, 2, axis=-1) for each in (cos, sin)], order.reshape(half, 2)
        pairs[1] *= jnp.tile(jnp.asarray([-1.0, 1.0]), half)
        order = order[:, ::-1]
    else:
        pairs, order = (
            [jnp.concatenate(each, axis=-1) for each in (pairs[:2], pairs[2:])],
            order[::-1],
        )
    cos, sin = jnp.pad(pairs[0], padding, constant_values=1.0), jnp.pad(pairs[1], padding)
    order = np.concatenate([order.reshape(-1), np.arange(2 * half, size)])
    swapped = jnp.einsum(
        "btnh,hk->btnk",
        x,
        np.eye(size, dtype=x.dtype)[:, order],
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _rotate_forward(
    interleaved: bool, x: Array, cos: Array, sin: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _rotate_by_matmul(interleaved, x, cos, sin), (cos, sin)


def _rotate_backward(
    interleaved: bool, angles: tuple[Array, Array], grad: Array
) -> tuple[Array, None, None]:
    """Rotate the cotangent by the negative angles. This avoids summing low-precision gradients."""
    cos, sin = angles
    return _rotate_by_matmul(interleaved, grad, cos, -sin), None, None


_rotate_by_matmul.defvjp(_rotate_forward, _rotate_backward)


class Attention(SpecModule):
    """Self-attention with G key/value heads and N query heads."""

    query: nnx.Param
    key: nnx.Param
    value: nnx.Param
    out: nnx.Param
    sinks: nnx.Param
    query_norm: nnx.Param
    key_norm: nnx.Param

    def __init__(self, part: attention.Attention, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Compute causal attention within document segments and within the window, if any."""
        part, dtype, rules = self.part, x.dtype, self.rules
        segments, positions = context.inputs["segment_ids"], context.inputs["positions"]
        frequencies = rotary_frequencies(part.rope, part.head_dim, context)
        split = context.split(rules, attention=True)
        query, *rest = self._projected(x, split, context.max_abs)
        if part.shared_from:
            shape = (part.num_kv_heads, part.head_dim)
            rest = [context.carried[name] for name in part.carried]
            rest = [each.reshape(*each.shape[:-1], *shape) for each in rest]
        key, value = rest[0], rest[-1]
        gate = None
        if part.gated:
            query, gate = jnp.split(query, 2, axis=-1)
            gate = checkpoint_name(gate, "query_gate")
        if part.head_norm is not None:
            query = rms_norm(query, self.query_norm[...], part.head_norm)
            if not part.shared_from:
                key = rms_norm(key, self.key_norm[...], part.head_norm)
        if part.value_norm is not None and not part.shared_from:
            value = rms_norm(value, None, part.value_norm)
        heads, kv_heads = (None, None, "heads", "head_dim"), (None, None, "kv_heads", "head_dim")
        rotate_heads = partial(
            rotate,
            positions=rotary_positions(part.rope, context.inputs, len(frequencies)),
            frequencies=frequencies,
            length=rotary_length(part.rope, context),
            backend=part.backend,
            interleaved=part.rope.interleaved,
        )
        query = rotate_heads(query)
        key = key if part.shared_from else rotate_heads(key)
        if part.rotary_norm is not None:
            query, key = (self._rotary_normed(each, context) for each in (query, key))
        if part.query_scaling is not None:
            query = scale_queries(query, part.query_scaling, context)
        query, key = constrain(query, heads, rules), constrain(key, kv_heads, rules)
        value = constrain(value, kv_heads, rules)
        query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
        value = checkpoint_name(value, "value")
        carried: dict[str, Array] = {}
        if part.stored_as:
            flat = (each.reshape(*each.shape[:2], -1) for each in (key, value))
            carried = dict(zip(part.carried, map(split.split_tokens, flat), strict=True))
        inputs = context.inputs
        if part.chunked:
            inputs = self._with_chunks(inputs, context)
        mask = Mask(
            inputs["segment_ids"],
            window=context.count(part.window) if part.window else 0,
            windows=context.counts(part.window) if part.window else (),
            scale=part.scale,
            soft_cap=part.soft_cap,
            sinks=self.sinks[...] if part.sinks else None,
            image_tokens_left=inputs.get(IMAGE_TOKENS_LEFT) if part.image_tokens else None,
            image_tokens=part.image_tokens,
        )
        if context.recorder is not None:
            context.recorder.record_attention(query, key, mask)
        context.record("value", value)
        cache = context.cache
        if cache is not None:
            cache = cache.append(key, value, segments, positions)
            key, value = cache.key, cache.value
            mask = replace(
                mask,
                positions=positions,
                key_segments=cache.segments,
                key_positions=cache.positions,
            )
            if part.chunked:
                chunks = self._chunk_ids(cache.segments, cache.positions, context)
                mask = replace(mask, key_segments=chunks)
        mixed = attend(BACKENDS[part.backend], query, key, value, mask, inputs, rules)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        out = split.row_parallel(mixed, self.out[...].astype(dtype), part.params["out"].axes)
        out = self._with_bias("out", out)
        return Output(checkpoint_name(out, "attention_out"), cache=cache, carried=carried)

    def _rotary_normed(
        self, x: Float[Array, "B T N H"], context: LayerContext
    ) -> Float[Array, "B T N H"]:
        """Return the normalized queries or keys, unchanged in layers without rotary positions."""
        rope, norm = self.part.rope, self.part.rotary_norm
        assert norm is not None
        normed = rms_norm(x, None, norm)
        if not rope.enabled:
            return normed
        # Products with 0 and 1 are exact.
        enabled = jnp.asarray(context.number(rope.enabled), x.dtype)
        return enabled * normed + (1 - enabled) * x

    def _with_chunks(self, inputs: Mapping[str, Any], context: LayerContext) -> Mapping[str, Any]:
        """Return the inputs with one segment per chunk of a document, so that no backend needs to
        know about chunks.
        """
        segments, positions = inputs["segment_ids"], inputs["positions"]
        changed = {"segment_ids": self._chunk_ids(segments, positions, context)}
        if FULL_SEGMENT_IDS in inputs:
            positions = gather_sequences(positions, 1)
            full = self._chunk_ids(inputs[FULL_SEGMENT_IDS], positions, context)
            changed[FULL_SEGMENT_IDS] = full
        return {**inputs, **changed}

    def _chunk_ids(
        self, segments: Int[Array, "B S"], positions: Int[Array, "B S"], context: LayerContext
    ) -> Int[Array, "B S"]:
        """Return a segment ID for each chunk. Padding and empty cache slots keep their IDs.

        IDs increase along a sequence. If a document has more than `count` chunks before its first
        token in the sequence, IDs can wrap around. Chunks with equal IDs are then further apart
        than the window.
        """
        window = context.count(self.part.window)
        smallest = min(filter(None, context.counts(self.part.window)), default=1)
        count = full_sequence_length(context.inputs) // smallest + 2
        chunks = segments * count + positions // jnp.maximum(window, 1) % count
        return jnp.where((window > 0) & (segments > 0), chunks, segments)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache of keys (after RoPE) and values for each key/value head."""
        return KVCache.empty((rows, tokens, part.num_kv_heads, part.head_dim), dtype)

    @staticmethod
    def cache_window(part: Any) -> str:
        """Return the name of the per-layer window, or "" if rotary factors depend on the cache
        size.
        """
        return "" if part.rope.stretch_beyond else part.window

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each `KVCache` array."""
        del part
        return KVCache.axes()

    def _projected(
        self,
        x: Float[Array, "B T D"],
        split: SequenceParallel,
        largest: Float[Array, "B T 1"] | None,
    ) -> list[Float[Array, "B T N H"]]:
        """Return the projected queries, keys and, if they are separate, values, split into
        heads.
        """
        names, params = self.part.inputs, self.part.params
        weights = [getattr(self, name)[...].astype(x.dtype) for name in names]
        projections = split.column_parallel(
            x, weights, [params[name].axes for name in names], largest
        )
        return [self._with_bias(*pair) for pair in zip(names, projections, strict=True)]

    def _with_bias(self, name: str, x: Float[Array, "B T *dims"]) -> Float[Array, "B T *dims"]:
        if name not in self.part.biased:
            return x
        return x + getattr(self, f"{name}_bias")[...].astype(x.dtype)
