"""Write checkpoints in the background.

`CheckpointWriter` runs one save at a time. orbax copies the arrays to the host while the caller
waits; threads then write and commit the copies and their digests. Afterwards, everything is read
back and compared, and the manifest is written. If the run is killed before the manifest is written,
the next start verifies the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxpipe.checkpoint import digests
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manifest import (
    METADATA_ITEM,
    STATE_ITEM,
    SaveVerificationError,
    verify_and_write_manifest,
)
from maxpipe.checkpoint.storage import (
    PinnedFolder,
    exists,
    root_cause_text,
    translate_bucket_errors,
)
from maxpipe.errors import DivergenceError, StorageError

Tree = Any

_LOG = logging.getLogger(__name__)
# orbax aborts a save after this time, for example if another process was lost.
_LIMIT_SECONDS = 3600
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.1

_IGNORED_MESSAGES = ("exception was never retrieved", "Commit callback in background save thread")
_IGNORED_MESSAGES += ("_SignalingThread.run() raised an exception",)
# `slab_writer.save` writes no jax.Array, and no OCDBT database.
_IGNORED_MESSAGES += ("No jax.Array in TypeHandlerRegistry", "Skipping merge of OCDBT checkpoints")


@dataclass(slots=True)
class SaveResult:
    """The result of a save. When the save ends, `CheckpointWriter` sets the fields that have
    defaults.

    `error` is None on success.
    """

    folder: CheckpointFolder
    step: int
    blocking_seconds: float = 0.0
    seconds: float = 0.0
    num_bytes: int = 0
    error: BaseException | None = None


_CHUNK_BYTES = 1 << 26
"""Chunk size of large arrays in bytes. A chunk is the smallest unit that can be read, so exports
need little memory, regardless of the mesh used by the run."""

_EVEN, _FEW = 16, 256
"""Arrays are divided into chunks only if all dims larger than `_FEW` are multiples of `_EVEN`."""


def _chunks(state: Tree) -> Tree:
    """Return the chunk shapes of large arrays. A chunk of stacked layers contains one layer."""

    def chunk(path: Any, leaf: Any) -> ocp.SaveArgs | None:
        # For sizes with few divisors, orbax would create one chunk per row.
        if leaf.nbytes <= _CHUNK_BYTES or any(size % _EVEN for size in leaf.shape if size > _FEW):
            return None
        stacked = any(getattr(key, "key", None) == "layers" for key in path)
        return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(chunk, state)


class CheckpointWriter:
    """Writes one checkpoint at a time in the background.

    Process 0 calls `then(save)` in the background after every successful save. `check(folder)`
    raises StorageError if the run has lost the folder's lock.
    """

    def __init__(
        self, then: Callable[[SaveResult], None], check: Callable[[CheckpointFolder], None]
    ):
        ignore_orphaned_errors()
        self._then, self._check = then, check
        self._thread: threading.Thread | None = None
        self._save: SaveResult | None = None
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{
                    # With pinned transfers, orbax would not use the host copies of `copy_to_host`.
                    STATE_ITEM: ocp.PyTreeCheckpointHandler(
                        save_concurrent_gb=96, enable_pinned_host_transfer=False
                    ),
                    METADATA_ITEM: ocp.JsonCheckpointHandler(),
                    digests.DIGEST_ITEM: digests.DigestHandler(),
                }
            ),
            # If folders were created asynchronously, a failure would be reported minutes later.
            async_options=ocp.AsyncOptions(
                timeout_secs=_LIMIT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, folder: CheckpointFolder, state: Tree, facts: CheckpointMetadata) -> None:
        """Start a save. The arrays may be changed as soon as this method returns.

        Call `take_result` for the previous save first. If this method fails, `take_result` reports
        the error.
        """
        assert self._save is None
        begin = time.monotonic()
        save, pinned = SaveResult(folder, facts.step), None
        copied: Future[digests.HostCopies | None] = Future()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        content = facts.to_json()
        sums = functools.partial(digests.await_digests, shapes, copied)
        try:
            with (
                translate_bucket_errors(folder.path),
                digests.distribute_replicas(state) as parts,
            ):
                pinned = PinnedFolder(folder.path)
                copies = digests.copy_to_host(parts)
                items = ocp.args.Composite(
                    **{
                        STATE_ITEM: ocp.args.PyTreeSave(parts, _chunks(parts)),
                        METADATA_ITEM: ocp.args.JsonSave(content),
                        digests.DIGEST_ITEM: digests.DigestSaveArgs(facts.step, content, sums),
                    }
                )
                self._checkpointer.save(pinned.path / str(facts.step), args=items)
            copied.set_result(copies)
        except Exception as error:
            save.error = pinned.restore_names(error) if pinned else error
            copied.set_result(None)
        save.blocking_seconds = time.monotonic() - begin
        self._save = save
        self._thread = threading.Thread(
            target=self._finish, args=(save, begin, pinned), name="checkpoint"
        )
        self._thread.start()

    def set_failed(self, save: SaveResult) -> None:
        """Record `save`, which was never started, as the next result of `take_result`."""
        assert self._save is None
        self._save = save

    def _finish(self, save: SaveResult, begin: float, pinned: PinnedFolder | None) -> None:
        is_primary = jax.process_index() == 0
        try:
            if save.error is None:
                with translate_bucket_errors(save.folder.path):
                    self._checkpointer.wait_until_finished()
                    self._check(save.folder)  # from here on, the folder is accessed by its path
                    if is_primary:
                        save.num_bytes = verify_and_write_manifest(
                            save.folder / save.step, save.step
                        )
        except Exception as error:
            save.error = pinned.restore_names(error) if pinned else error
        if pinned:
            pinned.close()
        save.seconds = time.monotonic() - begin
        if is_primary:
            self._clean_up(save)

    def _clean_up(self, save: SaveResult) -> None:
        try:
            self._check(save.folder)
        except StorageError:  # the error is reported elsewhere; leave the folder unchanged
            return
        for attempt in range(_ATTEMPTS):
            try:
                with translate_bucket_errors(save.folder.path):
                    if save.error is None:
                        self._then(save)
                    else:
                        self._delete_failed_save(save)
                return
            except (OSError, StorageError) as error:  # leftover files only occupy disk space
                if attempt == _ATTEMPTS - 1:
                    reason = root_cause_text(error)
                    _LOG.warning("%s: clean-up failed: %s", save.folder.path, reason)
                # Writes that were in progress when the save failed may continue for a moment.
                time.sleep(_PAUSE_SECONDS)

    def _delete_failed_save(self, save: SaveResult) -> None:
        save.folder.delete_unfinished()
        is_wrong = isinstance(save.error, SaveVerificationError | DivergenceError)
        if is_wrong and exists(save.folder / save.step):
            save.folder.remove(save.step)

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def take_result(self, *, wait: bool) -> SaveResult | None:
        """Return the save that finished since the last call, or None.

        If `wait` is set, wait for the save in progress.
        """
        if self._thread is not None:
            if self.is_busy and not wait:
                return None
            self._thread.join()
        self._thread, save, self._save = None, self._save, None
        return save

    def close(self) -> None:
        """Wait for the save in progress, and close the orbax checkpointer."""
        if self._thread is not None:
            self._thread.join()
        # The result of the save has already reported any error that orbax raises here.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._checkpointer.close()


@functools.cache
def ignore_orphaned_errors() -> None:
    """Suppress tracebacks from reads and writes that were in progress when orbax raised an error.

    Such operations report errors because the event loop is closed or nothing awaits their results.
    """
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error, source = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not is_late and not (source and "orbax" in source.co_filename):
            report(unraisable)

    def is_wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(words in message for words in _IGNORED_MESSAGES)

    sys.unraisablehook = hook
    for name in ("asyncio", "absl"):
        logging.getLogger(name).addFilter(is_wanted)
