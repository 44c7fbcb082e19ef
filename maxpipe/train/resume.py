"""Create a run's initial state: restored from its newest checkpoint or from another run, or new.

A checkpoint whose model, data or optimizer does not match the config is rejected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NotRequired, TypedDict

from maxpipe.checkpoint.folder import AdapterBase, CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manager import CheckpointManager, check_saved, find_lost_step
from maxpipe.checkpoint.manifest import METADATA_ITEM
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    DamagedError,
    checkpoint_home,
    find_checkpoint_home,
    in_bucket,
    run_folder,
)
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.plugins import check_plugins
from maxpipe.config.rules import format_value
from maxpipe.config.schema import Config, flatten, legacy_value_of, may_differ
from maxpipe.config.sections.source import paths_of
from maxpipe.config.sections.train import BatchRamp, total_steps
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Datasets
from maxpipe.data.prepared.logits import TeacherEntry
from maxpipe.errors import Code, ConfigError
from maxpipe.evals.early_stopping import EarlyStoppingState
from maxpipe.huggingface.folder import folder_of
from maxpipe.huggingface.import_ import WEIGHTS_ONLY
from maxpipe.io import redact
from maxpipe.io.typed_json import AnyFloat, check_type
from maxpipe.models.param_names import trained
from maxpipe.models.registry import describe
from maxpipe.optim.guard import init_guard_state
from maxpipe.optim.optax_update import OPTAX
from maxpipe.posttrain.rollouts import ReferenceParams
from maxpipe.restore.initial_weights import (
    NEW_START,
    base_record,
    check_adapter,
    check_model,
    has_adapters,
    read_base,
    read_other_metadata,
    read_peft_adapters,
    read_weights,
    restore_other,
    upgrade_model_section,
)
from maxpipe.step.state import TrainState
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console

FROZEN = "model.frozen"
"""Key of the name patterns of frozen parameters."""
_OPTIMIZER, _STATE_TYPE, _EMA_DECAY = "optim.name", "optim.state_dtype", "optim.ema_decay"
# Settings that may change after a run has finished: checkpoint and evaluation settings, the run's
# name and length, and machine settings.
_FREE_WHEN_DONE = frozenset({"checkpoint", "eval"})
_FREE_KEYS_WHEN_DONE = frozenset(
    {"run.name", "train.steps", "train.tokens", "mesh.cpu_devices", "data.allow_change"}
    | {"guard.replica_check_every", "model.attention"}
)


class GuardCounts(TypedDict):
    """Counts of bad steps kept by the guard, as stored in a checkpoint."""

    skipped: int
    spikes: int
    recent: tuple[list[AnyFloat], list[AnyFloat]]
    roll_backs: NotRequired[int]
    in_row: NotRequired[int]
    rows_left_out: NotRequired[int]


class Position(TypedDict):
    """Data position and related metadata, as stored in a checkpoint."""

    step: int
    fingerprint: dict[str, Any]
    guard: NotRequired[GuardCounts | None]
    teacher: NotRequired[TeacherEntry]
    reference: NotRequired[str]
    patience: NotRequired[EarlyStoppingState | None]
    plugins: NotRequired[dict[str, str]]


class RunStart(NamedTuple):
    """State and counts from which a run starts or resumes."""

    state: TrainState
    message: str
    offset: int = 0
    """Number of batches skipped by rollbacks; see `BadStepMonitor.offset`."""
    guard_counts: Mapping[str, Any] | None = None
    """Counts of bad steps kept by the guard, read from the checkpoint."""
    reference_digest: str | None = None
    """Checksum of a resumed run's initial parameters, if the checkpoint contains the checksum."""
    is_resumed: bool = False
    """Whether `state` comes from the run's own checkpoint rather than from initial parameters."""
    base: AdapterBase | None = None
    """Base model of the adapters, or None if the run trains no adapters."""
    early_stopping: Mapping[str, Any] | None = None
    """Counts kept by `EarlyStopping`, read from the checkpoint."""


def restore_or_init(
    loaded: LoadedConfig,
    steps: Steps,
    checkpoints: CheckpointManager,
    datasets: Datasets,
    console: Console,
    teacher: TeacherEntry | None = None,
) -> RunStart:
    """Return the initial state of the run. `teacher` identifies the run's teacher model.

    Raises:
        ConfigError: the checkpoint was saved with a different model, optimizer, teacher or data.
        StorageError: the checkpoint cannot be read.
    """
    config = loaded.config

    def accept(facts: CheckpointMetadata, *, own: bool = True) -> None:
        if own and facts.data.get(WEIGHTS_ONLY):
            raise _imported_folder_error(loaded)
        try:
            data = check_type(facts.data, Position)
            model = facts.config["model"]
            frozen = check_type(upgrade_model_section(model)[FROZEN], list[str])
            BatchRamp.from_metadata(data["fingerprint"])
            if data["step"] < 0:
                raise ValueError(f"the data position is step {data['step']}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{METADATA_ITEM}/metadata does not describe the model and data of a run: "
                f"{error!s:.300}"
            ) from error
        otherwise = "run.name to a new name" if own else NEW_START
        check_model(model, to_dict(config)["model"], loaded.origins, otherwise)
        check_adapter(facts, loaded, own=own)
        check_frozen(frozen, loaded, facts.step, own=own)
        check_optimizer(facts, loaded, own=own)
        _check_teacher(data.get("teacher"), teacher, loaded, facts.step, own=own)
        for warning in check_plugins(facts.data, loaded, facts.step):
            console.warn(warning)
        if not own:
            _check_objective(facts, loaded)
        if own and facts.step == total_steps(config.train):
            _check_finished(facts, loaded)
        others = compare_fingerprints(
            data["fingerprint"], datasets.train.fingerprint(), data["step"]
        )
        before, now = _data_path(facts.config), ", ".join(paths_of(config.data))
        if others and before != now:
            others = [("data.path", before or "''", now or "''"), *others]
        if others and own and not config.data.allow_change:
            raise _changed_data_error(others, facts.step)
        words = f"when step {facts.step} was saved"
        for name, before, now in others:
            console.warn(f"data: {name} was {before} {words} and is {now}")
        if own:
            for name, before, now in _changed_keys(facts.config, config):
                console.note(f"config: {name} was {before} {words} and is {now}")

    found = checkpoints.restore_newest(steps.abstract_saved, accept)
    if goes_on := found is not None:
        words = f"resuming {run_folder(config.run)} after step {found.step}"
        if found.folder.parent != checkpoints.durable.path:
            words += f", from {found.folder}"
        if config.checkpoint.restore_from:
            words += ": the run's own checkpoints take precedence over checkpoint.restore_from"
        if lost := find_lost_step(run_folder(config.run), checkpoints.durable, found.step):
            console.warn(lost.line)
    else:
        _check_new_run(loaded, checkpoints)
        if not (text := config.checkpoint.restore_from):
            return RunStart(steps.init(), f"starting a new run in {run_folder(config.run)}")
        if _restores_weights_only(loaded):
            tokenizer = datasets.train.fingerprint().get("tokenizer", "")
            return _start_from_weights(loaded, steps, console, tokenizer)
        if folder := config.adapter.restore_from:
            raise ConfigError.one(
                Code.CFG_CONFLICT,
                error_location("adapter.restore_from", loaded.origins),
                folder,
                f"cannot be combined with the adapters in {text}.",
                "Omit adapter.restore_from, or set checkpoint.restore_from to the base model.",
            )
        found = restore_other(text, loaded, steps.abstract_saved, partial(accept, own=False))
        words = f"starting from {text} after step {found.step}"
    data = found.metadata.data
    if datasets.train.resume_mixture(data["fingerprint"], data["step"]):
        console.note(f"data: the mixture weights change at step {found.step + 1}")
    guarded = data.get("guard")
    params, base = None, None
    if config.adapter.rank:
        params, base = read_base(found.metadata, loaded, steps, console, own=goes_on)
    state = steps.from_saved(found.state, init_guard_state(config.guard, guarded), params)
    offset = data["step"] - found.step
    # The early-stopping counts and the reference model of another run do not apply to this run.
    waited, reference = (data.get("patience"), data.get("reference")) if goes_on else (None, None)
    return RunStart(state, words, offset, guarded, reference, goes_on, base, waited)


def build_reference(
    loaded: LoadedConfig, steps: Steps, datasets: Datasets, console: Console, begin: RunStart
) -> ReferenceParams | None:
    """Return the run's initial parameters if the objective has a KL term, else None.

    Raises:
        ConfigError, StorageError: as in `restore_or_init`.
    """
    config = loaded.config
    if config.train.objective != "grpo" or not config.grpo.kl_coef:
        return None
    params = begin.state.params
    if begin.is_resumed:
        if origin := config.checkpoint.restore_from:
            tokenizer = datasets.train.fingerprint().get("tokenizer", "")
            found = read_weights(origin, loaded, steps, console, tokenizer)
            adapters = read_peft_adapters(loaded, steps, console)
            params = steps.initial_params(found.params, adapters)
        else:
            params = steps.init_params()
    key = error_location("checkpoint.restore_from", loaded.origins)
    return ReferenceParams(steps, params, begin.reference_digest, key)


def _restores_weights_only(loaded: LoadedConfig) -> bool:
    """Return whether only the weights in `checkpoint.restore_from` are loaded.

    Adapters are then newly initialized, unless the checkpoint contains adapters.
    """
    config = loaded.config
    text = config.checkpoint.restore_from
    if config.checkpoint.restore == "weights" or folder_of(text) is not None:
        return True
    if (other := read_other_metadata(text, loaded)) is None:
        return False
    return bool(other.data.get(WEIGHTS_ONLY)) or (
        config.adapter.rank > 0 and not has_adapters(other)
    )


def _start_from_weights(
    loaded: LoadedConfig, steps: Steps, console: Console, tokenizer: str
) -> RunStart:
    """Return the initial state of a new run, with weights from another run or a model folder."""
    config = loaded.config
    text = config.checkpoint.restore_from
    found = read_weights(text, loaded, steps, console, tokenizer)
    base = base_record(found, text) if config.adapter.rank else None
    adapters = read_peft_adapters(loaded, steps, console)
    words = (
        f"starting a new run in {run_folder(config.run)} with the weights of {found.description}"
    )
    return RunStart(steps.init_from_params(found.params, adapters), words, base=base)


def _imported_folder_error(loaded: LoadedConfig) -> ConfigError:
    """Return the error for a run folder that contains imported weights."""
    folder = run_folder(loaded.config.run)
    return ConfigError.one(
        Code.CKPT_MISSING,
        error_location("run.name", loaded.origins),
        loaded.config.run.name,
        f"names {folder}, which contains imported weights, not a run.",
        f"Set run.name to a new name, and checkpoint.restore_from={folder}.",
    )


def _data_path(saved: Mapping[str, Mapping[str, Any]]) -> str:
    data = saved.get("data", {})
    return str(data.get("path", "")) or ", ".join(map(str, data.get("paths", ())))


def _check_new_run(loaded: LoadedConfig, checkpoints: CheckpointManager) -> None:
    """Check that a new run has no checkpoints in another folder and that none were lost.

    Raises:
        ConfigError: the run has checkpoints in the previous `checkpoint.dir`.
        StorageError: the run has saved checkpoints that no longer exist.
    """
    run_dir = run_folder(loaded.config.run)
    homes = [str(run_dir)]
    with contextlib.suppress(ConfigError):
        homes.append(find_checkpoint_home(run_dir))
    for each in homes:
        folder = CheckpointFolder(os.path.join(each, CHECKPOINTS_FOLDER))
        if folder.path != checkpoints.durable.path and (saved := folder.steps()):
            raise ConfigError.one(
                Code.CKPT_LOST,
                error_location("checkpoint.dir", loaded.origins),
                loaded.config.checkpoint.dir or "''",
                f"points to {checkpoints.durable.path}, which is empty; this run has checkpoints "
                f"up to step {saved[-1]} in {folder.path}.",
                "Copy the checkpoints to the new folder, or set run.name to a new name.",
            )
    check_saved(run_dir, checkpoints.durable.path)


def check_frozen(
    frozen: list[str], loaded: LoadedConfig, step: int, *, own: bool, address: str = ""
) -> None:
    """Check that a resumed run trains exactly the parameters for which it has optimizer state.

    Raises:
        ConfigError: `frozen` in the checkpoint and in the config select different parameters.
    """
    model = loaded.config.model
    now, then = (
        trained(describe(each)) for each in (model, dataclasses.replace(model, frozen=frozen))
    )
    if now == then:
        return
    more, fewer = (", ".join(sorted(some)) for some in (now - then, then - now))
    changes = [f"{fewer} now frozen"] if fewer else []
    changes += [f"{more} now trained"] if more else []
    action = _restart_advice(loaded, own=own, address=address)
    raise ConfigError.one(
        Code.CKPT_RESUME,
        error_location(FROZEN, loaded.origins),
        format_value(model.frozen),
        f"must freeze the same parameters as when step {step} was saved, because optimizer state "
        f"exists only for the parameters trained until then: {'; '.join(changes)}.",
        f"Set {FROZEN}=[{','.join(frozen)}], or {action}.",
    )


def check_optimizer(
    facts: CheckpointMetadata, loaded: LoadedConfig, *, own: bool, address: str = ""
) -> None:
    """Check that a resumed run uses the same optimizer, because the optimizer state depends on it.

    Raises:
        ConfigError: the optimizers of the checkpoint and the config differ.
    """
    if (names := facts.data.get(OPTAX)) is not None:
        raise ConfigError.one(
            Code.CKPT_RESUME,
            error_location(_OPTIMIZER, loaded.origins),
            loaded.config.optim.name,
            f"cannot continue from step {facts.step}, whose optimizer state belongs to an optax "
            f"transformation ({', '.join(map(str, names)) or 'without arrays'}).",
            "Restore the checkpoint with `maxpipe.Checkpoint` and the same transformation, or set "
            f"{_restart_advice(loaded, own=own, address=address)}.",
        )
    saved, optim = facts.config.get("optim", {}), loaded.config.optim
    advice = _restart_advice(loaded, own=own, address=address)
    param_dtype = loaded.config.model.param_dtype  # the dtype in the checkpoint is the same
    for key in (_OPTIMIZER, _STATE_TYPE, _EMA_DECAY):
        field = key.partition(".")[2]
        then, now = saved.get(field, legacy_value_of(key)), getattr(optim, field)
        if key == _EMA_DECAY and bool(then) == bool(now):
            continue  # the EMA decay may change
        if (then, now) in (("same", param_dtype), (param_dtype, "same")):
            continue  # two names for the same dtype
        if then != now:
            raise ConfigError.one(
                Code.CKPT_RESUME,
                error_location(key, loaded.origins),
                format_value(now),
                f"must be {format_value(then)}, as in the checkpoint of step {facts.step}, because "
                "the optimizer state depends on this setting.",
                f"Set {key}={format_value(then)}, or {advice}.",
            )


def _check_teacher(
    before: TeacherEntry | None,
    now: TeacherEntry | None,
    loaded: LoadedConfig,
    step: int,
    *,
    own: bool,
) -> None:
    """Check that the teacher is the same as when the checkpoint was saved.

    Raises:
        ConfigError: the teacher's parameters differ.
    """
    if before is None or now is None or before["digest"] == now["digest"]:
        return
    key = "distill.teacher" if loaded.config.distill.teacher else "distill.teacher_logits"
    raise ConfigError.one(
        Code.CKPT_RESUME,
        error_location(key, loaded.origins),
        now["name"],
        f"must be the teacher used for the checkpoint of step {step}, {before['name']}; the "
        "configured teacher has different parameters.",
        f"Restore the previous teacher, or set {_restart_advice(loaded, own=own)}.",
    )


def _check_objective(facts: CheckpointMetadata, loaded: LoadedConfig) -> None:
    """Check that a run that continues another run has the same objective as that run.

    Raises:
        ConfigError: the objectives differ.
    """
    key, now = "train.objective", loaded.config.train.objective
    then = facts.config.get("train", {}).get("objective", legacy_value_of(key))
    if then != now:
        raise ConfigError.one(
            Code.CKPT_RESUME,
            error_location("checkpoint.restore", loaded.origins),
            "all",
            f"restores optimizer state, step and data position of a run with {key}={then}, but "
            f"this run has {key}={now}.",
            f"Set {_restart_advice(loaded, own=False)}.",
        )


def _restart_advice(loaded: LoadedConfig, *, own: bool, address: str = "") -> str:
    """Return the settings for starting a run from only the parameters of a checkpoint.

    `own` is whether the checkpoint belongs to the run of the config. `address` is its address, if
    the config does not name it (default: the newest of the run).
    """
    action = "checkpoint.restore=weights to restore only the parameters"
    if own or address:
        action = f"checkpoint.restore_from={address or loaded.config.run.name} and {action}"
    return f"run.name to a new name, {action}" if own else action


def _changed_data_error(differences: Sequence[tuple[str, Any, Any]], step: int) -> ConfigError:
    listed = "; ".join(f"{name} was {before} and is {now}" for name, before, now in differences)
    return ConfigError.one(
        Code.DATA_CHANGED,
        "data",
        None,
        f"must be unchanged since step {step} was saved: {listed}.",
        "Restore the data, or set data.allow_change=true to continue with the changed data.",
    )


def _changed_keys(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, saved value, new value) for each setting that changed since the checkpoint."""
    then = flatten(saved)
    for key, now in flatten(to_dict(redact.redact_value(config))).items():
        before = then.get(key, now)
        if before != now and not may_differ(key):
            yield key, before, now


def _check_finished(facts: CheckpointMetadata, loaded: LoadedConfig) -> None:
    """Check that the settings of a finished run are unchanged, because new settings require a new
    run.

    Raises:
        ConfigError: settings changed. The message lists the settings and suggests an unused run
            name.
    """
    config = loaded.config
    changed = [
        (key, before, now)
        for key, before, now in _changed_keys(facts.config, config)
        if key.partition(".")[0] not in _FREE_WHEN_DONE
        and key not in _FREE_KEYS_WHEN_DONE | loaded.inferred
    ]
    if not changed:
        return
    train = config.train
    listed = "; ".join(
        f"{key} was {format_value(old)} and is {format_value(new)}" for key, old, new in changed
    )
    more = f"train.steps={2 * train.steps}" if train.steps else f"train.tokens={2 * train.tokens}"
    raise ConfigError.one(
        Code.RUN_FINISHED,
        str(run_folder(config.run)),
        None,
        f"is a finished run: all of its {facts.step} steps are done, so settings that changed "
        f"since step {facts.step} was saved would have no effect: {listed}.",
        f"Set run.name={_free_name(config)} to start a new run with the new settings, {more} to "
        "continue this run, or restore the old settings.",
    )


def _free_name(config: Config) -> str:
    """Return the run's name with the first unused numeric suffix."""
    for number in itertools.count(2):
        named = dataclasses.replace(config.run, name=f"{config.run.name}-{number}")
        folder = run_folder(named)
        saved = checkpoint_home(folder, config.checkpoint)
        if not os.path.lexists(folder) and (in_bucket(saved) or not os.path.lexists(saved)):
            return named.name
    raise AssertionError("itertools.count is infinite")
