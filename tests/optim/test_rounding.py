"""Stochastic rounding is unbiased and independent of where an entry is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.optim.update import random_bits, round_stochastically

DRAWS = 10_000


def draw_bits(
    step: int, layers: np.ndarray | None = None, name: str = "w", seed: int = 0
) -> np.ndarray:
    stacked = () if layers is None else layers.shape
    return np.asarray(random_bits(seed, name, jnp.int32(step), layers, (4, 6), (*stacked, 4, 6)))


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of n draws has a standard deviation of at most half a step over sqrt(n)."""
    x = jnp.asarray([1.001, -3.14159, 1e-20, 7e30, 1.0, 0.0, 1 + 2**-9, -(2.0**-133)], "f4")
    run = jax.jit(
        jax.vmap(
            lambda step: round_stochastically(x, random_bits(1, "w", step, None, x.shape, x.shape))
        )
    )
    found = np.asarray(run(jnp.arange(DRAWS)), np.float64)
    near = np.asarray(x.astype(jnp.bfloat16), np.float64)
    step = np.spacing(np.abs(np.asarray(x))) * 2.0**16
    assert (np.abs(found - np.asarray(x, np.float64)) <= step).all()
    error = np.abs(found.mean(0) - np.asarray(x, np.float64))
    assert (error <= 4 * 0.5 * step / np.sqrt(DRAWS)).all()
    exact = near == np.asarray(x, np.float64)
    assert (found[:, exact] == near[exact]).all() and exact.sum() == 3
    assert (np.ptp(found[:, ~exact], axis=0) > 0).all()


def test_non_finite_values_are_unchanged_by_stochastic_rounding() -> None:
    x = jnp.asarray([np.inf, -np.inf, np.nan, np.finfo("f4").max], "f4")
    found = np.asarray(round_stochastically(x, jnp.full(4, 2**32 - 1, jnp.uint32)), "f4")
    assert found[0] == np.inf and found[1] == -np.inf and np.isnan(found[2])


def test_random_bits_are_uniform_and_depend_on_step_name_and_seed() -> None:
    layers = np.arange(6).reshape(2, 1, 3)
    base = draw_bits(3, layers)
    for other in (draw_bits(4, layers), draw_bits(3, layers, "v"), draw_bits(3, layers, seed=1)):
        assert np.mean(base == other) < 0.01
    assert len(np.unique(base)) == base.size
    shape = (1000, 100)
    many = np.asarray(random_bits(0, "w", jnp.int32(0), None, shape, shape)) >> 16
    counts = np.histogram(many, 64, (0, 2**16))[0]
    expected = many.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi squared, 63 degrees: 1e-5
    along = [np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]]
    along += [np.corrcoef(many[:, :-1].ravel(), many[:, 1:].ravel())[0, 1]]
    assert np.abs(along).max() < 0.02


@pytest.mark.parametrize("shape", [(3, 1, 2), (6,), (1, 2, 4)])
def test_random_bits_depend_on_layer_not_stacked_position(shape: tuple[int, ...]) -> None:
    layers = np.array([4, 0, 5, 1, 3, 2, -1, -1][: np.prod(shape)]).reshape(shape)
    plain, stacked = draw_bits(7, np.arange(6)), draw_bits(7, layers).reshape(-1, 4, 6)
    for place, layer in enumerate(layers.ravel()):
        if layer >= 0:
            np.testing.assert_array_equal(stacked[place], plain[layer])


def test_random_bits_are_independent_of_padding() -> None:
    for shape in ((7, 6), (4, 9)):
        padded = np.asarray(random_bits(0, "w", jnp.int32(1), None, (4, 6), shape))
        np.testing.assert_array_equal(padded[:4, :6], draw_bits(1))
