"""Train and eval steps, which combine the model, the pipeline and the shardings.

The result of an update is checked before the update is applied; see `optim.guard`.

This module also computes the layer metrics. Some parameters, such as load-balancing biases, are
updated from statistics instead of gradients. Statistics are sums over all sequences, stacked like
the parameters. This update is elementwise, so it does not depend on the mesh, the schedule or the
number of microbatches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float

from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.distributed.runtime import compiler_options
from maxpipe.models.layer_reports import Follows
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.vision import VISION
from maxpipe.models.spec import Model
from maxpipe.nn.decoder import MTP
from maxpipe.optim.guard import MOMENTUM, check_step, select_update
from maxpipe.optim.update import Optimizer, OptState
from maxpipe.parallel import scopes
from maxpipe.parallel.batch_arrays import (
    IMAGE_GRIDS,
    IMAGE_TOKENS_LEFT,
    IMAGES,
    ROTARY_POSITIONS,
)
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC, auto_sharded, is_on_host, reshard, reshard_like
from maxpipe.pipeline import mtp
from maxpipe.pipeline.engine import Engine, StepGradients
from maxpipe.pipeline.loss_head import sum_by_source
from maxpipe.pipeline.objective import Objective
from maxpipe.pipeline.tick_loop import OutputReader
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.schedule.catalog import make_forward_schedule
from maxpipe.schedule.table import Schedule
from maxpipe.step import executable
from maxpipe.step.image_features import ImageFeatures
from maxpipe.step.layer_statistics import collect, recording_engine
from maxpipe.step.state import DROPOUT_STREAM, StateLayout, TrainState


def compute_layer_metrics(
    model: Model,
    losses: Mapping[str, Float[Array, ""]],
    statistics: Mapping[str, Mapping[str, Array]],
) -> dict[str, Float[Array, ""]]:
    """Return the layer metrics, keyed by tag.

    `losses` are per target token, summed over layers. `statistics` are arrays `[layers of the type,
    ...]`, keyed by layer type and name. The metrics include MTP layers, which use shifted targets.
    """
    metrics: dict[str, Array] = {}
    for tag, summary in model.metrics.items():
        if summary.take == "mean":
            layers = sum(summary.of in model.layer_types[kind].losses for kind in model.all_layers)
            if layers:
                metrics[tag] = losses[summary.of] / layers
            continue
        arrays = [values[summary.of] for values in statistics.values() if summary.of in values]
        largest = summary.take == "largest"
        extremes = [_extreme_per_layer(array, largest=largest) for array in arrays]
        metrics[tag] = (jnp.max if largest else jnp.min)(jnp.concatenate(extremes))
    return metrics


def _extreme_per_layer(array: Float[Array, "L ..."], *, largest: bool) -> Float[Array, " L"]:
    """Return each layer's largest or smallest entry divided by the layer's mean; 0 if the mean is
    0.
    """
    entries = jax.lax.reshape(array, (len(array), array[0].size))
    extreme = (entries.max if largest else entries.min)(axis=1)
    mean = entries.mean(axis=1)
    return jnp.where(mean == 0, 0.0, extreme / jnp.where(mean == 0, 1.0, mean))


def apply_balance_updates(
    model: Model,
    params: Tree,
    statistics: Mapping[str, Mapping[str, Any]],
    taken: Bool[Array, ""] | bool,
) -> Tree:
    """Update the parameters that depend on statistics instead of gradients.

    `statistics` are keyed by subtree (`layers`, `outside`), layer type and name. The statistics of
    MTP layers are stored under `ahead`, keyed by name only. If `taken` is false, the step is
    skipped and no parameter changes.
    """
    updated = dict(params)

    def update(layers: Tree, follows: Mapping[tuple[str, str], Follows], reported: Tree) -> Tree:
        for (part, name), rule in follows.items():
            old = layers[part][name]
            new = select_update(taken, balance_step(old, reported[rule.statistic], rule), old)
            layers = layers | {part: layers[part] | {name: new}}
        return layers

    for place, reports in statistics.items():
        if place == MTP:
            layer = update(updated[MTP]["layer"], model.ends.balance_updates, reports)
            updated[MTP] = updated[MTP] | {"layer": layer}
            continue
        layers = dict(updated.get(place, {}))
        for layer_type, reported in reports.items():
            follows = model.layer_types[layer_type].balance_updates
            layers[layer_type] = update(layers[layer_type], follows, reported)
        if layers:
            updated[place] = layers
    return updated


def balance_step(
    param: Float[Array, "*layers E"], statistic: Float[Array, "*layers E"], rule: Follows
) -> Float[Array, "*layers E"]:
    """Increase entries whose statistic is below the mean, and decrease entries whose statistic is
    above the mean.

    Padding entries of a stack do not change, because their statistics are 0.
    """
    mean = statistic.mean(-1, keepdims=True)
    # Every device has the statistics of all experts, but the parameter can be sharded over experts.
    direction = reshard_like(jnp.sign(mean - statistic), param)
    return param + rule.rate * direction.astype(param.dtype)


Tree = Any
Metrics = dict[str, Any]
"""Metrics, keyed by tag. Training losses are in nats per token, and evaluation losses are sums in
nats. For a data mixture, evaluation sums are per source `[sources]`, and training metrics also
include the per-source sums listed in `BY_SOURCE`."""
LAYER_STATS = "layer_stats"
"""Key of the layer statistics in the metrics of a train step that records them; see
`layer_statistics.collect`."""
BY_SOURCE = ("train/nats_by_source", "train/targets_by_source")
"""Tags of the per-source sums `[sources]` in a training step on a data mixture; see
`PerSourceSums`."""


@dataclass(frozen=True)
class Steps(StateLayout):
    """A partitioned model: the layouts of the train state and the batches, and functions that
    compile the steps.
    """

    train_schedule: Schedule
    engine: Engine
    shape: tuple[int, int]
    """Number of sequences in a global batch, and number of tokens per sequence."""
    schedules: Callable[[int], Schedule]
    """Function that returns the schedule for a given number of microbatches."""
    byte_lengths: np.ndarray
    """Byte length of each token's text, indexed by token ID."""
    layer_stats: LayerStatsConfig | None = None
    """Statistics that the train step adds to its metrics under `LAYER_STATS`, or None."""
    images: ImageFeatures | None = None
    """Computation of image embeddings, or None if batches have no images."""

    @property
    def objective(self) -> Objective:
        """Return the objective that a train step minimizes."""
        return self.engine.network.objective

    @property
    def num_sources(self) -> int:
        """Return the number of sources in the data mixture; 0 without a mixture."""
        return self.engine.network.num_sources

    # Batches.

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of every batch array."""
        return NamedSharding(self.param_layout.mesh, BATCH_SPEC)

    def with_batch_size(self, rows: int) -> Steps:
        """Return the steps for a smaller batch, which consists of fewer microbatches of the same
        size.
        """
        count = rows * self.train_schedule.num_microbatches // self.shape[0]
        if rows == self.shape[0]:
            return self
        return replace(self, train_schedule=self.schedules(count), shape=(rows, self.shape[1]))

    def with_layer_statistics(self, config: LayerStatsConfig) -> Steps:
        """Return the steps whose train step also returns statistics of each layer.

        The losses and the new state are bitwise equal to those of the other train step.
        """
        engine = recording_engine(self.engine, self.param_layout, config)
        return replace(self, engine=engine, layer_stats=config)

    def abstract_batch(self, rows: int = 0) -> Tree:
        """Return the shapes and dtypes of a global batch; `rows` defaults to the training batch
        size.
        """
        shape = (rows or self.shape[0], self.shape[1])
        ids = partial(jax.ShapeDtypeStruct, sharding=self.batch_sharding)
        names = ("tokens", "targets", "segment_ids", "positions")
        by_row = ("example_ids", "source_ids") if self.num_sources else ("example_ids",)
        return (
            {name: ids(shape, jnp.int32) for name in names}
            | {"loss_mask": ids(shape, jnp.float32)}
            | {name: ids(shape[:1], jnp.int32) for name in by_row}
            | {
                name: ids((*shape[: 2 - extra.per_sequence], *extra.shape), extra.dtype)
                for name, extra in self.objective.batch_arrays.items()
            }
            | self._abstract_images(shape, ids)
        )

    def _abstract_images(
        self, shape: tuple[int, int], array: Callable[..., jax.ShapeDtypeStruct]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        if (images := self.images) is None:
            return {}
        count = (shape[0], images.max_images)
        arrays = {
            IMAGES: array((*count, *images.tower.image_shape), jnp.uint8),
            IMAGE_TOKENS_LEFT: array(shape, jnp.int32),
        }
        if images.tower.has_grids:
            arrays[IMAGE_GRIDS] = array((*count, 2), jnp.int32)
        if images.tower.has_rotary_positions:
            arrays[ROTARY_POSITIONS] = array((*shape, 3), jnp.int32)
        return arrays

    # Compiled functions.

    def compile_train(self) -> Any:
        """Compile the train step, which maps (state, batch) to (state, metrics). The state is
        donated.
        """
        return self.lower_train().compile(self.compiler_options)

    def load_train(self, folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> Any:
        """Load a train step that was compiled ahead of time for a config with the same sections.

        Raises:
            ConfigError: the program was compiled for another config, or cannot be loaded on these
                devices.
            StorageError: the program cannot be read, or is unsafe to load.
        """
        devices = list(self.param_layout.mesh.devices.flat)
        lowered = self.lower_train()
        facts = executable.program_metadata(sections, lowered, devices)
        arguments = (self.abstract_state, self.abstract_batch())
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure(lowered.out_info)
        return executable.load(folder, facts, in_tree, out_tree, devices)

    def lower_train(self) -> Any:
        """Trace and lower the train step."""
        metrics = NamedSharding(self.param_layout.mesh, PartitionSpec())
        step = jax.jit(
            self._train_step,
            donate_argnums=0,
            in_shardings=(self.state_sharding, self.batch_sharding),
            out_shardings=(self.state_sharding, metrics),
        )
        with jax.set_mesh(self.param_layout.mesh):
            return step.lower(self.abstract_state, self.abstract_batch())

    def compile_eval(self, rows: int = 0) -> Any:
        """Compile the eval step, which maps (params, batch) to sums over the target tokens of the
        batch.

        `rows` is the number of sequences in the global batch, which must be a multiple of the
        number of batch shards; 0 uses the training batch size. Microbatches are no larger than in
        training.
        """
        if (objective := self.objective.eval_objective) is not self.objective:
            network = replace(self.engine.network, objective=objective)
            return replace(self, engine=replace(self.engine, network=network)).compile_eval(rows)
        rows = rows or self.shape[0]
        step = jax.jit(
            partial(self._eval_step, self._eval_schedule(rows)),
            in_shardings=(self.state_sharding.params, self.batch_sharding),
            out_shardings=NamedSharding(self.param_layout.mesh, PartitionSpec()),
        )
        return self._compile_forward(step, rows)

    def compile_reader(
        self, reader: OutputReader, rows: int = 0, *, everywhere: bool = False
    ) -> Any:
        """Compile a function that maps (params, batch) to output arrays of shape `[rows, ...]`.

        The arrays contain the reader's output for each sequence. They are sharded like the batch,
        or replicated if `everywhere` is set. See `compile_eval` for `rows`.
        """
        rows = rows or self.shape[0]
        read = self.engine.read_outputs(self._eval_schedule(rows), reader)
        whole = NamedSharding(self.param_layout.mesh, PartitionSpec())
        step = jax.jit(
            lambda params, batch: read(params, self._with_features(params, batch), None),
            in_shardings=(self.state_sharding.params, self.batch_sharding),
            out_shardings=whole if everywhere else self.batch_sharding,
        )
        return self._compile_forward(step, rows)

    def _compile_forward(self, step: Any, rows: int) -> Any:
        with jax.set_mesh(self.param_layout.mesh):
            lowered = step.lower(self.abstract_state.params, self.abstract_batch(rows))
            return lowered.compile(self.compiler_options)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Return the XLA compiler options for this mesh."""
        device = self.param_layout.mesh.devices.flat[0]
        config = self.param_layout.decoder.config
        return compiler_options(
            device.platform,
            device.device_kind,
            spares_memory=self.engine.remat_policy.remat == "chunk",
            in_8_bits=config.matmul != "default",
            has_chunks=self.param_layout.mesh.shape["expert"] > 1
            and any(
                isinstance(part, Experts) and part.all_to_all_chunks > 1
                for kind in self.param_layout.decoder.model.layer_types.values()
                for part in kind.parts.values()
            ),
        )

    def _eval_schedule(self, rows: int) -> Schedule:
        shards = math.prod(self.param_layout.mesh.shape[axis] for axis in BATCH_AXES)
        largest = self.shape[0] // shards // self.train_schedule.num_microbatches
        per_shard = rows // shards
        counts = (count for count in range(1, per_shard + 1) if per_shard % count == 0)
        count = next(count for count in counts if per_shard // count <= largest)
        return make_forward_schedule(self.train_schedule.ring, count)

    def buffer_shapes(self) -> dict[str, list[Any]]:
        """Return the per-device shapes of the tick loop's buffers, without compiling."""
        batch = self.abstract_batch()
        batch = batch if self.images is None else self.images.abstract_features(batch)
        return self.engine.buffer_shapes(self.train_schedule, self.abstract_state.params, batch)

    # Computations.

    def value_and_grad(self, params: Tree, batch: Tree, key: jax.Array | None) -> StepGradients:
        """Return the losses and gradients of a training step, including those of the vision
        tower.
        """
        run = self.engine.value_and_grad(self.train_schedule)
        results = run(params, self._with_features(params, batch), key)
        if VISION not in self.optimizer.target_specs:
            return results
        if self.images is None:  # memory forecasts: a run without images freezes the tower
            trained = self.param_layout.select_trainable(params)[VISION]
            gradients = jax.tree.map(partial(jnp.zeros_like, dtype=jnp.float32), trained)
            gradients = reshard(gradients, self.optimizer.target_specs[VISION])
        else:
            assert results.image_features is not None
            gradients = self.images.gradients(params, batch, results.image_features)
        found = results.gradients | {VISION: gradients}
        return results._replace(gradients=found, image_features=None)

    def _with_features(self, params: Tree, batch: Tree) -> Tree:
        """Return the batch with image embeddings in place of images, if it has images."""
        return batch if self.images is None else self.images.add_to(params, batch)

    def _train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        config, model = self.param_layout.decoder.config, self.param_layout.decoder.model
        key = None
        rounds = config.matmul == "nvfp4"
        drops = config.dropout > 0 or (config.adapter is not None and config.adapter.dropout > 0)
        if rounds or drops:
            key = jax.random.fold_in(self._key(DROPOUT_STREAM), state.step)
        results = self.value_and_grad(state.params, batch, key)
        gradients = results.gradients
        if not self.optimizer.is_elementwise:
            # The operations after the barrier would change the fusions before it, and therefore
            # the last bits, if the step also records layer statistics.
            gradients = jax.lax.optimization_barrier(gradients)
        norm = optax.tree.norm(gradients)
        specs, everywhere = self.optimizer.target_specs, PartitionSpec()
        old = reshard(self.param_layout.select_trainable(state.params), specs)
        rate = jnp.asarray(self.optimizer.rate(state.step - state.guard.skipped))
        with jax.named_scope(scopes.UPDATE):
            taken, guard = check_step(
                self.guard,
                self.param_layout.mesh,
                state.guard,
                results.loss,
                norm,
                partial(check_update, self.optimizer),
                (gradients, norm, rate, old, state.optimizer, state.guard.bounds),
                (specs, everywhere, everywhere, specs, self._state_specs.optimizer, everywhere),
            )
            new, optimizer = self.optimizer.update(
                gradients, state.optimizer, old, norm=norm, taken=taken
            )
        params = replace_subtree(state.params, new)
        params = apply_balance_updates(model, params, results.statistics, taken)
        metrics: Metrics = {
            "train/loss": results.loss,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/skipped": guard.skipped,
        }
        if self.guard.spike_sigmas:
            metrics["train/spikes"] = guard.spikes
        metrics |= {f"train/{name}": mean for name, mean in results.reports.items()}
        metrics |= {f"train/loss_{name}": results.losses[name] for name in model.ends.losses}
        if results.by_source is not None:
            metrics |= dict(zip(BY_SOURCE, results.by_source, strict=True))
        # Merge the layers of all stages into one dim; the arrays are small.
        unstack = auto_sharded(self.param_layout.layout.unstack, PartitionSpec())
        statistics = unstack(results.statistics["layers"], results.statistics.get("outside", {}))
        statistics |= {mtp.MTP: results.statistics.get(mtp.MTP, {})}
        metrics |= compute_layer_metrics(model, results.losses, statistics)
        if self.layer_stats is not None:
            parts, config = self.param_layout, self.layer_stats
            metrics[LAYER_STATS] = collect(parts, config, batch, old, new, gradients, statistics)
        return TrainState(state.step + 1, params, optimizer, guard), metrics

    def _eval_step(self, schedule: Schedule, params: Tree, batch: Tree) -> Metrics:
        features = self._with_features(params, batch)
        sums, targets = self.engine.loss(schedule)(params, features, None)
        metrics = dict(zip(("loss", *self.objective.report_names), sums, strict=True))
        metrics["targets"] = targets
        if self.objective.segments_per_loss:
            return metrics
        lengths = jnp.asarray(self.byte_lengths, jnp.float32)
        # The output is sharded like the indices.
        num_bytes = auto_sharded(operator.getitem, BATCH_SPEC)(lengths, batch["targets"])
        num_bytes = num_bytes * batch["loss_mask"]
        if not self.num_sources:
            return metrics | {"bytes": num_bytes.sum()}

        def sum_bytes(num_bytes: Array, sources: Array) -> Array:
            return sum_by_source(num_bytes, self.num_sources, sources[:, None])

        by_source = auto_sharded(sum_bytes, PartitionSpec())(num_bytes, batch["source_ids"])
        return metrics | {"bytes": by_source}


def check_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    rate: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
    before: Float[jax.Array, " 2"],
) -> tuple[Bool[jax.Array, ""], Float[jax.Array, " 2"]]:
    """Return whether the update keeps parameters and moments finite, and the new bounds on their
    absolute values.

    A bound computed without the update is almost always sufficient. Otherwise, the update is
    computed once more to check its results, which requires a pass over all parameters and state.

    Args:
        optimizer: the optimizer.
        gradients: a device's shards of the gradients. `params` and `state` are also shards.
        norm: norm of the full gradient.
        rate: learning rate.
        params: parameters before the update.
        state: optimizer state before the update.
        before: bounds on parameters and moments before the update.
    """
    bound = optimizer.bound_update(before, norm, rate)

    def check_values() -> tuple[jax.Array, jax.Array]:
        trees = (params, state.trees.get(MOMENTUM, {}))
        sizes = jnp.stack(
            [
                optimizer.max_abs(tree) if _has_host_arrays(tree) else _largest(tree)
                for tree in trees
            ]
        )
        after = optimizer.bound_update(sizes, norm, rate)
        if not optimizer.is_elementwise:
            return jnp.isfinite(after).all(), after
        return _is_finite_after_update(optimizer, gradients, norm, params, state), after

    known = jnp.isfinite(bound).all()
    return jax.lax.cond(known, lambda: (known, bound), check_values)


def _has_host_arrays(tree: Tree) -> bool:
    return any(map(is_on_host, jax.tree.leaves(tree)))


def _largest(tree: Tree) -> Float[jax.Array, ""]:
    """Return the largest absolute value across all arrays, or 0 if there are no arrays."""
    maxima = [jnp.abs(leaf).max().astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(maxima).max() if maxima else jnp.zeros(())


def _is_finite_after_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
) -> Bool[jax.Array, ""]:
    """Compute the update without storing it, and return whether all results are finite.

    The barrier separates this computation from the actual update and keeps it inside its branch,
    where it is fused into a reduction. If XLA shared or hoisted some of these computations, their
    results would be stored in memory.
    """
    if _has_host_arrays((params, state.trees)):
        return optimizer.is_finite_after_update(gradients, norm, params, state)
    gradients, norm, params, state = jax.lax.optimization_barrier((gradients, norm, params, state))
    params, state = optimizer.update(gradients, state, params, norm=norm, draw=False)
    # A single expression covers all trees; with separate reductions, XLA would store shared
    # intermediates.
    finite = jax.tree.map(
        lambda *entries: reduce(operator.and_, map(jnp.isfinite, entries)).all(),
        params,
        *state.trees.values(),
    )
    return jnp.stack(jax.tree.leaves(finite)).all()
