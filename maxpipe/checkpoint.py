"""Checkpoints: arrays in network order, with config and data position beside them.

A thin adapter over Orbax, which makes saves asynchronous and commits them
atomically. It is given trees that are already in their saved form and knows neither
models nor pipelines, so that a checkpoint fits any layout. `list` and `show` read a
run folder without its devices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxpipe import runtime
from maxpipe.errors import ConfigError, StorageError

Tree = Any
FOLDER = "checkpoints"
"""Name of the folder inside a run's folder."""

_FORMAT = 1

# What orbax and tensorstore raise for a folder or file that is not as it should be.
_FAULTS = (OSError, ValueError, KeyError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Restored:
    """One checkpoint's content."""

    step: int
    state: Tree
    config: dict[str, Any]
    data: dict[str, Any]


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Never: jax's preemption counter belongs to the loop, and asking changes it."""
        return False


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: str | Path, *, every: int = 0, keep: int = 1, write: bool = True):
        self.directory = Path(run_dir).expanduser().absolute() / FOLDER
        self.every = every
        # A reader does not ask for orbax's `read_only`, which talks about it at length.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if write else None,
            create=write,
            cleanup_tmp_directories=write,
            enable_async_checkpointing=write,
        )
        _ignore_orphans()
        handlers = {"state": ocp.StandardCheckpointHandler(), "facts": ocp.JsonCheckpointHandler()}
        try:
            if write:  # to learn now, not at the first save, that nothing can be written
                self.directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.directory).close()
            self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
        except _FAULTS as error:
            raise _unusable(self.directory, error) from error

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Tree, config: Mapping[str, Any], data: Mapping) -> None:
        """Start writing; the arrays may be changed as soon as this returns.

        Raises:
            StorageError: this save could not start, or an earlier one failed.
        """
        facts = {"format": _FORMAT, "step": step, "config": dict(config), "data": dict(data)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts)
        )
        try:
            if not self._manager.save(step, args=items, force=True):
                raise StorageError(
                    f"{self.directory}: step {step} was not saved\n"
                    f"  a checkpoint of step {self.latest()} is there already.\n"
                    "  Set run.name to a new name, or move the folder away."
                )
        except _FAULTS as error:
            raise _unusable(self.directory, error) from error

    def restore(self, step: int, abstract: Tree | None = None) -> Restored:
        """Read one checkpoint, as arrays placed like `abstract`, by default as numpy arrays.

        Raises:
            StorageError: the checkpoint is incomplete or damaged.
        """
        with self._explained(step):
            if abstract is None:
                saved = self._manager.item_metadata(step)["state"]
                abstract = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved.tree)
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            state = self._manager.restore(step, args=items)["state"]
        facts = self.facts(step)
        return Restored(step, state, facts["config"], facts["data"])

    def facts(self, step: int) -> dict[str, Any]:
        """Config and data position, without the arrays.

        Raises:
            StorageError: the checkpoint is incomplete, damaged, or of another release.
        """
        with self._explained(step):
            items = ocp.args.Composite(facts=ocp.args.JsonRestore())
            facts = self._manager.restore(step, args=items)["facts"]
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']}: this release reads {_FORMAT} only")
            return facts

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax raises that very class for damaged arrays
            older = [str(other) for other in self.steps() if other < step]
            raise StorageError(
                f"{self.directory / str(step)}: cannot be restored\n"
                f"  {_first_line(error)}\n"
                + (
                    f"  Move this folder away to go on from step {older[-1]}."
                    if older
                    else "  It is the oldest: bring its files back, or move it away and start anew."
                )
            ) from error

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            StorageError: a save failed in the background.
        """
        try:
            self._manager.wait_until_finished()
        except _FAULTS as error:
            raise _unusable(self.directory, error) from error

    def close(self) -> None:
        """Wait for writing to end and let go of the folder."""
        try:
            self.wait()
        finally:
            self._manager.close()

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
            # The error that brought us here says more.
            if error is None:
                raise


def open_run(run_dir: str | Path, where: str = "") -> Checkpoints:
    """The checkpoints of a run that is only read. `where` names what gave the folder.

    Raises:
        ConfigError: there are none.
    """
    directory = Path(run_dir).expanduser() / FOLDER
    checkpoints = Checkpoints(run_dir, write=False) if directory.is_dir() else None
    if checkpoints is None or checkpoints.latest() is None:
        raise ConfigError.one(
            where or f"run folder {run_dir}",
            run_dir if where else None,
            f"must be a folder with a folder {FOLDER!r} in which one checkpoint is complete.",
            "Give the folder of a run, by default runs/<run.name>.",
        )
    return checkpoints


def leaves(tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """Dotted name and array of every leaf, in the order of their names."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found]
    for name, leaf in sorted(named):
        yield name, np.asarray(leaf)


def digest(tree: Tree) -> str:
    """SHA-256 over names, types, shapes and bytes of all leaves.

    On trees in their saved form it does not depend on mesh, stages or schedule.
    """
    total = hashlib.sha256()
    for name, array in leaves(tree):
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def print_list(run_dir: str) -> None:
    """One line per checkpoint: step, time, size."""
    runtime.use_no_devices()
    checkpoints = open_run(run_dir)
    print(f"{'step':>10}  {'saved':19}  {'size':>10}")
    for step in checkpoints.steps():
        folder = checkpoints.directory / str(step)
        saved = datetime.fromtimestamp(folder.stat().st_mtime)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{step:>10}  {saved:%Y-%m-%d %H:%M:%S}  {size / 2**20:>6.1f} MiB")


def print_show(run_dir: str, step: int | None) -> None:
    """The arrays of one checkpoint, and digests that do not depend on the layout.

    Raises:
        ConfigError: there is no checkpoint of that step.
    """
    runtime.use_no_devices()
    checkpoints = open_run(run_dir)
    steps = checkpoints.steps()
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError.one(
            "command line: --step",
            step,
            f"must be one of the saved steps: {', '.join(map(str, steps))}.",
            f"Use --step {steps[-1]}, or leave it out for the newest.",
        )
    found = checkpoints.restore(step)
    for name, array in leaves(found.state):
        print(f"{name:44} {array.dtype!s:9} {' x '.join(map(str, array.shape)) or 'scalar'}")
    count = sum(array.size for _, array in leaves(found.state["params"]))
    position = json.dumps(found.data, sort_keys=True)
    print(f"\nstep       {step}\nparameters {count:,}")
    for name, value in (
        ("params", digest(found.state["params"])),
        ("optimizer", digest(found.state["optimizer"])),
        ("data", hashlib.sha256(position.encode()).hexdigest()),
        ("all", hashlib.sha256((digest(found.state) + position).encode()).hexdigest()),
    ):
        print(f"sha256     {name:10} {value}")


def _unusable(directory: Path, error: BaseException) -> StorageError:
    return StorageError(
        f"{directory}: cannot be written\n"
        f"  {_first_line(error)}\n"
        "  Free space or set run.dir to a folder that can be written, then start again: the "
        "run resumes from its newest complete checkpoint."
    )


@functools.cache
def _ignore_orphans() -> None:
    """Keep quiet about reads and writes that were under way when orbax raised for another one.

    They end in a closed event loop, or are never waited for, and each would be a traceback.
    """
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error, source = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not is_late and not (source and "orbax" in source.co_filename):
            report(unraisable)

    def is_wanted(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(is_wanted)


def _first_line(error: BaseException) -> str:
    """What went wrong first: orbax wraps the reason in its own words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
