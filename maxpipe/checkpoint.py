"""Checkpoints: arrays in network order, with config and data position beside them.

A thin adapter over Orbax, which makes saves asynchronous and commits them
atomically. It is given trees that are already in their saved form and knows neither
models nor pipelines, so that a checkpoint fits any layout. `list` and `show` read a
run folder without its devices.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxpipe.errors import ConfigError, StorageError

Tree = Any
FOLDER = "checkpoints"
"""Name of the folder inside a run's folder."""

_FORMAT = 1
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """One checkpoint's content."""

    step: int
    state: Tree
    config: dict[str, Any]
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: str | Path, *, every: int = 0, keep: int = 1, write: bool = True):
        self.directory = Path(run_dir).expanduser().absolute() / FOLDER
        self.every = every
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if write else None,
            create=write,
            cleanup_tmp_directories=write,
            read_only=not write,
            enable_async_checkpointing=write,
        )
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        except ValueError as error:
            raise _no_checkpoint(self.directory.parent) from error

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
        except (OSError, ValueError) as error:
            raise _unusable(self.directory, error) from error

    def restore(self, step: int, abstract: Tree | None = None) -> Restored:
        """Read one checkpoint, as arrays placed like `abstract`, by default as numpy arrays.

        Raises:
            StorageError: the checkpoint is incomplete or damaged.
        """
        try:
            if abstract is None:
                state = self._restore_numpy(step)
            else:
                items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
                state = self._manager.restore(step, args=items)["state"]
            facts = self.facts(step)
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"{self.directory / str(step)}: cannot be restored\n"
                f"  {_first_line(error)}\n"
                f"  Steps that are there: {', '.join(map(str, self.steps()))}. Move this step's "
                "folder away to go on from the one before."
            ) from error
        return Restored(step, state, facts["config"], facts["data"])

    def facts(self, step: int) -> dict[str, Any]:
        """Config and data position, without the arrays."""
        facts = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))
        return facts["facts"]

    def _restore_numpy(self, step: int) -> Tree:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            path = self.directory / str(step) / "state"
            layout = reader.metadata(path).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), layout)
            return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            StorageError: a save failed in the background.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise _unusable(self.directory, error) from error

    def close(self) -> None:
        """Wait for writing to end and let go of the folder."""
        self.wait()
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


def open_run(run_dir: str | Path) -> Checkpoints:
    """The checkpoints of a run that is only read.

    Raises:
        ConfigError: there are none.
    """
    if not (Path(run_dir).expanduser() / FOLDER).is_dir():
        raise _no_checkpoint(Path(run_dir))
    checkpoints = Checkpoints(run_dir, write=False)
    if checkpoints.latest() is None:
        raise _no_checkpoint(Path(run_dir))
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


def _no_checkpoint(run_dir: Path) -> ConfigError:
    return ConfigError.one(
        f"run folder {run_dir}",
        None,
        f"must hold a folder {FOLDER!r} with at least one complete checkpoint.",
        "Give the folder of a run, by default runs/<run.name>.",
    )


def _unusable(directory: Path, error: BaseException) -> StorageError:
    return StorageError(
        f"{directory}: cannot be written\n"
        f"  {_first_line(error)}\n"
        "  Free space or set run.dir to a folder that can be written, then start again: the "
        "run resumes from its newest complete checkpoint."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
