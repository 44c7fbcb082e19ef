"""Test a run's devices: small computations, collectives and clocks.

Run with `python -m maxpipe.diagnosis.probe SPEC`. The test runs in a separate process that the
caller can stop, because broken links and busy devices hang instead of failing. The test prints one
JSON record per result, with name, status, text and action.
"""

from __future__ import annotations

import collections
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import Phases
from maxpipe.errors import ConfigError
from maxpipe.io.files import accelerators, expand_path
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh, describe_mesh, partition_devices

COLLECTIVES = ("psum", "all_gather", "psum_scatter", "ppermute", "all_to_all")

_CLOCK_SECONDS = 1.0
_CLOCK_ROUNDS = 3


def main(text: str) -> int:
    """Test the devices described by a JSON object with `runtime`, `mesh`, `folder` and
    `teacher_devices`.
    """
    spec = json.loads(text)
    config, mesh_config = RuntimeConfig(**spec["runtime"]), MeshConfig(**spec["mesh"])
    try:
        folder = expand_path(spec["folder"], "run.dir")
        with runtime.join_processes(config, mesh_config.cpu_devices, Phases(), {}, folder):
            _check_mesh(config, mesh_config, spec.get("teacher_devices", 0))
    except ConfigError as error:
        for problem in error.problems:
            text = f"{problem.where}: {problem.rule}"
            _print_check("devices", "FAILED", text, problem.action, code=problem.code)
        return int(error.exit_code)
    return 0


def _check_mesh(config: RuntimeConfig, mesh_config: MeshConfig, teacher_devices: int) -> None:
    _devices(config)
    mesh = build_mesh(
        mesh_config, partition_devices(jax.devices(), teacher_devices, "distill.teacher_devices")[0]
    )
    _print_check("mesh", "ok", describe_mesh(mesh), platform=mesh.devices.flat[0].platform)
    for axis, size in mesh.shape.items():
        if size > 1:
            _collectives(mesh, axis)
    if jax.process_count() > 1:
        _clocks()


def _print_check(name: str, status: str, text: str, action: str = "", **more: Any) -> None:
    record = {"name": name, "status": status, "text": text, "action": action} | more
    print(json.dumps(record), flush=True)


def _devices(config: RuntimeConfig) -> None:
    """List the devices, and check the result of a small computation on every local device."""
    for device in jax.local_devices():
        doubled = jax.device_put(np.arange(8.0, dtype=np.float32), device) * 2
        if np.asarray(doubled).tolist() != [2.0 * i for i in range(8)]:
            action = "Do not use this device in runs, and have it checked."
            _print_check("devices", "FAILED", f"{device} returned wrong results for x * 2.", action)
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    words = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    words += f" in {pluralize(jax.process_count(), 'process')}"
    present = accelerators()
    if config.platform == "auto" and jax.default_backend() == "cpu" and present:
        action = "Run: pip install 'maxpipe[tpu]' or 'maxpipe[cuda]', or set runtime.platform=cpu."
        _print_check(
            "devices", "warning", f"{words}, but {present[0]} exists.", action, kinds=kinds
        )
    else:
        _print_check("devices", "ok", words, kinds=kinds)


def _collectives(mesh: Mesh, axis: str) -> None:
    name, wrong = f"collectives over {axis}", _wrong_collectives(mesh, axis)
    if wrong:
        action = "Check the links between these devices, XLA_FLAGS and LIBTPU_INIT_ARGS."
        _print_check(name, "FAILED", f"wrong results from {', '.join(wrong)}.", action)
    else:
        _print_check(name, "ok", f"{', '.join(COLLECTIVES)} return correct results")


def _wrong_collectives(mesh: Mesh, axis: str) -> list[str]:
    """Return the names of the collectives that give wrong results on the local devices."""
    size = mesh.shape[axis]
    # Row i is the input of device i. Sums of these small integers are exact in float32.
    rows = (np.arange(size * size).reshape(size, size) % 251).astype(np.float32)
    following = [(i, (i + 1) % size) for i in range(size)]

    def program(given: jax.Array) -> jax.Array:
        row, here, every = given[0], lax.axis_index(axis), jnp.asarray(rows)
        total = every.sum(0)
        pairs = (
            (lax.psum(row, axis), total),
            (lax.all_gather(row, axis), every),
            (lax.psum_scatter(row, axis, tiled=True), total[here, None]),
            (lax.ppermute(row, axis, following), every[(here - 1) % size]),
            (lax.all_to_all(row, axis, 0, 0, tiled=True), every[:, here]),
        )
        return jnp.stack([jnp.array_equal(got, wanted) for got, wanted in pairs])[None]

    spec, all_axes = PartitionSpec(axis), PartitionSpec(mesh.axis_names)
    placed = jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, spec), lambda index: rows[index]
    )
    run = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=all_axes, check_vma=False)
    right = jax.jit(run)(placed)
    mine = np.concatenate([np.asarray(shard.data) for shard in right.addressable_shards])
    return [name for number, name in enumerate(COLLECTIVES) if not mine[:, number].all()]


def _clocks() -> None:
    """Report the clock skew between processes, as the smallest of several measurements."""
    differences = []
    for number in range(_CLOCK_ROUNDS):
        multihost_utils.sync_global_devices(f"clocks {number}")
        # Send the time as two int32 values, because jax would round a float64 to float32.
        thousands, remainder = divmod(time.time(), 1000)
        own = np.array([int(thousands), int(remainder * 1e6)], np.int32)
        times = np.asarray(multihost_utils.process_allgather(own), np.int64)
        seconds = times[:, 0] * 1000 + times[:, 1] / 1e6
        differences.append(float(seconds.max() - seconds.min()))
    least = min(differences)
    words = f"{pluralize(jax.process_count(), 'process')}, clocks differ by at most {least:.2f} s"
    if least > _CLOCK_SECONDS:
        _print_check(
            "clocks", "warning", f"{words}.", "Start NTP (chrony, systemd-timesyncd) on all hosts."
        )
    else:
        _print_check("clocks", "ok", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
