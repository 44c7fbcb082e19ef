"""What is in a run's checkpoints, as text. Nothing here changes a run, but for `prune`.

Needs none of the run's devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.contents import faults, recorded
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.folder import Folder, local_time
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import Checkpoints, open_run
from maxpipe.checkpoint.place import exists, files
from maxpipe.checkpoint.retention import Rules, kept
from maxpipe.checkpoint.trees import differences, digest, leaves
from maxpipe.errors import ConfigError, StorageError


def listed(run_dir: str, rules: Rules | None) -> Iterator[str]:
    """One line per checkpoint: step, time, size, manifest, loss, and why it stays."""
    folder = open_run(run_dir).durable
    saved = [one for step in folder.steps() if (one := folder.saved(step))]
    reasons = kept(saved, rules) if rules else {}
    yield f"{'step':>10}  {'saved':19}  {'size':>10}  manifest    {'loss':>8}" + (
        "  kept" if rules else ""
    )
    for one in saved:
        path = folder / one.step
        if (size := _num_bytes(path)) is None:
            continue  # its run deletes it
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        has = "yes" if manifest.is_in(path) else "no"
        line = (
            f"{one.step:>10}  {local_time(one.time)}  {size / 2**20:>6.1f} MiB  "
            f"{has:8}    {loss:>8}  {reasons.get(one.step, '')}"
        )
        yield line.rstrip()
    for name in folder.put_aside():
        yield f"{name}: was found damaged, and is not used"
    for name in folder.unfinished():
        yield f"{name}: unfinished"
    yield from folder.oddities()


def shown(run_dir: str, step: int | None) -> Iterator[str]:
    """The arrays of one checkpoint, and digests that do not depend on the layout.

    Raises:
        ConfigError: there is no checkpoint of that step.
    """
    checkpoints = open_run(run_dir)
    found = checkpoints.restore(chosen(checkpoints, step, "command line: --step"))
    for name, array in leaves(found.state):
        yield f"{name:44} {array.dtype!s:9} {' x '.join(map(str, array.shape)) or 'scalar'}"
    count = sum(array.size for _, array in leaves(found.state["params"]))
    position = json.dumps(found.facts.data, sort_keys=True)
    yield f"\nstep       {found.step}"
    yield f"saved      {local_time(found.facts.time)}"
    for tag, value in (found.facts.metrics or {}).items():
        yield f"{tag:10} {value:.6g}"
    yield f"parameters {count:,}"
    for name, value in (
        ("params", digest(found.state["params"])),
        ("optimizer", digest(found.state["optimizer"])),
        ("data", hashlib.sha256(position.encode()).hexdigest()),
        ("all", hashlib.sha256((digest(found.state) + position).encode()).hexdigest()),
    ):
        yield f"sha256     {name:10} {value}"


def verified(run_dir: str, step: int | None) -> Iterator[str]:
    """One line per checkpoint, after reading all its bytes.

    Raises:
        StorageError: at the end, when one is damaged.
    """
    checkpoints, damaged = open_run(run_dir), []
    folder = checkpoints.durable
    steps = checkpoints.steps()
    if step is not None:
        steps = [chosen(checkpoints, step, "command line: --step")]
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


def _faults(folder: Folder, step: int) -> tuple[list[str], bool]:
    """What is wrong with a step's files, arrays and facts, and whether it has a manifest."""
    path = folder / step
    if not exists(path):
        return [], False
    wrong = manifest.faults(path, step) if (sealed := manifest.is_in(path)) else []
    try:
        folder.facts(step)
        wrong += [line for line in faults(path, step, recorded(path, step)) if line not in wrong]
    except Damaged as damage:
        if str(damage) not in wrong:
            wrong.append(str(damage))
    return wrong, sealed


def pruned(run_dir: str, rules: Rules, *, dry_run: bool) -> Iterator[str]:
    """Deletes what no rule keeps, one line per checkpoint. The newest that is right stays.

    Raises:
        StorageError: a run is using the folder.
    """
    folder = open_run(run_dir).durable
    if dry_run:
        yield from _pruned(folder, rules, dry_run=True)
    else:
        with RunLock(folder.path.parent):
            yield from _pruned(folder, rules, dry_run=False)


def _pruned(folder: Folder, rules: Rules, *, dry_run: bool) -> Iterator[str]:
    saved = [one for step in folder.steps() if (one := folder.saved(step))]
    reasons = kept(saved, rules)
    for step in reversed(folder.steps()):
        wrong, sealed = _faults(folder, step)
        if sealed and not wrong:
            reasons.setdefault(step, "newest that is as it was saved")
            break
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


def compared(first: tuple[str, int | None], second: tuple[str, int | None]) -> list[str]:
    """What differs between two checkpoints, each given by run folder and step; nothing if same."""
    found = []
    for run_dir, step in (first, second):
        checkpoints = open_run(run_dir)
        number = chosen(checkpoints, step, f"command line: {run_dir}@{step}")
        found.append(checkpoints.restore(number))
    left, right = found
    lines = differences(left.state, right.state)
    for words, a, b in (
        ("config", left.facts.config, right.facts.config),
        ("data", left.facts.data, right.facts.data),
    ):
        before, now = dict(_flat(a)), dict(_flat(b))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                lines.append(f"{words} {key}  {before.get(key)}, and {now.get(key)}")
    return lines


def chosen(checkpoints: Checkpoints, step: int | None, where: str) -> int:
    """The step that was asked for, by default the newest.

    Raises:
        ConfigError: there is none of that step.
    """
    steps = checkpoints.steps()
    if step is not None and step not in steps:
        raise ConfigError.one(
            where,
            step,
            f"must be one of the saved steps: {', '.join(map(str, steps))}.",
            f"Take step {steps[-1]}, or leave it out for the newest.",
        )
    return steps[-1] if step is None else step


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
