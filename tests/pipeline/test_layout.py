"""Layouts: the cut of the layers into chunks, and the way there and back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.pipeline.layout import Layout, pad_vocabulary, padded_vocabulary
from maxpipe.schedule.balance import balanced_cut
from maxpipe.schedule.table import Ring


def even(layers: int, stages: int, repeats: int, shape: str = "loop", outside: int = 0) -> Layout:
    """`layers` of the ring are cut evenly."""
    ring = Ring(stages, repeats, shape)  # type: ignore[arg-type]
    cut = balanced_cut([1.0] * max(layers, ring.num_chunks), ring.num_chunks)
    return Layout(ring, cut, outside)


def layouts(layers: int, stages: int, repeats: int) -> st.SearchStrategy[Layout]:
    numbers = (st.integers(1, layers), st.integers(1, stages), st.integers(1, repeats))
    return st.builds(even, *numbers, st.sampled_from(["loop", "v"]), st.integers(0, 3))


@given(layouts(40, 8, 4))
@settings(max_examples=200, deadline=None)
def test_chunks_are_even_and_in_network_order(layout: Layout) -> None:
    sizes, first = layout.chunk_sizes, layout.first_layer
    assert sizes.shape == first.shape == (layout.ring.num_repeats, layout.ring.num_stages)
    assert sizes.dtype == first.dtype == np.int32
    assert sizes.sum() == layout.num_layers - layout.outside and sizes.max() - sizes.min() <= 1
    assert sizes.max() == layout.layers_per_chunk
    # Each chunk follows the one before it without a gap, wherever the ring has it.
    expected = layout.outside
    for chunk in range(layout.ring.num_chunks):
        stage, repeat = layout.ring.home(chunk)
        assert first[repeat, stage] == expected
        expected += sizes[repeat, stage]
    used = layout.layer_at[layout.layer_at >= 0]
    assert sorted(used.tolist()) == list(range(layout.outside, layout.num_layers))
    assert layout.layer_at.size == np.prod(layout.shape)


# A smaller range: every new shape is compiled.
@given(layouts(9, 4, 3))
@settings(max_examples=25, deadline=None)
def test_stacking_is_undone_and_pads_with_zeros(layout: Layout) -> None:
    layers = 1.0 + np.arange(layout.num_layers * 2, dtype=np.float32).reshape(-1, 2)
    stacked = np.asarray(layout.stack(jnp.asarray(layers)))
    assert stacked.shape == (*layout.shape, 2)
    for repeat in range(layout.shape[0]):
        for stage in range(layout.shape[1]):
            size = layout.chunk_sizes[repeat, stage]
            start = layout.first_layer[repeat, stage]
            np.testing.assert_array_equal(
                stacked[repeat, stage, :size], layers[start : start + size]
            )
            assert not stacked[repeat, stage, size:].any()
    ring = layout.unstack(jnp.asarray(stacked))
    np.testing.assert_array_equal(ring, layers[layout.outside :])
    whole = layout.unstack(jnp.asarray(stacked), jnp.asarray(layers[: layout.outside]))
    np.testing.assert_array_equal(whole, layers)


def test_nothing_reads_the_padding() -> None:
    layout = even(5, 2, 2)
    layers = jnp.arange(5.0)
    padding = jnp.asarray(layout.layer_at < 0).reshape(layout.shape)
    spoiled = jnp.where(padding, jnp.nan, layout.stack(layers))
    np.testing.assert_array_equal(layout.unstack(spoiled), layers)


def test_an_uneven_cut_by_hand() -> None:
    layout = even(6, 2, 2)
    assert layout.chunk_sizes.tolist() == [[2, 2], [1, 1]]
    assert layout.first_layer.tolist() == [[0, 2], [4, 5]]
    assert layout.layer_at.tolist() == [0, 1, 2, 3, 4, -1, 5, -1]


def test_a_cut_on_a_v_by_hand() -> None:
    layout = Layout(Ring(2, 2, "v"), (1, 2, 1, 1))
    assert layout.chunk_sizes.tolist() == [[1, 2], [1, 1]]
    assert layout.first_layer.tolist() == [[0, 1], [4, 3]]
    assert layout.layer_at.tolist() == [0, -1, 1, 2, 4, -1, 3, -1]


def test_layers_in_front_of_the_ring_by_hand() -> None:
    layout = Layout(Ring(2, 1), (2, 1), outside=2)
    assert layout.num_layers == 5 and layout.first_layer.tolist() == [[2, 4]]
    assert layout.layer_at.tolist() == [2, 3, 4, -1]
    stacked = layout.stack(jnp.arange(5.0))
    assert stacked.tolist() == [[[2.0, 3.0], [4.0, 0.0]]]
    assert layout.unstack(stacked, jnp.arange(2.0)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_types_survive(dtype: jnp.dtype) -> None:
    layout = even(3, 2, 1)
    stacked = layout.stack(jnp.arange(3, dtype=dtype))
    assert stacked.dtype == dtype and layout.unstack(stacked).dtype == dtype


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_the_padded_vocabulary_is_the_next_multiple(size: int, shards: int) -> None:
    padded = padded_vocabulary(size, shards)
    assert padded % shards == 0 and size <= padded < size + shards


@pytest.mark.parametrize("dim", [0, 1])
def test_the_vocabulary_is_padded_at_its_end(dim: int) -> None:
    table = jnp.ones((3, 2))
    padded = np.asarray(pad_vocabulary(table, dim, 5))
    assert padded.shape == ((5, 2) if dim == 0 else (3, 5))
    np.testing.assert_array_equal(padded[:3, :2], table)
    assert padded.sum() == table.sum()
    assert pad_vocabulary(table, 0, 3) is table
