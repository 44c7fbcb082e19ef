"""Bitwise comparison of the replicated arrays in the train state across devices.

If an array is not sharded over a mesh axis, the devices along that axis hold replicas, and every
step applies the same update to each replica. A hardware fault in a device makes its replica differ,
which no other check detects. Each device reduces every shard to one integer, and only these
integers are communicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.parallel.mesh import AXES
from maxpipe.parallel.sharding import to_device

Tree = Any


@dataclass(frozen=True, slots=True)
class Difference:
    """An array whose replica on `device` differs from the majority, for example from the replica on
    `other`.
    """

    name: str
    device: Any
    other: Any

    def __str__(self) -> str:
        kind, process = self.device.device_kind, self.device.process_index
        return f"{self.name} on device {self.device.id} ({kind}, process {process})"


def format_differences(found: Sequence[Difference], where: str) -> str:
    """Return the error message that reports these replica differences."""
    more = f", and {len(found) - 1} more replicas differ" if found[1:] else ""
    return (
        f"{where}: {found[0]}\n  must be bitwise equal to the replica on device "
        f"{found[0].other.id}{more}; events.jsonl lists all differences. Nothing has been "
        "saved since the replicas were last equal.\n  Restart to resume from the newest "
        "checkpoint; remove the device if it is reported again."
    )


class ReplicaCheck:
    """Bitwise comparison of array replicas in trees that have the given shardings."""

    def __init__(self, mesh: Mesh, abstract: Tree, shardings: Tree):
        self._devices = list(mesh.devices.flat)
        shapes = jax.tree_util.tree_leaves_with_path(abstract)
        placed = jax.tree.leaves(shardings)
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in shapes]
        self._groups = np.stack(
            [self._copies(leaf, each) for (_, leaf), each in zip(shapes, placed, strict=True)],
            axis=1,
        )
        self._digests = jax.jit(
            jax.shard_map(
                _digests,
                mesh=mesh,
                in_specs=(jax.tree.map(lambda each: each.spec, shardings),),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )

    def _copies(self, leaf: Any, sharding: NamedSharding) -> list[int]:
        """Return, for each device, the index of the first device that holds the same shard."""
        indices = sharding.devices_indices_map(leaf.shape)
        first: dict[str, int] = {}
        return [
            first.setdefault(str(indices[device]), index)
            for index, device in enumerate(self._devices)
        ]

    def differences(self, tree: Tree) -> list[Difference]:
        """Return the replicas in a tree that differ; the result is the same in all processes."""
        found = np.asarray(self._digests(tree))
        wrong = found != np.take_along_axis(found, self._groups, axis=0)
        return [
            difference
            for column in np.flatnonzero(wrong.any(axis=0)).tolist()
            for difference in self._of_array(column, found[:, column])
        ]

    def _of_array(self, column: int, found: np.ndarray) -> list[Difference]:
        groups, differences = self._groups[:, column], []
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            usual = Counter(found[members].tolist()).most_common(1)[0][0]
            other = members[found[members] == usual][0]
            differences += [
                Difference(self._names[column], self._devices[member], self._devices[other])
                for member in members
                if found[member] != usual
            ]
        return differences


def _digests(tree: Tree) -> jax.Array:
    """Return the checksums of each device's shards, uint32 `[devices, arrays]`, replicated on every
    device.
    """
    mine = jnp.stack([digest(leaf) for leaf in jax.tree.leaves(to_device(tree))])
    return jax.lax.all_gather(mine, AXES)


def digest(array: jax.Array) -> jax.Array:
    """Return the uint32 sum of the bits of all entries, weighted by odd numbers.

    An entry's weight depends on the entry's index. Odd weights are invertible modulo a power of
    two, so flipping a single bit always changes the sum.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    index = jnp.zeros(array.shape, jnp.uint32)
    for dim in range(array.ndim):
        stride = jnp.uint32(math.prod(array.shape[dim + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim) * stride
    return (bits.astype(jnp.uint32) * (2 * index + 1)).sum(dtype=jnp.uint32)
