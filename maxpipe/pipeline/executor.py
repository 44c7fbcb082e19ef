"""Runs a schedule: the layer stack as a ring of stages in one jitted SPMD program.

The program is written per device over all axes but tensor, which stays automatic. One loop walks
the ticks of the table, which is an argument of the program; forward and
backward are both part of the table: nothing differentiates through this program.

The engine sees functions and stacked parameters, never a model class or a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from maxpipe.parallel.context import own_tokens, whole_rows
from maxpipe.parallel.low_precision import LowPrecision
from maxpipe.parallel.mesh import CONTEXT, STAGE, TOKEN_AXES
from maxpipe.parallel.per_device import from_position, program_axes, sum_over, vary
from maxpipe.parallel.sharding import BATCH_SPEC, divided, restrict
from maxpipe.pipeline.ahead import AHEAD
from maxpipe.pipeline.carry import Table
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.loss_head import by_source, of_one_device
from maxpipe.pipeline.network import Network, Plan
from maxpipe.pipeline.program import Program, Reader
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.pipeline.slots import Idle
from maxpipe.pipeline.weights import Gather, WeightSharding, joined, trained
from maxpipe.schedule.table import Schedule

Tree = Any


class BySource(NamedTuple):
    """Sums over the rows of each source."""

    nats: Float[Array, " sources"]
    """The objective's loss."""
    targets: Float[Array, " sources"]
    """What it is divided by: target tokens."""


class Differentiated(NamedTuple):
    """What a step finds; what it minimises is `loss` and the weighted sum of `losses`."""

    loss: Float[Array, ""]
    """The objective's mean: of cross entropy over all target tokens, in nats."""
    reports: dict[str, Float[Array, ""]]
    """Means of what the objective reports."""
    losses: dict[str, Float[Array, ""]]
    """Of the layers and of heads ahead, each divided by the number of target tokens; not weighted.
    """
    gradients: Tree
    """Of what is minimised, float32, in the form of the parameters; frozen ones are missing."""
    statistics: dict[str, Tree]
    """What the layers report, summed over all rows: by kind `[R, P, L, ...]` under `layers`, and
    `[layers, ...]` under `outside`; of layers ahead `[heads, ...]` under `ahead`."""
    by_source: BySource | None = None
    """If rows are of several sources."""


@dataclass(frozen=True)
class Engine:
    """A network on a mesh: builds the functions that run it by a schedule."""

    network: Network
    layout: Layout
    mesh: Mesh
    specs: Tree
    """PartitionSpec of every parameter, stacked dims included."""
    weight_gather: Gather
    keep: RematPolicy
    idle: Idle
    trainable: Tree = None
    """For each parameter whether it has a gradient. None: all have."""
    exact: Tree = None
    """For each parameter whether it is used in the type in which it is stored. None: none is."""
    summed: Tree = None
    """For each parameter how many of its first dims its product sums over, if layers are given it
    in 8 bits; 0 if they are not. None: none."""
    low: LowPrecision | None = None
    """How these are rounded."""
    gradients: Tree = None
    """PartitionSpec of the gradient of each parameter that has one. None: as the parameters'."""
    reduced: str = "float32"
    """Type in which gradients are sent to be summed over devices."""

    def value_and_grad(self, schedule: Schedule) -> Callable[..., Differentiated]:
        """(params, batch, key) -> what a step found.

        `batch` is a dict of global arrays `[rows, ...]` with `tokens`, `targets`, `loss_mask`
        and whatever the layers read; rows are sharded over the batch axes.
        """
        ring, everywhere = PartitionSpec(None, STAGE), PartitionSpec()
        statistics = {"layers": ring} | ({"outside": everywhere} if self.layout.outside else {})
        statistics |= {AHEAD: everywhere} if self.network.has_layers_ahead else {}
        gradients = (
            trained(self.specs, self._trainable) if self.gradients is None else self.gradients
        )
        sources = BySource(everywhere, everywhere) if self.network.num_sources else None  # type: ignore[arg-type]
        sums = (everywhere, everywhere, everywhere)
        found = Differentiated(*sums, gradients, statistics, sources)  # type: ignore[arg-type]
        return self._shard_map(_train, schedule, found)

    def loss(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(params, batch, None) -> (sums of loss and reports `[R]`, number of target tokens).

        Forward only; `[R, sources]` and `[sources]` if rows are of several.
        """
        return self._shard_map(_evaluate, schedule, (PartitionSpec(), PartitionSpec()))

    def rows(self, schedule: Schedule, reader: Reader) -> Callable[..., Tree]:
        """(params, batch, None) -> what a reader finds of each row, forward only.

        Arrays `[rows, ...]`, sharded as the batch is: `LossHead.scores`, or `LossHead.top` with
        its two numbers.
        """
        return self._shard_map(partial(_read, reader=reader), schedule, BATCH_SPEC)

    def buffer_shapes(self, schedule: Schedule, params: Tree, batch: Tree) -> dict[str, list[Any]]:
        """Shapes on one device of each buffer that the loop over ticks carries.

        Known before anything is compiled.
        """
        found: dict[str, list[Any]] = {}

        def measure(plan: Plan, schedule: Schedule, params: Tree, batch: Tree, *_: Any):
            scale = vary(jnp.float32(1)) if schedule.trains else None
            buffers = Program(plan, schedule, params, batch, None, scale, by_token=scale).buffers()
            found.update((name, jax.tree.leaves(tree)) for name, tree in buffers._asdict().items())
            return jnp.float32(0)

        run = self._shard_map(measure, schedule, PartitionSpec())
        with jax.set_mesh(self.mesh):
            jax.eval_shape(run, params, batch, None)
        return {
            name: [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            for name, leaves in found.items()
        }

    @property
    def _by_row(self) -> tuple[str, ...]:
        """The objective's arrays that have no dim of tokens."""
        return tuple(name for name, each in self.network.objective.arrays.items() if each.by_row)

    @property
    def _trainable(self) -> Tree:
        return self._everywhere(True) if self.trainable is None else self.trainable

    def _everywhere(self, value: bool | int) -> Tree:
        """The same for each parameter."""
        return jax.tree.map(lambda _: value, self.specs, is_leaf=_is_spec)

    def _per_device(self, specs: Tree) -> Tree:
        """The specs as the per-device program sees them."""
        axes = program_axes(self.mesh)
        return jax.tree.map(lambda spec: restrict(spec, axes), specs, is_leaf=_is_spec)

    def _shard_map(self, program: Callable, schedule: Schedule, out_specs: Tree) -> Callable:
        assert schedule.num_stages == self.mesh.shape[STAGE]
        assert schedule.ring == self.layout.ring
        exact = self._everywhere(False) if self.exact is None else self.exact
        summed = self._everywhere(0) if self.summed is None else self.summed
        gradients = joined(self.specs, self.gradients or {})
        divisions = jax.tree.map(
            partial(WeightSharding.of, reduced=self.reduced, low=self.low),
            self.specs,
            self._trainable,
            exact,
            gradients,
            summed,
            is_leaf=_is_spec,
        )
        plan = Plan(self.network, self.layout, self.weight_gather, self.keep, self.idle, divisions)
        table = Table.of(schedule, self.layout, self.idle)
        run, axes = partial(program, plan, schedule), program_axes(self.mesh)
        if axes:
            in_specs = (self.specs, BATCH_SPEC, PartitionSpec(), table.specs())
            run = jax.shard_map(
                partial(_of_own_tokens, run, self._by_row),
                mesh=self.mesh,
                axis_names=set(axes),
                in_specs=self._per_device(in_specs),
                out_specs=self._per_device(out_specs),
            )
        # Constants, of which types say that each device has the whole.
        columns = partial(divided, table, table.specs())
        return lambda params, batch, key: run(params, batch, key, columns())


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _of_own_tokens(
    run: Callable[..., Any],
    by_row: tuple[str, ...],
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: Table,
) -> Any:
    """`run` on this device's tokens of its rows."""
    return run(params, own_tokens(batch, by_row), key, table)


def _train(
    plan: Plan, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Table
) -> Differentiated:
    targets = sum_over(_targets(plan, batch), TOKEN_AXES)
    count = jnp.maximum(_total(targets), 1.0)
    tokens = count
    if plan.network.objective.by_segment:
        tokens = jnp.maximum(sum_over(batch["loss_mask"].sum(), TOKEN_AXES), 1.0)
    program = Program(
        plan, schedule, params, batch, key, vary(1.0 / count), by_token=vary(1.0 / tokens)
    )
    carry = program.run(table)
    assert carry.gradients is not None
    total = sum_over(_of_one_stage(carry.loss), TOKEN_AXES)
    reports = program.finish_reports(carry)
    sums = dict(reports.losses)
    if carry.ahead is not None:
        assert plan.network.ahead is not None
        ahead = sum_over(_of_one_stage(carry.ahead.losses), TOKEN_AXES)
        sums |= zip(plan.network.ahead.loss_weights, ahead, strict=True)
    losses = {name: found / tokens for name, found in sums.items()}
    gradients = program.finish(carry.gradients)
    sources = BySource(total[0], targets) if plan.network.num_sources else None
    mean = [_total(each) / count for each in total]
    reported = dict(zip(plan.network.objective.reported, mean[1:], strict=True))
    return Differentiated(mean[0], reported, losses, gradients, reports.statistics, sources)


def _evaluate(
    plan: Plan, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Table
) -> tuple[jax.Array, jax.Array]:
    carry = Program(plan, schedule, params, batch, key, None).run(table)
    sums = jnp.concatenate([_of_one_stage(carry.loss), _targets(plan, batch)[None]])
    sums = sum_over(sums, TOKEN_AXES)
    return sums[:-1], sums[-1]


def _read(
    plan: Plan,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: Table,
    *,
    reader: Reader,
) -> Tree:
    carry = Program(plan, schedule, params, batch, key, None, reader).run(table)
    num_tokens = batch["tokens"].shape[1]

    def of_rows(found: jax.Array) -> jax.Array:
        found = _of_one_stage(found.reshape(-1, *found.shape[2:]))
        # Of tokens a device has its own, of segments the whole.
        if not plan.network.objective.by_segment:
            assert found.shape[1] == num_tokens
            found = whole_rows(found, 1)
        return from_position(found, CONTEXT, 0)

    return jax.tree.map(of_rows, carry.rows)


def _targets(plan: Plan, batch: Tree) -> jax.Array:
    """What losses of this device's rows are divided by, of each source if there are several."""
    objective, sources = plan.network.objective, plan.network.num_sources
    counts = batch[objective.normaliser].astype(jnp.float32)
    counts = of_one_device(counts) if objective.by_segment else counts
    return by_source(counts, sources, batch["source_ids"][:, None]) if sources else counts.sum()


def _total(sums: jax.Array) -> jax.Array:
    """Of all sources, if there are several."""
    return sums.sum() if sums.ndim else sums


def _of_one_stage(loss: jax.Array) -> jax.Array:
    """The loss of this device's rows: every stage computed the same, one counts."""
    return from_position(loss, STAGE, 0)
