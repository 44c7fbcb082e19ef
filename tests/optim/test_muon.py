"""Muon: orthogonalization compared with optax, and its collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from optax.contrib import _muon

from maxpipe.optim import muon
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import profile_program
from tests.cases import TOLERANCE


@pytest.mark.parametrize("shape", [(4, 4), (3, 16), (16, 5), (1, 8)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_orthogonalization_matches_optax(shape: tuple[int, int], scale: float) -> None:
    x = jax.random.normal(jax.random.key(0), shape)
    wanted = _muon.orthogonalize_via_newton_schulz(x, jnp.array(muon.COEFFICIENTS))
    declared = {("w",): muon.Matrices((0,), (1,), PartitionSpec())}
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    found = muon.compute_updates({("w",): scale * x}, declared, mesh)["w",]
    size = 0.2 * max(shape) ** 0.5
    np.testing.assert_allclose(found, size * wanted, rtol=0, atol=3e-5 * size)
    values = np.linalg.svd(np.asarray(found) / size, compute_uv=False)
    assert values.max() < 1.25 < muon.MAX_SINGULAR_VALUE and (shape[0] > 3 or values.min() > 0.6)


def test_zero_momentum_gives_zero_update() -> None:
    assert not np.asarray(muon.orthogonalize(jnp.zeros((3, 5)))).any()


SPECS = {
    # Stacked layers, inputs over fsdp, outputs over tensor.
    ("up",): (
        (2, 3, 8, 12),
        muon.Matrices((2,), (3,), PartitionSpec(None, None, "fsdp", "tensor")),
    ),
    # The transpose: exchanged together with the one above.
    ("down",): (
        (2, 3, 12, 8),
        muon.Matrices((2,), (3,), PartitionSpec(None, None, "tensor", "fsdp")),
    ),
    # Attention heads in the outputs, then in the inputs.
    ("query",): ((6, 8, 4, 3), muon.Matrices((1,), (2, 3), PartitionSpec(None, "fsdp", "tensor"))),
    ("out",): (
        (6, 4, 3, 8),
        muon.Matrices((1, 2), (3,), PartitionSpec(None, "tensor", None, "fsdp")),
    ),
    # An expert dim between inputs and outputs, over its own axis; one mesh axis is unused.
    ("gate",): ((8, 2, 4), muon.Matrices((0,), (2,), PartitionSpec(None, "tensor"))),
    # Two mesh axes for one dim.
    ("wide",): ((8, 6), muon.Matrices((0,), (1,), PartitionSpec(("fsdp", "tensor")))),
    # All dims equal.
    ("square",): ((4, 4, 4), muon.Matrices((1,), (2,), PartitionSpec(None, "tensor", "fsdp"))),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_updates_match_unsharded(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    declared = {path: matrices for path, (_, matrices) in SPECS.items()}
    arrays: Any = {
        path: jax.random.normal(jax.random.key(n), shape)
        for n, (path, (shape, _)) in enumerate(SPECS.items())
    }
    wanted = jax.jit(lambda given: muon.compute_updates(given, declared, one))(arrays)
    placed = {
        path: jax.device_put(x, NamedSharding(mesh, declared[path].spec))
        for path, x in arrays.items()
    }
    with jax.set_mesh(mesh):
        found = jax.jit(lambda given: muon.compute_updates(given, declared, mesh))(placed)
    for path, leaf in wanted.items():
        assert found[path].sharding.is_equivalent_to(placed[path].sharding, leaf.ndim)
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(found[path], leaf, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize(("count", "waste"), [(8, 1.0), (16, 1.0), (9, 16 / 9), (3, 8 / 3)])
def test_all_to_all_bytes_match_formula(count: int, waste: float) -> None:
    """An axis of n devices moves 2 (n - 1) / n of a shard; there is no all-gather."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    spec = PartitionSpec(None, "fsdp", "tensor")
    declared = {("w",): muon.Matrices((1,), (2,), spec)}
    x = jax.ShapeDtypeStruct((count, 16, 32), jnp.float32, sharding=NamedSharding(mesh, spec))
    run = jax.jit(lambda x: muon.compute_updates({("w",): x}, declared, mesh))
    found = profile_program(parse_hlo(run.lower(x).compile().as_text() or "")).collectives
    shard = waste * count * 16 * 32 * 4 / 8
    assert {each.kind for each in found} == {"all-to-all"}
    sent = sum(each.total_bytes for each in found)
    assert sent == pytest.approx(2 * (3 / 4 + 1 / 2) * shard, rel=1e-6)
