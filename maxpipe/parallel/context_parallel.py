"""Sequences whose tokens are sharded over the context axis.

A sequence is divided into 2C chunks, where C is the number of devices along the axis. Device c
holds the chunks c and 2C - 1 - c. Later tokens attend to more tokens than earlier tokens, so this
zig-zag order balances the work between devices (as in Llama 3, arXiv:2407.21783).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from maxpipe.parallel.collectives import all_gather, axis_index, axis_size, mark_varying
from maxpipe.parallel.mesh import CONTEXT

FULL_SEGMENT_IDS = "row_segment_ids"
"""Key of the microbatch array `[B, S]` with the segment ids of the full sequences, which is present
if tokens are sharded."""
_PER_SEQUENCE_ARRAYS = ("example_ids", "source_ids")
"""Batch arrays without a token dim."""


def shard_tokens(batch: Mapping[str, Any], by_row: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return a batch of full sequences with only this device's tokens, and add all segment ids.

    `by_row` contains the names of further arrays without a token dim.
    """
    if axis_size(CONTEXT) == 1:
        return batch
    whole = (*_PER_SEQUENCE_ARRAYS, *by_row)
    local = {name: local_shard(x, dim=1) for name, x in batch.items() if name not in whole}
    return {**batch, **local, FULL_SEGMENT_IDS: batch["segment_ids"]}


def local_positions(tokens: int) -> Int[Array, " T"]:
    """Return the positions in the sequence of the `tokens` tokens that this device holds."""
    return local_shard(mark_varying(jnp.arange(tokens * axis_size(CONTEXT))), dim=0)


def contiguous_length(tokens: int) -> int:
    """Return the number of tokens in each contiguous chunk that this device holds."""
    return tokens if axis_size(CONTEXT) == 1 else tokens // 2


def local_starts(tokens: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the start positions of this device's two chunks, which hold `tokens` tokens."""
    return shard_starts(axis_index(CONTEXT), tokens)


def shard_starts(device: Int[Array, ""], tokens: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the start positions of the two chunks of the given device."""
    run = contiguous_length(tokens)
    return device * run, (2 * axis_size(CONTEXT) - 1 - device) * run


def full_sequence_length(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens (S) of a full sequence, given a microbatch's arrays."""
    return inputs.get(FULL_SEGMENT_IDS, inputs["positions"]).shape[1]


def gather_sequences(x: Array, dim: int) -> Array:
    """Gather all tokens of the sequences along `dim`, in sequence order."""
    return undo_zigzag(all_gather(x, CONTEXT, dim), dim)


def undo_zigzag(x: Array, dim: int) -> Array:
    """Reorder tokens from device order (zig-zag) to sequence order."""
    size = axis_size(CONTEXT)
    if size == 1:
        return x
    pieces = x.reshape(*x.shape[:dim], size, 2, -1, *x.shape[dim + 1 :])
    first, last = (lax.index_in_dim(pieces, half, dim + 1, keepdims=False) for half in (0, 1))
    return jnp.concatenate([first, jnp.flip(last, dim)], axis=dim).reshape(x.shape)


def apply_zigzag(x: Array, dim: int) -> Array:
    """Reorder tokens from sequence order to device order (zig-zag)."""
    size = axis_size(CONTEXT)
    if size == 1:
        return x
    pieces = x.reshape(*x.shape[:dim], 2, size, -1, *x.shape[dim + 1 :])
    first, last = (lax.index_in_dim(pieces, half, dim, keepdims=False) for half in (0, 1))
    return jnp.stack([first, jnp.flip(last, dim)], axis=dim + 1).reshape(x.shape)


def local_shard(rows: Array, dim: int) -> Array:
    """Return this device's two chunks of full sequences."""
    size, place = axis_size(CONTEXT), axis_index(CONTEXT)
    if size == 1:
        return rows
    pieces = rows.reshape(*rows.shape[:dim], 2 * size, -1, *rows.shape[dim + 1 :])
    places = jnp.stack([place, 2 * size - 1 - place])
    selected = jnp.take(pieces, places, axis=dim)
    return selected.reshape(*rows.shape[:dim], -1, *rows.shape[dim + 1 :])
