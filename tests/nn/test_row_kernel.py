"""Kernel that adds to scattered rows, in interpret mode."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn import row_kernel


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])
def test_rows_are_added_and_rows_without_a_place_are_ignored(
    interpret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add twice, with three groups of eight rows; two rows have no place."""
    monkeypatch.setattr(row_kernel, "_MAX_GROUP", 8)
    draw = np.random.default_rng(1)
    rows = draw.standard_normal((2, 19, 130)).astype(np.float32)
    places = np.stack([draw.permutation(30)[:19] for _ in range(2)]).astype(np.int32)
    places[:, 17:] = 30
    add = jax.jit(partial(row_kernel.add_rows, interpret=interpret))
    total = row_kernel.new_rows(30, 130)
    expected = np.zeros((30, 130), np.float32)
    for at, more in zip(places, rows, strict=True):
        total = add(total, jnp.asarray(at), jnp.asarray(more))
        np.add.at(expected, at[:17], more[:17])
    np.testing.assert_array_equal(total[:-1, 0], expected)
