"""Writes checkpoints in the background, one at a time.

orbax copies the arrays to the host while the caller waits, then threads write these copies and
their digests, and commit both. Then everything is read back and compared, and the manifest
follows: after a kill before that, the next start compares a complete checkpoint.

Checkpoints whose arrays are never whole in memory: each is made and written slab by slab.

orbax keeps the names, commits the step with a rename, and writes whatever else there is; only the
arrays' content is written here. A slab is one chunk of its array, not compressed: weights hardly
shrink, and decoding costs more than it saves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import math
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

from maxpipe.checkpoint import digest_item, manifest
from maxpipe.checkpoint.contents import (
    METADATA_ITEM,
    STATE_ITEM,
    SaveVerificationError,
    verify_and_write_manifest,
)
from maxpipe.checkpoint.digest_item import leaves_by_name
from maxpipe.checkpoint.digests import ArrayDigest
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
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
"""Folder of an item in which arrays are written."""

NUM_THREADS = 3
"""Slabs at a time: while one is written the next is read."""


@dataclass(frozen=True, slots=True)
class LazySlabArray:
    """An array. `read` gives a region of it, and is called by several threads at once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    slab: tuple[int, ...]
    """Shape of the regions, but for those at the ends."""
    read: Callable[[Region], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    folder: CheckpointFolder,
    facts: CheckpointMetadata,
    state: Tree,
    written: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes a step whose state is a tree of `Slabs`, as one process, and its manifest.

    `written` is called with the bytes of each slab that was written, by several threads.

    Raises:
        NotSaved: what was written is not what was read.
        NumbersError: it holds NaN or infinity.
        OSError: it cannot be written.
        Exception: one of `Slabs.read`.
    """
    needed = sum(one.nbytes for one in leaves_by_name(state).values())
    if (free := folder.free_bytes()) is not None and free < needed:
        words = f"it needs {needed:,} bytes and {free:,} are free"
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
                digest_item.DIGEST_ITEM: digest_item.DigestHandler(),
            }
        )
    )
    items = ocp.args.Composite(
        **{
            STATE_ITEM: ocp.args.PyTreeSave(state),
            METADATA_ITEM: ocp.args.JsonSave(content),
            digest_item.DIGEST_ITEM: digest_item.DigestSaveArgs(facts.step, content, handler.sums),
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
    """Writes the arrays of one save."""

    def __init__(self, written: Callable[[int], None]):
        self._written = written
        self._sums: Future[dict[str, ArrayDigest] | None] = Future()
        self._turn, self._begun, self._stopped = threading.Lock(), False, False
        self.error: BaseException | None = None
        """Of `Slabs.read`, as it was raised."""
        self.ahead: dict[str, manifest.ManifestFile] = {}
        """Digests of files, by their names in the step's folder."""

    def typestr(self) -> str:
        """As arrays of numpy are called."""
        return "np.ndarray"

    def sums(self) -> dict[str, ArrayDigest] | None:
        """The digests of what was read, when all is written; None if it was not."""
        return self._sums.result()

    def stop(self) -> None:
        """Returns when no thread writes any more, and none begins."""
        with self._turn:
            self._stopped = True
        if self._begun:
            self._sums.result()
        else:
            self._sums.set_result(None)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[future.Future]:
        """Starts to write. After Ctrl-C orbax may still call it, in a thread of its own."""
        with self._turn:
            if self._stopped:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            self._begun = True
        writing = self._write(values, infos)
        return [future.CommitFutureAwaitingContractedSignals(writing, name="slabs")]

    async def _write(self, values: Sequence[LazySlabArray], infos: Sequence[Any]) -> None:
        sums, lock, found = {}, threading.Lock(), None
        try:
            arrays = {
                info.name: (one, _create_array(one, info))
                for one, info in zip(values, infos, strict=True)
            }
            sums = {
                name: ArrayDigest(str(one.dtype), one.shape) for name, (one, _) in arrays.items()
            }

            def put(task: tuple[str, Region]) -> None:
                name, region = task
                one, target = arrays[name]
                values = self._read(one, region)
                part = ArrayDigest(str(one.dtype), one.shape)
                part.add(values, [each.start for each in region])
                with lock:
                    sums[name].merge(part)
                with ahead.writing():
                    target[region].write(
                        values, can_reference_source_data_indefinitely=True
                    ).result()
                self._written(values.nbytes)

            tasks = (
                (name, region)
                for name, (one, _) in arrays.items()
                for region in regions(one.shape, one.slab)
            )
            with manifest.BackgroundDigester(infos[0].parent_dir / _DATA) as ahead:
                run_in_threads(put, itertools.takewhile(lambda _: not self._stopped, tasks))
                if self._stopped:
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                files = ahead.results()
            self.ahead = {f"{STATE_ITEM}/{_DATA}/{name}": one for name, one in files.items()}
            found = sums
        finally:
            self._sums.set_result(found)

    def _read(self, one: LazySlabArray, region: Region) -> np.ndarray:
        try:
            return one.read(region)
        except BaseException as error:
            self.error = error
            raise

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("they are read as arrays of numpy")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("they are read as arrays of numpy")


def _create_array(one: LazySlabArray, info: Any) -> Any:
    """The array's place, below which orbax expects that of process 0."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=one.shape,
        local_shape=one.slab,
        dtype=one.dtype,
        process_index=0,
    )
    spec["metadata"]["compressor"] = None
    spec["kvstore"]["base"]["file_io_sync"] = False  # they are brought to the disk by `Ahead`
    return tensorstore.open(
        tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
    ).result()


def regions(shape: Sequence[int], slab: Sequence[int]) -> Iterator[Region]:
    """An array in slabs, those at the ends smaller."""
    starts = (range(0, size, each) for size, each in zip(shape, slab, strict=True))
    for start in itertools.product(*starts):
        ends = (
            min(size, first + each) for size, first, each in zip(shape, start, slab, strict=True)
        )
        yield tuple(map(slice, start, ends))


def run_in_threads(work: Callable[[T], object], tasks: Iterable[T]) -> None:
    """Calls it with each, in a few threads, which have ended when this returns or raises.

    Raises:
        Exception: the first that a call raised; none of those that waited is called any more.
    """
    running: set[Future[object]] = set()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            for task in tasks:
                running.add(pool.submit(work, task))
                if len(running) > NUM_THREADS:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # one task may wait for a thread
            raise


Tree = Any

_LOG = logging.getLogger(__name__)
# Orbax gives up a save, with several processes because one of them is gone, after this time.
_LIMIT_SECONDS = 3600
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.1

_IGNORED_MESSAGES = ("exception was never retrieved", "Commit callback in background save thread")
_IGNORED_MESSAGES += ("_SignalingThread.run() raised an exception",)
# Of `maxpipe.checkpoint.writer`, which has none.
_IGNORED_MESSAGES += ("No jax.Array in TypeHandlerRegistry",)


@dataclass(slots=True)
class SaveResult:
    """One save. The other fields are set when it is over; `error` is None if it succeeded."""

    folder: CheckpointFolder
    step: int
    blocking_seconds: float = 0.0
    seconds: float = 0.0
    num_bytes: int = 0
    error: BaseException | None = None


_CHUNK_BYTES = 1 << 26
"""Of a chunk of a large array, the least that is read at a time; an export then needs little memory
whatever the mesh of the run."""

_EVEN, _FEW = 16, 256
"""Larger sizes than the second are multiples of the first in arrays that are cut."""

_LAYERS = "layers"
"""Where layers are stacked along the first dim."""


def _chunks(state: Tree) -> Tree:
    """How large arrays are cut; of those with several layers, a chunk has one."""

    def chunk(path: Any, leaf: Any) -> ocp.SaveArgs | None:
        # Of sizes with few divisors orbax makes chunks of single rows.
        if leaf.nbytes <= _CHUNK_BYTES or any(size % _EVEN for size in leaf.shape if size > _FEW):
            return None
        stacked = any(getattr(key, "key", None) == _LAYERS for key in path)
        return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if stacked else ())

    return jax.tree_util.tree_map_with_path(chunk, state)


class CheckpointWriter:
    """`then(save)` runs in the background after a save succeeded, on process 0.

    `check(folder)` raises StorageError when it is not the run's any more.
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
                    STATE_ITEM: ocp.StandardCheckpointHandler(),
                    METADATA_ITEM: ocp.JsonCheckpointHandler(),
                    digest_item.DIGEST_ITEM: digest_item.DigestHandler(),
                }
            ),
            # In the background, a folder that cannot be made would be reported after minutes.
            async_options=ocp.AsyncOptions(
                timeout_secs=_LIMIT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, folder: CheckpointFolder, state: Tree, facts: CheckpointMetadata) -> None:
        """Start a save; the arrays may be changed as soon as this returns.

        `outcome` must have returned the one before. Fails as that does.
        """
        assert self._save is None
        begin = time.monotonic()
        save, pinned = SaveResult(folder, facts.step), None
        copied: Future[digest_item.HostCopies | None] = Future()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        content = facts.to_json()
        items = ocp.args.Composite(
            **{
                STATE_ITEM: ocp.args.StandardSave(state, _chunks(state)),
                METADATA_ITEM: ocp.args.JsonSave(content),
                digest_item.DIGEST_ITEM: digest_item.DigestSaveArgs(
                    facts.step,
                    content,
                    functools.partial(digest_item.await_digests, shapes, copied),
                ),
            }
        )
        try:
            with (
                translate_bucket_errors(folder.path),
                digest_item.capture_host_copies(state) as found,
            ):
                pinned = PinnedFolder(folder.path)
                self._checkpointer.save(pinned.path / str(facts.step), args=items)
            copied.set_result(found)
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
        """Make a save that never started the next outcome."""
        assert self._save is None
        self._save = save

    def _finish(self, save: SaveResult, begin: float, pinned: PinnedFolder | None) -> None:
        is_primary = jax.process_index() == 0
        try:
            if save.error is None:
                with translate_bucket_errors(save.folder.path):
                    self._checkpointer.wait_until_finished()
                    self._check(save.folder)  # the folder is used by its name from here on
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
        except StorageError:  # reported elsewhere; the folder is left alone
            return
        for attempt in range(_ATTEMPTS):
            try:
                with translate_bucket_errors(save.folder.path):
                    if save.error is None:
                        self._then(save)
                    else:
                        self._delete_failed_save(save)
                return
            except (OSError, StorageError) as error:  # only costs space
                if attempt == _ATTEMPTS - 1:
                    reason = root_cause_text(error)
                    _LOG.warning("%s: cannot be tidied up: %s", save.folder.path, reason)
                # Writes that had started when another one failed go on for a moment.
                time.sleep(_PAUSE_SECONDS)

    def _delete_failed_save(self, save: SaveResult) -> None:
        """Delete what a failed save has left: unfinished files, or files that are wrong."""
        save.folder.delete_unfinished()
        is_wrong = isinstance(save.error, SaveVerificationError | DivergenceError)
        if is_wrong and exists(save.folder / save.step):
            save.folder.remove(save.step)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def take_result(self, *, wait: bool) -> SaveResult | None:
        """The save that has ended since the last call; None if there is none."""
        if self._thread is not None:
            if self.is_busy and not wait:
                return None
            self._thread.join()
        self._thread, save, self._save = None, self._save, None
        return save

    def close(self) -> None:
        """Waits for the save that is under way."""
        if self._thread is not None:
            self._thread.join()
        # Errors that orbax still raises are of a save whose outcome has reported them.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._checkpointer.close()


@functools.cache
def ignore_orphaned_errors() -> None:
    """Drop errors of reads and writes that were under way when orbax raised for another one.

    They end in a closed event loop, or are never waited for, and each would be a traceback.
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
