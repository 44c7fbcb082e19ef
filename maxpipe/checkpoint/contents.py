"""Read the arrays and recorded digests of a checkpoint from its files.

A checkpoint is intact if its decoded arrays have the digests recorded in memory when it was
saved, and its metadata is unchanged. These conditions are checked before the manifest is written
and by `maxpipe checkpoints verify`. Every restore checks them for the arrays that it reads.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from maxpipe.checkpoint import digest_item, digests, manifest
from maxpipe.checkpoint.digest_item import RecordedDigests, leaves_by_name
from maxpipe.checkpoint.digests import ArrayDigest
from maxpipe.checkpoint.storage import (
    DamagedError,
    call_with_retries,
    exists,
    in_bucket,
    is_damage,
    outage,
    read,
    root_cause_text,
    translate_bucket_errors,
    translate_read_errors,
)
from maxpipe.errors import DivergenceError, MaxpipeError
from maxpipe.io.typed_json import parse_json

Tree = Any

STATE_ITEM, METADATA_ITEM = "state", "facts"
"""Names of the orbax items in a step's folder."""

MAX_METADATA_BYTES = 1 << 24

# Number of chunks that are read in parallel. A chunk can be as large as one process's shard of an
# array.
_NUM_THREADS = 2


class SaveVerificationError(ValueError):
    """The saved content differs from memory; the message names the file or array and the reason."""


def read_shapes(folder: epath.Path) -> Tree:
    """Return the shapes and dtypes of a step's arrays.

    Raises:
        DamagedError: the array metadata cannot be read.
        OSError: the storage is not reachable.
    """

    def read() -> Tree:
        check_regular_files(folder / STATE_ITEM)
        found = ocp.StandardCheckpointHandler().metadata(folder / STATE_ITEM)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found.tree)

    return call_detecting_damage(read)


def check_regular_files(folder: epath.Path) -> None:
    """Check that a folder contains only regular files and folders, and no oversized index.

    Opening a pipe would block orbax.

    Raises:
        DamagedError: an entry is of another type, or the index is too large.
    """
    if in_bucket(folder):
        return
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(above, name)
            if os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise DamagedError(f"{name} is neither a file nor a folder")
            if name == _INDEX:
                _check_index(path)


def call_detecting_damage(read: Any) -> Any:
    """Return the result of a call that reads arrays, with retries.

    Raises:
        DamagedError: the content is not a valid checkpoint.
        OSError: the storage failed repeatedly.
        Exception: errors that are unrelated to storage are re-raised unchanged.
    """
    try:
        return call_with_retries(read)
    except MaxpipeError:
        raise
    except Exception as error:  # orbax also raises plain Exception for damaged arrays
        if (failure := outage(error)) is not None:
            raise failure from error
        if not is_damage(error) and type(error) is not Exception:
            raise  # the process may be out of memory, for example
        raise DamagedError(f"{STATE_ITEM} cannot be read: {root_cause_text(error)}") from error


def read_expected_digests(folder: epath.Path, step: int) -> RecordedDigests | None:
    """Return the in-memory digests recorded at the save, or None for steps of older releases.

    Raises:
        DamagedError: the recorded digests are not valid.
        OSError: the storage is not reachable.
    """
    try:
        if (
            manifest.has_manifest(folder)
            and (listed := manifest.read_arrays(folder, step)) is not None
        ):
            return RecordedDigests(
                {name: ArrayDigest.from_entry(one) for name, one in listed.items()}
            )
        if not exists(folder / digest_item.DIGEST_ITEM):
            return None
        with translate_read_errors(folder):
            return call_with_retries(lambda: digest_item.read_digest_item(folder, step))
    except (OSError, ValueError) as error:
        if is_damage(error):
            raise DamagedError(root_cause_text(error)) from error
        raise


def compute_stored_digests(folder: epath.Path) -> dict[str, ArrayDigest]:
    """Compute the digests of a step's arrays on disk.

    Raises:
        DamagedError: an array cannot be decoded.
        OSError: the storage is not reachable.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return call_detecting_damage(
            lambda: dict(_iter_stored_digests(folder, leaves_by_name(read_shapes(folder)), pool))
        )


def open_array(folder: epath.Path, name: str) -> Any:
    """Open one array on disk for partial reads: `array[...].read().result()`."""
    base: Any = f"{folder / STATE_ITEM}/"
    if not in_bucket(folder):
        _check_index(f"{folder / STATE_ITEM / _INDEX}")
        base = {"driver": "file", "path": base}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore}
    return tensorstore.open(spec, open=True, read=True).result()


_INDEX = "manifest.ocdbt"
_MAX_INDEX_BYTES = 1 << 30


def _check_index(path: str) -> None:
    """Raise DamagedError if the array index is too large for tensorstore.

    tensorstore reads the complete file, and a failed allocation would end the process.
    """
    size = os.stat(path).st_size if os.path.isfile(path) else 0
    if size > _MAX_INDEX_BYTES:
        raise DamagedError(
            f"{STATE_ITEM}/{_INDEX} has {size} bytes; an array index has at most {_MAX_INDEX_BYTES}"
        )


def _iter_stored_digests(
    folder: epath.Path, leaves: Mapping[str, Any], pool: ThreadPoolExecutor
) -> Iterator[tuple[str, ArrayDigest]]:
    for name in leaves:
        array = open_array(folder, name)
        found = ArrayDigest(str(array.dtype.numpy_dtype), tuple(array.shape))

        chunk: tuple[Any, ...] = array.chunk_layout.read_chunk.shape or ()  # a scalar has no chunks

        def part(start: tuple[int, ...], array: Any = array, chunk: Any = chunk) -> ArrayDigest:
            ends = map(min, array.shape, map(operator.add, start, chunk))
            values = array[tuple(map(slice, start, ends))].read().result()
            one = ArrayDigest(str(values.dtype), tuple(array.shape))
            one.add(values, start)
            return one

        for one in pool.map(part, _starts(tuple(array.shape), chunk)):
            found.merge(one)
        yield name, found


def _starts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the index of the first element of every chunk. Chunks are decoded as a unit."""
    ranges = [range(0, size, each) for size, each in zip(shape, chunk, strict=True)]
    return itertools.product(*ranges)


def verify_arrays(folder: epath.Path, step: int, expected: RecordedDigests | None) -> list[str]:
    """Compare a step's arrays and metadata with the recorded digests; return the differences.

    Raises:
        OSError: the storage is not reachable.
    """
    try:
        found = compute_stored_digests(folder)
        if expected is None:
            return digests.describe_non_finite(found)
        wrong = digests.diff_digests(expected.arrays, found) or digests.describe_non_finite(found)
        return wrong + verify_metadata(folder, expected)
    except DamagedError as damage:
        return [str(damage)]


def verify_metadata(folder: epath.Path, expected: RecordedDigests) -> list[str]:
    """Return the faults of the metadata, or nothing if no digest of the metadata is known."""
    if not expected.metadata_digest:
        return []
    path = folder / METADATA_ITEM / "metadata"
    try:
        content = parse_json(
            call_with_retries(lambda: read(path, MAX_METADATA_BYTES)), dict[str, Any]
        )
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        return [f"{METADATA_ITEM}/metadata cannot be read: {root_cause_text(error)}"]
    if digest_item.metadata_digest(content) != expected.metadata_digest:
        return [f"{METADATA_ITEM}/metadata differs from the saved content"]
    return []


def verify_and_write_manifest(
    folder: epath.Path, step: int, ahead: Mapping[str, manifest.ManifestFile] | None = None
) -> int:
    """Read a step back, compare it with the in-memory digests, and write its manifest.

    `ahead` contains digests of files that were flushed to disk and dropped from the page cache.

    Returns:
        The total size of the files in bytes.

    Raises:
        SaveVerificationError: the files differ from memory.
        DivergenceError: an array contains NaN or infinity, so a run cannot resume from the step.
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    with translate_bucket_errors(folder):
        try:
            expected = read_expected_digests(folder, step)
        except DamagedError as damage:
            raise SaveVerificationError(str(damage)) from damage
        if expected is None:
            raise SaveVerificationError(f"{digest_item.DIGEST_ITEM} is missing")
        if bad := digests.describe_non_finite(expected.arrays):
            raise _not_finite(folder, bad)
        files = manifest.digest_files(folder, ahead)
        with ThreadPoolExecutor(1) as pool:
            # Start after the first digests, so that all bytes are read from disk instead of the
            # page cache.
            again = pool.submit(manifest.find_changed_files, folder, files)
            wrong = verify_arrays(folder, step, expected)
            wrong += again.result()
        entries = {name: one.entry() for name, one in expected.arrays.items()}
        if wrong := wrong or manifest.write(folder, step, files, entries):
            raise SaveVerificationError("; ".join(wrong[:3]))
        return sum(file["bytes"] for file in files.values())


def write_missing_manifest(folder: epath.Path, step: int) -> None:
    """Write the manifest of a step that has none, after all content of the step was read.

    Raises:
        SaveVerificationError: the files differ from the recorded in-memory digests.
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    if exists(folder / digest_item.DIGEST_ITEM):
        verify_and_write_manifest(folder, step)
        return
    with translate_bucket_errors(folder):
        files = manifest.digest_files(folder)
        entries = {name: one.entry() for name, one in compute_stored_digests(folder).items()}
        wrong = manifest.find_changed_files(folder, files)
        if wrong := wrong or manifest.write(folder, step, files, entries):
            raise SaveVerificationError("; ".join(wrong[:3]))


def _not_finite(folder: epath.Path, bad: list[str]) -> DivergenceError:
    more = f", and {len(bad) - 3} more arrays" if len(bad) > 3 else ""
    return DivergenceError(
        f"{folder}: was not saved\n"
        f"  {'; '.join(bad[:3])}{more}; a run cannot resume from such a state.\n"
        "  Lower optim.learning_rate, or restore an earlier checkpoint with "
        "checkpoint.restore_from; earlier checkpoints are kept."
    )
