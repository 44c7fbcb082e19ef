"""Check the records of a run for lost checkpoints.

A run that stopped before its first save restarts at step 0. A run whose checkpoints were lost does
not restart, because the user may be able to restore the checkpoints.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from etils import epath

from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, exists, find_checkpoint_home, in_bucket
from maxpipe.config.bundled_configs import EVENTS_FILE, METRICS_FILE
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.files import read_json_lines


class _Step(TypedDict):
    """A record of `events.jsonl` or `metrics.jsonl`."""

    step: int


class _Saved(TypedDict):
    event: Literal["checkpoint"]
    step: int
    folder: NotRequired[str]


def check_present(run_dir: epath.PathLike, folder: epath.Path) -> None:
    """Compare the run's records with a checkpoint folder before the folder is created.

    Raises:
        StorageError: the folder does not exist, but the run has recorded steps.
    """
    if in_bucket(run_dir) or in_bucket(folder) or exists(folder):
        return
    with contextlib.suppress(ConfigError):
        if os.path.isdir(os.path.join(find_checkpoint_home(run_dir), CHECKPOINTS_FOLDER)):
            return  # a later check reports the previous `checkpoint.dir`
    for name in (EVENTS_FILE, METRICS_FILE):
        if step := _last(Path(run_dir) / name, _Step)[0]:
            rule = f"{Path(run_dir) / name} has records up to step {step}"
            raise _lost_checkpoints_error(run_dir, folder, "is missing", rule)


def check_saved(run_dir: epath.PathLike, folder: epath.Path) -> None:
    """Compare the run's records with a folder that contains no checkpoints.

    Raises:
        StorageError: the run saved a checkpoint in this folder or in a previous folder.
    """
    if in_bucket(run_dir):
        return
    events = Path(run_dir) / EVENTS_FILE
    step, saved_in = _last(events, _Saved)
    if step and _is_same(saved_in, folder):
        rule = f"{events} records that step {step} was saved there"
        raise _lost_checkpoints_error(run_dir, folder, "contains no checkpoint", rule)
    if step:
        rule = f"{events} records that step {step} was saved in {saved_in}"
        above = _setting(saved_in, run_dir)
        action = f"Set checkpoint.dir={above}, or copy that folder to {folder}."
        raise _lost_checkpoints_error(run_dir, folder, "contains no checkpoint", rule, action)


def _last(path: Path, kind: type[_Step] | type[_Saved]) -> tuple[int, str]:
    """Return the largest recorded step (0 if there are no records) and its checkpoint folder.

    Checkpoints in `checkpoint.local_dir` do not count, because a local disk may be lost.
    """
    last, where = 0, ""
    with contextlib.suppress(OSError):
        for each in read_json_lines(path, kind):
            saved_in = each.get("folder", "")
            is_durable = (
                not saved_in or os.path.basename(saved_in.rstrip("/")) == CHECKPOINTS_FOLDER
            )
            if is_durable and each["step"] >= last:
                last, where = each["step"], saved_in
    return last, where


def _is_same(saved_in: str, folder: epath.Path) -> bool:
    """Return whether `folder` is the recorded folder, which earlier releases did not record."""
    return not saved_in or _real_path(saved_in) == _real_path(os.fspath(folder))


def _real_path(path: str) -> str:
    if not in_bucket(path):
        return os.path.realpath(path)
    bucket, _, rest = path.partition("://")
    return f"{bucket}://{os.path.normpath(rest)}"


def _setting(saved_in: str, run_dir: epath.PathLike) -> str:
    """Return the value of `checkpoint.dir` that resolves to a recorded folder."""
    home = os.path.dirname(saved_in.rstrip("/"))
    return "''" if _real_path(home) == _real_path(os.fspath(run_dir)) else os.path.dirname(home)


def _lost_checkpoints_error(
    run_dir: epath.PathLike, folder: epath.Path, what: str, rule: str, action: str = ""
) -> StorageError:
    action = action or "Restore the folder, or mount the disk that contains it."
    return StorageError(
        f"{folder}: {what}\n"
        f"  {rule}. Nothing was changed.\n"
        f"  {action} To start over, delete {os.fspath(run_dir)}, or set run.name to a new name."
    )
