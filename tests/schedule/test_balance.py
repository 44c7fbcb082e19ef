"""Partitioning layers into chunks."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.schedule.table import balance_layers


def all_cuts(num_layers: int, num_chunks: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, num_layers), num_chunks - 1)
    return [tuple(np.diff([0, *inner, num_layers]).tolist()) for inner in ends]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_balanced_partition_is_optimal(
    costs: list[int], num_chunks: int, first: int, last: int
) -> None:
    num_chunks = min(num_chunks, len(costs))

    def quality(cut: tuple[int, ...]) -> tuple[float, float]:
        ends = np.cumsum(cut)
        sums = [sum(costs[end - size : end]) for end, size in zip(ends, cut, strict=True)]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(value**2 for value in sums)

    cut = balance_layers(costs, num_chunks, first=first, last=last)
    assert sum(cut) == len(costs) and len(cut) == num_chunks and min(cut) >= 1
    assert quality(cut) == min(map(quality, all_cuts(len(costs), num_chunks)))


def test_expensive_loss_head_reduces_layers_of_last_chunk() -> None:
    assert balance_layers([1.0] * 16, 4) == (4, 4, 4, 4)
    assert balance_layers([1.0] * 16, 4, last=2.0) == (5, 5, 4, 2)
    # Two layer types: the expensive layers are spread over chunks.
    assert balance_layers([3.0, 1.0, 1.0, 1.0, 3.0, 3.0], 4) == (1, 3, 1, 1)


def test_equal_layers_are_partitioned_evenly() -> None:
    assert balance_layers([2.0] * 14, 4) == (4, 4, 3, 3)
