"""What stands around cuDNN's kernel, with jax's plain attention in its place: no GPU is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxpipe.config.schema import MeshConfig
from maxpipe.model.attention import cudnn, xla
from maxpipe.model.attention.interface import Mask
from maxpipe.parallel import stated
from maxpipe.parallel.mesh import MANUAL_AXES, build_mesh
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    monkeypatch.setattr(cudnn, "IMPLEMENTATION", "xla")


def close(got: Any, wanted: Any) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE * np.abs(right).max())


ENGINE = [
    Case(2, 2, 3, fsdp=2, tensor=2),
    Case(2, 1, 3, schedule="zb_h1", data=2, tensor=2, remat="names", layers=3),
    Case(2, 2, 3, schedule="zb_v", fsdp=2, remat="none", idle="compute"),
]


@pytest.mark.parametrize("case", keeping(ENGINE, 0), ids=str)
def test_the_engine_trains_as_with_plain_attention(case: Case) -> None:
    def run(case: Case) -> Any:
        steps = steps_of(case, case.rows)
        parts = steps.partition
        params = jax.jit(parts.decoder.init)(jax.random.key(0))
        run = steps.engine.value_and_grad(steps.train_schedule)

        def whole(params: Any, batch: Any) -> Any:
            loss, gradients, *_ = run(parts.stack(params), batch, None)
            return loss, parts.unstack(gradients)

        with jax.set_mesh(parts.mesh):
            batch = jax.device_put(batch_of(case.rows), steps.batch_sharding)
            return jax.tree.map(np.asarray, jax.jit(whole)(params, batch))

    close(run(dataclasses.replace(case, attention="cudnn")), run(case))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (6, 3), (3, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_heads_are_divided_where_the_program_is_automatic(
    heads: int, groups: int, causal: bool
) -> None:
    mesh = build_mesh(MeshConfig(ici_fsdp=2, ici_tensor=2), jax.devices()[:4])
    draw = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (
        jax.random.normal(each, (2, 8, count, 4))
        for each, count in zip(draw, (heads, groups, groups, heads), strict=True)
    )
    segments = jnp.asarray([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 5 + [3] * 3])

    def run(attend: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            mask = Mask(segments, window=3, causal=causal, scale=0.3)
            return (attend(*arrays, mask) * weight).sum()

        with jax.set_mesh(mesh):
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    close(run(cudnn.attend), run(xla.attend))


def test_each_device_calls_the_kernel_by_itself_and_states_its_work() -> None:
    """jax's rule for cuDNN's kernel fails unless all axes of the mesh are written per device."""
    mesh = build_mesh(MeshConfig(ici_stage=2, ici_tensor=2), jax.devices()[:4])
    seen: list[tuple[set[str], tuple[int, ...]]] = []
    whole = jax.nn.dot_product_attention

    def spied(query: Any, *arguments: Any, **options: Any) -> Any:
        seen.append((set(jax.sharding.get_abstract_mesh().manual_axes), query.shape))
        return whole(query, *arguments, **options)

    def program(x: Any) -> Any:
        return cudnn.attend(x, x[:, :, :2], x[:, :, 2:], Mask(jnp.zeros((1, 8), int)))

    spec = PartitionSpec(MANUAL_AXES)
    run = jax.shard_map(
        program, mesh=mesh, axis_names=set(MANUAL_AXES), in_specs=spec, out_specs=spec
    )
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.nn, "dot_product_attention", spied)
        lowered = jax.jit(run).lower(jnp.ones((2, 8, 4, 6)))
    assert seen == [(set(mesh.axis_names), (1, 8, 2, 6))]
    forward = 4 * 6 * 2 * 8 * 8 / 2
    assert stated.flops(forward, 2.5 * forward) in lowered.as_text(debug_info=True)
