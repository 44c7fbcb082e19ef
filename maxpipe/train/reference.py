"""The reference of a run: the parameters that it began with, beside those that it trains.

Frozen parameters are the same in both and are there once. A checkpoint has a digest of the
reference and not the reference, which is read again from where the run began.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import UInt32

from maxpipe.errors import ConfigError
from maxpipe.parallel.explicit import left_to_compiler, on_mesh
from maxpipe.pipeline.trainable import joined
from maxpipe.train.step import Steps

Tree = Any


class Reference:
    """Copies of the trained parameters, divided over devices as they are.

    `saved_digest` is that of a checkpoint, if the run goes on from one.

    Raises:
        ConfigError: these are not the parameters that the run has begun with.
    """

    def __init__(self, steps: Steps, params: Tree, saved_digest: str | None, where: str):
        mine = steps.partition.trained(params)
        self._copies = jax.tree.map(jnp.copy, mine)  # a step uses its own up
        self.digest = _digest(steps, mine)
        if saved_digest not in (None, self.digest):
            raise ConfigError.one(
                where,
                None,
                "must lead to the weights that this run has begun with, which are the reference "
                "of grpo.kl: other weights are there now.",
                "Put them back, name the step that they are of with RUN@STEP, or set run.name to a "
                "new name.",
            )

    def of(self, params: Tree) -> Tree:
        """The parameters of the reference, `params` being those that are trained."""
        return joined(params, self._copies)


def _digest(steps: Steps, params: Tree) -> str:
    """Of parameters in network order: no layout changes it."""

    def digest(params: Tree) -> UInt32[Array, " leaves"]:
        saved = steps.partition.to_saved(params)
        return jnp.stack([_sum_of_bits(leaf) for leaf in jax.tree.leaves(saved)])

    def run(params: Tree) -> UInt32[Array, " leaves"]:
        return left_to_compiler(digest, PartitionSpec())(params)

    mesh = steps.partition.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(on_mesh(mesh, run), out_shardings=everywhere)(params)
    return "".join(f"{int(each):08x}" for each in jax.device_get(found))


def _sum_of_bits(leaf: Array) -> UInt32[Array, ""]:
    """Each entry's bits times an odd number of its own, modulo 2**32: in any order the same."""
    unsigned = jnp.uint32 if leaf.dtype.itemsize == 4 else jnp.uint16
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for dim, size in enumerate(leaf.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
    return (bits * (2 * place + 1) * jnp.uint32(0x9E3779B1)).sum(dtype=jnp.uint32)
