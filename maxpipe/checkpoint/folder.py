"""A run's checkpoint folder: its layout, metadata and quarantine.

`<folder>/<step>/` contains the arrays (`state/`, written by orbax), the config and data position
(`facts/metadata`, JSON), the in-memory digests of the arrays (`digests/`) and a manifest. A
checkpoint exists once orbax has committed it: by a rename, or in a bucket by `commit_success.txt`.
maxpipe and orbax ignore entries with other names: `<step>.orbax-checkpoint-tmp` is an unfinished
save, `<step>.corrupt` is a damaged checkpoint, and `<step>.deleting` is an unfinished deletion.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.manifest import (
    MAX_METADATA_BYTES,
    METADATA_ITEM,
    STATE_ITEM,
    call_detecting_damage,
    check_regular_files,
    read_shapes,
)
from maxpipe.checkpoint.retention import CheckpointInfo
from maxpipe.checkpoint.storage import (
    DamagedError,
    call_with_retries,
    entries,
    exists,
    in_bucket,
    is_damage,
    read,
    rename,
    root_cause_text,
    to_epath,
)
from maxpipe.config.schema import upgrade_config
from maxpipe.errors import Code, StorageError
from maxpipe.io.typed_json import AnyFloat, parse_json

Tree = Any

FORMAT = 3
"""Checkpoint format version of this release.

Format 1 has no manifest, save time or metrics. Format 2 has no array digests. This release can also
read formats 1 and 2.
"""

_UNFINISHED = re.compile(r".*\.orbax-checkpoint-tmp.*|[0-9]+\.deleting")
_COMMITTED = "commit_success.txt"


class _MetadataFile(TypedDict):
    """Content of the metadata file. `config` and `data` are validated where they are used."""

    format: int
    step: int
    config: dict[str, dict[str, Any]]
    data: dict[str, Any]
    time: NotRequired[float]
    metrics: NotRequired[dict[str, AnyFloat] | None]


BASE = "base"
"""Key of the base model in the data section of an adapter checkpoint."""


class AdapterBase(TypedDict):
    """The base model of an adapter checkpoint."""

    address: str
    """Resolved address of the base weights, in the format of `checkpoint.restore_from`."""
    given: str
    """Original value of `checkpoint.restore_from`."""
    digest: str
    """Digest of all base-model arrays (`reader.content_digest`)."""


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """Metadata of a checkpoint. `metrics` contains the evaluation metrics of its step."""

    step: int
    config: dict[str, Any]
    data: dict[str, Any]
    time: float = 0.0
    metrics: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON content of the metadata file."""
        return {
            "format": FORMAT,
            "step": self.step,
            "time": self.time,
            "metrics": self.metrics or {},
            "config": self.config,
            "data": self.data,
        }


class CheckpointFolder:
    """A local or bucket folder that contains checkpoints. `key` is the config key for its path."""

    def __init__(self, path: epath.PathLike, key: str = "run.dir"):
        self.path, self.key = to_epath(path), key

    def __truediv__(self, step: int) -> epath.Path:
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, including damaged ones, oldest first."""
        return sorted(
            int(entry.name)
            for entry in entries(self.path)
            if _is_step(entry.name) and _is_complete(entry)
        )

    def quarantined(self) -> list[str]:
        """Return the names of the quarantined checkpoints."""
        return [entry.name for entry in entries(self.path) if ".corrupt" in entry.name]

    def describe_incomplete(self) -> list[str]:
        """Return one warning for every entry that is named like a checkpoint but is incomplete."""
        return [
            f"{entry}: is ignored because it is not a complete checkpoint"
            for entry in entries(self.path)
            if _is_incomplete_step(entry) and not in_bucket(entry)
        ]

    def unfinished(self) -> list[str]:
        """Return the names of entries left over from unfinished saves and deletions.

        In a bucket, these entries include incomplete step folders, because buckets have no atomic
        rename.
        """
        return [
            entry.name
            for entry in entries(self.path)
            if _UNFINISHED.fullmatch(entry.name)
            or (in_bucket(entry) and _is_incomplete_step(entry))
        ]

    def delete_unfinished(self) -> list[str]:
        """Delete the entries left over from unfinished saves and deletions, and return their
        names.
        """
        names = self.unfinished()
        for name in names:
            _delete(self.path / name)
        return names

    def free_bytes(self) -> int | None:
        """Return the free space of the file system in bytes, or None for a bucket."""
        return None if in_bucket(self.path) else shutil.disk_usage(self.path).free

    def read_metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a checkpoint: config, data position, time and metrics.

        A config from an earlier release is converted to the keys and values of this release.

        Raises:
            DamagedError: the metadata cannot be read, or belongs to a different step.
            OSError: the storage is unreachable; the metadata may be intact.
            StorageError: a newer release saved the checkpoint.
        """
        path = self / step / METADATA_ITEM / "metadata"
        try:
            content = parse_json(
                call_with_retries(lambda: read(path, MAX_METADATA_BYTES)), _MetadataFile
            )
            number = content["format"]
            if number not in range(1, FORMAT + 1):
                raise StorageError(
                    Code.CKPT_FORMAT,
                    f"{self / step}: cannot be read\n"
                    f"  the checkpoint has format {number}; this release reads formats 1 to "
                    f"{FORMAT}.\n"
                    "  Use the release of maxpipe that saved the checkpoint, or a newer one.",
                )
            facts = CheckpointMetadata(
                step,
                upgrade_config(content["config"]),
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
        if content["step"] != step:
            raise DamagedError(
                f"the metadata belongs to step {content['step']}, which differs from the step in "
                "the folder's name"
            )
        return facts

    def read_info(self, step: int) -> CheckpointInfo | None:
        """Return a checkpoint's properties for the retention rules, or None if it was deleted.

        If the metadata is damaged, the time is the modification time of the folder.
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
        """Read the saved arrays with the shardings of `abstract` (default: as numpy arrays).

        Arrays that are missing from `abstract` are not read.

        Raises:
            DamagedError: an array cannot be read.
            OSError: the storage is unreachable.
        """
        saved = read_shapes(self / step) if abstract is None else None

        def read_arrays() -> Tree:
            check_regular_files(self / step / STATE_ITEM)
            target = abstract
            if target is None:  # allocate memory first: an array with a damaged shape may not fit
                target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            args = ocp.args.PyTreeRestore(target, restore_args, partial_restore=True)
            return ocp.PyTreeCheckpointHandler().restore(self / step / STATE_ITEM, args=args)

        return call_detecting_damage(read_arrays)

    def quarantine(self, step: int, why: str = "corrupt") -> str:
        """Rename a step's folder so that it no longer counts as a checkpoint, and return the new
        name.
        """
        name, number = f"{step}.{why}", 1
        while exists(self.path / name):
            number += 1
            name = f"{step}.{why}-{number}"
        rename(self / step, self.path / name)
        return name

    def remove(self, step: int) -> None:
        """Delete a checkpoint. An interrupted deletion leaves no folder that looks like a complete
        checkpoint.
        """
        path = self / step
        if in_bucket(path):  # a rename would copy all objects, so delete them individually
            (path / manifest.FILE).unlink(missing_ok=True)
            (path / _COMMITTED).unlink(missing_ok=True)
        else:
            path = path.rename(self.path / f"{step}.deleting")
        _delete(path)


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
    """Format a Unix time as local time."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # the time is outside the supported range
        return f"{'unknown':19}"
