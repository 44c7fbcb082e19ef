"""Writes checkpoints in the background, one at a time.

orbax copies the arrays to the host while the caller waits, then threads write these copies and
their digests, and commit both. Then everything is read back and compared, and the manifest
follows: after a kill before that, the next start compares a complete checkpoint.
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

from maxpipe.checkpoint import copies
from maxpipe.checkpoint.contents import FACTS, STATE, NotSaved, seal
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.storage import Pinned, exists, first_line, reaching
from maxpipe.errors import NumbersError, StorageError

Tree = Any

_LOG = logging.getLogger(__name__)
# Orbax gives up a save, with several processes because one of them is gone, after this time.
_LIMIT_SECONDS = 3600
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.1

_REPORTED_BY_US = ("exception was never retrieved", "Commit callback in background save thread")
_REPORTED_BY_US += ("_SignalingThread.run() raised an exception",)
# Of `maxpipe.checkpoint.slabs`, which has none.
_REPORTED_BY_US += ("No jax.Array in TypeHandlerRegistry",)


@dataclass(slots=True)
class Save:
    """One save. The other fields are set when it is over; `error` is None if it succeeded."""

    folder: Folder
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


class Writer:
    """`then(save)` runs in the background after a save succeeded, on process 0.

    `check(folder)` raises StorageError when it is not the run's any more.
    """

    def __init__(self, then: Callable[[Save], None], check: Callable[[Folder], None]):
        ignore_orphans()
        self._then, self._check = then, check
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{
                    STATE: ocp.StandardCheckpointHandler(),
                    FACTS: ocp.JsonCheckpointHandler(),
                    copies.ITEM: copies.Handler(),
                }
            ),
            # In the background, a folder that cannot be made would be reported after minutes.
            async_options=ocp.AsyncOptions(
                timeout_secs=_LIMIT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, folder: Folder, state: Tree, facts: Facts) -> None:
        """Start a save; the arrays may be changed as soon as this returns.

        `outcome` must have returned the one before. Fails as that does.
        """
        assert self._save is None
        begin = time.monotonic()
        save, pinned = Save(folder, facts.step), None
        copied: Future[copies.Copies | None] = Future()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        content = facts.to_json()
        items = ocp.args.Composite(
            **{
                STATE: ocp.args.StandardSave(state, _chunks(state)),
                FACTS: ocp.args.JsonSave(content),
                copies.ITEM: copies.Save(
                    facts.step, content, functools.partial(copies.awaited_sums, shapes, copied)
                ),
            }
        )
        try:
            with reaching(folder.path), copies.tapped(state) as found:
                pinned = Pinned(folder.path)
                self._checkpointer.save(pinned.path / str(facts.step), args=items)
            copied.set_result(found)
        except Exception as error:
            save.error = pinned.named(error) if pinned else error
            copied.set_result(None)
        save.blocking_seconds = time.monotonic() - begin
        self._save = save
        self._thread = threading.Thread(
            target=self._finish, args=(save, begin, pinned), name="checkpoint"
        )
        self._thread.start()

    def refuse(self, save: Save) -> None:
        """Make a save that never started the next outcome."""
        assert self._save is None
        self._save = save

    def _finish(self, save: Save, begin: float, pinned: Pinned | None) -> None:
        is_primary = jax.process_index() == 0
        try:
            if save.error is None:
                with reaching(save.folder.path):
                    self._checkpointer.wait_until_finished()
                    self._check(save.folder)  # the folder is used by its name from here on
                    if is_primary:
                        save.num_bytes = seal(save.folder / save.step, save.step)
        except Exception as error:
            save.error = pinned.named(error) if pinned else error
        if pinned:
            pinned.close()
        save.seconds = time.monotonic() - begin
        if is_primary:
            self._tidy(save)

    def _tidy(self, save: Save) -> None:
        try:
            self._check(save.folder)
        except StorageError:  # reported elsewhere; the folder is left alone
            return
        for attempt in range(_ATTEMPTS):
            try:
                with reaching(save.folder.path):
                    if save.error is None:
                        self._then(save)
                    else:
                        self._take_back(save)
                return
            except (OSError, StorageError) as error:  # only costs space
                if attempt == _ATTEMPTS - 1:
                    reason = first_line(error)
                    _LOG.warning("%s: cannot be tidied up: %s", save.folder.path, reason)
                # Writes that had started when another one failed go on for a moment.
                time.sleep(_PAUSE_SECONDS)

    def _take_back(self, save: Save) -> None:
        """Delete what a failed save has left: unfinished files, or files that are wrong."""
        save.folder.clean()
        is_wrong = isinstance(save.error, NotSaved | NumbersError)
        if is_wrong and exists(save.folder / save.step):
            save.folder.remove(save.step)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def outcome(self, *, wait: bool) -> Save | None:
        """The save that has ended since the last call; None if there is none."""
        if self._thread is not None:
            if self.busy and not wait:
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
def ignore_orphans() -> None:
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
        return not any(words in message for words in _REPORTED_BY_US)

    sys.unraisablehook = hook
    for name in ("asyncio", "absl"):
        logging.getLogger(name).addFilter(is_wanted)
