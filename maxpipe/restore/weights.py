"""A start from weights alone: of a Hugging Face folder, and with more tokens than there were.

Arrays are in the form of checkpoints: network order, without padding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint.trees import by_name
from maxpipe.huggingface.source import Source
from maxpipe.step.state import VOCABULARY

Tree = Any


def of_folder(source: Source, abstract: Tree) -> Tree:
    """A folder's parameters, placed like `abstract`.

    Each process reads what its devices hold, one device's part of one parameter at a time.

    Raises:
        ConfigError: a file cannot be read, or holds NaN or infinity.
    """
    size = _vocabulary(abstract)

    def read(name: str, leaf: Any) -> jax.Array:
        places: dict[str, list[Any]] = {}  # copies on several devices are read once
        regions = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        for device, region in regions.items():
            places.setdefault(str(region), []).append(device)
        shards = {}
        for devices in places.values():
            values = source.region(name, np.dtype(leaf.dtype), regions[devices[0]], size)
            for device in devices:
                shards[device] = jax.device_put(values, device)
            jax.block_until_ready(shards[devices[-1]])  # `values` are then free
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [shards[device] for device in regions]
        )

    return by_name(read, abstract)


def _vocabulary(params: Tree) -> int:
    return params["embedding"].shape[0]


def with_tokens(abstract: Tree, size: int) -> Tree:
    """The same with another vocabulary, which is not divided over devices."""
    found = dict(abstract)
    for name, dim in VOCABULARY.items():
        if name in abstract:
            leaf = abstract[name]
            shape, spec = list(leaf.shape), [*leaf.sharding.spec, None, None][: leaf.ndim]
            shape[dim], spec[dim] = size, None
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
            found[name] = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)
    return found


def grown(params: Tree, abstract: Tree) -> Tree:
    """The parameters with the vocabulary of `abstract`: new rows are the mean of the old ones."""
    found = dict(params)
    for name, dim in VOCABULARY.items():
        if name in params:
            wanted = abstract[name]

            def grow(table: jax.Array, dim: int = dim, wanted: Any = wanted) -> jax.Array:
                mean = table.astype(jnp.float32).mean(dim, keepdims=True).astype(table.dtype)
                shape = list(table.shape)
                shape[dim] = wanted.shape[dim] - table.shape[dim]
                return jnp.concatenate([table, jnp.broadcast_to(mean, shape)], dim)

            found[name] = jax.jit(grow, out_shardings=wanted.sharding)(params[name])
    return found


def words(before: int, now: int) -> str:
    """The line that says what was added."""
    assert now > before
    return (
        f"the vocabulary grows from {before:,} to {now:,} tokens: each new row of the embedding"
        " and of the output projection is the mean of the old ones"
    )
