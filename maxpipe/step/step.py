"""Train and eval steps: the only place where model, pipeline and sharding meet.

Parameters that a step moves without a gradient, by what the layers have reported of it.

Statistics are sums over all rows, in the form in which parameters are stacked: the update is entry
by entry, and the same under every mesh, schedule and number of microbatches.

Numbers of what layers return besides their output, as their parts declare them.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Key

from maxpipe.config.schema import GuardConfig
from maxpipe.distributed.runtime import compiler_options
from maxpipe.models.spec import Follows, Model
from maxpipe.nn.decoder import MTP
from maxpipe.optim.guard import GuardState, check_step, init_guard_state, select_update
from maxpipe.optim.update import Optimizer, OptState
from maxpipe.optim.update_check import check_update
from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import (
    BATCH_SPEC,
    auto_sharded,
    reshard,
    reshard_like,
    trace_on_mesh,
    with_shardings,
)
from maxpipe.pipeline import mtp
from maxpipe.pipeline.engine import Engine
from maxpipe.pipeline.loss_head import sum_by_source
from maxpipe.pipeline.objective import Objective
from maxpipe.pipeline.program import OutputReader
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.schedule.catalog import make_forward_schedule
from maxpipe.schedule.table import Schedule
from maxpipe.step import executable
from maxpipe.step.replicas import ReplicaCheck, digest
from maxpipe.step.state import VOCABULARY, ParamLayout, TrainState


def compute_layer_metrics(
    model: Model,
    losses: Mapping[str, Float[Array, ""]],
    statistics: Mapping[str, Mapping[str, Array]],
) -> dict[str, Float[Array, ""]]:
    """The numbers by tag.

    `losses` are sums over layers, for each target token; `statistics` are by kind and name arrays
    `[layers of the kind, ...]`. Layers of heads ahead count as others do, for their own targets.
    """
    found: dict[str, Array] = {}
    for tag, summary in model.metrics.items():
        if summary.take == "mean":
            layers = sum(summary.of in model.layer_types[kind].losses for kind in model.all_layers)
            if layers:
                found[tag] = losses[summary.of] / layers
            continue
        arrays = [each[summary.of] for each in statistics.values() if summary.of in each]
        largest = summary.take == "largest"
        extremes = [_extreme_per_layer(array, largest=largest) for array in arrays]
        found[tag] = (jnp.max if largest else jnp.min)(jnp.concatenate(extremes))
    return found


def _extreme_per_layer(array: Float[Array, "L ..."], *, largest: bool) -> Float[Array, " L"]:
    """A layer's largest or smallest entry as a multiple of their mean; 0 where all are 0."""
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
    """The parameters after a step, with those that follow statistics moved if it is taken.

    `statistics` are by place (`layers` and `outside`), kind and name; those of layers ahead by
    name, under `ahead`.
    """
    found = dict(params)

    def move(layers: Tree, follows: Mapping[tuple[str, str], Follows], reported: Tree) -> Tree:
        for (part, name), how in follows.items():
            old, own = layers[part][name], layers[part]
            new = select_update(taken, balance_step(old, reported[how.statistic], how), old)
            layers = layers | {part: own | {name: new}}
        return layers

    for place, kinds in statistics.items():
        if place == MTP:
            heads = found[place]
            found[place] = heads | {
                "layer": move(heads["layer"], model.ends.balance_updates, kinds)
            }
            continue
        layers = dict(found.get(place, {}))
        for kind, reported in kinds.items():
            layers[kind] = move(layers[kind], model.layer_types[kind].balance_updates, reported)
        if layers:
            found[place] = layers
    return found


def balance_step(
    param: Float[Array, "*layers E"], statistic: Float[Array, "*layers E"], how: Follows
) -> Float[Array, "*layers E"]:
    """Each entry up where the statistic is below its mean, down where it is above.

    In padding of a stack, whose statistics are 0, nothing moves.
    """
    mean = statistic.mean(-1, keepdims=True)
    # Each device has the statistics of all experts, and of the parameter maybe only its own.
    direction = reshard_like(jnp.sign(mean - statistic), param)
    return param + how.rate * direction.astype(param.dtype)


Tree = Any


Metrics = dict[str, Float[Array, "*sources"] | Int[Array, ""]]
"""By tag; losses in nats per token, in an evaluation in nats. Of a mixture there are sums of each
source: `[sources]` under `BY_SOURCE` in training, and all of an evaluation."""


BY_SOURCE = ("train/nats_by_source", "train/targets_by_source")
"""Tags of the sums `[sources]` of a mixture's step; see `BySource`."""
# One stream of keys for each use of randomness.
_PARAMETERS, _DROPOUT = 0, 1


@dataclass(frozen=True)
class Steps:
    """A partitioned model: shardings, and functions to be compiled for them."""

    param_layout: ParamLayout
    optimizer: Optimizer
    train_schedule: Schedule
    engine: Engine
    shape: tuple[int, int]
    """Rows and tokens of a global batch."""
    schedules: Callable[[int], Schedule]
    """The schedule for another number of microbatches."""
    seed: int
    byte_lengths: np.ndarray
    """Bytes of text that each token id stands for."""
    guard: GuardConfig

    @property
    def objective(self) -> Objective:
        """What a step minimises."""
        return self.engine.network.objective

    @property
    def num_sources(self) -> int:
        """Of a mixture; 0 without one."""
        return self.engine.network.num_sources

    # Shardings.

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Of every array of a batch."""
        return NamedSharding(self.param_layout.mesh, BATCH_SPEC)

    @cached_property
    def state_sharding(self) -> TrainState:
        """Of the stacked train state."""
        found = self.param_layout.shardings(self._state_specs)
        trees = self._in_state_memory(found.optimizer.trees)
        return found._replace(optimizer=found.optimizer._replace(trees=trees))

    def _in_state_memory(self, shardings: Tree) -> Tree:
        """Of the optimizer's trees, in the memory in which they are kept."""
        if not self.optimizer.config.offload_state:
            return shardings
        return jax.tree.map(lambda each: each.with_memory_kind("pinned_host"), shardings)

    @cached_property
    def _state_specs(self) -> TrainState:
        specs = self.param_layout.specs
        optimizer = OptState._make((PartitionSpec(), self.optimizer.specs))
        guard = jax.tree.map(lambda _: PartitionSpec(), init_guard_state(self.guard))
        return TrainState._make((PartitionSpec(), specs, optimizer, guard))

    @cached_property
    def saved_sharding(self) -> Tree:
        """Of the saved form of the state, in network order."""
        specs, trees = self._select_saved(self.param_layout.saved_specs), self._saved_trees_specs
        saved = {"step": PartitionSpec(), "params": specs, "optimizer": trees}
        found = self.param_layout.shardings(saved)
        return found | {"optimizer": self._in_state_memory(found["optimizer"])}

    @cached_property
    def _saved_trees_specs(self) -> dict[str, Tree]:
        kept = self.optimizer.state_arrays
        run = partial(self.param_layout.saved_state_specs, targets=self.optimizer.trainable_params)
        return {name: run(those) for name, those in kept.items()}

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the stacked train state."""
        return with_shardings(jax.eval_shape(self._init), self.state_sharding)

    @cached_property
    def _abstract_params(self) -> Tree:
        return jax.eval_shape(self.param_layout.init, jax.random.key(0))

    def with_batch_size(self, rows: int) -> Steps:
        """The same for batches of fewer rows: fewer microbatches, each as large."""
        count = rows * self.train_schedule.num_microbatches // self.shape[0]
        if rows == self.shape[0]:
            return self
        return replace(self, train_schedule=self.schedules(count), shape=(rows, self.shape[1]))

    # What is compiled.

    def init(self) -> TrainState:
        """A fresh state on the mesh; the values depend on seed and model only."""
        init = self._jit(self._init, self.state_sharding).lower()
        # On CPU, LLVM spends many seconds on the random generator of a program that runs once.
        # Its integer arithmetic gives the same bits however it is compiled.
        options: dict[str, Any] = {}
        if self.param_layout.mesh.devices.flat[0].platform == "cpu":
            options["xla_backend_optimization_level"] = 0
        return init.compile(options)()

    def init_params(self) -> Tree:
        """The parameters of a fresh state alone."""
        init = partial(self.param_layout.init, self._key(_PARAMETERS))
        return self._jit(init, self.state_sharding.params)()

    def compile_train(self) -> Any:
        """(state, batch) -> (state, metrics); the state passed in is used up."""
        return self.lower_train().compile(self.compiler_options)

    def load_train(self, folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> Any:
        """A train step compiled ahead of time for the config with these sections.

        Raises:
            ConfigError: it was made for something else, or cannot be used on these devices.
            StorageError: it cannot be read or trusted.
        """
        devices = list(self.param_layout.mesh.devices.flat)
        lowered = self.lower_train()
        facts = executable.program_metadata(sections, lowered, devices)
        arguments = (self.abstract_state, self.abstract_batch())
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure(lowered.out_info)
        return executable.load(folder, facts, in_tree, out_tree, devices)

    def lower_train(self) -> Any:
        """The train step traced and lowered, ready to be compiled."""
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
        """(params, batch) -> sums over the batch's target tokens.

        `rows` is the size of the global batch, any multiple of the devices that split it; 0 takes
        the training batch's. A microbatch gets at most as many rows as in training.
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
        with jax.set_mesh(self.param_layout.mesh):
            lowered = step.lower(self.abstract_state.params, self.abstract_batch(rows))
            return lowered.compile(self.compiler_options)

    def compile_reader(
        self, reader: OutputReader, rows: int = 0, *, everywhere: bool = False
    ) -> Any:
        """(params, batch) -> what a reader finds of each row, arrays `[rows, ...]`.

        They are divided as the batch is, or on all devices `everywhere`; `rows` as above.
        """
        rows = rows or self.shape[0]
        read = self.engine.read_outputs(self._eval_schedule(rows), reader)
        whole = NamedSharding(self.param_layout.mesh, PartitionSpec())
        step = jax.jit(
            lambda params, batch: read(params, batch, None),
            in_shardings=(self.state_sharding.params, self.batch_sharding),
            out_shardings=whole if everywhere else self.batch_sharding,
        )
        with jax.set_mesh(self.param_layout.mesh):
            lowered = step.lower(self.abstract_state.params, self.abstract_batch(rows))
            return lowered.compile(self.compiler_options)

    def digest(self, params: Tree) -> str:
        """Of parameters, the same under every layout."""
        parts = self.param_layout

        def digests(params: Tree) -> Array:
            saved = parts.to_saved(params, vocabulary=VOCABULARY)
            return jnp.stack([digest(leaf) for leaf in jax.tree.leaves(saved)])

        everywhere = NamedSharding(parts.mesh, PartitionSpec())
        found = self._jit(auto_sharded(digests, PartitionSpec()), everywhere)(params)
        return hashlib.sha256(np.asarray(found, "<u4").tobytes()).hexdigest()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What XLA should do differently for this mesh."""
        device = self.param_layout.mesh.devices.flat[0]
        config = self.param_layout.decoder.config
        return compiler_options(
            device.platform,
            device.device_kind,
            d_model=config.d_model,
            spares_memory=self.engine.remat_policy.remat == "chunk",
            in_8_bits=config.matmul != "default",
        )

    def _eval_schedule(self, rows: int) -> Schedule:
        shards = math.prod(self.param_layout.mesh.shape[axis] for axis in BATCH_AXES)
        largest = self.shape[0] // shards // self.train_schedule.num_microbatches
        mine = rows // shards
        counts = (count for count in range(1, mine + 1) if mine % count == 0)
        count = next(count for count in counts if mine // count <= largest)
        return make_forward_schedule(self.train_schedule.ring, count)

    def buffer_shapes(self) -> dict[str, list[Any]]:
        """On one device, of what the train step's loop carries, before compiling it."""
        return self.engine.buffer_shapes(
            self.train_schedule, self.abstract_state.params, self.abstract_batch()
        )

    def abstract_batch(self, rows: int = 0) -> Tree:
        """Shapes and types of a global batch, of the training batch's size if not given."""
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
        )

    @cached_property
    def replica_check(self) -> ReplicaCheck:
        """Compares the copies of the stacked train state on several devices."""
        return ReplicaCheck(self.param_layout.mesh, self.abstract_state, self.state_sharding)

    @cached_property
    def to_saved(self) -> Any:
        """state -> what a checkpoint holds: network order, no padding."""
        return self._jit(self._to_saved, self.saved_sharding)

    def _to_saved(self, state: TrainState) -> Tree:
        parts = self.param_layout

        # Layers of all stages are joined into one dim, and padding is cut off.
        def unstack(tree: Tree, specs: Tree, vocabulary: Mapping[str, int] = VOCABULARY) -> Tree:
            run = partial(parts.to_saved, vocabulary=vocabulary)
            return auto_sharded(run, specs)(tree)

        specs, vocabulary = self._saved_trees_specs, self.optimizer.vocab_dims
        saved = {
            name: unstack(_on_device(tree), specs[name], vocabulary[name])
            for name, tree in state.optimizer.trees.items()
        }
        params = self._select_saved(unstack(state.params, parts.saved_specs))
        return {"step": state.step, "params": params, "optimizer": saved}

    def _select_saved(self, params: Tree) -> Tree:
        """Of all parameters in the form of checkpoints those that these hold: adapters alone."""
        parts = self.param_layout
        return params if parts.base is parts else parts.select_trainable_saved(params)

    @cached_property
    def from_saved(self) -> Any:
        """(what a checkpoint holds, the guard's state, the base of adapters) -> state.

        By default the guard's is a new run's, and there is no base.
        """

        def convert(
            saved: Tree, guard: GuardState | None = None, base: Tree | None = None
        ) -> TrainState:
            guard = init_guard_state(self.guard) if guard is None else guard
            step, params = saved["step"], self._stack(saved["params"], base)
            specs, vocabulary = self.optimizer.specs, self.optimizer.vocab_dims
            trees = {}
            for name, tree in saved["optimizer"].items():
                run = partial(self.param_layout.from_saved, vocabulary=vocabulary[name])
                trees[name] = auto_sharded(run, specs[name])(_on_device(tree))
            optimizer = OptState(step - guard.skipped, trees)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)

    @cached_property
    def stack_params(self) -> Any:
        """Parameters as a checkpoint holds them -> as the steps take them."""
        return self._jit(self._stack, self.state_sharding.params)

    @cached_property
    def merge_adapters(self) -> Any:
        """(base, adapters) as checkpoints hold them -> all parameters in the same form."""
        parts, specs = self.param_layout, self.param_layout.saved_specs

        def convert(base: Tree, adapters: Tree) -> Tree:
            return auto_sharded(parts.to_saved, specs)(self._stack(adapters, base))

        return self._jit(convert, parts.shardings(specs))

    def _stack(self, params: Tree, base: Tree | None = None) -> Tree:
        """With a `base` the parameters are those beside it."""
        # Layers are dealt out to stages, and the vocabulary is padded.
        parts = self.param_layout
        if base is None:
            return auto_sharded(parts.from_saved, parts.specs)(params)
        mine = auto_sharded(parts.from_saved, parts.select_trainable(parts.specs))(params)
        return replace_subtree(self._stack_with_adapters(base), mine)

    def _stack_with_adapters(self, base: Tree) -> Tree:
        """Stacked parameters of a base in the form of checkpoints, with new adapters."""
        plain = self.param_layout.base
        stacked = auto_sharded(plain.from_saved, plain.specs)(base)
        return self.param_layout.add_adapters(stacked, self._key(_PARAMETERS))

    def _jit(self, run: Callable[..., Tree], shardings: Tree) -> Any:
        """A jitted function with these shardings of its results."""
        return jax.jit(trace_on_mesh(self.param_layout.mesh, run), out_shardings=shardings)

    def init_from_params(self, params: Tree) -> TrainState:
        """A fresh state, but for parameters in the form that a checkpoint holds.

        With adapters these are the base's.
        """

        def convert(saved: Tree) -> TrainState:
            params, guard = self._stack_with_adapters(saved), init_guard_state(self.guard)
            optimizer, step = self._optimizer_state(params), jnp.zeros((), jnp.int32)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)(params)

    @cached_property
    def initial_params(self) -> Any:
        """Parameters in the form that a checkpoint holds -> those of a new run that starts from
        them, as the steps take them; with adapters these are the base's.
        """
        return self._jit(self._stack_with_adapters, self.state_sharding.params)

    @cached_property
    def abstract_saved(self) -> Tree:
        """Shapes, types and shardings of the saved form."""
        state = jax.eval_shape(self._init)
        return with_shardings(jax.eval_shape(self._to_saved, state), self.saved_sharding)

    @cached_property
    def abstract_base(self) -> Tree:
        """Of the parameters that a run starts from: without adapters."""
        plain = self.param_layout.base
        stacked = jax.eval_shape(plain.init, self._key(_PARAMETERS))
        saved = jax.eval_shape(auto_sharded(plain.to_saved, plain.saved_specs), stacked)
        return with_shardings(saved, plain.shardings(plain.saved_specs))

    # The computations.

    def _key(self, stream: int) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.key(self.seed), stream)

    def _optimizer_state(self, params: Tree) -> Tree:
        """The optimizer's state of a new run; frozen parameters have none."""
        return self.optimizer.init(self.param_layout.select_trainable(params))

    def _init(self) -> TrainState:
        params = self.param_layout.init(self._key(_PARAMETERS))
        guard = jax.tree.map(jnp.asarray, init_guard_state(self.guard))
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer_state(params), guard)

    def _train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        key, model = None, self.param_layout.decoder.config
        if model.dropout > 0 or (model.adapter is not None and model.adapter.dropout > 0):
            key = jax.random.fold_in(self._key(_DROPOUT), state.step)
        found = self.engine.value_and_grad(self.train_schedule)(state.params, batch, key)
        loss, gradients = found.loss, found.gradients
        norm = optax.tree.norm(gradients)
        specs, everywhere = self.optimizer.target_specs, PartitionSpec()
        old = reshard(self.param_layout.select_trainable(state.params), specs)
        rate = jnp.asarray(self.optimizer.rate(state.step - state.guard.skipped))
        with jax.named_scope(scopes.UPDATE):
            taken, guard = check_step(
                self.guard,
                self.param_layout.mesh,
                state.guard,
                loss,
                norm,
                partial(check_update, self.optimizer),
                (gradients, norm, rate, old, state.optimizer, state.guard.bounds),
                (specs, everywhere, everywhere, specs, self._state_specs.optimizer, everywhere),
            )
            new, optimizer = self.optimizer.update(
                gradients, state.optimizer, old, norm=norm, taken=taken
            )
        params = replace_subtree(state.params, new)
        params = apply_balance_updates(
            self.param_layout.decoder.model, params, found.statistics, taken
        )
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/skipped": guard.skipped,
        }
        if self.guard.spike_sigmas:
            metrics["train/spikes"] = guard.spikes
        layers = found.statistics["layers"], found.statistics.get("outside", {})
        model, layout = self.param_layout.decoder.model, self.param_layout.layout
        metrics |= {f"train/{name}": mean for name, mean in found.reports.items()}
        metrics |= {f"train/loss_{name}": found.losses[name] for name in model.ends.losses}
        if found.by_source is not None:
            metrics |= dict(zip(BY_SOURCE, found.by_source, strict=True))
        further = {mtp.MTP: found.statistics.get(mtp.MTP, {})}
        # Layers of all stages are joined into one dim; the numbers are few.
        reported = auto_sharded(layout.unstack, PartitionSpec())(*layers)
        metrics |= compute_layer_metrics(model, found.losses, reported | further)
        return TrainState(state.step + 1, params, optimizer, guard), metrics

    def _eval_step(self, schedule: Schedule, params: Tree, batch: Tree) -> Metrics:
        sums, targets = self.engine.loss(schedule)(params, batch, None)
        found = dict(zip(("loss", *self.objective.report_names), sums, strict=True))
        if self.objective.segments_per_loss:
            return found | {"targets": targets}
        lengths = jnp.asarray(self.byte_lengths, jnp.float32)
        # Picked by index: divided as the indices are.
        size = auto_sharded(operator.getitem, BATCH_SPEC)(lengths, batch["targets"])
        size = size * batch["loss_mask"]
        if not self.num_sources:
            return found | {"targets": targets, "bytes": size.sum()}

        def summed(size: Array, sources: Array) -> Array:
            return sum_by_source(size, self.num_sources, sources[:, None])

        summed = auto_sharded(summed, PartitionSpec())
        return found | {"targets": targets, "bytes": summed(size, batch["source_ids"])}


def _on_device(tree: Tree) -> Tree:
    """Arrays that may be in host memory, where they can be computed with."""
    return jax.device_put(tree, jax.memory.Space.Device)
