"""A folder of checkpoints on disk: its steps, their content, and quarantine for damaged ones.

`<folder>/<step>/` holds arrays (`state/`, written by orbax), config and data position
(`facts/metadata`, JSON), the arrays' digests in memory (`digests/`) and a manifest. It is
there from the moment that orbax has committed it, by a rename or, in a bucket, by
`commit_success.txt`. Other names that may be there are no checkpoints, to orbax neither:
`<step>.orbax-checkpoint-tmp` is being written or was never finished, `<step>.corrupt` was
found damaged, `<step>.deleting` is going away.

Which checkpoints are kept, and why.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.contents import (
    MAX_METADATA_BYTES,
    METADATA_ITEM,
    STATE_ITEM,
    call_detecting_damage,
    check_regular_files,
    read_shapes,
)
from maxpipe.checkpoint.storage import (
    DamagedError,
    call_with_retries,
    entries,
    exists,
    in_bucket,
    is_damage,
    read,
    root_cause_text,
    to_epath,
)
from maxpipe.config.schema import CheckpointConfig
from maxpipe.errors import StorageError
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import AnyFloat, parse_json

_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The rules' view of a checkpoint: `time` in seconds, `metrics` of its evaluation."""

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BestMetric:
    """Which of two evaluations is better."""

    metric: str = "eval/loss"
    is_largest: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any] | CheckpointConfig) -> BestMetric:
        """As a section `checkpoint` says; that of a saved config may have no such keys."""
        if isinstance(section, CheckpointConfig):
            return cls(section.best_metric, section.best_mode == "largest")
        metric = str(section.get("best_metric") or cls().metric)
        return cls(metric, section.get("best_mode") == "largest")

    @property
    def description(self) -> str:
        """Such as `smallest eval/loss`."""
        return f"{'largest' if self.is_largest else 'smallest'} {self.metric}"

    def sort_key(self, metrics: Mapping[str, float]) -> float | None:
        """The smaller the better; None for what was not evaluated, or is not finite."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return None
        return -value if self.is_largest else value


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """A checkpoint that one of these asks for is kept; 0 asks for none.

    `newest` many; the steps that `every_steps` divides; the first in each period of
    `every_hours`; the `best` many by an evaluation.
    """

    newest: int
    every_steps: int = 0
    every_hours: float = 0
    best: int = 0
    better: BestMetric = field(default_factory=BestMetric)

    @classmethod
    def of(cls, config: CheckpointConfig) -> RetentionRules:
        """The rules that a config states."""
        periods = config.keep_every_steps, config.keep_every_hours
        return cls(config.keep, *periods, config.keep_best, BestMetric.of(config))


def select_retained(saved: Sequence[CheckpointInfo], rules: RetentionRules) -> dict[int, str]:
    """Step to the reason why it stays, for each of `saved` that does."""
    ordered = sorted(saved, key=lambda one: one.step)
    reasons: dict[int, list[str]] = {}

    def keep(one: CheckpointInfo, reason: str) -> None:
        reasons.setdefault(one.step, []).append(reason)

    for one in ordered[-rules.newest :] if rules.newest else []:
        keep(one, "newest")
    for one in ordered:
        if rules.every_steps and one.step and one.step % rules.every_steps == 0:
            keep(one, f"every {pluralize(rules.every_steps, 'step')}")
    if rules.every_hours:
        periods: dict[float, CheckpointInfo] = {}
        for one in ordered:
            period = one.time // (rules.every_hours * _HOUR_SECONDS)
            periods.setdefault(period, one)
        for one in periods.values():
            keep(one, f"every {rules.every_hours:g} hours")
    better = rules.better
    keys = [(key, one) for one in ordered if (key := better.sort_key(one.metrics)) is not None]
    for _, one in sorted(keys, key=lambda each: each[0])[: rules.best]:
        keep(one, f"best, {better.metric.removeprefix('eval/')} {one.metrics[better.metric]:.4f}")
    return {step: "; ".join(reasons[step]) for step in sorted(reasons)}


Tree = Any

FORMAT = 3
"""The format that is written now. Format 1 had no manifest, no time and no metrics, format 2 no
digests of the arrays; both are read, too."""

_UNFINISHED = re.compile(r".*\.orbax-checkpoint-tmp.*|[0-9]+\.deleting")
_COMMITTED = "commit_success.txt"


class _MetadataFile(TypedDict):
    """Facts on disk. The readers of `config` and `data` check their content."""

    format: int
    step: int
    config: dict[str, dict[str, Any]]
    data: dict[str, Any]
    time: NotRequired[float]
    metrics: NotRequired[dict[str, AnyFloat] | None]


BASE = "base"
"""Of what a checkpoint of adapters says about data: which base they belong to."""


class AdapterBase(TypedDict):
    """Which base adapters belong to."""

    address: str
    """Of its weights, as `checkpoint.restore_from` names them."""
    given: str
    """What that key was."""
    digest: str
    """Of all its arrays (`restore.content_digest`)."""


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a checkpoint says besides its arrays. `metrics` are those of its evaluation."""

    step: int
    config: dict[str, Any]
    data: dict[str, Any]
    time: float = 0.0
    metrics: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """As it is saved."""
        return {
            "format": FORMAT,
            "step": self.step,
            "time": self.time,
            "metrics": self.metrics or {},
            "config": self.config,
            "data": self.data,
        }


class CheckpointFolder:
    """One folder of checkpoints, in a file system or in a bucket. `key` of the config led to it."""

    def __init__(self, path: epath.PathLike, key: str = "run.dir"):
        self.path, self.key = to_epath(path), key

    def __truediv__(self, step: int) -> epath.Path:
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first; damaged ones are among them."""
        return sorted(
            int(entry.name)
            for entry in entries(self.path)
            if _is_step(entry.name) and _is_complete(entry)
        )

    def quarantined(self) -> list[str]:
        """Names of the quarantined checkpoints."""
        return [entry.name for entry in entries(self.path) if ".corrupt" in entry.name]

    def describe_incomplete(self) -> list[str]:
        """One line for each entry with the name of a checkpoint that is none."""
        return [
            f"{entry}: is ignored, it holds no complete checkpoint"
            for entry in entries(self.path)
            if _is_incomplete_step(entry) and not in_bucket(entry)
        ]

    def unfinished(self) -> list[str]:
        """Names of what an unfinished save or deletion has left.

        In a bucket both are done in place.
        """
        return [
            entry.name
            for entry in entries(self.path)
            if _UNFINISHED.fullmatch(entry.name)
            or (in_bucket(entry) and _is_incomplete_step(entry))
        ]

    def delete_unfinished(self) -> list[str]:
        """Delete what is unfinished; returns the names."""
        names = self.unfinished()
        for name in names:
            _delete(self.path / name)
        return names

    def free_bytes(self) -> int | None:
        """Free space of the file system; None of a bucket."""
        return None if in_bucket(self.path) else shutil.disk_usage(self.path).free

    def read_metadata(self, step: int) -> CheckpointMetadata:
        """Config, data position and the rest, without the arrays.

        Raises:
            Damaged: they cannot be read, or are of another step.
            OSError: they cannot be reached, which says nothing about their content.
            StorageError: they were saved by a later release.
        """
        path = self / step / METADATA_ITEM / "metadata"
        try:
            content = parse_json(
                call_with_retries(lambda: read(path, MAX_METADATA_BYTES)), _MetadataFile
            )
            number, found = content["format"], content["step"]
            if number not in range(1, FORMAT + 1):
                raise StorageError(
                    f"{self / step}: cannot be read\n"
                    f"  it has format {number}, and this release reads 1 to {FORMAT}.\n"
                    "  Use the release of maxpipe that has saved it, or a later one."
                )
            facts = CheckpointMetadata(
                step,
                content["config"],
                content["data"],
                content.get("time") or (self / step).stat().mtime,
                content.get("metrics") or None,
            )
        except (OSError, ValueError) as error:
            if not is_damage(error):
                raise
            raise DamagedError(
                f"{METADATA_ITEM}/metadata cannot be read: {root_cause_text(error)}"
            ) from error
        if found != step:
            raise DamagedError(f"it holds step {found}: the folder's name must be the step inside")
        return facts

    def read_info(self, step: int) -> CheckpointInfo | None:
        """The input of the retention rules; None for a step that is gone.

        For damaged facts, the folder's time.
        """
        try:
            facts = self.read_metadata(step)
        except (DamagedError, StorageError):
            try:
                return CheckpointInfo(step, (self / step).stat().mtime)
            except FileNotFoundError:
                return None
        return CheckpointInfo(step, facts.time, facts.metrics or {})

    def arrays(self, step: int, abstract: Tree | None = None) -> Tree:
        """The saved arrays, placed like `abstract`, by default as numpy arrays.

        What `abstract` leaves out is not read.

        Raises:
            Damaged: they cannot be read.
            OSError: they cannot be reached.
        """
        saved = read_shapes(self / step) if abstract is None else None

        def read_them() -> Tree:
            check_regular_files(self / step / STATE_ITEM)
            wanted = abstract
            if wanted is None:  # a shape may say more than any memory has
                wanted = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
            places = ocp.checkpoint_utils.construct_restore_args(wanted)
            arguments = ocp.args.PyTreeRestore(wanted, places, partial_restore=True)
            return ocp.PyTreeCheckpointHandler().restore(self / step / STATE_ITEM, args=arguments)

        return call_detecting_damage(read_them)

    def quarantine(self, step: int, why: str = "corrupt") -> str:
        """Rename a step, so that it is no longer a checkpoint; returns its new name."""
        name, number = f"{step}.{why}", 1
        while exists(self.path / name):
            number += 1
            name = f"{step}.{why}-{number}"
        (self / step).rename(self.path / name)
        return name

    def remove(self, step: int) -> None:
        """Delete a checkpoint; a kill in between leaves nothing that looks like one."""
        going = self.path / f"{step}.deleting"
        if in_bucket(going):  # where a rename is a copy: delete file by file
            going = self / step
            (going / manifest.FILE).unlink(missing_ok=True)
            (going / _COMMITTED).unlink(missing_ok=True)
        else:
            (self / step).rename(going)
        _delete(going)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and name == str(int(name))


def _is_complete(entry: epath.Path) -> bool:
    return manifest.has_manifest(entry) or exists(entry / _COMMITTED)


def _is_incomplete_step(entry: epath.Path) -> bool:
    return _is_step(entry.name) and not _is_complete(entry)


def _delete(entry: epath.Path) -> None:
    if entry.is_dir() and not os.path.islink(entry):
        entry.rmtree()
    else:
        entry.unlink(missing_ok=True)


def local_time(seconds: float) -> str:
    """The local time as text."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # outside the calendar
        return f"{'unknown':19}"
