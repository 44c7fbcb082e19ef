"""Run a schedule: one jitted SPMD program executes the layers on a ring of stages.

The program is written as per-device code, as in shard_map: every mesh axis is manual except
`tensor`, which is an auto axis. A single loop runs the ticks of the schedule table. The table is an
argument of the program. The table contains both forward and backward slots, so JAX never
differentiates this program.

The engine receives functions and stacked parameters, never a model class or a config.
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

from maxpipe.parallel.batch_arrays import IMAGE_FEATURES
from maxpipe.parallel.collectives import (
    broadcast_from,
    gather_sequences,
    manual_axes_of,
    mark_varying,
    shard_tokens,
    sum_over,
)
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.mesh import CONTEXT, STAGE, TOKEN_AXES
from maxpipe.parallel.sharding import BATCH_SPEC, reshard_explicit, restrict_spec
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.loss_head import mask_other_devices, sum_by_source
from maxpipe.pipeline.mtp import MTP
from maxpipe.pipeline.network import Network
from maxpipe.pipeline.program import PipelinePlan, StepProgram
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.pipeline.slots import Idle
from maxpipe.pipeline.tick_loop import OutputReader, TickTable
from maxpipe.pipeline.weights import GatherMode, WeightSharding, replace_subtree, select_trainable
from maxpipe.schedule.table import Schedule

Tree = Any


class PerSourceSums(NamedTuple):
    """Losses and target counts summed over the sequences of each data source."""

    nats: Float[Array, " sources"]
    """Sum of the objective's loss, which is in nats for cross entropy."""
    targets: Float[Array, " sources"]
    """Number of target tokens, the denominator of the mean loss."""


class StepGradients(NamedTuple):
    """Results of one training step. Training minimizes `loss` plus the weighted sum of `losses`."""

    loss: Float[Array, ""]
    """Mean value of the objective's loss. For cross entropy, the mean is in nats over all target
    tokens."""
    reports: dict[str, Float[Array, ""]]
    """Mean of each objective metric, keyed by name."""
    losses: dict[str, Float[Array, ""]]
    """Unweighted auxiliary losses of the layers and MTP heads, divided by the number of target
    tokens."""
    gradients: Tree
    """Float32 gradients of the minimized loss, in the tree structure of the trainable
    parameters."""
    statistics: dict[str, Tree]
    """Layer statistics, summed over all sequences. `layers` contains arrays `[R, P, L, ...]` and
    `outside` contains arrays `[layers, ...]`, both keyed by layer type. `ahead` contains arrays
    `[heads, ...]`."""
    by_source: PerSourceSums | None = None
    """Losses and target counts, summed separately for each data source. None if all sequences come
    from one source.
    """
    image_features: Float[Array, "B N K F"] | None = None
    """Gradient of the batch array `image_features`, sharded like the batch, or None."""


@dataclass(frozen=True)
class Engine:
    """Build the functions that run a network on a mesh according to a schedule."""

    network: Network
    layout: LayerLayout
    mesh: Mesh
    specs: Tree
    """PartitionSpec of every parameter, including stacked dims."""
    weight_gather: GatherMode
    remat_policy: RematPolicy
    idle: Idle
    trainable: Tree = None
    """Whether each parameter has a gradient. If None, all parameters have gradients."""
    has_own_dtype: Tree = None
    """Whether each parameter is used in its stored dtype. If None, all parameters are cast to the
    compute dtype."""
    contracted_dims: Tree = None
    """Number of leading dims that the matmul contracts, for each parameter that is quantized to 8
    bits; 0 for all other parameters. If None, no parameter is quantized."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer of the parameters whose entry in `contracted_dims` is nonzero."""
    gradient_specs: Tree = None
    """PartitionSpec of the gradient of each trainable parameter. If None, the parameters' own specs
    are used."""
    reduce_dtype: str = "float32"
    """Dtype used to communicate gradients in cross-device reductions."""

    def value_and_grad(self, schedule: Schedule) -> Callable[..., StepGradients]:
        """Return the training step, which maps (params, batch, key) to `StepGradients`.

        `batch` is a dict of global arrays `[sequences, ...]` that contains `tokens`, `targets`,
        `loss_mask` and every array that the layers use. Sequences are sharded over the batch axes.
        """
        ring, everywhere = PartitionSpec(None, STAGE), PartitionSpec()
        statistics = {"layers": ring} | (
            {"outside": everywhere} if self.layout.num_prologue_layers else {}
        )
        statistics |= {MTP: everywhere} if self.network.has_mtp_layers else {}
        gradients = (
            select_trainable(self.specs, self._trainable)
            if self.gradient_specs is None
            else self.gradient_specs
        )
        sources = PerSourceSums(everywhere, everywhere) if self.network.num_sources else None  # type: ignore[arg-type]
        sums = (everywhere, everywhere, everywhere)
        images = BATCH_SPEC if self.network.has_image_gradients else None
        found = StepGradients(*sums, gradients, statistics, sources, images)  # type: ignore[arg-type]
        return self._shard_map(_train, schedule, found)

    def loss(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Return the forward-only loss, which maps (params, batch, None) to (sums, number of target
        tokens).

        The sums `[R]` contain the loss and the objective's metrics. If there are several data
        sources, the sums have shape `[R, sources]` and the counts have shape `[sources]`.
        """
        return self._shard_map(_evaluate, schedule, (PartitionSpec(), PartitionSpec()))

    def read_outputs(self, schedule: Schedule, reader: OutputReader) -> Callable[..., Tree]:
        """Return a forward-only function that maps (params, batch, None) to the reader's output.

        The output consists of arrays `[sequences, ...]`, sharded like the batch. The reader is
        `LossHead.scores`, or `LossHead.top_log_probs` with its keyword arguments bound.
        """
        return self._shard_map(partial(_read_outputs, reader=reader), schedule, BATCH_SPEC)

    def buffer_shapes(self, schedule: Schedule, params: Tree, batch: Tree) -> dict[str, list[Any]]:
        """Return the per-device shapes of the tick loop's buffers, keyed by buffer name.

        Nothing is compiled.
        """
        found: dict[str, list[Any]] = {}

        def measure(plan: PipelinePlan, schedule: Schedule, params: Tree, batch: Tree, *_: Any):
            scale = mark_varying(jnp.float32(1)) if schedule.trains else None
            buffers = StepProgram(
                plan, schedule, params, batch, None, scale, by_token=scale
            ).buffers()
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
    def _per_sequence_arrays(self) -> tuple[str, ...]:
        """Return the names of batch arrays that have no token dim."""
        return IMAGE_FEATURES, *(
            name for name, each in self.network.objective.batch_arrays.items() if each.per_sequence
        )

    @property
    def _trainable(self) -> Tree:
        return self._for_each_param(True) if self.trainable is None else self.trainable

    def _for_each_param(self, value: bool | int) -> Tree:
        """Return a tree with the same structure as the parameters, with every leaf set to
        `value`.
        """
        return jax.tree.map(lambda _: value, self.specs, is_leaf=_is_spec)

    def _per_device(self, specs: Tree) -> Tree:
        """Restrict the specs to the manual axes."""
        axes = manual_axes_of(self.mesh)
        return jax.tree.map(lambda spec: restrict_spec(spec, axes), specs, is_leaf=_is_spec)

    def _shard_map(self, program: Callable, schedule: Schedule, out_specs: Tree) -> Callable:
        assert schedule.num_stages == self.mesh.shape[STAGE]
        assert schedule.ring == self.layout.ring
        exact = self._for_each_param(False) if self.has_own_dtype is None else self.has_own_dtype
        summed = self._for_each_param(0) if self.contracted_dims is None else self.contracted_dims
        gradients = replace_subtree(self.specs, self.gradient_specs or {})
        divisions = jax.tree.map(
            partial(WeightSharding.from_spec, reduced=self.reduce_dtype, low=self.quantizer),
            self.specs,
            self._trainable,
            exact,
            gradients,
            summed,
            is_leaf=_is_spec,
        )
        plan = PipelinePlan(
            self.network, self.layout, self.weight_gather, self.remat_policy, self.idle, divisions
        )
        table = TickTable.from_schedule(schedule, self.layout, self.idle)
        run, axes = partial(program, plan, schedule), manual_axes_of(self.mesh)
        if axes:
            in_specs = (self.specs, BATCH_SPEC, PartitionSpec(), table.specs())
            run = jax.shard_map(
                partial(_run_on_local_tokens, run, self._per_sequence_arrays),
                mesh=self.mesh,
                axis_names=set(axes),
                in_specs=self._per_device(in_specs),
                out_specs=self._per_device(out_specs),
            )
        # Constants are replicated by default, so the columns are resharded explicitly.
        columns = partial(reshard_explicit, table, table.specs())
        used = self.specs.keys()  # parameters of the vision tower are used before the tick loop

        def call(params: Tree, batch: Tree, key: jax.Array | None) -> Tree:
            return run({name: params[name] for name in used}, batch, key, columns())

        return call


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _run_on_local_tokens(
    run: Callable[..., Any],
    by_row: tuple[str, ...],
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: TickTable,
) -> Any:
    """Call `run` with the tokens in this device's shard along the context axis."""
    return run(params, shard_tokens(batch, by_row), key, table)


def _train(
    plan: PipelinePlan,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: TickTable,
) -> StepGradients:
    targets = sum_over(_count_targets(plan, batch), TOKEN_AXES)
    count = jnp.maximum(_sum_sources(targets), 1.0)
    tokens = count
    if plan.network.objective.segments_per_loss:
        tokens = jnp.maximum(sum_over(batch["loss_mask"].sum(), TOKEN_AXES), 1.0)
    program = StepProgram(
        plan,
        schedule,
        params,
        batch,
        key,
        mark_varying(1.0 / count),
        by_token=mark_varying(1.0 / tokens),
    )
    carry = program.run(table)
    assert carry.gradients is not None
    total = sum_over(_from_first_stage(carry.loss), TOKEN_AXES)
    reports = program.finish_reports(carry)
    sums = dict(reports.losses)
    if carry.ahead is not None:
        assert plan.network.mtp is not None
        ahead = sum_over(_from_first_stage(carry.ahead.losses), TOKEN_AXES)
        sums |= zip(plan.network.mtp.loss_weights, ahead, strict=True)
    losses = {name: found / tokens for name, found in sums.items()}
    gradients = program.finish(carry.gradients)
    sources = PerSourceSums(total[0], targets) if plan.network.num_sources else None
    mean = [_sum_sources(each) / count for each in total]
    reported = dict(zip(plan.network.objective.report_names, mean[1:], strict=True))
    images = carry.gradients.images
    if images is not None and program.images is not None:
        images = program.images.finish(images, in_prologue=program.prologue is not None)
    return StepGradients(mean[0], reported, losses, gradients, reports.statistics, sources, images)


def _evaluate(
    plan: PipelinePlan,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: TickTable,
) -> tuple[jax.Array, jax.Array]:
    carry = StepProgram(plan, schedule, params, batch, key, None).run(table)
    sums = jnp.concatenate([_from_first_stage(carry.loss), _count_targets(plan, batch)[None]])
    sums = sum_over(sums, TOKEN_AXES)
    return sums[:-1], sums[-1]


def _read_outputs(
    plan: PipelinePlan,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    key: jax.Array | None,
    table: TickTable,
    *,
    reader: OutputReader,
) -> Tree:
    carry = StepProgram(plan, schedule, params, batch, key, None, reader).run(table)
    num_tokens = batch["tokens"].shape[1]

    def of_rows(found: jax.Array) -> jax.Array:
        found = _from_first_stage(found.reshape(-1, *found.shape[2:]))
        # Per-token outputs are sharded over the context axis. Per-segment outputs are already
        # complete on each device.
        if not plan.network.objective.segments_per_loss:
            assert found.shape[1] == num_tokens
            found = gather_sequences(found, 1)
        return broadcast_from(found, CONTEXT, 0)

    return jax.tree.map(of_rows, carry.rows)


def _count_targets(plan: PipelinePlan, batch: Tree) -> jax.Array:
    """Return the loss denominator for this device's sequences, separately for each data source if
    there are several.
    """
    objective, sources = plan.network.objective, plan.network.num_sources
    counts = batch[objective.normaliser].astype(jnp.float32)
    counts = mask_other_devices(counts) if objective.segments_per_loss else counts
    return sum_by_source(counts, sources, batch["source_ids"][:, None]) if sources else counts.sum()


def _sum_sources(sums: jax.Array) -> jax.Array:
    """Return the sum over all data sources; a scalar is returned unchanged."""
    return sums.sum() if sums.ndim else sums


def _from_first_stage(loss: jax.Array) -> jax.Array:
    """Return stage 0's loss for this device's sequences; all stages compute the same loss."""
    return broadcast_from(loss, STAGE, 0)
