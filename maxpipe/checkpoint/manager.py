"""The checkpoints of a run: when one is due, what happens when saving or reading fails.

It takes trees that are already in their saved form, without models or
pipelines, so that a checkpoint fits any layout. What can be trusted:

- A checkpoint whose files or arrays are not what was saved is never used. The one before is
  tried; if that is intact, the damaged one is quarantined as `<step>.corrupt`, with a warning.
- Two damaged ones in a row are more likely a failure of the storage: the run stops, and nothing
  is renamed. Nor is it when the storage fails: only content that was read twice can be wrong.
- One without a manifest was saved by an older release, or its run was killed in the moment
  between commit and manifest. It is compared with the digests of its arrays in memory, if it
  has them, and otherwise used with a warning; then it gets a manifest.
- When no checkpoint can be used, but there were some, the run does not start from scratch.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from etils import epath

from maxpipe.boundary.files import full
from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.contents import NotSaved, adopt
from maxpipe.checkpoint.copies import ITEM
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.restore import Agree, Restored, answering, first_of_all, restore
from maxpipe.checkpoint.retention import Rules, kept
from maxpipe.checkpoint.storage import (
    FOLDER,
    exists,
    first_line,
    home,
    home_of,
    in_bucket,
    reaching,
    remedy,
    try_out,
)
from maxpipe.checkpoint.trees import num_bytes
from maxpipe.checkpoint.writer import Save, Writer, ignore_orphans
from maxpipe.config.schema import CheckpointConfig
from maxpipe.errors import ConfigError, StorageError, causes

Tree = Any
Record = Callable[..., None]

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 1.0
# Failures that a retry would meet again. Orbax passes on a system call's message, not its number.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_LASTING |= {errno.ENOTDIR, errno.EISDIR}
_LASTING_WORDS = ("No space left", "quota", "File too large", "Read-only", "ermission denied")
_LASTING_WORDS += ("Forbidden", "PERMISSION_DENIED")  # of a bucket
# What orbax and tensorstore raise for a folder or file that is not as it should be.
_FAULTS = (OSError, ValueError, KeyError, RuntimeError, StorageError)
_TOO_MANY = 2
"""This many damaged checkpoints in a row are no damage, but a failure of the storage."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A checkpoint that looks damaged."""

    folder: Folder
    step: int
    reason: str


class Checkpoints:
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
        record: Record = lambda event, **fields: None,
        agree: Agree = first_of_all,
        locks: Sequence[RunLock] = (),
    ):
        self._config = config or CheckpointConfig()
        self._record, self._agree, self._locks = record, agree, locks
        self._primary, self._alone = jax.process_index() == 0, jax.process_count() == 1
        self._run_dir = os.fspath(run_dir)
        key = "checkpoint.dir" if self._config.dir else "run.dir"
        self.durable = Folder(os.path.join(home(run_dir, self._config), FOLDER), key)
        self._folders = [self.durable]
        self._failures = 0  # in a row
        self._retry_at: float | None = None
        self._writer: Writer | None = None
        ignore_orphans()
        if write and self._config.local_dir:
            local = local_folder(self._config.local_dir, run_dir)
            self._folders.append(Folder(local, "checkpoint.local_dir"))
        if write:
            for folder in self._folders:
                _prepare(folder, self._primary)
                self._must_be_shared(folder)
            self._writer = Writer(self._prune, self._check_locks)
        self._newest_folder = self.durable
        # Of the steps, the newest that is known to exist; -1 for a new run.
        self._newest = -1
        for folder in self._folders:
            with answering(folder.path):
                self._newest = max([self._newest, *folder.steps()])

    def _must_be_shared(self, folder: Folder) -> None:
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
        missing = self._agree("" if _comes(folder.path / sign) else process)
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
        self, abstract: Tree, accept: Callable[[Facts], None] = lambda facts: None
    ) -> Restored | None:
        """The newest intact checkpoint; None if there never was one.

        What `abstract` leaves out is not read. `accept` may raise before the arrays are read.

        Raises:
            StorageError: all are damaged, or one does not fit.
        """
        skipped: list[_Skipped] = []
        if self._primary:
            for oddity in (line for folder in self._folders for line in folder.oddities()):
                _LOG.warning("%s", oddity)
        while (candidate := self._candidate(len(skipped))) is not None:
            folder, step = candidate
            try:
                found = self._read(folder, step, abstract, accept)
            except Damaged as damage:
                skipped.append(_Skipped(folder, step, str(damage)))
                if len(skipped) == _TOO_MANY:
                    raise self._distrusted(skipped) from damage
            else:
                for one in skipped:
                    self._skip(one)
                self._newest, self._newest_folder = step, folder
                return found
        aside = [
            str(folder.path / name) for folder in self._folders for name in folder.quarantined()
        ]
        if skipped or aside:
            reasons = [f"{one.folder / one.step}: {one.reason}" for one in skipped]
            raise StorageError(
                f"{self.durable.path}: no checkpoint can be used\n"
                f"  {'; '.join(reasons or [f'{name} was found damaged' for name in aside])}.\n"
                "  Bring the files of one back and give its folder its step as name again, or "
                "move all of them away to start from scratch."
            )
        return None

    def _distrusted(self, skipped: Sequence[_Skipped]) -> StorageError:
        """Several in a row look damaged: nothing is renamed."""
        newest = skipped[0]
        reasons = "; ".join(f"{one.step}: {one.reason}" for one in skipped)
        older = [step for step in newest.folder.steps() if step < skipped[-1].step]
        return StorageError(
            f"{newest.folder.path}: the newest {len(skipped)} checkpoints both look damaged\n"
            f"  {reasons}.\n"
            "  That is more often a fault of the storage or of this machine than lost data: "
            "everything is left as it is. Check both, then run "
            f"`maxpipe checkpoints verify {self._run_dir}` and start again. To go back "
            f"without them, move {' and '.join(str(one.folder / one.step) for one in skipped)} away"
            + (f": the run resumes from step {older[-1]}." if older else ".")
        )

    def restore(
        self,
        step: int,
        abstract: Tree | None = None,
        accept: Callable[[Facts], None] = lambda facts: None,
    ) -> Restored:
        """One checkpoint of the run's folder, as arrays placed like `abstract`, or numpy arrays.

        What `abstract` leaves out is not read. `accept` may raise before any array is.

        Raises:
            StorageError: it is damaged.
        """
        try:
            return self._read(self.durable, step, abstract, accept)
        except Damaged as damage:
            older = [str(other) for other in self.steps() if other < step]
            raise StorageError(
                f"{self.durable / step}: cannot be restored\n"
                f"  {damage}.\n"
                + (
                    f"  Take step {older[-1]}, or bring the files of this one back."
                    if older
                    else "  It is the oldest: bring its files back."
                )
            ) from damage

    def _candidate(self, num_skipped: int) -> tuple[Folder, int] | None:
        """The newest that is left, as process 0 sees it; of equal steps the durable one."""
        found = []
        for index, folder in enumerate(self._folders):
            with answering(folder.path):
                found += [(-step, index) for step in folder.steps()]
        found = sorted(found)[num_skipped:]
        mine = f"{found[0][1]} {-found[0][0]}" if found else "none"
        agreed = self._agree(mine if self._primary else "")
        if agreed == "none":
            return None
        index, step = map(int, agreed.split())
        return self._folders[index], step

    def _read(
        self, folder: Folder, step: int, abstract: Tree | None, accept: Callable[[Facts], None]
    ) -> Restored:
        found = restore(folder, step, abstract, accept=accept, agree=self._agree)
        with answering(folder / step):
            if self._primary and not manifest.is_in(folder / step):
                self._adopt(folder, step)
        return found

    def _adopt(self, folder: Folder, step: int) -> None:
        """Give a step a manifest that has none."""
        if exists(folder / step / ITEM):
            words = "it was read completely, and is what its run had in memory"
        else:
            words = "it was read completely, but whether its bytes are those that were saved "
            words += "is unknown"
        _LOG.warning("%s has no %s: %s", folder / step, manifest.FILE, words)
        if self._writer is not None:
            try:
                with reaching(folder.path):
                    adopt(folder / step, step)
            except (OSError, NotSaved) as error:
                _LOG.warning("%s: %s", folder / step / manifest.FILE, first_line(error))

    def _skip(self, skipped: _Skipped) -> None:
        """Report why a step is not used, and quarantine it."""
        folder, step, reason = skipped.folder, skipped.step, skipped.reason
        if self._primary:
            renamed = ""
            if self._writer is not None:
                try:
                    with reaching(folder.path):
                        renamed = f", renamed {folder.quarantine(step)}"
                except OSError as error:
                    raise _unusable(folder, error, folder / step) from error
            _LOG.warning("%s is skipped%s: %s", folder / step, renamed, reason)
            self._record("checkpoint_skipped", step=step, reason=reason)
        self._agree("done" if self._primary else "")  # renamed before any process lists again

    # Saving.

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        return self._target(step) is not None

    def _target(self, step: int) -> Folder | None:
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
        self._settle(self._writer.outcome(wait=True))
        if step < self._newest:
            raise StorageError(
                f"{self.durable.path}: step {step} was not saved\n"
                f"  a checkpoint of step {self._newest} is there already.\n"
                "  Set run.name to a new name, or move the folder away."
            )
        facts = Facts(step, dict(config), dict(data), time.time(), dict(metrics or {}))
        folder = self.durable if last else self._target(step) or self.durable
        attempt = 0
        while step != self._newest or (last and self._newest_folder is not self.durable):
            self._retry_at = None
            self._start(folder, state(), facts)
            if not last:
                return
            attempt += 1
            save = self._writer.outcome(wait=True)
            assert save is not None
            # Process 0 alone writes the manifest: its failure there is a failure of all.
            again = attempt <= self._config.retries
            if save.error is None or _is_fault(save.error):
                save.error = self._agree_on(save.error)
            else:
                again = False
            if save.error is None or _lasts(save.error) or not again:
                self._settle(save, final=True)
            else:
                self._tell_failure(save, f"another attempt in {_pause(attempt):g} s")
                time.sleep(_pause(attempt))

    def poll(self) -> None:
        """Poll, each step, the save in the background. Costs nothing.

        Raises:
            StorageError: it failed and `checkpoint.on_failure` says stop; or the folder was found
                to be lost in an earlier check.
        """
        for lock in self._locks:
            lock.must_be_held()
        # The processes of a run may see a failure at different steps; with the first of them
        # that does the run ends, whatever on_failure says.
        if self._writer is not None:
            self._settle(self._writer.outcome(wait=False))

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            StorageError: a save failed in the background.
        """
        if self._writer is not None:
            self._settle(self._writer.outcome(wait=True), final=True)

    def _start(self, folder: Folder, state: Tree, facts: Facts) -> None:
        assert self._writer is not None
        self._check_locks()
        trouble = None
        if self._primary:
            try:
                with reaching(folder.path):
                    _make_room(folder, facts.step, num_bytes(state))
            except OSError as error:
                trouble = error
        trouble = self._agree_on(trouble)
        if trouble is None:
            self._writer.start(folder, state, facts)
        else:
            self._writer.refuse(Save(folder, facts.step, error=trouble))

    def _check_locks(self, folder: Folder | None = None) -> None:
        """Those of the run, or what holds one folder of checkpoints."""
        for lock in self._locks:
            if folder is None or f"{folder.path}/".startswith(f"{lock.path.parent}/"):
                lock.check()

    def _agree_on(self, error: BaseException | None) -> BaseException | None:
        """The error of the first process that has one; every process has to ask."""
        if self._alone:
            return error
        number = getattr(error, "errno", None) or 0
        text = self._agree("" if error is None else f"{number} {first_line(error)}")
        if not text or error is not None:
            return error
        number, _, reason = text.partition(" ")
        return OSError(int(number), reason) if number != "0" else OSError(reason)

    def _settle(self, save: Save | None, *, final: bool = False) -> None:
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
        if not _is_fault(save.error):
            raise save.error
        self._failures += 1
        if not final and self._alone:
            if self._failures <= self._config.retries and not _lasts(save.error):
                pause = _pause(self._failures)
                self._retry_at = time.monotonic() + pause
                return self._tell_failure(save, f"another attempt after {pause:g} s")
            if self._config.on_failure == "go_on":
                return self._tell_failure(save, "training goes on until the next is due")
        self._tell_failure(save, "")
        raise _unusable(save.folder, save.error, save.folder / save.step) from save.error

    def _tell_failure(self, save: Save, then: str) -> None:
        assert save.error is not None
        reason = first_line(save.error)
        self._record("checkpoint_failed", step=save.step, reason=reason, failures=self._failures)
        if then:
            _LOG.warning("%s was not saved: %s. %s", save.folder / save.step, reason, then)

    def _prune(self, save: Save) -> None:
        """Delete what no rule keeps. The step of `save` was verified a moment ago."""
        folder = save.folder
        rules = Rules.of(self._config) if folder is self.durable else Rules(1)
        saved = [one for step in folder.steps() if (one := folder.saved(step))]
        stay = kept(saved, rules).keys() | {save.step}
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

    def __enter__(self) -> Checkpoints:
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


def open_run(run_dir: epath.PathLike, where: str = "", parent: str = "") -> Checkpoints:
    """The checkpoints of a run that is only read. `where` names what gave the folder; `place` holds
    their folder if that is not for the run's config to say.

    Raises:
        ConfigError: there are none.
        StorageError: they cannot be reached.
    """
    checkpoints = Checkpoints(parent or home_of(run_dir, where or "path"), write=False)
    if not checkpoints.steps():
        raise ConfigError.one(
            where or f"run folder {run_dir}",
            run_dir if where else None,
            f"must have a folder {FOLDER!r} in which one checkpoint is complete; there is none in "
            f"{checkpoints.durable.path}.",
            "Give the folder of a run, by default runs/<run.name>.",
        )
    return checkpoints


def local_folder(local_dir: str, run_dir: epath.PathLike) -> Path:
    """Of a run's newest checkpoint, with `checkpoint.local_dir`.

    Below the folder for all runs, named by the run's whole path: names may be used twice.
    """
    run = full(os.fspath(run_dir)).absolute()
    path = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    return full(local_dir, "checkpoint.local_dir").absolute() / f"{run.name}-{path}"


def _comes(path: epath.Path) -> bool:
    """Whether it exists, or soon does: network file systems may show files late."""
    return any(exists(path) or time.sleep(1.0) for _ in range(5))


def _prepare(folder: Folder, primary: bool) -> None:
    """Fail now, not at the first save, if nothing can be written."""
    try:
        with reaching(folder.path):
            try_out(folder.path)
            for name in folder.clean() if primary else ():
                _LOG.warning("%s is removed: it was never finished", folder.path / name)
    except OSError as error:
        raise _unusable(folder, error) from error


def _make_room(folder: Folder, step: int, needed: int) -> None:
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


def _unusable(folder: Folder, error: BaseException, what: epath.Path | None = None) -> StorageError:
    newest: list[int] = []
    with contextlib.suppress(OSError, StorageError):
        if what is not None and not in_bucket(folder.path) and not exists(folder.path):
            # Restarted without it, the run would begin at step 0.
            return StorageError(
                f"{folder.path}: was moved or deleted while the run was using it\n"
                f"  {what.name} was not saved, and the checkpoints before it are not there.\n"
                "  Put the folder back before you start the same command again: without it "
                "the run starts at step 0."
            )
        newest = folder.steps()[-1:]
    resumes = f"from step {newest[0]}" if newest else "from its newest complete checkpoint"
    return StorageError(
        f"{what or folder.path}: cannot be written\n"
        f"  {first_line(error)}.\n"
        f"  {remedy(folder.path, folder.key)} Started again, the run resumes {resumes}."
    )


def _is_fault(error: BaseException) -> bool:
    """Whether the storage may be the cause.

    An error of jax itself is not: a lost process fails the saves of the others.
    """
    by_jax = any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes(error))
    return isinstance(error, _FAULTS) and not by_jax


def _lasts(error: BaseException) -> bool:
    """Whether another attempt would fail, too."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _LASTING)
        or any(word in str(cause) for word in _LASTING_WORDS)
        for cause in causes(error)
    )


def _pause(attempt: int) -> float:
    return _FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
