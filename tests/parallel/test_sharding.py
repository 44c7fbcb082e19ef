"""Rules from logical to mesh axes, and placement of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.errors import ConfigError
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES, MeshConfig
from maxpipe.parallel.mesh import MANUAL_AXES, build_mesh
from maxpipe.parallel.sharding import (
    BATCH_SPEC,
    STACKED_AXES,
    AxisRules,
    constrain,
    fsdp_dim,
    local_sequences,
    make_global_batch,
    restrict_spec,
    sequences_by_process,
)

WEIGHTS = ("fsdp", "expert", "context")
RULES = AxisRules.from_config(MeshConfig())


def rules_with(**changes: list[str]) -> AxisRules:
    return AxisRules.from_config(MeshConfig(axis_rules=changes))


# Axis rules.


def test_specs_follow_axis_rules() -> None:
    assert RULES.spec(("embed", "heads", "head_dim")) == PartitionSpec(WEIGHTS, "tensor", None)
    assert RULES.spec(("vocab", "embed")) == PartitionSpec(("stage", "tensor"), WEIGHTS)
    assert RULES.spec(("norm",)) == PartitionSpec(None)
    assert RULES.spec((None, "mlp")) == PartitionSpec(None, "tensor")
    stacked = RULES.spec((*STACKED_AXES, "mlp", "embed"))
    assert stacked == PartitionSpec(None, "stage", None, "tensor", WEIGHTS)
    assert RULES.spec(("batch",)) == BATCH_SPEC


def test_axis_rules_override_single_entries() -> None:
    changed = rules_with(vocab=["stage"], mlp=[])
    assert changed.spec(("vocab", "mlp", "heads")) == PartitionSpec("stage", None, "tensor")
    assert dict(changed.table).keys() == {*DEFAULT_AXIS_RULES, "stage"}
    assert rules_with() == RULES and hash(rules_with()) == hash(RULES) and changed != RULES


def test_spec_rejects_mesh_axis_used_by_two_dims() -> None:
    rules = rules_with(head_dim=["tensor"])
    with pytest.raises(ConfigError) as caught:
        rules.spec(("embed", "heads", "head_dim"), where="layers.attention.query")
    (problem,) = caught.value.problems
    assert problem.where == "mesh.axis_rules" and problem.value == "head_dim: [tensor]"
    assert "layers.attention.query has dims 'heads' and 'head_dim'" in problem.rule
    assert "same mesh axis 'tensor'" in problem.rule
    assert problem.action == "Set mesh.axis_rules.head_dim=[], or change the rule of 'heads'."
    assert rules_with(head_dim=["tensor"], heads=[]).spec(("heads", "head_dim")) == (
        PartitionSpec(None, "tensor")
    )


def test_spec_rejects_conflict_within_axis_tuple() -> None:
    with pytest.raises(ConfigError, match="'vocab' and 'mlp' on the same mesh axis 'tensor'"):
        RULES.spec(("vocab", "mlp"))


@pytest.mark.parametrize(
    ("spec", "restricted", "dim"),
    [
        ((), (), None),
        (("fsdp", "tensor"), ("fsdp", None), 0),
        ((("stage", "tensor"), "fsdp"), ("stage", "fsdp"), 1),
        (
            (None, "stage", None, "tensor", ("data", "fsdp")),
            (None, "stage", None, None, ("data", "fsdp")),
            4,
        ),
        (("tensor", "expert"), (None, "expert"), None),
        (("expert", ("fsdp", "context")), ("expert", ("fsdp", "context")), 1),
    ],
)
def test_restrict_spec_and_fsdp_dim(
    spec: tuple[Any, ...], restricted: tuple[Any, ...], dim: int | None
) -> None:
    assert restrict_spec(PartitionSpec(*spec), MANUAL_AXES) == PartitionSpec(*restricted)
    assert restrict_spec(PartitionSpec(*spec), ()) == PartitionSpec(*(None for _ in spec))
    assert fsdp_dim(PartitionSpec(*spec)) == dim


# Constraints.


def test_constrain_does_nothing_without_a_mesh() -> None:
    x = jnp.ones((2, 4))
    assert constrain(x, ("batch", "mlp"), RULES) is x
    # Even an invalid request is not checked.
    assert constrain(x, ("mlp", "heads"), RULES) is x


def test_constrain_does_nothing_without_automatic_axes(devices: list[Any]) -> None:
    mesh = build_mesh(MeshConfig(ici_stage=4, ici_fsdp=2), devices)

    def program(x: jax.Array) -> jax.Array:
        assert constrain(x, (None, "mlp"), RULES) is x
        return x

    run = jax.shard_map(
        program,
        mesh=mesh,
        axis_names=set(MANUAL_AXES),
        in_specs=BATCH_SPEC,
        out_specs=BATCH_SPEC,
    )
    jax.eval_shape(run, jnp.ones((2, 4)))


def test_constrain_shards_automatic_axes(devices: list[Any]) -> None:
    mesh = build_mesh(MeshConfig(ici_fsdp=2, ici_tensor=4), devices)

    def program(x: jax.Array) -> jax.Array:
        return constrain(x * 2, (None, "mlp"), RULES)

    run = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            axis_names=set(MANUAL_AXES),
            in_specs=BATCH_SPEC,
            out_specs=BATCH_SPEC,
        )
    )
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    out = run(x)
    np.testing.assert_array_equal(out, 2 * x)
    wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    assert out.sharding.is_equivalent_to(wanted, 2)


# Batches.


@dataclass(frozen=True)
class Fake:
    """Fake device of one process."""

    process_index: int
    number: int


class HalfOfTheDevices:
    """Batch sharding in which this process has three devices, two of them with the same rows."""

    def devices_indices_map(self, shape: tuple[int]) -> dict[Fake, tuple[slice]]:
        (rows,) = shape
        quarter = rows // 4
        third = slice(2 * quarter, 3 * quarter)
        mine = {Fake(0, 5): (third,), Fake(0, 0): (slice(0, quarter),), Fake(0, 4): (third,)}
        return mine | {Fake(1, 1): (slice(quarter, 2 * quarter),)}


def test_local_sequences_are_sorted_and_unique() -> None:
    sharding: Any = HalfOfTheDevices()
    assert local_sequences(sharding, 8).tolist() == [0, 1, 4, 5]
    found = sequences_by_process(sharding, 8)
    assert {process: rows.tolist() for process, rows in found.items()} == {
        0: [0, 1, 4, 5],
        1: [2, 3],
    }


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> Mesh:
    return build_mesh(MeshConfig(ici_stage=2, ici_data=2, ici_fsdp=2), devices)


def test_batch_is_sharded_over_batch_axes_and_replicated_over_stages(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, BATCH_SPEC)
    rows = local_sequences(sharding, 8)
    assert rows.tolist() == list(range(8))
    host = {
        "tokens": np.arange(24, dtype=np.int32).reshape(8, 3),
        "example_ids": np.arange(8, dtype=np.int32),
    }
    placed = make_global_batch(host, rows, 8, sharding)
    assert placed.keys() == host.keys()
    for name, array in placed.items():
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, host[name])
    at = {
        shard.device: np.asarray(shard.data) for shard in placed["example_ids"].addressable_shards
    }
    for stage in range(2):
        for data in range(2):
            for fsdp in range(2):
                start = 2 * (2 * data + fsdp)
                device = mesh.devices[stage, data, fsdp].item()
                assert at[device].tolist() == [start, start + 1]


def test_global_batch_reads_device_shard_from_local_sequences(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_device(shape: tuple[int, ...], sharding: NamedSharding, part: Any) -> np.ndarray:
        assert shape == (8, 3) and sharding.mesh is mesh
        return part((slice(4, 6), slice(None)))

    monkeypatch.setattr(jax, "make_array_from_callback", one_device)
    # This process holds only sequences 0, 1, 4 and 5 of the batch in its host array.
    host = {"tokens": np.arange(12).reshape(4, 3)}
    rows = np.array([0, 1, 4, 5])
    placed = make_global_batch(host, rows, 8, NamedSharding(mesh, BATCH_SPEC))
    np.testing.assert_array_equal(placed["tokens"], host["tokens"][2:])
