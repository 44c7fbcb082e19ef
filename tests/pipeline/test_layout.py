"""Layer layouts: partitioning of layers into chunks, stacking and unstacking."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.pipeline.layout import (
    SINGLE_LAYER_TYPE,
    LayerLayout,
    pad_vocabulary,
    padded_vocab_size,
)
from maxpipe.schedule.table import Ring, balance_layers


def even_layout(
    layers: int, stages: int, repeats: int, shape: str = "loop", outside: int = 0
) -> LayerLayout:
    """Return a layout with `layers` ring layers partitioned evenly."""
    ring = Ring(stages, repeats, shape)  # type: ignore[arg-type]
    cut = balance_layers([1.0] * max(layers, ring.num_chunks), ring.num_chunks)
    return LayerLayout(ring, cut, outside)


def layouts(layers: int, stages: int, repeats: int) -> st.SearchStrategy[LayerLayout]:
    numbers = (st.integers(1, layers), st.integers(1, stages), st.integers(1, repeats))
    return st.builds(even_layout, *numbers, st.sampled_from(["loop", "v"]), st.integers(0, 3))


@given(layouts(40, 8, 4))
@settings(max_examples=200)
def test_chunks_are_balanced_and_in_model_order(layout: LayerLayout) -> None:
    sizes, first = layout.chunk_sizes, layout.first_layer
    assert sizes.shape == first.shape == (layout.ring.num_repeats, layout.ring.num_stages)
    assert sizes.dtype == first.dtype == np.int32
    assert (
        sizes.sum() == layout.num_layers - layout.num_prologue_layers
        and sizes.max() - sizes.min() <= 1
    )
    assert sizes.max() == layout.max_layers_per_chunk
    # Each chunk starts where the previous one ends, on any stage.
    expected = layout.num_prologue_layers
    for chunk in range(layout.ring.num_chunks):
        stage, repeat = layout.ring.locate_chunk(chunk)
        assert first[repeat, stage] == expected
        expected += sizes[repeat, stage]
    used = layout.layer_at[layout.layer_at >= 0]
    assert sorted(used.tolist()) == list(range(layout.num_prologue_layers, layout.num_layers))
    assert layout.layer_at.shape == (*sizes.shape, layout.max_layers_per_chunk)
    assert layout.stacks[SINGLE_LAYER_TYPE].shape == layout.layer_at.shape


# A smaller range, because every new shape is compiled.
@given(layouts(9, 4, 3))
@settings(max_examples=25)
def test_stack_pads_with_zeros_and_unstack_inverts_it(layout: LayerLayout) -> None:
    layers = 1.0 + np.arange(layout.num_layers * 2, dtype=np.float32).reshape(-1, 2)
    stack = layout.stacks[SINGLE_LAYER_TYPE]
    stacked = np.asarray(stack.stack(jnp.asarray(layers)))
    assert stacked.shape == (*stack.shape, 2)
    for repeat in range(stack.shape[0]):
        for stage in range(stack.shape[1]):
            size = layout.chunk_sizes[repeat, stage]
            start = layout.first_layer[repeat, stage]
            np.testing.assert_array_equal(
                stacked[repeat, stage, :size], layers[start : start + size]
            )
            assert not stacked[repeat, stage, size:].any()
    ring = stack.unstack(jnp.asarray(stacked))
    np.testing.assert_array_equal(ring, layers[layout.num_prologue_layers :])
    whole = stack.unstack(jnp.asarray(stacked), jnp.asarray(layers[: layout.num_prologue_layers]))
    np.testing.assert_array_equal(whole, layers)


def test_unstack_ignores_padding() -> None:
    layout = even_layout(5, 2, 2)
    layers = jnp.arange(5.0)
    padding, stack = jnp.asarray(layout.layer_at < 0), layout.stacks[SINGLE_LAYER_TYPE]
    spoiled = jnp.where(padding, jnp.nan, stack.stack(layers))
    np.testing.assert_array_equal(stack.unstack(spoiled), layers)


def test_uneven_layer_partition_example() -> None:
    layout = even_layout(6, 2, 2)
    assert layout.chunk_sizes.tolist() == [[2, 2], [1, 1]]
    assert layout.first_layer.tolist() == [[0, 2], [4, 5]]
    assert layout.layer_at.tolist() == [[[0, 1], [2, 3]], [[4, -1], [5, -1]]]


def test_layer_partition_on_v_ring_example() -> None:
    layout = LayerLayout(Ring(2, 2, "v"), (1, 2, 1, 1))
    assert layout.chunk_sizes.tolist() == [[1, 2], [1, 1]]
    assert layout.first_layer.tolist() == [[0, 1], [4, 3]]
    assert layout.layer_at.tolist() == [[[0, -1], [1, 2]], [[4, -1], [3, -1]]]


def test_prologue_layers_example() -> None:
    layout = LayerLayout(Ring(2, 1), (2, 1), num_prologue_layers=2)
    assert layout.num_layers == 5 and layout.first_layer.tolist() == [[2, 4]]
    assert layout.layer_at.tolist() == [[[2, 3], [4, -1]]]
    stack = layout.stacks[SINGLE_LAYER_TYPE]
    stacked = stack.stack(jnp.arange(5.0))
    assert stacked.tolist() == [[[2.0, 3.0], [4.0, 0.0]]]
    assert stack.unstack(stacked, jnp.arange(2.0)).tolist() == [0, 1, 2, 3, 4]


def test_layer_types_have_separate_stacks() -> None:
    layout = LayerLayout(
        Ring(2, 1), (3, 2), num_prologue_layers=1, layer_types=("c", "a", "b", "a", "b", "b")
    )
    assert (layout.ring_layer_types, layout.prologue_layer_types) == (("a", "b"), ("c",))
    assert layout.layer_type_at.tolist() == [[[0, 1, 0], [1, 1, -1]]]
    assert layout.index_in_type_at.tolist() == [[[0, 0, 1], [0, 1, 0]]]
    assert {kind: stack.max_layers_per_chunk for kind, stack in layout.stacks.items()} == {
        "c": 0,
        "a": 2,
        "b": 2,
    }
    layers = {"a": jnp.array([1.0, 3.0]), "b": jnp.array([2.0, 4.0, 5.0]), "c": jnp.array([0.5])}
    ring, front = layout.stack(layers)
    assert ring["a"].tolist() == [[[1.0, 3.0], [0.0, 0.0]]]
    assert ring["b"].tolist() == [[[2.0, 0.0], [4.0, 5.0]]]
    assert front["c"].tolist() == [0.5] and ring.keys() == {"a", "b"}
    back = layout.unstack(ring, front)
    assert {kind: leaf.tolist() for kind, leaf in back.items()} == {
        kind: leaf.tolist() for kind, leaf in layers.items()
    }
    assert layout.prologue.type_of_layer == ("c",)


@given(layouts(12, 4, 3), st.data())
@settings(max_examples=60)
def test_layers_are_indexed_by_type_and_position(layout: LayerLayout, data: st.DataObject) -> None:
    """The engine finds a layer by its type and its index in the stack of that type."""
    names = st.lists(st.sampled_from("abc"), min_size=layout.num_layers, max_size=layout.num_layers)
    layout = LayerLayout(
        layout.ring, layout.layer_partition, layout.num_prologue_layers, tuple(data.draw(names))
    )
    assert all(layout.stacks[kind].max_layers_per_chunk for kind in layout.ring_layer_types)
    for repeat, stage, position in np.argwhere(layout.layer_at >= 0):
        layer = layout.layer_at[repeat, stage, position]
        kind = layout.ring_layer_types[layout.layer_type_at[repeat, stage, position]]
        stack = layout.stacks[kind]
        found = stack.layer_at.reshape(stack.shape)[
            repeat, stage, layout.index_in_type_at[repeat, stage, position]
        ]
        assert kind == layout.type_of_layer[layer] and found == layer


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_stack_preserves_dtype(dtype: jnp.dtype) -> None:
    layout = even_layout(3, 2, 1)
    stack = layout.stacks[SINGLE_LAYER_TYPE]
    stacked = stack.stack(jnp.arange(3, dtype=dtype))
    assert stacked.dtype == dtype and stack.unstack(stacked).dtype == dtype


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_padded_vocab_size_is_next_multiple_of_shards(size: int, shards: int) -> None:
    padded = padded_vocab_size(size, shards)
    assert padded % shards == 0 and size <= padded < size + shards


@pytest.mark.parametrize("dim", [0, 1])
def test_pad_vocabulary_appends_zeros(dim: int) -> None:
    table = jnp.ones((3, 2))
    padded = np.asarray(pad_vocabulary(table, dim, 5))
    assert padded.shape == ((5, 2) if dim == 0 else (3, 5))
    np.testing.assert_array_equal(padded[:3, :2], table)
    assert padded.sum() == table.sum()
    assert pad_vocabulary(table, 0, 3) is table
