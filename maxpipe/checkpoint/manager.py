"""The checkpoints of a run: when one is due, what happens when saving fails.

It takes trees that are already in their saved form, without models or pipelines, so that a
checkpoint fits any layout. What can be trusted, and what is read instead of what cannot:
`maxpipe.checkpoint.reader`.

From the address of a checkpoint to the checkpoint: which steps there are, and which is meant.
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
from types import TracebackType
from typing import Any

import jax
from etils import epath

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.digest_item import num_bytes
from maxpipe.checkpoint.folder import (
    BestMetric,
    CheckpointFolder,
    CheckpointMetadata,
    RetentionRules,
    select_retained,
)
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
from maxpipe.checkpoint.run_records import check_present
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    DamagedError,
    checkpoint_home,
    exists,
    find_checkpoint_home,
    probe_writable,
    root_cause_text,
    translate_bucket_errors,
)
from maxpipe.checkpoint.writer import CheckpointWriter, SaveResult, ignore_orphaned_errors
from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import CheckpointConfig
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.files import expand_path

Tree = Any
EventRecorder = Callable[..., None]

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 1.0


class CheckpointManager:
    """The checkpoints of one run.

    `record(event, step=..., ...)` receives events. `agree` gives all processes the same
    text; each of them reads a share of the files when one is verified. Without `write`, files
    and folders are left as they are.
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
        self._failures = 0  # in a row
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
        # Of the steps, the newest that is known to exist; -1 for a new run.
        self._newest = -1
        for folder in self._folders:
            with translate_storage_errors(folder.path):
                self._newest = max([self._newest, *folder.steps()])

    def _check_shared(self, folder: CheckpointFolder) -> None:
        """A process that sees another folder would miss checkpoints and write its part of them
        where no other process finds it.
        """
        if self._alone:
            return
        sign = self._agree(f".seen-{secrets.token_hex(8)}" if self._primary else "")
        if self._primary:
            (folder.path / sign).write_text("all processes must see this")
        self._agree("there" if self._primary else "")
        process = f"process {jax.process_index()} on {platform.node()}"
        missing = self._agree("" if _wait_until_exists(folder.path / sign) else process)
        if self._primary:
            (folder.path / sign).unlink()
        if missing:
            raise ConfigError.one(
                folder.key,
                folder.path,
                f"must be one folder for all processes; {missing} does not see that of process 0.",
                "Give all of them the same absolute path to a file system that they share.",
            )

    # Reading.

    def steps(self) -> list[int]:
        """All complete checkpoints of the run's folder, oldest first."""
        return self.durable.steps()

    def restore_newest(
        self, abstract: Tree, accept: Callable[[CheckpointMetadata], None] = lambda facts: None
    ) -> RestoredCheckpoint | None:
        """The newest intact checkpoint; None if there never was one. See `Reader`."""
        found = self._reader.restore_newest(abstract, accept)
        if found is not None:
            self._newest = found.step
            self._newest_folder = next(
                folder for folder in self._folders if folder.path == found.folder.parent
            )
        return found

    def restore(
        self,
        step: int,
        abstract: Tree | None = None,
        accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    ) -> RestoredCheckpoint:
        """One checkpoint of the run's folder. See `Reader`."""
        return self._reader.restore_step(step, abstract, accept)

    # Saving.

    def should_save(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        return self._target(step) is not None

    def _target(self, step: int) -> CheckpointFolder | None:
        """Where a periodic save of this step goes."""
        every, often = self._config.every, self._config.local_every
        if every and step % every == 0:
            return self.durable
        if len(self._folders) > 1 and often and step % often == 0:
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
        """Start writing the result of `state`, which may be changed as soon as this returns.

        Does nothing when `step` is the newest checkpoint already. With `last` it returns when
        everything is on disk; a failure is retried at once, and always an error.

        Raises:
            StorageError: it cannot be saved and `checkpoint.on_failure` says stop.
        """
        assert self._writer is not None, "opened for reading"
        self._check_locks()
        self._handle_result(self._writer.take_result(wait=True))
        if step < self._newest:
            raise StorageError(
                f"{self.durable.path}: step {step} was not saved\n"
                f"  a checkpoint of step {self._newest} is there already.\n"
                "  Set run.name to a new name, or move the folder away."
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
            # Process 0 alone writes the manifest: its failure there is a failure of all.
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
        """Poll, each step, the save in the background. Costs nothing.

        Raises:
            StorageError: it failed and `checkpoint.on_failure` says stop; or the folder was found
                to be lost in an earlier check.
        """
        for lock in self._locks:
            lock.raise_if_lost()
        # The processes of a run may see a failure at different steps; with the first of them
        # that does the run ends, whatever on_failure says.
        if self._writer is not None:
            self._handle_result(self._writer.take_result(wait=False))

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            StorageError: a save failed in the background.
        """
        if self._writer is not None:
            self._handle_result(self._writer.take_result(wait=True), final=True)

    def _start(self, folder: CheckpointFolder, state: Tree, facts: CheckpointMetadata) -> None:
        assert self._writer is not None
        self._check_locks()
        trouble = None
        if self._primary:
            try:
                with translate_bucket_errors(folder.path):
                    _check_free_space(folder, facts.step, num_bytes(state))
            except OSError as error:
                trouble = error
        trouble = self._agree_on(trouble)
        if trouble is None:
            self._writer.start(folder, state, facts)
        else:
            self._writer.set_failed(SaveResult(folder, facts.step, error=trouble))

    def _check_locks(self, folder: CheckpointFolder | None = None) -> None:
        """Those of the run, or what holds one folder of checkpoints."""
        for lock in self._locks:
            if folder is None or f"{folder.path}/".startswith(f"{lock.path.parent}/"):
                lock.check()

    def _agree_on(self, error: BaseException | None) -> BaseException | None:
        """The error of the first process that has one; every process has to ask."""
        if self._alone:
            return error
        number = getattr(error, "errno", None) or 0
        text = self._agree("" if error is None else f"{number} {root_cause_text(error)}")
        if not text or error is not None:
            return error
        number, _, reason = text.partition(" ")
        return OSError(int(number), reason) if number != "0" else OSError(reason)

    def _handle_result(self, save: SaveResult | None, *, final: bool = False) -> None:
        """Handle a save that is over."""
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
            if self._config.on_failure == "go_on":
                return self._report_failure(save, "training goes on until the next is due")
        self._report_failure(save, "")
        raise unwritable_error(save.folder, save.error, save.folder / save.step) from save.error

    def _report_failure(self, save: SaveResult, then: str) -> None:
        assert save.error is not None
        reason = root_cause_text(save.error)
        self._record("checkpoint_failed", step=save.step, reason=reason, failures=self._failures)
        if then:
            _LOG.warning("%s was not saved: %s. %s", save.folder / save.step, reason, then)

    def _prune(self, save: SaveResult) -> None:
        """Delete what no rule keeps. The step of `save` was verified a moment ago."""
        folder = save.folder
        rules = RetentionRules.of(self._config) if folder is self.durable else RetentionRules(1)
        saved = [one for step in folder.steps() if (one := folder.read_info(step))]
        stay = select_retained(saved, rules).keys() | {save.step}
        for one in saved:
            if one.step not in stay:
                folder.remove(one.step)

    # Leaving.

    def close(self) -> None:
        """Wait for writing to end and release the folder."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StorageError:
            # The error that is being raised says more.
            if error is None:
                raise


def open_run(run_dir: epath.PathLike, where: str = "", parent: str = "") -> CheckpointManager:
    """The checkpoints of a run that is only read. `where` names what gave the folder; `place` holds
    their folder if that is not for the run's config to say.

    Raises:
        ConfigError: there are none.
        StorageError: they cannot be reached.
    """
    checkpoints = CheckpointManager(
        parent or find_checkpoint_home(run_dir, where or "path"), write=False
    )
    if not checkpoints.steps():
        raise ConfigError.one(
            where or f"run folder {run_dir}",
            run_dir if where else None,
            f"must have a folder {CHECKPOINTS_FOLDER!r} in which one checkpoint is complete; "
            "there is none in "
            f"{checkpoints.durable.path}.",
            "Give the folder of a run, by default runs/<run.name>.",
        )
    return checkpoints


def local_folder(local_dir: str, run_dir: epath.PathLike) -> Path:
    """Of a run's newest checkpoint, with `checkpoint.local_dir`.

    Below the folder for all runs, named by the run's whole path: names may be used twice.
    """
    run = expand_path(os.fspath(run_dir)).absolute()
    path = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    return expand_path(local_dir, "checkpoint.local_dir").absolute() / f"{run.name}-{path}"


def _wait_until_exists(path: epath.Path) -> bool:
    """Whether it exists, or soon does: network file systems may show files late."""
    return any(exists(path) or time.sleep(1.0) for _ in range(5))


def _prepare(folder: CheckpointFolder, primary: bool) -> None:
    """Fail now, not at the first save, if nothing can be written."""
    try:
        with translate_bucket_errors(folder.path):
            probe_writable(folder.path)
            for name in folder.delete_unfinished() if primary else ():
                _LOG.warning("%s is removed: it was never finished", folder.path / name)
    except OSError as error:
        raise unwritable_error(folder, error) from error


def _check_free_space(folder: CheckpointFolder, step: int, needed: int) -> None:
    """Raises OSError when there is no space for a save of this size."""
    free = folder.free_bytes()
    if free is not None and free < needed:
        raise OSError(
            errno.ENOSPC,
            f"it needs {_size(needed)} ({needed:,} bytes) and {_size(free)} ({free:,}) are free",
        )
    if not exists(folder / step):
        return
    if step in folder.steps():  # our last attempt, whose manifest failed
        folder.remove(step)
    else:
        name = folder.quarantine(step, "foreign")
        _LOG.warning("%s was in the way and is %s now", folder / step, name)


def _pause(attempt: int) -> float:
    return _FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_SHOWN_STEPS = 12


def open_address(address: Address) -> CheckpointManager:
    """The checkpoints of the run, to be read only.

    Raises:
        ConfigError: there are none.
        StorageError: they cannot be reached.
    """
    return open_run(address.run_dir, address.where, address.parent)


def resolve_step_on_all(checkpoints: CheckpointManager, address: Address) -> int:
    """The step that is meant, by default the newest; all processes of a run get the same.

    Raises:
        ConfigError: there is none of that step, or none that was evaluated.
    """
    is_first = jax.process_index() == 0
    return int(
        first_nonempty_text(str(resolve_step(checkpoints.durable, address)) if is_first else "")
    )


def resolve_step(folder: CheckpointFolder, address: Address) -> int:
    """The same as this process sees it, in a folder with checkpoints. Needs no devices.

    Raises:
        ConfigError: there is none of that step, or none that was evaluated.
    """
    steps, step = folder.steps(), address.step
    if step == "best":
        return find_best_step(folder, address, read_best_metric(folder))[0]
    if step is None or step == "newest":
        return steps[-1]
    if step in steps:
        return step
    rule = f"must be one of the saved steps: {_format_steps(steps)}."
    aside = [name for name in folder.quarantined() if name.startswith(f"{step}.")]
    if aside:
        rule = (
            f"was found damaged, and is {aside[-1]} now; the saved steps are "
            f"{_format_steps(steps)}."
        )
    raise address.error(rule, f"Take {address.address_at(steps[-1])}, the newest.")


def read_best_metric(folder: CheckpointFolder) -> BestMetric:
    """By what the run compares its checkpoints: as the newest that can be read was saved with."""
    for step in reversed(folder.steps()):
        with contextlib.suppress(DamagedError, FileNotFoundError):
            return BestMetric.of(folder.read_metadata(step).config.get("checkpoint", {}))
    return BestMetric()


def find_best_step(
    folder: CheckpointFolder, address: Address, better: BestMetric
) -> tuple[int, float]:
    """The step with the best value of a metric, the newest of equals, and that value.

    Raises:
        ConfigError: no checkpoint has it.
    """
    values: dict[int, float] = {}
    known: set[str] = set()
    for step in folder.steps():
        with contextlib.suppress(DamagedError, FileNotFoundError):  # a run may be deleting it
            metrics = folder.read_metadata(step).metrics or {}
            known |= metrics.keys()
            if (key := better.sort_key(metrics)) is not None:
                values[step] = key
    if values:
        step = min(values, key=lambda each: (values[each], -each))
        return step, -values[step] if better.is_largest else values[step]
    if not known:
        raise address.error(
            "has no checkpoint that was evaluated at the step at which it was saved.",
            "Name a step, or train with eval.every at the same number as checkpoint.every; "
            "eval.every=0 evaluates the last step only.",
        )
    guess = did_you_mean(better.metric, known) or BestMetric().metric
    raise address.error(
        f"has no checkpoint with a metric {better.metric}; they have {', '.join(sorted(known))}.",
        f"Take --metric {guess}.",
    )


def _format_steps(steps: Sequence[int]) -> str:
    words = [str(step) for step in steps]
    if len(words) > _SHOWN_STEPS:
        words = [*words[:3], f"... ({len(words)} in all)", *words[-(_SHOWN_STEPS - 4) :]]
    return ", ".join(words)
