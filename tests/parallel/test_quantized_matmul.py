"""8-bit matmuls against float32: values and gradients within the precision of the formats."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.parallel import quantized_matmul
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.quantized_array import (
    max_of_dtype,
    quantize_array,
    quantize_dequantize_blocks,
)
from tests.cases import keeping

product: Any = jax.jit(quantized_matmul.matmul, static_argnums=(2, 3, 4))
rounded_einsum: Any = jax.jit(quantized_matmul.quantized_einsum, static_argnums=(0, 3))

WAYS = [
    MatmulQuantizer(*way)
    for way in itertools.product(("int8", "fp8"), ("channel", "tensor", "block"), (False, True))
] + [MatmulQuantizer("mxfp8", "channel", same) for same in (False, True)]
NVFP4 = [MatmulQuantizer("nvfp4", "channel", same) for same in (False, True)]
FEW = keeping(WAYS, 2, 6, 11, 13)
"""Every format, scale granularity and type of weight gradient runs by default."""
TYPES = [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2]


def step_of(dtype: Any, sizes: Any, most: Any) -> Any:
    """Return the maximum rounding error of values of these sizes if the largest value is `most`."""
    if dtype == jnp.int8:
        return most / 127 / 2
    info, scale = jnp.finfo(dtype), most / max_of_dtype(dtype)
    return np.maximum(sizes * 2.0 ** -(info.nmant + 1), scale * float(info.smallest_subnormal) / 2)


@pytest.mark.parametrize("dtype", TYPES)
def test_quantization_error_is_at_most_half_a_step(dtype: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (64, 96)) * jnp.logspace(-12, 12, 64)[:, None]
    numbers, scale, _ = jax.jit(lambda x: quantize_array(x, (1,), dtype))(x)
    assert numbers.dtype == dtype and scale.shape == (64, 1)
    error = np.abs(np.asarray(numbers, np.float32) * scale - x)
    most = np.abs(x).max(1, keepdims=True)
    assert (error <= 1.001 * step_of(dtype, np.abs(x), most)).all() and error.max() > 0


@pytest.mark.parametrize("dtype", TYPES)
def test_block_scales_are_powers_of_two_exact_in_bfloat16(dtype: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (256, 192)).at[3, 5].set(1000.0)
    found = jax.jit(lambda x: quantize_dequantize_blocks(x, (0, 1), dtype))(x)
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))
    blocks = np.abs(x).reshape(2, 128, 3, 64).max((1, 3))  # 64 divides 192, and 128 does not
    most = np.repeat(np.repeat(2 * blocks, 128, 0), 64, 1)  # up to the next power of two
    assert (np.abs(found - x) <= 1.001 * step_of(dtype, np.abs(x), most)).all()


@pytest.mark.parametrize("how", FEW, ids=str)
def test_quantized_matmul_preserves_zeros_and_non_finite_values(how: MatmulQuantizer) -> None:
    x = jnp.ones((1, 32, 32)).at[0, 0].set(0.0).at[0, 1, 2].set(jnp.inf).at[0, 2, 3].set(jnp.nan)
    weight = jnp.ones((32, 32))
    found = product(x, weight, 1, how, True)
    assert (found[0, 0] == 0).all() and not jnp.isfinite(found[0, 1:3]).any()
    grads = jax.jit(jax.grad(lambda *both: product(*both, 1, how, True).sum(), (0, 1)))(x, weight)
    assert not jnp.isfinite(grads[1]).all()


# Uniform rounding of both operands: the format's relative step / sqrt(12) for each operand.
ERRORS = {"int8": 0.02, "fp8": 0.06, "mxfp8": 0.06}


def with_gradients(function: Any, cotangent: jax.Array, *inputs: Any) -> list[np.ndarray]:
    """Return the value, and the gradients of all inputs."""

    def run(cotangent: jax.Array, *inputs: Any) -> Any:
        value, pullback = jax.vjp(function, *inputs)
        return value, *pullback(cotangent)

    return jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(run)(cotangent, *inputs)))


@pytest.mark.parametrize("how", FEW, ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_values_and_gradients_are_near_float32(how: MatmulQuantizer, dims: int) -> None:
    shapes = {1: ((2, 32, 128), (128, 4, 32)), 2: ((2, 32, 4, 32), (4, 32, 128))}[dims]
    out = (2, 32, *shapes[1][dims:])
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, cotangent = (
        jax.random.normal(*pair) for pair in zip(keys, (*shapes, out), strict=True)
    )
    wanted = with_gradients(lambda a, b: jnp.tensordot(a, b, dims), cotangent, x, weight)
    found = with_gradients(lambda *both: product(*both, dims, how, True), cotangent, x, weight)
    errors = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(wanted, found, strict=True)]
    assert all(0 < error < ERRORS[how.format] for error in errors[:2]), errors
    if how.weight_gradients:
        assert 0 < errors[2] < ERRORS[how.format]
    else:
        assert errors[2] < 1e-6


@pytest.mark.parametrize("how", [*FEW, *NVFP4], ids=str)
def test_token_scales_do_not_depend_on_other_sequences(how: MatmulQuantizer) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 6, 64))
    weight = jax.random.normal(jax.random.key(1), (64, 32))
    alone = jnp.concatenate([product(each[None], weight, 1, how, True) for each in x])
    np.testing.assert_array_equal(product(x, weight, 1, how, True), alone)
    loud = x.at[1:].multiply(1e4)
    np.testing.assert_array_equal(product(loud, weight, 1, how, True)[0], alone[0])


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_weight_gradients_use_per_sequence_scales(form: Any, into: bool) -> None:
    how = MatmulQuantizer(form, "channel", True)
    x = jax.random.normal(jax.random.key(0), (6, 8, 64)) * jnp.logspace(-3, 3, 6)[:, None, None]
    cotangent = jax.random.normal(jax.random.key(1), (6, 8, 32))
    run = jax.jit(partial(how.weight_grad, into=into))
    alone = sum(run(*(each[n : n + 1] for each in (x, cotangent))) for n in range(6))
    for most in (None, jnp.abs(x if into else cotangent).max(-1, keepdims=True)):
        found = run(x, cotangent, most=most)
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max())


@pytest.mark.parametrize("how", FEW, ids=str)
@pytest.mark.parametrize("form", ["btd,def->btef", "btef,efd->btd", "end,def->enf", "enf,efd->end"])
def test_expert_matmuls_are_quantized_per_expert(form: str, how: MatmulQuantizer) -> None:
    sizes = {"b": 2, "t": 16, "d": 64, "e": 3, "f": 128, "n": 20}
    first, rest = form.split(",")
    shapes = [[sizes[letter] for letter in letters] for letters in (first, *rest.split("->"))]
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, cotangent = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    wanted = with_gradients(lambda *both: jnp.einsum(form, *both), cotangent, x, weight)
    found = with_gradients(lambda *both: rounded_einsum(form, *both, how), cotangent, x, weight)
    errors = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(wanted, found, strict=True)]
    assert all(0 < error < ERRORS[how.format] for error in errors[:2]), errors
    assert errors[2] < 1e-6
    # Large weights of one expert do not reduce the precision of the others.
    dim = rest.split("->")[0].index("e")
    loud = jnp.moveaxis(jnp.moveaxis(weight, dim, 0).at[0].multiply(1e4), 0, dim)
    if "e" in form.split("->")[1]:
        places = form.split("->")[1].index("e")
        a, b = (np.asarray(rounded_einsum(form, x, each, how)) for each in (weight, loud))
        np.testing.assert_array_equal(a.take(1, places), b.take(1, places))


@pytest.mark.parametrize(
    "how",
    [*keeping([how for how in WAYS if how.can_prequantize], 2, 5, 9), *NVFP4],
    ids=str,
)
@pytest.mark.parametrize("dims", [1, 2])
def test_prequantized_weights_give_equal_results(how: MatmulQuantizer, dims: int) -> None:
    shapes = {1: ((2, 32, 64), (3, 64, 2, 32)), 2: ((2, 32, 2, 32), (3, 2, 32, 64))}[dims]
    keys = jax.random.split(jax.random.key(0), 2)
    x, stack = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    held = jax.jit(lambda stack: how.quantize_weight(stack, 1, dims))(stack)
    kept = jax.tree.leaves(held)
    assert {leaf.dtype.itemsize for leaf in kept} == ({1} if how.format == "mxfp8" else {1, 4})
    counts = {"tensor": 2, "channel": 6 if how.format == "nvfp4" else 4}
    assert len(kept) == counts[how.scales]
    assert held.shape == stack.shape

    @jax.jit
    def run(x: Any, weight: Any, mine: Any) -> Any:
        def of_held(x: Any, gradient: Any) -> Any:
            return product(x, replace(mine, gradient=gradient), dims, how, dims == 1)

        def of_weight(x: Any, weight: Any) -> Any:
            return product(x, weight, dims, how, dims == 1)

        wanted, pull = jax.vjp(of_weight, x, weight)
        found, pull_held = jax.vjp(of_held, x, jnp.zeros_like(weight))
        # A weight that is not trained.
        (d_x,) = jax.vjp(lambda x: product(x, mine, dims, how, True), x)[1](wanted)
        return (wanted, *pull(wanted)), (found, *pull_held(wanted)), d_x

    for number, weight in enumerate(stack):
        mine = jax.tree.map(lambda leaf, at=number: leaf[at], held)
        wanted, found, d_x = run(x, weight, mine)
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(d_x, wanted[1])
