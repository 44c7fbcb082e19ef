"""`maxpipe data verify`: every byte of a prepared folder against the digests in its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from maxpipe.data.prepared import logits
from maxpipe.data.prepared.manifest import (
    FILE,
    SPANS,
    FileEntry,
    Manifest,
    read_manifest,
    shard_name,
)
from maxpipe.data.prepared.ranges import joined, open_ranges
from maxpipe.errors import StorageError
from maxpipe.io.files import scheme
from maxpipe.io.text import counted

_PART_BYTES = 1 << 22

VerifyReport = Callable[[str, int, int], object]
"""Called with a task, and how many of how many MiB are done."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A line for each damaged file, and one for the whole."""

    damage: tuple[str, ...]
    summary: str


def verify(folder: str, report: VerifyReport) -> Verified:
    """Reads all files of a folder or `gs://BUCKET/PATH`.

    Raises:
        ConfigError: it is no prepared folder.
        StorageError: the manifest is damaged, so that nothing can be compared.
    """
    if logits.is_there(folder):
        own, entries = logits.MANIFEST, dict(logits.entries(logits.read_manifest(folder)))
    else:
        own, entries = FILE, dict(_entries(read_manifest(folder)))
    total = sum(entry["bytes"] for entry in entries.values())
    done, damage = 0, []
    present = _present(folder)
    for name, entry in entries.items():
        path = joined(folder, name)
        if present is not None and name not in present:
            damage.append(f"{path}: it is missing")
            done += entry["bytes"]
            continue
        try:
            if words := _compared(path, entry, partial(_tell, report, done, total)):
                damage.append(f"{path}: {words}")
        except StorageError as error:
            damage.append(str(error))
        done += entry["bytes"]
    whole = f"{counted(len(entries), 'file')}, {total / 1e6:.1f} MB"
    if damage:
        summary = f"{folder}: {len(damage)} of {whole} damaged: copy or prepare them again"
    else:
        summary = f"{folder}: {whole}, every byte is what was written"
    if others := sorted((present or set()) - {own, *entries}):
        summary += (
            f"\n{counted(len(others), 'other file')} there, not read: {', '.join(others[:4])}"
        )
    return Verified(tuple(damage), summary)


def _entries(manifest: Manifest) -> Iterator[tuple[str, FileEntry]]:
    for number, shard in enumerate(manifest["shards"]):
        for suffix, entry in sorted(shard["files"].items()):
            yield shard_name(number, suffix), entry
    yield SPANS, manifest["spans"]


def _tell(report: VerifyReport, before: int, total: int, read: int) -> None:
    report("reading", (before + read) >> 20, total >> 20)


def _compared(path: str, entry: FileEntry, report: Callable[[int], object]) -> str:
    """What is wrong with a file; empty if nothing is."""
    file = open_ranges(path)
    if file.size != entry["bytes"]:
        return f"it has {file.size} bytes, and {entry['bytes']} were written"
    found = hashlib.sha256()
    for start in range(0, file.size, _PART_BYTES):
        found.update(file.read(start, min(start + _PART_BYTES, file.size)))
        report(start)
    return "" if found.hexdigest() == entry["sha256"] else "its content is not what was written"


def _present(folder: str) -> set[str] | None:
    """The names in a folder, from one listing; None for a bucket."""
    if scheme(folder):
        return None
    return set(os.listdir(os.path.expanduser(folder)))
