"""TPU kernels of recurrent layers, interpreted on CPUs with small matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn import chunked_scan, recurrent_backends, recurrent_kernels
from tests.model import test_delta, test_kda, test_mamba2
from tests.model.recurrent import Layer

LANES = 8
LAYERS = {
    "gated delta rule": test_delta.LAYER.with_part(
        key_size=8, value_size=8, num_key_heads=2, num_value_heads=4, norm=RMSNorm(8, 1e-4)
    ),
    "separate heads": test_delta.LAYER.with_part(
        key_size=8, value_size=16, num_key_heads=2, num_value_heads=2, norm=RMSNorm(16, 1e-4)
    ),
    "chunk of one matrix": test_delta.LAYER.with_part(
        chunk=8, key_size=8, value_size=8, norm=RMSNorm(8, 1e-4, offset=1.0)
    ),
    "Kimi delta attention": test_kda.LAYER.with_part(
        num_heads=4, head_dim=8, norm=RMSNorm(8, 1e-4, scales_in_float32=True)
    ),
    "Mamba-2": test_mamba2.LAYER.with_part(
        chunk=8, num_heads=8, head_dim=4, state_size=8, norm=RMSNorm(32, 1e-4)
    ),
    "Mamba-2, wide heads": test_mamba2.LAYER.with_part(
        chunk=8, num_heads=2, head_dim=8, num_groups=1, state_size=8, norm=RMSNorm(16, 1e-4)
    ),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the kernels on CPUs, and require that they run."""
    calls = []

    def forward(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return run(*arguments, **options)

    run = recurrent_kernels.forward
    monkeypatch.setattr(recurrent_kernels, "LANES", LANES)
    monkeypatch.setattr(recurrent_kernels, "forward", forward)
    monkeypatch.setattr(chunked_scan, "has_tpu_devices", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()
    assert calls


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_equal_token_recurrence(name: str) -> None:
    layer = LAYERS[name]
    layer.check_values_and_gradients(*layer.draw())


@pytest.mark.parametrize("name", ["gated delta rule", "Kimi delta attention", "Mamba-2"])
def test_document_does_not_affect_other_documents(name: str) -> None:
    LAYERS[name].check_documents_are_independent()


@pytest.mark.parametrize("name", ["gated delta rule", "Kimi delta attention", "Mamba-2"])
def test_start_state_and_gradients_equal_those_of_scan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare all results of `scan_chunks`, for a sequence that continues a cached one."""
    layer = LAYERS[name]
    params, x = layer.draw()
    _, cache = layer.run(params, x, None, _filled(layer))
    kernel = _gradients(layer, params, x, cache)
    monkeypatch.setattr(chunked_scan, "has_tpu_devices", lambda: False)
    jax.clear_caches()
    scan = _gradients(layer, params, x, cache)
    for actual, expected in zip(*map(jax.tree.leaves, (kernel, scan)), strict=True):
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-5)
