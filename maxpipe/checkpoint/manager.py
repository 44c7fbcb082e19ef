"""Save and restore the checkpoints of a run, and resolve addresses to steps.

The manager decides when a save is due and handles failed saves. It saves pytrees in a layout that
does not depend on the mesh, stages or schedule, so a checkpoint can be restored under different
settings. `maxpipe.checkpoint.reader` handles damaged checkpoints.

The manager also detects lost checkpoints from a run's event and metric records. A run that stopped
before its first save restarts at step 0. A run whose checkpoints were lost does not restart,
because the user may be able to recover them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import jax
from etils import epath

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.digests import num_bytes
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.reader import (
    Agree,
    CheckpointReader,
    RestoredCheckpoint,
    first_nonempty_text,
    is_fault,
    is_permanent,
    translate_storage_errors,
    unwritable_error,
)
from maxpipe.checkpoint.retention import BestMetric, RetentionRules, select_retained
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    DamagedError,
    checkpoint_home,
    exists,
    find_checkpoint_home,
    in_bucket,
    probe_writable,
    root_cause_text,
    translate_bucket_errors,
)
from maxpipe.checkpoint.writer import CheckpointWriter, SaveResult, ignore_orphaned_errors
from maxpipe.config.config_files import EVENTS_FILE, METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.io.files import expand_path, read_json_lines


class _Step(TypedDict):
    """A record in `events.jsonl` or `metrics.jsonl`."""

    step: int


class _Saved(TypedDict):
    event: Literal["checkpoint"]
    step: int
    folder: NotRequired[str]


def check_present(run_dir: epath.PathLike, folder: epath.Path) -> None:
    """Check that the checkpoint folder exists if the run's records contain steps.

    The check runs before the folder is created.

    Raises:
        StorageError: the folder does not exist, but the run has recorded steps.
    """
    if in_bucket(run_dir) or in_bucket(folder) or exists(folder):
        return
    with contextlib.suppress(ConfigError):
        if os.path.isdir(os.path.join(find_checkpoint_home(run_dir), CHECKPOINTS_FOLDER)):
            return  # a later check reports a changed `checkpoint.dir`
    for name in (EVENTS_FILE, METRICS_FILE):
        if step := _last(Path(run_dir) / name, _Step)[0]:
            rule = f"{Path(run_dir) / name} has records up to step {step}"
            raise _lost_checkpoints_error(run_dir, folder, "is missing", rule)


def check_saved(run_dir: epath.PathLike, folder: epath.Path) -> None:
    """Check that a run without checkpoints in its folder has never recorded a save.

    Raises:
        StorageError: the run has saved a checkpoint in this folder or in a previous one.
    """
    if in_bucket(run_dir):
        return
    events = Path(run_dir) / EVENTS_FILE
    step, saved_in = _last(events, _Saved)
    # Earlier releases did not record the folder.
    if step and (not saved_in or _real_path(saved_in) == _real_path(os.fspath(folder))):
        rule = f"{events} records that step {step} was saved there"
        raise _lost_checkpoints_error(run_dir, folder, "contains no checkpoint", rule)
    if step:
        rule = f"{events} records that step {step} was saved in {saved_in}"
        home = os.path.dirname(saved_in.rstrip("/"))
        is_default = _real_path(home) == _real_path(os.fspath(run_dir))
        above = "''" if is_default else os.path.dirname(home)
        action = f"Set checkpoint.dir={above}, or copy that folder to {folder}."
        raise _lost_checkpoints_error(run_dir, folder, "contains no checkpoint", rule, action)


def find_lost_step(
    run_dir: epath.PathLike, folder: CheckpointFolder, restored: int
) -> Problem | None:
    """Return a warning if the run's records name a later checkpoint than the restored step, or
    None. Quarantined checkpoints are reported when they are renamed.
    """
    if in_bucket(run_dir):
        return None
    events = Path(run_dir) / EVENTS_FILE
    step = _last(events, _Saved)[0]
    if step <= restored or any(name.startswith(f"{step}.") for name in folder.quarantined()):
        return None
    rule = f"contains no checkpoint of step {step}, although {events} records its save; the run "
    rule += f"resumes after step {restored}."
    action = f"If you did not delete step {step}, stop the run and restore its folder."
    return Problem(Code.CKPT_LOST, str(folder.path), "", rule, action)


def _last(path: Path, kind: type[_Step] | type[_Saved]) -> tuple[int, str]:
    """Return the largest recorded step (0 if nothing was recorded) and the checkpoint folder
    recorded with it.

    Checkpoints in `checkpoint.local_dir` are ignored, because a local disk may be lost.
    """
    last, where = 0, ""
    with contextlib.suppress(OSError):
        for record in read_json_lines(path, kind):
            saved_in = record.get("folder", "")
            name = os.path.basename(saved_in.rstrip("/"))
            if name in ("", CHECKPOINTS_FOLDER) and record["step"] >= last:
                last, where = record["step"], saved_in
    return last, where


def _real_path(path: str) -> str:
    if not in_bucket(path):
        return os.path.realpath(path)
    scheme, _, name = path.partition("://")
    return f"{scheme}://{os.path.normpath(name)}"


def _lost_checkpoints_error(
    run_dir: epath.PathLike, folder: epath.Path, what: str, rule: str, action: str = ""
) -> StorageError:
    action = action or "Restore the folder, or mount the disk that contains it."
    return StorageError(
        Code.CKPT_LOST,
        f"{folder}: {what}\n"
        f"  {rule}. No file was changed.\n"
        f"  {action} To start over, delete {os.fspath(run_dir)}, or set run.name to a new name.",
    )


Tree = Any
EventRecorder = Callable[..., None]

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 1.0


class CheckpointManager:
    """Saves and restores the checkpoints of one run.

    `record(event, step=..., ...)` is called for every event. `agree` returns the first nonempty
    string from any process. Each process verifies some of the files. If `write` is false, no
    file or folder is changed.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        config: CheckpointConfig | None = None,
        *,
        write: bool = True,
        record: EventRecorder = lambda event, **fields: None,
        agree: Agree = first_nonempty_text,
        locks: Sequence[RunLock] = (),
    ):
        self._config = config or CheckpointConfig()
        self._record, self._agree, self._locks = record, agree, locks
        self._primary, self._alone = jax.process_index() == 0, jax.process_count() == 1
        key = "checkpoint.dir" if self._config.dir else "run.dir"
        self.durable = CheckpointFolder(
            os.path.join(checkpoint_home(run_dir, self._config), CHECKPOINTS_FOLDER), key
        )
        self._folders = [self.durable]
        self._failures = 0  # consecutive failures
        self._retry_at: float | None = None
        self._writer: CheckpointWriter | None = None
        ignore_orphaned_errors()
        if write and self._config.local_dir:
            local = local_folder(self._config.local_dir, run_dir)
            self._folders.append(CheckpointFolder(local, "checkpoint.local_dir"))
        if write:
            if self._primary and not self._config.dir:
                check_present(run_dir, self.durable.path)
            for folder in self._folders:
                _prepare(folder, self._primary)
                self._check_shared(folder)
            self._writer = CheckpointWriter(self._prune, self._check_locks)
        self._reader = CheckpointReader(
            run_dir, self._folders, writes=write, record=record, agree=agree
        )
        self._newest_folder = self.durable
        # Newest saved step, or -1 in a new run.
        self._newest = -1
        for folder in self._folders:
            with translate_storage_errors(folder.path):
                self._newest = max([self._newest, *folder.steps()])

    def _check_shared(self, folder: CheckpointFolder) -> None:
        """Check that all processes see the same folder; otherwise, saves would be incomplete."""
        if self._alone:
            return
        path = folder.path / self._agree(f".seen-{secrets.token_hex(8)}" if self._primary else "")
        if self._primary:
            path.write_text("all processes must see this file")
        self._agree("there" if self._primary else "")
        process = f"process {jax.process_index()} on {platform.node()}"
        # On a network file system, the file may become visible only after several seconds.
        is_visible = any(exists(path) or time.sleep(1.0) for _ in range(5))
        missing = self._agree("" if is_visible else process)
        if self._primary:
            path.unlink()
        if missing:
            raise ConfigError.one(
                Code.NET_FOLDERS,
                folder.key,
                folder.path,
                f"must be the same folder for all processes; {missing} does not see the folder of "
                "process 0.",
                "Give all processes the same absolute path on a shared file system.",
            )

    # Restore.

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in the run's folder, oldest first."""
        return self.durable.steps()

    def restore_newest(
        self, abstract: Tree, accept: Callable[[CheckpointMetadata], None] = lambda facts: None
    ) -> RestoredCheckpoint | None:
        """Restore the newest intact checkpoint, if any; see `CheckpointReader.restore_newest`."""
        restored = self._reader.restore_newest(abstract, accept)
        if restored is not None:
            self._newest = restored.step
            self._newest_folder = next(
                folder for folder in self._folders if folder.path == restored.folder.parent
            )
        return restored

    def restore(
        self,
        step: int,
        abstract: Tree | None = None,
        accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    ) -> RestoredCheckpoint:
        """Restore one checkpoint from the run's folder; see `CheckpointReader.restore_step`."""
        return self._reader.restore_step(step, abstract, accept)

    # Save.

    def should_save(self, step: int) -> bool:
        """Return whether the state after `step` should be saved."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        return self._target(step) is not None

    def _target(self, step: int) -> CheckpointFolder | None:
        """Return the folder for the periodic save of this step, or None if no save is due."""
        if self._config.every and step % self._config.every == 0:
            return self.durable
        local_every = self._config.local_every
        if len(self._folders) > 1 and local_every and step % local_every == 0:
            return self._folders[1]
        return None

    def save(
        self,
        step: int,
        state: Callable[[], Tree],
        config: Mapping[str, Any],
        data: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Start a background save of the state that `state()` returns.

        The arrays may be changed as soon as this method returns. If `step` is already the newest
        checkpoint, nothing is saved. If `last` is set, this method blocks until the checkpoint is
        on disk and retries failed attempts. If all attempts fail, it raises the last error,
        regardless of `checkpoint.on_failure`.

        Raises:
            StorageError: the save failed and `checkpoint.on_failure` is `stop`.
        """
        assert self._writer is not None, "the manager was opened read-only"
        self._check_locks()
        self._handle_result(self._writer.take_result(wait=True))
        if step < self._newest:
            raise StorageError(
                Code.CKPT_LOCKED,
                f"{self.durable.path}: step {step} was not saved\n"
                f"  there is already a checkpoint for a later step, {self._newest}.\n"
                "  Set run.name to a new name, or move the folder to another path.",
            )
        facts = CheckpointMetadata(step, dict(config), dict(data), time.time(), dict(metrics or {}))
        folder = self.durable if last else self._target(step) or self.durable
        attempt = 0
        while step != self._newest or (last and self._newest_folder is not self.durable):
            self._retry_at = None
            self._start(folder, state(), facts)
            if not last:
                return
            attempt += 1
            save = self._writer.take_result(wait=True)
            assert save is not None
            # Only process 0 writes the manifest, so a failure there affects all processes.
            again = attempt <= self._config.retries
            if save.error is None or is_fault(save.error):
                save.error = self._agree_on(save.error)
            else:
                again = False
            if save.error is None or is_permanent(save.error) or not again:
                self._handle_result(save, final=True)
            else:
                self._report_failure(save, f"another attempt in {_pause(attempt):g} s")
                time.sleep(_pause(attempt))

    def poll(self) -> None:
        """Poll the background save. This method is called at every step and does no I/O.

        Raises:
            StorageError: the save failed and `checkpoint.on_failure` is `stop`, or an earlier
                check found that the lock was lost.
        """
        for lock in self._locks:
            lock.raise_if_lost()
        # The processes of a run may detect a failure at different steps. The first process that
        # detects a failure ends the run, regardless of `on_failure`.
        if self._writer is not None:
            self._handle_result(self._writer.take_result(wait=False))

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is on disk.

        Raises:
            StorageError: a background save failed.
        """
        if self._writer is not None:
            self._handle_result(self._writer.take_result(wait=True), final=True)

    def _start(self, folder: CheckpointFolder, state: Tree, facts: CheckpointMetadata) -> None:
        assert self._writer is not None
        self._check_locks()
        error: BaseException | None = None
        if self._primary:
            try:
                with translate_bucket_errors(folder.path):
                    _check_free_space(folder, facts.step, num_bytes(state))
            except OSError as failure:
                error = failure
        error = self._agree_on(error)
        if error is None:
            self._writer.start(folder, state, facts)
        else:
            self._writer.set_failed(SaveResult(folder, facts.step, error=error))

    def _check_locks(self, folder: CheckpointFolder | None = None) -> None:
        """Check all locks of the run, or only the lock on the given checkpoint folder."""
        for lock in self._locks:
            if folder is None or f"{folder.path}/".startswith(f"{lock.path.parent}/"):
                lock.check()

    def _agree_on(self, error: BaseException | None) -> BaseException | None:
        """Return this process's error, or else the error of the first failed process. Collective
        call.
        """
        if self._alone:
            return error
        number = getattr(error, "errno", None) or 0
        text = self._agree("" if error is None else f"{number} {root_cause_text(error)}")
        if not text or error is not None:
            return error
        number, _, reason = text.partition(" ")
        return OSError(int(number), reason) if number != "0" else OSError(reason)

    def _handle_result(self, save: SaveResult | None, *, final: bool = False) -> None:
        if save is None:
            return
        if save.error is None:
            self._failures, self._newest, self._newest_folder = 0, save.step, save.folder
            self._record(
                "checkpoint",
                step=save.step,
                bytes=save.num_bytes,
                blocking_seconds=round(save.blocking_seconds, 3),
                seconds=round(save.seconds, 3),
                folder=str(save.folder.path),
            )
            return
        if not is_fault(save.error):
            raise save.error
        self._failures += 1
        if not final and self._alone:
            if self._failures <= self._config.retries and not is_permanent(save.error):
                pause = _pause(self._failures)
                self._retry_at = time.monotonic() + pause
                return self._report_failure(save, f"another attempt after {pause:g} s")
            if self._config.on_failure == "continue":
                return self._report_failure(save, "training continues until the next save is due")
        self._report_failure(save, "")
        raise unwritable_error(save.folder, save.error, save.folder / save.step) from save.error

    def _report_failure(self, save: SaveResult, then: str) -> None:
        assert save.error is not None
        reason = root_cause_text(save.error)
        self._record("checkpoint_failed", step=save.step, reason=reason, failures=self._failures)
        if then:
            _LOG.warning("%s was not saved: %s. %s", save.folder / save.step, reason, then)

    def _prune(self, save: SaveResult) -> None:
        """Delete the checkpoints that no retention rule keeps. The step of `save` is always
        kept.
        """
        folder = save.folder
        rules = RetentionRules.of(self._config) if folder is self.durable else RetentionRules(1)
        saved = [info for step in folder.steps() if (info := folder.read_info(step))]
        retained = select_retained(saved, rules).keys() | {save.step}
        for info in saved:
            if info.step not in retained:
                folder.remove(info.step)

    # Close.

    def close(self) -> None:
        """Wait for the background save and close the writer."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except StorageError:
            # Do not replace an error that is already being raised.
            if error is None:
                raise


def open_run(run_dir: epath.PathLike, where: str = "", parent: str = "") -> CheckpointManager:
    """Open the checkpoints of a run read-only.

    `where` names the config key that sets the folder. `parent` is the parent of the checkpoint
    folder (default: read from the run's config).

    Raises:
        ConfigError: the run has no checkpoints.
        StorageError: the storage is unreachable.
    """
    open_folder(run_dir, where, parent)  # before jax initializes its devices
    return CheckpointManager(parent or find_checkpoint_home(run_dir, where or "path"), write=False)


def open_folder(run_dir: epath.PathLike, where: str = "", parent: str = "") -> CheckpointFolder:
    """Return the checkpoint folder of a run without initializing jax's devices; see `open_run`.

    Raises:
        ConfigError, StorageError: as in `open_run`; also if the run recorded checkpoints that no
            longer exist.
    """
    home = parent or find_checkpoint_home(run_dir, where or "path")
    folder = CheckpointFolder(os.path.join(home, CHECKPOINTS_FOLDER))
    with translate_storage_errors(folder.path):
        steps = folder.steps()
    if not steps:
        check_saved(run_dir, folder.path)
        raise ConfigError.one(
            Code.CKPT_MISSING,
            where or f"run folder {run_dir}",
            run_dir if where else None,
            f"must contain a folder {CHECKPOINTS_FOLDER!r} with at least one complete checkpoint; "
            f"there is none in {folder.path}.",
            "Give the folder of a run (default: runs/<run.name>).",
        )
    return folder


def local_folder(local_dir: str, run_dir: epath.PathLike) -> Path:
    """Return the folder in `checkpoint.local_dir` for the newest checkpoint of a run.

    The folder name contains a hash of the run's absolute path, because run names are not unique.
    """
    run = expand_path(os.fspath(run_dir)).absolute()
    path = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    return expand_path(local_dir, "checkpoint.local_dir").absolute() / f"{run.name}-{path}"


def _prepare(folder: CheckpointFolder, primary: bool) -> None:
    try:
        with translate_bucket_errors(folder.path):
            probe_writable(folder.path)
            for name in folder.delete_unfinished() if primary else ():
                _LOG.warning(
                    "%s was removed: its save or deletion was interrupted", folder.path / name
                )
    except OSError as error:
        raise unwritable_error(folder, error) from error


def _check_free_space(folder: CheckpointFolder, step: int, needed: int) -> None:
    """Check that there is enough free disk space for a save.

    Raises:
        OSError: there is not enough free disk space.
    """
    free = folder.free_bytes()
    if free is not None and free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the save needs {_size(needed)} ({needed:,} bytes), but only {_size(free)} "
            f"({free:,} bytes) are free",
        )
    if not exists(folder / step):
        return
    if step in folder.steps():  # files from a previous attempt, which failed to write the manifest
        folder.remove(step)
    else:
        name = folder.quarantine(step, "foreign")
        _LOG.warning("%s already existed and was renamed to %s", folder / step, name)


def _pause(attempt: int) -> float:
    return _FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_SHOWN_STEPS = 12


def open_address(address: Address) -> CheckpointManager:
    """Open the checkpoints of the addressed run read-only.

    Raises:
        ConfigError: the run has no checkpoints.
        StorageError: the storage is unreachable.
    """
    return open_run(address.run_dir, address.where, address.parent)


def open_address_folder(address: Address) -> CheckpointFolder:
    """Return the checkpoint folder of the addressed run; see `open_folder`."""
    return open_folder(address.run_dir, address.where, address.parent)


def resolve_step_on_all(checkpoints: CheckpointManager, address: Address) -> int:
    """Return the addressed step (default: the newest); all processes return the same step.

    Raises:
        ConfigError: the step has no checkpoint, or no evaluated checkpoint exists.
    """
    is_first = jax.process_index() == 0
    step = str(resolve_step(checkpoints.durable, address)) if is_first else ""
    return int(first_nonempty_text(step))


def resolve_step(folder: CheckpointFolder, address: Address) -> int:
    """Return the addressed step (default: the newest) in a folder, without communicating with other
    processes.

    Raises:
        ConfigError: the step has no checkpoint, or no evaluated checkpoint exists.
    """
    steps, step = folder.steps(), address.step
    if step == "best":
        return find_best_step(folder, address, read_best_metric(folder))[0]
    if step is None or step == "newest":
        return steps[-1]
    if step in steps:
        return step
    words = [str(saved) for saved in steps]
    if len(words) > _SHOWN_STEPS:
        words = [*words[:3], f"... ({len(words)} in all)", *words[-(_SHOWN_STEPS - 4) :]]
    rule = f"must be one of the saved steps: {', '.join(words)}."
    if renamed := [name for name in folder.quarantined() if name.startswith(f"{step}.")]:
        rule = f"was damaged and renamed to {renamed[-1]}; the saved steps are {', '.join(words)}."
    raise address.error(rule, f"Use {address.address_at(steps[-1])}, the newest.")


def read_best_metric(folder: CheckpointFolder) -> BestMetric:
    """Return the best-checkpoint metric in the config of the newest readable checkpoint."""
    for step in reversed(folder.steps()):
        with contextlib.suppress(DamagedError, FileNotFoundError):
            return BestMetric.of(folder.read_metadata(step).config.get("checkpoint", {}))
    return BestMetric()


def find_best_step(
    folder: CheckpointFolder, address: Address, better: BestMetric
) -> tuple[int, float]:
    """Return the step with the best value of a metric, and that value. If several steps tie, the
    newest one is returned.

    Raises:
        ConfigError: no checkpoint has the metric.
    """
    values: dict[int, float] = {}
    known: set[str] = set()
    for step in folder.steps():
        # The run may be deleting the step.
        with contextlib.suppress(DamagedError, FileNotFoundError):
            metrics = folder.read_metadata(step).metrics or {}
            known |= metrics.keys()
            if (key := better.sort_key(metrics)) is not None:
                values[step] = key
    if values:
        step = min(values, key=lambda step: (values[step], -step))
        return step, -values[step] if better.is_largest else values[step]
    if not known:
        raise address.error(
            "must have a checkpoint with evaluation metrics; no saved step was evaluated.",
            "Specify a step, or train with eval.every equal to checkpoint.every; "
            "eval.every=0 evaluates only the last step.",
        )
    guess = did_you_mean(better.metric, known) or BestMetric().metric
    raise address.error(
        f"has no checkpoint with metric {better.metric}; the recorded metrics are "
        f"{', '.join(sorted(known))}.",
        f"Use --metric {guess}.",
    )
