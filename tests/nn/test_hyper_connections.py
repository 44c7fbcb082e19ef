"""Hyper-connections against a float64 reference written from the formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxpipe.models.layers.hyper_connections import HyperConnection, StreamHead
from maxpipe.nn import stream_backends, stream_kernels
from maxpipe.nn.hyper_connections import (
    HyperConnectionModule,
    StreamHeadModule,
    sinkhorn,
    spread,
)
from maxpipe.nn.stream_backends import StreamShards
from tests.nn.parts import RULES, with_values

B, T, D, N = 2, 13, 128, 4
CONNECTION = HyperConnection(D, N, 0.03, 1e-3, 20)
HEAD = StreamHead(D, N, 0.03, 1e-3)
Values = Mapping[str, np.ndarray]


def normed(x: Any) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 0.03)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + jnp.exp(-x))


def comb_of(logits: Any, iterations: int = 20) -> Any:
    """Return the mixing matrices `[..., from, to]`."""
    comb = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True) + 1e-3
    for number in range(iterations):
        if number:
            comb = comb / (comb.sum(-1, keepdims=True) + 1e-3)
        comb = comb / (comb.sum(-2, keepdims=True) + 1e-3)
    return comb


def reference(values: Values, x: Any, change: Callable[[Any], Any]) -> Any:
    """Return the new streams and the branch's input. Streams are `[B, T, N, D]`."""
    z = normed(x.reshape(B, T, -1)) @ values["project"]
    bias, scale = values["bias"], values["scale"]
    pre = sigmoid(z[..., :N] * scale[0] + bias[:N]) + 1e-3
    post = 2 * sigmoid(z[..., N : 2 * N] * scale[1] + bias[N : 2 * N])
    comb = comb_of((z[..., 2 * N :] * scale[2] + bias[2 * N :]).reshape(B, T, N, N))
    h = jnp.einsum("btn,btnd->btd", pre, x)
    mixed = jnp.einsum("btij,btid->btjd", comb, x)
    return post[..., None] * change(h)[:, :, None] + mixed, h


def random_values(module: Any) -> Values:
    random = np.random.default_rng(1)
    sizes = {name: param.shape for name, param in module.part.params.items()}
    drawn = {name: random.normal(size=shape) for name, shape in sizes.items()}
    return with_values(module, **drawn | {"project": drawn["project"] * (N * D) ** -0.5})


@pytest.fixture(params=[False, True], ids=["plain", "kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels for TPUs are used, as JAX operations."""
    if request.param:
        shards = StreamShards((), None)
        monkeypatch.setattr(stream_backends, "select_shards", lambda *_: shards)
    return request.param


@pytest.fixture
def streams() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(B, T, N, D))


def branch(h: Any) -> Any:
    """A branch that is not linear, so that the order of its input and output matters."""
    return h**2 - 0.5 * h


@pytest.mark.usefixtures("kernels")
def test_new_streams(streams: np.ndarray) -> None:
    module = HyperConnectionModule(CONNECTION, RULES)
    values = random_values(module)
    x = jnp.asarray(streams.reshape(B, T, -1), jnp.float32)
    h, z = module.read(x)
    found = module.write(x, branch(h), z)
    with jax.enable_x64(True):
        wanted, wanted_h = map(np.asarray, reference(values, jnp.asarray(streams), branch))
    np.testing.assert_allclose(h, wanted_h, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.reshape(streams.shape), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_gradients(streams: np.ndarray) -> None:
    """Gradients of the streams and all parameters, against autodiff of the float64 reference."""
    values = random_values(HyperConnectionModule(CONNECTION, RULES))
    weight = np.random.default_rng(3).normal(size=(B, T, N * D))

    def of_module(values: Values, x: jax.Array) -> jax.Array:
        module = with_arrays(HyperConnectionModule(CONNECTION, RULES), values)
        h, z = module.read(x)
        return (module.write(x, branch(h), z) * weight).sum()

    def of_reference(values: Values, x: jax.Array) -> jax.Array:
        new, _ = reference(values, x.reshape(B, T, N, D), branch)
        return (new.reshape(B, T, -1) * weight).sum()

    compare_gradients(of_module, of_reference, values, streams)


@pytest.mark.usefixtures("kernels")
def test_head(streams: np.ndarray) -> None:
    values = random_values(StreamHeadModule(HEAD, RULES))
    weight = np.random.default_rng(3).normal(size=(B, T, D))

    def of_module(values: Values, x: jax.Array) -> jax.Array:
        module = with_arrays(StreamHeadModule(HEAD, RULES), values)
        return (module(x) ** 2 * weight).sum()

    def of_reference(values: Values, x: jax.Array) -> jax.Array:
        z = normed(x) @ values["project"] * values["scale"] + values["bias"]
        h = jnp.einsum("btn,btnd->btd", sigmoid(z) + 1e-3, x.reshape(B, T, N, D))
        return (h**2 * weight).sum()

    compare_gradients(of_module, of_reference, values, streams)


def with_arrays(module: Any, values: Values) -> Any:
    for name, value in values.items():
        setattr(module, name, nnx.Param(value))
    return module


def compare_gradients(
    of_module: Callable[..., jax.Array],
    of_reference: Callable[..., jax.Array],
    values: Values,
    streams: np.ndarray,
) -> None:
    x = streams.reshape(B, T, -1)
    narrow = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), (dict(values), x))
    value, found = jax.value_and_grad(of_module, argnums=(0, 1))(*narrow)
    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, (dict(values), x))
        wanted_value, wanted = jax.value_and_grad(of_reference, argnums=(0, 1))(*wide)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


def test_comb_is_doubly_stochastic() -> None:
    part = replace(CONNECTION, epsilon=1e-6)
    logits = np.random.default_rng(0).normal(size=(N, N, B, T))
    matrix = np.asarray(sinkhorn(jnp.asarray(logits, jnp.float32), part))
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-4)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-4)


def test_initial_layer_is_close_to_one_residual_stream() -> None:
    module = HyperConnectionModule(replace(CONNECTION, epsilon=1e-6), RULES)
    with_values(module)
    head = StreamHeadModule(replace(HEAD, epsilon=1e-6), RULES)
    with_values(head)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
    h, z = module.read(spread(x, N))
    found = module.write(spread(x, N), branch(h), z)
    np.testing.assert_allclose(head(found), x + branch(x), rtol=0.05, atol=0.05)
    first, second = found[..., :D], found[..., D : 2 * D]
    assert not np.allclose(first, second, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_saved_arrays() -> None:
    """Differentiation saves the streams, the branch's output, z and one number per token."""
    module = HyperConnectionModule(CONNECTION, RULES)
    with_values(module)
    x = jnp.ones((B, T, N * D), jnp.bfloat16)

    def run(x: jax.Array) -> jax.Array:
        h, z = module.read(x)
        return module.write(x, jax.lax.stop_gradient(h), z)

    _, backward = jax.vjp(run, x)
    sizes = {leaf.shape for leaf in jax.tree.leaves(backward) if leaf.shape[-1:] == (T,)}
    assert sizes == {(N * (N + 2), B, T), (B, T)}
    wide = [leaf for leaf in jax.tree.leaves(backward) if leaf.ndim == 3 and leaf.shape[1] == T]
    assert all(leaf.dtype == jnp.bfloat16 and leaf.shape[-1] in (D, N * D) for leaf in wide)


def test_kernels_equal_plain_sums_of_bfloat16_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection is split into bfloat16 pieces. Results differ by rounding."""
    values = random_values(HyperConnectionModule(CONNECTION, RULES))
    random = np.random.default_rng(5)
    x, weight = (jnp.asarray(random.normal(size=(B, T, N * D)), jnp.bfloat16) for _ in range(2))

    def new_streams(values: Values, x: jax.Array) -> Any:
        module = with_arrays(HyperConnectionModule(CONNECTION, RULES), values)
        h, z = module.read(x)
        new = module.write(x, branch(h), z)
        return jnp.sum((new * weight).astype(jnp.float32)), (h, z, new)

    def run() -> list[np.ndarray]:
        arrays = jax.tree.map(jnp.float32, dict(values))
        results = jax.value_and_grad(new_streams, (0, 1), has_aux=True)(arrays, x)
        return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(results)]

    plain = run()
    monkeypatch.setattr(stream_backends, "select_shards", lambda *_: StreamShards((), None))
    kernels = run()
    for found, wanted in zip(kernels, plain, strict=True):
        scale = float(np.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-9 * scale)
    # The projection z is not rounded to bfloat16.
    (z, wanted) = (
        next(x for x in each if x.shape == (N * (N + 2), B, T)) for each in (kernels, plain)
    )
    np.testing.assert_allclose(z, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_nan_in_one_token_does_not_reach_other_tokens(streams: np.ndarray) -> None:
    module = HyperConnectionModule(CONNECTION, RULES)
    random_values(module)
    x = jnp.asarray(streams.reshape(B, T, -1), jnp.float32)

    def run(x: jax.Array) -> jax.Array:
        h, z = module.read(x)
        return module.write(x, branch(h), z)

    results = []
    for value in (0.0, jnp.nan):
        other = x.at[1, 3].set(value)
        new, backward = jax.vjp(run, other)
        results.append((new, backward(jnp.ones_like(new))[0]))
    is_other = np.ones((B, T), bool)
    is_other[1, 3] = False
    for clean, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found[is_other], clean[is_other])
        assert np.isnan(found[~is_other]).all()


@pytest.mark.parametrize(
    ("streams", "width", "supported"), [(4, 4096, True), (4, 96, False), (8, 128, False)]
)
def test_supported_sizes(streams: int, width: int, supported: bool) -> None:
    """Streams consist of complete registers, and the pieces of all coefficients fit into one."""
    sizes = stream_kernels.Sizes(streams, width, streams * (streams + 2), 1e-6, 1e-6)
    assert stream_kernels.supports(sizes, jnp.bfloat16) == supported
