"""Attention to a sliding window and to compressed entries over packed sequences, with caches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import compressed_attention
from maxpipe.models.layers.compressed_attention import Compression, EntryIndexer
from maxpipe.models.layers.indexer import LOSS
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.attention_layer import rotary_frequencies, rotate
from maxpipe.nn.compressed_entries import (
    AttendBlocks,
    Compress,
    EntryTarget,
    Tokens,
    Windows,
    attend,
    complete_windows,
    recomputed,
    visible_entries,
)
from maxpipe.nn.indexer import (
    DivergenceOptions,
    IndexArrays,
    divergence,
    select_in_blocks,
    tie_cotangents,
)
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_HEADS = (None, None, "heads", "head_dim")

Series = tuple[Float[Array, "B T F"], ...]
"""Projected values and gates of tokens, from which entries are computed."""


class CompressedCache(NamedTuple):
    """Cache of one layer: the most recent tokens, and the entries of all complete windows.

    The entry of a window is in the slot of the block in which the window ends
    (`compressed_entries.Windows`), so slots depend only on the number of tokens.
    """

    keys: Float[Array, "B W H"]
    """Keys of the most recent tokens."""
    series: tuple[Series, ...]
    """Projections of the most recent tokens for entries, and for index keys if there is an
    indexer."""
    tokens: Tokens
    """Documents and positions of the most recent tokens."""
    entries: tuple[Float[Array, "B E H"], ...]
    """Entries, and index keys if there is an indexer."""
    entry_tokens: Tokens
    """Documents and positions of the entries."""
    length: Int[Array, ""]
    """Number of cached tokens per sequence."""


class _Compressed(NamedTuple):
    """Entries that attention can use, and the state from which the next entries are computed."""

    entries: tuple[Array, ...]
    tokens: Tokens
    series: tuple[Series, ...]


class CompressedAttention(SpecModule):
    """Self-attention with N query heads and one vector per token as key and value."""

    query_down: nnx.Param
    query_norm: nnx.Param
    query_up: nnx.Param
    key_value: nnx.Param
    key_value_norm: nnx.Param
    sinks: nnx.Param
    group_out: nnx.Param
    out: nnx.Param
    index_query: nnx.Param
    index_weights: nnx.Param

    def __init__(self, part: compressed_attention.CompressedAttention, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Compute causal attention within document segments."""
        part, dtype, cache = self.part, x.dtype, context.cache
        split = context.split(self.rules, attention=True)
        frequencies = rotary_frequencies(part.rope, part.head_dim, context)
        turn = partial(_rotate_last, frequencies=frequencies)
        new = Tokens(context.inputs["segment_ids"], context.inputs["positions"])
        latent = split.unsharded_matmul(x, self.query_down[...].astype(dtype))
        latent = checkpoint_name(latent, "query_latent")
        latent = rms_norm(latent, self.query_norm[...], part.query_norm)
        axes = part.params["query_up"].axes
        (query,) = split.column_parallel(latent, [self.query_up[...].astype(dtype)], [axes])
        query = turn(rms_norm(query, None, part.head_norm), new.positions)
        query = checkpoint_name(constrain(query, _HEADS, self.rules), "query")
        key = split.unsharded_matmul(x, self.key_value[...].astype(dtype))
        key = checkpoint_name(self._whole(split.gather_tokens(key)), "key")
        key = rms_norm(key, self.key_value_norm[...], part.key_norm)
        key = self._whole(turn(key[:, :, None], new.positions)[:, :, 0])
        index = None
        if part.indexer is not None:
            index = self._index(x, latent, new, turn, split)
        tokens, keys = new, key
        if cache is not None:
            tokens = cache.tokens.join(new)
            keys = jnp.concatenate([cache.keys, key], axis=1)
        compressed = self._compress(x, tokens, turn, context, split)
        if index is not None:
            index = index._replace(key=compressed.entries[1])
            if part.losses:
                query, index = tie_cotangents(query, index)
        mixed, losses = self._attend(query, keys, new, tokens, compressed, index, context)
        mixed = checkpoint_name(constrain(mixed, _HEADS, self.rules), "context")
        mixed = constrain(turn(mixed, -new.positions), _HEADS, self.rules)
        out = self._project(mixed, split)
        if cache is not None:
            cache = self._appended(cache, keys, tokens, compressed, x.shape[1])
        return Output(checkpoint_name(out, "attention_out"), losses, cache=cache)

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache. Only the number of entries depends on `tokens`."""
        recent, compression = part.cached_tokens, part.compression
        empty = partial(jnp.zeros, dtype=dtype)
        sizes = () if compression is None else (part.head_dim,)
        sizes += () if part.indexer is None else (part.indexer.head_dim,)
        num_series, rate = (
            (1, 1) if compression is None else (compression.num_series, compression.rate)
        )
        series = tuple((empty((rows, recent, num_series * size)),) * 2 for size in sizes)
        count = -(-tokens // rate) if sizes else 0
        return CompressedCache(
            empty((rows, recent, part.head_dim)),
            series,
            Tokens.empty(rows, recent),
            tuple(empty((rows, count, size)) for size in sizes),
            Tokens.empty(rows, count),
            jnp.zeros((), jnp.int32),
        )

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of the cache, which is replicated because all heads read it."""
        arrays, places = ("batch", None, None), ("batch", None)
        count = (part.compression is not None) + (part.indexer is not None)
        tokens = Tokens._make((places, places))
        return CompressedCache._make(
            (arrays, ((arrays, arrays),) * count, tokens, (arrays,) * count, tokens, ())
        )

    def _compress(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        turn: Any,
        context: LayerContext,
        split: SequenceParallel,
    ) -> _Compressed:
        """Return the entries of all complete windows; `tokens` include cached tokens."""
        part, cache, compression = self.part, context.cache, self.part.compression
        if compression is None:
            return _Compressed((), Tokens.empty(len(x), 0), ())
        earlier = 0 if cache is None else part.cached_tokens
        start = 0 if cache is None else cache.length
        windows = complete_windows(tokens, compression.rate, earlier, start)
        series = [self._series("entry", x, split)]
        norms = {"entry": part.key_norm}
        if part.indexer is not None:
            series.append(self._series("index", lax.stop_gradient(x), split))
            norms["index"] = part.index_norm
        if cache is not None:
            join = lambda old, now: jnp.concatenate([old, now], axis=1)  # noqa: E731
            series = list(jax.tree.map(join, cache.series, tuple(series)))
        entries = tuple(
            self._entries(name, pair, windows, norm, compression, turn)
            for (name, norm), pair in zip(norms.items(), series, strict=True)
        )
        if cache is None:
            return _Compressed(entries, windows.tokens, tuple(series))
        slots = cache.length // compression.rate + jnp.arange(windows.last.shape[1])
        exists = windows.tokens.positions >= 0

        def put(old: Array, entry: Array) -> Array:
            shape = (*exists.shape, *(1,) * (entry.ndim - 2))
            before = old.at[:, slots].get(mode="fill", fill_value=0)
            entry = jnp.where(exists.reshape(shape), entry.astype(old.dtype), before)
            return old.at[:, slots].set(entry, mode="drop")

        entries = tuple(map(put, cache.entries, entries))
        return _Compressed(
            entries, Tokens(*map(put, cache.entry_tokens, windows.tokens)), tuple(series)
        )

    def _series(self, name: str, x: Float[Array, "B T D"], split: SequenceParallel) -> Series:
        """Return the values and gates of tokens."""
        projected = []
        for kind in ("value", "gate"):
            weight = getattr(self, f"{name}_{kind}")[...].astype(x.dtype)
            each = self._whole(split.gather_tokens(split.unsharded_matmul(x, weight)))
            projected.append(checkpoint_name(each, f"{name}_{kind}"))
        return tuple(projected)

    def _entries(
        self,
        name: str,
        series: Series,
        windows: Windows,
        norm: RMSNorm,
        compression: Compression,
        turn: Any,
    ) -> Float[Array, "B E H"]:
        """Return the normalized and rotated entries of windows. The position of an entry is that of
        the window's first token.
        """
        bias, scale = getattr(self, f"{name}_bias")[...], getattr(self, f"{name}_norm")[...]
        places = windows.last, windows.follows
        how = _Entries(Compress(compression.rate, compression.overlaps), norm)
        entries: Any = recomputed(how, (*series, bias, scale), places)
        first = windows.tokens.positions - compression.rate + 1
        return self._whole(turn(self._whole(entries)[:, :, None], first)[:, :, 0])

    def _index(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T r"],
        tokens: Tokens,
        turn: Any,
        split: SequenceParallel,
    ) -> IndexArrays:
        """Return index queries and head weights. Gradients end here, so the indexer is trained only
        by its loss. Matmuls use the compute dtype.
        """
        dtype, split = x.dtype, replace(split, quantizer=None)
        x, latent = lax.stop_gradient(x), lax.stop_gradient(latent)
        axes = self.part.params["index_query"].axes
        (query,) = split.column_parallel(latent, [self.index_query[...].astype(dtype)], [axes])
        query = constrain(turn(query, tokens.positions), _HEADS, self.rules)
        weights = split.unsharded_matmul(x, self.index_weights[...].astype(dtype))
        weights = checkpoint_name(self._whole(split.gather_tokens(weights)), "index_weights")
        empty = jnp.zeros((len(x), 0, query.shape[-1]), dtype)  # replaced by the entries
        return IndexArrays(checkpoint_name(query, "index_query"), empty, weights)

    def _attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S H"],
        new: Tokens,
        tokens: Tokens,
        compressed: _Compressed,
        index: IndexArrays | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "B T N H"], dict[str, Float[Array, ""]]]:
        """Return the attention output before the inverse rotation, and the losses."""
        part, compression = self.part, self.part.compression
        rate = 0 if compression is None or context.cache is not None else compression.rate
        how = AttendBlocks(part.window, part.scale, key.shape[1] - query.shape[1], rate)
        entries = compressed.entries[0] if compressed.entries else key[:, :0]
        selected, losses = None, {}
        if index is not None and part.indexer is not None:
            selected = self._selected(part.indexer, index, new, compressed.tokens, how)
        arrays = key, entries, self.sinks[...].astype(jnp.float32)
        places = new, tokens, compressed.tokens, selected
        targets = context.inputs.get("loss_mask")
        if index is not None and part.losses and targets is not None:
            losses[LOSS] = self._loss(index, (query, arrays, places), how, targets)
        context.record("query", query)
        context.record("key", key)
        return attend(how, query, arrays, places), losses

    def _selected(
        self,
        indexer: EntryIndexer,
        index: IndexArrays,
        tokens: Tokens,
        entries: Tokens,
        how: AttendBlocks,
    ) -> Array | None:
        """Return the entries that the indexer selects, or None for all entries."""
        count = entries.segments.shape[1]
        if not indexer.is_sparse or count <= indexer.top_k:
            return None
        blocks = how.blocks(tokens.segments.shape[1], count)
        seen = [_seen(tokens, entries, *block) for block in blocks]
        return select_in_blocks(index, blocks, seen, indexer.top_k, self.rules)

    def _loss(
        self, index: IndexArrays, attention: Any, how: AttendBlocks, targets: Float[Array, "B T"]
    ) -> Float[Array, ""]:
        """Return the indexer's loss, summed over targets."""
        _, _, (tokens, _, entries, selected) = attention
        blocks = how.blocks(tokens.segments.shape[1], entries.segments.shape[1])
        seen = [_seen(tokens, entries, *block) for block in blocks]
        if selected is not None:
            pairs = zip(seen, blocks, strict=True)
            seen = [each & selected[:, start:stop, :n] for each, (start, stop, n) in pairs]
        options = DivergenceOptions(tuple(blocks), EntryTarget(how, self.rules), self.rules)
        return divergence(index, attention, seen, targets, options)

    def _whole(self, x: Float[Array, "B T size"]) -> Float[Array, "B T size"]:
        """Replicate an array and its cotangent over the tensor axis.

        Otherwise, XLA shards the tokens of some arrays, with collectives that all stages would have
        to execute.
        """
        return constrain(x, (None,) * 3, self.rules)

    def _project(
        self, mixed: Float[Array, "B T N H"], split: SequenceParallel
    ) -> Float[Array, "B T D"]:
        """Project the output of each group of heads, and the projected outputs of all groups."""
        part, dtype = self.part, mixed.dtype
        grouped = mixed.reshape(*mixed.shape[:2], part.num_groups, -1)
        grouped = constrain(grouped, (None, None, "heads", None), self.rules)
        weight = self.group_out[...].astype(dtype)
        grouped = jnp.einsum("btgk,gkr->btgr", grouped, weight)
        grouped = constrain(grouped, (None, None, "heads", None), self.rules)
        grouped = checkpoint_name(grouped, "group_out")
        return split.row_parallel(grouped, self.out[...].astype(dtype), part.params["out"].axes)

    def _appended(
        self,
        cache: CompressedCache,
        keys: Float[Array, "B S H"],
        tokens: Tokens,
        compressed: _Compressed,
        new: int,
    ) -> CompressedCache:
        """Return the cache after `new` more tokens."""
        count = self.part.cached_tokens

        def recent(old: Array, x: Array) -> Array:
            return x[:, x.shape[1] - count :].astype(old.dtype)

        return CompressedCache(
            recent(cache.keys, keys),
            jax.tree.map(recent, cache.series, compressed.series),
            jax.tree.map(recent, cache.tokens, tokens),
            compressed.entries,
            compressed.tokens,
            cache.length + new,
        )


class _Entries(NamedTuple):
    """Function that computes normalized entries."""

    compress: Compress
    norm: RMSNorm

    def __call__(self, arrays: Any, places: Any) -> Float[Array, "B E H"]:
        """Return the entries before RoPE."""
        *inputs, scale = arrays
        return rms_norm(self.compress(inputs, places), scale, self.norm)


def _seen(tokens: Tokens, entries: Tokens, start: int, stop: int, count: int) -> Array:
    """Return the visible entries among the first `count` entries."""
    return visible_entries(tokens.between(start, stop), entries.between(0, count))


def _rotate_last(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, " half"],
) -> Float[Array, "B T N H"]:
    """Rotate the last dims of each head, as pairs (2i, 2i + 1)."""
    split = x.shape[-1] - 2 * len(frequencies)
    turned = rotate(x[..., split:], positions, frequencies, interleaved=True)
    return jnp.concatenate([x[..., :split], turned], axis=-1) if split else turned
