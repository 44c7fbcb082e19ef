"""Runs a schedule: the layer stack as a ring of stages in one jitted SPMD program.

The program is written per device over the axes stage, data and fsdp (tensor stays
automatic). One loop walks the ticks of the table, which is an argument of the program; forward and
backward are both part of the table: nothing differentiates through this program.

The engine sees functions and stacked parameters, never a model class or a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxpipe.parallel.mesh import BATCH_AXES, STAGE
from maxpipe.parallel.sharding import BATCH_SPEC, restrict
from maxpipe.pipeline.collectives import from_position, program_axes, sum_over, vary
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.program import Network, Plan, Program, Table
from maxpipe.pipeline.remat import Keep
from maxpipe.pipeline.slots import Idle
from maxpipe.pipeline.weights import Division, Gather
from maxpipe.schedule.table import Schedule

Tree = Any


@dataclass(frozen=True)
class Engine:
    """A network on a mesh: builds the functions that run it by a schedule."""

    network: Network
    layout: Layout
    mesh: Mesh
    specs: Tree
    """PartitionSpec of every parameter, stacked dims included."""
    weight_gather: Gather
    keep: Keep
    idle: Idle

    def value_and_grad(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, Tree]]:
        """(params, batch, key) -> (mean loss over all target tokens, float32 gradients).

        `batch` is a dict of global arrays `[rows, ...]` with `tokens`, `targets`, `loss_mask`
        and whatever the layers read; rows are sharded over the batch axes.
        """
        return self._shard_map(_train, schedule, (PartitionSpec(), self.specs))

    def loss(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(params, batch, None) -> (summed loss, number of target tokens), forward only."""
        return self._shard_map(_evaluate, schedule, (PartitionSpec(), PartitionSpec()))

    def buffer_shapes(self, schedule: Schedule, params: Tree, batch: Tree) -> dict[str, list[Any]]:
        """Shapes on one device of each buffer that the loop over ticks carries.

        Known before anything is compiled.
        """
        found: dict[str, list[Any]] = {}

        def measure(plan: Plan, schedule: Schedule, params: Tree, batch: Tree, *_: Any):
            buffers = Program(plan, schedule, params, batch, None).buffers()
            found.update((name, jax.tree.leaves(tree)) for name, tree in buffers._asdict().items())
            return jnp.float32(0)

        run = self._shard_map(measure, schedule, PartitionSpec())
        with jax.set_mesh(self.mesh):
            jax.eval_shape(run, params, batch, None)
        return {
            name: [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            for name, leaves in found.items()
        }

    def _per_device(self, specs: Tree) -> Tree:
        """The specs as the per-device program sees them."""
        axes = program_axes(self.mesh)
        return jax.tree.map(lambda spec: restrict(spec, axes), specs, is_leaf=_is_spec)

    def _shard_map(self, program: Callable, schedule: Schedule, out_specs: Tree) -> Callable:
        assert schedule.num_stages == self.mesh.shape[STAGE]
        assert schedule.ring == self.layout.ring
        divisions = jax.tree.map(Division.of, self.specs, is_leaf=_is_spec)
        plan = Plan(self.network, self.layout, self.weight_gather, self.keep, self.idle, divisions)
        table = Table.of(schedule)
        run, axes = partial(program, plan, schedule), program_axes(self.mesh)
        if axes:
            in_specs = (self.specs, BATCH_SPEC, PartitionSpec(), _table_specs(table))
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                axis_names=set(axes),
                in_specs=self._per_device(in_specs),
                out_specs=self._per_device(out_specs),
            )
        return lambda params, batch, key: run(params, batch, key, table)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _table_specs(table: Table) -> Table:
    """How the table lies on the mesh: to each stage its column."""
    return jax.tree.map(
        lambda column: PartitionSpec(None, STAGE) if column.ndim == 2 else PartitionSpec(), table
    )


def _train(
    plan: Plan, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Table
) -> tuple[jax.Array, Tree]:
    program = Program(plan, schedule, params, batch, key)
    count = jnp.maximum(sum_over(_targets(batch), BATCH_AXES), 1.0)
    carry = program.run(table, vary(1.0 / count))
    assert carry.gradients is not None
    loss = sum_over(_of_one_stage(carry.loss), BATCH_AXES)
    return loss / count, program.finish(carry.gradients)


def _evaluate(
    plan: Plan, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Table
) -> tuple[jax.Array, jax.Array]:
    carry = Program(plan, schedule, params, batch, key).run(table, None)
    sums = jnp.stack([_of_one_stage(carry.loss), _targets(batch)])
    loss, count = sum_over(sums, BATCH_AXES)
    return loss, count


def _targets(batch: Tree) -> jax.Array:
    """Target tokens of this device's rows."""
    return batch["loss_mask"].astype(jnp.float32).sum()


def _of_one_stage(loss: jax.Array) -> jax.Array:
    """The loss of this device's rows: every stage computed the same, one counts."""
    return from_position(loss, STAGE, 0)
