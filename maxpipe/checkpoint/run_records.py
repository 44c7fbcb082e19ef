"""Comparison of a run's records with its checkpoints: steps that were done, and are nowhere.

A run that was stopped before its first save starts at step 0 again. A run whose checkpoints were
lost must not: the user may bring them back.
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
    """Compares a folder of checkpoints, which is about to be made, with the run's records.

    Raises:
        StorageError: the folder is missing, and the run has done steps.
    """
    if in_bucket(run_dir) or in_bucket(folder) or exists(folder):
        return
    with contextlib.suppress(ConfigError):
        if os.path.isdir(os.path.join(find_checkpoint_home(run_dir), CHECKPOINTS_FOLDER)):
            return  # where `checkpoint.dir` led before: its error names that folder
    for name in (EVENTS_FILE, METRICS_FILE):
        if step := _last(Path(run_dir) / name, _Step)[0]:
            rule = f"{Path(run_dir) / name} has records up to step {step}"
            raise _lost_checkpoints_error(run_dir, folder, "is missing", rule)


def check_saved(run_dir: epath.PathLike, folder: epath.Path) -> None:
    """Compares a folder without checkpoints with the run's records.

    Raises:
        StorageError: the run has saved a checkpoint in this folder, or in an earlier one.
    """
    if in_bucket(run_dir):
        return
    events = Path(run_dir) / EVENTS_FILE
    step, saved_in = _last(events, _Saved)
    if step and _is_same(saved_in, folder):
        rule = f"{events} records that step {step} was saved there"
        raise _lost_checkpoints_error(run_dir, folder, "holds no checkpoint", rule)
    if step:
        rule = f"{events} records that step {step} was saved in {saved_in}"
        above = _setting(saved_in, run_dir)
        action = f"Set checkpoint.dir={above}, or copy that folder to {folder}."
        raise _lost_checkpoints_error(run_dir, folder, "holds no checkpoint", rule, action)


def _last(path: Path, kind: type[_Step] | type[_Saved]) -> tuple[int, str]:
    """Return the largest step of the records, 0 without any, and the folder it was saved in.

    Checkpoints of `checkpoint.local_dir` do not count: that disk may be lost with its machine.
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
    """Whether a recorded folder, which is empty in records of earlier releases, is this one."""
    return not saved_in or _real_path(saved_in) == _real_path(os.fspath(folder))


def _real_path(path: str) -> str:
    if not in_bucket(path):
        return os.path.realpath(path)
    bucket, _, rest = path.partition("://")
    return f"{bucket}://{os.path.normpath(rest)}"


def _setting(saved_in: str, run_dir: epath.PathLike) -> str:
    """Return the value of `checkpoint.dir` that leads to a recorded folder."""
    home = os.path.dirname(saved_in.rstrip("/"))
    return "''" if _real_path(home) == _real_path(os.fspath(run_dir)) else os.path.dirname(home)


def _lost_checkpoints_error(
    run_dir: epath.PathLike, folder: epath.Path, what: str, rule: str, action: str = ""
) -> StorageError:
    action = action or "Bring it back, or mount what holds it."
    return StorageError(
        f"{folder}: {what}\n"
        f"  {rule}. Nothing was changed.\n"
        f"  {action} To start over, delete {os.fspath(run_dir)}, or set run.name to a new name."
    )
