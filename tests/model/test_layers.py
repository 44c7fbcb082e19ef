"""Norm, MLP, dropout and the draws that parameters start from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.schema import MeshConfig, ModelConfig
from maxpipe.model.layers import GatedMLP, RMSNorm, bell_curve, dropout, residual_gain, weight
from maxpipe.parallel.sharding import AxisRules

RULES = AxisRules.from_config(MeshConfig())
CONFIG = ModelConfig(
    num_layers=8,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=4,
    d_mlp=24,
    vocab_size=32,
    norm_epsilon=1e-3,
)


def assert_close(got: Any, wanted: Any) -> None:
    """Float32: 1e-5 of the largest value."""
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def rms_normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * scale


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(CONFIG)
    np.testing.assert_array_equal(norm.scale[...], np.ones(16))
    scale = np.linspace(0.5, 2.0, 16)
    norm.scale = nnx.Param(jnp.asarray(scale, jnp.float32))
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 16))) * 100 + 7
    assert_close(norm(jnp.asarray(x)), rms_normed(x, scale))
    np.testing.assert_array_equal(norm(jnp.zeros((1, 1, 16))), 0.0)


def test_rms_norm_measures_half_precision_in_float32() -> None:
    # 16 * 200 ** 2 needs more bits than bfloat16 has.
    x = (200 + jnp.arange(16.0)).astype(jnp.bfloat16)[None, None]
    got = RMSNorm(CONFIG)(x)
    assert got.dtype == jnp.bfloat16
    wanted = rms_normed(np.asarray(x, np.float32), np.ones(16))
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2**-8)


def test_gated_mlp_is_swiglu() -> None:
    module = GatedMLP(CONFIG, RULES, nnx.Rngs(params=jax.random.key(0)))
    gate, up, down = (
        np.asarray(getattr(module, name)[...], np.float64) for name in ("gate", "up", "down")
    )
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 5, 16)))
    gated = x.astype(np.float64) @ gate
    wanted = (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
    assert_close(module(jnp.asarray(x)), wanted)


def test_weights_have_the_variance_of_their_fan_in() -> None:
    rngs = nnx.Rngs(params=jax.random.key(0))
    axes = ("embed", "mlp")
    plain = weight(rngs, (400, 50), axes, fan_in=400, dtype="float32")
    assert plain[...].std() == pytest.approx(400**-0.5, rel=0.02)
    gained = weight(rngs, (400, 50), axes, fan_in=400, dtype="float32", gain=0.25)
    assert gained[...].std() == pytest.approx(0.25 * 400**-0.5, rel=0.02)
    assert weight(rngs, (4, 4), axes, fan_in=4, dtype="bfloat16")[...].dtype == jnp.bfloat16
    assert residual_gain(CONFIG) == 0.25


# The draws.


def test_bell_curve_has_the_moments_of_a_normal() -> None:
    values = np.asarray(bell_curve(jax.random.key(3), (200_000,), 2.0), np.float64)
    # Four standard errors of each estimate.
    assert abs(values.mean()) < 4 * 2.0 / len(values) ** 0.5
    assert values.std() == pytest.approx(2.0, rel=4 / (2 * len(values)) ** 0.5)
    assert np.abs(values).max() <= 3.5 * 2.0
    # A sum of four uniforms: 62% to 74% within one deviation, and tails beyond two.
    inside = (np.abs(values) < 2.0).mean()
    assert 0.64 < inside < 0.70
    assert 0.03 < (np.abs(values) > 4.0).mean() < 0.06


def test_bell_curve_is_bounded_and_exact_for_every_word() -> None:
    # The largest sum of four 16-bit integers, from its centre, in standard deviations.
    bound = 2 * (2**16 - 1) / (4 * (2**32 - 1) / 12) ** 0.5
    assert 3.4 < bound < 3.5
    # Multiples of one constant, at most 2**17 of them: float32 holds each count exactly.
    values = np.asarray(bell_curve(jax.random.key(0), (1000,), 1.0), np.float64)
    counts = values * (4 * (2**32 - 1) / 12) ** 0.5
    np.testing.assert_allclose(counts, np.round(counts), atol=0.01)
    assert np.abs(counts).max() <= 2 * (2**16 - 1)


def test_bell_curve_has_the_same_bits_jitted_and_sharded(devices: list[Any]) -> None:
    key, shape = jax.random.key(5), (16, 24)
    eager = np.asarray(bell_curve(key, shape, 0.3))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    specs = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),)]
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        draw = jax.jit(lambda key: bell_curve(key, shape, 0.3), out_shardings=sharding)
        np.testing.assert_array_equal(np.asarray(draw(key)), eager)
    rows = jax.vmap(lambda key: bell_curve(key, shape, 0.3))(jax.random.split(key, 3))
    one = bell_curve(jax.random.split(key, 3)[1], shape, 0.3)
    np.testing.assert_array_equal(rows[1], one)


# Dropout.


def test_dropout_zeros_a_fraction_and_keeps_the_mean() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    dropped = np.asarray(dropout(jnp.ones((4, 50, 100)), 0.25, keys))
    kept = dropped != 0
    np.testing.assert_array_equal(dropped[kept], np.float32(1 / 0.75))
    # Four standard errors of a share of 20,000 draws.
    assert kept.mean() == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / kept.size) ** 0.5)
    assert (kept[0] != kept[1]).any()


def test_dropout_of_an_example_depends_on_its_own_key_only() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    x = jnp.ones((6, 3, 8))
    whole = np.asarray(dropout(x, 0.5, keys))
    for cut in (slice(0, 2), slice(2, 6), slice(5, 6)):
        np.testing.assert_array_equal(dropout(x[cut], 0.5, keys[cut]), whole[cut])
    order = jnp.array([3, 1, 5])
    np.testing.assert_array_equal(dropout(x[order], 0.5, keys[order]), whole[order])
    assert dropout(x.astype(jnp.bfloat16), 0.5, keys).dtype == jnp.bfloat16
