"""Hyper-connections against a float64 reference written from the formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers.hyper_connections import HyperConnection, StreamHead
from maxpipe.nn.hyper_connections import HyperConnectionModule, StreamHeadModule, spread
from tests.nn.parts import RULES, with_values

B, T, D, N = 2, 5, 7, 4
CONNECTION = HyperConnection(D, N, 0.03, 1e-3, 20)
HEAD = StreamHead(D, N, 0.03, 1e-3)
Values = Mapping[str, np.ndarray]


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.03)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def comb_of(logits: np.ndarray, iterations: int = 20) -> np.ndarray:
    """Return the mixing matrices `[..., from, to]`."""
    comb = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) + 1e-3
    for number in range(iterations):
        if number:
            comb = comb / (comb.sum(-1, keepdims=True) + 1e-3)
        comb = comb / (comb.sum(-2, keepdims=True) + 1e-3)
    return comb


def reference(values: Values, x: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Return the new streams and the branch's input. Streams are `[B, T, N, D]`."""
    z = normed(x.reshape(B, T, -1)) @ values["project"]
    bias, scale = values["bias"], values["scale"]
    pre = sigmoid(z[..., :N] * scale[0] + bias[:N]) + 1e-3
    post = 2 * sigmoid(z[..., N : 2 * N] * scale[1] + bias[N : 2 * N])
    comb = comb_of((z[..., 2 * N :] * scale[2] + bias[2 * N :]).reshape(B, T, N, N))
    h = np.einsum("btn,btnd->btd", pre, x)
    mixed = np.einsum("btij,btid->btjd", comb, x)
    return post[..., None] * change(h)[:, :, None] + mixed, h


def random_values(module: Any) -> Values:
    random = np.random.default_rng(1)
    sizes = {name: param.shape for name, param in module.part.params.items()}
    drawn = {name: random.normal(size=shape) for name, shape in sizes.items()}
    return with_values(module, **drawn | {"project": drawn["project"] * (N * D) ** -0.5})


@pytest.fixture
def streams() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(B, T, N, D))


def branch(h: Any) -> Any:
    """A branch that is not linear, so that the order of its input and output matters."""
    return h**2 - 0.5 * h


def test_new_streams(streams: np.ndarray) -> None:
    module = HyperConnectionModule(CONNECTION, RULES)
    values = random_values(module)
    x = jnp.asarray(streams.reshape(B, T, -1), jnp.float32)
    h, z = module.read(x)
    found = module.write(x, branch(h), z)
    wanted, wanted_h = reference(values, streams, branch)
    np.testing.assert_allclose(h, wanted_h, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.reshape(streams.shape), wanted, rtol=1e-5, atol=1e-5)
