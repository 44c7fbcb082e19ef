"""Write checkpoints in the background, or slab by slab with little memory.

`CheckpointWriter` runs one save at a time. orbax copies the arrays to the host while the caller
waits; threads then write and commit the copies and their digests. Afterwards, everything is read
back and compared, and the manifest is written. If the run is killed before the manifest is written,
the next start verifies the checkpoint.

`save` writes arrays that do not fit in memory: every array is computed and written slab by slab.
orbax chooses the file names, commits the step by a rename and writes all other items. A slab is one
uncompressed chunk of an array, because weights compress poorly and decoding would cost more time
than it saves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future

from maxpipe.checkpoint import digests, manifest
from maxpipe.checkpoint.digests import ArrayDigest, leaves_by_name
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

Region = tuple[slice, ...]

T = TypeVar("T")

_DATA = "ocdbt.process_0/d"
"""Folder of array data inside an orbax item."""

NUM_THREADS = 3
"""Number of slabs in progress at the same time: one is written while the next is computed."""


@dataclass(frozen=True, slots=True)
class LazySlabArray:
    """An array that `read` computes region by region. `read` must be thread-safe."""

    shape: tuple[int, ...]
    dtype: np.dtype
    slab: tuple[int, ...]
    """Shape of a region. Regions at the array boundary may be smaller."""
    read: Callable[[Region], np.ndarray]
    is_finite: bool = False
    """Whether `read` raises an error for NaN and infinity."""

    @property
    def nbytes(self) -> int:
        """Size of the full array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    folder: CheckpointFolder,
    facts: CheckpointMetadata,
    state: Tree,
    written: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a step whose state is a pytree of `LazySlabArray`, and its manifest, in one process.

    After each slab is written, `written` is called with its size in bytes, possibly from several
    threads.

    Raises:
        SaveVerificationError: the written content differs from the computed arrays.
        DivergenceError: an array contains NaN or infinity.
        OSError: the checkpoint cannot be written.
        Exception: `LazySlabArray.read` raised an exception.
    """
    needed = sum(array.nbytes for array in leaves_by_name(state).values())
    if (free := folder.free_bytes()) is not None and free < needed:
        words = f"the checkpoint needs {needed:,} bytes, but only {free:,} are free"
        raise OSError(errno.ENOSPC, words)
    ignore_orphaned_errors()
    handler = _Handler(written)
    content = facts.to_json()
    checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            **{
                STATE_ITEM: ocp.PyTreeCheckpointHandler(
                    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                        (LazySlabArray, handler)
                    )
                ),
                METADATA_ITEM: ocp.JsonCheckpointHandler(),
                digests.DIGEST_ITEM: digests.DigestHandler(),
            }
        )
    )
    items = ocp.args.Composite(
        **{
            STATE_ITEM: ocp.args.PyTreeSave(state),
            METADATA_ITEM: ocp.args.JsonSave(content),
            digests.DIGEST_ITEM: digests.DigestSaveArgs(facts.step, content, handler.sums),
        }
    )
    try:
        checkpointer.save(folder / facts.step, args=items)
    except BaseException as error:
        handler.stop()
        if handler.error is not None:
            raise handler.error from None
        if isinstance(error, Exception):
            raise OSError(root_cause_text(error)) from error
        raise
    finally:
        checkpointer.close()
    verify_and_write_manifest(folder / facts.step, facts.step, handler.ahead)


class _Handler(ocp.type_handlers.TypeHandler):
    """Orbax type handler that writes the arrays of one save."""

    def __init__(self, written: Callable[[int], None]):
        self._written = written
        self._sums: Future[dict[str, ArrayDigest] | None] = Future()
        self._turn, self._begun, self._stopped = threading.Lock(), False, False
        self.error: BaseException | None = None
        """Original exception raised by `LazySlabArray.read`."""
        self.ahead: dict[str, manifest.ManifestFile] = {}
        """File digests computed during the save, keyed by path relative to the step's folder."""

    def typestr(self) -> str:
        """Return the type name of numpy arrays, because slabs are stored like numpy arrays."""
        return "np.ndarray"

    def sums(self) -> dict[str, ArrayDigest] | None:
        """Wait until all arrays are written and return their digests, or None if writing failed."""
        return self._sums.result()

    def stop(self) -> None:
        """Stop writing, and wait until all threads have stopped."""
        with self._turn:
            self._stopped = True
        if self._begun:
            self._sums.result()
        else:
            self._sums.set_result(None)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[future.Future]:
        """Start writing the arrays. orbax may call this method from a thread even after Ctrl-C."""
        with self._turn:
            if self._stopped:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            self._begun = True
        writing = self._write(values, infos)
        return [future.CommitFutureAwaitingContractedSignals(writing, name="slabs")]

    async def _write(self, values: Sequence[LazySlabArray], infos: Sequence[Any]) -> None:
        sums, lock, written_sums = {}, threading.Lock(), None
        try:
            arrays = {
                info.name: (array, _create_array(array, info))
                for array, info in zip(values, infos, strict=True)
            }
            sums = {
                name: ArrayDigest(str(array.dtype), array.shape)
                for name, (array, _) in arrays.items()
            }

            def put(task: tuple[str, Region]) -> None:
                name, region = task
                array, target = arrays[name]
                try:
                    values = array.read(region)
                except BaseException as error:
                    self.error = error
                    raise
                part = ArrayDigest(str(array.dtype), array.shape)
                begin = [indices.start for indices in region]
                part.add(values, begin, is_finite=array.is_finite)
                with lock:
                    sums[name].merge(part)
                with ahead.writing():
                    target[region].write(
                        values, can_reference_source_data_indefinitely=True
                    ).result()
                self._written(values.nbytes)

            tasks = (
                (name, region)
                for name, (array, _) in arrays.items()
                for region in regions(array.shape, array.slab)
            )
            with manifest.BackgroundDigester(infos[0].parent_dir / _DATA) as ahead:
                run_in_threads(put, itertools.takewhile(lambda _: not self._stopped, tasks))
                if self._stopped:
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                files = ahead.results()
            self.ahead = {f"{STATE_ITEM}/{_DATA}/{name}": file for name, file in files.items()}
            written_sums = sums
        finally:
            self._sums.set_result(written_sums)

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("read the arrays as numpy arrays")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("read the arrays as numpy arrays")


def _create_array(array: LazySlabArray, info: Any) -> Any:
    """Create the array at the path where orbax expects the arrays of process 0, and open it."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=array.shape,
        local_shape=array.slab,
        dtype=array.dtype,
        process_index=0,
    )
    spec["metadata"]["compressor"] = None
    spec["kvstore"]["base"]["file_io_sync"] = False  # `BackgroundDigester` flushes the files
    return tensorstore.open(
        tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
    ).result()


def regions(shape: Sequence[int], slab: Sequence[int]) -> Iterator[Region]:
    """Yield the slabs of an array. Slabs at the boundary may be smaller."""
    starts = (range(0, size, step) for size, step in zip(shape, slab, strict=True))
    for start in itertools.product(*starts):
        ends = (min(dims) for dims in zip(shape, map(operator.add, start, slab), strict=True))
        yield tuple(map(slice, start, ends))


def run_in_threads(work: Callable[[T], object], tasks: Iterable[T]) -> None:
    """Call `work` for every task in a few threads, and wait for all running calls.

    Raises:
        Exception: the first exception raised by a call; pending tasks are dropped.
    """
    running: set[Future[object]] = set()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            for task in tasks:
                running.add(pool.submit(work, task))
                if len(running) > NUM_THREADS:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for call in finished:
                        call.result()
            for call in running:
                call.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # a task may still be queued
            raise


Tree = Any

_LOG = logging.getLogger(__name__)
# orbax aborts a save after this time, for example if another process was lost.
_LIMIT_SECONDS = 3600
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.1

_IGNORED_MESSAGES = ("exception was never retrieved", "Commit callback in background save thread")
_IGNORED_MESSAGES += ("_SignalingThread.run() raised an exception",)
# The function `save` in this module writes no jax.Array.
_IGNORED_MESSAGES += ("No jax.Array in TypeHandlerRegistry",)


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
