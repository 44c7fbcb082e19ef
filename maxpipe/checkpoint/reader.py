"""Which checkpoint of a run is used when the newest may be damaged.

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

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.contents import NotSaved, adopt
from maxpipe.checkpoint.copies import ITEM
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.failures import unusable
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.restore import Agree, Restored, answering, restore
from maxpipe.checkpoint.storage import exists, first_line, reaching
from maxpipe.errors import StorageError

Tree = Any
Record = Callable[..., None]

_LOG = logging.getLogger(__name__)
_TOO_MANY = 2
"""This many damaged checkpoints in a row are no damage, but a failure of the storage."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A checkpoint that looks damaged."""

    folder: Folder
    step: int
    reason: str


class Reader:
    """Reads what the folders of one run hold, the durable one first.

    `record` and `agree` are those of `Checkpoints`. Unless it `writes`, nothing is renamed, and no
    manifest written.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        folders: Sequence[Folder],
        *,
        writes: bool,
        record: Record,
        agree: Agree,
    ):
        self._run_dir, self._folders, self._writes = os.fspath(run_dir), folders, writes
        self._record, self._agree = record, agree
        self._primary = jax.process_index() == 0

    def newest(
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
                return found
        aside = [
            str(folder.path / name) for folder in self._folders for name in folder.quarantined()
        ]
        if skipped or aside:
            reasons = [f"{one.folder / one.step}: {one.reason}" for one in skipped]
            raise StorageError(
                f"{self._folders[0].path}: no checkpoint can be used\n"
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

    def step(
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
            return self._read(self._folders[0], step, abstract, accept)
        except Damaged as damage:
            older = [str(other) for other in self._folders[0].steps() if other < step]
            raise StorageError(
                f"{self._folders[0] / step}: cannot be restored\n"
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
        if self._writes:
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
            if self._writes:
                try:
                    with reaching(folder.path):
                        renamed = f", renamed {folder.quarantine(step)}"
                except OSError as error:
                    raise unusable(folder, error, folder / step) from error
            _LOG.warning("%s is skipped%s: %s", folder / step, renamed, reason)
            self._record("checkpoint_skipped", step=step, reason=reason)
        self._agree("done" if self._primary else "")  # renamed before any process lists again
