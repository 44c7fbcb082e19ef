"""The device mesh: axis names, axis sizes, and device placement by interconnect.

Fast links (ici) connect the devices of a slice, and the data-center network (dcn) connects slices.
The size of an axis is ici x dcn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxpipe.errors import Code, ConfigError
from maxpipe.io.formatting import format_divisors, pluralize, round_up
from maxpipe.parallel.axes import MESH_AXES, MeshConfig, device_count_rule, infer_axis_sizes

STAGE, DATA, FSDP = "stage", "data", "fsdp"
EXPERT, CONTEXT, TENSOR = "expert", "context", "tensor"
AXES = MESH_AXES
"""Mesh axes, outermost first. Neighboring devices along the last axis are connected by the fastest
links.
"""

MANUAL_AXES = (STAGE, DATA, FSDP, EXPERT, CONTEXT)
"""Manual axes of the pipeline's per-device program. Axes that are not listed are auto axes."""

AUTOMATIC_AXES = tuple(axis for axis in AXES if axis not in MANUAL_AXES)

BATCH_AXES = (DATA, FSDP, EXPERT)
"""Axes along which devices hold different sequences of the batch."""

TOKEN_AXES = (*BATCH_AXES, CONTEXT)
"""Axes along which devices hold different tokens, so that each device has partial sums of losses
and gradients."""


class Device(Protocol):
    """Attributes of JAX devices that this module uses."""

    @property
    def platform(self) -> str: ...

    @property
    def process_index(self) -> int: ...


def resolve_mesh_config(config: MeshConfig, devices: Sequence[Device]) -> MeshConfig:
    """Replace each -1 in the mesh config with the number of remaining devices.

    Raises:
        ConfigError: the product of the sizes is not the number of devices or of slices.
    """
    slices, given = _num_slices(devices), config
    config = infer_axis_sizes(config, len(devices), slices)
    ici, dcn = _sizes(config)
    _check_slices(dcn, slices, devices[0].platform)
    total = math.prod(ici) * math.prod(dcn)
    if total != len(devices):
        wanted = " x ".join(f"{axis} {i * d}" for axis, i, d in zip(AXES, ici, dcn, strict=True))
        kind = devices[0].platform
        if rest := next((key for key in _ICI_KEYS if getattr(given, key) == -1), ""):
            raise _remainder_error(given, rest, math.prod(dcn), devices)
        processes = len({device.process_index for device in devices})
        if kind == "cpu" and total % processes == 0:
            each = total // processes
            action = f"Run on {pluralize(total, 'accelerator')}, or set mesh.cpu_devices={each} "
            action += "for virtual CPU devices, or change an axis size."
        elif len(devices) % (total // config.ici_data) == 0:
            action = (
                "Set mesh.ici_data=-1 to use the remaining devices, or change another axis size."
            )
        else:
            action = f"Set axis sizes whose product is {len(devices)}."
        raise ConfigError.one(
            Code.MESH_DEVICES,
            "mesh",
            wanted,
            device_count_rule(total, len(devices), kind),
            action,
        )
    return config


_ICI_KEYS = tuple(f"ici_{axis}" for axis in AXES)


def _remainder_error(
    given: MeshConfig, rest: str, slices: int, devices: Sequence[Device]
) -> ConfigError:
    """Return the error for a -1 if the product of the other sizes does not divide the number of
    devices.
    """
    count, kind = len(devices), devices[0].platform
    inside = {key: size for key in _ICI_KEYS if (size := getattr(given, key)) > 1}
    fixed = math.prod(inside.values()) * slices
    sizes = [f"mesh.{key}={size}" for key, size in inside.items()]
    sizes += [f"mesh.dcn_* {slices}"] if slices > 1 else []
    processes = len({device.process_index for device in devices})
    enough = round_up(count, math.lcm(fixed, processes))
    more = f"mesh.cpu_devices={enough // processes}, or " if kind == "cpu" else ""
    return ConfigError.one(
        Code.MESH_DEVICES,
        f"mesh.{rest}",
        "-1",
        f"is computed from {pluralize(count, f'{kind} device')}, but the other sizes "
        f"({', '.join(sizes)}) multiply to {fixed}, which does not divide {count}.",
        f"Set {more}the other sizes so that their product is {format_divisors(count)}.",
    )


def build_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Return a mesh that contains all devices and has the axis names in `AXES`.

    Raises:
        ConfigError: the product of the sizes is not the number of devices or of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    config = resolve_mesh_config(config, devices)
    grid = _rotate_planes(_arrange(devices, *_sizes(config)))
    types = [_axis_type(axis, size, config) for axis, size in zip(AXES, grid.shape, strict=True)]
    return Mesh(grid, AXES, axis_types=tuple(types))


def partition_devices(
    devices: Sequence[Device], count: int, key: str
) -> tuple[list[Device], list[Device]]:
    """Separate the last `count` devices from the others; if `count` is 0, both groups contain all
    devices.

    Every process contributes the same number of devices and keeps at least one, so both groups span
    all processes.

    Raises:
        ConfigError: no devices would remain, or the processes cannot contribute the same number of
            devices. `key` is the config key of `count`.
    """
    if not count:
        return list(devices), list(devices)
    own: dict[int, list[Device]] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    processes, smallest = (
        len(own),
        min(len(devices_of_process) for devices_of_process in own.values()),
    )
    each, remainder = divmod(count, processes)
    if remainder or smallest <= each:
        most = (smallest - 1) * processes
        rule = (
            "must leave at least one device for the rest of the run: the run has "
            f"{len(devices)} devices."
        )
        if processes > 1:
            rule = (
                f"must be a multiple of {processes}, the number of processes, and leave at least "
                f"one device of each process for the rest of the run: the run has {len(devices)} "
                "devices."
            )
        fits = [f"{key}={min(most, round_up(count, processes))}"] if most else []
        if devices[0].platform == "cpu" and not remainder:
            fits.append(f"mesh.cpu_devices={2 * each}")
        action = f"Set {', or '.join([*fits, f'{key}=0 to share all devices'])}."
        raise ConfigError.one(Code.MESH_DEVICES, key, count, rule, action)
    kept = [device for local in own.values() for device in local[:-each]]
    split_off = [device for local in own.values() for device in local[-each:]]
    return kept, split_off


def _axis_type(axis: str, size: int, config: MeshConfig) -> AxisType:
    # The pipeline's program is manual over the explicit axes. Axes of size 1 are omitted from the
    # program, and `tensor` is an auto axis.
    explicit = config.shard_mode == "explicit" and axis in MANUAL_AXES and size > 1
    return AxisType.Explicit if explicit else AxisType.Auto


def _sizes(config: MeshConfig) -> tuple[list[int], list[int]]:
    ici, dcn = ([getattr(config, f"{link}_{axis}") for axis in AXES] for link in ("ici", "dcn"))
    return ici, dcn


def _num_slices(devices: Sequence[Device]) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def _check_slices(dcn: list[int], slices: int, kind: str) -> None:
    # On TPU, the dcn axes must match the slices. On other platforms, ici axes can cross slice
    # boundaries.
    allowed = {slices} if kind == "tpu" else {1, slices}
    total = math.prod(dcn)
    if slices > 1 and total not in allowed:
        raise ConfigError.one(
            Code.MESH_DEVICES,
            "mesh",
            " x ".join(f"dcn_{axis} {size}" for axis, size in zip(AXES, dcn, strict=True)),
            f"must multiply to the number of slices: the product is {total}, and the {kind} "
            f"devices are in {pluralize(slices, 'slice')}.",
            f"Set mesh.dcn_data={slices} and every other mesh.dcn_* to 1, or choose another "
            "factorization.",
        )


def _arrange(devices: list[Device], ici: list[int], dcn: list[int]) -> np.ndarray:
    if math.prod(dcn) == 1:
        try:
            return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
        except AssertionError:  # the devices of the slice are not adjacent
            return np.asarray(devices).reshape(ici)
    processes = {device.process_index for device in devices}
    by_process = _num_slices(devices) == 1 and len(processes) == math.prod(dcn)
    if _num_slices(devices) > 1 or by_process:
        return mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    # A single process without slices uses virtual devices: consecutive devices are grouped into
    # slices.
    grid = np.asarray(devices).reshape(*dcn, *ici)
    order = [
        dim
        for pair in zip(range(len(AXES)), range(len(AXES), 2 * len(AXES)), strict=True)
        for dim in pair
    ]
    return grid.transpose(order).reshape([i * d for i, d in zip(ici, dcn, strict=True)])


_WITH_SPARSE_CORES = ("TPU v5", "TPU v6 lite", "TPU7x")
"""Kinds of devices that gather weights on sparse cores."""


def _rotate_planes(grid: np.ndarray) -> np.ndarray:
    """Rotate the devices of one mesh axis by one, if weights are gathered over a plane of a TPU
    torus.

    XLA of libtpu 0.0.42 does not use sparse cores for a gather whose devices are exactly a plane,
    row by row, so that the gather overlaps with nothing. It accepts any other order. A rotation
    preserves the neighbors in a torus, and the neighbors along other axes.
    """
    axes = [
        AXES.index(axis) for axis in (FSDP, EXPERT, CONTEXT) if grid.shape[AXES.index(axis)] > 1
    ]
    first = grid.flat[0]
    if not axes or getattr(first, "device_kind", "") not in _WITH_SPARSE_CORES:
        return grid
    group = grid[tuple(slice(None) if n in axes else 0 for n in range(grid.ndim))].flat
    coords = [(getattr(device, "slice_index", 0), *device.coords) for device in group]
    varying = [len(set(places)) > 1 for places in zip(*coords, strict=True)]
    return np.roll(grid, -1, axes[0]) if not varying[0] and sum(varying) > 1 else grid


def mesh_device_kind() -> str:
    """Return the device kind of the current mesh, whose devices need not be present, or ""."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else str(device.device_kind or "")


def describe_mesh(mesh: Mesh) -> str:
    """Return text that lists the mesh axes of more than one device, as in `stage 4 x fsdp 2`."""
    sizes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return " x ".join(sizes) or "one device"
