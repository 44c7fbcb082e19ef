"""Lists of selected keys: the kernel in interpret mode and plain JAX, compared with NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn import key_compaction
from maxpipe.nn.key_compaction import compact


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize(
    ("num_keys", "size", "density"),
    [(300, 128, 0.2), (4100, 1024, 0.03), (700, 256, 1.0), (200, 128, 0.0)],
    ids=["one tile", "many tiles", "all keys", "no keys"],
)
def test_selected_keys_are_listed_in_order(
    num_keys: int, size: int, density: float, interpret: bool
) -> None:
    """The second of three blocks is used. Its second sequence has fewer keys than the first."""
    draw = np.random.default_rng(num_keys)
    words = draw.integers(1, 2**32, (3, 2, num_keys), dtype=np.uint32)
    words[draw.random(words.shape) >= density] = 0
    words[1, 1, num_keys // 2 :] = 0
    run = jax.jit(partial(compact, size=size, interpret=interpret))
    places, found, count = run(jnp.asarray(words), jnp.int32(1))
    assert places.shape == found.shape == (2, -(-num_keys // size) * size)
    for sequence in range(2):
        (expected,) = np.nonzero(words[1, sequence])
        assert count[sequence] == len(expected)
        padding = places.shape[1] - len(expected)
        full = np.pad(expected, (0, padding), constant_values=num_keys)
        np.testing.assert_array_equal(places[sequence], full)
        listed = np.pad(words[1, sequence, expected], (0, padding))
        np.testing.assert_array_equal(found[sequence], listed)


def test_long_lists_do_not_fit_the_memory_of_a_core() -> None:
    """The default core has 16 MiB, and a key needs 36 bytes."""
    fits = [key_compaction._fits(keys) for keys in (2**17, 2**18, 2**19)]
    assert fits == [True, True, False]
