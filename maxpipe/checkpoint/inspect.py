"""The content of a run's checkpoints, as text. Only `pruned` and `deleted` change a run.

Needs no devices.
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
from maxpipe.checkpoint.contents import read_expected_digests, verify_arrays
from maxpipe.checkpoint.digest_item import diff_trees, iter_named_arrays, tree_digest
from maxpipe.checkpoint.folder import (
    BestMetric,
    CheckpointFolder,
    CheckpointInfo,
    RetentionRules,
    local_time,
    select_retained,
)
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import (
    find_best_step,
    open_address,
    open_run,
    read_best_metric,
    resolve_step_on_all,
)
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, DamagedError, exists, files, in_bucket
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.files import expand_path


class CheckpointListEntry(TypedDict):
    """One checkpoint; `kept` is empty if no rule keeps it, or there are no rules."""

    step: int
    saved: str
    """Time in ISO 8601, UTC."""
    bytes: int
    manifest: bool
    metrics: dict[str, float]
    kept: str
    path: str


class CheckpointList(TypedDict):
    """The content of a folder of checkpoints, oldest first."""

    folder: str
    checkpoints: list[CheckpointListEntry]
    damaged: list[str]
    """Names of quarantined checkpoints, which are not used."""
    unfinished: list[str]


def list_checkpoints(address: Address, rules: RetentionRules | None) -> CheckpointList:
    """The checkpoints of a run as plain values."""
    folder = open_address(address).durable
    return {
        "folder": str(folder.path),
        "checkpoints": [
            {
                "step": one.step,
                "saved": datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
                "bytes": size,
                "manifest": manifest.has_manifest(folder / one.step),
                "metrics": _metrics(folder, one.step),
                "kept": reason,
                "path": str(folder / one.step),
            }
            for one, size, reason in _saved(folder, rules)
        ],
        "damaged": folder.quarantined(),
        "unfinished": folder.unfinished(),
    }


def format_checkpoint_list(address: Address, rules: RetentionRules | None) -> Iterator[str]:
    """One line per checkpoint: step, time, size, manifest, loss, and why it stays."""
    folder = open_address(address).durable
    metric = read_best_metric(folder).metric
    name = metric.removeprefix("eval/")
    width = max(8, len(name))
    yield f"{'step':>10}  {'saved':19}  {'size':>10}  manifest    {name:>{width}}" + (
        "  kept" if rules else ""
    )
    for one, size, reason in _saved(folder, rules):
        value = one.metrics.get(metric)
        loss = "" if value is None else f"{value:.4f}"
        has = "yes" if manifest.has_manifest(folder / one.step) else "no"
        line = (
            f"{one.step:>10}  {local_time(one.time)}  {size / 2**20:>6.1f} MiB  "
            f"{has:8}    {loss:>{width}}  {reason}"
        )
        yield line.rstrip()
    for name in folder.quarantined():
        yield f"{name}: was found damaged and is not used"
    for name in folder.unfinished():
        yield f"{name}: unfinished"
    yield from folder.describe_incomplete()


def _saved(
    folder: CheckpointFolder, rules: RetentionRules | None
) -> Iterator[tuple[CheckpointInfo, int, str]]:
    """Each checkpoint with its bytes, and why it stays."""
    saved = [one for step in folder.steps() if (one := folder.read_info(step))]
    reasons = select_retained(saved, rules) if rules else {}
    for one in saved:
        if (size := _num_bytes(folder / one.step)) is not None:  # else its run is deleting it
            yield one, size, reasons.get(one.step, "")


def _metrics(folder: CheckpointFolder, step: int) -> dict[str, float]:
    try:
        return dict(folder.read_metadata(step).metrics or {})
    except (DamagedError, StorageError, FileNotFoundError):
        return {}


def describe_checkpoint(address: Address) -> Iterator[str]:
    """The arrays of one checkpoint, and digests that do not depend on the layout.

    Raises:
        ConfigError: there is no checkpoint of that step.
    """
    checkpoints = open_address(address)
    found = checkpoints.restore(resolve_step_on_all(checkpoints, address))
    for name, array in iter_named_arrays(found.state):
        yield f"{name:44} {array.dtype!s:9} {' x '.join(map(str, array.shape)) or 'scalar'}"
    count = sum(array.size for _, array in iter_named_arrays(found.state["params"]))
    position = json.dumps(found.metadata.data, sort_keys=True)
    yield f"\nstep       {found.step}"
    yield f"saved      {local_time(found.metadata.time)}"
    for tag, value in (found.metadata.metrics or {}).items():
        yield f"{tag:10} {value:.6g}"
    yield f"parameters {count:,}"
    for name, value in (
        ("params", tree_digest(found.state["params"])),
        ("optimizer", tree_digest(found.state["optimizer"])),
        ("data", hashlib.sha256(position.encode()).hexdigest()),
        ("all", hashlib.sha256((tree_digest(found.state) + position).encode()).hexdigest()),
    ):
        yield f"sha256     {name:10} {value}"


def verify_checkpoints(address: Address) -> Iterator[str]:
    """One line per checkpoint, or for the one that is named, after reading all its bytes.

    Raises:
        StorageError: at the end, when one is damaged.
    """
    checkpoints, damaged = open_address(address), []
    folder = checkpoints.durable
    steps = checkpoints.steps()
    if address.step is not None:
        steps = [resolve_step_on_all(checkpoints, address)]
    for one in steps:
        path = folder / one
        wrong, sealed = _faults(folder, one)
        if (size := _num_bytes(path)) is None or one not in folder.steps():
            yield f"{one:>10}  was deleted meanwhile"
        elif wrong:
            damaged.append(f"step {one}: {wrong[0]}")
            yield from (f"{one:>10}  damaged: {line}" for line in wrong)
        elif not sealed:
            yield f"{one:>10}  unknown: it has no {manifest.FILE}"
        else:
            yield f"{one:>10}  as it was saved, {size / 2**20:.1f} MiB"
    if damaged:
        raise StorageError(
            f"{folder.path}: {len(damaged)} of {len(steps)} damaged\n"
            f"  {'; '.join(damaged)}.\n"
            "  Bring the files back. Or start the run: it resumes from the newest checkpoint that "
            "is as it was saved."
        )


def _faults(folder: CheckpointFolder, step: int) -> tuple[list[str], bool]:
    """What is wrong with a step's files, arrays and facts, and whether it has a manifest."""
    path = folder / step
    if not exists(path):
        return [], False
    wrong = manifest.verify_files(path, step) if (sealed := manifest.has_manifest(path)) else []
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
    return wrong, sealed


def prune_checkpoints(
    run_dir: str, rules: RetentionRules, *, dry_run: bool, elsewhere: bool = False
) -> Iterator[str]:
    """Deletes what no rule keeps, one line per checkpoint. The newest intact one stays.

    Raises:
        ConfigError: the checkpoints are not in the run's own folder, without `elsewhere`.
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
    """Checks that the checkpoints to delete are in the run's own folder.

    A folder from another user may lead, by its config.yml or by a link, to the checkpoints
    of another run.

    Raises:
        ConfigError: they are not.
    """
    if in_bucket(run_dir):
        return
    own = os.path.join(expand_path(run_dir), CHECKPOINTS_FOLDER)
    real = folder.path if in_bucket(folder.path) else os.path.realpath(folder.path)
    if os.fspath(real) != os.path.join(os.path.realpath(expand_path(run_dir)), CHECKPOINTS_FOLDER):
        by = "is a link" if os.path.islink(own) else "its config.yml has checkpoint.dir"
        raise ConfigError.one(
            f"run folder {run_dir}",
            None,
            f"must hold the checkpoints that are to be deleted; {by}, and they are in {real}.",
            "Check which run they belong to with `maxpipe checkpoints list`, then add --elsewhere.",
        )


def _prune(folder: CheckpointFolder, rules: RetentionRules, *, dry_run: bool) -> Iterator[str]:
    saved = [one for step in folder.steps() if (one := folder.read_info(step))]
    reasons = select_retained(saved, rules)
    newest = next((step for step in reversed(folder.steps()) if _is_right(folder, step)), None)
    if newest is not None:
        reasons.setdefault(newest, "newest that is as it was saved")
    freed = 0
    for one in saved:
        if one.step in reasons:
            yield f"{one.step:>10}  stays: {reasons[one.step]}"
            continue
        freed += _num_bytes(folder / one.step) or 0
        if not dry_run:
            folder.remove(one.step)
        yield f"{one.step:>10}  {'would be deleted' if dry_run else 'deleted'}"
    yield f"{freed / 2**20:.1f} MiB {'would be freed' if dry_run else 'freed'}"


def delete_checkpoint(address: Address, *, force: bool, elsewhere: bool = False) -> Iterator[str]:
    """Deletes one checkpoint, but the newest intact one only with `force`.

    Raises:
        ConfigError: no step is named, it is the newest intact one, or it is not in the run's own
            folder, without `elsewhere`.
        StorageError: a run is using the folder.
    """
    if address.step is None:
        raise address.error("names no step to delete.", f"Give {address.given}@STEP.")
    checkpoints = open_address(address)
    folder = checkpoints.durable
    if not elsewhere:
        check_own(address.parent or address.run_dir, folder)
    with RunLock(folder.path.parent, to_free=True):
        step = resolve_step_on_all(checkpoints, address)
        newer = [each for each in folder.steps() if each > step]
        is_good = not manifest.has_manifest(folder / step) or _is_right(folder, step)
        if not force and is_good and not any(_is_right(folder, each) for each in reversed(newer)):
            only = "only" if len(folder.steps()) == 1 else "newest"
            raise address.error(
                f"is the {only} checkpoint that is as it was saved: without it the run "
                + ("begins again." if only == "only" else "loses steps."),
                "Delete it with --force if that is what you want.",
            )
        size = _num_bytes(folder / step) or 0
        folder.remove(step)
    yield f"{step:>10}  deleted, {size / 2**20:.1f} MiB freed"


def find_best_checkpoint(
    address: Address, better: BestMetric | None
) -> tuple[str, int, str, float]:
    """Address, step, metric and value of the best checkpoint, by default as its run compares them.

    Raises:
        ConfigError: no checkpoint has it.
    """
    folder = open_address(address).durable
    better = better or read_best_metric(folder)
    step, value = find_best_step(folder, address, better)
    return address.address_at(step), step, better.metric, value


def best_metric_of_run(run_dir: str) -> BestMetric:
    """Which of a run's checkpoints is better.

    Raises:
        ConfigError: there are none.
    """
    return read_best_metric(open_run(run_dir).durable)


def diff_checkpoints(first: Address, second: Address) -> list[str]:
    """The differences between two checkpoints; empty if they are the same."""
    found = []
    for address in (first, second):
        checkpoints = open_address(address)
        found.append(checkpoints.restore(resolve_step_on_all(checkpoints, address)))
    left, right = found
    lines = diff_trees(left.state, right.state)
    for words, a, b in (
        ("config", left.facts.config, right.facts.config),
        ("data", left.facts.data, right.facts.data),
    ):
        before, now = dict(_flat(a)), dict(_flat(b))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                lines.append(f"{words} {key}  {before.get(key)}, and {now.get(key)}")
    return lines


def _is_right(folder: CheckpointFolder, step: int) -> bool:
    """Whether all bytes and arrays of a checkpoint are known to be those that were saved."""
    wrong, sealed = _faults(folder, step)
    return sealed and not wrong


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _num_bytes(folder: epath.Path) -> int | None:
    """Of all files; None of a folder that is being deleted."""
    try:
        return sum(files(folder).values())
    except FileNotFoundError:
        return None
