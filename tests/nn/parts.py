"""Helpers that build single modules with parameter values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxpipe.nn.attention.interface import KVCache
from maxpipe.nn.decoder import init_params
from maxpipe.nn.module import LayerContext
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.times import shared

RULES = AxisRules.from_config(MeshConfig())


def with_values(module: Any, **values: Any) -> dict[str, np.ndarray]:
    """Set the module's parameters to initial values or `values`; return them in float64."""
    found = _initial_values(module.part) | values
    for name, value in found.items():
        setattr(module, name, nnx.Param(jnp.asarray(value, jnp.float32)))
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


@shared
def _initial_values(part: Any) -> dict[str, jax.Array]:
    draw = jax.jit(lambda key: init_params(part.params, key, jnp.dtype("float32")))
    return draw(jax.random.key(0))


def context(
    segments: Any,
    positions: Any,
    index: int = 0,
    values: Mapping[str, tuple[float, ...]] | None = None,
    cache: KVCache | None = None,
) -> LayerContext:
    """Return the context of a layer."""
    inputs = {"segment_ids": jnp.asarray(segments), "positions": jnp.asarray(positions)}
    return LayerContext(inputs, jnp.asarray(index), values or {}, cache)


def packed(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return segment IDs and positions of sequences with documents of these lengths."""
    ids = [np.repeat(1 + np.arange(len(row)), row) for row in lengths]
    positions = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    return np.stack(ids), np.stack(positions)


def assert_close(got: Any, wanted: Any) -> None:
    """Compare within a float32 tolerance of 1e-5 of the largest value."""
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
