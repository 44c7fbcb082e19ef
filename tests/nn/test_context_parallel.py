"""Attention over the context axis: outputs and gradients equal those of plain attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from maxpipe.nn.attention import xla
from maxpipe.nn.attention.context_parallel import attend
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel.axes import ContextAttention
from maxpipe.parallel.collectives import (
    FULL_SEGMENT_IDS,
    gather_sequences,
    local_shard,
    sum_over,
)
from maxpipe.parallel.mesh import CONTEXT, TENSOR
from maxpipe.parallel.sharding import AxisRules
from tests.cases import TOLERANCE

TOKENS, SIZE = 48, 4
DOCUMENTS = np.array([[17], [30]])
"""Start of the second document of each sequence."""


class Layout(NamedTuple):
    context: int
    method: str
    ulysses_size: int = 0
    heads: int = 8
    kv_heads: int = 4
    tensor: int = 1
    window: int = 0
    soft_cap: float = 0.0


LAYOUTS = [
    Layout(4, "all_gather", window=30),
    Layout(4, "ring", soft_cap=2.0),
    # With one head for each device, fewer key/value heads are replicated.
    Layout(4, "ulysses"),
    Layout(4, "ulysses", kv_heads=1, window=7),
    Layout(4, "ulysses", heads=12, kv_heads=6),
    Layout(4, "ulysses", tensor=2),
    Layout(4, "ulysses", kv_heads=1, tensor=2),
    Layout(4, "ulysses_ring", 2),
    Layout(4, "ulysses_ring", 2, kv_heads=1, window=9, soft_cap=2.0),
    Layout(8, "ulysses_ring", 4, heads=4, kv_heads=1),
    Layout(6, "ulysses_ring", 3, heads=6, kv_heads=2, window=20),
    Layout(4, "ulysses_ring", 2, kv_heads=2, tensor=2),
    Layout(4, "ulysses_ring", 1),
    Layout(4, "ulysses_ring", 4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_context_parallel_attention_equals_plain_attention(layout: Layout) -> None:
    mesh = jax.make_mesh(
        (layout.context, layout.tensor),
        (CONTEXT, TENSOR),
        devices=jax.devices()[: layout.context * layout.tensor],
        axis_types=(AxisType.Auto,) * 2,
    )
    method = ContextAttention(layout.method, layout.ulysses_size)
    rules = AxisRules((), context_attention=method)
    random = np.random.default_rng(0)
    counts = (layout.heads, layout.kv_heads, layout.kv_heads, layout.heads)
    query, key, value, cotangent = (
        jnp.asarray(random.normal(size=(2, TOKENS, count, SIZE)), jnp.float32) for count in counts
    )
    sinks = jnp.asarray(random.normal(size=layout.heads), jnp.float32)
    segments = jnp.asarray(np.arange(TOKENS) >= DOCUMENTS, jnp.int32)

    def mask(segments: Any, sinks: Any) -> Mask:
        return Mask(segments, window=layout.window, soft_cap=layout.soft_cap, sinks=sinks)

    def plain(query: Any, key: Any, value: Any, sinks: Any) -> tuple[Any, Any]:
        output = xla.attend(query, key, value, mask(segments, sinks))
        return (output * cotangent).sum(), output

    def on_device(arrays: Any) -> tuple[Any, Any]:
        *arrays, sinks = arrays
        query, key, value, own, slope = (local_shard(x, 1) for x in (*arrays, segments, cotangent))
        inputs = {FULL_SEGMENT_IDS: segments}
        output = attend(xla.attend, query, key, value, mask(own, sinks), inputs, rules)
        return sum_over((output * slope).sum(), CONTEXT), gather_sequences(output, 1)

    def parallel(*arrays: Any) -> tuple[Any, Any]:
        specs = (PartitionSpec(), PartitionSpec(CONTEXT))
        run = jax.shard_map(
            on_device, in_specs=PartitionSpec(), out_specs=specs, axis_names={CONTEXT}
        )
        total, copies = run(arrays)
        return total, copies[: len(DOCUMENTS)]

    arrays = (query, key, value, sinks)
    with jax.set_mesh(mesh):
        wanted, found = (
            jax.jit(jax.grad(run, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
            for run in (plain, parallel)
        )
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=TOLERANCE * float(abs(other).max()))


@pytest.mark.parametrize(
    ("method", "heads", "exchanging", "ring", "copies"),
    [
        (ContextAttention("auto", 0, 4), (8, 4), 4, 1, 4),
        (ContextAttention("auto", 0, 4), (8, 2), 1, 1, 2),
        (ContextAttention("ulysses", 0, 8), (8, 2), 8, 1, 8),
        (ContextAttention("ulysses", 0, 4), (12, 6), 4, 1, 12),
        (ContextAttention("ring", 2, 4), (8, 4), 1, 4, 4),
        # Without a size, no key/value head is copied.
        (ContextAttention("ulysses_ring", 0, 8), (8, 4), 4, 2, 4),
        (ContextAttention("ulysses_ring", 0, 8, 2), (8, 4), 2, 4, 4),
        (ContextAttention("ulysses_ring", 0, 8, num_slices=4), (8, 8), 2, 4, 8),
        (ContextAttention("ulysses_ring", 0, 6), (9, 9), 3, 2, 9),
        (ContextAttention("ulysses_ring", 0, 8), (8, 1), 1, 8, 1),
        (ContextAttention("ulysses_ring", 4, 8), (8, 1), 4, 2, 4),
        (ContextAttention("ulysses_ring", 4, 1), (8, 1), 1, 1, 1),
    ],
)
def test_sizes_of_groups_and_ring(
    method: ContextAttention, heads: tuple[int, int], exchanging: int, ring: int, copies: int
) -> None:
    assert method.exchange_size(*heads) == exchanging
    assert method.ring_size(*heads) == ring
    assert method.exchanged_kv_heads(*heads) == copies
