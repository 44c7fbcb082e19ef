"""Multi-head latent attention over packed sequences, with a cache of latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from maxpipe.models.layers import latent_attention
from maxpipe.models.layers.indexer import LOSS
from maxpipe.nn.attention import BACKENDS
from maxpipe.nn.attention.context_parallel import attend, gather_keys
from maxpipe.nn.attention.interface import KVCache, Mask
from maxpipe.nn.attention_layer import rotary_frequencies, rotate
from maxpipe.nn.indexer import IndexArrays, indexer_loss, select_keys, tie_cotangents
from maxpipe.nn.module import LayerContext, Output, SpecModule, layer_norm, rms_norm
from maxpipe.nn.sparse_attention import sparse_attend
from maxpipe.parallel.lora_weight import LoraWeight, map_columns, merge_lora
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_HEADS = (None, None, "heads", "head_dim")


class LatentAttention(SpecModule):
    """Self-attention with N heads, whose keys and values are projected from one latent per token.

    The RoPE dims of a head are the last ones. Internally, they are pairs (i, i + half), so RoPE is
    computed as in other families. Weights are reordered instead of activations, because weights are
    smaller. Queries consist of two matmuls, because most kernels and matmuls are slower if a head
    does not fill the lanes of a TPU.
    """

    query: nnx.Param
    query_down: nnx.Param
    query_norm: nnx.Param
    query_up: nnx.Param
    key_value_down: nnx.Param
    rope_key: nnx.Param
    key_value_norm: nnx.Param
    key_value_up: nnx.Param
    out: nnx.Param
    index_query: nnx.Param
    index_key: nnx.Param
    index_key_norm: nnx.Param
    index_key_norm_bias: nnx.Param
    index_weights: nnx.Param

    def __init__(self, part: latent_attention.LatentAttention, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Compute causal attention within document segments."""
        part, dtype, positions = self.part, x.dtype, context.inputs["positions"]
        split = context.split(self.rules, attention=True)
        frequencies = rotary_frequencies(part.rope, part.rope_size, context)
        angles = positions, frequencies, part.rope.attention_factor, part.backend
        latent = self._query_latent(x, split)
        unrotated, front = self._query(latent, split)
        query = jnp.concatenate([unrotated, rotate(front, *angles)], axis=-1)
        query = checkpoint_name(constrain(query, _HEADS, self.rules), "query")
        down = split.unsharded_matmul(x, self.key_value_down[...].astype(dtype))
        small = rms_norm(checkpoint_name(down, "latent"), self.key_value_norm[...], part.norm)
        weight = map_columns(_deinterleave_pairs, self.rope_key[...].astype(dtype))
        turned = split.gather_tokens(split.unsharded_matmul(x, weight))[:, :, None]
        turned = rotate(turned, *angles)
        mask = Mask(context.inputs["segment_ids"], scale=part.scale)
        index = None if part.indexer is None else self._index(x, latent, angles, split)
        if index is not None and part.losses:
            query, index = tie_cotangents(query, index)
        cache, losses = context.cache, {}
        if cache is None and part.is_absorbed:
            assert index is not None
            mixed, losses = self._sparse(query, small, turned, mask, index, context, split)
        elif cache is None:
            mixed, losses = self._expanded(query, small, turned, mask, index, context, split)
        else:
            mixed, cache = self._absorbed(query, small, turned, mask, index, positions, cache)
        out = split.row_parallel(mixed, self.out[...].astype(dtype), part.params["out"].axes)
        return Output(checkpoint_name(out, "attention_out"), losses, cache=cache)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache. A key consists of the RoPE dims and the latent, which is also the
        value. The values of the cache are the index keys, if any.
        """
        both = KVCache.empty((rows, tokens, 1, part.rope_size + part.rank), dtype)
        size = 0 if part.indexer is None else part.indexer.head_dim
        return both._replace(values=jnp.zeros((*both.values.shape[:-1], size), dtype))

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of the cache, which is replicated because all heads read it."""
        del part
        whole = ("batch", None, None, None)
        return KVCache.axes()._replace(keys=whole, values=whole)

    def _query_latent(self, x: Float[Array, "B T D"], split: SequenceParallel) -> Array:
        """Return the normalized query latent, or the input if queries have no latent."""
        part = self.part
        if not part.q_lora_rank:
            return x
        down = split.unsharded_matmul(x, self.query_down[...].astype(x.dtype))
        down = checkpoint_name(down, "query_latent")
        return rms_norm(down, self.query_norm[...], part.query_norm)

    def _query(self, latent: Float[Array, "B T r"], split: SequenceParallel) -> list[Array]:
        """Return the non-RoPE dims `[B, T, N, h]` and the RoPE dims of the queries before RoPE."""
        part = self.part
        name = "query_up" if part.q_lora_rank else "query"
        weight, axes = getattr(self, name)[...].astype(latent.dtype), part.params[name].axes
        weights = [weight[..., : part.rest_size], weight[..., part.rest_size :]]
        weights[1] = map_columns(_deinterleave_pairs, weights[1])
        return split.column_parallel(latent, weights, [axes, axes])

    def _index(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T r"],
        angles: tuple[Any, ...],
        split: SequenceParallel,
    ) -> IndexArrays:
        """Return the inputs of the index scores. Gradients end here, so the indexer is trained only
        by its loss. Matmuls use the compute dtype.
        """
        indexer, dtype, split = self.part.indexer, x.dtype, replace(split, quantizer=None)
        assert indexer is not None
        x, latent = lax.stop_gradient(x), lax.stop_gradient(latent)
        turn = partial(rotate, interleaved=indexer.interleaved)
        axes = indexer.params["index_query"].axes
        (query,) = split.column_parallel(latent, [self.index_query[...].astype(dtype)], [axes])
        query = constrain(turn(query, *angles), _HEADS, self.rules)
        key = split.unsharded_matmul(x, self.index_key[...].astype(dtype))
        norm = self.index_key_norm[...], self.index_key_norm_bias[...], indexer.norm
        key = turn(split.gather_tokens(layer_norm(key, *norm))[:, :, None], *angles)[:, :, 0]
        weights = split.unsharded_matmul(x, self.index_weights[...].astype(dtype))
        return IndexArrays(
            checkpoint_name(query, "index_query"),
            checkpoint_name(key, "index_key"),
            checkpoint_name(split.gather_tokens(weights), "index_weights"),
        )

    def _selected(self, index: IndexArrays | None, mask: Mask) -> Mask:
        """Return the mask with the selected keys."""
        indexer = self.part.indexer
        if index is None or indexer is None or not indexer.is_sparse:
            return mask
        return replace(mask, selected=select_keys(index, mask, indexer.top_k, self.rules))

    def _up(self, dtype: jnp.dtype) -> tuple[Array | LoraWeight, Array | LoraWeight]:
        """Return the projections from latents to the non-RoPE dims of keys `[r, N, h]` and to
        values `[r, N, v]`.
        """
        weight, unrotated = self.key_value_up[...].astype(dtype), self.part.rest_size
        return weight[..., :unrotated], weight[..., unrotated:]

    def _expanded(
        self,
        query: Float[Array, "B T N H"],
        small: Float[Array, "B T r"],
        turned: Float[Array, "B T 1 h"],
        mask: Mask,
        index: IndexArrays | None,
        context: LayerContext,
        split: SequenceParallel,
    ) -> tuple[Float[Array, "B T N v"], Mapping[str, Float[Array, ""]]]:
        """Compute attention with explicit keys and values for each head, and the losses."""
        axes = self.part.params["key_value_up"].axes
        keys, value = split.column_parallel(small, self._up(query.dtype), [axes, axes])
        everywhere = jnp.broadcast_to(turned, (*keys.shape[:3], turned.shape[-1]))
        key = jnp.concatenate([keys, everywhere], axis=-1)
        mask = self._selected(index, replace(mask, shared_dims=self.part.rope_size))
        key = checkpoint_name(constrain(key, _HEADS, self.rules), "key")
        value = checkpoint_name(constrain(value, _HEADS, self.rules), "value")
        if context.recorder is not None:
            context.recorder.record_attention(query, key, mask)
        context.record("value", value)
        inputs, backend = context.inputs, BACKENDS[self.part.backend]
        losses, targets = {}, inputs.get("loss_mask")
        if index is not None and self.part.losses and targets is not None:
            losses[LOSS] = indexer_loss(index, query, key, mask, targets, self.rules)
        return attend(backend, query, key, value, mask, inputs, self.rules), losses

    def _sparse(
        self,
        query: Float[Array, "B T N H"],
        small: Float[Array, "B T r"],
        turned: Float[Array, "B T 1 h"],
        mask: Mask,
        index: IndexArrays,
        context: LayerContext,
        split: SequenceParallel,
    ) -> tuple[Float[Array, "B T N v"], Mapping[str, Float[Array, ""]]]:
        """Compute attention to the selected latents, and the losses."""
        part = self.part
        assert part.indexer is not None
        small = split.gather_tokens(small)
        up_key, up_value = map(merge_lora, self._up(query.dtype))
        if context.recorder is not None:
            self._record(query, small, turned, up_key, mask, context)
        query = constrain(self._absorb(query, up_key), _HEADS, self.rules)
        key = jnp.concatenate([small, turned[:, :, 0]], axis=-1)
        mask, (key, index_key) = gather_keys(mask, (key, index.key), context.inputs)
        targets = context.inputs.get("loss_mask") if part.losses else None
        mixed, loss = sparse_attend(
            query,
            key,
            index._replace(key=index_key),
            mask,
            targets,
            top_k=part.indexer.top_k,
            rope_size=part.rope_size,
        )
        mixed = constrain(jnp.einsum("btnr,rnh->btnh", mixed, up_value), _HEADS, self.rules)
        return mixed, {} if targets is None else {LOSS: loss}

    def _record(
        self, query: Array, small: Array, turned: Array, up_key: Array, mask: Mask, context: Any
    ) -> None:
        """Record the statistics of explicit keys."""
        keys = jnp.einsum("btr,rnh->btnh", small, up_key)
        everywhere = jnp.broadcast_to(turned, (*keys.shape[:3], turned.shape[-1]))
        key = jnp.concatenate([keys, everywhere], axis=-1)
        context.recorder.record_attention(query, key, mask)

    def _absorb(
        self, query: Float[Array, "B T N H"], up_key: Float[Array, "r N h"]
    ) -> Float[Array, "B T N l"]:
        """Return queries for keys that consist of the latent and the RoPE dims."""
        unrotated, turned = jnp.split(query, (self.part.rest_size,), axis=-1)
        return jnp.concatenate([jnp.einsum("btnh,rnh->btnr", unrotated, up_key), turned], axis=-1)

    def _absorbed(
        self,
        query: Float[Array, "B T N H"],
        small: Float[Array, "B T r"],
        turned: Float[Array, "B T 1 h"],
        mask: Mask,
        index: IndexArrays | None,
        positions: Array,
        cache: KVCache,
    ) -> tuple[Float[Array, "B T N v"], KVCache]:
        """Compute attention with the latents themselves as keys and values.

        The up projections are instead applied to the queries and to the attention output.
        """
        up_key, up_value = map(merge_lora, self._up(query.dtype))
        query = self._absorb(query, up_key)
        key = jnp.concatenate([small[:, :, None], turned], axis=-1)
        index_key = key[..., :0] if index is None else index.key[:, :, None]
        cache = cache.append(key, index_key, mask.segments, positions)
        mask = replace(
            mask,
            positions=positions,
            key_segments=cache.segments,
            key_positions=cache.positions,
        )
        if index is not None:
            mask = self._selected(index._replace(key=cache.values[:, 0]), mask)
        values = cache.key[..., : small.shape[-1]]
        mixed = BACKENDS[self.part.backend](query, cache.key, values, mask)
        return jnp.einsum("btnr,rnh->btnh", mixed, up_value), cache


def _deinterleave_pairs(weight: Float[Array, "*dims h"]) -> Float[Array, "*dims h"]:
    """Reorder pairs of dims from (2i, 2i + 1) to (i, i + half)."""
    pairs = weight.reshape(*weight.shape[:-1], -1, 2)
    return pairs.swapaxes(-1, -2).reshape(weight.shape)
