"""Copies between arrays with different dimension orders."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from maxpipe.huggingface import mapping

SHAPES = [(5,), (300,), (5, 7), (300, 513), (3, 260, 5, 2), (1, 270, 1, 259), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_copy_between_any_dimension_orders_preserves_values(
    shape: tuple[int, ...], dtype: type
) -> None:
    draw = np.random.default_rng(3)
    wanted = draw.normal(size=shape).astype(ml_dtypes.bfloat16)
    whole = tuple(slice(1, 1 + size) for size in shape)
    for order in itertools.islice(itertools.permutations(range(len(shape))), 0, None, 5):
        back = np.argsort(order)
        source = wanted.transpose(order).copy().transpose(back)
        for target in (
            np.empty(shape, dtype),
            np.zeros([size + 2 for size in shape], dtype)[whole],  # with gaps
        ):
            mapping.copy(target, source)
            assert (target == wanted.astype(dtype)).all()


def test_copy_writes_only_target_region() -> None:
    around = np.zeros((5, 9), np.float32)
    mapping.copy(around[1:4, 2:6], np.ones((4, 3), np.float32).T)
    assert around.sum() == around[1:4, 2:6].sum() == 12
