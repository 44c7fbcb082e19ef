"""Which checkpoint of a run is used when the newest may be damaged.

- A checkpoint whose files or arrays are not what was saved is never used. The one before is
  tried; if that is intact, the damaged one is quarantined as `<step>.corrupt`, with a warning.
- Two damaged ones in a row are more likely a failure of the storage: the run stops, and nothing
  is renamed. Nor is it when the storage fails: only content that was read twice can be wrong.
- One without a manifest was saved by an older release, or its run was killed in the moment
  between commit and manifest. It is compared with the digests of its arrays in memory, if it
  has them, and otherwise used with a warning; then it gets a manifest.
- When no checkpoint can be used, but there were some, the run does not start from scratch.

Failures of saving: which may pass, and the error for one that does not.

Reads one checkpoint and decides with all processes whether it is intact.

The files are compared with the manifest and the arrays, once they are in memory, with the
digests that they had in memory when they were saved. A damaged one is read a second time:
a bit may have flipped on its way from the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxpipe.checkpoint import contents, digest_item, digests, manifest
from maxpipe.checkpoint.contents import SaveVerificationError, write_missing_manifest
from maxpipe.checkpoint.digest_item import (
    DIGEST_ITEM,
    RecordedDigests,
    diff_shapes,
    leaves_by_name,
    map_named_leaves,
)
from maxpipe.checkpoint.digests import ArrayDigest
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.storage import (
    DamagedError,
    exists,
    in_bucket,
    remedy,
    root_cause_text,
    translate_bucket_errors,
)
from maxpipe.errors import StorageError, exception_chain

# Failures that a retry would meet again. Orbax passes on a system call's message, not its number.
_PERMANENT_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
}
_PERMANENT_ERRNOS |= {errno.ENOTDIR, errno.EISDIR}
_PERMANENT_MESSAGES = ("No space left", "quota", "File too large", "Read-only", "ermission denied")
_PERMANENT_MESSAGES += ("Forbidden", "PERMISSION_DENIED")  # of a bucket
# Errors of orbax and tensorstore for a folder or file with unexpected content, which a flipped bit
# in their own metadata turns into values of any type. A save runs no code of the user.
_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_FAULTS += (ArithmeticError, EOFError, RuntimeError, StorageError)  # RuntimeError: RecursionError


def unwritable_error(
    folder: CheckpointFolder, error: BaseException, what: epath.Path | None = None
) -> StorageError:
    """The error that ends the run: `what`, by default the folder, cannot be written."""
    newest: list[int] = []
    with contextlib.suppress(OSError, StorageError):
        if what is not None and not in_bucket(folder.path) and not exists(folder.path):
            return StorageError(
                f"{folder.path}: was moved or deleted while the run was using it\n"
                f"  {what.name} was not saved, and the checkpoints before it are not there.\n"
                "  Put the folder back, then start the same command again."
            )
        newest = folder.steps()[-1:]
    resumes = f"from step {newest[0]}" if newest else "from its newest complete checkpoint"
    return StorageError(
        f"{what or folder.path}: cannot be written\n"
        f"  {root_cause_text(error)}.\n"
        f"  {remedy(folder.path, folder.key)} Started again, the run resumes {resumes}."
    )


def is_fault(error: BaseException) -> bool:
    """Whether the storage may be the cause.

    An error of jax itself is not: a lost process fails the saves of the others.
    """
    by_jax = any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in exception_chain(error))
    return isinstance(error, _FAULTS) and not by_jax


def is_permanent(error: BaseException) -> bool:
    """Whether another attempt would fail, too."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _PERMANENT_ERRNOS)
        or any(word in str(cause) for word in _PERMANENT_MESSAGES)
        for cause in exception_chain(error)
    )


Tree = Any
EventRecorder = Callable[..., None]

_LOG = logging.getLogger(__name__)
_TOO_MANY = 2
"""This many damaged checkpoints in a row are no damage, but a failure of the storage."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A checkpoint that looks damaged."""

    folder: CheckpointFolder
    step: int
    reason: str


class CheckpointReader:
    """Reads what the folders of one run hold, the durable one first.

    `record` and `agree` are those of `Checkpoints`. Unless it `writes`, nothing is renamed, and no
    manifest written.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        folders: Sequence[CheckpointFolder],
        *,
        writes: bool,
        record: EventRecorder,
        agree: Agree,
    ):
        self._run_dir, self._folders, self._writes = os.fspath(run_dir), folders, writes
        self._record, self._agree = record, agree
        self._primary = jax.process_index() == 0

    def restore_newest(
        self, abstract: Tree, accept: Callable[[CheckpointMetadata], None] = lambda facts: None
    ) -> RestoredCheckpoint | None:
        """The newest intact checkpoint; None if there never was one.

        What `abstract` leaves out is not read. `accept` may raise before the arrays are read.

        Raises:
            StorageError: all are damaged, or one does not fit.
        """
        skipped: list[_Skipped] = []
        if self._primary:
            for oddity in (
                line for folder in self._folders for line in folder.describe_incomplete()
            ):
                _LOG.warning("%s", oddity)
        while (candidate := self._candidate(len(skipped))) is not None:
            folder, step = candidate
            try:
                found = self._read(folder, step, abstract, accept)
            except DamagedError as damage:
                skipped.append(_Skipped(folder, step, str(damage)))
                if len(skipped) == _TOO_MANY:
                    raise self._repeated_damage_error(skipped) from damage
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

    def _repeated_damage_error(self, skipped: Sequence[_Skipped]) -> StorageError:
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

    def restore_step(
        self,
        step: int,
        abstract: Tree | None = None,
        accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    ) -> RestoredCheckpoint:
        """One checkpoint of the run's folder, as arrays placed like `abstract`, or numpy arrays.

        What `abstract` leaves out is not read. `accept` may raise before any array is.

        Raises:
            StorageError: it is damaged.
        """
        try:
            return self._read(self._folders[0], step, abstract, accept)
        except DamagedError as damage:
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

    def _candidate(self, num_skipped: int) -> tuple[CheckpointFolder, int] | None:
        """The newest that is left, as process 0 sees it; of equal steps the durable one."""
        found = []
        for index, folder in enumerate(self._folders):
            with translate_storage_errors(folder.path):
                found += [(-step, index) for step in folder.steps()]
        found = sorted(found)[num_skipped:]
        mine = f"{found[0][1]} {-found[0][0]}" if found else "none"
        agreed = self._agree(mine if self._primary else "")
        if agreed == "none":
            return None
        index, step = map(int, agreed.split())
        return self._folders[index], step

    def _read(
        self,
        folder: CheckpointFolder,
        step: int,
        abstract: Tree | None,
        accept: Callable[[CheckpointMetadata], None],
    ) -> RestoredCheckpoint:
        found = restore(folder, step, abstract, accept=accept, agree=self._agree)
        with translate_storage_errors(folder / step):
            if self._primary and not manifest.has_manifest(folder / step):
                self._adopt(folder, step)
        return found

    def _adopt(self, folder: CheckpointFolder, step: int) -> None:
        """Give a step a manifest that has none."""
        if exists(folder / step / DIGEST_ITEM):
            words = "it was read completely, and is what its run had in memory"
        else:
            words = "it was read completely, but whether its bytes are those that were saved "
            words += "is unknown"
        _LOG.warning("%s has no %s: %s", folder / step, manifest.FILE, words)
        if self._writes:
            try:
                with translate_bucket_errors(folder.path):
                    write_missing_manifest(folder / step, step)
            except (OSError, SaveVerificationError) as error:
                _LOG.warning("%s: %s", folder / step / manifest.FILE, root_cause_text(error))

    def _skip(self, skipped: _Skipped) -> None:
        """Report why a step is not used, and quarantine it."""
        folder, step, reason = skipped.folder, skipped.step, skipped.reason
        if self._primary:
            renamed = ""
            if self._writes:
                try:
                    with translate_bucket_errors(folder.path):
                        renamed = f", renamed {folder.quarantine(step)}"
                except OSError as error:
                    raise unwritable_error(folder, error, folder / step) from error
            _LOG.warning("%s is skipped%s: %s", folder / step, renamed, reason)
            self._record("checkpoint_skipped", step=step, reason=reason)
        self._agree("done" if self._primary else "")  # renamed before any process lists again


Agree = Callable[[str], str]


_TEXT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """One checkpoint's content, and where it was."""

    metadata: CheckpointMetadata
    state: Tree
    folder: epath.Path

    @property
    def step(self) -> int:
        return self.metadata.step


def first_nonempty_text(text: str) -> str:
    """The first text, by process, that is not empty; every process has to ask."""
    if jax.process_count() == 1:
        return text
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    for row in _allgather(mine):
        if row.any():
            return row.tobytes().rstrip(b"\0").decode(errors="ignore")
    return ""


@contextlib.contextmanager
def translate_storage_errors(path: epath.PathLike) -> Iterator[None]:
    """A failure of storage inside ends the run: no decision is based on it.

    Raises:
        StorageError: for any OSError. Other processes may see what this one does not.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be reached\n"
            f"  {root_cause_text(error)}. It is left as it is.\n"
            "  Start again when the storage answers."
        ) from error


def restore(
    folder: CheckpointFolder,
    step: int,
    abstract: Tree | None,
    *,
    accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    agree: Agree = first_nonempty_text,
) -> RestoredCheckpoint:
    """A checkpoint as arrays placed like `abstract`, by default as numpy arrays.

    `accept` may raise before the arrays are read: `Damaged` for metadata that no run saves.

    Raises:
        Damaged: it was read twice, and is not what was saved.
        StorageError: it cannot be reached, does not fit, or is of a later release.
    """
    try:
        return _restore(folder, step, abstract, accept, agree)
    except DamagedError as damage:
        first = str(damage)
    found = _restore(folder, step, abstract, accept, agree)
    if jax.process_index() == 0:
        _LOG.warning(
            "%s: %s at first, but not when it was read again: check the storage and the "
            "memory of this machine",
            folder / step,
            first,
        )
    return found


def _restore(
    folder: CheckpointFolder,
    step: int,
    abstract: Tree | None,
    accept: Callable[[CheckpointMetadata], None],
    agree: Agree,
) -> RestoredCheckpoint:
    path = folder / step
    with translate_storage_errors(path):
        fault, facts, expected = _check_files_and_metadata(folder, step)
    _raise_if_any_fault(agree, fault)
    assert facts is not None
    try:
        accept(facts)
    except DamagedError as damage:
        fault = str(damage)
    _raise_if_any_fault(agree, fault)
    state: Tree = None
    found: dict[str, ArrayDigest] = {}
    try:
        with translate_storage_errors(path):
            stored = abstract if abstract is None else _with_stored_dtypes(path, abstract)
            state = folder.arrays(step, stored)
        found = digest_item.digest_local_shards(state)
        if "step" in state and int(state["step"]) != step:
            fault = f"its state is that of step {int(state['step'])}"
    except DamagedError as damage:
        fault = str(damage)
    _raise_if_any_fault(agree, fault)
    total = _sum_over_processes(found)
    wrong = (
        digests.diff_digests(_select_sections(expected.arrays, total), total) if expected else []
    )
    if wrong := wrong or digests.describe_non_finite(total):
        raise DamagedError("; ".join(wrong[:3]))
    return RestoredCheckpoint(facts, state if abstract is None else _cast(state, abstract), path)


def _check_files_and_metadata(
    folder: CheckpointFolder, step: int
) -> tuple[str, CheckpointMetadata | None, RecordedDigests | None]:
    """The faults of the files, the facts, and the expected digests of the arrays."""
    path = folder / step
    try:
        if manifest.has_manifest(path):
            share = (jax.process_index(), jax.process_count())
            if wrong := manifest.verify_files(path, step, share):
                return "; ".join(wrong[:3]), None, None
        facts = folder.read_metadata(step)
        expected = contents.read_expected_digests(path, step)
        wrong = contents.verify_metadata(path, expected) if expected else []
        return "; ".join(wrong), facts, expected
    except DamagedError as damage:
        return str(damage), None, None


def _raise_if_any_fault(agree: Agree, fault: str) -> None:
    if fault := agree(fault):
        raise DamagedError(fault)


def _with_stored_dtypes(path: epath.Path, abstract: Tree) -> Tree:
    """The same in the types of the checkpoint, whose digests are of these.

    Raises:
        StorageError: the checkpoint has other arrays.
    """
    saved = contents.read_shapes(path)
    saved = {name: saved[name] for name in saved if name in abstract}
    if "step" not in abstract and "optimizer" in saved:  # some of its trees alone
        trees = saved["optimizer"]
        saved["optimizer"] = {each: trees[each] for each in abstract["optimizer"] if each in trees}
    lines = diff_shapes(saved, abstract)
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise StorageError(
            f"{path}: cannot be restored\n"
            f"  {'; '.join(lines[:3])}{more}.\n"
            "  Train with the model and optimizer that it was saved with, or set run.name to "
            "a new name."
        )
    types = {name: leaf.dtype for name, leaf in leaves_by_name(saved).items()}

    def as_stored(name: str, leaf: Any) -> Any:
        if leaf.dtype == types[name]:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, types[name], sharding=leaf.sharding)

    return map_named_leaves(as_stored, abstract)


def _cast(state: Tree, abstract: Tree) -> Tree:
    """In the types that were asked for, one array after the other."""

    def cast(leaf: Any, wanted: Any) -> Any:
        if leaf.dtype == wanted.dtype:
            return leaf
        dtype = wanted.dtype
        found = jax.jit(lambda array: array.astype(dtype), out_shardings=leaf.sharding)(leaf)
        found.block_until_ready()
        leaf.delete()
        return found

    return jax.tree.map(cast, state, abstract)


def _select_sections(
    expected: Mapping[str, ArrayDigest], restored: Mapping[str, ArrayDigest]
) -> dict[str, ArrayDigest]:
    """Those of the sections of the state that were asked for: evaluation leaves out moments."""

    def section(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first

    sections = set(map(section, restored))
    return {name: one for name, one in expected.items() if section(name) in sections}


def _sum_over_processes(sums: dict[str, ArrayDigest]) -> dict[str, ArrayDigest]:
    """Of whole arrays, from those of each process' parts."""
    if jax.process_count() > 1:
        mine = np.array(
            [(one.value, one.elements, one.non_finite) for one in sums.values()], np.uint64
        )
        rows = _allgather(mine.view(np.uint32))
        total = rows.view(np.uint64).sum(axis=0, dtype=np.uint64)  # modulo 2**64
        for one, (value, elements, non_finite) in zip(sums.values(), total, strict=True):
            one.value, one.elements, one.non_finite = int(value), int(elements), int(non_finite)
    return sums


def _allgather(mine: np.ndarray) -> np.ndarray:
    """`[processes, ...]`: every process' array."""
    # XLA for CPUs runs programs of a device in their order, and those of several devices in theirs,
    # but both at once, so that their messages get mixed. All that were begun end before this does.
    jax.block_until_ready(jax.jit(jnp.add)(0, 0))
    return np.asarray(multihost_utils.process_allgather(mine))


def content_digest(tree: Tree) -> str:
    """One digest of all arrays on devices, by their names, which depends on no layout."""
    return combine_digests(_sum_over_processes(digest_item.digest_local_shards(tree)))


def combine_digests(sums: Mapping[str, ArrayDigest]) -> str:
    """The same from the sums of all arrays."""
    entries = {name: one.entry() for name, one in sums.items()}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
