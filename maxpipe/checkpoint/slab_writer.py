"""Write checkpoints whose arrays do not fit in memory: arrays are computed slab by slab.

orbax chooses the file names, commits the step by a rename and writes the small items. Each slab
becomes one uncompressed chunk of a zarr array, in a separate file: weights compress poorly, and
compression would cost more time than it saves. Each file is written without the page cache, flushed
and read back from disk. Both its SHA-256 and the digest of its values are computed from the bytes
read, and the digest is compared with the one computed from the values in memory, so the manifest
never lists the SHA-256 of wrong bytes. After the commit, one slab of each array is read through the
storage library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import future

from maxpipe.checkpoint import digests
from maxpipe.checkpoint.digests import ArrayDigest, leaves_by_name
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manifest import (
    METADATA_ITEM,
    STATE_ITEM,
    ManifestFile,
    SaveVerificationError,
    VerifiedFiles,
    call_detecting_damage,
    open_array,
    verify_and_write_manifest,
)
from maxpipe.checkpoint.storage import DamagedError, root_cause_text
from maxpipe.checkpoint.writer import ignore_orphaned_errors
from maxpipe.io import direct_io
from maxpipe.io.forked_workers import ForkedWorkers, num_cores

Region = tuple[slice, ...]
Tree = Any
T = TypeVar("T")

NUM_THREADS = 4
"""Number of slabs in progress at the same time. While some slabs are computed, others are written
or read."""
PROCESSES_PER_CORE, MAX_PROCESSES = 3, 32
"""Number of forked processes. While some of them compute, others wait for the disk."""
FORK_BYTES = 1 << 28
"""Minimum total size of arrays whose slabs are written by forked processes. Threads would compute
only as fast as 1.3 cores, because numpy calls wait for the GIL."""


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
    is_fork_safe: bool = False
    """Whether `read` works in a forked process, because it does not use jax or tensorstore."""

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

    `folder` must be local. After each slab is written, `written` is called with its size in bytes,
    possibly from several threads.

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
    arrays: dict[str, LazySlabArray] = leaves_by_name(state)
    with contextlib.ExitStack() as stack:
        workers = None
        if needed >= FORK_BYTES and all(array.is_fork_safe for array in arrays.values()):
            count = min(PROCESSES_PER_CORE * num_cores(), MAX_PROCESSES)
            # Fork before orbax starts threads.
            workers = ForkedWorkers(partial(_write_slab, arrays), count)
            stack.callback(workers.close)
        handler = _Handler(written, workers)
        _save(folder, facts, state, handler)


def _save(
    folder: CheckpointFolder, facts: CheckpointMetadata, state: Tree, handler: _Handler
) -> None:
    content = facts.to_json()
    registry = ocp.type_handlers.create_type_handler_registry((LazySlabArray, handler))
    checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            **{
                STATE_ITEM: ocp.PyTreeCheckpointHandler(
                    use_ocdbt=False, type_handler_registry=registry
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
    _verify_last_slabs(folder / facts.step, handler.last_slabs.values())
    verified = VerifiedFiles(handler.files, handler.sums() or {})
    verify_and_write_manifest(folder / facts.step, facts.step, verified)


class _Slab(NamedTuple):
    """A slab of an array, and the digest of its values in memory."""

    name: str
    region: Region
    digest: ArrayDigest

    def is_equal(self, values: np.ndarray) -> bool:
        """Return whether values that were read back have the digest of this slab."""
        digest = ArrayDigest(str(values.dtype), self.digest.shape)
        digest.add(values, [part.start for part in self.region], is_finite=True)
        return digest.value == self.digest.value and digest.elements == self.digest.elements


class _Handler(ocp.type_handlers.TypeHandler):
    """Orbax type handler that writes the arrays of one save."""

    def __init__(self, written: Callable[[int], None], workers: ForkedWorkers | None = None):
        self._written, self._workers = written, workers
        self._sums: Future[dict[str, ArrayDigest] | None] = Future()
        self._turn, self._begun, self._stopped = threading.Lock(), False, False
        self.error: BaseException | None = None
        """Original exception raised by `LazySlabArray.read`, or for a slab that differs on disk."""
        self.files: dict[str, ManifestFile] = {}
        """Written and verified files, keyed by path relative to the step's folder."""
        self.last_slabs: dict[str, _Slab] = {}
        """The slab of each array that was written last, keyed by array name."""

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
        written_sums = None
        try:
            arrays = {info.name: array for array, info in zip(values, infos, strict=True)}
            for array, info in zip(values, infos, strict=True):
                _create_array(array, info)
            folder, lock = infos[0].parent_dir, threading.Lock()
            sums = {
                name: ArrayDigest(str(array.dtype), array.shape) for name, array in arrays.items()
            }
            write = self._workers.call if self._workers else partial(_write_slab, arrays)

            def put(task: tuple[str, Region]) -> None:
                name, region = task
                try:
                    path, slab, file, num_bytes = write((name, region, f"{folder}"))
                except BaseException as error:
                    self.error = error
                    raise
                with lock:
                    self.files[f"{STATE_ITEM}/{path}"] = file
                    sums[name].merge(slab.digest)
                    self.last_slabs[name] = slab
                self._written(num_bytes)

            tasks = (
                (name, region)
                for name, array in arrays.items()
                for region in regions(array.shape, array.slab)
            )
            wanted = itertools.takewhile(lambda _: not self._stopped, tasks)
            run_in_threads(put, wanted, self._workers.count if self._workers else NUM_THREADS)
            if self._stopped:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            written_sums = sums
        finally:
            self._sums.set_result(written_sums)

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("read the arrays as numpy arrays")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("read the arrays as numpy arrays")


def _write_slab(
    arrays: Mapping[str, LazySlabArray], task: tuple[str, Region, str]
) -> tuple[str, _Slab, ManifestFile, int]:
    """Write and verify the slab of an array in a region below a folder.

    Returns:
        The file's path relative to the folder, the slab, the manifest entry of the file, and the
        size of the slab in bytes.

    Raises:
        SaveVerificationError: the file differs from the slab in memory.
        OSError: the file cannot be written or read.
        Exception: `LazySlabArray.read` raised an exception.
    """
    name, region, folder = task
    array = arrays[name]
    values = array.read(region)
    slab = _Slab(name, region, ArrayDigest(str(array.dtype), array.shape))
    begin, num_bytes = [indices.start for indices in region], values.nbytes
    slab.digest.add(values, begin, is_finite=array.is_finite)
    path = f"{name}/{_chunk_name(region, array.slab)}"
    _write_chunk(f"{folder}/{path}", values, array.slab)
    del values
    size = math.prod(array.slab) * array.dtype.itemsize
    if getattr(_LOCAL, "memory", np.empty(0)).size < size:
        _LOCAL.memory = direct_io.aligned_empty(size)
    try:
        file = _verify_chunk(f"{folder}/{path}", slab, array, _LOCAL.memory)
    except SaveVerificationError as error:
        raise SaveVerificationError(f"{STATE_ITEM}/{path} {error}") from None
    return path, slab, file, num_bytes


_LOCAL = threading.local()
"""The buffer of each thread that reads slabs back."""


def _create_array(array: LazySlabArray, info: Any) -> None:
    """Create the array without chunks, in the folder where orbax expects it."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=False,
        global_shape=array.shape,
        local_shape=array.slab,
        dtype=array.dtype,
        process_index=None,
    )
    spec["metadata"] |= {"compressor": None, "dimension_separator": "."}
    tensorstore.open(
        tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
    ).result()


def _chunk_name(region: Region, slab: tuple[int, ...]) -> str:
    """Return the name of a chunk's file in a zarr array."""
    places = (part.start // size for part, size in zip(region, slab, strict=True))
    return ".".join(map(str, places)) or "0"


def _write_chunk(path: str, values: np.ndarray, chunk: tuple[int, ...]) -> None:
    """Write a chunk, padded with zeros at the array boundary. zarr stores complete chunks."""
    size = math.prod(chunk) * values.dtype.itemsize
    if values.shape == chunk and direct_io.is_aligned(values):
        direct_io.write_file(path, values.reshape(-1).view(np.uint8), size)
        return
    memory = direct_io.aligned_empty(size)
    words = np.dtype(f"u{values.dtype.itemsize}")  # numpy holds the GIL while copying bfloat16
    target = memory[:size].view(words).reshape(chunk)
    if values.shape != chunk:
        target[...] = 0
    np.copyto(target[tuple(map(slice, values.shape))], values.view(words))
    direct_io.write_file(path, memory, size)


def _verify_chunk(path: str, slab: _Slab, array: LazySlabArray, memory: np.ndarray) -> ManifestFile:
    """Flush the file of a chunk, read it back from disk into `memory`, and return its manifest
    entry.

    Raises:
        SaveVerificationError: the file differs from the slab in memory.
        OSError: the file cannot be flushed or read.
    """
    content = direct_io.read_from_disk(path, memory)
    if content.size == math.prod(array.slab) * array.dtype.itemsize:
        chunk = content.view(array.dtype).reshape(array.slab)
        if slab.is_equal(chunk[tuple(slice(part.stop - part.start) for part in slab.region)]):
            sha256 = hashlib.sha256(content.data).hexdigest()
            return {"bytes": content.size, "sha256": sha256}
    raise SaveVerificationError("differs from the saved content")


def _verify_last_slabs(folder: epath.Path, slabs: Iterable[_Slab]) -> None:
    """Read slabs through the storage library.

    Raises:
        SaveVerificationError: the values differ from those in memory.
        OSError: the storage is unreachable.
    """
    for slab in slabs:
        try:
            array = call_detecting_damage(lambda slab=slab: open_array(folder, slab.name))
            is_equal = slab.is_equal(array[slab.region].read().result())
        except (DamagedError, ValueError) as damage:
            raise SaveVerificationError(f"array {slab.name}: {root_cause_text(damage)}") from damage
        if not is_equal:
            raise SaveVerificationError(f"array {slab.name} differs from the saved content")


def regions(shape: Sequence[int], slab: Sequence[int]) -> Iterator[Region]:
    """Yield the slabs of an array. Slabs at the boundary may be smaller."""
    starts = (range(0, size, step) for size, step in zip(shape, slab, strict=True))
    for start in itertools.product(*starts):
        ends = (min(dims) for dims in zip(shape, map(operator.add, start, slab), strict=True))
        yield tuple(map(slice, start, ends))


def run_in_threads(
    work: Callable[[T], object], tasks: Iterable[T], count: int = NUM_THREADS
) -> None:
    """Call `work` for every task in a few threads, and wait for all running calls.

    Raises:
        Exception: the first exception raised by a call; pending tasks are dropped.
    """
    running: set[Future[object]] = set()
    with ThreadPoolExecutor(count) as pool:
        try:
            for task in tasks:
                running.add(pool.submit(work, task))
                if len(running) > count:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for call in finished:
                        call.result()
            for call in running:
                call.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # a task may still be queued
            raise
