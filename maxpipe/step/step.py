"""Train and eval steps, which combine the model, the pipeline and the shardings.

Some parameters, such as load-balancing biases, are updated from statistics that the layers report,
without a gradient. Statistics are sums over all sequences, stacked like the parameters. The update
is elementwise, so it does not depend on the mesh, the schedule or the number of microbatches.

Layer metrics are computed from the losses and statistics that the model declares.

The result of an update is checked before the update is applied; see `optim.guard`.
"""

from __future__ import annotations

import hashlib
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
from jaxtyping import Bool, Float, Int, Key

from maxpipe.config.schema import GuardConfig
from maxpipe.distributed.runtime import compiler_options
from maxpipe.models.spec import Follows, Model
from maxpipe.nn.decoder import MTP
from maxpipe.optim.guard import GuardState, check_step, init_guard_state, select_update
from maxpipe.optim.update import Optimizer, OptState
from maxpipe.optim.update_bound import MOMENTUM
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
from maxpipe.pipeline.loss_slot import OutputReader
from maxpipe.pipeline.objective import Objective
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.schedule.catalog import make_forward_schedule
from maxpipe.schedule.table import Schedule
from maxpipe.step import executable
from maxpipe.step.state import VOCABULARY, ParamLayout, ReplicaCheck, TrainState, digest


def check_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    rate: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
    before: Float[jax.Array, " 2"],
) -> tuple[Bool[jax.Array, ""], Float[jax.Array, " 2"]]:
    """Return whether the update keeps parameters and moments finite, and their new bounds.

    The cheap bound is nearly always sufficient. Otherwise, the update is computed once more to
    check its values, which requires a pass over all parameters and state.

    Args:
        optimizer: the optimizer.
        gradients: a device's shards of the gradients. `params` and `state` are also shards.
        norm: norm of the full gradient.
        rate: learning rate.
        params: parameters before the update.
        state: optimizer state before the update.
        before: bounds before the update.
    """
    bound = optimizer.bound_update(before, norm, rate)

    def by_looking() -> tuple[jax.Array, jax.Array]:
        largest = optimizer.max_abs if optimizer.config.offload_state else _largest
        sizes = jnp.stack([_largest(params), largest(state.trees.get(MOMENTUM, {}))])
        after = optimizer.bound_update(sizes, norm, rate)
        if not optimizer.is_elementwise:
            return jnp.isfinite(after).all(), after
        return _is_finite_after_update(optimizer, gradients, norm, params, state), after

    known = jnp.isfinite(bound).all()
    return jax.lax.cond(known, lambda: (known, bound), by_looking)


def _largest(tree: Tree) -> Float[jax.Array, ""]:
    """Return the largest absolute value across all arrays, or 0 if there are no arrays."""
    found = [jnp.abs(leaf).max().astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(found).max() if found else jnp.zeros(())


def _is_finite_after_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
) -> Bool[jax.Array, ""]:
    """Compute the update without storing it, and return whether all results are finite.

    The barrier separates this computation from the update itself and keeps it in its branch, where
    it is fused into a reduction. If XLA shared or hoisted parts of the computation, their results
    would be stored in memory.
    """
    if optimizer.config.offload_state:
        return optimizer.is_finite_after_update(gradients, norm, params, state)
    given = jax.lax.optimization_barrier((gradients, norm, params, state))
    gradients, norm, params, state = given
    params, state = optimizer.update(gradients, state, params, norm=norm, draw=False)
    # Use one expression for all trees; with separate reductions, XLA would store shared values.
    finite = jax.tree.map(
        lambda *entries: reduce(operator.and_, map(jnp.isfinite, entries)).all(),
        params,
        *state.trees.values(),
    )
    return jnp.stack(jax.tree.leaves(finite)).all()


def compute_layer_metrics(
    model: Model,
    losses: Mapping[str, Float[Array, ""]],
    statistics: Mapping[str, Mapping[str, Array]],
) -> dict[str, Float[Array, ""]]:
    """Return the layer metrics, keyed by tag.

    `losses` are per target token, summed over layers. `statistics` are arrays `[layers of the type,
    ...]`, keyed by layer type and name. MTP layers are included, with their shifted targets.
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
    """Return each layer's largest or smallest entry, divided by the mean; 0 if the mean is 0."""
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
    """Update the parameters that follow statistics, unless the step is skipped.

    `statistics` are keyed by place (`layers`, `outside`), layer type and name. Those of MTP layers
    are under `ahead`, keyed by name only.
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
    """Increase entries whose statistic is below the mean; decrease entries above the mean.

    Padding entries of a stack have statistics of 0 and do not change.
    """
    mean = statistic.mean(-1, keepdims=True)
    # Every device has the statistics of all experts, but the parameter may be sharded over experts.
    direction = reshard_like(jnp.sign(mean - statistic), param)
    return param + how.rate * direction.astype(param.dtype)


Tree = Any


Metrics = dict[str, Float[Array, "*sources"] | Int[Array, ""]]
"""Metrics, keyed by tag. Training losses are in nats per token, evaluation losses in total nats.
With a mixture, evaluation sums are per source `[sources]`, and training adds the sums under
`BY_SOURCE`."""


BY_SOURCE = ("train/nats_by_source", "train/targets_by_source")
"""Tags of the per-source sums `[sources]` of a training step on a mixture; see `PerSourceSums`."""
# Each use of randomness has a separate stream of keys.
_PARAMETERS, _DROPOUT = 0, 1


@dataclass(frozen=True)
class Steps:
    """A partitioned model: its shardings and the functions to compile for them."""

    param_layout: ParamLayout
    optimizer: Optimizer
    train_schedule: Schedule
    engine: Engine
    shape: tuple[int, int]
    """Number of sequences in a global batch, and number of tokens per sequence."""
    schedules: Callable[[int], Schedule]
    """Function that returns the schedule for a given number of microbatches."""
    seed: int
    byte_lengths: np.ndarray
    """Number of bytes of text for each token id."""
    guard: GuardConfig

    @property
    def objective(self) -> Objective:
        """Objective that a step minimizes."""
        return self.engine.network.objective

    @property
    def num_sources(self) -> int:
        """Number of sources of the mixture; 0 without a mixture."""
        return self.engine.network.num_sources

    # Shardings.

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every batch array."""
        return NamedSharding(self.param_layout.mesh, BATCH_SPEC)

    @cached_property
    def state_sharding(self) -> TrainState:
        """Sharding of the stacked train state."""
        found = self.param_layout.shardings(self._state_specs)
        trees = self._in_state_memory(found.optimizer.trees)
        return found._replace(optimizer=found.optimizer._replace(trees=trees))

    def _in_state_memory(self, shardings: Tree) -> Tree:
        """Return the shardings of optimizer-state trees with the memory kind that stores them."""
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
        """Sharding of the state in saved form, in network order."""
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
        """Shapes, dtypes and shardings of the stacked train state."""
        return with_shardings(jax.eval_shape(self._init), self.state_sharding)

    @cached_property
    def _abstract_params(self) -> Tree:
        return jax.eval_shape(self.param_layout.init, jax.random.key(0))

    def with_batch_size(self, rows: int) -> Steps:
        """Return the steps for a smaller batch, which has fewer microbatches of the same size."""
        count = rows * self.train_schedule.num_microbatches // self.shape[0]
        if rows == self.shape[0]:
            return self
        return replace(self, train_schedule=self.schedules(count), shape=(rows, self.shape[1]))

    # Compiled functions.

    def init(self) -> TrainState:
        """Return a new state on the mesh; its values depend only on the seed and the model."""
        init = self._jit(self._init, self.state_sharding).lower()
        # On CPU, LLVM needs many seconds to optimize the random number generator, which runs only
        # once. The generator uses integer arithmetic, so the bits are the same at any optimization
        # level.
        options: dict[str, Any] = {}
        if self.param_layout.mesh.devices.flat[0].platform == "cpu":
            options["xla_backend_optimization_level"] = 0
        return init.compile(options)()

    def init_params(self) -> Tree:
        """Return the parameters of a new state."""
        init = partial(self.param_layout.init, self._key(_PARAMETERS))
        return self._jit(init, self.state_sharding.params)()

    def compile_train(self) -> Any:
        """Compile the train step: (state, batch) -> (state, metrics). The state is donated."""
        return self.lower_train().compile(self.compiler_options)

    def load_train(self, folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> Any:
        """Load a train step that was compiled ahead of time for a config with the same sections.

        Raises:
            ConfigError: the program was compiled for different values, or cannot be loaded on these
                devices.
            StorageError: the program cannot be read, or is not safe to load.
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
        """Compile the eval step: (params, batch) -> sums over the target tokens of the batch.

        `rows` is the number of sequences in the global batch and must be a multiple of the number
        of batch shards; 0 uses the training batch size. Microbatches are not larger than in
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
        with jax.set_mesh(self.param_layout.mesh):
            lowered = step.lower(self.abstract_state.params, self.abstract_batch(rows))
            return lowered.compile(self.compiler_options)

    def compile_reader(
        self, reader: OutputReader, rows: int = 0, *, everywhere: bool = False
    ) -> Any:
        """Compile a reader: (params, batch) -> arrays `[rows, ...]` with its output for each
        sequence.

        The arrays are sharded like the batch, or replicated if `everywhere` is set. `rows` is
        described in `compile_eval`.
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
        """Return a checksum of the parameters that does not depend on the layout."""
        parts = self.param_layout

        def digests(params: Tree) -> Array:
            saved = parts.to_saved(params, vocabulary=VOCABULARY)
            return jnp.stack([digest(leaf) for leaf in jax.tree.leaves(saved)])

        everywhere = NamedSharding(parts.mesh, PartitionSpec())
        found = self._jit(auto_sharded(digests, PartitionSpec()), everywhere)(params)
        return hashlib.sha256(np.asarray(found, "<u4").tobytes()).hexdigest()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA options for this mesh."""
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
        """Return the per-device shapes of the tick loop's buffers, without compiling."""
        return self.engine.buffer_shapes(
            self.train_schedule, self.abstract_state.params, self.abstract_batch()
        )

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
        )

    @cached_property
    def replica_check(self) -> ReplicaCheck:
        """Check that replicated parts of the stacked train state are bitwise equal."""
        return ReplicaCheck(self.param_layout.mesh, self.abstract_state, self.state_sharding)

    @cached_property
    def to_saved(self) -> Any:
        """Function that converts a state to its saved form: network order, without padding."""
        return self._jit(self._to_saved, self.saved_sharding)

    def _to_saved(self, state: TrainState) -> Tree:
        parts = self.param_layout

        # Merge the layers of all stages into one dim and remove padding.
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
        """Return the parameters that a checkpoint stores: only the adapters, if there are any."""
        parts = self.param_layout
        return params if parts.base is parts else parts.select_trainable_saved(params)

    @cached_property
    def from_saved(self) -> Any:
        """Function (saved form, guard state, base parameters) -> state.

        The guard state defaults to that of a new run. Base parameters are needed only with
        adapters.
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
        """Function that converts saved parameters to stacked parameters."""
        return self._jit(self._stack, self.state_sharding.params)

    @cached_property
    def merge_adapters(self) -> Any:
        """Function (base, adapters) -> all parameters, all of them in saved form."""
        parts, specs = self.param_layout, self.param_layout.saved_specs

        def convert(base: Tree, adapters: Tree) -> Tree:
            return auto_sharded(parts.to_saved, specs)(self._stack(adapters, base))

        return self._jit(convert, parts.shardings(specs))

    def _stack(self, params: Tree, base: Tree | None = None) -> Tree:
        """Stack saved parameters. With a `base`, `params` are adapters of that base."""
        # Distribute the layers over the stages and pad the vocabulary.
        parts = self.param_layout
        if base is None:
            return auto_sharded(parts.from_saved, parts.specs)(params)
        mine = auto_sharded(parts.from_saved, parts.select_trainable(parts.specs))(params)
        return replace_subtree(self._stack_with_adapters(base), mine)

    def _stack_with_adapters(self, base: Tree) -> Tree:
        """Return the stacked parameters of a saved base with new adapters."""
        plain = self.param_layout.base
        stacked = auto_sharded(plain.from_saved, plain.specs)(base)
        return self.param_layout.add_adapters(stacked, self._key(_PARAMETERS))

    def _jit(self, run: Callable[..., Tree], shardings: Tree) -> Any:
        """Return a jitted function whose outputs have these shardings."""
        return jax.jit(trace_on_mesh(self.param_layout.mesh, run), out_shardings=shardings)

    def init_from_params(self, params: Tree) -> TrainState:
        """Return a new state with parameters from a checkpoint.

        For a model with adapters, `params` are the parameters of the base model.
        """

        def convert(saved: Tree) -> TrainState:
            params, guard = self._stack_with_adapters(saved), init_guard_state(self.guard)
            optimizer, step = self._optimizer_state(params), jnp.zeros((), jnp.int32)
            return TrainState(step, params, optimizer, jax.tree.map(jnp.asarray, guard))

        return self._jit(convert, self.state_sharding)(params)

    @cached_property
    def initial_params(self) -> Any:
        """Function that converts saved parameters to the initial stacked parameters of a run. With
        adapters, the saved parameters are those of the base model.
        """
        return self._jit(self._stack_with_adapters, self.state_sharding.params)

    @cached_property
    def abstract_saved(self) -> Tree:
        """Shapes, dtypes and shardings of the saved form."""
        state = jax.eval_shape(self._init)
        return with_shardings(jax.eval_shape(self._to_saved, state), self.saved_sharding)

    @cached_property
    def abstract_base(self) -> Tree:
        """Shapes, dtypes and shardings of the base parameters of a run, without adapters."""
        plain = self.param_layout.base
        stacked = jax.eval_shape(plain.init, self._key(_PARAMETERS))
        saved = jax.eval_shape(auto_sharded(plain.to_saved, plain.saved_specs), stacked)
        return with_shardings(saved, plain.shardings(plain.saved_specs))

    # Computations.

    def _key(self, stream: int) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.key(self.seed), stream)

    def _optimizer_state(self, params: Tree) -> Tree:
        """Return the optimizer state of a new run, without frozen parameters."""
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
        # Merge the layers of all stages into one dim; the arrays are small.
        reported = auto_sharded(layout.unstack, PartitionSpec())(*layers)
        metrics |= compute_layer_metrics(model, found.losses, reported | further)
        return TrainState(state.step + 1, params, optimizer, guard), metrics

    def _eval_step(self, schedule: Schedule, params: Tree, batch: Tree) -> Metrics:
        sums, targets = self.engine.loss(schedule)(params, batch, None)
        found = dict(zip(("loss", *self.objective.report_names), sums, strict=True))
        if self.objective.segments_per_loss:
            return found | {"targets": targets}
        lengths = jnp.asarray(self.byte_lengths, jnp.float32)
        # The output is sharded like the indices.
        size = auto_sharded(operator.getitem, BATCH_SPEC)(lengths, batch["targets"])
        size = size * batch["loss_mask"]
        if not self.num_sources:
            return found | {"targets": targets, "bytes": size.sum()}

        def summed(size: Array, sources: Array) -> Array:
            return sum_by_source(size, self.num_sources, sources[:, None])

        summed = auto_sharded(summed, PartitionSpec())
        return found | {"targets": targets, "bytes": summed(size, batch["source_ids"])}


def _on_device(tree: Tree) -> Tree:
    """Move arrays to device memory, if they are in host memory."""
    return jax.device_put(tree, jax.memory.Space.Device)
