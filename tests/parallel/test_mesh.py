"""Meshes: resolution of -1, rejected sizes and device order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxpipe.errors import ConfigError
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import (
    AXES,
    BATCH_AXES,
    MANUAL_AXES,
    _rotate_planes,
    build_mesh,
    describe_mesh,
    partition_devices,
    resolve_mesh_config,
)
from maxpipe.parallel.sharding import auto_mesh, rebind_mesh
from tests.errors import raises


@dataclass(frozen=True)
class FakeDevice:
    """Device attributes read by `resolve_mesh_config` and `partition_devices`."""

    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def fake_devices(slices: int, per_slice: int, platform: str = "tpu") -> list[FakeDevice]:
    return [FakeDevice(platform, slice_index=s) for s in range(slices) for _ in range(per_slice)]


def sizes(config: MeshConfig, link: str) -> dict[str, int]:
    """Return the axis sizes other than 1."""
    found = {axis: getattr(config, f"{link}_{axis}") for axis in AXES}
    return {axis: size for axis, size in found.items() if size != 1}


def test_mesh_axis_names_match_config_fields() -> None:
    fields = {field.name for field in dataclasses.fields(MeshConfig)}
    assert {f"{link}_{axis}" for link in ("ici", "dcn") for axis in AXES} <= fields
    assert set(BATCH_AXES) < set(MANUAL_AXES) < set(AXES)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"ici_data": -1}, {"data": 8}),
        ({"ici_stage": 4, "ici_fsdp": -1}, {"stage": 4, "fsdp": 2}),
        ({"ici_stage": -1, "ici_tensor": 2, "ici_data": 2}, {"stage": 2, "data": 2, "tensor": 2}),
        ({"ici_stage": 8, "ici_data": -1}, {"stage": 8}),
        ({"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2}, {"stage": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_minus_one_resolves_to_remaining_devices(
    devices: list[Any], given: dict[str, Any], wanted: dict[str, int]
) -> None:
    resolved = resolve_mesh_config(MeshConfig(**given), devices)
    assert sizes(resolved, "ici") == wanted and sizes(resolved, "dcn") == {}
    mesh = build_mesh(MeshConfig(**given))
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == wanted
    assert mesh.axis_names == AXES and len(set(mesh.devices.flat)) == 8


def test_dcn_minus_one_resolves_to_remaining_slices() -> None:
    devices = fake_devices(slices=4, per_slice=8)
    config = MeshConfig(dcn_data=-1, ici_fsdp=-1, ici_stage=2)
    resolved = resolve_mesh_config(config, devices)
    assert sizes(resolved, "dcn") == {"data": 4}
    assert sizes(resolved, "ici") == {"stage": 2, "fsdp": 4}
    resolved = resolve_mesh_config(dataclasses.replace(config, dcn_stage=2), devices)
    assert sizes(resolved, "dcn") == {"stage": 2, "data": 2}


def test_resolve_mesh_config_keeps_other_keys() -> None:
    config = MeshConfig(ici_data=-1, cpu_devices=8, axis_rules={"mlp": []})
    resolved = resolve_mesh_config(config, fake_devices(1, 8))
    assert resolved == dataclasses.replace(config, ici_data=8)


@pytest.mark.parametrize(
    ("given", "total"),
    [
        ({}, 1),
        ({"ici_stage": 3}, 3),
        ({"ici_stage": 16}, 16),
        ({"dcn_data": 3, "ici_stage": 2}, 6),
    ],
)
def test_wrong_mesh_product_raises_config_error(
    devices: list[Any], given: dict[str, Any], total: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh_config(MeshConfig(**given), devices)
    (problem,) = caught.value.problems
    assert problem.where == "mesh"
    assert f"the run needs {total}, but there are 8 cpu devices" in problem.rule
    assert f"set mesh.cpu_devices={total} for virtual CPU devices" in problem.action
    for axis in AXES:
        assert f"{axis} " in problem.value
    # The suggested action works.
    again = MeshConfig(**given, cpu_devices=total)
    resolve_mesh_config(again, fake_devices(1, total, "cpu"))


@pytest.mark.parametrize(
    ("given", "needed"),
    [({"ici_stage": 16, "ici_data": -1}, 16), ({"ici_stage": 3, "ici_fsdp": -1}, 9)],
)
def test_minus_one_rejects_sizes_that_do_not_divide_devices(
    given: dict[str, Any], needed: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh_config(MeshConfig(**given), fake_devices(1, 8, "cpu"))
    (problem,) = caught.value.problems
    stages = given["ici_stage"]
    assert problem.where in ("mesh.ici_data", "mesh.ici_fsdp") and problem.value == "-1"
    assert (
        f"(mesh.ici_stage={stages}) multiply to {stages}, which does not divide 8" in problem.rule
    )
    assert "1, 2, 4 or 8" in problem.action
    assert f"Set mesh.cpu_devices={needed}, or" in problem.action
    resolve_mesh_config(MeshConfig(**given), fake_devices(1, needed, "cpu"))


def test_suggested_cpu_devices_is_per_process() -> None:
    devices = [FakeDevice("cpu", process_index=process) for process in (0, 0, 1, 1)]
    with raises(ConfigError, "mesh", names=[8, 4], suggests="mesh.cpu_devices=4"):
        resolve_mesh_config(MeshConfig(ici_stage=8), devices)
    with raises(ConfigError, "mesh", names=[3, 4], suggests="4"):
        resolve_mesh_config(MeshConfig(ici_stage=3), devices)  # 3 does not divide 4


def test_error_suggests_minus_one_if_it_resolves() -> None:
    devices = fake_devices(1, 8, "gpu")
    for size in (1, 3):
        with raises(ConfigError, "mesh", names=[8], suggests="mesh.ici_data=-1"):
            resolve_mesh_config(MeshConfig(ici_stage=2, ici_data=size), devices)
    assert resolve_mesh_config(MeshConfig(ici_stage=2, ici_data=-1), devices).ici_data == 4


@pytest.mark.parametrize("given", [{"dcn_data": 4}, {"dcn_stage": 3}, {}])
def test_dcn_sizes_must_multiply_to_slice_count(given: dict[str, Any]) -> None:
    config = MeshConfig(**given, ici_fsdp=-1)
    with raises(ConfigError, "mesh", names=["2 slices"], suggests="mesh.dcn_data=2") as caught:
        resolve_mesh_config(config, fake_devices(slices=2, per_slice=12))
    assert "dcn_data" in caught.value.problems[0].value
    action = dataclasses.replace(config, dcn_data=2, dcn_stage=1)
    assert sizes(resolve_mesh_config(action, fake_devices(2, 12)), "ici") == {"fsdp": 12}


def test_gpu_hosts_do_not_require_dcn_axes() -> None:
    resolved = resolve_mesh_config(MeshConfig(ici_data=-1), fake_devices(2, 8, "gpu"))
    assert sizes(resolved, "ici") == {"data": 16}


def ids(config: MeshConfig) -> np.ndarray:
    """Return device IDs along the axes larger than 1."""
    mesh = build_mesh(config)
    return np.vectorize(lambda device: device.id)(mesh.devices).squeeze()


def test_dcn_is_major_dimension_of_mesh_axis(devices: list[Any]) -> None:
    assert len(devices) == 8
    # Two slices of four devices: 0..3 and 4..7.
    stages = ids(MeshConfig(dcn_stage=2, ici_stage=2, ici_fsdp=2))
    np.testing.assert_array_equal(stages, [[0, 1], [2, 3], [4, 5], [6, 7]])
    replicas = ids(MeshConfig(dcn_data=2, ici_stage=4))
    np.testing.assert_array_equal(replicas, [[0, 4], [1, 5], [2, 6], [3, 7]])
    both = ids(MeshConfig(dcn_data=2, ici_stage=2, ici_data=2))
    np.testing.assert_array_equal(both, [[0, 1, 4, 5], [2, 3, 6, 7]])
    # Four slices of two devices, on dcn_stage = 2 and dcn_data = 2.
    mixed = ids(MeshConfig(dcn_stage=2, dcn_data=2, ici_tensor=2))
    np.testing.assert_array_equal(mixed, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])


@dataclass(frozen=True)
class FakeTpu:
    """Device attributes that determine the order of TPUs in a mesh."""

    coords: tuple[int, int, int]
    device_kind: str = "TPU v5"


@pytest.mark.parametrize(
    ("shape", "rotated"),
    [
        ((4, 1, 16, 1, 1, 1), 2),  # a plane on one axis
        ((4, 1, 4, 4, 1, 1), 2),  # or on two
        ((4, 1, 1, 4, 4, 1), 3),
        ((4, 4, 4, 1, 1, 1), None),  # a line
        ((1, 64, 1, 1, 1, 1), None),  # no sharded weights
    ],
)
def test_groups_that_gather_weights_are_rotated(
    shape: tuple[int, ...], rotated: int | None
) -> None:
    grid = np.empty(64, object)
    grid[:] = [FakeTpu(coords) for coords in np.ndindex(4, 4, 4)]
    grid = grid.reshape(shape)
    wanted = grid if rotated is None else np.roll(grid, -1, rotated)
    assert (_rotate_planes(grid) == wanted).all()
    on_cpu = np.vectorize(lambda device: FakeTpu(device.coords, "cpu"))(grid)
    assert (_rotate_planes(on_cpu) == on_cpu).all()


def test_last_mesh_axis_has_adjacent_device_ids(devices: list[Any]) -> None:
    assert len(devices) == 8
    order = ids(MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2))
    np.testing.assert_array_equal(order.ravel(), np.arange(8))


def test_build_mesh_on_subset_of_devices(devices: list[Any]) -> None:
    mesh = build_mesh(MeshConfig(ici_stage=2), devices[4:6])
    assert [device.id for device in mesh.devices.flat] == [4, 5]


def test_describe_mesh_omits_axes_of_size_one(devices: list[Any]) -> None:
    mesh = build_mesh(MeshConfig(ici_stage=4, ici_fsdp=2), devices)
    assert describe_mesh(mesh) == "stage 4 x fsdp 2"
    assert describe_mesh(build_mesh(MeshConfig(), devices[:1])) == "one device"


def test_explicit_axes_are_multi_device_axes_except_tensor() -> None:
    config = MeshConfig(ici_stage=2, ici_context=2, ici_tensor=2)
    explicit = dataclasses.replace(config, shard_mode="explicit")
    devices = jax.devices()[:8]
    mesh = build_mesh(explicit, devices)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    assert {axis for axis in AXES if types[axis] == AxisType.Explicit} == {"stage", "context"}
    auto = build_mesh(config, devices)
    assert set(auto.axis_types) == {AxisType.Auto}
    assert auto_mesh(mesh) == auto and auto_mesh(auto) is auto


def test_rebind_mesh_does_not_copy_arrays() -> None:
    config = MeshConfig(ici_stage=2, ici_fsdp=4, shard_mode="explicit")
    mesh = build_mesh(config, jax.devices()[:8])
    spec = PartitionSpec("stage", ("fsdp", "data"))
    given = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
    seen = rebind_mesh(auto_mesh(mesh), given)
    assert seen.sharding == NamedSharding(auto_mesh(mesh), spec)
    np.testing.assert_array_equal(seen, given)
    pairs = zip(seen.addressable_shards, given.addressable_shards, strict=True)
    for mine, theirs in pairs:
        assert mine.data.unsafe_buffer_pointer() == theirs.data.unsafe_buffer_pointer()


def test_partition_devices_splits_off_last_devices(devices: list[Any]) -> None:
    assert partition_devices(devices, 3, "some.key") == (devices[:5], devices[5:])
    assert partition_devices(devices, 0, "some.key") == (devices, devices)
    for count in (8, 9):
        with raises(ConfigError, "some.key", names=[8], suggests="some.key=7"):
            partition_devices(devices, count, "some.key")


def test_partition_devices_rejects_single_device() -> None:
    with raises(ConfigError, "some.key", suggests=["mesh.cpu_devices=2", "some.key=0"]):
        partition_devices([FakeDevice("cpu")], 1, "some.key")


@pytest.mark.parametrize(
    ("count", "text"),
    [(3, "Set some.key=4, or some.key=0 to"), (9, "Set some.key=6, or"), (8, "Set some.key=6, or")],
)
def test_partition_devices_takes_equal_count_from_every_process(count: int, text: str) -> None:
    devices = [FakeDevice("tpu", number // 4, number) for number in range(8)]
    kept, given = partition_devices(devices, 2, "some.key")
    assert given == [devices[3], devices[7]] and kept == devices[:3] + devices[4:7]
    with pytest.raises(ConfigError, match=text):
        partition_devices(devices, count, "some.key")


def test_build_mesh_on_non_contiguous_devices(
    monkeypatch: pytest.MonkeyPatch, devices: list[Any]
) -> None:
    """Two chips of each host of a TPU slice may be non-contiguous."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("create_device_mesh must not be called")

    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", refuse)
    mesh = build_mesh(MeshConfig(ici_stage=2, ici_fsdp=2), devices[1:8:2])
    assert list(mesh.devices.flat) == devices[1:8:2]
