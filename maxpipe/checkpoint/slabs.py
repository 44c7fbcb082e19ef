"""Checkpoints whose arrays are never whole in memory: each is made and written slab by slab.

orbax keeps the names, commits the step with a rename, and writes whatever else there is; only the
arrays' content is written here. A slab is one chunk of its array, not compressed: weights hardly
shrink, and decoding costs more than it saves.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future

from maxpipe.checkpoint import copies, manifest
from maxpipe.checkpoint.contents import FACTS, STATE, seal
from maxpipe.checkpoint.digests import Sum
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.storage import first_line
from maxpipe.checkpoint.trees import named
from maxpipe.checkpoint.writer import ignore_orphans

Region = tuple[slice, ...]
Tree = Any
T = TypeVar("T")

_DATA = "ocdbt.process_0/d"
"""Folder of an item in which arrays are written."""

NUM_THREADS = 3
"""Slabs at a time: while one is written the next is read."""


@dataclass(frozen=True, slots=True)
class Slabs:
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
    folder: Folder, facts: Facts, state: Tree, written: Callable[[int], None] = lambda count: None
) -> None:
    """Writes a step whose state is a tree of `Slabs`, as one process, and its manifest.

    `written` is called with the bytes of each slab that was written, by several threads.

    Raises:
        NotSaved: what was written is not what was read.
        NumbersError: it holds NaN or infinity.
        OSError: it cannot be written.
        Exception: one of `Slabs.read`.
    """
    needed = sum(one.nbytes for one in named(state).values())
    if (free := folder.free_bytes()) is not None and free < needed:
        words = f"it needs {needed:,} bytes and {free:,} are free"
        raise OSError(errno.ENOSPC, words)
    ignore_orphans()
    handler = _Handler(written)
    content = facts.to_json()
    checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            **{
                STATE: ocp.PyTreeCheckpointHandler(
                    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                        (Slabs, handler)
                    )
                ),
                FACTS: ocp.JsonCheckpointHandler(),
                copies.ITEM: copies.Handler(),
            }
        )
    )
    items = ocp.args.Composite(
        **{
            STATE: ocp.args.PyTreeSave(state),
            FACTS: ocp.args.JsonSave(content),
            copies.ITEM: copies.Save(facts.step, content, handler.sums),
        }
    )
    try:
        checkpointer.save(folder / facts.step, args=items)
    except BaseException as error:
        handler.stop()
        if handler.error is not None:
            raise handler.error from None
        if isinstance(error, Exception):
            raise OSError(first_line(error)) from error
        raise
    finally:
        checkpointer.close()
    seal(folder / facts.step, facts.step, handler.ahead)


class _Handler(ocp.type_handlers.TypeHandler):
    """Writes the arrays of one save."""

    def __init__(self, written: Callable[[int], None]):
        self._written = written
        self._sums: Future[dict[str, Sum] | None] = Future()
        self._turn, self._begun, self._stopped = threading.Lock(), False, False
        self.error: BaseException | None = None
        """Of `Slabs.read`, as it was raised."""
        self.ahead: dict[str, manifest.File] = {}
        """Digests of files, by their names in the step's folder."""

    def typestr(self) -> str:
        """As arrays of numpy are called."""
        return "np.ndarray"

    def sums(self) -> dict[str, Sum] | None:
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

    async def _write(self, values: Sequence[Slabs], infos: Sequence[Any]) -> None:
        sums, lock, found = {}, threading.Lock(), None
        try:
            arrays = {
                info.name: (one, _created(one, info))
                for one, info in zip(values, infos, strict=True)
            }
            sums = {name: Sum(str(one.dtype), one.shape) for name, (one, _) in arrays.items()}

            def put(task: tuple[str, Region]) -> None:
                name, region = task
                one, target = arrays[name]
                values = self._read(one, region)
                part = Sum(str(one.dtype), one.shape)
                part.add(values, [each.start for each in region])
                with lock:
                    sums[name].join(part)
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
            with manifest.Ahead(infos[0].parent_dir / _DATA) as ahead:
                each(put, itertools.takewhile(lambda _: not self._stopped, tasks))
                if self._stopped:
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                files = ahead.listed()
            self.ahead = {f"{STATE}/{_DATA}/{name}": one for name, one in files.items()}
            found = sums
        finally:
            self._sums.set_result(found)

    def _read(self, one: Slabs, region: Region) -> np.ndarray:
        try:
            return one.read(region)
        except BaseException as error:
            self.error = error
            raise

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("they are read as arrays of numpy")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("they are read as arrays of numpy")


def _created(one: Slabs, info: Any) -> Any:
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


def each(work: Callable[[T], object], tasks: Iterable[T]) -> None:
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
