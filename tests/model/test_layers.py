"""Norms, MLP, dropout and parameter initialization."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.models.layers import mlp
from maxpipe.models.spec import Constant, Normal, Param
from maxpipe.nn.decoder import init_params, normal_approximation
from maxpipe.nn.mlp import MLP, apply_activation, quantized_mlp
from maxpipe.nn.module import LayerNorm, RMSNorm
from maxpipe.parallel.lora_weight import dropout
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.quantized_matmul import matmuls
from tests.nn.parts import RULES, assert_close, context, with_values

NO_CONTEXT = context([[0]], [[0]])


def rms_normed(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_divides_by_the_root_mean_square(offset: float) -> None:
    module = RMSNorm(mlp.RMSNorm(16, 1e-3, offset))
    np.testing.assert_array_equal(with_values(module)["scale"] + offset, np.ones(16))
    scale = np.linspace(-0.5, 2.0, 16)
    with_values(module, scale=scale)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 16))) * 100 + 7
    assert_close(module(jnp.asarray(x)), rms_normed(x, offset + scale, 1e-3))
    np.testing.assert_array_equal(module(jnp.zeros((1, 1, 16))), 0.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_of_bfloat16_is_computed_in_float32(offset: float) -> None:
    # 16 * 200 ** 2 needs more bits than bfloat16 has.
    x = (200 + jnp.arange(16.0)).astype(jnp.bfloat16)[None, None]
    module = RMSNorm(mlp.RMSNorm(16, 1e-3, offset))
    with_values(module)
    got = module(x)
    assert got.dtype == jnp.bfloat16
    wanted = rms_normed(np.asarray(x, np.float32), np.ones(16), 1e-3)
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2**-8)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_max_abs_equals_largest_output(offset: float) -> None:
    module = RMSNorm(mlp.RMSNorm(16, 1e-3, offset))
    with_values(module, scale=np.linspace(-2.5, 2.0, 16))
    x = jax.random.normal(jax.random.key(0), (2, 3, 16)) * jnp.arange(3.0)[:, None]
    assert_close(module.max_abs(x), np.abs(np.asarray(module(x))).max(-1, keepdims=True))
    half = x.astype(jnp.bfloat16)
    wanted = np.abs(np.asarray(module(half), np.float32)).max(-1, keepdims=True)
    np.testing.assert_allclose(module.max_abs(half), wanted, rtol=2**-7)
    assert not jax.grad(lambda x: module.max_abs(x).sum())(x).any()


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_follows_its_formula(bias: bool) -> None:
    module = LayerNorm(mlp.LayerNorm(16, 1e-3, bias))
    started = with_values(module)
    np.testing.assert_array_equal(started.pop("scale"), np.ones(16))
    assert {name: leaf.any() for name, leaf in started.items()} == ({"bias": False} if bias else {})
    values = {"scale": np.linspace(-0.5, 2.0, 16)} | ({"bias": np.arange(16.0)} if bias else {})
    with_values(module, **values)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 16)), np.float64) * 100 + 7
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    wanted = normed * values["scale"] + values.get("bias", 0.0)
    assert_close(module(jnp.asarray(x, jnp.float32)), wanted)
    rough = module(jnp.asarray(x, jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rough, np.float64), wanted, rtol=2**-6, atol=2**-4)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel's approximation (arXiv:1606.08415)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("function", [silu, gelu])
def test_gated_mlp_follows_its_formula(function: Any) -> None:
    module = MLP(mlp.MLP(16, 24, 0.25, function.__name__), RULES)
    weights = with_values(module)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    wide = np.asarray(x, np.float64)
    gate, up, down = (weights[name] for name in ("gate", "up", "down"))

    def exact(wide: np.ndarray) -> np.ndarray:
        return (function(wide @ gate) * (wide @ up)) @ down

    assert_close(jax.jit(lambda x: module(x, NO_CONTEXT).x)(x), exact(wide))
    # The derivative is written by hand; compare it with differences.
    step = np.asarray(jax.random.normal(jax.random.key(2), x.shape), np.float64)
    slope = jax.jit(jax.grad(lambda x: module(x, NO_CONTEXT).x.sum()))(x)
    difference = (exact(wide + 1e-6 * step) - exact(wide - 1e-6 * step)).sum() / 2e-6
    np.testing.assert_allclose((np.asarray(slope) * step).sum(), difference, rtol=1e-4)


def test_mlp_without_gate_follows_its_formula() -> None:
    module = MLP(mlp.MLP(16, 24, 0.25, mlp.Ungated("relu2")), RULES)
    weights = with_values(module)
    assert {*weights} == {"up", "down"}
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    wide, cotangent = np.asarray(x, np.float64), np.ones((2, 5, 16))
    up, down = weights["up"], weights["down"]
    positive = np.maximum(wide @ up, 0)
    found, pull = jax.vjp(jax.jit(lambda x: module(x, NO_CONTEXT).x), x)
    assert_close(found, positive**2 @ down)
    assert_close(pull(found * 0 + 1)[0], (cotangent @ down.T * 2 * positive) @ up.T)


def test_init_params_follows_declared_initializers() -> None:
    dims = ((400, "embed"), (50, "mlp"))
    declared = {
        "plain": Param(dims, Normal(400)),
        "ones": Param(dims[:1], Constant(1.0)),
        "gained": Param(dims, Normal(400, 0.25)),
    }
    found = init_params(declared, jax.random.key(0), jnp.dtype("float32"))
    assert list(found) == list(declared)
    assert found["plain"].std() == pytest.approx(400**-0.5, rel=0.02)
    assert found["gained"].std() == pytest.approx(0.25 * 400**-0.5, rel=0.02)
    np.testing.assert_array_equal(found["ones"], np.ones(400))
    rough = init_params(declared, jax.random.key(0), jnp.dtype("bfloat16"))
    assert {leaf.dtype.name for leaf in rough.values()} == {"bfloat16"}
    # Constants consume no random key, so that an additional norm changes no other parameter.
    fewer = {name: declared[name] for name in ("plain", "gained")}
    for name, leaf in init_params(fewer, jax.random.key(0), jnp.dtype("float32")).items():
        np.testing.assert_array_equal(leaf, found[name])


# Random initialization.


def test_normal_approximation_has_normal_moments() -> None:
    values = np.asarray(normal_approximation(jax.random.key(3), (200_000,), 2.0), np.float64)
    # Four standard errors of each estimate.
    assert abs(values.mean()) < 4 * 2.0 / len(values) ** 0.5
    assert values.std() == pytest.approx(2.0, rel=4 / (2 * len(values)) ** 0.5)
    assert np.abs(values).max() <= 3.5 * 2.0
    # A sum of four uniforms: 62% to 74% within one deviation, and tails beyond two.
    inside = (np.abs(values) < 2.0).mean()
    assert 0.64 < inside < 0.70
    assert 0.03 < (np.abs(values) > 4.0).mean() < 0.06


def test_normal_approximation_is_bounded_and_exact() -> None:
    # The largest sum of four 16-bit integers, from its centre, in standard deviations.
    bound = 2 * (2**16 - 1) / (4 * (2**32 - 1) / 12) ** 0.5
    assert 3.4 < bound < 3.5
    # Multiples of one constant, at most 2**17 of them: float32 holds each count exactly.
    values = np.asarray(normal_approximation(jax.random.key(0), (1000,), 1.0), np.float64)
    counts = values * (4 * (2**32 - 1) / 12) ** 0.5
    np.testing.assert_allclose(counts, np.round(counts), atol=0.01)
    assert np.abs(counts).max() <= 2 * (2**16 - 1)


def test_normal_approximation_is_bitwise_equal_jitted_and_sharded(devices: list[Any]) -> None:
    key, shape = jax.random.key(5), (16, 24)
    eager = np.asarray(normal_approximation(key, shape, 0.3))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    specs = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),)]
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        draw = jax.jit(lambda key: normal_approximation(key, shape, 0.3), out_shardings=sharding)
        np.testing.assert_array_equal(np.asarray(draw(key)), eager)
    rows = jax.vmap(lambda key: normal_approximation(key, shape, 0.3))(jax.random.split(key, 3))
    one = normal_approximation(jax.random.split(key, 3)[1], shape, 0.3)
    np.testing.assert_array_equal(rows[1], one)


# Dropout.


def test_dropout_zeros_a_fraction_and_keeps_the_mean() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    dropped = np.asarray(dropout(jnp.ones((4, 50, 100)), 0.25, keys, jnp.arange(50)))
    kept = dropped != 0
    np.testing.assert_array_equal(dropped[kept], np.float32(1 / 0.75))
    # Four standard errors of a share of 20,000 draws.
    assert kept.mean() == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / kept.size) ** 0.5)
    assert (kept[0] != kept[1]).any()


def test_dropout_of_example_depends_only_on_own_key() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    x, places = jnp.ones((6, 3, 8)), jnp.arange(3)
    run = jax.jit(lambda x, keys: dropout(x, 0.5, keys, places))
    whole = np.asarray(run(x, keys))
    for cut in (slice(0, 2), slice(2, 6), slice(5, 6)):
        np.testing.assert_array_equal(run(x[cut], keys[cut]), whole[cut])
    order = jnp.array([3, 1])
    np.testing.assert_array_equal(run(x[order], keys[order]), whole[order])
    assert jax.eval_shape(run, x.astype(jnp.bfloat16), keys).dtype == jnp.bfloat16


@pytest.mark.parametrize("weight_gradients", [False, True])
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("function", ["silu", mlp.Ungated("relu2")])
def test_8_bit_mlp_equals_separate_matmuls(
    function: mlp.Activation, form: Any, weight_gradients: bool
) -> None:
    how = MatmulQuantizer(form, "channel", weight_gradients)
    keys = jax.random.split(jax.random.key(0), 5)
    x, cotangent = (jax.random.normal(key, (2, 8, 32)) for key in keys[:2])
    shapes = (*((32, 48) for _ in mlp.input_projections(function)), (48, 32))
    weights = tuple(jax.random.normal(*pair) for pair in zip(keys[2:], shapes, strict=False))
    largest = jnp.abs(x).max(-1, keepdims=True)

    def whole(x: Any, weights: Any) -> Any:
        return quantized_mlp(x, largest, weights, function, how, RULES, "")

    def one_by_one(x: Any, weights: Any) -> Any:
        inputs = matmuls(x, None, weights[:-1], 1, how, True)
        hidden = apply_activation(inputs, function, in_8_bits=True)
        return matmuls(hidden, None, weights[-1:], 1, how, False)[0]

    @jax.jit
    def both(x: Any, weights: Any, cotangent: Any) -> Any:
        pairs = (jax.vjp(each, x, weights) for each in (whole, one_by_one))
        return [(value, pull(cotangent)) for value, pull in pairs]

    jax.tree.map(assert_close, *both(x, weights, cotangent))
