"""cuDNN's attention kernels reimplemented in jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.nn.attention import cudnn
from maxpipe.nn.attention.cudnn import DocumentOffsets, Kernel


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the cuDNN kernels by this module, with at most two documents per sequence."""
    monkeypatch.setattr(cudnn, "forward", forward)
    monkeypatch.setattr(cudnn, "backward", backward)
    monkeypatch.setattr(cudnn, "_supports_packing", lambda: True)
    monkeypatch.setattr(cudnn, "packed_documents", lambda tokens: 2)
    monkeypatch.setitem(cudnn._MASK_VALUE, "float32", -1e30)


def scores(
    kernel: Kernel, query: jax.Array, key: jax.Array, beside: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Return attention scores `[B, N, T, S]` and the document index of each token, if packed."""
    rows, tokens, heads, _ = query.shape
    key = jnp.repeat(key, heads // key.shape[2], axis=2)
    found = jnp.einsum("btnh,bsnh->bnts", query, key) * kernel.scale
    distance = jnp.arange(tokens)[:, None] - jnp.arange(key.shape[1])
    seen = distance >= 0 if kernel.causal else distance == distance
    seen &= (distance < kernel.window) | (kernel.window == 0)
    if not isinstance(beside, DocumentOffsets):
        assert kernel.packed == 1
        return jnp.where(seen, found if beside is None else found + beside, -1e30), None
    assert beside.lengths.shape == (rows, kernel.packed)
    assert beside.starts.shape == (rows, kernel.packed + 1)
    starts, lengths = beside.starts.reshape(-1), beside.lengths.reshape(-1)
    places = jnp.arange(rows * tokens)
    inside = (places >= starts[: len(lengths), None]) & (
        places < starts[: len(lengths), None] + lengths[:, None]
    )
    number = jnp.where(inside.sum(0) == 1, inside.argmax(0), -1).reshape(rows, tokens)
    same = number[:, None, :, None] == number[:, None, None]
    return jnp.where(seen & same, found, -1e30), number


def forward(
    kernel: Kernel, query: jax.Array, key: jax.Array, value: jax.Array, beside: Any
) -> tuple[jax.Array, jax.Array]:
    found, number = scores(kernel, query, key, beside)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(found), value)
    sums = jax.nn.logsumexp(found, axis=-1)
    if number is None:
        return mixed, sums
    rows, heads, tokens = sums.shape
    starts = beside.starts.reshape(-1)[: rows * kernel.packed]
    places = jnp.arange(rows * tokens) - starts[number.reshape(-1)]
    by_document = jnp.full((rows * kernel.packed, heads, tokens), jnp.nan)
    flat = jnp.swapaxes(sums, 1, 2).reshape(-1, heads)
    return mixed, by_document.at[number.reshape(-1), :, places].set(flat)


def backward(
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mixed: jax.Array,
    sums: jax.Array,
    d_mixed: jax.Array,
    beside: Any,
) -> tuple[jax.Array, ...]:
    found, number = scores(kernel, query, key, beside)
    if number is not None:
        starts = beside.starts.reshape(-1)
        places = jnp.arange(number.size) - starts[number.reshape(-1)]
        flat = sums[number.reshape(-1), :, places].reshape(*number.shape, -1)
        sums = jnp.swapaxes(flat, 1, 2)
    count = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(each, count, axis=2) for each in (key, value))
    shares = jnp.exp(found - sums[..., None])
    delta = jnp.einsum("btnh,btnh->bnt", d_mixed, mixed)
    d_scores = shares * (jnp.einsum("btnh,bsnh->bnts", d_mixed, values) - delta[..., None])
    d_query = jnp.einsum("bnts,bsnh->btnh", d_scores, keys) * kernel.scale
    d_keys = jnp.einsum("bnts,btnh->bsnh", d_scores, query) * kernel.scale
    d_values = jnp.einsum("bnts,btnh->bsnh", shares, d_mixed)
    grouped = (each.reshape(*key.shape[:3], count, -1).sum(3) for each in (d_keys, d_values))
    return d_query, *grouped
