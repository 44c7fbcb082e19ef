"""TPU kernels of recurrent layers, interpreted on CPUs with small matrices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn import chunked_scan, convolution_kernel, gated_delta, kda, mamba2, recurrent_kernels
from tests.model import test_delta, test_kda, test_mamba2
from tests.model.recurrent import Params

LANES = 8
LAYERS = {
    "gated delta rule": test_delta.LAYER.with_part(
        key_size=8, value_size=8, num_key_heads=2, num_value_heads=4, norm=RMSNorm(8, 1e-4)
    ),
    "separate heads": test_delta.LAYER.with_part(
        key_size=8, value_size=16, num_key_heads=2, num_value_heads=2, norm=RMSNorm(16, 1e-4)
    ),
    "chunk of one matrix": test_delta.LAYER.with_part(
        chunk=8, key_size=8, value_size=8, norm=RMSNorm(8, 1e-4)
    ),
    "Kimi delta attention": test_kda.LAYER.with_part(
        num_heads=4, head_dim=8, norm=RMSNorm(8, 1e-4, scales_in_float32=True)
    ),
    "Mamba-2": test_mamba2.LAYER.with_part(
        chunk=8, num_heads=8, head_dim=4, state_size=8, norm=RMSNorm(32, 1e-4)
    ),
    "Mamba-2, no norm": test_mamba2.LAYER.with_part(
        chunk=8, num_heads=8, head_dim=4, state_size=8, norm=None
    ),
    "Mamba-2, wide heads": test_mamba2.LAYER.with_part(
        chunk=8, num_heads=2, head_dim=8, num_groups=1, state_size=8, norm=RMSNorm(16, 1e-4)
    ),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Use the kernels on CPUs, and list the kernels that run."""
    calls = []

    def listed(name: str, run: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return run(*arguments, **options)

        return call

    for name in ("forward", "backward"):
        run = listed(name, getattr(recurrent_kernels, name))
        monkeypatch.setattr(recurrent_kernels, name, run)
    monkeypatch.setattr(recurrent_kernels, "LANES", LANES)
    monkeypatch.setattr(convolution_kernel, "HALO", 4)
    monkeypatch.setattr(convolution_kernel, "_BLOCK", 8)
    monkeypatch.setattr(convolution_kernel, "_ROWS", 4)
    monkeypatch.setattr(chunked_scan, "has_tpu_devices", lambda: True)
    jax.clear_caches()
    yield calls
    jax.clear_caches()


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_equal_token_recurrence(name: str, kernels: list[str]) -> None:
    layer = LAYERS[name]
    layer.check_values_and_gradients(*layer.draw())
    assert {*kernels} == {"forward", "backward"}


@pytest.mark.parametrize("name", ["gated delta rule", "Kimi delta attention", "Mamba-2"])
def test_document_does_not_affect_other_documents(name: str) -> None:
    LAYERS[name].check_documents_are_independent()


@pytest.mark.parametrize("name", ["gated delta rule", "Kimi delta attention", "Mamba-2"])
def test_start_state_and_its_gradient_equal_those_of_plain_scan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence continues the document of the cache; the others start new ones."""
    layer = LAYERS[name]
    params, x = layer.draw()
    cache = layer.module.empty_cache(layer.part, 3, 13, x.dtype)
    _, cache = layer.run(params, x, cache=cache)
    keys = jax.random.split(jax.random.key(3))
    towards = [jax.random.normal(keys[0], x.shape), jax.random.normal(keys[1], cache.state.shape)]

    def loss(params: Params, x: jax.Array, tail: Any, state: jax.Array) -> Any:
        before = cache._replace(tail=tail, state=state)
        out, after = layer.run(params, x, cache=before)
        return (out * towards[0]).sum() + (after.state * towards[1]).sum()

    grad = jax.grad(loss, argnums=(0, 1, 2, 3))
    actual = grad(params, x, cache.tail, cache.state)
    monkeypatch.setattr(chunked_scan, "has_tpu_devices", lambda: False)
    jax.clear_caches()
    expected = grad(params, x, cache.tail, cache.state)
    for found, target in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        scale = jnp.abs(target).max()
        assert scale > 0 and jnp.abs(found - target).max() < 1e-5 * scale


def test_gradients_of_large_gates_are_finite() -> None:
    x = jnp.array([-1e4, -100.0, 0.0, 100.0, 1e4])
    actual, slopes = jax.vmap(jax.value_and_grad(recurrent_kernels.sigmoid))(x)
    np.testing.assert_allclose(actual, [0, 0, 0.5, 1, 1])
    np.testing.assert_allclose(slopes, [0, 0, 0.25, 0, 0])


def test_inverse_in_large_blocks_is_accurate() -> None:
    """Two heads of 32 tokens, with nearly identical keys."""
    block = np.tri(32, k=-1) * (1 - 1e-3 * np.random.default_rng(0).random((32, 32)))
    near = np.kron(np.eye(2), block)
    expected = np.linalg.inv(np.eye(64) + near)
    for dtype, limit in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-3)):
        run = partial(recurrent_kernels.inverse_of_unit_lower, block=32, dtype=jnp.dtype(dtype))
        actual, pull = jax.vjp(run, jnp.asarray(near, jnp.float32))
        assert np.abs(actual - expected).max() < limit
        towards = np.random.default_rng(1).normal(size=(64, 64))
        gradient = -expected.T @ towards @ expected.T
        (found,) = pull(jnp.asarray(towards, jnp.float32))
        assert np.abs(found - gradient).max() < limit * np.abs(gradient).max()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gated delta rule", {"key_size": 12}),
        ("gated delta rule", {"chunk": 64}),
        ("Kimi delta attention", {"num_heads": 3}),
        ("Mamba-2", {"chunk": 4}),
        ("Mamba-2", {"state_size": 12}),
    ],
)
def test_other_sizes_use_plain_scan(name: str, changes: dict[str, Any]) -> None:
    layer = LAYERS[name].with_part(**changes)
    rules = {test_delta.GatedDelta: gated_delta, test_kda.KimiDelta: kda}
    module = rules.get(layer.module, mamba2)
    rule: Any = getattr(module, "_StateSpace" if module is mamba2 else "_DeltaRule")
    inputs = (jnp.zeros((3, 13, 1, 1)),)
    assert rule(LAYERS[name].part).layout(inputs, 13) is not None
    assert rule(layer.part).layout(inputs, 13) is None
