"""Recurrent layers over the context axis: outputs and gradients equal those of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from maxpipe.nn.module import LayerContext
from maxpipe.parallel.collectives import gather_sequences, mark_varying, shard_tokens, sum_over
from maxpipe.parallel.mesh import CONTEXT, TENSOR
from tests.cases import TOLERANCE, keeping
from tests.model.recurrent import Layer, Params
from tests.model.test_delta import LAYER as DELTA
from tests.model.test_kda import LAYER as KDA
from tests.model.test_mamba2 import LAYER as MAMBA2
from tests.nn.parts import RULES, packed

LENGTHS = [[40], [10, 10, 20], [3, 2, 5, 30], [1, 9, 21, 8, 1], [4, 1, 1, 2, 1, 30, 1]]
"""Document lengths of each sequence. With two devices, pieces of 10 tokens start at 10, 20, 30."""
LAYERS = {"delta": DELTA, "kda": KDA.with_part(num_heads=6), "mamba2": MAMBA2}


def mesh_of(context: int, tensor: int = 1) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (context, tensor),
        (CONTEXT, TENSOR),
        devices=jax.devices()[: context * tensor],
        axis_types=(AxisType.Auto,) * 2,
    )


def draw(layer: Layer, lengths: list[list[int]]) -> tuple[Params, jax.Array, jax.Array]:
    params, _ = layer.draw()
    shape = len(lengths), sum(lengths[0]), layer.part.d_model
    x = jax.random.normal(jax.random.key(3), shape)
    return params, x, jnp.asarray(packed(lengths)[0], jnp.int32)


def run_layer(layer: Layer, params: Params, x: Any, batch: Any) -> Any:
    built = layer.module(layer.part, RULES)
    for name, value in params.items():
        getattr(built, name)[...] = value
    return built(x, LayerContext(batch, jnp.int32(0))).x


def losses(layer: Layer, segments: jax.Array) -> tuple[Any, Any]:
    """Return functions of parameters and inputs on one device and on all devices. They return a
    sum and the output.
    """

    def towards(out: Any) -> Any:
        return jax.random.normal(jax.random.key(7), (*segments.shape, out.shape[-1]))

    def plain(params: Params, x: Any) -> Any:
        out = run_layer(layer, params, x, {"segment_ids": segments})
        return (out * towards(out)).sum(), out

    def on_device(params: Params, x: Any) -> Any:
        batch = {"segment_ids": segments, "positions": segments, "x": x}
        batch = dict(shard_tokens(batch))
        out = run_layer(layer, mark_varying(params), batch.pop("x"), batch)
        slope = shard_tokens({"slope": towards(out), "segment_ids": segments})["slope"]
        return sum_over((out * slope).sum(), CONTEXT), gather_sequences(out, 1)

    def parallel(params: Params, x: Any) -> Any:
        specs = (PartitionSpec(), PartitionSpec(CONTEXT))
        run = jax.shard_map(
            on_device, in_specs=PartitionSpec(), out_specs=specs, axis_names={CONTEXT}
        )
        total, copies = run(params, x)
        return total, copies[: len(segments)]

    return plain, parallel


def check_layer(
    layer: Layer, lengths: list[list[int]] = LENGTHS, context: int = 2, tensor: int = 1
) -> None:
    params, x, segments = draw(layer, lengths)
    with jax.set_mesh(mesh_of(context, tensor)):
        wanted, found = (
            jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(params, x)
            for run in losses(layer, segments)
        )
    for (path, target), actual in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(actual - target).max() / np.abs(target).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "chunk", "context", "tensor"),
    keeping(
        [
            ("delta", 4, 2, 1),
            ("kda", 4, 2, 2),
            ("mamba2", 4, 2, 1),
            ("delta", 16, 2, 2),
            ("kda", 16, 4, 1),
            ("mamba2", 2, 4, 2),
            ("delta", 1, 4, 1),
        ],
        *(0, 1, 2),
    ),
)
def test_layer_equals_one_device(name: str, chunk: int, context: int, tensor: int) -> None:
    layer = LAYERS[name].with_part(chunk=chunk)
    check_layer(layer, context=context, tensor=tensor)


@pytest.mark.parametrize("name", keeping(LAYERS, 0))
def test_pieces_of_single_tokens_equal_one_device(name: str) -> None:
    """The convolution reads tokens of several pieces."""
    check_layer(LAYERS[name], [[8], [1, 5, 2], [3, 1, 1, 3]], context=4)
