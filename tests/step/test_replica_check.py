"""Comparison of replicas on several devices after one was changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.replica_check import ReplicaCheck, digest, format_differences

SPECS = {
    "whole": PartitionSpec(),
    "split": PartitionSpec("fsdp", None),
    "narrow": PartitionSpec(None, "fsdp"),
    "count": PartitionSpec(),
}


def flipped(array: jax.Array, device: int, index: int, bit: int) -> jax.Array:
    """Return the array with one bit flipped in one entry of one device's shard."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            entries = data.reshape(-1).view(f"uint{8 * data.dtype.itemsize}")
            entries[index] ^= entries.dtype.type(1 << bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """A mesh with four replicas of arrays sharded over fsdp, and eight of unsharded arrays."""
    return build_mesh(MeshConfig(ici_data=4, ici_fsdp=2), jax.devices())


@pytest.fixture(scope="module")
def tree(mesh: Mesh) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    arrays = {
        "whole": random.normal(size=(3, 5)).astype(np.float32),
        "split": random.normal(size=(6, 7)).astype(np.float32),
        "narrow": jnp.asarray(random.normal(size=(2, 4)), jnp.bfloat16),
        "count": np.int32(7),
    }
    return {
        name: jax.device_put(array, NamedSharding(mesh, SPECS[name]))
        for name, array in arrays.items()
    }


@pytest.fixture(scope="module")
def check(mesh: Mesh, tree: dict[str, jax.Array]) -> ReplicaCheck:
    return ReplicaCheck(mesh, tree, {name: leaf.sharding for name, leaf in tree.items()})


def test_equal_replicas_have_no_differences(check: ReplicaCheck, tree: Any) -> None:
    assert check.differences(tree) == []


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("device", [0, 3, 7])
@pytest.mark.fault("N5")
def test_flipped_bit_is_reported_with_array_and_device(
    name: str, device: int, check: ReplicaCheck, tree: Any
) -> None:
    size, width = tree[name].addressable_shards[0].data.size, 8 * tree[name].dtype.itemsize
    for index, bit in ((0, 0), (size - 1, width - 1), (size // 2, width // 2)):
        (found,) = check.differences(tree | {name: flipped(tree[name], device, index, bit)})
        assert (found.name, found.device.id) == (name, device)
        assert found.other.id != device


def test_every_difference_is_reported(check: ReplicaCheck, tree: Any) -> None:
    wrong = tree | {
        "whole": flipped(flipped(tree["whole"], 2, 1, 4), 5, 3, 30),
        "split": flipped(tree["split"], 6, 2, 9),
    }
    found = check.differences(wrong)
    assert {(each.name, each.device.id) for each in found} == {
        ("whole", 2),
        ("whole", 5),
        ("split", 6),
    }
    message = format_differences(found, "runs/run: step 40").splitlines()
    assert message[0].startswith("runs/run: step 40: ") and "on device" in message[0]
    assert "and 2 more replicas differ" in message[1]
    assert message[2].endswith(".")


def test_digest_depends_on_every_entry_and_its_position() -> None:
    random = np.random.default_rng(1)
    values = random.normal(size=(4, 3, 2)).astype(np.float32)
    number = int(digest(jnp.asarray(values)))
    odd = 2 * np.arange(values.size, dtype=np.uint64) + 1
    assert number == int((values.reshape(-1).view(np.uint32) * odd).sum() % 2**32)
    exchanged = values.copy()
    exchanged[0, 0, 0], exchanged[3, 2, 1] = values[3, 2, 1], values[0, 0, 0]
    assert int(digest(jnp.asarray(exchanged))) != number
    assert int(digest(jnp.asarray(np.where(values == values[1, 1, 1], -values, values)))) != number
