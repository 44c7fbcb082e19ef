"""List, describe, verify, compare, prune and delete a run's checkpoints.

Only `prune_checkpoints` and `delete_checkpoint` change files. No function requires an accelerator.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypedDict

from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.digests import diff_trees, iter_named_arrays, tree_digest
from maxpipe.checkpoint.folder import CheckpointFolder, local_time
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import (
    find_best_step,
    open_address,
    open_address_folder,
    open_folder,
    open_run,
    read_best_metric,
    resolve_step_on_all,
)
from maxpipe.checkpoint.manifest import read_expected_digests, verify_arrays
from maxpipe.checkpoint.retention import (
    BestMetric,
    CheckpointInfo,
    RetentionRules,
    select_retained,
)
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, DamagedError, exists, files, in_bucket
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path


class CheckpointListEntry(TypedDict):
    """Entry for one checkpoint in a list of checkpoints. `kept` is the reason to retain the
    checkpoint, or empty if no rule matches.
    """

    step: int
    saved: str
    """Time at which the checkpoint was saved, in UTC (ISO 8601)."""
    bytes: int
    manifest: bool
    metrics: dict[str, float]
    kept: str
    path: str


class CheckpointList(TypedDict):
    """The checkpoints of a folder, oldest first."""

    folder: str
    checkpoints: list[CheckpointListEntry]
    damaged: list[str]
    """Names of quarantined checkpoints."""
    unfinished: list[str]


def list_checkpoints(address: Address, rules: RetentionRules | None) -> CheckpointList:
    """Return the checkpoints of a run as JSON-compatible data."""
    folder = open_address_folder(address)
    return {
        "folder": str(folder.path),
        "checkpoints": [
            {
                "step": info.step,
                "saved": datetime.fromtimestamp(info.time, UTC).isoformat(timespec="seconds"),
                "bytes": size,
                "manifest": manifest.has_manifest(folder / info.step),
                "metrics": _metrics(folder, info.step),
                "kept": reason,
                "path": str(folder / info.step),
            }
            for info, size, reason in _saved(folder, rules)
        ],
        "damaged": folder.quarantined(),
        "unfinished": folder.unfinished(),
    }


def format_checkpoint_list(address: Address, rules: RetentionRules | None) -> Iterator[str]:
    """Yield one line per checkpoint: step, time, size, manifest, metric and reason to keep it."""
    folder = open_address_folder(address)
    metric = read_best_metric(folder).metric
    name = metric.removeprefix("eval/")
    width = max(8, len(name))
    yield f"{'step':>10}  {'saved':19}  {'size':>10}  manifest    {name:>{width}}" + (
        "  kept" if rules else ""
    )
    for info, size, reason in _saved(folder, rules):
        value = info.metrics.get(metric)
        text = "" if value is None else f"{value:.4f}"
        has = "yes" if manifest.has_manifest(folder / info.step) else "no"
        line = f"{info.step:>10}  {local_time(info.time)}  {size / 2**20:>6.1f} MiB  "
        yield f"{line}{has:8}    {text:>{width}}  {reason}".rstrip()
    for name in folder.quarantined():
        yield f"{name}: damaged, not used"
    for name in folder.unfinished():
        yield f"{name}: unfinished"
    yield from folder.describe_incomplete()


def _saved(
    folder: CheckpointFolder, rules: RetentionRules | None
) -> Iterator[tuple[CheckpointInfo, int, str]]:
    """Yield every checkpoint with its size in bytes and the reason to keep it."""
    saved = [info for step in folder.steps() if (info := folder.read_info(step))]
    reasons = select_retained(saved, rules) if rules else {}
    for info in saved:
        # The size is None if the run is currently deleting the checkpoint.
        if (size := _num_bytes(folder / info.step)) is not None:
            yield info, size, reasons.get(info.step, "")


def _metrics(folder: CheckpointFolder, step: int) -> dict[str, float]:
    try:
        return dict(folder.read_metadata(step).metrics or {})
    except (DamagedError, StorageError, FileNotFoundError):
        return {}


def describe_checkpoint(address: Address) -> Iterator[str]:
    """Yield lines with the arrays, save time, metrics and digests of a checkpoint.

    Raises:
        ConfigError: the step has no checkpoint.
    """
    checkpoints = open_address(address)
    restored = checkpoints.restore(resolve_step_on_all(checkpoints, address))
    for name, array in iter_named_arrays(restored.state):
        yield f"{name:44} {array.dtype!s:9} {' x '.join(map(str, array.shape)) or 'scalar'}"
    count = sum(array.size for _, array in iter_named_arrays(restored.state["params"]))
    position = json.dumps(restored.metadata.data, sort_keys=True)
    yield f"\nstep       {restored.step}"
    yield f"saved      {local_time(restored.metadata.time)}"
    for tag, value in (restored.metadata.metrics or {}).items():
        yield f"{tag:10} {value:.6g}"
    yield f"parameters {count:,}"
    for name, value in (
        ("params", tree_digest(restored.state["params"])),
        ("optimizer", tree_digest(restored.state["optimizer"])),
        ("data", hashlib.sha256(position.encode()).hexdigest()),
        ("all", hashlib.sha256((tree_digest(restored.state) + position).encode()).hexdigest()),
    ):
        yield f"sha256     {name:10} {value}"


def verify_checkpoints(address: Address) -> Iterator[str]:
    """Verify every file of all checkpoints or of the addressed step, and yield one result per step.

    Raises:
        StorageError: a checkpoint is damaged; raised after all steps have been checked.
    """
    checkpoints, damaged = open_address(address), []
    folder = checkpoints.durable
    steps = checkpoints.steps()
    if address.step is not None:
        steps = [resolve_step_on_all(checkpoints, address)]
    for step in steps:
        wrong, has_manifest = _faults(folder, step)
        if (size := _num_bytes(folder / step)) is None or step not in folder.steps():
            yield f"{step:>10}  was deleted during verification"
        elif wrong:
            damaged.append(f"step {step}: {wrong[0]}")
            yield from (f"{step:>10}  damaged: {line}" for line in wrong)
        elif not has_manifest:
            yield f"{step:>10}  unknown: there is no {manifest.FILE}"
        else:
            yield f"{step:>10}  intact, {size / 2**20:.1f} MiB"
    if damaged:
        raise StorageError(
            Code.CKPT_DAMAGED,
            f"{folder.path}: {len(damaged)} of {len(steps)} checkpoints are damaged\n"
            f"  {'; '.join(damaged)}.\n"
            "  Restore the files from a backup, or start the run: it resumes from the newest "
            "intact checkpoint.",
        )


def _faults(folder: CheckpointFolder, step: int) -> tuple[list[str], bool]:
    """Return the problems found in a step's files, arrays and metadata, and whether a manifest
    exists.
    """
    path = folder / step
    if not exists(path):
        return [], False
    has_manifest = manifest.has_manifest(path)
    wrong = manifest.verify_files(path, step) if has_manifest else []
    try:
        folder.read_metadata(step)
        wrong += [
            line
            for line in verify_arrays(path, step, read_expected_digests(path, step))
            if line not in wrong
        ]
    except DamagedError as damage:
        if str(damage) not in wrong:
            wrong.append(str(damage))
    return wrong, has_manifest


def prune_checkpoints(
    run_dir: str, rules: RetentionRules, *, dry_run: bool, elsewhere: bool = False
) -> Iterator[str]:
    """Delete the checkpoints that no retention rule keeps, and yield one line per checkpoint. The
    newest intact checkpoint is always kept.

    Raises:
        ConfigError: the checkpoints are outside the run folder and `elsewhere` is not set.
        StorageError: a run is using the folder.
    """
    folder = open_run(run_dir).durable
    if not elsewhere:
        check_own(run_dir, folder)
    if dry_run:
        yield from _prune(folder, rules, dry_run=True)
    else:
        with RunLock(folder.path.parent, to_free=True):
            yield from _prune(folder, rules, dry_run=False)


def check_own(run_dir: str, folder: CheckpointFolder) -> None:
    """Check that the checkpoints to delete are inside the run folder.

    A run folder's config.yml, or a link inside the folder, may refer to another run's checkpoints.

    Raises:
        ConfigError: the checkpoints are outside the run folder.
    """
    if in_bucket(run_dir):
        return
    own = os.path.join(expand_path(run_dir), CHECKPOINTS_FOLDER)
    real = folder.path if in_bucket(folder.path) else os.path.realpath(folder.path)
    if os.fspath(real) != os.path.join(os.path.realpath(expand_path(run_dir)), CHECKPOINTS_FOLDER):
        by = "its checkpoint folder is a link" if os.path.islink(own) else "checkpoint.dir is set"
        raise ConfigError.one(
            Code.CKPT_MISSING,
            f"run folder {run_dir}",
            None,
            f"must contain the checkpoints to delete; {by}, and the checkpoints are in {real}.",
            "Review them with `maxpipe checkpoints list`, then add --elsewhere.",
        )


def _prune(folder: CheckpointFolder, rules: RetentionRules, *, dry_run: bool) -> Iterator[str]:
    saved = [info for step in folder.steps() if (info := folder.read_info(step))]
    reasons = select_retained(saved, rules)
    newest = next((step for step in reversed(folder.steps()) if _is_right(folder, step)), None)
    if newest is not None:
        reasons.setdefault(newest, "newest intact checkpoint")
    freed = 0
    for info in saved:
        if info.step in reasons:
            yield f"{info.step:>10}  kept: {reasons[info.step]}"
            continue
        freed += _num_bytes(folder / info.step) or 0
        if not dry_run:
            folder.remove(info.step)
        yield f"{info.step:>10}  {'would be deleted' if dry_run else 'deleted'}"
    yield f"{freed / 2**20:.1f} MiB {'would be freed' if dry_run else 'freed'}"


def delete_checkpoint(address: Address, *, force: bool, elsewhere: bool = False) -> Iterator[str]:
    """Delete one checkpoint; the newest intact checkpoint requires `force`.

    Raises:
        ConfigError: the address has no step; or the step is the newest intact checkpoint and
            `force` is not set; or the checkpoint is outside the run folder and `elsewhere` is not
            set.
        StorageError: a run is using the folder.
    """
    if address.step is None:
        raise address.error("must name the step to delete.", f"Give {address.given}@STEP.")
    checkpoints = open_address(address)
    folder = checkpoints.durable
    if not elsewhere:
        check_own(address.parent or address.run_dir, folder)
    with RunLock(folder.path.parent, to_free=True):
        step = resolve_step_on_all(checkpoints, address)
        newer = [other for other in folder.steps() if other > step]
        is_good = not manifest.has_manifest(folder / step) or _is_right(folder, step)
        if not force and is_good and not any(_is_right(folder, other) for other in reversed(newer)):
            only = "only" if len(folder.steps()) == 1 else "newest"
            raise address.error(
                f"is the {only} intact checkpoint; without it, the run "
                + ("restarts at step 0." if only == "only" else "resumes from an earlier step."),
                "Add --force to delete it anyway.",
            )
        size = _num_bytes(folder / step) or 0
        folder.remove(step)
    yield f"{step:>10}  deleted, {size / 2**20:.1f} MiB freed"


def find_best_checkpoint(
    address: Address, better: BestMetric | None
) -> tuple[str, int, str, float]:
    """Return the address, step, metric name and metric value of the best checkpoint.

    The default metric is the run's `checkpoint.best_metric`.

    Raises:
        ConfigError: no checkpoint has the metric.
    """
    folder = open_address_folder(address)
    better = better or read_best_metric(folder)
    step, value = find_best_step(folder, address, better)
    return address.address_at(step), step, better.metric, value


def best_metric_of_run(run_dir: str) -> BestMetric:
    """Return the metric that ranks a run's checkpoints.

    Raises:
        ConfigError: the run has no checkpoints.
    """
    return read_best_metric(open_folder(run_dir))


def diff_checkpoints(first: Address, second: Address) -> list[str]:
    """Return the differences between two checkpoints; empty if they are equal."""
    restored = []
    for address in (first, second):
        checkpoints = open_address(address)
        restored.append(checkpoints.restore(resolve_step_on_all(checkpoints, address)))
    left, right = restored
    lines = diff_trees(left.state, right.state)
    for section in ("config", "data"):
        before = dict(_flat(getattr(left.metadata, section)))
        now = dict(_flat(getattr(right.metadata, section)))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                lines.append(
                    f"{section} {key}  {before.get(key)} in the first checkpoint, "
                    f"{now.get(key)} in the second"
                )
    return lines


def _is_right(folder: CheckpointFolder, step: int) -> bool:
    """Return whether a checkpoint has a manifest that matches all of its files and arrays."""
    wrong, has_manifest = _faults(folder, step)
    return has_manifest and not wrong


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _num_bytes(folder: epath.Path) -> int | None:
    """Return the total size of all files in bytes, or None if the folder is being deleted."""
    try:
        return sum(files(folder).values())
    except FileNotFoundError:
        return None
