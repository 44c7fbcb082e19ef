"""Read checkpoints, verify them, and select the newest intact checkpoint of a run.

- A checkpoint whose files or arrays differ from the saved content is never used. The reader then
  tries the previous checkpoint. If that checkpoint is intact, the damaged checkpoint is quarantined
  as `<step>.corrupt`, with a warning.
- Two consecutive damaged checkpoints indicate a storage failure, so the run stops and nothing is
renamed. The run also stops without renaming anything if a read fails, because a checkpoint counts
as damaged only if two reads returned wrong content. - A checkpoint without a manifest was saved by
an older release, or by a run that was killed between the commit and the writing of the manifest.
The reader compares its arrays with the recorded
  digests, or logs a warning if there are none, and then writes a manifest.
- If a run has checkpoints but none of them is usable, the run stops. It never starts from scratch.

A restore compares the files with the manifest, and the restored arrays in memory with the digests
recorded during the save. All processes agree on the result of the restore. A damaged checkpoint is
read a second time, because a bit may have flipped during the first read.

The module also classifies failed saves as temporary or permanent.
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

from maxpipe.checkpoint import digests, manifest
from maxpipe.checkpoint.digests import (
    DIGEST_ITEM,
    ArrayDigest,
    RecordedDigests,
    diff_shapes,
    leaves_by_name,
    map_named_leaves,
)
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manifest import SaveVerificationError, write_missing_manifest
from maxpipe.checkpoint.storage import (
    DamagedError,
    exists,
    in_bucket,
    remedy,
    root_cause_text,
    translate_bucket_errors,
)
from maxpipe.errors import Code, StorageError, exception_chain

# Failures that a retry cannot fix. orbax reports a system call's error message, but not its errno.
_PERMANENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}
_PERMANENT_ERRNOS |= {errno.EPERM, errno.ENOTDIR, errno.EISDIR}
_PERMANENT_MESSAGES = ("No space left", "quota", "File too large", "Read-only", "ermission denied")
_PERMANENT_MESSAGES += ("Forbidden", "PERMISSION_DENIED")  # bucket errors
# Errors that orbax and tensorstore raise on unexpected files or content. A flipped bit in their
# metadata can cause errors of many types. User code cannot be the cause, because saving runs no
# user code.
_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_FAULTS += (ArithmeticError, EOFError, RuntimeError, StorageError)  # RuntimeError: RecursionError


def unwritable_error(
    folder: CheckpointFolder, error: BaseException, what: epath.Path | None = None
) -> StorageError:
    """Return the error that ends the run if `what` (default: the folder) is not writable."""
    newest: list[int] = []
    with contextlib.suppress(OSError, StorageError):
        if what is not None and not in_bucket(folder.path) and not exists(folder.path):
            return StorageError(
                Code.CKPT_LOST,
                f"{folder.path}: was moved or deleted while the run was using it\n"
                f"  step {what.name} was not saved, and earlier checkpoints are missing.\n"
                "  Move the folder back, then start the same command again.",
            )
        newest = folder.steps()[-1:]
    resumes = f"from step {newest[0]}" if newest else "from its newest complete checkpoint"
    return StorageError(
        Code.IO_UNWRITABLE,
        f"{what or folder.path}: cannot be written\n"
        f"  {root_cause_text(error)}.\n"
        f"  {remedy(folder.path, folder.key)} After a restart, the run resumes {resumes}.",
    )


def is_fault(error: BaseException) -> bool:
    """Return whether an error may be caused by the storage.

    JAX runtime errors are excluded, because losing one process makes the saves of all other
    processes fail with such errors.
    """
    return isinstance(error, _FAULTS) and not any(
        isinstance(cause, jax.errors.JaxRuntimeError) for cause in exception_chain(error)
    )


def is_permanent(error: BaseException) -> bool:
    """Return whether a retry would fail with the same error."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _PERMANENT_ERRNOS)
        or any(word in str(cause) for word in _PERMANENT_MESSAGES)
        for cause in exception_chain(error)
    )


Tree = Any
EventRecorder = Callable[..., None]

_LOG = logging.getLogger(__name__)
_TOO_MANY = 2
"""Number of consecutive damaged checkpoints that is treated as a sign of a storage failure."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A skipped checkpoint that appears to be damaged."""

    folder: CheckpointFolder
    step: int
    reason: str


class CheckpointReader:
    """Reads checkpoints from a run's folders, starting with the durable folder.

    For `record` and `agree`, see `CheckpointManager`. If `writes` is false, the reader neither
    renames checkpoints nor writes manifests.
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
        """Restore the newest intact checkpoint, or return None if no checkpoint was ever saved.

        Arrays that are missing from `abstract` are not read. `accept` is called before the arrays
        are read, and may raise an error to reject the checkpoint.

        Raises:
            StorageError: all checkpoints are damaged, or the arrays do not match `abstract`.
        """
        skipped: list[_Skipped] = []
        if self._primary:
            for folder in self._folders:
                for warning in folder.describe_incomplete():
                    _LOG.warning("%s", warning)
        while (candidate := self._candidate(len(skipped))) is not None:
            folder, step = candidate
            try:
                restored = self._read(folder, step, abstract, accept)
            except DamagedError as damage:
                skipped.append(_Skipped(folder, step, str(damage)))
                if len(skipped) == _TOO_MANY:
                    raise self._repeated_damage_error(skipped) from damage
            else:
                for damaged in skipped:
                    self._skip(damaged)
                return restored
        reasons = [f"{damaged.folder / damaged.step}: {damaged.reason}" for damaged in skipped] or [
            f"{folder.path / name} is damaged"
            for folder in self._folders
            for name in folder.quarantined()
        ]
        if reasons:
            raise StorageError(
                Code.CKPT_DAMAGED,
                f"{self._folders[0].path}: no checkpoint can be used\n"
                f"  {'; '.join(reasons)}.\n"
                "  Restore the files of one checkpoint and rename its folder to its step, or "
                "move all checkpoints to another path to start from scratch.",
            )
        return None

    def _repeated_damage_error(self, skipped: Sequence[_Skipped]) -> StorageError:
        """Return the error to raise after several consecutive damaged checkpoints. Nothing is
        renamed.
        """
        newest = skipped[0]
        reasons = "; ".join(f"{one.step}: {one.reason}" for one in skipped)
        older = [step for step in newest.folder.steps() if step < skipped[-1].step]
        return StorageError(
            Code.CKPT_DAMAGED,
            f"{newest.folder.path}: the newest {len(skipped)} checkpoints both look damaged\n"
            f"  {reasons}.\n"
            "  The usual cause is a failure of the storage or of this machine, so no checkpoint "
            "was changed. Check both, then run "
            f"`maxpipe checkpoints verify {self._run_dir}` and start again. To continue without "
            f"them, move {' and '.join(str(one.folder / one.step) for one in skipped)} to another "
            "path" + (f": the run then resumes from step {older[-1]}." if older else "."),
        )

    def restore_step(
        self,
        step: int,
        abstract: Tree | None = None,
        accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    ) -> RestoredCheckpoint:
        """Restore one checkpoint of the durable folder with the shardings of `abstract`.

        If `abstract` is None, the arrays are numpy arrays. Arrays that are missing from `abstract`
        are not read. `accept` is called before the arrays are read, and may raise an error.

        Raises:
            StorageError: the checkpoint is damaged.
        """
        try:
            return self._read(self._folders[0], step, abstract, accept)
        except DamagedError as damage:
            older = [str(other) for other in self._folders[0].steps() if other < step]
            raise StorageError(
                Code.CKPT_DAMAGED,
                f"{self._folders[0] / step}: cannot be restored\n"
                f"  {damage}.\n"
                + (
                    f"  Use step {older[-1]}, or restore the files of this step from a backup."
                    if older
                    else "  This is the oldest checkpoint: restore its files from a backup."
                ),
            ) from damage

    def _candidate(self, num_skipped: int) -> tuple[CheckpointFolder, int] | None:
        """Return the next candidate on process 0: the newest untried step, durable folder first."""
        candidates = []
        for index, folder in enumerate(self._folders):
            with translate_storage_errors(folder.path):
                candidates += [(-step, index) for step in folder.steps()]
        candidates = sorted(candidates)[num_skipped:]
        newest = f"{candidates[0][1]} {-candidates[0][0]}" if candidates else "none"
        agreed = self._agree(newest if self._primary else "")
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
        restored = restore(folder, step, abstract, accept=accept, agree=self._agree)
        with translate_storage_errors(folder / step):
            if self._primary and not manifest.has_manifest(folder / step):
                self._adopt(folder, step)
        return restored

    def _adopt(self, folder: CheckpointFolder, step: int) -> None:
        """Write the missing manifest of a step."""
        if exists(folder / step / DIGEST_ITEM):
            words = "the checkpoint was read completely and matches its recorded digests"
        else:
            words = "the checkpoint was read completely, but it has no digests to compare with"
        _LOG.warning("%s has no %s: %s", folder / step, manifest.FILE, words)
        if self._writes:
            try:
                with translate_bucket_errors(folder.path):
                    write_missing_manifest(folder / step, step)
            except (OSError, SaveVerificationError) as error:
                _LOG.warning("%s: %s", folder / step / manifest.FILE, root_cause_text(error))

    def _skip(self, skipped: _Skipped) -> None:
        """Log why a step is skipped, and quarantine its checkpoint."""
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
        # The other processes list the folder only after process 0 has renamed the checkpoint.
        self._agree("done" if self._primary else "")


Agree = Callable[[str], str]


_TEXT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A restored checkpoint with its metadata, state and folder."""

    metadata: CheckpointMetadata
    state: Tree
    folder: epath.Path

    @property
    def step(self) -> int:
        return self.metadata.step


def first_nonempty_text(text: str) -> str:
    """Return the first nonempty string in process order. This is a collective call."""
    if jax.process_count() == 1:
        return text
    encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    for row in _allgather(np.frombuffer(encoded, np.uint8)):
        if row.any():
            return row.tobytes().rstrip(b"\0").decode(errors="ignore")
    return ""


@contextlib.contextmanager
def translate_storage_errors(path: epath.PathLike) -> Iterator[None]:
    """Convert any OSError inside the context to a StorageError, which ends the run. A process must
    not continue after a storage failure, because other processes may not have detected it.

    Raises:
        StorageError: an OSError was raised inside the context.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            Code.CKPT_STORAGE,
            f"{path}: cannot be reached\n"
            f"  {root_cause_text(error)}. No file was changed.\n"
            "  Start again when the storage is available.",
        ) from error


def restore(
    folder: CheckpointFolder,
    step: int,
    abstract: Tree | None,
    *,
    accept: Callable[[CheckpointMetadata], None] = lambda facts: None,
    agree: Agree = first_nonempty_text,
) -> RestoredCheckpoint:
    """Restore a checkpoint with the shardings of `abstract` (default: as numpy arrays).

    `accept` is called before the arrays are read, and may raise an error, such as DamagedError for
    invalid metadata.

    Raises:
        DamagedError: two reads both returned content that differs from the saved content.
        StorageError: the storage is unreachable, the arrays do not match `abstract`, or a newer
            release saved the checkpoint.
    """
    try:
        return _restore(folder, step, abstract, accept, agree)
    except DamagedError as damage:
        first = str(damage)
    restored = _restore(folder, step, abstract, accept, agree)
    if jax.process_index() == 0:
        _LOG.warning(
            "%s: the first read found damage (%s), but the second read succeeded: check the "
            "storage and the memory of this machine",
            folder / step,
            first,
        )
    return restored


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
    local: dict[str, ArrayDigest] = {}
    try:
        with translate_storage_errors(path):
            stored = abstract if abstract is None else _with_stored_dtypes(path, abstract)
            state = folder.arrays(step, stored)
        local = digests.digest_local_shards(state)
        if "step" in state and int(state["step"]) != step:
            fault = f"the saved state belongs to step {int(state['step'])}"
    except DamagedError as damage:
        fault = str(damage)
    _raise_if_any_fault(agree, fault)
    total = _sum_over_processes(local)
    selected = _select_sections(expected.arrays, total) if expected else total
    wrong = digests.diff_digests(selected, total) or digests.describe_non_finite(total)
    if wrong:
        raise DamagedError("; ".join(wrong[:3]))
    return RestoredCheckpoint(facts, state if abstract is None else _cast(state, abstract), path)


def _check_files_and_metadata(
    folder: CheckpointFolder, step: int
) -> tuple[str, CheckpointMetadata | None, RecordedDigests | None]:
    """Return the problems found in files and metadata, the metadata, and the expected digests of
    the arrays.
    """
    path = folder / step
    try:
        if manifest.has_manifest(path):
            share = (jax.process_index(), jax.process_count())
            if wrong := manifest.verify_files(path, step, share):
                return "; ".join(wrong[:3]), None, None
        facts = folder.read_metadata(step)
        expected = manifest.read_expected_digests(path, step)
        wrong = manifest.verify_metadata(path, expected) if expected else []
        return "; ".join(wrong), facts, expected
    except DamagedError as damage:
        return str(damage), None, None


def _raise_if_any_fault(agree: Agree, fault: str) -> None:
    if fault := agree(fault):
        raise DamagedError(fault)


def _with_stored_dtypes(path: epath.Path, abstract: Tree) -> Tree:
    """Return `abstract` with the checkpoint's dtypes, because digests are computed in the saved
    dtypes.

    Raises:
        StorageError: the checkpoint has different arrays or shapes.
    """
    saved = manifest.read_shapes(path)
    saved = {name: saved[name] for name in saved if name in abstract}
    # If `abstract` has no step, it may contain only some optimizer trees.
    if "step" not in abstract and "optimizer" in saved:
        trees = saved["optimizer"]
        saved["optimizer"] = {name: trees[name] for name in abstract["optimizer"] if name in trees}
    lines = diff_shapes(saved, abstract)
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise StorageError(
            Code.CKPT_MODEL,
            f"{path}: cannot be restored\n"
            f"  {'; '.join(lines[:3])}{more}.\n"
            "  Use the saved run's model and optimizer, or set run.name to a new name.",
        )
    types = {name: leaf.dtype for name, leaf in leaves_by_name(saved).items()}

    def as_stored(name: str, leaf: Any) -> Any:
        if leaf.dtype == types[name]:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, types[name], sharding=leaf.sharding)

    return map_named_leaves(as_stored, abstract)


def _cast(state: Tree, abstract: Tree) -> Tree:
    """Cast the arrays to the dtypes of `abstract`, one array at a time to limit memory use."""

    def cast(leaf: Any, wanted: Any) -> Any:
        if leaf.dtype == wanted.dtype:
            return leaf
        dtype = wanted.dtype
        array = jax.jit(lambda array: array.astype(dtype), out_shardings=leaf.sharding)(leaf)
        array.block_until_ready()
        leaf.delete()
        return array

    return jax.tree.map(cast, state, abstract)


def _select_sections(
    expected: Mapping[str, ArrayDigest], restored: Mapping[str, ArrayDigest]
) -> dict[str, ArrayDigest]:
    """Return the expected digests of the restored sections; evaluation skips optimizer state."""

    def section(name: str) -> str:
        first, *names = name.split(".")
        return f"{first}.{names[0]}" if first == "optimizer" and names else first

    sections = set(map(section, restored))
    return {name: one for name, one in expected.items() if section(name) in sections}


def _sum_over_processes(sums: dict[str, ArrayDigest]) -> dict[str, ArrayDigest]:
    """Return the digests of the full arrays, by summing the shard digests over all processes."""
    if jax.process_count() > 1:
        local = [(digest.value, digest.elements, digest.non_finite) for digest in sums.values()]
        rows = _allgather(np.array(local, np.uint64).view(np.uint32))
        total = rows.view(np.uint64).sum(axis=0, dtype=np.uint64)  # modulo 2**64
        for digest, row in zip(sums.values(), total, strict=True):
            digest.value, digest.elements, digest.non_finite = map(int, row)
    return sums


def _allgather(array: np.ndarray) -> np.ndarray:
    """Gather one array from each process into a single array `[processes, ...]`."""
    # On CPU, XLA may run a single-device and a multi-device program concurrently and mix up their
    # messages. Therefore, wait for all pending programs before the all-gather.
    jax.block_until_ready(jax.jit(jnp.add)(0, 0))
    return np.asarray(multihost_utils.process_allgather(array))


def content_digest(tree: Tree) -> str:
    """Return one layout-independent digest over the names and contents of all device arrays."""
    return combine_digests(_sum_over_processes(digests.digest_local_shards(tree)))


def combine_digests(sums: Mapping[str, ArrayDigest]) -> str:
    """Combine the digests of all arrays into one SHA-256 digest."""
    entries = {name: one.entry() for name, one in sums.items()}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
