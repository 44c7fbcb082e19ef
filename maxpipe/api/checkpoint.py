"""List, restore and save checkpoints of a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

import jax

from maxpipe.api.arguments import (
    argument_error,
    check_instance,
    check_json,
    check_metrics,
    check_path,
    locate_errors,
)
from maxpipe.api.trainer import SavedState, Trainer
from maxpipe.checkpoint import inspect
from maxpipe.checkpoint.address import Address, parse_address, parse_run_address
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manager import (
    CheckpointManager,
    open_address_folder,
    resolve_step,
)
from maxpipe.checkpoint.retention import BestMetric
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, DamagedError
from maxpipe.config.load import to_dict
from maxpipe.config.plugins import check_plugins
from maxpipe.config.sections.eval import best_mode_of
from maxpipe.distributed.phases import RESTORE, SAVE
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import files
from maxpipe.optim.guard import init_guard_state
from maxpipe.optim.optax_update import OPTAX
from maxpipe.restore.initial_weights import (
    check_adapter,
    check_model,
    read_base,
    upgrade_model_section,
)
from maxpipe.step.state import TrainState
from maxpipe.telemetry.writers import EventLog
from maxpipe.train.memory_check import explain_allocation_errors
from maxpipe.train.resume import FROZEN, check_frozen, check_optimizer
from maxpipe.train.session import (
    WRITTEN_FILES,
    lock_folders,
    ownership_check,
    saved_config,
    saved_data,
    write_config,
)

_EXTRA = "extra"
RunLocation = str | os.PathLike[str] | Trainer
"""A run: the name of a run in `runs/`, the path of a run folder, a URL such as s3://BUCKET/PATH, or
a trainer."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of a run. Reading its description uses no jax device."""

    address: str
    """Address in the form RUN@STEP, which commands, `evaluate` and `generate` accept."""
    step: int
    """Number of completed steps."""
    saved: datetime
    """Time at which the checkpoint was saved, in the local time zone."""
    metrics: dict[str, float]
    """Evaluation metrics of the step, such as `eval/loss` in nats per token; empty if the step was
    not evaluated."""
    config: dict[str, Any] = field(repr=False)
    """Config of the run when the checkpoint was saved, as nested dicts."""
    extra: dict[str, Any]
    """JSON values that `save` received, such as the position of a custom data iterator."""
    path: Path | str
    """Folder of the checkpoint."""

    @classmethod
    @locate_errors
    def open(cls, address: str | os.PathLike[str]) -> Self:
        """Return the checkpoint with this address: RUN@STEP, RUN@newest, RUN@best, RUN (its newest)
        or the path of a checkpoint folder.

        Raises:
            ConfigError: the run or the step does not exist.
            StorageError: the metadata of the checkpoint is damaged or cannot be reached.
        """
        check_path("Checkpoint.open: address", address, "an address", "Pass RUN@STEP.")
        parsed = parse_address(os.fspath(address))
        folder = open_address_folder(parsed)
        return cls._read(folder, parsed, resolve_step(folder, parsed))

    @classmethod
    @locate_errors
    def list(cls, run: RunLocation) -> Sequence[Self]:
        """Return the checkpoints of a run, oldest first; empty if the run has none.

        Raises:
            ConfigError: the run does not exist.
            StorageError: a checkpoint is damaged or cannot be reached.
        """
        if isinstance(run, Trainer) and not run.run_dir.exists():
            return ()
        address = _run_address(run)
        folder = _folder(address)
        return tuple(cls._read(folder, address, step) for step in folder.steps())

    @classmethod
    @locate_errors
    def newest(cls, run: RunLocation) -> Self | None:
        """Return the newest checkpoint of a run, or None if the run has no checkpoint.

        Raises:
            ConfigError, StorageError: as in `list`.
        """
        if isinstance(run, Trainer) and not run.run_dir.exists():
            return None
        address = _run_address(run)
        folder = _folder(address)
        steps = folder.steps()
        return cls._read(folder, address, steps[-1]) if steps else None

    @classmethod
    @locate_errors
    def best(cls, run: RunLocation, metric: str = "", mode: Literal["", "min", "max"] = "") -> Self:
        """Return the checkpoint with the best evaluation metric.

        Args:
            run: the run.
            metric: tag of the metric, such as `eval/loss` (default: `checkpoint.best_metric`).
            mode: whether the smallest or the largest value is best (default: depends on `metric`).

        Raises:
            ConfigError: no checkpoint has the metric.
        """
        if mode not in ("", "min", "max"):
            rule = "must be min or max."
            raise argument_error("Checkpoint.best: mode", mode, rule, "Leave out mode.")
        check_instance(
            "Checkpoint.best: metric",
            metric,
            str,
            "must be the tag of a metric.",
            "Pass eval/loss.",
        )
        address = _run_address(run)
        better = None
        if metric:
            better = BestMetric(metric, (mode or best_mode_of(metric)) == "max")
        _, step, _, _ = inspect.find_best_checkpoint(address, better)
        return cls._read(open_address_folder(address), address, step)

    @classmethod
    def _read(cls, folder: CheckpointFolder, address: Address, step: int) -> Self:
        try:
            facts = folder.read_metadata(step)
        except DamagedError as damage:
            raise StorageError(
                Code.CKPT_DAMAGED,
                f"{folder / step}: cannot be used\n  {damage}.\n  Use another step.",
            ) from damage
        return cls(
            address=address.address_at(step),
            step=step,
            saved=datetime.fromtimestamp(facts.time).astimezone(),
            metrics=dict(facts.metrics or {}),
            config=dict(facts.config),
            extra=dict(facts.data.get(_EXTRA, {})),
            path=Path(folder / step) if os.path.exists(folder / step) else str(folder / step),
        )

    def restore(self, trainer: Trainer) -> TrainState:
        """Return the train state of this checkpoint in the layout of a trainer.

        The mesh, the schedule and the number of stages may differ from the run that saved the
        checkpoint. Continue with the batches `trainer.batches(int(state.step))`.

        Raises:
            ConfigError: the model or the optimizer of the trainer is another one, or the code of a
                plug-in has changed.
            StorageError: the checkpoint is damaged or cannot be reached.
        """
        _check_trainer("Checkpoint.restore", trainer)
        loaded, steps = trainer.loaded, trainer.steps
        parsed = parse_address(self.address)
        names = _optax_names(trainer)
        is_own = os.path.realpath(parsed.run_dir) == os.path.realpath(trainer.run_dir)

        def accept(facts: CheckpointMetadata) -> None:
            wanted = to_dict(loaded.config)["model"]
            saved = facts.config["model"]
            check_model(saved, wanted, loaded.origins, "use the config of the run")
            check_adapter(facts, loaded, own=is_own, address=self.address)
            frozen = upgrade_model_section(saved)[FROZEN]
            check_frozen(frozen, loaded, facts.step, own=is_own, address=self.address)
            if names is None:
                check_optimizer(facts, loaded, own=is_own, address=self.address)
            elif names != facts.data.get(OPTAX):
                raise _optimizer_error(facts.data.get(OPTAX), names, self.address)
            for warning in check_plugins(facts.data, loaded, facts.step):
                trainer.reporter.warn(warning)

        with (
            trainer.phases.enter(RESTORE),
            explain_allocation_errors(loaded.config),
            CheckpointManager(parsed.home, write=False) as checkpoints,
        ):
            found = checkpoints.restore(self.step, steps.abstract_saved, accept)
            data, base = found.metadata.data, None
            if loaded.config.adapter.rank:
                base, trainer.adapter_base = read_base(
                    found.metadata, loaded, steps, trainer.reporter
                )
            if loaded.config.data.mixture and "source" in data.get("fingerprint", {}):
                trainer.datasets.train.resume_mixture(data["fingerprint"], data["step"])
            guard = init_guard_state(loaded.config.guard, data.get("guard"))
            state = jax.block_until_ready(steps.from_saved(found.state, guard, base))
        if is_own:
            trainer.saved_state = SavedState.of(state)
        return state

    @classmethod
    def save(
        cls,
        trainer: Trainer,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Self:
        """Save a state to the run folder of a trainer, and return the checkpoint.

        The function returns when the checkpoint is on disk. Older checkpoints are deleted by the
        rules of `checkpoint` in the config. A saved step is never changed: if this state was just
        saved or restored with the same metrics and values, nothing is written. The run is locked
        only during the call. In runs of several processes, every process calls this function.

        Args:
            trainer: trainer of the state; `run.name` and `run.dir` select the folder.
            state: state to save. Its arrays may be used afterwards.
            metrics: evaluation metrics of the step, which `best` compares: finite numbers or NaN.
            extra: JSON values to store, such as the position of a custom data iterator.

        Raises:
            ConfigError: the step is already saved, `extra` contains other values than JSON, or a
                metric is infinite or no number.
            StorageError: the folder cannot be written, another process uses it, or it contains a
                later step.
        """
        values = check_metrics("Checkpoint.save: metrics", {} if metrics is None else metrics)
        more = check_json("Checkpoint.save: extra", {} if extra is None else extra)
        _check_trainer("Checkpoint.save", trainer)
        trainer.check_state(state)
        config, step = trainer.config, int(state.step)
        conversation = trainer.datasets.conversation if trainer.has_read_data else None
        guard = state.guard.to_json()
        data = saved_data(
            config, trainer.data_state(step), guard, trainer.adapter_base, conversation
        )
        data |= {OPTAX: names} if (names := _optax_names(trainer)) is not None else {}
        data |= {_EXTRA: more} if more else {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(trainer.phases.enter(SAVE))
            files.check_regular_files(trainer.run_dir, WRITTEN_FILES)
            is_first = jax.process_index() == 0
            locks = lock_folders(config, stack, trainer.reporter.warn) if is_first else []
            check = ownership_check(locks)
            events = EventLog(trainer.run_dir, jax.process_index(), time.monotonic(), check)
            manager = stack.enter_context(
                CheckpointManager(
                    trainer.run_dir, config.checkpoint, record=events.write, locks=locks
                )
            )
            if step == max(manager.steps(), default=-1):
                return cls._saved_before(trainer, state, values, more)
            if is_first:
                write_config(config, locks)
            manager.save(
                step,
                lambda: trainer.steps.to_saved(state),
                saved_config(config),
                data,
                values,
                last=True,
            )
        trainer.saved_state = SavedState.of(state)
        return cls.open(f"{trainer.run_dir}@{step}")

    @classmethod
    def _saved_before(
        cls, trainer: Trainer, state: TrainState, metrics: dict[str, float], extra: dict[str, Any]
    ) -> Self:
        """Return the checkpoint of a step that is already saved, if it has the same content.

        Raises:
            ConfigError: the content may differ.
        """
        step = int(state.step)
        found = cls.open(f"{trainer.run_dir}@{step}")
        same = repr(sorted(found.metrics.items())) == repr(sorted(metrics.items()))
        if same and found.extra == extra and trainer.saved_state.has(state):
            return found
        raise ConfigError.one(
            Code.API_SAVED,
            "Checkpoint.save: state",
            f"step {step}",
            f"is already saved in {found.path}, and a checkpoint is never changed.",
            "Delete this folder and save again, or set run.name to a new name in maxpipe.build.",
        )


def _run_address(run: RunLocation) -> Address:
    if isinstance(run, Trainer):
        return parse_run_address(str(run.run_dir))
    check_path("Checkpoint: run", run, "a run", "Pass the name or folder of a run, or a trainer.")
    return parse_run_address(os.fspath(run))


def _check_trainer(where: str, trainer: object) -> None:
    rule, action = "must be a trainer.", "Pass the result of maxpipe.build."
    check_instance(f"{where}: trainer", trainer, Trainer, rule, action)


def _folder(address: Address) -> CheckpointFolder:
    return CheckpointFolder(os.path.join(address.home, CHECKPOINTS_FOLDER))


def _optax_names(trainer: Trainer) -> Sequence[str] | None:
    """Return the names of the state arrays of the optax transformation; None without one."""
    return sorted(trainer.steps.optimizer.state_arrays) if trainer.has_own_optimizer else None


def _optimizer_error(then: object, now: Sequence[str], address: str) -> ConfigError:
    before = "those of the optimizer in the config"
    if isinstance(then, Sequence):
        before = ", ".join(map(str, then)) or "none"
    return ConfigError.one(
        Code.API_OPTIMIZER,
        "optimizer",
        ", ".join(now) or "without state",
        f"must have the state arrays of {address}: {before}.",
        "Build the trainer with the optimizer that saved the checkpoint, or set "
        f"checkpoint.restore_from={address} to read only the weights.",
    )
