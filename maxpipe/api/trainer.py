"""Build the mesh, the compiled steps and the state of a config, and train.

`run_training` trains a run as `maxpipe train` does. `build` returns a `Trainer` for custom loops.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from maxpipe.api.arguments import argument_error, check_instance, check_integer, locate_errors
from maxpipe.api.batch import check_mapping, complete_batch
from maxpipe.api.config import ConfigSource, load_config
from maxpipe.api.schedule import Schedule
from maxpipe.checkpoint.folder import AdapterBase
from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.check import check_length, check_training, error_location, find_warnings
from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.config.sections.train import BatchRamp, total_steps
from maxpipe.data.datasets import build_datasets
from maxpipe.data.loader import Batches, Datasets
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, RESTORE, STEP, Phases
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.evals.evaluate import Evaluator, evaluate
from maxpipe.evals.multiple_choice import open_tasks
from maxpipe.generation.completions import DecodeEngineProtocol
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    build_decode_engine,
    decode_param_converter,
    decode_param_layout,
)
from maxpipe.models.count import num_params
from maxpipe.models.spec import Model
from maxpipe.objectives import LossFunction, TokenLoss
from maxpipe.optim.optax_update import OptaxOptimizer, check_transformation
from maxpipe.parallel.sharding import local_sequences, make_global_batch
from maxpipe.pipeline.objective import Objective
from maxpipe.restore.initial_weights import base_record, read_peft_adapters, read_weights
from maxpipe.step.build import (
    check_loss,
    load_batches,
    resolve_mesh,
    shared_metadata,
    steps_on_all_devices,
)
from maxpipe.step.state import ParamLayout, TrainState
from maxpipe.step.step import Steps
from maxpipe.train.loop import train
from maxpipe.train.memory_check import check_forecast, check_program, explain_allocation_errors
from maxpipe.train.session import merge_problems, missing_files

Batch = Mapping[str, Array | np.ndarray]
"""Arrays of one batch, keyed by name; see `train_step`."""
Metrics = dict[str, Array]
_log = logging.getLogger("maxpipe")


@locate_errors
def run_training(*sources: ConfigSource) -> Path:
    """Train or resume the run of a config, as `maxpipe train` does, and return the run folder.

    The function prints the progress of the run, and writes checkpoints and metrics to the run
    folder. Ctrl-C saves the state before the function raises an error. In a thread other than the
    main thread, no signal is handled.

    Args:
        sources: config and overrides, as in `load_config`.

    Raises:
        ConfigError: the config is not valid, or does not match the machine, the data or the run's
            checkpoint.
        StorageError: checkpoints cannot be read or written.
        Preemption: a signal or Ctrl-C stopped the run, and the state is saved.
        DivergenceError: the config requires the run to stop after a bad step.
        ReplicaError: replicas of an array differ between devices.
    """
    loaded = sources[0] if len(sources) == 1 else None
    if isinstance(loaded, LoadedConfig):
        _raise_problems(check_training(loaded.config, loaded.origins))
    else:
        loaded = load_config(*sources, to_train=True)
    train(loaded)
    return Path(run_folder(loaded.config.run))


@locate_errors
def build(
    *sources: ConfigSource,
    loss: Objective | LossFunction | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Trainer:
    """Build the mesh, the model and the steps of a config. Programs are compiled at first use.

    The first call starts jax with the platform and the CPU devices of the config; jax cannot change
    them later in the same process. In runs of several processes (`runtime.num_processes`), every
    process calls the same functions in the same order, within `with maxpipe.build(...)`.

    Args:
        sources: config and overrides, as in `load_config`.
        loss: loss to minimize in place of `train.objective`. A function maps the log-probabilities
            of the target tokens, float32 `[B, T]` in nats, and a dict of batch arrays to the losses
            of the tokens `[B, T]`. B is the microbatch size of a device. The function must not
            combine tokens. The step averages the losses with the weights `loss_mask`. Losses that
            need more inputs are subclasses of `Objective`.
        optimizer: optax transformation in place of `optim`. Its state may contain arrays with the
            shapes of the parameters, and counters of updates. It clips gradients and schedules the
            learning rate itself.

    Returns:
        A trainer. It is a context manager; `close` ends its data threads and connections.

    Raises:
        ConfigError: the config is not valid, does not match the devices, or needs a teacher,
            rollouts or reference probabilities, which only `run_training` provides. The length of
            the run must be set unless `optimizer` is, because the learning rate depends on it.
        UnreachableError: other processes did not join in time.
    """
    loaded = load_config(*sources)
    _check_objective(loaded)
    if optimizer is None:
        check_length(loaded.config, loaded.origins)
    if loss is not None and not isinstance(loss, Objective):
        loss = TokenLoss(loss)
    if optimizer is not None:
        check_transformation(optimizer)
    with contextlib.ExitStack() as stack:
        phases = Phases()
        channel = _join(loaded.config, phases, stack)
        with merge_problems(missing_files(loaded)):
            loaded = resolve_mesh(loaded)
            check_forecast(loaded.config, _log.warning)
        config = loaded.config
        if loss is not None:
            check_loss(config, loss)
        for warning in (*loaded.warnings, *find_warnings(config)):
            _log.warning("%s", warning.line)
        tokenizer = fit_tokenizer(open_tokenizer(config.tokenizer), config.model.vocab_size)
        steps = steps_on_all_devices(
            config, tokenizer.byte_lengths, objective=loss, transformation=optimizer
        )
        return Trainer(loaded, steps, tokenizer, phases, channel, stack.pop_all())


def train_step(trainer: Trainer, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Train on one batch, and return the new state and the metrics.

    The function returns before the devices have finished. The memory of `state` is reused: use only
    the returned state afterwards.

    Args:
        trainer: result of `build`.
        state: state from `Trainer.init`, `train_step` or `Checkpoint.restore`.
        batch: arrays of the global batch, equal in all processes, or a batch of `Trainer.batches`.
            `tokens` and `targets` are integers `[sequences, T]`. The number of sequences is
            `train.batch_size`, or a smaller multiple of the microbatch size. Optional arrays are
            `loss_mask` (weights of the targets, default 1), `segment_ids` (documents numbered from
            1, 0 for padding; default 1), `positions` (default 0 to T - 1) and `example_ids`
            `[sequences]`.

    Returns:
        The new state, and metrics keyed by tag, such as `train/loss` (mean loss of the target
        tokens, in nats) and `train/grad_norm`, as scalars on the devices.

    Raises:
        ConfigError: an array of the batch is missing or has a wrong shape, or the state belongs to
            another layout or was used by an earlier step.
    """
    rule = "must be a trainer."
    check_instance("train_step: trainer", trainer, Trainer, rule, "Pass maxpipe.build(...).")
    return trainer.train_step(state, batch)


class Trainer:
    """Mesh, model and compiled steps of a config. The train state is passed to the methods."""

    def __init__(
        self,
        loaded: LoadedConfig,
        steps: Steps,
        tokenizer: Tokenizer,
        phases: Phases,
        channel: ControlChannel | None,
        stack: contextlib.ExitStack,
    ):
        self.loaded = loaded
        """Config with a resolved mesh, and the origin of each value."""
        self.steps = steps
        """Functions that compile steps, and the layout of the state (`maxpipe.step.step`)."""
        self.tokenizer = tokenizer
        self.adapter_base: AdapterBase | None = None
        """Base model of the adapters, if the config trains adapters."""
        self.phases = phases
        self._channel, self._stack = channel, stack
        self._train_steps: dict[int, Any] = {}
        self._eval_steps: dict[int, Any] = {}
        self._engines: dict[tuple[Sampling, int], DecodeEngineProtocol] = {}
        self.reporter = LogReporter()
        self.saved_state = SavedState(())
        """State that the newest checkpoint of the run is known to contain."""

    # Properties.

    @property
    def config(self) -> Config:
        """Config with a resolved mesh."""
        return self.loaded.config

    @property
    def run_dir(self) -> Path:
        """Folder of the run, in which `Checkpoint.save` writes."""
        return Path(run_folder(self.config.run))

    @property
    def mesh(self) -> Mesh:
        """Device mesh, with the axes of `mesh` in the config."""
        return self.steps.param_layout.mesh

    @property
    def model(self) -> Model:
        """Description of the model: layers, parameters and their shapes."""
        return self.steps.param_layout.decoder.model

    @property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        return num_params(self.model)

    @property
    def schedule(self) -> Schedule:
        """Pipeline schedule of a train step."""
        return Schedule.of(self.steps.train_schedule)

    @property
    def state_sharding(self) -> TrainState:
        """Sharding of each array of a train state."""
        return self.steps.state_sharding

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of the arrays of a batch."""
        return self.steps.batch_sharding

    @functools.cached_property
    def datasets(self) -> Datasets:
        """Training and validation data of the config, which is read at first use.

        Raises:
            ConfigError: the data cannot be used.
        """
        _raise_problems(check_training(self.config, self.loaded.origins))
        with self.phases.enter(DATA_SET_UP):
            datasets = build_datasets(self.config, self.phases.progress)
        self._stack.callback(datasets.close)
        return datasets

    @property
    def has_read_data(self) -> bool:
        """Whether the data of the config has been read."""
        return "datasets" in self.__dict__

    @property
    def has_own_optimizer(self) -> bool:
        """Whether an optax transformation replaces the optimizer of the config."""
        return isinstance(self.steps.optimizer, OptaxOptimizer)

    # State and batches.

    def init(self) -> TrainState:
        """Return the state of a new run, which depends only on the seed and the model.

        If `checkpoint.restore_from` is set, the weights are read from there.

        Raises:
            ConfigError: the weights do not exist or belong to another model.
            StorageError: the weights cannot be read.
        """
        origin = self.config.checkpoint.restore_from
        with self.phases.enter(RESTORE), explain_allocation_errors(self.config):
            if not origin:
                return jax.block_until_ready(self.steps.init())
            tokenizer = self.tokenizer.fingerprint()
            found = read_weights(origin, self.loaded, self.steps, self.reporter, tokenizer)
            if self.config.adapter.rank:
                self.adapter_base = base_record(found, origin)
            adapters = read_peft_adapters(self.loaded, self.steps, self.reporter)
            return jax.block_until_ready(self.steps.init_from_params(found.params, adapters))

    def batches(self, start: int = 0, stop: int | None = None) -> Batches:
        """Return an iterator over the batches `start` to `stop - 1` of the config's training data.

        The batches are the same as in `maxpipe train` and are prefetched by threads. The default of
        `stop` is the number of steps of the config.

        Raises:
            ConfigError: the data cannot be used, or the length of the run is not set.
        """
        start = check_integer("batches: start", start, 0)
        if stop is not None:
            stop = check_integer("batches: stop", stop, 0)
        else:
            check_length(self.config, self.loaded.origins)
            stop = total_steps(self.config.train)
        return load_batches(self.batch_sharding, self.datasets.train, start, stop)

    def place(self, batch: Batch) -> dict[str, Array]:
        """Complete a batch, and copy it to the devices; see `train_step` for its arrays.

        Raises:
            ConfigError: an array is missing or has a wrong shape.
        """
        check_mapping(batch)
        placed = {
            name: array
            for name, array in batch.items()
            if isinstance(array, Array) and array.sharding == self.batch_sharding
        }
        if placed and len(placed) == len(batch):
            return placed
        host = complete_batch(batch, self.steps)
        count = len(host["tokens"])
        rows = local_sequences(self.batch_sharding, count)
        local = {name: array[rows] for name, array in host.items()}
        return make_global_batch(local, rows, count, self.batch_sharding)

    def data_state(self, step: int) -> dict[str, Any]:
        """Return the data position that a checkpoint of `step` stores."""
        if self.has_read_data:
            return self.datasets.train.state(step)
        tokenizer = {"tokenizer": self.tokenizer.fingerprint()}
        ramp = BatchRamp.from_config(self.config.train)
        return {"step": step, "fingerprint": ramp.metadata() | tokenizer}

    # Steps.

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Train on one batch; see `maxpipe.train_step`."""
        self.phases.progress()
        placed = self.place(batch)
        compiled = self._compiled_train_step(len(placed["tokens"]))
        _check_unused(state)
        with self.phases.enter(STEP), explain_allocation_errors(self.config):
            try:
                state, metrics = compiled(state, placed)
            except (TypeError, ValueError, RuntimeError) as error:
                self.check_state(state, error)
                raise
        if self.has_own_optimizer:
            metrics.pop("train/lr")  # unknown
        return state, metrics

    def _compiled_train_step(self, rows: int) -> Any:
        if rows not in self._train_steps:
            with self.phases.enter(COMPILE), explain_allocation_errors(self.config):
                program = self.steps.with_batch_size(rows).compile_train()
            check_program(self.config, program, _log.warning)
            self._train_steps[rows] = program
        return self._train_steps[rows]

    def evaluate(
        self, state: TrainState, batches: Iterable[Batch] | None = None
    ) -> dict[str, float]:
        """Return evaluation metrics of a state; see `maxpipe.evaluate`."""
        if batches is None:
            evaluator = self._evaluator
            return evaluator.metrics(int(state.step), state.params, self._read)
        rule, action = "must be an iterable of batches.", "Pass a list of batches."
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise argument_error("evaluate: batches", batches, rule, action)
        placed = map(self.place, batches)
        if (first := next(placed, None)) is None:
            raise argument_error("evaluate: batches", batches, "must contain a batch.", action)
        placed = itertools.chain([first], placed)
        totals = evaluate(self._eval_step, state.params, placed)
        assert totals is not None
        return totals.metrics

    @functools.cached_property
    def _evaluator(self) -> Evaluator:
        tasks = open_tasks(self.config, self.datasets.tokenizer)
        evaluator = Evaluator(
            self.config.eval,
            self.datasets,
            tasks,
            self.reporter,
            self.should_stop,
            self.phases.progress,
        )
        with self.phases.enter(COMPILE), explain_allocation_errors(self.config):
            evaluator.compile(self.steps)
        return evaluator

    def _read(self, loader: Any, start: int, stop: int) -> Batches:
        return load_batches(self.batch_sharding, loader, start, stop)

    def _eval_step(self, params: Any, batch: dict[str, Array]) -> Mapping[str, Array]:
        rows = len(batch["tokens"])
        if rows not in self._eval_steps:
            with self.phases.enter(COMPILE), explain_allocation_errors(self.config):
                self._eval_steps[rows] = self.steps.compile_eval(rows)
        self.phases.progress()
        return self._eval_steps[rows](params, batch)

    def decode_engine(
        self, state: TrainState, sampling: Sampling, seed: int
    ) -> tuple[DecodeEngineProtocol, Any]:
        """Return an engine that generates text on the devices of the trainer, and the parameters in
        the layout of the engine.
        """
        if (sampling, seed) not in self._engines:
            engine = build_decode_engine(self._decode_layout, sampling, seed)
            self._engines[sampling, seed] = engine
        return self._engines[sampling, seed], self._to_decode_params(state.params)

    @functools.cached_property
    def _decode_layout(self) -> ParamLayout:
        return decode_param_layout(self.steps.param_layout)

    @functools.cached_property
    def _to_decode_params(self) -> Callable[[Any], Any]:
        return decode_param_converter(self.steps.param_layout, self._decode_layout)

    def check_state(self, state: TrainState, cause: BaseException | None = None) -> None:
        """Check that a state has the layout of this trainer.

        Raises:
            ConfigError: the state belongs to another model or layout, or its arrays were reused by
                an earlier step.
        """
        _check_unused(state)
        wanted = self.steps.abstract_state
        same = jax.tree.structure(state) == jax.tree.structure(wanted)
        same = same and all(map(_is_like, jax.tree.leaves(state), jax.tree.leaves(wanted)))
        if not same:
            raise ConfigError.one(
                Code.API_STATE,
                "state",
                None,
                "has another model, optimizer, mesh or pipeline than the trainer.",
                "Use a state from init() of the same trainer, or save it with Checkpoint.save and "
                "restore it with Checkpoint.restore(trainer), which converts the layout.",
            ) from cause

    # Processes.

    def should_stop(self) -> bool:
        """Return whether all processes of the run should stop, for example after a SIGTERM.

        All processes receive the same result if they call this method in the same order. In a run
        of one process, signals are not handled, and the result is False.
        """
        return self._channel is not None and self._channel.should_stop()

    def close(self) -> None:
        """Stop the data threads, and leave the run's processes."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        shape = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        return (
            f"Trainer({self.config.run.name}: {self.num_params:,} parameters, "
            f"mesh {shape or 'one device'}, schedule {self.steps.train_schedule.name})"
        )


class SavedState(NamedTuple):
    """Weak references to the arrays of a state, so that their memory can be freed."""

    arrays: tuple[weakref.ref[Any], ...]

    @classmethod
    def of(cls, state: TrainState) -> Self:
        """Return references to the arrays of a state."""
        return cls(tuple(map(weakref.ref, jax.tree.leaves(state))))

    def has(self, state: TrainState) -> bool:
        """Return whether a state consists of the same arrays, which cannot be changed."""
        leaves = jax.tree.leaves(state)
        return len(leaves) == len(self.arrays) and all(
            each() is leaf for each, leaf in zip(self.arrays, leaves, strict=True)
        )


class LogReporter:
    """Sends messages to the logger `maxpipe`, in place of a console."""

    def note(self, text: str) -> None:
        """Log a message with level INFO."""
        _log.info("%s", text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        _log.warning("%s", text)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Log the name of a stage."""
        _log.info("%s", name)
        yield


def _join(config: Config, phases: Phases, stack: contextlib.ExitStack) -> ControlChannel | None:
    """Start the devices, and join the other processes if there are several."""
    if config.runtime.num_processes == 1:
        runtime.start(config.runtime, config.mesh.cpu_devices)
        return None
    facts, where = shared_metadata(config), run_folder(config.run)
    joined = runtime.join_processes(config.runtime, config.mesh.cpu_devices, phases, facts, where)
    return stack.enter_context(joined)


def _check_objective(loaded: LoadedConfig) -> None:
    """Check that training needs no models or samples in addition to the data.

    Raises:
        ConfigError: the objective needs a teacher, rollouts or reference probabilities.
    """
    objective = loaded.config.train.objective
    if objective not in ("pretrain", "sft"):
        raise ConfigError.one(
            Code.API_OBJECTIVE,
            error_location("train.objective", loaded.origins),
            objective,
            "must be pretrain or sft with maxpipe.build.",
            "Use maxpipe.run_training, or set train.objective=pretrain and pass a loss.",
        )


def _raise_problems(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _check_unused(state: TrainState) -> None:
    """Check that no earlier step reused the memory of the state. XLA would crash.

    Raises:
        ConfigError: an array of the state was deleted.
    """
    if any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise ConfigError.one(
            Code.API_STATE,
            "state",
            None,
            "was used by an earlier train step, which reuses its memory.",
            "Pass the state that train_step returned: state, metrics = train_step(...).",
        )


def _is_like(leaf: Any, wanted: Any) -> bool:
    return (
        isinstance(leaf, Array)
        and (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        and leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    )
