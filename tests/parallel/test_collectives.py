"""Collectives in shard_map, and their gradients."""

from __future__ import annotations

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from maxpipe.parallel.collectives import all_gather


def test_gradient_of_a_bfloat16_gather_is_summed_in_float32() -> None:
    """XLA for CPU aborts on a bfloat16 reduce-scatter in a mesh with an automatic axis."""
    mesh = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (8, 6, 4), jnp.bfloat16)
    scale = jax.random.normal(jax.random.key(1), (4, 8, 24, 4), jnp.bfloat16)

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        gathered = all_gather(x, "expert", 1) * scale[0]
        return jnp.sum(gathered.astype(jnp.float32))[None]

    rows = PartitionSpec(None, "expert")
    mapped = jax.shard_map(
        loss,
        axis_names={"expert"},
        in_specs=(rows, PartitionSpec("expert")),
        out_specs=PartitionSpec("expert"),
    )
    with jax.set_mesh(mesh):
        x = jnp.tile(x, (1, 4, 1))
        found = jax.jit(jax.grad(lambda x: mapped(x, scale).sum()))(x)
    wanted = scale.astype(jnp.float32).sum(0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, wanted)
