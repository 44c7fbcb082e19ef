"""How attention is divided over axes that the pipeline's program leaves to the compiler.

A kernel is a program for one device: what calls it enters the devices' own programs
(`per_device.on_shards`), heads over tensor, and rows where the program is automatic throughout.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.parallel.mesh import BATCH_AXES, TENSOR


def axes_of(query: Float[Array, "B T N H"]) -> tuple[tuple[str, ...], str | None]:
    """(axes over which rows are divided here, that of the heads)."""
    mesh = jax.sharding.get_abstract_mesh()
    rest = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    rows = tuple(axis for axis in BATCH_AXES if axis in rest)
    if query.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()
    return rows, TENSOR if _head_shards(query.shape[2]) > 1 else None


def for_every_shard(x: Float[Array, "B S G h"], num_heads: int) -> Float[Array, "B S g h"]:
    """Key/value heads, some repeated where there are fewer than shards of the query heads."""
    count, shards = x.shape[2], _head_shards(num_heads)
    return jnp.repeat(x, math.lcm(count, shards) // count, axis=2) if count % shards else x


def _head_shards(num_heads: int) -> int:
    """Devices over which heads are split here."""
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or TENSOR in mesh.manual_axes:
        return 1
    size = mesh.shape[TENSOR]
    return 1 if num_heads % size else size
